"""TransformerEngine's own cases of score_mod callbacks, with its shapes, dtypes, layouts and tolerances, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.testing import check_close
from tests.support.te_callbacks import CASES, Case, by_value

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")


def expected(case: Case, inputs: list[Tensor], dout: Tensor | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """out and the gradients, [b, s, h, d], in plain torch; if dout is None, the gradients of out.sum()."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1], device=q.device)
    scores = case.expected(scores, at[:, None], at[None])
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out) if dout is None else dout.to(dtype))]


def compare(case: Case, inputs: list[Tensor], dout: Tensor | None, call: dict[str, object], fmt: str) -> None:
    """Compares a call with fp64 by TransformerEngine's tolerance, and by this library's tighter ones."""

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if fmt == "sbhd" else x

    given = [turned(x).contiguous().requires_grad_() for x in inputs]
    out = attention(*given, qkv_format=fmt, **call)  # type: ignore[call-overload]
    gradients = torch.autograd.grad(out, given, torch.ones_like(out) if dout is None else turned(dout))
    wanted, budget = expected(case, inputs, dout), expected(case, inputs, dout, inputs[0].dtype)
    for name, got, want, same_dtype in zip(("out", "dq", "dk", "dv"), (out, *gradients), wanted, budget, strict=True):
        torch.testing.assert_close(turned(got).double(), want, atol=case.tolerance, rtol=case.tolerance)
        check_close(name, turned(got), want, same_dtype, factor=2.0 if name == "out" else 3.0)


@pytest.mark.sample("backend", "dtype", "fmt", "name", "with_bprop", "scalar_loss")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("with_bprop", [True, False])
@pytest.mark.parametrize(
    ("name", "scalar_loss"), [("causal", False), ("causal", True), ("softcap", False), ("post_scale_bias", False)]
)
def test_cases_of_pull_request_2984(
    name: str, scalar_loss: bool, with_bprop: bool, fmt: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    shape = (2, case.length, 4, 64)
    scales = (1.0, 1.0, 0.1) if case.unit else (0.1, 0.1, 0.1)
    inputs = [(torch.randn(shape, generator=generator) * scale).to(device, dtype) for scale in scales]
    dout = None if scalar_loss else torch.randn(shape, generator=generator).to(device, dtype)
    compare(case, inputs, dout, {"score_mod": case.make(with_bprop, by_value), "backend": backend}, fmt)


@pytest.mark.sample("backend", "name")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(
    ("name", "shape", "with_bprop"),
    [("post_scale_bias", (1, 64, 2, 128), False), ("causal", (1, 64, 2, 128), True), ("softcap", (1, 16, 2, 64), True)],
)
def test_cases_of_pull_request_2985(name: str, shape: tuple[int, ...], with_bprop: bool, backend: str, device: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(2025)
    inputs = [(torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, torch.float16) for _ in "qkv"]
    dout = torch.randn(shape, generator=generator).to(device, torch.float16)
    compare(case, inputs, dout, {"score_mod": case.make(with_bprop, float), "backend": backend}, "bshd")
