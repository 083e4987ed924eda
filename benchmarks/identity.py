"""What it costs to tell whether a model is the one a file was made with, for a checkpoint of 7B parameters.

    python benchmarks/identity.py [--repeat 5]

files:      sizes and sampled blocks of 14.5 GB in 4 shards; sparse files, so no disk is read: what a disk adds is in the bytes
samples:    values of every tensor of a network of Mistral-7B's shape, its memory allocated and never touched otherwise
tokenizer:  the bundled model's, 49,152 entries
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from dropkv import load_model
from dropkv.digests import digest_samples
from dropkv.identity import tokenizer_fingerprint
from dropkv.weights import weights_agree, weights_fingerprint

SHARDS = (4_943_162_336, 4_999_819_336, 4_540_516_344, 100_000_000)


def bytes_read() -> int:
    """Bytes this process has read so far, from the disk or its cache."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    return 0


def median(action: Callable[[], object], repeat: int) -> tuple[float, float, float]:
    """Median of wall seconds and of processor seconds, and bytes read by one call."""
    walls, cpus = [], []
    before = bytes_read()
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus), (bytes_read() - before) / repeat


def network_7b() -> torch.nn.Module:
    """Mistral-7B's shape in bfloat16 with memory that nothing has been written to."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32_768, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, sliding_window=None,
    )  # fmt: skip
    with torch.device("meta"):
        network = MistralForCausalLM(config).to(torch.bfloat16)
    return network.to_empty(device="cpu")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=5)
    repeat = options.parse_args().repeat
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"model-{number}.safetensors" for number in range(len(SHARDS))]
        for path, size in zip(shards, SHARDS, strict=True):
            path.touch()
            with open(path, "r+b") as file:
                file.truncate(size)
        network, tokenizer = network_7b(), load_model().tokenizer
        fingerprint = weights_fingerprint(network)
        rows = {
            "files": median(lambda: digest_samples(shards), repeat),
            "samples": median(lambda: weights_fingerprint(network), repeat),
            "comparison": median(lambda: weights_agree(fingerprint, fingerprint), repeat),
            "tokenizer": median(lambda: tokenizer_fingerprint(tokenizer), repeat),
        }
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, median of {repeat}"
    )
    for name, (wall, cpu, read) in rows.items():
        print(f"{name:<12} {wall:7.3f} s  {cpu:7.3f} s processor  {read / 2**20:6.1f} MiB read")
    walls = sum(wall for wall, _, _ in rows.values())
    print(
        f"{'together':<12} {walls:7.3f} s of {sum(SHARDS) / 1e9:.1f} GB and {fingerprint['parameters'] / 1e9:.2f}B parameters"
    )


if __name__ == "__main__":
    main()
