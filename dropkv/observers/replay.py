"""replay: the model is made to repeat the document, and what it looks at while repeating is what it would need to answer.

For each chunk of the document one instruction, then the chunk itself again; the repeated tokens see the sinks, their own chunk and
themselves, and observe their chunk (the sinks, template head and first tokens, are always kept).
All replays are computed beside the document in one forward pass. The idea is KVzip's (arXiv 2505.23416), which scores attention against a
full cache in memory and in a second pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.observers._base import Observation, Probe
from dropkv.prompts import Seam

INSTRUCTION = "Repeat the previous context exactly."
SINKS = 4


def plan_replays(seam: Seam, document: Sequence[int], head_tokens: int, chunk: int) -> Observation:
    """Replays of chunks of `chunk` tokens of `document` (ids, template head included, whose tokens serve as sinks)."""
    n = len(document)
    sinks = min(n, max(SINKS, head_tokens))
    asking = tuple(seam.question_ids(INSTRUCTION))
    probes = tuple(
        Probe(asking + tuple(document[start : start + chunk]), (start, min(n, start + chunk)), ((0, sinks),))
        for start in range(sinks, n, chunk)
    )
    return Observation(0, probes, {"name": "replay", "chunk": chunk, "instruction": INSTRUCTION, "sinks": sinks})
