"""Several files with one model, opened to be asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dropkv.decode.batch import MOST, ROUND, fitting_rows
from dropkv.errors import DropkvError, IdentityError
from dropkv.hub.client import Hub
from dropkv.hub.fetch import for_questions
from dropkv.library import KVFile, OpenedFile, load_for, open_file
from dropkv.models import Model
from formats.errors import FormatError, show_path

ROW = (
    4096  # tokens of a question and its answer that a row has room for, where the model has so many behind the document
)


@dataclass(frozen=True)
class Shelf:
    """Opened files by their names, and the model that answers for all of them. opened: when, in seconds since 1970."""

    model: Model
    files: Mapping[str, KVFile]
    opened: int

    @property
    def capacity(self) -> int:
        """Tokens that a row of a batch should have room for."""
        longest = max(kv.session.room(0, ROW) for kv in self.files.values())
        return -(-longest // ROUND) * ROUND

    def rows(self, batch_size: int | None) -> int:
        """How many requests are answered at once: as many as said, else what fits into memory."""
        return batch_size or min(MOST, fitting_rows(self.model, self.capacity))


def open_shelf(
    files: Mapping[str, str],
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    budget: float | int | None = None,
    allow_mismatch: bool = False,
    failed: Callable[[str, Exception], None],
    note: Callable[[str], None] = lambda text: None,
) -> Shelf:
    """Open files, given by name, for one model, which is loaded once: the one that the first of them names, or `model`.

    failed: called with the name of each of several files that cannot be served, and why; the others are. Raises DropkvError when none can, and
    for a single file what is wrong with it; IdentityError when one belongs to another model than the first; ModelError.
    """
    opened: dict[str, OpenedFile] = {}
    hub = Hub(note=note)
    for name, file in files.items():
        try:
            opened[name] = open_file(for_questions(file, budget, hub), budget=budget)
        except (FormatError, DropkvError) as error:
            if len(files) == 1:
                raise
            failed(name, error)
    if not opened:
        raise DropkvError(f"none of these {len(files)} files can be served: see above")
    first, leader = next(iter(opened.items()))
    loaded = load_for(leader.header, model, revision=revision, dtype=dtype, device=device, note=note)
    ready: dict[str, KVFile] = {}
    for name, one in opened.items():
        try:
            ready[name] = one.with_model(loaded, allow_mismatch=allow_mismatch)
        except IdentityError as error:
            if model is not None or name == first:
                raise
            what = str(error).partition("; ")[0]
            raise IdentityError(
                f"{what}, which {show_path(files[first])} names; a server has one model: serve this file by another, with its own --port"
            ) from None
    return Shelf(loaded, ready, int(time.time()))
