"""What `auto` costs beside its scores: the two orders of every layer, what is held of them, and the copies of keys and values.

    python benchmarks/selection.py [--tokens 32768] [--layers 32] [--heads 8] [--budget 0.05] [--method auto] [--width 128] [--device cpu]

Scores are drawn: lognormal, heads of different levels, words of one token to nine; every layer has the same keys and values, bfloat16.
orders:  words, levels, what tokens stand for.  choice:  sorting a layer, cutting what cannot be kept.  finish:  the last choice
whole:   all of it with keys and values, as a prefill hands them over; the parts alone are waited for after every layer
waits:   what makes the program wait for a GPU in the whole, counted from the calls it makes, so on a CPU too
held:    the most that is held after a layer, and what a prefill counts with, as shares of the full cache
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dropkv.budgets import kept_count
from dropkv.keeper import Keeper
from dropkv.methods import LayerContext, LayerScores, get
from dropkv.methods._together import Orders
from dropkv.models import LayerGeometry
from dropkv.two_orders import TwoOrders, most_held
from dropkv.words import Words

WAITS = {
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "cpu",
    "nonzero",
    "masked_select",
    "bincount",
    "unique_consecutive",
}


class Waits(TorchFunctionMode):
    """Counts calls that have a program wait for a GPU."""

    count = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for part in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        repeats = (
            name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[1], torch.Tensor)
        )
        self.count += name in WAITS or masked or repeats
        return func(*args, **kwargs)


def layers_of(given: argparse.Namespace, device: torch.device) -> Iterator[LayerScores]:
    """The scores of layer after layer."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (given.heads, given.tokens)
    about = torch.randn(given.tokens, generator=generator, device=device)  # what tokens mean to all heads
    for _ in range(given.layers):
        level = torch.randn(given.heads, 1, generator=generator, device=device)
        steps, paid, own = (
            (1.5 * torch.randn(shape, generator=generator, device=device) + about + level).exp() for _ in range(3)
        )
        yield LayerScores(steps, torch.stack([paid, own]))


def words_of(tokens: int, device: torch.device) -> Words:
    """Words of one token to nine, mostly short."""
    joined = (torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 0.4).tolist()
    numbers, length = [0], 1
    for joins in joined[1:]:
        length = length + 1 if joins and length < 9 else 1
        numbers.append(numbers[-1] + (length == 1))
    return Words.made(numbers, device)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 32768), ("layers", 32), ("heads", 8), ("width", 128), ("repeat", 3)):
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--budget", type=float, default=0.05)
    options.add_argument("--method", default="auto")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    device, method, n = torch.device(given.device), get(given.method), given.tokens
    assert method.together is not None
    forced, counts, heads = method.forced(n), [given.heads] * given.layers, given.heads * given.layers
    kept, words = kept_count(given.budget, n, len(forced)), words_of(n, device)
    scores = list(layers_of(given, device))
    standing = torch.stack([one.beside[0].mean(0) for one in scores if one.beside is not None]).mean(0)
    k, v = torch.randn(2, given.heads, n, given.width, device=device).bfloat16()
    geometry = [LayerGeometry("full", given.heads, given.heads, given.width, given.width, None)] * given.layers

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def parts() -> tuple[dict[str, float], int]:
        orders = Orders(method.together, method.pool, words, standing)
        choice = TwoOrders(kept, n, forced, heads, method.alpha, method.together.heads)
        seconds, most = dict.fromkeys(("orders", "choice", "finish"), 0.0), 0

        def timed(part: str, action: Callable[..., Any], *given: Any) -> Any:
            wait()
            started = time.perf_counter()
            made = action(*given)
            wait()
            seconds[part] += time.perf_counter() - started
            return made

        for layer in scores:
            made = timed("orders", orders.add, layer)
            timed("choice", choice.add, *made)
            most = max(most, sum(map(sum, choice.held())))
        timed("finish", choice.finish)
        return seconds, most

    def whole() -> float:
        keeper = Keeper(method, kept, n, geometry, words, standing)
        wait()
        started = time.perf_counter()
        for number, layer in enumerate(scores):
            keeper.full(number, LayerContext(k, v, 1.0), [layer])
        keeper.finish()
        wait()
        return time.perf_counter() - started

    with torch.inference_mode():
        if device.type == "cuda":
            parts(), whole()  # kernels are loaded and compiled
        runs = [(*parts(), whole()) for _ in range(given.repeat)]
        with Waits() as waits:
            whole()
    middle = len(runs) // 2
    for part in ("orders", "choice", "finish"):
        print(f"{part:7} {1e3 * sorted(run[0][part] for run in runs)[middle]:9.1f} ms")
    print(f"{'whole':7} {1e3 * sorted(run[2] for run in runs)[middle]:9.1f} ms, {waits.count} waits")
    expected = most_held(kept, n, len(forced), counts, method.alpha, method.together.heads)
    print(f"{'held':7} {runs[0][1] / heads / n:9.1%}, counted with {expected / heads / n:.1%}")


if __name__ == "__main__":
    main()
