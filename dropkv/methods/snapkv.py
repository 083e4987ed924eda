"""SnapKV (arXiv 2404.14469): s_j = mean over the group's heads of sum_t p_tj, at KV-head granularity, max-pooled.

The authors' code scores each query head apart and so stores G times more entries on grouped models, and leaves the window's columns out
before pooling; its benchmark configs use a window of 32 and kernel 7. NVIDIA/kvpress averages with kernel 5 over a window of 64.
"""

from dropkv.methods._base import Method, Pool, probability

METHOD = Method("snapkv", "attention the window pays the token", probability, pool=Pool("max", 11))
