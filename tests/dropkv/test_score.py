"""Window scores against independent float64 values and a plain float64 restatement of each formula."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from dropkv.kernels.score import MAX_MAX, Attended, Window, score_blocks
from dropkv.methods import get, names, score
from dropkv.methods._base import odds_times_distance
from tests.vectors import score_files

SCORED = (
    "andpro", "cake", "caote", "criticalkv_stage2", "dropkv", "dropkv_replay", "keydiff", "laprox", "max_probability", "restkv", "snapkv",
    "streamingllm", "tova",
)  # fmt: skip


def per_head_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("path", score_files(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_scores_equal_the_vectors(path, name):
    with safe_open(path, "pt") as file:
        q, k, v, wo = (file.get_tensor(part) for part in ("q", "k", "v", "wo"))
        got = score(name, q, k, v, scale=0.25, wo=wo)
        assert got.dtype == torch.float32
        assert per_head_error(got, file.get_tensor(f"score.{name}")) < 1e-5  # hot heads too, where 1e-4 would do


@pytest.mark.parametrize("path", score_files(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_adaptive_methods_share_the_score_of_their_uniform_twin(path):
    with safe_open(path, "pt") as file:
        q, k, v = (file.get_tensor(name) for name in "qkv")
        assert torch.equal(score("adadropkv", q, k, v, scale=0.25), score("dropkv", q, k, v, scale=0.25))
        assert torch.equal(score("adakv", q, k, v, scale=0.25), score("snapkv", q, k, v, scale=0.25))


@pytest.mark.parametrize("path", score_files(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_pooled_scores_and_outputs_equal_the_vectors(path):
    with safe_open(path, "pt") as file:
        q, k, v = (file.get_tensor(name) for name in "qkv")
        for name in ("dropkv", "snapkv"):
            pooled = get(name).pooled(score(name, q, k, v, scale=0.25))
            assert per_head_error(pooled, file.get_tensor(f"pooled.{name}.max11")) < 1e-5
        outputs = Window(q.view(4, 3, 8, 16), k, v, 0.25).attend()
        want = file.get_tensor("attention_output")
        assert float((outputs - want).norm() / want.norm()) < 1e-6


def plain(q, k, v, scale, columns, softcap=None, reach=None):
    """p, a and the unsquared odds score of every query in float64, from their definitions: [kv_heads, G, m, n] and [.., d_v]."""
    q, k, v = q.double(), k.double(), v.double()
    m, n = q.shape[2], k.shape[1]
    logits = torch.einsum("hgmd,hnd->hgmn", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    own = torch.arange(n - m, n).unsqueeze(1)
    key = torch.arange(n)
    hidden = key > own
    if reach:
        hidden |= own - key >= reach
    p = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    a = torch.einsum("hgmn,hnd->hgmd", p, v)
    distance = (a.unsqueeze(3) - v[:, None, None]).norm(dim=-1)
    rest = torch.stack([p.sum(-1) - p[..., j] for j in range(n)], -1)
    return p, a, (p / (rest + 1e-6) * distance)[..., :columns]


@pytest.mark.parametrize("block", [1 << 19, 100, 1])
@pytest.mark.parametrize("softcap,reach", [(None, None), (5.0, None), (None, 20)])
def test_blocked_windows_equal_the_definition(monkeypatch, block, softcap, reach):
    monkeypatch.setattr("dropkv.kernels.score.BLOCK_ELEMENTS", block)
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 3, 9, 8), torch.randn(2, 31, 8), torch.randn(2, 31, 5)
    q[0, 1] *= 12  # one loud head
    _, outputs_want, want = plain(q, k, v, 0.3, 17, softcap, reach)
    outputs = torch.full((2, 3, 9, 5), torch.nan)
    window = Window(q, k, v, 0.3, softcap, 17, torch.arange(31), reach, outputs)
    got = score_blocks(window, lambda b: odds_times_distance(b, 1), MAX_MAX)
    assert torch.equal(window.attend(), outputs)
    assert float((outputs - outputs_want).abs().max()) < 1e-5
    reduced = want.amax((1, 2))
    assert float((got - reduced).norm() / reduced.norm()) < 1e-5


def test_an_overwhelming_key_keeps_its_precision():
    """p = 1 - 1e-6: 1 - p in float32 has one digit left, the score still has five."""
    q = torch.tensor([[[[4.0, 0.0]]]])
    k = torch.tensor([[[4.0, 0.0], [0.55, 0.3], [0.5, 1.0]]])
    v = torch.tensor([[[1.0, 2.0], [-3.0, 0.5], [0.25, 4.0]]])
    _, _, want = plain(q, k, v, 1.0, 3)
    got = score_blocks(Window(q, k, v, 1.0), lambda b: odds_times_distance(b, 1), MAX_MAX)
    assert float(((got - want[0, 0]) / want[0, 0]).abs().max()) < 1e-5


@pytest.mark.parametrize("block", [1 << 20, 60])
@pytest.mark.parametrize("name", ["dropkv", "dropkv_replay", "snapkv", "max_probability"])
def test_given_outputs_and_sums_the_scores_are_the_same(monkeypatch, block, name):
    monkeypatch.setattr("dropkv.kernels.score.BLOCK_ELEMENTS", block)
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 3, 9, 8) * 2, torch.randn(2, 31, 8), torch.randn(2, 31, 8)
    window = Window(q, k, v, 0.35, columns=20)
    want = get(name).scores(window)
    sums = torch.logsumexp(
        (torch.einsum("hgmd,hnd->hgmn", q, k) * 0.35).masked_fill(torch.ones(9, 31).triu(23).bool(), -torch.inf), -1
    )
    got = get(name).scores(Attended(q, k[:, :20], v[:, :20], 0.35, window.attend(), sums))
    assert float(get(name).scores(Window(q, k, v, 0.35)).max()) > 0
    assert per_head_error(got, want) < 1e-4


@pytest.mark.parametrize("n,m", [(1, 1), (3, 3), (5, 2)])
def test_short_documents(n, m):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, m, 4), torch.randn(1, n, 4), torch.randn(1, n, 4)
    p, _, _ = plain(q, k, v, 0.5, n)
    got = get("snapkv").scores(Window(q, k, v, 0.5))
    assert torch.allclose(got.double(), p.sum(2).mean(1), atol=1e-6)


def test_controls():
    k = torch.randn(2, 12, 4)
    q = torch.randn(4, 3, 4)
    assert torch.equal(score("random", q, k, k, scale=1, seed=5), score("random", q, k, k, scale=1, seed=5))
    assert not torch.equal(score("random", q, k, k, scale=1, seed=5), score("random", q, k, k, scale=1, seed=6))
    assert score("full", q, k, k, scale=1).shape == (2, 12)


def test_every_file_is_a_method_that_says_what_it_is():
    assert {"adadropkv", "adakv", "dropkv", "full", "keydiff", "random", "snapkv", "streamingllm"} <= set(names())
    for name in names():
        method = get(name)
        assert method.name == name and method.summary
        assert (method.observed is None) != (method.unobserved is None)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(Exception, match="did you mean dropkv"):
        get("dropvk")


def test_replay_changes_what_the_table_says():
    method = get("adadropkv").under_replay(31)
    assert (method.power, method.reduction, method.pool.size, method.forced_first, method.forced_last) == (
        1,
        MAX_MAX,
        5,
        31,
        4,
    )
    assert get("dropkv").under_replay(2).forced_first == 4
    assert get("keydiff").under_replay(31) == get("keydiff")
