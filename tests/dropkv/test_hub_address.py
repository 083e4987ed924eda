"""Addresses of the Hub: what they mean, and what is refused before any request."""

from __future__ import annotations

import pytest

from dropkv.errors import UsageError
from dropkv.hub.address import HubAddress, is_address, parse_address, refuse_web_address


@pytest.mark.parametrize(
    ("text", "repository", "revision", "file", "again"),
    [
        ("hf://ns/name/book.kv", "ns/name", None, "book.kv", None),
        ("hf://models/ns/name/book.kv", "ns/name", None, "book.kv", "hf://ns/name/book.kv"),
        ("hf://ns/name@v1.0/a/b c.kv", "ns/name", "v1.0", "a/b c.kv", None),
        ("hf://ns/name@refs/pr/12/book.kv", "ns/name", "refs/pr/12", "book.kv", None),
        ("hf://ns/name@dev%2Fnew/book.kv", "ns/name", "dev/new", "book.kv", None),
        ("hf://n.s/na_me-1/at@home.kv", "n.s/na_me-1", None, "at@home.kv", None),
        ("hf://ns/name", "ns/name", None, "", None),
        ("hf://ns/name@main", "ns/name", "main", "", None),
        ("hf://models/name", "models/name", None, "", None),
        ("hf://ns/name/süß.kv", "ns/name", None, "süß.kv", None),
    ],
)
def test_an_address_means_one_thing(text, repository, revision, file, again):
    found = parse_address(text)
    assert found == HubAddress(repository, revision, file)
    assert str(found) == (again or text)
    assert parse_address(str(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HF://ns/name/b.kv", "lower case"),
        ("hf://", "lacks its namespace"),
        ("hf://name", "lacks its namespace"),
        ("hf:///name/b.kv", "lacks its namespace"),
        ("hf://ns//b.kv", "lacks its namespace"),
        ("hf://datasets/ns/name/b.kv", "the Hub's datasets"),
        ("hf://spaces/ns/name/b.kv", "the Hub's spaces"),
        ("hf://buckets/ns/name/b.kv", "the Hub's buckets"),
        ("hf://ns/na me/b.kv", "no name of a repository"),
        ("hf://ns/-name/b.kv", "no name of a repository"),
        ("hf://../name/b.kv", "no name of a repository"),
        ("hf://ns/na..me/b.kv", "-- or .."),
        ("hf://ns/na--me/b.kv", "-- or .."),
        ("hf://ns/name.git/b.kv", ".git"),
        ("hf://ns/" + "n" * 97 + "/b.kv", "no name of a repository"),
        ("hf://ns/näme/b.kv", "no name of a repository"),
        ("hf://user:token@ns/name/b.kv", "no name of a repository"),
        ("hf://ns/name@/b.kv", "no revision"),
        ("hf://ns/name@../b.kv", "no revision"),
        ("hf://ns/name@a%2F..%2Fb/b.kv", "no revision"),
        ("hf://ns/name@-x/b.kv", "no revision"),
        ("hf://ns/name@a b/b.kv", "no revision"),
        ("hf://ns/name/", "an empty part"),
        ("hf://ns/name/a//b.kv", "an empty part"),
        ("hf://ns/name/../b.kv", "a .."),
        ("hf://ns/name/a/./b.kv", "a . or"),
        ("hf://ns/name/a\\..\\b.kv", "backslash"),
        ("hf://ns/name/.git/config", ".git"),
        ("hf://ns/name/b.kv?download=true", "no parameters"),
        ("hf://ns/name/b.kv#top", "no parameters"),
        ("hf://ns/name/b\x1b[2J.kv", "control character"),
        ("hf://ns/name/b\n.kv", "control character"),
        ("hf://ns/name/" + "b" * 1025, "too long"),
    ],
)
def test_what_is_not_clearly_meant_is_refused(text, words):
    assert is_address(text)
    with pytest.raises(UsageError) as raised:
        parse_address(text)
    message = str(raised.value)
    assert words in message
    assert "hf://NAMESPACE/NAME[@REVISION]/FILE.kv" in message
    assert message.isprintable()
    assert len(message) < 500


def test_other_names_are_no_addresses(tmp_path):
    for name in ("book.kv", "hf:/ns/name/book.kv", "./hf:/book.kv", tmp_path / "hf:" / "x"):
        assert not is_address(name)
        refuse_web_address(name)
    with pytest.raises(UsageError, match=r"is a web address; name a file of the Hub as hf://"):
        refuse_web_address("https://huggingface.co/ns/name/resolve/main/book.kv")
