"""Addresses of files on the Hub, hf://NAMESPACE/NAME[@REVISION]/FILE, read strictly: what is not clearly meant is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike

from dropkv.errors import UsageError
from formats.errors import printable

SCHEME = "hf://"
FORM = "hf://NAMESPACE/NAME[@REVISION]/FILE.kv"
MAIN = "main"
KINDS = ("datasets", "spaces", "buckets", "kernels")  # other things than model repositories that have addresses
# A pull request of a repository, and a conversion: the only revisions with a slash that need no %2F.
SPECIAL = re.compile(r"refs/(?:pr/[0-9]+|convert/[\w.-]+)(?=/|$)", re.ASCII)
LONGEST = 1024  # characters of a path in a repository


@dataclass(frozen=True)
class HubAddress:
    """A file in a model repository. repository: NAMESPACE/NAME; revision: branch, tag, commit, or None for the default branch;
    file: path in the repository, "" when the address ends before it.
    """

    repository: str
    revision: str | None
    file: str

    @property
    def wanted(self) -> str:
        """The revision to ask for."""
        return self.revision or MAIN

    @property
    def folder(self) -> str:
        """The address of the repository, without a file."""
        return SCHEME + self.repository + ("" if self.revision is None else f"@{_escaped(self.revision)}")

    def __str__(self) -> str:
        return f"{self.folder}/{self.file}" if self.file else self.folder


def is_address(file: object) -> bool:
    """Whether a FILE of the command line or the library is meant as an address of the Hub, well-formed or not."""
    return isinstance(file, str) and file[: len(SCHEME)].lower() == SCHEME


def refuse_web_address(file: object) -> None:
    """Raise UsageError for a web address, which no file of this machine can be meant by."""
    if isinstance(file, PathLike) and str(file).startswith("hf:/"):
        raise UsageError(f"{printable(str(file), 200)}: is no path; give an address of the Hub as a text, {FORM}")
    if isinstance(file, str) and re.match(r"https?:/", file, re.IGNORECASE):
        raise UsageError(f"{printable(file, 200)}: is a web address; name a file of the Hub as {FORM}, or download it")


def parse_address(text: str) -> HubAddress:
    """The address in a text that `is_address`. Raises UsageError, which says what is wrong with it."""
    if not text.startswith(SCHEME):
        raise _wrong(text, "must begin with hf:// in lower case")
    if not text.isprintable():
        raise _wrong(text, "holds a control character")
    rest = text.removeprefix(SCHEME)
    first, _, beyond = rest.partition("/")
    if first in KINDS:
        raise _wrong(text, f"names one of the Hub's {first}; KV files are kept in model repositories")
    if first == "models" and "/" in beyond:
        rest = beyond
    namespace, _, tail = rest.partition("/")
    name, revision, file = _parts(tail)
    repository = f"{namespace}/{name}"
    try:
        check_repository(repository)
        if revision is not None:
            check_revision(revision)
        if file or tail.endswith("/"):
            check_file(file)
    except UsageError as error:
        raise _wrong(text, str(error)) from None
    return HubAddress(repository, revision, file)


def _parts(tail: str) -> tuple[str, str | None, str]:
    """Name, revision and file of what follows the namespace."""
    name, at, after = tail.partition("@")
    if not at or "/" in name:  # an @ further on belongs to the file
        name, _, file = tail.partition("/")
        return name, None, file
    special = SPECIAL.match(after)
    if special:
        return name, special[0], after[special.end() + 1 :]
    revision, _, file = after.partition("/")
    return name, re.sub("%2f", "/", revision, flags=re.IGNORECASE), file


def check_repository(repository: str) -> None:
    """Raise UsageError unless the text is NAMESPACE/NAME as the Hub allows it."""
    namespace, slash, name = repository.partition("/")
    if not slash or not namespace or not name:
        raise UsageError(
            f"the repository {printable(repository, 120)!r} lacks its namespace or its name: write NAMESPACE/NAME"
        )
    for part in (namespace, name):
        if not re.fullmatch(r"[\w.-]{1,96}", part, re.ASCII) or part[0] in "-." or part[-1] in "-.":
            raise UsageError(
                f"{printable(part, 120)!r} is no name of a repository: use letters, digits, and - _ . between them"
            )
        if "--" in part or ".." in part or part.endswith(".git"):
            raise UsageError(f"{part!r} is no name of a repository: it must not have -- or .. in it, nor end in .git")


def check_revision(revision: str) -> None:
    """Raise UsageError unless the text can be a branch, a tag or a commit."""
    parts = revision.split("/")
    if (
        not re.fullmatch(r"[\w./-]{1,200}", revision, re.ASCII)
        or revision[0] == "-"
        or any(not part or part[0] == "." or ".." in part or part.endswith((".", ".lock")) for part in parts)
    ):
        raise UsageError(f"{printable(revision, 120)!r} is no revision: give a branch, a tag or a commit after @")


def check_file(file: str) -> None:
    """Raise UsageError unless the text is a path that stays inside a repository, on every system."""
    if len(file) > LONGEST:
        raise UsageError("the name of the file is too long")
    if not file or any(part in ("", ".", "..") for part in file.split("/")):
        raise UsageError("the name of the file has an empty part, a . or a ..: write the file's path in the repository")
    if "\\" in file or not file.isprintable() or file.split("/")[0] == ".git":
        raise UsageError("the name of the file has a backslash or a control character, or lies in .git")
    if "?" in file or "#" in file:
        raise UsageError(
            "the name of the file has a ? or a #; an address has no parameters, the revision stands behind @"
        )


def _escaped(revision: str) -> str:
    return revision if SPECIAL.fullmatch(revision) else revision.replace("/", "%2F")


def _wrong(text: str, what: str) -> UsageError:
    return UsageError(f"{printable(text, 200)}: {what}; an address has the form {FORM}")
