"""The kernel that merges attention over two sets of keys: the results of torch ops, in every format and any strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable import merge as kernels
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound

SHAPES = {"bshd": (2, 21, 3, 40), "sbhd": (21, 2, 3, 40), "bhsd": (2, 3, 21, 40), "thd": (37, 3, 40)}


def sides(fmt: str, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = SHAPES[fmt]
    lse_shape = (3, 37) if fmt == "thd" else (2, 3, 21)
    tensors: list[Tensor] = []
    for _ in "ab":
        lse = 30 * torch.randn(lse_shape, generator=generator)
        lse[..., 4] = -math.inf
        tensors += (torch.randn(shape, generator=generator).to(dtype), lse)
    tensors[1][..., 5] = -math.inf
    tensors[3][..., 6] = -math.inf
    return tuple(t.to(device) for t in tensors)


def merged_in_fp64(fmt: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return flexattn.merge_attention(*(t.double().cpu() for t in tensors), qkv_format=fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", SHAPES)
def test_the_result_of_torch_ops(fmt: str, dtype: torch.dtype, device: str) -> None:
    tensors = sides(fmt, dtype, device)
    assert triton_backend.can_merge(*tensors)
    out, lse = triton_backend.merge(fmt, *tensors)
    exact_out, exact_lse = merged_in_fp64(fmt, tensors)
    assert out.dtype is dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.cpu(), exact_out.to(dtype))
    torch.testing.assert_close(lse.cpu(), exact_lse.float(), rtol=1e-6, atol=1e-6)


def test_rows_in_larger_tensors(device: str) -> None:
    out_a, lse_a, out_b, lse_b = sides("bshd", torch.float32, device)
    wide = torch.full((2, 21, 6, 48), math.nan, device=device)
    wide[:, :, ::2, :40] = out_a
    strided = (wide[:, :, ::2, :40], lse_a.transpose(1, 2).contiguous().transpose(1, 2), out_b, lse_b)
    for got, want in zip(
        triton_backend.merge("bshd", *strided), triton_backend.merge("bshd", out_a, lse_a, out_b, lse_b), strict=True
    ):
        assert torch.equal(got, want)


def test_no_rows(device: str) -> None:
    out, lse = torch.zeros(0, 3, 8, device=device), torch.zeros(3, 0, device=device)
    merged = triton_backend.merge("thd", out, lse, out, lse)
    assert [tuple(t.shape) for t in merged] == [(0, 3, 8), (3, 0)]


def test_calls_that_the_kernel_leaves_to_torch() -> None:
    out, lse = torch.zeros(4, 3, 8), torch.zeros(3, 4)
    assert not triton_backend.can_merge(out.double(), lse.double(), out.double(), lse.double())
    last_dim = torch.zeros(4, 3, 16)[..., ::2]
    assert not triton_backend.can_merge(last_dim, lse, out, lse)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_compiled(capability: int) -> None:
    out, lse = torch.zeros(1, 64, 4, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 64)
    with pretended_device(capability, 132), recorded_launches() as launches:
        kernels.merge((out, lse), (out, lse), (torch.empty_like(out), torch.empty_like(lse)))
    (report,) = compile_sound([request_for(launches[0], capability)])
    assert report.spill_store_bytes == 0


def test_a_wrong_share_is_found() -> None:
    """The comparison above can fail."""
    tensors = sides("bshd", torch.float32, "cpu")
    wanted: Any = merged_in_fp64("bshd", tensors)[0].float()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(triton_backend.merge("bshd", tensors[0], tensors[3], tensors[2], tensors[1])[0], wanted)
