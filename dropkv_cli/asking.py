"""Putting questions to an opened file: one after another, or at a prompt with a few commands of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from dropkv.errors import DropkvError, QuestionError, UsageError
from dropkv_cli.output import complain, failure_keys, harmless, json_line, one_line, result, say
from formats.errors import ExistingFile, FormatError, show_path

if TYPE_CHECKING:
    from dropkv.generate import Answer
    from dropkv.library import KVFile
    from dropkv.settings import Sampling

PROMPT = "> "
COMMAND = re.compile(r"(/[^\s/]*)(?:\s+(.*))?$", re.DOTALL)  # /etc/passwd is a question
QUOTES = "\"'"
HELP = """\
/save FILE   write the conversation: NAME.jsonl can be gone on with (--resume), any other name gets Markdown
/reset       forget the turns so far; the document stays
/help        this list
/quit        end, as an empty line or Ctrl-D do
A question that starts with / is asked with another / before it. Ctrl-C stops an answer or clears the line; on an empty line it leaves
when pressed twice."""


def command_of(line: str) -> tuple[str, str] | None:
    """The command that a line is, in lower case, and what stands behind it; None for a question."""
    found = COMMAND.match(line.rstrip())
    return None if found is None else (found[1].lower(), found[2] or "")


def question_of(line: str) -> str:
    """The question that a line asks: a second / before it, which keeps it from being a command, is no part of it."""
    line = line.strip()
    return line[1:] if line.startswith("//") else line


def file_name(text: str) -> str:
    """A file's name as it is typed behind a command, with the quotes or backslashes of a shell or without. Raises UsageError."""
    if text[:1] and text[0] in QUOTES:
        if len(text) < 2 or text[-1] != text[0]:
            raise UsageError(f"the quote {text[0]} before the name is not closed: leave it out, spaces need none")
        text = text[1:-1]
    else:
        text = text.replace("\\ ", " ")
    return os.path.expanduser(text)


