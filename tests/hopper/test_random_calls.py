"""Random calls (fuzz_calls.py) in the kernels for sm_90, which the emulator runs."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, Results, as_bshd
from flexattn.emulator import Report
from flexattn.functional import bind_call
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.hopper import backward as hopper_backward
from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
from flexattn.kernels_triton.hopper import conditions, wide_forward
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.runtime.device import pretended_device
from tests.fuzz.calls import Call
from tests.fuzz.check import Verdicts, compare
from tests.fuzz.config import FEATURES, HALF, Where, draw_config
from tests.support.gluon_calls import HARMLESS, without_gpu

WHERE = Where("triton", "cpu", HALF, (64, 128, 128, 40, 96, 192, 256), (270, 300), 2, frozenset(FEATURES))
WIDE = WHERE._replace(head_dims=(320, 512, 264), longest=(130, 200))
FEW, MANY = 6, 100


def rows_and_lse(call: Call, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Memory for out, in q's format, and lse; poisoned."""
    dout, dlse = call.tensors["dout"], call.tensors["dlse"]
    return torch.full(tuple(dout.shape), float("nan"), dtype=spec.dtype), torch.full(tuple(dlse.shape), float("nan"))


def draw_for_hopper(seed: int, is_wide: bool = False) -> tuple[Call, AttentionSpec, Operands]:
    """The first call, from a seed on, for the forward for sm_90, or for its row for head dims above 256."""
    for own in count(1000 * seed):
        config = draw_config(own, WIDE if is_wide else WHERE)
        if config.kind != "ordinary" or config.listed:
            continue
        layouts = config.layouts | {"dout": "plain", "dlse": "plain"}  # with the backend's arguments for kernels
        config = config._replace(
            layouts=layouts,
            wants=frozenset({"q", "k", "v", "softmax_offset"}),
            loss=frozenset({"out", "lse"}),
            page_size=0,
            results=Results(),
        )
        call = Call(config, seed)
        x, settings = bind_call(**call.arguments())
        spec = ops.spec_to_run(x, settings)
        problem = mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "forward")
        with pretended_device(90, 132):
            rows = as_bshd(rows_and_lse(call, spec)[0], spec.q_format)
            unsupported = (
                conditions.wide_unsupported(problem, rows, False) if is_wide else conditions.forward_unsupported(problem, rows)
            )
        if unsupported is None:
            return call, spec, x
    raise AssertionError


@pytest.mark.sample
@without_gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a call without max_seqlen, a mod that is traced again
@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(FEW, MANY))])
def test_emulated(seed: int) -> None:
    call, spec, x = draw_for_hopper(seed)
    verdicts, parts = Verdicts(), 1 + seed % 3
    out, lse = rows_and_lse(call, spec)
    rows = as_bshd(out, spec.q_format)
    problem = triton_backend.to_problem(spec, x)
    with emulated(seed, hopper_forward) as reports:
        hopper_forward.hopper_forward(mask_blocks.with_mask_blocks(problem, "forward"), rows, lse, splits=parts)
    check_reports(reports)
    compare(verdicts, "forward", call, {"out": out, "lse": lse})

    dout, dlse = call.tensors["dout"], call.tensors["dlse"]
    problem, formats = mask_blocks.with_mask_blocks(problem, "backward"), (spec.q_format, spec.kv_format, spec.kv_format)
    for unsupported, backward in (
        (conditions.backward_unsupported, hopper_backward.hopper_backward),
        (conditions.fused_unsupported, hopper_fused.fused_backward),
    ):
        with pretended_device(90, 132):
            if unsupported(problem, rows, as_bshd(dout, spec.q_format)) is not None:
                continue
        gradients = {
            f"d{name}": torch.full(tuple(t.shape), float("nan"), dtype=t.dtype)
            for name, t in zip("qkv", (x.q, x.k, x.v), strict=True)
        }
        views = [as_bshd(t, fmt) for t, fmt in zip(gradients.values(), formats, strict=True)]
        doffset = torch.empty(spec.num_heads) if x.softmax_offset is not None else None
        with emulated(seed, hopper_backward, hopper_fused) as reports:
            backward(Backward(problem, rows, lse, as_bshd(dout, spec.q_format), dlse, *views, doffset))
        check_reports(reports)
        if doffset is not None:
            gradients["dsoftmax_offset"] = doffset.to(call.tensors["softmax_offset"].dtype)
        compare(verdicts, backward.__name__, call, gradients)
    wrong = verdicts.failures()
    assert not wrong, "\n".join(wrong)


@without_gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, MANY))])
def test_wide_emulated(seed: int) -> None:
    call, spec, x = draw_for_hopper(seed, is_wide=True)
    verdicts = Verdicts()
    out, lse = rows_and_lse(call, spec)
    problem = mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "forward")
    with emulated(seed, wide_forward) as reports:
        wide_forward.wide_forward(problem, as_bshd(out, spec.q_format), lse, splits=1 + seed % 3)
    check_reports(reports)
    compare(verdicts, "forward", call, {"out": out, "lse": lse})
    wrong = verdicts.failures()
    assert not wrong, "\n".join(wrong)


def check_reports(reports: dict[str, Report]) -> None:
    for name, report in reports.items():
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}: {report}"
