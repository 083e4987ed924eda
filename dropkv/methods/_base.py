"""What a method is: a score per key, how it is reduced and pooled, and the rule that turns scores into kept sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dropkv.budgets import Kept, forced_positions, kept_count
from dropkv.kernels.dispatch import run_jobs
from dropkv.kernels.reduce import MAX_MAX, SUM_MEAN, Reduction
from dropkv.kernels.score import Block, Job, Observed, Weight, score_jobs
from dropkv.methods._layer import Gathered, LayerContext, LayerScores
from dropkv.words import Words

__all__ = [
    "MAX_MAX",
    "SUM_MEAN",
    "Block",
    "Gathered",
    "Job",
    "LayerContext",
    "LayerScores",
    "Method",
    "Pool",
    "Reduction",
    "Together",
    "observe_all",
    "observed_by",
    "score_all",
]

Rule = Literal["uniform", "head-adaptive", "model-wide", "layer-pyramid", "cake-layers", "two orders"]
Need = Literal["output projection", "all queries", "query statistics", "replay", "told", "words"]


@dataclass(frozen=True)
class Pool:
    """Pooling along the keys, stride 1, centred: "max" with nothing outside, "avg" with zeros outside, divided by the whole kernel.

    "drift" is ReST-KV's average over a window that follows where the queries look; it needs more than scores (see `restkv`) and is, called
    alone, the average with the edge repeated outside.
    """

    kind: Literal["max", "avg", "drift"]
    size: int

    def __call__(self, scores: Tensor) -> Tensor:
        """Pooled scores, same shape as `scores` [..., n]."""
        if self.size == 1:
            return scores
        half = self.size // 2
        rows = scores.reshape(-1, 1, scores.shape[-1])
        if self.kind == "max":
            pooled = F.max_pool1d(rows, self.size, stride=1, padding=half)
        elif self.kind == "drift":
            pooled = F.avg_pool1d(F.pad(rows, (half, half), mode="replicate"), self.size, stride=1)
        else:
            pooled = F.avg_pool1d(rows, self.size, stride=1, padding=half, count_include_pad=True)
        return pooled.view(scores.shape)


@dataclass(frozen=True)
class Together:
    """How heads come to keep the same tokens (see `auto`). heads: the share of all heads that share a budget, 0 for all of them; balance: the
    power of the head's mean that its scores are divided by; scope: the layers whose attention says what a token stands for: those up to this
    one, this one alone, or all of the model, for which the document is read twice."""

    heads: float = 0.4
    balance: float = 1.0
    scope: Literal["so far", "layer", "model"] = "so far"


@dataclass(frozen=True)
class Method:
    """One way of choosing what is kept.

    Either `observed` (a contribution per query and key, from attention) or `unobserved` (scores [kv_heads, n] from the layer alone) is set.
    `power` raises an odds score; `forced_last` newest and `forced_first` oldest entries are kept whatever their score.

    For methods that are more than a score, each optional:
    weigh: a factor [kv_heads, G, n] on every query head's score, before the mean over the group.
    beside: further jobs over the same queries, stored as the parts of LayerScores.beside; or `beside_window`, from the queries themselves.
    finish: the last step once a layer's queries have all been seen.
    ranked: scores as the rule sees them, from (method, scores, kept, forced positions); given where they depend on the budget or more than
    pooling is done. A layer's are [kv_heads, n]; with a dimension of layers in front every layer is ranked for itself.
    projected: lengths are measured behind the output projection. two_stages: CriticalKV's selection inside a head. recent_half: the newest
    half of the budget is kept whatever its score. fused: what `observed` is called in the kernels of window_score.py and head_scores.py, where
    it is one of theirs. needs: what has to be collected beside keys, values and observation queries. together: how heads come to keep the same
    tokens, for the rule "two orders" (see `auto`); such methods are made for replays as they are.
    """

    name: str
    summary: str
    observed: Callable[[Block, int], Tensor] | None = None
    unobserved: Callable[[LayerContext], Tensor] | None = None
    power: int = 1
    reduction: Reduction = SUM_MEAN
    pool: Pool | None = None
    rule: Rule = "uniform"
    alpha: float = 0.2
    forced_first: int = 0
    forced_last: int = 8
    keeps_all: bool = False
    weigh: Callable[[LayerContext], Tensor] | None = None
    beside: tuple[Job, ...] = ()
    beside_window: Callable[[Observed], Tensor] | None = None
    finish: Callable[[LayerScores, LayerContext], LayerScores] | None = None
    ranked: Callable[[Method, LayerScores, int, Sequence[int]], Tensor] | None = None
    projected: bool = False
    two_stages: bool = False
    recent_half: bool = False
    budget_bound: bool = False
    fused: Weight | None = None
    needs: frozenset[Need] = frozenset()
    together: Together | None = None

    @property
    def nested(self) -> bool:
        """Whether a smaller budget keeps a smaller part of what a larger one keeps; not so where everything is kept at any budget."""
        bound = (
            self.keeps_all
            or self.budget_bound
            or self.two_stages
            or (self.pool is not None and self.pool.kind == "drift")
        )
        return not bound and self.rule not in ("layer-pyramid", "cake-layers")

    def scores(self, queries: Observed) -> Tensor:
        """Scores float32 [kv_heads, columns] of observation queries; for methods with `observed` that need nothing else of the layer."""
        return score_jobs(queries, [self._job(None)])[0]

    def observe(self, queries: Observed, context: LayerContext, first: int = 0) -> LayerScores:
        """Scores of the keys that `queries` observe, those of the document from position `first` on."""
        return observe_all([self], queries, context, [first])[0]

    def layer_scores(self, context: LayerContext, gathered: LayerScores | None = None) -> LayerScores:
        """This method's scores of a layer, before pooling, for every budget.

        gathered: what probes observed (`observe`, put together by `Gathered`); without, the window in the context observes.
        """
        if self.unobserved is not None:
            scores = LayerScores(self.unobserved(context).float())
        elif gathered is not None:
            scores = gathered
        elif (
            context.q is not None and context.q.shape[2] == 0
        ):  # nothing of the document is observed: all of it is kept anyway
            raw = context.k.new_zeros(context.k.shape[:2], dtype=torch.float32)
            parts = len(self.beside) + 2 * (self.beside_window is not None)
            scores = LayerScores(raw, raw.expand(parts, -1, -1) if parts else None)
        else:
            scores = self.observe(context.window(projected=self.projected), context)
        return scores if self.finish is None else self.finish(scores, context)

    @property
    def reads_twice(self) -> bool:
        """Whether a first reading has to say what tokens stand for."""
        return self.together is not None and self.together.scope == "model"

    def readings(self, *, weighed: bool = True) -> int:
        """How often a document is read; weighed: whether queries weigh nats if the method says so, as those of replays do."""
        return 1 + self.reads_twice + (weighed and "told" in self.needs)

    def choose(self, layers: Sequence[LayerScores], budget: float | int, words: Words | None = None) -> list[Kept]:
        """The kept entries of all layers that have a budget (full attention), from their scores in layer order. words: the document's."""
        from dropkv.methods._choice import Choice  # which knows methods

        n = layers[0].raw.shape[1]
        kept = n if self.keeps_all else kept_count(budget, n, len(self.forced(n)))
        standing = None
        if self.reads_twice:
            paid = [scores.beside[0] for scores in layers if scores.beside is not None]
            standing = torch.stack([own.mean(0) for own in paid]).mean(0)
        choice = Choice(self, kept, [scores.raw.shape[0] for scores in layers], n, words, standing)
        for scores in layers:
            choice.add(scores)
        return choice.finish()

    def forced(self, n: int) -> list[int]:
        """Positions of an n-token document that are kept whatever their score, newest first."""
        return forced_positions(n, self.forced_first, self.forced_last)

    def under_replay(self, head_tokens: int) -> Method:
        """The same score for replayed queries (METHODS, "What an observer changes"): the largest contribution of any query of any head counts,
        unsquared; template head and first 4 tokens and the last 4 are kept. Scores that need no queries stay as they are."""
        if self.observed is None or self.together is not None:
            return self
        inherent = ("last", "mean+200var")  # reductions that are the formula itself
        queries = self.reduction.queries if self.reduction.queries in inherent else "max"
        group = self.reduction.group if self.reduction.group == "all heads" else "max"
        return replace(
            self,
            power=1,
            reduction=Reduction(queries, group),
            pool=self.pool if "replay" in self.needs else Pool("max", 5),
            forced_first=max(4, head_tokens),
            forced_last=4,
            beside_window=None,
        )

    def pooled(self, scores: Tensor) -> Tensor:
        """Scores [..., n] after pooling."""
        return scores if self.pool is None else self.pool(scores)

    def comparable(self, scores: LayerScores, kept: int, forced: Sequence[int]) -> Tensor:
        """Scores [kv_heads, n] as the budget rule sees them; of several layers at once [layers, kv_heads, n]."""
        return self.pooled(scores.raw) if self.ranked is None else self.ranked(self, scores, kept, forced)

    def _job(self, factors: Tensor | None) -> Job:
        observed, power = self.observed, self.power
        assert observed is not None
        if observed is odds_times_distance and power == 1 and self.reduction.queries == "max":
            # a square root commutes with a maximum, and there are fewer of them afterwards
            return Job(lambda block: odds_times_distance(block, 2), self.reduction, _root, "odds")
        weight = self.fused
        if observed is probability:
            weight = "p"
        elif observed is odds_times_distance:
            weight = "squared odds" if power == 2 else "odds"
        finish = None if factors is None else factors.mul
        return Job(lambda block: observed(block, power), self.reduction, finish, weight, factors)


