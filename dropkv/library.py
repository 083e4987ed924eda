"""The library in three lines: compress a text, load a file, ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from os import PathLike
from os.path import isfile
from typing import Any, Unpack, overload

from torch import Tensor

from dropkv.attention import plain_cache
from dropkv.cache import Prefix
from dropkv.checkpoints import name_in_file
from dropkv.compression import Compression, compress_document, summary
from dropkv.devices import wait_for
from dropkv.documents import Document, read_document
from dropkv.errors import DocumentError, IdentityError, ModelError, QuestionError, UsageError
from dropkv.generate import Answer, Chat, Session, Stream
from dropkv.hub.fetch import for_questions
from dropkv.identity import check
from dropkv.models import Model, load_model
from dropkv.prompts import Seam, question_list
from dropkv.settings import CompressOptions, CompressSettings, Sampling
from dropkv.shrinking import chooser, shrink_prefix
from formats import Contents, Header, Landing, Metadata, Place, read_file
from formats.errors import printable, show_path, show_place
from formats.landing import landed

LONGEST_NAME = 255  # letters of a text that might be a file name by mistake


def compress(
    text: str | Document | PathLike[str],
    *,
    model: str | Model = "smollm2-135m",
    name: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    **settings: Unpack[CompressOptions],
) -> Compression:
    """Compress a text, as `dropkv compress` does a file, with the same defaults.

    text: the document itself, a pathlib.Path of the file it is in, or what `read_document` gave. model: a name (alias, Hub id, folder),
    which is loaded with revision, dtype and device, or a model that `load_model` loaded, so that several texts share it. name: what the
    .kv file calls the document; None for the name of its file, or "text". settings: the fields of CompressSettings (budget, method,
    observe, ...).

    Raises DocumentError, ModelError, BudgetError or UsageError, all of them DropkvError, whose text is the line that the command prints.
    """
    chosen = CompressSettings(**settings)
    document = _document(text, name)
    loaded = model if isinstance(model, Model) else load_model(model, revision=revision, dtype=dtype, device=device)
    return compress_document(loaded, document, chosen)


def _document(text: str | Document | PathLike[str], name: str | None) -> Document:
    if isinstance(text, PathLike):
        text = read_document(text)
    elif isinstance(text, str) and len(text) <= LONGEST_NAME and text.strip() and isfile(text):
        raise DocumentError(
            f"{show_path(text)}: is the name of a file, not its text; give pathlib.Path({text!r}) to have it read"
        )
    if not isinstance(text, Document):
        return Document.of(text, "text" if name is None else name)
    return text if name is None else Document(name, text.text, text.sha256)


class KVFile:
    """An opened .kv file with its model: ask it.

    metadata: what the file says of itself (document, method, budget, fidelity, ...). seconds_load: of the file alone, not of the model.
    """

    def __init__(self, session: Session, metadata: Metadata, seconds_load: float) -> None:
        self.metadata = metadata
        self.seconds_load = seconds_load
        self.session = session

    def __repr__(self) -> str:
        return f"<KVFile of {summary(self.metadata)}>"

    @property
    def model(self) -> Model:
        """The model that answers."""
        return self.session.model

    @overload
    def ask(self, question: str, sampling: Sampling | None = None) -> Answer: ...
    @overload
    def ask(self, question: list[str] | tuple[str, ...], sampling: Sampling | None = None) -> list[Answer]: ...
    def ask(
        self, question: str | list[str] | tuple[str, ...], sampling: Sampling | None = None
    ) -> Answer | list[Answer]:
        """The answer to a question, or the answers to several in their order, each as if asked alone.

        sampling: greedy and at most 256 tokens when left out. Raises QuestionError for one that is empty, no text or does not fit, and
        for an empty list.
        """
        if isinstance(question, str):
            return self.session.ask(question, sampling)
        questions = question_list(question)
        for one in questions:
            self.session.question_ids(one)
        return [answer for answer in self.ask_many(questions, sampling) if isinstance(answer, Answer)]

    def ask_many(
        self, questions: Iterable[str], sampling: Sampling | None = None, *, batch_size: int | None = None
    ) -> Iterator[Answer | QuestionError]:
        """The answers to many questions as they are ready, in the order of the questions; several are answered at once over the one document,
        which is in memory once.

        batch_size: so many at once, None for what fits into memory (at most 64). A question that is empty, no text or does not fit gives its
        QuestionError in place of an answer. Raises UsageError for a batch size below 1.
        """
        return self.session.ask_many(list(questions), sampling, batch_size=batch_size)

    def stream(self, question: str, sampling: Sampling | None = None) -> Stream:
        """The answer as an iterator of pieces of text, as they are generated; its `.answer` is set at the end.

        Raises QuestionError, at once and not at the first piece.
        """
        return self.session.stream(question, sampling)

    def shrink(self, budget: float | int) -> KVFile:
        """The same file at a smaller budget, in memory, as `load` with that budget would give it; the model is shared.

        Raises BudgetError for a budget above the file's own or below the entries that are always kept, DropkvError for a method whose
        smaller budgets are no part of larger ones.
        """
        metadata, session = self.metadata, self.session
        chosen = chooser(budget, printable(metadata.document.name))(metadata)
        prefix, smaller = shrink_prefix(session.prefix, metadata, chosen)
        return KVFile(Session(session.model, session.seam, prefix), smaller, self.seconds_load)

    def chat(self) -> Chat:
        """A new conversation, in which each question sees the turns before it (`ask` and `stream` see none)."""
        return self.session.chat()

    @property
    def document_tokens(self) -> int:
        """n, tokens of the whole document with the template's head: the position of the first token behind it."""
        return self.session.prefix.n

    def question_ids(self, question: str) -> list[int]:
        """Token ids of a question as `ask` puts it behind the document, up to where the answer begins. Raises QuestionError."""
        return self.session.seam.question_ids(question)

    def as_transformers_cache(self) -> Any:
        """The kept entries as a transformers DynamicCache, for forward calls of code that knows nothing of dropkv.

        Keys and values of each layer are [1, kv_heads, entries, d], on the model's device in its dtype, already rotated. Positions have
        to be given: the document's tokens keep the places they had, so the first token behind it is at position `document_tokens`,
        not at the number of entries, which is all the cache knows. `generate()` takes the latter and would answer from wrong
        positions without a warning, so it must not be given this cache; a forward call with `position_ids` is right:

            ids = torch.tensor([kv.question_ids("Who is the killer?")])
            places = kv.document_tokens + torch.arange(ids.shape[1])[None]
            out = network(ids, past_key_values=kv.as_transformers_cache(), position_ids=places)  # newer releases: cache=

        `network` is the same model loaded by transformers; the one of this file (`kv.model.network`) attends in dropkv's own way and
        takes no cache. Transformers has one length for all heads and layers, so the file must have been made with a budget that is
        the same for all of them (method="dropkv", "snapkv", "keydiff", ...); UsageError names the counts otherwise, and ModelError says
        that layers with sliding windows cannot be handed out.
        """
        prefix = self.session.prefix
        if any(geometry.kind == "sliding" for geometry in prefix.geometry):
            raise ModelError(f"{self.model.id}: layers with sliding windows have no plain cache; ask the file itself")
        counts = {stop - start for bounds in prefix.bounds for start, stop in pairwise(bounds)}
        if len(counts) > 1:
            raise UsageError(
                f"its heads keep {min(counts):,} to {max(counts):,} entries, a plain cache has one length: "
                f"compress with a uniform budget (method='dropkv')"
            )
        keys = [_by_head(layer.keys, g.kv_heads) for layer, g in zip(prefix.layers, prefix.geometry, strict=True)]
        values = [_by_head(layer.values, g.kv_heads) for layer, g in zip(prefix.layers, prefix.geometry, strict=True)]
        return plain_cache(keys, values)


