"""Peak memory as measured, not computed: the GPU allocator's peak, or the process's resident set."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
PROGRAM = 256 << 20  # mapped parts of Python, PyTorch and transformers that a run touches


def start_peak(device: torch.device) -> None:
    """Begin a new measurement, where the system allows it (else the peak since the process started is reported)."""
    if device.type == "cuda":
        for used in _in_use():
            torch.cuda.reset_peak_memory_stats(used)
        return
    with suppress(OSError):
        CLEAR.write_text("5")  # Linux: resets the peak resident set of this process


def expected_peak(device: torch.device, weights: int) -> int:
    """Bytes that a loaded model of `weights` bytes takes before it reads anything: on a CPU the program itself is counted, and weights
    that are mapped from a file but have not been touched yet."""
    if device.type == "cuda":
        return weights
    resident, mapped = _status("VmRSS"), _status("RssFile")
    if resident is None or mapped is None:
        return weights
    return resident if resident - mapped >= weights else resident - mapped + weights + PROGRAM


def read_peak(device: torch.device) -> int:
    """Peak bytes since `start_peak`: allocated on the GPUs in use, each at its own peak, or resident on a CPU (weights included)."""
    if device.type == "cuda":
        return sum(int(torch.cuda.max_memory_allocated(used)) for used in _in_use())
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_use() -> list[int]:
    """GPUs on which this process has allocated anything."""
    return [index for index in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(index)]


def _status(name: str) -> int | None:
    """A figure of this process in bytes, where the system tells it."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None
