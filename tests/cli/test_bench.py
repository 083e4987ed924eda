"""`dropkv bench` on a tiny model: what is measured once, what is kept, what is refused before a model is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropkv.bench.plan import make_plan, read_plan
from dropkv.bench.results import Results
from tests.cli.conftest import ROOT, TEXT, Dropkv, Result

METHODS = "adadropkv,snapkv,full,no-document,random-answer"
SMALL = ("--tasks", "noise", "--lengths", "256", "--methods", METHODS, "--budgets", "0.5", "--chunk", "64")


def without_seconds(result: Result) -> list[dict[str, Any]]:
    """Result lines but for what a clock says."""
    assert result.code == 0, result.err
    return [{key: value for key, value in line.items() if key != "seconds"} for line in result.records]


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A results folder with one run, and how that ended."""
    from tests.cli.conftest import run_dropkv

    folder = tmp_path_factory.mktemp("results") / "new"
    return folder, run_dropkv("bench", "accuracy", "-o", folder, *SMALL, "--samples", "2", "--model", model, "--json")


def test_a_run_has_a_line_per_answer_and_controls(measured: tuple[Path, Result], model: Path) -> None:
    folder, run = measured
    lines = without_seconds(run)
    found = {(line["observer"], line["method"], line["budget"], line["sample"]) for line in lines}
    cells = [
        *((observer, method, 0.5) for observer in ("replay", "tail") for method in ("adadropkv", "snapkv")),
        *(("none", method, 1.0) for method in ("full", "no-document", "random-answer")),
    ]
    assert found == {(*cell, sample) for cell in cells for sample in (0, 1)} and len(lines) == len(found)
    for line in lines:
        assert (line["version"], line["model"], line["task"], line["length"]) == (1, model.name, "noise", 256)
        assert (line["setting"], line["seed"], line["document_tokens"]) == ("question-free", 0, 256)
        assert 0 <= line["score"] <= 1
    assert {line["score"] for line in lines if line["method"] == "random-answer"} == {0}
    full = next(line for line in lines if line["method"] == "full")
    assert full["kept_entries"] == full["full_entries"] == 256 * 3 * 2
    half = [line for line in lines if line["method"] == "snapkv"]
    assert {line["kept_entries"] for line in half} == {128 * 3 * 2}
    assert [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()] == run.records
    (machine,) = (json.loads(line) for line in (folder / "machines.jsonl").read_text().splitlines())
    assert set(machine) == {"device", "threads", "dtype", "dropkv", "torch", "triton", "transformers", "date"}


def test_a_second_run_adds_nothing_and_a_larger_one_goes_on(
    dropkv: Dropkv, measured: tuple[Path, Result], model: Path, tmp_path: Path
) -> None:
    lines = (measured[0] / "lines.jsonl").read_bytes()
    (tmp_path / "lines.jsonl").write_bytes(lines)
    run = ("bench", "accuracy", "-o", tmp_path, *SMALL, "--model", model)
    again = dropkv(*run, "--samples", "2")
    part = dropkv(*run, "--samples", "1", "--methods", "snapkv,full", "--json").records
    assert {(line["sample"], line["method"]) for line in part} == {
        (0, "snapkv"),
        (0, "full"),
    }  # of the folder, what was asked for
    assert again.code == 0 and (tmp_path / "lines.jsonl").read_bytes() == lines
    assert "noise, 256 tokens, question-free" in again.out and "random-answer" in again.out
    assert dropkv(*run, "--samples", "3").code == 0
    grown = (tmp_path / "lines.jsonl").read_bytes()
    assert grown.startswith(lines) and grown.count(b"\n") == lines.count(b"\n") * 3 // 2
    more = ("--samples", "2", "--methods", "snapkv,keydiff", "--observers", "tail")
    assert [(line["method"], line["sample"]) for line in dropkv(*run, *more, "--json").records] == [
        *(("snapkv", 0), ("snapkv", 1), ("keydiff", 0), ("keydiff", 1))
    ]  # another method in a folder that has the first


