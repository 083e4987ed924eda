"""LongBench's 16 English and code tasks, from its own files and with its own scoring.

The prompts are ours (label "LongBench-shaped"), or LongBench's own (label "LongBench") where the data's folder also
holds its dataset2prompt.json. Either is cut behind the context: what comes before, and the context, is the document,
the rest the question. A document longer than the length asked loses its middle; no other is changed, so lengths are
limits here. LongBench ends a samsum answer at the first line end; here the rest is generated and not scored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dropkv.bench.tasks import _longbench_files as files
from dropkv.bench.tasks import _metrics as metrics
from dropkv.bench.tasks._base import Frame, Made, Question, Task

ANSWER_BRIEFLY = "Give the answer alone, in as few words as possible, and explain nothing."
FROM_PASSAGES = (
    f"Below are passages, and a question about them at the end. {ANSWER_BRIEFLY}\n\n",
    f"\n\nAnswer this question from the passages above. {ANSWER_BRIEFLY}\n\nQuestion: {{input}}\nAnswer:",
)
UNSURE = 'Write "unanswerable" when the article does not tell, and "yes" or "no" for a question that asks for it.'


@dataclass(frozen=True)
class Shape:
    """before and behind: the prompt around the context, {input} stands for the question. few_shot: only the first line
    of an answer counts.
    """

    before: str
    behind: str
    metric: Callable[[str, str], float] | None
    max_new_tokens: int
    chat: bool = True
    few_shot: bool = False


SHAPES = {
    "narrativeqa": Shape(
        f"Below is a story, a novel or a film script, and a question about it at the end. {ANSWER_BRIEFLY}\n\nStory: ",
        f"\n\nAnswer this question from the story above. {ANSWER_BRIEFLY}\n\nQuestion: {{input}}\n\nAnswer:",
        metrics.word_f1,
        128,
    ),
    "qasper": Shape(
        f"Below is a scientific article, and a question about it at the end. {ANSWER_BRIEFLY} {UNSURE}\n\nArticle: ",
        f"\n\nAnswer this question from the article above. {ANSWER_BRIEFLY} {UNSURE}\n\nQuestion: {{input}}\n\nAnswer:",
        metrics.word_f1,
        128,
    ),
    "multifieldqa_en": Shape(
        "Below is a text, and a question about it at the end. Answer it briefly.\n\n",
        f"\n\nAnswer this question from the text above. {ANSWER_BRIEFLY}\n\nQuestion: {{input}}\nAnswer:",
        metrics.word_f1,
        64,
    ),
    "hotpotqa": Shape(*FROM_PASSAGES, metrics.word_f1, 32),
    "2wikimqa": Shape(*FROM_PASSAGES, metrics.word_f1, 32),
    "musique": Shape(*FROM_PASSAGES, metrics.word_f1, 32),
    "gov_report": Shape(
        "Below is a report of a government agency. Summarize it on one page.\n\nReport:\n",
        "\n\nSummarize the report above on one page.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "qmsum": Shape(
        "Below is the transcript of a meeting, and a request about it at the end. Answer it in a sentence or a few."
        "\n\nTranscript:\n",
        "\n\nAnswer this request from the transcript above, in a sentence or a few.\n\nRequest: {input}\nAnswer:",
        metrics.rouge_l,
        512,
    ),
    "multi_news": Shape(
        "Below are several news articles. Summarize them all on one page.\n\nNews:\n",
        "\n\nSummarize all the news above on one page.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "trec": Shape(
        "Name the type of the last question. These are examples:\n\n",
        "\n{input}",
        None,
        64,
        chat=False,
        few_shot=True,
    ),
    "triviaqa": Shape(
        f"Answer the last question from its passage. {ANSWER_BRIEFLY} These are examples:\n\n",
        "\n\n{input}",
        metrics.word_f1,
        32,
        chat=False,
        few_shot=True,
    ),
    "samsum": Shape(
        "Summarize the last dialogue in a few short sentences. These are examples:\n\n",
        "\n\n{input}",
        metrics.rouge_l,
        128,
        chat=False,
        few_shot=True,
    ),
    "passage_count": Shape(
        "Below are paragraphs of Wikipedia, and some of them stand there more than once. How many different ones are "
        "there?\n\n",
        "\n\nHow many different paragraphs are there above, each counted once however often it stands there? Give the "
        "number alone, such as 1, 2 or 3.\n\nThe number is: ",
        metrics.number_share,
        32,
    ),
    "passage_retrieval_en": Shape(
        "Below are 30 paragraphs of Wikipedia, and a summary of one of them at the end. Which one is it?\n\n",
        '\n\nThis is the summary:\n\n{input}\n\nGive the number of its paragraph above, in the form "Paragraph 1", '
        '"Paragraph 2" and so on.\n\nThe answer is: ',
        metrics.paragraph_share,
        32,
    ),
    "lcc": Shape(
        "Continue this code with one more line.\n",
        "The next line of the code:\n",
        metrics.code_similarity,
        64,
        chat=False,
    ),
    "repobench-p": Shape(
        "Continue this code with one more line.\n",
        "{input}The next line of the code:\n",
        metrics.code_similarity,
        64,
        chat=False,
    ),
}
NAMES = tuple(SHAPES)


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    shape, own = SHAPES[name], files.own_prompt(name, data)
    metrics.check_package(shape.metric)
    return LongBench(
        name,
        "LongBench" if own else "LongBench-shaped",
        shape.max_new_tokens,
        chat=shape.chat,
        exact=False,
        shape=shape,
        prompt=own or (shape.before, shape.behind),
        path=files.find(name, data),
    )


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """prompt: what stands before and behind the context. path: its jsonl file, or the archive that holds it."""

    shape: Shape
    prompt: tuple[str, str]
    path: Path

    def score(self, prediction: str, question: Question) -> float:
        if self.shape.few_shot:
            prediction = metrics.first_line(prediction)
        if self.shape.metric is None:
            return max(metrics.class_share(prediction, answer, question.classes) for answer in question.answers)
        return max(self.shape.metric(prediction, answer) for answer in question.answers)

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        rows = files.read(self.name, self.path)
        random.Random(f"{self.name} {seed}").shuffle(rows)
        before, behind = self.prompt
        for row in rows:
            # Replaced, not formatted: code is full of braces.
            ids = middle_cut(frame.encode(before.replace("{input}", row.input) + row.context), frame.room)
            text = behind.replace("{input}", row.input)
            yield Made(ids, (Question(text, "", row.answers, self.max_new_tokens, row.classes),))


def middle_cut(ids: list[int], room: int) -> list[int]:
    """The first and the last half of `room` tokens of what is longer."""
    if len(ids) <= room:
        return ids
    half = room // 2
    return ids[: room - half] + ids[len(ids) - half :]
