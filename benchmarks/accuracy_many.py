"""`dropkv bench accuracy` in several processes on one GPU: small models leave it idle most of the time.

    python benchmarks/accuracy_many.py PLAN.toml -o FOLDER --processes 12 [--deadline 540]

Every (task, length, setting) of the plan is a job with a folder of its own under FOLDER; a job goes on where it stopped. At the end
FOLDER/lines.jsonl holds all lines, and FOLDER/machine.json what they were measured on. With a deadline (seconds) jobs are stopped when it passes;
what they had finished counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dropkv.bench.plan import read_plan
from dropkv.bench.tasks import lacking


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
    found = lacking(plan.tasks, data=plan.data, essay=plan.essay)
    for reason, names in found.items():
        print(f"skipped: {', '.join(names)}: {reason}", flush=True)
    tasks = [task for task in plan.tasks if not any(task in names for names in found.values())]
    waiting = [(task, length, setting) for length in plan.lengths for task in tasks for setting in plan.settings]
    running: dict[subprocess.Popen[bytes], tuple[str, float]] = {}
    given.output.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    noted = False
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
        if not noted:  # while the first jobs are starting
            write_machine(given.output / "machine.json")
            noted = True
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


def write_machine(path: Path) -> None:
    """Say where and when the lines of a folder were measured, for pack_lines.py."""
    import torch

    from dropkv.bench.speed.machine import device_name, today, versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    where = {"machine": device_name(device), "versions": found, "date": today()}
    path.write_text(json.dumps(where) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
