"""Many recipes of the question-free compression on the same documents: one prefill with all observers, all kept sets answered in one batch.

    python -m benchmarks.question_free -o FOLDER [--tasks noise,prose,four-keys] [--samples 64] [--seed 2] [--tokens 1536]
        [--budgets 0.05,0.1,0.25] [--groups today,score,...] [--recipes "default;told"] [--model smollm2-135m] [--likelihood]
        [--part 0/2] [--deadline SECONDS] [--full]
    python -m benchmarks.question_free -o FOLDER [FOLDER ...] --table
    python -m benchmarks.question_free --list

FOLDER/lines.jsonl holds one line for each document, recipe and budget, own.jsonl what the model asked about each document itself, where a
recipe looks through that; a run goes on where one stopped. Processes that run at once need folders
of their own; --part 0/2 measures every second document, --part 1/2 the others, and --table puts folders together. The seed is one for choosing:
figures that are reported anywhere as results must come from others. --likelihood asks, in place of an answer, how likely the right one is
behind what the full cache says before it; documents that the full cache cannot answer are left out then. It is cheaper and finer, and no accuracy.
Tasks are those of `dropkv bench tasks`, and written: prose with questions written for it. --full answers from the full cache alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from benchmarks.question_free.answering import Asked, answers, likelihoods
from benchmarks.question_free.documents import Reading, read_documents
from benchmarks.question_free.lines import line_of, missing
from benchmarks.question_free.observers import OBSERVERS
from benchmarks.question_free.own import Notes
from benchmarks.question_free.recipe import Recipe
from benchmarks.question_free.recipes import DEFAULT, FINALISTS, groups
from benchmarks.question_free.table import FULL, table
from benchmarks.question_free.text import Text
from benchmarks.question_free.written import named
from dropkv import load_model
from dropkv.bench.asked import question_tokens
from dropkv.bench.results import Line, Results
from dropkv.bench.tasks import Question, Sample, Task
from dropkv.errors import ResultsError, UsageError
from dropkv.models import Model
from dropkv.prompts import Seam

TOGETHER = 40_000  # tokens of documents that a GPU reads together


class Study:
    """One model, one list of recipes, and the folder that the lines go to."""

    def __init__(
        self, model: Model, recipes: Sequence[Recipe], budgets: Sequence[float], results: Results, likelihood: bool
    ) -> None:
        self.model, self.recipes, self.budgets, self.results = model, list(recipes), list(budgets), results
        self.likelihood = likelihood
        self.seam = Seam.of(model.tokenizer, name=model.id)
        self.wanted: dict[str, list[str]] = {}
        for observer, statistic in sorted(set().union(*(recipe.wanted for recipe in recipes))):
            self.wanted.setdefault(observer, []).append(statistic)
        if not recipes:
            self.wanted = {"replay": ["p/max"]}  # a document is read through an observer, whoever looks at it
        self.nats = any(recipe.needs_nats for recipe in recipes)
        self.notes: Notes | None = None
        if any(OBSERVERS[observer].own for observer in self.wanted):
            self.notes = Notes(model, self.seam, results.path.parent)

    def missing(self, task: Task, sample: Sample, seed: int) -> bool:
        """Whether a document still has something to measure."""
        cells = [(recipe.name, budget) for recipe in self.recipes for budget in self.budgets] + [(FULL, 1.0)]
        return missing(self.results, self.model, task, sample, seed, cells)

    def measure(self, task: Task, samples: Sequence[Sample], seed: int) -> None:
        """Read documents of one length together and measure every recipe at every budget."""
        ids = [[*self.seam.head_ids, *sample.document_ids] for sample in samples]
        written = None
        if self.notes is not None:
            names = [line_of(self.model, task, sample, seed, ("", 0.0), 0) for sample in samples]
            written = [self.notes.of(name, document) for name, document in zip(names, ids, strict=True)]
        readings = read_documents(self.model, self.seam, ids, OBSERVERS, self.wanted, notes=written, nats=self.nats)
        cells = [(FULL, 1.0)] + [(recipe.name, budget) for recipe in self.recipes for budget in self.budgets]
        keeps = self.keeps(readings)
        for number in range(max(len(sample.questions) for sample in samples)):
            owners = [place for place, sample in enumerate(samples) if number < len(sample.questions)]
            asked = []
            for place in owners:
                tokens = tuple(question_tokens(self.seam, samples[place].questions[number]))
                asked.append(Asked(readings[place], tokens, keeps[place]))
            most = samples[owners[0]].questions[number].max_new_tokens
            if self.likelihood:
                first = [Asked(one.reading, one.tokens, one.keeps[:1]) for one in asked]
                told = [own[0] for own in answers(self.model, first, most)]
            else:
                given = answers(self.model, asked, most)
            for index, place in enumerate(owners):
                sample = samples[place]
                if self.likelihood:
                    lines = self._likely(task, sample, seed, number, asked[index], told[index], cells)
                else:
                    lines = self._answered(task, sample, seed, number, given[index], cells)
                kept = keeps[place].flatten(1).sum(1).tolist()
                self.results.add(line | {"kept_entries": count} for line, count in zip(lines, kept, strict=False))

    def keeps(self, readings: Sequence[Reading]) -> torch.Tensor:
        """bool [documents, cells, layers, kv_heads, n]: everything, then every recipe at every budget."""
        if not self.recipes:
            keys = readings[0].keys
            return torch.ones((len(readings), 1, len(keys), *keys[0].shape[:2]), dtype=torch.bool)
        told = torch.stack([reading.told for reading in readings])
        text = Text.of_all(self.model.tokenizer, [reading.ids for reading in readings], told.device)
        seen = {
            observer: {name: torch.stack([reading.seen[observer][name] for reading in readings]) for name in names}
            for observer, names in self.wanted.items()
        }
        masks = []
        for recipe in self.recipes:
            ranking = None
            for budget in self.budgets:
                if ranking is None or recipe.grow:
                    ranking = recipe.ranking(seen, told, text, budget)
                masks.append(ranking.keep(budget))
        return torch.stack([torch.ones_like(masks[0]), *masks], 1)

    def _answered(
        self,
        task: Task,
        sample: Sample,
        seed: int,
        number: int,
        given: Sequence[Sequence[int]],
        cells: Sequence[tuple[str, float]],
    ) -> list[Line]:
        question = sample.questions[number]
        lines = []
        for (recipe, budget), answer in zip(cells, given, strict=True):
            prediction = self.model.tokenizer.decode(answer, skip_special_tokens=True)
            line = line_of(self.model, task, sample, seed, (recipe, budget), number)
            lines.append(line | {"score": task.score(prediction, question), "prediction": prediction})
        return lines

    def _likely(
        self,
        task: Task,
        sample: Sample,
        seed: int,
        number: int,
        asked: Asked,
        told: Sequence[int],
        cells: Sequence[tuple[str, float]],
    ) -> list[Line]:
        """Lines with the nats of the right answer as the full cache gave it; the full cache's alone where that was wrong."""
        question = sample.questions[number]
        prediction = self.model.tokenizer.decode(told, skip_special_tokens=True)
        score = self._score(task, told, question)
        full = line_of(self.model, task, sample, seed, (FULL, 1.0), number) | {"score": score, "prediction": prediction}
        if score < 1 or not told:
            return [full]
        scores = [self._score(task, told[:end], question) for end in range(len(told) + 1)]
        end = next(end for end, own in enumerate(scores) if end and own >= 1)
        begin = max(begin for begin in range(end + 1) if self._score(task, told[begin:end], question) >= 1)
        begin = min(begin, end - 1)  # an answer that is right whatever it says has one token at least
        lines = [full]
        measured = likelihoods(self.model, asked, told[:begin], told[begin:end])
        for (recipe, budget), (nats, right) in zip(cells[1:], measured[1:], strict=True):
            line = line_of(self.model, task, sample, seed, (recipe, budget), number)
            lines.append(line | {"score": float(right), "nats": round(nats, 4)})
        return lines

    def _score(self, task: Task, tokens: Sequence[int], question: Question) -> float:
        return task.score(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True), question)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--output", nargs="+", help="folder of the lines; with --table several")
    options.add_argument("--tasks", default="noise,prose,four-keys")
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--seed", type=int, default=2)
    options.add_argument("--tokens", type=int, default=1536)
    options.add_argument("--budgets", default="0.05,0.1,0.25")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--groups", help="groups of recipes, all unless given", default="")
    options.add_argument("--recipes", help="names of recipes, divided by ;", default="")
    options.add_argument("--together", type=int, help="documents read together", default=0)
    options.add_argument("--part", help="I/N: every N-th document, from number I on", default="0/1")
    options.add_argument("--deadline", type=float, default=1e9, help="seconds after which no document is begun")
    options.add_argument("--likelihood", action="store_true", help="nats of the right answer in place of answers")
    options.add_argument("--full", action="store_true", help="no recipes: answers of the full cache alone")
    options.add_argument("--table", action="store_true", help="print the table of what is there and stop")
    options.add_argument("--list", action="store_true", help="print the recipes and stop")
    given = options.parse_args()
    if given.list:
        for group, recipes in groups(24).items():
            print(f"{group}:\n" + "\n".join(f"  {recipe.name}" for recipe in recipes))
        return
    if given.output is None:
        options.error("-o FOLDER is needed")
    started = time.monotonic()
    folders = [Results(folder) for folder in given.output]
    if not given.table:
        try:
            with folders[0].writing():
                run(given, folders[0], started)
        except ResultsError as error:
            options.exit(error.exit_code, f"{error}\n")
        return
    asked = set(given.tasks.split(","))
    lines = [line for folder in folders for line in folder.read()]
    print(table((line for line in lines if line["task"] in asked and line["length"] == given.tokens), DEFAULT))


