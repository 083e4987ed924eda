"""What quantising entries costs and saves: bytes per document token and right answers for budget x kv-dtype x zstd.

    python benchmarks/kv_dtype.py -o FOLDER [--samples 64] [--tasks noise,prose,four-keys] [--budgets 0.05,0.1,0.25,0.5,1.0]
                                  [--kv-dtypes same,int8,fp8,int4] [--zstd 3] [--tokens 1536] [--seed 1] [--device cuda] [--batch 8]

Each document is read once, question not known, and pruned once at the largest budget; smaller budgets are the first entries of each head, as in
a file. Every cell is quantised by itself, as `compress --kv-dtype` at that budget does, restored as `query` does, and asked the document's
question, greedy. Bytes are those of real files, with and without zstd, of the first `--files` documents of each task.

FOLDER/lines.jsonl gets one line for every document and cell; a run goes on where the last one stopped. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dropkv import load_model, methods
from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.asked import question_tokens
from dropkv.bench.stats import Key, difference, estimate
from dropkv.bench.survey import SLICE, Collector
from dropkv.bench.tasks import Sample, Task, get
from dropkv.budgets import kept_count
from dropkv.identity import describe
from dropkv.keeper import take, trim
from dropkv.methods import Method
from dropkv.methods._layer import LayerScores
from dropkv.models import Model
from dropkv.observers.replay import plan_replays
from dropkv.prefill import read_together
from dropkv.prompts import Seam
from dropkv.words import Words
from formats import BudgetInfo, DocumentInfo, LayerEntries, LayerInfo, Metadata, Quantization, write_file
from formats.quantized import describe as describe_codes
from formats.quantized import quantize, restore

CHUNK = 512
MAX_NEW_TOKENS = 32
ROW_TOKENS = {
    "cpu": 400_000,
    "cuda": 4_000_000,
}  # entries per head that all answers of a batch see together: bounds the memory


@dataclass(frozen=True)
class Cell:
    """One way to store a document."""

    budget: float
    kv_dtype: str

    @property
    def name(self) -> str:
        return f"{self.budget:g} {self.kv_dtype}"


@dataclass(frozen=True)
class Stored:
    """One document in one cell: its entries as a file has them, and what they restore to. The heads of all layers are one layer's."""

    sample: Sample
    cell: Cell
    kept: int
    coded: LayerEntries
    restored: LayerEntries


