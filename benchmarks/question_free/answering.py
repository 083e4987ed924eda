"""What a kept set is worth: the answer it gives, or how likely the right answer is under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.question_free.documents import Reading
from dropkv.attention import run_logits
from dropkv.bench.answering import ROW_TOKENS
from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.kept import same_sets
from dropkv.bench.masked_run import MaskedRun
from dropkv.models import Model


@dataclass(frozen=True)
class Asked:
    """A document, the tokens of a question to it, and the masks to answer it with, bool [masks, layers, kv_heads, n]; equal ones once."""

    reading: Reading
    tokens: tuple[int, ...]
    keeps: Tensor


def answers(model: Model, asked: Sequence[Asked], max_new_tokens: int) -> list[list[list[int]]]:
    """Greedy answers of every mask of every document; documents of one length."""
    firsts = [same_sets(one.keeps) for one in asked]
    distinct = [sorted(set(first)) for first in firsts]
    n = len(asked[0].reading.ids)
    room = ROW_TOKENS.get(model.device.type, ROW_TOKENS["cpu"])
    most = max(1, room // (n * len(asked)))  # rows of a document at once
    found: list[dict[int, list[int]]] = [{} for _ in asked]
    keys, values = _stacked(asked)
    for begin in range(0, max(map(len, distinct)), most):
        parts = [own[begin : begin + most] for own in distinct]
        each = max(map(len, parts))
        rows, names = [], []
        for number, (one, part) in enumerate(zip(asked, parts, strict=True)):
            padded = part + [part[0] if part else 0] * (
                each - len(part)
            )  # every document needs as many rows as the others
            rows.extend(Row(number, one.tokens, one.keeps[mask]) for mask in padded)
            names.extend((number, mask) for mask in padded)
        given = answer_rows(model, keys, values, rows, starts=[n] * len(rows), max_new_tokens=max_new_tokens)
        for (number, mask), answer in zip(names, given, strict=True):
            found[number][mask] = answer
    return [[own[mask] for mask in first] for own, first in zip(found, firsts, strict=True)]


def likelihoods(model: Model, asked: Asked, before: Sequence[int], answer: Sequence[int]) -> list[tuple[float, bool]]:
    """For every mask the nats of `answer` behind the question and the tokens `before`, and whether each of its tokens is the likeliest.

    Cheaper than an answer, and finer: it tells apart masks that are both right, or both wrong.
    """
    first = same_sets(asked.keeps)
    distinct = sorted(set(first))
    ids = [*asked.tokens, *before, *answer[:-1]]
    n = len(asked.reading.ids)
    most = max(1, ROW_TOKENS.get(model.device.type, ROW_TOKENS["cpu"]) // (16 * n))
    keys, values = _stacked([asked])
    target = torch.tensor(list(answer), device=model.device)
    found: dict[int, tuple[float, bool]] = {}
    for begin in range(0, len(distinct), most):
        part = distinct[begin : begin + most]
        keep = asked.keeps[part].to(model.device).permute(1, 0, 2, 3).unsqueeze(1)
        run = MaskedRun(model, keys, values, keep, len(ids))
        run.expect(len(ids))
        rows = torch.tensor([ids], device=model.device).expand(len(part), -1).contiguous()
        positions = torch.arange(n, n + len(ids), device=model.device).expand(len(part), -1).contiguous()
        with torch.inference_mode():
            logits = run_logits(model.network, rows, positions, run, keep=len(answer))
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.repeat(len(part)), reduction="none"
        ).view(len(part), -1)
        right = (logits.argmax(-1) == target).all(-1)
        for mask, nats, hit in zip(part, losses.sum(-1).tolist(), right.tolist(), strict=True):
            found[mask] = (nats, hit)
    return [found[mask] for mask in first]


def _stacked(asked: Sequence[Asked]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values per layer [documents, kv_heads, n, d]."""
    layers = range(len(asked[0].reading.keys))
    keys = [torch.stack([one.reading.keys[layer] for one in asked]) for layer in layers]
    values = [torch.stack([one.reading.values[layer] for one in asked]) for layer in layers]
    return keys, values
