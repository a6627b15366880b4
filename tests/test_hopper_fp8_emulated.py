"""The FP8 kernels for sm_90 in the emulator: right, and without a race, a missing fence or a deadlock, over many schedules."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hopper_fp8_calls import E4M3, E5M2, Fp8Call, check_backward, check_forward, fp8_call, gradient_of, run_backward, run_forward
from test_hopper_emulated import EVERYTHING, HARMLESS, SEEDS, SINKS, UNEVEN, edited, without_gpu

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.kernels_triton import hopper_fp8_backward, hopper_fp8_forward
from flexattn.testing import make_call, make_dout, make_inputs


def call_of(call: dict[str, Any], granularity: Any = "head", **inputs: Any) -> Fp8Call:
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return fp8_call(*make_call(given, **call, return_max_logit=False), granularity)


def forward(call: Fp8Call, seed: int, kernels: ModuleType = hopper_fp8_forward) -> emulator.Report:
    """Held to the oracle where the emulator finds no bug."""
    with emulated(seed, kernels) as reports:
        out, lse = run_forward(call, kernels=kernels)
    (report,) = reports.values()
    if not report.bugs:
        check_forward(call, out, lse)
    return report


def check(call: Fp8Call, *seeds: int) -> None:
    for seed in seeds:
        report = forward(call, seed)
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"


def backward(
    seed: int,
    call: dict[str, Any],
    granularity: Any = "head",
    kernels: ModuleType = hopper_fp8_backward,
    **inputs: Any,
) -> list[emulator.Report]:
    """The same of the backward, of dq and of dk and dv."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    fp8 = fp8_call(*make_call(given, **call, return_max_logit=False), granularity)
    dout = make_dout(given)
    dtype = E5M2 if granularity == "batch_head" else E4M3
    gradient, stands_for = gradient_of(fp8, dout, granularity, dtype)
    with emulated(seed, kernels) as reports:
        grads = run_backward(fp8, gradient, dout, kernels)
    if not any(report.bugs for report in reports.values()):
        check_backward(fp8, grads, dout, stands_for)
    assert len(reports) == 2
    return list(reports.values())


def check_backward_of(seed: int, call: dict[str, Any], granularity: Any = "head", **inputs: Any) -> None:
    for report in backward(seed, call, granularity, **inputs):
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"


HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (48, 80)]


@without_gpu
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    """Lazy and random schedules."""
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(call_of(call, "batch_head", qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN), 1, 5)


@without_gpu
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_scales(fmt: str, granularity: str) -> None:
    inputs = {"lengths_q": [70, 0, 130], "lengths_kv": [300, 9, 65], "num_heads": 2, "num_heads_kv": 1, "outliers": True}
    bands = [{"attn_mask_type": "padding"}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}]
    for seed, band in enumerate(bands, 2):
        check(call_of({"attn_mask_type": "padding"} | band, granularity, qkv_format=fmt, padding=True, gap=2, **inputs), seed)


@without_gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_dense(mask: str) -> None:
    inputs = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 2}
    check(call_of({"attn_mask_type": mask}, "block", **inputs), 1, 7)


@without_gpu
def test_softcap_and_bias() -> None:
    inputs = {"lengths_q": [150], "lengths_kv": [300], "num_heads": 2, "num_heads_kv": 1}
    check(call_of({"attn_mask_type": "causal", "softcap": 3.0}, "block", **inputs), 4)
    bias = torch.randn(1, 2, 150, 300, dtype=torch.bfloat16)
    for kind in ("pre_scale_bias", "post_scale_bias"):
        check(call_of({"attn_mask_type": "no_mask", "bias_type": kind, "bias": bias}, **inputs), 5)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_twenty_schedules(dims: tuple[int, int]) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(call_of(call, "block", qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN), *SEEDS)


@without_gpu
def test_nan_stays_in_its_row() -> None:
    call = call_of({"attn_mask_type": "causal"}, lengths_q=[130], lengths_kv=[130], num_heads=1, num_heads_kv=1)
    call.problem.q[0, 77] = float("nan")
    with emulated(3, hopper_fp8_forward):
        out, lse = run_forward(call)
    is_nan = out[0, :, 0].isnan()
    assert is_nan[77].all()
    assert is_nan.sum() == out.shape[-1]
    assert lse.isnan().sum() == 1


