"""The attention of many answers at once: every row looks at what it keeps of its document, as a mask over the whole of it, and at its own tokens.

For measuring accuracy only. Rows of one document share its full keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.decode.tails import Tails
from dropkv.models import Model

ALIGNED = 16  # the fused operators want rows of a mask to begin at multiples of this
WIDEST = 256  # dimensions of a head that the kernels serve


def any_rows(model: Model) -> bool:
    """Whether documents may have different numbers of rows: where the kernels serve all layers."""
    widest = max(max(layer.d_k, layer.d_v) for layer in model.geometry)
    capped = getattr(model.network.config, "attn_logit_softcapping", None) is not None
    return model.device.type == "cuda" and widest <= WIDEST and not capped


class MaskedRun:
    """The run of a batch, rows of one document together; new tokens see kept entries, valid tail tokens, and themselves.

    keys, values: per layer [documents, kv_heads, n, d]. keep: bool [layers, documents, rows, kv_heads, n], or with counts, the rows of every
    document, [rows in all, layers, kv_heads, n]. The tail is [rows in all, kv_heads, capacity, d] per layer; `filled` int64 [1] is where the next
    tokens go, `hidden` bool [rows in all, capacity] marks padding. kernels: whether those of Triton compute; None for where they can.
    """

    def __init__(
        self,
        model: Model,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        keep: Tensor,
        capacity: int,
        counts: Sequence[int] | None = None,
        kernels: bool | None = None,
    ) -> None:
        self.kernels = any_rows(model) if kernels is None else kernels
        self.keys, self.values = ([x.contiguous() for x in part] for part in (keys, values))
        if counts is None:
            counts = [keep.shape[2]] * keep.shape[1]
            keep = keep.permute(1, 2, 0, 3, 4).flatten(0, 1)
        self.keep, self.counts = keep, list(counts)  # [rows in all, layers, kv_heads, n]
        total, capacity = len(keep), -(-capacity // ALIGNED) * ALIGNED
        self.geometry = model.geometry
        self.tails = Tails(
            [k.new_zeros((total, k.shape[1], capacity, k.shape[3])) for k in keys],
            [v.new_zeros((total, v.shape[1], capacity, v.shape[3])) for v in values],
        )
        self.slots = torch.arange(total, dtype=torch.int32, device=model.device)
        self.lengths = torch.zeros_like(self.slots)  # `filled`, for every row
        self.pending: Tensor | None = None
        self.hidden = torch.zeros((total, capacity), dtype=torch.bool, device=model.device)
        self.filled = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.line = torch.arange(capacity, device=model.device)
        self.reach = 0  # tail entries that are looked at: those filled so far and those the next steps fill
        self._seen = self.hidden.unsqueeze(1)
        self._tiles: dict[int, Tensor] = {}

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.counts)

    def expect(self, tokens: int) -> None:
        """From now on look at the first so many tail entries, until the tails hold more."""
        self.reach = min(len(self.line), -(-tokens // ALIGNED) * ALIGNED)

    def advance(self, tokens: int) -> None:
        """So many tokens have come in."""
        self.filled += tokens
        self.lengths += tokens

    def select(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Go on with these rows alone, int64 [rows], those of one document after another's; counts: how many each has."""
        self.keep, self.hidden, self.counts = self.keep[rows], self.hidden[rows], list(counts)
        for tails in (self.tails.keys, self.tails.values):
            for layer, tail in enumerate(tails):  # one after the other, so that there is never twice all of it
                tails[layer] = tail[rows]
        self.slots, self.lengths = self.slots[: len(rows)], self.lengths[rows]
        self._tiles = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [rows in all, heads, t, d_v]: over the kept entries and over the tail, put together by their log-sum-exps."""
        total, heads, t, _ = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        place = self.filled + torch.arange(t, device=q.device)
        self.tails.keys[layer].index_copy_(2, place, k)
        self.tails.values[layer].index_copy_(2, place, v)
        if layer == 0:
            self._seen = self._visible(place)
        if self.kernels and softcap is None:
            return (
                self._prompt(layer, q, scale)
                if t > 1
                else self._one(layer, q[:, :, 0].contiguous(), scale).unsqueeze(2)
            )
        if len(set(self.counts)) > 1:
            raise ValueError("every document needs the same number of rows where no kernel serves")

        # a document's rows are the queries of one attention; query heads and tokens are its heads, which share keys, values and masks
        rows = self.counts[0]
        shape = (self.documents, rows, kv_heads, group, t)
        together = q.view(*shape, -1).permute(0, 2, 3, 4, 1, 5).reshape(-1, group * t, rows, q.shape[-1])
        kept = _blocked(self.keep[:, layer].view(*shape[:3], -1).transpose(1, 2), k)
        far_keys, far_values, bias = (
            x.flatten(0, 1).unsqueeze(1).expand(-1, group * t, -1, -1)
            for x in (self.keys[layer], self.values[layer], kept)
        )
        far, far_sum = attention_with_sums(
            together, far_keys, far_values, bias[..., : far_keys.shape[2]], scale, softcap
        )
        by_row = (self.documents, kv_heads, group, t, rows)
        far = far.reshape(*by_row, -1).permute(0, 4, 1, 2, 3, 5).reshape(total, kv_heads, group * t, -1)
        far_sum = far_sum.reshape(by_row).permute(0, 4, 1, 2, 3).reshape(total, kv_heads, group * t)

        q = q.reshape(total, kv_heads, group * t, -1)
        tail_keys, tail_values = (x[layer][:, :, : self.reach] for x in (self.tails.keys, self.tails.values))
        bias = _blocked(self._seen.unsqueeze(1).repeat(1, 1, group, 1), k).expand(-1, kv_heads, -1, -1)
        near, near_sum = attention_with_sums(q, tail_keys, tail_values, bias, scale, softcap)
        share = torch.sigmoid(far_sum - near_sum).unsqueeze(-1).to(near.dtype)
        out = torch.lerp(near, far.to(near.dtype), share.expand_as(near))
        return out.reshape(total, heads, t, -1).to(v.dtype)

    def over(self, layer: int, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention outputs [rows in all, heads, d_v] of one token per row, q [rows in all, heads, d], whose keys and values are in the tails."""
        assert softcap is None
        if layer == 0:
            self._seen = self._visible(self.filled)
        return self._one(layer, q, scale)

    def _one(self, layer: int, q: Tensor, scale: float) -> Tensor:
        from dropkv.kernels.masked_decode import masked_decode, tiles_of

        group = q.shape[1] // self.keys[layer].shape[1]
        if group not in self._tiles:
            self._tiles[group] = tiles_of(self.counts, group, q.device)
        return masked_decode(q, *self._parts(layer), self._seen[:, 0], self._tiles[group], scale=scale)

    def _prompt(self, layer: int, q: Tensor, scale: float) -> Tensor:
        from dropkv.kernels.masked_prompt import masked_prompt

        q = q if q.stride(-1) == 1 else q.contiguous()
        return masked_prompt(q, *self._parts(layer), self._seen.contiguous(), self.counts, scale=scale)

    def _parts(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and mask of the documents, and the tails."""
        tails = (self.tails.keys[layer], self.tails.values[layer])
        return (self.keys[layer], self.values[layer], self.keep[:, layer], *tails)

    def _visible(self, place: Tensor) -> Tensor:
        """Which tail tokens those at `place` see, bool [rows in all, t, reach]; the same in all layers."""
        future = self.line[: self.reach] > place.unsqueeze(1)  # [t, reach]
        return ~(future | self.hidden[:, : self.reach].unsqueeze(1))


def _blocked(keep: Tensor, like: Tensor) -> Tensor:
    """0 where keep [..., n], a number that leaves no weight elsewhere; [..., n rounded up], as the fused operators want rows to begin."""
    nothing = torch.finfo(like.dtype).min / 2
    n = keep.shape[-1]
    bias = torch.full((*keep.shape[:-1], -(-n // ALIGNED) * ALIGNED), nothing, dtype=like.dtype, device=like.device)
    bias[..., :n].masked_fill_(keep.to(like.device), 0)
    return bias


def attention_with_sums(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + bias) v [b, h, m, d_v] and the log-sum-exps [b, h, m] in float32 or wider; bias [b, h, m, n].

    PyTorch's fused operators do it where they can, and never write the logits.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    plain = softcap is not None or k.shape[-1] != v.shape[-1]
    if q.device.type == "cuda" and not plain and q.dtype != torch.float64:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        out, sums, *_ = operator(q, k, v, bias, True, scale=scale)
        return out, sums[..., : q.shape[2]].to(wide)
    if q.device.type == "cpu" and not plain:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = operator(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, sums.to(wide)
    logits = (q @ k.transpose(2, 3)).to(wide).mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    logits += bias
    sums = logits.logsumexp(-1)
    return (logits - sums.unsqueeze(-1)).exp_().to(v.dtype) @ v, sums
