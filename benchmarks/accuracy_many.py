"""`dropkv bench accuracy` in several processes on one GPU: small models leave it idle most of the time.

    python benchmarks/accuracy_many.py PLAN.toml -o FOLDER --processes 5 [--deadline 540] [--tasks vt,fwe] [--lengths 1024] [--settings ...]

Every (task, length, setting) of the plan is a job with a folder of its own under FOLDER; a job goes on where it stopped, and
FOLDER/lines.jsonl holds all lines at the end. Each process loads the model once and takes job after job, the longest first. Towards a deadline
(seconds) batches get smaller and none begins that would not end in time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dropkv.bench.plan import AccuracyPlan, read_plan
from dropkv.bench.tasks import get, lacking

GRACE = 20.0  # seconds behind the deadline after which a process is stopped whatever it does


@dataclass(frozen=True)
class Job:
    """What one process does at a time."""

    task: str
    length: int
    setting: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.length}-{self.setting}"


class Pace:
    """How many documents of a batch still end before the deadline, from how long those of this process took so far."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.begun, self.seconds = (
            (0, 0.0),
            0.0,
        )  # the running batch: documents and start; the slowest seconds for one document of late

    def start(self) -> None:
        """A job begins."""
        self.begun = (0, 0.0)

    def __call__(self, documents: int) -> int:
        now, (before, since) = time.monotonic(), self.begun
        if before:
            self.seconds = max(self.seconds * 0.7, (now - since) / before)
        room = self.deadline - now
        count = 0 if room <= 0 else documents if not self.seconds else min(documents, int(room / self.seconds))
        self.begun = (count, now)
        return count


def jobs_of(plan: AccuracyPlan) -> list[Job]:
    """All jobs, those that take long first; the plan's tasks are those that can run."""

    def cost(job: Job) -> float:
        return job.length * (64 + get(job.task, data=plan.data, essay=plan.essay).max_new_tokens)

    jobs = [Job(task, length, setting) for length in plan.lengths for task in plan.tasks for setting in plan.settings]
    return sorted(jobs, key=cost, reverse=True)


def work(plan: AccuracyPlan, output: Path, waiting: Any, told: Any, deadline: float) -> None:
    """One process: job after job, until none is left or the deadline is near."""
    from dropkv.bench.accuracy import run_accuracy
    from dropkv.bench.results import Results
    from dropkv.models import load_model

    model = load_model(plan.model)
    pace = Pace(deadline)
    while time.monotonic() < deadline:
        try:
            job: Job = waiting.get(timeout=1)
        except queue.Empty:
            return
        own = replace(plan, tasks=(job.task,), lengths=(job.length,), settings=(job.setting,))
        began = time.monotonic()
        pace.start()
        with open(output / f"{job.name}.log", "w", encoding="utf-8") as log:

            def note(text: str, file: Any = log) -> None:
                print(text, file=file, flush=True)

            try:
                whole = run_accuracy(model, own, Results(output / job.name), note, pace)
                ended = "done" if whole else "stopped before the deadline"
            except Exception as error:  # the other jobs go on
                log.write(traceback.format_exc())
                ended = f"failed: {error}"
        told.put(f"{job.name}: {ended}, {time.monotonic() - began:.0f} s")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("plan")
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--processes", type=int, default=5)
    options.add_argument("--deadline", type=float, default=1e9)
    options.add_argument("--model", help="in place of the plan's")
    for name in ("samples", "batch"):
        options.add_argument(f"--{name}", type=int, help="in place of the plan's")
    for name in ("tasks", "lengths", "settings"):
        options.add_argument(f"--{name}", help="some of the plan's, by commas")
    given = options.parse_args()
    started = time.monotonic()
    several = {name: getattr(given, name).split(",") for name in ("tasks", "settings") if getattr(given, name)}
    lengths = [int(one) for one in given.lengths.split(",")] if given.lengths else None
    plan = read_plan(
        given.plan, model=given.model, samples=given.samples, batch=given.batch, lengths=lengths, **several
    )
    found = lacking(plan.tasks, data=plan.data, essay=plan.essay)
    for reason, names in found.items():
        print(f"skipped: {', '.join(names)}: {reason}", flush=True)
    able = tuple(task for task in plan.tasks if not any(task in names for names in found.values()))
    if not able:
        options.exit(2, "no task of the plan can run here\n")
    plan = replace(plan, tasks=able)
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    fresh = multiprocessing.get_context("spawn")
    waiting, told = fresh.Queue(), fresh.Queue()
    jobs = jobs_of(plan)
    for job in jobs:
        waiting.put(job)
    deadline = started + given.deadline
    count = min(given.processes, len(jobs))
    processes = [fresh.Process(target=work, args=(plan, given.output, waiting, told, deadline)) for _ in range(count)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline + GRACE:
        say(told, 0.2)
    for process in processes:
        if process.is_alive():
            process.terminate()
            print(f"process {process.pid}: stopped {GRACE:.0f} s behind the deadline", flush=True)
        process.join()
    say(told, 0.2)
    try:
        while True:
            print(f"{waiting.get(timeout=0.2).name}: not begun", flush=True)
    except queue.Empty:
        pass
    with open(given.output / "lines.jsonl", "w", encoding="utf-8") as merged:
        for path in sorted(given.output.glob("*/lines.jsonl")):
            text = path.read_text(encoding="utf-8")
            merged.write(text[: text.rfind("\n") + 1])  # a line cut off by the deadline is left out


def say(told: Any, seconds: float) -> None:
    """Print what processes tell, waiting for the first word at most so long."""
    try:
        while True:
            print(told.get(timeout=seconds), flush=True)
            seconds = 0.01
    except queue.Empty:
        pass


if __name__ == "__main__":
    main()
