"""The Gluon kernels for sm_90 and sm_100 in the emulator: launched as on the device, on a workload shortened for it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.check import Checker
from flexattn.bench.implementations import Launchers, with_launchers
from flexattn.bench.inputs import Tensors, arguments_of, make_tensors
from flexattn.bench.shapes import Workload
from flexattn.dispatch import eager_backend, quantization, triton_backend
from flexattn.dispatch.canary import ROUNDED_WEIGHTS
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.spec import Fp8
from flexattn.functional import bind_call
from flexattn.testing import GRADIENT_FACTOR, check_close

if TYPE_CHECKING:
    from flexattn.emulator import Report, Verdict

LONGEST = 200  # tokens of the workload's longest sequence, shortened
PROGRAMS = 3  # programs of the forward, which stay on the GPU: each then computes several blocks


class Played(NamedTuple):
    """A Gluon kernel, its family, and the module that launches it."""

    kernel: str
    family: str
    module: str


KERNELS = {
    "forward": Played("_attn_fwd_hopper_kernel", "sm_90", "hopper.forward"),
    "dq": Played("_attn_bwd_dq_hopper_kernel", "sm_90 two-kernel", "hopper.backward"),
    "dkdv": Played("_attn_bwd_dkdv_hopper_kernel", "sm_90 two-kernel", "hopper.backward"),
    "fused": Played("_attn_bwd_fused_hopper_kernel", "sm_90 fused", "hopper.backward_fused"),
    "fused-192": Played("_attn_bwd_fused_192_hopper_kernel", "sm_90 fused 192", "hopper.backward_fused_192"),
    "fp8-forward": Played("_attn_fwd_fp8_hopper_kernel", "sm_90 FP8", "hopper.fp8_forward"),
    "fp8-dq": Played("_attn_bwd_dq_fp8_hopper_kernel", "sm_90 FP8 two-kernel", "hopper.fp8_backward"),
    "fp8-dkdv": Played("_attn_bwd_dkdv_fp8_hopper_kernel", "sm_90 FP8 two-kernel", "hopper.fp8_backward"),
    "fp8-fused": Played("_attn_bwd_fused_fp8_hopper_kernel", "sm_90 FP8 fused", "hopper.fp8_backward_fused"),
    "sm_100": Played("_attn_fwd_blackwell_kernel", "sm_100", "blackwell.forward"),
    "sm_100-fused": Played("_attn_bwd_blackwell_kernel", "sm_100 fused", "blackwell.backward"),
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

    from flexattn.kernels_triton.common import preprocess, tile_schedule, tiles
    from flexattn.kernels_triton.runtime import device as device_of_calls
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
        # The kernels beside Gluon's run in the interpreter, where each program takes milliseconds: few programs do all their work.
        stack.enter_context(mock.patch.multiple(tile_schedule, _PARTS=1, _MOST_PROGRAMS=1))
        stack.enter_context(mock.patch.object(preprocess, "PREPROCESS", tiles.PREPROCESS._replace(block_m=128)))
        stack.enter_context(mock.patch.object(device_of_calls, "_num_processors", return_value=PROGRAMS))
        for module in modules:
            names = ("launch_forward", "launch_fused", "launch_two_kernels")
            launchers = [getattr(module, name).__globals__ for name in names if hasattr(module, name)]
            for namespace in launchers or [vars(module)]:
                stack.enter_context(mock.patch.dict(namespace, launch=launch_emulated))
        yield reports


def judge(kernel: str, workload: Workload, seeds: Iterable[int]) -> Verdict:
    """Returns the emulator's verdict on one of KERNELS on the shortened workload. Results are compared with the reference.

    Raises ValueError if the kernel does not support the workload.
    """
    emulator = the_emulator()
    small = workload.shortened(LONGEST)
    tensors = make_tensors(small, "cpu")
    launch, check = (_prepare_fp8 if kernel.startswith("fp8-") else _prepare)(kernel, small, tensors)
    modules = [importlib.import_module(f"flexattn.kernels_triton.{name}") for name in {x.module for x in KERNELS.values()}]

    def run(seed: int) -> Report:
        with emulated(seed, *modules) as reports:
            results = launch()
        report = reports[KERNELS[kernel].kernel]
        if not report.bugs:
            check(results)
        return report

    verdict: Verdict = emulator.judge(run, seeds, f"{KERNELS[kernel].kernel} on {small}")
    return verdict


Results = dict[str, Tensor]
Prepared = tuple[Callable[[], Results], Callable[[Results], None]]


def _run(kernel: str, call: Any) -> None:
    """Launches the family of a kernel. Raises ValueError if it does not support a call, a `Forward` or a `Backward`."""
    from flexattn.kernels_triton.common.problem import Forward
    from flexattn.kernels_triton.families import BACKWARDS, FORWARDS
    from flexattn.kernels_triton.runtime.device import pretended_device

    order: Any = (FORWARDS if isinstance(call, Forward) else BACKWARDS)[call.problem.is_fp8]
    family = next(family for family in order if family.name == KERNELS[kernel].family)
    with pretended_device(max(family.capabilities), PROGRAMS):
        reason, tile = family.unsupported(call), None
        tile = family.tile(call) if reason is None else None
    if reason is not None:
        raise ValueError(f"{kernel} does not run such a workload: {reason}")
    family.run(call, tile)


def _prepare(kernel: str, small: Workload, tensors: Tensors) -> Prepared:
    from flexattn.kernels_triton.common.problem import Forward

    direction = "forward" if kernel in ("forward", "sm_100") else "backward"
    before = kernel if direction == "forward" else "forward"  # a forward before a backward is not under test, and runs once
    launchers = Launchers(
        lambda problem, out, lse, tile: _run(before, Forward(problem, out, lse)),
        lambda call, tile_dq, tile_dkdv: _run(kernel, call),
        {},
    )
    prepared = functools.cache(lambda: with_launchers(launchers, small, tensors, direction))
    return lambda: dict(prepared().results()), functools.partial(Checker(small, tensors).check, direction)


def _prepare_fp8(kernel: str, workload: Workload, tensors: Tensors) -> Prepared:
    """Prepares a kernel on operands in e4m3 with a scale for each head, checked by the oracle on dequantised values."""
    from flexattn.kernels_triton.common.problem import Backward, Forward

    dtype = torch.float8_e4m3fn
    x, settings = bind_call(*tensors[:3], **arguments_of(workload, tensors))
    spec = ops.spec_to_run(x, settings)
    sides = [(spec.q_format, *x.packing("q")), (spec.kv_format, *x.packing("kv"))]
    whole = [quantization.Unquantized(t, *sides[n in (1, 2)], scale=None) for n, t in enumerate(tensors[:4])]
    (q, k, v, dout), scales, _ = quantization.quantize(whole, dtype, "head", 0, 0)
    descales = tuple(scales)
    spec = spec._replace(dtype=dtype, fp8=Fp8((False, True, False), 0, tensors.q.dtype, dtype, False))
    x = x._replace(q=q, k=k, v=v, descales=descales[:3])
    problem = triton_backend.to_problem(spec, x)
    exact, eager = reference_attention(spec, x), eager_backend.forward(spec, x)
    out, lse = exact[0].to(tensors.dout.dtype), exact[1].float()

    def forward() -> Results:
        results = {"out": torch.full_like(out, torch.nan), "lse": torch.full_like(lse, torch.nan)}
        _run(kernel, Forward(problem, **results))
        return results

    def check_forward(results: Results) -> None:
        check_close("out", results["out"], exact[0], eager[0])
        check_close("lse", results["lse"], exact[1], eager[1], atol=ROUNDED_WEIGHTS)

    if kernel == "fp8-forward":
        return forward, check_forward
    x, problem = x._replace(descales=descales), dataclasses.replace(problem, descales=descales)
    exact_dout = quantization.dequantize_side(spec, x, "q", dout, descales[3], torch.float64)
    wanted, budget = reference_gradients(spec, x, exact_dout), eager_backend.backward(spec, x, out, lse, dout, None)

    def backward() -> Results:
        dq, dk, dv = (torch.full(t.shape, torch.nan, dtype=out.dtype) for t in (q, k, v))
        doffset = None if tensors.softmax_offset is None else torch.empty(workload.num_heads)
        _run(kernel, Backward(problem, out, lse, dout, None, dq, dk, dv, doffset))
        return {"dq": dq, "dk": dk, "dv": dv}

    def check_backward(results: Results) -> None:
        for name, got in results.items():
            check_close(name, got, getattr(wanted, name), getattr(budget, name), factor=GRADIENT_FACTOR)

    return backward, check_backward
