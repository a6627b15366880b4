"""Rows that the Triton backend copies before a kernel loads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch.triton_backend import _loadable
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.runtime.device import Tile

GPU = torch.cuda.is_available()


def rows(width: int, device: str, dtype: torch.dtype = torch.float16, queries: int = 50, head_dim: int = 96) -> Tensor:
    """[2, queries, 3, head_dim], with `width` elements between the beginnings of rows."""
    return torch.randn(2, queries, 3, width, device=device).to(dtype)[..., :head_dim]


@pytest.mark.parametrize("width", [97, 98, 100, 103])
def test_rows_off_multiples_of_8_elements_are_copied_on_a_gpu(width: int) -> None:
    x = rows(width, "meta")  # like a GPU's, except for the address
    assert _loadable(x).is_contiguous()
    assert _loadable(x) is not x
    on_cpu = rows(width, "cpu")
    assert _loadable(on_cpu) is on_cpu  # the interpreter takes any


@pytest.mark.parametrize("x", [rows(96, "meta"), rows(104, "meta"), rows(96, "meta").transpose(1, 2), rows(97, "meta", queries=0)])
def test_other_views_stay(x: Tensor) -> None:
    assert _loadable(x) is x


def test_heads_that_are_expanded_stay() -> None:
    x = torch.empty(2, 50, 1, 96, device="meta").expand(2, 50, 3, 96)
    assert _loadable(x) is x


def test_a_dim_of_one_has_no_stride() -> None:
    x = torch.empty_strided((1, 50, 1, 96), (97, 96, 13, 1), device="meta")
    assert _loadable(x) is x


def test_a_launcher_takes_no_other_rows() -> None:
    x = rows(97, "meta")
    with pytest.raises(ValueError, match=r"q has shape \(2, 50, 3, 96\) and strides .*; accepted on a GPU: .*; pass q.contiguous"):
        Problem(x, x, x, softmax_scale=0.1).meta(Tile(64, 64, 4, 1))


@pytest.mark.skipif(not GPU, reason="needs a GPU, and torch.cuda.is_available() is False")
@pytest.mark.parametrize("hopper", ["never", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "offset"), [(97, 0), (98, 0), (100, 0), (96, 1), (104, 3)])
@pytest.mark.parametrize("queries", [1, 50, 300])
def test_on_a_gpu(width: int, offset: int, dtype: torch.dtype, queries: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries under a causal band, so that no block of keys is fully visible and a kernel's first loop is empty."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    made = []
    for seed, length in enumerate((queries, 100, 100, queries)):
        torch.manual_seed(seed)
        memory = torch.randn(2 * length * 3 * width + offset, device="cuda").to(dtype)
        made.append(memory[offset:].view(2, length, 3, width)[..., :96])
    *qkv, dout = made
    leaves = [t.detach().requires_grad_() for t in qkv]
    wanted = [t.double().detach().requires_grad_() for t in qkv]
    out = flexattn.attention(*wanted, attn_mask_type="causal", backend="eager")
    expected = [out, *torch.autograd.grad(out, wanted, dout.double())]
    for _ in range(4):  # the first call, a recorded one, and replayed ones
        got = flexattn.attention(*leaves, attn_mask_type="causal", backend="triton")
        results = [got, *torch.autograd.grad(got, leaves, dout)]
        for result, right in zip(results, expected, strict=True):
            assert (result.double() - right).abs().max() < 2e-2 * max(1.0, right.abs().max().item())
