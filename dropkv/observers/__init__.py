"""Observers: where the observation queries come from when no question is known (METHODS section 4).

An observer either reads queries the document has anyway (the tail), or appends probes to the sequence: text (replays, questions) whose tokens
look back at the document or a part of it while they are computed, and leave nothing behind but scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dropkv.observers._base import Observation, Probe
from dropkv.observers.question import plan_question
from dropkv.observers.questions import plan_questions
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prompts import Seam
from dropkv.question_files import read_questions
from dropkv.settings import CompressSettings

__all__ = ["Observation", "Probe", "observe"]


def observe(settings: CompressSettings, seam: Seam, document: Sequence[int], head_tokens: int) -> Observation:
    """What `settings.observe` means for a document of these ids (template head included). Raises QuestionError."""
    kind, _, rest = settings.observe.partition(":")
    if kind == "tail":
        return plan_tail(settings.window, len(document))
    if kind == "question":
        return plan_question(seam.question_ids(rest), len(document), settings.window, rest)
    if kind == "questions":
        questions = read_questions(rest)
        return plan_questions(
            questions, [seam.question_ids(text) for text in questions], len(document), Path(rest).name
        )
    return plan_replays(seam, document, head_tokens, settings.chunk)
