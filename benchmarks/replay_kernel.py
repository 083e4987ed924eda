"""The fused replay kernels on a GPU: time against the replay's own attention. What they compute is tested by tests/dropkv/test_prefill_gpu.py.

    python benchmarks/replay_kernel.py [--tokens 32768] [--tiles]

Mistral-7B's shape, bf16: 32 query heads, 8 KV heads, head dim 128, replays of chunks of 512 tokens and 28 tokens of instruction, 28 sinks. The
attention alone is PyTorch's flash kernel over variable lengths, with keys and values gathered for it beforehand (not timed). Medians of event
timings, the L2 cache flushed between repetitions. --tiles tries other tile shapes than the library's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from dropkv.kernels.fused_replay import Tiles, fused_replay, prepare

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CHUNK, ASKING, SINKS = 512, 28, 28
OTHERS = (
    {"stages": 2},
    {"columns": 128, "stages": 2},
    {"rows": 64, "warps": 4},
    {"score_stages": 2},
    {"queries": 128, "score_warps": 8, "score_stages": 2},
    {"queries": 128, "keys": 128, "score_warps": 16, "score_stages": 2},
)


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


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--tiles", action="store_true")
    given = options.parse_args()
    probes, length = given.tokens // CHUNK, CHUNK + ASKING
    total = probes * length
    q, own_k, own_v = (draw(total, heads, WIDTH).transpose(0, 1) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k, v = draw(KV_HEADS, given.tokens, WIDTH), draw(KV_HEADS, given.tokens, WIDTH)
    segments = [(i * length, (i + 1) * length, i * length, i * CHUNK, (i + 1) * CHUNK, 0, SINKS) for i in range(probes)]
    flat_q = q.transpose(0, 1).contiguous()
    flat_k, flat_v = (
        torch.cat(
            [torch.cat([document[:, s[3] : s[4]], document[:, :SINKS], own[:, s[0] : s[1]]], 1) for s in segments], 1
        )
        .transpose(0, 1)
        .contiguous()
        for document, own in ((k, own_k), (v, own_v))
    )
    seen = CHUNK + SINKS + length
    starts = torch.arange(probes + 1, device="cuda", dtype=torch.int32)

    def flash():
        return torch.ops.aten._flash_attention_forward(
            flat_q, flat_k, flat_v, starts * length, starts * seen, length, seen, 0.0, True, False, scale=WIDTH**-0.5
        )

    alone = median(flash)
    flops = 4 * HEADS * WIDTH * probes * (length * (CHUNK + SINKS) + length * length / 2)
    print(f"flash attention alone {alone:.3f} ms, {flops / alone / 1e9:.0f} TFLOP/s", flush=True)
    want = flash()[0].transpose(0, 1).float()
    for change in ({}, *(OTHERS if given.tiles else ())):
        prepared = prepare(segments, HEADS // KV_HEADS, WIDTH, q.device, Tiles(**change))
        unscored = replace(prepared, keys=prepared.keys[:0])
        for odds in (True, False):

            def fused(which, odds=odds):
                return fused_replay(q, k, v, own_k, own_v, which, scale=WIDTH**-0.5, odds=odds)

            error = float((fused(prepared)[0].float() - want).norm() / want.norm())
            own, both = (median(lambda which=which: fused(which)) for which in (unscored, prepared))
            print(
                f"{change or 'library'} {'odds' if odds else 'p'}: attention {own:.3f} ms, scores {both - own:.3f} ms "
                f"({(both - own) / own:.2f} x), both {both:.3f} ms ({both / alone:.2f} x flash), outputs {error:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
