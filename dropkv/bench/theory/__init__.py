"""bench theory: how well the assumptions behind DropKV's score hold for a model and a document (METHODS section 1 and 5)."""

from dropkv.bench.theory.lines import theory_report
from dropkv.bench.theory.text import render_theory

__all__ = ["render_theory", "theory_report"]
