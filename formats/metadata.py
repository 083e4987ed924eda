"""What a KV file says about itself: frozen records, each with a strict from_json and a to_json of one spelling."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, cast

from formats.errors import CorruptFile
from formats.fields import Fields, check_free
from formats.fields import kind as shown
from formats.grids import KINDS

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 16384
MAX_TOKENS = (1 << 31) - 1  # positions and offsets are int32
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Record:
    """A record whose JSON keys are its field names, in their order."""

    @classmethod
    def keys(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    def to_json(self) -> dict[str, Any]:
        """JSON values only; raises CorruptFile naming the key when a free dictionary holds anything else."""
        return {name: _plain(getattr(self, name), name) for name in self.keys()}


@dataclass(frozen=True)
class ModelIdentity(Record):
    """The model that computed the entries; `weights` is the fingerprint of its weights, `config_hash` of its config."""

    id: str
    source: Literal["bundled", "hub", "folder"]
    revision: str | None
    architecture: str
    config: dict[str, Any]
    config_hash: str
    weights: dict[str, Any]

    @classmethod
    def from_json(cls, value: object, where: str = "model") -> ModelIdentity:
        get = Fields(value, where, cls.keys())
        source = cast(Literal["bundled", "hub", "folder"], get.choice("source", ("bundled", "hub", "folder")))
        return cls(
            get.text("id"),
            source,
            get.optional_text("revision"),
            get.text("architecture"),
            get.free("config"),
            get.text("config_hash"),
            get.free("weights"),
        )


@dataclass(frozen=True)
class TokenizerIdentity(Record):
    """The tokenizer and chat template between the document and its token ids."""

    fingerprint: str
    template_hash: str
    template_arguments: dict[str, Any]
    system: str | None

    @classmethod
    def from_json(cls, value: object, where: str = "tokenizer") -> TokenizerIdentity:
        get = Fields(value, where, cls.keys())
        return cls(
            get.text("fingerprint"),
            get.text("template_hash"),
            get.free("template_arguments"),
            get.optional_text("system"),
        )


@dataclass(frozen=True)
class DocumentInfo(Record):
    """The document: `sha256` of its raw bytes, `tokens` (n) that were read, with the `head_tokens` of the chat template before it.

    `whole_tokens` is what all of it would have been: more than `tokens` when it was cut to fit the model.
    """

    name: str
    sha256: str
    tokens: int
    head_tokens: int
    whole_tokens: int

    @classmethod
    def from_json(cls, value: object, where: str = "document") -> DocumentInfo:
        get = Fields(value, where, cls.keys())
        tokens = get.whole("tokens", 1, MAX_TOKENS)
        return cls(
            get.text("name"),
            get.digest("sha256", 64),
            tokens,
            get.whole("head_tokens", 0, tokens),
            get.whole("whole_tokens", tokens, MAX_TOKENS),
        )


@dataclass(frozen=True)
class BudgetInfo(Record):
    """What was asked (a fraction as float, entries per KV head as int) and what was kept per KV head."""

    asked: float | int
    kept: int
    rule: str
    alpha: float | None
    forced_first: int
    forced_last: int
    nested: bool

    @classmethod
    def from_json(cls, value: object, where: str = "budget") -> BudgetInfo:
        get = Fields(value, where, cls.keys())
        asked = get.number("asked", 0, MAX_TOKENS)
        if asked <= 0 or (type(asked) is float and asked > 1):
            raise CorruptFile(
                f"is {asked}, not a fraction above 0 and up to 1 or a whole number", where=get.place("asked")
            )
        return cls(
            asked,
            get.whole("kept", 1, MAX_TOKENS),
            get.text("rule"),
            get.optional_number("alpha", 0, 1),
            get.whole("forced_first", 0, MAX_TOKENS),
            get.whole("forced_last", 0, MAX_TOKENS),
            get.flag("nested"),
        )


@dataclass(frozen=True)
class LayerInfo(Record):
    """Shape of one layer's kept entries; `entries` is the total of all KV heads, `window` tokens of a sliding layer."""

    kind: Literal["full", "sliding"]
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    window: int | None
    entries: int

    @classmethod
    def from_json(cls, value: object, where: str = "layer") -> LayerInfo:
        get = Fields(value, where, cls.keys())
        layer_kind = cast(Literal["full", "sliding"], get.choice("kind", ("full", "sliding")))
        query_heads, kv_heads = get.whole("query_heads", 1, MAX_HEADS), get.whole("kv_heads", 1, MAX_HEADS)
        if query_heads % kv_heads:
            raise CorruptFile(f"is {query_heads}, no multiple of {kv_heads} KV heads", where=get.place("query_heads"))
        window = get.optional_whole("window", 1, MAX_TOKENS)
        if (window is None) != (layer_kind == "full"):
            raise CorruptFile(f"is {shown(window)} in a {layer_kind} layer", where=get.place("window"))
        return cls(
            layer_kind,
            query_heads,
            kv_heads,
            get.whole("d_k", 1, MAX_HEAD_DIM),
            get.whole("d_v", 1, MAX_HEAD_DIM),
            window,
            get.whole("entries", 0, MAX_TOKENS),
        )


