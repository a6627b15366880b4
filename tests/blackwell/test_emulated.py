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
from flexattn.dispatch.spec import AttentionSpec, Operands, Window, as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.blackwell import conditions, consumer, pipeline, products
from flexattn.kernels_triton.blackwell import forward as blackwell_forward
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.mods.trace import trace_mods
from flexattn.ops import spec_to_run
from flexattn.testing import make_call, make_inputs
from tests.common.test_split_plan import CALLS as SPLIT_CALLS
from tests.common.test_split_plan import paged
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import FEATURES
from tests.hopper.test_pages import make_arguments
from tests.support import inject
from tests.support.gluon_calls import BANDS, EVERYTHING, SEEDS, SINKS, UNEVEN, check_results, without_gpu
from tests.support.inject import drop, kernels_with, move, with_argument, wrong_phase

HARMLESS = {"tma-out-of-bounds"}  # a tile may lie past its sequence's end
DENSE = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}


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


def case_of(call: dict[str, Any], **inputs: Any) -> tuple[AttentionSpec, Operands]:
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return make_call(given, **{"return_max_logit": False, **call})


def check(seed: int, call: dict[str, Any], splits: int | None = None, **inputs: Any) -> None:
    report = run(seed, *case_of(call, **inputs), splits=splits)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    assert report.products > 0
    assert report.tensor_columns <= 512


@pytest.mark.sample(values=True)
@without_gpu
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_bands(fmt: str, band: dict[str, Any]) -> None:
    seed = 2 + 4 * ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"].index(fmt) + BANDS.index(band)  # a schedule each
    dim = (64, 128)[(seed + seed // 4) % 2]
    inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [330, 9, 165], "num_heads": 2, "num_heads_kv": 1}
    check(seed, band, qkv_format=fmt, padding=True, gap=2, dtype=torch.float16, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (150, 70)}],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_dense(band: dict[str, Any], dim: int) -> None:
    """Lazy and random schedules; blocks that an edge cuts on either side, and complete ones."""
    for seed in (1, 7):
        check(seed, band, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample(values=True)
@without_gpu
@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("window", [(None, -40), (-30, None), (60, -20), (-25, 90), (None, -300), (5, -11)], ids=str)
def test_windows_beside_the_diagonal(window: tuple[int | None, int | None], bottom_right: bool) -> None:
    band = {"attn_mask_type": "padding", "window_size": Window(*window), "bottom_right_diagonal": bottom_right}
    inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [190, 9, 365], "num_heads": 2, "num_heads_kv": 1}
    dim = 64 if bottom_right else 128
    check(3 + (window[1] or -1) % 7, band, qkv_format="thd", padding=True, gap=2, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (160, 64)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int]) -> None:
    call = EVERYTHING | {"softmax_offset": SINKS}
    for seed in (0, 1, 5):
        check(seed, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@without_gpu
def test_rows_whose_maximum_rises_by_much() -> None:
    for seed in (1, 4):
        check(seed, {"attn_mask_type": "causal"}, outliers=True, lengths_q=[500], lengths_kv=[500], num_heads=2, num_heads_kv=2)


@without_gpu
def test_a_consumer_without_queries() -> None:
    for seed in (1, 4):
        check(seed, {"attn_mask_type": "padding_causal"}, qkv_format="thd", lengths_q=[20, 129, 1, 0], lengths_kv=[300, 40, 0, 5])


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_mods_and_biases(name: str) -> None:
    seed = 2 + list(FEATURES).index(name)
    check(seed, {"attn_mask_type": "padding_causal", **FEATURES[name]("cpu")}, qkv_format="thd", gap=3, **UNEVEN)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
def test_post_scale_bias(shape: tuple[int, int]) -> None:
    bias = torch.randn(*shape, 300, 330, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    inputs = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 4, "num_heads_kv": 2}
    check(4, {"bias_type": "post_scale_bias", "bias": bias, "attn_mask_type": "causal"}, **inputs)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_dropout(dims: tuple[int, int]) -> None:
    """The reference drops the same weights, bit for bit: one weight more or less is far outside the error budget."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(dims[0] % 20, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)
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


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", SPLIT_CALLS)
def test_keys_split_by_lengths(name: str) -> None:
    spec, x = paged(**SPLIT_CALLS[name])
    report = run(1 + list(SPLIT_CALLS).index(name), spec, x, splits=BY_LENGTHS)
    assert {finding.kind for finding in report.findings} <= HARMLESS, str(report)


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"bias_type": "alibi"}], ids=str)
def test_max_logit_beside_sinks(features: dict[str, Any]) -> None:
    """A sink is not a key's logit, and comes last."""
    if "bias_type" in features:
        features = features | FEATURES["alibi"]("cpu")
    call = EVERYTHING | {"softmax_offset": SINKS, "return_max_logit": True} | features
    for seed in (1, 6):
        check(seed, call, qkv_format="thd", gap=3, **UNEVEN)


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


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_twenty_schedules(dim: int) -> None:
    for seed in SEEDS:
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dim, head_dim_v=dim, **UNEVEN)
        check(seed, {"attn_mask_type": "causal"}, head_dim_qk=dim, head_dim_v=dim, **DENSE)


