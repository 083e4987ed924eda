"""Run by test_answers.py in a process of its own: whether Triton interprets is decided when a kernel is made."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.kernels.masked_decode import masked_decode
from dropkv.kernels.masked_prompt import kept_positions, masked_prompt


def definition(q, k, v, keep, tail_k, tail_v, seen, scale):
    q, k, v, tail_k, tail_v = (x.double() for x in (q, k, v, tail_k, tail_v))
    total, heads, _ = q.shape
    documents, kv_heads = k.shape[:2]
    group, each, reach = heads // kv_heads, total // documents, seen.shape[1]
    out = torch.zeros(total, heads, v.shape[-1], dtype=torch.float64)
    for row in range(total):
        for head in range(heads):
            document, own = row // each, head // group
            kept, visible = keep[document, own, row % each], seen[row]
            keys = torch.cat([k[document, own][kept], tail_k[row, own, :reach][visible]])
            values = torch.cat([v[document, own][kept], tail_v[row, own, :reach][visible]])
            out[row, head] = torch.softmax(keys @ q[row, head] * scale, 0) @ values
    return out


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    for documents, each, kv_heads, group, d, d_v, n, reach in (
        (1, 1, 1, 1, 16, 16, 1, 1),
        (2, 5, 2, 3, 24, 20, 67, 19),
        (1, 9, 1, 7, 64, 64, 130, 48),
    ):
        q, total = draw(documents * each, kv_heads * group, d), documents * each
        k, v = draw(documents, kv_heads, n, d), draw(documents, kv_heads, n, d_v)
        tail_k, tail_v = draw(total, kv_heads, reach + 5, d), draw(total, kv_heads, reach + 5, d_v)
        keep = torch.rand(documents, kv_heads, each, n, generator=generator) < 0.3
        keep[0, 0, 0] = False  # a row that keeps nothing
        seen = torch.rand(total, reach, generator=generator) < 0.5
        seen[:, 0] = True
        k[~keep.any(2)] = 40.0  # loud keys that nobody keeps, and poison behind the tail
        tail_k[:, :, reach:] = tail_v[:, :, reach:] = float("nan")
        want = definition(q, k, v, keep, tail_k, tail_v, seen, 0.3)
        given = [x.to(device) for x in (q, k, v, keep, tail_k, tail_v, seen)]
        got = masked_decode(*given, scale=0.3, rows=16, columns=16).double().cpu()
        error = (got - want).norm() / want.norm()
        assert error < tolerance, (documents, each, float(error))

        t = 7  # several tokens, of which a later one sees more
        q, later = draw(total, kv_heads * group, t, d), torch.arange(reach) < torch.arange(reach - t, reach).clamp(min=1).unsqueeze(1)
        seen = seen.unsqueeze(1) & later
        want = torch.stack(
            [definition(q[:, :, i], k, v, keep, tail_k, tail_v, seen[:, i], 0.3) for i in range(t)], 2
        )
        q, k, v, keep, tail_k, tail_v, seen = (x.to(device) for x in (q, k, v, keep, tail_k, tail_v, seen))
        positions, counts = kept_positions(keep)
        assert torch.equal(counts.long(), keep.sum(-1))
        for at, count, own in zip(positions.flatten(0, 2), counts.flatten(), keep.flatten(0, 2), strict=True):
            assert torch.equal(at[:count].long(), own.nonzero().squeeze(-1))
        shifted = q.transpose(1, 2).contiguous().transpose(1, 2)  # as layers hand them over
        got = masked_prompt(shifted, k, v, (positions, counts), tail_k, tail_v, seen, scale=0.3, lines=16, columns=16)
        error = (got.double().cpu() - want).norm() / want.norm()
        assert error < tolerance, (documents, each, float(error))
    print("all equal")


main()
