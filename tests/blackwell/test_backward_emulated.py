"""The Gluon backward for sm_100 in the emulator: right, and without a race, a missing fence or a deadlock, over many schedules.

No GPU has run it: this test and its compiled code are the only evidence. If a fault is injected, every schedule must find it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd
from flexattn.kernels_triton.blackwell import backward as blackwell_backward
from flexattn.kernels_triton.blackwell import conditions
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.mods.diagonals import with_diagonals
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.testing import (
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
)
from tests.support import inject
from tests.support.gluon_calls import (
    EVERYTHING,
    SINKS,
    UNEVEN,
    check_gradients,
    gradient_memory,
    wanted_gradients,
    without_gpu,
)
from tests.support.gluon_cases import (  # noqa: F401
    DENSE,
    Check,
    assert_found,
    formats_and_bands,
    mods_and_biases,
    test_biases,
    test_block_masks,
    test_heads_of_a_group_add_up,
    test_keys_past_the_end_beside_very_negative_scores,
    test_large_scores_past_the_end,
    test_outliers_and_slots_in_reverse,
    test_twenty_schedules,
    windows_beside_the_diagonal,
)
from tests.support.inject import call_instead, drop, kernels_with, move, with_argument, wrong_phase

HARMLESS = {"tma-out-of-bounds"}  # a tile may lie past its sequence's end


def run(seed: int, call: dict[str, Any], kernels: ModuleType = blackwell_backward, **inputs: Any) -> emulator.Report:
    """Returns the emulator's report. If it has no bug, the gradients are compared with the oracle, which gave out and lse."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    spec, x = make_call(given, return_max_logit=False, **call)
    out, lse = reference_attention(spec, x)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    rows, dout_rows = (as_bshd(t, spec.q_format) for t in (out.to(spec.dtype), dout))
    memory = gradient_memory(spec, x)
    with emulated(seed, kernels) as reports:
        problem = with_diagonals(triton_backend.to_problem(spec, x))
        with pretended_device(100, 148):
            assert conditions.backward_unsupported(problem, rows, dout_rows) is None
        kernels.blackwell_backward(Backward(problem, rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset))
    report = reports["_attn_bwd_blackwell_kernel"]
    if not report.bugs:
        check_gradients(memory, wanted_gradients(spec, x, dout, dlse))
    return report


def check(seed: int, call: dict[str, Any], **inputs: Any) -> None:
    report = run(seed, call, **inputs)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    assert report.tensor_columns <= 512


@pytest.fixture(name="check")
def _check() -> Check:
    return check


test_formats_and_bands = pytest.mark.slow(formats_and_bands(values=False))
test_windows_beside_the_diagonal = windows_beside_the_diagonal("bottom_right")
test_mods_and_biases = pytest.mark.slow(mods_and_biases([64, 128]))


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (250, 70)}],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_dense(band: dict[str, Any], dim: int) -> None:
    """Blocks that an edge cuts on either side, and complete ones."""
    seed = 7 if dim == 64 else 1  # random, lazy
    check(seed, band, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (96, 24)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int]) -> None:
    """Tiles of 32 columns of dq in even and odd numbers; sequences without queries, and without keys."""
    seed = {128: 0, 64: 1}.get(dims[0], 5)  # eager, lazy, random
    check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


