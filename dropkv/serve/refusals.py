"""Why a request is refused, in the shape in which OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"
FAILED = "server_error"


class Refused(Exception):
    """A request that gets no answer. status: of HTTP. param: the field that is wrong. code: a word for programs."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
