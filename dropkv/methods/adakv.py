"""AdaKV (arXiv 2407.11550): the score of `snapkv`; heads have different budgets (head-adaptive rule, alpha 0.2)."""

from dropkv.methods._base import Method, Pool, probability

METHOD = Method(
    "adakv", "snapkv with budgets that differ by head", probability, pool=Pool("max", 11), rule="head-adaptive"
)
