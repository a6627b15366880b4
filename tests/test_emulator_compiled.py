"""What holds the emulator to the compiler: its subjects compile for sm_90, with the named barriers and the memory that it says."""

from __future__ import annotations

import json
import os
import sys

import emulated_attention as emulated
import gluon_attention
import pytest
import torch
from conftest import FreshPython

from flexattn.emulator.rules import RESERVED_BARRIERS

# In a process of its own, whose kernels are not interpreted. Prints the shared memory and the numbers of the named barriers in PTX.
COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
sys.path.insert(0, "tests")
import gluon_attention

def descriptor(block, dtype):
    layout = gl.NVMMASharedLayout.get_default_for(block, {"bf16": gl.bfloat16, "fp32": gl.float32}[dtype])
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"

name, constexprs = sys.argv[1], json.loads(sys.argv[2])
kernel = getattr(gluon_attention, name)
box = [1, 1, 64, 1, constexprs["HEAD_DIM"]]
half = [1, 1, 64, 1, constexprs["HEAD_DIM"] // 2]
signature = {}
for argument in kernel.arg_names:
    if argument in constexprs:
        signature[argument] = "constexpr"
    elif argument.endswith("_desc"):
        signature[argument] = descriptor(half, "fp32") if argument == "dq_desc" else descriptor(box, "bf16")
    else:
        known = {"table_ptr": "*i32", "scale": "fp32", "qk_scale": "fp32"}
        signature[argument] = known.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
source = GluonASTSource(
    fn=kernel,
    signature=signature,
    constexprs={(kernel.arg_names.index(key),): value for key, value in constexprs.items()},
    attrs={(i,): [["tt.divisibility", 16]] for i, key in enumerate(kernel.arg_names) if signature[key].startswith("*")},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
barriers = re.findall(r"\\bbar(?:rier)?\\.(?:sync|arrive)\\s+(\\d+)", compiled.asm["ptx"])
print(json.dumps([compiled.metadata.shared, sorted(set(map(int, barriers)))]))
"""


COMPILERS_OWN = 512  # bytes at most that warp specialisation adds to the allocations of a kernel


@pytest.mark.parametrize(
    ("kernel", "constexprs", "workers", "own"),
    [
        ("attention_fwd", {"BLOCK_N": 64, "HEAD_DIM": 128, "STAGES": 2}, 2, {9, 10}),
        ("attention_bwd", {"HEAD_DIM": 128, "STAGES": 2}, 2, {9, 10}),
    ],
)
def test_subjects_compile_to_what_the_rules_say(
    kernel: str, constexprs: dict[str, int], workers: int, own: set[int], fresh_python: FreshPython
) -> None:
    path = os.pathsep.join(folder for folder in sys.path if folder)  # with the Triton that this process has
    ran = fresh_python("-c", COMPILE, kernel, json.dumps(constexprs), env={"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
    shared, barriers = json.loads(ran.stdout)
    assert own | {0, 1} <= set(barriers)
    assert set(barriers) - own <= set(range(RESERVED_BARRIERS + workers))
    run = emulated.forward if kernel == "attention_fwd" else emulated.backward
    case = emulated.problem(lengths_q=(8,), head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    emulated_bytes = run(gluon_attention, case, seed=0)[0].shared_bytes
    assert 0 <= shared - emulated_bytes <= COMPILERS_OWN
