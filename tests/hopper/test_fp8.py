"""FP8 on sm_90: the passes over tensors, the gates of the compiled kernels, and the kernels on such a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.gluon.descales import Scale
from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
from flexattn.kernels_triton.hopper.fp8 import empty_transposed
from flexattn.kernels_triton.hopper.fp8_forward import hopper_fp8_forward, select_fp8_tile
from flexattn.kernels_triton.hopper.fp8_passes import dequantize, transpose
from flexattn.kernels_triton.runtime.device import capability_of
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import make_call, make_dout, make_inputs
from tests.support import fp8_calls
from tests.support.compiled_kernels import TRITON, check_loops, compile_sound
from tests.support.hopper_fp8_calls import (
    E4M3,
    E5M2,
    backward_of,
    call_on,
    check_backward,
    check_forward,
    first_transposed,
    fp8_call,
    moved,
    quantise,
    rows_of,
    run_backward,
    run_forward,
    spans,
    transposed,
)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head", "block"])
@pytest.mark.parametrize(
    ("fmt", "inputs"),
    [
        ("thd", {"lengths_q": [100, 0, 300, 1], "gap": 3}),
        ("thd", {"lengths_q": [100, 0, 300, 1], "gap": 3, "in_reverse": True}),
        ("bshd", {"lengths_q": [100, 0, 300], "padding": True, "gap": 5}),
        ("sbhd", {"lengths_q": [130, 130], "strided": True}),
        ("bhsd", {"lengths_q": [257], "outliers": True}),
    ],
    ids=["thd", "thd in reverse", "bshd", "sbhd", "bhsd"],
)
def test_transpose_and_dequantize(fmt: str, inputs: dict[str, Any], granularity: Any, device: str) -> None:
    dtype = E5M2 if granularity == "head" else E4M3
    given = make_inputs(fmt, **inputs, dtype=torch.bfloat16, head_dim_qk=48, head_dim_v=64, device=device)
    problem = triton_backend.to_problem(*make_call(given))
    for side, x in (("q", problem.q), ("kv", problem.v)):
        given_in_half = make_inputs(fmt, **inputs, dtype=torch.bfloat16, head_dim_qk=48, head_dim_v=64)
        host = triton_backend.to_problem(*make_call(given_in_half))
        wanted = quantise(host, side, host.q if side == "q" else host.v, granularity, dtype)
        scale = wanted.scale._replace(descale=wanted.scale.descale.to(device))
        rows = torch.empty_like(x, dtype=dtype).copy_(wanted.values)
        tiles = torch.zeros_like(empty_transposed(rows, problem.batch).view(torch.uint8)).view(dtype)
        transpose(problem, side, rows, tiles)
        expected = transposed(host, side, wanted.values).view(torch.uint8)
        for b, _, length in spans(problem, side):
            first = first_transposed(problem, side, b)
            blocks = slice(first, first + -(-length // 128))
            assert tiles.view(torch.uint8)[:, blocks].cpu().equal(expected[:, blocks])
        if side == "kv":
            half = dequantize(problem, side, rows, scale, torch.full_like(rows, 7.0, dtype=torch.bfloat16))
            for b, start, length in spans(problem, side):
                assert rows_of(half, b, start, length).cpu().equal(rows_of(wanted.stands_for, b, start, length).to(torch.bfloat16))


FEATURES: dict[str, dict[str, Any]] = {
    "open": {},
    "causal": {"window_right": 0},
    "everything": {"window_left": 17, "window_right": 0, "has_sink": True, "softmax_offset": torch.zeros(4), "bottom_right": True},
}


# Variants of the fused backward: whether its programs are persistent, and the dtype of its gradients
FUSED = {
    "fused_fp8": (False, torch.bfloat16),
    "persistent_fp8": (True, torch.bfloat16),
    "persistent_fp8_to_fp32": (True, torch.float32),
}


def call_to_compile(head_dims: tuple[int, int], features: dict[str, Any], is_ragged: bool) -> tuple[Backward, Scale]:
    """A backward with dout in FP8, gradients in bfloat16, and the scale of all its operands."""
    shape = (256, 4) if is_ragged else (2, 128, 4)
    q, k, v, out, dout = (torch.zeros(*shape, dim, dtype=torch.bfloat16) for dim in (*head_dims[:1] * 2, *head_dims[1:] * 3))
    q8, k8, v8, dout8 = (t.to(E4M3) for t in (q, k, v, dout))
    lse = torch.zeros(4, 256) if is_ragged else torch.zeros(2, 4, 128)
    offsets = torch.tensor([0, 128, 256], dtype=torch.int32)
    lengths: dict[str, Any] = dict.fromkeys((f"cu_seqlens_{x}" for x in ("q", "kv", "q_padded", "kv_padded")), offsets)
    lengths |= {"max_seqlen_q": 128, "max_seqlen_kv": 128}
    scale = Scale(torch.ones(2, 4, 2 if is_ragged else 1), 128)
    own = features | (lengths if is_ragged else {})
    problem = Problem(q8, k8, v8, softmax_scale=0.1, descales=(scale.descale,) * 4, scale_rows=128, **own)
    return Backward(problem, out, lse, dout8, None, q, k, v), scale


def launches_of(head_dims: tuple[int, int], features: str) -> dict[str, Launch]:
    """The kernels' launches by name, as on the device."""
    call, scale = call_to_compile(head_dims, FEATURES[features], features == "everything")
    problem = call.problem
    v_transposed = empty_transposed(problem.v, 2)
    with recorded_launches() as launches:
        hopper_fp8_forward(problem, v_transposed, (scale, scale, scale), call.out, call.lse)
        if max(head_dims) <= 128:
            for is_persistent, dtype in FUSED.values():
                dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (call.dq, call.dk, call.dv))
                tile = replace(hopper_fp8_fused.tile_of(problem), is_persistent=is_persistent)
                hopper_fp8_fused.fp8_fused_backward(call._replace(dq=dq, dk=dk, dv=dv), tile)
        transpose(problem, "kv", problem.v, v_transposed)
    names = [x.kernel.__name__.removeprefix("_attn_").removeprefix("bwd_").removesuffix("_hopper_kernel") for x in launches]
    forms = iter(FUSED)
    names = [next(forms) if name == "fused_fp8" else name for name in names]
    return dict(zip(names, launches, strict=True))


