"""Decode steps on a GPU: a Mistral-7B shape with random weights in bfloat16, everything of one table measured in one run.

    python benchmarks/decode_gpu.py [--entries 6554] [--tail 256] [--document 131072] [--layers 32]

step:  one token for every row, captured and replayed, against the bytes it must read at the copy rate of this GPU, and at batch 1 against a
decode step of transformers with its dynamic cache of as many entries
attention:  that of one layer, prefixes ragged (heads keep 0.4 to 1.6 times the mean), L2 flushed by writing 256 MiB, some of which is written back
in the timed interval, and by reading them, as the weights of a step do
memory:  peak of 64 questions answered at once over that of one, against the bytes of 63 tails
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import triton
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from dropkv import Sampling, attention
from dropkv.cache import Prefix
from dropkv.decode.batch import Asked, answer_all
from dropkv.decode.kernel_run import KernelRun
from dropkv.decode.step import RowState, Step
from dropkv.decode.tails import Tails, row_bytes
from dropkv.models import Model, geometry_of
from dropkv.rope import rope_of
from formats import LayerEntries

QUESTION = 32  # tokens


def mistral(layers: int, device: torch.device) -> Model:
    """The shape of Mistral-7B, 0.02 times normal weights."""
    config = MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=None,
    )
    attention.register()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        network = MistralForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    network.set_attn_implementation(attention.NAME)
    return Model(
        network=network,
        tokenizer=None,
        id="mistral-7b-shape",
        source="folder",
        revision=None,
        device=device,
        dtype=torch.bfloat16,
        geometry=geometry_of(config),
        max_positions=config.max_position_embeddings,
        stop_ids=frozenset(),
        rope=rope_of(config),
    )


def ragged(model: Model, entries: int, n: int) -> Prefix:
    """Random entries; the heads of a layer keep 0.4 to 1.6 times the mean."""
    layers = []
    for shape in model.geometry:
        shares = torch.linspace(0.4, 1.6, shape.kv_heads)
        counts = (shares / shares.sum() * entries * shape.kv_heads).long()
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(model.device)
        total = int(bounds[-1])
        keys, values = torch.randn((2, total, shape.d_k), dtype=model.dtype, device=model.device).unbind()
        positions = torch.randint(n, (total,), dtype=torch.int32, device=model.device)
        layers.append(LayerEntries(keys, values, bounds, positions, positions, torch.zeros(total)))
    return Prefix(layers, model.geometry, n)


def milliseconds(action: Callable[[], object], repeat: int = 30) -> float:
    """Median of an action's time on the device."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeat):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        action()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), 10) * 1e3


def step_of(model: Model, prefix: Prefix, rows: int, tail: int) -> tuple[Step, Tails]:
    tails = Tails.of(model.geometry, model.devices, model.dtype, rows, tail + 64)
    for part in (*tails.keys, *tails.values):
        part.normal_()
    step = Step(model, tails, [prefix], rows, sampled=False)
    step.place([RowState(prefix, 100 + row, tail) for row in range(rows)])
    return step, tails


def attention_us(model: Model, prefix: Prefix, rows: int, tail: int) -> tuple[float, float]:
    """Microseconds of one layer's attention, L2 flushed before each by writing, and by reading: a graph of flushes and attentions less one
    of flushes."""
    tails = Tails.of(model.geometry, model.devices, model.dtype, rows, tail + 64)
    tails.keys[0].normal_()
    tails.values[0].normal_()
    run = KernelRun(model, tails, [prefix], rows)
    run.layout.place_rows([prefix] * rows)
    run.lengths.fill_(tail - 1)
    shape = model.geometry[0]
    q = torch.randn((rows, shape.query_heads, shape.d_k), dtype=model.dtype, device=model.device)
    large = torch.zeros(64 << 20, dtype=torch.float32, device=model.device)

    def attend() -> None:
        run.over(0, q, shape.d_k**-0.5, None)

    attend()
    took = [
        (captured_ms(lambda flush=flush: (flush(), attend())) - captured_ms(flush)) * 100
        for flush in (large.zero_, large.sum)
    ]
    return took[0], took[1]


def captured_ms(action: Callable[[], object]) -> float:
    """Of ten times an action in one graph."""
    action()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            action()
    return milliseconds(graph.replay, 9)


