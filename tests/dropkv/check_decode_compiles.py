"""Run by test_fused_decode.py in a process of its own: every kernel of a decode step is compiled for an NVIDIA GPU, which needs none, and not run.

The interpreter takes what the compiler refuses: values that change their shape in a loop, whole numbers with tensors' methods.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

import dropkv
from dropkv.decode.step import RowState, Step
from dropkv.decode.tails import Tails
from tests import tiny

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
POINTERS |= {torch.float16: "*fp16", torch.int16: "*i16", torch.uint8: "*u8"}
compiled: dict[str, set[str]] = {}


def compile_only(function, *args, grid, warmup, **given):
    """What a launch does before it runs, for these arguments."""
    options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
    values = dict(zip([parameter.name for parameter in function.params], args, strict=False)) | given
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(number,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    key = str((signature, constants, options))
    if key in compiled.setdefault(function.__name__, set()):
        return
    compiled[function.__name__].add(key)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compile(source, target=TARGET, options=options)


def main() -> None:
    JITFunction.run = compile_only
    for family, rows in (("qwen3", 1), ("mistral-sliding", 64), ("gemma2", 3)):
        model = tiny.model(family, dtype=torch.bfloat16)
        prefix = dropkv.compress("Who? " * 40, model=model, budget=0.5, observe="tail", fidelity=False).session().prefix
        tails = Tails.of(model.geometry, model.devices, model.dtype, rows, 128)
        step = Step(model, tails, [prefix], rows, sampled=False)
        step.place([RowState(prefix, 5, 1)] * rows)
        for step.run.early in (False, True):
            step.launch()
    for name, variants in sorted(compiled.items()):
        print(name, len(variants))
    assert len(compiled) == 9
    print("all equal")


if __name__ == "__main__":
    main()
