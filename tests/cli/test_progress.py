"""The progress bar: how much is done, how long it takes, how fast; and nothing where nobody sees it."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from dropkv_cli import progress


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_with_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress.progress_bar("2/5 book.txt", layers=4) as report:
        assert report is not None
        for layer in range(1, 4):
            now[0] += 10  # 800 tokens in each of 4 layers, so 20 tokens of the document each second
            report(800 * layer, 3200)
            assert re.search(rf"2/5 book.txt: +{25 * layer}%\|.*\| ", shown.getvalue().split("\r")[-1])
            assert "20 tokens/s" in shown.getvalue().split("\r")[-1]
        assert "00:30 passed, 00:10 left" in shown.getvalue().split("\r")[-1]
    assert shown.getvalue().endswith("\r") and shown.getvalue().split("\r")[-2].strip() == ""  # gone when it is done


def test_a_document_that_is_read_several_times_says_which_time_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress.progress_bar("book.txt", layers=2, readings=3) as report:
        assert report is not None and "book.txt, reading 1 of 3:   0%" in shown.getvalue()
        for done, words in enumerate(
            ("1 of 3:  17%", "2 of 3:  33%", "2 of 3:  50%", "3 of 3:  67%", "3 of 3:  83%", "3 of 3: 100%"), 1
        ):
            now[0] += 10
            report(80 * done, 480)
            assert f"book.txt, reading {words}" in shown.getvalue().split("\r")[-1]


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = io.StringIO()
    monkeypatch.setattr(sys, "stderr", silent)
    with progress.progress_bar("book.txt") as report:
        assert report is None
    progress.waiting("loading ...")
    assert silent.getvalue() == ""


def test_a_count_that_is_drawn_anew_while_notes_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress.counting("documents", lines=True) as (count, tell):
        count(0, 40, 60)
        now[0] += 30
        count(5, 40, 60)
        line = shown.getvalue().split("\r")[-1]
        assert re.search(r"^45 of 60 documents\|.*\| 00:30 passed, 01:30 left", line), line  # the 40 took no time
        tell("noise: done")
        assert "noise: done\n" in shown.getvalue() and "45 of 60" in shown.getvalue().split("noise: done\n")[1]
    assert shown.getvalue().split("\r")[-2].strip() == ""


def test_lines_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for lines in (True, False):
        said = io.StringIO()
        monkeypatch.setattr(sys, "stderr", said)
        with progress.counting("documents", lines=lines, every=0.2) as (count, tell):
            count(3, 40, 1060)
            tell("noise: done")
            time.sleep(0.5)
        first, *others = said.getvalue().splitlines()
        assert first == "noise: done" and bool(others) is lines
        assert set(others) <= {"43 of 1,060 documents, 0 s", "43 of 1,060 documents, 1 s"}
    with progress.counting("documents", lines=True) as (count, tell):  # half a minute has not passed
        count(1, 0, 2)
    assert said.getvalue() == "noise: done\n"
