"""Putting questions to an opened file: one after another, or at a prompt with a few commands of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from typing import TYPE_CHECKING

from dropkv.errors import DropkvError, ModelError, QuestionError, UsageError
from dropkv_cli.output import complain, harmless, json_line, one_line, result, say
from formats.errors import ExistingFile, FormatError, show_path

if TYPE_CHECKING:
    from dropkv.generate import Answer
    from dropkv.library import KVFile
    from dropkv.settings import Sampling

PROMPT = "> "
COMMAND = re.compile(r"/[a-z?]*(\s|$)")
HELP = """\
/save FILE   write the conversation: NAME.jsonl can be gone on with (--resume), any other name gets Markdown
/reset       forget the turns so far; the document stays
/help        this list
/quit        end, as an empty line or Ctrl-D do
A question that starts with / is asked with a space before it. Ctrl-C stops an answer."""


class Asker:
    """An opened file and how its answers are wanted."""

    def __init__(
        self, kv: KVFile, sampling: Sampling, *, chat: bool, as_json: bool, batch_size: int | None = None
    ) -> None:
        self.kv = kv
        self.sampling = sampling
        self.as_json = as_json
        self.batch_size = batch_size
        self.chat = kv.chat() if chat else None
        self.source = self.chat or kv
        self.own_file = ""  # a transcript that this conversation wrote or came from, which /save may replace
        self.streaming = sys.stdout.isatty() and not as_json

    def resume(self, path: str) -> None:
        """Go on with a saved conversation. Raises QuestionError, IdentityError."""
        from dropkv.transcripts import read_turns

        assert self.chat is not None
        self.chat.resume(read_turns(path, self.kv.session, self.kv.metadata))
        self.own_file = path
        if not self.as_json:
            say(f"{show_path(path)}: {self._turns()} so far")

    def ask_all(self, questions: list[str], *, alone: bool) -> int:
        """Answer every question; one that cannot be asked does not stop the others, unless it stands alone. Gives the exit code.

        Several are answered at once, and printed in their order as they are ready; those of a conversation one after another.
        """
        failures = 0
        batched = self.chat is None and len(questions) > 1
        answers = self.kv.ask_many(questions, self.sampling, batch_size=self.batch_size) if batched else iter(())
        for number, question in enumerate(questions):
            if not self.as_json and len(questions) > 1:
                if number:
                    result("")
                say(f"Q: {one_line(question)}")
            try:
                if batched:
                    self._show(next(answers))
                else:
                    self.answer(question)
            except (QuestionError, ModelError) as error:
                failures += 1
                if alone:
                    raise
                complain(str(error))
                if self.as_json:
                    json_line({"question": question, "error": str(error)})
        return 1 if failures else 0

    def prompt(self) -> int:
        """Read questions from the terminal until an empty line or the end of input. Ctrl-C stops an answer, not the prompt."""
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() editing and a history
        say("Ask about the document; an empty line or Ctrl-D ends, /help shows what else there is.")
        while True:
            try:
                line = self._read_line()
            except EOFError:
                say("")
                return 0
            if not line.strip():
                return 0
            try:
                if not COMMAND.match(line):
                    self.answer(line.strip())
                elif not self.obey(*line.split(maxsplit=1)):
                    return 0
            except (DropkvError, FormatError) as error:
                complain(str(error))
            except KeyboardInterrupt:
                (result if self.streaming else say)("")

    def obey(self, name: str, rest: str = "") -> bool:
        """Do what a command of the prompt says; False ends the prompt. Raises UsageError, and what saving raises."""
        rest = rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name in ("/help", "/?"):
            say(HELP)
        elif name not in ("/save", "/reset"):
            raise UsageError(f"no command {name}: /help lists them; to ask it, type a space first")
        elif self.chat is None:
            raise UsageError(f"{name} needs a conversation: start with --chat")
        elif name == "/reset":
            forgotten = self._turns()
            self.chat.reset()
            say(f"{forgotten} forgotten")
        else:
            self._save(rest)
        return True

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
        self._show(answer, shown=self.streaming)

    def _show(self, answer: Answer | QuestionError, *, shown: bool = False) -> None:
        """Print an answer, or raise the error that stands in its place; shown: its text has been printed."""
        if isinstance(answer, QuestionError):
            raise answer
        if self.as_json:
            json_line(self._record(answer))
            return
        if not shown:
            result(answer.text)
        self._note_cut(answer)

    def _save(self, path: str) -> None:
        from dropkv.transcripts import save_turns

        assert self.chat is not None
        if not path:
            raise UsageError("/save needs a name: /save talk.jsonl to go on later, /save talk.md to read")
        if not self.chat.turns:
            raise UsageError("nothing was said yet: ask something before /save")
        try:
            save_turns(
                os.path.expanduser(path),
                self.chat.turns,
                self.kv.session,
                self.kv.metadata,
                overwrite=path == self.own_file,
            )
        except ExistingFile as error:
            error.fix = "choose another name"
            raise
        self.own_file = path
        say(f"{self._turns()} -> {show_path(path)}")

    def _turns(self) -> str:
        count = len(self.chat.turns) if self.chat else 0
        return "1 turn" if count == 1 else f"{count:,} turns"

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
