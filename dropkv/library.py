"""The library in three lines: compress a text, load a file, ask it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, overload

import torch

from dropkv.cache import Prefix
from dropkv.compression import Compression, compress_document
from dropkv.documents import Document
from dropkv.errors import IdentityError, ModelError
from dropkv.generate import Answer, Chat, Session, Stream
from dropkv.identity import check
from dropkv.models import Model, load_model
from dropkv.prompts import Seam
from dropkv.settings import CompressSettings, Sampling
from formats import Header, Metadata, read_file, read_header


def compress(
    text: str | Document,
    *,
    model: str | Model = "smollm2-135m",
    name: str = "text",
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    **settings: Any,
) -> Compression:
    """Compress a text; `settings` are the fields of CompressSettings (budget, method, observe, ...).

    Raises the errors of dropkv.errors.
    """
    chosen = CompressSettings(**settings)
    document = text if isinstance(text, Document) else Document.of(text, name)
    loaded = model if isinstance(model, Model) else load_model(model, revision=revision, dtype=dtype, device=device)
    return compress_document(loaded, document, chosen)


class KVFile:
    """An opened .kv file with its model: ask it. seconds_load covers the file alone, not the model."""

    def __init__(self, session: Session, metadata: Metadata, seconds_load: float) -> None:
        self.metadata = metadata
        self.seconds_load = seconds_load
        self.session = session

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
        """The answer to a question, or the answers to several, each as if asked alone. Raises QuestionError."""
        if isinstance(question, str):
            return self.session.ask(question, sampling)
        return [self.session.ask(one, sampling) for one in question]

    def stream(self, question: str, sampling: Sampling | None = None) -> Stream:
        """The answer piece by piece; its `.answer` is set at the end."""
        return self.session.stream(question, sampling)

    def chat(self) -> Chat:
        """A conversation that remembers its turns."""
        return self.session.chat()


def load(
    path: str | Path,
    *,
    model: str | Model | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    allow_mismatch: bool = False,
) -> KVFile:
    """Open a .kv file for questions.

    model: a loaded model, a name, or None for the one the file names. The header is checked before the model is loaded, the whole file
    before anything is built. Raises formats.FormatError for a file that fails its checks, IdentityError for another model's file
    (unless allow_mismatch), ModelError.
    """
    header = read_header(path)
    loaded = (
        model if isinstance(model, Model) else load_for(header, model, revision=revision, dtype=dtype, device=device)
    )
    return open_with(path, header, loaded, allow_mismatch=allow_mismatch)


def load_for(
    header: Header, model: str | None, *, revision: str | None = None, dtype: str = "auto", device: str = "auto"
) -> Model:
    """Load the model a file names, or the one given. Raises ModelError for a file made from a local folder when none is given."""
    identity = header.metadata.model
    if model is None and identity.source == "folder":
        raise ModelError(f"the file was made with the local model folder {identity.id!r}: name it with --model FOLDER")
    return load_model(
        model or identity.id,
        revision=revision or (identity.revision if model is None else None),
        dtype=dtype,
        device=device,
    )


def open_with(path: str | Path, header: Header, model: Model, *, allow_mismatch: bool = False) -> KVFile:
    """Open a file whose header was read with a model in memory: identity first, then every checksum, then the prefix."""
    metadata = header.metadata
    seam = Seam.of(
        model.tokenizer,
        system=metadata.tokenizer.system,
        arguments=metadata.tokenizer.template_arguments,
        name=model.id,
    )
    check(metadata, model, seam, allow_mismatch=allow_mismatch)
    shapes = [(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window) for g in model.geometry]
    stored = [(info.kind, info.query_heads, info.kv_heads, info.d_k, info.d_v, info.window) for info in metadata.layers]
    if shapes != stored:
        raise IdentityError(
            f"{path}: its layers have other shapes than those of {model.id}: use the model it was made with, {metadata.model.id}"
        )
    started = time.perf_counter()
    contents = read_file(path)
    prefix = Prefix(contents.layers, model.geometry, metadata.document.tokens).to(model.device, model.dtype)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return KVFile(Session(model, seam, prefix), metadata, time.perf_counter() - started)
