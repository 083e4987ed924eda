"""The recipe of `auto` and the plain step through other observers, and through several at once."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.question_free.bases import STEP
from benchmarks.question_free.recipe import Part, Recipe
from benchmarks.question_free.streaming import streaming

ALONE = ("own questions", "own answers", "outline alone", "task alone")
OTHERS = (*ALONE, "outline and replay", "task and replay", "sees neighbours", "sees all")


def observing(default: Recipe) -> list[Recipe]:
    """The candidates; default: today's."""
    auto = next(recipe for recipe in streaming(default) if recipe.name == "stream 0.27")
    both = {
        f"{fused} of replay and {observer}": (fuse, observer)
        for observer in ("own answers", "task alone")
        for fused, fuse in (("max", "max"), ("mean", "mean"), ("ranks", "ranks"))
    }
    return [
        *[
            replace(
                auto,
                name=observer,
                parts=(Part("step/max", observer),),
                standing=Part("p/max", observer),
                own=Part("step/sum", observer),
            )
            for observer in OTHERS
        ],
        *[
            replace(auto, name=name, parts=(STEP, Part("step/max", observer)), fuse=fuse)  # type: ignore[arg-type]
            for name, (fuse, observer) in both.items()
        ],
        *[Recipe(f"step, {observer}", (Part("step/max", observer),)) for observer in OTHERS],
    ]
