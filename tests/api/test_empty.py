"""Calls without queries, keys or sequences: zeros and -inf of the right shapes, and gradients of 0, or a named error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, fp8
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.split_kv import number_of_splits, splits_of
from flexattn.kernels_triton.common.split_ranges import Parts
from flexattn.kernels_triton.portable.forward import attention_forward

H, H_KV, D, D_V = 4, 2, 16, 32
# Sizes of the batch, the queries and the keys.
DENSE = {"no queries": (2, 0, 7), "no keys": (2, 5, 0), "neither": (2, 0, 0), "no batch": (0, 5, 7), "nothing": (0, 0, 0)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal_bottom_right"},
    "window": {"window_size": (3, 2)},
    "alibi": {"bias_type": "alibi"},
    "dropout": {"dropout_p": 0.3},
    "softcap": {"softcap": 10.0},
    "max_logit": {"return_max_logit": True},
    "deterministic": {"deterministic": True},
}


def check(out: Any, inputs: list[Tensor], lse: Tensor, sink: Tensor | None = None) -> None:
    """Checks a call in which no query sees a key."""
    assert out.shape[-1] == D_V
    assert not out.any()
    expected = torch.full_like(lse, -torch.inf) if sink is None else sink.detach()[:, None].expand(lse.shape)
    torch.testing.assert_close(lse, expected)
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum() + lse.exp().sum(), inputs), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any() or x is sink


def dense(name: str, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, sq, skv = DENSE[name]
    shapes = (batch, sq, H, D), (batch, skv, H_KV, D), (batch, skv, H_KV, D_V)
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.sample("name", "option", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, option: str, backend: str, device: str) -> None:
    inputs = dense(name, device)
    for _ in range(3):  # kept calls too
        out, lse, *max_logit = attention(*inputs, return_lse=True, backend=backend, **OPTIONS[option])
        assert out.shape == (*inputs[0].shape[:3], D_V)
        assert lse.shape == (inputs[0].shape[0], H, inputs[0].shape[1])
        check(out, inputs, lse)
        if max_logit:
            assert max_logit[0].tolist() == [-torch.inf] * H


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", DENSE)
def test_with_a_bias_a_sink_and_a_score_mod(name: str, backend: str, device: str) -> None:
    torch.manual_seed(55)  # draws a sink whose probability rounds to a number other than 1
    inputs = dense(name, device)
    batch, sq, skv = DENSE[name]
    for shape in ((1, H, sq, skv), (1, 1, 1, skv), (max(1, batch), H, sq, 1)):
        bias = torch.randn(shape, device=device).requires_grad_()
        sink = torch.randn(H, device=device).requires_grad_()
        slopes = torch.randn(H, device=device).requires_grad_()
        out, lse = attention(
            *inputs,
            bias_type="post_scale_bias",
            bias=bias,
            softmax_type="learnable",
            softmax_offset=sink,
            score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j),  # noqa: B023
            return_lse=True,
            backend=backend,
        )
        check(out, [*inputs, bias, slopes, sink], lse, sink)


@pytest.mark.sample("backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("tokens_q", "tokens_kv", "batch"), [(0, 9, 2), (9, 0, 2), (0, 0, 1), (6, 5, 0)])
def test_thd(
    tokens_q: int, tokens_kv: int, batch: int, padded: bool, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")  # a longest length of 0 is too small for one side
    shapes = (tokens_q, H, D), (tokens_kv, H_KV, D), (tokens_kv, H_KV, D_V)
    inputs = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    cu_q, cu_kv = (torch.linspace(0, n if batch else 0, batch + 1, device=device).int() for n in (tokens_q, tokens_kv))
    call: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    if padded:
        call |= {"cu_seqlens_q_padded": cu_q, "cu_seqlens_kv_padded": cu_kv}
    for longest in (None, 0, 20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that the total replaces the longest
            out, lse = attention(*inputs, **call, max_seqlen_q=longest, max_seqlen_kv=longest, return_lse=True, backend=backend)
        assert lse.shape == (H, tokens_q)
        check(out, inputs, lse)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", DENSE)
def test_in_fp8(name: str, backend: str, device: str) -> None:
    inputs = dense(name, device, torch.bfloat16)
    out, lse = attention(*inputs, fp8_recipe=fp8.Recipe(), return_lse=True, backend=backend)
    check(out, inputs, lse)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal_bottom_right"])
def test_dense_with_lengths(mask_type: str, backend: str, device: str) -> None:
    for name in ("no queries", "no keys"):
        inputs = dense(name, device)
        cu = torch.zeros(3, dtype=torch.int32, device=device)
        call = {"attn_mask_type": mask_type, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        out, lse = attention(*inputs, **call, return_lse=True, backend=backend)
        check(out, inputs, lse)


@pytest.mark.parametrize("position", [0, 1])
def test_no_heads_are_refused(position: int, device: str) -> None:
    heads = [H, H_KV]
    heads[position] = 0
    q, k = (torch.randn(1, 4, n, D, device=device) for n in heads)
    with pytest.raises(ValueError, match=r"\b[qk] has shape \(1, 4, 0, 16\).*at least one head"):
        attention(q, k, k)


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(2, 0, H, D), (0, H, D)])
def test_keys_of_no_queries_are_not_split(shape: tuple[int, ...], device: str) -> None:
    """A GPU with room for many programs would split them."""
    q, k = torch.zeros(shape, device=device), torch.zeros(2, 5000, H, D, device=device)
    cu = torch.zeros(3, dtype=torch.int32, device=device) if len(shape) == 3 else None
    problem = Problem(q, k, k, 1.0, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert number_of_splits(problem, 8, 1000) == 1
    assert splits_of(problem, 8, 1000) == (1, "there are no queries")
    assert number_of_splits(Problem(k[:, :1], k, k, 1.0), 8, 1000) > 1
    problem = Problem(q, k[:, :50], k[:, :50], 1.0, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    lse = torch.empty((*shape[:-3], H, shape[-3]), device=device)
    parts = Parts.empty(3, lse, D, is_unbounded=False)
    assert parts.rows(lse).shape == (*shape[:-1], D)
    attention_forward(problem, torch.empty_like(q), lse, splits=3)
