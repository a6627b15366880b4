"""FP8 on sm_90: the quantisation pass, the gates of the compiled kernels, and the kernels on such a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_fp8_calls import (
    E4M3,
    E5M2,
    LARGEST,
    check_backward,
    check_forward,
    fp8_call,
    gradient_of,
    moved,
    moved_gradient,
    quantise,
    rows_of,
    run_backward,
    run_forward,
    spans,
    transposed,
)

from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.hopper_fp8 import empty_transposed
from flexattn.kernels_triton.hopper_fp8_quantize import quantize
from flexattn.kernels_triton.launch import capability_of
from flexattn.testing import make_call, make_dout, make_inputs


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


HAS_HOPPER = torch.cuda.is_available() and capability_of(torch.device("cuda")) == 90
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="no GPU of compute capability 9.0; the emulator runs the kernels")

UNEVEN = {"lengths_q": [300, 0, 1, 700, 129, 260], "lengths_kv": [333, 50, 500, 600, 0, 40]}
BANDS: list[dict[str, Any]] = [
    {},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding_causal_bottom_right"},
    {"window_size": (200, 70)},
    {"window_size": (40, 0), "bottom_right_diagonal": True},
]
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (48, 80), (96, 96), (160, 208)]


def check_on_gpu(call: dict[str, Any], granularity: Any = "head", dtype: torch.dtype = torch.bfloat16, **inputs: Any) -> None:
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    fp8 = fp8_call(*make_call(given, **call, return_max_logit=False), granularity)
    on_gpu = moved(fp8, "cuda")
    check_forward(fp8, *run_forward(on_gpu, dtype))
    if max(inputs.get("head_dim_qk", 128), inputs.get("head_dim_v", 128)) <= 128:
        dout = make_dout(given)
        gradient, stands_for = gradient_of(fp8, dout, granularity)
        check_backward(fp8, run_backward(on_gpu, moved_gradient(gradient, "cuda"), dout), dout, stands_for)


@on_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_head_dims_and_bands(dims: tuple[int, int], band: dict[str, Any]) -> None:
    check_on_gpu({"attn_mask_type": "padding", **band}, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@on_hopper
@pytest.mark.parametrize("granularity", ["tensor", "batch_head", "block"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "sbhd_2thd"])
def test_formats_and_scales(fmt: str, granularity: Any) -> None:
    for band in BANDS[:3]:
        inputs = {"qkv_format": fmt, "padding": True, "gap": 13, "num_heads": 6, "num_heads_kv": 2, "outliers": True}
        check_on_gpu({"attn_mask_type": "padding", **band}, granularity, torch.float16, **inputs, **UNEVEN)


@on_hopper
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_dense(mask: str, sq: int, skv: int) -> None:
    check_on_gpu({"attn_mask_type": mask}, lengths_q=[sq] * 3, lengths_kv=[skv] * 3)


@on_hopper
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks(softmax_type: str) -> None:
    offset = torch.tensor([0.5, float("-inf"), -3.0, 20.0]) if softmax_type == "learnable" else None
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": softmax_type, "softmax_offset": offset}
    check_on_gpu(call, qkv_format="thd", **UNEVEN)


@on_hopper
def test_bits_repeat() -> None:
    given = make_inputs("thd", **UNEVEN, num_heads=16, head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    call = fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False))
    dout = make_dout(given)
    on_gpu, gradient = moved(call, "cuda"), moved_gradient(gradient_of(call, dout)[0], "cuda")

    def run() -> list[torch.Tensor]:
        return [*run_forward(on_gpu), *run_backward(on_gpu, gradient, dout)]

    first = run()
    for _ in range(20):
        assert all(torch.equal(again, once) for again, once in zip(run(), first, strict=True))
