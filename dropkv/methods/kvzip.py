"""KVzip (arXiv 2505.23416): s_j = max over replayed queries and the group's heads of p_tj, over all layers' heads at once (model-wide, alpha 0).

Only with the replay observer: the document is repeated chunk by chunk, and what a chunk's repetition looks at in it counts. The authors run
replays of 2000 tokens in a second pass against the full cache, each with the last 8 tokens of the chunk before it; here they run beside the
prefill, 512 tokens each (--chunk). NVIDIA/kvpress forces only the first 4 positions and lets the rest of the template go first.
"""

from dropkv.methods._base import MAX_MAX, Method, probability

METHOD = Method(
    "kvzip",
    "the largest attention of a replay, all layers share",
    probability,
    reduction=MAX_MAX,
    rule="model-wide",
    alpha=0.0,
    needs=frozenset({"replay"}),
)
