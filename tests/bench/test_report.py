"""The page: what stands in it by hand, what must never stand in it."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dropkv.bench.report import render_report, write_report
from dropkv.bench.report.groups import group
from dropkv.bench.report.html import budget_name, plain, signed, size
from dropkv.bench.report.lines import read_lines
from dropkv.errors import ResultsError
from formats import FormatError
from tests.bench.synthetic import accuracy_lines, line, needle_lines, theory_lines

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)> \u202e\x07\ud800\n&amp;'
VOID = {"meta", "line", "polyline", "circle", "rect", "path", "br", "img"}


class Page(HTMLParser):
    """Tags in order, attributes by name, tables as lists of rows of cell texts; complains about tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return render_report([*accuracy_lines(samples=6), *needle_lines(), *theory_lines()])


def test_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link|<iframe|<img|<object", page)
    parsed = Page(page)
    assert {value[0] for _, name, value in parsed.attributes if name in ("href", "src", "xlink:href")} == {"#"}
    policy = next(value for _, name, value in parsed.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [name for _, name, _ in parsed.attributes if name == "style" or name.startswith("on")]


def test_anchors_lead_somewhere(page: str) -> None:
    parsed = Page(page)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for tag, name, value in parsed.attributes if (tag, name) == ("a", "href")} == set(ids)


def test_values_by_hand() -> None:
    lines = [
        *(line(method="dropkv", sample=s, score=x) for s, x in enumerate((1.0, 1.0, 0.0, 1.0))),
        *(line(method="snapkv", sample=s, score=x, kept_bytes=2048) for s, x in enumerate((1.0, 0.0, 0.0, 1.0))),
        *(line(method="full", budget=1.0, sample=s, kept_entries=400) for s in range(4)),
    ]
    table = Page(render_report(lines)).tables[0]
    # Wilson: 3 of 4 is 30.1 to 95.4, 2 of 4 is 15.0 to 85.0, 4 of 4 is 51.0 to 100.0.
    assert table[1] == ["dropkv", "25 %", "75.0 30.1 to 95.4", "\u2013", "4", "4", "25.0 %", "977 KiB"]
    assert table[2][:3] == ["snapkv", "25 %", "50.0 15.0 to 85.0"]
    assert table[2][3].startswith("\u221225.0 ")
    assert table[2][-1] == "2 KiB"
    assert table[3][:4] == ["full", "\u2013", "100.0 51.0 to 100.0", "\u2013"]


def test_settings_never_share_a_table_or_a_plot(page: str) -> None:
    free, aware = page.index('<h2 id="question-free">'), page.index('<h2 id="question-aware">')
    for setting, other, part in (
        ("question-free", "question-aware", page[free:aware]),
        ("question-aware", "question-free", page[aware : page.index('<h2 id="theory">')]),
    ):
        named = re.findall(r'aria-label="([^"]*)"', part)
        assert not [label for label in named if other in label]
        assert all(setting in label for label in named if "methods" not in label)
    made = group(read_lines(accuracy_lines(samples=2))[0])
    for each in made:
        assert {result.setting for cell in each.cells for result in cell.results.values()} == {each.setting}


def test_every_table_says_setting_model_samples_and_seed(page: str) -> None:
    captions = re.findall(r'<p class="caption">(.*?)</p>', page)
    assert len(captions) == page.count("<table")
    for caption in captions:
        assert caption.startswith(("question-free", "question-aware"))
        assert "tiny" in caption
        assert re.search(r"\d+ (samples a task|\(layer, head, query\) triples)", caption)
        assert re.search(r"seed \d+", caption)


@pytest.mark.parametrize("key", ["model", "task", "label", "observer", "method", "prediction"])
def test_hostile_text_is_escaped(key: str) -> None:
    lines = [line(**{key: EVIL}), line(method="other"), line(**{key: EVIL}, sample=1, depth=0.5, head_counts=[[1, 2]])]
    made = render_report(lines)
    made.encode("utf-8")
    parsed = Page(made)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert not re.search("[\u202e\x07]", made)
    assert "&lt;script&gt;alert(1)" in made
    assert "\\u202e" in made
    assert "&amp;amp;" in made