# Instructions in one iteration of the main loop, by kernel, row and features; the forward's loop has only complete blocks.
LOOP_INSTRUCTIONS = {
    ("fwd_fp8", (64, 64), "open"): 335,
    ("fwd_fp8", (64, 64), "causal"): 333,
    ("fwd_fp8", (64, 64), "everything"): 415,
    ("fused_fp8", (64, 64), "open"): 670,
    ("fused_fp8", (64, 64), "causal"): 767,
    ("fused_fp8", (64, 64), "everything"): 900,
    ("fwd_fp8", (128, 128), "open"): 368,
    ("fwd_fp8", (128, 128), "causal"): 368,
    ("fwd_fp8", (128, 128), "everything"): 460,
    ("fused_fp8", (128, 128), "open"): 450,
    ("fused_fp8", (128, 128), "causal"): 493,
    ("fused_fp8", (128, 128), "everything"): 563,
    ("persistent_fp8", (64, 64), "open"): 680,
    ("persistent_fp8", (64, 64), "causal"): 773,
    ("persistent_fp8", (64, 64), "everything"): 907,
    ("persistent_fp8", (128, 128), "open"): 465,
    ("persistent_fp8", (128, 128), "causal"): 511,
    ("persistent_fp8", (128, 128), "everything"): 575,
    ("persistent_fp8_to_fp32", (64, 64), "open"): 680,
    ("persistent_fp8_to_fp32", (64, 64), "causal"): 790,
    ("persistent_fp8_to_fp32", (64, 64), "everything"): 925,
    ("fwd_fp8", (192, 128), "open"): 403,
    ("fwd_fp8", (192, 128), "causal"): 400,
    ("fwd_fp8", (192, 128), "everything"): 479,
    ("fwd_fp8", (256, 256), "open"): 469,
    ("fwd_fp8", (256, 256), "causal"): 467,
    ("fwd_fp8", (256, 256), "everything"): 553,
}
SLACK = 0.05
# Share of spills: 1 or 2 with 128 queries, up to 6 in persistent programs. With all features, such as scales by block and a window,
# there are 10 to 14.
SPILLS = {("fused_fp8", (64, 64)): 0.004, ("fwd_fp8", (128, 128)): 0.031}
SPILLS |= {("persistent_fp8", (64, 64)): 0.007, ("persistent_fp8_to_fp32", (64, 64)): 0.005, ("persistent_fp8", (128, 128)): 0.005}
if TRITON >= (3, 9):  # asks ptxas for another allocation of registers (--regAllocOptLevel=2); without it spills are the same
    SPILLS |= {("fused_fp8", (64, 64)): 0.01, ("persistent_fp8", (64, 64)): 0.008, ("persistent_fp8_to_fp32", (64, 64)): 0.02}
