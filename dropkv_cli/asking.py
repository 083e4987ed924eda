"""Putting questions to an opened file: one after another, or at a prompt."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

from dropkv.errors import QuestionError
from dropkv_cli.output import complain, harmless, json_line, one_line, result, say

if TYPE_CHECKING:
    from dropkv.generate import Answer
    from dropkv.library import KVFile
    from dropkv.settings import Sampling

PROMPT = "> "


class Asker:
    """An opened file and how its answers are wanted."""

    def __init__(self, kv: KVFile, sampling: Sampling, *, chat: bool, as_json: bool) -> None:
        self.kv = kv
        self.sampling = sampling
        self.as_json = as_json
        self.source = kv.chat() if chat else kv
        self.streaming = sys.stdout.isatty() and not as_json

    def ask_all(self, questions: list[str]) -> int:
        """Answer every question; one that cannot be asked does not stop the others. Gives the exit code."""
        failures = 0
        for number, question in enumerate(questions):
            if not self.as_json and len(questions) > 1:
                if number:
                    result("")
                say(f"Q: {one_line(question)}")
            try:
                self.answer(question)
            except QuestionError as error:
                failures += 1
                if len(questions) == 1:
                    raise
                complain(str(error))
                if self.as_json:
                    json_line({"question": question, "error": str(error)})
        return 1 if failures else 0

    def prompt(self) -> int:
        """Read questions from the terminal until an empty line or the end of input. Ctrl-C stops an answer, not the prompt."""
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() editing and a history
        say("Ask about the document; an empty line or Ctrl-D ends.")
        while True:
            try:
                question = self._read_line().strip()
            except EOFError:
                say("")
                return 0
            if not question:
                return 0
            try:
                self.answer(question)
            except QuestionError as error:
                complain(str(error))
            except KeyboardInterrupt:
                (result if self.streaming else say)("")

    def answer(self, question: str) -> None:
        """Print one answer: piece by piece on a terminal, whole otherwise. Ctrl-C leaves a conversation as far as it has come."""
        stream = self.source.stream(question, self.sampling)
        try:
            if self.streaming:
                for piece in stream:
                    result(harmless(piece), newline=False)
                result("")
            answer = stream.result()
        finally:
            stream.close()
        if self.as_json:
            json_line(self._record(answer))
            return
        if not self.streaming:
            result(answer.text)
        self._note_cut(answer)

    def _note_cut(self, answer: Answer) -> None:
        """An answer that the model did not end itself looks like one that it did."""
        count = answer.generated_tokens
        if answer.stopped:
            return
        if count < self.sampling.max_new_tokens:
            say(f"(cut off after {count:,} tokens; the model has no positions left behind the document)")
        else:
            say(f"(cut off after {count:,} tokens; --max-new-tokens raises the limit)")

    def _read_line(self) -> str:
        if self.streaming:
            return input(PROMPT)
        # input() would put its prompt among the results.
        print(PROMPT, end="", file=sys.stderr, flush=True)
        return input()

    def _record(self, answer: Answer) -> dict[str, object]:
        return {
            "question": answer.question,
            "answer": answer.text,
            "document_tokens": answer.document_tokens,
            "prefix_entries": answer.prefix_entries,
            "prefilled_tokens": answer.prefilled_tokens,
            "generated_tokens": answer.generated_tokens,
            "stopped": answer.stopped,
            "seconds": {
                "load": self.kv.seconds_load,
                "first_token": answer.seconds_first_token,
                "total": answer.seconds_total,
            },
        }
