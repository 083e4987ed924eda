"""A command that a signal ends leaves no litter and ends as the signal says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, signal, sys
from dropkv_cli.endings import guarded
from formats.temporary import replacing

def action():
    with replacing("x.kv", overwrite=False) as fd:
        os.write(fd, b"half")
        assert len(os.listdir(".")) == 1
        os.kill(os.getpid(), int(sys.argv[1]))
        os.write(fd, b"never reached")

sys.exit(guarded(action))
"""


# Tests that run under nohup or in a shell's background were started with some of these ignored.
HEEDING = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGINT, 130)])
def test_no_litter(tmp_path: Path, number: int, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEEDING + COMMAND, str(int(number))], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == [] and "Traceback" not in done.stderr


def test_nohup_still_works(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = subprocess.run([sys.executable, "-c", ignoring + COMMAND, "1"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.kv").read_bytes() == b"halfnever reached"
