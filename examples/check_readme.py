"""Run the commands that README.md shows, in order, and check that the facts it promises come out.

A block starts with ```console; its lines that start with "$ " are commands (a trailing backslash goes on in the next
line), the others are the output a reader sees and are not compared word for word. A comment
`<!-- expect: one fact; another -->` after a block names what must occur in what its commands print, whatever the
case. `<!-- not run -->` after a block skips it.

    python examples/check_readme.py README.md
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```console\n(.*?)^```[ \t]*$(?:\s*<!--(.*?)-->)?", re.MULTILINE | re.DOTALL)
SKIP = "not run"
SECONDS = 600


@dataclass(frozen=True)
class Block:
    """The commands of one transcript and what their output must contain."""

    commands: tuple[str, ...]
    expected: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    """All transcripts of a page that are to be run, in order."""
    found = []
    for body, comment in BLOCK.findall(text):
        note = comment.strip()
        if note == SKIP:
            continue
        facts = note.removeprefix("expect:").split(";") if note.startswith("expect:") else []
        commands = re.findall(r"^\$ (.*)$", body.replace("\\\n", " "), re.MULTILINE)
        found.append(Block(tuple(commands), tuple(fact.strip() for fact in facts if fact.strip())))
    return found


def run(block: Block, folder: Path) -> list[str]:
    """Run a block's commands in `folder`; what went wrong, one line each."""
    output = ""
    for command in block.commands:
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        printed = done.stdout + done.stderr
        print(printed, end="", flush=True)
        output += printed
        if done.returncode != 0:
            return [f"exit {done.returncode} of: {command}"]
    # Answers are wrapped and styled differently from run to run: compare words, not layout.
    plain = " ".join(output.split()).casefold()
    missing = [fact for fact in block.expected if fact.casefold() not in plain]
    return [f"no {fact!r} in the output of: {block.commands[-1]}" for fact in missing]


def main(arguments: list[str]) -> int:
    """Check one page; the exit status is 1 when anything it promises is not so."""
    page = Path(arguments[0] if arguments else "README.md")
    todo = [block for block in blocks(page.read_text(encoding="utf-8")) if block.commands]
    if not any(block.expected for block in todo):
        print(f"{page}: no transcript with an expectation, nothing is proved", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "dropkv")
        # The page speaks of examples/NAME from the repository's root.
        shutil.copytree(EXAMPLES, folder / "examples")
        problems = [problem for block in todo for problem in run(block, folder)]
    for problem in problems:
        print(f"{page}: {problem}", file=sys.stderr)
    facts = sum(len(block.expected) for block in todo)
    print(f"{page}: {len(todo)} transcripts, {facts} facts, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
