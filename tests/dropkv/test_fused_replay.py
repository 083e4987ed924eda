"""The fused replay kernels against the definition in float64, and a prefill that uses them against one that does not; on a CPU under Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel_checks import run_check

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
    run_check(HERE / check, dtype)
