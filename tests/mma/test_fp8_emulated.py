"""The FP8 forward for mma.sync in the emulator: right by the oracle on dequantised values, and without a race of cp.async."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import create_block_mask, emulator
from flexattn.bench.emulated import PROGRAMS, emulated
from flexattn.block_mask import block_lists
from flexattn.dispatch.spec import as_bshd
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import BACKWARDS
from flexattn.kernels_triton.mma import backward as mma_backward
from flexattn.kernels_triton.mma import conditions, fp8
from flexattn.kernels_triton.mma import forward as mma_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_dout, make_inputs
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import FEATURES
from tests.mma.test_emulated import LIMITS, reused_bytes
from tests.support import inject
from tests.support.gluon_calls import BANDS, EVERYTHING, SINKS, UNEVEN, without_gpu
from tests.support.hopper_fp8_calls import E4M3, E5M2, Fp8Call, backward_of, check_backward, check_forward, fp8_call, rows_of, spans
from tests.support.inject import assign, drop, kernels_with, with_argument

DENSE = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
GRANULARITIES = ["tensor", "head", "batch_head", "block"]


def call_of(call: dict[str, Any], granularity: Any = "head", dtype: torch.dtype = E4M3, **inputs: Any) -> Fp8Call:
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return fp8_call(*make_call(given, **call, return_max_logit=False), granularity, dtype)


def problem_of(call: Fp8Call) -> Problem:
    return dataclasses.replace(
        call.problem, descales=tuple(scale.descale for scale in call.scales), scale_rows=call.scales[0].block_rows
    )


def run(
    seed: int, call: Fp8Call, kernels: ModuleType = mma_forward, splits: int | None = None, capability: int = 89
) -> emulator.Report:
    """Returns the emulator's report. If it has no bug, out and lse are compared with the oracle."""
    problem, fmt = problem_of(call), call.spec.q_format
    like = as_bshd(problem.q, fmt) if fmt != "thd" else problem.q
    out = torch.full((*like.shape[:-1], call.spec.head_dim_v), float("nan"), dtype=torch.bfloat16)
    shape = (problem.num_heads, problem.q.shape[0]) if fmt == "thd" else (problem.batch, problem.num_heads, problem.q.shape[1])
    lse = torch.full(shape, float("nan"))
    with emulated(seed, kernels) as reports, pretended_device(capability, PROGRAMS):
        rows = as_bshd(out, fmt)
        assert conditions.fp8_forward_unsupported(problem, rows, False) is None
        kernels.mma_forward(problem, rows, lse, splits=splits)
    report = reports["_attn_fwd_mma_kernel"]
    reused = reused_bytes(problem, capability)
    assert max(reused, report.shared_bytes - reused) <= LIMITS[capability]
    if not report.bugs:
        check_forward(call, out, lse)
    return report


def check(call: Fp8Call, *seeds: int, **how: Any) -> None:
    for seed in seeds:
        report = run(seed, call, **how)
        assert not report.findings, f"seed {seed}: {report}"


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_scales(fmt: str, granularity: str) -> None:
    inputs = {"lengths_q": [70, 0, 130], "lengths_kv": [300, 9, 65], "num_heads": 2, "num_heads_kv": 1, "outliers": True}
    bands = [{"attn_mask_type": "padding"}, {"attn_mask_type": "padding_causal"}, {"window_size": (60, 20)}]
    for seed, band in enumerate(bands, 2):
        check(call_of({"attn_mask_type": "padding"} | band, granularity, qkv_format=fmt, padding=True, gap=2, **inputs), seed)


@without_gpu
def test_a_dim_of_one_entry_may_have_an_odd_stride() -> None:
    call = call_of({"attn_mask_type": "causal"}, lengths_q=[70], lengths_kv=[90], num_heads=2, num_heads_kv=1)
    x = call.problem
    odd = {name: t.as_strided(t.shape, (1, *t.stride()[1:])) for name, t in (("q", x.q), ("k", x.k), ("v", x.v))}
    check(call._replace(problem=dataclasses.replace(x, **odd)), 3)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [89, 120])
def test_bands(band: dict[str, Any], dim: int, capability: int) -> None:
    """Blocks that an edge cuts on either side, and complete ones."""
    inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [330, 9, 165], "num_heads": 2, "num_heads_kv": 1, "gap": 2}
    call = call_of(band, "block", qkv_format="thd", padding=True, head_dim_qk=dim, head_dim_v=dim, **inputs)
    check(call, 7 if dim == 64 else 1, capability=capability)  # random, lazy


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80), (192, 128), (96, 96), (16, 16), (256, 256), (240, 144)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int], dtype: torch.dtype) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(call_of(call, "batch_head", dtype, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN), 5)


@without_gpu
def test_rows_whose_maximum_rises_by_much() -> None:
    inputs = {"outliers": True, "lengths_q": [500], "lengths_kv": [500], "num_heads": 2, "num_heads_kv": 2}
    check(call_of({"attn_mask_type": "causal"}, "block", **inputs), 4)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_mods_and_biases(name: str) -> None:
    call = {"attn_mask_type": "padding_causal", "softmax_type": "off-by-one", **FEATURES[name]("cpu")}
    check(call_of(call, "block", qkv_format="thd", gap=3, **UNEVEN), 2 + list(FEATURES).index(name))


