"""Does the fidelity of a file tell whether questions to it are answered? Files are ranked by both.

    python benchmarks/fidelity.py [--documents 10] [--files replay:0.05,0.1,0.2,0.35,0.6 tail:0.2,0.6] [--seed 3] [--method NAME]
                                  [--model smollm2-135m]

Documents of 640 to 1,024 tokens with the facts of the task five-facts in four kinds of text by turns (Python's help texts, a story, one
paragraph over and over, a licence), five questions each, asked as the bench asks them (greedy). All budgets of a document and observer
come from one prefill, kept by the method that `dropkv compress` takes or another (--method). Printed are a line for each file; the rank
correlations (Spearman, ties share their mean rank) of every number that fidelity has with the share of right answers, over all files, over those
of one observer, and as the mean over the files of one budget and observer (which says what fidelity knows beyond the budget); and the accuracy
of the files between two marks of kept_information.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropkv import Sampling, load_model
from dropkv.bench.asked import question_tokens
from dropkv.bench.tasks import Question, Task, get
from dropkv.budgets import kept_count
from dropkv.cache import Prefix, Tail
from dropkv.compression import resolve_method
from dropkv.fidelity import compare, hold_out, predict, predict_alone
from dropkv.generate import Session, Stream
from dropkv.keeper import Keeper, Stands
from dropkv.methods import LayerContext, LayerScores
from dropkv.models import Model
from dropkv.observers import observe
from dropkv.prefill import read
from dropkv.prompts import Seam
from dropkv.settings import CompressSettings
from dropkv.words import Words

TASK = "five-facts"
LENGTHS = (640, 768, 896, 1024, 704, 832, 960)
REPEATED = "The tide came in and went out again. A boat was painted blue. The nets hung on the wall to dry. Nobody was in a hurry.\n"
ROOT = Path(__file__).parents[1]
MARKS = (0.0, 0.25, 0.5, 0.7, 0.85, 0.95, 0.99)


class Keepers:
    """A reader that keeps by one method at several budgets."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self.keepers = keepers
        self.methods = keepers[0].methods

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        for keeper in self.keepers:
            keeper.full(layer, context, scores)

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        for keeper in self.keepers:
            keeper.sliding(layer, k, v)


@dataclass(frozen=True)
class File:
    """What one file would hold and how it answers; accuracy: share of the questions."""

    document: int
    observer: str
    budget: float
    fidelity: dict[str, Any]
    accuracy: float

    def number(self, name: str) -> float:
        """A number of the fidelity, larger is better; lost is minus the nats lost per token."""
        values = self.fidelity
        if name == "lost":
            return float(values["nll_full"] - values["nll"])
        if name == "budget":
            return self.budget
        return float(values[name] or 0.0)


def files(
    model: Model, seam: Seam, task: Task, index: int, seed: int, cells: dict[str, list[float]], named: str | None
) -> Iterator[File]:
    """All files of one document; cells: the budgets of each observer; named: the method, None for the observer's own."""
    head = len(seam.head_ids)
    (sample,) = task.samples(model.tokenizer, LENGTHS[index % len(LENGTHS)], 1, 1000 * seed + index, head_tokens=head)
    ids = [*seam.head_ids, *sample.document_ids]
    held = hold_out(seam, ids, head, model.max_positions - len(ids))
    assert held is not None
    alone = None
    for observer, budgets in cells.items():
        settings = CompressSettings(observe=observer, method=named)
        method = resolve_method(settings, head)
        counts = [kept_count(budget, len(ids), len(method.forced(len(ids)))) for budget in budgets]
        words = Words.of(model.tokenizer, ids, model.device)
        observation = observe(settings, seam, ids, head)
        standing = None
        if method.reads_twice:
            stands = Stands(len(ids), told="told" in method.needs)
            read(model, ids, observation, stands)
            standing = stands.standing()
        keepers = [Keeper(method, count, len(ids), model.geometry, words, standing) for count in counts]
        reading = read(model, ids, observation, Keepers(keepers), held=held)
        assert reading.predictions is not None
        for budget, keeper in zip(budgets, keepers, strict=True):
            prefix = Prefix(keeper.finish(), model.geometry, len(ids))
            alone = alone or predict_alone(model, prefix, ids[:head], held)
            fidelity = compare(held, reading.predictions, predict(model, prefix, held), alone)
            assert fidelity is not None
            session = Session(model, seam, prefix)
            right = [task.score(answer(session, question), question) for question in sample.questions]
            yield File(index, observer, budget, fidelity, sum(right) / len(right))


