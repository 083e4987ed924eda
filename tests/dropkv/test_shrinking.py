"""A file shrunk is the file that compress makes at the smaller budget: by random scores, and by real compressions, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dropkv
from dropkv.budgets import kept_count
from dropkv.cache import Tail
from dropkv.errors import BudgetError, DropkvError
from dropkv.keeper import Keeper
from dropkv.methods import LayerScores, Pool, get, names
from dropkv.models import LayerGeometry
from dropkv.settings import Sampling
from formats import LayerInfo, read_file, read_header, write_file
from tests import tiny
from tests.formats.conftest import build_sample

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
SETTINGS = {"chunk": 40, "name": "harbour.txt", "fidelity": False}
SHORT = Sampling(max_new_tokens=8)


def file_of(path, method, budget, n, kinds, seed, levels):
    """The file of a document whose scores are random with ties; keys, values and scores do not depend on the budget."""
    generator = torch.Generator().manual_seed(seed)
    geometry = [LayerGeometry(kind, 2 * heads, heads, 3, 2, 5 if kind == "sliding" else None) for kind, heads in kinds]
    kept = kept_count(budget, n, len(method.forced(n)))
    keeper = Keeper(method, kept, n, geometry)
    for index, layer in enumerate(geometry):
        k, v = (torch.randn(layer.kv_heads, n, d, generator=generator) for d in (layer.d_k, layer.d_v))
        raw = torch.randint(levels, (layer.kv_heads, n), generator=generator).float()
        if layer.kind == "sliding":
            keeper.sliding(index, k, v)
        else:
            keeper.full(index, SimpleNamespace(k=k, v=v), [LayerScores(raw)])
    layers = keeper.finish()
    sample = build_sample("float32", with_tokens=False)
    infos = tuple(
        LayerInfo(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window, entries.positions.numel())
        for g, entries in zip(geometry, layers, strict=True)
    )
    own = replace(
        sample.metadata.budget,
        asked=budget,
        kept=kept,
        forced_first=method.forced_first,
        forced_last=method.forced_last,
        nested=method.nested,
    )
    document = replace(sample.metadata.document, tokens=n, head_tokens=0, whole_tokens=n)
    metadata = replace(
        sample.metadata, writer=f"dropkv {dropkv.__version__}", layers=infos, budget=own, document=document
    )
    write_file(path, metadata, layers, None, overwrite=True)
    return metadata


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_shrunk_files_are_compressed_files_on_random_scores_with_ties(scratch, data):
    rule = data.draw(st.sampled_from(["uniform", "head-adaptive", "model-wide", "newest half"]))
    method = replace(
        get("adadropkv"),
        rule="uniform" if rule == "newest half" else rule,
        recent_half=rule == "newest half",
        alpha=data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        forced_first=data.draw(st.integers(0, 3)),
        forced_last=data.draw(st.integers(0, 6)) if rule != "newest half" else 0,
        pool=Pool("max", data.draw(st.sampled_from([1, 3]))) if rule != "newest half" else None,
    )
    if rule == "newest half":
        method = replace(method, forced_first=0)
    assert method.nested
    n = data.draw(st.integers(1, 24))
    kinds = data.draw(
        st.lists(st.tuples(st.sampled_from(["full", "full", "sliding"]), st.integers(1, 3)), min_size=1, max_size=4)
    )
    budget = st.one_of(st.just(1.0), st.integers(1, n + 3), st.floats(0.02, 1.0).map(lambda share: round(share, 3)))
    large, small = data.draw(budget), data.draw(budget)
    seed, levels = data.draw(st.integers(0, 10_000)), data.draw(st.integers(1, 9))
    paths = [scratch / name for name in ("large.kv", "small.kv", "shrunk.kv")]
    have = file_of(paths[0], method, large, n, kinds, seed, levels)
    forced = len(method.forced(n))
    asked = small if isinstance(small, int) else int(small * n + 1e-9)
    if asked < min(forced, n) or kept_count(small, n, forced) > have.budget.kept:
        with pytest.raises(BudgetError):
            dropkv.shrink(paths[0], small, paths[2], overwrite=True)
        return
    want = file_of(paths[1], method, small, n, kinds, seed, levels)
    report = dropkv.shrink(paths[0], small, paths[2], overwrite=True)
    assert report.metadata == want and type(report.metadata.budget.asked) is type(small)
    assert paths[2].read_bytes() == paths[1].read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def models():
    return {"llama": tiny.model("llama"), "sliding": tiny.model("qwen2", **SLIDING)}


def nested_methods():
    return sorted(name for name in names() if get(name).nested)


@pytest.mark.parametrize("family", ["llama", "sliding"])
@pytest.mark.parametrize("method", nested_methods())
def test_shrunk_files_are_compressed_files(models, tmp_path, family, method):
    """Every nested method, from everything and from a half, to a share and to a count, and in two steps."""

    def compressed(budget):
        path = tmp_path / f"{budget}.kv"
        if not path.exists():
            dropkv.compress(TEXT, model=models[family], method=method, budget=budget, **SETTINGS).save(path)
        return path

    for large, small in ((1.0, 0.25), (0.5, 0.25), (0.5, 50)):
        shrunk = tmp_path / "shrunk.kv"
        dropkv.shrink(compressed(large), small, shrunk, overwrite=True)
        assert shrunk.read_bytes() == compressed(small).read_bytes()
    dropkv.shrink(compressed(1.0), 0.5, shrunk, overwrite=True)
    dropkv.shrink(shrunk, 0.25, shrunk, overwrite=True)
    assert shrunk.read_bytes() == compressed(0.25).read_bytes()
    assert len({compressed(budget).stat().st_size for budget in (1.0, 0.5, 0.25)}) == 3


@pytest.mark.parametrize("observe", ["tail", "question:What is the code?"])
def test_other_observers_and_options(models, tmp_path, observe):
    options = {"observe": observe, "alpha": 0.6, "pool": 3, "keep_tokens": False, **SETTINGS}
    for budget in (0.6, 0.3):
        made = dropkv.compress(TEXT, model=models["llama"], method="adakv", budget=budget, **options)
        made.save(tmp_path / f"{budget}.kv")
    dropkv.shrink(tmp_path / "0.6.kv", 0.3, tmp_path / "shrunk.kv")
    assert (tmp_path / "shrunk.kv").read_bytes() == (tmp_path / "0.3.kv").read_bytes()
    assert read_file(tmp_path / "shrunk.kv").tokens is None


@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_compressed_files_are_shrunk_to_compressed_files(models, tmp_path, family):
    for budget in (0.6, 0.3):
        made = dropkv.compress(TEXT, model=models[family], budget=budget, zstd=6, **SETTINGS)
        made.save(tmp_path / f"{budget}.kv")
    assert read_header(tmp_path / "0.3.kv").zstd == 6
    dropkv.shrink(tmp_path / "0.6.kv", 0.3, tmp_path / "shrunk.kv")
    assert (tmp_path / "shrunk.kv").read_bytes() == (tmp_path / "0.3.kv").read_bytes()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
def test_quantised_entries_stay_what_they_were(models, tmp_path, kv_dtype):
    """Which entries is what compress says; their numbers are those of the larger file, however they are got."""
    model = models["sliding"]
    for budget in (0.8, 0.3):
        made = dropkv.compress(TEXT, model=model, budget=budget, kv_dtype=kv_dtype, **SETTINGS)
        made.save(tmp_path / f"{budget}.kv")
    dropkv.shrink(tmp_path / "0.8.kv", 0.3, tmp_path / "small.kv")
    large, small, direct = (dropkv.load(tmp_path / name, model=model) for name in ("0.8.kv", "small.kv", "0.3.kv"))
    assert small.metadata == direct.metadata
    for other in (dropkv.load(tmp_path / "0.8.kv", model=model, budget=0.3), large.shrink(0.3)):
        assert other.metadata == small.metadata
        for found, wanted in zip(other.session.prefix.layers, small.session.prefix.layers, strict=True):
            assert all(torch.equal(getattr(found, field), getattr(wanted, field)) for field in ("keys", "values"))
    layers = [kv.session.prefix.layers for kv in (small, direct, large)]
    for number, (found, wanted, whole) in enumerate(zip(*layers, strict=True)):
        for field in ("offsets", "positions", "admit", "scores"):
            assert torch.equal(getattr(found, field), getattr(wanted, field)), field
        keep = whole.admit <= (small.metadata.budget.kept if number else 10**9)
        assert torch.equal(found.keys, whole.keys[keep]) and torch.equal(found.values, whole.values[keep])
    assert small.ask("What is the code?", SHORT).text == large.shrink(0.3).ask("What is the code?", SHORT).text


def test_a_smaller_budget_answers_as_the_shrunk_file_does(models, tmp_path):
    """Loaded with a budget, shrunk in memory, or shrunk on the disk: the same entries, the same logits, bit for bit."""
    model = models["sliding"]
    dropkv.compress(TEXT, model=model, budget=0.6, **SETTINGS | {"fidelity": True}).save(tmp_path / "large.kv")
    assert read_header(tmp_path / "large.kv").metadata.fidelity is not None
    dropkv.shrink(tmp_path / "large.kv", 0.3, tmp_path / "small.kv")
    small, whole = (dropkv.load(tmp_path / name, model=model) for name in ("small.kv", "large.kv"))
    question = "What is the code?"
    ids = small.session.seam.question_ids(question)
    want = small.session.forward(ids, Tail())
    assert small.metadata.fidelity is None
    assert not torch.equal(want, whole.session.forward(ids, Tail()))
    for other in (dropkv.load(tmp_path / "large.kv", model=model, budget=0.3), whole.shrink(0.3)):
        assert other.metadata == small.metadata
        for found, wanted in zip(other.session.prefix.layers, small.session.prefix.layers, strict=True):
            for field in ("keys", "values", "offsets", "positions", "admit", "scores"):
                assert torch.equal(getattr(found, field), getattr(wanted, field)), field
        assert torch.equal(other.session.forward(ids, Tail()), want)
        answer, expected = other.ask(question, SHORT), small.ask(question, SHORT)
        assert (answer.text, answer.prefix_entries) == (expected.text, expected.prefix_entries)
    assert whole.metadata.budget.asked == 0.6 and whole.session.prefix.entries > small.session.prefix.entries


@pytest.mark.parametrize("method", ["pyramidkv", "cake", "criticalkv", "full"])
def test_rules_that_are_not_nested_are_refused(models, tmp_path, method):
    made = dropkv.compress(TEXT, model=models["llama"], method=method, budget=0.5, **SETTINGS)
    made.save(tmp_path / "a.kv")
    for attempt in (
        lambda: dropkv.shrink(tmp_path / "a.kv", 0.25, tmp_path / "b.kv"),
        lambda: dropkv.load(tmp_path / "a.kv", model=models["llama"], budget=0.25),
    ):
        with pytest.raises(DropkvError, match=rf"a\.kv: what method {method} \(.*\) keeps at budget 0\.25") as refused:
            attempt()
        assert refused.value.exit_code == 1 and "\n" not in str(refused.value)
    assert not (tmp_path / "b.kv").exists()
    kept = made.metadata.budget.kept  # the same budget in other words changes nothing but the words
    dropkv.shrink(tmp_path / "a.kv", kept, tmp_path / "b.kv")
    assert [layer.entries for layer in read_header(tmp_path / "b.kv").metadata.layers] == [
        layer.entries for layer in made.metadata.layers
    ]


def test_budgets_out_of_range_are_refused(models, tmp_path):
    made = dropkv.compress(TEXT, model=models["llama"], budget=0.5, **SETTINGS)
    made.save(tmp_path / "a.kv")
    kept, n = made.metadata.budget.kept, made.metadata.document.tokens
    least = made.metadata.budget.forced_first + made.metadata.budget.forced_last
    refusals = {
        kept
        + 1: f"keeps {kept} entries per KV head, and budget {kept + 1} of {n} tokens is {kept + 1}: use --budget {kept} or less",
        10**9: f"keeps {kept} entries per KV head, and budget {10**9} of {n} tokens is {n}",
        0.9: f"keeps {kept} entries per KV head, and budget 0.9 of {n} tokens is {int(0.9 * n)}",
        least - 1: f"fewer than the {least} entries per KV head that are always kept: use --budget {least} or more",
        0.001: f"fewer than the {least} entries",
        0: "keeps nothing",
        1.5: "no fraction",
        True: "no number",
    }
    for budget, words in refusals.items():
        with pytest.raises(BudgetError) as refused:
            dropkv.shrink(tmp_path / "a.kv", budget, tmp_path / "b.kv")
        assert words in str(refused.value) and refused.value.exit_code == 2
        with pytest.raises(BudgetError):
            dropkv.load(tmp_path / "a.kv", model=models["llama"], budget=budget)
    dropkv.shrink(tmp_path / "a.kv", least, tmp_path / "b.kv")
    assert read_header(tmp_path / "b.kv").metadata.budget.kept == least
    dropkv.shrink(tmp_path / "a.kv", 0.5, tmp_path / "c.kv")
    assert (tmp_path / "c.kv").read_bytes() == (tmp_path / "a.kv").read_bytes()
