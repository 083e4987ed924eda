"""benchmarks/kv_dtype.py measures what compress, save and query do: the same entries, the same answers, the same bytes."""

from __future__ import annotations

import argparse
import json

import torch

import dropkv
from benchmarks import kv_dtype
from dropkv.bench.asked import question_tokens
from dropkv.bench.tasks import Question, Sample
from dropkv.cache import Tail
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
GIVEN = argparse.Namespace(
    method="adadropkv", budgets="0.3,0.5", kv_dtypes="same,int8,fp8,int4", zstd=3, seed=0, tokens=0
)


def test_cells_are_the_files_of_compress(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_dtype, "CHUNK", 40)
    model = tiny.model("llama")
    bench = kv_dtype.Bench(model, GIVEN)
    asked = "What is the code?"
    texts = (TEXT, TEXT.replace("ship is Evergreen", "Evergreen is ship"))
    samples = [
        Sample("noise", 0, number, tuple(bench.seam.document_ids(text)), (Question(asked, "", ("4711",), 12),))
        for number, text in enumerate(texts)
    ]
    found = bench.read(samples)
    for sample, layers, text in zip(samples, found, texts, strict=True):
        stored = {one.cell: one for one in bench.store(sample, kv_dtype.merge(layers), bench.cells)}
        answers = dict(zip(stored, bench.answer(list(stored.values())), strict=True))
        for cell, one in stored.items():
            made = dropkv.compress(
                text,
                model=model,
                method=GIVEN.method,
                budget=cell.budget,
                chunk=40,
                kv_dtype=cell.kv_dtype,
                name="noise",
            )
            prefix = made.session().prefix
            assert [layer.positions.tolist() for layer in prefix.layers] == [
                positions.tolist() for positions in one.restored.positions.split([b[-1] for b in prefix.bounds])
            ]
            whole = (
                torch.cat([layer.keys for layer in prefix.layers]),
                torch.cat([layer.values for layer in prefix.layers]),
            )
            # Documents that are read together are added up in another order: equal but for that.
            torch.testing.assert_close(
                one.restored.keys, whole[0], rtol=0, atol=2e-2 if cell.kv_dtype != "same" else 1e-4
            )
            torch.testing.assert_close(
                one.restored.values, whole[1], rtol=0, atol=0.3 if cell.kv_dtype == "int4" else 2e-2
            )
            sizes = bench.file_bytes(sample, layers, cell, tmp_path)
            assert abs(made.save(tmp_path / "a.kv", overwrite=True) - sizes["none"]) < 1500  # headers differ
            assert sizes["3"] < sizes["none"]
            if cell.kv_dtype == "same":
                tokens = greedy(made.session(), question_tokens(bench.seam, sample.questions[0]), 6)
                assert answers[cell].startswith(model.tokenizer.decode(tokens, skip_special_tokens=True))


def greedy(session, ids, count):
    """The first tokens of an answer, one forward call for each."""
    tokens = []
    while len(tokens) < count:
        token = int(session.forward([*ids, *tokens], Tail()).argmax())
        if token in session.model.stop_ids:
            break
        tokens.append(token)
    return tokens


def test_lines_of_other_runs_and_cut_ones_are_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    good = {
        "method": "adadropkv",
        "tokens": 0,
        "seed": 0,
        "task": "noise",
        "sample": 0,
        "cell": "0.5 same",
        "score": 1.0,
    }
    lines = [good, {**good, "seed": 1}, {**good, "cell": "0.5 int8", "score": 0.0}, {**good, "method": "snapkv"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"method": "ada')
    found = kv_dtype.read_lines(path, GIVEN)
    assert [line["cell"] for line in found] == ["0.5 same", "0.5 int8"]
    found[0]["file_bytes"], found[0]["tokens"] = {"none": 3000, "3": 1500}, 3
    cells = [kv_dtype.Cell(0.5, "same"), kv_dtype.Cell(0.5, "int8"), kv_dtype.Cell(0.5, "int4")]
    table = kv_dtype.table(found, ["noise"], cells, 3).splitlines()
    assert table[2] == "| 50 % | same | 1,000 | 500 | 100.0 | 100.0 | - |"
    assert table[3].startswith("| 50 % | int8 | - | - | 0.0 | 0.0 | -100.0 (")
    assert len(table) == 4
