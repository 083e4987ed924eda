"""The KV file (.kv), versions 1 and 2; FORMAT.md beside this file is its specification.

Knows tensors and bytes, no model. Importing it, and reading a header, imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.checks import VerifyReport as VerifyReport
    from formats.checks import verify_file as verify_file
    from formats.entries import LayerEntries as LayerEntries
    from formats.errors import CorruptFile as CorruptFile
    from formats.errors import ExistingFile as ExistingFile
    from formats.errors import FormatError as FormatError
    from formats.errors import NotAKVFile as NotAKVFile
    from formats.errors import UnreadableFile as UnreadableFile
    from formats.errors import UnsupportedVersion as UnsupportedVersion
    from formats.errors import WriteFailed as WriteFailed
    from formats.header import FORMAT_VERSION as FORMAT_VERSION
    from formats.header import Header as Header
    from formats.landing import Landing as Landing
    from formats.layout import TensorInfo as TensorInfo
    from formats.metadata import BudgetInfo as BudgetInfo
    from formats.metadata import DocumentInfo as DocumentInfo
    from formats.metadata import LayerInfo as LayerInfo
    from formats.metadata import Metadata as Metadata
    from formats.metadata import ModelIdentity as ModelIdentity
    from formats.metadata import Quantization as Quantization
    from formats.metadata import TokenizerIdentity as TokenizerIdentity
    from formats.reader import Contents as Contents
    from formats.reader import read_file as read_file
    from formats.reader import read_header as read_header
    from formats.shrinking import ShrinkReport as ShrinkReport
    from formats.shrinking import copy_without_tokens as copy_without_tokens
    from formats.shrinking import shrink_file as shrink_file
    from formats.source import Place as Place
    from formats.source import Source as Source
    from formats.source import open_source as open_source
    from formats.temporary import check_target as check_target
    from formats.writer import write_file as write_file

_PUBLIC = {
    "BudgetInfo": "formats.metadata",
    "Contents": "formats.reader",
    "CorruptFile": "formats.errors",
    "DocumentInfo": "formats.metadata",
    "ExistingFile": "formats.errors",
    "FORMAT_VERSION": "formats.header",
    "FormatError": "formats.errors",
    "Header": "formats.header",
    "Landing": "formats.landing",
    "LayerEntries": "formats.entries",
    "LayerInfo": "formats.metadata",
    "Metadata": "formats.metadata",
    "ModelIdentity": "formats.metadata",
    "NotAKVFile": "formats.errors",
    "Place": "formats.source",
    "Quantization": "formats.metadata",
    "ShrinkReport": "formats.shrinking",
    "Source": "formats.source",
    "TensorInfo": "formats.layout",
    "TokenizerIdentity": "formats.metadata",
    "UnreadableFile": "formats.errors",
    "UnsupportedVersion": "formats.errors",
    "VerifyReport": "formats.checks",
    "WriteFailed": "formats.errors",
    "check_target": "formats.temporary",
    "copy_without_tokens": "formats.shrinking",
    "open_source": "formats.source",
    "read_file": "formats.reader",
    "read_header": "formats.reader",
    "shrink_file": "formats.shrinking",
    "verify_file": "formats.checks",
    "write_file": "formats.writer",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """The public names are imported when they are first used: reading a header needs few of these modules, `--help` but the errors."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'formats' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
