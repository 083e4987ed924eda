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
    assert [own.tolist() for own in words.members] == [[[3]], [[0, 1, 2], [4, 5, 6]]]
    assert words.place.tolist() == [1, 1, 1, 0, 2, 2]
    x = torch.tensor([[1.0, 2, 4, 8, 16, 32], [0, 0, 1, 0, 0, 5]])
    assert words.sums(x).tolist() == [[7, 7, 7, 8, 48, 48], [1, 1, 1, 0, 5, 5]]
    assert words.sums(x[0]).tolist() == [7, 7, 7, 8, 48, 48]
    assert torch.equal(Words.alone(6, CPU).sums(x), x)


def test_sums_of_short_and_long_runs():
    """Runs of every length, each added up on its own; runs that are equal have the same sum to the bit, wherever they stand."""
    sizes = [1, 9, 8, 2, LONGEST, 1, 9, 3, LONGEST]
    numbers = [run for run, size in enumerate(sizes) for _ in range(size)]
    words = Words.made(numbers, CPU)
    assert [tuple(own.shape) for own in words.members] == [(2, 1), (3, 8), (4, LONGEST)]
    x = torch.rand((2, 3, len(numbers)), generator=torch.Generator().manual_seed(4)) / 3
    begin = {run: numbers.index(run) for run in range(len(sizes))}
    for one, other in ((1, 6), (4, 8)):
        x[..., begin[other] : begin[other] + sizes[other]] = x[..., begin[one] : begin[one] + sizes[one]]
    sums = words.sums(x)
    for run, size in enumerate(sizes):
        own = slice(begin[run], begin[run] + size)
        want = x[..., own].double().sum(-1, keepdim=True).expand(2, 3, size)
        torch.testing.assert_close(sums[..., own].double(), want, rtol=1e-6, atol=0)
        assert bool((sums[..., own] == sums[..., own][..., :1]).all())
    for one, other in ((1, 6), (4, 8)):
        assert torch.equal(sums[..., begin[one]], sums[..., begin[other]])