@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)], ids=str)
def test_head_dims_backward(dims: tuple[int, int]) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    check_backward_of(dims[0] // 16, call, "batch_head", **inputs)


@without_gpu
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        ("bshd", "block"),
        ("thd", "tensor"),
        *(pytest.param(f, "block", marks=pytest.mark.exhaustive) for f in ("sbhd", "bhsd", "thd_2bshd")),
    ],
)
def test_formats_and_scales_backward(fmt: str, granularity: str) -> None:
    inputs = {"lengths_q": [70, 0, 230], "lengths_kv": [200, 9, 65], "num_heads": 2, "num_heads_kv": 1, "padding": True, "gap": 2}
    seed = ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"].index(fmt)
    band: dict[str, Any] = [{}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}][seed % 3]
    check_backward_of(2 + seed, {"attn_mask_type": "padding"} | band, granularity, qkv_format=fmt, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_twenty_schedules_backward(dims: tuple[int, int]) -> None:
    inputs = {"qkv_format": "thd", "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    for seed in SEEDS:
        check_backward_of(seed, EVERYTHING | {"softmax_offset": SINKS}, "block", **inputs)


# What is edited, what becomes of it.
PLANTED = {
    "k is read before it has come": ("mbarrier.wait(k_full.index(slot), phase)", "pass"),
    "v is read before it has come": ("mbarrier.wait(v_full.index(slot), phase)", "pass"),
    "v is released before the product has read it": (
        "            sum_of_v = warpgroup_mma(p, v.slice(0, V0",
        "            mbarrier.arrive(v_empty.index(slot), count=1)\n            sum_of_v = warpgroup_mma(p, v.slice(0, V0",
    ),
    "the sum of v is read while it runs": (
        "sum_here = warpgroup_mma_wait(0, deps=[sum_of_v])\n            if META.PARTS == 2:",
        "sum_here = warpgroup_mma_wait(1, deps=[sum_of_v])\n            if META.PARTS == 2:",
    ),
    "out is stored without a fence": ("        fence_async_shared()\n        store_rows(out_desc", "        store_rows(out_desc"),
    "the loader waits for the wrong phase of v": (
        "mbarrier.wait(v_empty.index(slot), phase ^ 1)",
        "mbarrier.wait(v_empty.index(slot), phase)",
    ),
    "too few bytes are expected of v": (
        "mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes)",
        "mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes // 2)",
    ),
    "acc is not rescaled": (
        "acc = acc * decay[:, None] + sum_here\n                compute_here(acc)\n            loaded",
        "acc = acc + sum_here\n                compute_here(acc)\n            loaded",
    ),
    "the scale of v of the block before": ("ratio = descale_v / next_descale_v", "ratio = 1.0"),
    "d 256: v is released between its halves": (
        "                # Into the same registers",
        "                mbarrier.arrive(v_empty.index(slot), count=1)\n                # Into the same registers",
    ),
}


@without_gpu
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    planted = edited(hopper_fp8_forward, *PLANTED[name], tmp_path)
    inputs = {"lengths_q": [330], "lengths_kv": [520], "num_heads": 2, "num_heads_kv": 1, "outliers": True}
    dim = 256 if name.startswith("d 256") else 128
    call = call_of({"attn_mask_type": "no_mask"}, "block", head_dim_qk=dim, head_dim_v=dim, **inputs)
    for seed in (0, 1, 2, 5):  # eager, lazy, round robin, random
        try:
            report = forward(call, seed, planted)
        except AssertionError:
            continue  # the numbers are wrong
        assert report.bugs, f"not found on seed {seed}"


PLANTED_BACKWARD = {
    "dq: k is released before dq has read it": (
        "        sum_here = warpgroup_mma_wait(0, deps=[sum_of_k])\n",
        "        mbarrier.arrive(k_empty.index(slot), count=1)\n        sum_here = warpgroup_mma_wait(0, deps=[sum_of_k])\n",
    ),
    "dq: v is read before it has come": (
        "        mbarrier.wait(v_full.index(slot), phase)\n",
        "",
    ),
    "dq: ds is not scaled back": ("undo * descale_k, gl", "undo * 0.0 + descale_k, gl"),
    "dk and dv: dout is released before dv has read it": (
        "        sum_here = warpgroup_mma_wait(0, deps=[sum_of_dout])\n",
        "        mbarrier.arrive(dout_empty.index(slot), count=1)\n        sum_here = warpgroup_mma_wait(0, deps=[sum_of_dout])\n",
    ),
    "dk and dv: q is read before it has come": (
        "        mbarrier.wait(q_full.index(slot), phase)\n",
        "",
    ),
    "dk and dv: too few bytes are expected of q": (
        "mbarrier.expect(full, Q_BYTES + statistics_descriptor.block_type.nbytes)",
        "mbarrier.expect(full, Q_BYTES)",
    ),
    "dk and dv: the gradients are stored without a fence": (
        "store(dv.to(dv_tiles.dtype))\n    fence_async_shared()\n",
        "store(dv.to(dv_tiles.dtype))\n",
    ),
}


@without_gpu
@pytest.mark.parametrize("name", PLANTED_BACKWARD)
def test_a_planted_bug_of_the_backward_is_found(name: str, tmp_path: Path) -> None:
    planted = edited(hopper_fp8_backward, *PLANTED_BACKWARD[name], tmp_path)
    inputs = {"lengths_q": [200], "lengths_kv": [390], "num_heads": 2, "num_heads_kv": 1}
    for seed in (1, 5):  # lazy, random
        try:
            reports = backward(seed, {"attn_mask_type": "no_mask"}, kernels=planted, **inputs)
        except AssertionError:
            continue  # the numbers are wrong
        assert any(report.bugs for report in reports), f"not found on seed {seed}"
