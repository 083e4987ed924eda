"""Keys and values that are planted: words from the package wonderwords, numbers, and uuids, drawn from a seed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from importlib import resources

from dropkv.errors import UsageError


def number(draw: random.Random, digits: int = 7) -> str:
    """A number of that many digits that does not begin with 0."""
    return str(draw.randint(10 ** (digits - 1), 10**digits - 1))


def uuid4(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def word_list(kind: str) -> list[str]:
    """All words of a kind, "noun", "adjective" or "verb", sorted; raises UsageError without wonderwords."""
    try:
        file = resources.files("wonderwords.assets") / f"{kind}list.txt"
        words = file.read_text("utf-8").split("\n")
    except (ModuleNotFoundError, FileNotFoundError):
        raise UsageError(
            "its words come from the package wonderwords, which is missing; pip install 'dropkv[bench]'"
        ) from None
    return sorted({word.strip() for word in words} - {""})


def listed(parts: Sequence[str]) -> str:
    """The parts as one writes them in a sentence: a; a, and b; a, b, and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", and " + parts[-1]
