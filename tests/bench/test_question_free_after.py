"""benchmarks/question_free/after.py: entries answer as masks do, and each change after the selection is what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.question_free import after, changed
from benchmarks.question_free.again import STATISTICS, Replays
from benchmarks.question_free.answering import Asked, answers
from benchmarks.question_free.documents import Reading, read_documents
from benchmarks.question_free.entries import Entries, EntriesRun, answers_of, read_question
from benchmarks.question_free.observers import Observer
from benchmarks.question_free.packed import pack
from dropkv.bench.packed import WHERE
from dropkv.bench.results import Results
from dropkv.kernels.score import Attended
from dropkv.prompts import Seam
from tests import tiny
from tests.bench.test_question_free import Echo, N, documents

BUDGETS, FILE = [0.15, 0.3], 0.5
OBSERVER = Observer(chunk=50)


@dataclass(frozen=True)
class Asking:
    model: object
    seam: Seam
    document: after.Document
    tokens: tuple[int, ...]
    found: dict


@pytest.fixture(scope="module")
def asking() -> Asking:
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    document = after.Document(model, seam, documents()[0], OBSERVER)
    tokens = tuple(seam.question_ids("what?"))
    return Asking(model, seam, document, tokens, document.answers(tokens, BUDGETS, FILE, 10))


def test_entries_answer_as_masks_do(asking):
    keeps = torch.stack([asking.document.ranking.keep(budget) for budget in (*BUDGETS, FILE, 1.0)])
    known = answers(asking.model, [Asked(asking.document.reading, asking.tokens, keeps)], 10)[0]
    cells = [(after.AUTO, budget) for budget in (*BUDGETS, FILE)] + [("full", 1.0)]
    assert [asking.found[cell] for cell in cells] == [
        (answer, int(keep.sum())) for answer, keep in zip(known, keeps, strict=True)
    ]
    assert len({tuple(answer) for answer in known}) == 4  # or it would show nothing


def test_all_rows_are_answered_from_as_many_entries(asking):
    wanted = {(name, budget) for name in after.NAMES for budget in BUDGETS} | {(after.AUTO, FILE), ("full", 1.0)}
    assert set(asking.found) == wanted
    layers, heads = asking.document.ranking.shape[:2]
    for (name, budget), (_, count) in asking.found.items():
        kept = layers * heads * int(budget * N)
        if name == "one entry for the rest":
            assert count == kept + layers * heads
        elif name == "second look, heads":
            assert kept - layers * heads <= count <= kept + layers * heads
        else:
            assert count == kept, name


def test_the_reading_is_the_studys(asking):
    wanted = {"replay": list(STATISTICS)}
    known = read_documents(asking.model, asking.seam, documents()[:1], {"replay": OBSERVER}, wanted)[0]
    own = asking.document.reading
    for name in STATISTICS:
        torch.testing.assert_close(own.seen["replay"][name], known.seen["replay"][name])
    everything = torch.ones(asking.document.ranking.shape, dtype=torch.bool)
    for name, again in asking.document.replays.again(everything).items():
        torch.testing.assert_close(again, own.seen["replay"][name], rtol=1e-3, atol=1e-5)


def made(layers: int = 1, heads: int = 2, n: int = 20, d: int = 4) -> Reading:
    generator = torch.Generator().manual_seed(5)
    keys, values = ([torch.randn(heads, n, d, generator=generator) for _ in range(layers)] for _ in range(2))
    return Reading(tuple(range(n)), keys, values, torch.zeros(n))


def test_replays_without_some_keys_are_attention_over_the_others():
    reading = made()
    generator = torch.Generator().manual_seed(6)
    sinks, ranges, m, scale = 3, [(3, 12), (12, 20)], 5, 0.5
    queries, own, parts = [], [], []
    for start, stop in ranges:
        q = torch.randn(2, 3, m, 4, generator=generator)
        own_keys, own_values = (torch.randn(2, m, 4, generator=generator) for _ in range(2))
        places = [*range(sinks), *range(start, stop)]
        logits = scale * q @ torch.cat([reading.keys[0][:, places], own_keys], 1).transpose(1, 2).unsqueeze(1)
        logits[..., len(places) :] += torch.full((m, m), -torch.inf).triu(1)
        outputs = logits.softmax(-1) @ torch.cat([reading.values[0][:, places], own_values], 1).unsqueeze(1)
        seen = (reading.keys[0][:, start:stop], reading.values[0][:, start:stop])
        queries.append(Attended(q, *seen, scale, outputs, logits.logsumexp(-1)))
        own.append((own_keys, own_values))
        parts.append(places)
    keep = torch.rand(1, 2, 20, generator=generator) < 0.4
    keep[..., 0] = True
    replays = Replays(reading, queries, ranges)
    found = replays.again(keep)
    paid = torch.zeros(2, 3, 20, dtype=torch.float64)
    for places, one, (own_keys, own_values) in zip(parts, queries, own, strict=True):
        for head in range(2):
            known = [place for place in places if keep[0, head, place]]
            asked = [place for place in known if place >= sinks]
            for query in range(3):
                rows = one.q[head, query].double()
                for t in range(m):
                    whole = torch.cat([reading.keys[0][head, places], own_keys[head, : t + 1]]).double()
                    paid[head, query, places] += (scale * whole @ rows[t]).softmax(-1)[: len(places)]
                keys = torch.cat([reading.keys[0][head, known], own_keys[head]]).double()
                values = torch.cat([reading.values[0][head, known], own_values[head]]).double()
                logits = scale * rows @ keys.T
                logits[:, len(known) :] += torch.full((m, m), -torch.inf).triu(1)
                p = logits.softmax(-1)
                distance = torch.cdist((p @ values), values)[:, len(known) - len(asked) : len(known)]
                p = p[:, len(known) - len(asked) : len(known)]
                step = p / (1 - p) * distance
                for name, want in zip(STATISTICS, (step.amax(0), step.sum(0), p.amax(0)), strict=True):
                    own_found = found[name][0, head, query, asked].double()
                    torch.testing.assert_close(own_found, want, rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(replays.paid[0].double(), paid, rtol=1e-4, atol=1e-6)
    assert float(found["p/max"].masked_select(~keep.unsqueeze(2)).abs().max()) == 0


def test_what_goes_is_merged_into_the_nearest():
    keep = torch.tensor([1, 1, 0, 0, 0, 1, 0, 0, 0, 1]).bool()
    assert changed.nearest(keep).tolist() == [
        5,
        5,
        5,
        5,
        5,
        5,
        5,
        5,
        9,
        9,
    ]  # not into the first four; 7 is as near to 9
    reading = made(heads=1, n=10)
    keep = keep.view(1, 1, -1)
    for weight in (0.0, 0.25, 1.0):
        entries = changed.merged(reading, keep, torch.full((1, 1, 10), weight))
        values = reading.values[0][0]
        want = torch.stack([values[0], values[1], values[5], values[9]])
        want[2] = (values[5] + weight * values[[2, 3, 4, 6, 7]].sum(0)) / (1 + 5 * weight)
        want[3] = (values[9] + weight * values[8]) / (1 + weight)
        torch.testing.assert_close(entries.values[0][0], want)
        assert torch.equal(entries.keys[0][0], reading.keys[0][0][[0, 1, 5, 9]])
    scores = torch.arange(10.0).view(1, 1, -1)
    assert changed.by_score(scores, keep)[0, 0, 2:].tolist() == pytest.approx([0.4, 0.6, 0.8, 1, 1, 1, 8 / 9, 1])


def test_keys_are_merged_as_if_they_stood_in_one_place(asking):
    from dropkv.attention import rotation
    from dropkv.kernels.moments import rotate

    d = asking.document.reading.keys[0].shape[-1]
    generator = torch.Generator().manual_seed(7)
    one, other = (torch.randn(d, generator=generator) for _ in range(2))
    cos, sin = rotation(asking.model.network, 0, torch.arange(10), 10)
    still = one.repeat(10, 1)
    still[7] = other
    reading = Reading(tuple(range(10)), [rotate(still, cos, sin)[None]], [torch.ones(1, 10, d)], torch.zeros(10))
    keep = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0, 0, 1]).bool().view(1, 1, -1)
    entries = changed.merged(reading, keep, torch.ones(1, 1, 10), asking.model)
    want = rotate(torch.stack([one, (3 * one + other) / 4, one]), cos[[3, 5, 9]], sin[[3, 5, 9]])
    torch.testing.assert_close(entries.keys[0][0, 3:], want, rtol=1e-4, atol=1e-5)


def attended(entries: Entries, group: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    run = EntriesRun([entries], 3, group)
    heads, _, d = entries.keys[0].shape
    q, k, v = (torch.randn(1, count, 3, d, generator=generator) for count in (heads * group, heads, heads))
    return run.attend(0, q, k, v, scale=0.5, window=None, softcap=None)


def test_one_entry_stands_for_many_that_are_alike():
    reading = made()
    keep = torch.zeros(1, 2, 20, dtype=torch.bool)
    keep[..., :6] = True
    for part in (reading.keys, reading.values):
        part[0][:, 6:] = part[0][:, 6:7]
    everything = Entries.of(reading.keys, reading.values, torch.ones_like(keep))
    torch.testing.assert_close(attended(changed.with_rest(reading, keep), 3), attended(everything, 3))
    assert attended(changed.with_rest(reading, torch.ones_like(keep)), 3).isfinite().all()


def test_bias_gives_kept_entries_what_all_had():
    reading = made()
    keep = torch.zeros(1, 2, 20, dtype=torch.bool)
    keep[..., :5] = True
    paid = torch.ones(1, 2, 3, 20)
    paid[0, 1, 2, :5] = 3.0
    bias = changed.with_bias(reading, keep, paid).bias[0]
    assert bias.shape == (2, 3, 5)
    assert bias[0].flatten().tolist() == pytest.approx([math.log(4)] * 15)
    assert bias[1, 2].tolist() == pytest.approx([math.log(2)] * 5)
    one = replace(
        reading, keys=[x * 0 for x in reading.keys]
    )  # all entries alike: four copies of five are those of all twenty
    one.values[0][:, 5:] = one.values[0][:, :5].repeat(1, 3, 1)
    everything = Entries.of(one.keys, one.values, torch.ones_like(keep))
    torch.testing.assert_close(
        attended(changed.with_bias(one, keep, torch.ones(1, 2, 3, 20)), 3), attended(everything, 3)
    )


def test_a_second_selection_lies_in_the_first(asking):
    document = asking.document
    for budget in BUDGETS:
        first = document.ranking.keep(2 * budget)
        again = changed.selected_again(
            document.recipe, document.reading, document.replays, document.text, first, budget
        )
        assert not bool((again & ~first).any()) and again.sum() == document.ranking.keep(budget).sum()
        assert bool(again[..., :4].all() and again[..., -4:].all())
        assert not torch.equal(again, document.ranking.keep(budget))


def test_a_second_look_lies_in_the_file_and_holds_what_the_question_looks_at(asking):
    document = asking.document
    whole = document.ranking.keep(FILE)
    entries = document.of(whole)
    run, first = read_question(asking.model, [entries, document.of(torch.ones_like(whole))], asking.tokens, N, 10, 0)
    looks = changed.looked_at(document.look, document.reading, document.text, whole, run.paid, 0.3)
    assert list(looks) == list(after.SCOPES)
    for keep in looks.values():
        assert not bool((keep & ~whole).any()) and bool(keep[..., :4].all() and keep[..., -4:].all())
    shares = looks["heads"].sum(-1) / whole.sum(-1)
    assert float((shares - shares.mean()).abs().max()) < 0.1
    largest, total = run.paid[1]
    assert bool((largest <= total * 1.0001).all()) and float(total.sum()) < len(asking.tokens) * 4
    head = largest[0].amax(0)[: int(whole[1, 0].sum())]
    places = torch.nonzero(whole[1, 0]).squeeze(-1)
    assert bool(looks["heads"][1, 0, places[4:-4][head[4:-4].argmax()]])
    # a run that goes on with all of the file answers as if it had never stopped
    going = run.going_on(0, [entries, document.of(looks["heads"])])
    same, _ = answers_of(asking.model, going, first[:1].expand(2), N + len(asking.tokens), 10)
    assert same == asking.found[after.AUTO, FILE][0]


def test_what_cannot_be_answered_from_changed_entries_is_refused():
    run = EntriesRun([Entries.of([torch.zeros(1, 3, 4)], [torch.zeros(1, 3, 4)], torch.ones(1, 1, 3).bool())], 2, 1)
    x = torch.zeros(1, 1, 1, 4)
    for window, softcap in ((8, None), (None, 2.0)):
        with pytest.raises(ValueError, match="full attention"):
            run.attend(0, x, x, x, scale=1.0, window=window, softcap=softcap)


def test_a_study_goes_on_where_it_stopped_and_is_packed(tmp_path):
    model = tiny.model("llama")
    task = Echo("echo", "test", 4)
    study = after.Study(model, BUDGETS, FILE, Results(tmp_path), OBSERVER)
    sample = next(task.samples(None, N, 1, head_tokens=6))
    assert study.missing(task, sample, 2)
    study.measure(task, sample, 2)
    again = after.Study(model, BUDGETS, FILE, Results(tmp_path), OBSERVER)
    assert not again.missing(task, sample, 2)
    lines = list(Results(tmp_path).read())
    assert len(lines) == 2 + len(after.NAMES) * 2
    assert pack(lines, dict.fromkeys(WHERE, "x")) == pack(reversed(lines), dict.fromkeys(WHERE, "x"))
