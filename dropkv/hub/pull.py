"""Fetching a KV file from the Hub, checked, into the cache or to a place of its own."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dropkv.errors import HubError, UsageError
from dropkv.hub.address import FORM, HubAddress, is_address, parse_address
from dropkv.hub.client import Hub, asking, offline
from dropkv.hub.fetch import CachedFile, download, whole
from dropkv.hub.remote import look_up
from formats import CorruptFile, Header, check_target, verify_file
from formats.errors import naming, printable
from formats.temporary import replacing


@dataclass(frozen=True)
class Pulled:
    """A file that was fetched and found good. path: where it is now; fresh: it came over the network just now."""

    address: HubAddress
    path: Path
    commit: str
    fresh: bool
    header: Header


def pull(
    address: str, output: str | os.PathLike[str] | None = None, *, overwrite: bool = False, hub: Hub | None = None
) -> Pulled:
    """Fetch the KV file at an hf:// address and check every byte of it.

    output: a file to copy it to, or a folder that exists; None leaves it in the cache. A damaged copy in the cache is
    fetched anew. Raises UsageError, HubError, or a formats.FormatError.
    """
    if not is_address(address):
        raise UsageError(f"{printable(str(address), 200)}: is no address of the Hub; write {FORM}")
    hub = hub or Hub()
    parsed = parse_address(address)
    target = None if output is None else _target(output, parsed)
    if target is not None:
        check_target(target, overwrite=overwrite)
    cached = whole(address, hub)
    assert isinstance(cached, CachedFile)
    try:
        header = verify_file(cached).header
    except CorruptFile:
        if cached.fresh or offline():
            raise
        hub.note(f"note: the copy of {address} in the cache is damaged; it is downloaded again")
        cached = _again(cached, hub)
        header = verify_file(cached).header
    if target is not None:
        with (
            naming(target),
            replacing(target, overwrite=overwrite) as fd,
            open(cached.path, "rb") as source,
            open(fd, "wb", closefd=False) as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
    return Pulled(parsed, target or cached.path, cached.commit, cached.fresh, header)


def _target(output: str | os.PathLike[str], address: HubAddress) -> Path:
    """The file to write: in a folder, it has the name that it has on the Hub."""
    name = PurePosixPath(address.file).name
    return Path(output) / name if os.path.isdir(output) else Path(output)


def _again(cached: CachedFile, hub: Hub) -> CachedFile:
    with asking(cached.address, hub):
        found = look_up(cached.address, hub)
    if found.commit != cached.commit:
        raise HubError(f"{cached.shown}: changed while it was read; run it again")
    return download(found, hub, again=True)