def answer(session: Session, question: Question) -> str:
    """The start of the greedy answer, long enough for a number."""
    tokens = question_tokens(session.seam, question)
    return Stream(session, Tail(), question.text, tokens, Sampling(max_new_tokens=10), []).result().text


def ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 0; equal values share the mean of theirs."""
    line = torch.tensor(values, dtype=torch.float64)
    below = (line.unsqueeze(0) < line.unsqueeze(1)).sum(1)
    equal = (line.unsqueeze(0) == line.unsqueeze(1)).sum(1)
    return below + (equal - 1) / 2


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; nan where one side is all the same."""
    if len(first) < 2:
        return float("nan")
    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


def report(made: Sequence[File]) -> None:
    """Print the tables."""
    names = ("kept_information", "lost", "still_right", "right", "agreement", "budget")
    accuracy = [file.accuracy for file in made]
    groups: dict[tuple[str, float], list[File]] = defaultdict(list)
    for file in made:
        groups[file.observer, file.budget].append(file)
    print(f"\n{'observer':10}{'budget':>8}{'kept_information':>18}{'lost nats':>11}{'right answers':>15}")
    for (observer, budget), own in groups.items():
        means = [
            sum(values) / len(own)
            for values in zip(
                *((f.number("kept_information"), -f.number("lost"), f.accuracy) for f in own), strict=True
            )
        ]
        print(f"{observer:10}{budget:8.2f}{means[0]:18.3f}{means[1]:11.2f}{means[2]:15.2f}")
    observers = sorted({file.observer for file in made})
    head = "".join(f"{name:>12}" for name in ["all", *observers])
    print(f"\nSpearman{'':12}{head}{'one budget':>12}")
    for name in names:
        cells = [spearman([file.number(name) for file in made], accuracy)]
        for observer in observers:
            own = [file for file in made if file.observer == observer]
            cells.append(spearman([file.number(name) for file in own], [file.accuracy for file in own]))
        inner = [spearman([f.number(name) for f in own], [f.accuracy for f in own]) for own in groups.values()]
        known = [value for value in inner if value == value]
        cells.append(sum(known) / len(known) if known else float("nan"))
        print(f"{name:20}" + "".join(f"{cell:12.2f}" for cell in cells))
    print(f"\n{'kept_information':20}{'files':>8}{'right answers':>15}{'lowest':>9}")
    for low, high in zip((-9.0, *MARKS), (*MARKS, 9.0), strict=True):
        own = [file.accuracy for file in made if low <= file.number("kept_information") < high]
        if own:
            print(f"{max(low, 0):8.2f} to {min(high, 1):<8.2f}{len(own):8}{sum(own) / len(own):15.2f}{min(own):9.2f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--documents", type=int, default=10)
    options.add_argument("--files", nargs="+", default=["replay:0.05,0.1,0.2,0.35,0.6", "tail:0.2,0.6"])
    options.add_argument("--seed", type=int, default=3)
    options.add_argument("--method", help="of all files; left out, what compress takes with the observer")
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    model = load_model(given.model)
    seam = Seam.of(model.tokenizer, name=model.id)
    cells = {}
    for part in given.files:
        observer, _, budgets = part.partition(":")
        cells[observer] = [float(budget) for budget in budgets.split(",")]
    made: list[File] = []
    print(
        f"{given.model}, {TASK}, {given.documents} documents, seed {given.seed}, {given.method or 'the default methods'}"
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder) / "repeated.txt"
        repeated.write_text(REPEATED * 100)
        essays = (None, ROOT / "examples/dark-lamp.md", repeated, ROOT / "LICENSE")
        tasks = [get(TASK, essay=None if essay is None else str(essay)) for essay in essays]
        for index in range(given.documents):
            for file in files(model, seam, tasks[index % len(tasks)], index, given.seed, cells, given.method):
                made.append(file)
                numbers = " ".join(f"{name} {value}" for name, value in file.fidelity.items() if name != "kind")
                print(
                    f"{file.document} {file.observer} {file.budget}: accuracy {file.accuracy:.1f}, {numbers}",
                    flush=True,
                )
    report(made)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
