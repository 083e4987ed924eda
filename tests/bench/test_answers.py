"""Answers from masks over shared full caches are those of the real pruned cache."""

from __future__ import annotations

import pytest
import torch

from dropkv.bench.answers import Row, answer_rows
from dropkv.cache import Prefix, Tail
from dropkv.generate import Session
from dropkv.methods import get
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from tests import tiny

N = 60


def ids(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY - 10, (count,), generator=generator).tolist()


def dense(layers):
    """Keys and values [kv_heads, n, d] per layer of a cache that keeps everything."""
    keys, values = [], []
    for layer in layers:
        order = layer.positions.view(2, N).long().argsort(1)
        keys.append(torch.stack([layer.keys.view(2, N, -1)[h, order[h]] for h in range(2)]))
        values.append(torch.stack([layer.values.view(2, N, -1)[h, order[h]] for h in range(2)]))
    return keys, values


def greedy(session, question, count):
    tail, tokens = Tail(), []
    logits = session.forward(question, tail)
    for _ in range(count):
        token = int(logits.argmax())
        if token in session.model.stop_ids:
            break
        tokens.append(token)
        logits = session.forward([token], tail)
    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_equal_those_of_the_pruned_cache(family):
    model = tiny.model(family, dtype=torch.float64)
    documents = [ids(N, 1), ids(N, 2)]
    questions = [ids(9, 3), ids(4, 4), ids(7, 5), ids(7, 6), ids(2, 7), ids(8, 8)]
    full = [dense(prefill(model, document, plan_tail(8, N), get("full"), N).layers) for document in documents]
    keys = [torch.stack([full[d][0][layer] for d in range(2)]) for layer in range(3)]
    values = [torch.stack([full[d][1][layer] for d in range(2)]) for layer in range(3)]
    rows, want = [], []
    for number, question in enumerate(questions):
        document = number % 2
        name, kept = [("adadropkv", 20), ("snapkv", 9), ("keydiff", 30)][number // 2]
        pruned = prefill(model, documents[document], plan_tail(8, N), get(name), kept).layers
        keep = torch.zeros(3, 2, N, dtype=torch.bool)
        for layer, entries in enumerate(pruned):
            for head in range(2):
                own = entries.positions[int(entries.offsets[head]) : int(entries.offsets[head + 1])].long()
                keep[layer, head, own] = True
        rows.append(Row(document, tuple(question), keep))
        seam = Seam.of(model.tokenizer, name=model.id)
        want.append(greedy(Session(model, seam, Prefix(pruned, model.geometry, N)), question, 10))
    got = answer_rows(model, keys, values, rows, starts=[N] * 6, max_new_tokens=10)
    assert got == want


def test_rows_must_be_even():
    model = tiny.model("llama")
    layers = [torch.zeros(2, 2, N, 16)] * 3
    keep = torch.ones(3, 2, N, dtype=torch.bool)
    with pytest.raises(ValueError, match="same number of rows"):
        answer_rows(
            model, layers, layers, [Row(0, (5,), keep)] * 2 + [Row(1, (5,), keep)], starts=[N] * 3, max_new_tokens=2
        )
