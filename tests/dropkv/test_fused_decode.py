"""The decode kernels against the definition in float64, and steps made of them against the plain run; on a CPU under Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel_checks import run_check

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernels_equal_the_definition(dtype: str) -> None:
    run_check(FOLDER / "check_fused_decode.py", dtype)


def test_steps_equal_the_plain_run() -> None:
    """Fused layers (llama, qwen2 with biases and a window, qwen3 with norms of heads), and families whose layers stay as they are."""
    run_check(FOLDER / "check_decode_step.py", "llama", "qwen2-sliding", "qwen3", "gemma2")


def test_the_kernels_compile_for_a_gpu() -> None:
    run_check(FOLDER / "check_decode_compiles.py", interpret=False)
