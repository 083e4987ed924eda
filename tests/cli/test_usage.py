"""Command lines that cannot be meant, help texts, and what is not imported for them."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import click
import pytest

from dropkv_cli.app import VERBS, cli
from dropkv_cli.endings import guarded
from dropkv_cli.interrupts import held_back
from dropkv_cli.output import compared, json_line
from tests.cli.conftest import ROOT, Dropkv, start_dropkv


@pytest.mark.parametrize(
    ("budget", "word"),
    [
        ("0", "0 keeps nothing"),
        ("-3", "-3 keeps nothing"),
        ("0.0", "0.0 is no fraction"),
        ("-0.5", "-0.5 is no fraction"),
        ("1.5", "1.5 is no fraction"),
        ("nan", "'nan' is no number"),
        ("1e-2", "'1e-2' is no number"),
        ("5%", "--budget 0.05"),
        ("", "'' is no number"),
    ],
)
def test_budgets_out_of_range(dropkv: Dropkv, document: Path, budget: str, word: str) -> None:
    output = document.with_suffix(".kv")
    dropkv("compress", document, "-o", output, "--budget", budget).failed_with(2, word, "0.05", "2048")
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compress"], ["DOC", "dropkv compress --help"]),
        (["compress", "{doc}"], ["-o FILE", "--dry-run"]),
        (["compress", "{doc}", "-o", ""], ["-o is empty"]),
        (["compress", "{doc}", "-o", "a.kv", "--nonsense"], ["--nonsense"]),
        (["compress", "{doc}", "-o", "a.kv", "--observe", "stars"], ["'stars'", "replay"]),
        (["compress", "{doc}", "-o", "a.kv", "--method", "adadrop"], ["'adadrop'", "adadropkv"]),
        (["compress", "{doc}", "-o", "a.kv", "--pool", "4"], ["4", "--pool"]),
        (["compress", "{doc}", "-o", "a.kv", "--window", "0"], ["--window 1"]),
        (["compress", "{doc}", "-o", "a.kv", "--chunk", "0"], ["--chunk 1"]),
        (["compress", "{doc}", "-o", "a.kv", "--alpha", "2"], ["alpha 2.0"]),
        (["compress", "{doc}", "-o", "a.kv", "--dtype", "int3"], ["'int3'", "bfloat16"]),
        (["compress", "{doc}", "-o", "a.kv", "--device", "abacus"], ["'abacus'", "cpu"]),
        (["compress", "{doc}", "-o", "a.kv", "--kv-dtype", "fp4"], ["'fp4'", "int4"]),
        (["compress", "{doc}", "-o", "a.kv", "--zstd", "23"], ["zstd level 23", "from 1 to 22"]),
        (["compress", "{doc}", "-o", "a.kv", "--zstd", "best"], ["'best'", "from 1 to 22"]),
        (["compress", "{doc}", "{doc}", "-o", "."], ["the document harbour.txt is given twice"]),
        (["compress", "{doc}", "other.txt", "-o", "a.kv"], ["2 documents", "folder"]),
        (["compress", "{doc}", "-o", "{doc}", "--force"], ["is the document itself"]),
        (["query"], ["FILE"]),
        (["query", "a.kv"], ["-f -"]),
        (["query", "a.kv", "-", "-f", "-"], ["standard input is named twice"]),
        (["query", "a.kv", "who?", "--temperature", "-1"], ["temperature -1.0"]),
        (["query", "a.kv", "who?", "--top-p", "0"], ["top-p 0.0"]),
        (["query", "a.kv", "who?", "--max-new-tokens", "0"], ["--max-new-tokens 1"]),
        (["query", "a.kv", "who?", "--seed", "-1"], ["'-1'", "from 0 on"]),
        (["query", "a.kv", "who?", "--max-new-tokens", "many"], ["for '--max-new-tokens': 'many' is not a valid"]),
        (["query", "", "who?"], ["empty name"]),
        (["query", "-", "who?"], ["cannot be read from a pipe", "./-"]),
        (["info", "-"], ["cannot be read from a pipe"]),
        (["verify", "-"], ["cannot be read from a pipe"]),
        (["compress", "{doc}", "-o", "-"], ["cannot go to a pipe", "./-"]),
        (["compress", "", "-o", "a.kv"], ["empty name", "standard input"]),
        (["compress", "{doc}", "-o", "a.kv", "--seed", "-1"], ["'-1'", "from 0 on"]),
        (["compress", "{doc}", "-o", "a.kv", "--method", "foo"], ["'foo': use one of adacriticalkv, adadropkv"]),
        (["info"], ["FILE"]),
        (["compress", "{doc}", "-o", "a.kv", "--system", "caf\udce9"], ["--system is no valid UTF-8"]),
        (["completion", "csh"], ["'csh'", "bash", "zsh", "fish"]),
        (["answer", "a.kv"], ["no such command 'answer'", "compress, query, serve, info"]),
        (["Compres", "a.txt"], ["no such command 'Compres': did you mean compress?"]),
        (
            ["compress", "{doc}", "-o", "a.kv", "--budget", "12.5%"],
            ["budget '12.5%' is no number: write a share", "--budget 0.125"],
        ),
        (["compress", "{doc}", "-o", "a.kv", "--budget", "9" * 30], ["is more than any document has: use 1.0"]),
        (["compress", "{doc}", "-o", "a.kv", "--window", "9" * 20], ["count tokens: use at most 1,073,741,824"]),
        (["compress", "{doc}", "-o", "a.kv", "--pool", "9" * 20], ["count tokens: use at most 1,073,741,824"]),
        (["query", "a.kv", "who?", "--seed", "9" * 20], ["from 0 on, of at most 18 digits"]),
        (["push", "a.kv", "https://huggingface.co/me/books"], ["https://huggingface.co/me/books: is a web address"]),
    ],
)
def test_usage_errors_take_one_line_and_exit_2(
    dropkv: Dropkv, document: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(document.parent)
    result = dropkv(*(argument.format(doc=document.name) for argument in arguments))
    result.failed_with(2, *words)
    assert list(document.parent.iterdir()) == [document]


def test_what_is_missing_or_empty_is_a_failure_and_no_usage_error(dropkv: Dropkv, tmp_path: Path) -> None:
    """The same exit code for every file that is not there: documents, .kv files, questions, transcripts."""
    blank = tmp_path / "blank.txt"
    blank.write_text("# only this\n\n")
    dropkv("compress", "missing.txt", "-o", tmp_path / "a.kv").failed_with(1, "missing.txt", "no such file")
    dropkv("query", "missing.kv", "who?").failed_with(1, "missing.kv")
    dropkv("query", "a.kv", "-f", "missing.txt").failed_with(1, "missing.txt: cannot be read (No such file")
    dropkv("query", "a.kv", "-f", tmp_path).failed_with(1, "cannot be read (Is a directory")
    dropkv("query", "a.kv", "-f", blank).failed_with(1, "no question in", "blank.txt", "one a line")
    dropkv("query", "a.kv", "-f", "-").failed_with(1, "no question in standard input")
    dropkv("query", "a.kv", "who?", "--resume", "missing.jsonl").failed_with(1, "missing.jsonl", "/save")
    observe = ("--observe", "questions:missing.txt")
    dropkv("compress", blank, "-o", tmp_path / "a.kv", *observe).failed_with(1, "missing.txt", "cannot be read")


@pytest.mark.parametrize(("question", "words"), [("  ", ["is empty"]), ("caf\udce9?", ["no valid UTF-8", "encoding"])])
def test_a_question_that_is_none_is_refused_before_anything_is_read(
    dropkv: Dropkv, question: str, words: list[str]
) -> None:
    dropkv("query", "missing.kv", question).failed_with(1, *words)
    two = dropkv("query", "missing.kv", question, "\n")
    assert (two.code, two.out) == (1, "")
    first, second = two.err.splitlines()
    assert first.startswith("dropkv: question 1: ") and second.startswith("dropkv: question 2: the question is empty")


def test_no_arguments_show_the_help(dropkv: Dropkv) -> None:
    result = dropkv()
    assert (result.code, result.out) == (2, "")
    assert all(f"\n  {verb} " in result.err for verb in VERBS)


@pytest.mark.parametrize(
    ("group", "names"), [([], list(VERBS)), (["bench"], ["accuracy", "report", "speed", "tasks", "theory"])]
)
def test_lists_of_commands_are_not_cut_off(dropkv: Dropkv, group: list[str], names: list[str]) -> None:
    _, _, listed = dropkv(*group, "--help").out.partition("\nCommands:\n")
    lines = listed.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_help_imports_no_command() -> None:
    program = "import sys; from dropkv_cli.app import cli; cli.main(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert not loaded & {*(f"dropkv_cli.{verb}" for verb in VERBS), "formats.reader", "formats.writer", "xxhash"}
    assert "formats.errors" in loaded


def test_version(dropkv: Dropkv) -> None:
    from dropkv import __version__

    assert (dropkv("--version").code, dropkv("--version").out) == (0, f"dropkv {__version__}\n")


BENCHES = [f"bench {name}" for name in ("accuracy", "tasks", "theory", "speed", "report")]


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "bench"), *BENCHES])
def test_every_option_has_a_help_line_and_shows_its_default(dropkv: Dropkv, verb: str) -> None:
    first, *rest = verb.split()
    command: click.Command = import_module(f"dropkv_cli.{first}").command
    for name in rest:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert options or verb == "completion"
    for option in options:
        assert option.help and option.help.endswith("."), option.name
        assert option.show_default, option.name
    result = dropkv(*verb.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert len(re.findall(r"(?:\[|; |;\s+)default:", result.out)) == len(options)


def test_the_options_of_the_contract_are_there() -> None:
    found = {
        verb: {name for parameter in import_module(f"dropkv_cli.{verb}").command.params for name in parameter.opts}
        for verb in VERBS
    }
    assert found["compress"] >= {
        "-o", "--model", "--budget", "--method", "--observe", "--system", "--window", "--pool", "--alpha", "--chunk",
        "--dtype", "--device", "--revision", "--no-tokens", "--no-fidelity", "--truncate", "--seed", "--force", "--dry-run", "--json",
    }  # fmt: skip
    assert found["query"] >= {
        "-f", "--model", "--revision", "--dtype", "--device", "--allow-mismatch", "--max-new-tokens", "--temperature",
        "--top-p", "--seed", "--chat", "--json", "--budget",
    }  # fmt: skip
    assert found["shrink"] == {"files", "-o", "--output", "--budget", "--force", "--json"}
    assert found["verify"] >= {"--model", "--json"}
    assert "--json" in found["info"] and "--json" in found["models"]


def test_help_and_info_start_without_torch(kv: Path) -> None:
    program = f"""