SOME = [("fwd_fp8", (128, 128), "causal"), ("fused_fp8", (128, 128), "causal"), ("persistent_fp8_to_fp32", (64, 64), "everything")]


def check_compiled(cases: list[tuple[str, tuple[int, int], str]]) -> None:
    requests = [request_for(launches_of(dims, features)[kernel], 90) for kernel, dims, features in cases]
    for case, report in zip(cases, compile_sound(requests), strict=True):
        assert report.loop_spill_share <= SPILLS.get(case[:2], 0.0), f"{case}: {report}"
        assert report.idle_barriers == 0, f"{case}: {report.idle_barriers} barriers that nothing uses"
        assert not report.warnings, f"{case}: {report.warnings}"  # C7510 and the like: ptxas serialised wgmma
        is_forward = case[0] == "fwd_fp8"
        assert set(report.matrix_instructions) == {"QGMMA"} | (set() if is_forward else {"HGMMA"}), (
            f"{case}: {report.matrix_instructions}"
        )
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90], f"{case}: {report.shared_bytes}"
        loops = [loop for loop in report.loops if "QGMMA" in loop]
        consumers = select_fp8_tile(*case[1]).block_m // 64 if is_forward else 2
        for_each = 2 if is_forward else 1  # of blocks that an edge may cut, and of complete ones
        assert len(loops) == consumers * for_each, f"{case}: {for_each} loops for each consumer, not {loops}"
        for loop in loops:  # nothing is transposed or shuffled: the shuffles belong to the rows' maxima (forward) or to votes
            assert not {"LDSM", *({"STSM", "STS"} if is_forward else {})} & loop.keys(), f"{case}: {loop}"
            assert loop.get("PRMT", 0) + loop.get("SHFL", 0) <= (6 if is_forward else 10), f"{case}: {loop}"
        check_loops(case, loops[for_each - 1 :: for_each], LOOP_INSTRUCTIONS[case], SLACK)


@pytest.mark.slow
def test_compiled() -> None:
    check_compiled(SOME)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [256, *(pytest.param(dim, marks=pytest.mark.exhaustive) for dim in (64, 96))])
def test_statistics_that_quantise_compiled(head_dim: int) -> None:
    """A program holds 128 rows of out and dout, and dout in FP8."""
    q, out, dout = (torch.zeros(2, 256, 4, head_dim, dtype=dtype) for dtype in (E4M3, torch.bfloat16, torch.bfloat16))
    descales = (torch.ones(1, 1, 1),) * 3 + (torch.ones(2, 4, 2),)
    problem = Problem(q, q, q, softmax_scale=0.1, descales=descales, scale_rows=128, copies16=(dout,), dout_is_to_come=True)
    with recorded_launches() as launches:
        tiled_statistics(Backward(problem, out, torch.zeros(2, 4, 256), torch.zeros_like(q), None, q, q, q), 64)
    (report,) = compile_sound([request_for(launch, 90) for launch in launches])
    assert report.spill_store_bytes == report.stack_bytes == 0, str(report)
    assert report.instructions["STG"] <= 16, str(report.instructions)  # 8 bytes of dout at a time; by the byte 32 and more


