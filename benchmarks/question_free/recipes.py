"""The candidates: the default of today, the published rules beside it, and one change after another. A group is a question that was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.question_free.documents import Observer
from benchmarks.question_free.keep import Rule
from benchmarks.question_free.recipe import Part, Recipe

DEFAULT = "default"
OBSERVERS = {
    "replay": Observer(),
    "replay 256": Observer(chunk=256),
    "replay 1024": Observer(chunk=1024),
    "sees neighbours": Observer(sees="neighbours"),
    "sees all": Observer(sees="all"),
    "questions": Observer(
        instruction="Answer questions about the text above: what does it say, and which names and numbers does it give?"
    ),
    "outline": Observer(
        instruction="Write down every fact, name and number of the previous context, in its own words."
    ),
    "pieces 8": Observer(pieces=8),
    "pieces 24": Observer(pieces=24),
}

STEP, P, STEP_TOLD, P_TOLD = (Part(name) for name in ("step/max", "p/max", "step/told", "p/told"))
WHOLE = ("words sum",)
AROUND = ("words sum", "max 5")
MEAN = ("words sum", "mean 11")


def groups(head_tokens: int) -> dict[str, list[Recipe]]:
    """Every candidate, by group; head_tokens: of the template, which today's default forces."""
    wide = Recipe("step", (STEP,))
    told = Recipe("told", (STEP_TOLD,))
    whole = Recipe(
        "whole", (STEP_TOLD,), pool=WHOLE, together=1, standing_pool=WHOLE, balance="head mean", balance_power=0.25
    )
    around = replace(whole, name="around", standing_pool=AROUND)
    by_layer = replace(around, name="by layer", rule=Rule("head-adaptive"), balance_power=0.5)
    plain = replace(by_layer, name="plain", parts=(STEP,), standing=P)
    shared = replace(plain, name="plain by heads", rule=Rule(), balance_power=1.0)
    two = replace(shared, name="two", heads=36, standing_pool=MEAN)
    default = Rule("head-adaptive", 0.2, first=max(4, head_tokens))
    forced = replace(Rule(), first=max(4, head_tokens))

    def each(base: Recipe, field: str, values: Sequence[object], show: Callable[[object], str] = str) -> list[Recipe]:
        return [replace(base, name=f"{base.name}, {field} {show(value)}", **{field: value}) for value in values]  # type: ignore[arg-type]

    def rules(base: Recipe, values: dict[str, Rule]) -> list[Recipe]:
        return [replace(base, name=f"{base.name}, {name}", rule=rule) for name, rule in values.items()]

    def scores(base: Recipe, names: Sequence[str]) -> list[Recipe]:
        return [replace(base, name=f"{base.name}, {name}", parts=(Part(name),)) for name in names]

    def by(part: Part) -> str:
        return part.statistic

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
    return {
        "today": [
            Recipe(DEFAULT, (STEP,), pool=("max 5",), rule=default),
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
            *each(replace(around, name="around by heads", balance_power=1.0), "heads", [24, 36, 48]),
            *each(replace(around, name="around by heads 0.5", balance_power=0.5), "heads", [24, 36]),
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
                name="around, 36 heads, mean 11",
                standing_pool=("words sum", "mean 11"),
                balance_power=1.0,
                heads=36,
            ),
            replace(around, name="around, no surprise", parts=(STEP,), standing=P),
        ],
        "observers": [
            recipe
            for observer in OBSERVERS
            if observer != "replay"
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
            *each(replace(shared, pool=WHOLE), "heads", [30, 36, 42, 48, 60]),
            *each(
                replace(shared, name="plain by heads, mean 11", heads=36, standing_pool=MEAN),
                "together",
                [0.5, 1.0, 1.5],
            ),
            replace(shared, name="plain by heads, mean 21", heads=36, standing_pool=("words sum", "mean 21")),
            replace(shared, name="plain by heads, mean 11, 48", heads=48, standing_pool=MEAN),
            replace(
                shared,
                name="plain by heads, mean 11, step/sum",
                heads=36,
                standing_pool=MEAN,
                parts=(Part("step/sum"),),
            ),
            replace(
                shared,
                name="plain by heads, mean 11, told",
                heads=36,
                standing_pool=MEAN,
                parts=(STEP_TOLD,),
                standing=P_TOLD,
            ),
            replace(shared, name="plain by heads, mean 11, so far", heads=36, standing_pool=MEAN, scope="so far"),
            replace(
                shared, name="plain by heads, mean 11, balance 0.75", heads=36, standing_pool=MEAN, balance_power=0.75
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
                (replace(two, name="two told", parts=(STEP_TOLD,), standing=P_TOLD), Part("step/sum"), (0.2, 0.3, 0.5)),
                (two, STEP, (0.3, 0.5)),
                (two, Part("p/max"), (0.3,)),
                (replace(two, name="two 24", heads=24), Part("step/sum"), (0.2, 0.3, 0.5)),
                (replace(two, name="two max 5", standing_pool=AROUND), Part("step/sum"), (0.3, 0.5)),
                (replace(two, name="two by layer", heads=0, rule=Rule("head-adaptive")), Part("step/sum"), (0.3, 0.5)),
                (replace(two, name="two of all heads", heads=0, balance_power=0.75), Part("step/sum"), (0.3, 0.5)),
            )
            for alpha in alphas
        ],
    }
