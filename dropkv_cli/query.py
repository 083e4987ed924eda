"""`dropkv query`: answer questions from a KV file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dropkv.errors import QuestionError, UsageError
from dropkv.hub.address import is_address
from dropkv.hub.client import Hub
from dropkv.hub.fetch import for_questions
from dropkv.settings import Sampling, check_batch_size
from dropkv.transcripts import check_head, read_lines
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import (
    batch_size_option,
    device_options,
    flag,
    given,
    json_option,
    model_of_file_option,
    note_budget,
    refuse_empty,
    refuse_pipe,
    smaller_budget_option,
)
from dropkv_cli.options import seed as seed_number
from dropkv_cli.output import complain, failure_keys, harmless, json_line, one_line, say, size
from dropkv_cli.progress import waiting
from formats import Header, Place, read_header
from formats.errors import show_path

if TYPE_CHECKING:
    from dropkv.library import KVFile

DEFAULTS = Sampling()
STDIN = "-"


@click.command("query")
@click.argument("file", metavar="FILE")
@click.argument("questions", metavar="[QUESTION]...", nargs=-1)
@click.option(
    "-f",
    "--questions-file",
    metavar="FILE|-",
    show_default="none",
    help="Read questions from a file or standard input, one a line; blank lines and lines that start with # are skipped.",
)
@model_of_file_option("the one the file names", "Alias, Hub id or local folder of the model the file was made with.")
@smaller_budget_option(
    "the one the file was made with",
    "Answer with a smaller budget than the file's: 0.05 is a share of the tokens, 2048 entries per KV head.",
)
@device_options
@flag("--allow-mismatch", help="Answer even if weights, tokenizer or template differ from those of the file.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=DEFAULTS.max_new_tokens,
    show_default=True,
    metavar="N",
    help="Longest answer.",
)
@click.option(
    "--temperature",
    type=float,
    default=DEFAULTS.temperature,
    show_default=True,
    metavar="T",
    help="0 takes the likeliest token every time; higher is more varied.",
)
@click.option(
    "--top-p",
    type=float,
    default=DEFAULTS.top_p,
    show_default=True,
    metavar="P",
    help="Sample from the likeliest tokens that have this share together.",
)
@click.option(
    "--seed",
    type=seed_number,
    default=None,
    show_default="another one each time",
    metavar="N",
    help="Seed of the sampling.",
)
@batch_size_option(
    "Answer up to so many of several questions at once; their answers are the same, and come in the order of the questions."
)
@flag("--chat", help="Later questions see the earlier ones and their answers; on a terminal a prompt follows them.")
@click.option(
    "--resume",
    metavar="FILE",
    default=None,
    show_default="none",
    help="Go on with a conversation that /save NAME.jsonl wrote at the prompt; includes --chat.",
)
@json_option
def command(
    file: str,
    questions: tuple[str, ...],
    questions_file: str | None,
    model: str | None,
    budget: float | int | None,
    dtype: str,
    device: str,
    revision: str | None,
    allow_mismatch: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    batch_size: int | None,
    chat: bool,
    resume: str | None,
    as_json: bool,
) -> int:
    """Answer questions from a .kv file, without the document.

    Each question is answered as if it were the only one, unless --chat is given. Answers go to standard output, an
    empty line between two; several questions are answered at once, --batch-size says how many. A QUESTION of - reads
    questions from standard input, one a line. With no question on a terminal a prompt opens, which an empty line or
    Ctrl-D ends, and where Ctrl-C stops an answer. /help lists its commands: with --chat, /save FILE keeps the
    conversation. A --chat obeys them among other questions too; // asks what starts with /.

    With --json, seconds.load is the loading of the file (not of the model), seconds.first_token and seconds.total are
    counted from the question on, and stopped is true when the model ended the answer itself, false when the token limit
    or the end of its context did.
    """
    refuse_pipe(file)
    refuse_empty(questions_file, "-f", "name a file with one question a line, or - for standard input")
    refuse_empty(resume, "--resume", "name a file that /save NAME.jsonl wrote, or leave it out")
    _refuse_files(questions)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    check_batch_size(batch_size)
    if (chat or resume is not None) and given("batch_size"):
        raise UsageError("a conversation has one question at a time: leave out --batch-size, or --chat and --resume")
    unused = [f"--{name}" for name in ("top-p", "seed") if given(name.replace("-", "_"))]
    if unused and temperature == 0:
        verb = "is" if len(unused) == 1 else "are"
        say(
            f"note: {' and '.join(unused)} {verb} not used at --temperature 0, which takes the likeliest token every time"
        )
    asked = _all_questions(questions, questions_file)
    good, bad = _sorted_out(asked)
    if asked and not good:
        _report(bad, as_json)
        return 1
    if not asked and not sys.stdin.isatty():
        raise UsageError("no question: give one in quotes after the file, or read them from standard input with -f -")
    transcript = [] if resume is None else read_lines(resume)
    place = for_questions(file, budget, Hub(note=say))
    header = read_header(place)  # what is no KV file is refused before torch is imported
    if budget is not None:  # and a budget that it cannot give before the model is loaded
        from dropkv.shrinking import smaller_budget

        smaller_budget(header.metadata, budget, show_path(file))
    if resume is not None:
        check_head(transcript[0], header.metadata, resume)
    _report(bad, as_json)
    kv, model_seconds = _open(place, header, budget, model, revision, dtype, device, allow_mismatch)
    note_budget(budget, header.metadata.document.tokens, show_path(file))
    if not as_json:
        _announce(file, header, kv, model_seconds)

    from dropkv_cli.asking import Asker

    chat = chat or resume is not None
    asker = Asker(kv, sampling, chat=chat, as_json=as_json, batch_size=batch_size)
    if resume is not None:
        asker.resume(resume)
    code = max(asker.ask_all(good, alone=len(asked) == 1), 1 if bad else 0)
    if not asker.ended and (not asked or (chat and asker.on_terminal and sys.stdin.isatty())):
        asker.prompt()
    return code


def _refuse_files(questions: Sequence[str]) -> None:
    """Raise UsageError for a .kv file among the questions: the model would be asked its name."""
    for question in questions:
        if question.lower().endswith(".kv") and (is_address(question) or os.path.isfile(question)):
            raise UsageError(
                f"{show_path(question)} is a .kv file, not a question: query takes one file, ask the other in a run of its own"
            )


def _all_questions(written: Sequence[str], file: str | None) -> list[str]:
    """The questions of the command line, - standing for those of standard input, and then those of -f."""
    if [*written, file].count(STDIN) > 1:
        raise UsageError("standard input is named twice: give - once, as a question or with -f")
    asked: list[str] = []
    for question in written:
        asked += _from_file(STDIN) if question == STDIN else [question]
    return asked if file is None else [*asked, *_from_file(file)]


def _from_file(name: str) -> Sequence[str]:
    """The questions of a file or standard input; raises QuestionError when it cannot be read or holds none."""
    from dropkv.question_files import questions_in, read_questions

    return questions_in(sys.stdin.buffer.read(), "standard input") if name == STDIN else read_questions(name)


def _sorted_out(questions: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The questions that can be asked, and those of which that can be told without a model, each with the reason.

    Raises QuestionError for a single one that cannot.
    """
    from dropkv.prompts import check_question

    good, bad = [], []
    for number, question in enumerate(questions, 1):
        try:
            check_question(question)
            good.append(question)
        except QuestionError as error:
            if len(questions) == 1:
                raise
            bad.append((question, f"question {number}: {error}"))
    return good, bad


