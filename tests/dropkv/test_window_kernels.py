"""The kernels for windows and for selection against their definitions: on a CPU under Triton's interpreter, on a GPU as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dropkv.kernels import dispatch
from dropkv.kernels.score import Score, Window
from dropkv.kernels.triton_here import slower
from dropkv.methods import get, observe_all
from tests.kernel_checks import run_check

HERE = Path(__file__).parent
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES[:2])  # the interpreter's bfloat16 products are wrong
def test_window_kernels_equal_the_definition(dtype: str) -> None:
    run_check(HERE / "check_window_kernels.py", dtype)


def test_the_selection_kernels_keep_what_the_plain_path_keeps() -> None:
    run_check(HERE / "check_window_select.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_window_kernels_equal_the_definition_on_a_gpu(dtype: str) -> None:
    run_check(HERE / "check_window_kernels.py", dtype, "cuda", interpret=False)


@pytest.mark.gpu
def test_the_selection_kernels_keep_what_the_plain_path_keeps_on_a_gpu() -> None:
    run_check(HERE / "check_window_select.py", "cuda", interpret=False)


@pytest.mark.gpu
def test_a_prefill_with_kernels_keeps_what_one_without_keeps() -> None:
    run_check(HERE / "check_window_compress.py", interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_replay_kernel_equals_the_definition_on_a_gpu(dtype: str) -> None:
    run_check(HERE / "check_fused_replay.py", dtype, "cuda", interpret=False)


def window(dtype: torch.dtype = torch.float32, d: int = 16) -> Window:
    torch.manual_seed(4)
    return Window(*(torch.randn(shape).to(dtype) for shape in ((2, 2, 3, d), (2, 20, d), (2, 20, d))), scale=0.25)


def test_a_cpu_needs_no_kernel_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert dispatch.attention_on_gpu(window()) is None
    assert dispatch.select_on_gpu(torch.rand(2, 9), 3, None, [8], "uniform", 0.2) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "dtype,d,says",
    [
        (torch.float64, 16, "no kernel computes in float64"),
        (torch.float32, 256, "no kernel has a head dim of 256 in float32"),
    ],
)
def test_what_no_kernel_computes_is_said_once(dtype, d, says, caplog) -> None:
    slower.cache_clear()
    plain = window(dtype, d)
    on_gpu = replace(plain, q=SimpleNamespace(is_cuda=True, dtype=dtype, shape=plain.q.shape))
    for _ in range(2):
        assert not dispatch._usable(on_gpu)
    assert [record.getMessage() for record in caplog.records] == [f"note: {says}, so plain PyTorch scores"]


def test_jobs_with_and_without_a_kernel_keep_their_places(monkeypatch) -> None:
    """snapkv and dropkv have a form in one kernel, cake in another, one has none: each gets its own score, and the outputs are filled."""
    other = replace(get("snapkv"), name="other", observed=lambda block, power: block.probability().square())
    methods = [get("snapkv"), get("cake"), other, get("dropkv")]
    own = replace(window(), outputs=torch.full((2, 2, 3, 16), torch.nan))
    want = observe_all(methods, window(), SimpleNamespace(documents=1))
    monkeypatch.setattr(dispatch, "_usable", lambda _: True)
    monkeypatch.setattr(dispatch, "_attention", lambda queries, values: SimpleNamespace(loud=True))
    asked = []

    def fused(queries, work, documents):
        asked.extend(kind.weight if isinstance(kind, Score) else kind for _, kind in work)
        return dispatch.score_jobs(replace(queries, attention=None), [job for job, _ in work], documents)

    monkeypatch.setattr(dispatch, "_fused", fused)
    monkeypatch.setattr(dispatch, "_by_head", fused)
    got = observe_all(methods, own, SimpleNamespace(documents=1))
    assert asked == ["p", "squared odds", ("mean p", "var p"), ("entropy",), ("var p",)]
    assert torch.equal(own.outputs, window().attend())
    for one, exact in zip(got, want, strict=True):
        assert torch.equal(one.raw, exact.raw)
