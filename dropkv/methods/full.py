"""Control: everything is kept, whatever the budget; the upper end of every comparison."""

from torch import Tensor

from dropkv.methods._base import LayerContext, Method


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] zeros: there is nothing to choose."""
    return layer.k.new_zeros(layer.k.shape[:2]).float()


METHOD = Method("full", "a control: everything is kept", unobserved=scores, keeps_all=True)
