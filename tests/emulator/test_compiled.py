"""Agreement of the emulator with the compiler: its kernels compile for sm_90, with the emulator's named barriers and memory."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from flexattn.emulator.rules import RESERVED_BARRIERS
from tests.conftest import FreshPython
from tests.support import emulated_attention as emulated
from tests.support import gluon_attention

# In a process of its own, without the interpreter. Prints each kernel's shared memory and its named barriers in PTX.
COMPILE = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from tests.support import gluon_attention

def descriptor(block, dtype):
    layout = gl.NVMMASharedLayout.get_default_for(block, {"bf16": gl.bfloat16, "fp32": gl.float32}[dtype])
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"

def type_of(argument, head_dim):
    if argument.endswith("_desc"):
        is_dq = argument == "dq_desc"
        return descriptor([1, 1, 64, 1, head_dim // 2 if is_dq else head_dim], "fp32" if is_dq else "bf16")
    known = {"table_ptr": "*i32", "scale": "fp32", "qk_scale": "fp32"}
    return known.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")

def compiled(name, constexprs):
    kernel = getattr(gluon_attention, name)
    names = kernel.arg_names
    signature = {key: "constexpr" if key in constexprs else type_of(key, constexprs["HEAD_DIM"]) for key in names}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(key),): value for key, value in constexprs.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if signature[key].startswith("*")},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    barriers = re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)", made.asm["ptx"])
    return made.metadata.shared, sorted(set(map(int, barriers)))

print(json.dumps({name: compiled(name, constexprs) for name, constexprs in json.loads(sys.argv[1]).items()}))
"""
KERNELS = {"attention_fwd": {"BLOCK_N": 64, "HEAD_DIM": 128, "STAGES": 2}, "attention_bwd": {"HEAD_DIM": 128, "STAGES": 2}}
WORKERS = 2
THEIR_BARRIERS = {9, 10}
COMPILERS_OWN = 512  # bytes that warp specialisation adds, at most, to the allocations of a kernel


@pytest.mark.slow
def test_subjects_compile_to_what_the_rules_say(forked_python: FreshPython) -> None:
    path = os.pathsep.join(folder for folder in sys.path if folder)  # with this process's Triton
    ran = forked_python("-c", COMPILE, json.dumps(KERNELS), env={"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
    case = emulated.problem(lengths_q=(8,), head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    runs = {"attention_fwd": emulated.forward, "attention_bwd": emulated.backward}
    compiled = json.loads(ran.stdout)
    assert compiled.keys() == runs.keys()
    for name, (shared_bytes, barriers) in compiled.items():
        assert THEIR_BARRIERS | {0, 1} <= set(barriers)
        assert set(barriers) - THEIR_BARRIERS <= set(range(RESERVED_BARRIERS + WORKERS))
        report = runs[name](gluon_attention, case, seed=0)[0]
        assert 0 <= shared_bytes - report.shared_bytes <= COMPILERS_OWN