def observed_by(method: Method) -> object:
    """What methods have in common whose observed scores are the same."""
    return method.observed, method.power, method.reduction, method.weigh, method.beside, method.beside_window


def observe_all(
    methods: Sequence[Method], queries: Observed, context: LayerContext, firsts: Sequence[int] = (0,)
) -> list[LayerScores]:
    """`observe` of several methods, all with `observed`: the attention is computed once, and so is every score that several share.

    firsts: where the observed keys begin; several where the queries are those of as many probes, the heads of one probe after another.
    """
    jobs: list[Job] = []
    places: dict[object, int] = {}

    def place(key: object, job: Job) -> int:
        if key not in places:
            places[key] = len(jobs)
            jobs.append(job)
        return places[key]

    wanted = []
    for method in methods:
        factors = None
        if method.weigh is not None:
            whole = method.weigh(context)
            factors = torch.cat([whole[..., first : first + queries.shape[3]] for first in firsts])
        key = (method.observed, method.power, method.reduction, method.weigh)
        wanted.append([place(key, method._job(factors)), *(place(job, job) for job in method.beside)])
    done = run_jobs(queries, jobs, context.documents * len(firsts))
    scores = []
    for method, (own, *others) in zip(methods, wanted, strict=True):
        beside = [done[other] for other in others]
        if method.beside_window is not None:
            beside.extend(method.beside_window(queries))
        scores.append(LayerScores(done[own], torch.stack(beside) if beside else None))
    return scores


