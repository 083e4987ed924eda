"""What group sizes of quantised entries cost and buy, on the entries of one document.

    python benchmarks/kv_groups.py [--document examples/dark-lamp.md] [--budget 0.25] [--model smollm2-135m] [--device auto]

keys, values: distance of the restored entries from the entries, as a share of their norm, mean of the layers
outputs: the same for the attention outputs of question and answer tokens, over prefix and tail; mean and worst of all layers, with each
layer given the queries of the unquantised run.  KL: of the next-token distribution after the answer, in nats (few tokens: mostly noise)
bits: of a stored number, its share of the grids included, where heads have many entries
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

from dropkv import CompressSettings, Document, Sampling, load_model
from dropkv.attention import run_logits
from dropkv.cache import AnswerRun, Prefix, Tail
from dropkv.compression import compress_document
from dropkv.kernels.decode import attend_prefix_and_tail
from formats import LayerEntries, Quantization
from formats.grids import KINDS
from formats.quantized import count_groups, quantize

QUESTIONS = ("What is this about?", "What is the name of the murderer?", "How long was the lamp dark?")
GROUPS = {
    "int8": ((32, 64), (64, 64), (128, 64), (128, 32), (512, 64)),
    "fp8": ((32, 64), (64, 64), (128, 64), (128, 32), (512, 64)),
    "int4": ((16, 32), (32, 16), (32, 32), (32, 64), (64, 16), (64, 32), (64, 64), (128, 64)),
}


class Compared(AnswerRun):
    """A run that also attends to other prefixes with the same queries, and notes how far their outputs are from its own."""

    def __init__(self, prefix: Prefix, tail: Tail, others: list[Prefix]) -> None:
        super().__init__(prefix, tail)
        self.others = others
        self.errors: list[list[float]] = [[] for _ in others]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """As the run itself."""
        own = super().attend(layer, q, k, v, scale=scale, window=window, softcap=softcap)
        for other, errors in zip(self.others, self.errors, strict=True):
            found = attend_prefix_and_tail(
                q[0],
                other.layers[layer],
                other.bounds[layer],
                k[0],
                v[0],
                scale=scale,
                softcap=softcap,
                reach=None,
                n=other.n,
            )
            errors.append(float((found - own[0]).norm() / own.norm()))
        return own


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--document", default="examples/dark-lamp.md")
    options.add_argument("--budget", type=float, default=0.25)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--device", default="auto")
    given = options.parse_args()
    model = load_model(given.model, device=given.device)
    document = Document.of(Path(given.document).read_text(encoding="utf-8"), given.document)
    compression = compress_document(model, document, CompressSettings(budget=given.budget, method="adadropkv"))
    session, layers = compression.session(), compression.layers
    cells = [(kind, keys, values) for kind, groups in GROUPS.items() for keys, values in groups]
    others = [coded(session.prefix, layers, model.device, model.dtype, *cell) for cell in cells]
    outputs: list[list[float]] = [[] for _ in cells]
    distances: list[list[float]] = [[] for _ in cells]
    with torch.inference_mode():
        for question in QUESTIONS:
            answer = session.ask(question, Sampling(max_new_tokens=24)).text
            ids = session.seam.question_ids(question) + model.tokenizer(answer, add_special_tokens=False).input_ids
            places = torch.arange(session.prefix.n, session.prefix.n + len(ids), device=model.device)[None]
            run = Compared(session.prefix, Tail(), others)
            tokens = torch.tensor([ids], device=model.device)
            wanted = run_logits(model.network, tokens, places, run)[0, -1].log_softmax(-1)
            for number, other in enumerate(others):
                found = run_logits(model.network, tokens, places, AnswerRun(other, Tail()))[0, -1].log_softmax(-1)
                distances[number].append(float((wanted.exp() * (wanted - found)).sum()))
                outputs[number] += run.errors[number]
    print(f"{given.document}, {given.model}, {model.dtype}, budget {given.budget}, {len(QUESTIONS)} questions\n")
    print("| kind | key group | value group | bits of keys | of values | keys | values | outputs | worst | KL |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (kind, keys, values), other, errors, kl in zip(cells, others, outputs, distances, strict=True):
        grid, code = (32 if KINDS[kind].zeros else 16), (4 if KINDS[kind].packed else 8)
        apart = [
            statistics.mean(
                float(
                    (getattr(one, part).float() - getattr(two, part).float()).norm() / getattr(two, part).float().norm()
                )
                for one, two in zip(other.layers, layers, strict=True)
            )
            for part in ("keys", "values")
        ]
        print(
            f"| {kind} | {keys} | {values} | {code + grid / keys:.2f} | {code + grid / values:.2f} | {apart[0]:.4f} | {apart[1]:.4f} "
            f"| {statistics.mean(errors):.4f} | {max(errors):.4f} | {statistics.mean(kl):.1e} |"
        )


def coded(
    prefix: Prefix,
    layers: tuple[LayerEntries, ...],
    device: torch.device,
    dtype: torch.dtype,
    kind: str,
    key_group: int,
    value_group: int,
) -> Prefix:
    """The prefix as it comes back from codes in groups of these sizes."""
    counts = tuple(count_groups(bounds, key_group) for bounds in prefix.bounds)
    about = Quantization(kind, key_group, value_group, counts)
    stored = [quantize(layer, about) for layer in layers]
    return Prefix(stored, prefix.geometry, prefix.n, about).to(device, dtype)


if __name__ == "__main__":
    main()
