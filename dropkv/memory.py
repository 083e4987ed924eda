"""Peak memory as measured, not computed: the GPU allocator's peak, or the process's resident set."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
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


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process may take in all, what it holds already included; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + int(torch.cuda.memory_reserved(device))
    free_now, held = _figure(MEMINFO, "MemAvailable"), _status("VmRSS")
    if free_now is None or held is None:
        return None
    limit = _group_limit()
    return free_now + held if limit is None else min(free_now + held, limit)


def spare_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take; None where the system does not tell."""
    whole = available_memory(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")
    return None if whole is None or held is None else max(0, whole - held)


def _group_limit() -> int | None:
    """The limit of a container, if there is one."""
    with suppress(OSError, ValueError):
        return int(GROUP_LIMIT.read_text())
    return None


def _status(name: str) -> int | None:
    """A figure of this process in bytes, where the system tells it."""
    return _figure(STATUS, name)


def _figure(table: Path, name: str) -> int | None:
    with suppress(OSError):
        for line in table.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None
