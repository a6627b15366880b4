"""Arguments that are numbers: of any size, of Python, numpy or a tensor on the host, and never of an earlier call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from flexattn import attention, call_cache, testing
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import LARGEST_WINDOW, Window, make_band
from flexattn.kernels_triton.common import problem as problems

BACKENDS = ["eager", "triton"]


def dense(device: str, heads: int = 2) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(2, 9, heads, 16, generator=gen).to(device).requires_grad_() for _ in "qkv"]


def thd(device: str, **arguments: Any) -> dict[str, Any]:
    """Two sequences of 9 tokens."""
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in dense(device))
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    call = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    return {"q": q, "k": k, "v": v, **call, "max_seqlen_q": 9, "max_seqlen_kv": 9, **arguments}


@pytest.mark.sample("window")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("window", "same"),
    [
        ((5, sys.maxsize), (5, -1)),
        ((sys.maxsize, 5), (-1, 5)),
        ((2**31 - 1, 2**31), (-1, -1)),
        ((2**63, 2**70), (-1, -1)),
        ((np.int64(5), np.int8(-1)), (5, -1)),
        ((torch.tensor(5), torch.tensor(2, dtype=torch.uint8)), (5, 2)),
        (torch.tensor([5, -1], dtype=torch.int32), (5, -1)),
    ],
    ids=str,
)
def test_windows(window: Any, same: tuple[int, int], backend: str, device: str) -> None:
    expected, out = (attention(*dense(device), window_size=size, backend=backend) for size in (same, window))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for inputs, out in _with_inputs(device, backend, window, same)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _with_inputs(device: str, backend: str, *windows: Any) -> list[Any]:
    every = [dense(device) for _ in windows]
    return [(inputs, attention(*inputs, window_size=size, backend=backend)) for inputs, size in zip(every, windows, strict=True)]


def test_bands_and_problems_keep_windows_within_what_kernels_count_in(device: str) -> None:
    assert make_band("no_mask", (sys.maxsize, 2**80), None)[:2] == (LARGEST_WINDOW, LARGEST_WINDOW)
    assert make_band("no_mask", Window(-sys.maxsize, -(2**80)), None)[:2] == (-LARGEST_WINDOW, -LARGEST_WINDOW)
    # A problem may come from elsewhere than attention().
    q = torch.zeros(1, 4, 1, 16, device=device)
    assert problems.Problem(q, q, q, 1.0, window_left=2**40, window_right=2**31).window == (2**30, 2**30)


@pytest.mark.sample("backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("longest", [18, 32, 2**30, 2**31 - 1, 2**31, 2**63, 2**80, np.int32(9), torch.tensor(9)], ids=str)
def test_max_seqlen(longest: Any, backend: str, device: str) -> None:
    results = []
    for n in (9, longest):
        call = thd(device, max_seqlen_q=n, max_seqlen_kv=n, backend=backend)
        out = attention(**call)
        results.append((out, *torch.autograd.grad(out.square().sum(), (call["q"], call["k"], call["v"]))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_large_max_seqlen_launches_what_there_may_be_work_for(device: str) -> None:
    spec, x = testing.make_call(
        testing.make_inputs(device=device, lengths_q=[9, 9], lengths_kv=[9, 9], qkv_format="thd"), attn_mask_type="padding"
    )
    x = x._replace(max_seqlen_q=2**31 - 1, max_seqlen_kv=2**40)
    problem = triton_backend.to_problem(spec, x)
    assert problem.longest_q <= x.q.shape[0]
    assert problem.longest_kv <= x.k.shape[0]


@pytest.mark.sample
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias_shape", [(1, 2, 1, 1), (1, 1, 24, 1), (2, 1, 1, 24)])
def test_max_seqlen_beside_a_bias(bias_shape: tuple[int, ...], backend: str, device: str) -> None:
    """A bias needs its length, which may exceed the number of tokens; the other length is cut."""
    bias = torch.randn(bias_shape, device=device).requires_grad_()
    small = bias.detach()[:, :, : min(9, bias_shape[2]), : min(9, bias_shape[3])].requires_grad_()
    q_size, kv_size = (24 if size == 24 else 2**63 for size in bias_shape[2:])
    outs = [
        attention(**thd(device, bias=b, bias_type="post_scale_bias", max_seqlen_q=m, max_seqlen_kv=n, backend=backend))
        for b, m, n in ((bias, q_size, kv_size), (small, 9, 9))
    ]
    torch.testing.assert_close(*outs)
    gradient, expected = (torch.autograd.grad(out.square().sum(), b)[0] for out, b in zip(outs, (bias, small), strict=True))
    torch.testing.assert_close(gradient[:, :, : expected.shape[2], : expected.shape[3]], expected)
    assert not gradient[:, :, expected.shape[2] :].any()
    assert not gradient[..., expected.shape[3] :].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_longer_than_max_seqlen_is_cut(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")  # a CPU would raise
    call = thd(device, max_seqlen_q=6, max_seqlen_kv=4, backend=backend, return_lse=True)
    out, lse = attention(**call)
    gradients = torch.autograd.grad(out.square().sum() + lse.exp().sum(), (call["q"], call["k"], call["v"]))
    q, k, v = (call[name].detach().view(2, 9, 2, 16)[:, :n].requires_grad_() for name, n in (("q", 6), ("k", 4), ("v", 4)))
    expected, expected_lse = attention(q, k, v, backend="eager", return_lse=True)
    expected_gradients = torch.autograd.grad(expected.square().sum() + expected_lse.exp().sum(), (q, k, v))
    for whole, part in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        rows = whole.view(2, 9, 2, 16)
        torch.testing.assert_close(rows[:, : part.shape[1]], part)
        assert not rows[:, part.shape[1] :].any()
    lse = lse.view(2, 2, 9).transpose(0, 1)
    torch.testing.assert_close(lse[..., :6], expected_lse)
    assert (lse[..., 6:] == -torch.inf).all()


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, torch.tensor])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_floats(name: str, kind: Any, device: str) -> None:
    state = torch.tensor([3, 4], device=device)
    outs = [attention(*dense(device), rng_state=state, **{name: number}) for number in (0.5, kind(0.5), kind(0.5), kind(0.5))]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p", "window_size", "max_seqlen_q"])
def test_a_tensor_that_changes_is_read_in_each_call(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of a call has a tensor for a number: it would be that of the object."""
    monkeypatch.setenv("FLEXATTN_CHECK", "0")  # a CPU would raise for a longest length that is too small
    call_cache.clear_cache()
    whole = name in ("window_size", "max_seqlen_q")
    number = torch.tensor(0) if whole else torch.tensor(0.0)
    for value in (2, 7) if whole else (0.25, 0.75):
        number.fill_(value)
        given, plain = (((n, 0) if name == "window_size" else n) for n in (number, number.item()))
        call = thd(device, rng_state=torch.tensor([3, 4], device=device), backend="triton" if device == "cuda" else "eager")
        expected = attention(**(call | {name: plain}))
        for _ in range(3):
            torch.testing.assert_close(attention(**(call | {name: given})), expected, rtol=0, atol=0)
    for (kinds, _, _, _, window, *_), *_ in call_cache._calls:
        assert torch.Tensor not in (*kinds, *(window or ()))


@pytest.mark.sample("backend", "dtype", "offset_dtype")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("offset_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sinks_of_any_half_type(dtype: torch.dtype, offset_dtype: torch.dtype, backend: str, device: str) -> None:
    inputs = [x.detach().to(dtype) for x in dense(device)]
    offset = torch.tensor([0.5, -1.25], device=device, dtype=offset_dtype).requires_grad_()
    exact = offset.detach().double().requires_grad_()
    out = attention(*inputs, softmax_type="learnable", softmax_offset=offset, backend=backend)
    expected = attention(*(x.double() for x in inputs), softmax_type="learnable", softmax_offset=exact, backend="eager")
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    (gradient,), (expected,) = (torch.autograd.grad(o.sum(), x) for o, x in ((out, offset), (expected, exact)))
    assert gradient.dtype is offset_dtype
    torch.testing.assert_close(gradient.double(), expected, atol=5e-2, rtol=5e-2)


def test_windows_that_a_mod_says(device: str) -> None:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= sys.maxsize) & (j - i <= 2**40) & (i - j <= 3)

    outs = [attention(*dense(device), mask_mod=mask, backend=backend) for backend in BACKENDS]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(outs[0], attention(*dense(device), window_size=(3, -1), bottom_right_diagonal=False))
