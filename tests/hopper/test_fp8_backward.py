"""The FP8 backward for sm_90 in two kernels: in the emulator on many schedules, its compiled code, and on such a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.gluon.descriptors import descriptor_error
from flexattn.kernels_triton.hopper import dkdv_consumer, dq_consumer, fp8_backward_operands
from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
from flexattn.kernels_triton.hopper.fp8_backward import FP8_BACKWARD, Fp8BackwardTile
from flexattn.kernels_triton.mods.diagonals import with_diagonals
from flexattn.kernels_triton.mods.mask_blocks import with_key_lists, with_mask_blocks
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import make_call, make_dout, make_inputs
from tests.hopper.test_fp8 import BANDS, FEATURES, HEAD_DIMS, call_to_compile, on_hopper
from tests.hopper.test_fp8 import UNEVEN as UNEVEN_AND_LONG
from tests.hopper.test_mods import FEATURES as MODS
from tests.hopper.test_mods import HEADS, LOOP_SPILLS, make_case
from tests.support import fp8_calls, inject
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import EVERYTHING, HARMLESS, SEEDS, SINKS, UNEVEN, is_wide, without_gpu
from tests.support.hopper_fp8_calls import E4M3, E5M2, backward_of, check_backward, fp8_call, run_backward
from tests.support.inject import drop, kernels_with, move, with_argument

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def backward(
    seed: int,
    call: dict[str, Any],
    granularity: Any = "head",
    kernels: ModuleType = hopper_fp8_backward,
    tile: Fp8BackwardTile | None = None,
    fp32: bool = False,
    **inputs: Any,
) -> tuple[dict[str, emulator.Report], list[torch.Tensor]]:
    """Returns the emulator's reports on both kernels, and the gradients, which match the oracle if there is no bug."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    fp8 = fp8_call(*make_call(given, **call, return_max_logit=False), granularity)
    wanted = backward_of(fp8, make_dout(given), granularity, E5M2 if granularity == "batch_head" else E4M3)
    with emulated(seed, kernels) as reports:
        grads = run_backward(wanted, kernels=kernels, tile=tile, fp32=fp32)
    if not any(report.bugs for report in reports.values()):
        check_backward(wanted, grads)
        assert not fp32 or all(is_wide(t, given.q.dtype) for t in grads)
    return reports, grads


