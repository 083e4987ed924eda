"""The words for a file's fidelity, whatever wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from dropkv_cli.fidelity import fidelity_lines, percent

VALUES = {"kept_information": 0.93, "nll": 1.25, "nll_full": 1.0, "right": 0.81, "right_full": 0.86}


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (1.004, "100 % of what the document tells the model is kept: as good as the full cache"),
        (0.9899, "98 % of what the document tells the model is kept: few facts are lost"),
        (0.998, "99 % of what the document tells the model is kept: as good as the full cache"),
        (0.8999, "89 % of what the document tells the model is kept: many facts are lost"),
        (0.9, "90 % of what the document tells the model is kept: few facts are lost"),
        (0.6, "60 % of what the document tells the model is kept: many facts are lost"),
        (0.2, "20 % of what the document tells the model is kept: most facts are lost"),
        (-0.3, "0 % of what the document tells the model is kept: most facts are lost"),
        (-7.0, "0 % of what the document tells the model is kept: most facts are lost"),
    ],
)
def test_a_share_has_a_plain_word(kept: float, words: str) -> None:
    assert fidelity_lines(VALUES | {"kept_information": kept})[0].startswith(words)


def test_the_numbers_behind_it() -> None:
    numbers = "held-out tokens predicted right: 81 %, by the full cache 86 %; {} per token"
    assert fidelity_lines(VALUES)[1:] == [numbers.format("0.25 nats lost")]
    assert fidelity_lines(VALUES | {"nll": 0.9})[1:] == [numbers.format("0.10 nats won")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "not measured"),
        ({}, "not know"),
        ({"kl": 0.5}, "not know"),
        ({"kept_information": "much", "nll": True}, "not know"),
        (VALUES | {"kept_information": None}, "no use of the document"),
    ],
)
def test_what_another_version_wrote(values: dict[str, Any] | None, words: str) -> None:
    assert words in fidelity_lines(values)[0]


def test_only_all_is_a_hundred_per_cent() -> None:
    assert [percent(share) for share in (1.0, 0.9999, 0.29, 0.0, 0.004, -0.2)] == [
        "100 %",
        "99 %",
        "29 %",
        "0 %",
        "0 %",
        "0 %",
    ]
