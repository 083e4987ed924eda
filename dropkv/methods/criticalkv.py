"""CriticalKV (arXiv 2502.03805): half of the budget by attention, half by (pooled p + 1e-4) * mean over the group's heads of ||v_j W_O^h||_1.

Stage 1 takes the first floor(kept / 2) entries (the forced ones among them) by p, summed over the window, averaged over the group and
max-pooled; stage 2 fills the rest. Both means over the group are taken before the product, as in NVIDIA/kvpress; it adds 1e-4 likewise.
A smaller budget does not keep a subset of a larger one's entries, so such files cannot be shrunk.
"""

from dropkv.methods._base import LayerContext, LayerScores, Method, Pool, probability


def norms(scores: LayerScores, context: LayerContext) -> LayerScores:
    """The scores, and beside them what stage 2 multiplies with."""
    return LayerScores(scores.raw, context.value_sizes.float().unsqueeze(0))


METHOD = Method(
    "criticalkv",
    "half by attention, half by attention times the projected value's size",
    probability,
    pool=Pool("max", 11),
    finish=norms,
    two_stages=True,
    needs=frozenset({"output projection"}),
)
