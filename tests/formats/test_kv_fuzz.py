"""20,000 mutants of good files on every run of the tests; `make fuzz` goes on with other seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.formats.fuzz import Fuzzer, quick_folder

SEED = 20261129
CASES = 20_000


@pytest.fixture
def folder():
    with quick_folder() as name:
        yield Path(name)


def test_no_mutant_crashes_the_reader_or_gets_through(folder):
    fuzzer = Fuzzer(folder, SEED)
    for number in range(CASES):
        try:
            fuzzer.try_one(number)
        except Exception as error:
            pytest.fail(
                f"{type(error).__name__}: {error}; again with `python -m tests.formats.fuzz --seed {SEED} --only {number}`"
            )
    assert sum(fuzzer.outcomes.values()) == CASES
    ends: Counter[str] = Counter()
    for (_, outcome), count in fuzzer.outcomes.items():
        ends[outcome] += count
    # The mutants reach everything: the header's checks, the tensors' checks, and what lies behind them.
    assert ends["header refused"] > CASES / 3 and ends["tensors refused"] > CASES / 10 and ends["accepted"] > CASES / 50
    assert fuzzer.outcomes["bytes", "accepted"] == 0
    assert all(fuzzer.outcomes[kind, "accepted"] for kind in ("numbers", "structure", "shapes"))
