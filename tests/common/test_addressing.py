"""Memory accesses of the kernels: rows that lie far apart, and no block that a window hides completely."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.runtime.device import Tile

FAR = 2**30 + 64  # elements from one row to the next: the third row is past 2**31


def far_apart(shape: tuple[int, int, int], device: str) -> Tensor:
    """[1, s, h, d] in float16 in the middle of zeros that mostly have no memory: a read at a wrapped offset is 0."""
    tokens, heads, dim = shape
    first = 2**31
    elements = first + tokens * FAR
    if device == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
        memory = torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)
    else:
        memory = torch.zeros(elements, dtype=torch.float16, device=device)
    x = memory.as_strided((1, tokens, heads, dim), (tokens * FAR, FAR, dim, 1), first)
    return x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))


def test_strides_without_an_effect_do_not_count() -> None:
    """Strides of an empty tensor, or of a dim of one entry, leave kernels their wide loads."""
    x = torch.zeros(2, 5, 2, 64, dtype=torch.bfloat16)
    for q in (x[:, :0].as_strided((2, 0, 2, 64), (1, 1, 1, 1)), x[:1].as_strided((1, 5, 2, 64), (1, 128, 64, 1))):
        assert Problem(q, x[: len(q)], x[: len(q)], softmax_scale=1.0).meta(Tile(64, 64, 4, 2)).ALIGN == 8
    odd = x.as_strided((2, 4, 1, 64), (640, 129, 64, 1))
    assert Problem(odd, x, x, softmax_scale=1.0).meta(Tile(64, 64, 4, 2)).ALIGN == 1


def test_rows_that_are_far_apart(device: str) -> None:
    """Offsets within a tile of q, k, v and dout need 64 bits."""
    far = far_apart((3, 1, 16), device)
    near = far.clone(memory_format=torch.contiguous_format)
    results = []
    for x in (far, near):
        leaves = [x.detach().requires_grad_() for _ in "qkv"]
        out = attention(*leaves, attn_mask_type="causal", backend="triton")
        results.append([out, *torch.autograd.grad(out, leaves, x)])
    for ours, expected in zip(*results, strict=True):
        assert expected[:, 2].any()
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_window_skips_what_its_left_side_hides(kind: str, device: str) -> None:
    """A NaN there would reach out and the gradients if any tile with it were multiplied, even by weights of 0."""
    # The largest tile has 256 rows, and 32 in the interpreter, so one visible tile begins past `far`.
    length, far, ends = (640, 320, 64) if device == "cuda" else (160, 80, 32)
    window = 20
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, length, 1, 16, generator=gen).to(device) for _ in range(4))
    call: dict[str, Any] = {"attn_mask_type": "causal", "window_size": (window, 0), "backend": "triton"}
    if kind == "packed":
        cu = torch.tensor([0, length], dtype=torch.int32, device=device)
        call |= {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        call |= {"max_seqlen_q": length, "max_seqlen_kv": length}
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
    tokens = 0 if kind == "packed" else 1

    def run(v: Tensor, dout: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, **call)
        return [x.transpose(0, tokens) for x in (out, *torch.autograd.grad(out, leaves, dout))]

    plain = run(v, dout)
    bad_v, bad_dout = v.clone(), dout.clone()
    bad_v.narrow(tokens, 0, length - far).fill_(torch.nan)
    bad_dout.narrow(tokens, far, length - far).fill_(torch.nan)
    for ours, expected in zip(run(bad_v, dout)[:2], plain[:2], strict=True):  # out, and dq
        torch.testing.assert_close(ours[-ends:], expected[-ends:], rtol=0, atol=0)
    for ours, expected in zip(run(v, bad_dout)[2:], plain[2:], strict=True):  # dk and dv
        torch.testing.assert_close(ours[:ends], expected[:ends], rtol=0, atol=0)
