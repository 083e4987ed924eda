"""TOVA (arXiv 2401.06104): s_j = p_tj of the last query t alone, averaged over ALL heads of the layer: every head keeps the same tokens.

The authors' code evicts at every step and forces nothing; here, as in NVIDIA/kvpress, the last token is kept (f = 1).
"""

from dropkv.methods._base import Method, Reduction, probability

METHOD = Method(
    "tova",
    "attention of the last token, the same for every head",
    probability,
    reduction=Reduction("last", "all heads"),
    forced_last=1,
)
