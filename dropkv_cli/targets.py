"""Where `compress` and `shrink` write: one path per input; what can be refused is refused before any work is done."""

from __future__ import annotations

import errno
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dropkv.errors import DropkvError, UsageError
from formats.errors import ExistingFile, FormatError, WriteFailed, printable, show_path

STDIN = STDOUT = "-"
SUFFIX = ".kv"
TEXTS = (".txt", ".text", ".md", ".markdown")  # what is taken of a folder of documents


@dataclass(frozen=True)
class Target:
    """One document and the file it becomes (no path on a dry run without -o).

    rivals: the other documents that would become the same file; with any, this one cannot be written.
    """

    document: str
    path: Path | None
    rivals: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The document for messages."""
        return "standard input" if self.document == STDIN else show_path(self.document)


def plan_targets(names: Sequence[str], output: str | None, noun: str = "document") -> list[Target]:
    """Pair documents, or whatever else the noun says, and files. A folder among documents stands for the texts in it; an output
    folder need not exist yet.

    Raises UsageError for what cannot be meant, DropkvError for a folder without texts or one that cannot be made.
    """
    if not all(names):
        advice = "name a text file, or give - to read standard input" if noun == "document" else "give the name of one"
        raise UsageError(f"a {noun} has an empty name: {advice}")
    documents = list(names)
    if noun == "document":
        documents = [document for name in names for document in (_texts_in(name) if os.path.isdir(name) else [name])]
    twice = next((name for name, times in Counter(documents).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"the {noun} {show_path(twice)} is given twice: name each one once")
    if output is None:
        return [Target(document, None) for document in documents]
    if not output:
        raise UsageError("-o is empty: name a file such as book.kv, or a folder")
    if "://" in output:
        address = show_path(output)
        raise UsageError(
            f"-o {address} is an address: write a file of this machine, then `dropkv push FILE NAMESPACE/NAME`"
        )
    if output == STDOUT:
        raise UsageError("a .kv file cannot go to a pipe: name a file with -o, or ./- for a file of that name")
    folder = Path(output)
    if not (os.path.isdir(folder) or output.endswith(os.sep)):
        if len(documents) > 1:
            count = len(documents)
            raise UsageError(
                f"-o {show_path(output)} is one file for {count} {noun}s: give a folder, {show_path(output)}/"
            )
        return [Target(documents[0], folder)]
    if not os.path.isdir(folder):
        _check_length(folder)
        _refuse_below_file(folder, folder)
    targets = [Target(document, folder / (_stem(document) + SUFFIX)) for document in documents]
    claims = defaultdict(list)
    for target in targets:
        claims[target.path].append(target.document)
    return [replace(one, rivals=tuple(name for name in claims[one.path] if name != one.document)) for one in targets]


def make_folder(output: str) -> None:
    """Make the folder an output ends in, where it names one. Raises DropkvError."""
    if not output.endswith(os.sep):
        return
    try:
        os.makedirs(output, exist_ok=True)
    except OSError as error:
        raise DropkvError(
            f"{show_path(output)}: cannot be made ({error.strerror}), choose another one with -o"
        ) from None


def check_target(target: Target, *, force: bool, new_folder: bool = False) -> None:
    """Raise DropkvError or FormatError when this file cannot or must not be written; nothing is touched.

    new_folder: its folder will be made.
    """
    path = target.path
    if path is None:
        return
    refuse_rivals(target)
    if target.document != STDIN and _same(Path(target.document), path):
        if path.suffix == SUFFIX:
            raise UsageError(
                f"{show_path(path)} is a .kv file already: ask it with `dropkv query`, or `dropkv shrink` it"
            )
        raise UsageError(f"{show_path(path)} is the document itself: choose another name with -o")
    check_path(path, force=force, new_folder=new_folder)


def refuse_rivals(target: Target) -> None:
    """Raise DropkvError for a document whose file is another's, too: neither name would say which of them it holds."""
    if target.rivals:
        others = f"{show_path(target.rivals[0])}{' and others' if len(target.rivals) > 1 else ''}"
        path = show_path(target.path or "")
        raise DropkvError(
            f"{target.shown}: would become {path}, as {others} would: do it apart, with -o and a name of its own"
        )


def check_path(path: Path, *, force: bool, new_folder: bool = False) -> None:
    """What `check_target` does, for a file that may take the place of the one it was made of."""
    shown = show_path(path)
    _check_length(path)
    if os.path.lexists(path):
        if path.exists() and not path.is_file():
            raise _refused(WriteFailed("is no regular file", fix="choose another name with -o"), shown)
        if not force:
            raise _refused(ExistingFile("exists already"), shown)
    parent = path.parent
    if not parent.is_dir() and new_folder:
        _try_folder(shown, next(place for place in parent.parents if place.is_dir()))
        return
    if not parent.is_dir():
        _refuse_below_file(path, parent)
        raise DropkvError(f"{shown}: its folder does not exist, make it first: mkdir -p {show_path(parent)}")
    _try_folder(shown, parent)


def _texts_in(folder: str) -> list[str]:
    """The texts that lie in a folder itself, by name; hidden ones and those of folders in it are passed over. Raises DropkvError."""
    try:
        found = [entry for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith(".")]
    except OSError as error:
        raise DropkvError(f"{show_path(folder)}: cannot be read ({error.strerror}), check its permissions") from None
    texts = sorted(entry.path for entry in found if entry.name.lower().endswith(TEXTS))
    if not texts:
        kinds = f"{', '.join(TEXTS[:-1])} or {TEXTS[-1]}"
        raise DropkvError(f"{show_path(folder)}: no {kinds} file lies in this folder, name the documents one by one")
    return texts


def _try_folder(shown: str, folder: Path) -> None:
    """Raise DropkvError where no file can be made in a folder; one without a name is, as permissions do not tell of all that forbids it."""
    from tempfile import TemporaryFile

    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower() if error.errno != errno.ENOENT else "no file can be made in it"
        raise DropkvError(
            f"{shown}: the folder {show_path(folder)} is not writable ({reason}), choose another one with -o"
        ) from None


def _check_length(path: Path) -> None:
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            shown = printable(os.fsdecode(path), limit=60)
            raise DropkvError(f"{shown}: the name is too long for the disk, choose a shorter one with -o") from None


def _refuse_below_file(path: Path, folder: Path) -> None:
    """Raise DropkvError when something that should be a folder is a file: no mkdir helps then."""
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                raise DropkvError(f"{show_path(path)}: {show_path(place)} is no folder, choose another name with -o")
            return


def _refused(error: FormatError, shown: str) -> FormatError:
    error.path = shown
    return error


def _stem(document: str) -> str:
    return "stdin" if document == STDIN else Path(document).stem


def _same(document: Path, path: Path) -> bool:
    try:
        return document.samefile(path)
    except OSError:
        return False  # one of them is not there
