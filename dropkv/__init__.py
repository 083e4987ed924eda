"""dropkv: read a long document once, keep the few per cent of its KV cache that matter, ask the small file many questions.

import dropkv
dropkv.compress(text, budget=0.25).save("book.kv")
print(dropkv.load("book.kv").ask("Who is the killer?").text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dropkv._version import __version__

if TYPE_CHECKING:
    from dropkv.compression import Compression as Compression
    from dropkv.documents import Document as Document
    from dropkv.documents import read_document as read_document
    from dropkv.errors import DropkvError as DropkvError
    from dropkv.generate import Answer as Answer
    from dropkv.library import KVFile as KVFile
    from dropkv.library import compress as compress
    from dropkv.library import load as load
    from dropkv.models import load_model as load_model
    from dropkv.settings import CompressSettings as CompressSettings
    from dropkv.settings import Sampling as Sampling
    from dropkv.shrinking import shrink as shrink
    from formats.errors import FormatError as FormatError

_PUBLIC = {
    "Answer": "dropkv.generate",
    "CompressSettings": "dropkv.settings",
    "Compression": "dropkv.compression",
    "Document": "dropkv.documents",
    "DropkvError": "dropkv.errors",
    "FormatError": "formats.errors",
    "KVFile": "dropkv.library",
    "Sampling": "dropkv.settings",
    "compress": "dropkv.library",
    "load": "dropkv.library",
    "load_model": "dropkv.models",
    "read_document": "dropkv.documents",
    "shrink": "dropkv.shrinking",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    """The public names are imported when they are first used, so that importing dropkv does not import torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dropkv' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names, so that completion in a prompt finds them before their first use."""
    return __all__
