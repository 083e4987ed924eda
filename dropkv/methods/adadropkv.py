"""AdaDropKV (NeurIPS 2026): the score of `dropkv`; heads have different budgets (head-adaptive rule, alpha 0.2).

The paper's name for it; the rule is that of `adakv` here. No public code of this combination is known.
"""

from dropkv.methods._base import Method, Pool, odds_times_distance

METHOD = Method(
    "adadropkv",
    "dropkv with budgets that differ by head",
    odds_times_distance,
    power=2,
    pool=Pool("max", 11),
    rule="head-adaptive",
)
