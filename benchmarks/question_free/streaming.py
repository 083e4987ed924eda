"""Candidates that need no second reading and no full cache: what a layer keeps is known from it and those before it. And their rivals."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.question_free.bases import AROUNDS, MEAN, STEP, P
from benchmarks.question_free.keep import Rule
from benchmarks.question_free.recipe import Part, Recipe

SUM = Part("step/sum")


def streaming(default: Recipe) -> list[Recipe]:
    """The candidates; default: today's, whose forced entries the rivals have."""
    wide = replace(default.rule, name="model-wide", alpha=0.0)
    base = replace(
        AROUNDS,
        name="stream",
        parts=(STEP,),
        standing=P,
        standing_pool=MEAN,
        scope="so far",
        balance_power=1.0,
        own=SUM,
        rule=Rule(alpha=0.3),
    )
    shared = replace(base, heads=0.4)
    return [
        shared,
        replace(shared, name="stream 50 %", rule=Rule(alpha=0.5)),
        replace(shared, name="stream 0.27", heads=0.27),
        replace(shared, name="stream 0.27 by p", heads=0.27, parts=(P,), own=Part("p/sum")),
        replace(shared, name="stream 0.53", heads=0.53),
        replace(shared, name="stream growing", heads=0.27, grow=0.42),
        replace(shared, name="stream, own layer", scope="layer"),
        replace(base, name="stream, all heads", balance_power=0.75),
        replace(base, name="stream, all heads, own layer", balance_power=0.75, scope="layer"),
        replace(base, name="stream by layer", rule=Rule("head-adaptive", 0.3)),
        replace(base, name="stream by layer, own layer", rule=Rule("head-adaptive", 0.3), scope="layer"),
        replace(base, name="stream uniform, one order", own=None, rule=Rule("uniform")),
        replace(shared, name="stream, nats", standing=None),
        replace(shared, name="stream, no standing", together=0.0),
        replace(base, name="stream, no standing, all heads", together=0.0, balance_power=0.0),
        replace(default, name="default, model-wide", rule=replace(wide, alpha=0.2)),
        replace(default, name="default, model-wide 0", rule=wide),
        Recipe("kvzip", (P,), rule=wide),
        Recipe("laprox", (Part("p-value/max"),), balance="pooled mean", pool=("max 5",), rule=wide),
    ]
