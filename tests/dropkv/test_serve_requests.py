"""The JSON of a chat completion: what is understood, and what is refused with the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropkv.errors import UsageError
from dropkv.serve.names import own_name, plan_names
from dropkv.serve.refusals import Refused
from dropkv.serve.requests import ChatRequest, Message, parse_request
from dropkv.settings import Sampling

ASKED = {"model": "book", "messages": [{"role": "user", "content": "Who?"}]}


def parsed(**fields: Any) -> ChatRequest:
    return parse_request(json.dumps({**ASKED, **fields}).encode())


def test_a_request_without_options_is_answered_as_query_answers() -> None:
    assert parsed() == ChatRequest("book", (Message("user", "Who?", "messages[0]"),), Sampling())


def test_every_option_reaches_the_answer() -> None:
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        max_tokens=12,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        logprobs=False,
        frequency_penalty=0.0,
        presence_penalty=None,
        response_format={"type": "text"},
        user="somebody",
        tools=[],
    )
    assert request.sampling == Sampling(12, 0.5, 0.9, -7)
    assert (request.stops, request.stream, request.include_usage) == (("a", "b"), True, True)
    assert parsed(stop="x", max_completion_tokens=3).stops == ("x",)
    assert parsed(max_completion_tokens=3, max_tokens=3).sampling.max_new_tokens == 3
    assert parsed(temperature=1).sampling.temperature == 1.0


def test_parts_of_a_message_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "was it?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Why?"},
    ]
    found = parsed(messages=messages).messages
    assert [(one.role, one.text) for one in found] == [
        ("system", "Be brief."),
        ("user", "Who was it?"),
        ("assistant", ""),
        ("user", "Why?"),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"model": None}, "model", "GET /v1/models"),
        ({"model": 3}, "model", "text"),
        ({"messages": None}, "messages", "not empty"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": "Who?"}, "messages", "list"),
        ({"messages": ["Who?"]}, "messages[0]", "role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "temperature -1.0"),
        ({"temperature": 10**400}, "temperature", "too large"),
        ({"top_p": 0}, "top_p", "top-p 0.0"),
        ({"top_p": [1]}, "top_p", "number"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": 1 << 63}, "seed", "64 bits"),
        ({"max_tokens": 0}, "max_tokens", "from 1 on"),
        ({"max_tokens": "9"}, "max_tokens", "whole number"),
        ({"max_completion_tokens": 1.0}, "max_completion_tokens", "whole number"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one of them"),
        ({"stop": 3}, "stop", "list of at most 16"),
        ({"stop": {"a": 1}}, "stop", "list of at most 16"),
        ({"stop": ["a", 3]}, "stop", "list of at most 16"),
        ({"stop": ["a"] * 17}, "stop", "list of at most 16"),
        ({"stop": ""}, "stop", "empty"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream alone"),
        ({"stream": True, "stream_options": []}, "stream_options", "object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "true or false"),
        ({"n": 2}, "n", "cannot be heeded: leave it out, or give 1"),
        ({"n": True}, "n", "give 1"),
        ({"logprobs": True}, "logprobs", "give false"),
        ({"tools": [{"type": "function"}]}, "tools", "leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
        ({"presence_penalty": 0.5}, "presence_penalty", "give 0"),
        ({"best_guess": 1}, "best_guess", "not known here"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(fields: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(Refused) as refused:
        parsed(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert word in str(refused.value)
    assert refused.value.body["error"] | {"message": "", "code": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": param,
        "code": "",
    }


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"7", b"[]", b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse_request(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("book.kv", "book"),
        ("/a/b.c/my book.kv", "my book"),
        ("book.kv.safetensors", "book"),
        ("book", "book"),
        (".kv", ".kv"),
        ("hf://you/moby-dick/chapters/one.kv", "one"),
        ("hf://you/moby-dick@v1.0/book.kv", "book"),
        ("hf://you/moby-dick@v1.0", "moby-dick"),
    ],
)
def test_a_file_is_called_by_its_own_name(file: str, name: str) -> None:
    assert own_name(file) == name


def test_names_can_be_given_and_must_differ(tmp_path: Any) -> None:
    odd = tmp_path / "x=y.kv"
    odd.touch()
    (tmp_path / "z.kv").touch()
    (tmp_path / "z.txt").touch()
    assert plan_names(["a/book.kv", "other=b/book.kv"]) == {"book": "a/book.kv", "other": "b/book.kv"}
    assert plan_names([str(odd)]) == {"x=y": str(odd)}
    assert plan_names([str(tmp_path)]) == {"x=y": str(odd), "z": str(tmp_path / "z.kv")}
    with pytest.raises(UsageError, match=r"a/book.kv and b/book.kv would both be called book: write NAME=FILE"):
        plan_names(["a/book.kv", "b/book.kv"])
    with pytest.raises(UsageError, match=r"the file a/book.kv is given twice: name each one once"):
        plan_names(["a/book.kv", "a/book.kv"])
    assert plan_names(["a/book.kv", "again=a/book.kv"]) == {"book": "a/book.kv", "again": "a/book.kv"}
