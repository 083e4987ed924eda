"""Pieces of HTML. Every text that comes from results goes through `text` (or an attribute through `attribute`): it may be hostile."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 300  # characters of one text
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # unseen, reordering or no characters at all


def plain(value: object, limit: int = LONGEST) -> str:
    """A value as one line of visible characters, cut with an ellipsis: controls and direction marks are spelled out."""
    raw = str(value)
    cut = raw[:limit] + ("\N{HORIZONTAL ELLIPSIS}" if len(raw) > limit else "")
    return "".join(_visible(char) for char in cut)


def _visible(char: str) -> str:
    if unicodedata.category(char) not in HIDDEN:
        return char
    if char == "\n":
        return "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    return " " if char == "\t" else f"\\u{ord(char):04x}"


def text(value: object, limit: int = LONGEST) -> str:
    """Escaped for element content and for quoted attributes."""
    return html.escape(plain(value, limit), quote=True)


@dataclass(frozen=True)
class Column:
    """A table column: its heading; whether its cells are numbers."""

    name: str
    number: bool = True
    hint: str = ""


@dataclass(frozen=True)
class Value:
    """A cell: what is shown (plain text, escaped here) and what it is sorted by; `small` is shown beside it, less loud."""

    shown: str
    sort: float | None = None
    small: str = ""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Value]], *, group: str = "") -> str:
    """A sortable table in a box that scrolls sideways, what it shows below it; the first column heads the rows. caption is plain text."""
    head = "".join(
        f'<th scope="col"{" class=num" if column.number else ""}{_title(column.hint)}>'
        f'<button type="button">{text(column.name)}</button></th>'
        for column in columns
    )
    body = "".join(f"<tr>{_row(columns, row)}</tr>" for row in rows)
    label = text(f"{group}: {caption}" if group else caption)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table aria-label="{label}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="caption">{text(caption, 600)}</p>'  # outside, so that it never scrolls away
    )


def _row(columns: Sequence[Column], row: Sequence[Value]) -> str:
    cells = []
    for index, (column, value) in enumerate(zip(columns, row, strict=True)):
        tag = 'th scope="row"' if index == 0 else "td"
        sort = "" if value.sort is None else f' data-sort="{value.sort:.10g}"'
        small = f" <small>{text(value.small)}</small>" if value.small else ""
        cells.append(
            f"<{tag}{' class=num' if column.number else ''}{sort}>{text(value.shown)}{small}</{tag.split()[0]}>"
        )
    return "".join(cells)


def _title(hint: str) -> str:
    return f' title="{text(hint)}"' if hint else ""


def percent(value: float, digits: int = 1) -> str:
    """A share as per cent, without the sign."""
    return f"{100 * value:.{digits}f}"


def signed(value: float) -> str:
    """A difference of shares in points, with its sign."""
    shown = f"{100 * value:+.1f}"
    return "0.0" if shown in ("+0.0", "-0.0") else shown.replace("-", "\N{MINUS SIGN}")


def budget_name(budget: float) -> str:
    """A fraction as per cent, a whole number above 1 as entries."""
    return f"{100 * budget:.4g} %" if budget <= 1 else f"{budget:g}"


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError
