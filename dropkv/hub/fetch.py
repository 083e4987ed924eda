"""A FILE that may be an address of the Hub: whole and in the cache, or in parts over the network."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dropkv._version import __version__
from dropkv.errors import HubError
from dropkv.hub.address import HubAddress, is_address, parse_address, refuse_web_address
from dropkv.hub.client import (
    LIBRARY,
    Hub,
    asked_wait,
    asking,
    broken_off,
    calm,
    explained,
    offline,
    repeated,
    status_of,
    unreachable,
)
from dropkv.hub.remote import Found, NoRanges, RemoteSource, look_up
from formats import CorruptFile, Place, Source, open_source

COMMIT = re.compile("[0-9a-f]{40}")
LISTED = 5  # files named in a message
DOWNLOADS = 3  # attempts at a whole file, each of which the Hub's client repeats and resumes by itself


@dataclass(frozen=True)
class CachedFile:
    """A file of the Hub in the local cache: its address is its name, `commit` the state of the repository it is from.

    fresh: it was downloaded just now, not found there.
    """

    address: HubAddress
    path: Path
    commit: str
    fresh: bool = False

    @property
    def shown(self) -> str:
        """Its address."""
        return str(self.address)

    def __str__(self) -> str:
        return self.shown

    @contextmanager
    def open(self) -> Iterator[Source]:
        """Its bytes; a damaged copy can be had anew."""
        with open_source(self.path) as source:
            try:
                yield source
            except CorruptFile as error:
                error.fix = f"fetch it again with `dropkv pull {self.shown}`, or tell its owner"
                raise


@dataclass(frozen=True)
class RemoteFile:
    """A file of the Hub whose parts are read when they are wanted."""

    found: Found
    hub: Hub

    @property
    def shown(self) -> str:
        """Its address."""
        return str(self.found.address)

    def __str__(self) -> str:
        return self.shown

    @contextmanager
    def open(self) -> Iterator[Source]:
        """Its bytes, by range requests; from a server that does not know them by way of the cache."""
        with calm():
            source = RemoteSource(self.found, self.hub)
            try:
                source.start()
            except NoRanges:
                self.hub.note(f"note: the server sends whole files only; all of {self.shown} is downloaded")
                with download(self.found, self.hub).open() as local:
                    yield local
                return
            yield source


def whole(file: str | os.PathLike[str], hub: Hub | None = None) -> Place:
    """A file to be read from end to end: what is no address stays as it is, the rest is in the cache afterwards.

    Raises UsageError for a malformed address, HubError.
    """
    place = parts(file, hub)
    return download(place.found, place.hub) if isinstance(place, RemoteFile) else place


def parts(file: str | os.PathLike[str], hub: Hub | None = None) -> Place:
    """A file of which little will be read: what is in the cache is taken from there, the rest stays on the Hub.

    Raises UsageError for a malformed address, HubError.
    """
    if not is_address(file):
        refuse_web_address(file)
        return file
    hub = hub or Hub()
    known = _known(parse_address(str(file)), hub)
    if isinstance(known, CachedFile):
        return known
    return download(known, hub) if known.size is None else RemoteFile(known, hub)


def for_questions(file: Place, budget: float | int | None = None, hub: Hub | None = None) -> Place:
    """A file that will be asked: of a budget smaller than its own only parts are read, else all of it.

    Raises UsageError for a malformed address, HubError.
    """
    if not isinstance(file, str | os.PathLike):
        return file  # looked up before
    return whole(file, hub) if budget is None else parts(file, hub)


def _known(address: HubAddress, hub: Hub) -> Found | CachedFile:
    """The file in the cache if that is what the Hub has now, or if the Hub cannot be asked; else where it is."""
    fixed = COMMIT.fullmatch(address.wanted)
    cached = in_cache(address, hub) if address.file and (fixed or offline()) else None
    if cached is not None:
        return cached
    if offline():
        raise HubError(
            f"{address}: not in the cache, and the network is switched off (HF_HUB_OFFLINE); unset it and run this again"
        )
    try:
        with calm():
            _refuse_folder(address, hub)
            found = look_up(address, hub)
    except HubError:
        raise
    except Exception as error:
        away = unreachable(error) or (status_of(error) or 0) >= 429
        cached = in_cache(address, hub) if away and address.file else None
        if cached is None:
            with explained(address, hub):
                raise
        hub.note(f"note: the Hub cannot be asked; {address} is the copy in the cache, of commit {cached.commit[:8]}")
        return cached
    return in_cache(address, hub, found.commit) or found


def _refuse_folder(address: HubAddress, hub: Hub) -> None:
    """Raise HubError for an address without a file; it names the KV files of the repository."""
    if address.file:
        return
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.url, library_name=LIBRARY, library_version=__version__)
    info = repeated(lambda: api.model_info(address.repository, revision=address.revision), hub.retries)
    files = [item.rfilename for item in info.siblings or [] if item.rfilename.endswith((".kv", ".kv.safetensors"))]
    if not files:
        raise HubError(f"{address}: holds no .kv file; name another repository, or the file: {address}/FILE")
    shown = ", ".join(str(replace(address, file=file)) for file in files[:LISTED])
    more = f" and {len(files) - LISTED} more" if len(files) > LISTED else ""
    raise HubError(f"{address}: is a repository, name the file in it: {shown}{more}")


def in_cache(address: HubAddress, hub: Hub, commit: str | None = None) -> CachedFile | None:
    """The file in the local cache, of that commit or as its revision was last seen; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(
        address.repository, address.file, cache_dir=hub.cache, revision=commit or address.wanted
    )
    if not isinstance(found, str):
        return None
    path = Path(found)
    return CachedFile(address, path, _commit_of(path, address))


