"""RoPE regimes: up to which length of text a model's rotary frequencies stay the same. Nothing here imports torch.

default, linear, llama3 and yarn (arXiv 2309.00071) have one set of frequencies. longrope (arXiv 2402.13753) has two, for texts of at most
`original_max_position_embeddings` tokens and for longer ones; dynamic NTK has one up to `max_position_embeddings` and stretches it with
every further token. transformers picks by the largest position of a forward call and turns all its keys so. Kept keys cannot be turned
again, so a document, its replays, a question and its answer have to lie in one regime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FIXED = ("default", "linear", "yarn", "llama3")
BY_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True)
class Regime:
    """Texts of more than `over` and at most `up_to` tokens are rotated alike. by_length: whether others are not, at least in part."""

    over: int
    up_to: int
    by_length: bool

    def described(self, rope: dict[str, Any]) -> dict[str, Any]:
        """The `rope` object of a KV file: the model's own, and the regime where there are several."""
        return {**rope, "regime": self.as_json()} if self.by_length else dict(rope)

    def as_json(self) -> dict[str, int] | None:
        """JSON values; None for models with one regime."""
        return {"over": self.over, "up_to": self.up_to} if self.by_length else None


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary parameters of a transformers config as JSON values."""
    copy: dict[str, Any] = _json_safe(getattr(config, "rope_parameters", None) or {})
    return copy


def rope_types(rope: dict[str, Any]) -> list[str]:
    """The kind of frequencies, or one per kind of layer (Gemma-3)."""
    return sorted({str(part.get("rope_type", "default")) for part in _parts(rope)})


def regime_of(rope: dict[str, Any], max_positions: int, tokens: int) -> Regime:
    """The regime of a text of `tokens` tokens; the last one ends with the model's positions."""
    kinds = rope_types(rope)
    limits = {max_positions}
    for part in _parts(rope):
        if part.get("rope_type") == "longrope":
            limits.add(min(max_positions, int(part["original_max_position_embeddings"])))
    over = max([limit for limit in limits if limit < min(tokens, max_positions)], default=0)
    up_to = min(limit for limit in limits if limit > over)
    return Regime(over, up_to, any(kind in BY_LENGTH for kind in kinds))


def _parts(rope: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
