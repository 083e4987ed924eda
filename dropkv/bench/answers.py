"""Many answers at once from the caches of a few documents: every row has a document, a question and its own kept set.

For measuring accuracy only. Rows of one document share its full keys and values, and a kept set is a mask over them: the logits of all rows
of a document are one matrix product, so a hundred methods and budgets cost little more than one. A test checks that the answers are those
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
        self.blocked = torch.zeros(keep.shape, dtype=keys[0].dtype, device=model.device).masked_fill_(~keep, -torch.inf)
        self.tail_keys = [k.new_zeros((total, k.shape[1], capacity, k.shape[3])) for k in keys]
        self.tail_values = [v.new_zeros((total, v.shape[1], capacity, v.shape[3])) for v in values]
        self.hidden = torch.zeros((total, capacity), dtype=torch.bool, device=model.device)
        self.filled = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.line = torch.arange(capacity, device=model.device)
        self.seen = 0

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [rows in all, heads, t, d_v]."""
        self.seen += 1
        q = q.contiguous()  # comes transposed
        total, heads, t, _ = q.shape
        kv_heads, n = k.shape[1], self.keys[layer].shape[2]
        group = heads // kv_heads
        place = self.filled + torch.arange(t, device=q.device)
        self.tail_keys[layer].index_copy_(2, place, k)
        self.tail_values[layer].index_copy_(2, place, v)
        # rows of a document become one matrix: [documents, kv_heads, rows * group * t, d]
        grouped = q.view(self.documents, self.rows, kv_heads, group, t, -1)
        together = grouped.permute(0, 2, 1, 3, 4, 5).reshape(self.documents, kv_heads, self.rows * group * t, -1)
        prefix = (together @ self.keys[layer].transpose(2, 3)).view(self.documents, kv_heads, self.rows, group, t, n)
        tail = q.view(total, kv_heads, group * t, -1) @ self.tail_keys[layer].transpose(2, 3)
        capacity = tail.shape[-1]
        future = self.line > place.unsqueeze(1)  # [t, capacity]
        tail = tail.view(total, kv_heads, group, t, capacity)
        logits = torch.empty((total, kv_heads, group, t, n + capacity), dtype=torch.float32, device=q.device)
        by_document = logits.view(self.documents, self.rows, kv_heads, group, t, n + capacity)
        by_document[..., :n] = prefix.permute(0, 2, 1, 3, 4, 5)
        logits[..., n:] = tail
        logits *= scale
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        by_document[..., :n] += self.blocked[layer].view(self.documents, self.rows, kv_heads, 1, 1, n)
        logits[..., n:].masked_fill_(future | self.hidden.view(total, 1, 1, 1, capacity), -torch.inf)
        weights = torch.softmax(logits, dim=-1).to(q.dtype)
        mine = weights.view(self.documents, self.rows, kv_heads, group, t, -1)[..., :n].permute(0, 2, 1, 3, 4, 5)
        out = (mine.reshape(self.documents, kv_heads, -1, n) @ self.values[layer]).view(
            self.documents, kv_heads, self.rows, group, t, -1
        )
        own = (weights[..., n:].reshape(total, kv_heads, group * t, capacity) @ self.tail_values[layer]).view(
            total, kv_heads, group, t, -1
        )
        return (out.permute(0, 2, 1, 3, 4, 5).reshape(total, kv_heads, group, t, -1) + own).reshape(total, heads, t, -1)


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
