"""The CPU path of compress and query against a plain prefill of the same document, as ratios within one run.

    python benchmarks/cpu_path.py [--tokens 2048] [--repeat 5] [--model smollm2-135m]

plain:  transformers' own forward call (sdpa, logits of the last token only, no cache)
tail, replay, auto:  seconds.prefill + seconds.score of `dropkv compress`, selection included, 25 % kept: by adadropkv with both observers, and
by the default method
open + first:  reading and checking the file, then the first token of an answer to a short question
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from dropkv import CompressSettings, Document, Sampling, load, load_model
from dropkv.compression import compress_document

QUESTION = "What is the document about?"
WORDS = [
    "the",
    "harbour",
    "lamp",
    "was",
    "dark",
    "when",
    "Miles",
    "walked",
    "along",
    "the",
    "quay",
    "and",
    "counted",
    "the",
    "boats",
    "that",
    "had",
    "not",
    "come",
    "home",
    "yet",
]


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    model = load_model(given.model, device="cpu")
    text = " ".join(WORDS[(7 * i + i // 5) % len(WORDS)] for i in range(2 * given.tokens))
    settings = {name: CompressSettings(budget=0.25, observe=name, method="adadropkv") for name in ("tail", "replay")}
    settings["auto"] = CompressSettings(budget=0.25)
    tokens = model.tokenizer(text, add_special_tokens=False).input_ids[: given.tokens - 40]
    document = Document.of(model.tokenizer.decode(tokens), "benchmark")
    compressed = {name: compress_document(model, document, chosen) for name, chosen in settings.items()}
    n = compressed["replay"].report.document_tokens
    ids = torch.tensor([list(compressed["replay"]._plan.ids)])

    def plain() -> None:
        with torch.inference_mode():
            model.network(input_ids=ids, use_cache=False, logits_to_keep=1)

    def opened(path: Path) -> None:
        load(path, model=model).ask(QUESTION, Sampling(max_new_tokens=1))

    times: dict[str, list[float]] = {"plain": [], "tail": [], "replay": [], "auto": [], "open + first": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.kv"
        size = compressed["replay"].save(path)
        for _ in range(given.repeat + 1):  # the first round warms up
            model.network.set_attn_implementation("sdpa")
            times["plain"].append(timed(plain))
            model.network.set_attn_implementation("dropkv")
            for name, chosen in settings.items():
                report = compress_document(model, document, chosen).report
                times[name].append(report.prefill_seconds + report.score_seconds)
            times["open + first"].append(timed(lambda: opened(path)))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    print(
        f"{given.model}, {n} document tokens, float32, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}"
    )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, file {size / 2**20:.1f} MiB, median of {given.repeat}"
    )
    print(f"{'':14}{'seconds':>9}{'x plain':>9}")
    for name, median in medians.items():
        print(f"{name:14}{median:9.3f}{median / medians['plain']:9.3f}")


if __name__ == "__main__":
    main()
