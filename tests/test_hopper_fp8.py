"""FP8 on sm_90: the quantisation pass, the gates of the compiled kernels, and the kernels on such a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_fp8_calls import E4M3, E5M2, LARGEST, quantise, rows_of, spans, transposed

from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.hopper_fp8 import empty_transposed
from flexattn.kernels_triton.hopper_fp8_quantize import quantize
from flexattn.testing import make_call, make_inputs


@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head", "block"])
@pytest.mark.parametrize(
    ("fmt", "inputs"),
    [
        ("thd", {"lengths_q": [100, 0, 300, 1], "gap": 3}),
        ("bshd", {"lengths_q": [100, 0, 300], "padding": True, "gap": 5}),
        ("sbhd", {"lengths_q": [130, 130], "strided": True}),
        ("bhsd", {"lengths_q": [257], "outliers": True}),
    ],
    ids=["thd", "bshd", "sbhd", "bhsd"],
)
def test_quantize(fmt: str, inputs: dict[str, Any], granularity: Any, device: str) -> None:
    dtype = E5M2 if granularity == "head" else E4M3
    given = make_inputs(fmt, **inputs, dtype=torch.bfloat16, head_dim_qk=48, head_dim_v=64, device=device)
    problem = triton_backend._problem(*make_call(given))
    for side, x in (("q", problem.q), ("kv", problem.v)):
        host = Any
        host = triton_backend._problem(*make_call(make_inputs(fmt, **inputs, dtype=torch.bfloat16, head_dim_qk=48, head_dim_v=64)))
        wanted = quantise(host, side, host.q if side == "q" else host.v, granularity, dtype)
        scale = wanted.scale._replace(descale=wanted.scale.descale.to(device))
        rows = torch.full(x.shape, 7.0, device=device).to(dtype)
        tiles = empty_transposed(x, problem.batch, dtype)
        quantize(problem, side, x, scale, rows, tiles)
        expected = transposed(host, side, wanted.values).view(torch.uint8)
        for b, start, length in spans(problem, side):
            got = rows_of(rows, b, start, length).view(torch.uint8).cpu()
            assert got.equal(rows_of(wanted.values, b, start, length).view(torch.uint8))
            first = start // 128 + b if x.dim() == 3 else b * -(-x.shape[1] // 128)
            blocks = slice(first, first + -(-length // 128))
            assert tiles.view(torch.uint8)[:, blocks].cpu().equal(expected[:, blocks])
        again = torch.zeros_like(tiles.view(torch.uint8)).view(dtype)
        quantize(problem, side, rows, scale, transposed=again)
        for b, start, length in spans(problem, side):
            first = start // 128 + b if x.dim() == 3 else b * -(-x.shape[1] // 128)
            blocks = slice(first, first + -(-length // 128))
            assert again.view(torch.uint8)[:, blocks].cpu().equal(expected[:, blocks])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_not_finite_becomes_nan_and_the_rest_saturates(dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(1, 16, 1, 16, device=device)
    x[0, 0, 0, :4] = torch.tensor([1e6, -1e6, float("inf"), float("nan")])
    problem = triton_backend._problem(*make_call(make_inputs(lengths_q=[16], num_heads=1, num_heads_kv=1, device=device)))
    scale = quantise(problem, "q", torch.zeros(1, 16, 1, 16), "tensor", dtype).scale
    rows = torch.empty(x.shape, dtype=dtype, device=device)
    quantize(problem, "q", x, scale._replace(descale=scale.descale.to(device)), rows)
    assert rows[0, 0, 0, :2].float().tolist() == [LARGEST[dtype], -LARGEST[dtype]]
    assert rows[0, 0, 0, 2:4].float().isnan().all()
    assert not rows.view(torch.uint8)[0, 1:].any()
