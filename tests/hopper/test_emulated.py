"""The Gluon kernels for sm_90 in the emulator: right, and without a race, a missing fence or a deadlock, over many schedules.

An injected fault must be found on every schedule that is tried.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import emulator
from flexattn.bench import emulated as emulated_kernels
from flexattn.bench import play
from flexattn.bench.emulated import KERNELS as KERNELS_PLAYED
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import Window, as_bshd, empty_outputs
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD, HOPPER_FUSED, HopperTile
from flexattn.kernels_triton.gluon import (
    dq_parts,
    dq_sums,
    forward_loader,
    fused_loader,
    tile_scheduler,
    work_order,
)
from flexattn.kernels_triton.hopper import backward as hopper_backward
from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
from flexattn.kernels_triton.hopper import conditions, dkdv_consumer, dq_consumer, forward_parts, fused_consumer
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.testing import (
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
)
from tests.support import inject
from tests.support.gluon_calls import (
    BANDS,
    EVERYTHING,
    HARMLESS,
    SEEDS,
    SINKS,
    UNEVEN,
    check_gradients,
    check_results,
    gradient_memory,
    is_wide,
    wanted_gradients,
    without_gpu,
)
from tests.support.inject import assign, drop, kernels_with, move, with_argument, wrong_phase

KERNELS = (hopper_forward, hopper_backward, hopper_fused)
VARIANTS = {  # of the fused backward
    "persistent": lambda tile: replace(tile, is_persistent=True),
    "converting": lambda tile: replace(tile, is_persistent=True, converts=True),
    "two tiles of dq": lambda tile: replace(tile, dq_stages=2),
    "short": lambda _: HOPPER_FUSED["d128_persistent"],
    "short, converting": lambda _: HOPPER_FUSED["d128_converting"],
}
BACKWARDS = ("hopper_backward", "fused_backward")


def run(
    seed: int,
    call: dict[str, Any],
    kernels: tuple[ModuleType, ...] = KERNELS,
    backwards: tuple[str, ...] = BACKWARDS,
    fp32: bool = False,
    **inputs: Any,
) -> dict[str, emulator.Report]:
    """Forward and backward, in two kernels, in one, and in one with persistent programs, against the oracle.

    Returns the emulator's report on each kernel. fp32: whether gradients, or out in a call without backwards, are in float32, with
    more than 16 bits.
    """
    forward, split, fused = kernels
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    spec, x = make_call(given, **call, return_max_logit=False)
    with emulated(seed, *kernels) as reports:
        problem = triton_backend.to_problem(spec, x)
        out, lse, _ = empty_outputs(spec, x)
        wide = torch.float32 if fp32 else x.q.dtype
        out = out if backwards else out.to(wide)
        rows = as_bshd(out, spec.q_format)
        forward.hopper_forward(problem, rows, lse)
        if any(report.bugs for report in reports.values()):
            return reports
        check_results(spec, x, out, lse)
        if not backwards:
            assert not fp32 or is_wide(out, x.q.dtype)
            return reports
        dout, dlse = make_dout(given), make_dlse(given)
        wanted = wanted_gradients(spec, x, dout, dlse)
        for name in backwards if max(spec.head_dim_qk, spec.head_dim_v) <= 128 else backwards[:1]:
            backward = split.hopper_backward if name == "hopper_backward" else fused.fused_backward
            tile = {"tile": VARIANTS[name](conditions.fused_tile(problem))} if name in VARIANTS else {}
            memory = gradient_memory(spec, x, wide)
            backward(Backward(problem, rows, lse, as_bshd(dout, spec.q_format), dlse, *memory.views, memory.doffset), **tile)
            if any(report.bugs for report in reports.values()):
                return reports
            check_gradients(memory, wanted)
            assert not fp32 or all(is_wide(t, x.q.dtype) for t in memory.gradients)
    return reports


def check(seed: int, call: dict[str, Any], **inputs: Any) -> None:
    reports = run(seed, call, **inputs)
    assert len(reports) == 4 if max(inputs.get("head_dim_qk", 128), inputs.get("head_dim_v", 128)) <= 128 else 3
    for name, report in reports.items():
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}, seed {seed}: {report}"


# Few tiles: a sequence with two blocks in each direction, one without queries, and one without keys.
FEW_TILES = {"lengths_q": [0, 140, 1], "lengths_kv": [40, 150, 0], "num_heads": 4, "num_heads_kv": 2}
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)]


@pytest.mark.slow
@pytest.mark.sample("band")
@without_gpu
@pytest.mark.parametrize("band", BANDS[1:3], ids=str)
def test_a_program_for_each_tile(band: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No table lists the tiles then: a program has nothing to store if its block is past the end of its sequence."""
    monkeypatch.setattr(emulated_kernels, "PROGRAMS", 64)
    for fmt in ("thd", "bshd"):
        reports = run(3, band, backwards=(), qkv_format=fmt, gap=3, padding=True, **UNEVEN)
        assert {finding.kind for report in reports.values() for finding in report.findings} <= HARMLESS


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("band", BANDS[1:], ids=str)
def test_heads_share_tiles_where_most_sequences_are_short(band: dict[str, Any]) -> None:
    inputs = {
        "lengths_q": [1, 140, 1, 2, 0, 1, 1, 1],
        "lengths_kv": [150, 200, 70, 30, 5, 0, 1, 130],
        "num_heads": 4,
        "num_heads_kv": 1,
    }
    reports = run(2, band, backwards=(), qkv_format="thd", **inputs)
    assert {finding.kind for report in reports.values() for finding in report.findings} <= HARMLESS


