"""The recipe for questions that nobody has asked yet (docs/question-free.md): DropKV's step, in whole words, times what the token stands for.

One query's step is p / (1 - p + eps) * ||a - v_j||_2, as in `dropkv_replay`. x_hj, the largest step of any query and any of the group's heads,
is divided by its mean over the head's tokens and summed over words: runs of letters and digits as the tokenizer writes them, so that a number
stays whole. s_hj = that sum * c_j, where c_j is what the token stands for: p_hj, the largest over queries and the group's heads, averaged over
the KV heads of this layer and those before it, summed over words, averaged over 11 neighbours (--pool).

Every head first keeps f, or alpha of its budget where that is more, by the sum of its steps over the queries (the largest of the group's heads;
of several probes the largest). What is left is shared by s_hj among the 27 % of all layers' heads with the largest mean x. Heads that compete
for an answer then keep the same tokens, and heads that look at everything a little keep something of everything.
"""

from dropkv.methods._base import (
    LARGEST_P,
    MAX_MAX,
    SUM_OF_STEPS,
    Method,
    Pool,
    Together,
    odds_times_distance,
)

METHOD = Method(
    "auto",
    "dropkv in whole words, heads keep the same tokens",
    odds_times_distance,
    reduction=MAX_MAX,
    pool=Pool("avg", 11),
    rule="two orders",
    alpha=0.3,
    forced_first=4,
    forced_last=4,
    beside=(LARGEST_P, SUM_OF_STEPS),
    together=Together(heads=0.27),
    needs=frozenset({"words", "replay"}),
)
