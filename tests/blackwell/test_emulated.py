"""The Gluon forward for sm_100 in the emulator: right, and without a race, a missing fence or a deadlock, over many schedules.

No GPU has run it: this test and its compiled code are the only evidence. If a fault is injected, every schedule must find it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import create_block_mask, emulator
from flexattn.bench.emulated import emulated
from flexattn.block_mask import block_lists
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.blackwell import conditions
from flexattn.kernels_triton.blackwell import forward as blackwell_forward
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.mods.trace import trace_mods
from flexattn.ops import spec_to_run
from tests.common.test_split_plan import CALLS as SPLIT_CALLS
from tests.common.test_split_plan import paged
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
from tests.support.inject import drop, kernels_with, move, with_argument, wrong_phase

HARMLESS = {"tma-out-of-bounds"}  # a tile may lie past its sequence's end


def run(
    seed: int, spec: AttentionSpec, x: Operands, kernels: ModuleType = blackwell_forward, splits: int | None = None
) -> emulator.Report:
    """Returns the emulator's report. If it has no bug, out and lse are compared with the oracle."""
    with emulated(seed, kernels) as reports:
        problem = triton_backend.to_problem(spec, x)
        out, lse, max_logit = empty_outputs(spec, x)
        rows = as_bshd(out, spec.q_format)
        with pretended_device(100, 148):
            assert conditions.forward_unsupported(problem, rows) is None
        kernels.blackwell_forward(problem, rows, lse, max_logit if spec.return_max_logit else None, splits=splits)
    report = reports["_attn_fwd_blackwell_kernel"]
    if not report.bugs:
        check_results(spec, x, out, lse, max_logit if spec.return_max_logit else None)
    return report


