"""questions:FILE: sample questions, or sentences that say what will be asked ("questions about who did what to whom"), observe the document.

Each line is put behind the document as a question would be; all its tokens observe, and what matters to any of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.digests import digest_json
from dropkv.observers._base import Observation, Probe


def plan_questions(
    questions: Sequence[str], ids: Sequence[Sequence[int]], document_tokens: int, name: str
) -> Observation:
    """Every question is a probe that sees all of the document; ids: the tokens of each behind the document, name: where they are from."""
    probes = tuple(Probe(tuple(own), (0, document_tokens), ()) for own in ids)
    about: dict[str, str | int] = {"name": "questions", "count": len(questions), "file": name}
    return Observation(0, probes, about | {"digest": digest_json(list(questions))})
