"""Whether Triton's kernels can run on a device."""

from __future__ import annotations

import functools
import logging

import torch


def triton_works(device: torch.device) -> bool:
    """Whether this device has Triton's kernels; a GPU without them is said."""
    return device.type == "cuda" and _imports()


@functools.lru_cache
def slower(reason: str) -> None:
    """Say, in one line on standard error and once, why a GPU computes by slower code."""
    logging.getLogger("dropkv").warning("note: %s", reason)


@functools.lru_cache
def _imports() -> bool:
    try:
        import triton.language  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        slower(f"Triton cannot be imported ({type(error).__name__}), so slower code runs: pip install triton")
        return False
    return True
