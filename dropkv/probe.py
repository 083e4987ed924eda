"""A test run of two tokens: whether a network's attention is what dropkv expects, known before anything long begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dropkv.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from dropkv.models import LayerGeometry

SHIFT = 37  # far from a whole turn at every rotary frequency that matters
SAME = 1e-2  # keys that differ by less, relative to their length, were not rotated


class Sight:
    """Records the shapes each layer hands to its attention and how far its keys move with the position."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[tuple[int, int, int, int], int | None, Tensor]] = {}
        self.again: set[int] = set()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention

        if layer in self.seen:
            self.again.add(layer)
        moved = (k[0] - k[1]).float().norm() / k[0].float().norm()
        self.seen[layer] = ((q.shape[1], k.shape[1], k.shape[3], v.shape[3]), window, moved)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def probe(network: Any, geometry: Sequence[LayerGeometry], name: str, unrotated: Collection[int] = ()) -> None:
    """Run the same two tokens at two places: the layers' inputs agree, since attention is relative, so only rotation
    moves the keys. Layers in `unrotated` are known to have none.

    Raises ModelError for a layer that is not seen once, has another shape than its config says, another window, or no
    rotation where there should be one.
    """
    import torch

    from dropkv import attention

    device = attention.entry_device(network)
    if device.type == "meta":
        return
    sight = Sight()
    ids = torch.tensor([[1, 0], [1, 0]], device=device)
    with torch.no_grad():
        attention.run_decoder(network, ids, torch.tensor([[0, 1], [SHIFT, SHIFT + 1]], device=device), sight)
    missed = [index for index in range(len(geometry)) if index not in sight.seen]
    if missed:
        raise ModelError(f"{name}: layer {missed[0]} has no softmax attention that dropkv can see; use another model")
    if sight.again:
        raise ModelError(
            f"{name}: layer {min(sight.again)} computes its attention in more than one piece, which dropkv does not "
            f"know; use another model"
        )
    for index, expected in enumerate(geometry):
        shape, window, moved = sight.seen[index]
        if shape != (expected.query_heads, expected.kv_heads, expected.d_k, expected.d_v):
            raise ModelError(
                f"{name}: layer {index} has heads of the shape {shape}, its config says otherwise; use another model"
            )
        if expected.kind == "sliding" and window != expected.window:
            raise ModelError(
                f"{name}: layer {index} has a window of {window}, its config says {expected.window}; use another model"
            )
        if index in unrotated and float(moved) > SAME:
            raise ModelError(
                f"{name}: layer {index} rotates its keys, which its config does not say; use another model"
            )
        if index not in unrotated and not float(moved) > SAME:
            raise ModelError(
                f"{name}: layer {index} has no rotary position embeddings, so its keys cannot be kept by "
                f"position; use another model"
            )
