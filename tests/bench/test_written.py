"""benchmarks/question_free/written.py: the documents and questions that are there are fit to be asked, and answers are scored as it says."""

from __future__ import annotations

import pytest

from benchmarks.question_free import __main__ as study
from benchmarks.question_free import written
from benchmarks.question_free.table import table
from benchmarks.question_free.written import FOLDER, NAME, Written, folded, named, questions
from dropkv.bench.results import Results
from dropkv.bench.tasks import Question
from dropkv.errors import UsageError
from tests import tiny

DOCUMENTS = sorted(FOLDER.glob("*.md"))


def task(folder=FOLDER):
    return Written(NAME, "written", 4, exact=False, folder=folder)


def test_every_document_has_its_questions_and_is_of_the_length_meant(smollm2):
    assert len(DOCUMENTS) == 8
    assert [path.with_suffix(".tsv") for path in DOCUMENTS] == sorted(FOLDER.glob("*.tsv"))
    samples = list(named(NAME).samples(smollm2.tokenizer, 1536, 400, seed=3, head_tokens=8))
    assert [sample.index for sample in samples] == list(range(8))
    for sample, path in zip(samples, DOCUMENTS, strict=True):
        assert 900 <= len(sample.document_ids) <= 1450
        assert smollm2.tokenizer.decode(sample.document_ids) == path.read_text(encoding="utf-8").strip()
        assert len(sample.questions) == 8


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_no_question_gives_its_answer_away_and_the_document_does(path):
    text = folded(path.read_text(encoding="utf-8"))
    for question in questions(path.with_suffix(".tsv")):
        answers = [folded(answer) for answer in question.answers]
        assert any(answer in text for answer in answers), question
        assert not any(answer in folded(f"{question.text} {question.answer_prefix}") for answer in answers), question


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        (" the WIG-maker, of course.", 1.0),
        ("\n\u201cThat\u2019s it\u201d", 1.0),
        ("That is it.", 0.0),
        ("the wig", 0.0),
        ("the wig maker's", 0.0),  # whole words: what else is right has to be written down
        ("", 0.0),
    ],
)
def test_case_and_punctuation_are_folded_and_words_are_whole(prediction, right):
    assert task().score(prediction, Question("?", "", ("wig maker", "that's it"), 4)) == right


@pytest.mark.parametrize("line", ["What?\tIt is", "What?\tIt is\t", "What?\tIt is\ta||b", "What?\t\ta", "a\tb\tc\td"])
def test_a_line_that_is_not_complete_is_named(tmp_path, line):
    (tmp_path / "one.tsv").write_text(f"What?\tIt is\ta|b\n{line}\n")
    with pytest.raises(UsageError, match=r"one\.tsv, line 2: write a question"):
        questions(tmp_path / "one.tsv")


def test_a_document_is_refused_rather_than_cut(smollm2):
    with pytest.raises(UsageError, match="written: 600 tokens are too short a length"):
        next(task().samples(smollm2.tokenizer, 600, 1))


def test_the_full_cache_can_be_asked_alone(tmp_path, monkeypatch, capsys):
    model = tiny.model("llama")
    (tmp_path / "one.md").write_text("The cat sat on the mat, and it was asleep.\n")
    (tmp_path / "one.tsv").write_text("Where?\tOn the\tmat\nWho?\tThe\tcat|a cat\n")
    monkeypatch.setattr(study, "load_model", lambda name: model)
    monkeypatch.setattr(study, "named", lambda name: task(tmp_path))
    run = ["study", "-o", str(tmp_path / "out"), "--tasks", NAME, "--tokens", "120"]
    for more in ("--full", "--table"):
        monkeypatch.setattr("sys.argv", [*run, more])
        study.main()
    lines = list(Results(tmp_path / "out").read())
    assert [(line["method"], line["sample"], line["question"]) for line in lines] == [("full", 0, 0), ("full", 0, 1)]
    assert "full cache" in capsys.readouterr().out
    assert table(lines, "default").startswith("full cache")


def test_unknown_tasks_are_the_librarys_to_refuse():
    assert named("five-facts").name == "five-facts"
    with pytest.raises(UsageError, match="unknown task 'writen'"):
        named("writen")
    assert named(NAME).max_new_tokens == written.MOST
