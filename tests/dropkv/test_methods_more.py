"""Methods without independent values, worked out by hand; and what every method must do inside a prefill."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from dropkv.compression import compress_document, resolve_method
from dropkv.documents import Document
from dropkv.errors import UsageError
from dropkv.kernels.moments import Moments, rotate, unrotate
from dropkv.kernels.score import Attended, Window
from dropkv.methods import Gathered, LayerContext, LayerScores, get, names, score
from dropkv.methods._choice import preference
from dropkv.methods.restkv import drift
from dropkv.observers.question import plan_question
from dropkv.observers.questions import plan_questions
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill, read
from dropkv.settings import CompressSettings
from tests import tiny
from tests.dropkv.reference import record
from tests.dropkv.test_prefill import N, ids, seam_of
from tests.vectors import score_files

LN = math.log
# Two queries of two heads on three keys; all logits are logarithms, so that the probabilities are plain fractions.
K = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
V = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [2.0, 0.0]]])
Q = torch.tensor([[[LN(1), LN(3), 0], [LN(2), LN(1), LN(1)]], [[LN(1), LN(1), 0], [LN(1), LN(1), LN(2)]]])
# p: head 0: (1/4, 3/4, -), (1/2, 1/4, 1/4); head 1: (1/2, 1/2, -), (1/4, 1/4, 1/2)


def close(got: torch.Tensor, want: list[list[float]], tolerance: float = 1e-5) -> bool:
    return torch.allclose(got.double(), torch.tensor(want, dtype=torch.float64), atol=tolerance, rtol=tolerance)


def test_h2o_by_hand():
    """The sum over the queries, the mean over the heads."""
    assert close(score("h2o", Q, K, V, scale=1.0), [[0.75, 0.875, 0.375]])


def test_kvzip_by_hand():
    assert close(score("kvzip", Q, K, V, scale=1.0), [[0.5, 0.75, 0.5]])


def test_knorm_by_hand():
    assert close(score("knorm", Q, torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), V[:, :2], scale=1.0), [[-5.0, -1.0]])


def test_expected_attention_by_hand():
    """One head, mean query (1, 0), covariance diag(0, 4) (divided by the count); 4 sinks, then two keys.

    With scale 1/2 the logits of (2, 0) and (0, 2 sqrt 2) are 1/2 * 2 = 1 and 1/8 * 4 * 8 = 4.
    """
    q = torch.tensor([[[1.0, 2.0], [1.0, -2.0]]])
    k = torch.tensor([[[9.0, 9.0]] * 4 + [[2.0, 0.0], [0.0, 2 * math.sqrt(2)]]])
    v = torch.tensor([[[1.0, 1.0]] * 4 + [[3.0, 4.0], [0.0, 1.0]]])
    share = 1 / (1 + math.exp(3))
    top = max(5 * share, 1 - share)
    assert close(score("expected-attention", q, k, v, scale=0.5), [[top] * 4 + [5 * share, 1 - share]])


def test_defensivekv_by_hand():
    """One query with p = (1/2, 1/4, 1/8, 1/8), averaged over 5 neighbours (zeros outside): (7/8, 1, 1, 1/2) / 5, scaled to sum 1:
    (7, 8, 8, 4) / 27. Nothing lies below the average but the last: 1/4. The norms are 2, 1, 1, 4 of 8."""
    q = torch.tensor([[[LN(4), LN(2), 0.0, 0.0]]])
    k = torch.eye(4).unsqueeze(0)
    v = torch.tensor([[[1.0, -1.0], [1.0, 0.0], [0.0, 1.0], [4.0, 0.0]]])
    got = score("defensivekv", q, k, v, scale=1.0, wo=torch.eye(2))
    assert close(got, [[7 / 27 / 4, 8 / 27 / 8, 8 / 27 / 8, 1 / 8]])


def test_defensivekv_keeps_the_safe_set_first_by_hand():
    """Without forced tokens 0.9 of (0.5, 0.25, 0.125, 0.125) takes all four; at two a head the first two of each are safe, whatever the
    score says; with the last one forced, 0.775 more is wanted, which takes three."""
    method = get("defensivekv")
    raw = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    mass = torch.tensor([[[0.5, 0.25, 0.125, 0.125], [0.93, 0.05, 0.01, 0.01]]])
    ranked = method.ranked(method, LayerScores(raw, mass), 2, [])
    assert (ranked > 40).tolist() == [[True, True, False, False], [True, False, False, False]]
    ranked = method.ranked(method, LayerScores(raw, mass), 4, [3])
    assert (ranked > 40).tolist() == [[True, True, True, False], [True, False, False, False]]


def test_criticalkv_halves_by_hand():
    """Budget 4 without forced tokens: two by attention (0 and 1), two by attention times value (5 and 4)."""
    method = get("criticalkv")
    raw = torch.tensor([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    scores = LayerScores(raw, torch.tensor([[[1.0, 1.0, 1.0, 1.0, 10.0, 30.0]]]))
    bare = replace(method, pool=None, forced_last=0)
    kept = bare.choose([scores], 4)[0]
    assert kept.positions.tolist() == [0, 1, 5, 4] and kept.admit.tolist() == [1, 2, 3, 4]
    assert not method.nested
    forced = replace(method, pool=None, forced_last=3)  # more than half: stage one is the forced ones
    assert forced.choose([scores], 4)[0].positions.tolist() == [5, 4, 3, 0]


def test_adacriticalkv_shares_by_attention_then_halves():
    """Six places for two heads by attention: five for the first and one for the second, as for adakv with alpha 0.2."""
    raw = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 2.0, 1.0, 0.5, 0.1, 0.0]])
    sizes = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 1.0, 100.0], [1.0] * 6]])
    method = replace(get("adacriticalkv"), pool=None, forced_last=0)
    kept = method.choose([LayerScores(raw, sizes)], 3)[0]
    assert kept.counts.tolist() == [6, 0]
    raw[1] += 4.5  # 7.5, 6.5, 5.5
    kept = method.choose([LayerScores(raw, sizes)], 3)[0]
    assert kept.counts.tolist() == [4, 2]
    assert kept.positions.tolist() == [0, 1, 5, 2, 0, 1]
    assert kept.admit.tolist() == [1, 2, 3, 3, 1, 2]


def test_andpro_by_hand():
    """Head 0, query 1: a = (2, 9/4); with values (3, 4), (0, 1), (2, 0) the products are 15, 9/4, 4."""
    got = score("andpro", Q[:1, 1:], K, V, scale=1.0)
    assert close(got, [[15 / 2, 9 / 16, 1.0]])


def test_restkv_follows_the_queries_by_hand(monkeypatch):
    """The best key of the first query is at 0, of the second at 4: D = -4; with scale 2 the window is 5 wide and shifted back by 1."""
    monkeypatch.setattr("dropkv.methods.restkv.SCALE", 2)
    q = torch.zeros(1, 1, 2, 6)
    q[..., 0, 0], q[..., 1, 4] = 9.0, 9.0
    k = torch.eye(6).unsqueeze(0)
    far = drift(Window(q, k, k, 1.0))
    assert far[0, 0, 0] == -4
    method = get("restkv")
    ramp = torch.arange(6.0).unsqueeze(0)
    got = method.ranked(method, LayerScores(ramp, far), 1, [])
    # place j averages j - 3 to j + 1, edges repeated
    assert close(
        got, [[(0 + 0 + 0 + 0 + 1) / 5, (0 + 0 + 0 + 1 + 2) / 5, 6 / 5, 10 / 5, 15 / 5, (2 + 3 + 4 + 5 + 5) / 5]]
    )
    wide = method.ranked(method, LayerScores(ramp, -torch.full((1, 1, 6), -7.0)), 1, [])  # D = 7: 7 wide, forward by 3
    assert close(wide[:, :1], [[(0 + 1 + 2 + 3 + 4 + 5 + 5) / 7]])
    assert close(method.pooled(ramp)[:, :1], [[3 / 5]])


def test_cake_terms_by_hand():
    """p of key 0: (1/4, 1/2) and (1/2, 1/4), variance 1/32 each; of key 1: 1/8 and 1/32; the last column is left out."""
    layer = get("cake").layer_scores(LayerContext(K, V, 1.0, q=Q[None]))
    variance = 1 / 32 + 1 / 32 + 1 / 8 + 1 / 32
    entropy = sum(-p * LN(p) for p in (1 / 4, 3 / 4, 1 / 2, 1 / 4, 1 / 2, 1 / 2, 1 / 4, 1 / 4))
    assert preference(layer, 1, 3) == pytest.approx(variance * entropy, rel=1e-5)
    assert close(layer.raw[:, :2], [[3 / 8 + 200 / 32, (4 / 8 + 3 / 8) / 2 + 100 * (1 / 8 + 1 / 32)]])


@pytest.mark.parametrize("block,together", [(1 << 20, 1), (300, 1), (1, 1), (1 << 20, 4), (2500, 3)])
@pytest.mark.parametrize("name", ["andpro", "cake", "caote", "criticalkv", "defensivekv", "laprox", "restkv", "tova"])
def test_blocks_do_not_change_scores(monkeypatch, block, together, name):
    """Window and known outputs, few queries a block or many, one KV head or several: scores and what stands beside them agree."""
    path = score_files()[-1]
    with safe_open(path, "pt") as file:
        q, k, v, wo = (file.get_tensor(part) for part in ("q", "k", "v", "wo"))
    context = LayerContext(k, v, 0.25, q=q.view(4, 3, 8, 16), wo=wo)
    want = get(name).layer_scores(context)
    monkeypatch.setattr("dropkv.kernels.score.BLOCK_ELEMENTS", block)
    monkeypatch.setattr("dropkv.kernels.score.CPU_HEADS", together)
    got = get(name).layer_scores(context)
    assert torch.allclose(want.raw, got.raw, rtol=1e-4, atol=1e-9)
    if want.beside is not None:
        assert torch.allclose(want.beside, got.beside, rtol=1e-4, atol=1e-4)
    if name == "defensivekv":
        return  # which smooths over the scored keys, so fewer of them are another score
    columns = 100
    logits = torch.einsum("hgmd,hnd->hgmn", context.q, k) * 0.25
    sums = logits.masked_fill(torch.ones(8, 131).triu(124).bool(), -torch.inf).logsumexp(-1)
    known = Attended(
        context.q, k[:, :columns], v[:, :columns], 0.25, context.window(projected=False).attend(), sums, context.roots
    )
    part = get(name).observe(known, context)
    assert torch.allclose(part.raw, want.raw[:, :columns], rtol=1e-3, atol=1e-6)


def test_moments_of_slices_are_those_of_the_whole():
    torch.manual_seed(0)
    q = torch.randn(3, 40, 6, dtype=torch.float64) + 2
    moments = Moments()
    for part in q.split([1, 17, 22], 1):
        moments.add(part)
    assert torch.allclose(moments.mean, q.mean(1))
    assert torch.allclose(moments.covariance, torch.stack([torch.cov(one.T, correction=0) for one in q]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_and_back(interleaved):
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 10, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    turned = rotate(x, angles.cos() * 1.5, angles.sin() * 1.5)
    a, b = (0, 1) if interleaved else (0, 3)
    want = 1.5 * (x[..., a] * angles[:, a].cos() - x[..., b] * angles[:, a].sin())
    assert torch.allclose(turned[..., a], want) and torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.allclose(unrotate(turned, angles.cos() * 1.5, angles.sin() * 1.5), x)


class Collected:
    """A reader that keeps all scores."""

    def __init__(self, methods):
        self.methods = methods
        self.layers = []
        self.contexts = []

    def full(self, layer, context, scores):
        self.layers.append(scores)
        self.contexts.append((context.k.clone(), context.v.clone(), context.q.clone(), context.expected))

    def sliding(self, layer, k, v):
        raise AssertionError("there is no such layer")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("size", [2048, 13])
def test_one_prefill_scores_every_method(family, size):
    """All methods from one pass over the tail equal `score` on that layer's tensors; h2o and the query statistics equal the definition."""
    model = tiny.model(family, dtype=torch.float64)
    reader = Collected([get(name) for name in names()])
    document, observation = ids(N), plan_tail(8, N)
    read(model, document, observation, reader, seed=3, slice_tokens=size)
    recorded = record(model.network, document, observation)
    for index, (scores, (k, v, q, expected)) in enumerate(zip(reader.layers, reader.contexts, strict=True)):
        wo = model.network.model.layers[index].self_attn.o_proj.weight
        for method, got in zip(reader.methods, scores, strict=True):
            if method.name in ("h2o", "expected-attention", "criticalkv", "adacriticalkv"):
                continue
            want = score(method.name, q.flatten(0, 1), k, v, scale=0.25, wo=wo, seed=3 + index)
            assert torch.allclose(got.raw, want, rtol=1e-5, atol=1e-9), method.name
        h2o = scores[[method.name for method in reader.methods].index("h2o")].raw
        assert torch.allclose(h2o.double(), recorded[index]["p"].sum(1).view(2, 2, N).mean(1), rtol=1e-5)
        before = unrotated(model, recorded[index]["q"][:, 4:N], 4)
        angles = model.network.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(N, N + 512)[None])
        turn = [
            rotate(torch.eye(16, dtype=torch.float64), c, s).T for c, s in zip(angles[0][0], angles[1][0], strict=True)
        ]
        average = torch.stack(turn).mean(0)
        assert torch.allclose(expected.mean, before.mean(1) @ average.T, atol=1e-5)
        spread = torch.stack([torch.cov(one.T, correction=0) for one in before])
        assert torch.allclose(expected.covariance, average @ spread @ average.T, atol=1e-5)


