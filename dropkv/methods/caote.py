"""CAOTE (arXiv 2504.14051): s_j = mean over the group's heads of sum_t p_tj / (1 - p_tj + eps) * ||a_t - v_j||_2: `dropkv` without the square.

The paper scores one query at a time, while blocks of 128 tokens are read, and also plugs other normalised scores in for p; no official code.
"""

from dropkv.methods._base import Method, Pool, odds_times_distance

METHOD = Method("caote", "how far the output would move without the token", odds_times_distance, pool=Pool("max", 11))
