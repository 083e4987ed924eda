"""The fused replay kernels against the definition in float64, and a prefill that uses them against one that does not; on a CPU under Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("check", "dtype"),
    [
        ("check_fused_replay.py", "float32"),
        ("check_fused_replay.py", "float16"),
        ("check_fused_prefill.py", "float32"),
        ("check_merge.py", "float16"),
    ],
)
def test_the_kernels_equal_the_definition(check: str, dtype: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / check), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
