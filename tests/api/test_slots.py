"""Slots of packed tensors, the starts of sequences: any order, any first start, unused rows, and wrong numbers within bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexattn import attention, fp8
from flexattn.testing import check_close

HEADS, HEADS_KV, DIM = 2, 1, 16
GUARD = 96  # rows before and after each tensor


class Layout(NamedTuple):
    starts: tuple[int, ...] | None  # None: none are given
    lengths: tuple[int, ...]
    total: int
    first: int = 0  # of cu_seqlens, where there are no starts


LAYOUTS = {
    "before the first slot": Layout((40, 80, 100), (33, 20, 5), 120),
    "in reverse": Layout((90, 50, 2), (20, 40, 35), 113),
    "any order": Layout((70, 0, 40, 100, 35), (25, 30, 3, 20, 5), 130),
    "empty ones anywhere": Layout((50, 55, 0, 50, 7), (40, 0, 7, 0, 12), 100),
    "only empty ones": Layout((30, 3), (0, 0), 70),
    "padded on the left": Layout((40, 100, 129), (24, 28, 63), 192),
    "behind the last, no starts": Layout(None, (33, 20, 5), 150),
    "before the first, no starts": Layout(None, (33, 20, 5), 150, 70),
}


def guarded(*shape: int, device: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns a tensor of NaN with random rows of sequences, so that a read outside of them shows."""
    memory = torch.full((shape[0] + 2 * GUARD, *shape[1:]), torch.nan, dtype=dtype, device=device)
    own = memory[GUARD : GUARD + shape[0]]
    own.copy_(torch.randn(shape, generator=generator))
    return own


def cumulative(lengths: tuple[int, ...], first: int = 0) -> list[int]:
    return [first, *(first + sum(lengths[: i + 1]) for i in range(len(lengths)))]


def arguments(layout: Layout, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """q, k and v with NaN in the padding, the rest of a call, and which rows are real."""
    gen = torch.Generator().manual_seed(0)
    inputs = [guarded(layout.total, n, DIM, device=device, dtype=dtype, generator=gen) for n in (HEADS, HEADS_KV, HEADS_KV)]
    cu = cumulative(layout.lengths, layout.first)
    real = torch.zeros(layout.total, dtype=torch.bool, device=device)
    for start, length in zip(layout.starts or cu, layout.lengths, strict=False):
        real[start : start + length] = True
    for x in inputs:
        x[~real] = torch.nan
        x.requires_grad_()
    cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=device)
    call: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    if layout.starts is not None:
        starts = torch.tensor([*layout.starts, layout.total], dtype=torch.int32, device=device)
        call |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    longest = max(1, *layout.lengths)
    return inputs, {**call, "max_seqlen_q": longest, "max_seqlen_kv": longest}, real


def expected_of(layout: Layout, inputs: list[Tensor], dtype: torch.dtype, **call: Any) -> list[Tensor]:
    """out, lse and the gradients, one sequence after the other, in a dense call each."""
    starts = layout.starts or cumulative(layout.lengths, layout.first)
    out = torch.zeros(layout.total, HEADS, DIM, dtype=dtype, device=inputs[0].device)
    lse = torch.full((HEADS, layout.total), -torch.inf, dtype=dtype, device=out.device)
    gradients = [torch.zeros_like(x, dtype=dtype) for x in inputs]
    for start, length in zip(starts, layout.lengths, strict=False):
        if length == 0:
            continue
        rows = slice(start, start + length)
        parts = [x.detach()[None, rows].to(dtype).requires_grad_() for x in inputs]
        own_out, own_lse = attention(*parts, return_lse=True, backend="eager", **call)
        for gradient, own in zip(gradients, torch.autograd.grad(loss(own_out, own_lse), parts), strict=True):
            gradient[rows] = own[0]
        out[rows], lse[:, rows] = own_out[0].detach(), own_lse[0].detach()
    return [out, lse, *gradients]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).double().sin().sum()


