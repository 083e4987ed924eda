"""The KV file (.kv), versions 1 and 2; FORMAT.md beside this file is its specification.

Knows tensors and bytes, no model. Importing it, and reading a header, imports neither torch nor numpy.
"""

from formats.checks import VerifyReport, verify_file
from formats.entries import LayerEntries
from formats.errors import (
    CorruptFile,
    ExistingFile,
    FormatError,
    NotAKVFile,
    UnreadableFile,
    UnsupportedVersion,
    WriteFailed,
)
from formats.header import FORMAT_VERSION, Header
from formats.layout import TensorInfo
from formats.metadata import (
    BudgetInfo,
    DocumentInfo,
    LayerInfo,
    Metadata,
    ModelIdentity,
    Quantization,
    TokenizerIdentity,
)
from formats.reader import Contents, read_file, read_header
from formats.shrinking import ShrinkReport, copy_without_tokens, shrink_file
from formats.source import Place, Source, open_source
from formats.temporary import check_target
from formats.writer import write_file

__all__ = [
    "FORMAT_VERSION",
    "BudgetInfo",
    "Contents",
    "CorruptFile",
    "DocumentInfo",
    "ExistingFile",
    "FormatError",
    "Header",
    "LayerEntries",
    "LayerInfo",
    "Metadata",
    "ModelIdentity",
    "NotAKVFile",
    "Place",
    "Quantization",
    "ShrinkReport",
    "Source",
    "TensorInfo",
    "TokenizerIdentity",
    "UnreadableFile",
    "UnsupportedVersion",
    "VerifyReport",
    "WriteFailed",
    "check_target",
    "copy_without_tokens",
    "open_source",
    "read_file",
    "read_header",
    "shrink_file",
    "verify_file",
    "write_file",
]
