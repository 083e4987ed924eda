"""The example documents: how many of their questions are answered right at each budget and observer.

    python benchmarks/examples.py [--model smollm2-135m] [--method auto-twice]

Greedy, 40 new tokens; an answer is right when it holds the fact of examples/*-answers.tsv. The questions were chosen so that the small
model answers them all from the full cache, so this shows what eviction costs, not how good the model is.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from dropkv import CompressSettings, Sampling, load_model
from dropkv.compression import compress_document
from dropkv.documents import read_document

EXAMPLES = Path(__file__).parents[1] / "examples"
CELLS = (("replay", 1.0), ("replay", 0.5), ("replay", 0.25), ("replay", 0.1), ("tail", 0.25))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--method", help="of the replays, in place of the default")
    given = options.parse_args()
    model = load_model(given.model)
    for name in ("dark-lamp", "observatory"):
        document = read_document(str(EXAMPLES / f"{name}.md"))
        with open(EXAMPLES / f"{name}-answers.tsv", encoding="utf-8", newline="") as file:
            facts = {row["question"]: row["answer"] for row in csv.DictReader(file, delimiter="\t")}
        for observe, budget in CELLS:
            if given.method and observe != "replay":
                continue
            settings = CompressSettings(budget=budget, observe=observe, method=given.method)
            made = compress_document(model, document, settings)
            answers = {question: made.session().ask(question, Sampling(max_new_tokens=40)).text for question in facts}
            right = sum(fact.lower() in answers[question].lower() for question, fact in facts.items())
            print(
                f"{name}, {made.report.document_tokens} tokens, {observe} {budget}: {right} of {len(facts)}", flush=True
            )


if __name__ == "__main__":
    main()
