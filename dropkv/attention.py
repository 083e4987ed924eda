"""The one seam to transformers' attention, layers and cache API.

A network is loaded with `attn_implementation="dropkv"`. Every attention layer of any family then hands its real, rotated q, k and v to the
function registered here, which passes them to the run that travels with the call as an extra keyword argument. Nothing is recomputed
per family, and no cache object of transformers is ever used: runs hold keys and values themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dropkv.devices import execution_device, weight
from dropkv.errors import ModelError
from dropkv.models import unrotated_layers
from dropkv.spans import Cuts, Span

NAME = "dropkv"
RUN = "dropkv_run"
LOSES_ARGUMENTS = ("stablelm", "nemotron")  # families whose layers do not pass extra arguments on to their attention
OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "wo", "c_proj")

# What layers hand to their attention function without changing its mathematics, given that runs place every token themselves.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "is_causal",
        "return_dict",
    }
)


class Run(Protocol):
    """What receives the queries, keys and values of every layer during one forward call."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [batch, heads, tokens, d_v] for q [batch, heads, tokens, d_k], k and v [batch, kv_heads, tokens, d]."""
        ...


class LayerDone(Exception):
    """Raised by a run inside the last layer of a prefill: all it needed from that layer has been seen, the rest need not be computed."""


def register() -> None:
    """Make `attn_implementation="dropkv"` known to transformers: the one process-wide state this library sets. Safe to repeat."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Runs know which keys a query may see; a mask of tokens x tokens would only cost memory."""
    return None


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function: q [batch, heads, tokens, d], k and v [batch, kv_heads, tokens, d] after RoPE -> [batch, tokens, heads, d_v].

    Raises ModelError where a layer lost the run (it does not pass extra arguments on) or passes an argument that changes the mathematics.
    """
    run: Run | None = kwargs.pop(RUN, None)
    layer = getattr(module, "layer_idx", None)
    if run is None or layer is None:
        raise ModelError(
            f"{type(module).__name__} does not pass extra arguments to its attention, so dropkv cannot serve it: use another model"
        )
    foreign = sorted(
        name
        for name, content in kwargs.items()
        if content is not None and name not in HARMLESS and _changes_attention(content)
    )
    if foreign or attention_mask is not None or (dropout and module.training):
        what = ", ".join(foreign) or ("an attention mask" if attention_mask is not None else "dropout")
        raise ModelError(
            f"{type(module).__name__} changes its attention by {what}, which dropkv does not know: use another model"
        )
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    output = run.attend(int(layer), query, key, value, scale=scale, window=sliding_window, softcap=softcap)
    return output.transpose(1, 2).contiguous(), None  # some families view it


def _changes_attention(content: Any) -> bool:
    """Plain switches (False, 0, empty) do nothing; tensors, numbers and objects may."""
    return isinstance(content, Tensor) or bool(content)


def decoder_of(network: nn.Module) -> nn.Module:
    """The stack without the language-model head, so that a prefill never computes logits it does not need."""
    decoder: nn.Module = network.base_model  # type: ignore[assignment]
    return decoder


def entry_device(network: nn.Module) -> torch.device:
    """Where token ids and positions have to be."""
    embeddings: nn.Module = network.get_input_embeddings()  # type: ignore[operator]
    return execution_device(embeddings)


def layer_list(network: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that owns the decoder layers, the attribute's name, and the list itself.

    Raises ModelError when there is no list of `num_hidden_layers` modules.
    """
    config: Any = network.config
    for owner in decoder_of(network).modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                return owner, name, child
    raise ModelError(
        f"{type(network).__name__} has no list of decoder layers, so it cannot be prefilled layer by layer: use another model"
    )


def output_projection(network: nn.Module, layer: int, width: int) -> Tensor:
    """The weight [model dim, width] of the linear module that ends a layer's attention; width is query heads * d_v.

    Raises ModelError when there is no such module under any name that families use.
    """
    _, _, layers = layer_list(network)
    block = layers[layer]
    inner = block.inner if isinstance(block, SlicedLayer) else block
    for module in inner.modules():
        if getattr(module, "layer_idx", None) is None:
            continue
        for name in OUTPUT_NAMES:
            linear = getattr(module, name, None)
            found = _matrix(linear, width) if isinstance(linear, nn.Module) else None
            if found is not None:
                return found
    raise ModelError(
        f"layer {layer} of {type(network).__name__} has no output projection that dropkv knows: use a method that does not need it"
    )


def _matrix(linear: nn.Module, width: int) -> Tensor | None:
    """The weight [out, width] of a linear module; of a quantised one what it makes of the unit vectors."""
    stored = getattr(linear, "weight", None)
    if isinstance(stored, Tensor) and stored.is_floating_point() and stored.itemsize > 1:
        if stored.dim() != 2 or stored.shape[1] != width:
            return None
        return weight(linear, "weight").detach().to(execution_device(linear))
    if getattr(linear, "in_features", None) != width:
        return None
    scales = [part for _, part in (*linear.named_parameters(), *linear.named_buffers()) if part.is_floating_point()]
    dtype = next((part.dtype for part in scales if part.itemsize > 1), torch.get_default_dtype())
    units = torch.eye(width, dtype=dtype, device=execution_device(linear))
    out: Tensor = linear(units) - linear(torch.zeros_like(units[:1]))  # without the bias
    return out.T


