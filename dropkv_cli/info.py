"""`dropkv info`: what a KV file says about itself, from its header alone."""

from __future__ import annotations

from itertools import groupby, zip_longest
from typing import Any

import click

from dropkv.hub.client import Hub
from dropkv.hub.fetch import parts
from dropkv_cli.fidelity import fidelity_lines
from dropkv_cli.options import json_option, refuse_pipe
from dropkv_cli.output import compared, json_line, pairs, result, say, size
from formats import Header, LayerInfo, Metadata, read_header
from formats.entries import ENTRY_FIELDS
from formats.errors import printable
from formats.grids import SCALE_FIELDS
from formats.layout import ITEM_BYTES

LONGEST = 100  # characters of one value; --json has all of it


@click.command("info")
@click.argument("file", metavar="FILE")
@json_option
def command(file: str, as_json: bool) -> None:
    """Show what a .kv file holds. Reads the header only, also of a file on the Hub: no model, no waiting.

    --json prints the JSON of the header, all but the sampled weights that tell models apart (`samples`) and the hashes.
    """
    refuse_pipe(file)
    header = read_header(parts(file, Hub(note=say)))
    if as_json:
        json_line(
            {
                "file": file,
                "file_bytes": header.file_bytes,
                "format_version": header.format_version,
                "oldest_reader": header.oldest_reader,
                **_about(header.metadata),
                "zstd": header.zstd,
                "stored": _stored_bytes(header),
            }
        )
    else:
        result(pairs(_rows(header)))


def _about(metadata: Metadata) -> dict[str, Any]:
    """The metadata as the header holds it, but for the thousands of sampled weights, which only a comparison with a model can use."""
    about = metadata.to_json()
    weights = about["model"]["weights"]
    about["model"]["weights"] = {name: value for name, value in weights.items() if name != "samples"}
    return about


def _rows(header: Header) -> list[tuple[str, str]]:
    metadata = header.metadata
    model, document, tokenizer = metadata.model, metadata.document, metadata.tokenizer
    blocks = sum(len(info.blocks) for info in header.tensors.values())
    rows = [
        (
            "model",
            f"{printable(model.id)} ({model.source}{_after(', revision ', model.revision)}), {model.architecture}",
        ),
        (
            "document",
            f"{printable(document.name)}, {document.tokens:,} tokens with the {document.head_tokens} of the template's head"
            + (f", cut from {document.whole_tokens:,}" if document.whole_tokens > document.tokens else ""),
        ),
        ("", f"sha256 {document.sha256}"),
        ("method", _parameters(metadata.method, "name")),
        ("observer", _parameters(metadata.observer, "name")),
        ("budget", _budget(metadata)),
        ("kept", _kept(metadata)),
        *zip_longest(("fidelity",), fidelity_lines(metadata.fidelity, metadata.observer), fillvalue=""),
        ("size", _size(header)),
        ("stored", _stored(header)),
        *_layers(metadata.layers),
        ("rope", _rope(metadata.rope)),
        ("tokens", "stored" if "tokens" in header.tensors else "not stored"),
        ("tokenizer", f"{tokenizer.fingerprint}, template {tokenizer.template_hash}"),
        ("weights", _parameters(metadata.model.weights, "kind")),
        ("written by", f"{metadata.writer}, format version {header.format_version}"),
        ("integrity", f"header intact; {blocks} block hashes not compared (`dropkv verify` does that)"),
    ]
    if tokenizer.system is not None:
        rows.insert(3, ("system", tokenizer.system))
    return [(name, printable(value, limit=400)) for name, value in rows]


def _after(before: str, value: str | None) -> str:
    return "" if value is None else before + value


def _parameters(values: dict[str, Any], first: str) -> str:
    """A free dictionary on one line: its name, then everything else as name=value."""
    head = [str(values[first])] if first in values else []
    rest = [f"{name}={_plain(value)}" for name, value in values.items() if name != first]
    rest = [item for item in rest if len(item) <= LONGEST]  # such as the sampled values of a fingerprint
    return ", ".join(head + rest) or "none"


