"""AnDPro (NeurIPS 2025): s_j = mean over the group's heads of sum_t p_tj <a_t, v_j>: how far a token pulls along the output; may be negative.

The layer's heads share one budget without a floor (alpha 0). The authors' code works per query head, max-pools each query's p with kernel 7,
scores chunks of 4 tokens, and takes a_t without the first chunk and the window; this is the unpooled form of the paper's formula.
"""

from torch import Tensor

from dropkv.methods._base import Block, Method


def along_output(block: Block, power: int) -> Tensor:
    """p <a, v> [h, rows, c]."""
    return block.probability().mul_(block.inner())


METHOD = Method(
    "andpro",
    "attention times the value's part along the output",
    along_output,
    rule="head-adaptive",
    alpha=0.0,
    fused="along",
)
