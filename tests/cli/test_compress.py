"""`dropkv compress` on tiny models: what is written, what is said, what is refused with everything left as it was."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats import read_file, read_header
from tests.cli.conftest import SETTINGS, TEXT, Dropkv, start_dropkv

KEYS = {
    "file", "model", "method", "observer", "budget", "document_tokens", "kept_entries", "full_entries", "file_bytes",
    "full_cache_bytes", "seconds", "peak_memory_bytes", "expected_memory_bytes", "document", "truncated_from", "fidelity",
    "fidelity_missing", "kv_dtype", "zstd",
}  # fmt: skip


def test_json_record(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    result = dropkv("compress", document, "-o", output, "--model", model, *SETTINGS, "--json")
    assert (result.code, result.err) == (0, "")
    (record,) = result.records
    assert set(record) == KEYS
    assert set(record["seconds"]) == {"load", "prefill", "score", "fidelity", "write", "total"}
    assert all(seconds > 0 for seconds in record["seconds"].values())
    assert record["seconds"]["total"] >= record["seconds"]["load"] + record["seconds"]["prefill"]
    header = read_header(output)
    tokens = header.metadata.document.tokens
    assert record["file"] == str(output) and record["model"] == model.name
    assert (record["method"], record["observer"], record["budget"]) == ("auto", "replay", 0.5)
    assert record["document_tokens"] == tokens and record["truncated_from"] is None
    assert record["document"] == str(document)
    assert record["full_entries"] == tokens * 3 * 2
    assert record["full_cache_bytes"] == tokens * 3 * 2 * 32 * 4
    assert record["kept_entries"] == sum(layer.entries for layer in header.metadata.layers) < record["full_entries"]
    assert record["file_bytes"] == output.stat().st_size == header.file_bytes
    assert record["peak_memory_bytes"] > 50 << 20
    assert record["expected_memory_bytes"] > 50 << 20
    assert record["fidelity"] == header.metadata.fidelity and record["fidelity_missing"] is None
    assert 0 <= record["fidelity"]["agreement"] <= 1 and record["fidelity"]["tokens"] > 10


def test_without_fidelity_nothing_is_measured_and_the_entries_are_the_same(
    dropkv: Dropkv, document: Path, model: Path, kv: Path
) -> None:
    output = document.with_name("plain.kv")
    arguments = ("compress", document, "-o", output, "--model", model, *SETTINGS, "--no-fidelity")
    (record,) = dropkv(*arguments, "--json").records
    assert record["fidelity"] is None and record["seconds"]["fidelity"] == 0
    assert record["fidelity_missing"] == "not asked for"
    assert read_header(output).metadata.fidelity is None and read_header(kv).metadata.fidelity is not None
    for ours, theirs in zip(read_file(output).layers, read_file(kv).layers, strict=True):
        assert ours.positions.equal(theirs.positions) and ours.keys.equal(theirs.keys)
    people = dropkv(*arguments, "--force")
    assert people.code == 0 and "fidelity:" not in people.err
    shown = dict(line.split(None, 1) for line in dropkv("info", output).out.splitlines() if line.startswith("fid"))
    assert shown == {"fidelity": "not measured"}


def test_a_document_too_short_to_be_measured_says_so(dropkv: Dropkv, document: Path, model: Path) -> None:
    document.write_text("a")
    done = dropkv("compress", document, "-o", document.with_suffix(".kv"), "--model", model, "--method", "full")
    assert done.code == 0 and "fidelity: not measured: the document is a single token" in done.err
    assert read_header(document.with_suffix(".kv")).metadata.fidelity is None


def test_fidelity_is_shown_by_compress_and_info(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    made = dropkv("compress", document, "-o", output, "--model", model, *SETTINGS)
    lines = made.err.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("  fidelity: "))
    said = [lines[start].removeprefix("  fidelity: "), lines[start + 1].strip()]
    shown = dropkv("info", output).out.splitlines()
    (start,) = (number for number, line in enumerate(shown) if line.startswith("fidelity"))
    assert said == [shown[start].removeprefix("fidelity").strip(), shown[start + 1].strip()]
    values = read_header(output).metadata.fidelity
    assert values is not None and f"{abs(values['nll'] - values['nll_full']):.2f} nats" in said[1]


def test_the_summary_goes_to_standard_error(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    result = dropkv("compress", document, "-o", output, "--model", model, "--budget", "64", "--observe", "tail")
    assert (result.code, result.out) == (0, "")
    budget = read_header(output).metadata.budget
    assert (budget.asked, budget.kept) == (64, 64)
    assert f"{document} -> {output}" in result.err
    assert "64 entries kept per KV head" in result.err and "peak memory" in result.err


@pytest.mark.parametrize(("budget", "kept"), [("1.0", None), ("40", 40)])
def test_the_decimal_point_tells_share_from_count(
    dropkv: Dropkv, document: Path, model: Path, budget: str, kept: int | None
) -> None:
    output = document.with_suffix(".kv")
    done = dropkv("compress", document, "-o", output, "--model", model, "--budget", budget, "--observe", "tail")
    assert done.code == 0, done.err
    metadata = read_header(output).metadata
    assert metadata.budget.kept == (kept or metadata.document.tokens)


def test_settings_reach_the_file(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    done = dropkv(
        "compress", document, "-o", output, "--model", model, "--budget", "0.5", "--method", "dropkv", "--observe",
        "tail", "--window", "5", "--pool", "3", "--system", "You are a harbour clerk.", "--no-tokens",
    )  # fmt: skip
    assert done.code == 0, done.err
    metadata, contents = read_header(output).metadata, read_file(output)
    assert contents.tokens is None
    assert metadata.method["name"] == "dropkv" and metadata.method["pool"]["size"] == 3
    assert metadata.observer["name"] == "tail" and metadata.observer["window"] == 5
    assert metadata.tokenizer.system == "You are a harbour clerk."
    assert metadata.document.name == "harbour.txt"


def test_standard_input_gives_the_same_entries_as_the_file(
    dropkv: Dropkv, document: Path, model: Path, kv: Path
) -> None:
    output = document.with_name("piped.kv")
    piped = dropkv("compress", "-", "-o", output, "--model", model, *SETTINGS, stdin=b"\xef\xbb\xbf" + TEXT.encode())
    assert piped.code == 0, piped.err
    for ours, theirs in zip(read_file(output).layers, read_file(kv).layers, strict=True):
        assert ours.positions.equal(theirs.positions) and ours.keys.equal(theirs.keys)
    assert read_header(output).metadata.document.name == "stdin"


def test_a_folder_takes_one_file_per_document_and_failures_do_not_stop_the_rest(
    dropkv: Dropkv, tmp_path: Path, model: Path
) -> None:
    for name, text in {"one.txt": TEXT, "two.md": TEXT + "More.", "empty.txt": " \n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "long.txt").write_text(TEXT * 40)
    (tmp_path / "taken.txt").write_text(TEXT)
    out = tmp_path / "out"
    out.mkdir()
    (out / "taken.kv").write_bytes(b"precious")
    names = ["one.txt", "empty.txt", "missing.txt", "long.txt", "taken.txt", "two.md"]
    result = dropkv(
        "compress", *(tmp_path / name for name in names), "-o", f"{out}/", "--model", model, *SETTINGS, "--json"
    )
    assert result.code == 1
    good = [record for record in result.records if "error" not in record]
    assert [record["file"] for record in good] == [str(out / "one.kv"), str(out / "two.kv")]
    assert [record["seconds"]["load"] > 0 for record in good] == [True, False]
    bad = {record["document"]: record for record in result.records if "error" in record}
    assert set(bad) == {str(tmp_path / name) for name in ("empty.txt", "missing.txt", "long.txt", "taken.txt")}
    assert bad[str(tmp_path / "long.txt")]["file"] == str(out / "long.kv")
    assert "512 positions" in bad[str(tmp_path / "long.txt")]["error"]
    assert all(set(record) == {"file", "document", "error", "exit"} for record in bad.values())
    assert sorted(path.name for path in out.iterdir()) == ["one.kv", "taken.kv", "two.kv"]
    assert (out / "taken.kv").read_bytes() == b"precious"
    lines = result.err.splitlines()
    assert len(lines) == 4 and all(line.startswith("dropkv: ") for line in lines)
    for name in ("empty.txt", "missing.txt", "long.txt", "taken"):
        assert sum(name in line for line in lines) == 1, (name, lines)


def test_a_folder_stands_for_the_texts_in_it(dropkv: Dropkv, tmp_path: Path, model: Path) -> None:
    notes = tmp_path / "notes"
    (notes / "deeper").mkdir(parents=True)
    for name in ("b.md", "a.txt", "c.TXT", ".hidden.txt", "d.py", "deeper/e.txt"):
        (notes / name).write_text(TEXT)
    output = f"{tmp_path}/made/for/this/"
    arguments = ("compress", notes, "-o", output, "--model", model, *SETTINGS)
    (notes / "broken.md").write_bytes(b"\xff\xfe")
    estimated = dropkv(*arguments, "--dry-run", "--json")
    assert not (tmp_path / "made").exists() and estimated.code == 1
    done = dropkv(*arguments, "--json")
    assert done.code == 1 and [Path(r["document"]).name for r in done.records] == [
        "broken.md",
        "a.txt",
        "b.md",
        "c.TXT",
    ]
    assert sorted(path.name for path in Path(output).iterdir()) == ["a.kv", "b.kv", "c.kv"]
    again = dropkv(*arguments, "--force")
    assert re.search(r"^3 files written, [\d.]+ KiB in all, 1 failed$", again.err.splitlines()[-1])
    sizes = [record["file_bytes"] for record in estimated.records if "file_bytes" in record]
    assert len(sizes) == 3 and all(record["available_memory_bytes"] > 1 << 20 for record in estimated.records[1:])
    dry = dropkv("compress", notes, "--model", model, *SETTINGS, "--dry-run").err.splitlines()
    assert re.search(r"^3 files would be written, about [\d.]+ KiB in all, 1 failed$", dry[-1])
    assert sum("memory needed, " in line and "available" in line for line in dry) == 3


def test_documents_that_would_become_one_file_fail_and_leave_the_rest_alone(
    dropkv: Dropkv, document: Path, model: Path
) -> None:
    notes, out = document.parent, document.parent / "kv"
    for name in ("note.txt", "note.md", "note.markdown"):
        (notes / name).write_text(TEXT)
    arguments = ("compress", notes, "-o", f"{out}/", "--model", model, "--no-fidelity", *SETTINGS)
    made = dropkv(*arguments, "--json")
    assert made.code == 1 and sorted(os.listdir(out)) == ["harbour.kv"]
    failed = {record["document"]: record for record in made.records if "error" in record}
    assert sorted(failed) == [str(notes / name) for name in ("note.markdown", "note.md", "note.txt")]
    assert failed[str(notes / "note.md")] == {
        "file": str(out / "note.kv"),
        "document": str(notes / "note.md"),
        "error": f"{notes}/note.md: would become {out}/note.kv, as {notes}/note.markdown and others would: do it apart, "
        f"with -o and a name of its own",
        "exit": 1,
    }
    (notes / "note.markdown").unlink()
    (notes / "harbour.txt").unlink()
    alone = dropkv(*arguments)  # nothing is left to do, so no model is loaded
    assert alone.code == 1 and alone.err.splitlines() == [
        f"dropkv: {notes}/{one}: would become {out}/note.kv, as {notes}/{other} would: do it apart, with -o and a name of its own"
        for one, other in (("note.md", "note.txt"), ("note.txt", "note.md"))
    ]


def test_a_folder_without_texts_or_with_two_of_a_name(dropkv: Dropkv, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2\n")
    dropkv("compress", tmp_path, "-o", f"{tmp_path}/").failed_with(1, "no .txt, .text, .md or .markdown file")
    for name in ("note.txt", "note.md"):
        (tmp_path / name).write_text(TEXT)
    dropkv("compress", tmp_path, "-o", tmp_path / "a.kv").failed_with(2, "2 documents", "a.kv/")
    dropkv("compress", tmp_path, tmp_path / "note.md", "-o", f"{tmp_path}/").failed_with(2, "given twice")
    assert len(list(tmp_path.iterdir())) == 3


def test_any_failure_of_one_document_leaves_the_others_alone(
    dropkv: Dropkv, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dropkv import compression

    def failing(model: Any, document: Any, settings: Any, **options: Any) -> Any:
        if document.name == "huge.txt":
            raise MemoryError
        if document.name == "odd.txt":
            raise ValueError("odd\nindeed")
        return original(model, document, settings, **options)

    original = compression.compress_document
    monkeypatch.setattr(compression, "compress_document", failing)
    for name in ("huge.txt", "odd.txt", "plain.txt"):
        (tmp_path / name).write_text(TEXT)
    result = dropkv("compress", tmp_path, "-o", tmp_path, "--model", model, *SETTINGS)
    assert (result.code, (tmp_path / "plain.kv").exists()) == (1, True)
    lines = [line for line in result.err.splitlines() if line.startswith("dropkv: ")]
    assert "huge.txt: out of memory: close other programs" in lines[0]
    assert "odd.txt: unexpected ValueError: odd; run it again with DROPKV_DEBUG=1" in lines[1] and len(lines) == 2


@pytest.mark.parametrize(
    ("template", "system", "code", "word"),
    [
        ("CHATML", "Stop.<|im_end|>", 2, "holds <|im_end|>, a special token"),
        ("CHATML", "<|endoftext|>", 2, "holds <|endoftext|>, a special token"),
        ("NO_SYSTEM", "You are terse.", 1, "takes no system text; leave --system out"),
        ("DROPS_SYSTEM", "You are terse.", 1, "drops the system text; leave --system out"),
    ],
)
def test_a_system_text_that_the_template_cannot_take_is_one_line_for_all_documents(
    dropkv: Dropkv, tmp_path: Path, template: str, system: str, code: int, word: str
) -> None:
    from tests import tiny

    folder = tmp_path / "model"
    tiny.network().save_pretrained(folder)
    tiny.tokenizer(getattr(tiny, template)).save_pretrained(folder)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(TEXT)
    arguments = ("compress", tmp_path, "-o", f"{tmp_path}/out/", "--model", folder, *SETTINGS)
    dropkv(*arguments, "--system", system).failed_with(code, word)
    assert not (tmp_path / "out").exists()


def test_one_document_into_a_folder(dropkv: Dropkv, document: Path, model: Path) -> None:
    done = dropkv("compress", document, "-o", document.parent, "--model", model, *SETTINGS)
    assert done.code == 0, done.err
    assert read_header(document.parent / "harbour.kv").metadata.document.name == "harbour.txt"


def test_dry_run_writes_nothing_and_tells_the_sizes(dropkv: Dropkv, document: Path, model: Path, kv: Path) -> None:
    arguments = ("compress", document, "--model", model, *SETTINGS, "--dry-run")
    (record,) = dropkv(*arguments, "--json").records
    metadata = read_header(kv).metadata
    assert record["dry_run"] is True and record["file"] is None
    assert record["document_tokens"] == metadata.document.tokens
    assert record["kept_entries"] == sum(layer.entries for layer in metadata.layers)
    assert 0 <= kv.stat().st_size - record["file_bytes"] < 20_000  # the header is not estimated
    people = dropkv(*arguments)
    assert (people.code, people.out) == (0, "") and "nothing written" in people.err
    assert sorted(document.parent.iterdir()) == [kv, document]


def test_the_same_command_writes_the_same_bytes(dropkv: Dropkv, document: Path, model: Path, kv: Path) -> None:
    again = document.with_name("again.kv")
    assert dropkv("compress", document, "-o", again, "--model", model, *SETTINGS).code == 0
    assert again.read_bytes() == kv.read_bytes()


BAD = {
    "empty": (b"", 1, ["is empty"]),
    "blank": (b" \r\n\t", 1, ["white space"]),
    "pdf": (b"%PDF-1.7 x", 1, ["PDF", "pdftotext"]),
    "epub": (b"PK\x03\x04" + b"x" * 26 + b"mimetypeapplication/epub+zip", 1, ["EPUB", "pandoc"]),
    "latin-1": ("Größe".encode("latin-1"), 1, ["UTF-8", "iconv"]),
    "binary": (b"ab\0cd", 1, ["binary"]),
    "too long": (TEXT.encode() * 40, 1, ["512 positions", "--truncate"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_documents_leave_the_old_file_alone(dropkv: Dropkv, tmp_path: Path, model: Path, name: str) -> None:
    content, code, words = BAD[name]
    document, output = tmp_path / "bad.txt", tmp_path / "bad.kv"
    document.write_bytes(content)
    output.write_bytes(b"precious")
    result = dropkv("compress", document, "-o", output, "--model", model, *SETTINGS, "--force")
    result.failed_with(code, "bad.txt", *words)
    assert output.read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == [output, document]


def test_truncate_cuts_what_does_not_fit(dropkv: Dropkv, tmp_path: Path, model: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 40)
    done = dropkv(
        "compress", tmp_path / "long.txt", "-o", tmp_path / "long.kv", "--model", model, *SETTINGS, "--truncate"
    )
    assert done.code == 0, done.err
    assert 300 < read_header(tmp_path / "long.kv").metadata.document.tokens < 512


def test_what_truncate_cut_is_said(dropkv: Dropkv, tmp_path: Path, model: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 40)
    arguments = ("compress", tmp_path / "long.txt", "-o", tmp_path / "long.kv", "--model", model, *SETTINGS)
    for more in (["--truncate", "--force"], ["--truncate", "--force", "--dry-run"]):
        (record,) = dropkv(*arguments, *more, "--json").records
        read, whole = record["document_tokens"], record["truncated_from"]
        assert read < 512 < whole
        assert f"  cut: the first {read} of {whole:,} tokens were read (--truncate)\n" in dropkv(*arguments, *more).err


def test_a_model_whose_layers_all_slide_says_that_the_budget_is_not_used(
    dropkv: Dropkv, document: Path, make_model: Callable[..., Path]
) -> None:
    folder = make_model(family="mistral", sliding_window=24)
    output = document.with_suffix(".kv")
    arguments = ("compress", document, "-o", output, "--model", folder, *SETTINGS)
    for more in ([], ["--force", "--dry-run"]):
        done = dropkv(*arguments, *more)
        assert done.code == 0, done.err
        assert f"note: --budget and --method are not used, all layers of {folder.name} slide" in done.err
        assert "the last window of each layer kept" in done.err and "per KV head" not in done.err
    metadata = read_header(output).metadata
    assert {layer.entries for layer in metadata.layers} == {24 * metadata.layers[0].kv_heads}
    assert metadata.fidelity is not None and metadata.fidelity["kept_information"] in (None, 1.0)
    assert "not used: all layers slide" in dropkv("info", output).out


def test_options_that_change_nothing_are_said(dropkv: Dropkv, document: Path, model: Path) -> None:
    arguments = ("compress", document, "--model", model, "--dry-run", "--json")
    common = ("--chunk", "32", "--budget", "0.5")
    assert dropkv(*arguments, *common).err == ""
    assert dropkv(*arguments, "--method", "full", "--chunk", "32").err == ""
    full = dropkv(*arguments, "--method", "full", "--window", "4", *common)
    assert full.code == 0
    assert [line.split(" is not used")[0] for line in full.err.splitlines()] == ["note: --budget", "note: --window"]
    tail = dropkv(*arguments, "--observe", "tail", "--window", "4", *common)
    assert tail.err == "note: --chunk is not used with --observe tail, which replays nothing\n"


def test_a_file_larger_than_the_cache_is_called_so(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    done = dropkv("compress", document, "-o", output, "--model", model, "--method", "full", "--chunk", "32")
    assert done.code == 0 and " % larger\n" in done.err and "smaller" not in done.err
    assert " % larger\n" in dropkv("info", output).out


def test_a_name_that_is_no_text(dropkv: Dropkv, document: Path, model: Path) -> None:
    odd = document.rename(document.with_name("od\udcffd.txt"))
    done = dropkv("compress", odd, "missing.txt", "-o", document.parent, "--model", model, *SETTINGS, "--json")
    assert "\\udc" not in done.out
    assert [record["document"] for record in done.records] == ["missing.txt", str(odd).replace("\udcff", "\ufffd")]
    assert (document.parent / "od\udcffd.kv").exists()


def test_fewer_than_the_forced_entries(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    dropkv("compress", document, "-o", output, "--model", model, "--budget", "1").failed_with(2, "budget 1")
    assert not output.exists()


def test_places_that_cannot_be_written(dropkv: Dropkv, document: Path, kv: Path) -> None:
    dropkv("compress", document, "-o", kv, "--model", "unused").failed_with(1, "harbour.kv", "exists", "--force")
    dropkv("compress", document, "-o", document.parent / "no" / "a.kv").failed_with(1, "folder", "mkdir -p")
    dropkv("compress", document, "-o", kv / "a.kv").failed_with(1, "harbour.kv is no folder", "choose another name")
    dropkv("compress", document, "-o", kv / "no" / "a.kv").failed_with(1, "harbour.kv is no folder")
    dropkv("compress", document, "-o", f"{kv}/no/").failed_with(1, "harbour.kv is no folder")
    long = "a" * 300
    dropkv("compress", document, "-o", document.parent / f"{long}.kv").failed_with(1, "name is too long", "shorter")
    dropkv("compress", document, "-o", f"{document.parent / long}/").failed_with(1, "name is too long", "shorter")
    dropkv("compress", document, "-o", "/dev/null", "--force").failed_with(1, "/dev/null", "-o")
    dropkv("compress", "missing.txt", "-o", document.parent / "a.kv").failed_with(1, "missing.txt", "no such file")
    assert sorted(document.parent.iterdir()) == [kv, document]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_without_permission(dropkv: Dropkv, document: Path) -> None:
    locked = document.parent / "locked"
    locked.mkdir(mode=0o500)
    dropkv("compress", document, "-o", locked / "a.kv").failed_with(1, "not writable", "-o")
    locked.chmod(0)
    dropkv("compress", locked / "a.txt", "-o", document.parent / "a.kv").failed_with(1, "permission denied")


def test_a_full_disk_leaves_the_old_file_alone(dropkv: Dropkv, document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    output.write_bytes(b"precious")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # writing more fails, as on a full disk
    try:
        result = dropkv("compress", document, "-o", output, "--model", model, *SETTINGS, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    result.failed_with(1, "harbour.kv")
    assert output.read_bytes() == b"precious"
    assert sorted(document.parent.iterdir()) == [output, document]


def test_an_unknown_model_is_one_line(dropkv: Dropkv, document: Path, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    result = dropkv("compress", document, "-o", document.with_suffix(".kv"), "--model", tmp_path / "hollow")
    result.failed_with(1, "hollow")
    assert not document.with_suffix(".kv").exists()


def test_ctrl_c_in_the_middle_leaves_the_old_file_alone(
    document: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    patient = make_model(max_position_embeddings=200_000)
    out = tmp_path / "out"
    out.mkdir()
    (out / "long.kv").write_bytes(b"precious")
    (tmp_path / "long.txt").write_text(TEXT * 300)
    process = start_dropkv(
        "compress", document, tmp_path / "long.txt", "-o", out, "--model", patient, *SETTINGS, "--force",
        "--json",        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout and process.stderr
    assert b"harbour.kv" in process.stdout.readline()  # the first document is done, the long one has begun
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out_rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out_rest == b"" and b"Traceback" not in err
    assert (out / "long.kv").read_bytes() == b"precious"
    assert sorted(path.name for path in out.iterdir()) == ["harbour.kv", "long.kv"]
