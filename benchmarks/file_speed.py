"""The KV file against the disk: writing and verified reading as shares of a plain copy, memory, and how fast entries are restored.

    python benchmarks/file_speed.py [--gib 0.8] [--folder /tmp] [--repeat 5] [--kv-dtypes same,int8,int4,fp8] [--zstd 3] [--device cpu]

copy:   a file of the same size copied by read and write calls of 4 MiB and flushed to the disk, as writing is
write:  write_file of entries in memory, hashes and flush included
read:   the copied file, and the KV file, read from the page cache into new memory; the KV file with every hash compared
restore:  entries moved to the device and turned into the compute dtype (float32 on a CPU, else bfloat16); load is read and restore
Rates are of stored bytes, medians; each round does all of them, so that the ratios belong to one moment. Memory is the growth of the
resident set's peak beyond the entries themselves, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from formats import (
    BudgetInfo,
    DocumentInfo,
    LayerEntries,
    LayerInfo,
    Metadata,
    ModelIdentity,
    TokenizerIdentity,
    read_file,
    write_file,
)
from formats.quantized import describe, quantize, restore_all

LAYERS, HEADS, DIM = 32, 8, 128  # the shape of an 8B model
RUN = 4 << 20


def entries(gib: float) -> list[LayerEntries]:
    """Layers of entries in bfloat16 whose values look like those of a cache: channels of different sizes, exponents that compress."""
    each = round(gib * 2**30 / (LAYERS * HEADS * (4 * DIM + 12)))
    generator = torch.Generator().manual_seed(0)
    total = each * HEADS
    size = torch.rand(DIM, generator=generator) * 2 + 0.1
    offsets = torch.arange(HEADS + 1, dtype=torch.int32) * each
    admit = (torch.arange(each, dtype=torch.int32) + 1).repeat(HEADS)
    layers = []
    for _ in range(LAYERS):
        keys, values = (torch.randn(total, DIM, generator=generator).mul_(size).bfloat16() for _ in range(2))
        order = torch.cat([torch.randperm(each, generator=generator) for _ in range(HEADS)]).int()
        layers.append(LayerEntries(keys, values, offsets, order, admit, torch.rand(total, generator=generator)))
    return layers


def metadata(layers: list[LayerEntries]) -> Metadata:
    """A description that goes with the entries."""
    each = layers[0].positions.numel() // HEADS
    return Metadata(
        writer="benchmark",
        model=ModelIdentity("none", "folder", None, "none", {}, "", {}),
        tokenizer=TokenizerIdentity("", "", {}, None),
        document=DocumentInfo("none", "0" * 64, each, 0, each),
        method={},
        observer={},
        budget=BudgetInfo(1.0, each, "uniform", None, 0, 0, True),
        layers=tuple(LayerInfo("full", 4 * HEADS, HEADS, DIM, DIM, None, each * HEADS) for _ in layers),
        dtype="bfloat16",
        rope={},
        fidelity=None,
    )


def coded(layers: list[LayerEntries], kind: str) -> tuple[Metadata, list[LayerEntries]]:
    """Entries as a kv-dtype stores them, and their description."""
    about = metadata(layers)
    if kind == "same":
        return about, layers
    chosen = describe(kind, [layer.offsets.tolist() for layer in layers])
    return replace(about, quantization=chosen), [quantize(layer, chosen) for layer in layers]


def stored_bytes(layers: list[LayerEntries]) -> int:
    """Bytes of keys and values as they are stored, grids included, and 12 for each entry."""
    parts = ("keys", "values", "key_scales", "key_zeros", "value_scales", "value_zeros")
    found = [getattr(layer, part) for layer in layers for part in parts]
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in found if tensor is not None)
    return bytes_ + 12 * sum(layer.positions.numel() for layer in layers)


def copy(source: Path, target: Path) -> None:
    """A plain copy, flushed."""
    with open(source, "rb", buffering=0) as one, open(target, "wb", buffering=0) as other:
        buffer = bytearray(RUN)
        while got := one.readinto(buffer):
            other.write(memoryview(buffer)[:got])
        os.fsync(other.fileno())


def plain_read(path: Path) -> None:
    """All bytes into new memory."""
    size = path.stat().st_size
    memory = torch.empty(size, dtype=torch.uint8).numpy().data
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < size:
            done += file.readinto(memory[done : done + RUN])


def timed(action: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action(*arguments, **options)
    return time.perf_counter() - started


MEMORY = """
import pathlib, re, sys
sys.path.insert(0, "benchmarks")
import file_speed, formats
path, gib, task, zstd = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4]) or None
def status(name): return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
small, layers = (file_speed.entries(size) for size in (0.001, gib if task == "write" else 0.001))
formats.write_file(path + ".small", file_speed.metadata(small), small, None, zstd=zstd, overwrite=True)
formats.read_file(path + ".small")  # whatever is loaded and started the first time
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before, held = status("VmRSS"), 0
if task == "write":
    formats.write_file(path, file_speed.metadata(layers), layers, None, zstd=zstd)
