"""Uploading to a Hub on the loopback: what ends up in the repository, and what is refused before anything does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropkv.errors import HubError, UsageError
from dropkv.hub.card import write_card
from dropkv.hub.client import Hub, Retries
from dropkv.hub.fetch import whole
from dropkv.hub.push import prepare, push, target_of
from formats import CorruptFile, NotAKVFile, UnreadableFile, read_file, read_header, verify_file
from formats.metadata import ModelIdentity
from formats.quantized import describe, quantize
from tests.formats.conftest import build_sample
from tests.hub_server import TOKEN, HubServer, serving

BASE = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with serving() as running:
        yield running


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(server.url, tmp_path / "cache", Retries(tries=3, first_wait=0.0, longest_wait=0.0))


def on_hub(metadata: Any, **changes: Any) -> Any:
    return replace(metadata, model=ModelIdentity(BASE, "hub", "abc", "LlamaForCausalLM", {}, "c0", {}), **changes)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A KV file said to be made with a model of the Hub."""
    sample = build_sample()
    replace(sample, metadata=on_hub(sample.metadata)).write(tmp_path / "book.kv")
    return tmp_path / "book.kv"


def files(server: HubServer, repository: str = "ns/books") -> dict[str, bytes]:
    return server.repositories[repository].commits[-1][1]


def upload(
    book: Path,
    hub: Hub,
    *,
    repository: str = "ns/books",
    name: str | None = None,
    public: bool = False,
    licence: str | None = "cc-by-4.0",
    tokens: bool = True,
):
    address = target_of(repository, book, name)
    return push(prepare(book, address, public=public, hub=hub), licence, tokens=tokens, hub=hub)


def test_a_push_makes_a_private_repository_with_file_and_card_in_one_commit(server, hub, book):
    pushed = upload(book, hub)
    repository = server.repositories["ns/books"]
    assert repository.private and pushed.private and pushed.created and pushed.changed
    assert len(repository.commits) == 2
    assert files(server)["book.kv"] == book.read_bytes()
    assert (pushed.commit, pushed.file_bytes, pushed.tokens_stored) == (
        repository.commits[-1][0],
        book.stat().st_size,
        True,
    )
    assert pushed.commit_url == f"{server.url}/ns/books/commit/{pushed.commit}"
    assert str(pushed.address) == "hf://ns/books/book.kv"
    assert all(
        entry.headers["user-agent"].startswith("dropkv/")
        for entry in server.requests(server="hub")
        if "/api/models" in entry.path
    )
    assert not [entry for entry in server.requests(server="storage") if "authorization" in entry.headers]
    assert whole("hf://ns/books/book.kv", hub).path.read_bytes() == book.read_bytes()


def test_the_card_says_what_the_hub_wants_to_know(server, hub, book):
    import yaml

    upload(book, hub, public=True)
    assert not server.repositories["ns/books"].private
    _, front, body = files(server)["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "license": "cc-by-4.0",
        "library_name": "dropkv",
        "pipeline_tag": "text-generation",
        "tags": ["kv-cache", "dropkv", "long-context", "adadropkv"],
        "base_model": BASE,
        "base_model_relation": "adapter",
    }
    assert body.startswith("\n# books\n\n<!-- dropkv begin book.kv -->\n## book.kv\n")
    assert 'dropkv query hf://ns/books/book.kv "What is this document about?"' in body
    assert 'dropkv.load("hf://ns/books/book.kv").ask(' in body
    assert "| document | 40 tokens, cut from 47, sha256 abab" in body
    assert "| kept | 59 of 360 entries (16.4 %) |" in body
    assert "| stored | bfloat16 |" in body
    assert "| token ids | stored |" in body
    assert "| fidelity | not measured |" in body
    assert "A KV file holds its document's content" in body


def test_a_second_file_joins_the_card_and_a_new_state_replaces_its_own_section(server, hub, book, tmp_path):
    import yaml

    upload(book, hub)
    own = (
        files(server)["README.md"]
        .decode()
        .replace("# books\n", "# My books\n\nWords of mine.\n")
        .replace("tags:", "language: de\ntags:")
    )
    server.repositories["ns/books"].commit({"README.md": own.encode() + b"\nThe end.\n"})
    sample = build_sample(seed=1)
    metadata = on_hub(sample.metadata, fidelity={"kl": 0.01234567, "tokens": 5, "by": {"layer": [1, 2]}})
    replace(sample, metadata=metadata).write(tmp_path / "other.kv")
    second = upload(tmp_path / "other.kv", hub, licence=None)
    assert not second.created
    assert upload(tmp_path / "other.kv", hub, name="book.kv", licence="mit").changed
    card = files(server)["README.md"].decode()
    assert set(files(server)) == {".gitattributes", "README.md", "book.kv", "other.kv"}
    assert files(server)["book.kv"] == files(server)["other.kv"] == (tmp_path / "other.kv").read_bytes()
    assert card.count("<!-- dropkv begin") == card.count("<!-- dropkv end") == 2
    assert (
        card.index("Words of mine.")
        < card.index("begin book.kv")
        < card.index("The end.")
        < card.index("begin other.kv")
    )
    assert card.count("| fidelity, kl | 0.0123457 |") == 2 and card.count("| fidelity, by, layer | 1 2 |") == 2
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["language"], front["license"], front["base_model"]) == ("de", "mit", BASE)


