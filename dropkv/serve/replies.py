"""What is sent back: objects in the shape of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from dropkv import __version__
from dropkv.library import KVFile

FINGERPRINT = f"dropkv-{__version__}"


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. document: those that are answered from without being computed. computed: question and turns. answer: generated."""

    document: int
    computed: int
    answer: int

    @property
    def record(self) -> dict[str, Any]:
        """As `usage`: the document counts as a part of the prompt that was cached."""
        prompt = self.document + self.computed
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.answer,
            "total_tokens": prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.document},
        }


@dataclass(frozen=True)
class Reply:
    """The objects of one answer, which share a name and a time. model: the name of the file."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: str, usage: Usage) -> dict[str, Any]:
        """The answer at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._record("chat.completion", [choice]) | {"usage": usage.record}

    def part(self, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        """A part of a stream: what is new of the answer, or why it ends."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._record("chat.completion.chunk", [choice])

    def costs(self, usage: Usage) -> dict[str, Any]:
        """The last part of a stream that asked for the usage."""
        return self._record("chat.completion.chunk", []) | {"usage": usage.record}

    def _record(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def model_record(name: str, kv: KVFile, created: int) -> dict[str, Any]:
    """A file as a model of the list. Beside what the API asks for: the document's name, its tokens, the entries kept per KV head, the most
    tokens of a question and its answer, the fidelity (null when not measured), and the model that answers."""
    session, document = kv.session, kv.metadata.document
    fidelity = kv.metadata.fidelity or {}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dropkv",
        "document": document.name,
        "document_tokens": document.tokens,
        "entries_per_head": session.entries_per_head,
        "most_tokens": session.model.regime(document.tokens).up_to - document.tokens,
        "fidelity": fidelity.get("kept_information"),
        "answered_by": session.model.id,
    }


def encoded(record: dict[str, Any]) -> bytes:
    """JSON in ASCII, so that no lone surrogate of somebody's text breaks it."""
    return json.dumps(record, allow_nan=False).encode("ascii")


def event(record: dict[str, Any]) -> bytes:
    """JSON as one event of a stream."""
    return b"data: " + encoded(record) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
