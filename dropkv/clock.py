"""How long parts of a run take, where the GPU runs behind the program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds spent in marked parts of a run: of the program's time on a CPU, of the device's own on a GPU, which is not waited for."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open: float | torch.cuda.Event = 0.0

    def start(self, device: torch.device) -> None:
        """A part begins on this device."""
        self._open = _now(device)

    def stop(self, device: torch.device) -> None:
        """The part ends."""
        began, ended = self._open, _now(device)
        if isinstance(began, float) and isinstance(ended, float):
            self._seconds += ended - began
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._events.append((began, ended))

    @contextmanager
    def part(self, device: torch.device) -> Iterator[None]:
        """The block is a part."""
        self.start(device)
        yield
        self.stop(device)

    def seconds(self) -> float:
        """All parts so far; the devices must have done their work."""
        return self._seconds + sum(float(began.elapsed_time(ended)) for began, ended in self._events) / 1000


def _now(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
