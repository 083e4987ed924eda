"""Run by test_window_kernels.py in a process of its own: whether Triton interprets is decided when a kernel is made.

python tests/dropkv/check_window_kernels.py DTYPE [DEVICE [PART/PARTS]]
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

sys.path.insert(0, os.getcwd())
import torch

from dropkv import methods
from dropkv.kernels import dispatch
from dropkv.kernels.projection import mean_l1_norms
from dropkv.kernels.score import Attended, Job, Score, Window, score_blocks, score_jobs
from dropkv.kernels.value_sizes import value_sizes
from dropkv.kernels.window_attend import Attention, Tile, attend_window
from dropkv.kernels.window_score import score_window
from dropkv.methods import LayerContext
from dropkv.methods._base import SUM_MEAN, odds_times_distance

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
SCORES = [
    Score("squared odds"), Score("odds"), Score("p"), Score("along"), Score("p", "l2"), Score("p", "max"), Score("odds", "max"),
    Score("squared odds", "max"),
]  # fmt: skip


def definition(q, k, v, scale, softcap):
    """p, a, ||a - v|| and log-sum-exps in float64, where nothing cancels that matters here."""
    q, k, v = q.double(), k.double(), v.double()
    m, n = q.shape[2], k.shape[1]
    logits = torch.einsum("hgmd,hnd->hgmn", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = torch.arange(n, device=q.device) > torch.arange(n - m, n, device=q.device).unsqueeze(1)
    logits = logits.masked_fill(hidden, -torch.inf)
    everything = torch.logsumexp(logits, -1)
    p = torch.exp(logits - everything.masked_fill(everything == -torch.inf, 0).unsqueeze(-1))
    a = torch.einsum("hgmn,hnd->hgmd", p, v)
    gap = torch.stack([(a - v[:, None, None, j]).norm(dim=-1) for j in range(n)], -1)
    return p, a, gap, everything


def wanted(p, a, gap, v, factors, what):
    odds = p / (1 - p + 1e-6) * gap
    along = p * torch.einsum("hgmd,hnd->hgmn", a, v.double())
    part = {"p": p, "odds": odds, "squared odds": odds.square(), "along": along}[what.weight]
    if what.over == "max":
        return part.amax((1, 2))
    if what.over == "l2":
        return (part.square().sum(2).sqrt() * factors).mean(1)
    return part.sum((1, 2)) / p.shape[1]


def per_head(got, want):
    assert bool(torch.isfinite(got).all())
    gap, size = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    return float((gap / torch.where(size > 0, size, 1)).max())


def cases(device, draw):
    """(name, q, k, v, softcap, tile, scores): every kind of input once; some tiles smaller than the inputs."""
    small, wide, few = Tile(16, 16, 4, 2), Tile(32, 32, 4, 2), SCORES[:1]

    def plain(kv_heads, group, m, n, d, d_v):
        return draw(kv_heads, group, m, d), draw(kv_heads, n, d), draw(kv_heads, n, d_v)

    q, k, v = plain(2, 4, 8, 67, 64, 64)
    q[0, 1] *= 5  # one loud head
    k[1, 0] = q[1, :, -1].mean(0) * 6  # a sink
    yield "sink and loud head", q, k, v, None, wide, SCORES
    q, k, v = plain(1, 2, 3, 45, 16, 16)
    q[0, 0, 1] = k[0, 17] * 3  # p near 1
    q[0, 1, 2] = k[0, 44] * 3  # of its own key
    yield "p near 1", q, k, v, None, small, SCORES[:2]
    yield "group 7", *plain(1, 7, 8, 40, 80, 80), None, Tile(64, 16, 4, 2), few
    many = SCORES[::3] if device == "cpu" else few  # each is compiled on a GPU
    yield "more rows than a tile", *plain(1, 3, 20, 50, 16, 24), None, small, many
    yield "softcap", *plain(2, 2, 4, 33, 24, 24), 5.0, small, few
    yield "one key", *plain(2, 3, 1, 1, 16, 16), None, small, few
    yield "masked rows", *plain(1, 2, 8, 5, 16, 16), None, small, SCORES[:3]
    q, k, v = draw(3, 6, 5, 32)[:2, ::2], draw(40, 2, 48).transpose(0, 1)[:, :37, :32], draw(2, 40, 32)[:, 3:]
    yield "not contiguous", q, k, v, None, small, few
    q, k, v = plain(2, 2, 4, 50, 16, 16)
    k[:, 20:40] = k[:, 20:21]  # many equal logits, the largest too
    q[0, 0] = k[0, 20] * 2
    yield "equal keys", q, k, v, None, small, few
    if device != "cpu":
        for d in (64, 80, 96, 128, *((256,) if draw(1).dtype != torch.float32 else ())):
            q, k, v = plain(3, 5, 8, 1500, d, d)
            k[0, 0] = q[0].mean((0, 1)) * 8
            q[1, 2] *= 6
            yield f"d {d}", q, k, v, None, None, few
        yield "window 64", *plain(2, 8, 64, 3000, 128, 128), None, None, few


def check_methods(draw):
    """Every method that has a form in the kernel gets the same scores as from plain torch, several documents at once included."""
    q, k, v = draw(4, 3, 5, 16), draw(4, 37, 16), draw(4, 37, 16)
    context = LayerContext(k, v, 0.25, q=q, wo=draw(20, 2 * 3 * 16), more_seeds=(1,))
    outputs = torch.full((4, 3, 5, 16), torch.nan, device=k.device)
    window = Window(q, k, v, 0.25, columns=30, outputs=outputs)
    seen = Window(q, k, v, 0.25, attention=attend_window(q, k, v, scale=0.25))
    sums = torch.logsumexp(torch.einsum("hgmd,hnd->hgmn", q, k) * 0.25, -1)
    all_seen = torch.einsum("hgmn,hnd->hgmd", torch.softmax(torch.einsum("hgmd,hnd->hgmn", q, k) * 0.25, -1), v)
    attended = Attended(q, k[:, :30], v[:, :30], 0.25, all_seen, sums)
    found, tried = [], set()
    for name in methods.names():
        known = methods.get(name)
        for method in (known, known.under_replay(4)):
            if method.observed is None:
                continue
            job = method._job(None if method.weigh is None else method.weigh(context)[..., :30])
            form = dispatch._form(window, job)
            if form is None:
                continue
            found.append(name)
            for queries in (window, attended, *((seen,) if job.factors is None else ())):
                if (kind := (form, job.reduction, id(queries))) not in tried:
                    tried.add(kind)
                    (got,) = dispatch._fused(queries, [(job, form)], 2)
                    assert per_head(got, score_jobs(queries, [job], 2)[0].double()) < 1e-5, name
    assert per_head(outputs.flatten(0, 2), replace(window, outputs=None).attend().flatten(0, 2).double()) < 1e-5
    print("methods:", *sorted(set(found)))
    assert set(found) >= {"adadropkv", "adakv", "andpro", "caote", "criticalkv", "dropkv", "laprox", "snapkv", "tova"}


def check_by_head(draw, dtype):
    """What head_scores.py makes of every job that it has a form of equals plain torch in float64: probes and windows, loud keys among them."""
    tried = set()
    for m, n, columns, d, softcap in (
        (70, 140, 67, 16, None),
        (5, 37, None, 24, None),
        (20, 45, 18, 16, 6.0),
        (1, 3, None, 16, None),
    ):
        q, k, v = draw(2, 2, m, d), draw(2, n, d), draw(2, n, d)
        q[0, 1, m // 2], q[1, 1, 0] = k[0, n // 3] * 4, k[1, 0] * 3  # p near 1
        context = LayerContext(k, v, 0.25, q=q, wo=draw(40, 2 * d) * 0.3, more_seeds=(1,))
        window = Window(q, k, v, 0.25, softcap, columns, roots=context.roots)
        wide = replace(window, q=q.double(), k=k.double(), v=v.double(), roots=context.roots.double())
        jobs = []
        for method in (
            one for name in methods.names() for one in (methods.get(name), methods.get(name).under_replay(4))
        ):
            if method.observed is not None:
                factors = None if method.weigh is None else method.weigh(context)[..., :columns]
                jobs.extend((method._job(factors), *method.beside))
        work = [(job, kinds) for job in jobs if (kinds := dispatch._kinds(window, job))]
        tried.update(kind for _, kinds in work for kind in kinds)
        seen = replace(window, attention=dispatch._attention(window, values=True))
        want = score_jobs(wide, [job for job, _ in work], 2)
        for (job, kinds), got, exact in zip(work, dispatch._by_head(seen, work, 2), want, strict=True):
            assert per_head(got, exact.double()) < 3 * TOLERANCE[dtype], (kinds, job.reduction, m)
        whole = Window(q, k, k, 0.25, softcap)
        (received,) = dispatch._fused(whole, [(Job(lambda block: block.probability()), Score("p"))], 1)
        want = score_jobs(
            replace(whole, q=q.double(), k=k.double(), v=k.double()), [Job(lambda block: block.probability())]
        )
        assert per_head(received, want[0].double()) < TOLERANCE[dtype]
        sizes = value_sizes(v, context.projection.contiguous(), 2)
        assert per_head(sizes, mean_l1_norms(v.double(), context.projection.double(), 2)) < TOLERANCE[dtype]
    assert tried == {kind for kinds in dispatch.KINDS.values() for kind in kinds}


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    seed = 3 if device == "cpu" else int.from_bytes(os.urandom(4))  # CI sees the same numbers, a GPU fresh ones
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    limit, failed = TOLERANCE[dtype], 0
    part, parts = map(int, sys.argv[3].split("/")) if len(sys.argv) > 3 else (0, 1)  # compiling takes its time
    for number, (name, q, k, v, softcap, tile, scores) in enumerate(cases(device, draw)):
        if number % parts != part:
            continue
        scale = q.shape[-1] ** -0.5
        n, m = k.shape[1], q.shape[2]
        p, a, gap, everything = definition(q, k, v, scale, softcap)
        factors = torch.rand(*p.shape[:2], n, device=device)
        attention = attend_window(q, k, v, scale=scale, softcap=softcap, tile=tile)
        errors = {"a": per_head(attention.outputs.flatten(0, 2), a.flatten(0, 2))}
        sums = torch.where(everything == -torch.inf, 0, everything)
        found = torch.where(attention.log_sum_exp == -torch.inf, 0, attention.log_sum_exp)
        errors["sums"] = float((found - sums).abs().max()) / 10
        assert torch.equal(attention.log_sum_exp == -torch.inf, everything == -torch.inf)
        loud = torch.where(p.amax(-1) > 0.5, p.argmax(-1), -1)
        sure = (p.amax(-1) - 0.5).abs() > 1e-4
        assert torch.equal(attention.loud.long()[sure], loud[sure]), name
        alone = attend_window(q, k, v, scale=scale, softcap=softcap, values=False, tile=tile)
        assert float((alone.log_sum_exp - attention.log_sum_exp).nan_to_num().abs().max()) < 1e-5
        given = Attention(a.float(), everything.float())
        for what in scores:
            for columns in (n, n // 2) if what in (SCORES[0], SCORES[4]) and len(scores) > 1 else (n,):
                want = wanted(p, a, gap, v, factors, what)[:, :columns]
                for label, source in (("", attention), (" given", given)):
                    out = torch.full((len(k), columns), torch.nan, device=device)
                    got = score_window(
                        q, k, v, source, what, scale=scale, softcap=softcap, columns=columns, tile=tile, out=out,
                        factors=factors[..., :columns].contiguous(),
                    )  # fmt: skip
                    assert got is out
                    key = f"{what.weight}/{what.over}{label}"
                    errors[key] = max(errors.get(key, 0), per_head(got, want))
        rest = 1 - float(p.max())  # of which float32 log-sum-exps leave so many digits
        slack = 4e-5 / rest if rest > 0.01 else torch.inf
        worst = {key: e for key, e in errors.items() if e > (limit + (slack if key.endswith("given") else 0))}
        failed += bool(worst)
        own, other = (max(e for key, e in errors.items() if ("given" in key) == flag) for flag in (False, True))
        print(f"{name}: {own:.1e}, given {other:.1e}", worst or "")
        if softcap is None and m <= n:  # the twins agree with the kernel as well
            window = Window(q, k, v, scale)
            twin = score_blocks(window, lambda block: odds_times_distance(block, 2), SUM_MEAN)
            got = score_window(q, k, v, attention, SCORES[0], scale=scale, tile=tile)
            assert per_head(got, twin.double()) < 2 * limit
    assert not failed, f"{failed} cases"
    if part == 0:
        check_by_head(draw, dtype)
    if dtype == torch.float32:
        check_methods(draw)
    print("all equal")


if __name__ == "__main__":
    main()
