"""Runs of tokens: what stands together, and sums inside."""

from __future__ import annotations

import torch

from dropkv.words import LONGEST, Words, piece, runs

CPU = torch.device("cpu")


class Letters:
    """A tokenizer whose tokens are spelled as given, decoded without the space that SentencePiece writes as a bar."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, ids, **_):
        return self.pieces[ids[0]].removeprefix("\u2581")

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]


def test_runs_of_letters_and_digits_stay_together():
    pieces = [" is", ":", " ", "4", "9", ".", " Em", "acs", "\n", "The", "\ufffd", "1"]
    assert runs(pieces) == [0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9]
    assert runs(["x"]) == [0]


def test_a_run_ends_somewhere():
    assert runs(["7"] * (LONGEST + 2)) == [0] * LONGEST + [1, 1]


def test_a_space_that_the_decoder_drops_still_parts_words():
    tokenizer = Letters("\u2581sold", "\u2581sh", "ips", "\u25812")
    assert [piece(tokenizer, token) for token in range(4)] == [" sold", " sh", "ips", " 2"]
    assert Words.of(tokenizer, [0, 1, 2, 3], CPU).own.tolist() == [0, 1, 1, 2]


def test_sums_inside_runs():
    words = Words.made([0, 0, 0, 1, 2, 2], CPU)
    assert words.members.tolist() == [[0, 1, 2], [3, 6, 6], [4, 5, 6]]
    x = torch.tensor([[1.0, 2, 4, 8, 16, 32], [0, 0, 1, 0, 0, 5]])
    assert words.sums(x).tolist() == [[7, 7, 7, 8, 48, 48], [1, 1, 1, 0, 5, 5]]
    assert words.sums(x[0]).tolist() == [7, 7, 7, 8, 48, 48]
    assert torch.equal(Words.alone(6, CPU).sums(x), x)
