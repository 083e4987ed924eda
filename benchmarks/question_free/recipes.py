"""The candidates: the default of today, the published rules beside it, and one change after another. A group is a question that was asked."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.question_free.bases import AROUND, AROUNDS, STEP, TOLD, P, each, rules, scores
from benchmarks.question_free.keep import Rule
from benchmarks.question_free.observing import observing
from benchmarks.question_free.recipe import Part, Recipe
from benchmarks.question_free.streaming import streaming
from benchmarks.question_free.together import together

DEFAULT = "default"
FINALISTS = (  # the candidates that docs/question-free.md names
    DEFAULT,
    "default, p",
    "step",
    "p",
    "told, pool words sum",
    "around, heads 0.4, mean 11",
    "by layer, standing_pool max 9",
    "plain by heads, mean 11, together 1",
    "plain by heads, mean 11, so far",
    "two, 10 % by step/sum",
    "two, 30 % by step/sum",
    "two, 50 % by step/sum",
    "two told, 30 % by step/sum",
    "two told, 50 % by step/sum",
    "two 0.27, 30 % by step/sum",
    "two told 0.27, 50 % by step/sum",
    "two told 0.53, 30 % by step/sum",
    "two growing, 30 % by step/sum",
    "two told growing, 30 % by step/sum",
)


def groups(head_tokens: int) -> dict[str, list[Recipe]]:
    """Every candidate, by group; head_tokens: of the template, which today's default forces."""
    wide = Recipe("step", (STEP,))
    told, around = TOLD, AROUNDS
    default = Rule("head-adaptive", 0.2, first=max(4, head_tokens))
    forced = replace(Rule(), first=max(4, head_tokens))
    budgets = {
        "alpha 0.05": Rule(alpha=0.05),
        "alpha 0.1": Rule(alpha=0.1),
        "alpha 0.2": Rule(alpha=0.2),
        "least 16": Rule(least=16),
        "layer share 0.1": Rule(layer_share=0.1),
        "layer share 0.3": Rule(layer_share=0.3),
        "head-adaptive 0": Rule("head-adaptive"),
        "head-adaptive 0.1": Rule("head-adaptive", 0.1),
        "uniform": Rule("uniform"),
    }
    ends = {
        "template head": forced,
        "first 1": Rule(first=1),
        "last 0": Rule(last=0),
        "last 8": Rule(last=8),
        "last 16": Rule(last=16),
    }
    looks = (
        "p/max",
        "p-distance/max",
        "step-wo/max",
        "step-rel/max",
        "step/content",
        "step/l4",
        "step/top",
        "step/sum",
        "step/copy",
    )
    tolds = ("p/told", "p-distance/told", "step-wo/told", "step-rel/told")
    today = Recipe(DEFAULT, (STEP,), pool=("max 5",), rule=default)
    return {
        "today": [
            today,
            Recipe("default, p", (P,), pool=("max 5",), rule=default),
            wide,
            Recipe("p", (P,)),
            Recipe("step, pool 5", (STEP,), pool=("max 5",)),
            Recipe("p, pool 5", (P,), pool=("max 5",)),
        ],
        "score": [
            *scores(wide, looks),
            replace(wide, name="step, group mean", parts=(Part("step/max", group="mean"),)),
            Recipe("step x p", (STEP, P), fuse="product"),
            Recipe("step and p, ranks", (STEP, P), fuse="ranks"),
            replace(wide, name="step, floor 1", floor=1.0),
            told,
            *scores(told, tolds),
            replace(wide, name="step, own surprise to 1", surprise=1.0),
            replace(wide, name="step, own surprise to 3", surprise=3.0),
            replace(wide, name="step, own surprise", surprise=99.0),
        ],
        "pool": [
            *each(told, "pool", [(f"max {size}",) for size in (3, 5, 7, 11, 21)], lambda x: "".join(x)),  # type: ignore[call-overload]
            *each(told, "pool", [("mean 3",), ("mean 5",), ("mean 11",)], lambda x: "".join(x)),  # type: ignore[call-overload]
            *each(told, "pool", [(f"words {how}",) for how in ("max", "l2", "sum")], lambda x: "".join(x)),  # type: ignore[call-overload]
            *each(told, "pool", [(f"sentences {how}",) for how in ("max", "mean")], lambda x: "".join(x)),  # type: ignore[call-overload]
            replace(told, name="told, pool words sum, max 5", pool=AROUND),
        ],
        "budget": [*rules(told, budgets), *rules(told, ends), *rules(around, budgets), *rules(around, ends)],
        "balance": [
            replace(told, name=f"told, balance {how} ^{power:g}", balance=how, balance_power=power)
            for how, power in [
                ("head mean", 0.25),
                ("head mean", 0.5),
                ("head mean", 1),
                ("head max", 0.5),
                ("head max", 1),
                ("head high", 0.5),
                ("layer mean", 0.5),
                ("layer mean", 1),
                ("layer max", 1),
                ("head ranks", 1),
            ]
        ],
        "streaming": streaming(today),
        "other observers": observing(today),
    } | together()
