"""docs/methods.md, written from the methods themselves: `python -m dropkv.methods._doc > docs/methods.md`."""

from __future__ import annotations

import re
from importlib import import_module

from dropkv.method_names import method_files
from dropkv.methods import get
from dropkv.methods._base import Method

TOP = """# Methods

Written by `python -m dropkv.methods._doc` from the files of `dropkv/methods/`; a test checks that it is current.

Notation: n document tokens; t an observation query, j a document token, h a query head; p_tj the attention probability of query t on token j
over all it sees (float32), a_t = sum_j p_tj v_j its output; W_O^h the output projection's slice of head h; G query heads share a KV head;
kept, the entries per KV head; f, the entries that are always kept; eps 1e-6. Every score is made per query head, reduced over the queries,
then over the G heads of a KV head, then pooled along the document. Larger is kept.

`--pool` and `--alpha` change pooling width and the share of the budget that heads get alike.
"""

NEEDS = {
    "output projection": "W_O",
    "all queries": "attention of every document token",
    "query statistics": "mean and covariance of queries before RoPE",
    "replay": "the replay observer",
    "told": "nats of every token",
    "words": "the tokenizer's pieces",
}

RULES = """
## Budget rules

Inside a head: always-kept entries first (newest first), then by pooled score, then by unpooled score, then the earlier position.

* uniform: every head keeps its first `kept`.
* head-adaptive: every head keeps its first max(f, floor(alpha * kept)); the layer's other places go to its best scores. alpha 0 shares the
  whole layer, alpha 1 is uniform.
* model-wide: the same over the heads of all layers. After each layer only the best so far are held, so no layer's full cache stays.
* layer-pyramid: a falling number per layer, `kept` on average (see `pyramidkv`).
* two orders: every head keeps its first max(f, floor(alpha * kept)) in an order of its own; what is left goes by another order that heads of
  all layers share (see `auto`). After each layer only what can still be kept is held.
* cake-layers: layers in proportion to entropy times variance of their attention (see `cake`).
* two stages, newest half: see `criticalkv` and `h2o`.

"Nested" methods keep a subset of a larger budget's entries under a smaller one, so their files can be cut to smaller budgets; the others'
cannot.

## What an observer changes

* `tail` and `question:TEXT`: the last `--window` queries of the document, or of the question behind it, observe as the table says.
* `replay` and `questions:FILE`: every token of every replay or question observes. Odds scores are not squared; the largest value of any query,
  head, replay and question counts (cake and tova keep their own reduction over one replay's queries); pooling is max 5, so that restkv is nested;
  the template's head, the first 4 and the last 4 tokens are always kept. Methods that need no observer stay as they are, and so do kvzip's lack
  of pooling and all of `auto`, `auto-twice` and `auto-told`, which are made for replays.
"""


def page() -> str:
    """The whole document."""
    files = sorted(method_files().items())
    rows = [_row(get(name)) for name, _ in files]
    table = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS), *rows]
    sections = ["", "## The methods one by one", *(_section(name, module) for name, module in files)]
    return "\n".join([TOP, *table, RULES, *sections[1:]]) + "\n"


HEADINGS = ("method", "what it keeps", "over queries / over G", "pool", "budget rule", "always kept", "needs", "nested")


def _row(method: Method) -> str:
    reduction = f"{method.reduction.queries} / {method.reduction.group}" if method.observed else "-"
    if method.observed and method.power == 2:
        reduction = "squared, " + reduction
    needs = [NEEDS[need] for need in sorted(method.needs)] or ["-" if method.observed is None else "queries"]
    cells = (
        f"[{method.name}](#{method.name})",
        method.summary,
        reduction,
        f"{method.pool.kind} {method.pool.size}" if method.pool else "-",
        _rule(method),
        _always(method),
        ", ".join(needs),
        "yes" if method.nested else "no",
    )
    return "| " + " | ".join(cells) + " |"


def _rule(method: Method) -> str:
    rule: str = method.rule
    if method.rule in ("head-adaptive", "model-wide", "two orders"):
        rule += f", alpha {method.alpha:g}"
    return rule + (", two stages" if method.two_stages else "") + (", newest half" if method.recent_half else "")


def _always(method: Method) -> str:
    if method.keeps_all:
        return "everything"
    parts = [f"first {method.forced_first}"] if method.forced_first else []
    parts += [f"last {method.forced_last}"] if method.forced_last else []
    return ", ".join(parts) or ("newest half" if method.recent_half else "-")


def _section(name: str, module: str) -> str:
    text = import_module(f"dropkv.methods.{module}").__doc__ or ""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return f"\n### {name}\n\n" + "\n\n".join(paragraphs).replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
