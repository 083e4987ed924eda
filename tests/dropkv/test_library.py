"""The public API: what it exports, its types and errors, and the entries as a cache of transformers."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import click
import pytest
import torch

import dropkv
from dropkv.cache import Tail
from dropkv.errors import DocumentError, ModelError, QuestionError, UsageError
from dropkv.settings import CompressOptions, CompressSettings
from tests import tiny

ROOT = Path(__file__).parents[2]
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
QUESTION = "What is the name of the ship?"


def opened(tmp_path, family="llama", **settings):
    model = tiny.model(family)
    chosen = {"method": "dropkv", "budget": 0.4, "chunk": 40} | settings
    dropkv.compress(TEXT, model=model, **chosen).save(tmp_path / "a.kv")
    return dropkv.load(tmp_path / "a.kv", model=model)


def named(network, cache):
    """The argument was renamed."""
    return {"cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values": cache}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_plain_cache_gives_the_logits_of_our_own_answers(tmp_path, family, attention):
    kv = opened(tmp_path, family)
    network = tiny.network(family)
    network.set_attn_implementation(attention)
    ids = kv.question_ids(QUESTION)
    own = [kv.session.forward(ids[: stop + 1], Tail()) for stop in range(len(ids))]
    places = kv.document_tokens + torch.arange(len(ids))[None]
    cache = kv.as_transformers_cache()
    assert cache.get_seq_length() == kv.metadata.budget.kept < kv.document_tokens
    with torch.inference_mode():
        out = network(torch.tensor([ids]), **named(network, cache), position_ids=places)
        torch.testing.assert_close(out.logits[0], torch.stack(own), atol=2e-5, rtol=1e-4)
        # A step more on the cache that grew, as a decoding loop takes it.
        tail = Tail()
        token = int(kv.session.forward(ids, tail).argmax())
        step = network(torch.tensor([[token]]), **named(network, cache), position_ids=places[:, -1:] + 1)
        torch.testing.assert_close(step.logits[0, 0], kv.session.forward([token], tail), atol=2e-5, rtol=1e-4)
        # The positions that generate() would take are wrong: nothing but the numbers tells.
        wrong = network(torch.tensor([ids]), **named(network, kv.as_transformers_cache()))
    assert (wrong.logits[0, -1] - own[-1]).abs().max() > 0.05
    assert kv.ask(QUESTION, dropkv.Sampling(max_new_tokens=1)).generated_tokens <= 1  # the file is as it was
    assert torch.equal(kv.session.forward(ids, Tail()), own[-1])


def test_files_that_have_no_plain_cache(tmp_path):
    kv = opened(tmp_path, method="adadropkv")
    with pytest.raises(
        UsageError, match=r"heads keep \d+ to \d+ entries, a plain cache has one length: .*method='dropkv'"
    ):
        kv.as_transformers_cache()
    model = tiny.model("mistral", sliding_window=32)
    dropkv.compress(TEXT, model=model, method="dropkv", budget=0.4, chunk=40).save(tmp_path / "b.kv")
    with pytest.raises(ModelError, match="sliding windows"):
        dropkv.load(tmp_path / "b.kv", model=model).as_transformers_cache()


def test_the_whole_document_as_a_plain_cache_equals_the_plain_model(tmp_path):
    kv = opened(tmp_path, method="full")
    network = tiny.network("llama")
    network.set_attn_implementation("sdpa")
    from formats import read_file

    document, ids = read_file(tmp_path / "a.kv").tokens.tolist(), kv.question_ids(QUESTION)
    with torch.inference_mode():
        want = network(torch.tensor([document + ids])).logits[0, len(document) :]
        got = network(
            torch.tensor([ids]),
            **named(network, kv.as_transformers_cache()),
            position_ids=kv.document_tokens + torch.arange(len(ids))[None],
        ).logits[0]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_keyword_arguments_are_the_settings():
    fields = {field.name: field.type for field in dataclasses.fields(CompressSettings)}
    assert list(CompressOptions.__annotations__) == list(fields), "CompressOptions and CompressSettings differ"
    assert typing.get_type_hints(CompressOptions) == typing.get_type_hints(CompressSettings)


def test_defaults_and_errors_are_those_of_the_commands(tmp_path):
    from dropkv_cli.compress import command as compress
    from dropkv_cli.query import command as query

    def defaults(command):
        context = click.Context(command)
        return {option.name: option.get_default(context) for option in command.params}

    options, asked = defaults(compress), defaults(query)
    for field in dataclasses.fields(CompressSettings):
        name = {"keep_tokens": "no_tokens", "fidelity": "no_fidelity"}.get(field.name, field.name)
        assert options[name] == (not field.default if name.startswith("no_") else field.default), name
    own = dropkv.Sampling()
    assert all(asked[name] == getattr(own, name) for name in ("max_new_tokens", "temperature", "top_p", "seed"))
    with pytest.raises(DocumentError, match="note: is empty"):
        dropkv.compress("", model=tiny.model("llama"), name="note")
    with pytest.raises(dropkv.DropkvError, match="no such file"):
        dropkv.read_document(tmp_path / "missing.txt")
    with pytest.raises(dropkv.FormatError, match=r"missing\.kv"):
        dropkv.load(tmp_path / "missing.kv")
    with pytest.raises(TypeError, match="budgte"):
        dropkv.compress("Text.", model=tiny.model("llama"), budgte=0.5)


def test_a_compression_answers_before_it_is_saved(tmp_path):
    made = dropkv.compress(TEXT, model=tiny.model("llama"), budget=0.5, chunk=40)
    short = dropkv.Sampling(max_new_tokens=8)
    made.save(tmp_path / "a.kv")
    assert made.ask(QUESTION, short).text == dropkv.load(tmp_path / "a.kv", model=made.model).ask(QUESTION, short).text
    with pytest.raises(QuestionError, match="empty"):
        made.ask(" ")


def test_all_public_names_are_there_and_importing_is_light():
    assert all(getattr(dropkv, name) is not None for name in dropkv.__all__)
    assert all((ROOT / package / "py.typed").is_file() for package in ("dropkv", "formats"))
    program = "import sys, dropkv; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_public_functions_are_documented_and_typed():
    from dropkv import KVFile, compression, generate

    for owner in (KVFile, compression.Compression, generate.Chat, generate.Stream):
        for name, member in vars(owner).items():
            if not name.startswith("_") and callable(member):
                assert member.__doc__ and typing.get_type_hints(member)["return"] is not None, (owner, name)
    for name in dropkv.__all__:
        assert getattr(dropkv, name).__doc__, name
