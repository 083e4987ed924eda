"""LongBench's tasks over small files of its format: prompts, the middle cut, scores, and errors in one line."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dropkv.bench import tasks
from dropkv.bench.tasks import _longbench_files as files
from dropkv.bench.tasks.longbench import NAMES, middle_cut
from dropkv.errors import UsageError
from tests import tiny

BYTES = tiny.tokenizer()
NO_CHAT = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
BUDGETS = {
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en"), 32),
    **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
    **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
}


def row(number: int, **changes: Any) -> dict[str, Any]:
    made = {
        "input": f"What is {{in}} chest {number}?",
        "context": f"There is gold in chest {number}. {{context}} stays {{as}} it is.\n",
        "answers": [f"gold {number}", "Paragraph 3"],
        "all_classes": ["gold", "silver"],
        "length": 12,
        "dataset": "x",
    }
    return {**made, **changes}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(3)))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_cut_behind_the_context(name: str, data: Path) -> None:
    task = tasks.get(name, data=str(data))
    samples = list(task.samples(BYTES, 4000, 9, 1))
    assert len(samples) == 3
    assert (task.label, task.chat, task.max_new_tokens) == ("LongBench-shaped", name not in NO_CHAT, BUDGETS[name])
    seen = set()
    for sample in samples:
        text, (question,) = BYTES.decode(sample.document_ids), sample.questions
        number = question.answers[0][-1]
        assert text.endswith(f"There is gold in chest {number}. {{context}} stays {{as}} it is.\n")
        assert "{" not in text.replace("{context} stays {as}", "")
        own = f"What is {{in}} chest {number}?"
        asks = name not in ("gov_report", "multi_news", "passage_count", "lcc")
        assert question.text.count(own) == asks and "{" not in question.text.replace(own, "")
        assert question.classes == ("gold", "silver")
        seen.add(number)
    assert seen == {"0", "1", "2"}
    assert samples == list(task.samples(BYTES, 4000, 9, 1))
    assert samples[:1] == list(task.samples(BYTES, 4000, 1, 1))


def test_longbench_s_own_prompts_are_used_where_they_lie_beside_the_data(data: Path) -> None:
    (data / "dataset2prompt.json").write_text(
        json.dumps({"qasper": "Read: {context}\nNow: {input}\nSay:", "lcc": "none"})
    )
    task = tasks.get("qasper", data=str(data))
    sample = next(task.samples(BYTES, 4000, 1))
    number = sample.questions[0].answers[0][-1]
    assert task.label == "LongBench"
    assert BYTES.decode(sample.document_ids).startswith(f"Read: There is gold in chest {number}.")
    assert sample.questions[0].text == f"\nNow: What is {{in}} chest {number}?\nSay:"
    for name in ("lcc", "trec"):
        with pytest.raises(UsageError, match=rf"has no prompt with \{{context\}} for {name}"):
            tasks.get(name, data=str(data))


def test_a_document_too_long_loses_its_middle(data: Path) -> None:
    task = tasks.get("gov_report", data=str(data))
    whole = next(task.samples(BYTES, 4000, 1)).document_ids
    cut = next(task.samples(BYTES, 57, 1, head_tokens=7)).document_ids
    assert len(whole) > 50
    assert cut == whole[:25] + whole[-25:]
    assert next(task.samples(BYTES, len(whole) + 7, 1, head_tokens=7)).document_ids == whole
    assert middle_cut([1, 2, 3, 4, 5, 6], 5) == [1, 2, 3, 5, 6]
    assert middle_cut([1, 2, 3], 1) == [1]


@pytest.mark.parametrize(
    ("name", "prediction", "answers", "score"),
    [
        ("qasper", "the gold", ("silver", "gold"), 1.0),  # the best of the answers
        ("qasper", "gold\nand more", ("gold",), 0.5),  # all lines count: precision 1/3, recall 1
        ("triviaqa", "\ngold\nand more", ("gold",), 1.0),  # the first line counts
        ("trec", "gold\nsilver", ("gold",), 1.0),
        ("trec", "gold silver", ("gold",), 0.5),
        ("passage_count", "3 or 4", ("3",), 0.5),
        ("passage_retrieval_en", "Paragraph 3", ("Paragraph 3",), 1.0),
    ],
)
def test_scores(name: str, prediction: str, answers: tuple[str, ...], score: float, data: Path) -> None:
    question = tasks.Question("", "", answers, 1, ("gold", "silver"))
    assert tasks.get(name, data=str(data)).score(prediction, question) == pytest.approx(score)


def test_scores_of_summaries_and_code(data: Path) -> None:
    pytest.importorskip("rouge", reason="pip install 'dropkv[bench]'")
    question = tasks.Question("", "", ("gold is here", "no"), 1)
    for name, score in (("samsum", 1.0), ("gov_report", 0.75)):  # 3 of 5 different words, 3 of 3
        predicted = "gold is here\nand more"
        assert tasks.get(name, data=str(data)).score(predicted, question) == pytest.approx(score, abs=1e-6)
    assert tasks.get("lcc", data=str(data)).score("# x\ngold is here\nmore", question) == 1.0


def test_the_archive_of_the_hub_is_read_as_it_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(data / "data.zip", "w") as archive:
        archive.write(data / "trec.jsonl", "data/trec.jsonl")
    monkeypatch.setattr(files, "_archive", lambda name: data / "data.zip")
    unpacked = list(tasks.get("trec", data=str(data)).samples(BYTES, 500, 3))
    assert list(tasks.get("trec").samples(BYTES, 500, 3)) == unpacked
    with pytest.raises(UsageError, match=r"holds no qasper\.jsonl; download it again"):
        next(tasks.get("qasper").samples(BYTES, 500, 3))


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *arguments, **options: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(
        UsageError, match=r"trec: needs LongBench's files, and the Hub cannot give them \(no network\)"
    ) as caught:
        tasks.get("trec")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"input": "x", "context": "y", "answers": ["z"]}', "line 2 is no line of LongBench \\(no 'all_classes'\\)"),
        (json.dumps(row(1, answers="gold")), "line 2 is no line of LongBench"),
        (json.dumps(row(1, answers=[])), "line 2 is no line of LongBench"),
        (json.dumps(row(1, context=3)), "line 2 is no line of LongBench"),
        ("{", "line 2 is no line of LongBench"),
    ],
)
def test_a_line_of_another_shape_is_named(line: str, reason: str, data: Path) -> None:
    (data / "trec.jsonl").write_text(json.dumps(row(0)) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=reason) as caught:
        next(tasks.get("trec", data=str(data)).samples(BYTES, 500, 1))
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file_is_one_line(data: Path) -> None:
    (data / "lcc.jsonl").unlink()
    with pytest.raises(UsageError, match=r"lcc: .* holds no lcc\.jsonl; unpack data\.zip of https://"):
        tasks.get("lcc", data=str(data))
    (data / "trec.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no questions"):
        next(tasks.get("trec", data=str(data)).samples(BYTES, 500, 1))
