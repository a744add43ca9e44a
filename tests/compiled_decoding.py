"""Compile the kernel for few tokens with int8 factors for GPUs that need not be there; one line for each result.

A line has the architecture, the dtype of x, the tokens of a tile, bytes of shared memory, the target of the code, and
whether it uses tensor cores.
"""

from __future__ import annotations

import re
import warnings

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import buttress as bt
from buttress.ops.fused import kernels, pair_launches
from buttress.ops.fused.launches import TensorSpec
from buttress.ops.layouts import layouts_of

warnings.simplefilter("ignore")
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compile_int8(structure: bt.Structure, width: int, dtype: torch.dtype, tokens: int, arch: int) -> None:
    strided = layouts_of(structure.chain(width, width)).strided
    assert strided is not None
    spec = TensorSpec(torch.device("cpu"), dtype, "ieee" if dtype == torch.float32 else "tf32")
    plan = pair_launches.decode_plan(strided, spec, tokens, False, True, True)
    constants = dict(plan.launch.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    names = kernels.decode_pair.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("p_x", "p_bias", "p_y"), NAMES[dtype]) | {"p_table2": "*i32"}
    types |= {"p_w1": "*i8", "p_w2": "*i8", "p_s1": "*fp32", "p_s2": "*fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")}
    source = ASTSource(kernels.decode_pair, types, {(names.index(n),): v for n, v in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", code)
    assert target is not None
    assert compiled.asm["cubin"]
    print(arch, str(dtype).removeprefix("torch."), tokens, compiled.metadata.shared, target[1], "mma" in code)


for arch in (80, 90):
    for tokens in (1, 16):
        compile_int8(bt.BTT(rank=2), 1024, torch.bfloat16, tokens, arch)
compile_int8(bt.Monarch(16), 4096, torch.float32, 16, 90)
