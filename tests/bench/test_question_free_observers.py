"""benchmarks/question_free: observers of the model's own questions, requests alone, and several observers in one reading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.question_free import __main__ as study_command
from benchmarks.question_free import own
from benchmarks.question_free.documents import read_documents
from benchmarks.question_free.observe import joined
from benchmarks.question_free.observers import OBSERVERS, OUTLINE, Exchange, Observer, chunks_of
from benchmarks.question_free.observing import OTHERS
from benchmarks.question_free.recipes import groups
from dropkv.bench.results import Results
from dropkv.bench.tasks import Question, Sample, Task
from dropkv.observers.replay import plan_replays
from dropkv.prompts import Seam
from tests import tiny

N = 130
NOTES = (
    (Exchange("Where is it?", "In the house."), Exchange("Who was there?", "Nobody.")),
    (Exchange("What then?", ""),),
    (Exchange("And who?", "All."), Exchange("Why so?", "It was late.")),
)
STATISTICS = ["step/max", "p/max", "step/sum", "step/l4"]


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny.VOCABULARY - 10, (2, N), generator=generator).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def seam(model):
    return Seam.of(model.tokenizer, name=model.id)


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ("1. What is it?\n2. Who?\n\n3) Where?\n4. When?", ["What is it?", "Who?", "Where?"]),
        ("Here are three questions:\n- Who?\n* Who?\n10: Why?", ["Who?", "Why?"]),
        ("\n The text says that it rains.\nAll day.", ["The text says that it rains."]),
        (" \n", [own.REQUEST]),
    ],
)
def test_questions_are_found_in_what_the_model_writes(text: str, questions: list[str]) -> None:
    assert own.questions_in(text) == questions


def test_chunks_are_those_of_replays(seam):
    document = documents()[0]
    head = len(seam.head_ids)
    plan = plan_replays(seam, document, head, 50)
    assert [probe.scored for probe in plan.probes] == list(chunks_of(N, head, 50))
    assert Observer(chunk=50).plan(seam, document, head)[0].probes == plan.probes


def test_own_questions_stand_behind_their_chunk(seam):
    document, head = documents()[0], len(seam.head_ids)
    chunks = list(chunks_of(N, head, 50))
    asked, replays = Observer(chunk=50, own="questions").plan(seam, document, head, NOTES)
    answered, _ = Observer(chunk=50, own="answers").plan(seam, document, head, NOTES)
    texts = [
        NOTES[0][0],
        NOTES[1][0],
        NOTES[2][0],
        NOTES[0][1],
        NOTES[2][1],
    ]  # the first of each chunk, then the second
    assert [replay.turn for replay in replays] == [0, 0, 0, 1, 1]
    assert [probe.scored for probe in asked.probes] == [*chunks, chunks[0], chunks[2]]
    assert all(probe.seen == ((0, head),) for probe in asked.probes)
    for probe, longer, replay, text in zip(asked.probes, answered.probes, replays, texts, strict=True):
        question = tuple(seam.question_ids(text.question))
        assert probe.ids == question
        assert longer.ids == question + tuple(seam.answer_ids(text.answer))
        assert replay.own.tolist() == [-1] * len(question)


def test_a_request_alone_repeats_nothing(seam):
    document, head = documents()[0], len(seam.head_ids)
    alone = OBSERVERS["outline alone"].plan(seam, document, head)[0].probes
    behind = OBSERVERS["outline and replay"].plan(seam, document, head)[0].probes
    asking = tuple(seam.question_ids(OUTLINE))
    assert [probe.ids for probe in alone] == [asking]
    assert [probe.ids for probe in behind] == [asking + tuple(document[head:])]
    task = OBSERVERS["task and replay"].instruction
    assert task.startswith(OBSERVERS["task alone"].instruction) and task.endswith(OBSERVERS["replay"].instruction)


def test_observers_of_one_reading_see_what_they_see_alone(model, seam):
    observers = {
        "replay": Observer(chunk=50),
        "all": Observer(chunk=36, sees="all"),
        "alone": Observer(chunk=50, instruction=OUTLINE, repeats=False),
        "own": Observer(chunk=50, own="answers"),
    }
    wanted = {"replay": [*STATISTICS, "p/told"], "all": ["p/max"], "alone": STATISTICS, "own": STATISTICS}
    together = read_documents(model, seam, documents(), observers, wanted, notes=[NOTES, NOTES])
    for name, names in wanted.items():
        alone = read_documents(model, seam, documents(), observers, {name: names}, notes=[NOTES, NOTES])
        for one, known in zip(together, alone, strict=True):
            assert list(one.seen[name]) == names
            for statistic in names:
                torch.testing.assert_close(one.seen[name][statistic], known.seen[name][statistic], rtol=1e-4, atol=1e-6)
            assert torch.equal(one.keys[-1], known.keys[-1])


def test_turns_are_put_together_as_queries_of_one_probe(model, seam):
    head, document = len(seam.head_ids), documents()[0]
    first = [chunk[:1] for chunk in NOTES]
    second = [chunk[1:] or chunk[:1] for chunk in NOTES]
    observers = {"own": Observer(chunk=50, own="questions")}

    def seen(notes):
        return read_documents(model, seam, [document], observers, {"own": STATISTICS}, notes=[notes])[0].seen["own"]

    whole, one, other = seen(NOTES), seen(first), seen(second)
    several = torch.zeros(N, dtype=torch.bool)
    for chunk in (0, 2):  # those with two questions
        several[slice(*list(chunks_of(N, head, 50))[chunk])] = True
    for name in STATISTICS:
        both = joined(name.split("/")[1], [one[name], other[name]])
        torch.testing.assert_close(whole[name][..., several], both[..., several], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(whole[name][..., ~several], one[name][..., ~several], rtol=1e-4, atol=1e-6)
    assert bool((whole["step/sum"][..., several] > one["step/sum"][..., several]).all())


def test_several_turns_by_every_reduction():
    parts = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 3.0])]
    assert joined("sum", parts).tolist() == [3.0, 3.0]
    assert joined("max", parts).tolist() == [2.0, 3.0]
    assert joined("l4", parts).tolist() == pytest.approx([17**0.25, 3.0])


def test_documents_with_probes_of_other_lengths_are_read_one_by_one(model, seam):
    observers = {"own": Observer(chunk=50, own="questions")}
    notes = [NOTES, ((Exchange("What is the name of the house?", ""),), *NOTES[1:])]
    both = read_documents(model, seam, documents(), observers, {"own": ["p/max"]}, notes=notes)
    for number, reading in enumerate(both):
        part = slice(number, number + 1)
        alone = read_documents(
            model, seam, documents()[part], observers, {"own": ["p/max"]}, notes=notes[part], nats=False
        )[0]
        assert torch.equal(reading.seen["own"]["p/max"], alone.seen["own"]["p/max"])
        assert float(alone.told.abs().max()) == 0 < float(reading.told.min() + reading.told.max())


def test_nats_are_read_where_a_recipe_needs_them():
    every = {recipe.name: recipe for group in groups(6).values() for recipe in group}
    assert all(every[name].needs_nats for name in ("told", "stream, nats", "step, own surprise", "around"))
    assert not any(every[name].needs_nats for name in ("default", "stream 0.27", "step", *OTHERS))


def test_other_observers_change_nothing_but_the_observer():
    every = {recipe.name: recipe for group in groups(6).values() for recipe in group}
    auto = every["stream 0.27"]
    for name in OTHERS:
        recipe = every[name]
        assert recipe.wanted == {(name, statistic) for _, statistic in auto.wanted}
        assert replace(recipe, name=auto.name, parts=auto.parts, standing=auto.standing, own=auto.own) == auto
    both = every["ranks of replay and own answers"]
    assert both.fuse == "ranks" and both.wanted == auto.wanted | {("own answers", "step/max")}


def test_a_model_writes_and_answers_as_it_would_for_a_chunk_alone(model, seam, monkeypatch):
    head, document = len(seam.head_ids), documents()[0]
    monkeypatch.setattr(own, "chunks_of", lambda n, head: chunks_of(n, head, 50))
    chunks = list(chunks_of(N, head, 50))
    assert len({stop - start for start, stop in chunks}) == 2  # the last is shorter
    written = own.study(model, seam, document)
    for (start, stop), exchanges in zip(chunks, written, strict=True):
        alone = own.study(model, seam, [*seam.head_ids, *document[start:stop]])
        assert alone == [exchanges] and 1 <= len(exchanges) <= own.QUESTIONS


class Once(Task):
    """Two documents of random tokens."""

    def _documents(self, frame, seed):
        raise NotImplementedError

    def samples(self, tokenizer, length, count, seed=0, head_tokens=0):
        for index in range(count):
            ids = tuple(documents()[index][: length - head_tokens])
            yield Sample("once", length, index, ids, (Question("what?", "it is", ("",), 4),))


def test_what_the_model_asks_is_written_once(model, tmp_path, monkeypatch):
    asked: list[int] = []

    def study(model, seam, document):
        asked.append(len(document))
        return [list(NOTES[0])]

    monkeypatch.setattr(own, "study", study)
    task = Once("once", "test", 4)
    samples = list(task.samples(None, N, 2, head_tokens=6))
    for names in ("own questions", "own answers;max of replay and own answers", "step"):
        results = Results(tmp_path)
        one = study_command.Study(model, study_command.chosen(6, "", names), [0.3], results, False)
        assert all(one.missing(task, sample, 2) for sample in samples)
        one.measure(task, samples, 2)
        assert (one.notes is None) == (names == "step")
    assert len(asked) == 2
    methods = {line["method"] for line in Results(tmp_path).read()}
    assert methods == {
        "full",
        "default",
        "own questions",
        "own answers",
        "max of replay and own answers",
        "step",
    }
    notes = list(Results(tmp_path, own.NAME, own.KEY).read())
    assert [line["sample"] for line in notes] == [0, 1]
    assert notes[0]["chunks"] == [[["Where is it?", "In the house."], ["Who was there?", "Nobody."]]]
