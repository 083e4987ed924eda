"""Where the time goes in `dropkv bench accuracy` on a GPU: wall time of some documents, its kernels by total time, and Python's functions.

    python benchmarks/accuracy_kernels.py PLAN.toml [--task vt] [--length 2048] [--setting question-free] [--samples 32]

Two documents first, so that nothing is compiled later; then the documents timed, then the same again under PyTorch's profiler, and Python's. One
process, about 45 seconds on an H200. What `benchmarks/accuracy_many.py` needs for a document is bounded from below by the kernels' sum.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dropkv.bench.accuracy import run_accuracy
from dropkv.bench.plan import AccuracyPlan, read_plan
from dropkv.bench.results import Results
from dropkv.models import Model, load_model

SHOWN = 50  # kernels


def run(model: Model, plan: AccuracyPlan, folder: Path) -> float:
    """Seconds of a run into a new folder."""
    started = time.perf_counter()
    results = Results(folder)
    run_accuracy(model, plan, results, print)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("plan")
    options.add_argument("--task", default="vt")
    options.add_argument("--length", type=int, default=2048)
    options.add_argument("--setting", default="question-free")
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--model", help="in place of the plan's")
    given = options.parse_args()

    def plan(samples: int) -> AccuracyPlan:
        one = {"tasks": given.task, "lengths": given.length, "settings": given.setting}
        return read_plan(given.plan, **one, samples=samples, batch=samples, model=given.model)

    model = load_model(plan(1).model)
    with tempfile.TemporaryDirectory() as folder:
        run(model, plan(2), Path(folder) / "warm")
        torch.cuda.reset_peak_memory_stats()
        seconds = run(model, plan(given.samples), Path(folder) / "timed")
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{given.samples} documents: {seconds:.1f} s, {peak:.1f} GiB at most", flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(model, plan(given.samples), Path(folder) / "seen")
        with cProfile.Profile() as called:
            run(model, plan(given.samples), Path(folder) / "called")
    totals: dict[str, tuple[int, float]] = {}
    events: Any = seen.profiler.kineto_results.events()
    for event in events:
        if str(event.device_type()).endswith("CUDA"):
            count, nanoseconds = totals.get(event.name(), (0, 0.0))
            totals[event.name()] = (count + 1, nanoseconds + event.duration_ns())
    print(f"{sum(count for count, _ in totals.values())} kernels, {sum(ns for _, ns in totals.values()) / 1e6:.0f} ms")
    for name, (count, nanoseconds) in sorted(totals.items(), key=lambda item: -item[1][1])[:SHOWN]:
        print(f"{nanoseconds / 1e6:9.1f} ms {count:8d} times {nanoseconds / count / 1e3:8.1f} us  {name[:120]}")
    pstats.Stats(called).sort_stats("cumulative").print_stats(70)
    pstats.Stats(called).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
