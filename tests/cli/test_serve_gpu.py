"""A server on a GPU: steps are captured by another thread than the one that loaded the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dropkv
from benchmarks.serve_load import QUESTIONS, load
from tests.cli.conftest import TEXT

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_many_clients_get_the_answers_of_their_own_file_and_leave_nothing(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from tests.serving import serving, until

    model = dropkv.load_model(str(make_model(max_position_embeddings=4096)), dtype="float32")
    files = {}
    for name, text in (("harbour", TEXT), ("ledger", TEXT.replace("Evergreen", "Bounty").replace("4711", "0815"))):
        made = dropkv.compress(text, model=model, name=name, chunk=32, budget=0.5, fidelity=False)
        made.save(tmp_path / f"{name}.kv")
        files[name] = dropkv.load(tmp_path / f"{name}.kv", model=model)
    sampling = dropkv.Sampling(max_new_tokens=12)
    wanted = {(name, question): kv.ask(question, sampling).text for name, kv in files.items() for question in QUESTIONS}
    taken = []
    with serving(files, rows=16) as served:
        for _ in range(2):
            done = load(served.address, list(files), 200, 20, 12)
            assert done.errors == ()
            assert (len(done.answers), done.mixed(wanted), done.same(wanted)) == (200, 0, 200)
            until(lambda: served.idle)
            taken.append(torch.cuda.memory_allocated() if model.device.type == "cuda" else 0)
        assert served.failures == []
    assert taken[1] - taken[0] < 4 << 20, taken
