"""What is read and asked: a document of any length, its observers and questions, for a model with a tokenizer and for one without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from dropkv.bench.speed.plan import SpeedPlan
from dropkv.bench.tasks._text import help_texts
from dropkv.budgets import counted_entries
from dropkv.compression import resolve_method
from dropkv.errors import UsageError
from dropkv.fidelity import HeldOut, hold_out
from dropkv.methods import Method
from dropkv.models import Model
from dropkv.observers import Observation, observe
from dropkv.prompts import Seam
from dropkv.settings import CompressSettings

HEAD = 24  # tokens of a template's head where there is no template
ASKING = 28  # tokens of a replay's instruction there
HELD, CUE = 512, 3  # tokens there by which fidelity is measured, and those of them that are not counted
LETTERS = 8  # of prose for each token: more than any tokenizer needs
ORDINARY = 100  # the first ids of a vocabulary stand for other things than text


@dataclass(frozen=True)
class StandIn:
    """In the place of a template, where a network has no tokenizer: a replay's instruction is so many tokens."""

    ids: tuple[int, ...]

    def question_ids(self, text: str) -> list[int]:
        """The tokens of any text."""
        return list(self.ids)


@dataclass(frozen=True)
class Material:
    """ids: template head and text, as long as the longest document. seam: a Seam, or what stands in for one."""

    ids: tuple[int, ...]
    head_tokens: int
    seam: Any

    @classmethod
    def of(cls, model: Model, tokens: int) -> Material:
        """English prose as the model's tokenizer cuts it, over and over if need be; ids drawn at random where there is no tokenizer."""
        if model.tokenizer is None:
            import torch

            draw = torch.Generator().manual_seed(tokens)
            vocabulary = int(model.network.config.vocab_size)
            first = min(ORDINARY, vocabulary // 2)
            ids = torch.randint(first, vocabulary, (tokens + ASKING,), generator=draw).tolist()
            return cls(tuple(ids[:tokens]), HEAD, StandIn(tuple(ids[tokens:])))
        seam = Seam.of(model.tokenizer, name=model.id)
        text = help_texts()[: LETTERS * tokens]
        body = islice(cycle(seam.document_ids(text)), max(0, tokens - len(seam.head_ids)))
        return cls((*seam.head_ids, *body), len(seam.head_ids), seam)

    def observation(self, settings: CompressSettings, tokens: int) -> Observation:
        """What the settings' observer does with a document of so many tokens."""
        return observe(settings, self.seam, self.ids[:tokens], self.head_tokens)

    def held_out(self, tokens: int, room: int) -> HeldOut | None:
        """Passages to measure fidelity with, as `compress` has them, in at most `room` positions."""
        if isinstance(self.seam, Seam):
            return hold_out(self.seam, self.ids[:tokens], self.head_tokens, room - self.head_tokens)
        count = min(HELD, tokens, room)
        return HeldOut(self.ids[:count], tuple(range(CUE, count)), ((0, count),)) if count > CUE else None

    def questions(self, rows: int, tokens: int) -> list[tuple[int, ...]]:
        """So many questions of `tokens` tokens, no two of them alike as long as the document allows."""
        text = self.ids[self.head_tokens :] or self.ids
        return [tuple(islice(cycle(text), row, row + tokens)) for row in range(rows)]


def settings_of(plan: SpeedPlan, method: str, observer: str, budget: float) -> CompressSettings:
    """Those of `compress`; observer "none" is the one that costs least."""
    name = "tail" if observer == "none" else observer
    return CompressSettings(budget=budget, method=method, observe=name, chunk=plan.chunk, window=plan.window)


def observers_of(plan: SpeedPlan, method: Method) -> Sequence[str]:
    """The plan's observers that a method can have; "none" for one that looks at no query. Raises UsageError when none is left."""
    if method.observed is None:
        return ("none",)
    fitting = [one for one in plan.observers if one == "replay" or "replay" not in method.needs]
    if not fitting:
        raise UsageError(f"method {method.name} observes with replays alone: use --observers replay")
    return fitting


def check_fit(model: Model, plan: SpeedPlan, material: Material) -> None:
    """Raise UsageError for a length that does not fit the model, or a budget below what a method always keeps of it."""
    from dropkv import methods

    for length in plan.lengths:
        behind = {"question and answer": plan.question_tokens + plan.answer_tokens if "answer" in plan.sides else 1}
        if "replay" in plan.observers:
            behind["replay"] = material.observation(settings_of(plan, "adadropkv", "replay", 1.0), length).longest_probe
        what, most = max(behind.items(), key=lambda item: item[1])
        up_to = model.regime(length).up_to
        if length + most > up_to:
            room = up_to - most
            advice = f"use --lengths {room} or less" if room > 0 else "use a smaller --chunk"
            raise UsageError(
                f"length {length} and {most} tokens of {what} are more than the {up_to} positions of {model.id}: {advice}"
            )
        for name, budget in plan.cells:
            for observer in observers_of(plan, methods.get(name)):
                method = resolve_method(settings_of(plan, name, observer, budget), material.head_tokens)
                forced = len(method.forced(length))
                if not method.keeps_all and int(budget * length) < min(forced, length):
                    raise UsageError(
                        f"budget {budget:g} of length {length} is {counted_entries(int(budget * length))} and {name} always keeps {forced}: "
                        f"use --lengths {-int(-forced // budget)} or more, or larger --budgets"
                    )
