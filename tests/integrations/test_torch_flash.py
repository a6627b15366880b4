"""flexattn as torch's flash attention, behind scaled_dot_product_attention and varlen_attn, registered for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

import flexattn
from flexattn.integrations import torch_flash

CU = [0, 5, 5, 12]


@pytest.fixture
def active() -> Iterator[None]:
    handle = torch_flash._activate("CPU")
    yield
    handle.remove()


def qkv(*shape: int, heads_kv: int, layout: str = "contiguous") -> list[Tensor]:
    """q, k and v of shape (..., h, s, d), or (t, h, d)."""
    tensors = []
    for seed, heads in enumerate((shape[-3] if len(shape) == 4 else shape[1], heads_kv, heads_kv)):
        size = (shape[0], heads, *shape[2:])
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        if layout == "transposed":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "strided":
            x = torch.cat((x, x), -1)[..., : shape[-1]]
        tensors.append(x.requires_grad_())
    return tensors


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.arange(1.0, out.shape[-1] + 1)
    return torch.autograd.grad((out * weights).sum(), leaves)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(active: None, layout: str, is_causal: bool) -> None:
    leaves = qkv(2, 4, 7, 8, heads_kv=4, layout=layout)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, is_causal=is_causal, scale=0.3)
    mask = "causal" if is_causal else "no_mask"
    want, want_lse = flexattn.attention(
        *leaves, qkv_format="bhsd", attn_mask_type=mask, softmax_scale=0.3, return_lse=True, backend="eager"
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert out.stride() == torch.empty_like(leaves[0]).stride()
    for got, expected, leaf in zip(gradients(out, leaves), gradients(want, leaves), leaves, strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == torch.empty_like(leaf).stride()


def test_the_flash_operators_causal_mask_ends_in_the_bottom_right_corner(active: None) -> None:
    """FlashAttention does the same. If lengths differ, torch calls it for `causal_lower_right` alone (torch.nn.attention.bias)."""
    leaves = qkv(2, 4, 7, 8, heads_kv=4)
    q = leaves[0].detach()[:, :, :3].requires_grad_()
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, *leaves[1:], is_causal=True)
    seen = causal_lower_right(3, 7)._materialize()
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), *(t.double() for t in leaves[1:]), seen)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    inputs = [q, *leaves[1:]]
    for got, expected in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-6, atol=5e-6)


def test_sdpa_drops_the_same_weights_in_the_backward(active: None) -> None:
    leaves = qkv(1, 2, 9, 8, heads_kv=2)
    torch.manual_seed(0)
    out, *_, rng_state, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, dropout_p=0.5)
    want = flexattn.attention(*leaves, qkv_format="bhsd", dropout_p=0.5, rng_state=rng_state.view(torch.int64), backend="eager")
    torch.testing.assert_close(out, want)
    for got, expected in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(got, expected)


MASKS = {"whole": (2, 4, 7, 9), "one row of it": (2, 1, 1, 9), "by head": (1, 4, 7, 9), "none": None}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_masked_sdpa(active: None, shape: tuple[int, ...] | None, is_causal: bool, is_trained: bool) -> None:
    leaves = [t[:, :, :n].detach().requires_grad_() for t, n in zip(qkv(2, 4, 9, 8, heads_kv=4), (7, 9, 9), strict=True)]
    mask = None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(4))
    bias = None if mask is None else mask.requires_grad_(is_trained).expand(2, 4, 7, 9)  # in torch's form
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*leaves, bias, True, is_causal=is_causal, scale=0.3)
    want, want_lse = written_out(leaves, mask, is_causal)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse[..., :7].double(), want_lse, rtol=2e-6, atol=2e-6)
    assert lse.shape == (2, 4, 32)
    assert out.transpose(1, 2).is_contiguous()
    trained = [*leaves, mask] if is_trained and mask is not None else leaves
    for got, expected in zip(gradients(out, trained), gradients(want, trained), strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-6, atol=5e-6)


def written_out(leaves: list[Tensor], mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Returns out and lse of q, k and v in float64, at a scale of 0.3."""
    q, k, v = (t.double() for t in leaves)
    scores = 0.3 * q @ k.mT + (0.0 if mask is None else mask.double())
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_masked_sdpa_drops_the_same_weights_in_the_backward(active: None) -> None:
    leaves, bias = qkv(1, 2, 9, 8, heads_kv=2), torch.randn(1, 2, 9, 9)
    out, _, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(*leaves, bias, True, dropout_p=0.5)
    named: dict[str, Any] = {"bias_type": "post_scale_bias", "bias": bias, "rng_state": torch.stack((seed, offset))}
    want = flexattn.attention(*leaves, qkv_format="bhsd", dropout_p=0.5, backend="eager", **named)
    torch.testing.assert_close(out, want)
    for got, expected in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(got, expected)


