"""Rows at any stride and any address on a GPU: forward and backward, over and over, with other kernels in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import ops
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.functional import bind_call
from flexattn.testing import GRADIENT_FACTOR, check_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

BATCH, HEADS, QUERIES = 2, 3, 50  # so few that under a causal band no block of keys is seen whole: the first loop has no turn
REPEATS = 5


def rows(length: int, head_dim: int, dtype: torch.dtype, padding: int, offset: int, seed: int) -> Tensor:
    """Standard normal [b, s, h, d], of which a row begins head_dim + padding elements behind the one before; NaN in between."""
    width = head_dim + padding
    memory = torch.full((BATCH * length * HEADS * width + offset,), torch.nan, dtype=dtype, device="cuda")
    view = memory[offset:].view(BATCH, length, HEADS, width)[..., :head_dim]
    generator = torch.Generator("cuda").manual_seed(seed)
    return view.copy_(torch.randn(view.shape, device="cuda", generator=generator))


def other_kernels(turn: int) -> None:
    """Leaves other numbers in registers and in shared memory than the turn before."""
    for dtype in (torch.float16, torch.float32):
        a = torch.full((256 + 64 * turn, 512), float(turn), dtype=dtype, device="cuda")
        (a @ a.T).softmax(-1).sort(-1)
    q = torch.full((1, 200 + 100 * turn, 2, 64 * (1 + turn % 2)), float(turn), dtype=torch.bfloat16, device="cuda")
    flexattn.attention(q, q, q, attn_mask_type="causal" if turn % 2 else "no_mask", backend="triton")


def check(dtype: torch.dtype, head_dim: int, length: int, padding: int, offset: int, **how: Any) -> None:
    sizes = (QUERIES, length, length)
    q, k, v = (rows(n, head_dim, dtype, padding, offset, seed).requires_grad_() for seed, n in enumerate(sizes))
    dout = rows(QUERIES, head_dim, dtype, padding, offset, 3)
    x, settings = bind_call(q, k, v, backend="triton", **how)
    spec = ops.spec_to_run(x, settings)
    exact_out, exact = reference_attention(spec, x)[0], reference_gradients(spec, x, dout)
    eager_out, eager = reference_attention(spec, x, dtype)[0], reference_gradients(spec, x, dout, None, dtype)
    first: list[Tensor] = []
    for turn in range(REPEATS):
        other_kernels(turn)
        out = flexattn.attention(q, k, v, backend="triton", **how)
        other_kernels(turn + 1)
        found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        check_close("out", out, exact_out, eager_out)
        for name, got in zip(("dq", "dk", "dv"), found[1:], strict=True):
            check_close(name, got, getattr(exact, name), getattr(eager, name), factor=GRADIENT_FACTOR)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), "bits differ from those of the first time"


@pytest.mark.parametrize("hopper", ["never", "auto"])
@pytest.mark.parametrize("padding", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
def test_row_strides_of_any_number_of_elements(
    head_dim: int, dtype: torch.dtype, padding: int, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    check(dtype, head_dim, QUERIES, padding, 0, attn_mask_type="causal", deterministic=True)


@pytest.mark.parametrize("hopper", ["never", "auto"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("how", [{}, {"attn_mask_type": "causal", "window_size": (70, 0)}], ids=["full", "windowed"])
def test_longer_ones_have_turns_in_each_loop(
    how: dict[str, Any], head_dim: int, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    check(torch.bfloat16, head_dim, 300, 1, 0, deterministic=True, **how)


@pytest.mark.parametrize("hopper", ["never", "auto"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_addresses_of_any_number_of_elements(
    dtype: torch.dtype, head_dim: int, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides are multiples of 16 bytes, and no row begins at one."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    check(dtype, head_dim, QUERIES, 8, 1, attn_mask_type="causal", deterministic=True)
