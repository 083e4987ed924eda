"""The Hub's client library as it is used here: with our name, without its log, its failures as one line each."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dropkv._version import __version__
from dropkv.errors import HubError
from dropkv.hub.address import HubAddress
from formats.errors import printable

Value = TypeVar("Value")

LIBRARY = "dropkv"
LOGIN = "run `hf auth login`, or set HF_TOKEN"
BUSY = (408, 429, 500, 502, 503, 504)  # answers after which the same request may succeed


@dataclass(frozen=True)
class Retries:
    """How often a request is repeated that brought nothing, and how long is waited before (seconds, doubled each time).

    A server that asks for more than `longest_asked` seconds of patience is not waited for.
    """

    tries: int = 5
    first_wait: float = 1.0
    longest_wait: float = 8.0
    longest_asked: float = 60.0

    def wait(self, attempt: int, asked: float | None) -> None:
        """Sleep before attempt number `attempt` (from 1 on); asked: seconds that the server named."""
        time.sleep(min(self.first_wait * 2 ** (attempt - 1), self.longest_wait) if asked is None else asked)


@dataclass(frozen=True)
class Hub:
    """Which Hub is asked and how. endpoint and cache: None for the ones of the environment (HF_ENDPOINT, HF_HOME).

    note: is told in one line what a user should know beside the result.
    """

    endpoint: str | None = None
    cache: Path | None = None
    retries: Retries = field(default_factory=Retries)
    note: Callable[[str], None] = lambda text: None

    @property
    def url(self) -> str:
        """Where the Hub is, without a slash at the end."""
        from huggingface_hub import constants

        return str(self.endpoint or constants.ENDPOINT).rstrip("/")


def offline() -> bool:
    """Whether the user forbade the network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def headers() -> dict[str, str]:
    """Headers of a request of our own: user agent, and the token if there is one. Never to be shown."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    built = build_hf_headers(library_name=LIBRARY, library_version=__version__)
    return {**built, "Accept-Encoding": "identity"}


@contextmanager
def calm() -> Iterator[None]:
    """The Hub's client without its log and its warnings, and with progress bars on terminals only."""
    import logging
    import warnings

    from huggingface_hub.utils.logging import get_verbosity, set_verbosity
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, silence = get_verbosity(), not sys.stderr.isatty() and not are_progress_bars_disabled()
    set_verbosity(logging.CRITICAL)
    if silence:
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_verbosity(verbosity)
        if silence:
            enable_progress_bars()