class Bench:
    """A model, its method as replay leaves it, and what is asked of every document."""

    def __init__(self, model: Model, given: argparse.Namespace) -> None:
        self.model = model
        self.given = given
        self.seam = Seam.of(model.tokenizer, name=model.id)
        self.head = len(self.seam.head_ids)
        self.method: Method = methods.get(given.method).under_replay(self.head)
        self.budgets = sorted({float(budget) for budget in given.budgets.split(",")}, reverse=True)
        self.cells = [Cell(budget, kind) for budget in self.budgets for kind in given.kv_dtypes.split(",")]
        if not self.method.nested:
            sys.exit(f"{given.method}: the entries of a smaller budget are no part of those of a larger one")
        if any(layer != model.geometry[0] or layer.kind != "full" for layer in model.geometry):
            sys.exit(f"{model.id}: its layers differ or slide, which this benchmark does not measure")

    def read(self, samples: Sequence[Sample]) -> list[list[LayerEntries]]:
        """The entries of each document at the largest budget, layer by layer in file order; one prefill for all."""
        documents = [[*self.seam.head_ids, *sample.document_ids] for sample in samples]
        observations = [plan_replays(self.seam, document, self.head, CHUNK) for document in documents]
        collector = Collector([self.method], self.model.geometry)
        seeds = [self.given.seed + sample.index for sample in samples]
        read_together(self.model, documents, observations, collector, seeds=seeds, slice_tokens=SLICE)
        found = []
        for number in range(len(samples)):
            own = [part_of(layer[0].raw, number, len(samples)) for layer in collector.scores]
            beside = [layer[0].beside for layer in collector.scores]
            scores = [
                LayerScores(raw, None if other is None else part_of(other, number, len(samples), dim=1))
                for raw, other in zip(own, beside, strict=True)
            ]
            words = Words.of(self.model.tokenizer, documents[number], self.model.device)
            chosen = self.method.choose(scores, self.budgets[0], words)
            found.append(
                [
                    take(part_of(k, number, len(samples)), part_of(v, number, len(samples)), kept, raw)
                    for k, v, kept, raw in zip(collector.keys, collector.values, chosen, own, strict=True)
                ]
            )
        return found

    def store(self, sample: Sample, merged: LayerEntries, cells: Sequence[Cell]) -> Iterator[Stored]:
        """A document in each of the cells; merged: its entries at the largest budget."""
        shape = self.model.geometry[0]
        for cell in cells:
            kept = self.kept(sample, cell.budget)
            smaller = trim(merged, admitted(merged, kept))
            if cell.kv_dtype == "same":
                yield Stored(sample, cell, kept, smaller, smaller)
                continue
            # Grids begin anew at every head, so it does not matter that one layer has them all.
            about = describe_codes(cell.kv_dtype, [smaller.offsets.tolist()])
            coded = quantize(smaller, about)
            whole = restore(coded, about, shape.d_k, shape.d_v, self.model.device, self.model.dtype)
            yield Stored(sample, cell, kept, coded, whole)

    def kept(self, sample: Sample, budget: float) -> int:
        """Entries per KV head that a budget keeps of a document."""
        n = self.head + len(sample.document_ids)
        return kept_count(budget, n, len(self.method.forced(n)))

    def answer(self, stored: Sequence[Stored]) -> list[str]:
        """The answers from some stored documents, all in one batch."""
        widest = max(int(one.restored.offsets.diff().max()) for one in stored)
        padded = [pad_heads(one.restored, widest) for one in stored]
        layers = len(self.model.geometry)
        keys, values, keep = (
            torch.stack([part[which].unflatten(0, (layers, -1)) for part in padded]) for which in range(3)
        )  # each [documents, layers, kv_heads, widest, ...]
        rows = [
            Row(place, tuple(question_tokens(self.seam, one.sample.questions[0])), keep[place])
            for place, one in enumerate(stored)
        ]
        starts = [self.head + len(one.sample.document_ids) for one in stored]
        answers = answer_rows(
            self.model, keys.unbind(1), values.unbind(1), rows, starts=starts, max_new_tokens=MAX_NEW_TOKENS
        )
        return [self.model.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]

    def file_bytes(self, sample: Sample, layers: Sequence[LayerEntries], cell: Cell, folder: Path) -> dict[str, int]:
        """Sizes of the files of a document in a cell, by zstd level; layers: its entries at the largest budget."""
        kept = self.kept(sample, cell.budget)
        stored = [trim(layer, admitted(layer, kept)) for layer in layers]
        quantization = None
        if cell.kv_dtype != "same":
            quantization = describe_codes(cell.kv_dtype, [layer.offsets.tolist() for layer in stored])
            stored = [quantize(layer, quantization) for layer in stored]
        about = self._metadata(sample, cell, kept, stored, quantization)
        ids = torch.tensor([*self.seam.head_ids, *sample.document_ids], dtype=torch.int32)
        path = folder / "file.kv"
        return {
            str(level or "none"): write_file(path, about, stored, ids, overwrite=True, zstd=level)
            for level in (None, self.given.zstd)
        }

    def _metadata(
        self, sample: Sample, cell: Cell, kept: int, stored: Sequence[LayerEntries], quantization: Quantization | None
    ) -> Metadata:
        model, tokenizer = describe(self.model, self.seam)
        n = self.head + len(sample.document_ids)
        layers = tuple(
            LayerInfo(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window, entries.positions.numel())
            for g, entries in zip(self.model.geometry, stored, strict=True)
        )
        return Metadata(
            writer="benchmarks/kv_dtype.py",
            model=model,
            tokenizer=tokenizer,
            document=DocumentInfo(sample.task, "0" * 64, n, self.head, n),
            method={"name": self.method.name},
            observer={"name": "replay", "chunk": CHUNK},
            budget=BudgetInfo(cell.budget, kept, self.method.rule, self.method.alpha, 0, 0, True),
            layers=layers,
            dtype=str(self.model.dtype).removeprefix("torch."),
            rope=dict(self.model.rope),
            fidelity=None,
            quantization=quantization,
        )


