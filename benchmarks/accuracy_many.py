"""`dropkv bench accuracy` in several processes on one GPU: small models leave it idle most of the time.

    python benchmarks/accuracy_many.py PLAN.toml -o FOLDER --processes 12 [--deadline 540]

Every (task, length) of the plan is a job with a folder of its own under FOLDER; a job goes on where it stopped, and FOLDER/lines.jsonl holds
all lines at the end. With a deadline (seconds) jobs are stopped when it passes; what they had finished counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from dropkv.bench.plan import read_plan


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("plan")
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--processes", type=int, default=12)
    options.add_argument("--deadline", type=float, default=1e9)
    options.add_argument("--model", help="in place of the plan's")
    options.add_argument("--samples", type=int, help="in place of the plan's")
    given = options.parse_args()
    plan = read_plan(given.plan)
    started = time.monotonic()
    waiting = [(task, length, setting) for length in plan.lengths for task in plan.tasks for setting in plan.settings]
    running: dict[subprocess.Popen[bytes], tuple[str, float]] = {}
    given.output.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    while (waiting or running) and time.monotonic() - started < given.deadline:
        while waiting and len(running) < given.processes:
            task, length, setting = waiting.pop(0)
            name = f"{task}-{length}-{setting}"
            command = [
                sys.executable,
                "-m",
                "dropkv_cli",
                "bench",
                "accuracy",
                given.plan,
                "-o",
                str(given.output / name),
                "--json",
            ]
            command += ["--tasks", task, "--lengths", str(length), "--settings", setting]
            command += ["--model", given.model] if given.model else []
            command += ["--samples", str(given.samples)] if given.samples else []
            with open(given.output / f"{name}.log", "wb") as log:
                process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
            running[process] = (name, time.monotonic())
        time.sleep(0.2)
        for process in [one for one in running if one.poll() is not None]:
            name, begun = running.pop(process)
            print(f"{name}: exit {process.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
    for process, (name, _) in running.items():
        process.terminate()
        print(f"{name}: stopped at the deadline", flush=True)
    for process in running:
        process.wait()
    for task, length, setting in waiting:
        print(f"{task}-{length}-{setting}: not begun", flush=True)
    with open(given.output / "lines.jsonl", "w", encoding="utf-8") as merged:
        for path in sorted(given.output.glob("*/lines.jsonl")):
            text = path.read_text(encoding="utf-8")
            merged.write(text[: text.rfind("\n") + 1])  # a line cut off by the deadline is left out


if __name__ == "__main__":
    main()
