"""benchmarks/question_free: its statistics, rules and default are the library's own, and what is of its own does what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.question_free import __main__ as study
from benchmarks.question_free.answering import Asked, answers, likelihoods
from benchmarks.question_free.documents import read_documents
from benchmarks.question_free.keep import Ranking, Rule
from benchmarks.question_free.observe import Replay
from benchmarks.question_free.observers import OBSERVERS, Observer
from benchmarks.question_free.recipe import Recipe
from benchmarks.question_free.recipes import DEFAULT, FINALISTS, groups
from benchmarks.question_free.table import table
from benchmarks.question_free.text import Text, pooled_in_runs
from dropkv import methods
from dropkv.bench.masks import Masks
from dropkv.bench.results import Results
from dropkv.bench.tasks import Question, Sample, Task
from dropkv.errors import UsageError
from dropkv.methods import Method, Pool
from dropkv.methods._base import probability
from dropkv.methods._layer import LayerScores
from dropkv.prompts import Seam
from dropkv.spans import Cuts
from tests import tiny
from tests.bench.synthetic import line

N = 130


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny.VOCABULARY - 10, (2, N), generator=generator).tolist()


@pytest.fixture(scope="module")
def read():
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    observers = {
        "plain": Observer(chunk=50),
        "shuffled": Observer(chunk=50, pieces=4),
        "all": Observer(chunk=50, sees="all"),
    }
    wanted = {
        "plain": [
            "step/max",
            "p/max",
            "step-wo/max",
            "p/content",
            "p/told",
            "step/sum",
            "step/top",
            "step/l4",
            "p/copy",
            "p/same",
        ],
        "shuffled": ["p/content", "p/copy"],
        "all": ["p/max"],
    }
    return model, seam, read_documents(model, seam, documents(), observers, wanted)


@pytest.mark.parametrize("rule", ["uniform", "head-adaptive", "model-wide"])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_rules_are_those_of_the_library(rule, alpha):
    raw = torch.randint(0, 9, (3, 2, 40), generator=torch.Generator().manual_seed(1)).float()  # full of ties
    method = Method("m", "", probability, pool=Pool("max", 3), rule=rule, alpha=alpha, forced_first=3, forced_last=2)
    own = Ranking(Rule(rule, alpha, first=3, last=2), Pool("max", 3)(raw), raw)
    known = Masks(method, [LayerScores(one) for one in raw])
    for budget in (0.15, 0.4, 1.0):
        assert torch.equal(own.keep(budget), known.keep(budget))


def test_least_and_layer_share_are_kept_within_the_budget():
    raw = torch.rand((4, 2, 50), generator=torch.Generator().manual_seed(2))
    raw[0] *= 1e-3  # a layer that wins nothing
    for rule, counts in ((Rule(least=6, first=1, last=1), 12), (Rule(layer_share=0.5, first=1, last=1), 10)):
        keep = Ranking(rule, raw, raw).keep(0.2)
        assert int(keep.sum()) == 4 * 2 * 10
        assert int(keep[0].sum()) == counts


def test_statistics_are_the_librarys_scores(read):
    model, seam, readings = read
    head = len(seam.head_ids)
    from dropkv.bench.survey import survey

    wanted = [("replay", name) for name in ("dropkv", "snapkv")]
    known = survey(model, seam, documents(), wanted, head_tokens=head, chunk=50, window=8, seeds=[0, 0])
    for reading, surveyed in zip(readings, known, strict=True):
        for statistic, name in (("step/max", "dropkv"), ("p/max", "snapkv")):
            want = surveyed.together.raw("replay", name)[surveyed.number]
            torch.testing.assert_close(reading.seen["plain"][statistic].amax(2), want, rtol=1e-4, atol=1e-6)
        assert torch.equal(reading.keys[1], surveyed.keys[1])


def test_todays_default_is_what_compress_keeps(read):
    model, seam, readings = read
    head = len(seam.head_ids)
    recipe = next(one for one in groups(head)["today"] if one.name == DEFAULT)
    ranking = recipe.ranking(
        {"replay": readings[0].seen["plain"]}, readings[0].told, Text.of(model.tokenizer, readings[0].ids, model.device)
    )
    method = methods.get("adadropkv").under_replay(head)
    layers = [LayerScores(one.amax(1)) for one in readings[0].seen["plain"]["step/max"]]
    assert torch.equal(ranking.keep(0.3), Masks(method, layers).keep(0.3))


def test_statistics_agree_with_each_other(read):
    _, seam, readings = read
    head = max(4, len(seam.head_ids))
    for reading in readings:
        plain, shuffled = reading.seen["plain"], reading.seen["shuffled"]
        assert bool((plain["p/content"] <= plain["p/max"]).all())
        assert bool((plain["p/told"] <= plain["p/content"] * reading.told.max() * 1.0001).all())
        assert bool((plain["p/copy"] <= plain["p/content"]).all() and (plain["p/same"] <= plain["p/max"]).all())
        assert float(plain["p/copy"][..., head:].min()) > 0
        assert float(plain["p/copy"][..., :head].max()) == 0  # sinks are not repeated
        assert bool(
            (plain["step/top"] <= plain["step/max"]).all() and (plain["step/l4"] >= plain["step/max"] * 0.9999).all()
        )
        assert bool((plain["step/sum"] >= plain["step/l4"] * 0.9999).all())
        assert float((shuffled["p/copy"] == 0).float().mean()) > 0.2  # what starts a piece cannot be predicted
        assert bool(
            (reading.seen["all"]["p/max"].mean() < plain["p/max"].mean()).all()
        )  # shared with the rest of the document


def test_a_reading_is_the_same_alone(read):
    model, seam, readings = read
    alone = read_documents(model, seam, documents()[1:], {"plain": Observer(chunk=50)}, {"plain": ["p/told"]})[0]
    torch.testing.assert_close(alone.seen["plain"]["p/told"], readings[1].seen["plain"]["p/told"], rtol=1e-4, atol=1e-6)


def test_blocks_of_any_size_give_the_same(read, monkeypatch):
    model, seam, readings = read
    monkeypatch.setattr("dropkv.kernels.score.BLOCK_ELEMENTS", 6000)
    monkeypatch.setattr("dropkv.kernels.score.CPU_HEADS", 4)  # heads of both documents at once, as on a GPU
    names = list(readings[0].seen["plain"])
    again = read_documents(model, seam, documents(), {"plain": Observer(chunk=50)}, {"plain": names})
    for one, known in zip(again, readings, strict=True):
        for name in names:
            torch.testing.assert_close(
                one.seen["plain"][name], known.seen["plain"][name], rtol=1e-4, atol=1e-6, msg=name
            )


def test_chunks_that_go_together_on_a_gpu_give_the_same(read, monkeypatch):
    model, seam, readings = read
    monkeypatch.setattr("dropkv.prefill.Cuts", lambda *args, together: Cuts(*args, together=True))
    observers = {"plain": Observer(chunk=36), "shuffled": Observer(chunk=36, pieces=4)}  # three of them are alike
    wanted = {"plain": list(readings[0].seen["plain"]), "shuffled": ["p/content", "p/copy"]}
    together = read_documents(model, seam, documents(), observers, wanted)
    for number, one in enumerate(together):
        alone = read_documents(model, seam, documents()[number : number + 1], observers, wanted)[0]
        for observer, names in wanted.items():
            for name in names:
                torch.testing.assert_close(
                    one.seen[observer][name], alone.seen[observer][name], rtol=1e-4, atol=1e-6, msg=name
                )


def test_replays_know_what_they_repeat_and_predict():
    replay = Replay.of(2, [7, 8, 4, 5, 6], 4)
    assert replay.own.tolist() == [-1, -1, 7, 8, 4, 5, 6]
    assert replay.next.tolist() == [-1, 7, 8, -1, 5, 6, -1]


class Letters:
    """A tokenizer whose tokens are given."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return self.pieces[ids[0]]

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.pieces[token]


