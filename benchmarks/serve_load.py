"""`dropkv serve` under load: many clients ask two files at once, in float32 and in bfloat16, and `dropkv query` gives the answers they must get.

    python benchmarks/serve_load.py [--requests 200] [--clients 20] [--rounds 3] [--dtypes float32,bfloat16] [--device auto] [--model smollm2-135m]

Every other request is a stream. same: answers that are letter for letter those of `dropkv query` one question at a time. mixed: answers that are
another question's or another file's; questions that differ by the number behind them alone count as one, since rounding makes any of their answers
any other's. Memory after each round of requests: of the server's process, and of all programs on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DOCUMENTS = {name: ROOT / "examples" / f"{name}.md" for name in ("dark-lamp", "observatory")}
QUESTIONS = [
    f"{question} ({number})"
    for number in range(5)
    for question in (
        "What is the name of the murderer?",
        "Who is the captain?",
        "Where does it happen?",
        "What was found?",
        "How long did it last?",
    )
]
Key = tuple[str, str]  # a file's name and a question


@dataclass(frozen=True)
class Round:
    """What came of some requests. answers: what was asked and what came; errors: what went wrong."""

    seconds: float
    waits: tuple[float, ...]
    answers: tuple[tuple[Key, str], ...]
    errors: tuple[str, ...]

    def same(self, wanted: Mapping[Key, str]) -> int:
        """Answers that are what they must be."""
        return sum(text == wanted[key] for key, text in self.answers)

    def mixed(self, wanted: Mapping[Key, str]) -> int:
        """Answers that are not theirs, but another question's or another file's."""
        ours: dict[Key, set[str]] = {}
        for key, text in wanted.items():
            ours.setdefault(unnumbered(key), set()).add(text)
        every = set(wanted.values())
        return sum(text in every - ours[unnumbered(key)] for key, text in self.answers)


def unnumbered(key: Key) -> Key:
    """The file and the question without the number behind it."""
    return key[0], key[1].partition(" (")[0]


def dropkv(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    """The command in a process of its own, whose standard output is read."""
    command = [sys.executable, "-m", "dropkv_cli", *map(str, arguments)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, **options)  # type: ignore[call-overload, no-any-return]


def answers(file: Path, options: Sequence[object], tokens: int) -> subprocess.Popen[bytes]:
    """`dropkv query` with all questions, one at a time."""
    return dropkv("query", file, *QUESTIONS, *options, "--max-new-tokens", tokens, "--batch-size", 1, "--json")


def read_answers(process: subprocess.Popen[bytes]) -> list[str]:
    """What it printed."""
    out = process.communicate()[0]
    assert process.returncode == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["question"] for record in records] == QUESTIONS
    return [record["answer"] for record in records]


@contextmanager
def serving(files: Sequence[Path], options: Sequence[object], batch_size: int) -> Iterator[tuple[str, int]]:
    """A server of these files, its address and its process."""
    process = dropkv("serve", *files, *options, "--batch-size", batch_size, "--port", 0, "--json")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server ended"
        yield json.loads(line)["address"], process.pid
    finally:
        process.terminate()
        process.communicate()


def ask(address: str, key: Key, tokens: int, *, stream: bool) -> str:
    """One request and its answer."""
    body = {
        "model": key[0],
        "messages": [{"role": "user", "content": key[1]}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": stream,
    }
    request = urllib.request.Request(
        address + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        if not stream:
            return str(json.load(reply)["choices"][0]["message"]["content"])
        events = [line[6:].strip() for line in reply if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    parts = [json.loads(event) for event in events]
    assert not any("error" in part for part in parts), parts
    return "".join(part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"])


def load(address: str, names: Sequence[str], requests: int, clients: int, tokens: int) -> Round:
    """So many requests by so many clients, each of which asks again when it has its answer."""
    keys = [
        (names[number % len(names)], QUESTIONS[number // len(names) % len(QUESTIONS)]) for number in range(requests)
    ]

    def one(number: int) -> tuple[float, str | None, str]:
        started = time.perf_counter()
        try:
            text, error = ask(address, keys[number], tokens, stream=number % 4 > 1), ""
        except Exception as failure:  # of any kind: all are counted
            text, error = None, f"{type(failure).__name__}: {failure}"
        return time.perf_counter() - started, text, error

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        done = list(pool.map(one, range(requests)))
    return Round(
        time.perf_counter() - started,
        tuple(wait for wait, _, _ in done),
        tuple((key, text) for key, (_, text, _) in zip(keys, done, strict=True) if text is not None),
        tuple(error for _, _, error in done if error),
    )


def resident(process: int) -> float:
    """MiB of a process in memory."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def on_gpu(device: str) -> float:
    """MiB of a GPU that are taken; 0 without one."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--device", default="auto")
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.kv" for name in DOCUMENTS]
        place = ["--model", given.model, "--device", given.device]
        made = ["--budget", "0.25", "--observe", "tail"]
        writing = dropkv("compress", *DOCUMENTS.values(), "-o", f"{folder}/", *place, *made, "--json")
        writing.communicate()
        assert writing.returncode == 0
        for dtype in given.dtypes.split(","):
            whole(files, [*place, "--dtype", dtype], dtype, given)


def whole(files: Sequence[Path], place: Sequence[object], dtype: str, given: argparse.Namespace) -> None:
    """All rounds in one type of numbers."""
    wanted: dict[Key, str] = {}
    asking = [answers(file, place, given.tokens) for file in files]
    started = time.perf_counter()
    with serving(files, place, given.batch_size) as (address, process):
        ready = time.perf_counter() - started
        for file, one in zip(files, asking, strict=True):
            wanted |= {(file.stem, question): text for question, text in zip(QUESTIONS, read_answers(one), strict=True)}
        print(
            f"{dtype}: ready after {ready:.1f} s; {resident(process):.0f} MiB, {on_gpu(given.device):.0f} MiB on the GPU"
        )
        for number in range(given.rounds):
            done = load(address, [file.stem for file in files], given.requests, given.clients, given.tokens)
            waits = sorted(done.waits)
            print(
                f"{dtype}, round {number + 1}: {given.requests} requests of {given.clients} clients in {done.seconds:.2f} s, "
                f"median {statistics.median(waits):.2f} s, longest {waits[-1]:.2f} s; {len(done.errors)} errors, "
                f"{done.same(wanted)} same, {done.mixed(wanted)} mixed; "
                f"{resident(process):.0f} MiB, {on_gpu(given.device):.0f} MiB on the GPU",
                flush=True,
            )
            for error in sorted(set(done.errors))[:3]:
                print(error)


if __name__ == "__main__":
    main()
