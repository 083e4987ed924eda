"""Check that a network spread over two GPUs, or with layers waiting in host memory, does what it does on one.

    python benchmarks/two_gpus.py                  # cuda:0 and cuda:1; with one GPU only what waits in host memory
    python benchmarks/two_gpus.py cpu cpu          # a dry run

Random networks of a tiny Llama, a Gemma-2 with sliding layers, and SmolLM2's shape; each compresses a document with four methods, is saved
and asked, and files made one way are opened the other way. Prints one line a check; exit 1 when one fails. Takes two to three minutes on GPUs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma2Config, LlamaConfig, PreTrainedTokenizerFast

from dropkv.compression import Compression, compress_document
from dropkv.documents import Document
from dropkv.library import open_file
from dropkv.models import Model, load_model, wrap_model
from dropkv.settings import CompressSettings, Sampling

METHODS = (
    "auto",
    "adadropkv",
    "kvzip",
    "criticalkv",
)  # two orders over all layers, inside a layer, one budget for all layers, behind the output projection
QUESTION = "What is the code?"
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, the ship is Evergreen.\n" * 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["<end>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def network(name: str) -> Any:
    """A random network, wide enough in its weights that attention is not flat."""
    from transformers import AutoModelForCausalLM

    shared: dict[str, Any] = dict(
        vocab_size=264, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    if name == "tiny llama":
        config: Any = LlamaConfig(**shared, **small, num_hidden_layers=5)
    elif name == "tiny gemma-2":
        config = Gemma2Config(**shared, **small, num_hidden_layers=5, sliding_window=300)
    else:
        smollm2 = dict(
            hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30
        )
        config = LlamaConfig(**{**shared, "vocab_size": 49152}, **smollm2, tie_word_embeddings=True)
    config.initializer_range = 0.15 if name.startswith("tiny") else 0.06
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def spread(folder: Path, dtype: torch.dtype, first: str, second: str) -> Model:
    """Embeddings and the lower half of the layers on one device, the rest on the other ("wait": in host memory)."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    layers = made.config.num_hidden_layers
    place = {"model.embed_tokens": first, "model.rotary_emb": first, "lm_head": first, "model.norm": first}
    place |= {f"model.layers.{index}": first if index < layers // 2 else second for index in range(layers)}
    return wrap_model(dispatch_model(made, place, main_device=first), byte_tokenizer(), id="random")


def compressed(model: Model, method: str) -> Compression:
    return compress_document(model, Document.of(TEXT), CompressSettings(budget=0.25, chunk=256, method=method))


def answer(session: Any) -> str:
    text: str = session.ask(QUESTION, Sampling(max_new_tokens=24)).text
    return text


def compare(label: str, model: Model, plain: Model, folder: Path) -> bool:
    """Entries, where they live, files both ways, and answers."""
    right = True
    for method in METHODS:
        mine, theirs = compressed(model, method), compressed(plain, method)
        layers = list(zip(mine.session().prefix.layers, theirs.session().prefix.layers, strict=True))
        at_home = all(layer.keys.device == device for (layer, _), device in zip(layers, model.devices, strict=True))
        same = all(torch.equal(a.positions.cpu(), b.positions.cpu()) for a, b in layers)
        apart = max(
            float((a.keys.cpu().float() - b.keys.cpu().float()).abs().max())
            if len(a.keys) == len(b.keys)
            else float("inf")
            for a, b in layers
        )
        files = [folder / f"{label}-{method}-{side}.kv".replace(" ", "-") for side in ("mine", "theirs")]
        mine.save(files[0])
        theirs.save(files[1])
        texts = [answer(mine.session()), answer(theirs.session())]
        texts += [answer(open_file(path).with_model(one).session) for path in files for one in (model, plain)]
        good = at_home and same and apart <= TOLERANCE[plain.dtype] and len(set(texts)) == 1
        right = right and good
        print(
            f"{'ok  ' if good else 'FAIL'} {label}, {method}: devices {sorted({str(device) for device in model.devices})}, entries at home "
            f"{at_home}, same positions {same}, keys differ by {apart:.1e}, {len(set(texts))} different of {len(texts)} answers"
        )
    return right


def main(arguments: list[str]) -> int:
    count = torch.cuda.device_count()
    if not arguments and count == 0:
        print("no GPU here: nothing to check (a dry run: benchmarks/two_gpus.py cpu cpu)")
        return 0
    first, second = arguments or ["cuda:0", "cuda:1" if count > 1 else ""]
    started = time.perf_counter()
    right = True
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("tiny llama", "tiny gemma-2", "smollm2 shape"):
            dtype = torch.bfloat16 if name == "smollm2 shape" and first != "cpu" else torch.float32
            folder = Path(temporary) / name.replace(" ", "-")
            network(name).to(dtype).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
            plain = load_model(str(folder), dtype=short, device=first)
            if second:
                right &= compare(
                    f"{name} {short} split by hand", spread(folder, dtype, first, second), plain, Path(temporary)
                )
            if first != "cpu":
                right &= compare(
                    f"{name} {short} half waiting", spread(folder, dtype, first, "cpu"), plain, Path(temporary)
                )
            if second and first != "cpu":
                model = load_model(str(folder), dtype=short, device=f"{first},{second}")
                right &= compare(f"{name} {short} --device {first},{second}", model, plain, Path(temporary))
                if name == "smollm2 shape" and len(set(model.devices)) != 2:
                    print(f"FAIL {name}: --device {first},{second} used {set(model.devices)} only")
                    right = False
            if first != "cpu":
                auto = load_model(str(folder), dtype=short)
                one = set(auto.devices) == {torch.device("cuda", 0)}
                print(
                    f"{'ok  ' if one else 'FAIL'} {name}: --device auto keeps what fits on one GPU: {set(auto.devices)}"
                )
                right &= one
    print(f"{'all right' if right else 'NOT right'}, {time.perf_counter() - started:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