def unrotated(model, q, first):
    """Queries before RoPE from the model's own angles, pair by pair."""
    cos, sin = model.network.model.rotary_emb(q, torch.arange(first, first + q.shape[1])[None])
    a, b, c, s = q[..., :8], q[..., 8:], cos[0, :, :8], sin[0, :, :8]
    return torch.cat([a * c + b * s, b * c - a * s], -1)


def test_probes_of_every_method_agree_with_a_plain_restatement():
    """Replays: p of the recorded attention, its largest over queries and group; weighed, projected and summed as each method says."""
    model = tiny.model("llama", dtype=torch.float64)
    document = ids(N)
    observation = plan_replays(seam_of(model), document, 6, 32)
    methods = [
        get(name).under_replay(6)
        for name in ("andpro", "caote", "criticalkv", "kvzip", "laprox", "restkv", "tova", "cake")
    ]
    reader = Collected(methods)
    read(model, document, observation, reader)
    for index, (layer, scores) in enumerate(
        zip(record(model.network, document, observation), reader.layers, strict=True)
    ):
        got = {method.name: one.raw.double() for method, one in zip(methods, scores, strict=True)}
        wo = model.network.model.layers[index].self_attn.o_proj.weight.detach().T.reshape(4, 16, -1)
        row = N
        for probe in observation.probes:
            m, (start, stop) = len(probe.ids), probe.scored
            p = layer["p"][:, row : row + m, start:stop]
            a = layer["a"][:, row : row + m]
            rest = layer["p"][:, row : row + m].sum(-1, keepdim=True) - p
            row += m
            v = layer["v"].repeat_interleave(2, 0)[:, start:stop]
            step = a.unsqueeze(2) - v.unsqueeze(1)
            odds = p / (rest + 1e-6)
            top = lambda x: x.amax(1).view(2, 2, -1).amax(1)  # noqa: E731
            want = {
                "andpro": top(p * (a @ v.transpose(1, 2))),
                "caote": top(odds * step.norm(dim=-1)),
                "criticalkv": top(p),
                "kvzip": top(p),
                "laprox": top(p * (v @ wo).norm(dim=-1).unsqueeze(1)),
                "restkv": top(odds * (step @ wo.unsqueeze(1)).norm(dim=-1)),
                "tova": p[:, -1].mean(0).expand(2, -1),
                "cake": (p.mean(1) + 200 * p.var(1)).view(2, 2, -1).amax(1),
            }
            for name, value in want.items():
                assert torch.allclose(got[name][:, start:stop], value, rtol=1e-4, atol=1e-7), name


