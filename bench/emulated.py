"""The Gluon kernels for sm_90 in the emulator: launched as on the device, on a workload shortened for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from flexattn.bench.check import Checker
from flexattn.bench.implementations import problem_of
from flexattn.bench.inputs import make_tensors
from flexattn.bench.shapes import Workload

if TYPE_CHECKING:
    from flexattn.emulator import Report, Verdict

LONGEST = 200  # tokens of the workload's longest sequence, shortened
PROGRAMS = 3  # of the forward's, whose programs stay: each then does several blocks
KERNELS = {
    "forward": "_attn_fwd_hopper_kernel",
    "dq": "_attn_bwd_dq_hopper_kernel",
    "dkdv": "_attn_bwd_dkdv_hopper_kernel",
}


@contextmanager
def emulated(seed: int, *modules: ModuleType) -> Iterator[dict[str, Report]]:
    """Inside, what these modules launch in Gluon runs in the emulator, the rest as ever; the reports, by kernel, fill up."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    from flexattn import emulator
    from flexattn.kernels_triton.launch import launch

    reports: dict[str, Report] = {}

    def launch_emulated(kernel: Any, programs: int, device: torch.device, tile: Any, arguments: tuple[Any, ...]) -> None:
        if not isinstance(kernel, GluonJITFunction):
            launch(kernel, programs, device, tile, arguments)
        elif programs:
            reports[kernel.__name__] = emulator.launch(kernel, (programs,), *arguments, num_warps=4, seed=seed)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", launch_emulated))
            if hasattr(module, "num_processors"):
                stack.enter_context(mock.patch.object(module, "num_processors", return_value=PROGRAMS))
        yield reports


def judge(kernel: str, workload: Workload, seeds: Iterable[int]) -> Verdict:
    """What the emulator says of "forward", "dq" or "dkdv" on the workload, shortened; results are held to the reference."""
    from flexattn import emulator
    from flexattn.kernels_triton import hopper_backward, hopper_forward

    small = workload.shortened(LONGEST)
    tensors = make_tensors(small, "cpu")
    checker = Checker(small, tensors)
    problem = problem_of(small, tensors)
    q, k, v, dout = tensors[:4]

    def run(seed: int) -> Report:
        out = torch.full_like(dout, float("nan"))
        shape = (small.num_heads, q.shape[0]) if small.is_ragged else (small.batch, small.num_heads, q.shape[1])
        lse = torch.full(shape, float("nan"))
        with emulated(seed, hopper_forward, hopper_backward) as reports:
            hopper_forward.hopper_forward(problem, out, lse)
            if kernel != "forward":
                dq, dk, dv = (torch.full_like(t, float("nan")) for t in (q, k, v))
                doffset = torch.empty(small.num_heads) if tensors.softmax_offset is not None else None
                hopper_backward.hopper_backward(problem, out, lse, dout, None, dq, dk, dv, doffset)
        report = reports[KERNELS[kernel]]
        if not report.bugs:
            if kernel == "forward":
                checker.check("forward", {"out": out})
            else:
                checker.check("backward", {"dq": dq, "dk": dk, "dv": dv})
        return report

    return emulator.judge(run, seeds, f"{KERNELS[kernel]} on {small}")
