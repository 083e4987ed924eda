"""The fused replay kernel against the definition in float64; on a CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("check_fused_replay.py")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernel_equals_the_definition(dtype: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECK), dtype], env=environment, capture_output=True, text=True, cwd=CHECK.parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
