"""The decode kernels against the definition in float64, and steps made of them against the plain run; on a CPU under Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run(script: str, *arguments: str, interpret: bool = True) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernels_equal_the_definition(dtype: str) -> None:
    run("check_fused_decode.py", dtype)


def test_steps_equal_the_plain_run() -> None:
    """Fused layers (llama, qwen2 with biases and a window, qwen3 with norms of heads), and families whose layers stay as they are."""
    run("check_decode_step.py", "llama", "qwen2-sliding", "qwen3", "gemma2")


def test_the_kernels_compile_for_a_gpu() -> None:
    run("check_decode_compiles.py", interpret=False)
