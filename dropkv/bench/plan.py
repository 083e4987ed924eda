"""What an accuracy run measures: methods x budgets x lengths x observers over tasks, from the command line or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dropkv.errors import DropkvError, UsageError
from dropkv.method_names import method_file, method_files

Setting = Literal["question-free", "question-aware"]

SETTINGS: tuple[Setting, ...] = ("question-free", "question-aware")
CONTROLS = ("full", "random", "no-document", "random-answer")
WITHOUT_BUDGET = ("full", "no-document", "random-answer")  # the same at every budget, so run once


@dataclass(frozen=True)
class AccuracyPlan:
    """One run. Everything but `samples` decides what a result line means, so lines of different plans can share a folder.

    lengths: document tokens, template head included. observers: of the question-free setting; question-aware has the question's own tokens.
    batch: documents answered at once. essay, data: a text file and a folder for the tasks that need them.
    """

    tasks: tuple[str, ...] = ("noise", "prose", "four-keys")
    lengths: tuple[int, ...] = (1536,)
    methods: tuple[str, ...] = (
        "auto",
        "adadropkv",
        "dropkv",
        "snapkv",
        "full",
        "random",
        "no-document",
        "random-answer",
    )
    budgets: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5)
    observers: tuple[str, ...] = ("replay", "tail")
    settings: tuple[Setting, ...] = ("question-free",)
    samples: int = 20
    seed: int = 0
    chunk: int = 512
    window: int = 8
    model: str = "smollm2-135m"
    batch: int = 4
    essay: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("tasks", "lengths", "methods", "budgets", "settings"):
            if not getattr(self, name):
                raise UsageError(f"a bench without {name} measures nothing: name at least one")
        object.__setattr__(self, "tasks", expand(self.tasks))
        object.__setattr__(self, "methods", expand_methods(self.methods))
        for setting in self.settings:
            if setting not in SETTINGS:
                raise UsageError(f"unknown setting {setting!r}: use {' or '.join(SETTINGS)}")
        for observer in self.observers:
            if observer not in ("replay", "tail"):
                raise UsageError(f"unknown observer {observer!r}: use replay or tail")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise UsageError(f"budget {budget} is no share: benches take fractions above 0 and at most 1")
        if min(self.samples, self.batch, *self.lengths) < 1:
            raise UsageError("samples, batch and lengths count something: use whole numbers of at least 1")

    def _check_types(self) -> None:
        """Raise UsageError for a value of another kind than the default's."""
        for field in fields(self):
            value, text = getattr(self, field.name), field.default is None  # essay and data
            model = field.default[0] if isinstance(field.default, tuple) else field.default
            kind, words = str if text else type(model), {int: "a whole number", float: "a share such as 0.05"}
            for one in value if isinstance(field.default, tuple) else (value,):
                fits = type(one) is kind or (kind is float and type(one) is int) or (text and one is None)
                if not fits:
                    raise UsageError(
                        f"{field.name} is {one!r}: give {words.get(kind, 'text')}, see docs/bench.md for an example"
                    )

    def check_methods(self) -> None:
        """Raise UsageError with the nearest names for a method that does not exist."""
        for name in self.methods:
            if name not in CONTROLS:
                method_file(name, CONTROLS)


def read_plan(path: str | Path, **overrides: Any) -> AccuracyPlan:
    """A plan from a TOML file whose keys are the fields of AccuracyPlan; overrides that are not None win.

    Raises DropkvError for a file that cannot be read, UsageError for what is in it.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DropkvError(f"{path}: cannot be read ({error.strerror}): name a plan, see docs/bench.md") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as TOML ({error}): see docs/bench.md for an example") from None
    known = {field.name for field in fields(AccuracyPlan)}
    unknown = sorted(set(content) - known)
    if unknown:
        raise UsageError(f"{path}: unknown keys {', '.join(unknown)}: use some of {', '.join(sorted(known))}")
    return make_plan(**(content | {name: value for name, value in overrides.items() if value is not None}))


def _several(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def make_plan(**values: Any) -> AccuracyPlan:
    """A plan from plain values; lists become tuples, and so does one value where several may stand. Raises UsageError."""
    several = {field.name for field in fields(AccuracyPlan) if isinstance(field.default, tuple)}
    tidy: dict[str, Any] = {
        name: tuple(value) if _several(value) else value
        for name, value in (
            (name, [value] if name in several and not _several(value) else value) for name, value in values.items()
        )
    }
    return AccuracyPlan(**tidy)


GROUPS = {
    "all-needle": ("noise", "prose", "four-keys", "four-values", "four-queries"),
    "all-ruler": (
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    ),
    "all-longbench": (
        *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
        *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
    ),
}


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Task names with the groups spelt out, each once."""
    return tuple(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def expand_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Method names with "all" spelt out: every method, then the controls; each once, so what is named before "all" stays first."""
    every = [name for name in sorted(method_files()) if name not in CONTROLS]
    spelt = (one for name in names for one in ((*every, *CONTROLS) if name == "all" else (name,)))
    return tuple(dict.fromkeys(spelt))