FAULTS: dict[str, tuple[ModuleType, inject.Fault]] = {
    "weights are multiplied before they are there": (products, drop("wait(weights_full)")),
    "weights are multiplied without a fence": (products, drop("fence_after_sync()")),
    "v is multiplied before it has come": (products, drop("wait(v_full)")),
    "k is multiplied before it has come": (products, drop("wait(k_full)")),
    "q is multiplied before it has come": (products, drop("wait(q_full)")),
    "q is released twice": (products, with_argument("mbarrier.arrive(q_empty)", "pred", "True")),
    "nobody hears of scores": (products, drop("tcgen05_commit(scores_full)")),
    "nobody hears of out": (products, drop("tcgen05_commit(out_full)")),
    "scores take the place of weights that have yet to be multiplied": (
        products,
        move("_issue_scores()", before="_add_product_with_v()"),
    ),
    "out begins with what another tile left": (products, with_argument("tcgen05_mma(weights)", "use_acc", "True")),
    "out is each block's anew": (products, with_argument("tcgen05_mma(weights)", "use_acc", "False")),
    "a stage of k is released before its products": (
        products,
        move("tcgen05_commit(k_empty)", before="_issue_scores()", within="product_partition"),
    ),
    "a stage of k is released by the warp and not by its products": (
        products,
        inject.call_instead("tcgen05_commit(k_empty)", "mbarrier.arrive"),
    ),
    "the program ends under a commit": (products, drop("wait(v_empty)")),
    "scores are read before they are there": (consumer, drop("wait(scores_full)")),
    "scores are read without a fence": (consumer, drop("fence_after_sync()", within="_take_block")),
    "scores are waited for in another phase": (consumer, wrong_phase("wait(scores_full)")),
    "weights are left without a fence": (consumer, drop("fence_before_sync()")),
    "weights are released before out is rescaled": (
        consumer,
        move("arrive(weights_full)", before="_rescale_out()", within="_take_block"),
    ),
    "out is read before it is there": (consumer, drop("wait(out_full)")),
    "out is read without a fence": (consumer, drop("fence_after_sync()", within="compute_partition")),
    "out is stored without a fence": (consumer, drop("fence_async_shared()")),
    "out is overwritten before its store has read it": (consumer, drop("tma.store_wait()", within="_store_out")),
    "the program ends under a store": (consumer, drop("tma.store_wait()", within="compute_partition")),
    "out is not rescaled": (consumer, drop("_rescale_out()")),
    "a work tile's slot is free before the products' warp has read it": (
        pipeline,
        with_argument("allocate_forward_barriers(1, CONSUMERS + 1, META)", 1, "CONSUMERS"),
    ),
}


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
# round robin and random; eager, lazy and random
@pytest.mark.parametrize("seeds", [(2, 5), pytest.param((0, 1, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, fault = FAULTS[name]
    [kernels] = kernels_with((blackwell_forward,), where, fault, tmp_path)
    case = case_of({"attn_mask_type": "causal"}, lengths_q=[600], lengths_kv=[600], num_heads=3, num_heads_kv=1, outliers=True)
    for seed in seeds:
        try:
            report = run(seed, *case, kernels)
        except AssertionError:  # a wrong result
            continue
        assert {finding.kind for finding in report.findings} - HARMLESS, f"not found on seed {seed}: {report}"