def check(seed: int, call: dict[str, Any], granularity: Any = "head", **inputs: Any) -> list[torch.Tensor]:
    reports, grads = backward(seed, call, granularity, **inputs)
    assert len(reports) == 2
    for name, report in reports.items():
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}, seed {seed}: {report}"
    return grads


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("dims", [*DIMS, (48, 80), (160, 208)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    lazy, shuffled = (check(seed, call, "batch_head", **inputs) for seed in (1, 5))
    assert all(map(torch.equal, lazy, shuffled))  # to the bit, in any order


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (160, 208)], ids=str)
def test_gradients_in_float32(dims: tuple[int, int]) -> None:
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    check(5, EVERYTHING | {"softmax_offset": SINKS}, "batch_head", fp32=True, **inputs)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        *zip(["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"], ["tensor", "block"] * 3, strict=False),
        *(pytest.param(f, "block", marks=pytest.mark.exhaustive) for f in ("bshd", "bhsd", "thd_2bshd")),
        *(pytest.param(f, "tensor", marks=pytest.mark.exhaustive) for f in ("sbhd", "thd")),
    ],
)
def test_formats_and_scales(fmt: str, granularity: str) -> None:
    """Each has bands and a head dim of its own."""
    turn = ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"].index(fmt) + 2 * (granularity == "block")
    dims = DIMS[turn % 4]
    inputs = {"lengths_q": [70, 0, 230], "lengths_kv": [200, 9, 65], "num_heads": 2, "num_heads_kv": 1, "padding": True, "gap": 2}
    band: dict[str, Any] = [{}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}][turn % 3]
    inputs |= {"dtype": torch.float16, "head_dim_qk": dims[0], "head_dim_v": dims[1], "outliers": turn % 2 == 0}
    check(2 + turn, {"attn_mask_type": "padding"} | band, granularity, qkv_format=fmt, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    ("dims", "mask"), [((128, 128), "causal"), ((256, 256), "no_mask"), ((256, 256), "causal_bottom_right")], ids=str
)
def test_dense(dims: tuple[int, int], mask: str) -> None:
    inputs = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
    check(7, {"attn_mask_type": mask}, "block", head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_softcap_and_bias(dims: tuple[int, int]) -> None:
    inputs = {"lengths_q": [150], "lengths_kv": [200], "num_heads": 2, "num_heads_kv": 1}
    inputs |= {"head_dim_qk": dims[0], "head_dim_v": dims[1]}
    check(4, {"attn_mask_type": "causal", "softcap": 3.0}, "block", **inputs)
    bias = torch.randn(1, 2, 150, 200, dtype=torch.bfloat16)
    check(5, {"attn_mask_type": "no_mask", "bias_type": "pre_scale_bias", "bias": bias}, **inputs)


@without_gpu
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_a_query_that_sees_one_key_has_no_gradient(dims: tuple[int, int]) -> None:
    """Only the rounding of out remains: its sum with dout uses the same dout as dp."""
    inputs = {"lengths_q": [70], "lengths_kv": [1], "num_heads": 2, "num_heads_kv": 1}
    check(3, {"attn_mask_type": "no_mask"}, "head", head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@without_gpu
@pytest.mark.exhaustive  # all other tests have the committed rows
@pytest.mark.parametrize(
    ("row", "dq_stages", "dkdv_stages"),
    [
        (0, (1, 1), (1, 1, 1)),
        (1, (3, 2), (2, 3, 3)),
        (2, (1, 2), (2, 1, 1)),
        (3, (2, 3), (1, 2, 2)),
        (4, (3, 1), (1, 3, 3)),
        (5, (2, 1), (1, 2, 2)),
        (5, (1, 3), (2, 1, 1)),
    ],
)
def test_other_numbers_of_slots(row: int, dq_stages: tuple[int, int], dkdv_stages: tuple[int, int, int]) -> None:
    tile = replace(FP8_BACKWARD[row], dq_stages=dq_stages, dkdv_stages=dkdv_stages)
    inputs = {"lengths_q": [300], "lengths_kv": [280], "num_heads": 2, "num_heads_kv": 1}
    check(8 + row, {"attn_mask_type": "causal"}, tile=tile, head_dim_qk=tile.head_dim_qk, head_dim_v=tile.head_dim_v, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_twenty_schedules(dims: tuple[int, int]) -> None:
    inputs = {"qkv_format": "thd", "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    for seed in SEEDS:
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, "block", **inputs)


# The file, of the kernels or of code shared with the 16-bit ones, and its change.
FAULTS: dict[str, tuple[ModuleType, inject.Fault]] = {
    "dq: k and v are read before they have come": (dq_consumer, drop("wait(scores_full)")),
    "dq: k in a half type is read before it has come": (dq_consumer, drop("wait(ds_full)")),
    "dq: v is released before dp has read it": (dq_consumer, move("arrive(dp_empty)", before="warpgroup_mma_wait([dp])")),
    "dq: the factors are those of the turn before": (
        hopper_fp8_backward,
        with_argument("write_factors()", 1, "{} ^ 1", within="_dq_load"),
    ),
    "dq takes the place of k while the other warpgroup multiplies by it": (dq_consumer, drop("named_barrier_sync(LAST)")),
    "dk and dv: too few bytes are expected": (hopper_fp8_backward, with_argument("mbarrier.expect(BYTES)", 1, "Q_BYTES")),
    "dk and dv: q is released before dk has read it": (
        dkdv_consumer,
        move("arrive(ds_empty)", before="_wait_for_sums(dv)", within="_consume_dkdv_rows"),
    ),
    "dk and dv: the gradients are stored without a fence": (
        dkdv_consumer,
        drop("fence_async_shared()", within="_consume_dkdv_rows"),
    ),
    "d 256: q in a half type is read before it has come": (dkdv_consumer, drop("wait(ds_full)")),
    "d 256: p is read before the other warpgroup has written it": (dkdv_consumer, drop("named_barrier_sync(P_WRITTEN)")),
    "d 256: q in a half type is overwritten while it is read": (hopper_fp8_backward, drop("wait(ds_empty)", within="_dkdv_load")),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((hopper_fp8_backward,), *FAULTS[name], tmp_path)
    inputs = {"lengths_q": [330], "lengths_kv": [520], "num_heads": 1, "num_heads_kv": 1, "outliers": True}
    dim = 256 if name.startswith(("d 256", "dq takes")) else 128
    for seed in (1, 5):  # lazy, random
        try:
            reports, _ = backward(seed, {"attn_mask_type": "no_mask"}, "block", kernels, head_dim_qk=dim, head_dim_v=dim, **inputs)
        except AssertionError:
            continue  # the numbers are wrong
        assert any(report.bugs for report in reports.values()), f"not found on seed {seed}"


def launches_of(head_dims: tuple[int, int], features: str) -> dict[str, Launch]:
    """The kernels' launches by name, as on the device."""
    own = {"window_right": 0, "softcap": 30.0} if features == "softcap" else FEATURES[features]
    call, _ = call_to_compile(head_dims, own, features == "everything")
    with recorded_launches() as launches:
        hopper_fp8_backward.fp8_backward(call)
    names = [x.kernel.__name__.removeprefix("_attn_bwd_").removesuffix("_fp8_hopper_kernel") for x in launches]
    return dict(zip(names, launches, strict=True))


# Instructions in one iteration of the main loop, by kernel, row and features.
LOOP_INSTRUCTIONS: dict[tuple[str, tuple[int, int], str], int] = {
    ("dq", (64, 64), "open"): 508,
    ("dq", (64, 64), "causal"): 538,
    ("dq", (64, 64), "everything"): 668,
    ("dq", (64, 64), "softcap"): 702,
    ("dkdv", (64, 64), "open"): 272,
    ("dkdv", (64, 64), "causal"): 358,
    ("dkdv", (64, 64), "everything"): 425,
    ("dkdv", (64, 64), "softcap"): 756,
    ("dq", (128, 128), "open"): 517,
    ("dq", (128, 128), "causal"): 549,
    ("dq", (128, 128), "everything"): 680,
    ("dq", (128, 128), "softcap"): 717,
    ("dkdv", (128, 128), "open"): 289,
    ("dkdv", (128, 128), "causal"): 379,
    ("dkdv", (128, 128), "everything"): 446,
    ("dkdv", (128, 128), "softcap"): 444,
    ("dq", (192, 128), "open"): 342,
    ("dq", (192, 128), "causal"): 360,
    ("dq", (192, 128), "everything"): 427,
    ("dq", (192, 128), "softcap"): 755,
    ("dkdv", (192, 128), "open"): 223,
    ("dkdv", (192, 128), "causal"): 270,
    ("dkdv", (192, 128), "everything"): 304,
    ("dkdv", (192, 128), "softcap"): 475,
    ("dq", (256, 256), "open"): 335,
    ("dq", (256, 256), "causal"): 350,
    ("dq", (256, 256), "everything"): 417,
    ("dq", (256, 256), "softcap"): 745,
    ("dkdv", (256, 256), "open"): 279,
    ("dkdv", (256, 256), "causal"): 329,
    ("dkdv", (256, 256), "everything"): 362,
    ("dkdv", (256, 256), "softcap"): 533,
}
SLACK = 0.05
# One of the loops' instructions spills.
SPILLS = {("dkdv", (128, 128), "everything"): 0.002}
SOME = [
    ("dq", (256, 256), "causal"),
    ("dkdv", (256, 256), "everything"),
    ("dq", (192, 128), "open"),
    ("dkdv", (128, 128), "softcap"),
]


def check_compiled(cases: list[tuple[str, tuple[int, int], str]]) -> None:
    requests = [request_for(launches_of(dims, features)[kernel], 90) for kernel, dims, features in cases]
    for case, report in zip(cases, compile_sound(requests), strict=True):
        assert report.loop_spill_share <= SPILLS.get(case, 0.0), f"{case}: {report}"
        assert report.idle_barriers == 0, f"{case}: {report.idle_barriers} barriers that nothing uses"
        assert not report.warnings, f"{case}: {report.warnings}"  # C7510 and the like: ptxas serialised wgmma
        assert report.exposed_exponentials == 0, f"{case}: exp2 is behind the wait for the product that it should run under"
        assert set(report.matrix_instructions) == {"QGMMA", "HGMMA"}, f"{case}: {report.matrix_instructions}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90], f"{case}: {report.shared_bytes}"
        loops = [loop for loop in report.loops if "QGMMA" in loop]
        assert len(loops) == 2, f"{case}: one loop for each consumer, not {loops}"
        is_exchanged = case[:2] == ("dkdv", (256, 256))  # p and ds go through shared memory
        for loop in loops:
            assert not {"LDSM", "SHFL", "PRMT", *(() if is_exchanged else ("STSM", "STS"))} & loop.keys(), f"{case}: {loop}"
        expected = LOOP_INSTRUCTIONS[case]
        counts = [sum(loop.values()) for loop in loops]
        assert all(abs(count - expected) <= SLACK * expected for count in counts), f"{case}: {counts}, not {expected}"


@pytest.mark.slow
def test_compiled() -> None:
    check_compiled(SOME)


@pytest.mark.exhaustive
def test_every_row_compiled() -> None:
    check_compiled(list(LOOP_INSTRUCTIONS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_mods_compiled(dims: tuple[int, int]) -> None:
    """The call has the lists of blocks of a mask_mod."""
    requests, names = [], []
    for name, make in MODS.items():
        inputs = {"lengths_q": [256], "num_heads": HEADS, "num_heads_kv": HEADS, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
        _, *case = make_case("cpu", {"attn_mask_type": "causal", **make("cpu")}, **inputs)
        with recorded_launches() as launches:
            problem = with_diagonals(with_mask_blocks(triton_backend.to_problem(*case), "backward"))
            q, k, v = problem.q, problem.k, problem.v
            ones = torch.ones(1, 1, 1)
            fp8 = dataclasses.replace(problem, q=q.to(E4M3), k=k.to(E4M3), v=v.to(E4M3), descales=(ones,) * 4)
            fp8 = with_key_lists(fp8)
            gradients = map(torch.zeros_like, (q, k, v))
            hopper_fp8_backward.fp8_backward(Backward(fp8, v, torch.zeros(1, HEADS, 256), v.to(E4M3), None, *gradients))
        for launch in launches:
            if "hopper" in launch.kernel.__name__:
                requests.append(request_for(launch, 90))
                names.append((name, launch.kernel.__name__))
    assert len(names) == 2 * len(MODS)
    for case_name, report in zip(names, compile_sound(requests), strict=True):
        most = LOOP_SPILLS.get(case_name[0], 0.03)
        assert report.loop_spill_share <= most, f"{case_name}: {report}"
        assert report.idle_barriers == 0, f"{case_name}: {report}"
        assert not report.warnings, f"{case_name}: {report.warnings}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90], f"{case_name}: {report.shared_bytes}"


@pytest.mark.parametrize("strides", ["expanded", "off 16 bytes", "plain"])
def test_copies_in_16_bits_have_the_callers_numbers_at_any_strides(strides: str) -> None:
    """A hook for saved tensors may change the strides; a repeated call has the same gradients."""
    q = torch.randn(1, 5, 2, 64).to(torch.bfloat16)
    k = torch.randn(1, 7, 2, 64).to(torch.bfloat16)
    if strides == "expanded":
        q = q[:, :, :1].expand(q.shape)
    elif strides == "off 16 bytes":
        q = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    q8, k8, dout8 = q.to(E4M3), k.to(E4M3), q.to(E5M2)
    descales = (torch.ones(1, 1, 1),) * 4
    problem = Problem(q8, k8, k8, softmax_scale=0.1, descales=descales, copies16=(q, q, k))
    for found, given in zip(fp8_backward_operands.copies_in_16_bits(problem, dout8, q.dtype), (q, k, q), strict=True):
        assert torch.equal(found, given)
        assert descriptor_error("a copy", found) is None


@pytest.mark.parametrize(
    ("dims", "block_rows", "reason"),
    [
        ((256, 256), 128, None),
        ((192, 128), 0, None),
        ((272, 64), 0, "head dims up to 256"),
        ((64, 64), 64, "blocks of 64 rows, no multiple of 128"),
    ],
)
def test_the_two_kernels_leave_other_calls_to_others(dims: tuple[int, int], block_rows: int, reason: str | None) -> None:
    q, v = (torch.zeros(2, 256, 4, dim) for dim in dims)
    descale = torch.ones(2, 4, 256 // block_rows if block_rows else 1)
    q8, v8 = q.to(E4M3), v.to(E4M3)
    problem = Problem(q8, q8, v8, softmax_scale=0.1, descales=(descale,) * 4, scale_rows=block_rows)
    found = hopper_fp8_backward.unsupported(problem, v.to(torch.bfloat16), v.to(E5M2))
    assert found is None if reason is None else reason in str(found)


def check_on_gpu(call: dict[str, Any], granularity: Any = "head", dtype: torch.dtype = torch.bfloat16, **inputs: Any) -> None:
    given = make_inputs(**{"dtype": dtype, "head_dim_qk": 256, "head_dim_v": 256, **inputs})
    fp8 = fp8_call(*make_call(given, **call, return_max_logit=False), granularity)
    wanted = backward_of(fp8, make_dout(given), granularity)
    check_backward(wanted, run_backward(wanted, "cuda", hopper_fp8_backward))


@on_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_head_dims_and_bands_on_gpu(dims: tuple[int, int], band: dict[str, Any]) -> None:
    inputs = {"head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN_AND_LONG}
    check_on_gpu({"attn_mask_type": "padding", **band}, qkv_format="thd", **inputs)


@on_hopper
@pytest.mark.parametrize("granularity", ["tensor", "batch_head", "block"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "sbhd_2thd"])
def test_formats_and_scales_on_gpu(fmt: str, granularity: Any) -> None:
    for band in BANDS[:3]:
        inputs = {"qkv_format": fmt, "padding": True, "gap": 13, "num_heads": 6, "num_heads_kv": 2, "outliers": True}
        check_on_gpu({"attn_mask_type": "padding", **band}, granularity, torch.float16, **inputs, **UNEVEN_AND_LONG)


@on_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (1, 500), (300, 1)])
def test_dense_on_gpu(dims: tuple[int, int], sq: int, skv: int) -> None:
    for mask in ("no_mask", "causal"):
        inputs = {"lengths_q": [sq] * 3, "lengths_kv": [skv] * 3, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
        check_on_gpu({"attn_mask_type": mask}, **inputs)


@on_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_calls_on_gpu(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(ignores_measurements=True))
    more = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "dtype": torch.bfloat16, "gap": 3, "device": "cuda"}
    given = make_inputs("thd", **UNEVEN_AND_LONG, **more)
    fp8_calls.check(given, "head", E5M2, attn_mask_type="padding_causal", deterministic=True, softcap=30.0)


@on_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_bits_repeat(dims: tuple[int, int]) -> None:
    given = make_inputs("thd", **UNEVEN_AND_LONG, num_heads=16, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16)
    wanted = backward_of(fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False)), make_dout(given))
    first = run_backward(wanted, "cuda", hopper_fp8_backward)
    for _ in range(20):
        assert all(map(torch.equal, run_backward(wanted, "cuda", hopper_fp8_backward), first))
