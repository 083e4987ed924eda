"""Running the real commands: in this process for most, in one of its own where start-up, signals or a terminal matter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dropkv_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711. The ship is Evergreen.\n\n" * 3
SETTINGS = ("--budget", "0.5", "--chunk", "32")


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines; fails on anything else."""
        return [json.loads(line) for line in self.out.splitlines()]

    def failed_with(self, code: int, *words: str) -> None:
        """Assert an expected failure: this code, nothing on standard output, one line that has these words."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("dropkv: ") and self.err.count("\n") == 1, self.err
        for word in words:
            assert word in self.err, (word, self.err)


Dropkv = Callable[..., Result]


def run_dropkv(*arguments: object, stdin: bytes = b"") -> Result:
    """Run the command line in this process, as the script `dropkv` does."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    finally:
        sys.stdin = before
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    assert isinstance(ended.value.code, int)
    return Result(ended.value.code, *texts)


def start_dropkv(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command line in a process of its own."""
    command = [sys.executable, "-m", "dropkv_cli", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.Popen(command, env=environment, preexec_fn=heed_ctrl_c, **options)


def heed_ctrl_c() -> None:
    """A shell's background job, which a test run may be, ignores Ctrl-C and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def dropkv(monkeypatch: pytest.MonkeyPatch) -> Dropkv:
    """The command line, without variables that change its defaults."""
    for name in [name for name in os.environ if name.startswith("DROPKV_") and name != "DROPKV_CACHE"]:
        monkeypatch.delenv(name)
    return run_dropkv


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny random model to a folder that transformers can load."""
    from tests import tiny

    def save(*, endless: bool = False, **changes: Any) -> Path:
        """endless: greedy answers never stop, since some logit is always above the 0 of what would stop them."""
        folder = tmp_path_factory.mktemp("model")
        network, tokenizer = tiny.network(**changes), tiny.tokenizer()
        if endless:
            network.lm_head.weight.data[[network.config.eos_token_id, tokenizer.eos_token_id]] = 0
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path]) -> Path:
    """A tiny random Llama with 512 positions."""
    return make_model()


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A short document."""
    path = tmp_path / "harbour.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def made_once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "harbour.txt").write_text(TEXT)
    made = run_dropkv("compress", folder / "harbour.txt", "-o", folder / "harbour.kv", "--model", model, *SETTINGS)
    assert made.code == 0, made.err
    return folder / "harbour.kv"


@pytest.fixture
def kv(made_once: Path, tmp_path: Path) -> Path:
    """A KV file of the short document, for this test alone."""
    return Path(shutil.copy(made_once, tmp_path / "harbour.kv"))
