"""The FP8 kernels for sm_90 in the emulator: right, and without a race, a missing fence or a deadlock, over many schedules."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import emulator, mods
from flexattn.bench.emulated import emulated
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.gluon import forward_loader, forward_work
from flexattn.kernels_triton.hopper import backward as hopper_backward
from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
from flexattn.kernels_triton.hopper import backward_fused_192 as hopper_fused_192
from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
from flexattn.kernels_triton.hopper import fp8_forward as hopper_fp8_forward
from flexattn.kernels_triton.hopper import fused_consumer
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_dout, make_inputs, reference_attention
from tests.support import fp8_calls, inject
from tests.support.gluon_calls import BANDS, EVERYTHING, HARMLESS, SEEDS, SINKS, UNEVEN, is_wide, without_gpu
from tests.support.hopper_fp8_calls import (
    E4M3,
    E5M2,
    Fp8Call,
    backward_of,
    check_backward,
    check_forward,
    fp8_call,
    on_sm_90,
    run_backward,
    run_forward,
    spans,
)
from tests.support.inject import assign, drop, kernels_with, move, with_argument, wrong_phase


def call_of(call: dict[str, Any], granularity: Any = "head", **inputs: Any) -> Fp8Call:
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return fp8_call(*make_call(given, **call, return_max_logit=False), granularity)


def forward(call: Fp8Call, seed: int, kernels: ModuleType = hopper_fp8_forward) -> emulator.Report:
    """Compares the results with the oracle if the emulator finds no bug."""
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
    kernels: ModuleType = hopper_fp8_fused,
    is_persistent: bool = False,
    fp32: bool = False,
    **inputs: Any,
) -> emulator.Report:
    """The same for the backward; fp32: whether gradients are in float32."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    fp8 = fp8_call(*make_call(given, **call, return_max_logit=False), granularity)
    wanted = backward_of(fp8, make_dout(given), granularity, E5M2 if granularity == "batch_head" else E4M3)
    with emulated(seed, kernels) as reports:
        tile = None
        if hasattr(kernels, "fp8_fused_backward"):
            tile = replace(hopper_fp8_fused.tile_of(wanted.problem), is_persistent=is_persistent)
        grads = run_backward(wanted, kernels=kernels, tile=tile, fp32=fp32)
    (report,) = reports.values()
    if not report.bugs:
        check_backward(wanted, grads)
        assert not fp32 or all(is_wide(t, given.q.dtype) for t in grads)
    return report


def check_backward_of(seed: int, call: dict[str, Any], granularity: Any = "head", **inputs: Any) -> None:
    report = backward(seed, call, granularity, **inputs)
    # A persistent kernel waits for a block's last q when it loads k and v. It waits again when it loads the next data there.
    harmless = HARMLESS | ({"phase-repeat"} if inputs.get("is_persistent") else set())
    assert {finding.kind for finding in report.findings} <= harmless, f"seed {seed}: {report}"


HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (48, 80)]


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    seed = (1, 5)[HEAD_DIMS.index(dims) % 2]  # lazy, random
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(call_of(call, "batch_head", qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN), seed)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_scales(fmt: str, granularity: str) -> None:
    inputs = {"lengths_q": [70, 0, 130], "lengths_kv": [300, 9, 65], "num_heads": 2, "num_heads_kv": 1, "outliers": True}
    bands = [{"attn_mask_type": "padding"}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}]
    for seed, band in enumerate(bands, 2):
        check(call_of({"attn_mask_type": "padding"} | band, granularity, qkv_format=fmt, padding=True, gap=2, **inputs), seed)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (330, 70)}],
    ids=str,
)
def test_dense(band: dict[str, Any]) -> None:
    """Blocks that an edge cuts on either side, and complete ones between."""
    inputs = {"lengths_q": [330] * 2, "lengths_kv": [530] * 2, "num_heads": 2, "num_heads_kv": 2}
    check(call_of(band, "block", **inputs), 1 if "window_size" in band else 7)  # lazy, random


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)], ids=str)
def test_head_dims_backward(dims: tuple[int, int]) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    check_backward_of(dims[0] // 16, call, "batch_head", **inputs)


@pytest.mark.slow
@without_gpu
def test_gradients_in_float32() -> None:
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": 48, "head_dim_v": 80, **UNEVEN}
    check_backward_of(3, EVERYTHING | {"softmax_offset": SINKS}, "batch_head", fp32=True, **inputs)


@pytest.mark.slow
@without_gpu
def test_gradients_in_float32_of_persistent_programs() -> None:
    """Blocks of keys that no query sees lie between others; each program has several blocks."""
    inputs = {"is_persistent": True, "fp32": True, "head_dim_qk": 64, "head_dim_v": 64}
    call = EVERYTHING | {"softmax_offset": SINKS}
    check_backward_of(5, call, "batch_head", qkv_format="thd", gap=3, **inputs, **UNEVEN)
    dense = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 2}
    for seed in (1, 5, 6):  # lazy, random, eager
        check_backward_of(seed, {"attn_mask_type": "causal"}, **inputs, **dense)


