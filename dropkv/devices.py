"""Where a network computes: on one device, layer by layer on several, or from weights that wait in host memory or on the disk.

The accelerate library moves a layer's inputs to the device that its map gives it, and fetches weights that wait elsewhere; what belongs to a
layer here (its entries, buffers, tail) lives where the layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dropkv.errors import UsageError

if TYPE_CHECKING:
    from dropkv.models import Model

ROOM = 0.75  # share of a GPU's free memory that weights may take: the rest is for entries, slices and answers


def execution_device(module: nn.Module) -> torch.device:
    """The device a module computes on, wherever its weights wait; that of its first weight when nothing moves it."""
    for part in module.modules():  # with some maps only the innermost modules know
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def named_weights(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Every weight as the module holds it and with its values, which may have to be fetched: parameters, and packed integers of quantised ones."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield parameter, weight(owner, name)
        for name, buffer in owner.named_buffers(recurse=False):
            packed = buffer.dim() > 1 and not buffer.is_floating_point() and buffer.dtype != torch.bool
            if packed and name not in owner._non_persistent_buffers_set:
                yield buffer, weight(owner, name)


def weight(module: nn.Module, name: str) -> Tensor:
    """A module's own parameter with its values, fetched from where it waits."""
    parameter: Tensor = getattr(module, name)
    if parameter.is_meta:
        for hook in _hooks(module):
            waiting = getattr(hook, "weights_map", None)
            if waiting is not None:
                fetched: Tensor = waiting[name]
                return fetched
    return parameter


def device_map(
    size: int, devices: Sequence[torch.device], free: Callable[[torch.device], int], *, named: bool
) -> dict[str, Any]:
    """What `from_pretrained` is told for `size` bytes of weights and these GPUs; `free` gives the free bytes of one.

    One GPU where the weights leave room on the first, else spread evenly, the rest waiting in host memory. named: the user listed the GPUs
    and wants all of them used.
    """
    if len(devices) == 1 if named else size <= ROOM * free(devices[0]):
        return {"device_map": {"": devices[0]}}
    room = {device.index or 0: int(ROOM * free(device)) for device in devices}
    return {"device_map": "balanced" if size <= sum(room.values()) else "auto", "max_memory": room | {"cpu": 1 << 50}}


def refuse_spread(model: Model) -> None:
    """Raise UsageError for a model on several devices, where one is needed."""
    if len(set(model.devices)) > 1:
        names = ", ".join(sorted({str(device) for device in model.devices}))
        raise UsageError(
            f"{model.id} is spread over {names}, the bench needs it on one: use --device cuda:0 or a smaller model"
        )


def wait_for(devices: Sequence[torch.device]) -> None:
    """Return when everything asked of these devices is done."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [hook]))
