"""Run by test_fused_replay.py in a process of its own: whether Triton interprets is decided when a kernel is made."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.kernels.fused_replay import Tiles, fused_replay, prepare

# What float32 leaves of a key with p near 1. The sums over all keys, in which that key's weight is 1, are rounded by at most 2^-24 with every
# one of some 55 keys that is added; roundings are independent, so that sqrt(55) of them, rounded up, add up. 1 - p is such a sum without the 1,
# and every dimension of a - v is one without that of v. So p / (1 - p + eps) ||a - v|| may be off by as much, over 1 - p + eps,
# times itself (the first) plus ||v|| (the second). A logit's own rounding, at most some 2^-24 of it, changes 1 - p by less than the tolerance.
ROUNDING = 8 * 2.0**-24


def definition(q, k, v, own_k, own_v, segments, scale, told):
    """Outputs, and [3, kv_heads, n]: largest step, largest p, each times what its query weighs, told [kv_heads, T], and largest sum of a head's
    steps; and what float32 may leave of the steps."""
    q, k, v, own_k, own_v = (x.double() for x in (q, k, v, own_k, own_v))
    heads, tokens, _ = q.shape
    kv_heads, n, d_v = v.shape
    group = heads // kv_heads
    out = torch.zeros(heads, tokens, d_v, dtype=torch.float64)
    scores, slack = torch.zeros(2, 3, kv_heads, n, dtype=torch.float64)
    for start, stop, observing, first, last, sink_first, sink_last in segments:
        for head in range(heads):
            own = head // group
            summed, loose = torch.zeros(2, last - first, dtype=torch.float64)
            for t in range(start, stop):
                keys = torch.cat([k[own, first:last], k[own, sink_first:sink_last], own_k[own, start : t + 1]])
                values = torch.cat([v[own, first:last], v[own, sink_first:sink_last], own_v[own, start : t + 1]])
                logits = keys @ q[head, t] * scale
                p = torch.softmax(logits, 0)
                a = p @ values
                out[head, t] = a
                if t < observing:
                    continue
                count = last - first
                w = torch.exp(logits - logits.max())
                rest = torch.stack([w[:j].sum() + w[j + 1 :].sum() for j in range(count)]) / w.sum()
                step = p[:count] / (rest + 1e-6) * (a - values[:count]).norm(dim=-1)
                part = slice(first, last)
                lost = (step + p[:count] * values[:count].norm(dim=-1)) * ROUNDING / (rest + 1e-6)
                weight = told[own, t].double()
                slack[0, own, part] = torch.maximum(slack[0, own, part], lost * weight)
                scores[0, own, part] = torch.maximum(scores[0, own, part], step * weight)
                scores[1, own, part] = torch.maximum(scores[1, own, part], p[:count] * weight)
                summed, loose = summed + step, loose + lost
            scores[2, own, first:last] = torch.maximum(scores[2, own, first:last], summed)
            slack[2, own, first:last] = torch.maximum(slack[2, own, first:last], loose)
    return out, scores, slack


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    seed = 1 if device == "cpu" else int.from_bytes(os.urandom(4))  # CI sees the same numbers, a GPU fresh ones
    generator = torch.Generator().manual_seed(seed)
    for heads, kv_heads, d, d_v, rows, columns in (
        (2, 1, 16, 16, 16, 16),
        (7, 1, 24, 20, 16, 16),
        (4, 2, 64, 32, 32, 16),
    ):
        segments = [(0, 9, 0, 5, 38, 0, 5), (9, 16, 12, 38, 51, 0, 5), (16, 17, 16, 51, 52, 2, 3)]

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        q, k, v = draw(heads, 17, d), draw(kv_heads, 60, d), draw(kv_heads, 60, d_v)
        own_k, own_v = draw(kv_heads, 17, d), draw(kv_heads, 17, d_v)
        q[0] *= 6  # one loud head
        q[-1, 3] = k[-1, 20] * 2  # and one key with p near 1
        q[-1, 8] = own_k[-1, 8] * 2  # and one of the probe's own, which is not scored
        # p near 1 where a logit of 100 is rounded by more than the sums are
        q[-1, 4] = k[-1, 22] * (100 * d**0.5 / k[-1, 22].float().square().sum())
        k[-1, 23] = k[-1, 22] * 0.93
        tiles = Tiles(rows, columns, keys=columns, queries=rows) if device == "cpu" else None
        prepared = prepare(segments, heads // kv_heads, max(d, d_v), q.device, tiles)
        scale = d**-0.5
        weighed = torch.rand(kv_heads, 17, generator=generator) * 9
        weighed[:, 13] = 0
        alike, told = (
            definition(*(x.cpu() for x in (q, k, v, own_k, own_v)), segments, scale, weights)
            for weights in (torch.ones(kv_heads, 17), weighed)
        )
        for odds, part, weights in (
            (True, [0], None),
            (False, [1], None),
            (True, [0, 1, 2], None),
            (False, [1], weighed.to(device)),
            (True, [0, 1, 2], weighed.to(device)),
        ):
            want, every, slack = alike if weights is None else told
            got, scores = fused_replay(
                q, k, v, own_k, own_v, prepared, scale=scale, odds=odds, every=len(part) == 3, told=weights
            )
            scores = scores.view(len(part), *scores.shape[-2:])
            error = float((got.cpu().double() - want).norm() / want.norm())
            gap = ((scores.cpu().double() - every[part]).abs() - slack[part]).clamp(min=0)
            error_scores = float((gap.norm(dim=-1) / every[part].norm(dim=-1)).max())
            print(heads, kv_heads, d, d_v, part, weights is not None, f"outputs {error:.1e} scores {error_scores:.1e}")
            assert error < tolerance and error_scores < tolerance
            assert bool((scores[..., 52:] == 0).all()) and bool((scores[..., :5] == 0).all())
    print("all equal")


if __name__ == "__main__":
    main()
