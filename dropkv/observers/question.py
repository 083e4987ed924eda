"""question:TEXT: the one question that will be asked is known, and observes: the setting in which published numbers are measured.

Its last tokens (with the template's, up to where the answer begins) are the window, and they see the whole document. Not for files that
answer many questions: what another question needs is not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.observers._base import Observation, Probe


def plan_question(ids: Sequence[int], document_tokens: int, window: int, text: str = "") -> Observation:
    """The last `window` of the tokens `ids` that would follow the document observe all of it; text goes into the file."""
    probe = Probe(tuple(ids), (0, document_tokens), (), min(window, len(ids)))
    return Observation(0, (probe,), {"name": "question", "window": window, "text": text})