def counted(turns: int) -> str:
    """A number of turns in words."""
    return "1 turn" if turns == 1 else f"{turns:,} turns"


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
        self.saved = 0  # turns that are in a file
        self.ended = False  # by /quit
        self.editor: Any = None  # what gives input() editing and a history
        self.on_terminal = sys.stdout.isatty() and not as_json

    def resume(self, path: str) -> None:
        """Go on with a saved conversation. Raises QuestionError, IdentityError."""
        from dropkv.transcripts import read_turns

        assert self.chat is not None
        self.chat.resume(read_turns(path, self.kv.session, self.kv.metadata))
        self.own_file = path
        self.saved = len(self.chat.turns)
        if not self.as_json:
            say(f"{show_path(path)}: {self._turns()} so far")

    def ask_all(self, questions: list[str], *, alone: bool) -> int:
        """Answer every question; one that cannot be asked does not stop the others, unless it stands alone. Gives the exit code.

        Several are answered at once, and printed in their order as they are ready; those of a conversation one after another, and in one the
        commands of the prompt are obeyed.
        """
        failures, answers = 0, 0
        batched = self.chat is None and len(questions) > 1
        outcomes = self.kv.ask_many(questions, self.sampling, batch_size=self.batch_size) if batched else iter(())
        for question in questions:
            command = command_of(question) if self.chat else None
            try:
                if command is not None:
                    self.ended = not self.obey(*command)
                    if self.ended:
                        break
                    continue
                if not self.as_json and len(questions) > 1:
                    if answers:
                        result("")
                    say(f"Q: {one_line(question)}")
                answers += 1
                if batched:
                    self._show(next(outcomes))
                else:
                    self.answer(question_of(question) if self.chat else question)
            except (DropkvError, FormatError) as error:
                failures += 1
                if alone or (batched and not isinstance(error, QuestionError)):  # after others no more answers come
                    raise
                complain(str(error))
                if self.as_json:
                    json_line({"question": question} | failure_keys(str(error)))
        return 1 if failures else 0

    def prompt(self) -> int:
        """Read questions from the terminal until an empty line or the end of input.

        Ctrl-C stops an answer, or clears the line; pressed twice on an empty line it raises KeyboardInterrupt.
        """
        with contextlib.suppress(ImportError):
            self.editor = importlib.import_module("readline")
        say("Ask about the document; an empty line or Ctrl-D ends, /help shows what else there is.")
        pressed = False
        while True:
            try:
                line = self._read_line()
            except EOFError:
                say("")
                return self._leave()
            except KeyboardInterrupt:
                typed = self._typed()
                if pressed and not typed:
                    raise
                (result if self.on_terminal else say)("")
                if typed:
                    continue
                pressed = True
                say(f"(Ctrl-C again or /quit leaves{self._unsaved('; {} not saved, /save FILE keeps {}')})")
                continue
            pressed = False
            if not line.strip():
                return self._leave()
            try:
                command = command_of(line)
                if command is None:
                    self.answer(question_of(line))
                elif not self.obey(*command):
                    return self._leave()
            except (DropkvError, FormatError) as error:
                complain(str(error))
            except KeyboardInterrupt:
                (result if self.on_terminal else say)("")

    def obey(self, name: str, rest: str = "") -> bool:
        """Do what a command of the prompt says; False ends the prompt. Raises UsageError, and what saving raises."""
        name, rest = name.lower(), rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name in ("/help", "/?"):
            say(HELP)
        elif name not in ("/save", "/reset"):
            raise UsageError(
                f"no command {one_line(name, 40)}: there are /save FILE, /reset, /help and /quit; to ask it, type another / before it"
            )
        elif self.chat is None:
            raise UsageError(f"{name} needs a conversation: start with --chat")
        elif name == "/reset":
            forgotten = self._turns()
            self.chat.reset()
            self.saved = 0
            say(f"{forgotten} forgotten")
        else:
            self._save(rest)
        return True

    def answer(self, question: str) -> None:
        """Print one answer piece by piece, as JSON whole. Ctrl-C leaves a conversation, and a file, as far as the answer has come."""
        stream = self.source.stream(question, self.sampling)
        begun = False
        try:
            if not self.as_json:
                for piece in stream:
                    result(harmless(piece) if self.on_terminal else piece, newline=False)
                    begun = True
                result("")
            answer = stream.result()
        except KeyboardInterrupt:
            if begun and not self.on_terminal:
                result("")  # what a file has got of it ends as a line
            raise
        finally:
            stream.close()
        self._show(answer, shown=not self.as_json)

    def _show(self, answer: Answer | DropkvError, *, shown: bool = False) -> None:
        """Print an answer, or raise the error that stands in its place; shown: its text has been printed."""
        if isinstance(answer, Exception):
            raise answer
        if self.as_json:
            json_line(self._record(answer))
            return
        if not shown:
            result(answer.text)
        self._note_cut(answer)

    def _save(self, typed: str) -> None:
        from dropkv.transcripts import save_turns

        assert self.chat is not None
        path = file_name(typed)
        if not path:
            raise UsageError("/save needs a name: /save talk.jsonl to go on later, /save talk.md to read")
        if not self.chat.turns:
            raise UsageError("nothing was said yet: ask something before /save")
        try:
            save_turns(
                path,
                self.chat.turns,
                self.kv.session,
                self.kv.metadata,
                overwrite=bool(self.own_file) and os.path.realpath(path) == os.path.realpath(self.own_file),
            )
        except ExistingFile as error:
            error.fix = "choose another name"
            raise
        self.own_file = path
        self.saved = len(self.chat.turns)
        say(f"{self._turns()} -> {show_path(path)}")

    def _turns(self) -> str:
        return counted(len(self.chat.turns) if self.chat else 0)

    def _unsaved(self, words: str) -> str:
        """`words` with the turns that no file has and a pronoun for them, or nothing where there are none."""
        count = len(self.chat.turns) - self.saved if self.chat else 0
        return (
            words.format(f"{counted(count)} {'is' if count == 1 else 'are'}", "it" if count == 1 else "them")
            if count > 0
            else ""
        )

    def _leave(self) -> int:
        """The end of the prompt; gives the exit code."""
        note = self._unsaved("({} not saved; next time, /save FILE keeps {})")
        if note:
            say(note)
        return 0

    def _typed(self) -> str:
        """What stood on the line when Ctrl-C cleared it."""
        return self.editor.get_line_buffer().strip() if self.editor else ""

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
        if self.on_terminal:
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
