"""`dropkv shrink` and `dropkv query --budget` on files of a tiny model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from formats import read_header
from tests.cli.conftest import SETTINGS, Dropkv

KEYS = {
    "file", "source", "model", "method", "observer", "budget", "kept", "document_tokens", "kept_entries", "entries_before",
    "full_entries", "file_bytes", "file_bytes_before", "seconds",
}  # fmt: skip


def compressed(dropkv: Dropkv, kv: Path, model: Path, budget: str, *options: str) -> Path:
    """The file that `compress` makes of the document of `kv` at another budget."""
    from tests.cli.conftest import TEXT

    document, path = kv.parent / "harbour.txt", kv.parent / f"compressed-{budget}.kv"
    document.write_text(TEXT)
    common = ("--model", model, *SETTINGS[2:], "--budget", budget, "--no-fidelity", *options)
    assert dropkv("compress", document, "-o", path, *common).code == 0
    return path


@pytest.mark.parametrize("budget", ["0.4", "33"])
def test_a_shrunk_file_is_the_compressed_one(dropkv: Dropkv, kv: Path, model: Path, budget: str) -> None:
    small = kv.with_name("small.kv")
    result = dropkv("shrink", kv, "-o", small, "--budget", budget, "--json")
    assert (result.code, result.err) == (0, "")
    assert small.read_bytes() == compressed(dropkv, kv, model, budget).read_bytes()
    (record,) = result.records
    before, after = read_header(kv).metadata, read_header(small).metadata
    assert set(record) == KEYS and record["seconds"]["total"] > 0
    assert (record["file"], record["source"], record["model"]) == (str(small), str(kv), model.name)
    assert (record["method"], record["observer"]) == ("auto", "replay")
    assert str(record["budget"]) == budget and record["kept"] == after.budget.kept < before.budget.kept
    assert record["kept_entries"] == sum(layer.entries for layer in after.layers) == 3 * 2 * after.budget.kept
    assert record["entries_before"] == 3 * 2 * before.budget.kept
    assert record["full_entries"] == 3 * 2 * after.document.tokens == 3 * 2 * record["document_tokens"]
    assert record["file_bytes"] == small.stat().st_size and record["file_bytes_before"] == kv.stat().st_size


def test_the_summary_goes_to_standard_error(dropkv: Dropkv, kv: Path) -> None:
    small = kv.with_name("small.kv")
    result = dropkv("shrink", kv, "-o", small, "--budget", "33")
    kept = read_header(kv).metadata.budget.kept
    assert (result.code, result.out) == (0, "")
    assert f"{kv} -> {small}\n  33 of {kept} entries kept per KV head (198 of {6 * kept}, " in result.err
    assert "times smaller" in result.err


def test_query_with_a_budget_answers_as_the_shrunk_file(dropkv: Dropkv, kv: Path, model: Path) -> None:
    small = kv.with_name("small.kv")
    assert dropkv("shrink", kv, "-o", small, "--budget", "0.3").code == 0
    common = ("What is the code?", "--model", model, "--max-new-tokens", "8")
    (wanted,) = dropkv("query", small, *common, "--json").records
    (found,) = dropkv("query", kv, *common, "--json", "--budget", "0.3").records
    assert {**found, "seconds": 0} == {**wanted, "seconds": 0}
    kept, own = read_header(small).metadata.budget.kept, read_header(kv).metadata.budget.kept
    assert found["prefix_entries"] == kept
    assert f" {kept} of {own} entries per KV head" in dropkv("query", kv, *common, "--budget", "0.3").err


def test_what_is_not_in_the_file_is_refused(dropkv: Dropkv, kv: Path, model: Path) -> None:
    small = kv.with_name("small.kv")
    own = read_header(kv).metadata.budget
    forced = own.forced_first + own.forced_last
    for budget, words in (("0.9", f"use --budget {own.kept} or less"), ("5", f"use --budget {forced} or more")):
        dropkv("shrink", kv, "-o", small, "--budget", budget).failed_with(2, str(kv), words)
        asked = ("query", kv, "Which ship?", "--model", model, "--budget", budget)
        dropkv(*asked).failed_with(2, str(kv), words)
    pyramid = compressed(dropkv, kv, model, "0.6", "--method", "pyramidkv")
    for command in (("shrink", pyramid, "-o", small), ("query", pyramid, "Which ship?", "--model", model)):
        dropkv(*command, "--budget", "0.4").failed_with(1, str(pyramid), "pyramidkv", "compress the document again")
    assert not small.exists()


def test_mistakes_are_one_line(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.kv"
    dropkv("shrink", kv, "--budget", "0.4").failed_with(2, "-o FILE")
    dropkv("shrink", kv, "-o", small).failed_with(2, "--budget")
    dropkv("shrink", kv, "-o", small, "--budget", "many").failed_with(2, "'many' is no number")
    dropkv("shrink", "-", "-o", small, "--budget", "0.4").failed_with(2, "cannot be read from a pipe")
    dropkv("shrink", kv, kv, "-o", tmp_path, "--budget", "0.4").failed_with(2, f"the file {kv} is given twice")
    dropkv("shrink", kv, tmp_path / "b.kv", "-o", small, "--budget", "0.4").failed_with(2, "one file for 2 files")
    dropkv("shrink", kv, "-o", tmp_path / "none" / "a.kv", "--budget", "0.4").failed_with(1, "mkdir -p")
    dropkv("shrink", tmp_path / "b.kv", "-o", small, "--budget", "0.4").failed_with(1, "b.kv: no such file")
    (tmp_path / "c.kv").write_text("Once upon a time")
    dropkv("shrink", tmp_path / "c.kv", "-o", small, "--budget", "0.4").failed_with(1, "c.kv: ", "dropkv compress")
    assert not small.exists()


def test_nothing_is_replaced_without_force(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    small, content = tmp_path / "small.kv", kv.read_bytes()
    small.write_bytes(b"mine")
    dropkv("shrink", kv, "-o", small, "--budget", "0.4").failed_with(1, "small.kv: exists already", "--force")
    dropkv("shrink", kv, "-o", kv, "--budget", "0.4").failed_with(1, "exists already", "--force")
    assert (small.read_bytes(), kv.read_bytes()) == (b"mine", content)
    assert dropkv("shrink", kv, "-o", small, "--budget", "0.4", "--force").code == 0
    assert dropkv("shrink", kv, "-o", kv, "--budget", "0.4", "--force").code == 0
    assert small.read_bytes() == kv.read_bytes() != content
    assert dropkv("verify", kv).code == 0
    # A link to the file is the file.
    link = tmp_path / "link.kv"
    link.symlink_to(kv)
    assert dropkv("shrink", kv, "-o", link, "--budget", "0.3", "--force").code == 0
    assert link.is_symlink() and read_header(kv).metadata.budget.asked == 0.3


def test_a_damaged_file_leaves_the_target_alone(dropkv: Dropkv, kv: Path) -> None:
    header = read_header(kv)
    raw = bytearray(kv.read_bytes())
    raw[header.data_start + header.tensors["layers.2.values"].start] ^= 1
    kv.write_bytes(raw)
    result = dropkv("shrink", kv, "-o", kv, "--budget", "0.4", "--force")
    result.failed_with(1, "harbour.kv: layers.2.values, block 0", "does not match its hash")
    assert kv.read_bytes() == bytes(raw)
    assert os.listdir(kv.parent) == ["harbour.kv"]


def test_several_files_go_into_a_folder(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    other, folder = tmp_path / "other.kv", tmp_path / "small"
    shutil.copy(kv, other)
    folder.mkdir()
    missing = tmp_path / "missing.kv"
    result = dropkv("shrink", kv, missing, other, "-o", folder, "--budget", "0.4", "--json")
    assert result.code == 1 and result.err == f"dropkv: {missing}: no such file; check the name\n"
    first, second, third = result.records
    assert first["file"] == str(folder / "harbour.kv") and third["file"] == str(folder / "other.kv")
    assert second == {
        "file": str(folder / "missing.kv"), "source": str(missing), "error": f"{missing}: no such file; check the name", "exit": 1
    }  # fmt: skip
    assert sorted(os.listdir(folder)) == ["harbour.kv", "other.kv"]
    assert (folder / "harbour.kv").read_bytes() == (folder / "other.kv").read_bytes()
    (tmp_path / "far").mkdir()
    rival = shutil.copy(kv, tmp_path / "far" / "harbour.kv")
    there = dropkv("shrink", kv, other, "-o", folder, "--budget", "0.3").err.splitlines()
    assert len(there) == 2 and all(
        line.endswith("choose another name with -o, or replace it with --force") for line in there
    )
    done = dropkv("shrink", kv, rival, other, "-o", folder, "--budget", "0.3", "--force")
    assert done.code == 1 and f"{kv}: would become {folder}/harbour.kv, as {rival} would" in done.err
    assert (folder / "harbour.kv").stat().st_size > (folder / "other.kv").stat().st_size
    new = tmp_path / "new"
    dropkv("shrink", missing, "-o", f"{new}/", "--budget", "0.4").failed_with(1, "no such file")
    dropkv("shrink", folder, "-o", f"{new}/", "--budget", "0.4").failed_with(1, "is a folder")
    assert not new.exists()
    assert dropkv("shrink", kv, other, "-o", f"{new}/", "--budget", "0.4").code == 0
    assert sorted(os.listdir(new)) == ["harbour.kv", "other.kv"]
