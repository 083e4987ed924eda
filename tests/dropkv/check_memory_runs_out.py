"""Run on a GPU by test_prefill_gpu.py: memory that runs out in the middle of a prefill makes its slices smaller, and changes nothing else.

python tests/dropkv/check_memory_runs_out.py DTYPE [DEVICE]

The GPU is filled until the slices of the first run do not fit any more, a quarter of them do. On a CPU, where slices stay as they are, only the
comparison is tried.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.bench.speed.shapes import make_network
from dropkv.memory import read_peak, start_peak
from dropkv.methods import get
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill

SHAPE = dict(
    model_type="mistral",
    vocab_size=1000,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=65536,
    sliding_window=None,
    initializer_range=0.05,
)
# How far keys and values may be apart that are rounded in another order: some roundings of the dtype for every layer. A logit, of 10 or so, moves
# by as much as its keys and queries do, and a score is the square of odds: so many times more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
SCORES = 4
# Entries whose scores differ by less than that may change places at the threshold; so few of all lie there.
COMMON = {torch.float32: 0.995, torch.bfloat16: 0.9}


def apart(one, other) -> tuple[float, float]:
    """The smallest share of a layer's entries that both keep, and the largest relative distance of what they keep in common, that of
    scores divided by SCORES."""
    shares, errors = [], []
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for head in range(len(mine.offsets) - 1):
            parts = []
            for layer in (mine, theirs):
                begin, end = layer.offsets[head : head + 2].tolist()
                order = layer.positions[begin:end].argsort()
                parts.append(
                    [x[begin:end][order].double() for x in (layer.positions, layer.keys, layer.values, layer.scores)]
                )
            both = [torch.isin(x[0], y[0]) for x, y in (parts, parts[::-1])]
            shares.append(float(both[0].double().mean()))
            for x, y, times in zip(*(part[1:] for part in parts), (1, 1, SCORES), strict=True):
                errors.append(float((x[both[0]] - y[both[1]]).norm() / y.norm()) / times)
    return min(shares), max(errors)


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cuda")
    gpu = device.type == "cuda"
    torch.manual_seed(3)
    widths = dict(hidden_size=1024, intermediate_size=14336) if gpu else dict(hidden_size=64, intermediate_size=96)
    model = make_network("of this check", SHAPE | widths, dtype, device)
    n, large, small = (32768, 8192, 2048) if gpu else (512, 256, 64)
    document = torch.randint(3, 990, (n,), generator=torch.Generator().manual_seed(1)).tolist()

    def run(size: int):
        start_peak(device)
        done = prefill(model, document, plan_tail(8, n), get("adadropkv"), n // 20, slice_tokens=size)
        return done, read_peak(device)

    run(large)  # compiles kernels
    whole, most = run(large)
    finer, less = run(small)
    print(
        f"slices of {large} and {small}: peaks {most >> 20} and {less >> 20} MiB, common {apart(whole, finer)[0]:.4f}"
    )
    if gpu:
        torch.cuda.empty_cache()
        left = less - torch.cuda.memory_allocated() + (most - less) // 4
        filler = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device=device)
        failed = torch.cuda.memory_stats()["num_ooms"]
        halved, _ = run(large)
        failed = torch.cuda.memory_stats()["num_ooms"] - failed
        print(f"{left >> 20} MiB left beside {filler.nbytes >> 20}: memory ran out {failed} times")
        assert failed >= 1
        del filler
    else:
        halved = finer
    share, error = apart(halved, whole)
    print(f"{sys.argv[1]}: common {share:.4f}, apart {error:.1e}")
    assert share > COMMON[dtype] and error < TOLERANCE[dtype]
    print("all equal")


if __name__ == "__main__":
    main()
