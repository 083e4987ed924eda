"""How long a command takes from its start to its end: `dropkv --help`, `dropkv info` of a small and of a large file, and `dropkv query`.

    python benchmarks/startup.py [--repeat 15] [--query 5]

The small file has 3 layers. The large one is of the shape of 6,554 entries of each KV head of a 7B model (32 layers, 8 KV heads of 128),
0.9 GB; its data are holes, as info reads the header alone. query: one question to the small model on a CPU, 16 tokens of answer, beside a
process that does nothing but load that model; --query says how often, 0 leaves it out. Wall time is of a machine that may be busy,
processor time is not.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from formats import BudgetInfo, DocumentInfo, LayerInfo, Metadata, ModelIdentity, TokenizerIdentity, layout
from formats import header as headers

ROOT = Path(__file__).resolve().parents[1]


def metadata(layers: int, kv_heads: int, dim: int, entries: int) -> Metadata:
    """Metadata of a plain file with so many entries of each KV head."""
    return Metadata(
        writer="dropkv",
        model=ModelIdentity("a/b", "hub", "0" * 40, "MistralForCausalLM", {}, "0" * 32, {"samples": "A" * 12_416}),
        tokenizer=TokenizerIdentity("0" * 32, "0" * 32, {}, None),
        document=DocumentInfo("book.txt", "0" * 64, 20 * entries, 4, 20 * entries),
        method={"name": "adadropkv"},
        observer={"name": "replay"},
        budget=BudgetInfo(0.05, entries, "head-adaptive", 0.2, 4, 8, True),
        layers=(LayerInfo("full", 4 * kv_heads, kv_heads, dim, dim, None, kv_heads * entries),) * layers,
        dtype="bfloat16",
        rope={"rope_type": "default", "rope_theta": 1e6},
        fidelity=None,
    )


def write_hollow(path: Path, about: Metadata) -> int:
    """A file with a right header and no data: good enough for info."""
    infos = layout.plan(about, True)
    step = layout.DEFAULT_BLOCK_BYTES
    hashes = {info.name: ["0" * 32] * layout.block_count(info.size, step) for info in infos}
    head = headers.build(about, [replace(info) for info in infos], hashes, step)
    path.write_bytes(head)
    os.truncate(path, len(head) + infos[-1].stop)
    return path.stat().st_size


def timed(arguments: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def query(folder: Path, repeat: int) -> None:
    """A question as a whole process, against one that loads the model: times, and their ratio."""
    kv = folder / "lamp.kv"
    document = ROOT / "examples" / "dark-lamp.md"
    own = ["--device", "cpu", "--dtype", "float32"]
    dropkv = ["-m", "dropkv_cli"]
    timed([*dropkv, "compress", str(document), "-o", str(kv), "--budget", "0.25", "--observe", "tail", *own])
    asked = [*dropkv, "query", str(kv), "Who is the murderer?", "--max-new-tokens", "16", *own]
    load = "import dropkv; dropkv.load_model('smollm2-135m', device='cpu', dtype='float32')"
    commands = {"model loaded": ["-c", load], "dropkv query": asked}
    for arguments in commands.values():
        timed(arguments)
    runs = [{name: timed(arguments) for name, arguments in commands.items()} for _ in range(repeat)]
    for name in commands:
        walls, cpus = zip(*(run[name] for run in runs), strict=True)
        print(f"{name:<22} {statistics.median(walls):.3f} s wall  {statistics.median(cpus):.3f} s processor")
    ratios = [[run["dropkv query"][kind] / run["model loaded"][kind] for run in runs] for kind in (0, 1)]
    print(
        f"query over load        {statistics.median(ratios[0]):.2f} x wall    {statistics.median(ratios[1]):.2f} x processor"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=15)
    options.add_argument("--query", type=int, default=5)
    given = options.parse_args()
    repeat = given.repeat
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.kv", Path(folder) / "large.kv"
        write_hollow(small, metadata(3, 2, 16, 40))
        size = write_hollow(large, metadata(32, 8, 128, 6554))
        dropkv = ["-m", "dropkv_cli"]
        commands = {
            "python alone": ["-c", "pass"],
            "dropkv --help": [*dropkv, "--help"],
            "dropkv info, small": [*dropkv, "info", str(small)],
            f"dropkv info, {size / 1e9:.1f} GB": [*dropkv, "info", str(large)],
        }
        print(
            f"Python {platform.python_version()}, {platform.machine()}, median of {repeat}, load {os.getloadavg()[0]:.1f}"
        )
        for name, arguments in commands.items():
            timed(arguments)
            walls, cpus = zip(*(timed(arguments) for _ in range(repeat)), strict=True)
            print(f"{name:<22} {statistics.median(walls):.3f} s wall  {statistics.median(cpus):.3f} s processor")
        if given.query:
            query(Path(folder), given.query)


if __name__ == "__main__":
    main()
