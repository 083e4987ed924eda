"""Answers from masks over shared full caches are those of the real pruned cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dropkv.bench.answers import LOOK, Row, answer_rows
from dropkv.bench.kept import same_sets
from dropkv.bench.masked_run import _blocked, attention_with_sums
from dropkv.cache import Prefix, Tail
from dropkv.generate import Session
from dropkv.methods import get
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from tests import tiny
from tests.kernel_checks import run_check

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


def test_rows_that_end_are_left_out_and_nothing_else_changes():
    """Many stop tokens, so that rows end at different steps; the answers are those of each row alone."""
    model = tiny.model("llama", dtype=torch.float64)
    model = replace(model, stop_ids=frozenset(range(0, tiny.VOCABULARY, 24)))
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn(2, 2, N, 16, generator=generator, dtype=torch.float64) for _ in range(3)] for _ in "kv"
    )
    rows = [
        Row(number % 2, tuple(ids(3 + number % 4, number)), torch.rand(3, 2, N, generator=generator) < 0.5)
        for number in range(16)
    ]
    alone = []
    for row in rows:
        own_keys, own_values = ([x[row.document : row.document + 1] for x in full] for full in (keys, values))
        one = Row(0, row.tokens, row.keep)
        alone += answer_rows(model, own_keys, own_values, [one], starts=[N], max_new_tokens=4 * LOOK)
    lengths = [len(tokens) for tokens in alone]
    assert min(lengths) < LOOK < max(lengths)  # or the test shows nothing
    assert answer_rows(model, keys, values, rows, starts=[N] * 16, max_new_tokens=4 * LOOK) == alone


def test_rows_that_are_decided_end_early_and_nothing_else_changes():
    model = replace(tiny.model("llama"), stop_ids=frozenset())
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(1, 2, N, 16, generator=generator) for _ in range(3)] for _ in "kv")
    rows = [Row(0, tuple(ids(4, number)), torch.rand(3, 2, N, generator=generator) < 0.5) for number in range(4)]
    given = {"starts": [N] * 4, "max_new_tokens": 3 * LOOK}
    whole = answer_rows(model, keys, values, rows, **given)
    asked = []

    def decided(row, tokens):
        asked.append((row, len(tokens)))
        return row in (0, 2) and len(tokens) > LOOK + 1

    got = answer_rows(model, keys, values, rows, **given, decided=decided)
    assert [len(answer) for answer in got] == [2 * LOOK + 1, 3 * LOOK, 2 * LOOK + 1, 3 * LOOK]
    assert all(answer == full[: len(answer)] for answer, full in zip(got, whole, strict=True))
    assert asked == [(row, look * LOOK + 1) for look in (1, 2) for row in range(4)]
    assert answer_rows(model, keys, values, rows, **given, decided=lambda row, tokens: True) == [
        full[: LOOK + 1] for full in whole
    ]


def test_rows_must_be_even():
    model = tiny.model("llama")
    layers = [torch.zeros(2, 2, N, 16)] * 3
    keep = torch.ones(3, 2, N, dtype=torch.bool)
    with pytest.raises(ValueError, match="same number of rows"):
        answer_rows(
            model, layers, layers, [Row(0, (5,), keep)] * 2 + [Row(1, (5,), keep)], starts=[N] * 3, max_new_tokens=2
        )


def test_equal_kept_sets_are_found():
    keep = torch.rand(5, 2, 3, 400, generator=torch.Generator().manual_seed(0)) < 0.3
    keep[3], keep[4] = keep[1], keep[0]
    assert same_sets(keep) == [0, 1, 2, 1, 0]
    keep[4, 1, 2, 399] ^= True
    assert same_sets(keep) == [0, 1, 2, 1, 4]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_and_its_sums_are_the_definition(softcap):
    """A row that keeps nothing has no weight beside any other."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (5, 37, 37))
    keep = torch.rand(2, 3, 5, 37, generator=generator) < 0.4
    keep[0, 1, 2] = False
    out, sums = attention_with_sums(q, k, v, _blocked(keep, q)[..., :37], 0.3, softcap)
    logits = (q.double() @ k.double().transpose(2, 3)) * 0.3
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits.masked_fill_(~keep, -torch.inf)
    want = torch.softmax(logits, -1).nan_to_num(0) @ v.double()
    some = keep.any(-1)
    assert torch.allclose(out[some].double(), want[some], atol=1e-5)
    assert torch.allclose(sums[some].double(), logits.logsumexp(-1)[some], atol=1e-5)
    assert float(sums[0, 1, 2]) < -1e30 and bool(out.isfinite().all())


def test_the_kernels_of_the_bench_compile():
    run_check(Path(__file__).with_name("check_accuracy_compiles.py"), interpret=False)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernel_of_a_step_equals_the_definition(dtype):
    run_check(Path(__file__).with_name("check_masked_decode.py"), dtype)