def check_persistent(seed: int, call: dict[str, Any], name: str = "persistent", **inputs: Any) -> None:
    report = run(seed, call, backwards=(name,), **inputs)["_attn_bwd_fused_hopper_kernel"]
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"


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
    check_persistent(seed, call, qkv_format=fmt, gap=3, padding=True, head_dim_qk=dim, head_dim_v=dim, **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 40])
def test_persistent_programs_of_dense_calls(dim: int, mask: str) -> None:
    inputs = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 2}
    seed = {64: 5, 128: 1, 40: 0}[dim]  # random, lazy, eager
    check_persistent(seed, {"attn_mask_type": mask}, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "call",
    [
        {"window_size": (90, 0)},  # with a causal mask a section has all heads (`walk_of_call`)
        {"attn_mask_type": "causal"},
        {"attn_mask_type": "causal_bottom_right", "softcap": 3.0},
        {"softmax_type": "off-by-one"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs_that_convert_dq(dim: int, fmt: str, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One section or several, whose parts of dq come after the blocks of the next section, or after all."""
    inputs = {"lengths_q": [150] * 2, "lengths_kv": [200] * 2, "num_heads": 4, "num_heads_kv": 2, "qkv_format": fmt}
    for seed, heads in ((5, 3), (6, 4)) if fmt != "bhsd" else ((1, 1),):  # random and lazy
        monkeypatch.setattr(work_order, "section_of_one_size", lambda most, _, heads=heads: min(heads, most))
        check_persistent(seed, call, "converting", head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.slow
@pytest.mark.sample("seed", "variant")
@without_gpu
@pytest.mark.parametrize("variant", ["short", "short, converting"])
@pytest.mark.parametrize("seed", [1, 5])
def test_short_calls_without_a_mask(seed: int, variant: str) -> None:
    """Rows of head dim 128, which have the order of causal calls."""
    check_persistent(seed, {}, variant, lengths_q=[200] * 2, lengths_kv=[330] * 2, num_heads=2, num_heads_kv=2)


@pytest.mark.slow
@pytest.mark.sample("sq")
@without_gpu
@pytest.mark.parametrize("sq", [150, 64])
def test_persistent_programs_of_odd_numbers_of_iterations(sq: int) -> None:
    """A modified call's row, which is not persistent by itself, has a barrier that only releases dout."""
    inputs = {"lengths_q": [sq] * 2, "lengths_kv": [330] * 2, "num_heads": 3, "num_heads_kv": 3}
    check_persistent(1, {"softcap": 20.0}, head_dim_qk=64, head_dim_v=64, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_programs_over_twenty_schedules(dim: int) -> None:
    for seed in SEEDS:
        check_persistent(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dim, head_dim_v=dim, **UNEVEN)
        for name in ("persistent", "converting"):
            inputs = {"lengths_q": [200], "lengths_kv": [330], "head_dim_qk": dim, "head_dim_v": dim}
            check_persistent(seed, {"attn_mask_type": "causal"}, name, **inputs)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    seed = (1, 5)[HEAD_DIMS.index(dims) % 2]  # lazy, random
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(seed, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **FEW_TILES)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "dims", [(128, 128), *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((256, 256), (192, 128), (40, 72)))], ids=str
)
def test_results_in_float32(dims: tuple[int, int]) -> None:
    """They go from registers to memory. Rows past a sequence's end, and columns past the head dim, must stay unwritten."""
    own = {"head_dim_qk": dims[0], "head_dim_v": dims[1]}
    padded = own | {"qkv_format": "sbhd" if dims[0] < 128 else "thd", "padding": True, "gap": 3, **FEW_TILES}
    check(5, EVERYTHING | {"softmax_offset": SINKS}, fp32=True, **padded)
    reports = run(6, {"attn_mask_type": "padding_causal"}, backwards=(), fp32=True, **padded)
    assert {finding.kind for report in reports.values() for finding in report.findings} <= HARMLESS


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (192, 128), (40, 72)], ids=str)
def test_causal_results_in_float32(dims: tuple[int, int]) -> None:
    own = {"head_dim_qk": dims[0], "head_dim_v": dims[1]}
    check(1, {"attn_mask_type": "causal"}, fp32=True, lengths_q=[70], lengths_kv=[200], **own)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_programs_with_gradients_in_float32(dim: int) -> None:
    dims = {"head_dim_qk": dim, "head_dim_v": dim}
    check_persistent(
        5, {"attn_mask_type": "causal"}, lengths_q=[200], lengths_kv=[330], num_heads=2, num_heads_kv=1, fp32=True, **dims
    )
    check_persistent(
        1, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", padding=True, gap=3, fp32=True, **dims, **FEW_TILES
    )
    one = {"lengths_q": [512], "lengths_kv": [512], "num_heads": 1, "num_heads_kv": 1}  # the row of short calls without a mask
    reports = run(5, {}, backwards=("fused_backward",), fp32=True, **dims, **one)
    assert {finding.kind for report in reports.values() for finding in report.findings} <= HARMLESS


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_bands(fmt: str, band: dict[str, Any]) -> None:
    seed = 2 + 4 * ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"].index(fmt) + BANDS.index(band)  # a schedule each
    dim = (64, 128)[(seed + seed // 4) % 2]  # of either, every format and every band
    inputs = {"lengths_q": [70, 0, 130], "lengths_kv": [130, 9, 65], "num_heads": 2, "num_heads_kv": 1}
    check(seed, band, qkv_format=fmt, padding=True, gap=2, dtype=torch.float16, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.slow
@pytest.mark.sample("bottom_right")
@without_gpu
@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("window", [(None, -40), (-30, None), (60, -20), (-25, 90), (None, -300), (5, -11)], ids=str)
def test_windows_beside_the_diagonal(window: tuple[int | None, int | None], bottom_right: bool) -> None:
    band = {"attn_mask_type": "padding", "window_size": Window(*window), "bottom_right_diagonal": bottom_right}
    inputs = {"lengths_q": [70, 0, 200], "lengths_kv": [190, 9, 165], "num_heads": 2, "num_heads_kv": 1}
    dim = 64 if bottom_right else 128
    check(3 + (window[1] or -1) % 7, band, qkv_format="thd", padding=True, gap=2, head_dim_qk=dim, head_dim_v=dim, **inputs)


@without_gpu
def test_three_heads_that_share_a_tile() -> None:
    """out goes out from registers, without columns past v's head dim."""
    inputs = {"lengths_q": [9], "lengths_kv": [100], "num_heads": 6, "num_heads_kv": 2, "head_dim_qk": 40, "head_dim_v": 72}
    for seed in (1, 5):
        reports = run(seed, {"attn_mask_type": "causal_bottom_right"}, backwards=(), **inputs)
        for name, report in reports.items():
            assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}, seed {seed}: {report}"


@pytest.mark.slow
@pytest.mark.sample("dim")
@without_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_slots_in_reverse(dim: int) -> None:
    inputs = {"lengths_q": [70, 0, 130, 20], "lengths_kv": [130, 9, 65, 40], "num_heads": 2, "num_heads_kv": 1}
    call = {"attn_mask_type": "padding_causal"}
    check(5, call, qkv_format="thd", gap=3, in_reverse=True, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (150, 70)}],
    ids=str,
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_dense(band: dict[str, Any], dims: tuple[int, int]) -> None:
    """Blocks that an edge cuts on one side, and complete ones."""
    seed = 1 if dims[0] == 64 else 7  # lazy, random
    inputs = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
    check(seed, band, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "tile",
    [HOPPER_FORWARD[name] for name in ("d48_long", "d64_long", "d64_short", "d64_narrow", "d128", "d128_three_consumers")],
    ids=lambda tile: f"{tile.head_dim_qk}: {tile.block_m}x{tile.block_n}",
)
def test_forward_rows(tile: HopperTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each consumer skips blocks that only others see, at either end; a program has several tiles."""
    monkeypatch.setattr(hopper_forward, "forward_tile", lambda problem: tile)
    inputs = {"lengths_q": [500, 0, 30], "lengths_kv": [450, 40, 700], "num_heads": 2, "num_heads_kv": 1}
    bands = ({"attn_mask_type": "padding_causal", "window_size": (390, 0)}, {"attn_mask_type": "padding", "window_size": (20, 40)})
    for seed, band in enumerate((*bands, {"attn_mask_type": "padding_causal_bottom_right"}), start=4):
        outliers = seed == 6  # rows whose maximum rises a lot
        dims = {"head_dim_qk": tile.head_dim_qk, "head_dim_v": tile.head_dim_v}
        reports = run(seed, band, backwards=(), qkv_format="thd", outliers=outliers, **dims, **inputs)
        for name, report in reports.items():
            assert {finding.kind for finding in report.findings} <= HARMLESS, f"{name}, seed {seed}: {report}"


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_twenty_schedules(dims: tuple[int, int]) -> None:
    for seed in SEEDS:
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


# The file, of a kernel or of shared code, and its change.
FAULTS: dict[str, tuple[ModuleType, inject.Fault]] = {
    "forward: v is read before it has come": (hopper_forward, drop("wait(v_full)", within="_iterate")),
    "forward: v is released before the product has read it": (
        hopper_forward,
        move("arrive(v_empty)", before="softmax()", within="_iterate"),
    ),
    "forward: out is stored without a fence": (forward_parts, drop("fence_async_shared()", within="store_out")),
    "forward: q is released before its last scores": (
        hopper_forward,
        move("arrive(q_empty)", before="score_product()", within="_run"),
    ),
    "forward: the loader waits for the wrong phase of k": (forward_loader, wrong_phase("wait(k_empty)", within="load_keys")),
    "forward: a tile is received before it was broadcast": (tile_scheduler, drop("wait(tile_full)")),
    "forward: too few bytes are expected of v": (
        forward_loader,
        with_argument("mbarrier.expect(full)", 1, "{} // 2", within="load_partition"),
    ),
    "dq: k is read before it has come": (dq_consumer, drop("wait(scores_full)")),
    "dq: k is released before dq has read it": (
        dq_consumer,
        move("arrive(ds_empty)", before="warpgroup_mma_wait([dq, ds])"),
    ),
    "dk and dv: q is read before it has come": (dkdv_consumer, drop("wait(scores_full)", within="_consume_dkdv_rows")),
    "dk and dv: the gradients are stored without a fence": (
        dkdv_consumer,
        drop("fence_async_shared()", within="_consume_dkdv_rows"),
    ),
    "one pass: q is read before it has come": (fused_consumer, drop("wait(q_full)")),
    "one pass, two tiles of dq: dq is summed before the other half of ds is there": (
        fused_consumer,
        drop("wait_written(last)", within="_consume_block", nth=1),
    ),
    "one pass, causal: dq is summed before the other half of ds is there": (
        fused_consumer,
        drop("wait_written(last)", within="_consume_block", nth=0),
    ),
    "one pass: ds is read without a fence": (fused_consumer, drop("fence_async_shared()", within="_consume_block", nth=0)),
    "one pass, two tiles of dq: ds is overwritten before the other warpgroup's dq has read it": (
        fused_consumer,
        drop("wait_read(current)"),
    ),
    "one pass, two tiles of dq: ds is released before dq has read it": (
        fused_consumer,
        move("announce_read(last)", before="warpgroup_mma_wait(SCORES_IN_FLIGHT)"),
    ),
    "one pass: dq is added before it is written": (dq_sums, drop("wait(full)")),
    "one pass: dq is overwritten before it is added": (dq_sums, drop("tma.store_wait()")),
    "one pass: dq is added without a fence": (dq_sums, drop("fence_async_shared()")),
    "one pass: k is overwritten while the other warpgroup multiplies by it": (fused_consumer, drop("named_barrier_sync(LAST)")),
    "one pass: q is released before dk has read it": (
        fused_consumer,
        move("release(q_empty)", before="_wait_for_sums(dk)", within="_consume_block"),
    ),
    "persistent: a block is drawn twice": (fused_loader, assign("t", "0", within="load_fused", nth=3)),
    "persistent: a block is left out": (fused_loader, with_argument("gl.atomic_add(work.table_ptr)", 1, "2", nth=1)),
    "persistent, d 64: k comes before dk of the last but one has left": (
        fused_loader,
        drop("tma.store_wait()", within="_load_block", nth=0),
    ),
    "persistent, d 128: v comes before dv has left": (fused_loader, drop("tma.store_wait()", within="_load_block", nth=1)),
    "persistent, d 128: dv is stored before it is written": (fused_loader, drop("wait_full(dkdv_full)")),
    "persistent: k of the block before is multiplied": (
        fused_consumer,
        assign("k_tile", "2 * ((begun.blocks + 1) % META.K_STAGES)", within="_consumer_of"),
    ),
    "persistent: stages are counted anew in each block": (fused_consumer, assign("n", "m_block", within="_iteration", nth=0)),
    "persistent, d 64: q that the last product reads for nothing is overwritten": (
        fused_consumer,
        with_argument("mbarrier.arrive(q_empty)", "pred", "True"),
    ),
    "converting: the rows of a tile are taken in its order": (
        dq_parts,
        assign("offsets", "rows * DIM", within="convert_part", nth=0),
    ),
    "converting: a part of dq is left out": (fused_loader, with_argument("find_part(task.index)", 0, "task.index // 2 * 2")),
    "persistent, causal: zeros are written before the gradients before them have left": (
        fused_loader,
        drop("tma.store_wait()", within="load_fused", nth=0),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
# round robin and random; eager and lazy; random
@pytest.mark.parametrize(
    "seeds",
    [(2, 5), *(pytest.param(seeds, marks=pytest.mark.exhaustive) for seeds in ((0, 1), (11,)))],
    ids=["few", "more", "random"],
)
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, fault = FAULTS[name]
    kernels = kernels_with(KERNELS, where, fault, tmp_path)
    inputs = {"lengths_q": [330], "lengths_kv": [520], "num_heads": 2, "num_heads_kv": 1}
    # In one pass they differ in the order of products; with a causal mask no query sees the last keys.
    call = {"attn_mask_type": "causal" if "causal" in name else "no_mask"}
    # One tile of dq keeps the consumers so close that few schedules show a read that is too early.
    fused = "two tiles of dq" if "two tiles" in name else "fused_backward"
    backwards = (fused,) if "one pass" in name else ("hopper_backward",)
    variant = name.split(":")[0].split(",")[0]
    if variant in VARIANTS:
        backwards = (variant,)
        inputs = {"lengths_q": [200 if "causal" in name else 300], "lengths_kv": [330], "num_heads": 4, "num_heads_kv": 4}
        dim = 64 if "d 64" in name else 128
        inputs |= {"head_dim_qk": dim, "head_dim_v": dim}
    for seed in seeds:
        try:
            reports = run(seed, call, kernels, backwards, **inputs)
        except AssertionError:  # a wrong result
            continue
        assert any(report.bugs for report in reports.values()), f"not found on seed {seed}"


@without_gpu
@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.slow)])
def test_a_part_that_does_not_wait_for_its_sums_is_found(seed: int, tmp_path: Path) -> None:
    """On schedules in which the warp that adds dq is late: a part is drawn long after its head's blocks have been loaded."""
    kernels = kernels_with(KERNELS, dq_parts, assign("arrived", "args.work.blocks", within="wait_for_sums", nth=0), tmp_path)
    inputs = {"lengths_q": [300], "lengths_kv": [330], "num_heads": 1, "num_heads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64}
    run(seed, {"attn_mask_type": "no_mask"}, backwards=("converting",), **inputs)
    with pytest.raises(AssertionError, match="dq"):
        run(seed, {"attn_mask_type": "no_mask"}, kernels, ("converting",), **inputs)


PLAYED_IN_CI = ("forward", "fused-192", "fp8-dq", "sm_100-fused")


@without_gpu
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(name, marks=pytest.mark.slow if name in PLAYED_IN_CI else pytest.mark.exhaustive) for name in KERNELS_PLAYED],
)
def test_play_emulates_a_kernel(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "deepseek-v3-s4096" if kernel == "fused-192" else "gpt-oss-window-s8192"
    assert play.main([kernel, "--emulate", "--shape", shape, "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert f"{KERNELS_PLAYED[kernel].kernel} on " in said
    assert said.rstrip().endswith("clean")


def test_play_refuses_shapes_that_a_kernel_does_not_take() -> None:
    with pytest.raises(SystemExit):
        play.main(["fused", "--emulate", "--shape", "sweep-d256-causal-s512"])
    with pytest.raises(SystemExit):
        play.main(["fused-192", "--emulate", "--shape", "sweep-d128-causal-s512"])
    with pytest.raises(SystemExit):
        play.main(["fused"])


def test_play_emulates_ones_own_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def run(seed):\n    raise AssertionError('it is wrong')\n", "utf-8")
    assert play.main(["--emulate", f"{tmp_path / 'own.py'}:run", "--seeds", "2"]) == 1
    assert "it is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emulate"], "a kernel's name before it, or FILE.py:RUN after it"),
        (["forward", "--emulate", "x.py:run"], "a kernel's name before it, or FILE.py:RUN after it"),
        (["--emulate", "nothing"], "names no run"),
        (["--arch", "80"], "name a kernel"),
    ],
)
def test_play_says_what_to_emulate(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        play.main(arguments)
    assert message in capsys.readouterr().err
