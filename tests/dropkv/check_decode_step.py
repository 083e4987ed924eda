"""Run by test_fused_decode.py in a process of its own: whether Triton interprets is decided when a kernel is made.

Steps by the kernels, fused layers included, against steps of the plain run: the same logits at every step, rows of several documents.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
from itertools import islice

import torch

import dropkv
from dropkv.cache import Tail
from dropkv.decode.batch import Asked, Batch, run_batch
from dropkv.decode.captured import CapturedBatch, tokens_behind
from dropkv.decode.fused import fits
from dropkv.decode.kernel_run import KernelRun
from dropkv.decode.rows import Piece, forward_rows
from dropkv.decode.sampling import Chooser, draws
from dropkv.decode.step import RowState, Step
from dropkv.decode.tails import Tails
from dropkv.generate import Session
from dropkv.kernels import skinny
from dropkv.models import wrap_model
from dropkv.prompts import Seam
from dropkv.settings import Sampling
from tests import tiny

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 2
ASKED = 4 if DEVICE == "cpu" else None  # tokens of a question
STEPS = 1 if DEVICE == "cpu" else 6


def main() -> None:
    if DEVICE == "cpu":  # the interpreter takes milliseconds for every program
        for launcher in (skinny.products, skinny.gated):
            launcher.__kwdefaults__.update(columns=64, depth=128)
    for family in sys.argv[1:]:
        network = tiny.network(family)
        if family == "qwen3":
            tiny.vary(network)
        model = wrap_model(network.to(DEVICE), tiny.tokenizer(), id=f"tiny-{family}")
        prefixes = [
            dropkv.compress(text, model=tiny.model(family), budget=0.5, observe="tail", fidelity=False)
            .session()
            .prefix.to(model.device, model.dtype)
            for text in (TEXT, "A lighthouse stands on the cliff. " * 6)
        ]
        whose = [prefixes[0], prefixes[1], prefixes[0]]
        ids = [[5, 6, 7], [8] * (6 if DEVICE == "cpu" else 30), [9]]
        tails = [Tails.of(model.geometry, model.devices, model.dtype, 4, 48) for _ in range(2)]
        for one in tails[:1]:
            logits = forward_rows(model, one, [Piece(row, whose[row], 0, ids[row]) for row in range(3)])
        tokens = logits.argmax(-1).tolist()
        reader = KernelRun(model, tails[1], prefixes, 64)
        again = reader.read(model, [Piece(row, whose[row], 0, ids[row]) for row in range(3)])
        assert float((again - logits).abs().max() / logits.abs().max()) < 1e-4
        step = Step(model, tails[1], prefixes, 4, sampled=False)
        states = [RowState(whose[row], tokens[row], len(ids[row])) for row in range(3)]
        step.place(states)
        for number in range(STEPS):
            pieces = [Piece(row, whose[row], len(ids[row]) + number, [tokens[row]]) for row in range(3)]
            logits = forward_rows(model, tails[0], pieces)
            got = step.launch().tokens()[:3]
            error = float((step.logits[:3] - logits).abs().max() / logits.abs().max())
            assert error < (1e-5 if DEVICE == "cpu" else 1e-4), (family, number, error)
            tokens = logits.argmax(-1).tolist()
            assert got == tokens, (family, number)
        for layer in range(len(model.geometry)):
            for row in range(3):
                part = slice(0, len(ids[row]) + STEPS)
                for mine, theirs in ((tails[1].keys, tails[0].keys), (tails[1].values, tails[0].values)):
                    torch.testing.assert_close(
                        mine[layer][row, :, part], theirs[layer][row, :, part], atol=1e-5, rtol=1e-5
                    )
        print(family, "fused" if fits(model) else "plain", f"{error:.1e}")

        if family != sys.argv[1]:
            continue

        session = Session(model, Seam.of(model.tokenizer, name=family), prefixes[0])
        limits = [2, 4, 1] if DEVICE == "cpu" else [2, 40, 1, 30, 17, 60, 5, 33, 50, 8, 9, 25]
        warm = [Sampling(max_new_tokens=limit, temperature=float(limit % 4 == 0), seed=limit) for limit in limits]
        questions = [f"Who kept the ledger {limit}?" for limit in limits]
        asked = [
            Asked(prefixes[0], tuple(session.question_ids(question)[:ASKED]), one, one.max_new_tokens)
            for question, one in zip(questions, warm, strict=True)
        ]
        rows = 2 if DEVICE == "cpu" else 8
        batch = CapturedBatch(model, rows, 112)
        rows = sorted(run_batch(batch, asked), key=lambda row: row.number)
        plain = sorted(run_batch(Batch(model, 3, 112), asked), key=lambda row: row.number)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        assert [row.stopped for row in rows] == [row.stopped for row in plain]
        if DEVICE != "cpu":
            assert batch._step._graph is not None
            for _ in range(2):  # the second time with a graph of the first
                got = [session.ask(question, one) for question, one in zip(questions, warm, strict=True)]
                assert [one.text for one in got] == [session.text(row.tokens).strip() for row in plain]
            assert session._idle[0].step._graph is not None

        for question, one in list(zip(questions, warm, strict=True))[
            : 1 if DEVICE == "cpu" else 3
        ]:  # one answer, with steps ahead of the host
            tail = Tail()
            logits = session.forward(session.question_ids(question)[:ASKED], tail)
            first = Chooser(one)(logits)
            drawn = None if one.temperature == 0 else draws(one, one.max_new_tokens)
            behind = tokens_behind(model, prefixes[0], tail, first, one, drawn, one.max_new_tokens)
            tokens = [first, *islice(behind, one.max_new_tokens - 1)]
            assert len(tail) == len(session.question_ids(question)[:ASKED]) + len(tokens) - 1
            answer = next(row.tokens for row in plain if row.asked.sampling == one)
            assert tokens[: len(answer)] == answer
    print("all equal")


if __name__ == "__main__":
    main()