FAULTS: dict[str, tuple[ModuleType, inject.Fault]] = {
    "q is multiplied before it has come": (blackwell_backward, drop("wait(q_full)", within="_issue_scores")),
    "dout is multiplied before it has come": (blackwell_backward, drop("wait(dout_full)")),
    "weights are multiplied before they are there": (blackwell_backward, drop("wait(weights_full)")),
    "weights are multiplied without a fence": (blackwell_backward, drop("fence_after_sync()", within="_issue_dp_and_dv", nth=1)),
    "the weights of other queries are multiplied": (
        blackwell_backward,
        with_argument("slice(COLUMNS)", 0, "0", within="_issue_dp_and_dv", nth=0),
    ),
    "dout of other queries is multiplied": (blackwell_backward, with_argument("dout.slice(COLUMNS)", 0, "0")),
    "ds is multiplied before it is there": (blackwell_backward, drop("wait(ds_full)")),
    "dq takes the place of dp without a fence": (blackwell_backward, drop("fence_after_sync()", within="_issue_dq_and_dk")),
    "ds is waited for in another phase": (blackwell_backward, wrong_phase("wait(ds_full)")),
    "dp is overwritten before it has been read": (
        blackwell_backward,
        move("_issue_dp_and_dv()", before="_issue_dq_and_dk()", within="product_partition", nth_there=0),
    ),
    "dp comes before dq has left": (blackwell_backward, drop("wait(dq_empty)")),
    "dp comes without a fence behind dq": (blackwell_backward, drop("fence_after_sync()", within="_issue_dp_and_dv", nth=0)),
    "dq lies over the scores": (
        blackwell_backward,
        with_argument("tcgen05_mma(use_acc=False)", 2, "sums.scores", within="_issue_dq_and_dk", nth=0),
    ),
    "dq begins with dp": (blackwell_backward, with_argument("tcgen05_mma(k)", "use_acc", "True", within="_issue_dq_and_dk")),
    "dk begins with what lay there": (
        blackwell_backward,
        with_argument("tcgen05_mma(q)", "use_acc", "True", within="_issue_dq_and_dk"),
    ),
    "dv is each block's anew": (blackwell_backward, with_argument("tcgen05_mma(weights)", "use_acc", "part > 0")),
    "scores take the place of weights that have yet to be multiplied": (
        blackwell_backward,
        move("_issue_scores()", after="_issue_dq_and_dk()", within="product_partition", nth_there=1),
    ),
    "q is released before dk": (
        blackwell_backward,
        move("tcgen05_commit(q_empty)", before="tcgen05_mma(k)", within="_issue_dq_and_dk"),
    ),
    "q is released by the warp and not by its products": (
        blackwell_backward,
        call_instead("tcgen05_commit(q_empty)", "mbarrier.arrive"),
    ),
    "d 128: dout is released by the warp and not by its products": (
        blackwell_backward,
        call_instead("tcgen05_commit(dout_empty)", "mbarrier.arrive"),
    ),
    "nobody hears of scores": (blackwell_backward, drop("tcgen05_commit(scores_full)")),
    "nobody hears of dq": (blackwell_backward, drop("tcgen05_commit(dq_full)")),
    "nobody hears of dk and dv": (blackwell_backward, drop("tcgen05_commit(sums_full)")),
    "dk and dv are there before the last block": (
        blackwell_backward,
        move("tcgen05_commit(sums_full)", before="_issue_dq_and_dk()", within="product_partition", nth_there=1),
    ),
    "scores are read before they are there": (blackwell_backward, drop("wait(scores_full)")),
    "scores are waited for in another phase": (blackwell_backward, wrong_phase("wait(scores_full)")),
    "scores are read without a fence": (blackwell_backward, drop("fence_after_sync()", within="compute_partition", nth=0)),
    "scores of other queries are read": (blackwell_backward, with_argument("sums.scores.slice(COLUMNS)", 0, "part * COLUMNS")),
    "weights are left without a fence": (blackwell_backward, drop("fence_before_sync()", within="compute_partition", nth=0)),
    "weights are released before they are there": (
        blackwell_backward,
        move("arrive(weights_full)", before="probabilities()", within="compute_partition"),
    ),
    "dp is read before it is there": (blackwell_backward, drop("wait(dp_full)")),
    "dp is read without a fence": (blackwell_backward, drop("fence_after_sync()", within="compute_partition", nth=1)),
    "dp of other queries is read": (blackwell_backward, with_argument("sums.dp.slice(COLUMNS)", 0, "part * COLUMNS")),
    "ds is multiplied without a fence for the products": (
        blackwell_backward,
        drop("fence_async_shared()", within="compute_partition"),
    ),
    "dp is left without a fence": (blackwell_backward, drop("fence_before_sync()", within="compute_partition", nth=1)),
    "dk and dv are read before they are there": (blackwell_backward, drop("wait(sums_full)")),
    "dk and dv are read without a fence": (blackwell_backward, drop("fence_after_sync()", within="compute_partition", nth=2)),
    "dk and dv are stored without a fence": (blackwell_backward, drop("fence_async_shared()", within="_write_gradient")),
    "dq is read before it is there": (blackwell_backward, drop("wait(dq_full)")),
    "dq is waited for in another phase": (blackwell_backward, wrong_phase("wait(dq_full)")),
    "dq is read without a fence": (blackwell_backward, drop("fence_after_sync()", within="add_dq")),
    "dq is left without a fence": (blackwell_backward, drop("fence_before_sync()", within="add_dq")),
    "dq is overwritten before it has been read": (
        blackwell_backward,
        move("arrive(dq_empty)", after="fence_after_sync()", within="add_dq"),
    ),
    "dq is added without a fence": (blackwell_backward, drop("fence_async_shared()", within="add_dq")),
    "dq is overwritten before it is added": (blackwell_backward, drop("tma.store_wait()", within="add_dq", nth=0)),
    "the program ends under an addition": (blackwell_backward, drop("tma.store_wait()", within="add_dq", nth=1)),
    "dq is added to other columns": (blackwell_backward, with_argument("reduce_add()", 1, "[{}[0], 0]")),
    "dq of other columns is added": (blackwell_backward, with_argument("slice(DQ_COLUMNS)", 0, "0")),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
# round robin and random; eager, lazy and random
@pytest.mark.parametrize("seeds", [(2, 5), pytest.param((0, 1, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, fault = FAULTS[name]
    [kernels] = kernels_with((blackwell_backward,), where, fault, tmp_path)
    dim = 128 if "d 128" in name else 64  # with one stage of dout, or as many as of q
    inputs = {"lengths_q": [400], "lengths_kv": [140], "num_heads": 2, "num_heads_kv": 1, "head_dim_qk": dim, "head_dim_v": dim}
    assert_found(seeds, lambda seed: [run(seed, {"attn_mask_type": "causal"}, kernels, **inputs)], HARMLESS)
