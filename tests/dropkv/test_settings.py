"""The method that is meant where none is named, in settings, in the library and in a bench."""

from __future__ import annotations

import pytest

import dropkv
from dropkv.bench.plan import AccuracyPlan
from dropkv.bench.speed.plan import SpeedPlan
from dropkv.compression import resolve_method
from dropkv.errors import UsageError
from dropkv.methods import get
from dropkv.settings import CompressSettings
from tests import tiny

TEXT = "The ledger of 1893 names 52 ships and 4711 crates. " * 8


@pytest.mark.parametrize(
    ("observe", "method"),
    [("replay", "auto"), ("tail", "adadropkv"), ("question:Why?", "adadropkv"), ("questions:a.txt", "adadropkv")],
)
def test_the_default_is_what_the_observer_allows(observe, method):
    assert CompressSettings(observe=observe).method == CompressSettings(method=None, observe=observe).method == method
    assert CompressSettings(method="dropkv", observe=observe).method == "dropkv"
    assert resolve_method(CompressSettings(observe=observe), 6).name == method


@pytest.mark.parametrize("observe", ["tail", "question:Why?", "questions:a.txt"])
def test_a_method_of_replays_is_refused_elsewhere_with_what_to_type(observe):
    with pytest.raises(UsageError) as error:
        resolve_method(CompressSettings(method="auto", observe=observe), 6)
    assert str(error.value) == "method auto observes with replays alone: use --observe replay, or --method adadropkv"


def test_a_bench_of_speed_takes_what_compress_takes():
    assert SpeedPlan().cells == [("adadropkv", 0.05), ("auto", 0.05)]
    assert SpeedPlan(observers=("tail",)).cells == [("adadropkv", 0.05)]
    assert SpeedPlan(observers=("replay",)).cells == [("auto", 0.05)]
    assert AccuracyPlan().methods[:2] == ("auto", "adadropkv")
    with pytest.raises(UsageError, match="without methods"):
        SpeedPlan(methods=())
    with pytest.raises(UsageError, match="without observers"):
        SpeedPlan(observers=())


def test_how_often_a_document_is_read():
    assert [get(name).readings() for name in ("auto-told", "auto-twice", "auto", "adadropkv")] == [3, 2, 1, 1]
    assert get("auto-told").readings(weighed=False) == 2


def test_short_documents_and_large_budgets():
    """Documents of little more than what is always kept, and budgets at which the heads that share are full."""
    model = tiny.model("llama")
    for text, budget in (
        ("Hi.", 1.0),
        ("The ship is Evergreen.", 8),
        (TEXT, 0.4),
        (TEXT, 0.6),
        (TEXT, 0.9),
        (TEXT, 1.0),
    ):
        made = dropkv.compress(text, model=model, budget=budget, chunk=40)
        report, own = made.report, made.metadata
        assert own.method["name"] == "auto" and own.budget.nested
        assert report.kept_entries == 3 * 2 * report.kept and report.kept <= report.document_tokens
        assert all(int(layer.positions.max()) < report.document_tokens for layer in made.layers)
    with pytest.raises(dropkv.DropkvError, match="8"):
        dropkv.compress(TEXT, model=model, budget=7)
