"""Reading files of a Hub on the loopback: in parts and whole, with everything that a network can do in between."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dropkv.errors import HubError, UsageError
from dropkv.hub.address import parse_address
from dropkv.hub.client import Hub, Retries
from dropkv.hub.fetch import CachedFile, RemoteFile, download, in_cache, parts, whole
from dropkv.hub.pull import pull
from dropkv.hub.remote import look_up
from formats import CorruptFile, ExistingFile, NotAKVFile, read_file, read_header, verify_file
from tests.formats.conftest import build_sample
from tests.hub_server import TOKEN, HubServer, serving

ADDRESS = "hf://ns/books/deep/book.kv"


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A KV file of about 240 KiB in blocks of 4 KiB."""
    path = tmp_path_factory.mktemp("book") / "book.kv"
    build_sample("float32", n=900, d_k=32, d_v=32, counts=((300, 300), (100, 200)), sliding=False).write(
        path, block_bytes=4096
    )
    return path.read_bytes()


@pytest.fixture
def server(book: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving() as running:
        running.add("ns/books", {"deep/book.kv": book, "README.md": b"# Books\n"})
        yield running


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, notes: list[str]) -> Hub:
    retries = Retries(tries=3, first_wait=0.0, longest_wait=0.0, longest_asked=5.0)
    return Hub(server.url, tmp_path / "cache", retries, notes.append)


def remote(address: str, hub: Hub) -> RemoteFile:
    found = parts(address, hub)
    assert isinstance(found, RemoteFile)
    return found


def cached(address: str, hub: Hub) -> CachedFile:
    found = whole(address, hub)
    assert isinstance(found, CachedFile)
    return found


def litter(hub: Hub) -> list[str]:
    assert hub.cache is not None
    return [
        file.name
        for file in hub.cache.rglob("*")
        if file.is_file() and (".incomplete" in file.name or file.name.startswith("tmp_"))
    ]


def test_a_header_costs_the_bytes_of_the_header(server, hub, book):
    header = read_header(remote(ADDRESS, hub))
    assert header.file_bytes == len(book)
    sent = sum(entry.sent for entry in server.requests("GET"))
    assert sent == header.data_start
    assert sent < len(book) / 4
    assert not list(hub.cache.rglob("*")) if hub.cache.exists() else True


def test_the_whole_file_in_parts_is_the_file(server, hub, book, tmp_path):
    (tmp_path / "book.kv").write_bytes(book)
    ours, theirs = read_file(tmp_path / "book.kv"), read_file(remote(ADDRESS, hub))
    assert theirs.header == ours.header
    for found, wanted in zip(theirs.layers, ours.layers, strict=True):
        assert found.keys.equal(wanted.keys) and found.values.equal(wanted.values)
    assert verify_file(remote(ADDRESS, hub)).header == ours.header


def test_reads_from_many_threads_are_right_and_send_nothing_twice(server, hub, book):
    with remote(ADDRESS, hub).open() as source:
        wrong = []

        def read(number: int) -> None:
            out = bytearray(2000)
            source.read_into(5000 + 2000 * number, memoryview(out))
            if out != book[5000 + 2000 * number :][:2000]:
                wrong.append(number)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert source.received == 4096 + 40 * 2000
    with pytest.raises(CorruptFile, match="shorter"):
        source.read_into(len(book) - 1, memoryview(bytearray(2)))


def test_a_range_that_breaks_off_goes_on_where_it_stopped(server, hub, book):
    with remote(ADDRESS, hub).open() as source:
        server.fail("GET", "signature", times=4, cut=10_000)
        out = bytearray(50_000)
        source.read_into(4096, memoryview(out))
    assert out == book[4096:54_096]
    ranges = [entry.headers["range"] for entry in server.requests("GET", server="storage")[1:]]
    assert ranges == [f"bytes={start}-54095" for start in (4096, 14096, 24096, 34096, 44096)]


