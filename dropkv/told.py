"""How little a document's own words tell of its next token: nats from a plain reading, and what replayed queries weigh by them.

The document runs through the layers slice by slice, as in a prefill, with nothing observed and nothing kept but one layer's keys and values. The
final norm and the model's head then run over few tokens at a time, so that no tokens x vocabulary of a document is ever there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dropkv.attention import run_decoder, run_logits, sliced_layers
from dropkv.devices import wait_for
from dropkv.errors import ModelError
from dropkv.head import head_rows, known_states
from dropkv.kernels.causal import causal_attention
from dropkv.models import LayerGeometry, Model
from dropkv.observers import Observation, Probe
from dropkv.spans import Cuts, Span

Progress = Callable[[int, int], None]


def weighs(observation: Observation) -> bool:
    """Whether an observation has queries that nats can weigh: those of replays."""
    return observation.description.get("name") == "replay"


def weights(told: Tensor, probe: Probe) -> Tensor:
    """What the tokens of a replay weigh [rows, tokens], from nats [rows, n]: each the nats of the token that it predicts.

    The probe's last tokens are those of its scored range again; the token before them predicts the first. The others, and the last of all, which
    has nothing to predict, weigh 0.
    """
    start, stop = probe.scored
    own = told.new_zeros((len(told), len(probe.ids)))
    own[:, -1 - (stop - start) : -1] = told[:, start:stop]
    return own


def nats_of(
    model: Model, documents: Sequence[Sequence[int]], slice_tokens: int, progress: Progress | None = None
) -> Tensor:
    """-ln of the probability of every token given those before it [documents, n], float32 (float64 for float64 models), 0 for the first.

    documents: of one length. slice_tokens: what a layer computes of each at once. Raises ModelError when a layer bypasses the seam, or when nats are
    not finite.
    """
    count, n = len(documents), len(documents[0])
    ids = torch.tensor([list(document) for document in documents], device=model.device)
    positions = torch.arange(n, device=model.device).expand(count, -1)
    run = _Plain(model.geometry, n, progress)
    states: list[Tensor] = []
    with torch.inference_mode():
        with sliced_layers(model.network, Cuts(n, (), slice_tokens), run.enter, run.leave, rows=1, taken=states.append):
            run_decoder(model.network, ids, positions, run)
        if run.done != len(model.geometry) or not states:
            raise ModelError(
                f"only {run.done} of {len(model.geometry)} layers of {model.id} passed through dropkv: use another model"
            )
        # one document after another, as if they were one: what the last token of one predicts is thrown away
        hidden, ids, positions = (part.reshape(1, count * n, *part.shape[2:]) for part in (states[0], ids, positions))
        found = [hidden.new_zeros(1, dtype=torch.promote_types(hidden.dtype, torch.float32))]
        rows = head_rows(model)
        for start in range(0, count * n - 1, rows):
            part = slice(start, min(count * n - 1, start + rows))
            with known_states(model.network, hidden[:, part]):
                logits = run_logits(model.network, ids[:, part], positions[:, part], run, keep=0)[0]
            targets = ids[0, part.start + 1 : part.stop + 1].to(logits.device)
            found.append(cross_entropy(logits, targets, reduction="none"))
    wait_for(model.devices)
    told = torch.cat([nats.to(found[-1].device) for nats in found]).view(count, n)
    told[:, 0] = 0
    if not bool(torch.isfinite(told).all()):
        raise ModelError(
            f"{model.id} predicts what is not finite: nothing was written, use another --dtype or --method auto"
        )
    return told


class _Plain:
    """The run of a plain reading: causal attention in every layer, the buffers of one layer."""

    def __init__(self, geometry: Sequence[LayerGeometry], n: int, progress: Progress | None) -> None:
        self.geometry, self.n, self.progress = geometry, n, progress
        self.done = 0
        self._span = Span(0, 0)
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def enter(self, layer: int, span: Span) -> None:
        """A layer is about to compute a span."""
        self._span = span

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """The attention outputs of a slice, of all documents, whose heads follow one another as if one layer had them all."""
        start, stop, shape = self._span.start, self._span.stop, q.shape
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        if self._k is None or self._v is None:
            self._k, self._v = (part.new_empty((len(part), self.n, part.shape[-1])) for part in (k, v))
        self._k[:, start:stop], self._v[:, start:stop] = k, v
        geometry = self.geometry[layer]
        reach = geometry.window if geometry.kind == "sliding" else None
        seen_k, seen_v = self._k[:, :stop], self._v[:, :stop]
        out = causal_attention(q, seen_k, seen_v, scale=scale, reach=reach, softcap=softcap)
        return out.view(*shape[:2], *out.shape[1:])

    def leave(self, layer: int) -> None:
        """All slices of a layer have run."""
        if self._k is None:
            raise ModelError(f"layer {layer} did not hand its attention to dropkv: use another model")
        self._k = self._v = None
        self.done += 1
        if self.progress is not None:
            self.progress(layer + 1, len(self.geometry))
