"""Many questions over one file: several at once against one after another, as ratios within one run; and how often an answer differs.

    python benchmarks/questions.py [DOCUMENT] [--questions 64] [--batch-sizes 1,4,16,64] [--model smollm2-135m] [--dtype auto] [--device auto]
                                   [--max-new-tokens 32] [--budget 0.25]

one by one:  KVFile.ask for each question. at once N:  KVFile.ask_many with that batch size. The questions differ by a number at their end.
processor:  seconds of all threads, which other programs on the machine do not add to
same:  answers that are letter for letter those of the first batch size, and tokens before the first that differs, of all tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers

import dropkv
from dropkv import Answer, Sampling
from dropkv.library import KVFile

STORY = Path(__file__).parents[1] / "examples" / "dark-lamp.md"
QUESTIONS = [
    "What is the name of the murderer?",
    "Who is the captain?",
    "How long was the lamp dark?",
    "What is the place where the captain was killed?",
    "Where does the story happen?",
    "Who found the body?",
]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("document", nargs="?", default=str(STORY))
    options.add_argument("--questions", type=int, default=64)
    options.add_argument("--batch-sizes", default="1,4,16,64")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--device", default="auto")
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--budget", type=float, default=0.25)
    given = options.parse_args()
    model = dropkv.load_model(given.model, dtype=given.dtype, device=given.device)
    made = dropkv.compress(
        Path(given.document).read_text(), model=model, budget=given.budget, method="adadropkv", fidelity=False
    )
    kv = KVFile(made.session(), made.metadata, 0.0)
    questions = [f"{QUESTIONS[number % len(QUESTIONS)]} ({number})" for number in range(given.questions)]
    sampling = Sampling(max_new_tokens=given.max_new_tokens)

    kv.ask(questions[0], sampling)  # warms up
    print(
        f"{given.model}, {model.dtype}, {model.device}, {torch.get_num_threads()} threads, {len(questions)} questions, ",
        end="",
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'':14}{'seconds':>9}{'processor':>11}{'tokens/s':>10}{'x':>7}  same answers, tokens")
    runs: list[tuple[str, float, float, list[Answer]]] = []
    for size in (0, *map(int, given.batch_sizes.split(","))):
        started, busy = time.perf_counter(), time.process_time()
        if size:
            outcomes = kv.ask_many(questions, sampling, batch_size=size)
            answers = [one for one in outcomes if isinstance(one, Answer)]
        else:
            answers = [kv.ask(question, sampling) for question in questions]
        runs.append(
            (
                f"at once {size}" if size else "one by one",
                time.perf_counter() - started,
                time.process_time() - busy,
                answers,
            )
        )
    reference = runs[1][3]
    total = sum(answer.generated_tokens for answer in reference)
    for name, seconds, processor, answers in runs:
        tokens = sum(answer.generated_tokens for answer in answers)
        same = sum(mine.text == theirs.text for mine, theirs in zip(answers, reference, strict=True))
        before = sum(_before(kv, mine, theirs) for mine, theirs in zip(answers, reference, strict=True))
        print(f"{name:14}{seconds:9.2f}{processor:11.2f}{tokens / seconds:10.1f}{runs[0][1] / seconds:7.2f}", end="")
        print(f"  {same} of {len(answers)}, {100 * before / total:.1f} %")


def _before(kv: KVFile, mine: Answer, theirs: Answer) -> int:
    """Tokens of the second answer before the first one that differs."""
    if mine.text == theirs.text:
        return theirs.generated_tokens
    tokenizer = kv.model.tokenizer
    pairs = zip(*(tokenizer(one.text, add_special_tokens=False).input_ids for one in (mine, theirs)), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 0)


if __name__ == "__main__":
    main()