def status_of(error: BaseException) -> int | None:
    """The status of the Hub's answer that an error is about, None when there was no answer."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def broken_off(error: BaseException) -> bool:
    """Whether the connection failed or ended early; the HTTP library under the client has had several names."""
    return status_of(error) is None and type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")


def unreachable(error: BaseException) -> bool:
    """Whether no answer was to be had at all: no network, or none allowed."""
    from huggingface_hub import errors as hub

    known = (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError)
    return isinstance(error, known) or broken_off(error)


def asked_wait(answer: object) -> float | None:
    """Seconds that an answer asks to wait (Retry-After, or the reset of the Hub's rate limit), None when it does not say."""
    found = getattr(answer, "headers", {})
    after = found.get("retry-after") or ""
    if after.strip().isdigit():
        return float(after)
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", found.get("ratelimit") or "")
    return float(limit[1]) + 1 if limit else None


def repeated(action: Callable[[], Value], retries: Retries) -> Value:
    """What `action` gives; it is called again when the Hub is busy. Lets every other exception of the client through."""
    for attempt in range(1, retries.tries + 1):
        try:
            return action()
        except Exception as error:
            wait = asked_wait(getattr(error, "response", None))
            last = attempt == retries.tries or (wait or 0.0) > retries.longest_asked
            if last or status_of(error) not in BUSY:
                raise
            retries.wait(attempt, wait)
    raise AssertionError("unreachable")


@contextmanager
def asking(subject: object, hub: Hub, *, writing: bool = False) -> Iterator[None]:
    """Turn whatever the Hub's client raises into a HubError of one line that begins with `subject`; its log is silent.

    writing: the failures are those of an upload.
    """
    with calm(), explained(subject, hub, writing=writing):
        yield


@contextmanager
def explained(subject: object, hub: Hub, *, writing: bool = False) -> Iterator[None]:
    """As `asking`, but with the log as it is: for threads, which must not switch what all of them share."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        line = explain(error, hub, subject, writing=writing)
        if line is None:
            raise
        raise HubError(f"{subject}: {line}") from error


def explain(error: Exception, hub: Hub, subject: object, *, writing: bool = False) -> str | None:
    """What went wrong with `subject` and what to type next; None for what is no failure of the Hub.

    Nothing of a request is repeated: it holds the token.
    """
    from huggingface_hub import errors as known

    status = status_of(error)
    page = f"{hub.url}/{subject.repository}" if isinstance(subject, HubAddress) else hub.url
    if isinstance(error, known.OfflineModeIsEnabled):
        return "the network is switched off (HF_HUB_OFFLINE); unset it and run this again"
    if isinstance(error, known.GatedRepoError):
        return f"its owner gives access on request; ask for it at {page}, then {LOGIN}"
    if isinstance(error, known.RevisionNotFoundError):
        return f"the repository has no such revision; look at its commits at {page}/commits"
    if isinstance(error, known.EntryNotFoundError) and not isinstance(error, known.LocalEntryNotFoundError):
        return f"the repository has no such file; look at its files at {page}/tree/main"
    if isinstance(error, known.RepositoryNotFoundError) or status == 404:
        return f"no such repository, or it is private; check the spelling, or {LOGIN}"
    if status == 401 and os.environ.get("HF_TOKEN"):
        return (
            "the Hub does not accept the token in HF_TOKEN (401); set a valid one, or unset it and run `hf auth login`"
        )
    if status == 401:
        return f"the Hub wants a valid token (401); {LOGIN}"
    if status == 403:
        need = "with the right to write" if writing else "that may read it"
        return f"the Hub refuses access (403); use a token {need}: {LOGIN}"
    if status == 429:
        wait = asked_wait(getattr(error, "response", None))
        return "too many requests (429); " + ("try again in a while" if wait is None else f"try again in {wait:.0f} s")
    if writing and status == 412:
        return "the repository changed in the meantime; run it again"
    if writing and status in (400, 413, 422):
        return f"the Hub does not accept this ({status}){_said(error)}; change what it names and run it again"
    if status is not None:
        return f"the Hub answers {status}{_said(error)}; try again in a while"
    if broken_off(error) and "Connect" not in type(error).__name__:
        return f"the connection broke off ({_reason(error)}); run it again"
    if unreachable(error):
        instead = "" if writing else ", or use a file of this machine"
        return f"the Hub cannot be reached ({hub.url}); check the network or HF_ENDPOINT{instead}"
    if isinstance(error, known.HFValidationError):
        return f"{_reason(error)}; check the spelling"
    if isinstance(error, OSError | RuntimeError | ValueError):
        inner = error.__cause__ if isinstance(error.__cause__, Exception) else None
        if inner is not None and (status_of(inner) is not None or broken_off(inner)):
            return explain(inner, hub, subject, writing=writing)
        advice = "check the network and the disk, or set HF_HOME to a folder with room"
        return f"{'cannot be uploaded' if writing else 'cannot be downloaded'} ({_reason(error)}); {advice}"
    return None


def _said(error: Exception) -> str:
    """The server's own words, if they are few."""
    words = _line(str(getattr(error, "server_message", None) or ""))
    return f" ({words})" if words else ""


def _reason(error: Exception) -> str:
    return _line(str(getattr(error, "strerror", None) or error)) or type(error).__name__


def _line(text: str) -> str:
    """Foreign words on one line, with whatever looks like a token taken out."""
    return printable(re.sub(r"\bhf_\w+", "hf_...", " ".join(text.split())), 160)
