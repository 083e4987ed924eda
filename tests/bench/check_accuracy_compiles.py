"""Run by test_answers.py in a process of its own: the kernels of the accuracy bench are compiled for an NVIDIA GPU, which needs none, and not run.

python tests/bench/check_accuracy_compiles.py [all]: more types and head dims, 100 seconds
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch
from triton.runtime.jit import JITFunction

from dropkv.kernels import dispatch
from dropkv.kernels.head_scores import ORDER, head_scores
from dropkv.kernels.masked_decode import masked_decode, tiles_of
from dropkv.kernels.masked_prompt import masked_prompt
from dropkv.kernels.value_sizes import value_sizes
from dropkv.kernels.window_attend import attend_window
from tests.dropkv.check_decode_compiles import compile_only, compiled


def scores(dtype: torch.dtype, m: int, n: int, columns: int | None, d: int) -> None:
    """Everything that a probe or a window is scored by."""
    q, k, v = (torch.zeros(shape, dtype=dtype) for shape in ((2, 3, m, d), (2, n, d), (2, n, d)))
    roots = torch.zeros(2, 3, d, d)
    attention = attend_window(q, k, v, scale=0.1, residuals=True)
    moving = [kind for kind in ORDER if kind != "max step"]
    for kinds in ([kind for kind in ORDER if kind != "ema step"], moving, *([["max smoothed"]] if d <= 128 else [])):
        head_scores(q, k, v, attention, kinds, scale=0.1, columns=columns, roots=roots)
    dispatch._fused(
        dispatch.Window(q, k, k, 0.1), [(dispatch.Job(lambda block: block.probability()), dispatch.Score("p"))], 1
    )


def answers(dtype: torch.dtype, d: int) -> None:
    """Questions, and one token more."""
    k, v, tails = (
        torch.zeros(2, 1, 64, d, dtype=dtype),
        torch.zeros(2, 1, 64, d, dtype=dtype),
        torch.zeros(5, 1, 32, d, dtype=dtype),
    )
    keep, seen = torch.ones(5, 2, 1, 64, dtype=torch.bool)[:, 1], torch.ones(5, 4, 16, dtype=torch.bool)
    q = torch.zeros(5, 3, 4, d, dtype=dtype)
    masked_prompt(q, k, v, keep, tails, tails, seen, [2, 3], scale=0.1)
    masked_decode(
        q[:, :, 0].contiguous(), k, v, keep, tails, tails, seen[:, 0], tiles_of([2, 3], 3, q.device), scale=0.1
    )


def main() -> None:
    JITFunction.run = compile_only
    others = ((torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 64)) if "all" in sys.argv else ()
    for dtype, d in ((torch.bfloat16, 64), *others):
        scores(dtype, 70, 200, 100, d)
        scores(dtype, 8, 200, None, d)
        answers(dtype, d)
        value_sizes(torch.zeros(2, 100, min(d, 128), dtype=dtype), torch.zeros(96, 6 * min(d, 128), dtype=dtype))
    for name, variants in sorted(compiled.items()):
        print(name, len(variants))
    assert set(compiled) == {
        "_attend", "_merge", "_score", "_scores", "_scale_back", "_smoothed", "_far", "_near", "_positions", "_sizes"
    }  # fmt: skip
    print("all equal")


if __name__ == "__main__":
    main()
