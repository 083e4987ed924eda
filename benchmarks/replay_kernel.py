"""The fused replay kernel on a GPU: correctness against float64 on fresh inputs, and time against the replay's own attention.

    python benchmarks/replay_kernel.py [--tokens 32768]

Mistral-7B's shape, bf16: 32 query heads, 8 KV heads, head dim 128, replays of chunks of 512 tokens and 28 tokens of instruction. The attention
alone is PyTorch's flash kernel over variable lengths, with keys and values gathered for it beforehand (not timed). Medians of event timings,
the L2 cache flushed between repetitions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from dropkv.kernels.fused_replay import Segment, fused_replay

TILES = ((64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2), (64, 32, 4, 2))


def median(action, repeat: int = 20) -> float:
    """Milliseconds."""
    flush = torch.empty(1 << 26, device="cuda")
    for _ in range(3):
        action()
    times = []
    for _ in range(repeat):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=32768)
    given = options.parse_args()
    for dtype in ("float32", "float16", "bfloat16"):
        done = subprocess.run(
            [sys.executable, "tests/dropkv/check_fused_replay.py", dtype, "cuda"], capture_output=True, text=True
        )
        print(dtype, done.stdout.splitlines()[-1:], done.stderr[-300:], flush=True)
    heads, kv_heads, d, n, chunk, asking, sinks = 32, 8, 128, given.tokens, 512, 28, 4
    probes = n // chunk
    total = probes * (chunk + asking)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(heads, total, d), draw(kv_heads, n, d), draw(kv_heads, n, d)
    own_k, own_v = draw(kv_heads, total, d), draw(kv_heads, total, d)
    length = chunk + asking
    segments = [
        Segment(i * length, (i + 1) * length, i * length, i * chunk, (i + 1) * chunk, 0, sinks) for i in range(probes)
    ]
    keys, values = (
        torch.cat(
            [torch.cat([doc[:, s.first : s.last], doc[:, :sinks], own[:, s.start : s.stop]], 1) for s in segments], 1
        )
        for doc, own in ((k, own_k), (v, own_v))
    )
    seen = chunk + sinks + length
    starts = torch.arange(probes + 1, device="cuda", dtype=torch.int32)
    flat_q, flat_k, flat_v = (x.transpose(0, 1).contiguous() for x in (q, keys, values))

    def flash():
        return torch.ops.aten._flash_attention_forward(
            flat_q, flat_k, flat_v, starts * length, starts * seen, length, seen, 0.0, True, False, scale=d**-0.5
        )

    alone = median(flash)
    flops = 4 * heads * d * probes * (length * (chunk + sinks) + length * length / 2)
    print(f"attention alone {alone:.3f} ms, {flops / alone / 1e9:.0f} TFLOP/s", flush=True)
    want = flash()[0].transpose(0, 1).float()
    for rows, columns, warps, stages in TILES:
        line = f"rows {rows} columns {columns} warps {warps} stages {stages}:"
        for odds in (True, False):
            settings = {
                "scale": d**-0.5,
                "odds": odds,
                "rows": rows,
                "columns": columns,
                "warps": warps,
                "stages": stages,
            }
            try:
                out, _ = fused_replay(q, k, v, own_k, own_v, segments, **settings)
                error = float((out.float() - want).norm() / want.norm())
                time = median(lambda settings=settings: fused_replay(q, k, v, own_k, own_v, segments, **settings), 10)
                line += f" {'odds' if odds else 'p'} {time:.3f} ms ({time / alone:.2f} x, outputs {error:.1e})"
            except Exception as error:
                line += f" {type(error).__name__}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
