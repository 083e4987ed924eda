"""LongBench's files: a folder of NAME.jsonl, or the archive of them on the Hub."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropkv.errors import UsageError
from formats.errors import show_path

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
PROMPTS = "dataset2prompt.json"
ANSWER_SECONDS = 15.0


@dataclass(frozen=True)
class Row:
    """One line of a file."""

    input: str
    context: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def find(name: str, data: str | None) -> Path:
    """NAME.jsonl in the folder `data`, or the Hub's archive, downloaded unless it is there; raises UsageError."""
    if data is None:
        return _archive(name)
    folder = Path(data).expanduser()
    for file in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if file.is_file():
            return file
    raise UsageError(
        f"{name}: {show_path(folder)} holds no {name}.jsonl; unpack {ARCHIVE} of "
        f"https://huggingface.co/datasets/{REPOSITORY} there"
    )


def read(name: str, path: Path) -> list[Row]:
    """The rows of a task; raises UsageError naming the line that is not as it should be."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                member = next((member for member in archive.namelist() if Path(member).name == f"{name}.jsonl"), None)
                if member is None:
                    raise UsageError(f"{show_path(path)}: holds no {name}.jsonl; download it again")
                rows = _rows(archive.read(member).decode("utf-8").split("\n"), path)
        else:
            rows = _rows(path.read_text("utf-8").split("\n"), path)
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{show_path(path)}: cannot be read ({error}); download it again") from None
    if not rows:
        raise UsageError(f"{show_path(path)}: holds no questions; download it again")
    return rows


def own_prompt(name: str, data: str | None) -> tuple[str, str] | None:
    """LongBench's own prompt before and behind the context, where its dataset2prompt.json lies in the data's folder."""
    if data is None:
        return None
    file = Path(data).expanduser() / PROMPTS
    if not file.is_file():
        return None
    try:
        before, found, behind = str(json.loads(file.read_text("utf-8"))[name]).partition("{context}")
    except (OSError, ValueError, KeyError, TypeError):
        found = ""
    if not found:
        raise UsageError(
            f"{show_path(file)}: has no prompt with {{context}} for {name}; remove it, or download it again"
        )
    return before, behind


def _rows(lines: Iterable[str], path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"{show_path(path)}: line {number} is no line of LongBench ({what}); download it again"
            ) from None
    return rows


def _row(line: Any) -> Row:
    row = Row(line["input"], line["context"], tuple(line["answers"]), tuple(line["all_classes"] or ()))
    texts = (row.input, row.context, *row.answers, *row.classes)
    if isinstance(line["answers"], str) or not row.answers or not all(isinstance(text, str) for text in texts):
        raise TypeError("input, context, answers or all_classes of another type")
    return row


def _archive(name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(REPOSITORY, ARCHIVE, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    try:
        # Asked first because this call alone fails at once without a network.
        HfApi().dataset_info(REPOSITORY, timeout=ANSWER_SECONDS)
        return Path(hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset"))
    except Exception as error:  # the Hub's client lets its HTTP library's own errors through
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UsageError(
            f"{name}: needs LongBench's files, and the Hub cannot give them ({reason}); unpack {ARCHIVE} of "
            f"https://huggingface.co/datasets/{REPOSITORY} and give its folder with --data"
        ) from None
