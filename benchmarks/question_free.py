"""Variants of the question-free recipe on the needle tasks, from one replay prefill per document.

    python benchmarks/question_free.py [--tasks noise,prose,four-keys] [--samples 64] [--seed 2] [--tokens 1536] [--model smollm2-135m]

Score (odds x distance or plain p) x budget rule (head-adaptive, model-wide) x pooling. The seed is one for choosing: figures that are reported
anywhere as results must come from others.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace

import torch

from dropkv import load_model
from dropkv.bench.accuracy import question_tokens
from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.masks import Masks
from dropkv.bench.survey import Collector
from dropkv.bench.tasks import get
from dropkv.methods import Method, Pool
from dropkv.methods import get as get_method
from dropkv.observers.replay import plan_replays
from dropkv.prefill import read
from dropkv.prompts import Seam

TASKS = ("noise", "prose", "four-keys")
BUDGETS = (0.05, 0.1, 0.25)


def variants(head_tokens: int) -> dict[str, tuple[str, Method]]:
    """Name -> (score, method)."""
    found: dict[str, tuple[str, Method]] = {}
    for score in ("dropkv", "snapkv"):
        base = get_method(score).under_replay(head_tokens)
        for pool in (1, 5, 11):
            for rule, alpha in (("head-adaptive", 0.2), ("model-wide", 0.0), ("model-wide", 0.2)):
                method = replace(base, rule=rule, alpha=alpha, pool=Pool("max", pool))
                found[f"{score} {rule} {alpha} pool {pool}"] = (score, method)
            few = replace(base, rule="model-wide", alpha=0.0, pool=Pool("max", pool), forced_first=4)
            found[f"{score} model-wide 0.0 pool {pool}, 4 sinks forced"] = (score, few)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--tasks", default=",".join(TASKS))
    options.add_argument("--seed", type=int, default=2)
    options.add_argument("--tokens", type=int, default=1536)
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    model = load_model(given.model)
    seam = Seam.of(model.tokenizer, name=model.id)
    head = len(seam.head_ids)
    chosen = variants(head)
    right: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in given.tasks.split(","):
        task = get(name)
        for sample in task.samples(model.tokenizer, given.tokens, given.samples, given.seed, head_tokens=head):
            document = [*seam.head_ids, *sample.document_ids]
            scores = [get_method(score).under_replay(head) for score in ("dropkv", "snapkv")]
            collector = Collector(scores, model.geometry)
            read(model, document, plan_replays(seam, document, head, 512), collector, seed=0)
            layers = {"dropkv": [one[0] for one in collector.scores], "snapkv": [one[1] for one in collector.scores]}
            question = sample.questions[0]
            tokens = tuple(question_tokens(seam, question))
            shape = (len(model.geometry), model.geometry[0].kv_heads, len(document))
            cells = [("full", 1.0, torch.ones(shape, dtype=torch.bool, device=model.device))]
            for variant, (score, method) in chosen.items():
                masks = Masks(method, layers[score])
                cells += [(variant, budget, masks.keep(budget)) for budget in BUDGETS]
            keys, values = [k[None] for k in collector.keys], [v[None] for v in collector.values]
            rows = [Row(0, tokens, keep) for _, _, keep in cells]
            answers = answer_rows(model, keys, values, rows, starts=[len(document)] * len(rows), max_new_tokens=32)
            for (variant, budget, _), answer in zip(cells, answers, strict=True):
                text = model.tokenizer.decode(answer, skip_special_tokens=True)
                right[variant][budget].append(task.score(text, question))
        print(name, "done", flush=True)
    print(f"{given.model}, {given.tokens} tokens, {given.tasks}, {given.samples} documents each, seed {given.seed}")
    for variant, by_budget in right.items():
        cells_text = "".join(f"{100 * sum(scores) / len(scores):8.1f}" for scores in by_budget.values())
        print(f"{variant:52}{cells_text}")


if __name__ == "__main__":
    main()