def rotation(network: nn.Module, layer: int, positions: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, r], by which a layer's queries at `positions` int64 are rotated in a text of `tokens` tokens.

    Raises ModelError when the network does not keep its rotary embeddings where families do.
    """
    if layer in unrotated_layers(network.config):
        still = torch.ones(len(positions), 2, device=positions.device)
        return still, torch.zeros_like(still)
    rotary = getattr(decoder_of(network), "rotary_emb", None)
    if not callable(rotary):
        raise ModelError(
            f"{type(network).__name__} keeps its rotary embeddings where dropkv does not find them: use another method"
        )
    config: Any = network.config
    like = torch.zeros(1, device=positions.device)
    given: dict[str, Any] = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        given["layer_type"] = config.layer_types[layer]
    # The largest position of a call picks the frequencies of some models (see rope.py), so the text's last one goes along.
    line = torch.cat([positions, positions.new_tensor([tokens - 1])])
    cos, sin = rotary(like, line.unsqueeze(0), **given)
    return cos[0, :-1].to(positions.device, torch.float32), sin[0, :-1].to(positions.device, torch.float32)


class SlicedLayer(nn.Module):
    """One decoder layer, run over slices of the sequence; hidden states are overwritten in place.

    `cuts` says where slices end. `enter(layer, span)` is called before each slice and `leave(layer)` after the last one. Where a GPU's memory
    runs out, the slice is run again in halves, and so are those behind it. `rows`: how many of the last hidden states go on to what follows;
    `taken` is called with all of them.
    """

    def __init__(
        self,
        inner: nn.Module,
        index: int,
        cuts: Cuts,
        enter: Callable[[int, Span], None],
        leave: Callable[[int], None],
        rows: int | None = None,
        taken: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        self.cuts = cuts
        self.enter = enter
        self.leave = leave
        self.rows = rows
        self.taken = taken
        self.device = execution_device(inner)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)  # some families read attributes of their layers

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = hidden.to(self.device)
        start = 0
        while start < hidden.shape[1]:
            span = self.cuts.span(start)
            if self._ran(hidden, span, args, kwargs):
                start = span.stop
        self.leave(self.index)
        if self.taken is not None:
            self.taken(hidden)
        return hidden if self.rows is None else hidden[:, -self.rows :]

    def _ran(self, hidden: Tensor, span: Span, args: Any, kwargs: Any) -> bool:
        """Compute one slice; False when memory ran out and the next ones are smaller."""
        total, start, stop = hidden.shape[1], span.start, span.stop
        self.enter(self.index, span)
        cut_args = [_cut(argument, start, stop, total) for argument in args]
        cut_kwargs = {name: _cut(argument, start, stop, total) for name, argument in kwargs.items()}
        try:
            out = self.inner(hidden[:, start:stop], *cut_args, **cut_kwargs)
        except LayerDone:
            return True
        except torch.OutOfMemoryError:
            if not self.cuts.halve(span):
                raise
            return False
        hidden[:, start:stop] = out[0] if isinstance(out, tuple) else out
        return True


def _cut(argument: Any, start: int, stop: int, total: int) -> Any:
    """The same slice of whatever a layer is given per position: position ids, cosines and sines; anything else unchanged."""
    if isinstance(argument, Tensor):
        return argument[:, start:stop] if argument.dim() >= 2 and argument.shape[1] == total else argument
    if isinstance(argument, tuple):
        return tuple(_cut(item, start, stop, total) for item in argument)
    if isinstance(argument, dict):
        return {name: _cut(item, start, stop, total) for name, item in argument.items()}
    return argument


@contextmanager
def sliced_layers(
    network: nn.Module,
    cuts: Cuts,
    enter: Callable[[int, Span], None],
    leave: Callable[[int], None],
    rows: int | None = None,
    taken: Callable[[Tensor], None] | None = None,
) -> Iterator[None]:
    """For the length of the block every decoder layer runs slice by slice; the network is restored whatever happens.

    rows: only so many of the last hidden states are given to what follows the layers; None for all. taken: called with all that the last layer made
    [batch, tokens, width].
    """
    owner, name, layers = layer_list(network)
    wrapped = nn.ModuleList(
        SlicedLayer(layer, index, cuts, enter, leave, *((rows, taken) if index == len(layers) - 1 else ()))
        for index, layer in enumerate(layers)
    )
    wrapped.train(network.training)
    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, layers)


@contextmanager
def carried(network: nn.Module, run: Run) -> Iterator[None]:
    """For the length of the block a run reaches every attention module, also those whose layers drop extra arguments."""
    config: Any = network.config
    handles = []
    if config.model_type in LOSES_ARGUMENTS:

        def hand(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, RUN: run}

        modules = decoder_of(network).modules()
        attentions = [module for module in modules if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
        handles = [module.register_forward_pre_hook(hand, with_kwargs=True) for module in attentions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_decoder(network: nn.Module, ids: Tensor, positions: Tensor, run: Run) -> None:
    """One forward call of the decoder stack, no logits: ids and positions int64 [batch, tokens]."""
    with carried(network, run):
        decoder_of(network)(input_ids=ids, position_ids=positions, use_cache=False, **{RUN: run})


def run_logits(
    network: nn.Module, ids: Tensor, positions: Tensor, run: Run, *, keep: int | Tensor = 1, widened: bool = True
) -> Tensor:
    """Logits float32 [batch, keep, vocabulary] of the last `keep` tokens (0: all), or of those at the places int64 [keep], for ids and
    positions int64 [batch, tokens]. widened: False leaves them in the network's type, which is enough to find the largest."""
    rows = (
        keep.tolist() if isinstance(keep, Tensor) else keep
    )  # a tensor might be on another device than the last layer
    with carried(network, run):
        out = network(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows, **{RUN: run})
    logits: Tensor = out.logits
    return logits.float() if widened and logits.dtype != torch.float64 else logits


def plain_cache(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """A cache of transformers that holds copies of the keys and values [1, kv_heads, entries, d] of every layer."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k, v, layer)
    return cache
