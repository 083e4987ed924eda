"""Replacing a file in one step: a temporary file beside it, locked while its writer lives, flushed, then renamed.

A killed writer leaves a temporary file behind, which the next writer of the same target removes: nobody holds its lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from formats.errors import ExistingFile, FormatError, WriteFailed, naming
from formats.source import file_kind

LONGEST_STEM = 180  # bytes; a longer name is hashed, so that the temporary name stays below the usual limit of 255

FIXES = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some of your quota, or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or choose another folder",
    errno.ENOENT: "make the folder first (`mkdir -p`)",
    errno.ENOTDIR: "choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}
AT_FDCWD, RENAME_NOREPLACE = -100, 1  # Linux's, which Python does not name
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EINVAL}


@contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[int]:
    """Give a descriptor of an empty file that takes the place of `path` when the block ends without an exception.

    Otherwise `path` stays as it was and the temporary file is removed. A symbolic link is followed, not replaced.
    Raises ExistingFile, or WriteFailed for every OSError inside the block.
    """
    temporary: Path | None = None
    fd = -1
    try:
        target = _target(path, overwrite)
        temporary, fd = _create(target)
        yield fd
        os.fsync(fd)
        _commit(temporary, target, overwrite)
        temporary = None
        _flush_folder(target.parent)
    except OSError as error:
        raise _failed(error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise now what `write_file` would raise at its start, so that nobody computes for hours first.

    Removes, as every write does, what killed writers of this target left behind.
    """
    with naming(path):
        try:
            target = _target(path, overwrite)
            os.stat(target.parent / ".")
            if not os.access(target.parent, os.W_OK | os.X_OK):
                read_only = os.statvfs(target.parent).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise PermissionError(code, os.strerror(code))
        except OSError as error:
            raise _failed(error) from error


def _failed(error: OSError) -> WriteFailed:
    fix = FIXES.get(error.errno or 0, "choose a folder that can be written")
    return WriteFailed(f"cannot be written: {(error.strerror or str(error)).lower()}", fix=fix)


def _target(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Where links lead, cleared of litter; raises for what cannot be replaced."""
    if not isinstance(path, str | os.PathLike):
        raise WriteFailed("is no file name", fix="give a path such as book.kv")
    if os.fsdecode(path).endswith(("/", "/.", "/..")) or os.fsdecode(path) in ("", ".", ".."):
        raise WriteFailed("is the name of a folder", fix="give the name of a file")
    try:
        target = Path(os.path.realpath(path))
        _remove_stale(target)
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return target
    except ValueError as error:
        raise WriteFailed(f"is no file name: {error}", fix="choose another name") from error
    if not stat.S_ISREG(mode):
        raise WriteFailed(f"is {file_kind(mode)}, not a file", fix="give the name of a file")
    if not overwrite:
        raise _existing()
    return target


def _existing() -> FormatError:
    return ExistingFile("exists already")


def _stem(target: Path) -> str:
    name = os.fsencode(target.name)
    return target.name if len(name) <= LONGEST_STEM else xxhash.xxh3_128_hexdigest(name)


def _create(target: Path) -> tuple[Path, int]:
    while True:
        temporary = target.with_name(f".{_stem(target)}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
        # 0666 less the umask, as any file a user makes.
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks: then no cleaner can take the lock either
                fcntl.flock(fd, fcntl.LOCK_EX)
            # Between creation and lock another writer may have taken the file for litter.
            if os.fstat(fd).st_nlink:
                return temporary, fd
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            os.close(fd)
            raise
        os.close(fd)


def _remove_stale(target: Path) -> None:
    """Remove temporary files of this target whose writer is gone; a living writer holds the lock of its own."""
    pattern = re.compile(rf"\.{re.escape(_stem(target))}\.\d+\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError, ValueError):  # a folder that cannot be listed may still be written to
        for name in os.listdir(target.parent):
            if pattern.fullmatch(name):
                with suppress(OSError):
                    _remove_unlocked(target.with_name(name))


def _remove_unlocked(temporary: Path) -> None:
    fd = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
    finally:
        os.close(fd)


def _commit(temporary: Path, target: Path, overwrite: bool) -> None:
    if overwrite:
        os.replace(temporary, target)
        return
    # A link fails when the name is taken, also by a file that appeared while this one was written.
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise _existing() from error
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if not _rename_to_free_name(temporary, target):
            _claim_and_replace(temporary, target)
        return
    with suppress(OSError):  # the target stands; a second name left behind is litter for the next writer
        temporary.unlink()


def _rename_to_free_name(temporary: Path, target: Path) -> bool:
    """Rename unless the name is taken, in one step; False where the system or the file system cannot."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(temporary), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE) == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise _existing()
    return False


def _claim_and_replace(temporary: Path, target: Path) -> None:
    """For file systems that can do neither: claim the name with an empty file, then replace that.

    The only way to be killed and leave something under the target's name: the claim, which is empty.
    """
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError as error:
        raise _existing() from error
    try:
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            target.unlink()
        raise


def _flush_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut, where the file system can."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
