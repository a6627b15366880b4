"""Backwards on a GPU: parts of the keys with the out and lse of all, on each family of kernels, and retained graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention_backward, call_cache, ops
from flexattn.dispatch import eager_backend, triton_backend
from flexattn.dispatch.quantization import dout_of
from flexattn.dispatch.reference import reference_gradients
from flexattn.dispatch.spec import FP32_GRADIENTS, Results
from flexattn.functional import bind_call
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_dout, make_inputs
from tests.support.fp8_calls import make_fp8_call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

LENGTH, CUTS = 700, (0, 250, 700)


def make_tensors(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, LENGTH, heads, head_dim, device="cuda", generator=generator).to(dtype) for heads in (6, 2, 2)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 64)]
)
def test_parts_add_up(dtype: torch.dtype, head_dim: int, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal over all keys, by parts: the queries from a part's first key on."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    q, k, v = make_tensors(dtype, head_dim)
    how: dict[str, Any] = {"attn_mask_type": "causal", "deterministic": deterministic, "backend": "triton"}
    out, lse = flexattn.attention(q, k, v, **how, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    x, settings = bind_call(*(t.clone().requires_grad_() for t in (q, k, v)), **how)
    exact, budget = (reference_gradients(ops.spec_to_run(x, settings), x, dout, dlse, kind) for kind in (torch.float64, dtype))
    for _ in range(4):  # replayed from the third on
        dq = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
        parts = []
        for begin, end in itertools.pairwise(CUTS):
            rows = slice(begin, None)
            parts.append(
                attention_backward(
                    *(dout[:, rows], q[:, rows], k[:, begin:end], v[:, begin:end], out[:, rows], lse[..., rows]),
                    dlse=dlse[..., rows],
                    **how,
                )
            )
            dq[:, rows] += parts[-1].dq
        found = {"dq": dq, "dk": torch.cat([part.dk for part in parts], 1), "dv": torch.cat([part.dv for part in parts], 1)}
        for name, got in found.items():
            want, same_dtype = (getattr(gradients, name) for gradients in (exact, budget))
            check_close(name, got, want, same_dtype, factor=GRADIENT_FACTOR)


def rounds_to(got: Tensor, want: Tensor) -> bool:
    """Returns whether the float32 numbers round to `want`, and differ from it."""
    return got.dtype is torch.float32 and torch.equal(got.to(want.dtype), want) and bool((got != want).float().mean() > 0.3)


def check_float32(spec: Any, x: Any, given: tuple[Tensor, ...], exact: Any, budget: Any) -> None:
    """dk and dv in float32 round to the 16-bit ones. So does dq if it is deterministic; otherwise it is compared with fp64."""
    wanted = triton_backend.backward(spec, x, *given, None)
    for fp32 in FP32_GRADIENTS[1:]:
        found = triton_backend.backward(spec._replace(results=Results(fp32=fp32)), x, *given, None)
        for name in ("dq", "dk", "dv"):
            got, want = getattr(found, name), getattr(wanted, name)
            if name[1:] not in fp32.removeprefix("d"):
                assert got.dtype is want.dtype
            elif name != "dq" or spec.deterministic:
                assert rounds_to(got, want), (name, fp32)
            else:
                assert got.dtype is torch.float32
                check_close(name, got, getattr(exact, name), getattr(budget, name), factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40), (192, 128), (256, 256)], ids=str)
def test_results_in_float32(
    dims: tuple[int, int], fmt: str, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    lengths = ([300, 300], [450, 450]) if fmt == "bshd" else ([300, 0, 129], [450, 70, 64])
    packed: dict[str, Any] = {} if fmt == "bshd" else {"padding": True, "gap": 3}
    inputs = make_inputs(
        fmt,
        lengths_q=lengths[0],
        lengths_kv=lengths[1],
        num_heads=4,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        dtype=torch.bfloat16,
        device="cuda",
        **packed,
    )
    spec, x = make_call(inputs, attn_mask_type="padding_causal" if packed else "causal_bottom_right", deterministic=deterministic)
    out, lse, _ = triton_backend.forward(spec, x)
    assert rounds_to(triton_backend.forward(spec._replace(results=Results(fp32_out=True)), x)[0], out)
    dout = make_dout(inputs)
    exact, budget = (reference_gradients(spec, x, dout, None, dtype) for dtype in (torch.float64, torch.bfloat16))
    check_float32(spec, x, (out, lse, dout), exact, budget)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_fp8_gradients_in_float32(dims: tuple[int, int], hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    inputs = make_inputs(
        "thd",
        lengths_q=[300, 129],
        lengths_kv=[450, 64],
        num_heads=4,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        dtype=torch.bfloat16,
        device="cuda",
    )
    spec, x = make_fp8_call(inputs, "block", attn_mask_type="padding_causal", deterministic=deterministic)
    out, lse, _ = triton_backend.forward(spec, x)
    dout = make_dout(inputs)
    exact = reference_gradients(spec, x, dout_of(spec, x, dout, torch.float64), None)
    check_float32(spec, x, (out, lse, dout), exact, eager_backend.backward(spec, x, out, lse, dout, None))


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_retained_graph_of_the_first_call_gives_the_same_bits_each_time(backend: str) -> None:
    """The first backward is computed, the second recorded, the others are replayed; the same holds for a later call."""
    leaves = [t.requires_grad_() for t in make_tensors(torch.bfloat16, 128)]

    def attend() -> Tensor:
        out: Tensor = flexattn.attention(*leaves, attn_mask_type="causal", deterministic=True, backend=backend)
        return out

    out = attend()
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for graph in (out, attend(), attend()):
        for _ in range(4):
            found = torch.autograd.grad(graph, leaves, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for _ in range(4):  # for a scalar loss, whose dout has strides of its own
            torch.autograd.grad(graph.sum(), leaves, retain_graph=True)
    assert call_cache.cache_info()["recordings"] >= 2
