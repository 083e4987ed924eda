"""Running a check of kernels in a process of its own: whether Triton interprets is decided when a kernel is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_check(script: Path, *arguments: str, interpret: bool = True) -> None:
    """Assert that a check ends well and says so; interpret: under Triton's interpreter, on a CPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
