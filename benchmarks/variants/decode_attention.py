"""Decode attention of one layer over a shared prefix and each row's tail, in variants that wait for a measurement on a GPU: about 60 seconds.

    python benchmarks/variants/decode_attention.py [--rows 64] [--processes 8]
    TRITON_INTERPRET=1 python benchmarks/variants/decode_attention.py --check     every variant against float32, on a CPU

Mistral-7B's shape in bfloat16, 6,554 ragged entries a head, tails of 256. Each line: microseconds with L2 flushed by writing and by reading, the
error against float32, the variant. far and near: columns, stages, warps (registers) of the kernels over prefix and tails; most: chunks.

now: the library's three kernels, tails on a second stream. side: the same with the kernels beside this file. first: the prefix on a stream of
higher priority, so that tails cannot take its place. apart: one stream, tails merge. early: one stream, each kernel starts before the one before
is done and waits inside for it. early-merged: so, and tails merge. far, near, merge: these parts alone.

Counted for 64 rows: 27 MB of prefix and 67 MB of tails take 21.9 us; products and exponents over the prefix keep all multiprocessors busy for about
13 us, during which tails can be read; 8.7 MB of partial results are written and read again. In a captured graph nothing says that the
prefix's programs, which need most of a multiprocessor, are placed first: if tails come first, both run one after another, which would explain
the 47 us that were measured. Predicted: early, with far (64, 2, 8, 168) and near (64, 2, 4) or (32, 2, 2), 25 to 35 us. The fastest kind with
L2 flushed by writing goes into fused_decode.py, its blocks become MANY and TAILS there; then benchmarks/decode_gpu.py measures whole steps.
`early` needs compute capability 9 and Triton's `launch_pdl`; elsewhere the second stream stays.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import decode_attention_kernels as kernels
import torch
import triton
from torch import Tensor

from dropkv.cache import Prefix
from dropkv.decode.layout import Layout
from dropkv.kernels.fused_decode import LOG2E, TAILS, Blocks, launch
from dropkv.models import LayerGeometry
from formats import LayerEntries

KINDS = ("now", "side", "first", "apart", "early", "early-merged")
Steps = list[Callable[[], object]]


@dataclass(frozen=True)
class Variant:
    """half: partial results in bfloat16."""

    kind: str
    far: Blocks
    near: Blocks = TAILS
    tile: int = 128
    most: int = 66
    merge: int = 16
    half: bool = False

    def __str__(self) -> str:
        far, near = ((b.columns, b.stages, b.warps, b.registers) for b in (self.far, self.near))
        return f"{self.kind}, far {far}, near {near[:3]}, tile {self.tile}, most {self.most}, merge {self.merge}{', half' * self.half}"


def variants(rows: int) -> Iterator[Variant]:
    """All that are measured."""
    if rows * 4 < 128:
        for kind, far in itertools.product(KINDS, (Blocks(64, 3, 4), Blocks(64, 2, 4))):
            yield Variant(kind, far, most=264, merge=64)
        return
    large, lean, small = Blocks(64, 3, 8, 168), Blocks(64, 2, 8, 168), Blocks(32, 3, 8)
    nears = Blocks(64, 2, 4), Blocks(32, 2, 2), Blocks(32, 3, 2), Blocks(32, 3, 4), Blocks(64, 3, 4)
    for far in (large, lean, small, Blocks(64, 2, 8, 128), Blocks(128, 2, 8), Blocks(64, 3, 8)):
        yield Variant("far", far)
    for most in (33, 66):
        yield Variant("far", Blocks(64, 2, 4), tile=64, most=most)
    for near in nears:
        yield Variant("near", large, near)
    for size in (16, 32):
        yield Variant("merge", large, merge=size)
    for kind, far, near in itertools.product(KINDS, (large, lean, small), nears):
        yield Variant(kind, far, near)
    for kind in ("early", "early-merged"):
        for most in (56, 60):
            yield Variant(kind, lean, most=most)
        yield Variant(kind, lean, half=True)
        yield Variant(kind, Blocks(64, 2, 4), Blocks(32, 2, 2), tile=64)


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
        self.streams = [torch.cuda.Stream(device, priority) for priority in (0, -1)] if device.type == "cuda" else []
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
        """What leaves the attention, or for a part something, in `out` and scratch memory."""
        lay = Layout([self.prefix], self.device, self.rows, most=v.most, tile=v.tile)
        lay.place_rows([self.prefix] * self.rows)
        chunks, heads_of, table = lay.chunks[0], lay.heads[0], lay.tables[0]
        heads, kept = self.q.shape[1], torch.bfloat16 if v.half else torch.float32

        def scratch(*size: int) -> tuple[Tensor, Tensor]:
            sums = torch.full(size, -torch.inf, device=self.device)
            return torch.zeros((*size, self.d), dtype=kept, device=self.device), sums

        far, far_sums = scratch(chunks.shape[1], self.rows, self.group)
        near, near_sums = scratch(1, self.rows, heads)
        q, keys, values, out = self.q, self.keys, self.values, self.out
        if v.kind == "now":
            return lambda: launch(
                q, keys, values, self.slots, self.lengths, lay.starts, table, chunks, heads_of, lay.tiles, lay.order, lay.whose,
                (far, far_sums, near, near_sums), out, scale=self.d**-0.5, softcap=None, reach=None, tile=lay.tile, per_head=lay.per_head,
                far_blocks=v.far, near_blocks=v.near, side=self.streams[0] if self.streams else None,
            )  # fmt: skip
        early = v.kind.startswith("early") and self.device.type == "cuda"
        follows = {"launch_pdl": True} if early else {}
        limit = {"maxnreg": v.far.registers} if v.far.registers and self.device.type == "cuda" else {}
        sizes, factor = {"GROUP": self.group, "D": self.d, "DV": self.d, "EARLY": early}, self.d**-0.5 * LOG2E
        read = q, keys, values, self.slots, self.lengths
        strides = q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)

        def over_prefix() -> None:
            kernels.over_prefix[(chunks.shape[1], lay.tiles.shape[0])](
                q, table, chunks, lay.tiles, lay.order, far, far_sums, factor, q.stride(0), q.stride(1), table.stride(0), chunks.stride(0),
                self.rows, **sizes, BM=lay.tile, BN=v.far.columns, STAGES=v.far.stages, num_warps=v.far.warps, **limit,
            )  # fmt: skip

        def over_tails() -> None:
            kernels.over_tails[(self.rows, self.kv_heads, 1)](
                *read, near, near_sums, factor, *strides, self.rows, heads, **sizes, BM=16, BN=v.near.columns, SPLITS=1,
                STAGES=v.near.stages, num_warps=v.near.warps, **follows,
            )  # fmt: skip

        def tails_and_merge() -> None:
            kernels.tails_and_merge[(self.rows, self.kv_heads)](
                *read, far, far_sums, lay.whose, heads_of, out, factor, *strides, heads_of.stride(0), self.rows, out.stride(0), out.stride(1),
                **sizes, BM=16, BN=v.near.columns, BC=v.merge, STAGES=v.near.stages, num_warps=v.near.warps, **follows,
            )  # fmt: skip

        def merge() -> None:
            kernels.merge[(self.rows, heads)](
                far, far_sums, near, near_sums, lay.whose, heads_of, out, heads_of.stride(0), self.rows, heads, out.stride(0), out.stride(1),
                GROUP=self.group, DV=self.d, BC=v.merge, EARLY=early, num_warps=max(1, v.merge // 16), **follows,
            )  # fmt: skip

        steps: dict[str, Steps] = {
            "far": [over_prefix], "near": [over_tails], "merge": [merge], "apart": [over_prefix, tails_and_merge],
            "early-merged": [over_prefix, tails_and_merge],
        }  # fmt: skip
        if v.kind == "side" and self.streams:
            return lambda: _beside(self.streams[0], over_prefix, over_tails, merge)
        if v.kind == "first" and self.streams:
            return lambda: _beside(self.streams[1], over_tails, over_prefix, merge, there_first=True)
        return lambda: [step() for step in steps.get(v.kind, [over_prefix, over_tails, merge])]


def _beside(
    other: torch.cuda.Stream,
    here: Callable[[], None],
    there: Callable[[], None],
    last: Callable[[], None],
    there_first: bool = False,
) -> None:
    """One kernel in the current stream, one in another, and a third behind both."""
    main = torch.cuda.current_stream()
    other.wait_stream(main)
    if not there_first:
        here()
    with torch.cuda.stream(other):
        there()
    if there_first:
        here()
    main.wait_stream(other)
    last()


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
    """Every kind against the definition, in float32 on a CPU."""
    case = Case(torch.device("cpu"), torch.float32, rows=6, entries=150, tail=40, kv_heads=2, d=32)
    blocks = Blocks(16, 2, 4)
    for kind, half in itertools.product(KINDS, (False, True)):
        case.out.fill_(torch.nan)
        case.action(Variant(kind, blocks, blocks, tile=16, most=9, half=half))()
        print(kind, half, f"{case.error():.1e}")
        assert case.error() < (1e-2 if half else 1e-5)
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
    all_ = list(variants(given.rows))
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
        error = "" if one.kind in ("far", "near", "merge") else f", error {case.error():.1e}"
        print(f"{took[0]:6.1f} {took[1]:6.1f} us{error}: {one}", flush=True)


if __name__ == "__main__":
    main()
