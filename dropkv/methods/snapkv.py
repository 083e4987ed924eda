"""SnapKV (arXiv 2404.14469): s_j = mean over the group's heads of sum_t p_tj, at KV-head granularity, max-pooled.

The authors' code scores each query head apart and stores G times more entries on grouped models; see docs for the differences.
"""

from dropkv.methods._base import Method, Pool, probability

METHOD = Method("snapkv", "attention the window pays the token", probability, pool=Pool("max", 11))
