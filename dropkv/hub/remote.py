"""Reading parts of a file on the Hub: positioned reads as range requests, pinned to one commit."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dropkv.errors import HubError
from dropkv.hub.address import HubAddress
from dropkv.hub.client import BUSY, Hub, asked_wait, broken_off, explain, explained, headers, repeated
from formats.errors import CorruptFile
from formats.sniff import SNIFF_BYTES

EXPIRED = (401, 403, 404, 410)  # answers of a storage server whose signed address is too old


class NoRanges(HubError):
    """The server sends whole files only."""


@dataclass(frozen=True)
class Found:
    """A file as the Hub describes it: `commit` is what the address meant when it was asked for, `etag` the hash of the
    content (sha256, or git's for a small file), `size` its bytes (None when the server does not say), `location` where
    the bytes are: a signed address, not to be shown.
    """

    address: HubAddress
    commit: str
    etag: str
    size: int | None
    location: str


def look_up(address: HubAddress, hub: Hub, *, commit: str | None = None) -> Found:
    """Ask the Hub for a file, without its content. Raises what the Hub's client raises; repeats while the Hub is busy."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(address.repository, address.file, revision=commit or address.wanted, endpoint=hub.url)
    found = repeated(
        lambda: get_hf_file_metadata(url, headers=headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=hub.url),
        hub.retries,
    )
    if not found.commit_hash or not found.etag or not re.fullmatch("[0-9a-f]{40}", found.commit_hash):
        raise HubError(f"{address}: {hub.url} does not answer as a Hub does; check HF_ENDPOINT and the network's proxy")
    return Found(address, found.commit_hash, found.etag, found.size, found.location)


class RemoteSource:
    """A formats.Source over range requests. Several threads may read at once.

    A read that breaks off goes on where it stopped; one that brings nothing is repeated as Hub.retries says. Every
    answer must come from the same content: same size, same etag, and the pinned commit's when an address has to be renewed.
    """

    threads = 16
    gap = 32 << 10  # less than a block: nothing but blocks that are needed
    longest = 4 << 20

    def __init__(self, found: Found, hub: Hub) -> None:
        assert found.size is not None
        self.found = found
        self.hub = hub
        self.size = found.size
        self.received = 0  # bytes of content, for whoever wants to know
        self._location = found.location
        self._etag: str | None = None  # of the storage server, which may not be the Hub's
        self._lock = threading.Lock()
        self._all_headers = headers()
        self._head = b""

    def start(self) -> None:
        """Read the first bytes, which every reader wants. Raises NoRanges when the server sends whole files only."""
        first = bytearray(min(SNIFF_BYTES, self.size))
        self._fill(0, memoryview(first))
        self._head = bytes(first)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on. Raises HubError, or CorruptFile beyond the end."""
        if offset + len(out) > self.size:
            raise CorruptFile("the file is shorter than that", where=f"file byte {self.size}")
        known = max(0, min(len(self._head) - offset, len(out)))
        out[:known] = self._head[offset : offset + known]
        self._fill(offset + known, out[known:])

    def _fill(self, offset: int, out: memoryview) -> None:
        """Fetch the bytes, as often as it takes and Hub.retries allows."""
        done, failures = 0, 0
        while done < len(out):
            before, location = done, self._location
            trouble = _Trouble("the connection broke off (too few bytes); run it again")
            try:
                for piece in self._get(location, offset + done, offset + len(out)):
                    out[done : done + len(piece)] = piece
                    done += len(piece)
            except _Trouble as found:
                trouble = found
            except Exception as error:
                with explained(self.found.address, self.hub):
                    if not broken_off(error):
                        raise
                trouble = _Trouble(explain(error, self.hub, self.found.address) or "")
            failures = 0 if done > before else failures + 1
            if failures == self.hub.retries.tries:
                raise HubError(f"{self.found.address}: {trouble.line}")
            if trouble.status in EXPIRED:
                self._renew(location, trouble)
            elif failures:
                self.hub.retries.wait(failures, trouble.wait)

    def _get(self, location: str, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop), or as many of them as come."""
        from huggingface_hub import constants, get_session

        asked = {**self._headers(location), "Range": f"bytes={start}-{stop - 1}"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", location, headers=asked, timeout=timeout) as answer:
            self._check(answer, start, stop)
            left = stop - start
            for piece in answer.iter_raw():
                view = memoryview(piece)[:left]  # a server that sends more than was asked for is not believed
                left -= len(view)
                with self._lock:
                    self.received += len(view)
                yield view
                if not left:
                    return

    def _check(self, answer: Any, start: int, stop: int) -> None:
        """Raise unless the answer holds the bytes that were asked for, of the file that was found."""
        if answer.status_code not in (200, 206):
            raise self._trouble(answer)
        if answer.status_code == 200 and stop - start < self.size:
            raise NoRanges(
                f"{self.found.address}: the server sends whole files only; fetch it with `dropkv pull` first"
            )
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise NoRanges(f"{self.found.address}: the server sends it compressed; fetch it with `dropkv pull` first")
        etag, place = answer.headers.get("etag"), answer.headers.get("content-range")
        with self._lock:
            self._etag = self._etag or etag
            changed = etag is not None and etag != self._etag
        if answer.status_code == 206:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", place or "")
            if not found or int(found[1]) != start or int(found[2]) >= stop:
                raise NoRanges(
                    f"{self.found.address}: the server sends other bytes than asked for; fetch it with `dropkv pull` first"
                )
            changed = changed or int(found[3]) != self.size
        if changed:
            raise self._changed()

    def _changed(self) -> HubError:
        return HubError(f"{self.found.address}: changed while it was read; run it again")

    def _headers(self, location: str) -> dict[str, str]:
        """The token goes to the Hub itself and to nobody else."""
        allowed = self._ours(location)
        return {name: value for name, value in self._all_headers.items() if allowed or name.lower() != "authorization"}

    def _trouble(self, answer: Any) -> Exception:
        """The error for an answer without content: _Trouble when a further request may succeed, else HubError."""
        from huggingface_hub import hf_raise_for_status

        status = int(answer.status_code)
        line: str | None = None
        try:
            hf_raise_for_status(answer)
        except Exception as error:
            line = explain(error, self.hub, self.found.address)
        trouble = _Trouble(line or f"the Hub answers {status}; try again in a while", status, asked_wait(answer))
        busy = status in BUSY and (trouble.wait or 0.0) <= self.hub.retries.longest_asked
        return trouble if busy or status in EXPIRED else HubError(f"{self.found.address}: {trouble.line}")

    def _renew(self, location: str, trouble: _Trouble) -> None:
        """Ask again where the bytes of the pinned commit are, once for all threads that found the address too old."""
        if self._ours(location):  # no signed address: the Hub itself refuses
            raise HubError(f"{self.found.address}: {trouble.line}")
        with self._lock:
            if self._location != location:
                return
            with explained(self.found.address, self.hub):
                again = look_up(self.found.address, self.hub, commit=self.found.commit)
            if (again.etag, again.size) != (self.found.etag, self.found.size):
                raise self._changed()
            self._location, self._etag = again.location, None

    def _ours(self, location: str) -> bool:
        return urlsplit(location)[:2] == urlsplit(self.hub.url)[:2]


class _Trouble(Exception):
    """A request that brought nothing more. line: what to say when it stays so; wait: seconds that the server asks for."""

    def __init__(self, line: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(line)
        self.line, self.status, self.wait = line, status, wait