def test_words_and_sentences_follow_the_tokens():
    pieces = [" is", ":", " ", "4", "9", ".", " Em", "acs", "\n", "The"]
    text = Text.of(Letters(pieces), range(len(pieces)), torch.device("cpu"))
    assert text.words.tolist() == [0, 1, 2, 3, 3, 4, 5, 5, 6, 7]
    assert text.sentences.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]
    x = torch.tensor([[3.0, 0, 0, 3, 4, 0, 1, 2, 0, 5]])
    assert pooled_in_runs(x, text.words, "sum")[0].tolist() == [3, 0, 0, 7, 7, 0, 3, 3, 0, 5]
    assert pooled_in_runs(x, text.words, "l2")[0, 3:5].tolist() == [5, 5]
    assert pooled_in_runs(x, text.words, "max")[0, 3:8].tolist() == [4, 4, 0, 2, 2]
    assert pooled_in_runs(x, text.words, "mean")[0, 3:8].tolist() == [3.5, 3.5, 0, 1.5, 1.5]


def test_together_makes_heads_keep_the_same_tokens():
    generator = torch.Generator().manual_seed(0)
    x = 0.5 + torch.rand((2, 3, 1, 30), generator=generator)
    standing = 2.0 ** torch.randperm(30, generator=generator)
    seen = {"replay": {"step/max": x, "p/told": standing.expand_as(x)}}
    text = Text(torch.arange(30), torch.zeros(30, dtype=torch.int64))
    rule = Rule("uniform", first=1, last=1)
    shared = Recipe("a", together=4.0, rule=rule).ranking(seen, torch.ones(30), text).keep(0.2)
    alone = Recipe("b", rule=rule).ranking(seen, torch.ones(30), text).keep(0.2)
    assert bool((shared == shared[0, 0]).all()) and not bool((alone == alone[0, 0]).all())