def run(given: argparse.Namespace, results: Results, started: float) -> None:
    """Measure what the results lack. started: when the deadline's seconds began."""
    part, parts = (int(number) for number in given.part.split("/"))
    model = load_model(given.model)
    head = len(Seam.of(model.tokenizer, name=model.id).head_ids)
    study = Study(
        model,
        [] if given.full else chosen(head, given.groups, given.recipes),
        [float(x) for x in given.budgets.split(",")],
        results,
        given.likelihood,
    )
    print(f"{len(study.recipes)} recipes, {len(study.wanted)} observers", flush=True)
    together = given.together or (max(1, TOGETHER // given.tokens) if model.device.type == "cuda" else 1)
    tasks = [named(name) for name in given.tasks.split(",")]
    streams = [
        list(task.samples(model.tokenizer, given.tokens, given.samples, given.seed, head_tokens=head))[part::parts]
        for task in tasks
    ]
    # tasks take turns, so that a run that is stopped has some of each
    for begin in range(0, max(map(len, streams)), together):
        for task, samples in zip(tasks, streams, strict=True):
            todo = [sample for sample in samples[begin : begin + together] if study.missing(task, sample, given.seed)]
            if not todo or time.monotonic() - started > given.deadline:
                continue
            for length in sorted({len(sample.document_ids) for sample in todo}):
                study.measure(task, [sample for sample in todo if len(sample.document_ids) == length], given.seed)
            print(f"{task.name} {begin}: {time.monotonic() - started:.0f} s", flush=True)


def chosen(head_tokens: int, group_names: str, recipe_names: str) -> list[Recipe]:
    """The recipes that were asked for, the default always among them."""
    known = groups(head_tokens)
    known["finalists"] = [recipe for own in known.values() for recipe in own if recipe.name in FINALISTS]
    names = [name for name in group_names.split(",") if name] or ([] if recipe_names else list(known))
    recipes = [recipe for name in names for recipe in known.get(name, ())]
    every = {recipe.name: recipe for own in known.values() for recipe in own}
    wanted = {recipe.name: recipe for recipe in [every[DEFAULT], *recipes]}
    asked = [name.strip() for name in recipe_names.split(";") if name.strip()]
    for unknown in [name for name in names if name not in known] + [name for name in asked if name not in every]:
        raise UsageError(f"no group or recipe {unknown!r}: --list prints them")
    wanted |= {name: every[name] for name in asked}
    return list(wanted.values())


if __name__ == "__main__":
    main()
