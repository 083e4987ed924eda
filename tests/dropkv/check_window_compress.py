"""Run on a GPU by test_window_kernels.py: a prefill with the kernels keeps what one without them keeps.

python tests/dropkv/check_window_compress.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

sys.path.insert(0, os.getcwd())
import torch

from dropkv.kernels import dispatch
from dropkv.methods import get
from dropkv.observers.question import plan_question
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from tests import tiny

N = 150


def main() -> None:
    for family in ("llama", "gemma2", "qwen2-sliding"):
        made = tiny.model(family)
        model = replace(made, network=made.network.to("cuda"), device=torch.device("cuda"))
        document = torch.randint(3, tiny.VOCABULARY - 10, (N,), generator=torch.Generator().manual_seed(1)).tolist()
        seam = Seam.of(model.tokenizer, name=model.id)
        question = plan_question(seam.question_ids("Who kept the ledger?"), N, 8)
        plans = [
            (
                "tail",
                plan_tail(8, N),
                ("dropkv", "adadropkv", "snapkv", "laprox", "tova", "criticalkv", "pyramidkv", "cake"),
            ),
            ("question", question, ("adadropkv", "caote")),
            ("replay", plan_replays(seam, document, 6, 60), ("adadropkv", "kvzip")),
        ]
        for kind, observation, names in plans:
            for name in names:
                method = get(name).under_replay(6) if kind == "replay" else get(name)
                fast = prefill(model, document, observation, method, 40)
                works, dispatch.triton_works = dispatch.triton_works, lambda device: False
                plain = prefill(model, document, observation, method, 40)
                dispatch.triton_works = works
                for mine, theirs in zip(fast.layers, plain.layers, strict=True):
                    where = (family, kind, name)
                    assert torch.equal(mine.offsets, theirs.offsets) and torch.equal(
                        mine.positions, theirs.positions
                    ), where
                    assert torch.equal(mine.admit, theirs.admit), where
                    assert torch.allclose(mine.scores, theirs.scores, rtol=1e-4, atol=1e-9), where
                    assert torch.allclose(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5), where
        print(family, "equal")
    print("all equal")


if __name__ == "__main__":
    main()
