"""Where a step on the GPU has a Triton kernel, the kernel; everywhere else, and for what no kernel can do, plain torch.

The kernels are imported when the first of them is used. Where one could not be used, one line on standard error says why, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dropkv.budgets import Kept
from dropkv.kernels.reduce import MAX_MAX, SPREAD, SUM_MEAN, Reduction, over_group
from dropkv.kernels.score import Attended, Job, Observed, Score, Weight, Window, score_jobs
from dropkv.kernels.triton_here import slower, triton_works
from formats import LayerEntries

if TYPE_CHECKING:
    from dropkv.kernels.head_scores import Kind
    from dropkv.kernels.window_attend import Attention
    from dropkv.methods._base import Pool

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256  # head dim; half of it in float32, whose tiles are twice as large
LONGEST_L2 = 64  # queries whose squares one tile can add up

LAST = Reduction("last", "all heads")
L2_MEAN = Reduction("l2", "mean")


def run_jobs(queries: Observed, jobs: Sequence[Job], documents: int = 1) -> list[Tensor]:
    """`score_jobs`, with kernels for those jobs that they have a form of."""
    forms = [_form(queries, job) for job in jobs]
    kinds = [() if form else _kinds(queries, job) for job, form in zip(jobs, forms, strict=True)]
    if not isinstance(queries, Window | Attended) or not (any(forms) or any(kinds)) or not _usable(queries):
        return score_jobs(queries, jobs, documents)
    rest = [job for job, form, kind in zip(jobs, forms, kinds, strict=True) if form is None and not kind]
    plain = iter(score_jobs(queries, rest, documents) if rest else ())
    with _on(queries.q):
        if isinstance(queries, Window) and any(kinds) and queries.attention is None:
            queries = replace(queries, attention=_attention(queries, values=True))
        fused = iter(_fused(queries, [(job, form) for job, form in zip(jobs, forms, strict=True) if form], documents))
        by_head = iter(_by_head(queries, [pair for pair in zip(jobs, kinds, strict=True) if pair[1]], documents))
    return [next(fused if form else by_head if kind else plain) for form, kind in zip(forms, kinds, strict=True)]


def attention_on_gpu(window: Window) -> Attention | None:
    """Attention outputs and log-sum-exps of a window; None where plain torch has to make them."""
    if not _usable(window):
        return None
    with _on(window.q):
        return _attention(window, values=True)


def received_on_gpu(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """What queries [kv_heads, G, m, d] of the last m keys pay each of them, k [kv_heads, n, d], summed, the mean over the group's heads; float32
    [kv_heads, n]. None where plain torch has to make it."""
    window = Window(q, k, k, scale, softcap)  # the values are not read
    if not _usable(window):
        return None
    with _on(q):
        return _fused(window, [(Job(lambda block: block.probability(), SUM_MEAN, weight="p"), Score("p"))], 1)[0]


def value_sizes_on_gpu(v: Tensor, wo: Tensor, documents: int) -> Tensor | None:
    """`mean_l1_norms` of values [kv_heads, n, d_v] in float32; None where plain torch has to make them."""
    alike = v.dtype == wo.dtype and v.dtype in DTYPES and v.device == wo.device and 0 < v.shape[-1] <= WIDEST // 2
    if not v.is_cuda or not alike or not _works(v):
        return None
    from dropkv.kernels.value_sizes import value_sizes

    with _on(v):
        return value_sizes(_dense(v), _dense(wo), documents)


def select_on_gpu(
    scores: Tensor, count: int, pool: Pool | None, forced: Sequence[int], rule: str, alpha: float
) -> Kept | None:
    """What `dropkv.budgets.select` keeps of pooled scores, made from scores [kv_heads, n]; None where that has to do it."""
    if not scores.is_cuda or scores.dtype != torch.float32 or not _works(scores):
        return None
    from dropkv.kernels.window_select import select_entries

    with _on(scores):
        if pool is None or pool.size == 1 or pool.kind == "max":
            size = 1 if pool is None else pool.size
            return select_entries(scores, count, forced=forced, rule=rule, alpha=alpha, pool=size)
        return select_entries(scores, count, forced=forced, rule=rule, alpha=alpha, pooled=pool(scores))


def gather_on_gpu(k: Tensor, v: Tensor, chosen: Kept, scores: Tensor) -> LayerEntries | None:
    """The chosen entries of k and v [kv_heads, n, d] in file order; None where plain torch has to copy them."""
    dense = k.stride(-1) == 1 and v.stride(-1) == 1
    if not k.is_cuda or scores.dtype != torch.float32 or not dense or not len(chosen.positions) or not _works(k):
        return None
    from dropkv.kernels.window_gather import gather_entries

    with _on(k):
        return gather_entries(k, v, chosen, scores)


def _form(queries: Observed, job: Job) -> Score | None:
    """What the kernel computes for a job; None where it has no form of it."""
    if job.weight not in ("p", "odds", "squared odds", "along"):
        return None
    if job.factors is not None:
        fits = job.reduction == L2_MEAN and job.weight == "p" and queries.shape[2] <= LONGEST_L2
        return Score("p", "l2") if fits else None
    if job.reduction in (SUM_MEAN, LAST):
        return Score(job.weight)
    return Score(job.weight, "max") if job.reduction == MAX_MAX and job.weight != "along" else None


KINDS: dict[tuple[Weight | None, str], tuple[Kind, ...]] = {
    ("p", "max"): ("max p",),
    ("p", "mean"): ("mean p",),
    ("p", "var"): ("var p",),
    ("p", "mean+200var"): ("mean p", "var p"),
    ("entropy", "sum"): ("entropy",),
    ("along", "max"): ("max along",),
    ("odds", "sum"): ("sum of steps",),
    ("step", "max"): ("max step",),
    ("step", "ema"): ("ema step",),
    ("smoothed", "max"): ("max smoothed",),
}


def _kinds(queries: Observed, job: Job) -> tuple[Kind, ...]:
    """What the kernels of head_scores.py compute for a job, for windows alone; () where they have no form of it."""
    if not isinstance(queries, Window) or (queries.attention is not None and queries.attention.loud is None):
        return ()
    width = max(queries.q.shape[-1], queries.v.shape[-1])
    most = WIDEST // 4 if queries.q.dtype == torch.float32 else WIDEST // 2 if job.weight == "smoothed" else WIDEST
    return KINDS.get((job.weight, job.reduction.queries), ()) if width <= most else ()


def _by_head(queries: Window | Attended, work: Sequence[tuple[Job, tuple[Kind, ...]]], documents: int) -> list[Tensor]:
    if not work:
        return []
    from dropkv.kernels.head_scores import head_scores

    assert isinstance(queries, Window) and queries.attention is not None
    q, k, v = (_dense(part) for part in (queries.q, queries.k, queries.v))
    found = head_scores(
        q, k, v, queries.attention, {kind for _, kinds in work for kind in kinds},
        scale=queries.scale, softcap=queries.softcap, columns=queries.columns, roots=queries.roots,
    )  # fmt: skip
    done = []
    for job, kinds in work:
        score = found[kinds[0]] if len(kinds) == 1 else found["mean p"] + SPREAD * found["var p"]
        done.append(over_group(score if job.finish is None else job.finish(score), job.reduction.group, documents))
    return done


def _usable(queries: Window | Attended) -> bool:
    """Whether the kernels can serve these queries; says why they cannot where that is not to be expected."""
    if not queries.q.is_cuda or not queries.q.shape[2]:
        return False
    if isinstance(queries, Window) and queries.reach is not None and queries.positions is not None:
        return False  # layers that slide have no scores
    if queries.q.dtype not in DTYPES:
        slower(f"no kernel computes in {_name(queries.q.dtype)}, so plain PyTorch scores")
        return False
    widest = max(queries.k.shape[-1], queries.v.shape[-1])
    most = WIDEST // 2 if queries.q.dtype == torch.float32 else WIDEST
    if widest > most:
        slower(f"no kernel has a head dim of {widest} in {_name(queries.q.dtype)}, so plain PyTorch scores")
    return widest <= most and queries.v.shape[-1] > 0 and _works(queries.q)


def _works(x: Tensor) -> bool:
    """Whether the kernels run where x lies; they are made for CUDA's way of launching alone."""
    return triton_works(x.device) and torch.version.hip is None