@dataclass(frozen=True)
class Quantization(Record):
    """How keys and values are stored as codes on grids (formats/quantized.py has the formulas).

    A grid of keys spans `key_group` consecutive entries of one KV head in one channel, a grid of values `value_group`
    channels of one entry; the last of a head, or of an entry, may span fewer. key_groups: for each layer, the groups of
    entries of all its KV heads together.
    """

    kind: str
    key_group: int
    value_group: int
    key_groups: tuple[int, ...]

    @classmethod
    def from_json(cls, value: object, layers: tuple[LayerInfo, ...], where: str = "quantization") -> Quantization:
        get = Fields(value, where, cls.keys())
        kind = get.choice("kind", tuple(KINDS))
        group = get.whole("key_group", 1, MAX_TOKENS)
        value_group = get.whole("value_group", 1, MAX_HEAD_DIM)
        counts = get.values["key_groups"]
        if type(counts) is not list or len(counts) != len(layers):
            raise get.wrong("key_groups", f"a list of {len(layers)} whole numbers")
        for index, (count, layer) in enumerate(zip(counts, layers, strict=True)):
            low, high = -(-layer.entries // group), min(layer.entries, layer.entries // group + layer.kv_heads)
            if type(count) is not int or not low <= count <= high:
                raise CorruptFile(
                    f"is {shown(count)}, not a whole number from {low} to {high}",
                    where=get.place(f"key_groups[{index}]"),
                )
        return cls(kind, group, value_group, tuple(counts))


@dataclass(frozen=True)
class Metadata(Record):
    """Everything known about a KV file's content except where its bytes lie.

    dtype: that of keys and values, before they were quantised where they are.
    """

    writer: str
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    document: DocumentInfo
    method: dict[str, Any]
    observer: dict[str, Any]
    budget: BudgetInfo
    layers: tuple[LayerInfo, ...]
    dtype: str
    rope: dict[str, Any]
    fidelity: dict[str, Any] | None
    quantization: Quantization | None = None

    @classmethod
    def from_json(cls, value: object, where: str = "") -> Metadata:
        get = Fields(value, where, cls.keys())
        document = DocumentInfo.from_json(get.values["document"], get.place("document"))
        budget = BudgetInfo.from_json(get.values["budget"], get.place("budget"))
        if budget.kept > document.tokens:
            raise CorruptFile(
                f"is {budget.kept}, more than the document's {document.tokens} tokens", where=get.place("budget.kept")
            )
        rows = get.values["layers"]
        if type(rows) is not list or not 1 <= len(rows) <= MAX_LAYERS:
            raise CorruptFile(f"is not a list of 1 to {MAX_LAYERS} layers", where=get.place("layers"))
        layers = tuple(LayerInfo.from_json(row, get.place(f"layers[{index}]")) for index, row in enumerate(rows))
        for index, layer in enumerate(layers):
            if layer.entries > layer.kv_heads * document.tokens:
                raise CorruptFile(
                    f"is {layer.entries}, more than {layer.kv_heads} heads of {document.tokens} tokens have",
                    where=get.place(f"layers[{index}].entries"),
                )
        quantization = get.values["quantization"]
        return cls(
            get.text("writer"),
            ModelIdentity.from_json(get.values["model"], get.place("model")),
            TokenizerIdentity.from_json(get.values["tokenizer"], get.place("tokenizer")),
            document,
            get.free("method"),
            get.free("observer"),
            budget,
            layers,
            get.choice("dtype", DTYPES),
            get.free("rope"),
            get.optional_free("fidelity"),
            None if quantization is None else Quantization.from_json(quantization, layers, get.place("quantization")),
        )


def _plain(value: Any, where: str) -> Any:
    """A field as JSON: records become objects, tuples of records lists, free dictionaries get sorted keys."""
    if is_dataclass(value):
        return cast(Record, value).to_json()
    if isinstance(value, tuple):
        return [_plain(item, where) for item in value]
    if not isinstance(value, dict):
        return _text(value)
    value = _sorted(value)
    check_free(value, where)
    return value


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        items = [(_text(key), _sorted(item)) for key, item in value.items()]
        return dict(sorted(items, key=lambda pair: str(pair[0])))
    return [_sorted(item) for item in value] if isinstance(value, list) else _text(value)


def _text(value: Any) -> Any:
    """Bytes of a file name that are text in no encoding become "?": no reason to lose a compressed document."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
