"""A fingerprint of weights that survives other file formats and 16-bit types: samples compared with a tolerance.

Caught: other weights of the same shape, and fine-tunes that move more than one value in a hundred by more than the
tolerance. Not caught: changes below one unit in the last place of the coarser of the two types (0.4 to 0.8 % of a
bfloat16 value), edits that touch no sampled value (8 in each of at most 512 tensors), and edits between the sampled
blocks of otherwise equal files.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropkv.digests import digest_samples

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KIND = "sampled-1"
VALUES = 8  # of each tensor
TENSORS = 512  # at most, evenly spread
AGREE = 0.99  # share of samples that must agree
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples spread evenly and fall on no grid of rows and columns
FLOOR = 2.0**-24  # spacing of the smallest float16 values: what a way through float16 loses of tiny weights


def weights_fingerprint(network: Any, files: Sequence[Path] = ()) -> dict[str, Any]:
    """The fingerprint as JSON values: kind, dtype, parameter count, base64 of float32 samples, digest of files or None."""
    import torch

    tensors = list(_in_order(network))
    count = min(len(tensors), TENSORS)
    chosen = [tensors[index * len(tensors) // count] for index in range(count)]
    samples = torch.cat([_samples(tensor).to("cpu", torch.float32) for tensor in chosen])
    return {
        "kind": KIND,
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "parameters": sum(tensor.numel() for tensor in tensors),
        "samples": base64.b64encode(samples.numpy().astype("<f4").tobytes()).decode("ascii"),
        "files": _files(files),
    }


def weights_agree(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two fingerprints are of the same weights, loaded in any type. Malformed ones agree with nothing."""
    if left.get("kind") != KIND or right.get("kind") != KIND or left.get("parameters") != right.get("parameters"):
        return False
    if left.get("files") is not None and left.get("files") == right.get("files"):
        return True
    a, b = _values(left), _values(right)
    if a is None or b is None or a.shape != b.shape or not a.numel():
        return False
    tolerance = _spacing(a, b)
    return float(((a - b).abs() <= tolerance).double().mean()) >= AGREE


def _in_order(network: Any) -> Iterator[Tensor]:
    """Every parameter once: input embeddings, layers, the rest. Names differ between releases and do not count."""
    from dropkv import attention
    from dropkv.devices import named_weights

    seen: set[int] = set()
    groups = [[network.get_input_embeddings()], list(attention.layer_list(network)[2]), [network]]
    tied = [network.get_parameter(name) for name in getattr(network, "all_tied_weights_keys", ())]
    for module in (module for group in groups for module in group):
        if module is network:  # accelerate may have made a parameter of its own of what is the embeddings again
            seen.update(map(id, tied))
        for parameter, values in named_weights(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield values


def _samples(tensor: Tensor) -> Tensor:
    """Values at fixed places of a tensor, taken through its row and column so that nothing is copied."""
    import torch

    count = tensor.numel()
    places = [((number + 1) * GOLDEN % 2**64) * count >> 64 for number in range(VALUES)]
    shape = torch.Size(tensor.shape)
    where = torch.unravel_index(torch.tensor(places, device=tensor.device), shape)
    return tensor.detach()[where] if shape else tensor.detach().reshape(1)


def _files(files: Sequence[Path]) -> str | None:
    try:
        return digest_samples(files) if files else None
    except OSError:
        return None


def _values(fingerprint: dict[str, Any]) -> Tensor | None:
    import torch

    try:
        raw = bytearray(base64.b64decode(fingerprint["samples"], validate=True))
        return torch.frombuffer(raw, dtype=torch.float32).double() if raw and len(raw) % 4 == 0 else None
    except (KeyError, ValueError, TypeError):
        return None


def _spacing(a: Tensor, b: Tensor) -> Tensor:
    """Allowed difference per value: one unit in the last place of the coarser type, read off the values themselves.

    A bfloat16 value stays one when it is loaded as float32, so what a value fits into exactly says how it was stored. A
    whole unit, not half of one: rounding twice (float32 to float16 to bfloat16) can end on the neighbour.
    """
    import torch

    size = torch.maximum(a.abs(), b.abs())
    exponent = torch.frexp(size).exponent - 1  # size lies in [2^exponent, 2^(exponent + 1))
    bits = torch.full_like(size, 23.0)
    for dtype, fraction in ((torch.float16, 10.0), (torch.bfloat16, 7.0)):
        fits = _fits(a, dtype) | _fits(b, dtype)
        bits = torch.where(fits, fraction, bits)
    return torch.clamp(torch.exp2(exponent - bits) * 1.01, min=FLOOR)


def _fits(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values == values.to(dtype).double()
