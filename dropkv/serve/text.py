"""The text of an answer while its tokens come: what is sure is given, once, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class AnswerWriter:
    """Turns growing tokens into pieces of text that together are the answer, without white space around it.

    text: decodes tokens; what it makes of more of them starts with what it made of fewer. stops: the answer ends before the first of these.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = stops
        self._given = ""
        self.tokens = 0
        self.stopped = False

    def more(self, tokens: Sequence[int], *, done: bool) -> str:
        """What can be given now that the answer has these tokens; done: no more will come. After a stop string nothing follows."""
        if self.stopped:
            return ""
        pieces = []
        if self._stops:  # token by token, so that where an answer is stopped does not depend on how many came at once
            for count in range(self.tokens + 1, len(tokens)):
                pieces.append(self._upto(tokens[:count], done=False))
                if self.stopped:
                    return "".join(pieces)
        return "".join([*pieces, self._upto(tokens, done=done)])

    def _upto(self, tokens: Sequence[int], *, done: bool) -> str:
        self.tokens = len(tokens)
        text = self._text(tokens)
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)]
        elif not done:
            text = text[: len(text) - self._begun(text)]
        text = text.strip()
        if not text.startswith(self._given):
            return ""
        piece, self._given = text[len(self._given) :], text
        return piece

    def _begun(self, text: str) -> int:
        """Letters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
