"""What can be chosen for a compression and for an answer, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypedDict

from dropkv.errors import BudgetError, UsageError
from formats import codecs
from formats.errors import printable
from formats.grids import KINDS

OBSERVERS = ("replay", "tail", "question:TEXT", "questions:FILE")
DEFAULT_METHOD = "auto"  # with replays, which it is made for
WITHOUT_REPLAYS = "adadropkv"  # with every other observer
MOST = 1 << 30  # tokens, more than any document has
EXAMPLES = {
    "question": "question:TEXT, such as 'question:Who is the killer?'",
    "questions": "questions:FILE, the name of a file with one on each line",
}
KV_DTYPES = ("same", *KINDS)
ZSTD_LEVELS = codecs.LEVELS
KINDS_OF: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}
WORDS_OF = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "True or False"}


@dataclass(frozen=True)
class CompressSettings:
    """How one document is compressed.

    budget: a float in (0, 1] is a fraction of the document's tokens, an int >= 1 the entries kept per KV head. method: a name of
    docs/methods.md; None becomes that of `default_method`, so that settings once made always have one; a replacement for another observer has to name
    it again, or None.
    observe: replay, tail, question:TEXT (the one that will be asked) or questions:FILE (one a line). window: observation queries of tail and
    question. chunk: tokens of the document that one replay repeats.
    pool: size of the pooling kernel in tokens (odd, 1 = none), None = what method and observer say. alpha: share of the budget that the
    rules "head-adaptive" and "two orders" give to every head alike, None = the method's own.
    keep_tokens: store the document's token ids in the file. truncate: cut a document that does not fit instead of refusing it.
    fidelity: measure what the kept entries change in the model's predictions.
    kv_dtype: how entries are kept: same, as they were computed; fp8, int8 or int4, quantised (formats/quantized.py). zstd: the level at which
    the file is compressed, None for not at all.
    Raises BudgetError or UsageError.
    """

    budget: float | int = 0.25
    method: str | None = None
    observe: str = "replay"
    window: int = 8
    pool: int | None = None
    alpha: float | None = None
    chunk: int = 512
    system: str | None = None
    keep_tokens: bool = True
    truncate: bool = False
    fidelity: bool = True
    seed: int = 0
    kv_dtype: str = "same"
    zstd: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.budget)
        _check_types(self)
        if self.method is None:
            object.__setattr__(self, "method", default_method(self.observe))
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(f"unknown kv-dtype {self.kv_dtype!r}: use one of {', '.join(KV_DTYPES)}")
        low, high = ZSTD_LEVELS
        if self.zstd is not None and (type(self.zstd) is not int or not low <= self.zstd <= high):
            raise UsageError(f"zstd level {self.zstd!r} is out of range: use a whole number from {low} to {high}")
        kind, _, rest = self.observe.partition(":")
        if kind in EXAMPLES and not rest.strip():
            raise UsageError(f"observer {self.observe!r} has nothing behind its colon: write {EXAMPLES[kind]}")
        if self.observe not in ("replay", "tail") and kind not in EXAMPLES:
            raise UsageError(f"unknown observer {self.observe!r}: use one of {', '.join(OBSERVERS)}")
        if self.window < 1:
            raise UsageError(f"a window of {self.window} queries observes nothing: use --window 1 or more")
        if self.pool is not None and (self.pool < 1 or self.pool % 2 == 0):
            raise UsageError(f"a pooling kernel of {self.pool} has no centre: use an odd --pool, 1 for none")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UsageError(
                f"alpha {self.alpha} is no share: use --alpha between 0 (the layer's best) and 1 (uniform)"
            )
        if max(self.window, self.chunk, self.pool or 0) > MOST:
            raise UsageError(f"--window, --chunk and --pool count tokens: use at most {MOST:,}")
        if self.chunk < 1:
            raise UsageError(f"chunks of {self.chunk} tokens repeat nothing: use --chunk 1 or more")


def default_method(observe: str) -> str:
    """The method that is meant where none is named, with an observer."""
    return DEFAULT_METHOD if observe == "replay" else WITHOUT_REPLAYS


class CompressOptions(TypedDict, total=False):
    """The fields of CompressSettings as keyword arguments, for type checkers and editors."""

    budget: float | int
    method: str | None
    observe: str
    window: int
    pool: int | None
    alpha: float | None
    chunk: int
    system: str | None
    keep_tokens: bool
    truncate: bool
    fidelity: bool
    seed: int
    kv_dtype: str
    zstd: int | None


@dataclass(frozen=True)
class Sampling:
    """How an answer's tokens are chosen, and how many at most.

    max_new_tokens: the answer is cut off there. temperature: 0 takes the likeliest token every time, more samples from the distribution
    divided by it. top_p: only from the likeliest tokens that have this share of it together. seed: an int makes samples repeatable, None
    draws another one each time. Raises UsageError.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_new_tokens < 1:
            raise UsageError(f"an answer of {self.max_new_tokens} tokens says nothing: use --max-new-tokens 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature {self.temperature} is out of range: use 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is out of range: use a share above 0 and at most 1")


def check_batch_size(batch_size: int | None) -> None:
    """Raise UsageError unless it is None or a whole number >= 1."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise UsageError(f"a batch of {batch_size!r} questions answers none: use --batch-size 1 or more")


def check_sampling(sampling: Sampling | None) -> Sampling:
    """How to choose tokens: None is greedy. Raises UsageError for anything but a Sampling."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise UsageError(f"sampling is of type {type(sampling).__name__}: give dropkv.Sampling(max_new_tokens=64, ...)")
    return sampling


def _check_types(settings: CompressSettings | Sampling) -> None:
    """Raise UsageError for a field of another type than it is declared with."""
    for field in fields(settings):
        value, names = getattr(settings, field.name), str(field.type).split(" | ")
        if not any(type(value) is bool if name == "bool" else _is(value, KINDS_OF[name]) for name in names):
            wanted = " or ".join(WORDS_OF.get(name, name) for name in names)
            raise UsageError(f"{field.name} is {printable(repr(value), 80)}: give {wanted}")


def _is(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_budget(budget: float | int) -> None:
    """Raise BudgetError unless `budget` is a fraction in (0, 1] or a whole number of entries >= 1."""
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise BudgetError(f"budget {budget!r} is no number: use a fraction such as 0.05 or a whole number such as 2048")
    if isinstance(budget, int):
        if budget < 1:
            raise BudgetError(
                f"budget {budget} keeps nothing: use a fraction such as 0.05 or a whole number of entries such as 2048"
            )
    elif not 0 < budget <= 1:
        raise BudgetError(
            f"budget {budget} is no fraction: use one above 0 and at most 1.0 such as 0.05, or a whole number of entries such as 2048"
        )