def test_balance_and_heads():
    x = torch.rand((2, 3, 1, 30), generator=torch.Generator().manual_seed(0))
    x[1, 2] *= 100
    seen = {"replay": {"step/max": x, "step/sum": -x}}
    text = Text(torch.arange(30), torch.zeros(30, dtype=torch.int64))
    rule = Rule(first=1, last=1)

    def counts(**changes: object) -> list[int]:
        recipe = Recipe("r", rule=rule, **changes)  # type: ignore[arg-type]
        return recipe.ranking(seen, torch.ones(30), text).keep(0.2).sum(-1).flatten().tolist()

    assert counts()[5] == 26 and max(counts(balance="head max")) < 12
    assert sum(number > 2 for number in counts(balance="head mean", heads=1 / 3)) == 2
    recipe = Recipe("r", rule=rule, balance="head mean", heads=1 / 6, grow=1.0)
    for budget, heads in ((0.1, 2), (0.2, 4)):
        keep = recipe.ranking(seen, torch.ones(30), text, budget).keep(0.2)
        assert int((keep.sum(-1) > 2).sum()) == heads
    faded = counts(balance="head ranks", fade=0.1)
    order = sorted(range(6), key=lambda head: -float(x.flatten(0, 2)[head].mean()))
    assert [faded[head] for head in order] == sorted(faded, reverse=True) and faded[order[0]] > faded[order[-1]]
    assert sum(counts(balance="head ranks")) == 36 and min(counts(seed=4)) >= 4 > min(counts())


def test_documents_ranked_together_are_ranked_alone(read):
    model, seam, readings = read
    every = [recipe for own in groups(len(seam.head_ids)).values() for recipe in own]
    alone = [Text.of(model.tokenizer, reading.ids, model.device) for reading in readings]
    text = Text.of_all(model.tokenizer, [reading.ids for reading in readings], model.device)
    told = torch.stack([reading.told for reading in readings])
    plain = [reading.seen["plain"] for reading in readings]
    known = set(plain[0])
    compared = 0
    for recipe in every:
        if {name for _, name in recipe.wanted} <= known and {observer for observer, _ in recipe.wanted} == {"replay"}:
            both = {name: torch.stack([one[name] for one in plain]) for name in known}
            keep = recipe.ranking({"replay": both}, told, text, 0.1).keep(0.3)
            for number in range(2):
                single = recipe.ranking({"replay": plain[number]}, told[number], alone[number], 0.1).keep(0.3)
                assert torch.equal(keep[number], single), recipe.name
            compared += 1
    assert compared > 80