def test_a_connection_that_brings_nothing_is_given_up(server, hub):
    with remote(ADDRESS, hub).open() as source:
        server.fail("GET", "signature", times=9, cut=0)
        with pytest.raises(HubError, match=r"^hf://ns/books/deep/book\.kv: the connection broke off .*; run it again$"):
            source.read_into(4096, memoryview(bytearray(100)))
    assert len(server.requests("GET", server="storage")) == 1 + hub.retries.tries


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_waited_for_as_it_asks(server, hub, book, status, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    server.fail("HEAD", "resolve", status=status, headers={"Retry-After": "3"})
    place = remote(ADDRESS, hub)
    server.fail("GET", "signature", times=2, status=status, headers={"Retry-After": "2"})
    with place.open() as source:
        out = bytearray(100)
        source.read_into(9000, memoryview(out))
    assert out == book[9000:9100]
    assert [seconds for seconds in waited if seconds >= 1] == [3, 2, 2]


def test_a_server_that_stays_busy_or_asks_for_too_much_patience_is_one_line(server, hub):
    server.fail("HEAD", "resolve", times=1, status=429, headers={"Retry-After": "900"})
    with pytest.raises(HubError, match=r"^hf://ns/books/deep/book\.kv: too many requests \(429\); try again in 900 s$"):
        parts(ADDRESS, hub)
    server.fail("HEAD", "resolve", times=3, status=503)
    with pytest.raises(HubError, match=r"book\.kv: the Hub answers 503; try again in a while$"):
        parts(ADDRESS, hub)
    assert len(server.requests("HEAD")) == 1 + 3
    with remote(ADDRESS, hub).open() as source:
        server.fail("GET", "signature", times=9, status=500)
        with pytest.raises(HubError, match="the Hub answers 500"):
            source.read_into(9000, memoryview(bytearray(10)))


def test_a_signed_address_that_is_too_old_is_renewed_for_the_same_commit(server, hub, book):
    commit = server.repositories["ns/books"].commits[-1][0]
    with remote(ADDRESS, hub).open() as source:
        server.epoch += 1
        server.repositories["ns/books"].commit({"deep/book.kv": b"something else"})
        out = bytearray(100)
        source.read_into(9000, memoryview(out))
        assert out == book[9000:9100]
    assert [entry.path for entry in server.requests("HEAD")] == [
        "/ns/books/resolve/main/deep/book.kv",
        f"/ns/books/resolve/{commit}/deep/book.kv",
    ]
    with remote(ADDRESS.replace("books/", f"books@{commit}/"), hub).open() as source:
        server.fail("GET", "signature", times=9, status=403)
        with pytest.raises(HubError, match="refuses access"):
            source.read_into(9000, memoryview(bytearray(10)))


@pytest.mark.parametrize(
    "options",
    [{"headers": {"ETag": '"other"'}}, {"content": lambda data: data + b"more"}, {"content": lambda data: data[:-1]}],
)
def test_a_file_that_changes_between_two_ranges_is_refused(server, hub, options):
    with remote(ADDRESS, hub).open() as source:
        server.fail("GET", "signature", **options)
        with pytest.raises(HubError, match=r"book\.kv: changed while it was read; run it again"):
            source.read_into(9000, memoryview(bytearray(10)))


def test_a_server_without_ranges_is_read_whole_with_a_note(server, hub, book, notes):
    server.fail("GET", "signature", times=2, whole=True)
    assert read_header(parts(ADDRESS, hub)).file_bytes == len(book)
    assert notes == [f"note: the server sends whole files only; all of {ADDRESS} is downloaded"]
    assert isinstance(parts(ADDRESS, hub), CachedFile)


def test_a_changed_byte_is_found_by_the_hashes_of_the_file(server, hub, book):
    place = remote(ADDRESS, hub)
    server.fail("GET", "signature", times=99, content=lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    with pytest.raises(CorruptFile, match=r"^hf://ns/books/deep/book\.kv: layers\.1\.values, block"):
        verify_file(place)
    server.faults.clear()
    server.fail("GET", "signature", times=99, content=lambda data: data[:300] + b"!" + data[301:])
    with pytest.raises(CorruptFile, match=r"^hf://ns/books/deep/book\.kv: header .*is not JSON"):
        read_header(remote(ADDRESS, hub))


def test_a_whole_file_is_cached_and_asked_for_by_commit(server, hub, book):
    first = cached(ADDRESS, hub)
    assert first.fresh and first.path.read_bytes() == book
    assert first.commit == server.repositories["ns/books"].commits[-1][0]
    assert server.requests("GET")[0].headers["user-agent"].startswith("dropkv/")
    before = len(server.requests("GET"))
    second = cached(ADDRESS, hub)
    assert (second.path, second.fresh) == (first.path, False)
    assert isinstance(parts(ADDRESS, hub), CachedFile)
    assert len(server.requests("GET")) == before
    asked = len(server.log)
    pinned = ADDRESS.replace("books/", f"books@{first.commit}/")
    assert cached(pinned, hub).path == first.path
    assert len(server.log) == asked, "a commit in the cache needs no network"


def test_a_new_commit_is_fetched_and_a_tag_stays(server, hub, book):
    repository = server.repositories["ns/books"]
    repository.tags["v1"] = repository.commits[-1][0]
    assert cached(ADDRESS, hub).path.read_bytes() == book
    repository.commit({"deep/book.kv": book + b"2"})
    assert cached(ADDRESS, hub).path.read_bytes() == book + b"2"
    assert cached(ADDRESS.replace("books/", "books@v1/"), hub).path.read_bytes() == book


def test_a_commit_between_looking_up_and_downloading_is_compared_with_its_own_hash(server, hub, book):
    found = look_up(parse_address(ADDRESS), hub)
    commit = server.repositories["ns/books"].commit({"deep/book.kv": book + b"2"})
    got = download(found, hub)
    assert (got.commit, got.path.read_bytes()) == (commit, book + b"2")


def test_without_network_the_cache_serves_with_one_line(server, hub, book, notes, monkeypatch):
    commit = cached(ADDRESS, hub).commit
    server.fail("HEAD", "resolve", times=3, status=503)
    assert cached(ADDRESS, hub).commit == commit
    hub = replace(hub, endpoint="http://127.0.0.1:9")
    assert cached(ADDRESS, hub).path.read_bytes() == book
    line = f"note: the Hub cannot be asked; {ADDRESS} is the copy in the cache, of commit {commit[:8]}"
    assert notes == [line, line]
    with pytest.raises(HubError, match=r"other\.kv: the Hub cannot be reached \(http://127.*\); check the network"):
        whole("hf://ns/books/other.kv", hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cached(ADDRESS, hub).path.read_bytes() == book
    assert isinstance(parts(ADDRESS, hub), CachedFile)
    assert notes == [line, line], "who switched the network off knows"
    with pytest.raises(
        HubError, match=r"other\.kv: not in the cache, and the network is switched off \(HF_HUB_OFFLINE\)"
    ):
        parts("hf://ns/books/other.kv", hub)


def test_a_download_that_breaks_off_is_resumed(server, hub, book, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    server.fail("GET", "signature", times=1, cut=100_000)
    assert cached(ADDRESS, hub).path.read_bytes() == book
    assert [entry.headers.get("range") for entry in server.requests("GET")] == [None, "bytes=100000-"]
    assert not litter(hub)


def test_a_download_is_repeated_while_the_server_is_busy(server, hub, book, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    server.fail("GET", "signature", times=2, status=503, headers={"Retry-After": "4"})
    assert cached(ADDRESS, hub).path.read_bytes() == book
    assert [seconds for seconds in waited if seconds >= 1] == [4, 4]


def test_a_download_that_stays_broken_leaves_nothing(server, hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.fail("GET", "signature", times=999, cut=0)
    with pytest.raises(HubError, match=r"^hf://ns/books/deep/book\.kv: the connection broke off"):
        whole(ADDRESS, hub)
    assert not litter(hub)
    assert in_cache(parse_address(ADDRESS), hub) is None


def test_content_with_another_hash_than_announced_is_not_kept(server, hub, book):
    forged = bytearray(book)
    forged[-1] ^= 1
    server.fail("GET", "signature", content=lambda data: bytes(forged))
    with pytest.raises(
        HubError, match=r"book\.kv: what the server sent is not what the Hub announces .*; nothing was kept"
    ):
        whole(ADDRESS, hub)
    assert in_cache(parse_address(ADDRESS), hub) is None
    assert not [file for file in hub.cache.rglob("*") if file.is_file() and file.stat().st_size == len(book)]
    assert cached(ADDRESS, hub).path.read_bytes() == book


REFUSED = {
    "no repository": (
        "hf://ns/none/book.kv",
        "no such repository, or it is private; check the spelling, or run `hf auth login`",
    ),
    "no file": ("hf://ns/books/none.kv", "the repository has no such file"),
    "no revision": ("hf://ns/books@v9/deep/book.kv", "the repository has no such revision"),
    "private": (
        "hf://ns/secret/book.kv",
        "no such repository, or it is private; check the spelling, or run `hf auth login`",
    ),
    "gated": ("hf://ns/gated/book.kv", "its owner gives access on request; ask for it at http://127.0.0.1:"),
}


@pytest.mark.parametrize("read", [parts, whole], ids=["parts", "whole"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_one_line_with_what_to_do(server, hub, book, case, read):
    server.add("ns/secret", {"book.kv": book}, private=True)
    server.add("ns/gated", {"book.kv": book}, gated=True)
    address, words = REFUSED[case]
    with pytest.raises(HubError) as raised:
        read(address, hub)
    message = str(raised.value)
    assert message.startswith(f"{address}: {words}")
    assert "\n" not in message


def test_a_token_opens_what_is_private_and_goes_to_the_hub_alone(server, hub, book, monkeypatch):
    server.add("ns/secret", {"book.kv": book}, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read_header(remote("hf://ns/secret/book.kv", hub)).file_bytes == len(book)
    assert cached("hf://ns/secret/book.kv", hub).path.read_bytes() == book
    for entry in server.log:
        assert ("authorization" in entry.headers) == (entry.server == "hub"), entry
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    with pytest.raises(
        HubError, match=r"/book\.kv: the Hub does not accept the token in HF_TOKEN \(401\); .* run `hf auth login`"
    ) as raised:
        parts("hf://ns/secret@" + "0" * 40 + "/book.kv", hub)
    assert "bbb" not in str(raised.value)
    assert "secret" not in str(raised.value).replace("ns/secret", "")


def test_a_small_file_that_lies_in_git_itself(server, hub, book):
    address = "hf://ns/small/book.kv.safetensors"
    server.add("ns/small", {"book.kv.safetensors": book})
    assert verify_file(remote(address, hub)).header.file_bytes == len(book)
    server.fail("GET", "small/resolve", content=lambda data: data[:-1] + b"?")
    with pytest.raises(HubError, match="its hash differs"):
        whole(address, hub)
    assert cached(address, hub).path.read_bytes() == book
    with RemoteFile(look_up(parse_address(address), hub), hub).open() as source:
        server.fail("GET", "small/resolve", status=403)
        with pytest.raises(HubError, match=r"refuses access \(403\); use a token that may read it"):
            source.read_into(9000, memoryview(bytearray(10)))
    assert not server.requests("GET", server="storage")


def test_a_server_that_is_no_hub_is_said_so(server, hub):
    server.fail("HEAD", "resolve", status=200)
    with pytest.raises(HubError, match="does not answer as a Hub does; check HF_ENDPOINT"):
        parts(ADDRESS, hub)


def test_an_address_without_a_file_names_the_files(server, hub, book):
    with pytest.raises(HubError, match=r"is a repository, name the file in it: hf://ns/books/deep/book\.kv$"):
        whole("hf://ns/books", hub)
    server.add("ns/many", {f"{number}.kv": b"" for number in range(7)})
    with pytest.raises(HubError, match=r"hf://ns/many/0\.kv, .*hf://ns/many/4\.kv and 2 more$"):
        parts("hf://ns/many", hub)
    server.add("ns/empty", {"README.md": b""})
    with pytest.raises(HubError, match=r"holds no \.kv file"):
        parts("hf://ns/empty", hub)


def test_pull_checks_and_copies(server, hub, book, tmp_path):
    pulled = pull(ADDRESS, tmp_path, hub=hub)
    assert pulled.path == tmp_path / "book.kv" and pulled.path.read_bytes() == book
    assert pulled.fresh and pulled.header.file_bytes == len(book)
    assert not pulled.path.is_symlink()
    with pytest.raises(ExistingFile, match=r"book\.kv: exists already"):
        pull(ADDRESS, tmp_path / "book.kv", hub=hub)
    (tmp_path / "book.kv").write_bytes(b"old")
    again = pull(ADDRESS, tmp_path / "book.kv", overwrite=True, hub=hub)
    assert again.path.read_bytes() == book and not again.fresh
    assert pull(ADDRESS, hub=hub).path == in_cache(parse_address(ADDRESS), hub).path
    with pytest.raises(UsageError, match=r"book\.kv: is no address of the Hub; write hf://"):
        pull("book.kv", hub=hub)


def test_pull_keeps_nothing_of_what_is_no_kv_file(server, hub, tmp_path):
    server.add("ns/page", {"page.kv": b"<!doctype html><p>no</p>"})
    with pytest.raises(NotAKVFile, match=r"^hf://ns/page/page\.kv: is a web page"):
        pull("hf://ns/page/page.kv", tmp_path / "page.kv", hub=hub)
    assert not (tmp_path / "page.kv").exists()


def test_a_damaged_copy_in_the_cache_is_named_and_healed(server, hub, book, notes, monkeypatch):
    path = cached(ADDRESS, hub).path
    damaged = bytearray(book)
    damaged[-1] ^= 1
    Path(os.path.realpath(path)).write_bytes(damaged)
    with pytest.raises(CorruptFile, match=r"fetch it again with `dropkv pull hf://ns/books/deep/book\.kv`"):
        verify_file(whole(ADDRESS, hub))
    pulled = pull(ADDRESS, hub=hub)
    assert pulled.fresh and hashlib.sha256(pulled.path.read_bytes()).digest() == hashlib.sha256(book).digest()
    assert notes == [f"note: the copy of {ADDRESS} in the cache is damaged; it is downloaded again"]
