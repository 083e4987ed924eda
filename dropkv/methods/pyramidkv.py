"""PyramidKV (arXiv 2406.02069): the score of `snapkv`; lower layers keep more, in an arithmetic sequence whose ends are 39 to 1 (beta 20).

With C = kept - f, lo = C // 20 and hi = 2C - lo, layer l keeps hi - l * ((hi - lo) // (L - 1)) entries per head and the f forced ones.
The authors' integer step makes the total exceed L * C by up to 3 %; here the difference is settled one entry a layer, from the bottom.
NVIDIA/kvpress falls back to plain SnapKV where the lowest layer would get fewer entries than the window, e.g. below 25.6K tokens at 5 %.
"""

from dropkv.methods._base import Method, Pool, probability

METHOD = Method(
    "pyramidkv", "snapkv with more entries in the lower layers", probability, pool=Pool("max", 11), rule="layer-pyramid"
)
