"""The lines of a bench run as one small file, from which results_table.py prints the same tables.

    python benchmarks/pack_lines.py FOLDER -o benchmarks/lines/NAME.json.gz

FOLDER holds lines.jsonl and, where accuracy_many.py made it, machine.json, which says where and when it was measured; for other folders
--machine, --versions and --date say it. What is kept: dropkv/bench/packed.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dropkv.bench.packed import WHERE, pack
from dropkv.bench.results import LINES
from dropkv.errors import DropkvError
from dropkv_cli.bench.lines import read_json_lines
from formats.errors import FormatError, naming
from formats.temporary import replacing


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--machine", help='such as "NVIDIA H200"')
    options.add_argument("--versions", help='such as "torch 2.11, transformers 5.17"')
    options.add_argument("--date", help="YYYY-MM-DD")
    given = options.parse_args()
    noted = given.folder / "machine.json"
    where = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
    where |= {name: value for name in WHERE if (value := getattr(given, name)) is not None}
    lacking = [f"--{name}" for name in WHERE if name not in where]
    if lacking:
        options.exit(1, f"{noted} does not say where these lines were measured: give {', '.join(lacking)}\n")
    try:
        lines = read_json_lines(given.folder / LINES)
        packed = pack(lines, where)
        with (
            naming(given.output),
            replacing(given.output, overwrite=True) as target,
            open(target, "wb", closefd=False) as file,
        ):
            file.write(packed)
    except (DropkvError, FormatError) as error:
        options.exit(getattr(error, "exit_code", 1), f"{error}\n")
    print(f"{given.folder} -> {given.output}: {len(lines):,} lines, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
