"""Tiles of the accuracy bench's kernels on a GPU, which wait for a measurement: about 25 seconds, most of them for compiling.

    python benchmarks/variants/accuracy_tiles.py

Shapes of SmolLM2 with 32 documents of 2,048 tokens and 70 rows each, which keep 5, 10, 25 or 50 %. The library has the first line of each
kind. Predicted: decode, 64 rows a program instead of 128, since 192 programs of 128 rows leave a third of an H200 idle; prompt, the default,
three stages being worth little where entries come from the L2 cache; scores, 32 queries or 8 warps, since 64 queries with 4 warps spill some
registers. The fastest of each kind becomes the default: of decode `ROWS` and `warps` in masked_decode.py, of prompt the arguments' defaults in
masked_prompt.py, of scores the tile in head_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dropkv.kernels.head_scores import Kind, head_scores
from dropkv.kernels.masked_decode import masked_decode, tiles_of
from dropkv.kernels.masked_prompt import masked_prompt
from dropkv.kernels.window_attend import Tile, attend_window

DOCUMENTS, ROWS, KV_HEADS, GROUP, DIM, TOKENS, QUESTION, REACH = 32, 70, 3, 3, 64, 2048, 60, 64
SHARES = (0.05, 0.1, 0.25, 0.5)
KINDS: tuple[Kind, ...] = ("max p", "mean p", "var p", "entropy", "max along", "sum of steps", "max step")


def timed(name: str, action: Callable[[], object], repeat: int) -> None:
    """Print the mean time of an action in microseconds."""
    action()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        action()
    end.record()
    torch.cuda.synchronize()
    print(f"{name}: {begin.elapsed_time(end) / repeat * 1000:.0f} us", flush=True)


def draw(*shape: int) -> Tensor:
    """Normal bf16 numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rows() -> None:
    """One token of every row, and whole questions."""
    total, counts = DOCUMENTS * ROWS, [ROWS] * DOCUMENTS
    document = draw(DOCUMENTS, KV_HEADS, TOKENS, DIM), draw(DOCUMENTS, KV_HEADS, TOKENS, DIM)
    shares = torch.tensor(SHARES, device="cuda").repeat(total // len(SHARES)).view(-1, 1, 1)
    keep = torch.rand(total, KV_HEADS, TOKENS, device="cuda") < shares
    tails = draw(total, KV_HEADS, 2 * REACH, DIM), draw(total, KV_HEADS, 2 * REACH, DIM)
    q, seen = draw(total, KV_HEADS * GROUP, DIM), torch.ones(total, REACH, dtype=torch.bool, device="cuda")
    for lines, warps in ((128, 4), (64, 4), (128, 8), (64, 8)):
        tiles = tiles_of(counts, GROUP, q.device, lines)

        def one(tiles: Tensor = tiles, lines: int = lines, warps: int = warps) -> Tensor:
            return masked_decode(q, *document, keep, *tails, seen, tiles, scale=0.125, rows=lines, warps=warps)

        timed(f"decode, {lines} rows, {warps} warps", one, 20)
    several = draw(total, QUESTION, KV_HEADS * GROUP, DIM).transpose(1, 2)
    each = seen.unsqueeze(1).expand(-1, QUESTION, -1).contiguous()
    for lines, columns, warps, stages in ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2)):

        def many(lines: int = lines, columns: int = columns, warps: int = warps, stages: int = stages) -> Tensor:
            return masked_prompt(
                several, *document, keep, *tails, each, counts, scale=0.125, lines=lines, columns=columns, warps=warps, stages=stages
            )  # fmt: skip

        timed(f"prompt, {lines} rows, {columns} entries, {warps} warps, {stages} stages", many, 3)


def scores() -> None:
    """Replays of 550 tokens over 512 keys, 16 documents."""
    heads, m, columns = 16 * KV_HEADS, 550, 512
    q, k, v = draw(heads, GROUP, m, DIM), draw(heads, columns + 12 + m, DIM), draw(heads, columns + 12 + m, DIM)
    roots = torch.randn(heads, GROUP, DIM, DIM, device="cuda")
    attention = attend_window(q, k, v, scale=0.125, residuals=True)
    smoothed: tuple[Kind, ...] = ("max smoothed",)
    for tile in (Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 64, 8, 1)):
        for name, kinds in (("scores", KINDS), ("smoothed", smoothed)):

            def run(kinds: tuple[Kind, ...] = kinds, tile: Tile = tile) -> object:
                return head_scores(q, k, v, attention, kinds, scale=0.125, columns=columns, roots=roots, tile=tile)

            timed(f"{name}, {tile.rows} queries, {tile.warps} warps", run, 5)


def main() -> None:
    torch.manual_seed(0)
    rows()
    scores()


if __name__ == "__main__":
    main()
