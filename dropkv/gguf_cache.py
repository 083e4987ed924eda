"""Converted copies of small GGUF models, so that only the first start pays for the conversion.

A copy is the same float32 weights as safetensors, with config and tokenizer, in a folder named by the GGUF's content
and the transformers release that converted it. It is never needed: whatever goes wrong here, the GGUF itself is read, and a note says
that every start will do so.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dropkv.digests import digest_file
from formats.errors import printable, show_path

Note = Callable[[str], None]  # is told in one line what a user should know

LAYOUT = "converted-1"  # raise when what a copy holds changes
LIMIT_BYTES = 256 << 20  # larger GGUFs are read directly: their copies would fill disks
LIST = "complete.json"  # sizes and digests of the files of a copy; written last
STALE_SECONDS = 3600  # an unfinished copy older than this was left by a killed process


def ignore(text: str) -> None:
    """For `note`: nobody is told."""


def cache_root(note: Note = ignore) -> Path | None:
    """DROPKV_CACHE (empty: no cache), else XDG_CACHE_HOME/dropkv, else ~/.cache/dropkv; None for no cache or no home, of which the
    latter is told to `note`.
    """
    chosen = os.environ.get("DROPKV_CACHE")
    if chosen == "":
        return None
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dropkv"
    except RuntimeError:
        note(_lost(printable(chosen or "~"), "there is no such home"))
        return None


def copy_folder(gguf: Path, note: Note = ignore) -> Path | None:
    """Where the copy of this GGUF belongs, whether or not it is there; None when it should not be cached."""
    from transformers import __version__

    try:
        if gguf.stat().st_size > LIMIT_BYTES or (root := cache_root(note)) is None:
            return None
        return root / LAYOUT / f"{digest_file(gguf)}-{__version__}"
    except OSError:
        return None


def is_valid(folder: Path) -> bool:
    """Whether every byte of a copy is as it was written."""
    try:
        listed: dict[str, str] = json.loads((folder / LIST).read_text("utf-8"))
        return (
            all(digest_file(folder / name) == digest for name, digest in listed.items())
            and "model.safetensors" in listed
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def store(folder: Path, network: Any, tokenizer: Any, note: Note = ignore) -> None:
    """Write a copy, whole or not at all; `note` is told when there is no room or no permission."""
    parent = folder.parent
    unfinished: str | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clean(parent, folder)
        needed = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
        if shutil.disk_usage(parent).free < 2 * needed:
            note(_lost(show_path(folder.parent.parent), f"{(2 * needed >> 20) + 1:,} MiB have to be free"))
            return
        unfinished = tempfile.mkdtemp(prefix=f".unfinished-{os.getpid()}-", dir=parent)
        _write(Path(unfinished), network, tokenizer)
        os.rename(unfinished, folder)
    except OSError as error:
        if not is_valid(folder):  # another process may have been first
            note(_lost(show_path(folder.parent.parent), (error.strerror or str(error)).lower()))
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _lost(root: str, reason: str) -> str:
    return (
        f"note: the converted model cannot be kept in {root} ({reason}), so every start converts it anew; "
        f"name another folder with DROPKV_CACHE, or set it empty to be without"
    )


def _write(folder: Path, network: Any, tokenizer: Any) -> None:
    from safetensors.torch import save_file

    config = copy.deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the copy holds plain floats
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    if network.generation_config is not None:
        network.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {
        name: parameter.detach().contiguous() for name, parameter in network.named_parameters()
    }  # tied ones once
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    listed = {file.name: digest_file(file) for file in sorted(folder.iterdir())}
    (folder / LIST).write_text(json.dumps(listed), "utf-8")


def _clean(parent: Path, folder: Path) -> None:
    """Drop a damaged copy here, the same GGUF's copies by other transformers releases, and what killed processes left."""
    content = folder.name.partition("-")[0]
    for other in parent.iterdir():
        stale = other.name.startswith(".unfinished-") and time.time() - other.stat().st_mtime > STALE_SECONDS
        if stale or other.name.startswith(content):
            shutil.rmtree(other, ignore_errors=True)
