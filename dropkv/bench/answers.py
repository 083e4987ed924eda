"""Many answers at once from the caches of a few documents: every row has a document, a question and its own kept set.

For measuring accuracy only. Rows of one document share its full keys and values, and a kept set is a mask over them: all rows of a document
are the queries of one attention, so a hundred methods and budgets cost little more than one. A test checks that the answers are those
of the real, pruned cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.models import Model


@dataclass(frozen=True)
class Row:
    """One answer to give: tokens appended behind document number `document`, and what is kept of it, bool [layers, kv_heads, n]."""

    document: int
    tokens: tuple[int, ...]
    keep: Tensor


class MaskedRun:
    """The run of a batch: rows are [documents, rows per document]; new tokens see kept entries, valid tail tokens, and themselves.

    keys, values: per layer [documents, kv_heads, n, d]. keep: bool [layers, documents, rows, kv_heads, n]. The tail is [rows in all, kv_heads,
    capacity, d] per layer; `filled` int64 [1] is where the next tokens go, `hidden` bool [rows in all, capacity] marks padding.
    """

    def __init__(
        self, model: Model, keys: Sequence[Tensor], values: Sequence[Tensor], keep: Tensor, capacity: int
    ) -> None:
        self.keys, self.values = keys, values
        self.documents, self.rows = keep.shape[1], keep.shape[2]
        total = self.documents * self.rows
        # from here on a kept set is what is added to logits: rows of one document stand together, as [documents, kv_heads, rows, 1, n]
        self.blocked = [_blocked(one.transpose(1, 2).unsqueeze(3), like) for one, like in zip(keep, keys, strict=True)]
        self.tail_keys = [k.new_zeros((total, k.shape[1], capacity, k.shape[3])) for k in keys]
        self.tail_values = [v.new_zeros((total, v.shape[1], capacity, v.shape[3])) for v in values]
        self.hidden = torch.zeros((total, capacity), dtype=torch.bool, device=model.device)
        self.filled = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.line = torch.arange(capacity, device=model.device)

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
        q = q.reshape(total, kv_heads, group * t, -1)

        # all rows of a document are queries of one attention: [documents, kv_heads, rows * group * t, d]
        together = q.view(self.documents, self.rows, *q.shape[1:]).transpose(1, 2).flatten(2, 3)
        bias = self.blocked[layer].expand(-1, -1, -1, group * t, -1).flatten(2, 3)[..., : self.keys[layer].shape[2]]
        far, far_sum = attention_with_sums(together, self.keys[layer], self.values[layer], bias, scale, softcap)
        by_row = (self.documents, kv_heads, self.rows, group * t)
        far = far.reshape(*by_row, -1).transpose(1, 2).reshape(total, kv_heads, group * t, -1)
        far_sum = far_sum.reshape(by_row).transpose(1, 2).reshape(total, kv_heads, group * t)

        near, near_sum = self._tail(layer, q, place, group, scale, softcap)
        share = torch.sigmoid(far_sum - near_sum).unsqueeze(-1)
        out: Tensor = near + share * (far.to(near.dtype) - near)
        return out.reshape(total, heads, t, -1).to(v.dtype)

    def _tail(
        self, layer: int, q: Tensor, place: Tensor, group: int, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps over each row's own tail, for q [rows in all, kv_heads, group * t, d]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = (q @ self.tail_keys[layer].transpose(2, 3)).to(wide).mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        future = self.line > place.unsqueeze(1).repeat(group, 1)  # [group * t, capacity]
        logits.masked_fill_(future | self.hidden.view(len(q), 1, 1, -1), -torch.inf)
        sums = logits.logsumexp(-1)
        weights = (logits - sums.unsqueeze(-1)).exp_().nan_to_num_(0)  # a padding token before all others sees nothing
        return (weights.to(q.dtype) @ self.tail_values[layer]).to(wide), sums


def _blocked(keep: Tensor, like: Tensor) -> Tensor:
    """0 where keep [..., n], a number that leaves no weight elsewhere; [..., n rounded up to 16], as the fused operators want rows to begin."""
    nothing = torch.finfo(like.dtype).min / 2
    n = keep.shape[-1]
    bias = torch.full((*keep.shape[:-1], -(-n // 16) * 16), nothing, dtype=like.dtype, device=like.device)
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


def answer_rows(
    model: Model,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    rows: Sequence[Row],
    *,
    starts: Sequence[int],
    max_new_tokens: int,
    graphs: bool = True,
) -> list[list[int]]:
    """Greedy answers (token ids without the stop token) of all rows.

    keys, values: per layer [documents, kv_heads, n, d]. starts: per row, the position of its first token. Rows must name each document
    equally often. On a GPU the decode step is captured in a CUDA graph.
    """
    documents = keys[0].shape[0]
    order = sorted(range(len(rows)), key=lambda index: rows[index].document)
    each = len(rows) // documents
    if [rows[index].document for index in order] != [number for number in range(documents) for _ in range(each)]:
        raise ValueError("every document needs the same number of rows")
    longest = max(len(row.tokens) for row in rows)
    keep = torch.stack([rows[index].keep for index in order]).to(model.device)  # [rows, layers, kv_heads, n]
    keep = keep.view(documents, each, *keep.shape[1:]).permute(2, 0, 1, 3, 4)
    run = MaskedRun(model, keys, values, keep, longest + max_new_tokens)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    positions = torch.zeros((len(rows), longest), dtype=torch.int64)
    for place, index in enumerate(order):
        tokens = rows[index].tokens
        pad = longest - len(tokens)
        ids[place, pad:] = torch.tensor(tokens)
        positions[place, pad:] = torch.arange(starts[index], starts[index] + len(tokens))
        run.hidden[place, :pad] = True
    stops = torch.tensor(sorted(model.stop_ids), device=model.device)
    with torch.inference_mode():
        logits = run_logits(model.network, ids.to(model.device), positions.to(model.device), run)
        run.filled += longest
        token = logits[:, -1].argmax(-1, keepdim=True)
        position = positions[:, -1:].to(model.device) + 1
        produced = _decode(model, run, token, position, stops, max_new_tokens, graphs and model.device.type == "cuda")
    answers: list[list[int]] = [[] for _ in rows]
    for place, index in enumerate(order):
        for one in produced[place]:
            if one in model.stop_ids:
                break
            answers[index].append(one)
    return answers


def _decode(
    model: Model, run: MaskedRun, token: Tensor, position: Tensor, stops: Tensor, count: int, graphs: bool
) -> list[list[int]]:
    produced = [token]
    done = torch.isin(token, stops)
    token, position = token.clone(), position.clone()

    def step() -> Tensor:
        return run_logits(model.network, token, position, run)[:, -1].argmax(-1, keepdim=True)

    graph: torch.cuda.CUDAGraph | None = None
    captured: Tensor | None = None
    for number in range(1, count):
        if number % 8 == 0 and bool(done.all()):  # a look at the answers costs a wait, so only now and then
            break
        if graphs and number == 2:  # the first step has warmed everything up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
        if graph is not None and captured is not None:
            graph.replay()
            following = captured.clone()
        else:
            following = step()
        run.filled += 1
        position += 1
        token.copy_(following)
        produced.append(following)
        done |= torch.isin(following, stops)
    return [list(map(int, row)) for row in torch.cat(produced, dim=1).tolist()]