def _commit_of(path: Path, address: HubAddress) -> str:
    """The commit in the path of a file in the cache, .../snapshots/COMMIT/FILE."""
    return path.parts[-1 - len(address.file.split("/"))]


def download(found: Found, hub: Hub, *, again: bool = False) -> CachedFile:
    """Fetch a whole file into the cache and compare it with the hash that the Hub announces.

    again: also when it is there. A file that differs is removed from the cache. Raises HubError.
    """
    from huggingface_hub import hf_hub_download

    address = found.address
    with asking(address, hub):
        for attempt in range(1, DOWNLOADS + 1):
            try:
                path = hf_hub_download(
                    address.repository,
                    address.file,
                    revision=address.wanted,  # not the commit, so that the cache remembers what the revision means
                    cache_dir=hub.cache,
                    endpoint=hub.url,
                    library_name=LIBRARY,
                    library_version=__version__,
                    force_download=again,
                )
                break
            except Exception as error:
                wait = asked_wait(getattr(error, "response", None))
                failed = (status_of(error) or 0) >= 500 and (wait or 0.0) <= hub.retries.longest_asked
                if attempt == DOWNLOADS or not (failed or broken_off(error)):
                    raise
                hub.retries.wait(attempt, wait)
        cached = CachedFile(address, Path(path), _commit_of(Path(path), address), fresh=True)
        if cached.commit != found.commit:  # there was a commit between the two requests
            found = look_up(address, hub, commit=cached.commit)
    if _hash(cached.path, found.etag) not in ("", found.etag):
        _remove(cached.path)
        raise HubError(
            f"{address}: what the server sent is not what the Hub announces (its hash differs); nothing was kept, "
            f"run it again, or tell the owner"
        )
    return cached


def _hash(path: Path, etag: str) -> str:
    """The hash of a file of the kind that the etag is: sha256, or git's own for small files; "" for another kind."""
    if re.fullmatch("[0-9a-f]{64}", etag):
        made = hashlib.sha256()
    elif COMMIT.fullmatch(etag):
        made = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    else:
        return ""
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            made.update(piece)
    return made.hexdigest()


def _remove(path: Path) -> None:
    """Take a file out of the cache: its name in the snapshot and what that links to."""
    with suppress(OSError):
        blob = path.parent / os.readlink(path) if path.is_symlink() else path
        path.unlink()
        blob.unlink(missing_ok=True)