@pytest.mark.sample("name", "mask_type", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_sequence_and_zeros_elsewhere(name: str, mask_type: str, backend: str, device: str) -> None:
    layout = LAYOUTS[name]
    inputs, call, real = arguments(layout, device, torch.float32)
    dense = {"attn_mask_type": "causal"} if mask_type == "padding_causal" else {}
    exact, budget = (expected_of(layout, inputs, dtype, **dense) for dtype in (torch.float64, torch.float32))
    for deterministic in (False, True):
        out, lse = attention(
            *inputs, **call, attn_mask_type=mask_type, return_lse=True, deterministic=deterministic, backend=backend
        )
        found = [out, lse, *torch.autograd.grad(loss(out, lse), inputs)]
        for label, got, want, allowed in zip(("out", "lse", "dq", "dk", "dv"), found, exact, budget, strict=True):
            rows = got.transpose(0, 1) if label == "lse" else got
            assert (rows[~real] == (-torch.inf if label == "lse" else 0)).all(), label
            check_close(label, *(x.transpose(0, 1)[real] if label == "lse" else x[real] for x in (got, want, allowed)), factor=4)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(
    "name", ["in reverse", "any order", "empty ones anywhere", "padded on the left", "before the first, no starts"]
)
def test_in_fp8(name: str, granularity: str, backend: str, device: str) -> None:
    """Also the transposed copies, in which sequences lie in an order of their own."""
    layout = LAYOUTS[name]
    inputs, call, real = arguments(layout, device, torch.bfloat16)
    recipe = fp8.Recipe(granularity=granularity, **({"block_rows": 64} if granularity == "block" else {}))
    out, lse = attention(*inputs, **call, attn_mask_type="padding", return_lse=True, fp8_recipe=recipe, backend=backend)
    found = [out, lse, *torch.autograd.grad(loss(out, lse), inputs)]
    for label, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, expected_of(layout, inputs, torch.float64), strict=True):
        if label == "lse":
            got, want = got.transpose(0, 1), want.transpose(0, 1)
        assert (got[~real] == (-torch.inf if label == "lse" else 0)).all(), label
        error = (got[real].double() - want[real]).norm() / want[real].norm().clamp(min=1e-9)
        assert error < 0.12, (label, error)  # of numbers with three bits of mantissa


@pytest.mark.parametrize(
    "name", ["any order", "empty ones anywhere", "only empty ones", "before the first, no starts", "behind the last, no starts"]
)
def test_quantised_data(name: str, device: str) -> None:
    inputs, call, real = arguments(LAYOUTS[name], device, torch.bfloat16)
    padded = call.get("cu_seqlens_q_padded")
    x = inputs[0].detach()
    t = fp8.quantize(
        x, qkv_format="thd", cu_seqlens=call["cu_seqlens_q"], cu_seqlens_padded=padded, max_seqlen=call["max_seqlen_q"]
    )
    assert not t.data.view(torch.uint8)[~real].any()
    values = fp8.dequantize(t, qkv_format="thd", cu_seqlens=call["cu_seqlens_q"], cu_seqlens_padded=padded, dtype=torch.float32)
    torch.testing.assert_close(values[real], x[real].float(), atol=0.05, rtol=0.07)


WRONG = {
    "decreasing": (5, 3, 60, 2, 40),
    "negative": (-5, -1, -70, 10, 20),
    "past the end": (0, 10, 1000, 2**31 - 1, 70),
    "extremes": (2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0),
    "all past the end": (500, 600, 700, 800, 900),
    "extremes, rising": (-(2**31), 2**31 - 1, 0, 80, 2**31 - 1),
}


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("fp8_too", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((name, None) for name in WRONG),
        *((None, name) for name in WRONG),
        ("extremes", "extremes, rising"),
        ("past the end", "negative"),
    ],
)
def test_wrong_numbers_touch_nothing_outside(
    name: str | None, padded: str | None, fp8_too: bool, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")  # a CPU would raise
    gen = torch.Generator().manual_seed(0)
    total = 80
    dtype = torch.bfloat16 if fp8_too else torch.float32
    inputs = [guarded(total, n, DIM, device=device, dtype=dtype, generator=gen) for n in (HEADS, HEADS_KV, HEADS_KV)]
    right = (0, 20, 40, 60, 80)
    cu, starts = (
        torch.tensor(right if which is None else WRONG[which], dtype=torch.int32, device=device) for which in (name, padded)
    )
    call: dict[str, Any] = {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts} if padded is not None else {}
    call |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    leaves = [x.requires_grad_() for x in inputs]
    recipe = fp8.Recipe() if fp8_too else None
    out = attention(*leaves, qkv_format="thd", attn_mask_type="padding_causal", fp8_recipe=recipe, backend=backend, **call)
    gradients = torch.autograd.grad(out.sum(), leaves)
    # What is read outside of the tensors is NaN, and so would be what comes of it; what no row owns is at liberty.
    assert all(not t.isnan().any() for t in (out, *gradients)) or padded is not None or fp8_too
    for x in inputs:
        memory = x.detach()._base if x._base is not None else None
        if memory is not None:
            assert memory[:GUARD].isnan().all()
            assert memory[-GUARD:].isnan().all()
