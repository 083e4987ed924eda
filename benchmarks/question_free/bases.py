"""What lists of recipes are made with: a base, and one change of it after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.question_free.keep import Rule
from benchmarks.question_free.recipe import Part, Recipe

STEP, P, STEP_TOLD, P_TOLD = (Part(name) for name in ("step/max", "p/max", "step/told", "p/told"))
WHOLE = ("words sum",)
AROUND = ("words sum", "max 5")
MEAN = ("words sum", "mean 11")
TOLD = Recipe("told", (STEP_TOLD,))
WHOLES = Recipe(
    "whole", (STEP_TOLD,), pool=WHOLE, together=1, standing_pool=WHOLE, balance="head mean", balance_power=0.25
)
AROUNDS = replace(WHOLES, name="around", standing_pool=AROUND)


def each(base: Recipe, field: str, values: Sequence[object], show: Callable[[object], str] = str) -> list[Recipe]:
    """The base with each of these values in a field."""
    return [replace(base, name=f"{base.name}, {field} {show(value)}", **{field: value}) for value in values]  # type: ignore[arg-type]


def rules(base: Recipe, values: dict[str, Rule]) -> list[Recipe]:
    """The base under each of these rules."""
    return [replace(base, name=f"{base.name}, {name}", rule=rule) for name, rule in values.items()]


def scores(base: Recipe, names: Sequence[str]) -> list[Recipe]:
    """The base with each of these statistics as its score."""
    return [replace(base, name=f"{base.name}, {name}", parts=(Part(name),)) for name in names]


def by(part: Part) -> str:
    """How a part is called in a name."""
    return part.statistic
