"""Observers: where the observation queries come from when no question is known (METHODS section 4).

An observer either reads queries the document has anyway (the tail), or appends probes to the sequence: text whose tokens look back at a part
of the document while they are computed, and leave nothing behind but scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.observers._base import Observation, Probe
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prompts import Seam
from dropkv.settings import CompressSettings

__all__ = ["Observation", "Probe", "observe"]


def observe(settings: CompressSettings, seam: Seam, document: Sequence[int], head_tokens: int) -> Observation:
    """What `settings.observe` means for a document of these ids (template head included)."""
    if settings.observe == "tail":
        return plan_tail(settings.window, len(document))
    return plan_replays(seam, document, head_tokens, settings.chunk)
