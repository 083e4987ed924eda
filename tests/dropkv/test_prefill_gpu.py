"""What a prefill computes on a GPU, against float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    "command",
    [
        ["check_causal.py"],
        *(["check_fused_replay.py", dtype, "cuda"] for dtype in ("float32", "float16", "bfloat16")),
        ["check_merge.py", "bfloat16", "cuda"],
        *(["check_fused_prefill.py", dtype, "cuda"] for dtype in ("float16", "bfloat16")),
        *(["check_memory_runs_out.py", dtype] for dtype in ("float32", "bfloat16")),
    ],
    ids=" ".join,
)
def test_the_gpu_computes_what_is_defined(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
