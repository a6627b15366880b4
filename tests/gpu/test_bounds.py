"""On a GPU: calls without queries, with keys that would be split; slots in any order, on every kernel family; extreme numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, create_block_mask, fp8
from flexattn.dispatch.select import BackendError
from flexattn.testing import GRADIENT_FACTOR, check_close
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

HEADS, HEADS_KV = 8, 2
LENGTHS = (700, 0, 333, 1, 1024, 64)
STARTS = {
    "any order": (1500, 40, 0, 1450, 2300, 400),
    "in reverse": (2900, 2800, 2400, 2300, 1200, 1000),
    "padded on the left": (324, 1024, 1715, 3071, 3072, 4960),
}
TOTAL = 5200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hopper", ["auto", "always", "never"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_no_queries_beside_many_keys(packed: bool, hopper: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries, so that their keys would be split."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    shapes = ((0, 16, 64), (20000, 16, 64)) if packed else ((2, 0, 16, 64), (2, 10000, 16, 64))
    q, k, v = (torch.randn(shapes[min(n, 1)], device="cuda", dtype=dtype).requires_grad_() for n in range(3))
    call: dict[str, Any] = {}
    if packed:
        cu_q, cu_kv = (torch.tensor(cu, dtype=torch.int32, device="cuda") for cu in ([0, 0, 0], [0, 10000, 20000]))
        call = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        call |= {"max_seqlen_q": 1, "max_seqlen_kv": 10000}
    for backend in ("auto", "triton"):
        for _ in range(3):
            out, lse = attention(q, k, v, return_lse=True, backend=backend, **call)
            assert out.shape == q.shape
            assert lse.numel() == 0
            dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
            assert dq.numel() == 0
            assert not dk.any()
            assert not dv.any()


def packed_call(name: str, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """q, k and v, NaN outside of the sequences, the rest of a call, and the rows with tokens."""
    gen = torch.Generator("cuda").manual_seed(0)
    real = torch.zeros(TOTAL, dtype=torch.bool, device="cuda")
    for start, length in zip(STARTS[name], LENGTHS, strict=True):
        assert not real[start : start + length].any()
        real[start : start + length] = True
    inputs = [torch.randn(TOTAL, n, dim, device="cuda", dtype=dtype, generator=gen) for n in (HEADS, HEADS_KV, HEADS_KV)]
    for x in inputs:
        x[~real] = torch.nan
        x.requires_grad_()
    lengths = torch.tensor([0, *LENGTHS], dtype=torch.int32, device="cuda")
    cu = lengths.cumsum(0, dtype=torch.int32)
    starts = torch.tensor([*STARTS[name], TOTAL], dtype=torch.int32, device="cuda")
    call = {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 1024, "max_seqlen_kv": 1024}
    return inputs, {**call, "cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}, real


def results(inputs: list[Tensor], **call: Any) -> list[Tensor]:
    """out, lse by rows, dq, dk and dv, for inputs of any dtype."""
    out, lse = attention(*inputs, return_lse=True, **call)
    loss = out.double().sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).double().sin().sum()
    return [out.detach(), lse.detach().T, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(("backend", "hopper"), [("triton", "always"), ("triton", "never"), ("cudnn", "never"), ("eager", "never")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", STARTS)
def test_slots_in_any_order(
    name: str, dim: int, deterministic: bool, backend: str, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    inputs, call, real = packed_call(name, dim, torch.bfloat16)
    call |= {"attn_mask_type": "padding_causal"}
    try:
        found = results(inputs, **call, backend=backend, deterministic=deterministic)
    except BackendError as e:
        if backend != "cudnn":
            raise
        pytest.skip(f"cuDNN refuses it: {e}"[:200])
    exact = results([x.detach().double().requires_grad_() for x in inputs], **call, backend="eager")
    budget = results(inputs, **call, backend="eager")
    for label, got, want, allowed in zip(("out", "lse", "dq", "dk", "dv"), found, exact, budget, strict=True):
        assert (got[~real] == (-torch.inf if label == "lse" else 0)).all(), label
        factor = 2 * (GRADIENT_FACTOR if label.startswith("d") else 2.0)  # eager's arithmetic is fp32, and rounds once
        check_close(label, got[real], want[real], allowed[real], factor=factor, atol=2e-2)


@pytest.mark.parametrize("hopper", ["always", "never"])
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("name", STARTS)
def test_slots_in_any_order_in_fp8(name: str, granularity: Any, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    inputs, call, real = packed_call(name, 128, torch.bfloat16)
    call |= {"attn_mask_type": "padding_causal", "fp8_recipe": fp8.Recipe(granularity=granularity)}
    found, wanted = (results(inputs, **call, backend=backend) for backend in ("triton", "eager"))
    for label, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert (got[~real] == (-torch.inf if label == "lse" else 0)).all(), label
        error = (got[real].double() - want[real].double()).norm() / want[real].double().norm()
        assert error < 0.1, (label, error)  # both round to three bits of mantissa, in another order


def test_integers_of_mods_wrap_as_torchs() -> None:
    q = torch.randn(2, 1024, 4, 64, device="cuda")
    memory = torch.full((4096,), 1e6, device="cuda")
    t = memory[2048:2056]
    t.copy_(torch.randn(8))

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((i * 6364136223846793005 + j * 40503) % 10 < 3) | (i == j)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + t[(i * 6364136223846793005 + j * 1442695040888963407) % 8] + t[:4][j % 6]

    ours, theirs = (attention(q, q, q, mask_mod=mask, score_mod=score, backend=backend) for backend in ("triton", "eager"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def wild() -> None:
    """Calls with wrong numbers on every family of kernels, for a run under compute-sanitizer."""
    numbers = [[0, 5, 3, 60, 2], [-5, -1, -70, 10, 20], [0, 10, 1000, 2**31 - 1, 70], [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0]]
    q, k, v = (torch.randn(300, n, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
    for recipe in (None, fp8.Recipe()):
        for first in numbers:
            for second in (None, *numbers):
                cu = torch.tensor(first, dtype=torch.int32, device="cuda")
                starts = None if second is None else torch.tensor(second, dtype=torch.int32, device="cuda")
                call = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
                call |= {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 256, "max_seqlen_kv": 256}
                out = attention(q, k, v, fp8_recipe=recipe, backend="triton", **call)
                torch.autograd.grad(out.sum(), (q, k, v))
    x = torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for name, value in (("kv_num_blocks", 1000), ("kv_indices", -1), ("full_kv_indices", 2**27), ("q_indices", 2**30)):
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (j != 5), None, None, 1000, 1000, "cuda", 128)
        getattr(mask, name).fill_(value)
        torch.autograd.grad(attention(x, x, x, block_mask=mask, backend="triton").sum(), x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("hopper", ["always", "never"])
def test_wild_numbers_under_memcheck(hopper: str, fresh_python: Any) -> None:
    tool = shutil.which("compute-sanitizer")
    code = "from tests.gpu.test_bounds import wild; wild()"
    if tool is None:
        done = fresh_python("-c", code, env={"FLEXATTN_HOPPER": hopper})
    else:
        environment = {**os.environ, "FLEXATTN_HOPPER": hopper, "PYTHONPATH": ".", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_scales_of_dout_if_max_seqlen_exceeds_the_tokens(dim: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that quantises dout has room for more scales than there are blocks of rows: gradients keep their bits."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    torch.manual_seed(dim)
    ends = torch.tensor([0, 260, 300], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(300, 3, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q) * torch.tensor([1.0, 30.0, 1e3], device="cuda", dtype=torch.bfloat16)[:, None]
    call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    call |= {"fp8_recipe": fp8.Recipe(granularity="batch_head"), "deterministic": deterministic, "backend": "triton"}
    found = []
    for longest in (260, 400, 512):
        out = attention(q, k, v, max_seqlen_q=longest, max_seqlen_kv=260, **call)
        found.append(torch.autograd.grad(out, (q, k, v), dout))
    for gradients in found[1:]:
        for got, wanted in zip(gradients, found[0], strict=True):
            error, size = (t.double().norm(dim=(0, 2)) for t in (got - wanted, wanted))
            assert (error <= (0.0 if deterministic else 0.01) * size).all()
