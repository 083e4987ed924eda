"""Run by test_window_kernels.py in a process of its own: whether Triton interprets is decided when a kernel is made.

python tests/dropkv/check_window_select.py [DEVICE]
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.budgets import forced_positions, select
from dropkv.keeper import take
from dropkv.kernels import window_select, window_sort
from dropkv.kernels.window_gather import gather_entries
from dropkv.kernels.window_select import select_entries
from dropkv.methods import Pool

FIELDS = ("keys", "values", "offsets", "positions", "admit", "scores")


def cases(draw, device):
    """(name, scores, count, first forced, last forced, pool): smooth ones, and every kind of tie."""
    yield "plain", draw(2, 600), 60, 4, 8, 11
    yield "all equal", torch.zeros(2, 150, device=device), 40, 0, 8, 5
    yield "few levels", (draw(4, 90) * 2).round(), 37, 3, 5, 1
    yield "few levels pooled", (draw(2, 300) * 3).round(), 70, 0, 8, 11
    yield "zeros of both signs", draw(2, 100).clamp(max=0) * draw(2, 100).sign(), 50, 0, 2, 1
    yield "one loud head", torch.cat([draw(1, 100).abs() * 1e20, draw(2, 100) * 1e-30]), 20, 0, 8, 3
    yield "infinite", torch.cat([draw(1, 60), torch.full((1, 60), -torch.inf, device=device)]), 20, 1, 1, 1
    yield "nothing forced", draw(1, 60), 1, 0, 0, 1
    yield "all but one", draw(2, 40), 39, 4, 4, 5
    if device != "cpu":
        yield "long", draw(8, 30_001), 1500, 4, 8, 11
        yield "long, few levels", (draw(6, 9_000) * 20).round(), 4_500, 4, 8, 5
        yield "many heads", draw(40, 3000), 300, 4, 8, 11


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    seed = 5 if device == "cpu" else int.from_bytes(os.urandom(4))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    if device == "cpu":  # several blocks and tiles of small inputs
        window_sort.SORTED, window_sort.MINE, window_sort.MERGED, window_select.SPARE = 16, 16, 4, 20
    for name, scores, count, first, last, size in cases(draw, device):
        heads, n = scores.shape
        pool, forced = Pool("max", size), forced_positions(n, first, last)
        pooled = pool(scores)
        k, v = draw(heads, n, 24), draw(heads, n, 16).half()
        alphas = (0.2,) if device == "cpu" and "pooled" not in name else (0.0, 0.75)
        uniform = (("uniform", 0.2),) if name in ("plain", "few levels pooled") or device != "cpu" else ()
        for rule, alpha in (*uniform, *(("head-adaptive", alpha) for alpha in alphas)):
            want = select(pooled.cpu(), count, forced=forced, rule=rule, alpha=alpha, unpooled=scores.cpu())
            options = {"forced": forced, "rule": rule, "alpha": alpha}
            got = select_entries(scores, count, pool=size, **options)
            for other in (
                (got, select_entries(scores, count, pooled=pooled, **options))
                if name == "plain" and rule == "uniform"
                else (got,)
            ):
                assert other is not None
                same = [
                    torch.equal(getattr(other, f).cpu(), getattr(want, f)) for f in ("counts", "positions", "admit")
                ]
                assert all(same), (name, rule, alpha, same)
            entries, plain = gather_entries(k, v, got, scores), take(k.cpu(), v.cpu(), want, scores.cpu())
            for field in FIELDS:
                one, other = getattr(entries, field).cpu(), getattr(plain, field)
                assert one.dtype == other.dtype and torch.equal(one, other), (name, rule, field)
        print(name, "equal")
    assert select_entries(draw(2, 30), 30, forced=[29], rule="uniform", alpha=0.2) is None
    assert select_entries(draw(2, 30), 9, forced=[29, 14], rule="uniform", alpha=0.2) is None
    print("all equal")


if __name__ == "__main__":
    main()
