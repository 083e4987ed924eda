"""What is said of options that change nothing, and of arguments that are meant otherwise, before the model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dropkv.transcripts import _head
from formats import read_header
from tests.cli.conftest import TEXT, Dropkv


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-p", "0.5"], "--top-p is"),
        (["--seed", "3"], "--seed is"),
        (["--top-p", "0.5", "--seed", "3", "--temperature", "0"], "--top-p and --seed are"),
    ],
)
def test_sampling_options_without_a_temperature(dropkv: Dropkv, options: list[str], named: str) -> None:
    note, failed = dropkv("query", "no.kv", "who?", *options).err.splitlines()
    assert note == f"note: {named} not used at --temperature 0, which takes the likeliest token every time"
    assert failed.startswith("dropkv: no.kv: ")


def test_sampling_options_that_are_used(dropkv: Dropkv, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--top-p", "0.5", "--seed", "3")
    dropkv("query", "no.kv", "who?", *options, "--temperature", "0.1").failed_with(1, "no.kv")
    monkeypatch.setenv("DROPKV_TOP_P", "0.5")  # meant for the runs that sample
    dropkv("query", "no.kv", "who?").failed_with(1, "no.kv")


def test_a_seed_that_no_method_takes(dropkv: Dropkv, document: Path, model: Path) -> None:
    arguments = (
        "compress",
        document,
        "--dry-run",
        "--model",
        model,
        "--seed",
        "1",
        "--budget",
        "0.5",
        "--json",
        "--method",
    )
    assert dropkv(*arguments, "tova").err == "note: --seed is not used with --method tova, only with random\n"
    assert dropkv(*arguments, "random").err == ""


def test_an_alpha_that_no_rule_takes(dropkv: Dropkv, document: Path, model: Path) -> None:
    run = (
        "compress",
        document,
        "--dry-run",
        "--model",
        model,
        "--alpha",
        "0.5",
        "--budget",
        "0.5",
        "--json",
        "--method",
    )
    for method in ("snapkv", "random"):
        said = f"note: --alpha is not used with --method {method}, where all heads of a layer have one budget\n"
        assert dropkv(*run, method).err == said
    for method in ("adadropkv", "kvzip", "auto"):
        assert dropkv(*run, method).err == ""


def test_too_small_a_budget_names_the_document(dropkv: Dropkv, document: Path, model: Path, tmp_path: Path) -> None:
    run = ("compress", document, "--model", model, "--budget", "1", "--no-fidelity", "--method", "snapkv")
    words = "budget 1 is 1 entry per head of "
    dropkv(*run, "--dry-run").failed_with(2, f"dropkv: harbour.txt: {words}")
    other = shutil.copy(document, tmp_path / "other.txt")
    failed = dropkv(*run, other, "-o", f"{tmp_path}/out/").err.splitlines()
    assert [line.partition(words)[0] for line in failed[:2]] == [f"dropkv: {document}: ", f"dropkv: {other}: "]


def test_a_count_beyond_the_document(dropkv: Dropkv, document: Path, model: Path, tmp_path: Path) -> None:
    kv, small = tmp_path / "a.kv", tmp_path / "b.kv"
    common = ("--model", model, "--observe", "tail", "--no-fidelity")
    made = dropkv("compress", document, "-o", kv, *common, "--budget", "5000", "--json")
    [record] = made.records
    tokens = record["document_tokens"]
    assert made.err == f"note: {document} has {tokens:,} tokens, --budget 5,000 keeps everything\n"
    assert record["kept_entries"] == record["full_entries"]
    dry = dropkv("compress", document, "--dry-run", *common, "--budget", tokens + 1, "--json")
    assert dry.err == f"note: {document} has {tokens:,} tokens, --budget {tokens + 1:,} keeps everything\n"
    assert dropkv("compress", document, "--dry-run", *common, "--budget", tokens, "--json").err == ""
    note = f"note: {kv} has {tokens:,} tokens, --budget 5,000 keeps everything\n"
    assert dropkv("shrink", kv, "-o", small, "--budget", "5000", "--json").err == note
    asked = dropkv("query", kv, "who?", "--model", model, "--budget", "5000", "--max-new-tokens", "1", "--json")
    assert asked.err == note and asked.records[0]["prefix_entries"] == tokens


def test_a_second_file_is_no_question(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    other = shutil.copy(kv, tmp_path / "OTHER.KV")
    for name in (other, "hf://me/books/b.kv"):
        dropkv("query", kv, name, "who?").failed_with(2, f"{name} is a .kv file, not a question: query takes one file")
    dropkv("query", "no.kv", "what is in b.kv").failed_with(1, "no.kv: no such file")
    dropkv("query", "no.kv", "b.kv").failed_with(1, "no.kv: no such file")  # there is no such file: a question


def test_what_is_no_transcript_is_found_out_without_the_model(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    """The file names a local folder, so that loading its model would fail in other words."""
    talk = tmp_path / "talk.jsonl"
    head = _head(read_header(kv).metadata)

    def resumed(*lines: object) -> str:
        talk.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = dropkv("query", kv, "who?", "--resume", talk)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        return result.err

    assert "is no transcript of version 1" in resumed({"some": "json"})
    assert "talk.jsonl: its document tokens is 3, that of the .kv file" in resumed(head | {"document_tokens": 3})
    assert "line 2 is no turn" in resumed(head, {"question": TEXT})
    assert "local model folder" in resumed(head)
    dropkv("query", kv, "who?", "--resume", kv).failed_with(1, "harbour.kv: is no transcript")
    dropkv("query", "hf://me/books/b.kv", "who?", "--resume", kv).failed_with(1, "harbour.kv: is no transcript")
