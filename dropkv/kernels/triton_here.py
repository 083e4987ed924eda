"""Whether Triton's kernels can run on a device."""

from __future__ import annotations

import functools
import logging

import torch


def triton_works(device: torch.device) -> bool:
    """Whether this device has Triton's kernels; a GPU without them is said once, in one line on standard error."""
    return device.type == "cuda" and _imports()


@functools.lru_cache
def _imports() -> bool:
    try:
        import triton.language  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        logging.getLogger("dropkv").warning(
            "note: Triton cannot be imported (%s), so slower code runs: pip install triton", type(error).__name__
        )
        return False
    return True