def merge(layers: Sequence[LayerEntries]) -> LayerEntries:
    """The heads of all layers as those of one."""
    counts = torch.cat([layer.offsets.diff() for layer in layers]).cumsum(0)
    offsets = torch.cat([counts.new_zeros(1), counts]).int()
    fields = ("keys", "values", "positions", "admit", "scores")
    joined = {field: torch.cat([getattr(layer, field) for layer in layers]) for field in fields}
    return LayerEntries(offsets=offsets, **joined)


def part_of(x: Tensor, number: int, documents: int, *, dim: int = 0) -> Tensor:
    """The KV heads of one of several documents that were read together."""
    heads = x.shape[dim] // documents
    return x.narrow(dim, number * heads, heads)


def admitted(layer: LayerEntries, kept: int) -> Tensor:
    """Entries of each head [kv_heads] that a budget of `kept` admits."""
    sizes = layer.offsets.long().diff()
    heads = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    return torch.bincount(heads[layer.admit <= kept], minlength=len(sizes))


def pad_heads(layer: LayerEntries, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [kv_heads, width, d] and which of them are there, bool [kv_heads, width]."""
    bounds = layer.offsets.long()
    line = torch.arange(width, device=bounds.device)
    keep = line < bounds.diff()[:, None]
    rows = torch.where(keep, bounds[:-1, None] + line, 0)
    return layer.keys[rows], layer.values[rows], keep


def run(bench: Bench, task: Task, lines: Path) -> None:
    """Measure every document and cell of a task that the lines do not hold yet."""
    given = bench.given
    done = {(line["sample"], line["cell"]) for line in read_lines(lines, given) if line["task"] == task.name}
    samples = task.samples(bench.model.tokenizer, given.tokens, given.samples, given.seed, head_tokens=bench.head)
    started, count = time.perf_counter(), 0
    todo = (s for s in samples if any((s.index, cell.name) not in done for cell in bench.cells))
    while batch := list(islice(todo, given.batch)):
        found = bench.read(batch)
        merged = [merge(layers) for layers in found]
        layers_of = {sample.index: layers for sample, layers in zip(batch, found, strict=True)}
        new: list[dict[str, Any]] = []
        with TemporaryDirectory() as folder:
            for budget in bench.budgets:
                cells = [cell for cell in bench.cells if cell.budget == budget]
                stored = [
                    one
                    for sample, whole in zip(batch, merged, strict=True)
                    for one in bench.store(sample, whole, cells)
                ]
                for part in parts(stored, max(1, int(ROW_TOKENS[bench.model.device.type] / (budget * given.tokens)))):
                    for one, text in zip(part, bench.answer(part), strict=True):
                        line = line_of(bench, task, one, text)
                        if one.sample.index < given.files:
                            line["file_bytes"] = bench.file_bytes(
                                one.sample, layers_of[one.sample.index], one.cell, Path(folder)
                            )
                        new.append(line)
        with open(lines, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in new if (line["sample"], line["cell"]) not in done)
        count += len(batch)
        rate = count / (time.perf_counter() - started)
        print(f"{task.name}: {count} documents, {rate:.2f} a second", file=sys.stderr, flush=True)


def line_of(bench: Bench, task: Task, one: Stored, text: str) -> dict[str, Any]:
    """What a document and a cell gave."""
    fields = ("keys", "values", "key_scales", "key_zeros", "value_scales", "value_zeros")
    tensors = [getattr(one.coded, field) for field in fields]
    return {
        "model": bench.model.id,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "method": bench.given.method,
        "task": task.name,
        "tokens": bench.given.tokens,
        "seed": bench.given.seed,
        "sample": one.sample.index,
        "cell": one.cell.name,
        "budget": one.cell.budget,
        "kv_dtype": one.cell.kv_dtype,
        "score": task.score(text, one.sample.questions[0]),
        "prediction": text,
        "answers": list(one.sample.questions[0].answers),
        "entries": one.coded.positions.numel(),
        "entry_bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
    }


def parts(items: Sequence[Stored], size: int) -> Iterator[Sequence[Stored]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def read_lines(path: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of this model, method, length and seed; a line that a killed run left unfinished is passed over."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if (line["method"], line["tokens"], line["seed"]) == (given.method, given.tokens, given.seed):
            found.append(line)
    return found


def table(lines: Sequence[dict[str, Any]], tasks: Sequence[str], cells: Sequence[Cell], zstd: int) -> str:
    """Markdown: bytes per document token, right answers by task and their mean, and the mean's distance from the same budget unquantised."""
    scores: dict[str, dict[Key, float]] = defaultdict(dict)
    sizes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["task"] in tasks:
            scores[line["cell"]][line["task"], line["sample"], 0] = line["score"]
            for level, size in line.get("file_bytes", {}).items():
                sizes[line["cell"]][level].append(size / line["tokens"])
    head = ["budget", "kv-dtype", "bytes/token", f"with zstd {zstd}", *tasks, "mean", "against same (95 %)"]
    rows = [head, ["---"] * len(head)]
    for cell in cells:
        own = scores[cell.name]
        if not own:
            continue
        by_task = [[score for key, score in own.items() if key[0] == task] for task in tasks]
        against = difference(own, scores[Cell(cell.budget, "same").name])
        rows.append(
            [
                f"{100 * cell.budget:g} %",
                cell.kv_dtype,
                *(
                    f"{sum(found) / len(found):,.0f}" if (found := sizes[cell.name][level]) else "-"
                    for level in ("none", str(zstd))
                ),
                *(f"{100 * sum(found) / len(found):.1f}" if found else "-" for found in by_task),
                f"{100 * estimate(own).mean:.1f}",
                "-"
                if against is None or cell.kv_dtype == "same"
                else f"{100 * against.mean:+.1f} ({100 * against.low:+.1f} to {100 * against.high:+.1f})",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--tasks", default="noise,prose,four-keys")
    options.add_argument("--budgets", default="0.05,0.1,0.25,0.5,1.0")
    options.add_argument("--kv-dtypes", default="same,int8,fp8,int4")
    options.add_argument("--zstd", type=int, default=3)
    options.add_argument("--tokens", type=int, default=1536)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--method", default="adadropkv")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument(
        "--batch", type=int, default=0, help="documents that are read together; 0: 8 on a GPU, 1 on a CPU"
    )
    options.add_argument(
        "--files", type=int, default=4, help="documents of each task whose files are written and measured"
    )
    given = options.parse_args()
    model = load_model(given.model, device=given.device, dtype=given.dtype)
    given.batch = given.batch or (8 if model.device.type == "cuda" else 1)
    bench = Bench(model, given)
    given.output.mkdir(parents=True, exist_ok=True)
    lines, tasks = given.output / "lines.jsonl", given.tasks.split(",")
    with torch.inference_mode():
        for name in tasks:
            run(bench, get(name), lines)
    found = read_lines(lines, given)
    where = torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU"
    print(
        f"{given.model}, {str(model.dtype).removeprefix('torch.')}, {where}; {given.method}, replay, question not known; "
        f"{given.tokens} tokens, {given.samples} documents a task, seed {given.seed}; right answers in percent\n"
    )
    print(table(found, tasks, bench.cells, given.zstd))


if __name__ == "__main__":
    main()
