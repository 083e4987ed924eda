"""Largest attention: s_j = max over queries and the group's heads of p_tj, the plain-attention counterpart of `dropkv_replay`.

What `snapkv` becomes under the replay observer; `kvzip` is the same score with one budget for all layers.
"""

from dropkv.kernels.score import MAX_MAX
from dropkv.methods._base import Method, probability

METHOD = Method("max_probability", "the largest attention any query pays the token", probability, reduction=MAX_MAX)