@without_gpu
@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_dropout(dim: int) -> None:
    """The reference drops the same weights, bit for bit."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(call_of(call, "head", qkv_format="thd", gap=3, head_dim_qk=dim, head_dim_v=dim, **UNEVEN), dim % 20)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (6, 128), (2, 256)])
def test_few_queries(heads: int, dim: int, splits: int) -> None:
    """Heads that share a tile have their own descales; keys in one part, or in three."""
    inputs = {"lengths_q": [9, 1], "lengths_kv": [500, 130], "num_heads": heads, "num_heads_kv": 2, "padding": True}
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one"}
    check(call_of(call, "block", head_dim_qk=dim, head_dim_v=dim, **inputs), heads + splits, splits=splits)


@pytest.mark.slow
@without_gpu
def test_block_masks() -> None:
    mask = create_block_mask(lambda b, h, i, j: (i // 75 == j // 75) | (j < 20), None, None, 300, 330, "cpu", BLOCK_SIZE=128)
    lists = block_lists(mask, 2, 2, 300, 330, torch.device("cpu"))
    call = {"attn_mask_type": "causal", "mods": trace_mods(None, mask.mask_mod, needs_grad=True), "blocks": lists}
    check(call_of(call, "block", **DENSE), 3)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_pages(page_size: int, granularity: str) -> None:
    """The dense keys, in pages in any order; a descale's block counts the keys of a sequence."""
    call = call_of(
        {"attn_mask_type": "padding_causal_bottom_right"}, granularity, padding=True, **DENSE | {"lengths_kv": [330, 201]}
    )
    problem = call.problem
    columns = -(-problem.k.shape[1] // page_size)
    table = torch.randperm(2 * columns, generator=torch.Generator().manual_seed(page_size)).view(2, columns).to(torch.int32)
    paged = []
    for x in (problem.k, problem.v):
        pages = torch.full((2 * columns, page_size, *x.shape[2:]), float("nan"))
        for b, start, length in spans(problem, "kv"):
            rows = rows_of(x, b, start, length).float()
            for n in range(0, length, page_size):
                part = rows[n : n + page_size]
                pages[table[b, n // page_size], : len(part)] = part
        paged.append(pages.to(E4M3))
    changed = dataclasses.replace(problem, k=paged[0], v=paged[1], page_table=table, max_seqlen_kv=330)
    check(call._replace(problem=changed), 2, 5)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_backward_in_16_bits(dim: int, granularity: str) -> None:
    given = make_inputs("thd", gap=3, dtype=torch.bfloat16, head_dim_qk=dim, head_dim_v=dim, **UNEVEN)
    call = fp8_call(*make_call(given, attn_mask_type="padding_causal", return_max_logit=False), granularity)
    wanted = backward_of(call, make_dout(given), granularity)
    [family] = [family for family in BACKWARDS[True] if family.name == "mma.sync fused, dequantized"]
    grads = [torch.full(t.shape, float("nan"), dtype=torch.bfloat16) for t in call.stands_for[:3]]
    views = [as_bshd(t, "thd") for t in grads]
    launched = Backward(wanted.problem, as_bshd(wanted.out, "thd"), wanted.lse, wanted.dout, None, *views)
    with emulated(3, mma_backward) as reports, pretended_device(89, PROGRAMS):
        assert family.unsupported(launched) is None
        family.run(launched, family.tile(launched))
    (report,) = reports.values()
    assert not report.findings, str(report)
    check_backward(wanted, grads)


# With a call whose tile has the form of the loop: most have rings, and with a softcap one buffer for k and one for v
ONE_BUFFER = {"softcap": 20.0}
FAULTS: dict[str, tuple[ModuleType, dict[str, Any], inject.Fault]] = {
    "a block is multiplied before it has come": (mma_forward, {}, drop("wait_group(0)", within="_take_blocks", nth=0)),
    "k is multiplied before it has come": (mma_forward, ONE_BUFFER, drop("wait_group(0)", within="_take_blocks", nth=0)),
    "v is multiplied before it has come": (mma_forward, ONE_BUFFER, drop("wait_group(0)", within="_take_blocks", nth=1)),
    "v is in no group": (mma_forward, ONE_BUFFER, drop("commit_group()", within="_take_blocks", nth=1)),
    "the next k overwrites the one that is multiplied": (
        mma_forward,
        {},
        with_argument("_copy_k(following)", 2, "slot", within="_take_blocks"),
    ),
    "keys of weights in their own order": (
        fp8,
        {},
        with_argument("gl.permute(gl.reshape)", 1, "[0, 1, 2, 3, 4]", within="to_operand"),
    ),
    "even and odd columns change places": (fp8, {}, assign("(even, odd)", "odd, even", within="_values_of")),
    "columns are stored in the order of the sums": (mma_forward, {}, assign("acc", "acc", within="_store_columns")),
    "acc is not rescaled": (mma_forward, {}, with_argument("_add_values(weights)", 0, "acc0", within="_take_blocks", nth=0)),
    "the descale of v of the block before": (mma_forward, {}, assign("correction", "correction", within="_take_blocks", nth=-1)),
    "the first block's descale of k": (fp8, {}, assign("k", "scales.k", within="score_descale", nth=-1)),
    "the first row's descale of q": (fp8, {}, with_argument("load_descale(heads)", 3, "rows * 0", within="head_scales", nth=0)),
    "weights of a sink without their scale": (mma_forward, {}, assign("row_sum", "row_sum", within="_compute_tile", nth=1)),
}


@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seeds", [(5,), pytest.param((0, 1, 2, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, more, fault = FAULTS[name]
    [kernels] = kernels_with((mma_forward,), where, fault, tmp_path)
    inputs = {"lengths_q": [300, 20], "lengths_kv": [300, 0], "num_heads": 3, "num_heads_kv": 1, "outliers": True}
    call = {"attn_mask_type": "padding_causal", "softmax_type": "off-by-one"} | more
    case = call_of(call, "block", qkv_format="thd", **inputs)
    for seed in seeds:
        try:
            report = run(seed, case, kernels)
        except AssertionError:  # a wrong result
            continue
        assert report.findings, f"not found on seed {seed}: {report}"
