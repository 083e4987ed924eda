"""A fingerprint of weights that survives other file formats and 16-bit types: samples compared with a tolerance.

The same number stored in two types differs by no more than half a unit in the last place (ulp) of each, so that is what
values in different types may differ by. In the same type they are equal, with one exception: bfloat16 reached by way of
float16 is rounded twice and ends on the neighbour in 6 % of the values, always on the even one. Other weights of the same
type differ to both sides, which tells even a slight fine-tune.

Caught: other weights of the same shape; fine-tunes, even if 1 value in 100 moves; an edit of a single tensor. Not caught:
see FORMAT.md.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropkv.digests import digest_samples

if TYPE_CHECKING:
    from torch import Tensor

KIND = "sampled-1"
VALUES = 8  # of each tensor
TENSORS = 512  # at most, evenly spread
STRAY = 0.01  # share of all samples that may differ for no known reason
STRAY_IN_TENSOR = 2  # of its samples; one more, and the tensor is another
TWICE = 0.12  # share of samples that rounding twice may move: 6 % of many
LESSER_SIDE = 0.02  # share of the moved ones that may have gone the wrong way
MOSTLY = 0.5  # share of equal samples above which the order of the tensors is known to be the same
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples spread evenly and fall on no grid of rows and columns
SLACK = 1.01  # on rounding errors, for those of the comparison itself
FLOOR = 2.0**-24  # spacing of the smallest float16 values: what a way through float16 loses of tiny weights
BFLOAT16, FLOAT16, FLOAT32 = 7, 10, 23  # bits of a fraction, by which types are told here


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
    """Whether two fingerprints are of the same weights, loaded in any type. Malformed ones agree with nothing.

    Equal files speak for values that are nowhere the same, as when a release of transformers orders its tensors anew,
    but not against a difference among values that are mostly the same: that is an edit between the sampled blocks.
    """
    if left.get("kind") != KIND or right.get("kind") != KIND:
        return False
    same_files = left.get("files") is not None and left.get("files") == right.get("files")
    a, b = _values(left), _values(right)
    if a is None or b is None or a.shape != b.shape or left.get("parameters") != right.get("parameters"):
        return same_files
    equal, agree = _compare(a, b)
    return agree or (same_files and equal < MOSTLY)


def _compare(a: Tensor, b: Tensor) -> tuple[float, bool]:
    """Samples [tensors, VALUES] in float64: the share that is as near as the types allow, and whether all is well."""
    import torch

    bits_a, bits_b = _fraction_bits(a), _fraction_bits(b)  # [tensors, 1]
    size = torch.maximum(a.abs(), b.abs())
    half_a, half_b, half_16 = (_half_place(size, bits) for bits in (bits_a, bits_b, FLOAT16))
    same_type = (bits_a == bits_b) & (bits_a < FLOAT32)
    distance = (a - b).abs()
    near = distance <= torch.clamp(torch.where(same_type, 0.0, (half_a + half_b) * SLACK), min=FLOOR)
    # Rounded to float16 on the way to bfloat16: to the neighbour of a value rounded once, or a little past the middle.
    limit = torch.where(same_type, half_a + half_b, torch.maximum(half_a, half_b) + half_16) * SLACK
    moved = ~near & ((bits_a == BFLOAT16) | (bits_b == BFLOAT16)) & (distance <= limit)
    stray = ~(near | moved)
    even = torch.where(bits_a == BFLOAT16, _even(a), _even(b))
    left_even = int((moved & even).sum())
    lesser = min(left_even, int(moved.sum()) - left_even)
    agree = (
        _share(stray) <= STRAY
        and int(stray.sum(dim=1).max()) <= STRAY_IN_TENSOR
        and _share(moved) <= TWICE
        and lesser <= LESSER_SIDE * int(moved.sum())
    )
    return _share(near | moved), agree


def _half_place(size: Tensor, bits: Tensor | int) -> Tensor:
    """Half a unit in the last place of values of this size, in a type of so many fraction bits."""
    import torch

    exponent = torch.frexp(size).exponent.double() - 1  # size lies in [2^exponent, 2^(exponent + 1))
    return torch.exp2(exponent - bits - 1)


def _share(found: Tensor) -> float:
    return float(found.double().mean())


def _fraction_bits(values: Tensor) -> Tensor:
    """By tensor: the fraction bits of the coarsest type that all of its samples fit into. Widening does not hide it."""
    import torch

    bits = torch.full((len(values), 1), float(FLOAT32), dtype=torch.float64)
    for dtype, fraction in ((torch.float16, FLOAT16), (torch.bfloat16, BFLOAT16)):
        fits = (values == values.to(dtype).double()).all(dim=1, keepdim=True)
        bits = torch.where(fits, float(fraction), bits)
    return bits


def _even(values: Tensor) -> Tensor:
    """Whether the last bit of each bfloat16 value is 0: the lowest of the upper 16 bits as float32."""
    import torch

    return (values.float().view(torch.int32) >> 16) & 1 == 0


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
    return tensor.detach()[where] if shape else tensor.detach().expand(VALUES)


def _files(files: Sequence[Path]) -> str | None:
    try:
        return digest_samples(files) if files else None
    except OSError:
        return None


def _values(fingerprint: dict[str, Any]) -> Tensor | None:
    """The samples as float64 [tensors, VALUES], or None when there are none."""
    import torch

    try:
        raw = bytearray(base64.b64decode(fingerprint["samples"], validate=True))
    except (KeyError, ValueError, TypeError):
        return None
    if not raw or len(raw) % (4 * VALUES):
        return None
    return torch.frombuffer(raw, dtype=torch.float32).double().reshape(-1, VALUES)
