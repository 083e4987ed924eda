"""AdaKV (arXiv 2407.11550): the score of `snapkv`; heads have different budgets (head-adaptive rule, alpha 0.2).

Every head keeps its first floor(alpha * kept) entries, the layer's other places go to its best scores: the rule of NVIDIA/kvpress. The
authors' code counts how many of the layer's best fall to each head and blends these counts with the uniform budget, which rounds and is not
nested in the budget.
"""

from dropkv.methods._base import Method, Pool, probability

METHOD = Method(
    "adakv", "snapkv with budgets that differ by head", probability, pool=Pool("max", 11), rule="head-adaptive"
)
