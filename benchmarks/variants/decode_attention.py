"""Decode attention of one layer over a shared prefix and each row's tail, in variants that wait for a measurement on a GPU: about 40 seconds.

    python benchmarks/variants/decode_attention.py [--rows 64] [--processes 8]
    TRITON_INTERPRET=1 python benchmarks/variants/decode_attention.py --check     against float32, on a CPU

Mistral-7B's shape in bfloat16, 6,554 ragged entries a head, tails of 256. Each line: microseconds with L2 flushed by writing and by reading, the
error against float32, the variant. far and near: columns, stages, warps (registers) of the kernels over prefix and tails, and the lines that a
program asks for before anything else.

Counted for 64 rows: 27 MB of prefix and 67 MB of tails take 21.9 us at the rate of a copy. Products and exponents over the prefix keep all
multiprocessors busy, and tails are read meanwhile by two programs beside each of the large ones. Such a program reads 128 KB in four blocks, each of
which it asks for when the one before is used up; that is why `ahead` is tried: all of a tail, or the first blocks of a chunk, on their way at once.
What was tried and is not better: tails on a stream of their own,
before the prefix, put together with it in one kernel, in 2 or 4 parts, other blocks, fewer chunks. What wins becomes MANY and TAILS of
fused_decode.py; then benchmarks/decode_gpu.py measures whole steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from dropkv.cache import Prefix
from dropkv.decode.layout import Layout
from dropkv.kernels.fused_decode import MANY, TAILS, Blocks, begins_early, launch
from dropkv.models import LayerGeometry
from formats import LayerEntries


@dataclass(frozen=True)
class Variant:
    """kept: the type of partial results. splits: parts of a tail."""

    far: Blocks = MANY
    near: Blocks = TAILS
    splits: int = 1
    kept: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        far, near = ((b.columns, b.stages, b.warps, b.registers, b.ahead) for b in (self.far, self.near))
        return f"far {far}, near {near}, splits {self.splits}, {self.kept}"


def variants() -> Iterator[Variant]:
    """All that are measured."""
    yield Variant(kept=torch.float32)
    nears = TAILS, Blocks(32, 3, 2), Blocks(64, 3, 4)
    for ahead, near, first in itertools.product((0, 256, 512), nears, (0, 128, 256)):
        yield Variant(replace(MANY, ahead=first), replace(near, ahead=ahead))
    for ahead in (256, 512):
        yield Variant(MANY, replace(TAILS, ahead=ahead), splits=2)


class Case:
    """One layer's prefix, tails and queries, and what comes out by definition."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, rows: int, entries: int, tail: int, kv_heads: int, d: int
    ) -> None:
        torch.manual_seed(0)
        self.rows, self.tail, self.kv_heads, self.group, self.d, self.device = rows, tail, kv_heads, 4, d, device
        shares = torch.linspace(0.4, 1.6, kv_heads)
        counts = (shares / shares.sum() * entries * kv_heads).long()
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(device)
        total = int(bounds[-1])
        keys, values = torch.randn((2, total, d), dtype=dtype, device=device).unbind()
        positions = torch.zeros(total, dtype=torch.int32, device=device)
        layer = LayerEntries(keys, values, bounds, positions, positions, torch.zeros(total))
        self.prefix = Prefix([layer], [LayerGeometry("full", kv_heads * self.group, kv_heads, d, d, None)], 131072)
        self.keys, self.values = torch.randn((2, rows, kv_heads, tail + 64, d), dtype=dtype, device=device).unbind()
        self.q = torch.randn((rows, kv_heads * self.group, d), dtype=dtype, device=device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.lengths = torch.full((rows,), tail - 1, dtype=torch.int32, device=device)
        self.out = torch.zeros_like(self.q)
        self.wanted = self._defined()

    def _defined(self) -> Tensor:
        bounds, layer = self.prefix.bounds[0], self.prefix.layers[0]
        out = torch.empty(self.q.shape, device=self.device)
        for head, row in itertools.product(range(self.kv_heads), range(self.rows)):
            part, mine = slice(bounds[head], bounds[head + 1]), slice(head * self.group, (head + 1) * self.group)
            k = torch.cat([layer.keys[part], self.keys[row, head, : self.tail]]).float()
            v = torch.cat([layer.values[part], self.values[row, head, : self.tail]]).float()
            out[row, mine] = torch.softmax(self.q[row, mine].float() @ k.T * self.d**-0.5, -1) @ v
        return out

    def error(self) -> float:
        """Of what stands in `out`."""
        return float((self.out.float() - self.wanted).norm() / self.wanted.norm())

    def action(self, v: Variant) -> Callable[[], object]:
        """What leaves the attention in `out`."""
        lay = Layout([self.prefix], self.device, self.rows, most=66, tile=128)
        lay.place_rows([self.prefix] * self.rows)

        def scratch(*size: int) -> tuple[Tensor, Tensor]:
            sums = torch.full(size, -torch.inf, device=self.device)
            return torch.zeros((*size, self.d), dtype=v.kept, device=self.device), sums

        parts = *scratch(lay.chunks[0].shape[1], self.rows, self.group), *scratch(v.splits, self.rows, self.q.shape[1])
        return lambda: launch(
            self.q, self.keys, self.values, self.slots, self.lengths, lay.starts, lay.tables[0], lay.chunks[0], lay.heads[0], lay.tiles, lay.order,
            lay.whose, parts, self.out, scale=self.d**-0.5, softcap=None, reach=None, tile=lay.tile, per_head=lay.per_head, far_blocks=v.far,
            near_blocks=v.near, early=begins_early(self.device),
        )  # fmt: skip


def microseconds(*actions: Callable[[], object]) -> float:
    """Of all actions together, from a graph that has them ten times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            for action in actions:
                action()
    times = []
    for _ in range(11):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 100)
    return statistics.median(times[2:])


def compile_all(rows: int, processes: int) -> None:
    """Compile in so many processes, which leave what they made in Triton's cache."""
    command = [sys.executable, __file__, "--rows", str(rows)]
    running = [
        subprocess.Popen([*command, "--part", str(part), "--processes", str(processes)]) for part in range(processes)
    ]
    for one in running:
        one.wait()


def check() -> None:
    """What can be checked on a CPU: types and splits, against the definition in float32."""
    case = Case(torch.device("cpu"), torch.float32, rows=40, entries=150, tail=40, kv_heads=2, d=32)
    blocks = Blocks(16, 2, 4)
    for splits, kept in itertools.product((1, 2), (torch.float32, torch.bfloat16)):
        case.out.fill_(torch.nan)
        case.action(Variant(blocks, blocks, splits, kept))()
        print(splits, kept, f"{case.error():.1e}")
        assert case.error() < (1e-2 if kept is torch.bfloat16 else 1e-5)
    print("all equal")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that compile")
    options.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options.add_argument("--check", action="store_true")
    given = options.parse_args()
    if given.check:
        return check()
    if given.part is None:
        compile_all(given.rows, given.processes)
    case = Case(torch.device("cuda"), torch.bfloat16, given.rows, entries=6554, tail=256, kv_heads=8, d=128)
    all_ = list(variants())
    if given.part is not None:
        for one in all_[given.part :: given.processes]:
            case.action(one)()
            torch.cuda.synchronize()
        return
    large = torch.zeros(64 << 20, device="cuda")
    flushes = (large.zero_, large.sum)
    alone = [(flush(), microseconds(flush))[1] for flush in flushes]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {given.rows} rows; written, read"
    )
    for one in all_:
        action = case.action(one)
        case.out.fill_(torch.nan)
        action()
        took = [microseconds(flush, action) - flushed for flush, flushed in zip(flushes, alone, strict=True)]
        print(f"{took[0]:6.1f} {took[1]:6.1f} us, error {case.error():.1e}: {one}", flush=True)


if __name__ == "__main__":
    main()
