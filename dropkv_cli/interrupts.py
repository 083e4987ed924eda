"""Signals that end a command: Ctrl-C, remembered where an exception would do harm; others, so that they leave no litter either."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType


class Ended(BaseException):
    """A signal that ends the process: raised so that unfinished files are removed first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def die(self) -> None:
        """End as the signal would have ended us."""
        signal.signal(self.number, signal.SIG_DFL)
        signal.raise_signal(self.number)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP (docker stop, a closed terminal) raise Ended where they would have killed us; nohup still works."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


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
