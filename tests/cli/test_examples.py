"""The example documents, the README's commands, and the main job with the real small model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.check_readme import Block, blocks, run
from tests.cli.conftest import ROOT, Dropkv, start_dropkv

EXAMPLES = ROOT / "examples"


def answers(name: str) -> dict[str, str]:
    """Question to fact, from a table in examples/."""
    with open(EXAMPLES / f"{name}-answers.tsv", encoding="utf-8", newline="") as file:
        return {row["question"]: row["answer"] for row in csv.DictReader(file, delimiter="\t")}


@pytest.mark.parametrize("name", ["dark-lamp", "observatory"])
def test_facts_stand_in_the_document_and_questions_agree(name: str) -> None:
    text = " ".join((EXAMPLES / f"{name}.md").read_text(encoding="utf-8").split())
    facts = answers(name)
    assert len(facts) >= 5 and all(fact in text for fact in facts.values())
    lines = (EXAMPLES / f"{name}-questions.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == list(facts)


def test_readme_blocks_are_found() -> None:
    page = """
```sh
make demo
```
```console
$ dropkv compress a.md \\
    -o a.kv
a.md -> a.kv
$ dropkv info a.kv
```
<!-- expect: Marrow; lighthouse -->

```console
$ rm -rf /
```
<!-- not run -->

```console
$ true
```
"""
    first, second = blocks(page)
    assert first == Block(("dropkv compress a.md      -o a.kv", "dropkv info a.kv"), ("Marrow", "lighthouse"))
    assert second == Block(("true",), ())


def test_readme_checker_notices_what_is_missing(tmp_path: Path) -> None:
    assert run(Block(("echo Silas", "echo MARROW >&2"), ("silas marrow",)), tmp_path) == []
    assert run(Block(("echo Silas",), ("Marrow",)), tmp_path) == ["no 'Marrow' in the output of: echo Silas"]
    assert run(Block(("false", "echo Marrow"), ("Marrow",)), tmp_path) == ["exit 1 of: false"]


def test_readme_without_a_promise_fails(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("```console\n$ true\n```\n")
    done = subprocess.run([sys.executable, EXAMPLES / "check_readme.py", page], capture_output=True, text=True)
    assert done.returncode == 1 and "nothing is proved" in done.stderr


@pytest.mark.slow
def test_the_main_job_with_the_real_model(dropkv: Dropkv, tmp_path: Path) -> None:
    """A handbook of 823 tokens, a quarter kept; a new process answers from the file (7 of 8 when this was written)."""
    output = tmp_path / "observatory.kv"
    made = dropkv("compress", EXAMPLES / "observatory.md", "-o", output, "--device", "cpu", "--json")
    assert made.code == 0, made.err
    (record,) = made.records
    assert record["kept_entries"] / record["full_entries"] == pytest.approx(0.25, abs=0.005)
    assert record["full_cache_bytes"] > 3.5 * record["file_bytes"]

    questions = EXAMPLES / "observatory-questions.txt"
    process = start_dropkv(
        "query", output, "-f", questions, "--max-new-tokens", "24", "--device", "cpu", "--json", stdout=subprocess.PIPE
    )
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found = {row["question"]: row["answer"] for row in map(json.loads, printed.splitlines())}
    facts = answers("observatory")
    assert list(found) == list(facts)
    right = [question for question, fact in facts.items() if fact.casefold() in found[question].casefold()]
    assert len(right) >= 5, found
