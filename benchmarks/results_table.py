"""The tables of docs/results.md from the lines of a bench run: means over tasks, and paired differences to the first row.

    python benchmarks/results_table.py FOLDER --setting question-free --tasks noise,prose,four-keys

Rows in the order of the lines, the one given by --first (method and observer) before all; intervals as in dropkv/bench/stats.py.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from dropkv.bench.results import Results
from dropkv.bench.stats import difference, estimate


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder")
    options.add_argument("--setting", default="question-free")
    options.add_argument("--tasks", default="noise,prose,four-keys")
    options.add_argument(
        "--first", default="adadropkv,replay", help="method,observer of the row the others are compared with"
    )
    given = options.parse_args()
    tasks = given.tasks.split(",")
    scores: dict[tuple[str, str], dict[float, dict[tuple[str, int, int], float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for line in Results(given.folder).read():
        if line["setting"] == given.setting and line["task"] in tasks:
            cell = scores[line["method"], line["observer"]][line["budget"]]
            cell[line["task"], line["sample"], line["question"]] = line["score"]
    method, observer = given.first.split(",")
    first = scores[method, observer]
    budgets = sorted(first)
    print("| method | " + " | ".join(f"{100 * budget:g} %" for budget in budgets) + " |")
    print("|---" * (len(budgets) + 1) + "|")
    for (name, seen), row in sorted(scores.items(), key=lambda item: item[0] != (method, observer)):
        cells = []
        for budget in budgets if len(row) > 1 else row:
            mean = estimate(row[budget])
            text = f"{100 * mean.mean:.1f} ± {50 * (mean.high - mean.low):.1f}"
            against = difference(row[budget], first[budget]) if len(row) > 1 and row is not first else None
            if against is not None:
                text = f"{100 * mean.mean:.1f} ({100 * against.mean:+.1f}, {100 * against.low:+.1f} to {100 * against.high:+.1f})"
            cells.append(text)
        print(f"| {name}, {seen} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
