"""Scoring, selecting and gathering the entries of one layer on a GPU, as ratios to one read of its K and V.

    python benchmarks/score_kernel.py [--tokens 131072,16384] [--budget 0.05]

Mistral-7B's shape, bf16: 32 query heads, 8 KV heads, head dim 128, a window of 8 queries, score of `dropkv`. One read of K and V is their bytes
at the rate of a device copy (read and write), measured in the same run. Medians of event timings; before each, the device sleeps, so that no
launch is waited for, and the L2 cache is emptied: by writing 256 MB (left columns), some of which is still to be written back when the timing
begins, or by reading 256 MB (right columns). The plain-torch paths are timed with the same inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from dropkv.budgets import Kept, forced_positions, select
from dropkv.kernels.dispatch import gather_on_gpu, select_on_gpu
from dropkv.kernels.score import Attended, Score, Window, score_blocks
from dropkv.kernels.window_attend import Attention, attend_window
from dropkv.kernels.window_score import score_window
from dropkv.methods import Pool
from dropkv.methods._base import odds_times_distance

HEADS, KV_HEADS, DIM, WINDOW = 32, 8, 128, 8
FORM = Score("squared odds")
POOL = Pool("max", 11)


def median(action: Callable[[], object], repeat: int = 25, *, read: bool = False) -> float:
    """Microseconds."""
    flush = torch.zeros(1 << 26, device="cuda")
    for _ in range(3):
        action()
    times = []
    for _ in range(repeat):
        torch.cuda._sleep(4_000_000)
        if read:
            flush.sum()
        else:
            flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3


def copy_rate() -> float:
    """Bytes a microsecond, read and written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / median(lambda: target.copy_(source))


def extra(action: Callable[[], object]) -> tuple[float, float]:
    """Megabytes taken at the peak beside what is left behind, and left behind."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    left_behind = action()
    torch.cuda.synchronize()
    left, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    del left_behind
    return (peak - left) / 1e6, left / 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", default="131072,16384")
    options.add_argument("--budget", type=float, default=0.05)
    given = options.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e6:.2f} TB/s")
    for n in map(int, given.tokens.split(",")):
        one_layer(n, int(given.budget * n), rate)


def one_layer(n: int, kept: int, rate: float) -> None:
    group, scale = HEADS // KV_HEADS, DIM**-0.5
    q, k, v = (
        torch.randn(*shape, DIM, device="cuda", dtype=torch.bfloat16)
        for shape in ((KV_HEADS, group, WINDOW), (KV_HEADS, n), (KV_HEADS, n))
    )
    k[:, 0] = q.float().mean((1, 2)) * 12  # a sink
    floor = (k.numel() + v.numel()) * 2 / rate
    print(f"\nn = {n}: one read of K and V takes {floor:.1f} us")

    def report(name: str, action: Callable[[], object], repeat: int = 25) -> None:
        times = [median(action, repeat, read=read) for read in (False, True)]
        print(f"{name:58s}" + "".join(f"{time:9.1f} us {time / floor:6.2f} x" for time in times), flush=True)

    attention = attend_window(q, k, v, scale=scale)
    foreign = Attention(attention.outputs, attention.log_sum_exp)
    scores = score_window(q, k, v, attention, FORM, scale=scale)

    def score(known: Attention) -> torch.Tensor:
        return score_window(q, k, v, known, FORM, scale=scale)

    report("score, attention given", lambda: score(attention))
    report("score, attention given, keys with p > 1/2 not", lambda: score(foreign))
    report("score, nothing given", lambda: score(attend_window(q, k, v, scale=scale)))
    report("attention of the window alone", lambda: attend_window(q, k, v, scale=scale))
    report("p, log-sum-exp given", lambda: score_window(q, k, v, foreign, Score("p"), scale=scale))
    window = Window(q, k, v, scale)
    attended = Attended(q, k, v, scale, attention.outputs, attention.log_sum_exp)
    report("torch: score, attention given", lambda: score_blocks(attended, lambda b: odds_times_distance(b, 2)), 5)
    report("torch: score, nothing given", lambda: score_blocks(window, lambda b: odds_times_distance(b, 2)), 5)
    forced = forced_positions(n, 0, 8)
    for rule in ("uniform", "head-adaptive"):

        def choose(raw: torch.Tensor, rule: str = rule) -> Kept:
            return select_on_gpu(raw, kept, POOL, forced, rule, 0.2)

        def everything(choose: Callable = choose) -> object:
            raw = score(attention)
            return raw, gather_on_gpu(k, v, choose(raw), raw)

        chosen = choose(scores)
        plain = select(POOL(scores), kept, forced=forced, rule=rule, alpha=0.2, unpooled=scores)
        assert torch.equal(chosen.positions, plain.positions) and torch.equal(chosen.admit, plain.admit)
        report(f"{rule}: pool and select", lambda choose=choose: choose(scores))
        report(
            f"torch: {rule}: pool and select",
            lambda rule=rule: select(POOL(scores), kept, forced=forced, rule=rule, alpha=0.2, unpooled=scores),
            5,
        )
        report(f"{rule}: gather", lambda c=chosen: gather_on_gpu(k, v, c, scores))
        report(f"{rule}: score, attention given, pool, select, gather", everything)
        scratch, left = extra(everything)
        print(f"{rule}: scratch {scratch:.2f} MB beside scores and entries of {left:.2f} MB")
    report("torch.topk, one row a head", lambda: scores.topk(kept, 1))


if __name__ == "__main__":
    main()
