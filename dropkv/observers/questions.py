"""questions:FILE: sample questions, or sentences that say what will be asked ("questions about who did what to whom"), observe the document.

Each line is put behind the document as a question would be; all its tokens observe, and what matters to any of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dropkv.digests import digest_json
from dropkv.errors import QuestionError
from dropkv.observers._base import Observation, Probe


def read_questions(path: str | Path) -> tuple[str, ...]:
    """The lines of a UTF-8 text file that are not empty. Raises QuestionError when it cannot be read or has none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise QuestionError(
            f"{path}: cannot be read ({error.strerror}); name a text file with --observe questions:FILE"
        ) from None
    except UnicodeDecodeError:
        raise QuestionError(f"{path} is no UTF-8 text; write one question a line") from None
    questions = tuple(line.strip() for line in lines if line.strip())
    if not questions:
        raise QuestionError(f"{path} has no questions in it; write one a line")
    return questions


def plan_questions(
    questions: Sequence[str], ids: Sequence[Sequence[int]], document_tokens: int, name: str
) -> Observation:
    """Every question is a probe that sees all of the document; ids: the tokens of each behind the document, name: where they are from."""
    probes = tuple(Probe(tuple(own), (0, document_tokens), ()) for own in ids)
    about: dict[str, str | int] = {"name": "questions", "count": len(questions), "file": name}
    return Observation(0, probes, about | {"digest": digest_json(list(questions))})
