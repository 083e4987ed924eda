"""The JSON of a chat completion as settings of an answer; what cannot be done as it is asked is refused, not passed over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dropkv.errors import UsageError
from dropkv.serve.refusals import Refused
from dropkv.settings import Sampling
from formats.errors import printable

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS = 16
SEEDS = (-(1 << 63), (1 << 63) - 1)
HEEDED = {"model", "messages", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "stop", "stream"}
HEEDED |= {"stream_options"}
# What changes no answer.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# What would change the answer, and the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True)
class Message:
    """One message of a conversation; place: where it stands in the request."""

    role: Literal["system", "user", "assistant"]
    text: str
    place: str


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion that is asked for. model: the name of a file. stops: the answer ends before the first of these."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def parse_request(body: bytes) -> ChatRequest:
    """The request of a body. Raises Refused, with the field that is wrong."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {printable(str(error), 200)}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise Refused('the body is no JSON object: send {"model": ..., "messages": [...]}', code="invalid_json")
    fields = {name: value for name, value in given.items() if value is not None}
    _refuse_others(fields)
    if not isinstance(fields.get("model"), str):
        raise Refused("model names a file of GET /v1/models: give it as a text", param="model")
    stream = _flag(fields, "stream")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise Refused("stream_options is an object, and goes with stream alone", param="stream_options")
    return ChatRequest(
        fields["model"],
        _messages(fields.get("messages")),
        _sampling(fields),
        _stops(fields.get("stop", [])),
        stream,
        _flag(options, "include_usage"),
    )


def _refuse_others(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in HEEDED or name in IGNORED:
            continue
        shown = printable(name, 40)
        if name not in NEUTRAL:
            raise Refused(f"{shown} is not known here: leave it out", param=shown, code="unknown_parameter")
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            only = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            raise Refused(
                f"{shown} cannot be heeded: leave it out, or give {only}", param=shown, code="unsupported_value"
            )


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} is true or false", param=name)
    return bool(value)


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise Refused('messages is a list, and not empty: [{"role": "user", "content": "..."}]', param="messages")
    return tuple(_message(one, f"messages[{number}]") for number, one in enumerate(given))


def _message(given: Any, place: str) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"{place}: a message has a role: system, user or assistant", param=place)
    return Message(ROLES[role], _text(given.get("content"), f"{place}.content", role), place)  # type: ignore[arg-type]


def _text(content: Any, place: str, role: str) -> str:
    if content is None and role == "assistant":
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise Refused(f"{place} is a text, or a list of parts of type text", param=place)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{place} has a part that is no text: only text is read", param=place)
    return "".join(part["text"] for part in parts)


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    limits = {name: fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise Refused(f"{name} is a whole number from 1 on", param=name)
    if len(set(limits.values())) > 1:
        raise Refused("max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens")
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not SEEDS[0] <= seed <= SEEDS[1]):
        raise Refused("seed is a whole number of 64 bits", param="seed")
    for name in ("temperature", "top_p"):
        if isinstance(fields.get(name, 0), bool) or not isinstance(fields.get(name, 0), int | float):
            raise Refused(f"{name} is a number", param=name)
    own = Sampling()
    try:
        return Sampling(
            next(iter(limits.values()), own.max_new_tokens),
            float(fields.get("temperature", own.temperature)),
            float(fields.get("top_p", own.top_p)),
            seed,
        )
    except (UsageError, OverflowError) as error:
        raise Refused(str(error), param="top_p" if "top-p" in str(error) else "temperature") from None


def _stops(given: Any) -> tuple[str, ...]:
    stops: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise Refused(f"stop is a text or a list of at most {MOST_STOPS} texts", param="stop")
    if not all(stops):
        raise Refused(
            "stop has an empty text, which would end every answer before it begins: leave it out", param="stop"
        )
    return tuple(stops)
