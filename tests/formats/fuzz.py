"""Fuzzing the reader: `make fuzz`, or python -m tests.formats.fuzz [--seconds 300] [--seed N] [--cases N] [--only I].

What must hold of every mutant (mutation.py):

* the reader accepts it or raises a FormatError of one printable line that names the file and a fix; nothing else;
* one that was changed without its hashes is accepted only if it is the good file byte for byte, and one whose zstd frames
  were changed, hashes of what is stored made right, only if it holds what the good file holds (a frame has other spellings);
* an accepted one is well-formed: its index tensors keep the rules of FORMAT.md, checked here in plain Python, and the
  writer makes of what was read exactly the mutant's bytes again, so no byte of it was overlooked or understood otherwise;
* one that is not compressed and whose numbers alone were changed, hashes made right, is accepted if and only if those rules hold;
* read_header, read_file and verify_file agree, and reading a smaller budget gives the same entries, or a FormatError.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from formats import Contents, FormatError, Header, LayerEntries, read_file, read_header, verify_file, write_file
from formats.entries import raw_bytes
from tests.formats.conftest import Forgery
from tests.formats.mutation import LEVEL, Mutant, corpus, is_raw, mutant

HEADER_KEYS = (
    "format_version", "oldest_reader", "writer", "model", "tokenizer", "document", "method", "observer", "budget", "layers",
    "dtype", "rope", "fidelity", "quantization", "block_bytes", "zstd", "tensors",
)  # fmt: skip
ENTRIES = ("positions", "admit", "scores", "keys", "values")


class Fuzzer:
    """Mutants of one seed, each put to the reader in `folder`; `outcomes` counts how they ended."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.path, self.again = folder / "mutant.kv", folder / "again.kv"
        self.bases = corpus(folder)
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def try_one(self, number: int) -> None:
        """Raises AssertionError, or whatever the reader should not have raised."""
        made = mutant(self.bases, self.seed, number)
        self._write(made.data)
        header = self._header()
        if header is None and number % 20:
            self.outcomes[made.kind, "header refused"] += 1
            return  # read_file begins with the same header; one in twenty is looked at all the same
        contents = self._contents(also_verify=number % 4 == 0)
        if contents is None:
            self.outcomes[made.kind, "header refused" if header is None else "tensors refused"] += 1
            assert made.kind != "numbers" or not rules_hold(made.data), "a well-formed file was refused"
            if header is not None and number % 3 == 0:
                self._smaller(header)
            return
        assert header is not None and header == contents.header
        self.outcomes[made.kind, "the same" if made.data == made.base else "accepted"] += 1
        self._check_acceptance(made, contents)

    def _header(self) -> Header | None:
        try:
            return read_header(self.path)
        except FormatError as error:
            self._check_message(error)
            return None

    def _write(self, data: bytes) -> None:
        """Over the last mutant: emptying a file and filling it again costs a flush on some file systems."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)

    def _contents(self, *, also_verify: bool) -> Contents | None:
        try:
            return read_file(self.path, threads=1)
        except FormatError as error:
            self._check_message(error)
            if not also_verify:
                return None
        try:
            verify_file(self.path, threads=1)
        except FormatError:
            return None
        raise AssertionError("verify_file accepts what read_file refuses")

    def _smaller(self, header: Header) -> Contents | None:
        """About half the budget, where the file has smaller ones; its own otherwise."""
        own = header.metadata.budget
        kept = (own.kept + 1) // 2 if own.nested else own.kept
        try:
            return read_file(self.path, choose=lambda _: replace(own, asked=kept, kept=kept), threads=1)
        except FormatError as error:
            self._check_message(error)
            return None

    def _check_message(self, error: FormatError) -> None:
        line = str(error)
        assert line.startswith(f"{self.path}: ") and line.isprintable() and "; " in line, line
        assert len(line) < len(str(self.path)) + 700, line
        assert error.exit_code == 1

    def _check_acceptance(self, made: Mutant, contents: Contents) -> None:
        assert made.kind != "bytes" or made.data == made.base, "a changed byte went unseen"
        verify_file(self.path, threads=1)
        assert rules_hold(made.data), "accepted against the rules of FORMAT.md"
        header = contents.header
        smaller = self._smaller(header)
        assert smaller is not None, "a smaller budget of a good file was refused"
        for whole, part in zip(contents.layers, smaller.layers, strict=True):
            assert heads(part) == [head[: len(kept)] for head, kept in zip(heads(whole), heads(part), strict=True)]
        write_file(
            self.again,
            header.metadata,
            contents.layers,
            contents.tokens,
            overwrite=True,
            block_bytes=header.block_bytes,
            zstd=None if header.zstd is None else LEVEL,
        )
        wanted = made.base if made.kind == "frames" else as_known_version(made.data)
        assert self.again.read_bytes() == wanted, "read otherwise than it is written"


def heads(layer: LayerEntries) -> list[list[tuple[bytes, ...]]]:
    """Each entry of each head: where it is from, and the bytes of its key and value as they are stored."""
    entries = list(zip(*(rows_of(getattr(layer, field)) for field in ENTRIES), strict=True))
    return [entries[start:stop] for start, stop in pairwise(layer.offsets.tolist())]


def rows_of(tensor: Tensor) -> list[bytes]:
    """The bytes of each row; without any for a tensor without entries."""
    return pieces(bytes(raw_bytes(tensor)), tensor[:1].numel() * tensor.element_size()) if tensor.numel() else []


def as_known_version(data: bytes) -> bytes:
    """The file without what a newer writer may have added, which readers skip."""
    forged = Forgery.from_bytes(data)
    forged.about = {key: forged.about[key] for key in HEADER_KEYS if key in forged.about}
    forged.about["format_version"] = forged.about["oldest_reader"]
    if forged.about.get("zstd") is not None:
        forged.about["zstd"] = LEVEL  # says only how the frames came to be
    return forged.bytes()


def rules_hold(data: bytes) -> bool:
    """Whether the numbers of a file whose structure is right keep the rules of FORMAT.md."""
    forged = Forgery.from_bytes(data)
    about, n = forged.about, forged.about["document"]["tokens"]

    def numbers(name: str) -> tuple[float, ...]:
        code = "f" if name.endswith("scores") else "i"
        span = bytes(forged.data[forged.span(name)])
        return struct.unpack(f"<{len(span) // 4}{code}", span)

    counts = [about["document"][key] for key in ("tokens", "head_tokens", "whole_tokens")]
    counts += [about["budget"][key] for key in ("kept", "forced_first", "forced_last")]
    counts += [layer[key] for layer in about["layers"] for key in ("query_heads", "kv_heads", "d_k", "d_v", "entries")]
    if not is_raw(data):
        return True  # their numbers are not there to be seen
    if any(type(count) is not int or count < 0 for count in counts):
        return False
    good = "tokens" not in forged.table or min(numbers("tokens")) >= 0
    for index, layer in enumerate(about["layers"]):
        offsets, positions, admit, scores = (
            numbers(f"layers.{index}.{name}") for name in ("offsets", "positions", "admit", "scores")
        )
        low, high = (1, about["budget"]["kept"]) if layer["kind"] == "full" else (0, n)
        good &= offsets[0] == 0 and offsets[-1] == layer["entries"] and list(offsets) == sorted(offsets)
        good &= all(0 <= position < n for position in positions) and all(low <= value <= high for value in admit)
        good &= all(map(math.isfinite, scores))
        if good:
            heads = [slice(int(start), int(stop)) for start, stop in pairwise(offsets)]
            good &= all(len(set(positions[head])) == len(positions[head]) for head in heads)
            good &= all(list(admit[head]) == sorted(admit[head]) for head in heads)
            good &= about["quantization"] is None or codes_hold(
                forged, index, [head.stop - head.start for head in heads]
            )
    return good


def codes_hold(forged: Forgery, index: int, counts: list[int]) -> bool:
    """Whether a layer's codes and grids are what FORMAT.md allows, and its groups those that heads of so many entries make."""
    quantization, layer = forged.about["quantization"], forged.about["layers"][index]

    def read(field: str) -> bytes:
        return bytes(forged.data[forged.span(f"layers.{index}.{field}")])

    def wide(data: bytes) -> list[float]:
        """bfloat16 as the first half of a float32."""
        return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]

    good = quantization["key_groups"][index] == sum(-(-count // quantization["key_group"]) for count in counts)
    for part, channels in (("key", layer["d_k"]), ("value", layer["d_v"])):
        good &= all(scale == 0 or 2.0**-126 <= scale <= 2.0**118 for scale in wide(read(f"{part}_scales")))
        good &= b"\0\x80" not in pieces(read(f"{part}_scales"), 2)
        if quantization["kind"] == "fp8":
            good &= all(code & 0x7F != 0x7F for code in read(f"{part}s"))
            continue
        good &= all(abs(zero) <= 2.0**121 for zero in wide(read(f"{part}_zeros")))
        good &= b"\0\x80" not in pieces(read(f"{part}_zeros"), 2)
        if quantization["kind"] == "int4" and channels % 2:
            good &= all(row[-1] < 16 for row in pieces(read(f"{part}s"), (channels + 1) // 2))
    return good


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def quick_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory where there is one: thousands of files are written and flushed."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def main() -> int:
    """Fuzz for a time or a number of cases; gives the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=300, help="how long (default %(default)s)")
    options.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="default: another each time"
    )
    options.add_argument("--cases", type=int, default=None, help="stop after so many mutants")
    options.add_argument("--only", type=int, default=None, help="try this one mutant of the seed")
    chosen = options.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with quick_folder() as folder:
        fuzzer = Fuzzer(Path(folder), chosen.seed)
        number, until = chosen.only or 0, time.monotonic() + chosen.seconds
        last = chosen.only + 1 if chosen.only is not None else chosen.cases
        while (last is None or number < last) and (chosen.only is not None or time.monotonic() < until):
            try:
                fuzzer.try_one(number)
            except Exception as error:
                kept = Path(f"fuzz-{chosen.seed}-{number}.kv")
                kept.write_bytes(mutant(fuzzer.bases, chosen.seed, number).data)
                print(
                    f"{type(error).__name__}: {error}\nmutant kept as {kept}; again with --seed {chosen.seed} --only {number}"
                )
                if chosen.only is not None:
                    raise
                return 1
            number += 1
        print(f"{number - (chosen.only or 0)} mutants, none got through")
        for (kind, outcome), count in sorted(fuzzer.outcomes.items()):
            print(f"  {kind:<10} {outcome:<16} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
