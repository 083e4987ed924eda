"""`dropkv query`, `info` and `verify` on a file of a tiny model."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dropkv_cli.output import harmless
from formats import read_header
from tests.cli.conftest import SETTINGS, Dropkv, start_dropkv

KEYS = {
    "question", "answer", "document_tokens", "prefix_entries", "prefilled_tokens", "generated_tokens", "seconds",
    "stopped",
}  # fmt: skip
SHORT = ("--max-new-tokens", "6")
QUESTIONS = ["What is the code?", "Which ship?"]


def test_json_records(dropkv: Dropkv, kv: Path, model: Path) -> None:
    from dropkv.prompts import Seam
    from tests import tiny

    result = dropkv("query", kv, *QUESTIONS, "--model", model, *SHORT, "--json")
    assert (result.code, result.err) == (0, "")
    seam = Seam.of(tiny.tokenizer(), name="tiny")
    metadata = read_header(kv).metadata
    for record, question in zip(result.records, QUESTIONS, strict=True):
        assert set(record) == KEYS
        assert set(record["seconds"]) == {"load", "first_token", "total"}
        assert 0 < record["seconds"]["first_token"] <= record["seconds"]["total"]
        assert record["question"] == question
        assert record["prefilled_tokens"] == len(seam.question_ids(question))
        assert record["document_tokens"] == metadata.document.tokens
        assert record["prefix_entries"] == metadata.budget.kept
        assert 1 <= record["generated_tokens"] <= 6
        assert record["stopped"] is (record["generated_tokens"] < 6)


def test_plain_answers_alone_go_to_standard_output(dropkv: Dropkv, kv: Path, model: Path) -> None:
    records = dropkv("query", kv, *QUESTIONS, "--model", model, *SHORT, "--json").records
    answers = [record["answer"] for record in records]
    plain = dropkv("query", kv, *QUESTIONS, "--model", model, *SHORT)
    assert (plain.code, plain.out) == (0, f"{answers[0]}\n\n{answers[1]}\n")
    assert [line for line in plain.err.splitlines() if line.startswith("Q: ")] == [f"Q: {q}" for q in QUESTIONS]
    assert "harbour.txt" in plain.err
    alone = dropkv("query", kv, QUESTIONS[1], "--model", model, *SHORT)
    assert alone.out == f"{answers[1]}\n" and "Q: " not in alone.err


def test_questions_from_a_file_and_from_standard_input(dropkv: Dropkv, kv: Path, model: Path, tmp_path: Path) -> None:
    text = "# a comment\n\n  What is the code?  \r\nWhich ship?\n"
    (tmp_path / "questions.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    common = ("--model", model, *SHORT, "--json")
    from_file = dropkv("query", kv, "First?", "-f", tmp_path / "questions.txt", *common).records
    assert [record["question"] for record in from_file] == ["First?", *QUESTIONS]
    piped = dropkv("query", kv, "-f", "-", *common, stdin=text.encode()).records
    assert [(r["question"], r["answer"]) for r in piped] == [(r["question"], r["answer"]) for r in from_file[1:]]


def test_a_seed_repeats_a_sample(dropkv: Dropkv, kv: Path, model: Path) -> None:
    def sample(seed: int) -> str:
        hot = ("--temperature", "1.5", "--top-p", "0.95", "--seed", str(seed))
        (record,) = dropkv(
            "query", kv, "Which ship?", "--model", model, "--max-new-tokens", "12", *hot, "--json"
        ).records
        return str(record["answer"])

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_chat_keeps_the_turns(dropkv: Dropkv, kv: Path, model: Path) -> None:
    common = ("--model", model, *SHORT, "--json")
    alone = dropkv("query", kv, *QUESTIONS, *common).records
    chat = dropkv("query", kv, *QUESTIONS, *common, "--chat").records
    assert chat[0]["answer"] == alone[0]["answer"]
    assert chat[0]["prefilled_tokens"] == alone[0]["prefilled_tokens"]
    # The end of the first answer's turn and the head of the next one come on top of the question.
    assert chat[1]["prefilled_tokens"] > alone[1]["prefilled_tokens"]


def test_one_question_that_does_not_fit_leaves_the_others_alone(dropkv: Dropkv, kv: Path, model: Path) -> None:
    result = dropkv("query", kv, "Which ship?", "why " * 600, "What is the code?", "--model", model, *SHORT, "--json")
    assert result.code == 1
    assert [record["question"].strip()[:20] for record in result.records if "answer" in record] == [
        "Which ship?",
        "What is the code?",
    ]
    assert "512 positions" in result.records[1]["error"] and result.records[1]["question"] == "why " * 600
    assert result.err.startswith("dropkv: ") and "512 positions" in result.err


def test_several_questions_at_once_change_no_answer(dropkv: Dropkv, kv: Path, model: Path, tmp_path: Path) -> None:
    asked = [f"{question} {number}" for number in range(4) for question in QUESTIONS]
    (tmp_path / "questions.txt").write_text("\n".join([*asked[:3], "why " * 600, *asked[3:]]))
    common = ("query", kv, "-f", tmp_path / "questions.txt", "--model", model, *SHORT, "--json")
    alone = dropkv(*common, "--batch-size", "1")
    assert [record["question"].strip() for record in alone.records if "answer" in record] == asked
    assert "512 positions" in alone.records[3]["error"] and alone.code == 1
    for size in ("3", "64"):
        batched = dropkv(*common, "--batch-size", size)
        assert [r.get("answer", r.get("error")) for r in batched.records] == [
            r.get("answer", r.get("error")) for r in alone.records
        ]
        assert batched.code == 1
    dropkv(*common[:-1], "--batch-size", "0").failed_with(2, "--batch-size 1 or more")
    dropkv(*common[:-1], "--batch-size", "4", "--chat").failed_with(2, "one question at a time")


def test_a_file_of_a_local_folder_finds_it_or_says_how(
    dropkv: Dropkv, document: Path, make_model: Callable[..., Path]
) -> None:
    output = document.with_suffix(".kv")
    folder = make_model(seed=5)
    assert dropkv("compress", document, "-o", output, "--model", folder, *SETTINGS).code == 0
    dropkv("query", output, "Which ship?").failed_with(1, "--model FOLDER")


def test_other_weights_are_refused_with_both_values(dropkv: Dropkv, kv: Path, make_model: Callable[..., Path]) -> None:
    other = make_model(seed=9)
    refused = dropkv("query", kv, "Which ship?", "--model", other, *SHORT)
    refused.failed_with(1, "weights", "--allow-mismatch")
    dropkv("verify", kv, "--model", other).failed_with(1, "weights")
    allowed = dropkv("query", kv, "Which ship?", "--model", other, *SHORT, "--allow-mismatch", "--json")
    assert (allowed.code, len(allowed.records)) == (0, 1)


def foreign(kind: str, path: Path) -> None:
    """Write something that is no KV file."""
    from safetensors.torch import save_file
    from torch import zeros

    contents = {
        "empty": b"",
        "short": b"abc",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "page": b"<!DOCTYPE html><html><body>404</body></html>",
        "pickle": pickle.dumps({"keys": [1]}, protocol=4),
        "text": b"Once upon a time there was a harbour.\n" * 9,
    }
    if kind == "safetensors":
        save_file({"a": zeros(3)}, path)
    else:
        path.write_bytes(contents[kind])


@pytest.mark.parametrize("verb", ["query", "info", "verify"])
@pytest.mark.parametrize("kind", ["empty", "short", "pointer", "page", "pickle", "text", "safetensors"])
def test_foreign_files(dropkv: Dropkv, tmp_path: Path, verb: str, kind: str) -> None:
    path = tmp_path / "foreign.kv"
    foreign(kind, path)
    # The model does not exist: the file has to be refused before anybody looks for it.
    more = {"query": ["who?", "--model", "/no/such/model"], "verify": ["--model", "/no/such/model"], "info": []}[verb]
    dropkv(verb, path, *more).failed_with(1, "foreign.kv")


@pytest.mark.parametrize("place", [3, 200, -40])
def test_damaged_files(dropkv: Dropkv, kv: Path, model: Path, place: int) -> None:
    raw = bytearray(kv.read_bytes())
    raw[place] ^= 4
    kv.write_bytes(raw)
    dropkv("verify", kv).failed_with(1, "harbour.kv")
    dropkv("query", kv, "who?", "--model", model).failed_with(1, "harbour.kv")


def test_cut_and_missing_files(dropkv: Dropkv, kv: Path) -> None:
    dropkv("info", kv.parent).failed_with(1, "folder")
    dropkv("query", kv.parent / "nothing.kv", "who?").failed_with(1, "nothing.kv")
    kv.write_bytes(kv.read_bytes()[:-9])
    dropkv("info", kv).failed_with(1, "harbour.kv")


def test_info(dropkv: Dropkv, kv: Path, model: Path) -> None:
    metadata = read_header(kv).metadata
    json_form = json.loads(json.dumps(metadata.to_json()))
    del json_form["model"]["weights"]["samples"]  # too long for a reader
    (record,) = dropkv("info", kv, "--json").records
    assert record["file"] == str(kv) and record["file_bytes"] == kv.stat().st_size and record["format_version"] == 1
    assert {key: record[key] for key in json_form} == json_form
    shown = dropkv("info", kv)
    assert (shown.code, shown.err) == (0, "")
    assert f"harbour.txt, {metadata.document.tokens} tokens" in shown.out
    assert f"{metadata.budget.kept} entries per KV head" in shown.out
    assert "0-2: full attention, 4 query and 2 KV heads of 16" in shown.out
    for name in ("model", "method", "observer", "kept", "size", "rope", "integrity"):
        assert f"\n{name} " in "\n" + shown.out


def test_info_of_a_hostile_name_cannot_steer_the_terminal(dropkv: Dropkv, document: Path, model: Path) -> None:
    nasty = document.rename(document.with_name("a\x1b[2Jb\n.txt"))
    output = document.with_name("a.kv")
    done = dropkv("compress", nasty, "-o", output, "--model", model, *SETTINGS)
    assert done.code == 0 and "\x1b" not in done.err
    shown = dropkv("info", output).out
    assert "\x1b" not in shown and "'a\\x1b[2Jb\\n.txt', " in shown  # the name alone is quoted


def test_verify(dropkv: Dropkv, kv: Path, model: Path) -> None:
    plain = dropkv("verify", kv)
    assert (plain.code, plain.err) == (0, "") and plain.out.startswith("ok: ") and plain.out.count("\n") == 1
    (record,) = dropkv("verify", kv, "--model", model, "--json").records
    assert record["ok"] is True and record["model"] == str(model) and record["tensors"] == 19
    assert dropkv("verify", kv, "--model", model).out.startswith("ok: ")


def test_an_answer_that_was_cut_off_says_so(dropkv: Dropkv, kv: Path, model: Path) -> None:
    cut = dropkv("query", kv, "Which ship?", "--model", model, "--max-new-tokens", "2")
    assert cut.err.splitlines()[-1] == "(cut off after 2 tokens; --max-new-tokens raises the limit)"
    assert re.search(r" loaded in \d+\.\d\d s, the model in \d+\.\d s\n", cut.err)
    full = dropkv("query", kv, "Which ship?", "--model", model, "--max-new-tokens", "9999")
    (record,) = dropkv("query", kv, "Which ship?", "--model", model, "--max-new-tokens", "9999", "--json").records
    notes = [line for line in full.err.splitlines() if line.startswith("(cut off")]
    count = record["generated_tokens"]
    expected = f"(cut off after {count} tokens; the model has no positions left behind the document)"
    assert notes == ([] if record["stopped"] else [expected])


def test_a_huge_question_is_not_repeated_whole(dropkv: Dropkv, kv: Path, model: Path) -> None:
    result = dropkv("query", kv, "why\n" * 300, "Which ship?", "--model", model, *SHORT)
    first = next(line for line in result.err.splitlines() if line.startswith("Q: "))
    assert first.startswith("Q: why why ") and first.endswith("...") and len(first) <= 103


class Terminal:
    """The command line with a terminal for its standard input and output; standard error is apart."""

    def __init__(self, *arguments: object) -> None:
        self.ours, theirs = os.openpty()
        self.process = start_dropkv(
            *arguments, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={"TERM": "dumb"}
        )
        os.close(theirs)
        self.shown = b""
        self.guard = threading.Timer(180, self.process.kill)  # a test that waits in vain fails then
        self.guard.start()

    def write(self, text: bytes) -> None:
        """Type."""
        os.write(self.ours, text)

    def wait_for(self, count: int, what: bytes = b"> ") -> None:
        """Read on until `what` has been shown `count` times."""
        while self.shown.count(what) < count:
            self.shown += os.read(self.ours, 4096)

    def wait_busy(self, seconds: float) -> None:
        """Until the process has computed for so long: it is well into an answer, of which a random model may show little."""
        until = self._computed() + seconds
        while self._computed() < until:
            assert self.process.poll() is None, f"it ended, or waited until it was killed; shown: {self.shown!r}"
            time.sleep(0.05)

    def wait_idle(self) -> None:
        """Until it computes no more, and waits at its prompt: readline is deaf between showing the prompt and waiting at it."""
        before = -1.0
        while before != (before := self._computed()):
            time.sleep(0.3)

    def press_ctrl_c(self) -> None:
        """At the prompt, when it is ready for it."""
        self.wait_idle()
        self.process.send_signal(signal.SIGINT)
        self.wait_idle()

    def _computed(self) -> float:
        """Processor seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> tuple[int, str]:
        """Wait for the end; gives the exit code and standard error."""
        assert self.process.stderr
        said = self.process.stderr.read().decode()
        while True:
            try:
                piece = os.read(self.ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            self.shown += piece
        os.close(self.ours)
        code = self.process.wait(180)
        self.guard.cancel()
        return code, said


def test_a_prompt_opens_on_a_terminal(kv: Path, model: Path) -> None:
    terminal = Terminal("query", kv, "--model", model, *SHORT)
    terminal.write(b"Which ship?\n\n")
    code, said = terminal.end()
    assert code == 0 and "Ctrl-D ends" in said and "Traceback" not in said
    assert terminal.shown.count(b"> ") >= 2  # the prompt came back after the answer


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_ctrl_c_stops_the_answer_and_then_the_prompt(
    dropkv: Dropkv, document: Path, make_model: Callable[..., Path], chat: list[str]
) -> None:
    patient = make_model(endless=True, max_position_embeddings=200_000)
    output = document.with_suffix(".kv")
    assert dropkv("compress", document, "-o", output, "--model", patient, *SETTINGS, "--method", "adadropkv").code == 0
    terminal = Terminal("query", output, "--model", patient, *chat, "--max-new-tokens", "100000")
    terminal.wait_for(1)
    terminal.write(b"Which ship?\n")
    terminal.wait_busy(0.5)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(1, b"\r\n> ")  # a line feed, and the prompt again
    terminal.shown = b""
    terminal.write(b"who?\n")
    terminal.wait_busy(0.5)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(1, b"\r\n> ")
    terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    code, said = terminal.end()
    assert code == 130 and "Traceback" not in said
    unsaved = "; 2 turns are not saved, /save FILE keeps them" if chat else ""
    assert [line for line in said.splitlines() if line][-2:] == [
        f"(Ctrl-C again or /quit leaves{unsaved})",
        "dropkv: interrupted",
    ]


def test_ctrl_c_at_the_prompt_clears_the_line_and_leaves_when_pressed_twice(
    kv: Path, model: Path, tmp_path: Path
) -> None:
    talk = tmp_path / "talk.jsonl"
    terminal = Terminal("query", kv, "--chat", "--model", model, *SHORT)
    terminal.wait_for(1)
    terminal.press_ctrl_c()  # nothing was said yet
    terminal.write(b"Which ship?\n")
    terminal.wait_for(1, b"\r\n> ")
    for _ in range(2):  # a line is cleared as often as one likes
        terminal.write(b"What is the")
        terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    terminal.write(f"/save {talk}\n".encode())  # which the note advised
    terminal.press_ctrl_c()
    terminal.write(b"What is the code?\n")
    terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    code, said = terminal.end()
    assert code == 130 and "Traceback" not in said
    assert [line for line in said.splitlines() if "Ctrl-C again" in line] == [
        "(Ctrl-C again or /quit leaves)",
        "(Ctrl-C again or /quit leaves; 1 turn is not saved, /save FILE keeps it)",
        "(Ctrl-C again or /quit leaves)",
        "(Ctrl-C again or /quit leaves; 1 turn is not saved, /save FILE keeps it)",
    ]
    assert len(talk.read_text().splitlines()) == 2


@pytest.mark.parametrize("end", [b"\x04", b"/QUIT\n"])
def test_leaving_says_what_was_not_saved(kv: Path, model: Path, end: bytes) -> None:
    terminal = Terminal("query", kv, "--chat", "--model", model, *SHORT)
    terminal.wait_for(1)
    terminal.write(b"Which ship?\nWho?\n")
    terminal.wait_for(2, b"\r\n> ")
    terminal.wait_idle()
    terminal.write(end)
    code, said = terminal.end()
    assert code == 0
    assert said.splitlines()[-1] == "(2 turns are not saved; next time, /save FILE keeps them)"


def test_ctrl_c_during_a_question_of_the_command_line_ends_it(
    dropkv: Dropkv, document: Path, make_model: Callable[..., Path]
) -> None:
    patient = make_model(endless=True, max_position_embeddings=200_000)
    output = document.with_suffix(".kv")
    assert dropkv("compress", document, "-o", output, "--model", patient, *SETTINGS, "--method", "adadropkv").code == 0
    process = start_dropkv(
        "query", output, "who?", "--model", patient, "--max-new-tokens", "100000", stderr=subprocess.PIPE
    )
    assert process.stderr
    assert b"loaded in" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted" in err and b"Traceback" not in err


def test_a_redirected_answer_is_there_as_far_as_it_came(
    dropkv: Dropkv, document: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    patient = make_model(endless=True, max_position_embeddings=200_000)
    kv = document.with_suffix(".kv")
    assert dropkv("compress", document, "-o", kv, "--model", patient, *SETTINGS).code == 0
    asked = ("query", kv, "who?", "--model", patient, "--max-new-tokens")
    whole = dropkv(*asked, "40").out.removesuffix("\n")
    answer = tmp_path / "answer.txt"
    with answer.open("wb") as out:
        process = start_dropkv(*asked, "100000", stdout=out, stderr=subprocess.PIPE)
        while len(answer.read_bytes()) < len(whole.encode()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith(b"\ndropkv: interrupted\n")
    text = answer.read_text()
    assert text.startswith(whole) and text.endswith("\n")


def test_a_chat_goes_on_at_a_prompt_on_a_terminal(dropkv: Dropkv, kv: Path, model: Path) -> None:
    terminal = Terminal("query", kv, "Which ship?", "--chat", "--model", model, *SHORT)
    terminal.wait_for(1)
    terminal.write(b"What is the code?\n\n")
    code, said = terminal.end()
    assert (
        code == 0
        and "Ctrl-D ends" in said
        and said.endswith("\n(2 turns are not saved; next time, /save FILE keeps them)\n")
    )
    piped = dropkv(
        "query", kv, "Which ship?", "What is the code?", "--chat", "--model", model, *SHORT, "--json"
    ).records
    shown = terminal.shown.decode(errors="replace").replace("\r\n", "\n")
    for record in piped:  # the second answer has seen the first turn
        assert harmless(record["answer"]) in shown
    alone = dropkv("query", kv, "Which ship?", "--chat", "--model", model, *SHORT)
    assert alone.code == 0 and "Ctrl-D" not in alone.err


def test_the_commands_of_the_prompt(dropkv: Dropkv, kv: Path, model: Path, tmp_path: Path) -> None:
    """A conversation is saved, forgotten, and gone on with in another process."""
    talk, notes, other = (tmp_path / name for name in ("talk.jsonl", "notes.md", "other.md"))
    other.write_text("precious")
    typed = [
        "/help", "/nonsense", "/save", f"/save {talk}", "Which ship?", f"/save {talk}", f"/save {talk}", f"/save {notes}",
        f"/save {other}", f"/save {tmp_path}/./notes.md", "/reset", "/save x.md", " /etc/passwd?", "/quit", "never asked",
    ]  # fmt: skip
    terminal = Terminal("query", kv, "--chat", "--model", model, *SHORT)
    terminal.wait_for(1)
    terminal.write("".join(f"{line}\n" for line in typed).encode())
    code, said = terminal.end()
    assert code == 0 and "Traceback" not in said
    lines = said.splitlines()
    assert any(line.startswith("/save FILE ") for line in lines)
    assert [line.removeprefix("dropkv: ")[:36] for line in lines if line.startswith("dropkv: ")] == [
        "no command /nonsense: there are /sav",
        "/save needs a name: /save talk.jsonl",
        "nothing was said yet: ask something ",
        f"{other}: exists already"[:36],
        "nothing was said yet: ask something ",
    ]
    assert f"{other}: exists already; choose another name\n" in said and other.read_text() == "precious"
    assert [line for line in lines if " -> " in line] == [
        *[f"1 turn -> {talk}"] * 2, f"1 turn -> {notes}", f"1 turn -> {tmp_path}/./notes.md",
    ]  # fmt: skip
    assert "1 turn forgotten" in lines
    head, turn = map(json.loads, talk.read_text(encoding="utf-8").splitlines())
    assert head["document"] == "harbour.txt" and turn["question"] == "Which ship?"
    assert turn["answer"] in notes.read_text(encoding="utf-8")
    one_go = dropkv("query", kv, "Which ship?", "What is the code?", "--chat", "--model", model, *SHORT, "--json")
    later = dropkv("query", kv, "What is the code?", "--resume", talk, "--model", model, *SHORT, "--json")
    assert later.code == 0 and later.records[0]["answer"] == one_go.records[1]["answer"]
    assert later.records[0]["prefilled_tokens"] == one_go.records[1]["prefilled_tokens"]
    refused = dropkv("query", kv, "Who?", "--resume", notes, "--model", model)
    assert refused.code == 1 and "notes.md: is no transcript: name a file that /save NAME.jsonl wrote" in refused.err


def test_commands_of_a_prompt_without_a_conversation(kv: Path, model: Path) -> None:
    from dropkv import Sampling, load
    from dropkv.errors import UsageError
    from dropkv_cli.asking import Asker

    asker = Asker(load(kv, model=str(model)), Sampling(), chat=False, as_json=False)
    for line in ("/save talk.jsonl", "/RESET"):
        with pytest.raises(UsageError, match="needs a conversation: start with --chat"):
            asker.obey(*line.split())
    assert asker.obey("/help") and not any(asker.obey(word) for word in ("/quit", "/Exit", "/BYE"))


@pytest.mark.parametrize(
    ("line", "command", "question"),
    [
        ("/help", ("/help", ""), None),
        ("/?", ("/?", ""), None),
        ("/RESET", ("/reset", ""), None),
        ("/save  My talk.md ", ("/save", "My talk.md"), None),
        ("/1", ("/1", ""), None),
        ("/", ("/", ""), None),
        ("/reset!", ("/reset!", ""), None),
        ("/etc/passwd?", None, "/etc/passwd?"),
        ("//reset", None, "/reset"),
        (" /save a", None, "/save a"),
        ("//", None, "/"),
        ("who/what", None, "who/what"),
        (" Who? ", None, "Who?"),
    ],
)
def test_what_is_a_command(line: str, command: tuple[str, str] | None, question: str | None) -> None:
    from dropkv_cli.asking import command_of, question_of

    assert command_of(line) == command
    assert question is None or question_of(line) == question


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ('"my file.txt"', "my file.txt"),
        ("'my file.txt'", "my file.txt"),
        ("my file.txt", "my file.txt"),
        (r"my\ file.txt", "my file.txt"),
        ("'a\"b'", 'a"b'),
        ("it's.md", "it's.md"),
        ("~/a.md", str(Path.home() / "a.md")),
        ('""', ""),
    ],
)
def test_names_behind_a_command(typed: str, name: str) -> None:
    from dropkv_cli.asking import file_name

    assert file_name(typed) == name


@pytest.mark.parametrize("typed", ['"my file.txt', '"', "'a\""])
def test_a_quote_that_is_not_closed(typed: str) -> None:
    from dropkv.errors import UsageError
    from dropkv_cli.asking import file_name

    with pytest.raises(UsageError, match="before the name is not closed: leave it out, spaces need none"):
        file_name(typed)


def test_commands_in_a_conversation_without_a_terminal(dropkv: Dropkv, kv: Path, model: Path, tmp_path: Path) -> None:
    """They are obeyed among the questions; what cannot be done does not stop the others."""
    spaced, notes, last = tmp_path / "my talk.jsonl", tmp_path / "notes.md", tmp_path / "last.jsonl"
    common = ("--chat", "--model", model, *SHORT)
    typed = [
        "/save early.md", "Which ship?", f'/SAVE "{spaced}"', f"/save {kv}", f"/save {tmp_path}", "/nonsense", "What is the code?",
        f"/save {notes}", "/reset", "//reset", f"/save {last}", "/quit", "never asked",
    ]  # fmt: skip
    piped = dropkv("query", kv, "-f", "-", *common, stdin="\n".join(typed).encode())
    plain = dropkv("query", kv, "Which ship?", "What is the code?", *common)
    fresh = dropkv("query", kv, "//reset", *common)
    assert piped.code == 1 and piped.out == f"{plain.out}\n{fresh.out}"
    assert [line for line in piped.err.splitlines() if line.startswith("Q: ")] == [
        "Q: Which ship?", "Q: What is the code?", "Q: //reset",
    ]  # fmt: skip
    assert [line for line in piped.err.splitlines() if line.startswith("dropkv: ")] == [
        "dropkv: nothing was said yet: ask something before /save",
        f"dropkv: {kv}: a conversation is no such file: name it NAME.jsonl to go on with it, NAME.md to read it",
        f"dropkv: {tmp_path}: is a folder, not a file; give the name of a file",
        "dropkv: no command /nonsense: there are /save FILE, /reset, /help and /quit; to ask it, type another / before it",
    ]
    assert [json.loads(line).get("question") for line in spaced.read_text().splitlines()] == [None, "Which ship?"]
    assert "## What is the code?" in notes.read_text()
    assert [json.loads(line).get("question") for line in last.read_text().splitlines()] == [None, "/reset"]
    assert not (tmp_path / "early.md").exists()


def test_commands_in_json_lines_and_alone(dropkv: Dropkv, kv: Path, model: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    common = ("--chat", "--model", model, *SHORT, "--json")
    result = dropkv("query", kv, "Which ship?", f"/save {talk}", "/what", *common)
    assert result.code == 1 and len(result.records) == 2 and result.records[0]["question"] == "Which ship?"
    assert result.records[1]["question"] == "/what" and result.records[1]["error"].startswith("no command /what: there")
    turned = dropkv("query", kv, f"/save {tmp_path / 'talk.md'}", "--resume", talk, "--model", model, "--json")
    assert (turned.code, turned.out) == (0, "") and "## Which ship?" in (tmp_path / "talk.md").read_text()
    unknown = dropkv("query", kv, "/what", *common)
    assert unknown.code == 2 and unknown.err.startswith("dropkv: no command /what")
    assert [record["question"] for record in unknown.records] == ["/what"]
    asked = dropkv(
        "query", kv, "/what", "--model", model, *SHORT, "--json"
    )  # no conversation: a question like any other
    assert (asked.code, asked.records[0]["question"]) == (0, "/what")


def test_questions_that_are_none_leave_the_others_alone(dropkv: Dropkv, kv: Path, model: Path) -> None:
    asked = ("Which ship?", " ", "caf\udce9?", "What is the code?")
    result = dropkv("query", kv, *asked, "--model", model, *SHORT, "--json")
    assert result.code == 1
    bad, good = result.records[:2], result.records[2:]
    assert [record["error"].partition(";")[0] for record in bad] == [
        "question 2: the question is empty", "question 3: the question is no valid UTF-8",
    ]  # fmt: skip
    alone = dropkv("query", kv, "Which ship?", "What is the code?", "--model", model, *SHORT, "--json").records
    assert [record["answer"] for record in good] == [record["answer"] for record in alone]
    assert result.err.count("dropkv: question ") == len(result.err.splitlines()) == 2


def test_a_dash_reads_questions_from_standard_input(dropkv: Dropkv, kv: Path, model: Path) -> None:
    text = b"What is the code?\nWhich ship?\n"
    result = dropkv("query", kv, "Who?", "-", "--model", model, *SHORT, "--json", stdin=text)
    assert [record["question"] for record in result.records] == ["Who?", "What is the code?", "Which ship?"]


def test_special_tokens_in_a_question_stay_text(dropkv: Dropkv, kv: Path, model: Path) -> None:
    from dropkv.prompts import Seam
    from tests import tiny

    marks = "<|im_end|><|im_start|><|endoftext|>"
    (record,) = dropkv("query", kv, marks, "--model", model, *SHORT, "--json").records
    seam = Seam.of(tiny.tokenizer(), name="tiny")
    frame = seam.encoder.foreign(seam.pieces.opening), seam.encoder.template(seam.pieces.after)
    own = seam.question_ids(marks)[len(frame[0]) : -len(frame[1])]
    assert record["prefilled_tokens"] == len(own) + sum(map(len, frame))
    assert len(own) >= 20 and not seam.encoder.special_ids & set(own)
