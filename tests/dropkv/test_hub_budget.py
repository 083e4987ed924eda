"""A smaller budget of a file on the Hub: only its entries come over the network, in few requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dropkv.errors import BudgetError
from dropkv.hub.client import Hub, Retries
from dropkv.hub.fetch import parts
from dropkv.shrinking import chooser, shrink
from formats import read_file, read_header
from tests.formats.conftest import build_sample
from tests.formats.test_kv_partial import ranked
from tests.hub_server import HubServer, serving

ADDRESS = "hf://ns/books/book.kv"
KEPT, N = 500, 2000


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 MiB in blocks of 4 KiB: two layers of three heads with 2,000 entries each."""
    path = tmp_path_factory.mktemp("book") / "book.kv"
    sample = ranked(build_sample, n=N, sliding=False)
    budget = replace(sample.metadata.budget, forced_first=2, forced_last=4)
    replace(sample, metadata=replace(sample.metadata, budget=budget)).write(path, block_bytes=4096)
    return path


@pytest.fixture
def hub(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving() as running:
        running.add("ns/books", {"book.kv": book.read_bytes()})
        yield running, Hub(running.url, tmp_path / "cache", Retries(tries=3, first_wait=0.0, longest_wait=0.0))


def sent(server: HubServer) -> int:
    return sum(entry.sent for entry in server.requests("GET", server="storage"))


def test_a_quarter_of_the_budget_is_a_quarter_of_the_bytes(hub, book):
    server, client = hub
    contents = read_file(parts(ADDRESS, client), choose=chooser(KEPT, ADDRESS))
    wanted = read_file(book, choose=chooser(KEPT, "book"))
    assert contents.header == wanted.header and contents.header.metadata.budget.kept == KEPT
    for found, ours in zip(contents.layers, wanted.layers, strict=True):
        assert found.keys.equal(ours.keys) and found.values.equal(ours.values) and found.scores.equal(ours.scores)
    header = read_header(book)
    front = header.data_start + header.tensors["layers.0.keys"].start
    entries = book.stat().st_size - front
    assert front + entries / 4 <= sent(server) <= front + entries / 4 + 12 * 2 * 4096
    # The first bytes, the rest of the header, the index, and a range for each head's keys and values of each layer.
    assert len(server.requests("GET", server="storage")) == 3 + 2 * 2 * 3


def test_it_is_shrunk_without_fetching_the_rest(hub, book, tmp_path):
    server, client = hub
    shrink(parts(ADDRESS, client), KEPT, tmp_path / "remote.kv")
    shrink(book, KEPT, tmp_path / "local.kv")
    assert (tmp_path / "remote.kv").read_bytes() == (tmp_path / "local.kv").read_bytes()
    assert sent(server) < book.stat().st_size / 3


def test_a_budget_that_is_not_there_costs_the_header(hub, book):
    server, client = hub
    with pytest.raises(BudgetError, match=rf"^{ADDRESS}: budget 3 of 2000 tokens is fewer than the 6 entries"):
        read_file(parts(ADDRESS, client), choose=chooser(3, ADDRESS))
    assert sent(server) == read_header(book).data_start