def test_a_question_observes_with_its_last_tokens():
    model = tiny.model("llama", dtype=torch.float64)
    document, question = ids(N), ids(13, seed=5)
    observation = plan_question(question, N, 8, "what?")
    assert observation.description == {"name": "question", "window": 8, "text": "what?"}
    reader = Collected([get("snapkv"), get("dropkv"), get("restkv"), get("cake")])
    read(model, document, observation, reader, slice_tokens=40)
    for layer, scores in zip(record(model.network, document, observation), reader.layers, strict=True):
        p, a = layer["p"][:, N + 5 : N + 13, :N], layer["a"][:, N + 5 : N + 13]
        assert torch.allclose(scores[0].raw.double(), p.sum(1).view(2, 2, N).mean(1), rtol=1e-5)
        distance = (a.unsqueeze(2) - layer["v"].repeat_interleave(2, 0)[:, None, :N]).norm(dim=-1)
        want = ((p / (1 - p + 1e-6) * distance) ** 2).sum(1).view(2, 2, N).mean(1)
        assert torch.allclose(scores[1].raw.double(), want, rtol=1e-4)
        assert preference(scores[3], 8, N) == pytest.approx(
            float(-(p * (p + 1e-10).log())[..., : N - 8].sum() * p.var(1)[..., : N - 8].sum()), rel=1e-4
        )