import json, sys
from dropkv_cli.app import VERBS, cli
infos = [["info", {str(kv)!r}], ["info", {str(kv)!r}, "--json"]]
for arguments in [["--help"], *infos, ["models"], *([verb, "--help"] for verb in VERBS)]:
    cli.main(arguments, standalone_mode=False)
heavy = {{"torch", "transformers", "triton", "numpy"}}
print(json.dumps(sorted(heavy & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_verbs_are_modules_of_the_package() -> None:
    context = click.Context(cli)
    assert cli.list_commands(context) == list(VERBS)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None and command.name == verb


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start_dropkv("models", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 1


@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["compress", "--help"]])
def test_an_output_that_is_full_or_closed_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = start_dropkv(*arguments, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith(b"dropkv: standard output cannot be written (No space left") and err.count(b"\n") == 1
    command = f"{shlex.join([sys.executable, '-m', 'dropkv_cli', *arguments])} >&- <&-"
    closed = subprocess.run(command, shell=True, capture_output=True, cwd=ROOT)
    assert closed.returncode == 1
    assert (
        closed.stderr.startswith(b"dropkv: standard output cannot be written (Bad file")
        and b"Trace" not in closed.stderr
    )
    for unbuffered in ("", "1"):
        with open("/dev/full", "wb") as full:
            environment = {"PYTHONUNBUFFERED": unbuffered}
            process = start_dropkv(*arguments, stdout=subprocess.PIPE, stderr=full, env=environment)
            assert process.communicate(timeout=60)[0]
        assert process.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_exit_codes_stay_where_nobody_can_be_told(unbuffered: str) -> None:
    stopped = (
        "import dropkv_cli.app\n"
        "def run(arguments):\n    raise KeyboardInterrupt\n"
        "dropkv_cli.app.run = run\n"
        "from dropkv_cli.main import main\n"
        "main(['models'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        for command, code in ((["-m", "dropkv_cli", "no-such-verb"], 2), (["-c", stopped], 130)):
            assert (
                subprocess.run([sys.executable, *command], stderr=full, env=environment, timeout=60).returncode == code
            )


def test_closed_streams_are_no_hindrance(document: Path, model: Path) -> None:
    output = document.with_suffix(".kv")
    program = shlex.join([sys.executable, "-m", "dropkv_cli"])
    compress = f"{program} compress {document} -o {output} --model {model} --budget 0.5 --chunk 32 >&- <&- 2>&-"
    assert subprocess.run(compress, shell=True, cwd=ROOT).returncode == 0
    ask = subprocess.run(f"{program} query {output} --model {model} <&-", shell=True, capture_output=True, cwd=ROOT)
    assert ask.returncode == 2 and ask.stderr.startswith(b"dropkv: no question")


def test_ctrl_c_while_python_imports(kv: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(1.5)")
    for seconds in (0.1, 0.15, 0.25, 1.0):
        process = start_dropkv("query", kv, "who?", stderr=subprocess.PIPE, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert b"Traceback" not in err and err.strip() == b"dropkv: interrupted"


@pytest.mark.parametrize(
    "arguments",
    [
        ["compress", "{doc}", "-o", "new.kv"],
        ["query", "{kv}", "who?"],
        ["shrink", "{kv}", "-o", "new.kv", "--budget", "0.1"],
        ["verify", "{kv}", "--model", "smollm2-135m"],
        ["bench", "accuracy", "-o", "results"],
        ["bench", "theory", "{doc}"],
        ["push", "{kv}", "me/books"],
        ["pull", "hf://me/books/harbour.kv"],
    ],
)
def test_ctrl_c_waits_for_the_import_of_torch(kv: Path, document: Path, arguments: list[str]) -> None:
    """An exception inside its C++ part ends the process with an abort. The torch of this test presses Ctrl-C itself."""
    folder = kv.parent
    (folder / "torch.py").write_text("import os; os.kill(os.getpid(), 2); open('imported', 'w').close()")
    command = [argument.format(doc=document, kv=kv) for argument in arguments]
    process = start_dropkv(*command, cwd=folder, stderr=subprocess.PIPE, env={"PYTHONPATH": f"{folder}:{ROOT}"})
    _, err = process.communicate(timeout=60)
    writes = arguments[0] in ("compress", "shrink", "bench", "pull")
    said = b"dropkv: interrupted; no file is left half-written" if writes else b"dropkv: interrupted"
    if arguments[:2] == ["bench", "accuracy"]:
        said += b", and the same command goes on where it was"
    assert (process.returncode, err.strip()) == (130, said)
    assert (folder / "imported").exists() and not (folder / "new.kv").exists()


def test_ctrl_c_waits_for_the_import_of_triton(kv: Path) -> None:
    folder = kv.parent
    (folder / "torch.py").touch()
    (folder / "triton.py").write_text("import os; os.kill(os.getpid(), 2); open('imported', 'w').close()")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}"}
    process = start_dropkv("query", kv, "who?", cwd=folder, stderr=subprocess.PIPE, env=environment)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, b"dropkv: interrupted")
    assert (folder / "imported").exists()


def test_ctrl_c_that_is_held_back() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append("heeded"))
    try:
        own = signal.getsignal(signal.SIGINT)
        with held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == ["heeded"] and signal.getsignal(signal.SIGINT) is own
        with held_back():
            pass
        assert seen == ["heeded"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_inside_exec_of_a_string_keeps_the_exit_code(kv: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('exec("raise KeyboardInterrupt")')
    process = start_dropkv("query", kv, "who?", stderr=subprocess.PIPE, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, b"dropkv: interrupted")


def test_the_first_import_is_light() -> None:
    program = "import sys; before = set(sys.modules); import dropkv_cli.main; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "['__future__', 'dropkv_cli', 'dropkv_cli.main']\n"


def test_ctrl_c_that_an_import_swallows_is_still_one(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot import name") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert guarded(action) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "dropkv: interrupted\n"


def test_a_file_that_looks_like_an_option(dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash.txt").write_text("text")
    dropkv("compress", "-dash.txt", "-o", "a.kv").failed_with(2, "write ./-dash.txt")
    dropkv("compress", "-lash.txt", "-o", "a.kv").failed_with(2, "dropkv compress --help")


def test_json_has_no_lone_surrogates(capsys: pytest.CaptureFixture[str]) -> None:
    json_line({"file": 'a\udcff\U0001f600\u00e9\n"', "n": [1, None, 0.5]})
    printed = capsys.readouterr().out
    assert printed.isascii() and "\\udcff" not in printed
    assert json.loads(printed) == {"file": 'a\ufffd\U0001f600\u00e9\n"', "n": [1, None, 0.5]}


@pytest.mark.parametrize(
    ("file", "full", "words"),
    [
        (100, 390, "3.9 times smaller"),
        (100, 105, "1.1 times smaller"),
        (100, 103, "about as large"),
        (100, 100, "about as large"),
        (103, 100, "3 % larger"),
        (2500, 100, "2,400 % larger"),
    ],
)
def test_how_sizes_compare(file: int, full: int, words: str) -> None:
    assert compared(file, full) == words


def test_make_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    helped = set(re.findall(r'@echo "make ([a-z-]+) ', text))
    assert helped >= {"venv", "demo", "test", "lint", "check-readme", "clean"}


def test_debug_shows_the_traceback_before_the_line(dropkv: Dropkv, monkeypatch: pytest.MonkeyPatch) -> None:
    dropkv("info", "missing.kv").failed_with(1, "missing.kv")
    monkeypatch.setenv("DROPKV_DEBUG", "1")
    result = dropkv("info", "missing.kv")
    assert result.err.startswith("Traceback") and result.err.splitlines()[-1].startswith("dropkv: missing.kv")


def test_an_unexpected_error_is_one_line_with_advice(dropkv: Dropkv, kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise ValueError("first\nsecond")

    monkeypatch.setattr("dropkv_cli.info.read_header", broken)
    dropkv("info", kv).failed_with(1, "ValueError: first", "DROPKV_DEBUG=1")


def test_models_lists_aliases(dropkv: Dropkv) -> None:
    records = dropkv("models", "--json").records
    assert records[0]["alias"] == "smollm2-135m"
    assert {"smollm2-135m", "llama-3.1-8b", "mistral-7b-512k", "qwen2.5-7b-1m"} <= {r["alias"] for r in records}
    assert all(set(record) == {"alias", "stands_for", "usable_offline", "note"} for record in records)
    assert next(record for record in records if record["alias"] == "smollm2-135m")["usable_offline"] is True
    table = dropkv("models").out.splitlines()
    assert table[0].split() == ["alias", "stands", "for", "offline", "now", "note"]
    assert len(table) == len(records) + 1