else:
    contents = formats.read_file(path)
    held = sum(info.size for info in contents.header.tensors.values())
print(status("VmHWM") - before - held)
"""


def memory(path: Path, gib: float, task: str, zstd: int) -> float:
    """MiB beyond the entries at the peak of writing or reading, in a new process."""
    command = [sys.executable, "-c", MEMORY, str(path), str(gib), task, str(zstd)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) / 2**20


def raw_file(plain: list[LayerEntries], root: Path, repeat: int) -> None:
    """Print rates of the file that is neither quantised nor compressed."""
    rates: dict[str, list[float]] = defaultdict(list)
    about, path, copied = metadata(plain), root / "plain.kv", root / "copied"
    size = write_file(path, about, plain, None)
    for number in range(repeat + 1):  # the first round warms up
        seconds = {
            "copy": timed(copy, path, copied),
            "write": timed(write_file, root / "written.kv", about, plain, None, overwrite=True),
            "plain read": timed(plain_read, copied),
            "verified read": timed(read_file, path),
        }
        for name, taken in seconds.items():
            rates[name] += [size / taken] if number else []
    print(f"raw file of {size / 2**30:.2f} GiB\n\n| | GiB/s | of copy | of plain read |\n|---|---|---|---|")
    for name, found in rates.items():
        to_copy, to_read = (
            statistics.median(a / b for a, b in zip(found, rates[other], strict=True))
            for other in ("copy", "plain read")
        )
        print(f"| {name} | {statistics.median(found) / 2**30:.2f} | {to_copy:.2f} | {to_read:.2f} |")
    for one in (path, copied, root / "written.kv"):
        one.unlink()


def coded_files(
    plain: list[LayerEntries], root: Path, kinds: list[str], levels: list[int | None], repeat: int, device: torch.device
) -> None:
    """Print sizes and seconds of every kind and level; the time to read and restore is compared with that of the first cell."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    numbers = 2 * sum(layer.keys.numel() for layer in plain)
    print(
        "| kv-dtype | zstd | bytes | / entries x (K + V + 12) | write s | read s | restore s | 1e9 numbers/s | load / first |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    first = 0.0
    for kind in kinds:
        about, stored = coded(plain, kind)
        for level in levels:
            path = root / "coded.kv"
            writes, reads, restores = [], [], []
            for _ in range(repeat):
                writes.append(timed(write_file, path, about, stored, None, overwrite=True, zstd=level))
                reads.append(timed(read_file, path))
                contents = read_file(path)
                restores.append(timed(restored, contents.layers, contents.header.metadata, device, dtype))
            write, read, restore_ = (statistics.median(times) for times in (writes, reads, restores))
            first = first or read + restore_
            share = path.stat().st_size / stored_bytes(stored)
            print(
                f"| {kind} | {level or '-'} | {path.stat().st_size:,} | {share:.4f} | {write:.2f} | {read:.2f} | {restore_:.2f} "
                f"| {numbers / restore_ / 1e9:.2f} | {(read + restore_) / first:.2f} |",
                flush=True,
            )
            path.unlink()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=0.8)
    options.add_argument("--folder", default=None, help="where the files go; its disk is what is measured")
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--kv-dtypes", default="same,int8,int4,fp8")
    options.add_argument("--zstd", type=int, default=3, help="level of the compressed files; 0 leaves them out")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    plain = entries(given.gib)
    levels = [None, given.zstd] if given.zstd else [None]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    print(f"{machine}, {given.device}, torch {torch.__version__}, median of {given.repeat}\n")
    with TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder)
        raw_file(plain, root, given.repeat)
        print("\nMiB of memory beyond the entries:", end="")
        for level in levels:
            found = [memory(root / "memory.kv", given.gib, task, level or 0) for task in ("write", "read")]
            print(f" zstd {level or '-'}: write {found[0]:.0f}, read {found[1]:.0f};", end="")
            (root / "memory.kv").unlink()
        print("\n")
        coded_files(plain, root, given.kv_dtypes.split(","), levels, given.repeat, torch.device(given.device))


def restored(layers: tuple[LayerEntries, ...], about: Metadata, device: torch.device, dtype: torch.dtype) -> None:
    """All layers on the device in the compute dtype, as opening a file does it."""
    if about.quantization is None:
        moved = [(layer.keys.to(device, dtype), layer.values.to(device, dtype)) for layer in layers]
        assert len(moved) == LAYERS
    else:
        restore_all(layers, about.quantization, [(DIM, DIM)] * LAYERS, device, dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
