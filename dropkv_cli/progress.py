"""A progress bar, only where somebody sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]
BAR = "{desc}: {percentage:3.0f}%|{bar:24}| {elapsed} passed, {remaining} left{postfix}"


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


def waiting(text: str) -> None:
    """Say what takes a while, on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
