"""Run by test_answers.py in a process of its own: whether Triton interprets is decided when a kernel is made."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.bench.answers import LOOK, Row, answer_rows
from dropkv.kernels.masked_decode import masked_decode, tiles_of
from dropkv.kernels.masked_prompt import kept_positions, masked_prompt
from tests import tiny


def definition(q, k, v, keep, tail_k, tail_v, seen, owners, scale):
    q, k, v, tail_k, tail_v = (x.double() for x in (q, k, v, tail_k, tail_v))
    total, heads, _ = q.shape
    group, reach = heads // k.shape[1], seen.shape[1]
    out = torch.zeros(total, heads, v.shape[-1], dtype=torch.float64)
    for row in range(total):
        for head in range(heads):
            document, own = owners[row], head // group
            kept, visible = keep[row, own], seen[row]
            keys = torch.cat([k[document, own][kept], tail_k[row, own, :reach][visible]])
            values = torch.cat([v[document, own][kept], tail_v[row, own, :reach][visible]])
            out[row, head] = torch.softmax(keys @ q[row, head] * scale, 0) @ values
    return out


def check_answers() -> None:
    """Documents with different numbers of rows, some of which end early: every answer is that of its row alone on the plain path."""
    model, n = tiny.model("llama"), 96
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(3, 2, n, 16, generator=generator) for _ in model.geometry] for _ in "kv")
    rows = []
    for document in (0, 1, 1, 1, 2, 2):
        tokens = torch.randint(
            3, tiny.VOCABULARY - 10, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator
        )
        rows.append(Row(document, tuple(tokens.tolist()), torch.rand(3, 2, n, generator=generator) < 0.4))
    got = answer_rows(
        model, keys, values, rows, starts=[n] * 6, max_new_tokens=20, decided=lambda row, tokens: row % 3 == 0, kernels=True
    )  # fmt: skip
    for number, (row, answer) in enumerate(zip(rows, got, strict=True)):
        own_keys, own_values = ([x[row.document : row.document + 1] for x in full] for full in (keys, values))
        one = Row(0, row.tokens, row.keep)
        (want,) = answer_rows(model, own_keys, own_values, [one], starts=[n], max_new_tokens=20, kernels=False)
        assert answer == (want[: LOOK + 1] if number % 3 == 0 else want), number


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    for rows, kv_heads, group, d, d_v, n, reach in (
        ((1,), 1, 1, 16, 16, 1, 1),
        ((4, 0, 6), 2, 3, 24, 20, 67, 19),
        ((9,), 1, 7, 64, 64, 130, 48),
    ):
        documents, total = len(rows), sum(rows)
        owners = [document for document, count in enumerate(rows) for _ in range(count)]
        q = draw(total, kv_heads * group, d)
        k, v = draw(documents, kv_heads, n, d), draw(documents, kv_heads, n, d_v)
        tail_k, tail_v = draw(total, kv_heads, reach + 5, d), draw(total, kv_heads, reach + 5, d_v)
        layers = torch.rand(total, 2, kv_heads, n, generator=generator) < 0.3
        layers[0, 1, 0] = False  # a row that keeps nothing
        seen = torch.rand(total, reach, generator=generator) < 0.5
        seen[:, 0] = True
        wanted = torch.zeros(documents, kv_heads, n, dtype=torch.bool).index_add(0, torch.tensor(owners), layers[:, 1])
        k[~wanted] = 40.0  # loud keys that nobody keeps, and poison behind the tail
        tail_k[:, :, reach:] = tail_v[:, :, reach:] = float("nan")
        want = definition(q, k, v, layers[:, 1], tail_k, tail_v, seen, owners, 0.3)
        q, k, v, layers, tail_k, tail_v, shown = (x.to(device) for x in (q, k, v, layers, tail_k, tail_v, seen))
        keep, tiles = layers[:, 1], tiles_of(rows, group, q.device, 16)
        got = masked_decode(q, k, v, keep, tail_k, tail_v, shown, tiles, scale=0.3, rows=16, columns=16)
        error = (got.double().cpu() - want).norm() / want.norm()
        assert error < tolerance, (rows, float(error))

        t = 7  # several tokens, of which a later one sees more
        later = torch.arange(reach) < torch.arange(reach - t, reach).clamp(min=1).unsqueeze(1)
        q, seen = draw(total, kv_heads * group, t, d), seen.unsqueeze(1) & later
        whole = [x.cpu() for x in (k, v, keep, tail_k, tail_v)]
        want = torch.stack([definition(q[:, :, i], *whole, seen[:, i], owners, 0.3) for i in range(t)], 2)
        positions, counts = kept_positions(keep)
        assert torch.equal(counts.long(), keep.sum(-1))
        for at, count, own in zip(positions.flatten(0, 1), counts.flatten(), keep.flatten(0, 1), strict=True):
            assert torch.equal(at[:count].long(), own.nonzero().squeeze(-1))
        turned = q.to(device).transpose(1, 2).contiguous().transpose(1, 2)  # as layers hand them over
        got = masked_prompt(turned, k, v, keep, tail_k, tail_v, seen.to(device), rows, scale=0.3, lines=16, columns=16)
        error = (got.double().cpu() - want).norm() / want.norm()
        assert error < tolerance, (rows, float(error))
    if dtype == torch.float32 and device == "cpu":
        check_answers()
    print("all equal")


main()
