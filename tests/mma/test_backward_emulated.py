"""The Gluon backward for mma.sync in the emulator: right, and without a race of cp.async, over many schedules.

If a fault is injected, every schedule must find it.
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
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.mma import backward as mma_backward
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mods.diagonals import with_diagonals
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


def run(
    seed: int, call: dict[str, Any], kernels: ModuleType = mma_backward, capability: int = 80, **inputs: Any
) -> emulator.Report:
    """Returns the emulator's report. If it has no bug, the gradients are compared with the oracle, which gave out and lse."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    spec, x = make_call(given, return_max_logit=False, **call)
    out, lse = reference_attention(spec, x)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    rows, dout_rows = (as_bshd(t, spec.q_format) for t in (out.to(spec.dtype), dout))
    memory = gradient_memory(spec, x)
    with emulated(seed, kernels) as reports:
        problem = with_diagonals(triton_backend.to_problem(spec, x))
        backward = Backward(problem, rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset)
        with pretended_device(capability, 108):
            assert conditions.backward_unsupported(backward) is None
            kernels.mma_backward(backward)
    report = reports["_attn_bwd_mma_kernel"]
    if not report.bugs:
        check_gradients(memory, wanted_gradients(spec, x, dout, dlse))
    return report


def check(seed: int, call: dict[str, Any], capability: int = 80, **inputs: Any) -> None:
    report = run(seed, call, capability=capability, **inputs)
    assert not report.findings, f"seed {seed}: {report}"


@pytest.fixture(name="check")
def _check() -> Check:
    return check


test_formats_and_bands = formats_and_bands(pairs=False)
test_windows_beside_the_diagonal = windows_beside_the_diagonal(pairs=False)
test_mods_and_biases = mods_and_biases([64, 128])


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")] + [{"window_size": (250, 70)}],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 89])
def test_dense(band: dict[str, Any], dim: int, capability: int) -> None:
    """Lazy and random schedules; blocks that an edge cuts on either side, and complete ones."""
    for seed in (1, 7):
        check(seed, band, capability=capability, head_dim_qk=dim, head_dim_v=dim, strided=seed == 7, **DENSE)


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (96, 24), (8, 8), (192, 128), (256, 256)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int], capability: int) -> None:
    """Sequences without queries, and without keys."""
    call = EVERYTHING | {"softmax_offset": SINKS}
    for seed in (0, 1, 5):
        check(seed, call, capability=capability, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dropout(dim: int, capability: int) -> None:
    """The reference drops the same weights, bit for bit: one weight more or less is far outside the error budget."""
    call = EVERYTHING | dropped() | {"softmax_offset": SINKS}
    check(dim % 20, call, capability=capability, qkv_format="thd", gap=3, head_dim_qk=dim, head_dim_v=dim, **UNEVEN)


# With a head dim whose tile for 8.0 has the form of the loop: 128 has a ring of q, and 256 one buffer
FAULTS: dict[str, tuple[int, inject.Fault]] = {
    "a block is multiplied before it has come": (128, drop("wait_group(0)", within="_add_blocks", nth=1)),
    "a wait leaves a group out": (128, with_argument("wait_group(0)", 0, "1", within="_add_blocks", nth=1)),
    "dout is in no group": (256, drop("commit_group()", within="_add_blocks", nth=4)),
    "the next q overwrites the one that is multiplied": (
        128,
        with_argument("_copy_queries(following)", 2, "slot", within="_add_blocks", nth=0),
    ),
    "q of another block": (256, with_argument("_copy_queries(following)", 3, "position", within="_add_blocks", nth=1)),
    "dout of another block": (128, with_argument("_copy_dout(following)", 2, "position", within="_add_blocks")),
    "dq is added elsewhere": (128, with_argument("add_to_sums()", 0, "{} + 8", within="_add_dq")),
}


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seeds", [(2, 5), pytest.param((0, 1, 11), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_injected_fault_is_found(seeds: tuple[int, ...], name: str, tmp_path: Path) -> None:
    dim, fault = FAULTS[name]
    [kernels] = kernels_with((mma_backward,), mma_backward, fault, tmp_path)
    inputs = {"lengths_q": [300], "lengths_kv": [200], "num_heads": 3, "num_heads_kv": 1, "head_dim_qk": dim, "head_dim_v": dim}
    assert_found(seeds, lambda seed: run(seed, {"attn_mask_type": "causal"}, kernels, **inputs))
