"""Candidates in which heads keep the same tokens: see docs/question-free.md for why."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.question_free.bases import (
    AROUND,
    AROUNDS,
    MEAN,
    P_TOLD,
    STEP,
    STEP_TOLD,
    TOLD,
    WHOLE,
    WHOLES,
    P,
    by,
    each,
    rules,
    scores,
)
from benchmarks.question_free.keep import Rule
from benchmarks.question_free.recipe import Part, Recipe

FIRST = ("replay 256", "replay 1024", "sees neighbours", "sees all", "questions", "outline", "pieces 8", "pieces 24")


def together() -> dict[str, list[Recipe]]:
    """The candidates by group."""
    told, whole, around = TOLD, WHOLES, AROUNDS
    by_layer = replace(around, name="by layer", rule=Rule("head-adaptive"), balance_power=0.5)
    plain = replace(by_layer, name="plain", parts=(STEP,), standing=P)
    shared = replace(plain, name="plain by heads", rule=Rule(), balance_power=1.0)
    two = replace(shared, name="two", heads=0.4, standing_pool=MEAN)
    told_two = replace(two, name="two told", parts=(STEP_TOLD,), standing=P_TOLD)
    return {
        "together": [
            *each(replace(told, standing_pool=()), "together", [0.5, 1, 2]),
            *each(
                replace(told, name="told by words", pool=("words max",), standing_pool=("words max",)),
                "together",
                [1, 2],
            ),
            whole,
            around,
            *each(whole, "balance_power", [0.0, 0.5, 1.0]),
            *each(around, "balance_power", [0.0, 0.5, 0.75, 1.0]),
            *each(around, "together", [0.5, 1.5, 2]),
            *each(around, "standing_pool", [("words sum", f"max {size}") for size in (3, 7, 11)], lambda x: x[1]),  # type: ignore[index]
            *each(around, "standing_pool", [("words sum", f"mean {size}") for size in (5, 11)], lambda x: x[1]),  # type: ignore[index]
            *each(
                around,
                "standing_pool",
                [("words sum", "sentences mean"), ("words sum", "sentences max")],
                lambda x: x[1],
            ),  # type: ignore[index]
            *each(around, "pool", [(), ("words max",), ("words l2",), AROUND], lambda x: " ".join(x) or "none"),  # type: ignore[call-overload]
            *each(
                around,
                "standing",
                [None, STEP_TOLD, P, STEP, Part("p/copy"), Part("step-rel/told")],
                lambda x: by(x) if x else "nats",
            ),  # type: ignore[arg-type]
            *each(replace(around, name="around by heads", balance_power=1.0), "heads", [0.27, 0.4, 0.53]),
            *each(replace(around, name="around by heads 0.5", balance_power=0.5), "heads", [0.27, 0.4]),
        ],
        "around": [
            *scores(
                around, ("p/told", "p-distance/told", "step-wo/told", "step-rel/told", "p/max", "step/max", "step/sum")
            ),
            *[
                replace(around, name=f"around, {part.statistic}, balance {power:g}", parts=(part,), balance_power=power)
                for part in (P_TOLD, Part("step-rel/told"))
                for power in (0.0, 0.5, 1.0)
            ],
            replace(around, name="around, step x p", parts=(STEP_TOLD, P_TOLD), fuse="product"),
            replace(
                around,
                name="around, root of step x p",
                parts=(replace(STEP_TOLD, power=0.5), replace(P_TOLD, power=0.5)),
                fuse="product",
            ),
            replace(around, name="around, step^0.5", parts=(replace(STEP_TOLD, power=0.5),)),
            replace(around, name="around, p^0.5", parts=(replace(P_TOLD, power=0.5),)),
            replace(around, name="around, seed 8", seed=8),
            replace(around, name="around, seed 16", seed=16),
            replace(
                around,
                name="around, heads 0.4, mean 11",
                standing_pool=("words sum", "mean 11"),
                balance_power=1.0,
                heads=0.4,
            ),
            replace(around, name="around, no surprise", parts=(STEP,), standing=P),
        ],
        "observers": [
            recipe
            for observer in FIRST
            for recipe in (
                replace(told, name=f"told, {observer}", parts=(Part("step/told", observer),)),
                replace(
                    around,
                    name=f"around, {observer}",
                    parts=(Part("step/told", observer),),
                    standing=Part("p/told", observer),
                ),
                replace(
                    around,
                    name=f"around, replay + {observer}",
                    parts=(STEP_TOLD, Part("step/told", observer)),
                    fuse="mean",
                ),
                replace(around, name=f"around, replay or {observer}", parts=(STEP_TOLD, Part("step/told", observer))),
            )
        ],
        "layers": [
            *[
                replace(
                    by_layer, name=f"by layer, {part.statistic}, balance {power:g}", parts=(part,), balance_power=power
                )
                for part in (STEP_TOLD, P_TOLD, Part("step-rel/told"))
                for power in (0.0, 0.5, 1.0)
            ],
            *rules(
                by_layer,
                {
                    "alpha 0.1": Rule("head-adaptive", 0.1),
                    "alpha 0.2": Rule("head-adaptive", 0.2),
                    "alpha 0.5": Rule("head-adaptive", 0.5),
                    "last 16": Rule("head-adaptive", last=16),
                    "layer share 0.5": Rule(layer_share=0.5),
                    "layer share 0.7": Rule(layer_share=0.7),
                    "layer share 0.9": Rule(layer_share=0.9),
                    "uniform": Rule("uniform"),
                },
            ),
            *each(by_layer, "together", [0.5, 1.5, 2]),
            *each(by_layer, "seed", [8, 16]),
            *each(
                by_layer,
                "standing_pool",
                [("words sum", "max 9"), ("words sum", "mean 11"), ("words sum", "sentences mean")],
                lambda x: x[1],
            ),  # type: ignore[index]
            *each(by_layer, "standing", [None, STEP_TOLD, Part("p/content")], lambda x: by(x) if x else "nats"),  # type: ignore[arg-type]
            replace(by_layer, name="by layer, step/sum", parts=(Part("step/sum"),)),
            plain,
            replace(by_layer, name="by layer, surprise in the standing alone", parts=(STEP,)),
            replace(around, name="around, step/sum, balance 0.75", parts=(Part("step/sum"),), balance_power=0.75),
            replace(around, name="around, balance 0.75, seed 8", balance_power=0.75, seed=8),
            replace(around, name="around, balance 0.75, last 16", balance_power=0.75, rule=Rule(last=16)),
        ],
        "plain": [
            *each(plain, "scope", ["layer", "so far"]),
            *each(plain, "together", [0.5, 1.5]),
            *each(plain, "balance_power", [0.0, 1.0]),
            *each(plain, "pool", [(), ("words max",), ("words l2",)], lambda x: " ".join(x) or "none"),  # type: ignore[call-overload]
            *each(
                plain,
                "standing_pool",
                [(), WHOLE, ("words max", "max 5"), ("max 5",), ("words sum", "max 9"), MEAN],
                lambda x: " ".join(x) or "none",
            ),  # type: ignore[call-overload]
            *each(plain, "standing", [STEP, Part("p/content"), Part("p/sum"), Part("step-rel/max")], lambda x: by(x)),  # type: ignore[arg-type]
            *scores(plain, ("p/max", "step-wo/max", "step-rel/max", "step/sum")),
            *rules(plain, {"model-wide": Rule(), "uniform": Rule("uniform"), "alpha 0.3": Rule("head-adaptive", 0.3)}),
            *each(replace(shared, pool=WHOLE), "heads", [0.33, 0.4, 0.47, 0.53, 0.67]),
            *each(
                replace(shared, name="plain by heads, mean 11", heads=0.4, standing_pool=MEAN),
                "together",
                [0.5, 1, 1.5],
            ),
            replace(shared, name="plain by heads, mean 21", heads=0.4, standing_pool=("words sum", "mean 21")),
            replace(shared, name="plain by heads 0.53, mean 11", heads=0.53, standing_pool=MEAN),
            replace(
                shared,
                name="plain by heads, mean 11, step/sum",
                heads=0.4,
                standing_pool=MEAN,
                parts=(Part("step/sum"),),
            ),
            replace(
                shared,
                name="plain by heads, mean 11, told",
                heads=0.4,
                standing_pool=MEAN,
                parts=(STEP_TOLD,),
                standing=P_TOLD,
            ),
            replace(shared, name="plain by heads, mean 11, so far", heads=0.4, standing_pool=MEAN, scope="so far"),
            replace(
                shared, name="plain by heads, mean 11, balance 0.75", heads=0.4, standing_pool=MEAN, balance_power=0.75
            ),
        ],
        "two": [
            replace(
                base,
                name=f"{base.name}, {100 * alpha:g} % by {part.statistic}",
                own=part,
                rule=replace(base.rule, alpha=alpha),
            )
            for base, part, alphas in (
                (two, Part("step/sum"), (0.1, 0.2, 0.3, 0.5, 0.7)),
                (told_two, Part("step/sum"), (0.2, 0.3, 0.4, 0.5)),
                (replace(told_two, heads=0.27, name="two told 0.27"), Part("step/sum"), (0.3, 0.5)),
                (replace(told_two, heads=0.53, name="two told 0.53"), Part("step/sum"), (0.3,)),
                (replace(told_two, name="two told p", parts=(P_TOLD,)), Part("p/sum"), (0.3, 0.5)),
                (replace(two, name="two, standing told", standing=P_TOLD), Part("step/sum"), (0.3, 0.5)),
                (replace(told_two, name="two told, standing plain", standing=P), Part("step/sum"), (0.3, 0.5)),
                *[
                    (
                        replace(told_two, name=f"two told or plain{name}", parts=(STEP, STEP_TOLD), heads=heads),
                        Part("step/sum"),
                        (0.3, 0.5),
                    )
                    for name, heads in (("", 0.4), (" 0.27", 0.27))
                ],
                (
                    replace(two, name="two, standing told 0.27", standing=P_TOLD, heads=0.27),
                    Part("step/sum"),
                    (0.3, 0.5),
                ),
                *[
                    (
                        replace(base, name=f"{base.name}, fade {fade:g}", heads=0, fade=fade),
                        Part("step/sum"),
                        (0.3, 0.5),
                    )
                    for base in (two, told_two)
                    for fade in (0.07, 0.15, 0.3)
                ],
                *[
                    (
                        replace(base, name=f"{base.name} growing", heads=0.27, grow=0.42),
                        Part("step/sum"),
                        (0.2, 0.3, 0.5),
                    )
                    for base in (two, told_two)
                ],
                (two, STEP, (0.3, 0.5)),
                (two, Part("p/max"), (0.3,)),
                (replace(two, name="two 0.27", heads=0.27), Part("step/sum"), (0.2, 0.3, 0.5)),
                (replace(two, name="two max 5", standing_pool=AROUND), Part("step/sum"), (0.3, 0.5)),
                (replace(two, name="two by layer", heads=0, rule=Rule("head-adaptive")), Part("step/sum"), (0.3, 0.5)),
                (replace(two, name="two of all heads", heads=0, balance_power=0.75), Part("step/sum"), (0.3, 0.5)),
            )
            for alpha in alphas
        ],
    }
