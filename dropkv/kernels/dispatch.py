"""Where a step on the GPU has a Triton kernel, the kernel; everywhere else, and for what no kernel can do, plain torch.

The kernels are imported when the first of them is used. Where one could not be used, one line on standard error says why, once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dropkv.budgets import Kept
from dropkv.kernels.reduce import MAX_MAX, SUM_MEAN, Reduction, over_group
from dropkv.kernels.score import Job, Observed, Score, Window, score_jobs
from formats import LayerEntries

if TYPE_CHECKING:
    from dropkv.kernels.window_attend import Attention
    from dropkv.methods._base import Pool

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256  # head dim
LONGEST_L2 = 64  # queries whose squares one tile can add up

LAST = Reduction("last", "all heads")
L2_MEAN = Reduction("l2", "mean")


def run_jobs(queries: Observed, jobs: Sequence[Job], documents: int = 1) -> list[Tensor]:
    """`score_jobs`, with the kernel for those jobs that it has a form of."""
    forms = [_form(queries, job) for job in jobs]
    if not isinstance(queries, Window) or not any(forms) or not _usable(queries):
        return score_jobs(queries, jobs, documents)
    rest = [job for job, form in zip(jobs, forms, strict=True) if form is None]
    plain = iter(score_jobs(queries, rest, documents) if rest else ())
    if rest and queries.outputs is not None:
        queries = replace(queries, outputs=None)  # the plain path has filled them
    fused = iter(_fused(queries, [(job, form) for job, form in zip(jobs, forms, strict=True) if form], documents))
    return [next(plain if form is None else fused) for form in forms]


def attend(window: Window) -> Tensor:
    """Attention outputs [kv_heads, G, m, d_v] of a window, in float32 (float64 for float64 inputs)."""
    if not _usable(window):
        return window.attend()
    outputs = _attention(window, values=True).outputs
    assert outputs is not None
    return outputs


def select_on_gpu(
    scores: Tensor, count: int, pool: Pool | None, forced: Sequence[int], rule: str, alpha: float
) -> Kept | None:
    """What `dropkv.budgets.select` keeps of pooled scores, made from scores [kv_heads, n]; None where that has to do it."""
    if not scores.is_cuda or scores.dtype != torch.float32 or not _triton():
        return None
    from dropkv.kernels.window_select import select_entries

    if pool is None or pool.size == 1 or pool.kind == "max":
        size = 1 if pool is None else pool.size
        return select_entries(scores, count, forced=forced, rule=rule, alpha=alpha, pool=size)
    return select_entries(scores, count, forced=forced, rule=rule, alpha=alpha, pooled=pool(scores))


def gather_on_gpu(k: Tensor, v: Tensor, chosen: Kept, offsets: Tensor, scores: Tensor) -> LayerEntries | None:
    """The chosen entries of k and v [kv_heads, n, d] in file order; None where plain torch has to copy them."""
    dense = k.stride(-1) == 1 and v.stride(-1) == 1
    if not k.is_cuda or scores.dtype != torch.float32 or not dense or not len(chosen.positions) or not _triton():
        return None
    from dropkv.kernels.window_select import gather_entries

    return gather_entries(k, v, chosen, offsets, scores)


def _form(queries: Observed, job: Job) -> Score | None:
    """What the kernel computes for a job; None where it has no form of it."""
    if job.weight is None:
        return None
    if job.factors is not None:
        fits = job.reduction == L2_MEAN and job.weight == "p" and queries.shape[2] <= LONGEST_L2
        return Score("p", "l2") if fits else None
    if job.reduction in (SUM_MEAN, LAST):
        return Score(job.weight)
    return Score(job.weight, "max") if job.reduction == MAX_MAX and job.weight != "along" else None


def _usable(window: Window) -> bool:
    """Whether the kernels can compute a window's attention; says why they cannot where that is not to be expected."""
    if not window.q.is_cuda or (window.reach is not None and window.positions is not None):
        return False
    if window.q.dtype not in DTYPES:
        _say(f"no kernel computes {str(window.q.dtype).removeprefix('torch.')}")
        return False
    if max(window.k.shape[-1], window.v.shape[-1]) > WIDEST or not window.v.shape[-1]:
        _say(f"no kernel has a head dim of {max(window.k.shape[-1], window.v.shape[-1])}")
        return False
    return window.q.shape[2] > 0 and _triton()


@cache
def _triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except Exception as error:
        _say(f"Triton cannot be imported ({type(error).__name__})")
        return False
    return True


@cache
def _say(reason: str) -> None:
    print(f"dropkv: {reason}: PyTorch scores and selects instead, which takes longer", file=sys.stderr, flush=True)


def _attention(window: Window, *, values: bool) -> Attention:
    from dropkv.kernels.window_attend import attend_window

    return attend_window(
        _dense(window.q), _dense(window.k), _dense(window.v), scale=window.scale, softcap=window.softcap, values=values
    )


def _fused(window: Window, work: Sequence[tuple[Job, Score]], documents: int) -> list[Tensor]:
    from dropkv.kernels.window_score import score_window

    window = replace(window, q=_dense(window.q), k=_dense(window.k), v=_dense(window.v))
    values = window.outputs is not None or any(form.reads_values for _, form in work)
    attention = _attention(window, values=values)
    if window.outputs is not None:
        window.outputs.copy_(cast(Tensor, attention.outputs))
    done = []
    for job, form in work:
        q, own = window.q, attention
        if job.reduction == LAST:
            q, own = q[:, :, -1:], attention.last()
        scores = score_window(
            q, window.k, window.v, own, form, scale=window.scale, softcap=window.softcap, columns=window.columns,
            factors=None if job.factors is None else job.factors.contiguous(),
        )  # fmt: skip
        done.append(over_group(scores.unsqueeze(1), "all heads", documents) if job.reduction == LAST else scores)
    return done


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
