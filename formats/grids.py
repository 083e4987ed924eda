"""The kinds of quantised entries: what a code is, how far a grid reaches, and what its numbers must satisfy.

A code c on a grid stands for zero + scale * c. Scales and zeros are bfloat16, so that scale * c is exact in float32 and
every device restores the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_FIELDS = ("key_scales", "key_zeros", "value_scales", "value_zeros")
GROUP_FIELDS = ("key_scales", "key_zeros")  # a row for each group of entries, not for each entry

# Bit patterns of bfloat16. Between these bounds zero + scale * code is finite in float32, and no part of it subnormal.
SMALLEST_SCALE = 0x0080  # 2**-126, the smallest normal number
LARGEST_SCALE = 0x7A80  # 2**118
LARGEST_ZERO = 0x7C00  # 2**121, sign aside
LARGEST_ENTRY = 2.0**120  # magnitude of what can be quantised


@dataclass(frozen=True)
class Kind:
    """One way to store entries as codes.

    codes: torch's name of the stored type. top: the largest code. zeros: grids have a zero and codes from 0 to `top`,
    otherwise codes from -top to top. packed: two codes in a byte. key_group, value_group: what a writer chooses.
    """

    codes: str
    top: int
    zeros: bool
    packed: bool
    key_group: int
    value_group: int

    def width(self, channels: int) -> int:
        """Stored elements of one key or value of so many channels."""
        return -(-channels // 2) if self.packed else channels


# Group sizes by the error of attention outputs a byte bought; benchmarks/RESULTS.md has the figures.
KINDS = {
    "fp8": Kind("float8_e4m3fn", 448, zeros=False, packed=False, key_group=128, value_group=64),
    "int8": Kind("uint8", 255, zeros=True, packed=False, key_group=128, value_group=64),
    "int4": Kind("uint8", 15, zeros=True, packed=True, key_group=32, value_group=32),
}
