"""DropKV (NeurIPS 2026): s_j = mean over the group's heads of sum_t (p_tj / (1 - p_tj + eps))^2 * ||a_t - v_j||_2^2.

Removing key j and renormalising moves the output of query t by exactly p_tj / (1 - p_tj) * (a_t - v_j); the score is the squared length
of that step. p is float32, eps 1e-6. The reference code rounds p to the model's dtype first, which only changes keys with p near 1; its
standalone cache and the pull request to NVIDIA/kvpress pool by averages (kernel 11 and 7) where the evaluated patch takes the maximum.
"""

from dropkv.methods._base import Method, Pool, odds_times_distance

METHOD = Method(
    "dropkv",
    "how far the output would move without the token, squared",
    odds_times_distance,
    power=2,
    pool=Pool("max", 11),
)
