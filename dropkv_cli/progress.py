"""Progress: a bar where somebody sees it, now and then a line where what is said goes to a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dropkv_cli.output import say

Report = Callable[[int, int], None]
Count = Callable[[int, int, int], None]
BAR = "{desc}: {percentage:3.0f}%|{bar:24}| {elapsed} passed, {remaining} left{postfix}"
COUNTED = "{n_fmt} of {total_fmt} {desc}|{bar:24}| {elapsed} passed, {remaining} left"


@contextmanager
def progress_bar(name: str, layers: int | None = None, readings: int = 1) -> Iterator[Report | None]:
    """A callback for steps done and wanted that draws a bar on standard error; None when that is no terminal.

    layers: the steps are tokens in each of so many layers, and their speed is shown. readings: how often the steps go through all of these;
    which one it is stands beside the name.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    def title(done: int, total: int) -> str:
        number = min(readings, done * readings // total + 1)
        return name[:40] + (f", reading {number} of {readings}" if readings > 1 else "")

    with tqdm(total=1, desc=title(0, 1), bar_format=BAR, leave=False, dynamic_ncols=True) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            seconds = bar.format_dict["elapsed"]
            if layers and seconds > 0:
                bar.set_postfix_str(f"{done / layers / seconds:,.0f} tokens/s", refresh=False)
            bar.set_description_str(title(done, total), refresh=False)
            bar.update(done - bar.n)

        yield report


@contextmanager
def counting(things: str, *, lines: bool, every: float = 30.0) -> Iterator[tuple[Count, Callable[[str], None]]]:
    """A callback for things done here, done before and wanted, and one for what is said meanwhile.

    On a terminal a bar whose clock goes on; elsewhere, if `lines` are wanted, a line when nothing was said for `every` seconds.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=1, desc=things, bar_format=COUNTED, leave=False, dynamic_ncols=True) as bar:

            def count(done: int, before: int, total: int) -> None:
                bar.n, bar.initial, bar.total = done + before, before, total
                bar.refresh()

            def tell(text: str) -> None:
                with tqdm.external_write_mode(file=sys.stderr):
                    say(text)

            with _ticking(1.0, bar.refresh):
                yield count, tell
        return
    started = said = time.monotonic()
    state = (0, 1)

    def count_silently(done: int, before: int, total: int) -> None:
        nonlocal state
        state = done + before, total

    def tell_now(text: str) -> None:
        nonlocal said
        said = time.monotonic()
        say(text)

    def line() -> None:
        if time.monotonic() - said >= every:
            tell_now(f"{state[0]:,} of {state[1]:,} {things}, {time.monotonic() - started:.0f} s")

    with _ticking(min(1.0, every / 4), line if lines else lambda: None):
        yield count_silently, tell_now


@contextmanager
def _ticking(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Do something again and again while the block runs."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def waiting(text: str) -> None:
    """Say what takes a while, on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
