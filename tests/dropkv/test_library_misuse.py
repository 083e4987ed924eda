"""What a notebook user hands over by mistake is answered by the family's errors, in one line that says what to give."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import dropkv
from dropkv.errors import BudgetError, DocumentError, ModelError, QuestionError, UsageError
from dropkv.settings import CompressSettings, Sampling
from dropkv.transcripts import read_turns
from formats.errors import ExistingFile, UnreadableFile, WriteFailed
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
SHORT = Sampling(max_new_tokens=4)
QUICK = {"budget": 0.5, "observe": "tail", "fidelity": False}


@pytest.fixture(scope="module")
def made():
    return dropkv.compress(TEXT, model=tiny.model("llama"), **QUICK)


@pytest.fixture(scope="module")
def kv(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "a.kv"
    made.save(path)
    return dropkv.load(path, model=made.model)


def line(error):
    text = str(error.value)
    assert "\n" not in text and "--" not in text
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "text: the document is of type NoneType, not text: give a str"),
        (b"Text.", "text: the document is bytes, not text: decode it first, .decode()"),
        (["Text."], "text: the document is of type list, not text: give a str"),
    ],
)
def test_documents_that_are_no_text(made, text, words):
    with pytest.raises(DocumentError) as error:
        dropkv.compress(text, model=made.model)
    assert line(error) == words


def test_a_path_is_read(made, tmp_path):
    path = tmp_path / "harbour.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    own = dropkv.compress(path, model=made.model, **QUICK)
    document = own.metadata.document
    assert (document.name, document.sha256) == ("harbour.txt", hashlib.sha256(path.read_bytes()).hexdigest())
    assert document.tokens == made.metadata.document.tokens
    named = dropkv.compress(path, model=made.model, name="The harbour", **QUICK).metadata.document
    assert (named.name, named.sha256) == ("The harbour", document.sha256)
    read = dropkv.read_document(path)
    assert dropkv.compress(read, model=made.model, name="again", **QUICK).metadata.document.name == "again"
    with pytest.raises(DocumentError, match=r"nothing\.txt: no such file"):
        dropkv.compress(tmp_path / "nothing.txt", model=made.model)
    with pytest.raises(DocumentError) as error:
        dropkv.compress(str(path), model=made.model)
    assert (
        line(error) == f"{path}: is the name of a file, not its text; give pathlib.Path({str(path)!r}) to have it read"
    )
    with pytest.raises(DocumentError, match="None: is no file name"):
        dropkv.read_document(None)


QUESTIONS = [
    (None, "the question is of type NoneType, not text: give a str"),
    (b"Who?", "the question is bytes, not text: decode it first, .decode()"),
    (5, "the question is of type int, not text: give a str"),
    ([], "the list of questions is empty: give at least one"),
    (["Who?", None], "question 2: the question is of type NoneType, not text: give a str"),
    ({"Who?": 1}, "the question is of type dict, not text: give a str"),
    (["Who?", b"Who?"], "question 2: the question is bytes, not text: decode it first, .decode()"),
]


@pytest.mark.parametrize(("question", "words"), QUESTIONS)
@pytest.mark.parametrize("saved", [True, False])
def test_questions_that_are_no_text(made, kv, question, words, saved):
    with pytest.raises(QuestionError) as error:
        (kv if saved else made).ask(question)
    assert line(error) == words


@pytest.mark.parametrize(("question", "words"), [one for one in QUESTIONS if not isinstance(one[0], list)])
def test_conversations_and_streams_are_as_strict(kv, question, words):
    chat = kv.chat()
    for ask in (chat.ask, kv.stream, kv.question_ids):
        with pytest.raises(QuestionError) as error:
            ask(question)
        assert line(error) == words
    assert chat.turns == []


def test_a_stream_that_was_stopped_has_no_result(kv):
    stream = kv.stream("Who?", SHORT)
    next(stream)
    stream.close()
    with pytest.raises(QuestionError, match="stopped before its end and has no result; ask again"):
        stream.result()
    assert stream.answer is None
    for turns in (None, [1], "ab"):
        with pytest.raises(QuestionError, match="turns are what the `turns` of a conversation holds"):
            kv.chat().resume(turns)
    with pytest.raises(QuestionError, match="None: is no file name"):
        read_turns(None, kv.session, kv.metadata)


def test_what_a_notebook_shows_of_them(made, kv):
    tokens, kept = kv.metadata.document.tokens, kv.metadata.budget.kept
    assert repr(kv) == f"<KVFile of text: {tokens} tokens, {kept} entries per KV head, tiny-llama>"
    assert repr(made) == f"<Compression of text: {tokens} tokens, {kept} entries per KV head, tiny-llama>"


def test_types_and_devices_may_be_those_of_torch():
    from dropkv.models import devices_named, dtype_named

    assert [dtype_named(name) for name in (torch.float32, torch.bfloat16, "fp16")] == ["float32", "bfloat16", "float16"]
    assert devices_named(torch.device("cpu")) == (torch.device("cpu"),)
    with pytest.raises(UsageError, match="unknown device 'None'"):
        devices_named(None)
    with pytest.raises(UsageError, match=r"hf:/a/b/c\.kv: is no path; give an address of the Hub as a text, hf://"):
        dropkv.load(Path("hf://a/b/c.kv"))


def test_a_compression_takes_several_questions_as_a_file_does(made, kv):
    asked = ["Who kept the ledger?", "What is the code?"]
    answers = made.ask(asked, SHORT)
    assert [answer.question for answer in answers] == asked
    assert [answer.text for answer in answers] == [answer.text for answer in kv.ask(tuple(asked), SHORT)]


@pytest.mark.parametrize("path", [None, 5, b"a.kv"])
def test_names_that_are_none(made, kv, path, tmp_path):
    for write in (lambda: made.save(path), lambda: dropkv.shrink(tmp_path / "no.kv", 0.1, path)):
        with pytest.raises((WriteFailed, UnreadableFile)) as error:
            write()
    with pytest.raises(WriteFailed) as error:
        made.save(path)
    assert line(error) == f"{path!r}: is no file name; give a path such as book.kv"
    with pytest.raises(UnreadableFile) as error:
        dropkv.load(path, model=kv.model)
    assert line(error) == f"{path!r}: is no file name; give a path such as book.kv"


def test_saving_twice_is_told_in_the_words_of_the_library(made, tmp_path):
    path = tmp_path / "a.kv"
    size = made.save(path)
    with pytest.raises(ExistingFile) as error:
        made.save(path)
    assert line(error) == f"{path}: exists already; choose another name, or replace it with overwrite=True"
    assert made.save(path, overwrite=True) == size
    with pytest.raises(ExistingFile, match="or replace it with overwrite=True"):
        dropkv.shrink(path, 0.4, path)
    with pytest.raises(WriteFailed) as error:
        made.save(tmp_path)
    assert line(error) == f"{tmp_path}: is a folder, not a file; give the name of a file"
    with pytest.raises(WriteFailed) as error:
        made.save(tmp_path / "no" / "a.kv")
    assert "make the folder first (`mkdir -p`)" in line(error)


def test_models_that_are_none(made):
    for model, words in ((None, "NoneType"), (7, "int"), (b"smollm2-135m", "bytes")):
        with pytest.raises(ModelError) as error:
            dropkv.compress(TEXT, model=model)
        assert line(error).startswith(f"the model is of type {words}, not a name: give an alias")
    with pytest.raises(ModelError, match=r"LlamaForCausalLM, not a name: .* dropkv\.models\.wrap_model\(network,"):
        dropkv.load_model(made.model.network)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("window", "8", "window is '8': give a whole number"),
        ("chunk", 2.5, "chunk is 2.5: give a whole number"),
        ("pool", "3", "pool is '3': give a whole number or None"),
        ("alpha", "0.2", "alpha is '0.2': give a number or None"),
        ("observe", None, "observe is None: give a text"),
        ("method", 1, "method is 1: give a text or None"),
        ("fidelity", "no", "fidelity is 'no': give True or False"),
        ("seed", True, "seed is True: give a whole number"),
    ],
)
def test_settings_of_another_type(field, value, words):
    with pytest.raises(UsageError) as error:
        CompressSettings(**{field: value})
    assert line(error) == words


def test_samplings_that_are_none(kv):
    for changes in ({"max_new_tokens": "5"}, {"max_new_tokens": 2.0}, {"temperature": None}, {"seed": 1.5}):
        with pytest.raises(UsageError, match=next(iter(changes))):
            Sampling(**changes)
    assert (Sampling(temperature=1, top_p=1).temperature, Sampling(seed=None).seed) == (1, None)
    for sampling in ({"max_new_tokens": 5}, 5):
        for ask in (kv.ask, kv.stream, kv.chat().ask):
            with pytest.raises(UsageError, match=r"sampling is of type \w+: give dropkv\.Sampling\("):
                ask("Who?", sampling)
    with pytest.raises(BudgetError, match="is no number"):
        kv.shrink("0.1")
