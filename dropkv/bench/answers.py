"""Many answers at once from the caches of a few documents: every row has a document, a question and its own kept set.

For measuring accuracy only. Rows of one document share its full keys and values, and a kept set is a mask over them: all rows of a document
are the queries of one attention, so a hundred methods and budgets cost little more than one. A test checks that the answers are those
of the real, pruned cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.models import Model

ALIGNED = 16  # the fused operators want rows of a mask to begin at multiples of this
WIDEST = 256  # dimensions of a head that the kernels serve
LOOK = 12  # decode steps between two looks at which answers have ended


Decided = Callable[[int, Sequence[int]], bool]  # row, its tokens so far -> whether what follows them is of no interest


@dataclass(frozen=True)
class Row:
    """One answer to give: tokens appended behind document number `document`, and what is kept of it, bool [layers, kv_heads, n]."""

    document: int
    tokens: tuple[int, ...]
    keep: Tensor


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
        self.tail_keys = [k.new_zeros((total, k.shape[1], capacity, k.shape[3])) for k in keys]
        self.tail_values = [v.new_zeros((total, v.shape[1], capacity, v.shape[3])) for v in values]
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

    def select(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Go on with these rows alone, int64 [rows], those of one document after another's; counts: how many each has."""
        self.keep, self.hidden, self.counts = self.keep[rows], self.hidden[rows], list(counts)
        for layer in range(len(self.keys)):  # one after the other, so that there is never twice all of it
            self.tail_keys[layer] = self.tail_keys[layer][rows]
            self.tail_values[layer] = self.tail_values[layer][rows]
        self._tiles = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [rows in all, heads, t, d_v]: over the kept entries and over the tail, put together by their log-sum-exps."""
        total, heads, t, _ = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        place = self.filled + torch.arange(t, device=q.device)
        self.tail_keys[layer].index_copy_(2, place, k)
        self.tail_values[layer].index_copy_(2, place, v)
        if layer == 0:
            self._seen = self._visible(place)
        if self.kernels and softcap is None:
            return self._by_kernel(layer, q, scale)
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
        tail_keys, tail_values = (x[layer][:, :, : self.reach] for x in (self.tail_keys, self.tail_values))
        bias = _blocked(self._seen.unsqueeze(1).repeat(1, 1, group, 1), k).expand(-1, kv_heads, -1, -1)
        near, near_sum = attention_with_sums(q, tail_keys, tail_values, bias, scale, softcap)
        share = torch.sigmoid(far_sum - near_sum).unsqueeze(-1).to(near.dtype)
        out = torch.lerp(near, far.to(near.dtype), share.expand_as(near))
        return out.reshape(total, heads, t, -1).to(v.dtype)

    def _by_kernel(self, layer: int, q: Tensor, scale: float) -> Tensor:
        from dropkv.kernels.masked_decode import masked_decode, tiles_of
        from dropkv.kernels.masked_prompt import masked_prompt

        document = (self.keys[layer], self.values[layer], self.keep[:, layer])
        tails = (self.tail_keys[layer], self.tail_values[layer])
        group = q.shape[1] // self.keys[layer].shape[1]
        if q.shape[2] > 1:
            q = q if q.stride(-1) == 1 else q.contiguous()
            return masked_prompt(q, *document, *tails, self._seen.contiguous(), self.counts, scale=scale)
        if group not in self._tiles:
            self._tiles[group] = tiles_of(self.counts, group, q.device)
        tiles = self._tiles[group]
        return masked_decode(
            q[:, :, 0].contiguous(), *document, *tails, self._seen[:, 0], tiles, scale=scale
        ).unsqueeze(2)

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


def any_rows(model: Model) -> bool:
    """Whether documents may have different numbers of rows: where the kernels serve all layers."""
    widest = max(max(layer.d_k, layer.d_v) for layer in model.geometry)
    capped = getattr(model.network.config, "attn_logit_softcapping", None) is not None
    return model.device.type == "cuda" and widest <= WIDEST and not capped


def answer_rows(
    model: Model,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    rows: Sequence[Row],
    *,
    starts: Sequence[int],
    max_new_tokens: int,
    graphs: bool = True,
    decided: Decided | None = None,
    kernels: bool | None = None,
) -> list[list[int]]:
    """Greedy answers (token ids without the stop token) of all rows; those that `decided` says enough of may end early.

    keys, values: per layer [documents, kv_heads, n, d]. starts: per row, the position of its first token. Rows must name each document
    equally often, except where `any_rows`. kernels: as in `MaskedRun`. On a GPU the decode step is captured in a CUDA graph.
    """
    documents = keys[0].shape[0]
    order = sorted(range(len(rows)), key=lambda index: rows[index].document)
    counts = [0] * documents
    for row in rows:
        counts[row.document] += 1
    if len(set(counts)) > 1 and not (any_rows(model) if kernels is None else kernels):
        raise ValueError("every document needs the same number of rows")
    longest = max(len(row.tokens) for row in rows)
    keep = torch.stack([rows[index].keep for index in order]).to(model.device)  # [rows, layers, kv_heads, n]
    run = MaskedRun(model, keys, values, keep, longest + max_new_tokens, counts, kernels)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    positions = torch.zeros((len(rows), longest), dtype=torch.int64)
    for place, index in enumerate(order):
        tokens = rows[index].tokens
        pad = longest - len(tokens)
        ids[place, pad:] = torch.tensor(tokens)
        positions[place, pad:] = torch.arange(starts[index], starts[index] + len(tokens))
        run.hidden[place, :pad] = True
    run.expect(longest)
    with torch.inference_mode():
        logits = run_logits(model.network, ids.to(model.device), positions.to(model.device), run)
        run.filled += longest
        first = logits[:, -1].argmax(-1, keepdim=True)
        position = positions[:, -1:].to(model.device) + 1
        known = None if decided is None else (lambda place, tokens: decided(order[place], tokens))
        decoding = Decoding(model, run, first, position, graphs and model.device.type == "cuda", known)
        produced = decoding.finish(max_new_tokens)
    answers: list[list[int]] = [[] for _ in rows]
    for index, chosen in zip(order, produced, strict=True):
        for one in chosen:
            if one in model.stop_ids:
                break
            answers[index].append(one)
    return answers


class Decoding:
    """The decode steps of a batch. Now and then rows that have ended are left out, so that few long answers do not cost as much as many."""

    def __init__(
        self,
        model: Model,
        run: MaskedRun,
        token: Tensor,
        position: Tensor,
        graphs: bool,
        decided: Decided | None = None,
    ) -> None:
        self.model, self.run, self.graphs, self.decided = model, run, graphs, decided
        self.stops = torch.tensor(sorted(model.stop_ids), device=model.device)
        self.token, self.position = token.clone(), position.clone()
        self.done = torch.isin(token, self.stops)  # [rows, 1]
        self.rows = torch.arange(len(token), device=model.device)  # which of the first rows the present ones are
        self.fresh = [token]  # tokens chosen since rows were last left out
        self.answers: list[list[int]] = [[] for _ in range(len(token))]

    def finish(self, count: int) -> list[list[int]]:
        """At most `count` tokens for every row, the first included; what follows a stop token is of no meaning."""
        number, filled = 1, int(self.run.filled)
        while number < count and not bool(self.done.all()):  # a look at the answers costs a wait, so only now and then
            if number > 1 and not self._leave_out():
                break
            steps = min(LOOK, count - number)
            self.run.expect(filled + number - 1 + steps)
            self._steps(steps)
            number += steps
        self._collect()
        return self.answers

    def _step(self) -> Tensor:
        logits = run_logits(self.model.network, self.token, self.position, self.run, widened=False)
        return logits[:, -1].argmax(-1, keepdim=True)

    def _steps(self, count: int) -> None:
        graph: torch.cuda.CUDAGraph | None = None
        captured: Tensor | None = None
        for number in range(count):
            if self.graphs and number == 1 and count > 3:  # the first step has warmed everything up
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = self._step()
            if graph is not None and captured is not None:
                graph.replay()
                following = captured.clone()
            else:
                following = self._step()
            self.run.filled += 1
            self.position += 1
            self.token.copy_(following)
            self.fresh.append(following)
            self.done |= torch.isin(following, self.stops)

    def _leave_out(self) -> bool:
        """Go on with the rows that have not ended, and where documents need as many rows as others with some that have; False: all have."""
        self._collect()
        over = self.done.flatten().tolist()
        if self.decided is not None:
            rows = self.rows.tolist()
            over = [own or self.decided(row, self.answers[row]) for row, own in zip(rows, over, strict=True)]
        by_document, start = [], 0
        for count in self.run.counts:
            places = range(start, start + count)
            by_document.append(sorted(places, key=over.__getitem__))  # those that go on first
            start += count
        left = [sum(not over[place] for place in places) for places in by_document]
        if max(left) == 0:
            return False
        if not self.run.kernels:
            left = [max(left)] * len(left)
        chosen = [place for places, count in zip(by_document, left, strict=True) for place in places[:count]]
        at = torch.tensor(chosen, device=self.token.device)
        self.run.select(at, left)
        self.token, self.position, self.rows = self.token[at], self.position[at], self.rows[at]
        self.done = torch.tensor([[over[place]] for place in chosen], device=at.device)
        return True

    def _collect(self) -> None:
        if self.fresh:
            for row, tokens in zip(self.rows.tolist(), torch.cat(self.fresh, dim=1).tolist(), strict=True):
                self.answers[row].extend(tokens)
        self.fresh = []
