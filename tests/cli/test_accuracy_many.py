"""benchmarks/accuracy_many.py: a job for every task, length and setting that can run, and one file of all lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import ROOT

PLAN = """
tasks = ["noise", "qa_1"]
lengths = [256]
methods = ["adadropkv", "full"]
budgets = [0.5]
observers = ["tail"]
settings = ["question-free", "question-aware"]
samples = 1
chunk = 64
"""


def test_every_job_is_run_and_their_lines_are_merged(model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    command = [sys.executable, ROOT / "benchmarks" / "accuracy_many.py", tmp_path / "plan.toml", "-o", tmp_path / "r"]
    done = subprocess.run(
        [*command, "--model", model, "--processes", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *others = done.stdout.splitlines()
    assert first.startswith("skipped: qa_1: needs SQuAD 2.0")
    assert sorted(line.partition(":")[0] for line in others) == [
        "noise-256-question-aware",
        "noise-256-question-free",
    ]
    machines = [json.loads(path.read_text()) for path in (tmp_path / "r").glob("*/machines.jsonl")]
    assert len(machines) == 2 and {machine["dtype"] for machine in machines} == {"float32"}
    lines = [json.loads(line) for line in (tmp_path / "r" / "lines.jsonl").read_text().splitlines()]
    assert sorted((line["setting"], line["observer"], line["method"]) for line in lines) == [
        ("question-aware", "none", "full"),
        ("question-aware", "question", "adadropkv"),
        ("question-free", "none", "full"),
        ("question-free", "tail", "adadropkv"),
    ]
