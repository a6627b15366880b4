"""The Gluon backward for mma.sync in the emulator: right, and without a race of cp.async, over many schedules.

If a fault is injected, every schedule must find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexattn import emulator
from flexattn.bench.emulated import PROGRAMS, emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.mma import backward as mma_backward
from flexattn.kernels_triton.mma import backward_dq, conditions
from flexattn.kernels_triton.mods.diagonals import with_diagonals
from flexattn.kernels_triton.mods.mask_blocks import with_key_lists
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.testing import (
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
)
from tests.hopper.test_dropout import dropped
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
from tests.support.inject import drop, kernels_with, with_argument

REPORTS = ("_attn_bwd_mma_kernel", "_attn_bwd_dq_mma_kernel")
FUSED, TWO_KERNELS = False, True


def run(
    seed: int,
    call: dict[str, Any],
    kernels: Sequence[ModuleType] = (mma_backward, backward_dq),
    capability: int = 80,
    deterministic: bool = FUSED,
    **inputs: Any,
) -> list[emulator.Report]:
    """Returns the emulator's reports. If they have no bug, the gradients are compared with the oracle, which gave out and lse."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    spec, x = make_call(given, return_max_logit=False, **call)
    out, lse = reference_attention(spec, x)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    rows, dout_rows = (as_bshd(t, spec.q_format) for t in (out.to(spec.dtype), dout))
    memory = gradient_memory(spec, x)
    fused, two = kernels
    with emulated(seed, *kernels) as found:
        problem = with_diagonals(triton_backend.to_problem(spec, x))
        if deterministic and problem.block_mask is not None:
            problem = with_key_lists(problem)
        own = (rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset)
        backward = Backward(problem, *own, deterministic=deterministic)
        with pretended_device(capability, PROGRAMS):
            if deterministic:
                assert conditions.two_kernels_unsupported(backward) is None
                two.mma_two_kernel_backward(backward)
            else:
                assert conditions.backward_unsupported(backward) is None
                fused.mma_backward(backward)
    reports = [found[name] for name in REPORTS if name in found]
    assert len(reports) == 1 + deterministic
    if not any(report.bugs for report in reports):
        check_gradients(memory, wanted_gradients(spec, x, dout, dlse))
    return reports


def check_call(seed: int, call: dict[str, Any], capability: int = 80, deterministic: bool = FUSED, **inputs: Any) -> None:
    for report in run(seed, call, capability=capability, deterministic=deterministic, **inputs):
        assert not report.findings, f"seed {seed}: {report}"


@pytest.fixture(name="check", params=[FUSED, TWO_KERNELS], ids=["fused", "two kernels"])
def _check(request: pytest.FixtureRequest) -> Check:
    return partial(check_call, deterministic=request.param)


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
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 89])
def test_dense(check: Check, band: dict[str, Any], dim: int, capability: int) -> None:
    """Blocks that an edge cuts on either side, and complete ones."""
    seed = 7 if dim == 64 else 1  # random, lazy
    check(seed, band, capability=capability, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (96, 96), (96, 24), (8, 8), (192, 128), (256, 256)], ids=str)
def test_head_dims_and_sinks(check: Check, dims: tuple[int, int], capability: int) -> None:
    """Sequences without queries, and without keys."""
    seed = {128: 0, 64: 1}.get(dims[0], 5)  # eager, lazy, random
    call = EVERYTHING | {"softmax_offset": SINKS}
    check(seed, call, capability=capability, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dropout(check: Check, dim: int, capability: int) -> None:
    """The reference drops the same weights, bit for bit: one weight more or less is far outside the error budget."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(
        dim % 20,
        call,
        capability=capability,
        qkv_format="thd",
        gap=3,
        head_dim_qk=dim,
        head_dim_v=dim,
        **UNEVEN,
    )


# With a head dim whose tile for 8.0 has the form of the loop: 128 has a ring of q, and 256 one buffer. Of dq, 64 has rings.
FAULTS: dict[str, tuple[ModuleType, int, inject.Fault]] = {
    "a block is multiplied before it has come": (mma_backward, 128, drop("wait_group(0)", within="_add_blocks", nth=1)),
    "a wait leaves a group out": (mma_backward, 128, with_argument("wait_group(0)", 0, "1", within="_add_blocks", nth=1)),
    "dout is in no group": (mma_backward, 256, drop("commit_group()", within="_add_blocks", nth=4)),
    "the next q overwrites the one that is multiplied": (
        mma_backward,
        128,
        with_argument("_copy_queries(following)", 2, "slot", within="_add_blocks", nth=0),
    ),
    "q of another block": (
        mma_backward,
        256,
        with_argument("_copy_queries(following)", 3, "position", within="_add_blocks", nth=1),
    ),
    "dout of another block": (mma_backward, 128, with_argument("_copy_dout(following)", 2, "position", within="_add_blocks")),
    "dq is added elsewhere": (mma_backward, 128, with_argument("_add_part_of_dq()", 0, "{} + 8", within="_add_dq", nth=0)),
    "the second part of dq is the first": (
        mma_backward,
        96,
        with_argument("_add_part_of_dq()", 2, "k.first", within="_add_dq", nth=1),
    ),
    "the second part of dk is left out": (mma_backward, 96, drop("store_part(dk1)", within="_attn_bwd_mma_kernel")),
    "keys are multiplied before they have come": (backward_dq, 128, drop("wait_group(0)", within="_add_blocks", nth=0)),
    "k is in no group": (backward_dq, 128, drop("commit_group()", within="_add_blocks", nth=3)),
    "the next k overwrites the one that is multiplied": (
        backward_dq,
        64,
        with_argument("_copy_k(following)", 2, "slot", within="_add_blocks", nth=0),
    ),
    "the next v comes under its product": (
        backward_dq,
        128,
        with_argument("_copy_v(following)", 3, "column", within="_add_blocks", nth=1),
    ),
    "no block is cut": (backward_dq, 64, with_argument("mask_keys()", 2, "columns * 0", within="_add_blocks")),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seeds", [(2, 5), pytest.param((0, 1, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    where, dim, fault = FAULTS[name]
    kernels = kernels_with((mma_backward, backward_dq), where, fault, tmp_path)
    inputs = {"lengths_q": [300], "lengths_kv": [200], "num_heads": 3, "num_heads_kv": 1, "head_dim_qk": dim, "head_dim_v": dim}
    call = {"attn_mask_type": "causal"}
    assert_found(seeds, lambda seed: run(seed, call, kernels, deterministic=where is backward_dq, **inputs))