def _by_head(rows: Tensor, kv_heads: int) -> Tensor:
    """Rows [kv_heads * entries, d] of heads end to end as [1, kv_heads, entries, d]."""
    return rows.view(1, kv_heads, -1, rows.shape[-1])


def load(
    path: Place,
    *,
    model: str | Model | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    allow_mismatch: bool = False,
    budget: float | int | None = None,
) -> KVFile:
    """Open a .kv file for questions, as `dropkv query` does; path: a file, or an address of the Hub (hf://...).

    budget: a smaller one than the file's own, as `shrink` would store it; only its entries are read, and what covers them checked.
    model: a loaded model, a name, or None for the one the file names. Every byte of the file is checked before the model is
    loaded; with a loaded one they are checked on their way to its device. Raises FormatError for a file that fails its checks,
    IdentityError for another model's file (unless allow_mismatch), ModelError, HubError, and with a budget what `KVFile.shrink` raises.
    """
    if isinstance(model, Model):
        return _onto(for_questions(path, budget), model, budget, allow_mismatch=allow_mismatch)
    opened = open_file(path, budget=budget)
    loaded = load_for(opened.header, model, revision=revision, dtype=dtype, device=device)
    return opened.with_model(loaded, allow_mismatch=allow_mismatch)


def _onto(place: Place, model: Model, budget: float | int | None, *, allow_mismatch: bool) -> KVFile:
    """Read a file straight to where the model computes."""
    started = time.perf_counter()
    seams: list[Seam] = []

    def onto(metadata: Metadata) -> Landing:
        seams.append(_seam(metadata, model, place, allow_mismatch=allow_mismatch))
        return Landing(tuple(model.devices), model.dtype)

    contents = read_file(place, choose=None if budget is None else chooser(budget, show_place(place)), onto=onto)
    metadata = contents.header.metadata
    prefix = Prefix(contents.layers, model.geometry, metadata.document.tokens)
    return KVFile(Session(model, seams[0], prefix), metadata, time.perf_counter() - started)


