"""CriticalKV with head budgets of AdaKV (arXiv 2502.03805 and 2407.11550): counts per head by pooled p, then both stages inside each head.

A head with b entries takes max(f, floor(b / 2)) of them by p and the rest by (pooled p + 1e-4) * mean ||v_j W_O^h||_1, as in `criticalkv`.
NVIDIA/kvpress composes the two the same way (CriticalAdaKVPress, alpha 0.2).
"""

from dataclasses import replace

from dropkv.methods.criticalkv import METHOD as CRITICALKV

METHOD = replace(
    CRITICALKV, name="adacriticalkv", summary="criticalkv with budgets that differ by head", rule="head-adaptive"
)
