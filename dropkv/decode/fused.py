"""Decoder layers of the plain kind with their small steps fused, for the length of a decode step.

A layer of Llama, Mistral, Qwen2 or Qwen3 is two norms, seven products, a rotation, the attention and a gate. Between the products and the attention
transformers launches some thirty small kernels, which take longer than reading the weights; here they are three. Sums of the residual
stream and the norms are rounded where transformers rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dropkv.attention import layer_list
from dropkv.models import TESTED, LayerGeometry, Model

if TYPE_CHECKING:
    from dropkv.decode.tails import Tails


class LayerRun(Protocol):
    """What fused layers need of a run, as `dropkv.decode.kernel_run.KernelRun` has it. pending: what a layer leaves to the next one to add to the
    residual stream."""

    tails: Tails
    slots: Tensor
    lengths: Tensor
    pending: Tensor | None

    @property
    def geometry(self) -> Sequence[LayerGeometry]:
        """The layers' shapes."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """What layers that are not fused ask for."""
        ...

    def over(self, layer: int, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention outputs [tokens, heads, d_v] of q [tokens, heads, d], whose keys and values are in the tails."""
        ...


class FusedLayer(nn.Module):
    """A decoder layer as it stands in one step, hidden [1, rows, width]; see `fits`."""

    def __init__(self, inner: Any, index: int, run: LayerRun, last: bool) -> None:
        super().__init__()
        self.inner = [inner]  # in a list, so that it is not registered a second time
        self.index = index
        self.run = run
        self.last = last

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_kwargs: Any) -> Tensor:
        from dropkv.kernels import skinny
        from dropkv.kernels.small import add_norm, gate, rotate_and_put

        layer, run = self.inner[0], self.run
        attention, mlp = layer.self_attn, layer.mlp
        stream, pending = hidden[0], run.pending
        cos, sin = position_embeddings
        normed = add_norm(stream, pending, layer.input_layernorm)
        alone = len(normed) == 1
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = skinny.products(normed, projections) if alone else [projection(normed) for projection in projections]
        shape = run.geometry[self.index]
        q = rotate_and_put(
            q.view(len(q), shape.query_heads, -1), k.view(len(q), shape.kv_heads, -1), v.view(len(q), shape.kv_heads, -1),
            cos[0], sin[0], run.tails.keys[self.index], run.tails.values[self.index], run.slots, run.lengths,
            getattr(attention, "q_norm", None), getattr(attention, "k_norm", None),
        )  # fmt: skip
        out = run.over(self.index, q, float(attention.scaling), None)
        out = out.flatten(1)
        out = skinny.products(out, [attention.o_proj])[0] if alone else attention.o_proj(out)
        normed = add_norm(stream, out, layer.post_attention_layernorm)
        if alone:
            out = skinny.products(skinny.gated(normed, mlp.gate_proj, mlp.up_proj), [mlp.down_proj])[0]
        else:
            out = mlp.down_proj(gate(mlp.gate_proj(normed), mlp.up_proj(normed)))
        run.pending = out
        if self.last:
            stream += out
            run.pending = None
        return hidden


@contextmanager
def fused_layers(model: Model, run: LayerRun) -> Iterator[None]:
    """For the length of the block the layers are fused ones, if the model's are of that kind; the network is restored whatever happens."""
    with _replaced(model, run) if fits(model) else nullcontext():
        yield


@contextmanager
def _replaced(model: Model, run: LayerRun) -> Iterator[None]:
    owner, name, layers = layer_list(model.network)
    last = len(layers) - 1
    run.pending = None
    setattr(
        owner, name, nn.ModuleList(FusedLayer(layer, index, run, index == last) for index, layer in enumerate(layers))
    )
    try:
        yield
    finally:
        setattr(owner, name, layers)


def fits(model: Model) -> bool:
    """Whether the layers are of the kind that is fused: the families of `TESTED`, on a GPU, with plain weights and the SiLU gate."""
    config: Any = model.network.config
    if config.model_type not in TESTED or model.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if getattr(config, "hidden_act", None) != "silu" or config.rms_norm_eps is None:
        return False
    return all(_plain(layer) for layer in layer_list(model.network)[2])


def _plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    gates = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    biases = {linear is not None and getattr(linear, "bias", None) is not None for linear in linears[:3]}
    return (
        all(type(linear) is nn.Linear for linear in (*linears, *gates))
        and len(biases) == 1
        and all(linear.bias is None for linear in gates if linear is not None)
    )