def _report(bad: list[tuple[str, str]], as_json: bool) -> None:
    """A line for each question that cannot be asked."""
    for question, problem in bad:
        complain(problem)
        if as_json:
            json_line({"question": question} | failure_keys(problem))


def _open(
    file: Place,
    header: Header,
    budget: float | int | None,
    model: str | None,
    revision: str | None,
    dtype: str,
    device: str,
    allow_mismatch: bool,
) -> tuple[KVFile, float]:
    """The file with its model, which is loaded only once every byte that is used has been found good, and the seconds of that."""
    waiting(f"loading {one_line(model or header.metadata.model.id)} ...")
    import_compiler()
    from dropkv.library import load_for, open_file

    opened = open_file(file, budget=budget)
    started = time.perf_counter()
    loaded = load_for(opened.header, model, revision=revision, dtype=dtype, device=device, note=say)
    seconds = time.perf_counter() - started
    return opened.with_model(loaded, allow_mismatch=allow_mismatch), seconds


def _announce(file: str, header: Header, kv: KVFile, model_seconds: float) -> None:
    """What was loaded, so that nobody has to wonder whether anything was."""
    document, kept, own = header.metadata.document, kv.metadata.budget.kept, header.metadata.budget.kept
    shown = (
        f"{kept:,} entries per KV head, {size(header.file_bytes)}"
        if kept == own
        else f"{kept:,} of {own:,} entries per KV head"
    )
    say(
        harmless(
            f"{show_path(file)}: {one_line(document.name)}, {document.tokens:,} tokens, {shown} loaded in {kv.seconds_load:.2f} s, "
            f"the model in {model_seconds:.1f} s"
        )
    )
