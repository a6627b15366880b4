"""The Gluon forward for mma.sync in the emulator: right, and without a race of cp.async, over many schedules.

If a fault is injected, every schedule must find it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import create_block_mask, emulator
from flexattn.bench.emulated import PROGRAMS, emulated
from flexattn.block_mask import block_lists
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.mma import conditions, copies
from flexattn.kernels_triton.mma import forward as mma_forward
from flexattn.kernels_triton.mma.tiles import forward_tile
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.mods.trace import trace_mods
from flexattn.ops import spec_to_run
from tests.hopper.test_dropout import dropped
from tests.hopper.test_pages import make_arguments
from tests.support import inject
from tests.support.gluon_calls import EVERYTHING, SINKS, UNEVEN, check_results, without_gpu
from tests.support.gluon_cases import (  # noqa: F401
    DENSE,
    Check,
    assert_found,
    case_of,
    formats_and_bands,
    mods_and_biases,
    test_max_logit_beside_sinks,
    test_post_scale_bias,
    test_rows_whose_maximum_rises_by_much,
    test_tiles_that_see_no_key,
    test_twenty_schedules,
    windows_beside_the_diagonal,
)
from tests.support.inject import assign, drop, kernels_with, with_argument

LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}  # bytes of shared memory of a program


def reused_bytes(problem: Problem, capability: int) -> int:
    """Returns the bytes of q's tile if registers hold q: the compiler gives its memory to k and v, and the emulator does not."""
    tile = forward_tile(problem, capability)
    return tile.block_m * tile.head_dim_qk * problem.q.element_size() if tile.holds_q else 0


def run(
    seed: int,
    spec: AttentionSpec,
    x: Operands,
    kernels: ModuleType = mma_forward,
    splits: int | None = None,
    capability: int = 80,
) -> emulator.Report:
    """Returns the emulator's report. If it has no bug, out and lse are compared with the oracle."""
    with emulated(seed, kernels) as reports:
        problem = triton_backend.to_problem(spec, x)
        out, lse, max_logit = empty_outputs(spec, x)
        rows = as_bshd(out, spec.q_format)
        with pretended_device(capability, PROGRAMS):
            assert conditions.forward_unsupported(problem, rows) is None
            kernels.mma_forward(problem, rows, lse, max_logit if spec.return_max_logit else None, splits=splits)
    report = reports["_attn_fwd_mma_kernel"]
    reused = reused_bytes(problem, capability)
    assert max(reused, report.shared_bytes - reused) <= LIMITS[capability]
    if not report.bugs:
        check_results(spec, x, out, lse, max_logit if spec.return_max_logit else None)
    return report


def check(seed: int, call: dict[str, Any], splits: int | None = None, capability: int = 80, **inputs: Any) -> None:
    report = run(seed, *case_of(call, **inputs), splits=splits, capability=capability)
    assert not report.findings, f"seed {seed}: {report}"


@pytest.fixture(name="check")
def _check() -> Check:
    return check


