"""Ctrl-C at moments when an exception would do harm: remembered, and heeded right after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended, and then do what it would have done.

    Nothing is changed outside of the main thread, or where Ctrl-C is ignored or ends the process without Python.
    """
    heeded = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(heeded):
        yield
        return
    pressed = []

    def remember(number: int, frame: FrameType | None) -> None:
        pressed.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeded)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def import_torch() -> None:
    """Import PyTorch, which aborts the process when Ctrl-C strikes while its C++ part calls Python: every command does it here."""
    with held_back():
        import_module("torch")


def import_compiler() -> None:
    """Import PyTorch and the compiler that loading a model brings along where it is installed, which aborts in the same way."""
    with held_back():
        import_module("torch")
        with suppress(ImportError):
            import_module("triton")