def dynamic_cache_ms(model: Model, entries: int, n: int) -> float:
    """A decode step of transformers, by the host's clock, the token fetched as a loop of its own must."""
    network: Any = model.network
    network.set_attn_implementation("sdpa")
    cache = DynamicCache()
    for layer, shape in enumerate(model.geometry):
        size = (1, shape.kv_heads, entries, shape.d_k)
        cache.update(*torch.randn((2, *size), dtype=model.dtype, device=model.device).unbind(), layer)
    token = torch.tensor([[100]], device=model.device)
    times = []
    with torch.inference_mode():
        for step in range(13):
            torch.cuda.synchronize()
            started = time.perf_counter()
            place = torch.tensor([[n + step]], device=model.device)
            token = network(input_ids=token, past_key_values=cache, position_ids=place).logits[:, -1:].argmax(-1)
            int(token)
            times.append(time.perf_counter() - started)
    network.set_attn_implementation(attention.NAME)
    return statistics.median(times[3:]) * 1e3


def answered(model: Model, prefix: Prefix, rows: int, tail: int) -> tuple[float, int]:
    """Seconds and peak bytes of so many questions answered at once, each with a tail of `tail` tokens."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = tail - QUESTION
    asked = [
        Asked(prefix, tuple(range(200 + row, 200 + row + QUESTION)), Sampling(max_new_tokens=limit), limit)
        for row in range(rows)
    ]
    started = time.perf_counter()
    tokens = sum(len(row.tokens) for row in answer_all(model, asked, rows))
    seconds = time.perf_counter() - started
    assert tokens == rows * limit
    return seconds, torch.cuda.max_memory_allocated()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--entries", type=int, default=6554)
    options.add_argument("--tail", type=int, default=256)
    options.add_argument("--document", type=int, default=131072)
    options.add_argument("--layers", type=int, default=32)
    given = options.parse_args()
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    rate = copy_rate(device)
    gc.collect()
    torch.cuda.empty_cache()
    model = mistral(given.layers, device)
    prefix = ragged(model, given.entries, given.document)
    weights = sum(part.numel() * part.itemsize for part in model.network.parameters())
    weights -= model.network.get_input_embeddings().weight.numel() * model.dtype.itemsize  # a row or two is read
    kept = sum(part.numel() * part.itemsize for layer in prefix.layers for part in (layer.keys, layer.values))
    each = row_bytes(model.geometry, model.dtype, given.tail)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, ", end="")
    print(
        f"transformers {transformers.__version__}, {given.layers} layers, {given.entries} entries, copies {rate / 1e12:.2f} TB/s"
    )

    for rows in (1, 64):
        step, tails = step_of(model, prefix, rows, given.tail)
        started = time.perf_counter()
        step.launch().tokens()
        first = time.perf_counter() - started
        started = time.perf_counter()
        step.launch().tokens()
        captured = time.perf_counter() - started
        floor = (weights + kept + rows * each) / rate * 1e3
        took = milliseconds(step.launch)
        print(
            f"step, batch {rows}: {took:.2f} ms, floor {floor:.2f}, {took / floor:.2f} x (first {first:.1f} s, capture {captured:.2f} s)"
        )
        if rows == 1:
            theirs = dynamic_cache_ms(model, given.entries, given.document)
            print(f"step of transformers, batch 1: {theirs:.1f} ms, {theirs / took:.1f} x ours")
        del step, tails
        gc.collect()
        torch.cuda.empty_cache()
    for rows in (1, 64):
        floor = (kept + rows * each) / given.layers / rate * 1e6
        for how, took in zip(("writing", "reading"), attention_us(model, prefix, rows, given.tail), strict=True):
            print(
                f"attention of a layer, batch {rows}, L2 flushed by {how}: {took:.1f} us, floor {floor:.1f}, {took / floor:.2f} x"
            )
    one, alone = answered(model, prefix, 1, given.tail)
    all_, peak = answered(model, prefix, 64, given.tail)
    tails_bytes = 63 * each
    print(f"1 question {one:.2f} s, 64 questions {all_:.2f} s: {64 * one / all_:.1f} x as many tokens a second")
    print(
        f"memory: {alone / 2**30:.3f} GiB for 1, {peak / 2**30:.3f} GiB for 64: {(peak - alone) / 2**30:.3f} GiB more, "
        f"63 tails are {tails_bytes / 2**30:.3f} GiB, {(peak - alone) / tails_bytes:.3f} x"
    )


if __name__ == "__main__":
    main()
