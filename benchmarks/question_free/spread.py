"""The study in several processes on one machine, since one of them is busy with launching: a folder for each part of a task, then one table.

    python -m benchmarks.question_free.spread -o FOLDER [--tasks noise,prose,four-keys] [--parts 2] [--seeds 2] [--seconds 150]
        [other options of benchmarks.question_free]

Processes share the GPU; each takes some 10 GiB of it. Seeds are gone through one after another in each process, and no document is begun
after so many seconds. What is there already is not measured again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

MODULE = "benchmarks.question_free"


def folder_of(output: Path, task: str, part: int, parts: int, seed: int) -> Path:
    """Where one process writes what it measures of one seed."""
    return output / f"seed{seed}-{task}-{part}of{parts}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--tasks", default="noise,prose,four-keys")
    options.add_argument("--parts", type=int, default=2, help="processes for each task")
    options.add_argument("--seeds", default="2", help="one after another, separated by commas")
    options.add_argument("--seconds", type=float, default=1e6, help="after which no document is begun")
    given, others = options.parse_known_args()
    tasks = given.tasks.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    begun = time.monotonic()

    def measure(cell: tuple[str, int]) -> int:
        task, part = cell
        failed = 0
        for seed in seeds:
            left = given.seconds - (time.monotonic() - begun)
            if left < 0:
                break
            folder = folder_of(given.output, task, part, given.parts, seed)
            folder.mkdir(parents=True, exist_ok=True)
            which = ["--tasks", task, "--part", f"{part}/{given.parts}", "--seed", str(seed), "--deadline", str(left)]
            with (folder / "log.txt").open("w", encoding="utf-8") as log:
                command = [sys.executable, "-u", "-m", MODULE, "-o", str(folder), *which, *others]
                failed += subprocess.run(command, stdout=log, stderr=log, check=False).returncode != 0
        return failed

    cells = list(product(tasks, range(given.parts)))
    with ThreadPoolExecutor(len(cells)) as pool:
        failed = sum(pool.map(measure, cells))
    if failed:
        print(f"{failed} of the processes failed: see log.txt in the folders of {given.output}", file=sys.stderr)
    for seed in seeds:
        folders = [str(folder_of(given.output, task, part, given.parts, seed)) for task, part in cells]
        print(f"seed {seed}", flush=True)
        table = ["-o", *folders, "--tasks", given.tasks, "--table", *others]
        subprocess.run([sys.executable, "-m", MODULE, *table], check=False)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
