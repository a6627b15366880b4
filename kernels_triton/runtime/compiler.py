"""How Triton compiles a kernel: the options, and a pass of LLVM that no kernel wants.

From Triton 3.9 on, whose LLVM is 24, the SLP vectorizer takes the sums that a loop carries for one vector where the loop ends. A
wgmma adds to registers that are then copied before they are ready. ptxas puts a wait behind each product (C7514): the loop of the
forward for sm_90 at head dim 128 has 28 % more instructions. Triton has no option for it and turns the pass off by itself for sm_80
alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.nvidia import compiler as nvidia


class _Thread(threading.local):
    compiles = False  # whether this thread compiles a kernel of the library


_thread = _Thread()


class _Llvm:
    """LLVM as Triton's compiler sees it; inside `compiling` without the SLP vectorizer."""

    def __init__(self, llvm: Any) -> None:
        self.llvm = llvm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llvm, name)

    def optimize_module(self, *arguments: Any, **options: Any) -> Any:
        if _thread.compiles:
            options["disable_slp_vectorizer"] = True
        return self.llvm.optimize_module(*arguments, **options)


if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) and not isinstance(nvidia.llvm, _Llvm):
    nvidia.llvm = _Llvm(nvidia.llvm)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, what this thread compiles is the library's own."""
    before, _thread.compiles = _thread.compiles, True
    try:
        yield
    finally:
        _thread.compiles = before


def options_of(num_warps: int, num_stages: int) -> dict[str, Any]:
    """Returns the options of Triton's compiler, the same for each kernel but for these two.

    enable_fp_fusion: a product and a sum become one operation, which rounds once. It is the default until Triton 3.9 alone.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
