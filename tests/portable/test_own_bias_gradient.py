"""The gradient of a bias that each batch entry has for itself, which the kernel of dq writes: the reference's, and its launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexattn
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.portable.own_bias_gradient import owned_gradient
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import check_close, make_call, make_dout, make_inputs, reference_gradients
from tests.support.compiled_kernels import compile_sound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SQ, SKV, HEADS = 70, 45, 2

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, pre-scale": {"attn_mask_type": "causal_bottom_right", "bias_type": "pre_scale_bias"},
    "window, softcap": {"window_size": (9, 3), "softcap": 3.0},
    "sink": {"softmax_type": "off-by-one"},
    "two parts": {"head_dim_qk": 24, "head_dim_v": 48},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "sink" else []) for name in CASES])
def test_equals_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    options = dict(CASES[name])
    dims = {key: options.pop(key, 16) for key in ("head_dim_qk", "head_dim_v")}
    lengths = {"lengths_q": [SQ] * 2, "lengths_kv": [SKV] * 2}
    given = make_inputs(num_heads=HEADS, num_heads_kv=1, dtype=torch.bfloat16, device=DEVICE, **lengths, **dims)
    bias = torch.randn(2, HEADS, SQ, SKV, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16).requires_grad_()
    call = {"bias_type": "post_scale_bias", "bias": bias, **options}
    dout = make_dout(given)
    out = flexattn.attention(**given._asdict(), **call, backend="triton")
    (got,) = torch.autograd.grad(out, bias, dout)
    spec, x = make_call(given, **call | {"bias": bias.detach()})
    exact, rounded = (reference_gradients(spec, x, dout, dtype=dtype).dbias for dtype in (torch.float64, torch.bfloat16))
    check_close("dbias", got, exact, rounded, factor=3.0)


def backward(entries: int = 2, dtype: torch.dtype = torch.bfloat16, dim: int = 16, **fields: Any) -> Backward:
    q = torch.zeros(2, SQ, HEADS, dim, dtype=dtype)
    bias = torch.zeros(entries, HEADS, SQ, SQ, dtype=dtype)
    return Backward(
        Problem(q, q, q, 0.1, bias=bias, **fields), q, torch.zeros(2, HEADS, SQ), q, None, q, q, q, dbias=torch.ones_like(bias)
    )


def test_one_launch_less() -> None:
    names = []
    for call in (backward(), backward(1)):
        with recorded_launches() as launches:
            attention_backward(call)
        names.append([launch.kernel.__name__ for launch in launches])
    assert [name for name in names[0] if "dbias" in name] == []
    assert [name for name in names[1] if "dbias" in name] == ["_attn_bwd_shared_dbias_kernel"]


@pytest.mark.parametrize("window", [{}, {"window_left": 3}, {"window_right": 0}], ids=str)
def test_blocks_that_a_mask_hides_have_zeros(window: dict[str, int]) -> None:
    gradient = owned_gradient(backward(**window))
    assert gradient is not None
    assert bool(gradient.any()) == (not window)


def test_other_calls_have_a_kernel_of_their_own() -> None:
    strided = backward()._replace(dbias=torch.ones(HEADS, 2, SQ, SQ, dtype=torch.bfloat16).transpose(0, 1))
    lengths = torch.ones(2, dtype=torch.int32)
    for call in (
        backward(1),
        backward(dtype=torch.float32),
        strided,
        backward(seqused_kv=lengths),
        backward()._replace(dbias=None),
    ):
        assert owned_gradient(call) is None


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 48, 128])
def test_the_kernel_compiles_without_spills(dim: int) -> None:
    call = backward(dim=dim)
    with pretended_device(90, 132), recorded_launches() as launches:
        attention_backward(call)
    (report,) = compile_sound([request_for(launch, 90) for launch in launches if launch.kernel.__name__ == "_attn_bwd_dq_kernel"])
    assert report.loop_spill_share <= 0.01, report
