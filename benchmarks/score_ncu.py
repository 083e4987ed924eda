"""Achieved bandwidth and occupancy of the kernels that score, select and gather one layer, as Nsight Compute counts them.

    python benchmarks/score_ncu.py [--tokens 131072] [--budget 0.05]

Inputs as in score_kernel.py. Each kernel is launched once behind a run that compiles it, with cold caches and the clocks as they are
(`ncu --clock-control none`); ncu replays it for every few counters, so that its times are a little above those of score_kernel.py. Wants ncu in
the PATH or beside CUDA, and leave to read the GPU's counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys

COLUMNS = {
    "gpu__time_duration.sum": ("us", 1e-3),
    "dram__bytes.sum.per_second": ("TB/s", 1e-12),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("of peak, %", 1),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy, %", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__grid_size": ("programs", 1),
}
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


def find_ncu() -> str:
    """Ends the program with one line where there is none."""
    found = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is None:
        sys.exit("ncu is not here, so nothing was measured: install Nsight Compute and put it in the PATH")
    return found


def profiled(tokens: int, budget: float) -> None:
    """What runs under ncu: every kernel once, unseen, then once between the marks."""
    import torch
    from score_kernel import DIM, FORM, HEADS, KV_HEADS, POOL, WINDOW

    from dropkv.budgets import forced_positions
    from dropkv.kernels.dispatch import gather_on_gpu, select_on_gpu
    from dropkv.kernels.window_attend import attend_window
    from dropkv.kernels.window_score import score_window

    group, scale = HEADS // KV_HEADS, DIM**-0.5
    q, k, v = (
        torch.randn(*shape, DIM, device="cuda", dtype=torch.bfloat16)
        for shape in ((KV_HEADS, group, WINDOW), (KV_HEADS, tokens), (KV_HEADS, tokens))
    )
    k[:, 0] = q.float().mean((1, 2)) * 12  # a sink
    forced = forced_positions(tokens, 0, 8)

    def work(rules: tuple[str, ...]) -> None:
        attention = attend_window(q, k, v, scale=scale)
        scores = score_window(q, k, v, attention, FORM, scale=scale)
        for rule in rules:
            gather_on_gpu(k, v, select_on_gpu(scores, int(budget * tokens), POOL, forced, rule, 0.2), scores)

    rules = ("uniform", "head-adaptive")
    work(rules)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    work(rules)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def table(text: str) -> list[str]:
    """ncu's CSV as lines: per launch of a kernel its figures."""
    at = text.find('"ID"')
    if at < 0:
        return []
    names, _units, *rows = csv.reader(io.StringIO(text[at:]))
    name = names.index("Kernel Name")
    lines = [f"{'kernel':32}" + "".join(f"{title:>14}" for title, _ in COLUMNS.values())]
    for row in rows:
        if len(row) != len(names):
            continue
        figures = [float(row[names.index(column)].replace(",", "")) * factor for column, (_, factor) in COLUMNS.items()]
        lines.append(f"{row[name][:31]:32}" + "".join(f"{figure:14.2f}" for figure in figures))
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=131072)
    options.add_argument("--budget", type=float, default=0.05)
    options.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.profiled:
        return profiled(given.tokens, given.budget)
    command = [find_ncu(), "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(COLUMNS)]
    own = [sys.executable, __file__, "--profiled", "--tokens", str(given.tokens), "--budget", str(given.budget)]
    try:
        done = subprocess.run([*command, *own], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        sys.exit("ncu took more than two minutes and was ended")
    lines = table(done.stdout)
    if not lines:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        sys.exit("ncu measured nothing: " + " | ".join(line for line in said if "ERR" in line or line is said[-1]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
