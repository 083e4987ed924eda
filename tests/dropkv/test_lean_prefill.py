"""Cuts, memory that runs out, and what is not computed: the parts of a prefill that keep it small."""

from __future__ import annotations

import math

import pytest
import torch

from dropkv.compression import compress_document, estimate
from dropkv.documents import Document
from dropkv.fidelity import HeldOut
from dropkv.footprint import Footprint, footprint
from dropkv.kernels.causal import pieces
from dropkv.kernels.merge import merge
from dropkv.methods import get
from dropkv.observers import Observation, Probe
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from dropkv.replays import kind_of
from dropkv.settings import CompressSettings
from dropkv.spans import Cuts, Span
from tests import tiny

N = 90
HELD = HeldOut((5, 6, 7, 8, 9), (2, 3, 4), ((0, 5),))


def ids(count: int) -> list[int]:
    return torch.randint(3, 590, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def all_spans(cuts: Cuts, total: int) -> list[tuple[int, int, int]]:
    found, start = [], 0
    while start < total:
        span = cuts.span(start)
        found.append((span.start, span.stop, len(span.probes)))
        start = span.stop
    return found


def probes_of(*lengths: int, last: int | None = None) -> list[Probe]:
    return [Probe((1,) * length, (0, 4), (), None) for length in lengths] + (
        [] if last is None else [Probe((1,) * last, (0, 4), (), observing=0)]
    )


def test_probes_stand_alone_or_in_groups_that_fit():
    probes = probes_of(3, 3, 4, 20, 2, last=2)
    slices = [(0, 10, 0), (10, 20, 0), (20, 25, 0)]
    alone = [(25, 28, 1), (28, 31, 1), (31, 35, 1), (35, 55, 1), (55, 57, 1), (57, 59, 1)]
    assert all_spans(Cuts(25, probes, 10), 59) == slices + alone
    grouped = [(25, 35, 3), (35, 55, 1), (55, 57, 1), (57, 59, 1)]  # the held-out text joins nobody
    assert all_spans(Cuts(25, probes, 10, together=True), 59) == slices + grouped
    assert Cuts(25, probes, 10, together=True).span(25).probes == tuple(probes[:3])


def test_cuts_get_finer_until_nothing_can_be_cut():
    cuts = Cuts(1000, probes_of(300, 300), 600, together=True)
    assert cuts.span(0).stop == 600 and cuts.span(1000) == Span(1000, 1600, tuple(probes_of(300, 300)))
    assert cuts.halve(cuts.span(0)) and cuts.size == 300
    assert cuts.span(1000).stop == 1300
    assert not cuts.halve(cuts.span(1000))  # one probe
    assert cuts.halve(Span(300, 400)) and cuts.size == 64  # smaller than a slice, as the last one may be
    assert not cuts.halve(Span(0, 64))


class Scarce:
    """Makes a layer fail for want of memory where a slice has more than so many tokens, behind its attention as before it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.failed = limit, 0

    def __call__(self, _module: object, args: tuple[torch.Tensor, ...], *_: object) -> None:
        if args[0].shape[1] > self.limit:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")


@pytest.mark.parametrize("where", ["self_attn.q_proj", "mlp"])
@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_a_prefill_goes_on_with_smaller_slices(observe, where):
    """The same entries as with so small slices from the start; also where queries had been observed before memory ran out."""
    model = tiny.model("llama", dtype=torch.float64)
    document = ids(300)
    seam = Seam.of(model.tokenizer, name=model.id)
    observation = plan_tail(8, 300) if observe == "tail" else plan_replays(seam, document, 6, 40)
    method = get("adadropkv") if observe == "tail" else get("adadropkv").under_replay(6)
    want = prefill(model, document, observation, method, 60, slice_tokens=75, held=HELD)
    scarce = Scarce(80)
    module = model.network.model.layers[1].get_submodule(where)
    handle = module.register_forward_pre_hook(scarce)
    got = prefill(model, document, observation, method, 60, slice_tokens=300, held=HELD)
    handle.remove()
    assert scarce.failed == 2  # 300 tokens, then 150; every later slice has 75
    for mine, theirs in zip(got.layers, want.layers, strict=True):
        assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.admit, theirs.admit)
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-9) and torch.allclose(mine.scores, theirs.scores)
    assert got.predictions.nll == pytest.approx(want.predictions.nll, abs=1e-6)


def test_memory_that_is_too_small_for_the_smallest_slice_is_an_error():
    model = tiny.model("llama")
    handle = model.network.model.layers[0].mlp.register_forward_pre_hook(Scarce(50))
    with pytest.raises(torch.OutOfMemoryError):
        prefill(model, ids(300), plan_tail(8, 300), get("dropkv"), 60)
    handle.remove()


@pytest.mark.parametrize("held", [None, HELD])
def test_the_last_layer_computes_what_is_asked_for(held):
    """Its MLP sees the held-out text and nothing else, and no more than that is normalised behind it."""
    model = tiny.model("llama")
    seen: dict[str, list[int]] = {"mlp": [], "norm": [], "o_proj": []}
    last = model.network.model.layers[-1]
    modules = {"mlp": last.mlp, "norm": model.network.model.norm, "o_proj": last.self_attn.o_proj}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _m, args, name=name: seen[name].append(args[0].shape[1]))
    document = ids(N)
    seam = Seam.of(model.tokenizer, name=model.id)
    prefill(model, document, plan_replays(seam, document, 6, 32), get("adadropkv").under_replay(6), 30, held=held)
    own = [] if held is None else [5]
    assert seen == {"mlp": own, "norm": own or [1], "o_proj": own}


def test_attention_over_two_sets_of_keys_is_that_over_both():
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, count, 16, generator=generator) for count in (7, 40, 40))
    logits = q @ k.transpose(1, 2)
    parts = [
        (torch.softmax(logits[..., own], -1) @ v[:, own], logits[..., own].logsumexp(-1))
        for own in (slice(0, 9), slice(9, 40))
    ]
    out, log_sum = parts[0][0].clone(), parts[0][1].clone()
    log_sum = merge(out, log_sum, *parts[1])
    assert torch.allclose(out, torch.softmax(logits, -1) @ v, atol=1e-5)
    assert torch.allclose(log_sum, logits.logsumexp(-1), atol=1e-5)
    alone = parts[0][0].clone()
    same = merge(alone, log_sum, parts[1][0], torch.full_like(parts[1][1], -math.inf))
    assert torch.equal(alone, parts[0][0]) and torch.equal(same, log_sum)


def test_keys_are_cut_into_few_lengths():
    assert pieces(3 * 8192 + 5) == [3 * 8192, 5] and pieces(0) == [] and pieces(8000) == [8000]
    assert pieces(131072 - 8192) == [3 * 32768, 3 * 8192]
    lengths = {length for slices in range(17) for length in pieces(8192 * slices)}
    assert len(lengths) == 7 and all(sum(pieces(n)) == n for n in range(0, 1 << 20, 4099))


def test_the_largest_slice_that_fits_is_taken():
    needed = Footprint(weights=1000, whole=500, per_token=1, between=700, slices=(800, 400, 200))
    assert [needed.peak(size) for size in needed.slices] == [2300, 2200, 2200]
    assert needed.slice_tokens(None) == 800
    assert needed.slice_tokens(2400) == 400  # 95 % of it are 2280
    assert needed.slice_tokens(100) == 200


def test_the_expected_memory_counts_what_a_prefill_holds(tiny_llama):
    """More tokens, probes and kept entries cost what they are; the weights are counted once."""

    def of(tokens: int, probes: int = 0, kept: int = 0) -> int:
        observation = Observation(0, tuple(probes_of(*[10] * probes)), {})
        return footprint(tiny_llama, tokens, observation, None, kept=kept).whole

    per_token = 64 * 4 * 2 + 2 * 16 * 4  # hidden states, one copy, and rotary tables
    layer = 2 * 32 * 4  # keys and values of two heads
    assert of(200) - of(100) == 100 * (per_token + layer)
    assert of(100, probes=3) - of(100) == 30 * per_token
    assert of(100, kept=10) - of(100) == 3 * 10 * (layer + 2 * 12)


def test_a_report_says_what_was_expected(tiny_llama):
    document = Document.of("The harbour master kept the ledger in a locked drawer. " * 4, "note")
    settings = CompressSettings(budget=0.5, chunk=40)
    report = compress_document(tiny_llama, document, settings).report
    expected = estimate(tiny_llama, document, settings).peak_bytes
    assert report.expected_memory_bytes == pytest.approx(expected, rel=0.2)
    assert 0.3 < report.peak_memory_bytes / report.expected_memory_bytes < 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adadropkv", "step"),
        ("dropkv", "step"),
        ("auto", "every"),
        ("auto-told", "told"),
        ("snapkv", "p"),
        ("adakv", "p"),
        ("kvzip", "p"),
        ("criticalkv", "p"),
        ("cake", None),
    ],
)
def test_the_kernels_for_replays_take_plain_maxima(name, kind):
    assert kind_of(get(name).under_replay(6)) == kind
    assert kind_of(get("dropkv")) is None  # a sum, as the tail has it