def _seam(metadata: Metadata, model: Model, place: Place, *, allow_mismatch: bool) -> Seam:
    """The prompts of a file's questions to a model. Raises IdentityError for another model's file."""
    tokenizer = metadata.tokenizer
    seam = Seam.of(model.tokenizer, system=tokenizer.system, arguments=tokenizer.template_arguments, name=model.id)
    check(metadata, model, seam, allow_mismatch=allow_mismatch, path=place)
    shapes = [(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window) for g in model.geometry]
    wanted = [(i.kind, i.query_heads, i.kv_heads, i.d_k, i.d_v, i.window) for i in metadata.layers]
    if shapes != wanted:
        raise IdentityError(
            f"{show_place(place)}: its layers have other shapes than those of {model.id}: "
            f"use the model it was made with, {printable(metadata.model.id, 80)}"
        )
    return seam


class OpenedFile:
    """A file read and checked, not yet met by a model; seconds: what that took."""

    def __init__(self, path: Place, contents: Contents, seconds: float, budget: float | int | None = None) -> None:
        self.path = path
        self.header: Header = contents.header  # what the file says of itself, at that budget
        self.seconds = seconds
        self._budget = budget
        self._layers = list(contents.layers)

    def with_model(self, model: Model, *, allow_mismatch: bool = False) -> KVFile:
        """Ready for questions. Raises IdentityError for another model's file (unless allow_mismatch; other shapes never pass).

        The first call takes the entries with it, so that they are not in memory twice; later ones read the file again.
        """
        metadata = self.header.metadata
        seam = _seam(metadata, model, self.path, allow_mismatch=allow_mismatch)
        if not self._layers:
            return _onto(self.path, model, self._budget, allow_mismatch=allow_mismatch)
        started = time.perf_counter()
        layers, self._layers = self._layers, []
        entries = landed(layers, metadata, Landing(tuple(model.devices), model.dtype))
        wait_for(model.devices)
        prefix = Prefix(entries, model.geometry, metadata.document.tokens)
        return KVFile(Session(model, seam, prefix), metadata, self.seconds + time.perf_counter() - started)


def open_file(path: Place, *, budget: float | int | None = None) -> OpenedFile:
    """Read a .kv file whole and check every byte, or what a smaller budget keeps, of a file of the Hub too; no model is needed.

    Raises formats.FormatError, HubError for a file of the Hub; with a budget also what `shrinking.smaller_budget` raises.
    """
    started = time.perf_counter()
    choose = None if budget is None else chooser(budget, show_place(path))
    place = for_questions(path, budget)
    contents = read_file(place, choose=choose)
    return OpenedFile(place, contents, time.perf_counter() - started, budget)


def load_for(
    header: Header,
    model: str | None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
) -> Model:
    """Load the model a file names, or the one given; note as for `load_model`.

    Raises ModelError for a file made from a local folder when none is given.
    """
    identity = header.metadata.model
    return load_model(
        name_in_file(identity.id, identity.source, revision or identity.revision) if model is None else model,
        revision=revision or (identity.revision if model is None else None),
        dtype=dtype,
        device=device,
        note=note,
    )