def test_pushing_the_same_again_says_so(server, hub, book):
    first = upload(book, hub)
    address = target_of("ns/books", book, None)
    prepared = prepare(book, address, hub=hub)
    assert (prepared.exists, prepared.replaces, prepared.licence, prepared.commit) == (
        True,
        True,
        "cc-by-4.0",
        first.commit,
    )
    sent = len(server.requests("PUT"))
    push(prepared, None, hub=hub)
    assert len(server.requests("PUT")) == sent, "the content is on the Hub already"


def test_without_tokens_the_entries_are_the_same(server, hub, book, tmp_path):
    before = book.read_bytes()
    pushed = upload(book, hub, tokens=False)
    assert not pushed.tokens_stored and book.read_bytes() == before
    (tmp_path / "got.kv").write_bytes(files(server)["book.kv"])
    verify_file(tmp_path / "got.kv")
    ours, theirs = read_file(book), read_file(tmp_path / "got.kv")
    assert theirs.tokens is None and theirs.header.metadata == ours.header.metadata
    for found, wanted in zip(theirs.layers, ours.layers, strict=True):
        assert (
            found.keys.equal(wanted.keys)
            and found.values.equal(wanted.values)
            and found.positions.equal(wanted.positions)
        )
    assert "| token ids | left out |" in files(server)["README.md"].decode()
    assert (
        upload(tmp_path / "got.kv", hub, name="again.kv", tokens=False).file_bytes
        == (tmp_path / "got.kv").stat().st_size
    )


@pytest.mark.parametrize("level", [None, 3])
@pytest.mark.parametrize("kind", [None, "fp8", "int8", "int4"])
def test_without_tokens_is_what_would_have_been_written_without_them(server, hub, tmp_path, kind, level):
    """A file of several blocks, whose first head's entries compress: the very bytes, and what the card says of them."""
    sample = build_sample("float32", n=600, counts=((600, 500, 0),), d_k=16, d_v=8)
    sample.layers[0].keys[:300] = 1.5
    sample = replace(sample, metadata=on_hub(sample.metadata))
    if kind is not None:
        about = describe(kind, [layer.offsets.tolist() for layer in sample.layers])
        layers = [quantize(layer, about) for layer in sample.layers]
        sample = replace(sample, metadata=replace(sample.metadata, quantization=about), layers=layers)
    sample.write(tmp_path / "book.kv", zstd=level, block_bytes=4096)
    replace(sample, tokens=None).write(tmp_path / "bare.kv", zstd=level, block_bytes=4096)
    assert (read_header(tmp_path / "book.kv").zstd, read_header(tmp_path / "bare.kv").zstd) == (level, level)
    upload(tmp_path / "book.kv", hub)
    assert files(server)["book.kv"] == (tmp_path / "book.kv").read_bytes()
    upload(tmp_path / "book.kv", hub, tokens=False)
    assert files(server)["book.kv"] == (tmp_path / "bare.kv").read_bytes()
    types = "float32" if kind is None else f"{kind} from float32"
    card = files(server)["README.md"].decode()
    assert f"| stored | {types}{'' if level is None else ', zstd level 3'} |" in card


def test_a_public_repository_needs_the_word_and_a_private_one_stays_private(server, hub, book):
    server.add("ns/open", {"README.md": b"# Open\n"})
    server.add("ns/closed", {"README.md": b"# Closed\n"}, private=True)
    with pytest.raises(HubError, match=r"^hf://ns/open: is public, everybody could read the document; .*--public$"):
        upload(book, hub, repository="ns/open")
    assert set(files(server, "ns/open")) == {"README.md"}
    assert not upload(book, hub, repository="ns/open", public=True).private
    assert upload(book, hub, repository="ns/closed", public=True).private
    assert server.repositories["ns/closed"].private


def test_what_is_no_intact_kv_file_is_refused_before_any_request(server, hub, book, tmp_path):
    damaged = bytearray(book.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "bad.kv").write_bytes(damaged)
    (tmp_path / "text.kv").write_text("just words")
    for name, error in (("bad.kv", CorruptFile), ("text.kv", NotAKVFile), ("none.kv", UnreadableFile)):
        with pytest.raises(error, match=name):
            upload(tmp_path / name, hub)
    assert not server.log