def _rope(values: dict[str, Any]) -> str:
    """The rotary parameters, and the lengths of text they are right for where that is not every length."""
    text = _parameters({name: value for name, value in values.items() if name != "regime"}, "rope_type")
    regime = values.get("regime")
    limits = [regime.get("over"), regime.get("up_to")] if isinstance(regime, dict) else []
    whole = [limit for limit in limits if isinstance(limit, int)]
    return f"{text}, for texts of {whole[0] + 1:,} to {whole[1]:,} tokens" if len(whole) == 2 else text


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        if len(value) > 2:  # values alone say what they are of a kind and its size, and of no more
            return "(" + ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) + ")"
        return " ".join(_plain(item) for item in value.values())
    if isinstance(value, list):
        return f"{len(value)} values" if len(value) > 4 else " ".join(_plain(item) for item in value)
    return printable(str(value))


def _budget(metadata: Metadata) -> str:
    budget = metadata.budget
    if all(layer.kind == "sliding" for layer in metadata.layers):
        return f"{budget.asked!r} asked, not used: all layers slide and keep their last window"
    asked = f"{budget.asked!r} of the tokens" if isinstance(budget.asked, float) else f"{budget.asked:,} entries"
    alpha = "" if budget.alpha is None else f", alpha {budget.alpha:g}"
    forced = f"{budget.forced_first} first and {budget.forced_last} last always"
    return f"{asked} asked, {budget.kept:,} entries per KV head kept, {budget.rule}{alpha}, {forced}"


def _kept(metadata: Metadata) -> str:
    kept = sum(layer.entries for layer in metadata.layers)
    full = sum(layer.kv_heads * metadata.document.tokens for layer in metadata.layers)
    return f"{kept:,} of {full:,} entries ({100 * kept / full:.1f} %)"


def _size(header: Header) -> str:
    metadata = header.metadata
    item = ITEM_BYTES[metadata.dtype]
    full = sum(layer.kv_heads * metadata.document.tokens * (layer.d_k + layer.d_v) * item for layer in metadata.layers)
    ratio = compared(header.file_bytes, full)
    kind = metadata.dtype if metadata.quantization is None else metadata.quantization.kind
    return f"{size(header.file_bytes)} as {kind}, the full cache is {size(full)} as {metadata.dtype}: {ratio}"


def _stored(header: Header) -> str:
    """How keys and values stand in the file, and what of it is compressed."""
    quantization = header.metadata.quantization
    if quantization is None:
        types = f"{header.metadata.dtype}, as it was computed"
    else:
        types = (
            f"{quantization.kind} from {header.metadata.dtype}, keys on a grid for {quantization.key_group} entries of a "
            f"channel, values on one for {quantization.value_group} channels of an entry"
        )
    if header.zstd is None:
        return f"{types}; not compressed"
    parts = _stored_bytes(header)
    packed = sum(info.codec != "raw" for info in header.tensors.values())
    saved = ", ".join(f"{name} {size(part['stored'])} of {size(part['raw'])}" for name, part in parts.items())
    return f"{types}; zstd level {header.zstd} in {packed} of {len(header.tensors)} tensors: {saved}"


def _stored_bytes(header: Header) -> dict[str, dict[str, int]]:
    """Bytes of keys, values, grids and everything else: as tensors, and as they stand in the file."""
    parts = {name: {"raw": 0, "stored": 0} for name in ("keys", "values", "grids", "index")}
    for info in header.tensors.values():
        part = "grids" if info.field in SCALE_FIELDS else info.field if info.field in ENTRY_FIELDS else "index"
        parts[part]["raw"] += info.size
        parts[part]["stored"] += info.stop - info.start
    return {name: part for name, part in parts.items() if part["raw"] or name != "grids"}


def _layers(layers: tuple[LayerInfo, ...]) -> list[tuple[str, str]]:
    """One row per run of layers of one shape, with the range of their entries."""
    rows: list[tuple[str, str]] = []
    for shape, run in groupby(enumerate(layers), key=lambda item: _shape(item[1])):
        members = list(run)
        first, last = members[0][0], members[-1][0]
        counts = [layer.entries for _, layer in members]
        entries = f"{counts[0]:,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        rows.append(("layers" if not rows else "", f"{first}-{last}: {shape}, {entries} entries in each layer"))
    return rows


def _shape(layer: LayerInfo) -> str:
    window = "" if layer.window is None else f" of {layer.window:,}"
    dims = str(layer.d_k) if layer.d_k == layer.d_v else f"{layer.d_k}/{layer.d_v}"
    return f"{layer.kind} attention{window}, {layer.query_heads} query and {layer.kv_heads} KV heads of {dims}"
