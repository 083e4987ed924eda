"""All probes of one span at once, by the fused kernels, where a GPU and the methods allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dropkv.kernels.triton_here import slower, triton_works
from dropkv.methods import (
    LARGEST_P,
    LARGEST_P_TOLD,
    MAX_MAX,
    SUM_OF_STEPS,
    LayerScores,
    Method,
    odds_times_distance,
    probability,
    told_probability,
    told_step,
)
from dropkv.models import LayerGeometry
from dropkv.observers import Probe
from dropkv.spans import Span

if TYPE_CHECKING:
    from dropkv.kernels.fused_replay import Prepared

MOST = 256  # dimensions of a head


Kind = Literal["p", "step", "every", "told p", "told"]
EVERY = (LARGEST_P, SUM_OF_STEPS)
KINDS: dict[object, Kind] = {
    (probability, ()): "p",
    (odds_times_distance, ()): "step",
    (odds_times_distance, EVERY): "every",
    (told_probability, ()): "told p",
    (told_step, (LARGEST_P_TOLD, SUM_OF_STEPS)): "told",
}
ORDER: tuple[Kind, ...] = ("every", "told", "told p", "step", "p")  # the first two have others in them
ALIKE: dict[Kind, Kind] = {"told p": "p", "told": "every"}  # where queries weigh nothing


def kind_of(method: Method) -> Kind | None:
    """What a method asks of the kernels: the largest p of any query; the largest step, odds x distance; or every one of these and the sum of
    steps; "told" where queries weigh. None for what they do not compute."""
    more = method.weigh or method.beside_window or method.projected
    if method.reduction != MAX_MAX or method.power != 1 or more:
        return None
    return KINDS.get((method.observed, method.beside))


class FusedProbes:
    """The probes of one document, for the methods that observe with them; places on the device are made once and serve every layer.

    forced: True for the kernels wherever they are, also under Triton's interpreter; False for never.
    """

    def __init__(self, methods: Sequence[Method], *, forced: bool | None = None) -> None:
        self.kinds = [kind_of(method) for method in methods if method.observed is not None]
        self.forced = forced
        self._prepared: dict[tuple[object, ...], Prepared] = {}

    def serve(self, geometry: LayerGeometry, span: Span, q: Tensor, softcap: float | None) -> bool:
        """Whether this span of a layer can be computed here; each probe sees one range besides the scored one, or none."""
        if None in self.kinds or geometry.kind != "full" or any(len(probe.seen) > 1 for probe in span.probes):
            return False
        lacking = ""
        if softcap is not None:
            lacking = "soft-capped logits"
        elif max(geometry.d_k, geometry.d_v) > MOST:
            lacking = f"heads of {max(geometry.d_k, geometry.d_v)} dimensions"
        elif self.forced is None and q.dtype not in (torch.float16, torch.bfloat16):
            lacking = str(q.dtype).removeprefix("torch.")
        if lacking and q.is_cuda:
            slower(
                f"there is no kernel for replays with {lacking}, so they are computed one by one, which takes longer"
            )
        if lacking or self.forced is not None:
            return not lacking and bool(self.forced)
        return triton_works(q.device)

    def attend(
        self,
        span: Span,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        scale: float,
        told: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerScores]]:
        """Outputs [heads, T, d_v] of the span's tokens, and for every observing method the scores of the document's keys, 0 where the span's
        probes do not look. Shapes as in `fused_replay`; told [kv_heads, T]: what the queries weigh, None for all alike."""
        from dropkv.kernels.fused_replay import fused_replay

        prepared = self._places(span, q, k, v)
        kinds = [kind for kind in self.kinds if kind is not None]
        if told is None:
            kinds = [ALIKE.get(kind, kind) for kind in kinds]
        outputs: Tensor | None = None
        known: dict[Kind, LayerScores] = {}
        for kind in sorted(set(kinds), key=ORDER.index) or [ORDER[-1]]:
            if kind in known:
                continue
            every, weights = kind in ("every", "told"), told if kind in ALIKE else None
            odds = every or kind == "step"
            outputs, raw = fused_replay(
                q, k, v, own_k, own_v, prepared, scale=scale, odds=odds, every=every, told=weights
            )
            if not every:
                known[kind] = LayerScores(raw)
                continue
            step, p, summed = raw
            known[kind] = LayerScores(step, torch.stack([p, summed]))
            if kind == "every":
                known |= {"step": LayerScores(step), "p": LayerScores(p)}
            else:
                known["told p"] = LayerScores(p)
        assert outputs is not None
        return outputs, [known[kind] for kind in kinds]

    def _places(self, span: Span, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        from dropkv.kernels.fused_replay import prepare

        shape = (span.start, span.stop, len(q) // len(k), q.shape[-1], v.shape[-1], q.device)
        if shape not in self._prepared:
            self._prepared[shape] = prepare(
                segments_of(span.probes), len(q) // len(k), max(q.shape[-1], v.shape[-1]), q.device
            )
        return self._prepared[shape]


def segments_of(probes: Sequence[Probe]) -> list[tuple[int, ...]]:
    """For each probe (start, stop, observing) among all probes' tokens, and the document ranges that it scores and sees besides."""
    found: list[tuple[int, ...]] = []
    start = 0
    for probe in probes:
        stop = start + len(probe.ids)
        observing = start if probe.observing is None else max(start, stop - probe.observing)
        (seen,) = probe.seen or ((0, 0),)
        found.append((start, stop, observing, *probe.scored, *seen))
        start = stop
    return found
