"""Options of Triton's compiler, and a pass of LLVM that slows the kernels down.

From version 3.9 on, Triton uses LLVM 24. Its SLP vectorizer joins the sums that a loop carries into one vector at the loop's end.
Then the registers of a wgmma's accumulator are copied before they are ready, so ptxas adds a wait after each product (C7514). The
loop of the forward for sm_90 at head dim 128 gets 28 % more instructions. Triton has no option for this pass, and disables it only
for sm_80.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.nvidia import compiler as nvidia

FROM_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


class _Thread(threading.local):
    compiles = False  # whether this thread compiles a kernel of the library


_thread = _Thread()


class _Llvm:
    """LLVM as Triton's compiler sees it, without the SLP vectorizer inside `compiling`."""

    def __init__(self, llvm: Any) -> None:
        self.llvm = llvm

    def __getattr__(self, name: str) -> object:
        return getattr(self.llvm, name)

    def optimize_module(self, *arguments: Any, **options: Any) -> object:
        if _thread.compiles:
            options["disable_slp_vectorizer"] = True
        return self.llvm.optimize_module(*arguments, **options)


if FROM_3_9 and not isinstance(nvidia.llvm, _Llvm):
    nvidia.llvm = _Llvm(nvidia.llvm)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Marks the kernels that this thread compiles inside as the library's own."""
    before, _thread.compiles = _thread.compiles, True
    try:
        yield
    finally:
        _thread.compiles = before


SHARED_MEMORY_LIMIT: dict[int, int] = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Maximum bytes of shared memory of one block (opt-in), by compute capability.

CUDA C++ Programming Guide, "Compute Capabilities", technical specifications per compute capability, "Maximum amount of shared
memory per thread block".
"""


def shared_memory_limit(architecture: int) -> int:
    """Returns the limit of the newest listed capability that is not newer than `architecture`."""
    return SHARED_MEMORY_LIMIT[max(listed for listed in SHARED_MEMORY_LIMIT if listed <= architecture)]


UNOPTIMISED = "--opt-level 0"
"""Options of ptxas for a kernel that it otherwise miscompiles: slower code, with many spills."""


def options_of(num_warps: int, num_stages: int, ptx_options: str | None = None, registers: int | None = None) -> dict[str, object]:
    """Returns the options of Triton's compiler. All kernels have the same options, except for these.

    ptx_options: for ptxas; None: Triton's default. registers: the most of a thread; None: no limit. enable_fp_fusion fuses a
    product and a sum into one operation, which rounds once. Not every version of Triton has this default.
    """
    options: dict[str, object] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if ptx_options is not None:
        options["ptx_options"] = ptx_options
    if registers is not None:
        options["maxnreg"] = registers
    return options