def test_masked_sdpa_keeps_no_lse_without_a_backward(active: None) -> None:
    leaves = [t.detach() for t in qkv(1, 2, 9, 8, heads_kv=2)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*leaves, None, False)
    assert lse.shape == (1, 2, 0)
    torch.testing.assert_close(out, flexattn.attention(*leaves, qkv_format="bhsd", backend="eager"))


@pytest.mark.parametrize("skv", [7, 16])
def test_masked_sdpas_results_are_laid_out_as_torch_says(active: None, skv: int) -> None:
    leaves = [t[:, :, :n].detach() for t, n in zip(qkv(2, 4, 16, 8, heads_kv=4), (7, skv, skv), strict=True)]
    bias, dout = torch.randn(2, 4, 7, skv), torch.randn(2, 4, 7, 8)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    results = efficient(*leaves, bias, True)
    gradients = backward(dout, *leaves, bias, *results, 0.0, [True] * 4)
    on_meta = [t.to("meta") for t in (dout, *leaves, bias)]
    promised = efficient(*on_meta[1:], True)
    promised_gradients = backward(*on_meta, *promised, 0.0, [True] * 4)
    for got, want in zip((*results, *gradients), (*promised, *promised_gradients), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn(active: None, window: tuple[int, int]) -> None:
    leaves = qkv(12, 4, 8, heads_kv=2)
    cu = torch.tensor(CU, dtype=torch.int32)
    named: dict[str, Any] = {"window_size": window}
    if "enable_gqa" in varlen_attn.__code__.co_varnames:
        named["enable_gqa"] = True
    out = varlen_attn(*leaves, cu, cu, 7, 7, **named)
    want = flexattn.attention(
        *leaves,
        qkv_format="thd",
        attn_mask_type="padding",
        window_size=window,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=7,
        max_seqlen_kv=7,
        backend="eager",
    )
    torch.testing.assert_close(out, want)
    for got, expected in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_causal_mask_of_packed_queries_ends_in_the_bottom_right_corner(active: None) -> None:
    q, k, v = (t.detach() for t in qkv(12, 2, 8, heads_kv=2))
    cu_q, cu_k = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    out, *_ = torch.ops.aten._flash_attention_forward(q[:4], k, v, cu_q, cu_k, 2, 7, 0.0, True, False)
    for i in range(2):
        one = flexattn.attention(
            q[None, 2 * i : 2 * i + 2],
            k[None, cu_k[i] : cu_k[i + 1]],
            v[None, cu_k[i] : cu_k[i + 1]],
            attn_mask_type="causal_bottom_right",
        )
        torch.testing.assert_close(out[2 * i : 2 * i + 2], one[0])


def test_keys_in_use_are_the_first_of_each_slot(active: None) -> None:
    q, k, v = (t.detach() for t in qkv(12, 2, 8, heads_kv=2))
    k[3:5] = v[3:5] = float("nan")
    cu_q, cu_k = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    used = torch.tensor([3, 7], dtype=torch.int32)
    out, *_ = torch.ops.aten._flash_attention_forward(q[:4], k, v, cu_q, cu_k, 2, 7, 0.0, False, False, seqused_k=used)
    torch.testing.assert_close(out[:2], flexattn.attention(q[None, :2], k[None, :3], v[None, :3])[0])
    torch.testing.assert_close(out[2:4], flexattn.attention(q[None, 2:4], k[None, 5:], v[None, 5:])[0])


def test_what_it_does_not_take_is_refused(active: None) -> None:
    q, k, v = qkv(12, 2, 8, heads_kv=2)
    cu = torch.tensor(CU, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="has no return_debug_mask"):
        torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 7, 7, 0.0, False, True)
    with pytest.raises(RuntimeError, match="alibi_slopes_in_training"):
        torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 7, 7, 0.0, False, False, alibi_slopes=torch.ones(2))


def test_torch_lists_it_once_registered_and_nothing_before(forked_python: Any) -> None:
    code = """
import torch
from torch.nn.attention import list_flash_attention_impls
from flexattn.integrations import torch_flash
assert "flexattn" not in list_flash_attention_impls()
torch_flash.register()
assert "flexattn" in list_flash_attention_impls()
torch.nn.attention.activate_flash_attention_impl("flexattn")
assert torch.nn.attention.current_flash_attention_impl() == "flexattn"
torch.nn.attention.restore_flash_attention_impl()
"""
    ran = forked_python("-c", code)
    assert ran.returncode == 0, ran.stderr