def test_rivals_are_the_librarys_methods():
    from dropkv.bench.survey import survey

    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    head = len(seam.head_ids)
    readings = read_documents(
        model, seam, documents(), {"replay": Observer(chunk=50)}, {"replay": ["p/max", "p-value/max"]}
    )
    wanted = [("replay", "kvzip"), ("replay", "laprox")]
    known = survey(model, seam, documents(), wanted, head_tokens=head, chunk=50, window=8, seeds=[0, 0])
    recipes = {recipe.name: recipe for recipe in groups(head)["streaming"]}
    for reading, surveyed in zip(readings, known, strict=True):
        text = Text.of(model.tokenizer, reading.ids, model.device)
        for name in ("kvzip", "laprox"):
            keep = recipes[name].ranking(reading.seen, reading.told, text).keep(0.3)
            want = surveyed.keep("replay", name, 0.3)
            assert float((keep == want).float().mean()) > 0.999, name


def test_every_candidate_has_its_name_and_can_be_ranked(read):
    model, seam, readings = read
    every = [recipe for own in groups(len(seam.head_ids)).values() for recipe in own]
    assert len({recipe.name for recipe in every}) == len(every) > 150
    assert set(FINALISTS) <= {recipe.name for recipe in every}
    assert {observer for recipe in every for observer, _ in recipe.wanted} == set(OBSERVERS)
    text = Text.of(model.tokenizer, readings[0].ids, model.device)
    one = readings[0].seen["plain"]["p/max"]
    for recipe in every:
        seen: dict[str, dict[str, torch.Tensor]] = {}
        for observer, statistic in recipe.wanted:
            seen.setdefault(observer, {})[statistic] = one
        assert int(recipe.ranking(seen, readings[0].told, text).keep(0.5).sum()) == 3 * 2 * (N // 2)


def test_unknown_names_are_refused():
    for arguments in (("nothing", ""), ("", "told;nothing")):
        with pytest.raises(UsageError, match="'nothing': --list"):
            study.chosen(6, *arguments)
    assert [recipe.name for recipe in study.chosen(6, "", "told")] == [DEFAULT, "told"]
    assert {recipe.name for recipe in study.chosen(6, "finalists", "")} == set(FINALISTS)


class Echo(Task):
    """Documents of random tokens; any answer that has a token is right."""

    def _documents(self, frame, seed):
        raise NotImplementedError

    def samples(self, tokenizer, length, count, seed=0, head_tokens=0):
        for index in range(count):
            ids = tuple(documents()[index][: length - head_tokens])
            yield Sample("echo", length, index, ids, (Question("what?", "it is", ("",), 4),))


def test_a_study_goes_on_where_it_stopped(tmp_path):
    model = tiny.model("llama")
    recipes = study.chosen(6, "", "told;around")
    task = Echo("echo", "test", 4)
    for likelihood in (False, True):
        results = Results(tmp_path / str(likelihood))
        first = study.Study(model, recipes, [0.3, 1.0], results, likelihood)
        samples = list(task.samples(None, N, 2, head_tokens=6))
        assert all(first.missing(task, sample, 2) for sample in samples)
        first.measure(task, samples, 2)
        lines = list(Results(tmp_path / str(likelihood)).read())
        assert len(lines) == 2 * (1 + 3 * 2)
        again = study.Study(model, recipes, [0.3, 1.0], Results(tmp_path / str(likelihood)), likelihood)
        assert not any(again.missing(task, sample, 2) for sample in samples)
        full = {one["sample"]: one["prediction"] for one in lines if one["method"] == "full"}
        for one in lines:
            if one["budget"] == 1.0 and not likelihood:
                assert one["prediction"] == full[one["sample"]]
            if one["budget"] == 1.0 and likelihood:
                assert one["score"] == 1.0
        assert "told" in table(lines, DEFAULT)


def test_tables_are_printed_of_folders_that_others_write_into(tmp_path, monkeypatch, capsys):
    line = {"model": "m", "task": "noise", "length": 1536, "setting": "question-free", "observer": "replay"}
    line |= {"seed": 2, "question": 0, "kept_entries": 1}
    arguments = ["question_free", "-o", str(tmp_path / "0"), str(tmp_path / "1")]
    writers = [Results(tmp_path / str(part)) for part in (0, 1)]
    with writers[0].writing(), writers[1].writing():
        for part, results in enumerate(writers):
            for method, budget, score in (("full", 1.0, 1.0), (DEFAULT, 0.1, float(part))):
                cell = {"method": method, "budget": budget, "sample": part, "score": score}
                results.add([line | cell])
        monkeypatch.setattr("sys.argv", [*arguments, "--table"])
        study.main()
        assert "50.0" in capsys.readouterr().out
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as ended:
            study.main()
        assert ended.value.code == 1 and capsys.readouterr().err == (
            f"another run writes into {tmp_path / '0'}: wait until it has ended, or name another folder\n"
        )


def test_likelihood_of_the_own_answer(read):
    model, seam, readings = read
    keeps = torch.ones((3, 3, 2, N), dtype=torch.bool)
    keeps[2, ..., 4:-4] = False
    asked = Asked(readings[0], tuple(seam.question_ids("what?")), keeps)
    full, same, less = answers(model, [asked], 5)[0]
    assert full == same
    if len(full) > 1:
        (nats, right), second, _ = likelihoods(model, asked, full[:1], full[1:] or full)
        assert right and (nats, right) == second
    assert isinstance(less, list)


def test_table_sorts_by_the_share_of_the_full_cache():
    lines = []
    for sample in range(10):
        lines.append(line(method="full", budget=1.0, sample=sample, score=float(sample < 8)))
        for name, right in (("default", 4), ("better", 6)):
            lines.append(line(method=name, budget=0.1, sample=sample, score=float(sample < right)))
    rows = table(lines, "default").splitlines()
    assert rows[0].startswith("full cache 80.0")
    assert rows[2].split()[:4] == ["better", "0.750", "60.0", "0.750"] and "+20.0" in rows[2]
    assert rows[3].split()[:2] == ["default", "0.500"]


def test_table_tells_seeds_apart():
    lines = []
    for seed, right in ((3, 8), (4, 2)):
        for sample in range(10):
            lines.append(line(method="full", budget=1.0, seed=seed, sample=sample, score=1.0))
            lines.append(line(method="default", budget=0.1, seed=seed, sample=sample, score=float(sample < right)))
    rows = table(lines, "default").splitlines()
    assert rows[0].endswith("20 documents") and rows[2].split()[:4] == ["default", "0.500", "50.0", "0.500"]


def test_spread_starts_each_part_once_and_joins_them(tmp_path, monkeypatch, capsys):
    from benchmarks.question_free import spread

    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command[command.index("-m") + 1 :])
        return type("Done", (), {"returncode": int("four-keys" in command and "1/2" in command)})()

    monkeypatch.setattr(spread.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["x", "-o", str(tmp_path), "--tasks", "prose,four-keys", "--samples", "8"])
    with pytest.raises(SystemExit) as left:
        spread.main()
    assert left.value.code == 1 and "1 of the processes failed" in capsys.readouterr().err
    measured, (table_of,) = commands[:-1], commands[-1:]
    assert sorted(one[one.index("--part") + 1] for one in measured) == ["0/2", "0/2", "1/2", "1/2"]
    assert all(one[-2:] == ["--samples", "8"] and one[0] == "benchmarks.question_free" for one in measured)
    folders = [one[one.index("-o") + 1] for one in measured]
    assert sorted(folders) == sorted(table_of[2:6]) and len(set(folders)) == 4 and "--table" in table_of
