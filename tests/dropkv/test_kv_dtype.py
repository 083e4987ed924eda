"""Quantised and compressed files from the library and the command line: answered as unsaved, described by info, refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dropkv
from dropkv.cache import Prefix, Tail
from dropkv.compression import compress_document, estimate
from dropkv.errors import UsageError
from dropkv.settings import CompressSettings, Sampling
from formats import read_file, read_header
from formats.quantized import describe, quantize
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
QUESTION = "What is the code?"
SHORT = Sampling(max_new_tokens=12)
KINDS = ("fp8", "int8", "int4")

LOGITS_IN_A_NEW_PROCESS = """
import sys, torch, dropkv
from dropkv.cache import Tail
from tests import tiny
found = {}
for path in sys.argv[3:]:
    kv = dropkv.load(path, model=tiny.model("llama"))
    ids = kv.session.seam.question_ids(sys.argv[1])
    found[path] = kv.session.forward(ids, Tail()), kv.ask(sys.argv[1], dropkv.Sampling(max_new_tokens=12)).text
torch.save(found, sys.argv[2])
"""


def made(**settings):
    return dropkv.compress(TEXT, model=tiny.model("llama"), budget=0.5, chunk=40, **settings)


def logits(session):
    return session.forward(session.seam.question_ids(QUESTION), Tail())


@pytest.fixture(scope="module")
def compressions():
    cells = [(kind, level) for kind in ("same", *KINDS) for level in (None, 3)]
    return {cell: made(kv_dtype=cell[0], zstd=cell[1]) for cell in cells}


def test_a_new_process_gives_the_same_logits_bit_for_bit(compressions, tmp_path):
    paths = {}
    for (kind, level), compression in compressions.items():
        paths[kind, level] = tmp_path / f"{kind}-{level}.kv"
        compression.save(paths[kind, level])
    root, out = Path(__file__).parents[2], tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, "-c", LOGITS_IN_A_NEW_PROCESS, QUESTION, out, *paths.values()], check=True, cwd=root
    )
    found = torch.load(out)
    for cell, compression in compressions.items():
        session = compression.session()
        saved, text = found[str(paths[cell])]
        assert torch.equal(logits(session), saved)
        assert session.ask(QUESTION, SHORT).text == text


def test_compression_changes_no_bit_and_quantising_changes_little(compressions):
    exact = logits(compressions["same", None].session())
    errors = {}
    for kind in ("same", *KINDS):
        one, other = (logits(compressions[kind, level].session()) for level in (None, 3))
        assert torch.equal(one, other)
        errors[kind] = float((one - exact).norm() / exact.norm())
    assert errors["same"] == 0 < errors["int8"] < errors["fp8"] < errors["int4"] < 0.5
    assert errors["int8"] < 0.02


def test_fidelity_is_that_of_the_restored_entries(compressions):
    found = {cell: made.metadata.fidelity for cell, made in compressions.items()}
    full, alone = (found["same", None][name] for name in ("nll_full", "nll_alone"))
    for kind, level in found:
        assert found[kind, level] == found[kind, None]
        assert (found[kind, level]["nll_full"], found[kind, level]["nll_alone"]) == (full, alone)
    assert len({found[kind, None]["nll"] for kind in ("same", "int8", "int4")}) == 3


def test_what_a_file_keeps_does_not_depend_on_how_it_is_stored(compressions, tmp_path):
    contents = {}
    for cell, compression in compressions.items():
        compression.save(tmp_path / "a.kv", overwrite=True)
        contents[cell] = read_file(tmp_path / "a.kv")
    plain = contents["same", None]
    for cell, other in contents.items():
        assert other.header.metadata.dtype == "float32"
        assert (other.header.metadata.quantization is None) == (cell[0] == "same")
        for one, two in zip(plain.layers, other.layers, strict=True):
            for field in ("offsets", "positions", "admit", "scores"):
                assert torch.equal(getattr(one, field), getattr(two, field))


def test_sizes_are_as_the_estimate_says(tiny_llama, tmp_path):
    document = dropkv.Document.of(TEXT * 2, "note")
    sizes = {}
    for kind in ("same", *KINDS):
        settings = CompressSettings(budget=1.0, observe="tail", kv_dtype=kind)
        size = compress_document(tiny_llama, document, settings).save(tmp_path / f"{kind}.kv")
        header = read_header(tmp_path / f"{kind}.kv")
        expected = estimate(tiny_llama, document, settings).file_bytes
        assert 0 <= size - header.data_start - expected < 0.04 * expected + 200  # heads do not end where groups do
        sizes[kind] = size - header.data_start
    assert sizes["int4"] < sizes["fp8"] < sizes["int8"] < sizes["same"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_sliding_layers_and_other_dtypes(kind, tmp_path):
    model = tiny.model("mistral", sliding_window=24)
    compression = dropkv.compress(TEXT, model=model, budget=0.5, observe="tail", kv_dtype=kind, zstd=1)
    compression.save(tmp_path / "a.kv")
    half = tiny.model("mistral", sliding_window=24, dtype=torch.bfloat16)
    assert {layer.kind for layer in compression.metadata.layers} == {"sliding"}
    kv = dropkv.load(tmp_path / "a.kv", model=half, allow_mismatch=True)
    exact = compression.session().prefix
    for one, two in zip(kv.session.prefix.layers, exact.layers, strict=True):
        assert one.keys.dtype == torch.bfloat16
        assert torch.equal(one.keys, two.keys.bfloat16()) and torch.equal(one.values, two.values.bfloat16())


def test_a_chat_and_a_stream_work_on_restored_entries(compressions):
    session = compressions["int4", None].session()
    assert "".join(session.stream(QUESTION, SHORT)).strip() == session.ask(QUESTION, SHORT).text
    assert session.chat().ask(QUESTION, SHORT).text == session.ask(QUESTION, SHORT).text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kv_dtype": "int3"}, "unknown kv-dtype 'int3': use one of same, fp8, int8, int4"),
        ({"kv_dtype": None}, "kv_dtype is None: give a text"),
        ({"zstd": 0}, "zstd level 0 is out of range: use a whole number from 1 to 22"),
        ({"zstd": 23}, "zstd level 23"),
        ({"zstd": True}, "zstd is True: give a whole number or None"),
        ({"zstd": 3.0}, "zstd is 3.0: give a whole number or None"),
    ],
)
def test_settings_that_cannot_be_meant(wrong, words):
    with pytest.raises(UsageError) as caught:
        CompressSettings(**wrong)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_int8_answers_as_the_entries_themselves_do(smollm2):
    """The real model: the quantised prefix gives nearly the same next-token probabilities, int4 less so."""
    text = (Path(__file__).parents[2] / "examples" / "observatory.md").read_text()
    compression = dropkv.compress(text, model=smollm2, budget=0.5)
    exact = compression.session()
    ids = exact.seam.question_ids("What is the password of the alarm?")
    wanted = exact.forward(ids, Tail()).log_softmax(-1)
    distance = {}
    for kind in KINDS:
        about = describe(kind, exact.prefix.bounds)
        coded = [quantize(layer, about) for layer in compression.layers]
        prefix = Prefix(coded, smollm2.geometry, exact.prefix.n, about).to(smollm2.device, smollm2.dtype)
        session = type(exact)(smollm2, exact.seam, prefix)
        found = session.forward(ids, Tail()).log_softmax(-1)
        distance[kind] = float((wanted.exp() * (wanted - found)).sum())
        if kind == "int8":
            assert "copper kettle" in session.ask("What is the password of the alarm?", SHORT).text.lower()
    assert distance["int8"] < 0.005 and distance["fp8"] < 0.05 and distance["int4"] < 0.5
