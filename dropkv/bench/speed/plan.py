"""What a speed run measures: sides x lengths x methods x budgets x batch sizes, and what stands in the way of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dropkv.errors import UsageError
from dropkv.settings import default_method

Side = Literal["compress", "answer"]

SIDES: tuple[Side, ...] = ("compress", "answer")
OBSERVERS = ("tail", "replay")
LINES = "speed.jsonl"
MACHINE = ("device", "threads", "dtype", "dropkv", "torch", "triton", "transformers")
KEY = (  # what makes a line of speed the only one
    *("model", "random_weights", "side", "length", "method", "observer", "budget", "batch_size"),
    *("question_tokens", "answer_tokens", "chunk", "window", *MACHINE),
)


@dataclass(frozen=True)
class SpeedPlan:
    """One run. lengths: document tokens, template head included. batch_sizes: questions answered at once. answer_tokens: of each answer, the
    first one included. methods: None becomes what `compress` takes with these observers. repeat: runs of every cell behind one that warms up;
    figures are their medians. Raises UsageError.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    budgets: tuple[float, ...] = (0.05,)
    batch_sizes: tuple[int, ...] = (1, 4)
    methods: tuple[str, ...] | None = None
    observers: tuple[str, ...] = OBSERVERS
    sides: tuple[Side, ...] = SIDES
    repeat: int = 3
    question_tokens: int = 32
    answer_tokens: int = 32
    chunk: int = 512
    window: int = 8

    def __post_init__(self) -> None:
        if self.methods is None:
            object.__setattr__(self, "methods", tuple(default_method(observer) for observer in self.observers))
        for name in ("lengths", "budgets", "batch_sizes", "observers", "methods", "sides"):
            if not getattr(self, name):
                raise UsageError(f"a bench without {name.replace('_', ' ')} measures nothing: name at least one")
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name, known in (("sides", SIDES), ("observers", OBSERVERS)):
            for one in getattr(self, name):
                if one not in known:
                    raise UsageError(f"unknown {name[:-1]} {one!r}: use {' or '.join(known)}")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise UsageError(f"budget {budget} is no share: benches take fractions above 0 and at most 1")
        counts = (self.repeat, self.question_tokens, self.chunk, self.window, *self.lengths, *self.batch_sizes)
        if min(counts) < 1:
            raise UsageError("lengths, batch sizes, repeat, chunk and window count something: use 1 or more")
        if self.answer_tokens < 3:
            raise UsageError("a decode step is timed behind the second token: use --answer-tokens 3 or more")

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Methods and budgets; `full` keeps everything at any budget and stands there once."""
        return [
            (method, budget)
            for method in self.methods or ()
            for budget in ((1.0,) if method == "full" else self.budgets)
        ]  # fmt: skip