def test_hostile_answers_and_theory_are_escaped() -> None:
    theory = [item | {"model": EVIL, "document": EVIL, "stratum": EVIL, EVIL: EVIL} for item in theory_lines()]
    parsed = Page(render_report([line(answers=[EVIL]), *theory, theory[0] | {"table": EVIL}]))
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags


def test_long_predictions_are_cut() -> None:
    made = render_report([line(prediction="x" * 100_000)])
    assert "x" * 300 + "\u2026" in made
    assert len(made) < 40_000


def test_grid_and_head_budgets_are_drawn() -> None:
    counts = [[10, 30], [40, 20]]
    made = render_report(
        [
            *needle_lines(budgets=(0.05,)),
            line(method="adadropkv", head_counts=counts),
            line(method="dropkv", head_counts=[[9, 9]]),
        ]
    )
    grid = re.search(r"<svg class=\"heat\"[^>]*Accuracy by depth and length, adadropkv, 5 %.*?</svg>", made)
    assert grid is not None
    assert grid[0].count("<rect") == 55
    heads = re.findall(r"<svg class=\"heat\"[^>]*Kept entries by layer and KV head, (\w+).*?</svg>", made)
    assert heads == ["adadropkv"]  # equal budgets need no map
    assert "layer 1, KV head 0: 40" in made
    assert 'fill-opacity="1.000"/><text class="strong mid"' in made
    assert 'fill-opacity="0.250"/><text class="weak mid"' in made


def many_methods() -> list[dict[str, Any]]:
    """Fifteen methods of falling accuracy at two budgets, the last two alike, and a control."""
    right = [9, 5, *range(18, 6, -1), 7]
    cells = [(f"m{number:02}", budget) for number in range(15) for budget in (0.25, 0.5)]
    lines = [
        line(method=method, budget=budget, sample=sample, score=float(sample < right[int(method[1:])] * 2 * budget))
        for method, budget in cells
        for sample in range(20)
    ]
    return [*lines, *(line(method="full", budget=1.0, observer="none", sample=sample) for sample in range(20))]


def test_an_overview_has_a_row_for_each_method_and_the_rest_is_folded_away() -> None:
    made = render_report(many_methods())
    overview, cells = Page(made).tables[:2]
    assert overview[0] == ["method", "25 %", "50 %"]
    assert [row[0] for row in overview[1:4]] == ["m00", "m02", "m03"]  # the first, then the best
    assert overview[1][1].startswith("25.0 ") and overview[1][2].startswith("45.0 ")  # 0 to 4 and 0 to 8 of 20
    assert overview[2][2].startswith("90.0 +45.0, +")
    assert overview[-1] == ["full", "100.0 83.9 to 100.0", "100.0 83.9 to 100.0"]
    assert len(cells) == 32 and "<details><summary>All cells</summary>" in made
    few = render_report(accuracy_lines(samples=2))
    assert "<details open><summary>All cells</summary>" in few
    assert len(Page(render_report([line()])).tables) == 2  # one budget needs no overview


def test_charts_show_the_best_methods_and_buttons_bring_the_others() -> None:
    made = render_report(many_methods())
    buttons = re.findall(r'aria-pressed="(\w+)" data-toggle="(\d+)".*?</svg>([^<]*)</button>', made)
    assert [name for state, _, name in buttons if state == "true"] == [f"m{n:02}" for n in (0, *range(2, 9))] + ["full"]
    assert {name for state, _, name in buttons if state == "false"} == {"m01", *(f"m{n:02}" for n in range(9, 15))}
    for state, number, _ in buttons:
        lines = re.findall(rf'<g class="s\d( off)?" data-series="{number}">', made)
        assert len(lines) == 2 and set(lines) == ({""} if state == "true" else {" off"})
    assert "7 are hidden at first" in made