def test_a_plan_of_the_same_seed_gives_the_same_lines(
    dropkv: Dropkv, measured: tuple[Path, Result], model: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    methods = json.dumps(METHODS.split(","))
    plan.write_text(
        f'tasks = ["noise"]\nlengths = [256]\nmethods = {methods}\nbudgets = [0.5]\nchunk = 64\nsamples = 9\nmodel = "none"\n'
    )
    # What is written on the command line wins over the file.
    given = ("--samples", "2", "--model", model)
    run = dropkv("bench", "accuracy", plan, "-o", tmp_path / "results", *given, "--json")
    assert without_seconds(run) == without_seconds(measured[1])


def test_report(dropkv: Dropkv, measured: tuple[Path, Result], tmp_path: Path) -> None:
    folder = measured[0]
    done = dropkv("bench", "report", folder)
    assert (done.code, done.out) == (0, "") and "report.html" in done.err
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "random-answer" in page and page.endswith("</html>\n")
    assert not re.search(r"https?:|url\(|@import|<link|<iframe|<img", page)
    assert dropkv("bench", "report", folder, "-o", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_lines_of_theory_that_came_while_others_were_measured_stay(tmp_path: Path) -> None:
    from dropkv.bench.report.theory import RUN
    from dropkv_cli.bench.theory import _keep

    one, two = ({"version": 1, **dict.fromkeys(RUN, number)} for number in (1, 2))
    _keep(tmp_path, [one])
    _keep(tmp_path, [two])  # another run, which began before that
    _keep(tmp_path, [one])
    assert [json.loads(line) for line in (tmp_path / "theory.jsonl").read_text().splitlines()] == [two, one]


def test_theory_lines_are_kept_once(dropkv: Dropkv, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    run = ("bench", "theory", tmp_path / "a.txt", "-o", tmp_path / "r", "--model", model, "--budget", "0.5")
    first = dropkv(*run, "--samples", "4", "--json")
    assert (first.code, first.err) == (0, "")
    assert {line["table"] for line in first.records} >= {"eps", "cone", "factor", "gap"}
    assert all(line["version"] == 1 and line["budget"] == 0.5 for line in first.records)
    kept = (tmp_path / "r" / "theory.jsonl").read_bytes()
    assert [json.loads(line) for line in kept.splitlines()] == first.records
    people = dropkv(*run, "--samples", "4")
    assert people.code == 0 and "eps, the largest attention on an evicted key" in people.out
    assert (tmp_path / "r" / "theory.jsonl").read_bytes() == kept
    asked = dropkv(*run, "--samples", "4", "--question", "Which ship?", "--json")
    assert (tmp_path / "r" / "theory.jsonl").read_bytes().startswith(kept)
    assert {line["question"] for line in asked.records} == {"Which ship?"}
    assert dropkv("bench", "report", tmp_path / "r").code == 0
    assert "Half-angles" in (tmp_path / "r" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["accuracy"], 2, ["-o", "dropkv bench accuracy --help"]),
        (["accuracy", "-o", "r", "--tasks", "nois"], 2, ["'nois'", "noise"]),
        (["accuracy", "-o", "r", "--tasks", "ruler"], 2, ["'ruler'", "did you mean all-ruler?"]),
        (["accuracy", "-o", "r", "--tasks", "zzz"], 2, ["'zzz'", "`dropkv bench tasks`"]),
        (["accuracy", "-o", "r", "--tasks", "qa_1,qa_2"], 2, ["qa_1: needs SQuAD", "qa_2: needs HotpotQA"]),
        (["accuracy", "-o", "r", "--methods", "adadrop"], 2, ["'adadrop'", "adadropkv"]),
        (["accuracy", "-o", "r", "--methods", ","], 2, ["without methods"]),
        (["accuracy", "-o", "r", "--settings", "blind"], 2, ["'blind'", "question-free"]),
        (["accuracy", "-o", "r", "--lengths", "1k"], 2, ["'1k'", "--lengths"]),
        (["accuracy", "-o", "r", "--budgets", "64"], 2, ["budget 64", "0.05"]),
        (["accuracy", "-o", "r", "--samples", "0"], 2, ["--samples"]),
        (["accuracy", "-o", "r", "--seed", "-1"], 2, ["'-1'"]),
        (["accuracy", "-o", "r", "--tasks", "qa_1"], 2, ["qa_1", "SQuAD"]),
        (["accuracy", "-o", "r", "--essay", "missing.txt"], 1, ["missing.txt"]),
        (["accuracy", "missing.toml", "-o", "r"], 1, ["missing.toml", "docs/bench.md"]),
        (["accuracy", "half.toml", "-o", "r"], 2, ["samples is 1.5", "a whole number"]),
        (["accuracy", "five.toml", "-o", "r"], 2, ["tasks is 5", "text"]),
        (["accuracy", "-o", "file"], 1, ["file", "another folder"]),
        (["accuracy", "-o", "old"], 1, ["lines.jsonl", "line 1", "another version"]),
        (["accuracy", "-o", "r", "--methods", "zzzz"], 2, ["unknown method 'zzzz'", "no-document", "tova"]),
        (["accuracy", "-o", "r", "--methods", "no-documnt"], 2, ["did you mean no-document"]),
        (["theory", "missing.txt"], 1, ["missing.txt"]),
        (["theory", "file", "--question", " "], 1, ["the question is empty"]),
        (["theory", "file", "-o", "old"], 1, ["theory.jsonl", "line 1", "another version"]),
        (["theory", "file", "-o", "file"], 1, ["file", "another folder"]),
        (["speed", "-o", "r", "--methods", "snapvk"], 2, ["unknown method 'snapvk'", "snapkv"]),
        (["speed", "-o", "r", "--lengths", "1k"], 2, ["length '1k'", "--lengths 1024"]),
        (["speed", "-o", "r", "--batch-sizes", "0"], 2, ["batch sizes", "1 or more"]),
        (["speed", "-o", "r", "--budgets", "64"], 2, ["budget 64", "0.05"]),
        (["speed", "-o", "r", "--budgets", ","], 2, ["without budgets"]),
        (["speed", "-o", "r", "--sides", "ask"], 2, ["unknown side 'ask'", "compress or answer"]),
        (["speed", "-o", "r", "--observers", "question"], 2, ["unknown observer 'question'", "tail or replay"]),
        (["speed", "-o", "r", "--answer-tokens", "2"], 2, ["--answer-tokens 3"]),
        (["speed", "-o", "r", "--shape", "mistral-7b"], 2, ["--model or --shape", "not both"]),
        (["speed", "-o", "old"], 1, ["speed.jsonl", "line 1", "another version"]),
        (["report", "missing"], 1, ["missing", "no such folder"]),
        (["report", "old"], 1, ["lines.jsonl", "line 1", "another version"]),
        (["report", "cut"], 1, ["lines.jsonl", "line 1 is damaged"]),
        (["report", "wrong"], 1, ["result line 1", "setting"]),
        (["report", "."], 1, ["no results"]),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_model_is_loaded(
    dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(TEXT)
    (tmp_path / "half.toml").write_text("samples = 1.5")
    (tmp_path / "five.toml").write_text("tasks = 5")
    for name, text in (("cut", '{"versi\n'), ("wrong", '{"version": 1, "score": 7}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lines.jsonl").write_text(text)
    (tmp_path / "old").mkdir()
    for name in ("lines", "theory", "speed"):
        (tmp_path / "old" / f"{name}.jsonl").write_text('{"version": 0}\n')
    more = [] if arguments[0] == "report" else ["--model", "/no/such/model"]
    dropkv("bench", *arguments, *more).failed_with(code, *words)


def test_what_only_the_model_can_tell_is_one_line_too(dropkv: Dropkv, model: Path, tmp_path: Path) -> None:
    long = dropkv("bench", "accuracy", "-o", tmp_path, *SMALL[:2], "--lengths", "4096", "--model", model)
    long.failed_with(2, "length 4096", "512 positions")
    short = ("bench", "accuracy", "-o", tmp_path, *SMALL[:2], "--model", model, "--lengths")
    dropkv(*short, "30", "--budgets", "1.0").failed_with(2, "too short", "ask for at least")
    dropkv(*short, "256", "--budgets", "0.05").failed_with(
        2, "budget 0.05 of length 256 is 12 entries and adadropkv always keeps 26", "--lengths 520"
    )
    (tmp_path / "a.txt").write_text("No.")
    dropkv("bench", "theory", tmp_path / "a.txt", "--model", model).failed_with(1, "a.txt", "longer document")


def test_a_run_that_fails_before_its_first_line_leaves_no_folder(
    dropkv: Dropkv, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "a.txt").write_text("No.")
    accuracy = ("bench", "accuracy", "-o", tmp_path / "a" / "b", *SMALL)
    speed = ("bench", "speed", "-o", tmp_path / "s")
    theory = ("bench", "theory", tmp_path / "a.txt", "-o", tmp_path / "t")
    for run in (accuracy, speed, theory):
        dropkv(*run, "--model", "/no/such/model").failed_with(1, "/no/such/model")
        dropkv(*run, "--model", model, "--device", "cuda").failed_with(2, "cuda")
    dropkv(*accuracy, "--model", model, "--lengths", "20").failed_with(2, "length 20")
    dropkv(*speed, "--model", model, "--lengths", "600").failed_with(2, "length 600")
    dropkv(*theory, "--model", model).failed_with(1, "a.txt", "longer document")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_one_run_writes_into_a_folder_while_others_read_it(
    dropkv: Dropkv, measured: tuple[Path, Result], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "lines.jsonl").write_bytes((measured[0] / "lines.jsonl").read_bytes())
    run = ("bench", "accuracy", "-o", folder, *SMALL, "--model")
    with Results(folder).writing():
        refused = dropkv(*run, "/no/such/model", "--samples", "3")  # before a model is loaded
        refused.failed_with(1, f"another run writes into {folder}: wait until it has ended, or name another folder")
        assert dropkv(*run, model, "--samples", "2", "--json").records == measured[1].records
        assert dropkv("bench", "report", folder).code == 0


def test_documents_are_counted_once_for_each_task_and_setting(model: Path, tmp_path: Path) -> None:
    from dropkv.bench.accuracy import run_accuracy
    from dropkv.models import load_model

    plan = make_plan(tasks="noise", lengths=256, methods=["full"], samples=3, batch=2, model=str(model))
    loaded, seen = load_model(str(model)), []

    def told(*counts: int) -> None:
        if counts not in seen:
            seen.append(counts)

    run_accuracy(loaded, plan, Results(tmp_path), print, progress=told)
    assert seen == [(0, 0, 3), (2, 0, 3), (3, 0, 3)]
    seen.clear()
    more = replace(plan, samples=5, settings=("question-free", "question-aware"))
    run_accuracy(loaded, more, Results(tmp_path), print, progress=told)
    want = [(0, 0), (0, 2), (0, 3), (1, 3), (2, 3), (4, 3), (6, 3), (7, 3)]
    assert seen == [(*counts, 10) for counts in want]


def test_tasks(dropkv: Dropkv) -> None:
    records = {record["task"]: record for record in dropkv("bench", "tasks", "--json").records}
    assert records["noise"] == {"task": "noise", "family": "needle", "needs": None}
    assert "SQuAD" in records["qa_1"]["needs"] and records["qasper"]["family"] == "LongBench"
    shown = dropkv("bench", "tasks")
    assert len(shown.out.splitlines()) == len(records) + 1 and "all-needle: noise" in shown.err


def test_the_example_of_the_manual(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "bench.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "plan.toml").write_text(example)
    plan = read_plan(tmp_path / "plan.toml")
    plan.check_methods()
    assert (plan.lengths, plan.samples, plan.tasks) == ((1024, 2048), 20, ("noise", "prose", "five-facts"))


def test_speed_has_a_line_per_cell_goes_on_and_is_reported(dropkv: Dropkv, model: Path, tmp_path: Path) -> None:
    small = ("--lengths", "96", "--budgets", "0.5", "--chunk", "32", "--question-tokens", "4", "--answer-tokens", "4")
    run = ("bench", "speed", "-o", tmp_path / "r", "--model", model, *small, "--repeat", "1")
    first = dropkv(*run, "--batch-sizes", "1", "--json")
    assert first.code == 0, first.err
    cells = [(line["side"], line["method"], line["observer"], line["batch_size"]) for line in first.records]
    assert cells == [
        ("compress", "transformers", "none", None),
        ("compress", "adadropkv", "tail", None),
        ("compress", "adadropkv", "replay", None),
        ("compress", "auto", "replay", None),
        ("answer", "transformers", "none", 1),
        ("answer", "adadropkv", "tail", 1),
        ("answer", "auto", "replay", 1),
    ]
    kept = (tmp_path / "r" / "speed.jsonl").read_bytes()
    again = dropkv(*run, "--batch-sizes", "1,2")
    grown = (tmp_path / "r" / "speed.jsonl").read_bytes()
    assert grown.startswith(kept) and grown.count(b"\n") == 10  # three lines for the new batch size
    assert "first token s" in again.out and "auto (replay)" in again.out and again.err.count("answer, ") == 3
    assert dropkv("bench", "report", tmp_path / "r").code == 0
    assert '<h2 id="speed">' in (tmp_path / "r" / "report.html").read_text()


def test_shapes_are_refused_by_name_and_size(dropkv: Dropkv, model: Path, tmp_path: Path) -> None:
    run = ("bench", "speed", "-o", tmp_path)
    dropkv(*run, "--shape", "lama-3.1").failed_with(2, "unknown shape 'lama-3.1'", "did you mean llama-3.1-8b?")
    large = ("--shape", "mistral-7b", "--dtype", "bfloat16", "--device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        dropkv(*run, *large, "auto").failed_with(1, "13.5 GiB of weights in bfloat16", "no GPU", "--shape smollm2-135m")
        patch.setattr("dropkv.memory.spare_memory", lambda device: 1 << 30)
        dropkv(*run, *large, "cpu").failed_with(1, "13.5 GiB", "1.0 GiB are free on cpu")
    small = ("--model", model, "--lengths")
    dropkv(*run, *small, "600").failed_with(2, "length 600", "512 positions")
    dropkv(*run, *small, "100", "--sides", "compress", "--observers", "tail").failed_with(
        2, "budget 0.05 of length 100 is 5 entries and adadropkv always keeps", "--lengths"
    )
    dropkv(*run, *small, "99", "--methods", "kvzip", "--observers", "tail").failed_with(
        2, "kvzip", "--observers replay"
    )


def test_a_folder_that_holds_every_line_is_read_without_the_weights(
    dropkv: Dropkv, measured: tuple[Path, Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (measured[0] / "lines.jsonl").read_text()
    (tmp_path / "lines.jsonl").write_text(lines)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the weights were loaded")

    with monkeypatch.context() as patch:
        patch.setattr("dropkv.models.load_model", refuse)
        run = ("bench", "accuracy", "-o", tmp_path, *SMALL, "--model", model, "--samples", "2")
        again = dropkv(*run, "--json")
        assert again.records == measured[1].records
        assert again.err.splitlines() == [f"nothing to measure: {tmp_path} holds every line of this plan"]
        assert dropkv(*run).out.startswith("noise, 256 tokens, question-free")
    last = lines.splitlines()[-1]
    (tmp_path / "lines.jsonl").write_text("".join(f"{line}\n" for line in lines.splitlines()[:-1]))
    assert dropkv(*run, "--json").err.startswith("noise 256 question-free: 1 documents")
    assert json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[-1])["method"] == json.loads(last)["method"]


def test_a_method_that_is_added_does_not_bring_the_others_again(
    dropkv: Dropkv, measured: tuple[Path, Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dropkv.bench import accuracy

    (tmp_path / "lines.jsonl").write_bytes((measured[0] / "lines.jsonl").read_bytes())
    asked: list[tuple[str, str]] = []
    answer = accuracy.answer_samples

    def watch(*arguments: Any) -> Any:
        asked.extend((cell.method, cell.observer) for cell in arguments[-1])
        return answer(*arguments)

    monkeypatch.setattr(accuracy, "answer_samples", watch)
    run = ("bench", "accuracy", "-o", tmp_path, *SMALL, "--model", model, "--samples", "2")
    assert dropkv(*run, "--methods", METHODS + ",keydiff,caote").code == 0
    assert asked == [("keydiff", "none"), ("caote", "replay"), ("caote", "tail")]


def test_what_tasks_lack_is_said_once_for_each_reason_before_the_model_is_loaded(
    dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> Any:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr("dropkv.bench.tasks._words.resources.files", missing)
    monkeypatch.setattr("dropkv.bench.tasks.longbench.files.find", lambda name, data: tmp_path)
    monkeypatch.setattr("dropkv.bench.tasks._metrics.find_spec", lambda name: None)
    run = dropkv(
        "bench", "accuracy", "-o", tmp_path, "--tasks", "all-ruler,noise,lcc,qmsum", "--model", "/no/such/model"
    )
    words, squad, hotpot, code, text, failure = run.err.splitlines()
    assert words == (
        "skipped: niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, niah_multikey_2, niah_multivalue, "
        "niah_multiquery, cwe: its words come from the package wonderwords, which is missing; pip install 'dropkv[bench]'"
    )
    assert squad.startswith("skipped: qa_1: needs SQuAD") and hotpot.startswith("skipped: qa_2: needs HotpotQA")
    assert code.startswith("skipped: lcc: its scores need the package rapidfuzz")
    assert text.startswith("skipped: qmsum: its scores need the package rouge")
    assert "/no/such/model" in failure and run.code == 1
    nothing = dropkv("bench", "accuracy", "-o", tmp_path, "--tasks", "cwe,niah_single_1", "--model", "/no/such/model")
    nothing.failed_with(2, "cwe, niah_single_1: its words come from the package wonderwords")
    needs = {record["task"]: record["needs"] for record in dropkv("bench", "tasks", "--json").records}
    assert needs["cwe"] == "the package wonderwords" and "SQuAD" in needs["qa_1"]


def test_options_are_checked_before_torch_is_imported(
    dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("torch was imported")

    for module in ("bench.accuracy", "bench.speed", "compress"):
        monkeypatch.setattr(f"dropkv_cli.{module}.import_compiler", refuse)
    (tmp_path / "a.txt").write_text(TEXT)
    run = ("bench", "accuracy", "-o", tmp_path)
    for option, value in (("methods", "snapvk"), ("tasks", "nois"), ("budgets", "7"), ("observers", "head")):
        dropkv(*run, f"--{option}", value).failed_with(2, value)
    dropkv("bench", "speed", "-o", tmp_path, "--methods", "snapvk").failed_with(2, "snapkv")
    compress = ("compress", tmp_path / "a.txt", "-o", tmp_path / "a.kv")
    dropkv(*compress, "--method", "snapvk").failed_with(2, "did you mean snapkv")
    dropkv(*compress, "--observe", "questions:none.txt").failed_with(1, "none.txt", "cannot be read")
    dropkv(*compress, "--observe", "head").failed_with(2, "unknown observer 'head'")


def test_groups_are_tasks(dropkv: Dropkv) -> None:
    from dropkv.bench.plan import GROUPS
    from dropkv.bench.tasks import names
    from dropkv.bench.tasks.longbench import NAMES

    assert {task for tasks in GROUPS.values() for task in tasks} <= set(names())
    assert sorted(GROUPS["all-longbench"]) == sorted(NAMES)


def test_methods_that_no_observer_of_a_plan_serves_are_named(dropkv: Dropkv, model: Path, tmp_path: Path) -> None:
    run = (
        "bench",
        "accuracy",
        "-o",
        tmp_path / "r",
        "--model",
        model,
        "--tasks",
        "noise",
        "--lengths",
        "256",
        "--samples",
        "1",
    )
    wanted = "observe with replays alone: use --observers replay and --settings question-free"
    dropkv(*run, "--methods", "auto", "--observers", "tail").failed_with(2, f"auto {wanted}")
    assert not (tmp_path / "r").exists()
    some = dropkv(*run, "--methods", "auto,kvzip,full", "--observers", "tail")
    assert some.code == 0 and f"note: left out are auto, kvzip, which {wanted}" in some.err
