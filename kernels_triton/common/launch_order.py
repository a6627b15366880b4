"""Kernels that begin while the kernel before them still runs: programmatic dependent launch, from sm_90 on.

A kernel that calls `wait_for_previous` before it accesses memory is launched so that its programs may begin early (`Direct`). That
hides the launch latency and the kernel's setup behind the previous kernel. `wait_for_previous` returns once the previous kernel has
ended and its writes are visible, even if that kernel never called `let_next_begin` (CUDA C++ Programming Guide, "Programmatic
Dependent Launch"; PTX ISA, `griddepcontrol`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.runtime import imitation
from flexattn.kernels_triton.runtime.device import capability_of


def overlaps(device: torch.device) -> bool:
    """Returns whether kernels on this device may be compiled with the two functions below."""
    return capability_of(device) >= 90 and imitation.imitated() is None


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    # Once all programs have called this or have ended, programs of the next kernel may begin if there is room for them.
    if OVERLAPS:
        assembly: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
