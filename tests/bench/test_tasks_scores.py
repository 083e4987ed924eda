"""RULER's and LongBench's scoring, against values worked out by hand."""

from __future__ import annotations

import pytest

from dropkv.bench.tasks import _metrics as metrics
from dropkv.bench.tasks._match import match_all, match_part
from dropkv.errors import UsageError


@pytest.mark.parametrize(
    ("prediction", "answers", "all_of_them", "part"),
    [
        ("The numbers are 1234567 and 7654321.", ("1234567", "7654321"), 1.0, 1.0),
        ("The first is 1234567.", ("1234567", "7654321"), 0.5, 1.0),
        ("one two three", ("two", "four", "six", "eight"), 0.25, 1.0),
        ("RIGA, of course", ("riga",), 1.0, 1.0),
        ("in riga", ("from Riga", "Riga"), 0.5, 1.0),
        ("12345678", ("1234567",), 1.0, 1.0),  # a part of a longer word counts
        ("123\t4567", ("1234567",), 0.0, 0.0),  # a control character becomes a line end ...
        ("old\x07town", ("old\ntown",), 1.0, 1.0),  # ... which this shows
        ("old\x7ftown", ("oldtown",), 0.0, 0.0),  # not among them
        ("\x00 yes \x1f", ("yes",), 1.0, 1.0),
        ("", ("x",), 0.0, 0.0),
    ],
)
def test_ruler_s_matches(prediction: str, answers: tuple[str, ...], all_of_them: float, part: float) -> None:
    assert match_all(prediction, answers) == all_of_them
    assert match_part(prediction, answers) == part


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The cat!", "a cat", 1.0),  # articles, case and punctuation do not count
        ("black cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat dog", "cat dog dog", 2 / 3),  # two words shared of three and three
        ("it's", "its", 1.0),
        ("state-of-the-art", "state of the art", 0.0),  # without its hyphens it is one word
        ("the", "a", 0.0),
        ("dog", "cat", 0.0),
    ],
)
def test_f1_of_words(prediction: str, answer: str, score: float) -> None:
    assert metrics.word_f1(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("12", "12", 1.0),
        ("Between 12 and 30, so 12", "12", 2 / 3),
        ("112", "12", 0.0),
        ("none", "12", 0.0),
    ],
)
def test_share_of_numbers(prediction: str, answer: str, score: float) -> None:
    assert metrics.number_share(prediction, answer) == pytest.approx(score)
    assert metrics.paragraph_share(prediction, f"Paragraph {answer}") == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Type: City", "City", 1.0),
        ("City or Date", "City", 0.5),
        ("Date", "City", 0.0),
        ("Other city", "Other city", 1.0),  # "Other", a part of the right name, is taken off
        ("Other city", "Other", 0.5),  # "Other city" is no part of "Other" and stays
        ("abc", "abc", 0.5),  # of a, ab, abc: a is taken off, ab skipped
        ("nothing", "City", 0.0),
    ],
)
def test_share_of_class_names(prediction: str, answer: str, score: float) -> None:
    classes = ("a", "ab", "abc") if answer == "abc" else ("City", "Date", "Other", "Other city")
    assert metrics.class_share(prediction, answer, classes) == score


def test_rouge_l() -> None:
    pytest.importorskip("rouge", reason="pip install 'dropkv[bench]'")
    # Longest common sequence "the cat sat": 3 of 4 words and 3 of 3.
    assert metrics.rouge_l("the cat sat down", "the cat sat") == pytest.approx(2 * 0.75 / 1.75, abs=1e-6)
    # "cat ... mat" is 2 long: precision 2/3, recall 2/5 of its different words.
    assert metrics.rouge_l("cat mat dog", "cat sits on one mat") == pytest.approx(0.5, abs=1e-6)
    assert metrics.rouge_l("same words here", "same words here") == pytest.approx(1.0, abs=1e-6)
    assert metrics.rouge_l("dog", "cat") == 0.0
    assert metrics.rouge_l("", "cat") == 0.0
    assert metrics.rouge_l(".", "cat") == 0.0


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("x = 1", "x = 1", 1.0),
        ("\n\nabcd\nmore", "abxd", 0.75),  # three of four letters kept: 2 * 3 / 8
        ("```python\n# note\n// note\nabcd\n", "abcd", 1.0),  # fences and comments are passed over
        ("x = 1  # one\nabc", "abc", 1.0),  # and so is a line with a comment in it
        ("ab", "abc", 0.8),  # 2 * 2 / 5
        ("abb", "abc", 0.67),  # 2 * 2 / 6, in whole per cent
        ("# only a note", "abc", 0.0),
        ("", "", 1.0),
    ],
)
def test_edit_similarity(prediction: str, answer: str, score: float) -> None:
    pytest.importorskip("rapidfuzz", reason="pip install 'dropkv[bench]'")
    assert metrics.code_similarity(prediction, answer) == score


def test_the_first_line_is_the_one_behind_empty_ones() -> None:
    assert metrics.first_line("\n\nCity\nQuestion: next") == "City"
    assert metrics.first_line(" \nCity") == " "


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rouge", None)
    monkeypatch.setitem(__import__("sys").modules, "rapidfuzz", None)
    with pytest.raises(UsageError, match=r"need the package rouge.*dropkv\[bench\]"):
        metrics.check_package(metrics.rouge_l)
    with pytest.raises(UsageError, match=r"need the package rapidfuzz.*dropkv\[bench\]"):
        metrics.check_package(metrics.code_similarity)
    metrics.check_package(metrics.word_f1)
