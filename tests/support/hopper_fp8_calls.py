"""Calls in FP8 for tests of the sm_90 kernels: operands quantised by plain torch, and the oracle on dequantised values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, NamedTuple
from unittest import mock

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.gluon.descales import Scale
from flexattn.kernels_triton.gluon.fp8_operands import BLOCK
from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
from flexattn.kernels_triton.hopper import fp8_forward as hopper_fp8_forward
from flexattn.kernels_triton.hopper.fp8 import empty_transposed
from flexattn.testing import GRADIENT_FACTOR, check_close, reference_attention, reference_gradients
from tests.support.fp8_sums import short_sums

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
Granularity = Literal["tensor", "head", "batch_head", "block"]


def spans(problem: Problem, side: str) -> Iterator[tuple[int, int, int]]:
    """(sequence, its first row in [total, h, d] or 0, its length)."""
    x = problem.q if side == "q" else problem.k
    cu_seqlens = problem.cu_seqlens_q if side == "q" else problem.cu_seqlens_kv
    padded = problem.cu_seqlens_q_padded if side == "q" else problem.cu_seqlens_kv_padded
    for b in range(problem.batch):
        length = x.shape[-3] if cu_seqlens is None else int(cu_seqlens[b + 1] - cu_seqlens[b])
        yield b, int((cu_seqlens if padded is None else padded)[b]) if x.dim() == 3 else 0, length  # type: ignore[index]


def first_transposed(problem: Problem, side: str, b: int) -> int:
    """Returns the first tile of a sequence in a transposed tensor, in which sequences are in order even if their slots are not."""
    x = problem.q if side == "q" else problem.k
    if x.dim() == 4:
        return b * -(-x.shape[1] // BLOCK.value)
    cu_seqlens = problem.cu_seqlens_q if side == "q" else problem.cu_seqlens_kv
    assert cu_seqlens is not None
    return int(cu_seqlens[b]) // BLOCK.value + b


def rows_of(x: torch.Tensor, b: int, start: int, length: int) -> torch.Tensor:
    """[length, h, d], a view."""
    return x[start : start + length] if x.dim() == 3 else x[b, :length]


class Quantised(NamedTuple):
    values: torch.Tensor  # FP8, laid out like the dequantised tensor; padding is NaN
    scale: Scale
    stands_for: torch.Tensor  # fp32


def quantise(problem: Problem, side: str, x: torch.Tensor, granularity: Granularity, dtype: torch.dtype = E4M3) -> Quantised:
    longest = problem.longest_q if side == "q" else problem.longest_kv
    block = BLOCK.value
    blocks = -(-longest // block) if granularity == "block" else 1
    amax = torch.zeros(problem.batch, x.shape[-2], blocks)
    for b, start, length in spans(problem, side):
        rows = rows_of(x, b, start, length).float().abs()
        for n in range(blocks) if length else ():
            part = rows[n * block : (n + 1) * block] if granularity == "block" else rows
            if len(part):
                amax[b, :, n] = part.amax((0, 2))
    if granularity in ("tensor", "head"):
        amax = amax.amax((0, 1, 2) if granularity == "tensor" else (0, 2), keepdim=True)
    descale = torch.where(amax > 0, amax / LARGEST[dtype], 1.0)
    values = torch.full_like(x, float("nan"), dtype=torch.float32)
    stands_for = values.clone()
    every = descale.expand(problem.batch, x.shape[-2], blocks)
    for b, start, length in spans(problem, side):
        by_row = every[b].T.repeat_interleave(block if granularity == "block" else max(length, 1), 0)[:length, :, None]
        values_here = (rows_of(x, b, start, length).float() * (1.0 / by_row)).to(dtype).float()
        rows_of(values, b, start, length).copy_(values_here)
        rows_of(stands_for, b, start, length).copy_(values_here * by_row)
    return Quantised(values.to(dtype), Scale(descale, block if granularity == "block" else 0), stands_for)


def transposed(problem: Problem, side: str, values: torch.Tensor) -> torch.Tensor:
    """Tensor that `fp8_passes.transpose` writes: [h, blocks, d, BLOCK], tokens in order within each 16 of 2t, 2t + 1, 8 + 2t, 9
    + 2t.
    """
    block = BLOCK.value
    out = torch.full(empty_transposed(values, problem.batch).shape, float("nan"))
    order = torch.arange(block).view(-1, 2, 4, 2).transpose(1, 2).reshape(-1)
    for b, start, length in spans(problem, side):
        first = first_transposed(problem, side, b)
        rows = rows_of(values, b, start, length).float()
        for n in range(-(-length // block)):
            tile = torch.zeros(block, *rows.shape[1:])
            part = rows[n * block : (n + 1) * block]
            tile[: len(part)] = part
            out[:, first + n] = tile[order].permute(1, 2, 0)
    return out.to(values.dtype)


class Fp8Call(NamedTuple):
    problem: Problem  # with q, k and v in FP8
    v_transposed: torch.Tensor
    scales: tuple[Scale, Scale, Scale]
    spec: AttentionSpec
    stands_for: Operands  # in fp32


def fp8_call(spec: AttentionSpec, x: Operands, granularity: Granularity = "head", dtype: torch.dtype = E4M3) -> Fp8Call:
    problem = triton_backend.to_problem(spec, x)
    sides = (("q", problem.q), ("kv", problem.k), ("kv", problem.v))
    q, k, v = (quantise(problem, side, t, granularity, dtype) for side, t in sides)
    stands_for = x._replace(
        **{
            name: as_bshd(t.stands_for, fmt)
            for name, t, fmt in zip("qkv", (q, k, v), (spec.q_format, spec.kv_format, spec.kv_format), strict=True)
        }
    )
    own = dataclasses.replace(problem, q=q.values, k=k.values, v=v.values)
    return Fp8Call(own, transposed(own, "kv", v.values), (q.scale, k.scale, v.scale), spec, stands_for)


def rounded_attention(spec: AttentionSpec, x: Operands) -> tuple[torch.Tensor, ...]:
    """The budget of out and lse: eager attention in fp32, with its probabilities in e4m3 as the kernels multiply and sum them."""
    exp = torch.exp

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return (exp(t) * 256.0).clamp(max=448.0).to(E4M3).float() / 256.0

    with mock.patch.object(torch, "exp", rounded):
        return reference_attention(spec, x, dtype=torch.float32)


def moved(problem: Problem, device: str) -> Problem:
    fields = {f: getattr(problem, f) for f in problem.__dataclass_fields__}
    tensors = {f: t.to(device) for f, t in fields.items() if isinstance(t, torch.Tensor)}
    lists = {f: tuple(t.to(device) for t in fields[f]) for f in ("descales", "copies16")}
    return dataclasses.replace(problem, **tensors, **lists)


def call_on(call: Fp8Call, device: str) -> Fp8Call:
    """The forward's part of a call on another device; the oracle's stays."""
    scales = tuple(s._replace(descale=s.descale.to(device)) for s in call.scales)
    return call._replace(problem=moved(call.problem, device), v_transposed=call.v_transposed.to(device), scales=scales)  # type: ignore[arg-type]


def run_forward(
    call: Fp8Call,
    dtype: torch.dtype = torch.bfloat16,
    kernels: ModuleType = hopper_fp8_forward,
    tile: hopper_fp8_forward.Fp8Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's format, lse), which begin as NaN."""
    p, fmt = call.problem, call.spec.q_format
    like = as_bshd(p.q, fmt) if fmt != "thd" else p.q
    out = torch.full((*like.shape[:-1], call.spec.head_dim_v), float("nan"), dtype=dtype, device=p.device)
    shape = (p.num_heads, p.q.shape[0]) if fmt == "thd" else (p.batch, p.num_heads, p.q.shape[1])
    lse = torch.full(shape, float("nan"), device=p.device)
    kernels.hopper_fp8_forward(p, call.v_transposed, call.scales, as_bshd(out, fmt), lse, tile)
    return out, lse