def check(seed: int, call: dict[str, Any], splits: int | None = None, **inputs: Any) -> None:
    report = run(seed, *case_of(call, **inputs), splits=splits)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    assert report.products > 0
    assert report.tensor_columns <= 512


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
@pytest.mark.parametrize("dim", [64, 128])
def test_dense(band: dict[str, Any], dim: int) -> None:
    """Blocks that an edge cuts on either side, and complete ones."""
    seed = 7 if dim == 64 else 1  # random, lazy
    check(seed, band, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (160, 64)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int]) -> None:
    seed = {128: 0, 64: 1}.get(dims[0], 5)  # eager, lazy, random
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(seed, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@without_gpu
def test_a_consumer_without_queries() -> None:
    for seed in (1, 4):
        check(seed, {"attn_mask_type": "padding_causal"}, qkv_format="thd", lengths_q=[20, 129, 1, 0], lengths_kv=[300, 40, 0, 5])


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_dropout(dims: tuple[int, int]) -> None:
    """The reference drops the same weights, bit for bit: one weight more or less is far outside the error budget."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(dims[0] % 20, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample("dims")
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_dropout_in_dense_calls(dims: tuple[int, int]) -> None:
    check(3, {"attn_mask_type": "causal"} | dropped(p=0.1), head_dim_qk=dims[0], head_dim_v=dims[1], **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (6, 128), (2, 128)])
def test_few_queries(heads: int, dim: int, splits: int) -> None:
    """Heads that share a tile, three of four rows, or none; keys in one part, or in three."""
    inputs = {"lengths_q": [9, 1], "lengths_kv": [500, 130], "num_heads": heads, "num_heads_kv": 2, "padding": True}
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one"} | dropped()
    check(heads + splits, call, splits, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", SPLIT_CALLS)
def test_keys_split_by_lengths(name: str) -> None:
    spec, x = paged(**SPLIT_CALLS[name])
    report = run(1 + list(SPLIT_CALLS).index(name), spec, x, splits=BY_LENGTHS)
    assert {finding.kind for finding in report.findings} <= HARMLESS, str(report)


@without_gpu
@pytest.mark.parametrize(("lengths_q", "heads"), [([100, 9], 2), ([3, 1], 4)], ids=str)
def test_a_mask_is_asked_of_all_rows_of_a_consumer(lengths_q: list[int], heads: int) -> None:
    """A block is fully visible to all of the first 64 queries, and not to the next ones; and heads share a tile."""
    masks = trace_mods(None, lambda b, h, i, j: (i < 70) | (j < 10))
    inputs = {"lengths_q": lengths_q, "lengths_kv": [330, 140], "num_heads": heads, "num_heads_kv": 2}
    check(5, {"attn_mask_type": "padding", "mods": masks}, qkv_format="thd", **inputs)


def _documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 75 == kv_idx // 75) | (kv_idx < 20)


@pytest.mark.slow
@without_gpu
def test_block_masks() -> None:
    """The masks' blocks have 256 queries, like a work tile; masks with blocks of 128 are refused."""
    for size, seed in ((256, 3), (256, 5), (128, 3)):
        mask = create_block_mask(_documents, None, None, 300, 400, "cpu", BLOCK_SIZE=(size, 128))
        lists = block_lists(mask, 2, 2, 300, 330, torch.device("cpu"))
        call = {"attn_mask_type": "causal", "mods": trace_mods(None, mask.mask_mod, needs_grad=True), "blocks": lists}
        if size == 256:
            check(seed, call, **DENSE)
        else:
            with pretended_device(100, 148):
                problem = triton_backend.to_problem(*case_of(call, **DENSE))
                said = conditions.forward_unsupported(problem, problem.q)
            assert said is not None
            assert "its tiles are 256 x 64, and the block mask's blocks 128 x 128" in said


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_pages(page_size: int) -> None:
    x, settings = bind_call(**make_arguments(page_size, "[pages, size, heads, dim]", 64))
    report = run(page_size, spec_to_run(x, settings), x)
    assert {finding.kind for finding in report.findings} <= HARMLESS, str(report)


FAULTS: dict[str, tuple[ModuleType, inject.Fault]] = {
    "weights are multiplied before they are there": (blackwell_forward, drop("wait(weights_full)")),
    "weights are multiplied without a fence": (blackwell_forward, drop("fence_after_sync()", within="_add_product_with_v")),
    "v is multiplied before it has come": (blackwell_forward, drop("wait(v_full)")),
    "k is multiplied before it has come": (blackwell_forward, drop("wait(k_full)")),
    "q is multiplied before it has come": (blackwell_forward, drop("wait(q_full)")),
    "q is released twice": (blackwell_forward, with_argument("mbarrier.arrive(q_empty)", "pred", "True")),
    "nobody hears of scores": (blackwell_forward, drop("tcgen05_commit(scores_full)")),
    "nobody hears of out": (blackwell_forward, drop("tcgen05_commit(out_full)")),
    "scores take the place of weights that have yet to be multiplied": (
        blackwell_forward,
        move("_issue_scores()", before="_add_product_with_v()"),
    ),
    "out begins with what another tile left": (blackwell_forward, with_argument("tcgen05_mma(weights)", "use_acc", "True")),
    "out is each block's anew": (blackwell_forward, with_argument("tcgen05_mma(weights)", "use_acc", "False")),
    "a stage of k is released before its products": (
        blackwell_forward,
        move("tcgen05_commit(k_empty)", before="_issue_scores()", within="product_partition"),
    ),
    "a stage of k is released by the warp and not by its products": (
        blackwell_forward,
        inject.call_instead("tcgen05_commit(k_empty)", "mbarrier.arrive"),
    ),
    "the program ends under a commit": (blackwell_forward, drop("wait(v_empty)")),
    "scores are read before they are there": (blackwell_forward, drop("wait(scores_full)")),
    "scores are read without a fence": (blackwell_forward, drop("fence_after_sync()", within="_take_block")),
    "scores are waited for in another phase": (blackwell_forward, wrong_phase("wait(scores_full)")),
    "weights are left without a fence": (blackwell_forward, drop("fence_before_sync()")),
    "weights are released before out is rescaled": (
        blackwell_forward,
        move("arrive(weights_full)", before="_rescale_out()", within="_take_block"),
    ),
    "out is read before it is there": (blackwell_forward, drop("wait(out_full)")),
    "out is read without a fence": (blackwell_forward, drop("fence_after_sync()", within="compute_partition")),
    "out is stored without a fence": (blackwell_forward, drop("fence_async_shared()")),
    "out is overwritten before its store has read it": (blackwell_forward, drop("tma.store_wait()", within="_store_out")),
    "the program ends under a store": (blackwell_forward, drop("tma.store_wait()", within="compute_partition")),
    "out is not rescaled": (blackwell_forward, drop("_rescale_out()")),
    "a work tile's slot is free before the products' warp has read it": (
        blackwell_forward,
        with_argument("allocate_forward_barriers(1, CONSUMERS + 1, META)", 1, "CONSUMERS"),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
# round robin and random; eager, lazy and random
@pytest.mark.parametrize("seeds", [(2, 5), pytest.param((0, 1, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, fault = FAULTS[name]
    [kernels] = kernels_with((blackwell_forward,), where, fault, tmp_path)
    case = case_of({"attn_mask_type": "causal"}, lengths_q=[600], lengths_kv=[600], num_heads=3, num_heads_kv=1, outliers=True)
    assert_found(seeds, lambda seed: [run(seed, *case, kernels)], HARMLESS)
