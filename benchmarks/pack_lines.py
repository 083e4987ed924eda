"""The lines of a bench run as one small file, from which results_table.py prints the same tables.

    python benchmarks/pack_lines.py FOLDER -o benchmarks/lines/NAME.json.gz

FOLDER holds lines.jsonl. Where and when they were measured comes from the bench's machines.jsonl, there or in the folders of accuracy_many.py;
--machine, --versions and --date say it otherwise, --model names a model. What is kept: dropkv/bench/packed.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dropkv.bench.packed import WHERE, pack, write_packed
from dropkv.bench.results import LINES, MACHINES
from dropkv.errors import DropkvError
from dropkv_cli.bench.lines import read_json_lines
from formats.errors import FormatError

PACKAGES = ("dropkv", "torch", "triton", "transformers")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--machine", help='such as "NVIDIA H200"')
    options.add_argument("--versions", help='such as "torch 2.11, transformers 5.17"')
    options.add_argument("--date", help="YYYY-MM-DD")
    options.add_argument("--model", help="a name for a model whose lines bear that of a folder")
    given = options.parse_args()
    where = measured_on(given.folder)
    where |= {name: value for name in WHERE if (value := getattr(given, name)) is not None}
    lacking = [f"--{name}" for name in WHERE if name not in where]
    if lacking:
        options.exit(1, f"{given.folder} does not say where these lines were measured: give {', '.join(lacking)}\n")
    try:
        lines = read_json_lines(given.folder / LINES)
        if given.model:
            lines = [line | {"model": given.model} for line in lines]
        packed = pack(lines, where)
        write_packed(given.output, packed)
    except (DropkvError, FormatError) as error:
        options.exit(getattr(error, "exit_code", 1), f"{error}\n")
    print(f"{given.folder} -> {given.output}: {len(lines):,} lines, {len(packed):,} bytes")


def measured_on(folder: Path) -> dict[str, str]:
    """Machines, versions and dates of a folder and of those in it, each once."""
    notes = [folder / MACHINES, *sorted(folder.glob(f"*/{MACHINES}"))]
    found = [json.loads(line) for note in notes if note.exists() for line in note.read_text("utf-8").splitlines()]
    parts = {
        "machine": [one["device"] for one in found],
        "versions": [", ".join(f"{name} {one[name]}" for name in PACKAGES if one[name]) for one in found],
        "date": sorted(one["date"] for one in found),
    }
    return {name: "; ".join(dict.fromkeys(values)) for name, values in parts.items() if values}


if __name__ == "__main__":
    main()
