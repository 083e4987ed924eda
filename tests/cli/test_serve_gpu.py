"""A server on a GPU: steps are captured by another thread than the one that loaded the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serve_load import QUESTIONS, answers, load, read_answers, serving
from tests.cli.conftest import SETTINGS, TEXT, run_dropkv

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_many_clients_get_the_answers_of_their_own_file(make_model: Callable[..., Path], tmp_path: Path) -> None:
    options = ("--model", make_model(max_position_embeddings=4096), "--dtype", "float32")
    files = [tmp_path / f"{name}.kv" for name in ("harbour", "ledger")]
    for file, text in zip(files, (TEXT, TEXT.replace("Evergreen", "Bounty").replace("4711", "0815")), strict=True):
        file.with_suffix(".txt").write_text(text)
        made = run_dropkv("compress", file.with_suffix(".txt"), "-o", file, *options, *SETTINGS)
        assert made.code == 0, made.err
    asking = [answers(file, options, 12) for file in files]
    wanted = {
        (file.stem, question): text
        for file, one in zip(files, asking, strict=True)
        for question, text in zip(QUESTIONS, read_answers(one), strict=True)
    }
    with serving(files, options, 16) as (address, _):
        done = load(address, [file.stem for file in files], 200, 20, 12)
    assert done.errors == ()
    assert (len(done.answers), done.mixed(wanted), done.same(wanted)) == (200, 0, 200)