def test_head_budgets_of_the_first_method_are_seen_and_others_folded_away() -> None:
    lines = [
        line(method=method, budget=budget, head_counts=[[1, 2], [3, 4]])
        for method in ("adadropkv", "adakv")
        for budget in (0.1, 0.5)
    ]
    made = render_report(lines)
    names = re.findall(r"Kept entries by layer and KV head, (\w+), (\d+) %, question-free, tiny\"", made)
    assert names == [("adadropkv", "10"), ("adadropkv", "50"), ("adakv", "10")]
    assert (
        made.index("adadropkv, 50 %, question-free")
        < made.index("Other methods")
        < made.index("adakv, 10 %, question-free")
    )


def test_many_heads_say_their_numbers_to_a_pointer() -> None:
    made = render_report([line(method="adadropkv", head_counts=[list(range(1, 33))])])
    assert "<title>layer 0, KV head 31: 32</title>" in made
    heat = re.search(r'<svg class="heat".*?</svg>', made)
    assert heat is not None and ">32</text>" not in heat[0]


def test_methods_that_need_no_observer_have_none_in_their_name() -> None:
    made = group(read_lines([line(), line(observer="tail"), line(method="h2o", observer="none")])[0])[0]
    assert [made.name(series) for series in made.series] == ["dropkv, replay", "dropkv, tail", "h2o"]


def test_angles_are_drawn() -> None:
    made = render_report(theory_lines())
    assert "40 triples with one, 24 without" in made
    assert "85\u00b0: 20" in made


def test_observers_are_told_apart_where_there_are_several() -> None:
    lines = [
        line(),
        line(observer="tail", score=0.0),
        line(method="full", observer="tail"),
        line(method="full", sample=1),
    ]
    made = group(read_lines(lines)[0])[0]
    assert [made.name(series) for series in made.series] == ["dropkv, replay", "dropkv, tail", "full"]
    assert len(made.cells) == 3  # one full cache for all observers


def test_last_of_two_results_counts() -> None:
    made = group(read_lines([line(score=0.0), line(score=1.0)])[0])[0]
    assert [list(cell.scores.values()) for cell in made.cells] == [[1.0]]


def test_same_lines_same_page() -> None:
    assert render_report(accuracy_lines(samples=3)) == render_report(accuracy_lines(samples=3))


def test_writes_one_file_and_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    write_report(iter([line()]), target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(ResultsError):
        write_report([line(version=2)], target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(FormatError):
        write_report([line()], tmp_path / "missing" / "report.html")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no result lines"),
        ([line(), line(version=2)], "line 2 has version 2"),
        ([{}], "line 1 has version None"),
        ([line(setting="mixed")], "setting 'mixed'"),
        ([line(score=1.5)], "score 1.5"),
        ([line(score=float("nan"))], "score is nan"),
        ([line(score=True)], "score is True"),
        ([line(budget="5 %")], "budget is '5 %'"),
        ([line(head_counts=[["<"]])], "head_counts"),
        ([line(depth="deep")], "depth is 'deep'"),
        ([{"version": 1, "kind": "theory"}], "table is None"),
        (["text"], "no JSON object"),
    ],
)
def test_foreign_lines_are_refused_by_number(lines: list[Any], message: str) -> None:
    with pytest.raises(ResultsError, match=re.escape(message)) as caught:
        render_report(lines)
    assert "\n" not in str(caught.value)


def test_small_words() -> None:
    assert [budget_name(value) for value in (0.05, 0.125, 1.0, 2048.0)] == ["5 %", "12.5 %", "100 %", "2048"]
    assert [size(value) for value in (0, 999, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "999 B",
        "1023 B",
        "1.5 KiB",
        "5 MiB",
        "3072 GiB",
    ]
    assert [signed(value) for value in (0.031, -0.2, -0.0001)] == ["+3.1", "\u221220.0", "0.0"]
    assert plain("a\tb\nc\u200b") == "a b\u21b5c\\u200b"
