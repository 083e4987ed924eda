"""Run by test_fused_replay.py in a process of its own: a whole prefill with the fused kernels against one without, or against float64.

python check_fused_prefill.py DTYPE [DEVICE]
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

sys.path.insert(0, os.getcwd())
import torch

from dropkv.fidelity import HeldOut
from dropkv.keeper import Stands
from dropkv.methods import get
from dropkv.observers.questions import plan_questions
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import read
from dropkv.prompts import Seam
from tests import tiny


class Scores:
    """A reader that keeps the scores of every layer."""

    def __init__(self, methods):
        self.methods = methods
        self.found = []

    def full(self, layer, context, scores):
        parts = [part for one in scores for part in (one.raw, *(() if one.beside is None else one.beside))]
        self.found.append(torch.stack(parts).double().cpu())

    def sliding(self, layer, k, v):
        raise AssertionError


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    gpu = device.type == "cuda"
    n, chunk, size = (900, 128, 512) if gpu else (90, 32, 80)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    shape = dict(max_position_embeddings=2048, hidden_size=256, head_dim=64, initializer_range=0.08) if gpu else {}
    model = tiny.model("mistral", **shape)
    model.network.to(dtype)
    document = torch.randint(3, 590, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    seam = Seam.of(model.tokenizer, name=model.id)
    questions = [seam.question_ids(text) for text in ("What is the code?", "Who kept the ledger, and where?")]
    held = HeldOut(tuple(document[:20]), tuple(range(3, 20)), ((0, 20),))
    for name, observation in (
        ("replay", plan_replays(seam, document, 6, chunk)),
        ("questions", plan_questions(["a", "b"], questions, n, "q.txt")),
        ("tail", plan_tail(8, n)),
    ):
        more = {"questions": [get("auto")], "replay": [get("auto-told"), *Stands(n, told=True).methods]}
        methods = [get("adadropkv"), get("snapkv"), *more.get(name, [])]
        if name != "tail":
            methods = [method.under_replay(6) for method in methods]
        model.network.to(dtype).to(device)
        moved = replace(model, device=device, dtype=dtype, layer_devices=(device,) * len(model.geometry))
        mine, theirs = Scores(methods), Scores(methods)
        got = read(moved, document, observation, mine, slice_tokens=size, fused=None if gpu else True, held=held)
        if gpu:
            model.network.double().cpu()
            moved = replace(model, dtype=torch.float64)
        want = read(moved, document, observation, theirs, slice_tokens=size, fused=False, held=held)
        for layer, (a, b) in enumerate(zip(mine.found, theirs.found, strict=True)):
            error = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
            print(name, layer, f"{error:.1e}")
            assert error < (2 if name == "tail" else 1) * tolerance  # whose scores are squares
        losses = (torch.tensor(got.predictions.nll) - torch.tensor(want.predictions.nll)).abs().max()
        print(name, "losses", f"{float(losses):.1e}")
        assert float(losses) < 10 * tolerance
        assert got.prefill > 0 and got.score > 0 and got.held > 0
    print("all equal")


if __name__ == "__main__":
    main()
