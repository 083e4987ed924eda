"""The registry of methods is the list of files in this folder: a file `name.py` holds METHOD, the method called "name"."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from dropkv.method_names import method_file, method_files
from dropkv.methods._base import (
    LARGEST_P,
    LARGEST_P_TOLD,
    MAX_MAX,
    SUM_OF_STEPS,
    Gathered,
    LayerContext,
    LayerScores,
    Method,
    Pool,
    Together,
    observe_all,
    observed_by,
    odds_times_distance,
    probability,
    score_all,
    told_probability,
    told_step,
)
from dropkv.methods._choice import Choice, second_stage

__all__ = [
    "LARGEST_P",
    "LARGEST_P_TOLD",
    "MAX_MAX",
    "SUM_OF_STEPS",
    "Choice",
    "Gathered",
    "LayerContext",
    "LayerScores",
    "Method",
    "Pool",
    "Together",
    "get",
    "names",
    "observe_all",
    "observed_by",
    "odds_times_distance",
    "probability",
    "score",
    "score_all",
    "told_probability",
    "told_step",
]


def names() -> list[str]:
    """All methods, in alphabetical order."""
    return sorted(method_files())


def get(name: str) -> Method:
    """The method of that name; UsageError with the nearest names for any other."""
    method: Method = import_module(f"{__name__}.{method_file(name)}").METHOD
    return method


def score(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, scale: float, wo: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Scores float32 [kv_heads, n] of a method under its own definition, before pooling.

    q [heads, m, d] are the queries of the last m positions; k [kv_heads, n, d], v [kv_heads, n, d_v] the keys and values of all n.
    `wo` is the output projection as nn.Linear stores it [model dim, heads * d_v], for methods that need it. Larger is kept.
    For criticalkv (and adacriticalkv) it is the score of stage 2, which is made of pooled attention.
    """
    method = get(name.removesuffix("_stage2"))
    kv_heads = k.shape[0]
    queries = q.reshape(kv_heads, q.shape[0] // kv_heads, *q.shape[1:])
    scores = method.layer_scores(LayerContext(k, v, scale, q=queries, wo=wo, seed=seed))
    return second_stage(method.pooled(scores.raw), scores).float() if method.two_stages else scores.raw
