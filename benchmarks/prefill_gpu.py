"""Prefill and score of `compress` on a GPU against transformers' own prefill, in one run: seconds, ratios and memory peaks.

    python benchmarks/prefill_gpu.py [--shape mistral-7b] [--tokens 32768,131072] [--observe tail,replay] [--method adadropkv,auto] [--budget 0.05]
        [--repeat 3] [--profile]

The networks have a model's shape and random weights, made on the GPU from the configurations of `dropkv bench speed`. plain is
transformers' forward call (sdpa, its own cache, logits of the last token). The others are `dropkv.prefill`, with the kept entries as a file
would have them; a held-out text of 512 tokens stands behind the document as in `compress`, its time counted apart. Medians of --repeat runs
after one that warms up; the peaks are those of PyTorch's allocator, weights included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from dropkv import attention, methods
from dropkv.bench.speed.shapes import SHAPES, make_network
from dropkv.devices import wait_for
from dropkv.fidelity import HeldOut
from dropkv.footprint import footprint, slice_for
from dropkv.memory import read_peak, start_peak
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill

TINY = SHAPES["mistral-7b"] | dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)  # to try this script without a GPU: --shape tiny --device cpu --tokens 2000
HEAD = 24  # tokens of a template head
ASKING = 28  # tokens of a replay's instruction
HELD = 512


@dataclass(frozen=True)
class Instruction:
    """Stands for a template: a replay's instruction is so many tokens."""

    ids: tuple[int, ...] = tuple(range(100, 100 + ASKING))

    def question_ids(self, _text: str) -> tuple[int, ...]:
        return self.ids


def build(shape: str, device: torch.device) -> Model:
    """A random network of a shape, bfloat16."""
    given = TINY if shape == "tiny" else SHAPES[shape]
    return make_network(shape, given | {"max_position_embeddings": 1 << 19}, torch.bfloat16, device)


def observation_of(name: str, ids: Sequence[int], chunk: int) -> Observation:
    if name == "tail":
        return plan_tail(8, len(ids))
    return plan_replays(Instruction(), ids, HEAD, chunk)  # type: ignore[arg-type]


class Bench:
    """One network and document."""

    def __init__(
        self, model: Model, tokens: int, budget: float, chunk: int, slice_tokens: int | None, method: str
    ) -> None:
        self.model, self.budget, self.chunk, self.slice_tokens = model, budget, chunk, slice_tokens
        self.method = method
        generator = torch.Generator().manual_seed(tokens)
        self.ids = torch.randint(1000, 30000, (tokens,), generator=generator).tolist()
        self.held = HeldOut(tuple(self.ids[:HELD]), tuple(range(3, HELD)), ((0, HELD),))

    def plain(self) -> dict[str, float]:
        """transformers' own prefill."""
        network = self.model.network
        network.set_attn_implementation("sdpa")
        try:
            ids = torch.tensor([self.ids], device=self.model.device)
            started = time.perf_counter()
            with torch.inference_mode():
                network(input_ids=ids, logits_to_keep=1)
            wait_for([self.model.device])
            return {"seconds": time.perf_counter() - started}
        finally:
            network.set_attn_implementation(attention.NAME)

    def compress(self, observe: str) -> dict[str, float]:
        """The library's prefill with one observer."""
        model, n = self.model, len(self.ids)
        observation = observation_of(observe, self.ids, self.chunk)
        method = methods.get(self.method)
        if observe == "replay":
            method = method.under_replay(HEAD)
        kept = int(self.budget * n)
        needed = footprint(model, n, observation, self.held, methods=(method,), kept=kept)
        size = self.slice_tokens or slice_for(model, needed)
        done = prefill(model, self.ids, observation, method, kept, slice_tokens=size, held=self.held)
        entries = sum(layer.positions.numel() for layer in done.layers)
        assert entries == kept * sum(layer.kv_heads for layer in model.geometry)
        return {
            "seconds": done.prefill_seconds + done.score_seconds,
            "prefill": done.prefill_seconds,
            "score": done.score_seconds,
            "held": done.held_seconds,
            "slice": size,
            "expected_gib": needed.peak(size) / 2**30,
        }

    def run(self, name: str) -> dict[str, float]:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        start_peak(self.model.device)
        try:
            found = self.plain() if name == "plain" else self.compress(name)
        except torch.OutOfMemoryError:
            return {"seconds": float("nan"), "peak_gib": float("nan")}
        return found | {"peak_gib": read_peak(self.model.device) / 2**30}

    def profile(self, name: str) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as kept:
            self.run(name)
        rows = [row for row in kept.key_averages() if row.self_device_time_total > 0 and row.device_type.name == "CUDA"]
        total = sum(row.self_device_time_total for row in rows)
        print(f"  profile of {name}: {total / 1e3:.0f} ms on the GPU")
        for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:15]:
            print(f"    {row.self_device_time_total / 1e3:9.1f} ms {row.count:6}  {row.key[:110]}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=[*SHAPES, "tiny"], default="mistral-7b")
    options.add_argument("--tokens", default="32768,131072")
    options.add_argument("--observe", default="tail,replay")
    options.add_argument("--method", default="adadropkv", help="several separated by commas")
    options.add_argument("--budget", type=float, default=0.05)
    options.add_argument("--chunk", type=int, default=512)
    options.add_argument(
        "--repeat", default="3", help="runs behind the first one; several numbers, separated by commas, for --tokens"
    )
    options.add_argument(
        "--slice", default="", help="tokens of a slice, several separated by commas; empty: as the library chooses"
    )
    options.add_argument("--device", default="cuda:0")
    options.add_argument(
        "--memory", type=float, help="GiB of the GPU that may be used; with less than is needed slices get smaller"
    )
    options.add_argument("--profile", action="store_true")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    device = torch.device(given.device)
    if given.memory:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(given.memory * 2**30 / total, device)
    model = build(given.shape, device)
    if not given.json:
        weights = sum(parameter.nbytes for parameter in model.network.parameters()) / 2**30
        where = torch.cuda.get_device_name() if device.type == "cuda" else device
        print(f"{given.shape}, {where}, torch {torch.__version__}, transformers {transformers.__version__}")
        print(f"weights {weights:.1f} GiB, bfloat16, budget {given.budget}, chunk {given.chunk}")
    lengths, repeats = ([int(number) for number in text.split(",")] for text in (given.tokens, given.repeat))
    for tokens, repeat in zip(lengths, repeats + repeats[-1:] * len(lengths), strict=False):
        slices = [int(size) for size in given.slice.split(",") if size] or [None]
        plain = float("nan")
        for name, size, method in [("plain", None, "")] + [
            (name, size, method)
            for name in given.observe.split(",")
            if name
            for size in slices
            for method in given.method.split(",")
        ]:
            bench = Bench(model, tokens, given.budget, given.chunk, size, method)
            first = bench.run(name)
            runs = [bench.run(name) for _ in range(repeat)] or [first]
            middle = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            plain = middle["seconds"] if name == "plain" else plain
            record = {
                "tokens": tokens,
                "what": name,
                "method": method,
                "first": first["seconds"],
                "ratio": middle["seconds"] / plain,
            } | middle
            if given.json:
                print(json.dumps({"shape": given.shape, "budget": given.budget} | record), flush=True)
            else:
                figures = " ".join(f"{key} {value:.3f}" for key, value in record.items() if isinstance(value, float))
                print(f"{tokens:7} {name:7} {method:10} {int(middle.get('slice', 0)):5} {figures}", flush=True)
            if given.profile:
                bench.profile(name)


if __name__ == "__main__":
    main()
