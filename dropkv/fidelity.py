"""Fidelity: how much of what the document tells the model the kept entries still tell it.

Behind the document stand short quotes from all over it, those passages whose tokens are rarest in it: names, numbers, what is asked for. The
first tokens of a quote are its cue; each token after them is to be predicted. With the full cache a model finds the passage and copies it;
what has been evicted it cannot find, and without the document it could only guess: the share of the way from guessing to copying is what is
kept. The full cache's predictions are made during the prefill, where every layer's keys and values are there for a moment; the file's, by one
forward call over the kept entries. The queries are no observer's: the tokens stand at other places, behind other words, and see everything.

It measures what the budget costs against the full cache: not whether the model can answer, which it may fail to do with the full cache, and
nothing of use where the entries were chosen for given questions, as the quotes are from all over the document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dropkv.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from dropkv.cache import Prefix
    from dropkv.models import Model
    from dropkv.prompts import Seam

PASSAGE = 16  # tokens of a passage
CUE = 3  # of which so many come first and are not counted
SHARE = 0.07  # of the document's tokens, quoted
FEWEST, MOST = 64, 512  # tokens quoted whatever the share is
LEAST_TOLD = 0.1  # nats per token that the document must be worth for a share of it to mean anything
DIGITS = 4  # of stored likelihoods: so that the last bits of a sum change no file


@dataclass(frozen=True)
class HeldOut:
    """Tokens that stand behind a document for its fidelity to be measured.

    ids: placed at position n. scored: ascending indices of the ids that are to be predicted, each from what stands before it.
    passages: the (start, stop) document ranges that are quoted.
    """

    ids: tuple[int, ...]
    scored: tuple[int, ...]
    passages: tuple[tuple[int, int], ...]

    def rows(self, before: int) -> list[int]:
        """Where in a sequence with so many tokens before the ids each scored token is predicted: one place ahead of it."""
        return [before + index - 1 for index in self.scored]

    def predictions(self, logits: Tensor) -> Predictions:
        """What the logits [scored, vocabulary] of those rows say."""
        import torch

        targets = torch.tensor([self.ids[index] for index in self.scored], device=logits.device)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        return Predictions(tuple(losses.tolist()), tuple(logits.argmax(-1).tolist()), tuple(targets.tolist()))


@dataclass(frozen=True)
class Predictions:
    """For each scored token: nll, the negative log-likelihood in nats; best, the likeliest token; target, the one that stands there."""

    nll: tuple[float, ...]
    best: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def right(self) -> tuple[bool, ...]:
        """Where the likeliest token is the one that stands there."""
        return tuple(best == target for best, target in zip(self.best, self.target, strict=True))


def hold_out(seam: Seam, document: Sequence[int], head_tokens: int, room: int) -> HeldOut | None:
    """Passages of `document` (ids, template head included) to quote in at most `room` positions; None when not one has a place.

    One from each of equal parts of the document; documents shorter than a passage are quoted whole.
    """
    body = len(document) - head_tokens
    size = min(PASSAGE, body)
    between = seam.encoder.foreign("\n")
    wanted = min(max(SHARE * body, FEWEST), MOST, body)
    fitting = (room - len(between)) // (PASSAGE + len(between))
    if size < 2 or fitting < 1:
        return None
    count = min(max(1, int(wanted / size)), fitting)
    cue = min(CUE, size - 1)
    counts = Counter(document[head_tokens:])
    rarity = [0.0, *accumulate(math.log(body / counts[token]) for token in document[head_tokens:])]
    ids = list(between)
    scored: list[int] = []
    passages: list[tuple[int, int]] = []
    for number in range(count):
        first, last = number * body // count, (number + 1) * body // count - size
        start = max(range(first, last + 1), key=lambda place: rarity[place + size] - rarity[place + cue])
        passages.append((head_tokens + start, head_tokens + start + size))
        scored += range(len(ids) + cue, len(ids) + size)
        ids += [*document[passages[-1][0] : passages[-1][1]], *between]
    ids = ids[: len(ids) - len(between)]
    return HeldOut(tuple(ids), tuple(scored), tuple(passages))


def predict(model: Model, prefix: Prefix, held: HeldOut) -> Predictions:
    """What the model predicts of the scored tokens behind a compressed document. Raises ModelError when a layer bypasses the prefix."""
    return _predict(model, prefix, held, ())


def predict_alone(model: Model, prefix: Prefix, head: Sequence[int], held: HeldOut) -> Predictions:
    """What the model predicts of the scored tokens without the document, behind the template head (ids) alone; prefix: any of the model."""
    return _predict(model, prefix.emptied(), held, head)


def _predict(model: Model, prefix: Prefix, held: HeldOut, before: Sequence[int]) -> Predictions:
    import torch

    from dropkv.attention import run_logits
    from dropkv.cache import AnswerRun, Tail

    tokens = [*before, *held.ids]
    run = AnswerRun(prefix, Tail())
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(prefix.n, prefix.n + len(tokens), device=model.device).unsqueeze(0)
        rows = torch.tensor(held.rows(len(before)), device=model.device)
        logits = run_logits(model.network, ids, positions, run, keep=rows)[0]
    if run.seen != len(prefix.layers):
        raise ModelError(
            f"only {run.seen} of {len(prefix.layers)} layers of {model.id} passed through dropkv: use another model"
        )
    return held.predictions(logits)


def compare(held: HeldOut, full: Predictions, pruned: Predictions, alone: Predictions) -> dict[str, Any] | None:
    """The numbers that go into a file (formats/FORMAT.md says what each is); None when a likelihood is not finite.

    full: with the whole cache, pruned: with the kept entries, alone: without the document.
    """
    if not all(map(math.isfinite, (*full.nll, *pruned.nll, *alone.nll))):
        return None
    nll, nll_full, nll_alone = (_mean(one.nll) for one in (pruned, full, alone))
    told = nll_alone - nll_full
    still = [mine for mine, theirs in zip(pruned.right, full.right, strict=True) if theirs]
    agreeing = [mine == theirs for mine, theirs in zip(pruned.best, full.best, strict=True)]
    shares = {
        "kept_information": (nll_alone - nll) / told if told >= LEAST_TOLD else None,
        "agreement": _mean(agreeing),
        "right": _mean(pruned.right),
        "right_full": _mean(full.right),
        "right_alone": _mean(alone.right),
        "still_right": _mean(still) if still else None,
        "nll": nll,
        "nll_full": nll_full,
        "nll_alone": nll_alone,
    }
    rounded = {name: None if value is None else round(value, DIGITS) for name, value in shares.items()}
    return {"kind": "quotes", "passages": len(held.passages), "tokens": len(held.scored), **rounded}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