@pytest.mark.parametrize("head_dim", [64, 96, pytest.param(256, marks=pytest.mark.exhaustive)])
def test_statistics_that_quantise(head_dim: int, device: str) -> None:
    """They equal those of a dout that was quantised before, and so does the gradient of softmax_offset; gaps stay unwritten."""
    inputs = {"lengths_q": [70, 0, 200], "lengths_kv": [30, 40, 70], "num_heads": 2, "num_heads_kv": 1, "dtype": torch.bfloat16}
    given = make_inputs("thd", gap=3, head_dim_qk=head_dim, head_dim_v=head_dim, **inputs)
    sinks = {"softmax_type": "learnable", "softmax_offset": torch.randn(2)}
    call = fp8_call(*make_call(given, attn_mask_type="padding", **sinks, return_max_logit=False))
    found = backward_of(call, make_dout(given), "block")
    problem = moved(found.problem, device)
    out, lse, dout = (t.to(device) for t in (found.out, found.lse, found.given))
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_q_padded, problem.longest_q)
    (dout8,), (descale,), _ = quantization.quantize([Unquantized(dout, "thd", *lengths, None)], E4M3, "block", 128, 0)
    before = dataclasses.replace(problem, descales=(*problem.descales[:3], descale))
    room, data = torch.full_like(descale, float("nan")), torch.full_like(dout, float("nan")).to(E4M3)
    to_come = dataclasses.replace(problem, descales=(*problem.descales[:3], room), copies16=(dout,), dout_is_to_come=True)
    results = []
    for own, own_dout in ((before, dout8), (to_come, data)):
        doffset = torch.empty(2, device=device)
        statistics, tiles, *_ = tiled_statistics(Backward(own, out, lse, own_dout, None, own.q, own.k, own.v, doffset), 64)
        first = 64 * 2 * (1 + torch.arange(2, device=device) * tiles)  # a sequence of 70, in two tiles
        rows = first[:, None] + torch.tensor([*range(64), *range(128, 134)], device=device)
        results.append((doffset, statistics[rows], statistics[rows + 64]))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert data[70:73].float().isnan().all()


@pytest.mark.exhaustive
def test_every_row_compiled() -> None:
    check_compiled(list(LOOP_INSTRUCTIONS))


@pytest.mark.exhaustive
def test_transposition_compiled() -> None:
    requests = [request_for(launches_of((dim, dim), "everything")["_transpose_fp8_kernel"], 90) for dim in (64, 96, 128, 256)]
    assert not any(report.spill_store_bytes for report in compile_sound(requests))


