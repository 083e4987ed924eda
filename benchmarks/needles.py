"""One planted fact in a document of about 1,400 tokens: is it still answered from the compressed file?

    python benchmarks/needles.py [--samples 10] [--tokens 1400] [--budgets 0.5,0.25,0.1] [--observe replay,tail] [--model smollm2-135m]

repeated: four plain sentences over and over, one fact among them.  prose: help texts of the running Python, one fact among them.
Full cache, every observer and every budget see the same documents; a sample counts when the answer holds the planted number.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dropkv import CompressSettings, Document, Sampling, load_model
from dropkv.compression import compress_document

PLACES = [
    "Bergen",
    "Cadiz",
    "Dover",
    "Esbjerg",
    "Faro",
    "Genoa",
    "Hull",
    "Izmir",
    "Lisbon",
    "Malmo",
    "Naples",
    "Odessa",
    "Porto",
    "Riga",
    "Split",
    "Turku",
    "Vigo",
]
REPEATED = " The tide came in and went out again. A boat was painted blue. The nets hung on the wall to dry. Nobody was in a hurry."


@dataclass(frozen=True)
class Needle:
    """A document with one planted fact, the question that asks for it, and the number that answers it."""

    text: str
    question: str
    answer: str


def needles(tokenizer: Any, kind: str, tokens: int, count: int, seed: int) -> Iterator[Needle]:
    """`count` documents of about `tokens` tokens, kind "repeated" or "prose"; the same for the same seed."""
    draw = random.Random(f"{kind} {seed}")
    prose = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    for _ in range(count):
        place = draw.choice(PLACES)
        number = "".join(draw.choice("0123456789") for _ in range(7))
        fact = f" The number of the locker in {place} is {number}. "
        if kind == "repeated":
            hay = REPEATED * (tokens // 8)
        else:
            start = draw.randrange(len(prose) - 8 * tokens)
            hay = prose[start : start + 8 * tokens]
        ids = tokenizer(hay, add_special_tokens=False).input_ids[: tokens - 60]
        hay = tokenizer.decode(ids)
        breaks = [i + 1 for i, letter in enumerate(hay[:-1]) if letter in ".\n"]
        cut = draw.choice(breaks)
        yield Needle(hay[:cut] + fact + hay[cut:], f"What is the number of the locker in {place}?", number)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=10)
    options.add_argument("--tokens", type=int, default=1400)
    options.add_argument("--budgets", default="0.5,0.25,0.1")
    options.add_argument("--observe", default="replay,tail")
    options.add_argument("--method", default="adadropkv")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    model = load_model(given.model)
    cells = [("full cache", CompressSettings(budget=1.0, method="full", observe="tail"))]
    for observe in given.observe.split(","):
        for budget in given.budgets.split(","):
            settings = CompressSettings(budget=float(budget), method=given.method, observe=observe)
            cells.append((f"{observe} {budget}", settings))
    print(
        f"{given.model}, {given.samples} documents of about {given.tokens} tokens, {given.method}, greedy, seed {given.seed}"
    )
    print(f"{'':14}{'repeated':>10}{'prose':>10}")
    right = {name: {"repeated": 0, "prose": 0} for name, _ in cells}
    for kind in ("repeated", "prose"):
        for needle in needles(model.tokenizer, kind, given.tokens, given.samples, given.seed):
            document = Document.of(needle.text, kind)
            for name, settings in cells:
                answer = (
                    compress_document(model, document, settings)
                    .session()
                    .ask(needle.question, Sampling(max_new_tokens=32))
                )
                right[name][kind] += needle.answer in answer.text
    for name, counts in right.items():
        print(f"{name:14}{counts['repeated']:>10}{counts['prose']:>10}")


if __name__ == "__main__":
    main()
