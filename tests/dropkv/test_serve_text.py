"""Pieces of an answer: together the answer without white space around it, up to a stop string, however many tokens come at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dropkv.serve.text import AnswerWriter

WORDS = [" ", "\n", "The", " lamp", " was", " dark", ".", "\n\n", "STO", "P", " more", "  "]


def text(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def pieces(tokens: list[int], stops: Sequence[str], sizes: Sequence[int]) -> tuple[list[str], AnswerWriter]:
    writer, given, count = AnswerWriter(text, stops), [], 0
    for size in sizes:
        count = min(len(tokens), count + size)
        given.append(writer.more(tokens[:count], done=count == len(tokens)))
    return given, writer


EVERYTHING = list(range(len(WORDS)))


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [3] * 4, [5, 0, 7]])
@pytest.mark.parametrize(
    ("stops", "want", "tokens"),
    [
        ((), "The lamp was dark.\n\nSTOP more", 12),
        (("STOP",), "The lamp was dark.", 10),
        (("STOPPED", "nothing"), "The lamp was dark.\n\nSTOP more", 12),
        (("more", "dark"), "The lamp was", 6),
        ((" was dark", "lamp was"), "The", 5),
        (("P m",), "The lamp was dark.\n\nSTO", 11),
        (("\n",), "", 2),
    ],
)
def test_an_answer_ends_before_a_stop_string(stops: tuple[str, ...], want: str, tokens: int, sizes: list[int]) -> None:
    given, writer = pieces(EVERYTHING, stops, sizes)
    assert "".join(given) == want
    assert writer.tokens == tokens
    assert writer.stopped == (tokens < 12)
    assert writer.more([*EVERYTHING, 2], done=True) == ("" if writer.stopped else "  The")


def test_what_may_still_become_a_stop_string_or_white_space_at_the_end_is_held_back() -> None:
    given, _ = pieces(EVERYTHING, ("STOPPED",), [1] * 12)
    assert given == ["", "", "The", " lamp", " was", " dark", ".", "", "", "", "\n\nSTOP more", ""]
