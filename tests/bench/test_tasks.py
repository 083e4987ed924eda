"""Every task: exact lengths for any tokenizer, needles whole, the same seed the same documents, errors in one line."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dropkv.bench import tasks
from dropkv.bench.tasks import needles, ruler_cwe
from dropkv.bench.tasks._base import Frame
from dropkv.bench.tasks._text import Haystack, insert, sentence_ends
from dropkv.errors import DocumentError, DropkvError, UsageError
from tests import tiny

pytest.importorskip("wonderwords", reason="pip install 'dropkv[bench]'")

NEEDLES = ("noise", "prose", "four-keys", "four-values", "four-queries")
RULER = (
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
LENGTHS = {"cwe": (2003, 6500)}
HEAD = 7
BYTES = tiny.tokenizer()
SPACED = tiny.spaced_tokenizer()


@pytest.fixture(scope="module")
def essay(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of its own, so that the long help texts need not be tokenised again and again."""
    path = tmp_path_factory.mktemp("essay") / "harbour.txt"
    lines = [
        f"On day {day} the master wrote <|im_end|> into the ledger. Was it true?\n\nNobody asked." for day in range(900)
    ]
    path.write_text("\n\n".join(lines), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with files in the formats of SQuAD 2.0 and HotpotQA."""
    folder = tmp_path_factory.mktemp("data")
    articles = []
    for article in range(4):
        paragraphs = []
        for number in range(10):
            text = f"Ship {article}-{number} sailed from Riga. " + f"Its hold was full of salt {number}. " * 6
            good = {"question": f"Where did ship {article}-{number} sail from?", "is_impossible": False}
            good["answers"] = [{"text": "Riga"}, {"text": "from Riga"}]
            bad = {"question": "Who built it?", "is_impossible": True, "answers": []}
            paragraphs.append({"context": text, "qas": [good, bad]})
        articles.append({"paragraphs": paragraphs})
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Who owns boat {item}?",
            "answer": f"Captain {item}",
            "context": [[f"Boat {item}", [f"Captain {item} owns it.", " It is red."]], [f"Pier {item}", ["Wet. " * 9]]],
        }
        for item in range(40)
    ]
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot))
    return str(folder)


@pytest.fixture(autouse=True)
def _shorter_help_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones take the longest to tokenise, and here only their length would matter."""
    start = needles.help_texts()[:60_000]
    monkeypatch.setattr(needles, "help_texts", lambda: start)


def task_of(name: str, essay: str, data: str) -> tasks.Task:
    return tasks.get(name, essay=essay, data=data if name.startswith("qa_") else None)


def decoded(tokenizer: Any, sample: tasks.Sample) -> str:
    text: str = tokenizer.decode(sample.document_ids)
    return text


@pytest.mark.parametrize("name", [*RULER, "qa_1", "qa_2", "noise", "niah", "five-facts"])
def test_document_and_head_have_exactly_the_length_asked(name: str, essay: str, data: str) -> None:
    task = task_of(name, essay, data)
    for tokenizer in (BYTES, SPACED):
        for length in LENGTHS.get(name, (1024, 1531)):
            samples = list(task.samples(tokenizer, length, 2, 5, HEAD))
            assert [len(sample.document_ids) + HEAD for sample in samples] == [length, length]
            assert [(sample.task, sample.length, sample.index) for sample in samples] == [
                (name, length, 0),
                (name, length, 1),
            ]


@pytest.mark.parametrize("name", [*RULER, *NEEDLES, "qa_1", "qa_2", "niah", "five-facts"])
def test_the_same_seed_gives_the_same_documents_and_every_answer_stands_in_them(
    name: str, essay: str, data: str
) -> None:
    task = task_of(name, essay, data)
    length = LENGTHS.get(name, (1400,))[0]
    first = list(task.samples(BYTES, length, 2, 1))
    assert first == list(task.samples(BYTES, length, 2, 1))
    assert list(task.samples(BYTES, length, 1, 1)) == first[:1]
    assert first[0].document_ids not in [sample.document_ids for sample in task.samples(BYTES, length, 2, 2)]
    for sample in first:
        text = decoded(BYTES, sample)
        for question in sample.questions:
            assert all(answer in text for answer in question.answers)
            assert task.score("It is " + " and ".join(question.answers).upper(), question) == 1.0
            assert task.score("nothing of the kind", question) == 0.0
            assert question.max_new_tokens == task.max_new_tokens


@pytest.mark.parametrize(
    ("name", "hidden", "answers"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_ruler_needles_are_whole_and_as_many_as_ruler_hides(name: str, hidden: int, answers: int, essay: str) -> None:
    value = "[0-9a-f-]{36}" if name == "niah_single_3" else r"\d{7}"
    kind = "uuid" if name == "niah_single_3" else "number"
    for sample in tasks.get(name, essay=essay).samples(BYTES, 1300, 4):
        found = re.findall(rf"A secret {kind} of (.+?) is: ({value})\.\n", decoded(BYTES, sample))
        question = sample.questions[0]
        assert len(found) == hidden
        assert len(question.answers) == answers
        for key, planted in found:
            assert (planted in question.answers) == (key in question.text)
            assert (key in question.text) == (key in question.answer_prefix)


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_every_line_of_a_needle_haystack_is_a_needle_and_one_is_asked_for(name: str) -> None:
    sample = next(tasks.get(name).samples(BYTES, 1300, 1))
    lines = decoded(BYTES, sample).split("\n")[1:-1]
    key = re.search(r"of (\S+) that", sample.questions[0].text)
    assert key is not None
    assert len(lines) > 8
    assert all(re.fullmatch(r"A secret \w+ of .+ is: [0-9a-f-]+\.", line) for line in lines)
    assert [line for line in lines if f"of {key[1]} is" in line] == [
        f"A secret {'uuid' if name[-1] == '3' else 'number'} of {key[1]} is: {sample.questions[0].answers[0]}."
    ]


def test_prose_needles_stand_between_sentences(essay: str) -> None:
    for sample in tasks.get("niah_multikey_1", essay=essay).samples(BYTES, 1600, 3):
        body = decoded(BYTES, sample).split("\n", 1)[1]
        for before in re.split(r" A secret number of .+\n", body)[:-1]:
            assert before == "" or re.search(r"[.?!]\s*$", before)


def test_the_variables_of_a_chain_are_assigned_in_order_and_the_example_is_solved() -> None:
    sample = next(tasks.get("vt").samples(BYTES, 3000, 1))
    question = sample.questions[0]
    example, document = re.split(r"(?<=\w\n\n)", decoded(BYTES, sample), maxsplit=1)
    value = re.search(r"value (\d{5})", question.text)
    assert value is not None
    names = question.answers
    assert re.findall(r"VAR (\w{5}) = (.+)\n", document) == [
        (names[0], value[1]),
        *((after, f"VAR {before}") for before, after in pairwise(names)),
    ]
    solved = re.findall(r"VAR (\w{3}) = ", example)
    assert len(solved) == 5
    assert example.endswith(" ".join(solved) + "\n\n")
    assert "5 variables" in question.answer_prefix and question.max_new_tokens == 30


@pytest.mark.parametrize(("length", "often", "seldom"), [(2500, 6, 1), (9000, 30, 3)])
def test_common_words_stand_as_often_as_in_ruler(length: int, often: int, seldom: int) -> None:
    sample = next(tasks.get("cwe").samples(BYTES, length, 1))
    document = decoded(BYTES, sample).rsplit("keep those in mind.\n", 1)[1]
    listed = re.findall(r" (\d+)\. (.+?)(?= \d+\.)", document)
    assert [int(place) for place, _ in listed] == list(range(1, len(listed) + 1))
    counts = {word: [other for _, other in listed].count(word) for _, word in listed}
    common = sample.questions[0].answers
    assert {counts.pop(word) for word in common} == {often}
    assert len(common) == 10
    assert max(counts.values()) == seldom


def test_coded_words_follow_zipf_with_exponent_two() -> None:
    sample = next(tasks.get("fwe").samples(BYTES, 4000, 1))
    words = decoded(BYTES, sample).split("\n", 1)[1].split()
    counts = sorted({word: words.count(word) for word in words}.items(), key=lambda item: -item[1])
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.questions[0].answers
    assert counts[1][1] / counts[3][1] == pytest.approx(4, rel=0.1)  # (4 / 2) squared
    assert counts[1][1] / counts[2][1] == pytest.approx(9 / 4, rel=0.1)


def test_a_question_from_squad_has_its_own_passage_whole_and_the_others_of_the_article_first(data: str) -> None:
    for sample in tasks.get("qa_1", data=data).samples(BYTES, 1000, 5):
        text, question = decoded(BYTES, sample), sample.questions[0]
        name = re.search(r"ship (\d)-(\d)", question.text)
        assert name is not None
        assert f"Ship {name[0][5:]} sailed from Riga. " + f"Its hold was full of salt {name[2]}. " * 6 in text
        numbers = [int(number) for number in re.findall(r"Passage (\d+):\n", text)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert set(re.findall(r"Ship (\d)-", text)) == {name[1]}
        assert question.answers == ("Riga", "from Riga")
        assert question.answer_prefix == "Answer:"


def test_a_question_from_hotpotqa_has_all_its_passages(data: str) -> None:
    sample = next(tasks.get("qa_2", data=data).samples(BYTES, 1000, 1))
    number = sample.questions[0].answers[0].split()[1]
    text = decoded(BYTES, sample)
    assert f"Boat {number}\nCaptain {number} owns it. It is red." in text
    assert f"Pier {number}\n" + "Wet. " * 9 in text


def test_the_grid_has_eleven_depths_and_the_needle_stands_there(essay: str) -> None:
    samples = list(tasks.get("niah", essay=essay).samples(BYTES, 1500, 22))
    assert [sample.depth for sample in samples] == [tenth / 10 for tenth in range(11)] * 2
    for sample in samples:
        text = decoded(BYTES, sample)
        stands = text.index(sample.questions[0].answers[0]) / len(text)
        assert sample.depth is not None
        assert stands == pytest.approx(sample.depth, abs=0.06)


def test_five_facts_are_five_questions_about_one_document(essay: str) -> None:
    for sample in tasks.get("five-facts", essay=essay).samples(BYTES, 1500, 2):
        text = decoded(BYTES, sample)
        assert len(sample.questions) == 5
        for question in sample.questions:
            assert text.count(f" {question.answer_prefix} {question.answers[0]}.\n") == 1
        places = sorted(text.index(question.answers[0]) / len(text) for question in sample.questions)
        assert [int(place * 5) for place in places] == pytest.approx(range(5), abs=1)


@pytest.mark.parametrize(("name", "count"), [("noise", 1), ("prose", 1), ("four-keys", 4), ("four-values", 4)])
def test_the_needle_tasks_hide_one_number_or_four(name: str, count: int) -> None:
    sample = next(tasks.get(name).samples(BYTES, 1500, 1, head_tokens=HEAD))
    found = re.findall(r" One of the special magic numbers for (\w+) is: (\d{7})\.", decoded(BYTES, sample))
    question = sample.questions[0]
    assert len(found) == count
    assert {value for key, value in found if key in question.text.split()} == set(question.answers)
    assert len(sample.document_ids) == 1500 - HEAD


def test_the_needle_documents_are_those_of_the_published_figures() -> None:
    """The digest is of the documents that the script behind the figures makes with this tokenizer's words allowed."""
    digest = hashlib.sha256()
    for sample in tasks.get("noise").samples(BYTES, 900, 3, 4):
        digest.update(json.dumps([sample.document_ids, sample.questions[0].answers]).encode())
        assert sample.questions[0].text.startswith("\nWhat is the special magic number for ")
    assert digest.hexdigest()[:16] == "a4f9169f8a8d16c3"


def test_four_queries_are_asked_at_once() -> None:
    question = next(tasks.get("four-queries").samples(BYTES, 1500, 1)).questions[0]
    asked = re.fullmatch(
        r"\nWhat are all the special magic numbers for (\w+), (\w+), (\w+), and (\w+) mentioned in the provided text\?",
        question.text,
    )
    assert asked is not None
    assert len(question.answers) == 4
    assert question.answer_prefix.endswith(f"{asked[3]}, and {asked[4]} mentioned in the provided text are")


def test_an_essay_s_special_tokens_stay_text(essay: str) -> None:
    sample = next(tasks.get("niah", essay=essay).samples(BYTES, 1500, 1))
    assert "<|im_end|>" in decoded(BYTES, sample)
    assert BYTES.eos_token_id not in sample.document_ids


def test_sentences_end_behind_marks_with_white_space_and_at_empty_lines() -> None:
    frame = Frame("test", 100, 0, BYTES)
    ids = [
        token
        for piece in ("Pi is 3", ".", "14", ".", " So", "\n", "it", "\n", "\n", "end", "!")
        for token in frame.encode(piece)
    ]
    ends = sentence_ends(frame, ids)
    assert [BYTES.decode(ids[:end]) for end in ends] == [
        "Pi is 3.14.",
        "Pi is 3.14. So\nit\n\n",
        "Pi is 3.14. So\nit\n\nend!",
    ]
    hay = Haystack(list(range(20)), [5, 11], "test")
    assert [hay.place(depth) for depth in (0, 0.2, 0.4, 0.45, 0.75, 0.8, 1)] == [0, 5, 5, 11, 11, 20, 20]
    assert insert([1, 2, 3], [0, 2, 2], [[7], [8], [9]]) == [7, 1, 2, 8, 9, 3]


@pytest.mark.parametrize("name", [*RULER, *NEEDLES, "niah", "five-facts", "qa_1", "qa_2"])
def test_a_length_too_short_is_one_line_that_names_one_that_fits(name: str, essay: str, data: str) -> None:
    task = task_of(name, essay, data)
    length = 12
    for _ in range(4):  # how much a needle needs depends on what was drawn, so what is asked for may fall short once
        with pytest.raises(UsageError) as caught:
            list(task.samples(BYTES, length, 1, head_tokens=HEAD))
        message = re.fullmatch(
            rf"{name}: {length} tokens are too short a length for it; ask for at least (\d+)", str(caught.value)
        )
        assert message is not None
        length = int(message[1])
        try:
            sample = next(task.samples(BYTES, length, 1, head_tokens=HEAD))
        except UsageError:
            continue
        assert len(sample.document_ids) == length - HEAD
        return
    pytest.fail("the length named never fits")


@pytest.mark.parametrize("name", ["niah", "five-facts", "niah_single_2", "qa_2"])
def test_a_text_too_short_for_the_length_is_one_line(name: str, essay: str, data: str) -> None:
    with pytest.raises(
        UsageError, match=r"a length of 90000 tokens is more than .+ can fill \(\d+ tokens\); "
    ) as caught:
        list(task_of(name, essay, data).samples(BYTES, 90_000, 1))
    assert "\n" not in str(caught.value)


def test_a_length_beyond_the_help_texts_or_the_word_list_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler_cwe, "word_list", lambda kind: [f"{kind}{number}" for number in range(30)])
    for name in ("prose", "cwe"):
        with pytest.raises(UsageError, match=r"is more than .+ can fill"):
            list(tasks.get(name).samples(BYTES, 100_000, 1))


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown task 'niah_mutlikey_2': did you mean niah_multikey_2 or "):
        tasks.get("niah_mutlikey_2")


def test_missing_data_is_one_line_that_says_what_to_get(tmp_path: Path, essay: str) -> None:
    for reason, data in (("needs SQuAD 2.0; download https://", None), ("holds no dev-v2.0.json", str(tmp_path))):
        with pytest.raises(UsageError, match=reason):
            tasks.get("qa_1", data=data)
    (tmp_path / "dev-v2.0.json").write_text('{"data": 3}')
    with pytest.raises(UsageError, match="is not in the data set's own format"):
        list(tasks.get("qa_1", data=str(tmp_path)).samples(BYTES, 500, 1))
    with pytest.raises(DocumentError, match="no such file"):
        list(tasks.get("niah", essay=str(tmp_path / "none.txt")).samples(BYTES, 500, 1))


def test_no_samples_are_refused(essay: str) -> None:
    with pytest.raises(DropkvError, match="ask for at least 1"):
        list(tasks.get("noise").samples(BYTES, 500, 0))


def test_every_task_has_its_label() -> None:
    known = tasks.names()
    assert known == sorted(known) and len(known) == len(set(known)) == 36
    assert {tasks.get(name).label for name in RULER} == {"RULER-shaped"}
    assert {tasks.get(name).label for name in (*NEEDLES, "five-facts")} == {"needle"}
    assert tasks.get("niah").label == "NIAH"


def test_ruler_s_answer_lengths() -> None:
    assert {tasks.get(name).max_new_tokens for name in RULER if name.startswith("niah")} == {128}
    assert [tasks.get(name).max_new_tokens for name in ("vt", "cwe", "fwe")] == [30, 120, 50]
