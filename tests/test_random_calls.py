"""Features that meet at random, against the reference: `attention` on the Triton backend, and the kernels for sm_90 emulated."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from random_calls import HALF, RandomCall, check_gradient, draw_call
from test_hopper_emulated import HARMLESS, without_gpu
from test_splits import FAMILIES
from torch import Tensor

import flexattn
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd
from flexattn.emulator import Report
from flexattn.kernels_triton import hopper_backward, hopper_forward, hopper_one_pass, mask_blocks, splits
from flexattn.kernels_triton.launch import pretended_device
from flexattn.testing import check_close, make_dlse, make_dout, reference_attention, reference_gradients


def seeds(few: int, many: int) -> list[Any]:
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(few, many))]


@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("seed", seeds(30, 400))
def test_attention(seed: int, hopper: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    monkeypatch.setattr(splits, "SPLIT_KEYS", 48)
    call = draw_call(seed, device, (*HALF, torch.float32), (16, 8, 24, 40, 64, 72, 96), 150)
    leaves = [t.detach().requires_grad_() for t in call.inputs[:3]]
    inputs = call.inputs._asdict() | dict(zip("qkv", leaves, strict=True))
    out, lse = flexattn.attention(**inputs, **call.arguments, return_lse=True, backend="triton")
    spec, x = call.spec, call.operands
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    for name, got, want, same_dtype in zip(("out", "lse"), (out, lse), exact, budget, strict=False):
        check_close(name, got, want, same_dtype, largest_score=max(0.0, float(exact[1].detach().max())))

    dout, dlse = make_dout(call.inputs), make_dlse(call.inputs)
    torch.autograd.backward((out, lse), (dout, dlse))
    exact, budget = (reference_gradients(spec, x, dout, dlse, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    leaves += [t for t in (x.bias, x.softmax_offset) if t is not None]
    names = [name for name, t in zip(exact._fields, exact[:5], strict=False) if t is not None]
    for name, leaf in zip(names, leaves, strict=True):
        check_gradient(call, name, leaf.grad, getattr(exact, name), getattr(budget, name))
    captured = [t for t in x.mod_tensors if t.requires_grad]
    assert all(t.grad is not None and t.grad.isfinite().all() for t in captured)
    if spec.dtype is torch.float32:  # in half a few elements' error, summed over all scores, is no budget for others
        for t, want, same_dtype in zip(captured, exact.dmod_tensors or (), budget.dmod_tensors or (), strict=True):
            check_gradient(call, "the gradient of a capture", t.grad, want, same_dtype)


def rows_and_lse(call: RandomCall) -> tuple[Tensor, Tensor]:
    """Memory for out, in q's format, and lse; poisoned."""
    q, v, spec = call.operands.q, call.operands.v, call.spec
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype)
    rows = as_bshd(q, spec.q_format)
    shape = (spec.num_heads, len(q)) if spec.q_format == "thd" else (rows.shape[0], spec.num_heads, rows.shape[1])
    return out, torch.full(shape, float("nan"))


def draw_for_hopper(seed: int) -> RandomCall:
    """The first from a seed on that the forward for sm_90 takes."""
    for own in count(1000 * seed):
        call = draw_call(own, "cpu", HALF, (64, 128, 128, 40, 96, 192, 256), 270)
        problem = mask_blocks.with_mask_blocks(triton_backend._problem(call.spec, call.operands), "forward")
        with pretended_device(90, 132):
            refusal = hopper_forward.refusal(problem, as_bshd(rows_and_lse(call)[0], call.spec.q_format))
        if refusal is None:
            return call
    raise AssertionError


@without_gpu
@pytest.mark.parametrize("seed", seeds(6, 100))
def test_emulated(seed: int) -> None:
    call = draw_for_hopper(seed)
    spec, x, parts = call.spec, call.operands, 1 + seed % 3
    out, lse = rows_and_lse(call)
    rows = as_bshd(out, spec.q_format)
    problem = triton_backend._problem(spec, x)
    with emulated(seed, hopper_forward) as reports:
        hopper_forward.hopper_forward(mask_blocks.with_mask_blocks(problem, "forward"), rows, lse, splits=parts)
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    check_reports(reports)
    for name, got, want, same_dtype in zip(("out", "lse"), (out, lse), exact, budget, strict=False):
        check_close(name, got, want, same_dtype, largest_score=max(0.0, float(exact[1].detach().max())))

    dout, dlse = make_dout(call.inputs), make_dlse(call.inputs)
    exact, budget = (reference_gradients(spec, x, dout, dlse, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    problem, formats = mask_blocks.with_mask_blocks(problem, "backward"), (spec.q_format, spec.kv_format, spec.kv_format)
    for module, backward in (
        (hopper_backward, hopper_backward.hopper_backward),
        (hopper_one_pass, hopper_one_pass.one_pass_backward),
    ):
        with pretended_device(90, 132):
            if module.refusal(problem, rows, as_bshd(dout, spec.q_format)) is not None:
                continue
        gradients = [torch.full_like(t, float("nan"), memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)]
        views = [as_bshd(t, fmt) for t, fmt in zip(gradients, formats, strict=True)]
        doffset = torch.empty(spec.num_heads) if x.softmax_offset is not None else None
        with emulated(seed, hopper_backward, hopper_one_pass) as reports:
            backward(problem, rows, lse, as_bshd(dout, spec.q_format), dlse, *views, doffset)
        check_reports(reports)
        for name, got, want, same_dtype in zip(("dq", "dk", "dv"), gradients, exact[:3], budget[:3], strict=True):
            check_gradient(call, name, got, want, same_dtype)
        if doffset is not None:
            check_gradient(call, "dsoftmax_offset", doffset, exact.dsoftmax_offset, budget.dsoftmax_offset)


def check_reports(reports: dict[str, Report]) -> None:
    for name, report in reports.items():
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}: {report}"