test_formats_and_bands = formats_and_bands()
test_windows_beside_the_diagonal = windows_beside_the_diagonal("bottom_right")
test_mods_and_biases = mods_and_biases([128])


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (150, 70)}],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("capability", LIMITS)
def test_dense(band: dict[str, Any], dim: int, capability: int) -> None:
    """Blocks that an edge cuts on either side, and complete ones."""
    seed = 7 if dim == 64 else 1  # random, lazy
    check(seed, band, capability=capability, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (40, 72), (192, 128), (160, 64), (8, 8), (96, 96), (80, 80), (256, 256), (248, 136)], ids=str
)
def test_head_dims_and_sinks(dims: tuple[int, int], capability: int) -> None:
    seed = {128: 0, 64: 1}.get(dims[0], 5)  # eager, lazy, random
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(seed, call, capability=capability, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_dropout(dims: tuple[int, int]) -> None:
    """The reference drops the same weights, bit for bit: one weight more or less is far outside the error budget."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(dims[0] % 20, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample("dims")
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_dropout_in_dense_calls(dims: tuple[int, int]) -> None:
    check(3, {"attn_mask_type": "causal"} | dropped(p=0.1), head_dim_qk=dims[0], head_dim_v=dims[1], **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, 3, BY_LENGTHS])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (6, 128), (2, 128), (4, 96)])
def test_few_queries(heads: int, dim: int, splits: int) -> None:
    """Heads that share a tile, three of four rows, or none; keys in one part, in three, or in pieces of a plan."""
    inputs = {"lengths_q": [9, 1], "lengths_kv": [500, 130], "num_heads": heads, "num_heads_kv": 2, "padding": True}
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one"} | dropped()
    check(heads + splits, call, splits, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.sample("capability")
@without_gpu
@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("dim", [256, 128, 64])
def test_tiles_of_few_queries(dim: int, capability: int) -> None:
    """A multiprocessor holds two programs, which hide each other's waits."""
    inputs = {"lengths_q": [9, 1], "lengths_kv": [150, 70], "num_heads": 6, "num_heads_kv": 2, "padding": True}
    spec, x = case_of({"attn_mask_type": "padding_causal_bottom_right"}, head_dim_qk=dim, head_dim_v=dim, **inputs)
    report = run(capability, spec, x, splits=BY_LENGTHS, capability=capability)
    assert not report.findings, str(report)
    problem = triton_backend.to_problem(spec, x)
    assert report.shared_bytes - reused_bytes(problem, capability) <= LIMITS[capability] // 2


@without_gpu
@pytest.mark.parametrize(("capability", "block_n"), [(89, 64), (120, 32)])
def test_windows_have_fewer_keys_at_a_time_on_120(capability: int, block_n: int) -> None:
    """With 64, ptxas for 12.0 spills, and ptxas for 8.9 does not."""
    spec, x = case_of({"window_size": (150, 70)}, head_dim_qk=96, head_dim_v=96, **DENSE)
    assert forward_tile(triton_backend.to_problem(spec, x), capability).block_n == block_n
    report = run(1, spec, x, capability=capability)
    assert not report.findings, str(report)


@without_gpu
@pytest.mark.parametrize(("lengths_q", "heads"), [([100, 9], 2), ([3, 1], 4)], ids=str)
def test_a_mask_is_asked_of_all_rows_of_a_tile(lengths_q: list[int], heads: int) -> None:
    """A block is fully visible to the first queries, and not to the next ones; and heads share a tile."""
    masks = trace_mods(None, lambda b, h, i, j: (i < 50) | (j < 10))
    inputs = {"lengths_q": lengths_q, "lengths_kv": [330, 140], "num_heads": heads, "num_heads_kv": 2}
    check(5, {"attn_mask_type": "padding", "mods": masks}, qkv_format="thd", **inputs)


def _documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 75 == kv_idx // 75) | (kv_idx < 20)


@pytest.mark.slow
@without_gpu
def test_block_masks() -> None:
    """A tile has 64 queries, so blocks of 128 are two tiles."""
    for size, seed in ((128, 5), (64, 3)):
        mask = create_block_mask(_documents, None, None, 300, 400, "cpu", BLOCK_SIZE=(size, 128))
        lists = block_lists(mask, 2, 2, 300, 330, torch.device("cpu"))
        call = {"attn_mask_type": "causal", "mods": trace_mods(None, mask.mask_mod, needs_grad=True), "blocks": lists}
        check(seed, call, **DENSE)


@without_gpu
@pytest.mark.parametrize(("len_q", "band", "splits"), [(100, {}, 2), (250, {"window_size": (10, 0)}, 1)], ids=["split", "band"])
def test_no_block_is_read_behind_a_list(len_q: int, band: dict[str, Any], splits: int) -> None:
    """The only block belongs to the first split, or lies before the windows of the last queries."""
    mask = create_block_mask(lambda b, h, i, j: j >= 0, None, None, len_q, 100, "cpu", BLOCK_SIZE=128)
    lists = block_lists(mask, 1, 2, len_q, 100, torch.device("cpu"))
    call = {"attn_mask_type": "causal" if band else "no_mask", "blocks": lists, "mods": trace_mods(None, mask.mask_mod), **band}
    check(1, call, splits, lengths_q=[len_q], lengths_kv=[100], num_heads=2, num_heads_kv=2)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, BY_LENGTHS])
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(page_size: int, dim: int, splits: int) -> None:
    x, settings = bind_call(**make_arguments(page_size, "[pages, size, heads, dim]", dim))
    report = run(page_size, spec_to_run(x, settings), x, splits=splits)
    assert not report.findings, str(report)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "call",
    [
        {"attn_mask_type": "padding"},
        {"attn_mask_type": "padding_causal_bottom_right", "softmax_offset": SINKS, "softmax_type": "learnable"},
        {"attn_mask_type": "padding_causal_bottom_right", "window_size": (60, 0), "return_max_logit": True},
        {"attn_mask_type": "padding", "softcap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_pieces_of_a_plan(call: dict[str, Any], dims: tuple[int, int]) -> None:
    """Some tiles are one piece, and write their results; a sequence has no keys, and another one no query."""
    inputs = {"lengths_q": [3, 1, 0, 2], "lengths_kv": [700, 0, 90, 40], "num_heads": 4, "num_heads_kv": 2, "padding": True}
    check(7 if dims[0] == 64 else 2, call, BY_LENGTHS, qkv_format="thd", gap=2, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


# With a head dim whose tile has the form of the loop: 64 has rings, and 128 one buffer for k and one for v
FAULTS: dict[str, tuple[ModuleType, int, inject.Fault]] = {
    "a block is multiplied before it has come": (mma_forward, 64, drop("wait_group(0)", within="_take_blocks", nth=0)),
    "k is multiplied before it has come": (mma_forward, 128, drop("wait_group(0)", within="_take_blocks", nth=0)),
    "v is multiplied before it has come": (mma_forward, 128, drop("wait_group(0)", within="_take_blocks", nth=1)),
    "a wait leaves a group out": (mma_forward, 64, with_argument("wait_group(0)", 0, "1", within="_take_blocks", nth=0)),
    "copies are in no group": (mma_forward, 64, drop("commit_group()", within="_take_blocks", nth=0)),
    "v is in no group": (mma_forward, 128, drop("commit_group()", within="_take_blocks", nth=1)),
    "the next k overwrites the one that is multiplied": (
        mma_forward,
        64,
        with_argument("_copy_k(following)", 2, "slot", within="_take_blocks"),
    ),
    "the next v overwrites the one that is multiplied": (
        mma_forward,
        64,
        with_argument("_copy_v(following)", 2, "slot", within="_take_blocks"),
    ),
    "v of another block": (mma_forward, 64, with_argument("_copy_v(following)", 3, "column", within="_take_blocks")),
    "the first k is in the other stage": (mma_forward, 64, with_argument("_copy_k(column)", 2, "1", within="_compute_tile")),
    "the program ends under a copy": (mma_forward, 128, drop("wait_group(0)", within="_compute_tile", nth=1)),
    "out is not rescaled": (mma_forward, 64, with_argument("_add_values(weights)", 0, "acc0", within="_take_blocks", nth=0)),
    "rows past the end are read": (copies, 64, with_argument("gl.minimum(length)", 1, "2**20", within="_copy_part_of_keys")),
}


@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
# random; eager, lazy, round robin and random
@pytest.mark.parametrize("seeds", [(5,), pytest.param((0, 1, 2, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, dim, fault = FAULTS[name]
    [kernels] = kernels_with((mma_forward,), where, fault, tmp_path)
    inputs = {"lengths_q": [300, 20], "lengths_kv": [300, 0], "num_heads": 3, "num_heads_kv": 1, "outliers": True}
    case = case_of({"attn_mask_type": "padding_causal"}, qkv_format="thd", head_dim_qk=dim, head_dim_v=dim, **inputs)
    assert_found(seeds, lambda seed: [run(seed, *case, kernels)])


PLAN_FAULTS = {
    "another piece": with_argument("piece_of_part(part)", 1, "{} + 1", within="_planned_tile"),
    "every piece counts as whole": assign("is_whole", "num_blocks > 0", within="_compute_tile", nth=1),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_injected_fault_of_a_plan_is_found(name: str, tmp_path: Path) -> None:
    [kernels] = kernels_with((mma_forward,), mma_forward, PLAN_FAULTS[name], tmp_path)
    inputs = {"lengths_q": [3, 1], "lengths_kv": [700, 90], "num_heads": 2, "num_heads_kv": 1, "padding": True}
    case = case_of({"attn_mask_type": "padding"}, qkv_format="thd", **inputs)
    assert_found((2, 5), lambda seed: [run(seed, *case, kernels, splits=BY_LENGTHS)])
