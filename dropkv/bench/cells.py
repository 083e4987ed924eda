"""The cells of an accuracy run: which method at which budget, as which observer sees it."""

from __future__ import annotations

from dataclasses import dataclass

from dropkv.bench.plan import WITHOUT_BUDGET, AccuracyPlan, Setting


@dataclass(frozen=True)
class Cell:
    """A method at a budget, as one observer sees it. Observer "none" for what needs none."""

    observer: str
    method: str
    budget: float


def cells_of(plan: AccuracyPlan, setting: Setting) -> list[Cell]:
    """Every cell of a setting, controls once: a full cache is the same at every budget."""
    from dropkv import methods

    cells: list[Cell] = []
    observers = plan.observers if setting == "question-free" else ("question",)
    for method in plan.methods:
        if method in WITHOUT_BUDGET:
            cells.append(Cell("none", method, 1.0))
            continue
        unobserved = methods.get(method).observed is None
        for observer in ("none",) if unobserved else observers:
            if observer != "replay" and "replay" in methods.get(method).needs:
                continue
            cells.extend(Cell(observer, method, budget) for budget in plan.budgets)
    return cells


def left_out(plan: AccuracyPlan) -> list[str]:
    """Methods that no setting and observer of the plan asks: they need replays, of which it has none."""
    asked = {cell.method for setting in plan.settings for cell in cells_of(plan, setting)}
    return [method for method in plan.methods if method not in asked]
