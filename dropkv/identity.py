"""Which model, tokenizer and chat template a KV file belongs to, and whether a loaded model is that one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from dropkv.digests import digest_json
from dropkv.errors import IdentityError
from dropkv.models import same_in_gguf
from dropkv.weights import weights_agree, weights_fingerprint
from formats import Place
from formats.errors import printable, show_place

if TYPE_CHECKING:
    from dropkv.models import Model
    from dropkv.prompts import Seam
    from formats import Metadata, ModelIdentity, TokenizerIdentity

STRUCTURE = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)  # without these the entries fit nowhere
# What tokenizers disagree about: case, digits, white space, contractions, composed letters, scripts, code, rare words.
PROBE_TEXT = (
    "The Quick brown\tfox's 1234567 caf\u00e9s cafe\u0301s\n\n  d\u00e9j\u00e0-vu:\u3000\u6f22\u5b57 "
    "\ufb01 DON'T we'll  ##### "
    "http://a.b/c?d=e&f=1 \U0001f98a\U0001f469\u200d\U0001f52c \u041f\u0440\u0438\u0432\u0435\u0442 \ud55c\uad6d\uc5b4 "
    "\u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940\r\n"
    "\tdef f(x_1, *args):\n        return {x_1: 3.14e-10}  # unquestionable\n\n\n"
    "Counterrevolutionary misunderstandings characteristically notwithstanding; electroencephalographically 2024-07-26."
)
PROBE_WORDS = 512  # of the vocabulary, by which merges show: those of plain letters, evenly spread
SCALES = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "clip_qkv",
    "final_logit_softcapping",
)  # fmt: skip
SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True)
class Mismatch:
    """One difference: what differs, its value in the file and in the model, short enough for a line."""

    what: str
    in_file: str
    in_model: str


def describe(model: Model, seam: Seam) -> tuple[ModelIdentity, TokenizerIdentity]:
    """The identity that a KV file of this model and prompt seam carries."""
    import formats

    config = config_fields(model)
    return (
        formats.ModelIdentity(
            id=model.id,
            source=model.source,
            revision=model.revision,
            architecture=type(model.network).__name__,
            config=config,
            config_hash=digest_json(config),
            weights=weights_fingerprint(model.network, model.weights),
        ),
        formats.TokenizerIdentity(
            fingerprint=tokenizer_fingerprint(model.tokenizer),
            template_hash=seam.fingerprint,
            template_arguments=dict(seam.arguments),
            system=seam.system,
        ),
    )


def mismatches(metadata: Metadata, model: Model, seam: Seam) -> list[Mismatch]:
    """Every difference between what a file says it was made with and what is loaded; empty when they are the same."""
    theirs, mine = metadata.model.config, config_fields(model)
    found = [
        Mismatch(printable(name, SHOWN), *_apart(theirs.get(name), mine.get(name)))
        # What an older writer did not record cannot be compared.
        for name in sorted(theirs.keys() | set(STRUCTURE), key=lambda name: (name not in STRUCTURE, name))
        if theirs.get(name) != mine.get(name)
    ]
    regimes = metadata.rope.get("regime"), model.regime(metadata.document.tokens).as_json()
    if regimes[0] != regimes[1]:
        found.append(Mismatch("RoPE regime", *map(_short, regimes)))
    weights = weights_fingerprint(model.network, model.weights)
    if not weights_agree(metadata.model.weights, weights):
        found.append(Mismatch("weights", _weights_name(metadata.model.weights), _weights_name(weights)))
    tokenizer = tokenizer_fingerprint(model.tokenizer)
    wanted = metadata.tokenizer.fingerprint
    if wanted != tokenizer and wanted != tokenizer_fingerprint(model.tokenizer, words=0):
        found.append(Mismatch("tokenizer", _digits(wanted), _digits(tokenizer)))
    if metadata.tokenizer.template_hash != seam.fingerprint:
        found.append(Mismatch("chat template", _digits(metadata.tokenizer.template_hash), _digits(seam.fingerprint)))
    return found


def check(
    metadata: Metadata,
    model: Model,
    seam: Seam,
    *,
    allow_mismatch: bool = False,
    path: Place | None = None,
) -> None:
    """Raise IdentityError when the file was made with something else; `allow_mismatch` lets all but another structure
    pass. path: the file's, for the message.
    """
    found = mismatches(metadata, model, seam)
    fatal = [mismatch for mismatch in found if mismatch.what in STRUCTURE]
    if not found or (allow_mismatch and not fatal):
        return
    first = (fatal or found)[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    made_with = printable(metadata.model.id, SHOWN)
    if metadata.model.revision is not None:
        made_with += f" at {printable(metadata.model.revision[:12])}"
    fix = f"give the model it was made with, {made_with}, by --model"
    if not fatal:
        fix += ", or accept wrong answers with --allow-mismatch"
    where = "" if path is None else f"{show_place(path)}: "
    raise IdentityError(
        f"{where}made with {_noun(first.what)}: {first.in_file} in the file, {first.in_model} in {model.id}{more}; {fix}"
    )


def config_fields(model: Model) -> dict[str, Any]:
    """What of a config decides keys and values, the same from a GGUF and from safetensors: JSON values, numbers to 6
    digits.
    """
    config, first = model.network.config, model.geometry[0]
    eps = next(
        (
            getattr(config, name)
            for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
            if hasattr(config, name)
        ),
        None,
    )
    kinds = {layer.kind for layer in model.geometry}
    fields = {
        "model_type": same_in_gguf(config.model_type),
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_hidden_layers": len(model.geometry),
        "num_attention_heads": first.query_heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.d_k,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "norm_eps": eps,
        "layers": "".join(layer.kind[0] for layer in model.geometry) if len(kinds) > 1 else first.kind,
        "sliding_window": next((layer.window for layer in model.geometry if layer.window), None),
        "rope": model.rope,
        "attn_softcap": getattr(config, "attn_logit_softcapping", None),
        "query_scale": getattr(config, "query_pre_attn_scalar", None),
        "activation": str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)),
        "scales": {name: getattr(config, name) for name in SCALES if getattr(config, name, None) is not None},
    }
    rounded: dict[str, Any] = _rounded(fields)
    return rounded


def tokenizer_fingerprint(tokenizer: Any, *, words: int = PROBE_WORDS) -> str:
    """32 hexadecimal digits over the vocabulary, the special tokens, and the ids of texts that merges and normalisation
    show in: PROBE_TEXT and so many words of the vocabulary (0: as the first writers did).
    """
    state = xxhash.xxh3_128()
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    state.update("\0".join(f"{index}\0{text}" for text, index in pairs).encode("utf-8", "surrogatepass"))
    special = sorted(
        token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special
    )
    ids = list(tokenizer(PROBE_TEXT, add_special_tokens=False, verbose=False).input_ids)
    plain = [text for text, _ in pairs if text.isascii() and text.isalpha() and len(text) > 2] if words else []
    if plain:
        probe = " ".join(plain[index * len(plain) // words] for index in range(words))
        ids += tokenizer(probe, add_special_tokens=False, verbose=False).input_ids
    state.update(json.dumps([special, ids]).encode())
    return state.hexdigest()


def _rounded(value: Any) -> Any:
    """Numbers to 6 significant digits, whole ones as int: formats store 1e-5 and 100000 differently."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() else short
    return value


def _apart(theirs: Any, mine: Any) -> tuple[str, str]:
    """Two values that differ, as text that shows it: of two objects only the keys that differ."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        keys = [key for key in sorted(theirs.keys() | mine.keys()) if theirs.get(key) != mine.get(key)]
        theirs, mine = ({key: value[key] for key in keys if key in value} for value in (theirs, mine))
    return _short(theirs), _short(mine)


def _short(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value), SHOWN)


def _digits(fingerprint: str) -> str:
    return printable(fingerprint[:12])


def _weights_name(weights: dict[str, Any]) -> str:
    """Enough of a fingerprint to tell two apart: their number, a digest of the samples, and the type they were in."""
    samples = digest_json(weights.get("samples"))[:12]
    return f"{samples} ({_short(weights.get('parameters'))} x {_short(weights.get('dtype'))})"


def _noun(what: str) -> str:
    if what == "weights":
        return "other weights"
    return f"another {what}" if what in ("tokenizer", "chat template", "RoPE regime") else f"another config ({what})"
