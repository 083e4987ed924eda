"""What methods there are, without importing them: that would import torch, too slow for `--help`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("methods")
HYPHENATED = {"expected_attention": "expected-attention"}  # a module's name cannot have the hyphen its authors write


def method_files() -> dict[str, str]:
    """Name of every method -> name of its module in dropkv/methods."""
    stems = (path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    return {HYPHENATED.get(stem, stem): stem for stem in stems}
