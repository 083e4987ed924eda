"""Uploading a KV file to a model repository of the Hub, with its card, in one commit."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dropkv._version import __version__
from dropkv.errors import HubError, UsageError
from dropkv.hub.address import SCHEME, HubAddress, check_file, is_address, parse_address
from dropkv.hub.card import licence_of, write_card
from dropkv.hub.client import LIBRARY, LOGIN, Hub, asking, offline, repeated
from formats import Header, copy_without_tokens, read_header, verify_file
from formats.errors import show_path

CARD = "README.md"
SUFFIXES = (".kv", ".kv.safetensors")  # what `_refuse_folder` of fetch.py lists
NAME = re.compile(r"[\w .()+=,@/-]+")  # more would need quoting in shells and in Markdown


@dataclass(frozen=True)
class Upload:
    """A checked file and where it is to go. exists: the repository is there, `private` or not, at `commit`, with `card` (its
    README.md) and perhaps a file of this name (`replaces`).
    """

    path: Path
    header: Header
    address: HubAddress
    exists: bool
    private: bool
    commit: str | None
    card: str | None
    replaces: bool

    @property
    def licence(self) -> str | None:
        """The licence that the repository's card names already."""
        return licence_of(self.card)


@dataclass(frozen=True)
class Pushed:
    """What an upload made: the address of the file, the commit with its page, and whether anything changed."""

    address: HubAddress
    commit: str
    commit_url: str
    private: bool
    created: bool
    changed: bool
    file_bytes: int
    tokens_stored: bool


def target_of(repository: str, file: str | os.PathLike[str], name: str | None) -> HubAddress:
    """Where a file goes: NAMESPACE/NAME or an hf:// address, under `name` or its own. Raises UsageError."""
    text = repository if is_address(repository) else SCHEME + repository
    address = parse_address(text)
    wanted = name or address.file or os.path.basename(os.fspath(file))
    try:
        check_file(wanted)
    except UsageError as error:
        raise UsageError(f"{show_path(wanted)}: {error}; choose another name with --name") from None
    if not wanted.endswith(SUFFIXES) or not NAME.fullmatch(wanted):
        raise UsageError(
            f"{show_path(wanted)}: on the Hub a name ends in .kv and has letters, digits, blanks and - _ . ( ) + = , @ / alone; "
            f"choose one with --name"
        )
    return replace(address, file=wanted)


def prepare(
    file: str | os.PathLike[str], address: HubAddress, *, public: bool = False, hub: Hub | None = None
) -> Upload:
    """Check every byte of the file, then look at the repository; nothing is changed.

    public: the repository may be one that everybody reads. Raises formats.FormatError, HubError.
    """
    hub, folder = hub or Hub(), replace(address, file="")
    header = verify_file(file).header
    if offline():
        raise HubError(f"{address}: the network is switched off (HF_HUB_OFFLINE); unset it and run this again")
    _check_login(address)
    upload = Upload(Path(file), header, address, False, not public, None, None, False)
    with asking(folder, hub, writing=True):
        info = _info(address, hub)
        if info is None:
            return upload
        names = {item.rfilename for item in info.siblings or []}
        card = _card(address, info.sha, hub) if CARD in names else None
    if not info.private and not public:
        raise HubError(
            f"{folder}: is public, everybody could read the document; choose another repository, or say --public"
        )
    return replace(
        upload, exists=True, private=bool(info.private), commit=info.sha, card=card, replaces=address.file in names
    )


def push(upload: Upload, licence: str | None, *, tokens: bool = True, hub: Hub | None = None) -> Pushed:
    """Upload a prepared file and the card in one commit; the repository is made when it is not there, private unless prepared as public.

    licence: None keeps the one of the card that is there. tokens: False uploads a copy without the document's token ids.
    Raises HubError, or formats.FormatError when that copy cannot be written.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub, address = hub or Hub(), upload.address
    folder = replace(address, file="")
    with _uploaded(upload, tokens) as (path, header):
        try:
            text = write_card(upload.card, address, header, licence)
        except HubError as error:
            raise HubError(f"{folder}: {error}") from error
        api = HfApi(endpoint=hub.url, library_name=LIBRARY, library_version=__version__)
        with asking(folder, hub, writing=True):
            if not upload.exists:
                repeated(
                    lambda: api.create_repo(address.repository, private=upload.private, repo_type="model"), hub.retries
                )
            commit = api.create_commit(
                address.repository,
                [CommitOperationAdd(address.file, str(path)), CommitOperationAdd(CARD, text.encode())],
                commit_message=f"Upload {address.file} with dropkv {__version__}",
                revision=address.revision,
                parent_commit=upload.commit,
            )
    return Pushed(
        address=address,
        commit=str(commit.oid),
        commit_url=str(commit.commit_url),
        private=upload.private,
        created=not upload.exists,
        changed=commit.oid != upload.commit,
        file_bytes=header.file_bytes,
        tokens_stored="tokens" in header.tensors,
    )


@contextmanager
def _uploaded(upload: Upload, tokens: bool) -> Iterator[tuple[Path, Header]]:
    """The file to upload and its header: the given one, or a copy of it without token ids that is gone afterwards."""
    if tokens or "tokens" not in upload.header.tensors:
        yield upload.path, upload.header
        return
    with tempfile.TemporaryDirectory(prefix="dropkv-push-") as folder:
        copy = Path(folder) / "without-tokens.kv"
        copy_without_tokens(upload.path, copy)
        yield copy, read_header(copy)


def _check_login(address: HubAddress) -> None:
    from huggingface_hub import get_token

    if not get_token():
        raise HubError(f"{address.folder}: you are not logged in to the Hub; {LOGIN}")


def _info(address: HubAddress, hub: Hub) -> Any:
    """What the Hub knows of the repository, None when there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api = HfApi(endpoint=hub.url, library_name=LIBRARY, library_version=__version__)
    try:
        return repeated(lambda: api.model_info(address.repository, revision=address.revision), hub.retries)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401:  # the token is no good
            raise
        return None


def _card(address: HubAddress, commit: str, hub: Hub) -> str:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(
        address.repository,
        CARD,
        revision=commit,
        cache_dir=hub.cache,
        endpoint=hub.url,
        library_name=LIBRARY,
        library_version=__version__,
    )
    return Path(path).read_text("utf-8")
