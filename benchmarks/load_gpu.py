"""A KV file from the page cache to a GPU: the entries of a Mistral-7B shape in bfloat16, random, read as `dropkv.load` with a loaded model does.

    python benchmarks/load_gpu.py [--entries 6554] [--folder /dev/shm] [--repeat 5] [--kinds same,int8] [--token] [--phases]
                                  [--device cuda]

verified:  read_file onto the device, until everything is there: header, index, every hash, pinned buffers, copies
unverified:  the same bytes by the same reads, threads and buffers, nothing parsed and no hash compared
host first:  read_file into host memory, then `Prefix.to` the device: what is done while the model is not loaded yet
hash:  every block's hash computed on as many threads, of bytes that are in a CPU's cache
phases:  with --phases, the parts of verified one after another: header; index (all but keys and values, read and checked); cut (what is wanted
of it); entries (read, checked, their copies begun); rest (until all has arrived)
token:  with --token, verified and then the first token of an answer to a question of 32 tokens; the network has random weights

Seconds are medians, the fastest and the slowest beside them, and the very first; GiB/s are of the file's bytes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from file_speed import DIM, HEADS, LAYERS, coded, entries

from dropkv.cache import Prefix
from dropkv.models import LayerGeometry
from formats import Landing, open_source, read_file, read_header, write_file
from formats.hashing import digest
from formats.header import parse
from formats.landing import read_onto
from formats.reader import read_index
from formats.smaller import cut
from formats.staging import staging


def onto(path: Path, device: torch.device, dtype: torch.dtype, threads: int) -> Prefix:
    """The library's own way."""
    contents = read_file(path, threads=threads, onto=lambda metadata: Landing((device,) * len(metadata.layers), dtype))
    finish(device)
    return Prefix(contents.layers, geometry(), contents.header.metadata.document.tokens)


def geometry() -> list[LayerGeometry]:
    """The layers of the network."""
    return [LayerGeometry("full", 4 * HEADS, HEADS, DIM, DIM, None)] * LAYERS


def host_first(path: Path, device: torch.device, dtype: torch.dtype, threads: int) -> Prefix:
    """All of it in host memory, then layer by layer to the device."""
    contents = read_file(path, threads=threads)
    about = contents.header.metadata
    prefix = Prefix(contents.layers, geometry(), about.document.tokens, about.quantization).to(device, dtype)
    finish(device)
    return prefix


def unverified(path: Path, device: torch.device, threads: int) -> torch.Tensor:
    """The file's bytes on the device."""
    with open_source(path) as source, staging(threads, [device]) as buffers:
        out = torch.empty(source.size, dtype=torch.uint8, device=device)

        def move(start: int) -> None:
            with buffers.pair() as (buffer, _):
                size = min(source.longest, source.size - start)
                source.read_into(start, buffer.take(size))
                buffer.send(0, size, torch.uint8, out[start : start + size])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, range(0, source.size, source.longest)))
    finish(device)
    return out


def hashes(size: int, block: int, threads: int) -> None:
    """As many blocks as the file has."""
    data = memoryview(bytearray(4 << 20))

    def some(start: int) -> None:
        for low in range(0, min(len(data), size - start), block):
            digest(data[low : low + block])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(0, size, len(data))))


def phases(path: Path, device: torch.device, dtype: torch.dtype, threads: int, repeat: int) -> str:
    """Milliseconds of each part of `onto`: medians."""
    runs = []
    for _ in range(repeat + 1):
        marks = [time.perf_counter()]
        with open_source(path) as source:
            header = parse(source)
            marks.append(time.perf_counter())
            index = read_index(source, header, threads)
            marks.append(time.perf_counter())
            smaller = cut(header.metadata, index, header.metadata.budget)
            marks.append(time.perf_counter())
            read = read_onto(source, header, smaller, threads, Landing((device,) * len(header.metadata.layers), dtype))
            marks.append(time.perf_counter())
            finish(device)
            marks.append(time.perf_counter())
        del read
        runs.append([1e3 * (stop - start) for start, stop in pairwise(marks)])
    parts = [f"{statistics.median(times):.1f}" for times in zip(*runs[1:], strict=True)]
    return ", ".join(
        f"{name} {part} ms" for name, part in zip(("header", "index", "cut", "entries", "rest"), parts, strict=True)
    )


def finish(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(name: str, action: Callable[[], object], size: int, repeat: int) -> None:
    """Time an action and print a line; what it makes is dropped before the next time."""
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    first, *rest = times
    median = statistics.median(rest)
    print(
        f"| {name} | {median:.3f} | {min(rest):.3f} to {max(rest):.3f} | {first:.3f} | {size / median / 2**30:.2f} |",
        flush=True,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--entries", type=int, default=6554, help="of each of the 8 heads in each of the 32 layers")
    options.add_argument("--folder", default="/dev/shm", help="where the file goes")
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--kinds", default="same,int8", help="kv-dtypes")
    options.add_argument("--threads", default="2,4,8", help="reading threads that are compared")
    options.add_argument("--phases", action="store_true", help="say what each part of verified takes")
    options.add_argument("--token", action="store_true", help="make a network too and ask for the first token")
    options.add_argument("--device", default="cuda")
    given = options.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = entries(given.entries * LAYERS * HEADS * (4 * DIM + 12) / 2**30)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"{name}, torch {torch.__version__}, {given.entries} entries per head, median of {given.repeat}\n")
    print("| | seconds | from to | first | GiB/s |\n|---|---|---|---|---|")
    with TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "book.kv"
        for kind in given.kinds.split(","):
            about, layers = coded(plain, kind)
            size = write_file(path, about, layers, None, overwrite=True)
            wanted = (Prefix(layers, geometry(), 1, about.quantization)).to(torch.device("cpu"), dtype)
            found = onto(path, device, dtype, 4)
            for one, other in zip(found.layers, wanted.layers, strict=True):
                for field in ("keys", "values", "offsets", "positions"):
                    assert torch.equal(getattr(one, field).cpu(), getattr(other, field)), field
            del found, wanted, one, other
            block = read_header(path).block_bytes
            for threads in map(int, given.threads.split(",")):
                actions = {
                    "verified": partial(onto, path, device, dtype, threads),
                    "unverified": partial(unverified, path, device, threads),
                    "hash": partial(hashes, size, block, threads),
                    "host first": partial(host_first, path, device, dtype, threads),
                }
                for label, action in actions.items():
                    report(f"{label}, {kind}, {threads} threads", action, size, given.repeat)
                if given.phases:
                    print(f"phases, {kind}, {threads} threads: {phases(path, device, dtype, threads, given.repeat)}")
            report(f"header, {kind}", partial(read_header, path), size, given.repeat)
            if given.token:
                report(f"token, {kind}, 4 threads", first_token(path, device, dtype), size, given.repeat)


def first_token(path: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], int]:
    """What opens the file and gives the first token of an answer to a question of 32 tokens."""
    from decode_gpu import QUESTION, mistral

    from dropkv.attention import run_logits
    from dropkv.cache import AnswerRun, Tail

    network = mistral(LAYERS, device).network

    def token() -> int:
        prefix = onto(path, device, dtype, 4)
        with torch.inference_mode():
            ids = torch.arange(200, 200 + QUESTION, device=device)[None]
            places = prefix.n + torch.arange(QUESTION, device=device)[None]
            return int(run_logits(network, ids, places, AnswerRun(prefix, Tail()))[0, -1].argmax())

    return token


if __name__ == "__main__":
    main()
