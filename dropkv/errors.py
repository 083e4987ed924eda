"""The closed family of errors a user can meet; each carries the exit code of the command that raised it.

Every message is one line: what is wrong, where, and what to type next.
"""

from __future__ import annotations

import errno

MORE_MEMORY = "close other programs, or use --dtype bfloat16 or a smaller model"
NO_MEMORY = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "bad_alloc",
)  # in the words of PyTorch, of systems and of C++


class DropkvError(Exception):
    """Base of every expected failure; commands print it as one line and leave with `exit_code`."""

    exit_code = 1


class UsageError(DropkvError):
    """An option or argument that cannot be meant: exit code 2, as for any command-line mistake."""

    exit_code = 2


class DocumentError(DropkvError):
    """A document that cannot be read, is empty, or does not fit the model."""


class ModelError(DropkvError):
    """A model that cannot be found, loaded or served."""


class BudgetError(UsageError):
    """A budget out of range, or smaller than the entries that are always kept."""


class IdentityError(DropkvError):
    """A KV file made with other weights, another tokenizer or another chat template."""


class QuestionError(DropkvError):
    """A question that cannot be asked: empty, or longer than what fits behind the document."""


class ResultsError(DropkvError):
    """A results folder that cannot be read or written, is damaged, or of another version."""


class HubError(DropkvError):
    """The Hub cannot be reached, refuses, does not have what was asked for, or sends something else."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python or of a library says that the memory of this machine is used up."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, Exception) and any(words in str(error) for words in NO_MEMORY)


def no_text(value: object) -> str:
    """What to say of a value that stands where text was expected."""
    if isinstance(value, bytes | bytearray):
        return "bytes, not text: decode it first, .decode()"
    return f"of type {type(value).__name__}, not text: give a str"