@pytest.mark.parametrize(
    ("repository", "name", "words"),
    [
        ("books", None, "lacks its namespace"),
        ("ns/bo--oks", None, "-- or .."),
        ("hf://datasets/ns/books", None, "datasets"),
        ("ns/books", "../up.kv", r"a \.\.: .*--name"),
        ("ns/books", "/abs.kv", "an empty part"),
        ("ns/books", "README.md", r"a name ends in \.kv"),
        ("ns/books", "book.bin", r"a name ends in \.kv"),
        ("ns/books", "a`b.kv", r"a name ends in \.kv"),
        ("ns/books", "a-->b.kv", r"a name ends in \.kv"),
        ("ns/books@a..b", None, "no revision"),
    ],
)
def test_names_that_lead_elsewhere_are_usage_errors(repository, name, words):
    with pytest.raises(UsageError, match=words):
        target_of(repository, "book.kv", name)


def test_a_target_may_be_an_address(book):
    assert str(target_of("hf://ns/books@dev/deep/b.kv", book, None)) == "hf://ns/books@dev/deep/b.kv"
    assert str(target_of("ns/books/deep/b.kv", book, None)) == "hf://ns/books/deep/b.kv"
    assert str(target_of("ns/books", book, "c/d.kv.safetensors")) == "hf://ns/books/c/d.kv.safetensors"


def test_refusals_of_the_hub_are_one_line_and_show_no_token(server, hub, book, monkeypatch):
    server.add("ns/books", {"README.md": b""}, private=True)
    with pytest.raises(HubError, match=r"^hf://ns/books@dev: the repository has no such revision"):
        upload(book, hub, repository="ns/books@dev")
    server.fail("POST", "commit", status=403)
    with pytest.raises(
        HubError, match=r"refuses access \(403\); use a token with the right to write: run `hf auth login`"
    ):
        upload(book, hub)
    server.fail("POST", "repos/create", status=403)
    with pytest.raises(HubError, match="use a token with the right to write"):
        upload(book, hub, repository="other/books")
    server.objects.clear()
    server.fail("PUT", "upload", status=401)
    with pytest.raises(HubError, match="does not accept the token in HF_TOKEN"):
        upload(book, hub)
    body = {"X-Error-Message": '"license" must be one of [mit]'}
    server.fail("POST", "validate-yaml", status=400, headers=body)
    with pytest.raises(
        HubError, match=r'does not accept this \(400\) \("license" must be one of \[mit\].*\); change what it names'
    ):
        upload(book, hub)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    with pytest.raises(HubError, match=r"token in HF_TOKEN \(401\); .* run `hf auth login`") as raised:
        upload(book, hub)
    assert "bbb" not in repr(raised.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        upload(book, hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    with pytest.raises(HubError, match=r"not logged in to the Hub; run `hf auth login`, or set HF_TOKEN$"):
        upload(book, hub)


def test_a_repository_that_changes_meanwhile_is_not_written_to(server, hub, book):
    upload(book, hub)
    prepared = prepare(book, target_of("ns/books", book, None), hub=hub)
    server.repositories["ns/books"].commit({"README.md": b"# Mine\n"})
    with pytest.raises(HubError, match=r"changed in the meantime; run it again$"):
        push(prepared, None, hub=hub)
    assert files(server)["README.md"] == b"# Mine\n"


def test_a_hostile_file_cannot_leave_its_cells(tmp_path):
    import yaml

    sample = build_sample()
    evil = "x | y\n\n# Big\n<script>alert(1)</script> --> `rm` [a](b) \x1b[2J"
    metadata = replace(
        on_hub(sample.metadata, method={"name": evil}),
        document=replace(sample.metadata.document, name=evil),
        model=ModelIdentity("a/b\nlicense: mit", "hub", evil, evil, {}, "c0", {}),
    )
    replace(sample, metadata=metadata).write(tmp_path / "evil.kv")
    card = write_card(None, target_of("ns/books", "evil.kv", None), read_header(tmp_path / "evil.kv"), "other")
    front, body = yaml.safe_load(card.split("---\n")[1]), card.split("---\n", 2)[2]
    assert front["license"] == "other" and "base_model" not in front
    assert not re.search(r"<script|^# Big|\x1b", body, re.MULTILINE)
    assert body.count("-->") == 2
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows), rows
    assert json.dumps(front)


def test_front_matter_that_cannot_be_read_is_left_alone(server, hub, book):
    server.add("ns/books", {"README.md": b"---\n: [\n---\n# x\n"}, private=True)
    with pytest.raises(HubError, match=r"^hf://ns/books: the front matter of its README\.md cannot be read; mend it"):
        upload(book, hub)