def score_all(
    methods: Sequence[Method], context: LayerContext, gathered: Sequence[LayerScores | None]
) -> list[LayerScores]:
    """`layer_scores` of several methods; gathered: what probes observed for each, None without any."""
    parts = list(gathered)
    if context.q is not None and context.q.shape[2]:
        observers = [i for i, method in enumerate(methods) if method.observed is not None and parts[i] is None]
        if observers:
            window = context.window(projected=any(methods[i].projected for i in observers))
            for i, scores in zip(observers, observe_all([methods[i] for i in observers], window, context), strict=True):
                parts[i] = scores
    return [method.layer_scores(context, part) for method, part in zip(methods, parts, strict=True)]


def _root(squares: Tensor) -> Tensor:
    return squares.clamp_(min=0).sqrt_()


def odds_times_distance(block: Block, power: int) -> Tensor:
    """(p / (1 - p + eps))^power * ||a - v||^power [h, rows, c]: what one query's output moves when one key is dropped (DropKV)."""
    squared = block.squared_distance()
    odds = block.odds()
    if power == 2:
        return squared.mul_(odds).mul_(odds)
    return odds.mul_(squared.clamp_(min=0).sqrt_())


def probability(block: Block, power: int) -> Tensor:
    """p, the attention probability itself."""
    return block.probability()


def told_step(block: Block, power: int) -> Tensor:
    """The step of each query times what it weighs (`dropkv.told`); all alike where nothing is known of that."""
    return _told(odds_times_distance(block, power), block)


def told_probability(block: Block, power: int) -> Tensor:
    """p times what the query weighs."""
    return _told(block.probability(), block)


def _told(x: Tensor, block: Block) -> Tensor:
    return x if block.told is None else x.mul_(block.told)


LARGEST_P = Job(lambda block: block.probability(), MAX_MAX, weight="p")
LARGEST_P_TOLD = Job(lambda block: told_probability(block, 1), MAX_MAX)
SUM_OF_STEPS = Job(lambda block: odds_times_distance(block, 1), Reduction("sum", "max"), weight="odds")


def unit(x: Tensor) -> Tensor:
    """x [..., d] scaled to length 1 in float32 (or float64)."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