def _attention(window: Window, *, values: bool) -> Attention:
    from dropkv.kernels.window_attend import attend_window

    return attend_window(
        _dense(window.q), _dense(window.k), _dense(window.v), scale=window.scale, softcap=window.softcap, values=values,
        residuals=values and window.roots is not None,
    )  # fmt: skip


def _fused(queries: Window | Attended, work: Sequence[tuple[Job, Score]], documents: int) -> list[Tensor]:
    from dropkv.kernels.window_attend import Attention
    from dropkv.kernels.window_score import score_window

    q, k, v = (_dense(part) for part in (queries.q, queries.k, queries.v))
    columns, softcap = None, None
    if isinstance(queries, Attended):
        attention = Attention(queries.outputs.float(), queries.log_sum_exp.float())
    else:
        columns, softcap = queries.columns, queries.softcap
        values = queries.outputs is not None or any(form.reads_values for _, form in work)
        attention = queries.attention or _attention(replace(queries, q=q, k=k, v=v), values=values)
        if queries.outputs is not None:
            queries.outputs.copy_(cast(Tensor, attention.outputs))
    done = []
    for job, form in work:
        newest = job.reduction == LAST
        scores = score_window(
            q[:, :, -1:] if newest else q, k, v, attention.part(slice(-1, None)) if newest else attention, form,
            scale=queries.scale, softcap=softcap, columns=columns, causal=isinstance(queries, Window),
            factors=None if job.factors is None else job.factors.contiguous(),
        )  # fmt: skip
        done.append(over_group(scores.unsqueeze(1), "all heads", documents) if newest else scores)
    return done


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it that of a tensor."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
