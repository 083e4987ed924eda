"""What can be done after the selection of `auto`: its entries changed, weighed, selected again, or looked through when a question comes.

    python -m benchmarks.question_free.after -o FOLDER [--tasks noise,prose,four-keys] [--samples 24] [--seed 2] [--tokens 1536]
        [--budgets 0.05,0.1] [--file 0.25] [--model smollm2-135m] [--deadline SECONDS]

One reading of a document serves all rows; they are answered from the entries themselves, on a CPU. FOLDER/lines.jsonl is what
benchmarks/question_free/packed.py packs; a run goes on where one stopped. Rows:

stream 0.27: `auto`, nothing changed. values merged W: evicted values averaged into the nearest kept one of their head, with a weight of W
against 1; by score: as much as their score is of that one's. keys and values merged: keys as well, turned to its position. one entry for the
rest: the mean of all that went, counted as many. bias for what went: kept entries heavier, by what replays paid to those that went. scored
again: from twice the budget, by replays that see what is left. second look: of the entries of a file of the budget --file those that the
question's tokens look at, once the question has been read with all of the file: most in each head, most of all heads, or as auto's recipe would
choose by p.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.question_free import changed
from benchmarks.question_free.again import read_replays
from benchmarks.question_free.entries import Enough, Entries, EntriesRun, answers_of, read_question
from benchmarks.question_free.lines import Cell, line_of, missing
from benchmarks.question_free.observers import Observer
from benchmarks.question_free.recipes import groups
from benchmarks.question_free.table import FULL
from benchmarks.question_free.text import Text
from benchmarks.question_free.written import named
from dropkv import load_model
from dropkv.bench.asked import question_tokens
from dropkv.bench.results import Results
from dropkv.bench.tasks import Question, Sample, Task
from dropkv.errors import ResultsError
from dropkv.models import Model
from dropkv.prompts import Seam

AUTO = "stream 0.27"
LIGHT = 0.02
CHANGES = (
    AUTO,
    f"values merged {LIGHT}",
    "values merged by score",
    "keys and values merged by score",
    "one entry for the rest",
    "bias for what went",
    "scored again",
)
LOOK = "stream 0.27 by p"
SCOPES = ("heads", "model-wide", "recipe")
LOOKS = tuple(f"second look, {scope}" for scope in SCOPES)
NAMES = (*CHANGES, *LOOKS)


class Document:
    """One document, read; `rows` makes what is answered from."""

    def __init__(self, model: Model, seam: Seam, ids: Sequence[int], observer: Observer) -> None:
        self.model = model
        streaming = {recipe.name: recipe for recipe in groups(len(seam.head_ids))["streaming"]}
        self.recipe, self.look = streaming[AUTO], streaming[LOOK]
        self.reading, self.replays = read_replays(model, seam, ids, observer)
        self.text = Text.of(model.tokenizer, ids, model.device)
        self.ranking = self.recipe.ranking(self.reading.seen, self.reading.told, self.text)

    def of(self, keep: Tensor) -> Entries:
        """What a mask keeps."""
        return Entries.of(self.reading.keys, self.reading.values, keep)

    def rows(self, budget: float) -> dict[str, Entries]:
        """CHANGES at a budget."""
        reading, keep = self.reading, self.ranking.keep(budget)
        scores = reading.seen["replay"]["step/max"].amax(2)
        weights = changed.by_score(scores, keep)
        twice = self.ranking.keep(min(1.0, 2 * budget))
        again = changed.selected_again(self.recipe, reading, self.replays, self.text, twice, budget)
        made = (
            self.of(keep),
            changed.merged(reading, keep, torch.full_like(scores, LIGHT)),
            changed.merged(reading, keep, weights),
            changed.merged(reading, keep, weights, self.model),
            changed.with_rest(reading, keep),
            changed.with_bias(reading, keep, self.replays.paid),
            self.of(again),
        )
        return dict(zip(CHANGES, made, strict=True))

    def answers(
        self, tokens: Sequence[int], budgets: Sequence[float], file: float, most: int, enough: Enough | None = None
    ) -> dict[Cell, tuple[list[int], int]]:
        """Answer and number of entries of every row and budget, of auto at the budget `file`, and of the full cache."""
        n, behind = len(self.reading.ids), len(self.reading.ids) + len(tokens)
        found: dict[Cell, tuple[list[int], int]] = {}

        def answer(rows: Mapping[Cell, Entries], run: EntriesRun, first: Tensor) -> None:
            given = answers_of(self.model, run, first, behind, most, enough)
            counted = [(answer, entries.counts) for answer, entries in zip(given, rows.values(), strict=True)]
            found.update(zip(rows, counted, strict=True))

        def read(rows: Mapping[Cell, Entries], watched: int | None = None) -> tuple[EntriesRun, Tensor]:
            return read_question(self.model, list(rows.values()), tokens, n, most, watched)

        rows = {(name, budget): own for budget in budgets for name, own in self.rows(budget).items()}
        answer(rows, *read(rows))
        whole = self.ranking.keep(file)
        rows = {(AUTO, file): self.of(whole), (FULL, 1.0): self.of(torch.ones_like(whole))}
        run, first = read(rows, watched=0)
        looks = {}
        for budget in budgets:
            for scope, keep in changed.looked_at(self.look, self.reading, self.text, whole, run.paid, budget).items():
                looks[f"second look, {scope}", budget] = self.of(keep)
        answer(looks, run.going_on(0, list(looks.values())), first[:1].expand(len(looks)))
        answer(rows, run, first)
        return found


class Study:
    """A model, the budgets, and where the lines go to."""

    def __init__(
        self, model: Model, budgets: Sequence[float], file: float, results: Results, observer: Observer
    ) -> None:
        self.model, self.budgets, self.file, self.results, self.observer = model, list(budgets), file, results, observer
        self.seam = Seam.of(model.tokenizer, name=model.id)
        self.cells = [(FULL, 1.0), (AUTO, file), *((name, budget) for name in NAMES for budget in budgets)]

    def missing(self, task: Task, sample: Sample, seed: int) -> bool:
        """Whether a document still has something to measure."""
        return missing(self.results, self.model, task, sample, seed, self.cells)

    def measure(self, task: Task, sample: Sample, seed: int) -> None:
        """Read a document and answer all its questions."""
        ids = [*self.seam.head_ids, *sample.document_ids]
        document = Document(self.model, self.seam, ids, self.observer)
        for number, question in enumerate(sample.questions):

            def score(answer: Sequence[int], question: Question = question) -> float:
                return task.score(self.model.tokenizer.decode(list(answer), skip_special_tokens=True), question)

            tokens = question_tokens(self.seam, question)
            enough = lambda answer: score(answer) >= 1  # noqa: E731
            found = document.answers(tokens, self.budgets, self.file, question.max_new_tokens, enough)
            lines = []
            for cell in self.cells:
                answer, count = found[cell]
                line = line_of(self.model, task, sample, seed, cell, number)
                lines.append(line | {"score": score(answer), "kept_entries": count})
            self.results.add(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--output", required=True, help="folder of the lines")
    options.add_argument("--tasks", default="noise,prose,four-keys")
    options.add_argument("--samples", type=int, default=24)
    options.add_argument("--seed", type=int, default=2)
    options.add_argument("--tokens", type=int, default=1536)
    options.add_argument("--budgets", default="0.05,0.1")
    options.add_argument("--file", type=float, default=0.25, help="budget of the file that a second look goes through")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--deadline", type=float, default=1e9, help="seconds after which no document is begun")
    given = options.parse_args()
    started = time.monotonic()
    results = Results(given.output)
    try:
        with results.writing():
            model = load_model(given.model, device="cpu", dtype="float32")
            study = Study(model, [float(x) for x in given.budgets.split(",")], given.file, results, Observer())
            head = len(study.seam.head_ids)
            tasks = [named(name) for name in given.tasks.split(",")]
            streams = [
                task.samples(model.tokenizer, given.tokens, given.samples, given.seed, head_tokens=head)
                for task in tasks
            ]
            # tasks take turns, so that a run that is stopped has some of each
            for samples in zip(*streams, strict=True):
                for task, sample in zip(tasks, samples, strict=True):
                    if study.missing(task, sample, given.seed) and time.monotonic() - started < given.deadline:
                        study.measure(task, sample, given.seed)
                        print(f"{task.name} {sample.index}: {time.monotonic() - started:.0f} s", flush=True)
    except ResultsError as error:
        options.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    main()
