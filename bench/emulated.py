"""The Gluon kernels for sm_90 and sm_100 in the emulator: launched as on the device, on a workload shortened for it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from flexattn.bench.check import Checker
from flexattn.bench.implementations import Launchers, with_launchers
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.shapes import Workload

if TYPE_CHECKING:
    from flexattn.emulator import Report, Verdict

LONGEST = 200  # tokens of the workload's longest sequence, shortened
PROGRAMS = 3  # programs of the forward, which stay on the GPU: each then computes several blocks
KERNELS = {
    "forward": "_attn_fwd_hopper_kernel",
    "dq": "_attn_bwd_dq_hopper_kernel",
    "dkdv": "_attn_bwd_dkdv_hopper_kernel",
    "fused": "_attn_bwd_fused_hopper_kernel",
    "fused-192": "_attn_bwd_fused_192_hopper_kernel",
    "fp8-forward": "_attn_fwd_fp8_hopper_kernel",
    "fp8-dq": "_attn_bwd_dq_fp8_hopper_kernel",
    "fp8-dkdv": "_attn_bwd_dkdv_fp8_hopper_kernel",
    "fp8-fused": "_attn_bwd_fused_fp8_hopper_kernel",
    "sm_100": "_attn_fwd_blackwell_kernel",
    "sm_100-fused": "_attn_bwd_blackwell_kernel",
}
"""Gluon kernels for sm_90 and sm_100, by their names in `play --emulate`; no workload has head dims above 256."""


def the_emulator() -> ModuleType:
    """Returns flexattn.emulator, which a checkout has and the wheel has not. Raises ImportError if it is not there."""
    if importlib.util.find_spec("flexattn.emulator") is None:
        raise ImportError(
            "flexattn.emulator is not in the wheel. Run pip install -e '.[bench]' and the command in a clone of the repository"
        )
    return importlib.import_module("flexattn.emulator")


@contextmanager
def emulated(seed: int, *modules: ModuleType) -> Iterator[dict[str, Report]]:
    """Within this context, Gluon launches of these modules run in the emulator. The reports, by kernel, fill up."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    from flexattn.kernels_triton.runtime.launch import flat_arguments, launch

    emulator = the_emulator()
    reports: dict[str, Report] = {}

    def launch_emulated(kernel: Any, programs: int, device: torch.device, tile: Any, arguments: tuple[Any, ...]) -> None:
        if not isinstance(kernel, GluonJITFunction):
            launch(kernel, programs, device, tile, arguments)
        elif programs:
            flat = flat_arguments(kernel, arguments)
            reports[kernel.__name__] = emulator.launch(kernel, (programs,), *flat, num_warps=tile.num_warps, seed=seed)

    with ExitStack() as stack:
        for module in modules:
            launchers = [getattr(module, name).__globals__ for name in ("launch_forward", "launch_fused") if hasattr(module, name)]
            for names in launchers or [vars(module)]:
                stack.enter_context(mock.patch.dict(names, launch=launch_emulated))
                if "num_processors" in names:
                    stack.enter_context(mock.patch.dict(names, num_processors=lambda device: PROGRAMS))
        yield reports


def judge(kernel: str, workload: Workload, seeds: Iterable[int]) -> Verdict:
    """Returns the emulator's verdict on one of KERNELS on the shortened workload. Results are compared with the reference.

    Raises ValueError if the kernel does not support the workload.
    """
    emulator = the_emulator()
    small = workload.shortened(LONGEST)
    tensors = make_tensors(small, "cpu")
    prepare = _prepare_fp8 if kernel.startswith("fp8-") else _prepare
    modules, launch, check = prepare(kernel, small, tensors)

    def run(seed: int) -> Report:
        with emulated(seed, *modules) as reports:
            results = launch()
        report = reports[KERNELS[kernel]]
        if not report.bugs:
            check(results)
        return report

    verdict: Verdict = emulator.judge(run, seeds, f"{KERNELS[kernel]} on {small}")
    return verdict


Results = dict[str, Tensor]
Prepared = tuple[tuple[ModuleType, ...], Callable[[], Results], Callable[[Results], None]]


def _prepare_fp8(kernel: str, small: Workload, tensors: Tensors) -> Prepared:
    from flexattn.bench.emulated_fp8 import prepare
    from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
    from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
    from flexattn.kernels_triton.hopper import fp8_forward as hopper_fp8_forward

    return (hopper_fp8_forward, hopper_fp8_backward, hopper_fp8_fused), *prepare(kernel, small, tensors)


def _prepare(kernel: str, small: Workload, tensors: Tensors) -> Prepared:
    from flexattn.kernels_triton.blackwell import backward as blackwell_backward
    from flexattn.kernels_triton.blackwell import forward as blackwell_forward
    from flexattn.kernels_triton.hopper import backward as hopper_backward
    from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
    from flexattn.kernels_triton.hopper import backward_fused_192 as hopper_fused_192
    from flexattn.kernels_triton.hopper import forward as hopper_forward

    if kernel == "sm_100" and (small.head_dim_qk > 192 or small.head_dim_v > 128):
        raise ValueError(
            f"sm_100 takes head dims up to 192 and 128, and {small.name} has {small.head_dim_qk} and {small.head_dim_v}"
        )
    if kernel in ("fused", "sm_100-fused") and max(small.head_dim_qk, small.head_dim_v) > 128:
        raise ValueError(f"{kernel} takes head dims up to 128, and {small.name} has {small.head_dim_qk} and {small.head_dim_v}")
    if kernel == "fused-192" and (not 128 < small.head_dim_qk <= 192 or small.head_dim_v > 128):
        raise ValueError(
            f"fused-192 takes head dims from 136 to 192 and up to 128, and {small.name} has {small.head_dim_qk} and "
            f"{small.head_dim_v}"
        )
    direction = "forward" if kernel in ("forward", "sm_100") else "backward"
    forward = blackwell_forward.blackwell_forward if kernel == "sm_100" else hopper_forward.hopper_forward
    own: dict[str, Callable[..., None]] = {
        "fused": hopper_fused.fused_backward,
        "fused-192": hopper_fused_192.fused_192_backward,
        "sm_100-fused": blackwell_backward.blackwell_backward,
    }
    backward = own.get(kernel, hopper_backward.hopper_backward)
    launchers = Launchers(lambda *results, tile: forward(*results), lambda results, tile_dq, tile_dkdv: backward(results), {})
    # The forward before a backward is not under test, and runs once.
    prepared = functools.cache(lambda: with_launchers(launchers, small, tensors, direction))
    modules = (hopper_forward, hopper_backward, hopper_fused, hopper_fused_192, blackwell_forward, blackwell_backward)
    return modules, lambda: dict(prepared().results()), functools.partial(Checker(small, tensors).check, direction)
