"""Peak memory as measured, not computed: the GPU allocator's peak, or the process's resident set."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def start_peak(device: torch.device) -> None:
    """Begin a new measurement, where the system allows it (else the peak since the process started is reported)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        CLEAR.write_text("5")  # Linux: resets the peak resident set of this process


def read_peak(device: torch.device) -> int:
    """Peak bytes since `start_peak`: allocated on a GPU, resident on a CPU (weights included)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
