"""The task `written`: the documents of the folder prose, each with the questions that were written for it, asked after one compression.

prose/NAME.md is a document, a paragraph a line. A line of prose/NAME.tsv is a question, how its answer begins (small models say the question again
otherwise), and the answers that are accepted, divided by |. Every seed gives the same documents in the same order, so seeds add nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dropkv.bench.tasks import Question, Task, get
from dropkv.bench.tasks._base import Frame, Made
from dropkv.errors import UsageError

NAME = "written"
FOLDER = Path(__file__).with_name("prose")
MOST = 24  # tokens of an answer


def named(name: str) -> Task:
    """A task of this bench or of the library's. Raises UsageError for an unknown name."""
    return Written(NAME, "written", MOST, exact=False) if name == NAME else get(name)


def folded(text: str) -> str:
    """Words with a space around each, without case or punctuation; an apostrophe divides no word."""
    words = re.sub(r"[^\w\s]|_", " ", re.sub("['\u2019]", "", text.casefold())).split()
    return f" {' '.join(words)} "


def questions(path: Path, max_new_tokens: int = MOST) -> tuple[Question, ...]:
    """The questions of a file. Raises UsageError for a line that is not a question, a beginning and answers."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text, begun, answers = (*line.split("\t"), "", "")[:3]
        accepted = tuple(answers.split("|"))
        if line.count("\t") != 2 or not all(folded(part).strip() for part in (text, begun, *accepted)):
            fix = "write a question, how its answer begins, and answers divided by |, with tabs between the three"
            raise UsageError(f"{path.name}, line {number}: {fix}")
        found.append(Question(f"\n\n{text}", begun, accepted, max_new_tokens))
    return tuple(found)


@dataclass(frozen=True)
class Written(Task):
    """folder: of the documents; a length is the most that a document may have."""

    folder: Path = FOLDER

    def score(self, prediction: str, question: Question) -> float:
        """1 when the answer holds an accepted one as whole words, else 0."""
        text = folded(prediction)
        return float(any(folded(answer) in text for answer in question.answers))

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        for path in sorted(self.folder.glob("*.md")):
            ids = frame.encode(path.read_text(encoding="utf-8").strip())
            if len(ids) > frame.room:  # cut, it would lose answers
                raise frame.short(len(ids))
            yield Made(ids, questions(path.with_suffix(".tsv"), self.max_new_tokens))
