"""What follows the layers, run over given hidden states: final norm and language-model head, and whatever else a family puts there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dropkv.attention import layer_list
from dropkv.models import Model

LOGITS = 1 << 24  # numbers of the logits that are there at once: 64 MiB of float32
GPU_LOGITS = 1 << 26  # a GPU takes more, since every call costs it launches


def head_rows(model: Model) -> int:
    """Tokens whose logits are made at once."""
    numbers = GPU_LOGITS if model.device.type == "cuda" else LOGITS
    return max(1, numbers // int(model.network.config.vocab_size))


@contextmanager
def known_states(network: nn.Module, hidden: Tensor) -> Iterator[None]:
    """For the length of the block the layers compute nothing and the last one gives `hidden` [batch, tokens, width]; the network is restored
    whatever happens."""
    owner, name, layers = layer_list(network)
    last = len(layers) - 1
    known = [_Known(layer, hidden if index == last else None) for index, layer in enumerate(layers)]
    setattr(owner, name, nn.ModuleList(known).train(network.training))
    try:
        yield
    finally:
        setattr(owner, name, layers)


class _Known(nn.Module):
    """A layer that is passed over, or whose output is known."""

    def __init__(self, inner: nn.Module, hidden: Tensor | None) -> None:
        super().__init__()
        self.inner = inner
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)  # some families read attributes of their layers

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden if self.hidden is None else self.hidden
