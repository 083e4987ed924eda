"""Made-up result lines: what a bench run leaves behind, without a run."""

from __future__ import annotations

import random
from typing import Any

STRENGTH = {"adadropkv": 0.8, "dropkv": 0.7, "snapkv": 0.55, "random": 0.05}


def line(**changes: Any) -> dict[str, Any]:
    """One finished question."""
    base: dict[str, Any] = {
        "version": 1,
        "model": "tiny",
        "task": "niah_single_1",
        "label": "RULER",
        "length": 1024,
        "setting": "question-free",
        "observer": "replay",
        "method": "dropkv",
        "budget": 0.25,
        "seed": 42,
        "sample": 0,
        "question": 0,
        "score": 1.0,
        "prediction": "The number is 7.",
        "answers": ["7"],
        "kept_entries": 100,
        "full_entries": 400,
        "kept_bytes": 1_000_000,
        "document_tokens": 900,
        "seconds": 0.5,
    }
    return base | changes


def accuracy_lines(
    *, methods: dict[str, float] = STRENGTH, budgets: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5), samples: int = 24
) -> list[dict[str, Any]]:
    """Both settings, four tasks, methods, budgets and controls; adaptive methods with their counts per head."""
    rng = random.Random(0)
    made = []
    for setting in ("question-free", "question-aware"):
        for task in ("niah_single_1", "niah_multikey_2", "vt", "fwe"):
            for sample in range(samples):
                ease = rng.random()
                cells = [(name, budget) for name in methods for budget in budgets]
                for method, budget in [*cells, ("full", 1.0), ("no-document", 0.0)]:
                    skill = methods.get(method, {"full": 1.1, "no-document": 0.02}.get(method, 0.0))
                    right = ease < skill * (0.35 + 0.9 * budget**0.5)
                    counts = None
                    if method == "adadropkv" and sample == 0:
                        counts = [[int(2000 * budget * rng.uniform(0.2, 2)) for _ in range(3)] for _ in range(12)]
                    share = budget if method != "full" else 1.0
                    made.append(
                        line(
                            setting=setting,
                            task=task,
                            sample=sample,
                            method=method,
                            budget=budget,
                            observer="question" if setting == "question-aware" else "replay",
                            score=float(right),
                            prediction="It is 7." if right else "I do not know which number that could be.",
                            kept_entries=int(4000 * share),
                            full_entries=4000,
                            kept_bytes=int(23_000_000 * share),
                            **({"head_counts": counts} if counts else {}),
                        )
                    )
    return made


def needle_lines(method: str = "adadropkv", budgets: tuple[float, ...] = (0.05, 0.25)) -> list[dict[str, Any]]:
    """A depth x length grid."""
    rng = random.Random(1)
    return [
        line(
            task="niah",
            label="NIAH",
            method=method,
            budget=budget,
            length=length,
            depth=depth / 10,
            sample=depth,
            question=question,
            score=float(rng.random() < 1.1 - length / 9000 + budget),
            kept_bytes=int(20_000 * length * budget / 10),
        )
        for budget in budgets
        for length in (1024, 2048, 3000, 4096, 8192)
        for depth in range(11)
        for question in range(3)
    ]


def theory_lines() -> list[dict[str, Any]]:
    """A few rows of a theory run."""
    common = {
        "version": 1,
        "kind": "theory",
        "model": "tiny",
        "document": "ledger.txt",
        "document_tokens": 1000,
        "question": None,
        "method": "dropkv",
        "window": 8,
        "budget": 0.05,
        "kept": 50,
        "evicted": 950,
        "seed": 0,
    }
    return [
        common
        | {"table": "eps", "paper_table": 15, "triples": 2160, "median": 0.011, "p99": 0.084, "share_small": 0.3},
        common | {"table": "gap", "paper_table": 19, "triples": 64, "stratum": "random", "median": 1.0, "p95": 1.07},
        common
        | {"table": "gap", "paper_table": 19, "triples": 64, "stratum": "near threshold", "median": 1.2, "p95": 1.6},
        common
        | {
            "table": "angle",
            "paper_figure": 1,
            "triples": 64,
            "counts": [0] * 14 + [2, 7, 11, 20],
            "no_cone": 24,
            "median": 84.0,
        },
    ]
