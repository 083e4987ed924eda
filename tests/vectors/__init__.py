"""Expected values computed independently in float64; more of the same may stand in ../shared/vectors beside a checkout."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "vectors"


def _files(pattern: str) -> list[Path]:
    own = sorted(HERE.glob(pattern))
    return own + [path for path in sorted(SHARED.glob(pattern)) if path.name not in {mine.name for mine in own}]


def score_files() -> list[Path]:
    """Queries, keys, values and the scores of every method."""
    return _files("scores-*.safetensors")


def budget_files() -> list[Path]:
    """Scores with ties and what each budget rule keeps of them."""
    return _files("budgets-*.safetensors")


def theory_files() -> list[Path]:
    """One query's probabilities and values, and which of its tokens are best removed together."""
    return _files("theory-*.safetensors")
