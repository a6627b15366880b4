"""Kernels that begin while the kernel launched before them still runs: programmatic dependent launch, from sm_90 on.

A kernel that waits here, before it reads or writes any memory, is launched so that its programs may begin early (`Direct`): what a
launch takes, and what a kernel prepares, is then hidden behind the kernel before. `wait_for_previous` returns once that one has
ended and all that it wrote can be read, whether it let its successor begin or not (CUDA C++ Programming Guide, "Programmatic
Dependent Launch"; PTX ISA, `griddepcontrol`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.runtime.launch import capability_of


def overlaps(device: torch.device) -> bool:
    """Returns whether kernels on this device may be compiled with the two functions below."""
    return capability_of(device) >= 90


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    # Once all programs have come here or have ended, the next kernel's may begin wherever there is room for them.
    if OVERLAPS:
        assembly: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
