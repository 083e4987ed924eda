"""Models of the Hub: what is in the local cache, and downloading what is not. Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from dropkv.errors import ModelError
from dropkv.hub.client import calm, unreachable

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WANTED_FILES = ["*.safetensors", *SMALL_FILES]
UNWANTED_FILES = ["*/*", "consolidated*"]  # subfolders hold copies in other formats, consolidated* Mistral's own
ANSWER_SECONDS = 15.0


def cached_snapshot(repository: str, revision: str = "main") -> Path | None:
    """The folder of a Hub model whose config, tokenizer and weights are all in the local cache; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return folder if tokenizer and weight_files(folder) else None


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, sorted; empty when there are none or the index names one that is missing."""
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = {folder / shard for shard in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return ()
        if not named <= files:
            return ()
    return tuple(sorted(file for file in files if not file.name.startswith("consolidated")))


def fetch_model(
    repository: str,
    revision: str | None,
    check: Callable[[Path], None] | None,
    *,
    hint: str = "",
    weights: bool = True,
) -> Path:
    """The folder of a Hub model, downloaded unless it is cached; it is named by the commit.

    What is cached needs no network: a full commit hash, and the default branch as it was when it was downloaded. Any
    other revision is looked up. check: called with the folder once the config is there, before the weights are fetched.
    hint: for a misspelt id. weights: False fetches configuration and tokenizer only. Raises ModelError.
    """
    fixed = revision is None or re.fullmatch("[0-9a-f]{40}", revision)
    folder = cached_snapshot(repository, revision or "main") if fixed else None
    if folder is not None:
        if check is not None:
            check(folder)
        return folder
    with calm():
        try:
            folder = _download(repository, revision, check, WANTED_FILES if weights else SMALL_FILES)
        except ModelError:
            raise
        except Exception as error:  # the Hub's client lets its HTTP library's own errors through
            folder = cached_snapshot(repository, revision or "main") if unreachable(error) else None
            if folder is None:
                raise ModelError(_explain(error, repository, revision, hint)) from error
    if weights and not weight_files(folder):
        raise ModelError(
            f"{repository}: no complete set of *.safetensors (pickled .bin files are not read); "
            f"look at https://huggingface.co/{repository}/tree/main"
        )
    return folder


def _download(repository: str, revision: str | None, check: Callable[[Path], None] | None, wanted: list[str]) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    # Asked first because this call alone fails at once without a network; downloads try for half a minute.
    HfApi().model_info(repository, revision=revision, timeout=ANSWER_SECONDS)
    config = hf_hub_download(repository, "config.json", revision=revision)
    if check is not None:
        check(Path(config).parent)
    return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED_FILES))


def _explain(error: Exception, repository: str, revision: str | None, hint: str) -> str:
    """One line for whatever the Hub's client raised."""
    from huggingface_hub import errors as hub

    page = f"https://huggingface.co/{repository}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub.GatedRepoError):
        line = (
            f"{repository}: its licence must be accepted first; do so at {page}, then run `hf auth "
            f"login` or set HF_TOKEN"
        )
    elif isinstance(error, hub.RevisionNotFoundError):
        line = f"{repository}: has no revision {revision}; choose one from {page}/commits/main"
    elif isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):
        line = (
            f"{repository}: no such model on the Hub and no such folder here{hint}; "
            f"check the spelling, or run `hf auth login` if it is private"
        )
    elif unreachable(error):
        line = (
            f"{repository}: not downloaded yet, and the Hub cannot be reached; connect to the network "
            f"once, or use --model smollm2-135m, which needs none"
        )
    elif isinstance(error, hub.EntryNotFoundError):
        line = (
            f"{repository}: has no config.json, so it is no transformers model; download a GGUF into "
            f"a folder and give that, or look at {page}"
        )
    elif status in (401, 403):
        line = (
            f"{repository}: the Hub refuses access ({status}); accept its licence at {page}, then run "
            f"`hf auth login` or set HF_TOKEN"
        )
    elif status is not None:
        line = f"{repository}: the Hub answers {status}; try again in a while"
    else:
        lines = str(getattr(error, "strerror", None) or error).splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        line = (
            f"{repository}: cannot be downloaded ({reason}); check the network and the disk, or set "
            f"HF_HOME to a folder with room"
        )
    return line
