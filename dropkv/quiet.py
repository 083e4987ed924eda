"""Keeping transformers silent while it loads, with everything as it was afterwards."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log, progress bars and Python warnings for the length of the block; errors still raise."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_bars = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
    ):  # the latter for bars drawn without asking
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
            (enable_progress_bars if hub_bars else disable_progress_bars)()