def check_forward(call: Fp8Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    exact = reference_attention(call.spec, call.stands_for)
    check_close("out", out.cpu(), exact[0], rounded_attention(call.spec, call.stands_for)[0])
    check_close("lse", lse.cpu(), exact[1], _lse_budget(call, lse.device).cpu())


def _lse_budget(call: Fp8Call, device: torch.device) -> torch.Tensor:
    """Returns the oracle: on a GPU with scores summed like its tensor cores, on a CPU with exact ones like the emulator's."""
    if device.type == "cpu":
        return rounded_attention(call.spec, call.stands_for)[1]
    p, x = call.problem, call.stands_for
    off = torch.zeros(p.batch, p.num_heads, p.longest_q, p.longest_kv, dtype=torch.float64)
    for (b, start, length), (_, start_kv, length_kv) in zip(spans(p, "q"), spans(p, "kv"), strict=True):
        sides = ((p.q, start, length, call.scales[0]), (p.k, start_kv, length_kv, call.scales[1]))
        (q, q_scale), (k, k_scale) = (_codes(p, b, *side, device) for side in sides)
        k, k_scale = (t.repeat_interleave(p.group_size, 0) for t in (k, k_scale))
        short = (short_sums(q, k) - q @ k.mT) * q_scale * k_scale.mT
        off[b, :, :length, :length_kv] = (short * x.softmax_scale).cpu()
    spec = call.spec._replace(bias_type="post_scale_bias", bias_dims=(True,) * 4)  # type: ignore[arg-type]
    return rounded_attention(spec, x._replace(bias=off))[1]


def _codes(
    problem: Problem, b: int, t: torch.Tensor, start: int, length: int, scale: Scale, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """([h, length, d] as FP8 numbers, their descales [h, length, 1]), in fp64."""
    rows = rows_of(t, b, start, length).to(device).double().transpose(0, 1)
    descale = scale.descale.to(device).double()
    every = descale.expand(problem.batch, rows.shape[0], descale.shape[-1])[b]
    if scale.is_blockwise:
        every = every.repeat_interleave(scale.block_rows, 1)[:, :length]
    return rows, every[..., None].expand(*rows.shape[:2], 1)


def on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets calls on a CPU take the backwards of sm_90, whatever was measured."""
    monkeypatch.setattr(families, "capability_of", lambda device: 90)
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(ignores_measurements=True))
    monkeypatch.setitem(families.FORWARDS, True, (families.PORTABLE_FORWARD,))


class Fp8Backward(NamedTuple):
    call: Fp8Call
    problem: Problem  # the call's, with the descales of q, k, v and dout
    out: torch.Tensor  # the oracle's, in a half type; laid out as dout, in its format
    lse: torch.Tensor
    dout: torch.Tensor  # in FP8, as the problem has q
    given: torch.Tensor  # dout before
    stands_for: torch.Tensor  # dequantised, in fp32


def backward_of(call: Fp8Call, dout: torch.Tensor, granularity: Granularity = "head", dtype: torch.dtype = E4M3) -> Fp8Backward:
    rows = quantise(call.problem, "q", as_bshd(dout, call.spec.q_format), granularity, dtype)
    scales = (*call.scales, rows.scale)
    problem = dataclasses.replace(call.problem, descales=tuple(scale.descale for scale in scales), scale_rows=rows.scale.block_rows)
    out, lse, _ = reference_attention(call.spec, call.stands_for)
    stands_for = as_bshd(rows.stands_for, call.spec.q_format)
    return Fp8Backward(call, problem, out.to(dout.dtype), lse.float(), rows.values, dout, stands_for)


def run_backward(
    backward: Fp8Backward,
    device: str = "cpu",
    kernels: ModuleType = hopper_fp8_fused,
    tile: hopper_fp8_fused.Fp8FusedTile | hopper_fp8_backward.Fp8BackwardTile | None = None,
    fp32: bool = False,
) -> list[torch.Tensor]:
    """[dq, dk, dv] in their formats, which begin as NaN. fp32: whether they are in float32."""
    call, problem = backward.call, moved(backward.problem, device)
    spec, dtype = call.spec, torch.float32 if fp32 else backward.out.dtype
    grads = [torch.full(t.shape, float("nan"), dtype=dtype, device=device) for t in call.stands_for[:3]]
    views = [as_bshd(t, fmt) for t, fmt in zip(grads, (spec.q_format, spec.kv_format, spec.kv_format), strict=True)]
    doffset = torch.empty(spec.num_heads, device=device) if problem.softmax_offset is not None else None
    out, lse, dout = (t.to(device) for t in (as_bshd(backward.out, spec.q_format), backward.lse, backward.dout))
    assert kernels.unsupported(problem, out, dout) is None
    run = kernels.fp8_backward if hasattr(kernels, "fp8_backward") else kernels.fp8_fused_backward
    run(Backward(problem, out, lse, dout, None, *views, doffset), tile)
    return grads


def check_backward(backward: Fp8Backward, grads: list[torch.Tensor]) -> None:
    """The budget is the error of dout in FP8 and of a 16-bit out in their sums; everything else is exact."""
    call, spec = backward.call, backward.call.spec
    exact = reference_gradients(spec, call.stands_for, backward.given)
    error = backward.out.double() - reference_attention(spec, call.stands_for)[0]
    # dlse is subtracted from such a sum.
    dlse = -(error * backward.stands_for).nan_to_num().sum(-1)
    dlse = as_bshd(dlse[..., None], spec.q_format)[..., 0].transpose(-1, -2).contiguous()
    budget = reference_gradients(spec, call.stands_for, backward.stands_for, dlse)
    for name, got, want, eager in zip(("dq", "dk", "dv"), grads, exact, budget, strict=False):
        check_close(name, got.cpu(), want, eager, factor=GRADIENT_FACTOR)
