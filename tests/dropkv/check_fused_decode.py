"""Run by test_fused_decode.py in a process of its own: whether Triton interprets is decided when a kernel is made."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.cache import Prefix
from dropkv.decode.layout import Layout
from dropkv.kernels.fused_decode import Blocks, begins_early, launch
from dropkv.kernels.tail_put import put
from dropkv.models import LayerGeometry
from formats import LayerEntries


def prefix_of(lengths, geometry, n, draw):
    """One layer of ragged heads at random positions."""
    entries = sum(lengths)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    positions = torch.cat([torch.randperm(n)[:length].sort().values for length in lengths]).int()
    device = draw(1).device
    layer = LayerEntries(
        keys=draw(entries, geometry.d_k), values=draw(entries, geometry.d_v),
        offsets=torch.tensor(bounds, dtype=torch.int32).to(device), positions=positions.to(device),
        admit=positions, scores=torch.zeros(entries),
    )  # fmt: skip
    return Prefix([layer], [geometry], n)


def definition(q, prefix, keys, values, length, scale, softcap, reach):
    """One row, q [heads, d] in float64, over its prefix and the first length + 1 tokens of its tail."""
    layer, bounds = prefix.layers[0], prefix.bounds[0]
    group = q.shape[0] // (len(bounds) - 1)
    own = prefix.n + length
    out = []
    for head in range(q.shape[0]):
        part = slice(bounds[head // group], bounds[head // group + 1])
        k = torch.cat([layer.keys[part], keys[head // group, : length + 1]]).double()
        v = torch.cat([layer.values[part], values[head // group, : length + 1]]).double()
        places = torch.cat([layer.positions[part].cpu(), prefix.n + torch.arange(length + 1)]).to(k.device)
        logits = k @ q[head].double() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if reach is not None:
            logits = logits.masked_fill(own - places >= reach, -torch.inf)
        out.append(torch.softmax(logits, 0) @ v)
    return torch.stack(out)


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    seed = 1 if device == "cpu" else int.from_bytes(os.urandom(4))  # CI sees the same numbers, a GPU fresh ones
    torch.manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape).to(dtype).to(device)

    for heads, kv_heads, d, d_v, softcap, reach, tile, count, splits in (
        (2, 1, 16, 16, None, None, 16, 3, 1),
        (6, 2, 24, 20, None, 40, 16, 2, 2),
        (4, 2, 64, 32, 2.0, None, 32, 5, 3),
        (7, 1, 32, 32, 5.0, 90, 64, 1, 2),
        (28, 1, 16, 16, None, None, 128, 3, 1),
        (56, 2, 24, 20, 5.0, 90, 128, 2, 2),
    ):
        geometry = LayerGeometry("full", heads, kv_heads, d, d_v, None)
        lengths = ([37, 80], [1, 0], [0, 0])
        prefixes = [prefix_of(one[:kv_heads], geometry, 100 + 10 * number, draw) for number, one in enumerate(lengths)]
        rows, capacity = 7, 150
        whose = [1, 0, 0, 1, 0, 2]  # the last row has no question
        filled = torch.tensor([0, 5, 140, 33, 64, 63, 0], dtype=torch.int32)
        q, k, v = draw(rows, heads, d), draw(rows, kv_heads, d), draw(rows, kv_heads, d_v)
        keys, values = draw(rows + 1, kv_heads, capacity, d), draw(rows + 1, kv_heads, capacity, d_v)
        untouched = keys.clone()
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        put(k, v, keys, values, slots, filled.to(device))
        for row in range(len(filled)):
            assert torch.equal(keys[row, :, filled[row]], k[row]) and torch.equal(values[row, :, filled[row]], v[row])
            untouched[row, :, filled[row]] = k[row]
        assert torch.equal(keys, untouched)

        layout = Layout(prefixes, torch.device(device), rows, most=count, tile=tile)
        assert (layout.tile == 128) == (tile == 128)
        layout.place_rows([prefixes[one] for one in whose])
        chunks = layout.chunks[0].shape[1]
        part = (chunks, rows, heads // kv_heads), (splits, rows, heads)
        for early in (False, True) if begins_early(q.device) else (False,):
            scratch = []
            for shape in part:  # with the type of the queries, and in float32
                kept = torch.float32 if count % 2 else dtype
                scratch += [torch.full((*shape, d_v), torch.nan, dtype=kept, device=device)]
                scratch += [torch.full(shape, -torch.inf, device=device)]
            out = torch.full((rows, heads, d_v), torch.nan, dtype=dtype, device=device)
            launch(
                q, keys, values, slots, filled.to(device), layout.starts, layout.tables[0], layout.chunks[0], layout.heads[0], layout.tiles,
                layout.order, layout.whose, tuple(scratch), out, scale=d**-0.5, softcap=softcap, reach=reach, tile=layout.tile,
                per_head=layout.per_head, far_blocks=Blocks(16, 2, 4), near_blocks=Blocks(16, 2, 4), early=early,
            )  # fmt: skip
            worst = 0.0
            for row, number in enumerate(whose):
                given = q[row], prefixes[number], keys[row], values[row], int(filled[row]), d**-0.5, softcap, reach
                want = definition(*given)
                worst = max(worst, float((out[row].double() - want).norm() / want.norm()))
            print(heads, kv_heads, d, d_v, softcap, reach, early, f"{worst:.1e}")
            assert worst < tolerance
    print("all equal")


if __name__ == "__main__":
    main()
