"""tail: the document's last tokens observe all of it, the setting of the published code with a prompt that ends in the document.

Cheap, and blind to most questions: with this observer a file answers little (METHODS section 4). For comparisons and for documents that end
in what will be asked.
"""

from __future__ import annotations

from dropkv.observers._base import Observation


def plan_tail(window: int, document_tokens: int) -> Observation:
    """The last `window` queries of the document (all of a shorter one)."""
    return Observation(min(window, document_tokens), (), {"name": "tail", "window": window})
