"""DropKV's score in the form replayed queries use: s_j = max over queries and the group's heads of p / (1 - p + eps) * ||a - v_j||_2.

What `dropkv` becomes under the replay observer, as a method of its own for comparisons with any observer.
"""

from dropkv.kernels.score import MAX_MAX
from dropkv.methods._base import Method, odds_times_distance

METHOD = Method(
    "dropkv_replay", "dropkv unsquared, the largest step of any query", odds_times_distance, reduction=MAX_MAX
)
