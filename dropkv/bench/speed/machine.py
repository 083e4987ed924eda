"""What a figure was measured on, how long an action took, and what memory it needed."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dropkv._version import __version__
from dropkv.devices import wait_for
from dropkv.errors import out_of_memory
from dropkv.memory import read_peak, spare_memory, start_peak
from dropkv.models import Model

Figures = dict[str, float]

CPUINFO = Path("/proc/cpuinfo")


class NoMemory(Exception):
    """An action that would take more memory than there is, found out before it began."""


def machine(model: Model) -> dict[str, Any]:
    """Where this model computes: the device's name, threads of a CPU, dtype and versions; and today's date (UTC)."""
    on_gpu = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if on_gpu else _processor(),
        "threads": None if on_gpu else torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "dropkv": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def measured(
    model: Model, action: Callable[[], Figures], repeat: int, warm: Callable[[], object] | None = None
) -> Figures | None:
    """Medians of an action's own figures and of its peak memory over `repeat` runs; None when memory runs out.

    warm: what is run before, the action itself if None. A GPU has nothing left to do before a run and after it.
    """
    runs = []
    clean(model)
    for number in range(repeat + 1):
        if model.device.type == "cuda":  # captured steps hold memory in circles; elsewhere nothing of size does
            clean(model)
        start_peak(model.device)
        try:
            if not number and warm is not None:
                warm()
                continue
            found = action()
            wait_for(model.devices)
        except Exception as error:
            if not no_memory(error):
                raise
            return None  # leaving this block drops the frames, and with them what they hold
        if number:
            runs.append(found | {"peak_memory_bytes": read_peak(model.device)})
    return medians(runs)


def no_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: on a GPU, on a CPU, or as found out before."""
    return isinstance(error, NoMemory | torch.OutOfMemoryError) or out_of_memory(error)


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure, over the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def timed(model: Model, action: Callable[[], object]) -> float:
    """Seconds of an action, to the end of what it asked of the devices."""
    wait_for(model.devices)
    started = time.perf_counter()
    action()
    wait_for(model.devices)
    return time.perf_counter() - started


def refuse(model: Model, wanted: int, least: int = 0) -> None:
    """Raise NoMemory when a CPU lacks so many bytes, because there the system would end the process. A GPU says so itself: there only the
    bytes without which nothing goes count, `least`, lest a document is read for nothing."""
    spare = spare_memory(model.device)
    if spare is not None and (wanted if model.device.type == "cpu" else least) > spare:
        raise NoMemory


def clean(model: Model) -> None:
    """Give back what earlier runs have left."""
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def _processor() -> str:
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
