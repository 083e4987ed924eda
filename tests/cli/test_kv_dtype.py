"""`--kv-dtype` and `--zstd`: the files they make, and what info, verify and --json say of them."""

from __future__ import annotations

import pytest

from tests.cli.conftest import SETTINGS, Dropkv


@pytest.mark.parametrize("kind", ["same", "fp8", "int8", "int4"])
def test_compress_info_verify_and_query(dropkv: Dropkv, document, model, tmp_path, kind):
    path = tmp_path / "a.kv"
    options = ("--model", model, *SETTINGS, "--kv-dtype", kind, "--zstd", "3")
    made = dropkv("compress", document, "-o", path, *options, "--json")
    assert made.code == 0, made.err
    (record,) = made.records
    assert (record["kv_dtype"], record["zstd"], record["file_bytes"]) == (kind, 3, path.stat().st_size)
    (about,) = dropkv("info", path, "--json").records
    assert (about["format_version"], about["oldest_reader"], about["zstd"], about["dtype"]) == (2, 2, 3, "float32")
    assert (about["quantization"] or {"kind": "same"})["kind"] == kind
    stored = about["stored"]
    assert sum(part["stored"] for part in stored.values()) < sum(part["raw"] for part in stored.values())
    assert ("grids" in stored) == (kind != "same")
    shown = dropkv("info", path).out
    assert ("float32, as it was computed" if kind == "same" else f"{kind} from float32") in shown
    assert "zstd level 3 in " in shown and "format version 2" in shown
    assert dropkv("verify", path).out.startswith("ok: ")
    asked = dropkv("query", path, "Who kept the ledger?", "--model", model, "--max-new-tokens", "3", "--json")
    assert asked.code == 0 and asked.records[0]["generated_tokens"] > 0


def test_info_of_a_plain_file(dropkv: Dropkv, kv):
    assert "stored      float32, as it was computed; not compressed\n" in dropkv("info", kv).out
    (about,) = dropkv("info", kv, "--json").records
    assert (about["zstd"], about["quantization"], about["format_version"]) == (None, None, 1)


def test_a_dry_run_counts_the_stored_type(dropkv: Dropkv, document, model):
    sizes = {
        kind: dropkv(
            "compress", document, "--dry-run", "--model", model, *SETTINGS, "--kv-dtype", kind, "--json"
        ).records[0]["file_bytes"]
        for kind in ("same", "int8", "int4")
    }
    assert sizes["int4"] < sizes["int8"] < sizes["same"]


def test_info_names_the_parts_of_the_default_method(dropkv: Dropkv, document, model, tmp_path):
    """A pool is its kind and size; how heads come to keep the same tokens has more parts, which say their names."""
    path = tmp_path / "a.kv"
    assert dropkv("compress", document, "-o", path, "--model", model, *SETTINGS).code == 0
    (line,) = [line for line in dropkv("info", path).out.splitlines() if line.startswith("method")]
    assert "auto, " in line and "pool=avg 11, " in line
    assert line.endswith("together=(balance 1.0, heads 0.27, scope so far)")