@pytest.mark.parametrize(
    ("dim", "block_rows", "dtype", "reason"),
    [
        (128, 128, torch.bfloat16, None),
        (144, 128, torch.bfloat16, "head dims up to 128"),
        (64, 64, torch.bfloat16, "blocks of 64 rows, no multiple of 128"),
        (64, 0, torch.float32, "its gradients are bf16 or fp16, and out is float32"),
    ],
)
def test_the_fused_backward_leaves_other_calls_to_others(dim: int, block_rows: int, dtype: torch.dtype, reason: str | None) -> None:
    x = torch.zeros(2, 256, 4, dim)
    descale = torch.ones(2, 4, 256 // block_rows if block_rows else 1)
    problem = Problem(*(x.to(E4M3) for _ in "qkv"), softmax_scale=0.1, descales=(descale,) * 4, scale_rows=block_rows)
    found = hopper_fp8_fused.unsupported(problem, x.to(dtype), x.to(E5M2))
    assert found is None if reason is None else reason in str(found)


def test_persistent_programs_are_chosen_by_head_dim_length_and_groups() -> None:
    for dim, length, heads_kv, more, chosen in (
        (64, 4096, 8, {}, True),
        (64, 1024, 8, {"window_right": 0}, True),
        (64, 4097, 8, {}, False),
        (64, 1024, 2, {}, False),
        (64, 1024, 8, {"softcap": 30.0}, False),
        (128, 1024, 8, {}, False),
    ):
        q, k = (torch.empty((1, length, heads, dim), dtype=E4M3, device="meta") for heads in (8, heads_kv))
        tile = hopper_fp8_fused.tile_of(Problem(q, k, k, softmax_scale=0.1, **more))
        assert tile.is_persistent == chosen, (dim, length, heads_kv, more)


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
    check_forward(fp8, *run_forward(call_on(fp8, "cuda"), dtype))
    if max(inputs.get("head_dim_qk", 128), inputs.get("head_dim_v", 128)) <= 128:
        backward = backward_of(fp8, make_dout(given), granularity)
        check_backward(backward, run_backward(backward, "cuda"))


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
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_persistent_programs(granularity: Any, band: dict[str, Any], dims: tuple[int, int]) -> None:
    """Packed sequences, some without queries or keys, and two heads of queries for a head of keys."""
    heads = {"num_heads": 6, "num_heads_kv": 2, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
    given = make_inputs("thd", dtype=torch.bfloat16, padding=True, gap=13, **heads, **UNEVEN)
    fp8 = fp8_call(*make_call(given, **{"attn_mask_type": "padding", **band}, return_max_logit=False), granularity)
    backward = backward_of(fp8, make_dout(given), granularity)
    tile = replace(hopper_fp8_fused.tile_of(backward.problem), is_persistent=True)
    check_backward(backward, run_backward(backward, "cuda", tile=tile))


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_persistent_programs_of_dense_calls(sq: int, skv: int, mask: str, dim: int) -> None:
    """Gradients match the reference; dk and dv are bitwise those of a program for each block of keys."""
    heads = {"num_heads": 24, "num_heads_kv": 24, "head_dim_qk": dim, "head_dim_v": dim}
    given = make_inputs(dtype=torch.bfloat16, lengths_q=[sq] * 3, lengths_kv=[skv] * 3, **heads)
    backward = backward_of(fp8_call(*make_call(given, attn_mask_type=mask, return_max_logit=False)), make_dout(given))
    tile = hopper_fp8_fused.tile_of(backward.problem)
    _, *once = run_backward(backward, "cuda", tile=replace(tile, is_persistent=False))
    for _ in range(3):
        gradients = run_backward(backward, "cuda", tile=replace(tile, is_persistent=True))
        check_backward(backward, gradients)
        assert all(map(torch.equal, gradients[1:], once))


@on_hopper
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks(softmax_type: str) -> None:
    offset = torch.tensor([0.5, float("-inf"), -3.0, 20.0]) if softmax_type == "learnable" else None
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": softmax_type, "softmax_offset": offset}
    check_on_gpu(call, qkv_format="thd", **UNEVEN)


@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_calls(dims: tuple[int, int], granularity: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete calls on the kernels of sm_90 that take them."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(ignores_measurements=True))
    given = make_inputs("thd", **UNEVEN, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16, gap=3, device="cuda")
    fp8_calls.check(given, granularity, E5M2, attn_mask_type="padding_causal", deterministic=deterministic)


@on_hopper
def test_bits_repeat() -> None:
    """dq is excepted: its sums depend on the order of programs."""
    given = make_inputs("thd", **UNEVEN, num_heads=16, head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    call = fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False))
    backward, on_gpu = backward_of(call, make_dout(given)), call_on(call, "cuda")

    def run() -> list[torch.Tensor]:
        return [*run_forward(on_gpu), *run_backward(backward, "cuda")[1:]]

    first = run()
    for _ in range(20):
        assert all(torch.equal(again, once) for again, once in zip(run(), first, strict=True))
