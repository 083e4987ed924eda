"""The model card of a repository of KV files: what the Hub wants to know about it, and a section for each file.

A section stands between two comments, so that pushing a file again replaces its own section and touches nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from dropkv.errors import HubError
from dropkv.hub.address import HubAddress
from formats import Header
from formats.errors import printable
from formats.layout import ITEM_BYTES

LIBRARY = "dropkv"
TAGS = ("kv-cache", "dropkv", "long-context")
BUNDLED_MODELS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
CONTENT = (
    "A KV file holds its document's content: keys and values let much of it be recovered, with or without token ids"
)
LONGEST = 200  # characters of one value


def base_model(header: Header) -> str | None:
    """The Hub id of the model that a file was made with; None for a model of a local folder."""
    model = header.metadata.model
    if model.source == "bundled":
        return BUNDLED_MODELS.get(model.id)
    return model.id if model.source == "hub" and re.fullmatch(r"[\w.-]+/[\w.-]+", model.id, re.ASCII) else None


def licence_of(card: str | None) -> str | None:
    """The licence that an existing card names."""
    found = None if card is None else _parse(card).data.to_dict().get("license")
    return found if isinstance(found, str) else None


def write_card(card: str | None, address: HubAddress, header: Header, licence: str | None) -> str:
    """The text of README.md: a new one, or an existing one with this file's section, and what its front matter lacked.

    licence: None leaves the one that is there. Raises HubError when the existing card's front matter cannot be read.
    """
    parsed = _parse(card or "---\n{}\n---\n")
    known: dict[str, Any] = parsed.data.to_dict()
    body = f"# {address.repository.partition('/')[2]}\n" if card is None else parsed.text.strip("\n") + "\n"
    base = base_model(header)
    bases = [*_texts(known.get("base_model")), *([base] if base else [])]
    tags = [*_texts(known.get("tags")), *TAGS, str(header.metadata.method.get("name", ""))]
    facts = {
        **({} if licence is None else {"license": licence}),
        "library_name": known.get("library_name") or LIBRARY,
        "pipeline_tag": known.get("pipeline_tag") or "text-generation",
        "tags": [tag for tag in dict.fromkeys(tags) if tag],
    }
    if bases:
        unique = list(dict.fromkeys(bases))
        facts["base_model"] = unique[0] if len(unique) == 1 else unique
        # The model's own weights are used as they are: no relation would be read as a fine-tuning.
        facts["base_model_relation"] = known.get("base_model_relation") or "adapter"
    return f"---\n{_yaml({**known, **facts})}---\n\n{_placed(body, address.file, section(address, header))}"


def section(address: HubAddress, header: Header) -> str:
    """What the card says about one file."""
    metadata = header.metadata
    shown = str(HubAddress(address.repository, None, address.file))
    model = base_model(header) or metadata.model.id
    lines = [
        f"## {_cell(address.file)}",
        "",
        f"The KV cache of {_cell(metadata.document.name)}, compressed with dropkv. It answers questions about the document "
        f"without the document, with the model {_cell(model)}.",
        "",
        "```sh",
        "pip install dropkv",
        f'dropkv query {shlex.quote(shown)} "What is this document about?"',
        "```",
        "",
        "```python",
        "import dropkv",
        "",
        f'print(dropkv.load({json.dumps(shown, ensure_ascii=False)}).ask("What is this document about?").text)',
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in _rows(header)),
        "",
        f"{CONTENT}.",
    ]
    return "\n".join(lines)


def _rows(header: Header) -> Iterator[tuple[str, str]]:
    metadata = header.metadata
    document, budget, model = metadata.document, metadata.budget, metadata.model
    item = ITEM_BYTES[metadata.dtype]
    kept = sum(layer.entries for layer in metadata.layers)
    full = sum(layer.kv_heads * document.tokens for layer in metadata.layers)
    full_bytes = sum(layer.kv_heads * document.tokens * (layer.d_k + layer.d_v) * item for layer in metadata.layers)
    yield "model", model.id + ("" if model.revision is None else f", revision {model.revision}")
    cut = f", cut from {document.whole_tokens:,}" if document.whole_tokens > document.tokens else ""
    yield "document", f"{document.tokens:,} tokens{cut}, sha256 {document.sha256}"
    yield "method", f"{metadata.method.get('name', 'unknown')}, observer {metadata.observer.get('name', 'unknown')}"
    asked = f"{budget.asked!r} of the tokens" if isinstance(budget.asked, float) else f"{budget.asked:,} entries"
    yield "budget", f"{asked}, {budget.kept:,} entries per KV head, {budget.rule}"
    yield "kept", f"{kept:,} of {full:,} entries ({100 * kept / full:.1f} %)"
    yield (
        "size",
        f"{header.file_bytes / 2**20:.1f} MiB, the full cache is {full_bytes / 2**20:.1f} MiB as {metadata.dtype}",
    )
    yield "stored", _stored(header)
    yield "token ids", "stored" if "tokens" in header.tensors else "left out"
    if metadata.fidelity is None:
        yield "fidelity", "not measured"
    yield from _leaves(metadata.fidelity or {}, "fidelity")
    yield "written by", f"{metadata.writer}, format version {header.format_version}"


def _stored(header: Header) -> str:
    """The type of keys and values in the file, and the level they were compressed with."""
    metadata = header.metadata
    types = metadata.dtype if metadata.quantization is None else f"{metadata.quantization.kind} from {metadata.dtype}"
    return types if header.zstd is None else f"{types}, zstd level {header.zstd}"


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """The numbers and words in a free dictionary, each with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}, {str(key).replace('_', ' ')}")
    elif isinstance(value, list):
        yield name, f"{len(value)} values" if len(value) > 8 else " ".join(_plain(item) for item in value)
    else:
        yield name, _plain(value)


def _plain(value: object) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _placed(body: str, file: str, text: str) -> str:
    """The body with this file's section in the place of its former one, or at the end."""
    begin, end = (f"<!-- dropkv {word} {quote(file, safe='/')} -->" for word in ("begin", "end"))
    block = f"{begin}\n{text}\n{end}"
    start = body.find(begin)
    stop = body.find(end, start)
    if start < 0 or stop < 0:
        return f"{body.rstrip()}\n\n{block}\n"
    return body[:start] + block + body[stop + len(end) :]


def _cell(text: str) -> str:
    """Foreign text that stays one piece of running Markdown, whatever is in it."""
    line = printable(" ".join(text.split()), LONGEST)
    return re.sub(r"([\\|`*_\[\]#~])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _texts(value: object) -> list[str]:
    """A key of the front matter that may be one text or a list of them."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str)]


def _parse(card: str) -> Any:
    """The existing card: `data`, its front matter, and `text` behind it."""
    from huggingface_hub import RepoCard

    try:
        return RepoCard(card)
    except Exception as error:  # whatever a YAML parser can raise
        raise HubError(
            "the front matter of its README.md cannot be read; mend it on the Hub, and run this again"
        ) from error


def _yaml(facts: dict[str, Any]) -> str:
    from huggingface_hub import CardData

    return str(CardData(**facts).to_yaml(line_break="\n")).rstrip("\n") + "\n"
