"""Strict reading of JSON objects: exact keys, exact types, bounded numbers; what is wrong is named by its key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from formats.errors import CorruptFile, printable

MAX_TEXT = 1 << 20  # characters of one string
MAX_DEPTH = 32  # nesting of a free dictionary
MAX_WHOLE = (1 << 63) - 1  # magnitude of any whole number


class Fields:
    """One JSON object whose keys must be exactly `keys`; `where` is its place, such as `layers[3]`."""

    def __init__(self, value: object, where: str, keys: Sequence[str]) -> None:
        if type(value) is not dict:
            raise CorruptFile(f"is {kind(value)}, not an object", where=where or "metadata")
        self.values = cast(dict[str, object], value)
        self.where = where
        for key in keys:
            if key not in self.values:
                raise CorruptFile("is missing", where=self.place(key))
        for key in self.values:
            if key not in keys:
                raise CorruptFile("is not a key of this version", where=self.place(printable(key, 60)))

    def place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def wrong(self, key: str, wanted: str) -> CorruptFile:
        return CorruptFile(f"is {kind(self.values[key])}, not {wanted}", where=self.place(key))

    def text(self, key: str) -> str:
        value = self.values[key]
        if type(value) is not str or len(value) > MAX_TEXT:
            raise self.wrong(key, f"text of at most {MAX_TEXT} characters")
        check_text(value, self.place(key))
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.values[key] is None else self.text(key)

    def digest(self, key: str, digits: int) -> str:
        value = self.values[key]
        if not is_hex(value, digits):
            raise self.wrong(key, f"{digits} lower-case hexadecimal digits")
        return cast(str, value)

    def choice(self, key: str, choices: Sequence[str]) -> str:
        value = self.values[key]
        if type(value) is not str or value not in choices:
            raise self.wrong(key, "one of " + ", ".join(choices))
        return value

    def whole(self, key: str, low: int, high: int) -> int:
        value = self.values[key]
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def optional_whole(self, key: str, low: int, high: int) -> int | None:
        return None if self.values[key] is None else self.whole(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        """A finite number in [low, high]; a whole number stays one."""
        value = self.values[key]
        if type(value) not in (int, float) or not low <= cast(float, value) <= high:
            raise self.wrong(key, f"a number from {low} to {high}")
        return cast(float, value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return None if self.values[key] is None else self.number(key, low, high)

    def flag(self, key: str) -> bool:
        value = self.values[key]
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def free(self, key: str) -> dict[str, object]:
        """A dictionary of free form, keys in ascending order at every level so that it has one spelling."""
        value = self.values[key]
        if type(value) is not dict:
            raise self.wrong(key, "an object")
        check_free(value, self.place(key))
        return cast(dict[str, object], value)

    def optional_free(self, key: str) -> dict[str, object] | None:
        return None if self.values[key] is None else self.free(key)


def check_free(value: object, where: str, depth: int = 0) -> None:
    """Refuse what JSON cannot hold exactly, at any level of a free dictionary."""
    if depth > MAX_DEPTH:
        raise CorruptFile(f"is nested deeper than {MAX_DEPTH} levels", where=where)
    if value is None or type(value) is bool:
        return
    if type(value) is str:
        return check_text(value, where)
    if type(value) is int and abs(value) <= MAX_WHOLE:
        return
    if type(value) is float and math.isfinite(value):
        return
    if type(value) is list:
        for number, item in enumerate(value):
            check_free(item, f"{where}[{number}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise CorruptFile(f"has the key {key!r}, which is not text", where=where)
            check_text(key, where)
            check_free(item, f"{where}.{printable(key, 60)}", depth + 1)
    else:
        reason = "is not a JSON value (text, whole number, finite number, true, false, null, list, object)"
        raise CorruptFile(reason, where=where)


def check_text(value: str, where: str) -> None:
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise CorruptFile("holds half a surrogate pair, which is not text", where=where)


def is_hex(value: object, digits: int) -> bool:
    return all_hex([value], digits)


def all_hex(values: list[Any], digits: int) -> bool:
    """Whether all are texts of so many hexadecimal digits; in one go, since a header has thousands."""
    texts = set(map(type, values)) <= {str} and set(map(len, values)) <= {digits}
    return texts and not "".join(values).strip("0123456789abcdef")


def kind(value: object) -> str:
    """A short word for a value in a message; long text and containers are not repeated."""
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) in (int, float):
        return printable(repr(value), 40)
    if type(value) is str:
        return f"the text {printable(ascii(value), 60)}"
    if type(value) is dict:
        return "an object"
    return "a list" if type(value) is list else f"a {type(value).__name__}"
