"""docs/methods.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from dropkv.methods import names
from dropkv.methods._doc import page

DOC = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_current():
    assert DOC.read_text(encoding="utf-8") == page(), "write it again: python -m dropkv.methods._doc > docs/methods.md"


def test_every_method_has_a_row_and_a_section():
    text = page()
    for name in names():
        assert f"| [{name}](#{name}) |" in text and f"\n### {name}\n" in text