def test_questions_take_the_largest_of_any():
    model = tiny.model("llama", dtype=torch.float64)
    document, texts = ids(N), [ids(5, seed=5), ids(9, seed=6)]
    observation = plan_questions(["a", "b"], texts, N, "list.txt")
    assert observation.description["count"] == 2 and observation.longest_probe == 9
    reader = Collected([get("snapkv").under_replay(6)])
    read(model, document, observation, reader)
    for layer, scores in zip(record(model.network, document, observation), reader.layers, strict=True):
        want = layer["p"][:, N:, :N].amax(1).view(2, 2, N).amax(1)
        assert torch.allclose(scores[0].raw.double(), want, rtol=1e-5)


@pytest.mark.parametrize("name", sorted({*names()} - {"full"}))
@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_every_method_spends_the_budget_exactly(tiny_llama, name, observe):
    """kv_heads * kept entries a layer on average, the forced ones among them, none twice, in ascending admit."""
    document = ids(N)
    method, observation = get(name), plan_tail(8, N)
    if observe == "replay":
        method, observation = method.under_replay(6), plan_replays(seam_of(tiny_llama), document, 6, 32)
    got = prefill(tiny_llama, document, observation, method, 25, slice_tokens=40)
    assert sum(layer.positions.numel() for layer in got.layers) == 3 * 2 * 25
    for layer in got.layers:
        for head in range(2):
            own = slice(int(layer.offsets[head]), int(layer.offsets[head + 1]))
            positions, admit = layer.positions[own].tolist(), layer.admit[own]
            assert len(set(positions)) == len(positions) and set(method.forced(N)) <= set(positions)
            assert bool((admit.diff() >= 0).all()) and int(admit.min()) >= 1 and int(admit.max()) <= 25


@pytest.mark.parametrize("name", sorted(name for name in names() if get(name).nested))
@pytest.mark.parametrize("most", [40, N])
def test_a_smaller_budget_is_a_prefix_by_admit(tiny_llama, name, most):
    """What `shrink` does with admit equals compressing with the smaller budget, layer by layer."""
    document, observation = ids(N), plan_tail(8, N)
    large = prefill(tiny_llama, document, observation, get(name), most)
    small = prefill(tiny_llama, document, observation, get(name), 20)
    for big, little in zip(large.layers, small.layers, strict=True):
        keep = big.admit <= 20
        assert torch.equal(big.positions[keep], little.positions) and torch.equal(big.admit[keep], little.admit)
        assert torch.equal(big.keys[keep], little.keys)


@pytest.mark.parametrize(
    "name", ["auto", "auto-told", "cake", "kvzip", "laprox", "pyramidkv", "h2o", "expected-attention", "criticalkv"]
)
def test_sliding_layers_take_no_part_in_shared_budgets(name):
    """The first of three layers slides over 16 tokens: its last 16 entries stay, the others share 2 * 2 * 25 places."""
    model = tiny.model(
        "qwen2",
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    assert [layer.kind for layer in model.geometry] == ["sliding", "full", "full"]
    document = ids(N)
    got = prefill(
        model, document, plan_replays(seam_of(model), document, 6, 32), get(name).under_replay(6), 25, slice_tokens=40
    )
    assert got.layers[0].positions.tolist() == [*range(N - 1, N - 17, -1)] * 2
    assert sum(layer.positions.numel() for layer in got.layers[1:]) == 100


def test_the_table_of_observers_changes_only_what_it_says():
    assert get("tova").under_replay(9).reduction == get("tova").reduction
    assert get("cake").under_replay(9).reduction.group == "max"
    assert get("kvzip").under_replay(9).pool is None and get("restkv").under_replay(9).pool.kind == "max"
    for name in ("h2o", "expected-attention", "knorm", "streamingllm"):
        assert get(name).under_replay(9) == get(name)
    with pytest.raises(UsageError, match="--observe replay"):
        resolve_method(CompressSettings(method="kvzip", observe="tail"), 5)
    assert resolve_method(CompressSettings(method="adadropkv", observe="questions:a.txt"), 9) == get(
        "adadropkv"
    ).under_replay(9)
    assert resolve_method(CompressSettings(method="adadropkv", observe="question:why?"), 9) == get("adadropkv")
    for wrong, words in (
        ("stars", "unknown observer"),
        ("questions", "FILE"),
        ("question: ", "nothing behind its colon"),
    ):
        with pytest.raises(UsageError, match=words):
            CompressSettings(observe=wrong)


@pytest.mark.parametrize("observe", ["question:Who kept the ledger?", "questions:{}"])
def test_known_questions_compress_a_document(tiny_llama, tmp_path, observe):
    """The bundle of settings, seam and probes as commands use them; the observer is described in the file."""
    path = tmp_path / "list.txt"
    path.write_text("Who kept the ledger?\nWhere?\n")
    text = "The harbour master kept the ledger in a locked drawer. " * 4
    done = compress_document(
        tiny_llama, Document.of(text), CompressSettings(observe=observe.format(path), method="laprox", budget=0.5)
    )
    metadata = done.metadata
    assert metadata.observer["name"] == observe.split(":")[0] and metadata.budget.rule == "model-wide"
    assert metadata.budget.alpha == 0 and metadata.budget.nested
    assert metadata.budget.forced_last == (8 if metadata.observer["name"] == "question" else 4)
    assert done.report.kept_entries == 3 * 2 * done.report.kept
    assert done.save(tmp_path / "a.kv") > 0


def test_what_a_method_needs_is_said_when_it_is_missing():
    for name in ("laprox", "criticalkv", "restkv", "defensivekv"):
        with pytest.raises(UsageError, match="output projection"):
            score(name, Q, K, V, scale=1.0)


def test_gathered_scores_are_the_largest_and_may_be_negative():
    gathered = Gathered()
    assert gathered.scores() is None
    gathered.add(LayerScores(torch.tensor([[-3.0, -1.0]])), 1, 4)
    gathered.add(LayerScores(torch.tensor([[-2.0]])), 2, 4)
    assert gathered.scores().raw.tolist() == [[0.0, -3.0, -1.0, 0.0]]
