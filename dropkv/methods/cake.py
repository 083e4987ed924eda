"""CAKE (arXiv 2503.12491): s_j = mean over the group's heads of mean_t p_tj + 200 Var_t p_tj, average-pooled; layers share the budget by need.

Var is unbiased, over the window's queries. Layer l gets a share P_l = H_l V_l of all layers' entries, over its window attention A without
the last f columns: H_l = -sum A ln(A + 1e-10), V_l = sum_j Var_t(A_tj), summed over query heads.
The authors' code rounds A to the model's type first, in which small variances vanish, sets exponents of H and V per model, and evicts
further while answering; none of that is done here.
"""

from torch import Tensor

from dropkv.methods._base import Block, Job, Method, Pool, Reduction, probability


def entropy(block: Block) -> Tensor:
    """-p ln(p + 1e-10) [h, rows, c]."""
    p = block.probability()
    return (p + 1e-10).log_().mul_(p).neg_()


METHOD = Method(
    "cake",
    "attention and how much it varies, layers budgeted by entropy",
    probability,
    reduction=Reduction("mean+200var", "mean"),
    pool=Pool("avg", 5),
    rule="cake-layers",
    beside=(
        Job(entropy, Reduction("sum", "sum"), weight="entropy"),
        Job(lambda block: block.probability(), Reduction("var", "sum"), weight="p"),
    ),
)