@without_gpu
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        ("bshd", "block"),
        pytest.param("thd", "tensor", marks=pytest.mark.slow),
        *(pytest.param(f, "block", marks=pytest.mark.exhaustive) for f in ("sbhd", "bhsd", "thd_2bshd")),
    ],
)
def test_formats_and_scales_backward(fmt: str, granularity: str) -> None:
    inputs = {"lengths_q": [70, 0, 230], "lengths_kv": [200, 9, 65], "num_heads": 2, "num_heads_kv": 1, "padding": True, "gap": 2}
    seed = ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"].index(fmt)
    band: dict[str, Any] = [{}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}][seed % 3]
    call = {"attn_mask_type": "padding"} | band
    check_backward_of(2 + seed, call, granularity, qkv_format=fmt, dtype=torch.float16, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize(
    "call", [*BANDS, EVERYTHING | {"softmax_offset": SINKS}, {"attn_mask_type": "padding", "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_programs(dim: int, call: dict[str, Any], fmt: str) -> None:
    """Blocks of keys that no query sees, that need one iteration, and that two heads of queries go through."""
    seed = dim // 64 + 3 * ["bshd", "sbhd", "thd"].index(fmt)
    inputs = {"qkv_format": fmt, "gap": 3, "padding": True, "head_dim_qk": dim, "head_dim_v": dim, **UNEVEN}
    check_backward_of(seed, call, "batch_head", is_persistent=True, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("sq", [200, 64])
@pytest.mark.parametrize("dim", [64, 128, 48])
def test_persistent_programs_of_dense_calls(dim: int, sq: int, mask: str) -> None:
    inputs = {"lengths_q": [sq] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 2}
    seed = {64: 5, 128: 1, 48: 0}[dim]  # random, lazy, eager
    check_backward_of(seed, {"attn_mask_type": mask}, is_persistent=True, head_dim_qk=dim, head_dim_v=dim, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_programs_over_twenty_schedules(dim: int) -> None:
    inputs = {"head_dim_qk": dim, "head_dim_v": dim, "is_persistent": True}
    for seed in SEEDS:
        check_backward_of(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", **inputs, **UNEVEN)
        check_backward_of(seed, {"attn_mask_type": "causal"}, lengths_q=[200], lengths_kv=[330], **inputs)


@pytest.mark.slow
@without_gpu
def test_slots_in_reverse() -> None:
    """The transposed tiles and the statistics have an order of their own."""
    inputs = {"qkv_format": "thd", "gap": 3, "in_reverse": True, "lengths_q": [70, 0, 130, 20], "lengths_kv": [130, 9, 65, 140]}
    heads = {"num_heads": 2, "num_heads_kv": 1}
    call = {"attn_mask_type": "padding_causal"}
    check(call_of(call, "block", **inputs, **heads), 4)
    check_backward_of(4, call, "head", **inputs, **heads)


@without_gpu
def test_a_query_that_sees_one_key_has_no_gradient() -> None:
    """Only the rounding of out remains: its sum with dout uses the same dout as dp."""
    inputs = {"lengths_q": [70], "lengths_kv": [1], "num_heads": 2, "num_heads_kv": 1}
    check_backward_of(3, {"attn_mask_type": "no_mask"}, "tensor", **inputs)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("kernels", [hopper_fp8_fused, hopper_fp8_backward], ids=lambda module: module.__name__.split(".")[-1])
def test_products_take_what_came_in_16_bits(kernels: ModuleType) -> None:
    """dv is a sum of dout, dk of q and dq of k, in their given 16 bits if the dtype is out's. Scores and dp use FP8 copies."""
    inputs = {"lengths_q": [70, 0, 130], "lengths_kv": [150, 40, 70], "num_heads": 4, "num_heads_kv": 2, "dtype": torch.bfloat16}
    given = make_inputs("thd", gap=2, head_dim_qk=64, head_dim_v=64, **inputs)
    fp8 = fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False))
    found = backward_of(fp8, make_dout(given))
    q, k, _ = fp8.stands_for[:3]
    copies16 = [(factor * t).nan_to_num().to(torch.bfloat16) for factor, t in ((2, found.stands_for), (4, q), (8, k))]

    def run(*copies16: torch.Tensor) -> list[torch.Tensor]:
        with emulated(3, kernels):
            return run_backward(found._replace(problem=dataclasses.replace(found.problem, copies16=copies16)), kernels=kernels)

    once = run()
    check_backward(found, once)
    unaligned = torch.empty(copies16[1].numel() + 1, dtype=torch.bfloat16)[1:].view_as(copies16[1]).copy_(copies16[1])
    dout, q, k = copies16
    for given16, factors in (
        ((dout, q, k), (8, 4, 2)),
        ((dout,), (1, 1, 2)),
        ((dout.half(), q.half(), k.half()), (1, 1, 1)),
        ((dout.half(), unaligned), (1, 4, 1)),
    ):
        for t, expected, factor in zip(run(*given16), once, factors, strict=True):
            assert t.equal(expected * factor)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("kernels", [hopper_fp8_fused, hopper_fp8_backward], ids=lambda module: module.__name__.split(".")[-1])
def test_dout_that_comes_in_16_bits(kernels: ModuleType, dims: tuple[int, int]) -> None:
    """It becomes the result of a separate pass, to the bit, and the gradients are of that."""
    if max(dims) > 128 and kernels is hopper_fp8_fused:
        pytest.skip("its accumulators hold head dims up to 128")
    inputs = {"lengths_q": [70, 0, 200], "lengths_kv": [150, 40, 70], "num_heads": 4, "num_heads_kv": 2, "dtype": torch.bfloat16}
    given = make_inputs("thd", gap=2, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)
    fp8 = fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False))
    dout = make_dout(given)
    found = backward_of(fp8, dout, "block")
    room = torch.full_like(found.problem.descales[3], float("nan"))
    problem = dataclasses.replace(
        found.problem, descales=(*found.problem.descales[:3], room), copies16=(dout,), dout_is_to_come=True, scale_rows=128
    )
    to_come = found._replace(problem=problem, dout=torch.full_like(found.dout.float(), float("nan")).to(E4M3))
    with emulated(3, kernels):
        check_backward(found, run_backward(to_come, kernels=kernels))
    lengths = (given.cu_seqlens_q, given.cu_seqlens_q_padded, given.max_seqlen_q)
    (data,), (descale,), _ = quantization.quantize([Unquantized(dout, "thd", *lengths, None)], E4M3, "block", 128, 0)
    assert room.equal(descale)
    for _, start, length in spans(problem, "q"):
        rows = slice(start, start + length)
        assert to_come.dout[rows].view(torch.uint8).equal(data[rows].view(torch.uint8))


@without_gpu
@pytest.mark.parametrize(
    ("place", "dims", "kernel"),
    [
        (0, (64, 64), "_attn_bwd_fused_fp8_hopper_kernel"),
        pytest.param(1, (128, 128), "_attn_bwd_dq_fp8_hopper_kernel", marks=pytest.mark.slow),
        pytest.param(1, (256, 256), "_attn_bwd_dq_fp8_hopper_kernel", marks=pytest.mark.exhaustive),
        pytest.param(2, (64, 64), "_attn_bwd_fused_hopper_kernel", marks=pytest.mark.slow),
        pytest.param(3, (192, 128), "_attn_bwd_fused_192_hopper_kernel", marks=pytest.mark.slow),
        pytest.param(4, (64, 64), "_attn_bwd_dq_hopper_kernel", marks=pytest.mark.slow),
        pytest.param(5, (64, 64), None, marks=pytest.mark.slow),  # portable
    ],
)
def test_a_longest_sequence_above_the_number_of_packed_queries(
    place: int, dims: tuple[int, int], kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is then room for more scales of dout than there are blocks of rows: each head still reads its own scales."""
    on_sm_90(monkeypatch)
    monkeypatch.setitem(families.BACKWARDS, True, (families.BACKWARDS[True][place], families.PORTABLE_BACKWARD))
    lengths = {"lengths_q": [70, 9], "lengths_kv": [80, 9], "num_heads": 3, "num_heads_kv": 3}
    given = make_inputs("thd", **lengths, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16)
    spec, x = fp8_calls.make_fp8_call(given, attn_mask_type="padding_causal")
    out, lse, _ = reference_attention(spec, x)
    dout = make_dout(given) * torch.tensor([1.0, 30.0, 1e3], dtype=torch.bfloat16)[:, None]
    found = []
    for longest in (70, 129, 512):
        with emulated(5, hopper_fp8_fused, hopper_fp8_backward, hopper_fused, hopper_fused_192, hopper_backward) as reports:
            call = x._replace(max_seqlen_q=longest)
            found.append(triton_backend.backward(spec, call, out.bfloat16(), lse.float(), dout, None)[:3])
        assert kernel in reports if kernel else not reports
    assert all(gradient.isfinite().all() for gradient in found[0])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@without_gpu
def test_softcap_and_bias_backward() -> None:
    inputs = {"lengths_q": [150], "lengths_kv": [200], "num_heads": 2, "num_heads_kv": 1}
    check_backward_of(4, {"attn_mask_type": "causal", "softcap": 3.0}, "block", **inputs)
    bias = torch.randn(1, 2, 150, 200, dtype=torch.bfloat16)
    check_backward_of(5, {"attn_mask_type": "no_mask", "bias_type": "pre_scale_bias", "bias": bias}, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_twenty_schedules_backward(dims: tuple[int, int]) -> None:
    inputs = {"qkv_format": "thd", "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    for seed in SEEDS:
        check_backward_of(seed, EVERYTHING | {"softmax_offset": SINKS}, "block", **inputs)


def _softcap_and_documents() -> Any:
    """Softcap, and a mask that hides some blocks completely."""
    return trace_mods(mods.softcap(2.0), mods.document(torch.arange(80) // 30), needs_grad=True)


_FP8_PAIR = {"_attn_bwd_dq_fp8_hopper_kernel", "_attn_bwd_dkdv_fp8_hopper_kernel"}
_HALF_PAIR = {"_attn_bwd_dq_hopper_kernel", "_attn_bwd_dkdv_hopper_kernel"}


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    ("dim", "granularity", "more", "expected"),
    [
        (128, "head", {}, {"_attn_bwd_fused_fp8_hopper_kernel"}),
        (128, "block", {}, {"_attn_bwd_fused_hopper_kernel"}),  # its blocks are half as long as the kernel's tiles
        (64, "head", {"deterministic": True}, _FP8_PAIR),
        (64, "block", {"deterministic": True}, _HALF_PAIR),
        (192, "tensor", {}, _FP8_PAIR),
        (64, "head", {"mods": _softcap_and_documents()}, {"_attn_bwd_fused_fp8_hopper_kernel"}),
        (128, "head", {"mods": _softcap_and_documents(), "deterministic": True}, _FP8_PAIR),
        (256, "tensor", {"mods": _softcap_and_documents()}, _FP8_PAIR),
    ],
)
def test_a_backward_runs_on_the_kernels_chosen_for_it(
    dim: int, granularity: str, more: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in FP8 if the kernel takes it, otherwise in a half type after a dequantisation; the reference is in fp64."""
    modules = (hopper_fp8_fused, hopper_fp8_backward, hopper_fused, hopper_backward)
    on_sm_90(monkeypatch)
    lengths = {"lengths_q": [70, 0, 9], "lengths_kv": [80, 9, 65], "num_heads": 2, "num_heads_kv": 1, "gap": 2}
    given = make_inputs("thd", **lengths, head_dim_qk=dim, head_dim_v=dim, dtype=torch.bfloat16)
    with emulated(6, *modules) as reports:
        fp8_calls.check(given, granularity, E5M2, attn_mask_type="padding_causal", softmax_type="off-by-one", **more)
    assert reports.keys() == expected
    assert {finding.kind for report in reports.values() for finding in report.findings} <= HARMLESS


def test_a_bias_that_needs_a_gradient_is_left_to_the_portable_kernels() -> None:
    nothing: Any = None
    call = Backward(*[nothing] * 8, dbias=torch.randn(1, 1, 8, 8))
    for family in families.BACKWARDS[True][:-1]:
        assert "gradients of a bias" in str(family.unsupported(call))


FAULTS = {
    "k is read before it has come": (hopper_fp8_forward, drop("wait(k_full)")),
    "v is read before it has come": (hopper_fp8_forward, drop("wait(v_full)")),
    "v is released before the product has read it": (
        hopper_fp8_forward,
        move("arrive(v_empty)", before="warpgroup_mma_wait(pv, p_sums)"),
    ),
    "the sum of v is read while it runs": (hopper_fp8_forward, with_argument("warpgroup_mma_wait(pv, p_sums)", 0, "2")),
    "the sum of p is read while it runs": (hopper_fp8_forward, with_argument("warpgroup_mma_wait(pv, p_sums)", 0, "1")),
    "the ones are written without a fence": (
        hopper_fp8_forward,
        drop("fence_async_shared()", within="_attn_fwd_fp8_hopper_kernel"),
    ),
    "out is stored without a fence": (hopper_fp8_forward, drop("fence_async_shared()", within="_compute_partition")),
    "the loader waits for the wrong phase of v": (forward_loader, wrong_phase("wait(v_empty)", within="load_partition")),
    "too few bytes are expected of v": (
        forward_loader,
        with_argument("mbarrier.expect(full)", 1, "{} // 2", within="load_partition"),
    ),
    "acc is not rescaled": (hopper_fp8_forward, assign("acc", "acc + pv", within="_attend", nth=-1)),
    "the scale of v of the block before": (hopper_fp8_forward, assign("ratio", "1.0", nth=-1)),
    "a block that the end cuts is taken for a whole one": (
        forward_work,
        assign("begin", "block_range + num_blocks - gl.cdiv(right_end, META.BLOCK_N)", within="unmasked_blocks", nth=2),
    ),
    "d 256: v is released between its halves": (hopper_fp8_forward, move("arrive(v_empty)", before="warpgroup_mma(pv)")),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    [kernels] = kernels_with((hopper_fp8_forward,), *FAULTS[name], tmp_path)
    inputs = {"lengths_q": [330], "lengths_kv": [520], "num_heads": 2, "num_heads_kv": 1, "outliers": True}
    dim = 256 if name.startswith("d 256") else 128
    call = call_of({"attn_mask_type": "no_mask"}, "block", head_dim_qk=dim, head_dim_v=dim, **inputs)
    for seed in (0, 1, 2, 5):  # eager, lazy, round robin, random
        try:
            report = forward(call, seed, kernels)
        except AssertionError:
            continue  # the numbers are wrong
        assert report.bugs, f"not found on seed {seed}"


# The file, of the kernel or of code shared with the 16-bit one, and its change.
FAULTS_OF_THE_BACKWARD: dict[str, tuple[ModuleType, inject.Fault]] = {
    "q is read before it has come": (fused_consumer, drop("wait(q_full)")),
    "dout is read before it has come": (fused_consumer, drop("wait(dout_full)", nth=0)),
    "too few bytes are expected of q": (
        hopper_fp8_fused,
        with_argument("mbarrier.expect(Q_BYTES)", 1, "descriptors.q.block_type.nbytes", nth=0),
    ),
    "the factors are written before the last ones have been read": (hopper_fp8_fused, drop("wait(q_empty)", nth=0)),
    "q is released before dk has read it": (
        fused_consumer,
        move("release(q_empty)", before="_wait_for_sums(dk)", within="_consume_block"),
    ),
    "ds is read without a fence": (fused_consumer, drop("fence_async_shared()", nth=1)),
    "dq is summed before the other half of ds is there": (
        fused_consumer,
        drop("wait_written(last)", within="_consume_block", nth=1),
    ),
    "ds is overwritten while the other warpgroup reads it": (fused_consumer, drop("wait_read(current)")),
    "ds is released before dq has read it": (
        fused_consumer,
        move("announce_read(last)", before="warpgroup_mma_wait(SCORES_IN_FLIGHT)"),
    ),
    "dv takes the place of dout while the other warpgroup multiplies by it": (fused_consumer, drop("named_barrier_sync(LAST)")),
    "persistent: a block is drawn twice": (hopper_fp8_fused, assign("t", "gl.atomic_add(work.table_ptr, 1)", nth=1)),
    "persistent: k and v come while the block before is multiplied": (hopper_fp8_fused, drop("wait(q_empty)", nth=1)),
    "persistent: k in 16 bits comes before dk has left": (hopper_fp8_fused, drop("tma.store_wait()", within="_store_gradients")),
    "persistent: dk is stored before it is written": (hopper_fp8_fused, drop("wait_full(dkdv_full)")),
    "persistent: k and v are not waited for": (hopper_fp8_fused, with_argument("mbarrier.expect(KV_BYTES)", 1, "Q_BYTES", nth=1)),
    "persistent: k in 16 bits is not waited for": (
        hopper_fp8_fused,
        with_argument("mbarrier.expect(K16_BYTES)", 1, "DOUT_BYTES", nth=1),
    ),
    "persistent: q that the last product reads for nothing is overwritten": (
        fused_consumer,
        with_argument("mbarrier.arrive(q_empty)", "pred", "True"),
    ),
    "persistent, in float32: k in 16 bits comes while the block before is multiplied by it": (
        hopper_fp8_fused,
        drop("wait_full(dkdv_full)"),
    ),
    "persistent, causal: zeros are written before the gradients before them have left": (
        hopper_fp8_fused,
        drop("_store_gradients()", within="_load", nth=1),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS_OF_THE_BACKWARD)
def test_injected_fault_of_the_backward_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((hopper_fp8_fused,), *FAULTS_OF_THE_BACKWARD[name], tmp_path)
    inputs: dict[str, Any] = {"lengths_q": [520], "lengths_kv": [130], "num_heads": 1, "num_heads_kv": 1}
    mask = "causal" if "causal" in name else "no_mask"  # with it no query sees the last keys
    if "persistent" in name:
        inputs = {"lengths_q": [300], "lengths_kv": [430], "num_heads": 3, "num_heads_kv": 3, "is_persistent": True}
    inputs["fp32"] = "float32" in name
    for seed, dim in ((1, 64), (5, 128)):  # lazy, random
        inputs |= {"head_dim_qk": dim, "head_dim_v": dim}
        try:
            report = backward(seed, {"attn_mask_type": mask}, kernels=kernels, **inputs)
        except AssertionError:
            continue  # the numbers are wrong
        assert report.bugs, f"not found on seed {seed}"
