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
from flexattn.dispatch.spec import Window, as_bshd
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
from tests.hopper.test_mods import BANDS as BANDS_OF_MASKS
from tests.hopper.test_mods import BLOCK_MASKS, FEATURES, blocks_of, large_scores_past_the_end
from tests.support import inject
from tests.support.gluon_calls import (
    BANDS,
    EVERYTHING,
    SEEDS,
    SINKS,
    UNEVEN,
    check_gradients,
    gradient_memory,
    wanted_gradients,
    without_gpu,
)
from tests.support.inject import drop, kernels_with, with_argument

DENSE = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}


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


@pytest.mark.sample(pairs=False)
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
@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("window", [(None, -40), (-30, None), (60, -20), (-25, 90), (None, -300), (5, -11)], ids=str)
def test_windows_beside_the_diagonal(window: tuple[int | None, int | None], bottom_right: bool) -> None:
    band = {"attn_mask_type": "padding", "window_size": Window(*window), "bottom_right_diagonal": bottom_right}
    inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [190, 9, 365], "num_heads": 2, "num_heads_kv": 1}
    dim = 64 if bottom_right else 128
    check(3 + (window[1] or -1) % 7, band, qkv_format="thd", padding=True, gap=2, head_dim_qk=dim, head_dim_v=dim, **inputs)


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


@without_gpu
def test_heads_of_a_group_add_up() -> None:
    inputs = {"lengths_q": [140], "lengths_kv": [260], "num_heads": 6, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}
    for seed in (1, 6):
        check(seed, {"attn_mask_type": "causal_bottom_right"}, **inputs)


@without_gpu
def test_outliers_and_slots_in_reverse() -> None:
    inputs = {"lengths_q": [70, 0, 130, 20], "lengths_kv": [130, 9, 165, 40], "num_heads": 2, "num_heads_kv": 1}
    check(5, {"attn_mask_type": "padding_causal"}, qkv_format="thd", gap=3, in_reverse=True, outliers=True, **inputs)


@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_mods_and_biases(name: str) -> None:
    seed = 2 + list(FEATURES).index(name)
    dim = (64, 128)[seed % 2]
    features = {"attn_mask_type": "padding_causal", **FEATURES[name]("cpu")}
    check(seed, features, qkv_format="thd", gap=3, head_dim_qk=dim, head_dim_v=dim, **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(("shape", "name"), [((2, 4), "post_scale_bias"), ((1, 1), "pre_scale_bias")], ids=str)
def test_biases(shape: tuple[int, ...], name: str) -> None:
    bias = torch.randn(*shape, 300, 330, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    call = {"bias_type": name, "bias": bias, "attn_mask_type": "causal"}
    check(4, call, **(DENSE | {"num_heads": 4, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}))


@pytest.mark.slow
@pytest.mark.sample(pairs=False)
@without_gpu
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks(name: str) -> None:
    heads_kv = 4 if BLOCK_MASKS[name][1] else 2
    inputs = {"lengths_q": [300, 210], "lengths_kv": [330, 100], "num_heads": 4, "num_heads_kv": heads_kv}
    features = {**BANDS_OF_MASKS.get(name, {"attn_mask_type": "padding"}), **blocks_of(name, 300, 330, 2, "cpu")}
    check(3, features, qkv_format="bshd", padding=True, head_dim_qk=64, head_dim_v=64, **inputs)


@without_gpu
def test_large_scores_past_the_end() -> None:
    inputs = {"lengths_q": [170], "lengths_kv": [256], "num_heads": 4, "num_heads_kv": 4, "head_dim_qk": 64, "head_dim_v": 64}
    check(4, large_scores_past_the_end(170, 256, "cpu"), qkv_format="thd", **inputs)


@without_gpu
def test_keys_past_the_end_beside_very_negative_scores() -> None:
    """The weight of a key past the end would be infinite; no row of dq may have a part of it."""
    bias = torch.full((1, 1, 1, 100), -200.0)
    inputs = {"lengths_q": [70], "lengths_kv": [100], "num_heads": 2, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}
    check(6, {"bias_type": "post_scale_bias", "bias": bias}, **inputs)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_twenty_schedules(dim: int) -> None:
    for seed in SEEDS:
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dim, head_dim_v=dim, **UNEVEN)
        check(seed, {"attn_mask_type": "causal"}, head_dim_qk=dim, head_dim_v=dim, **DENSE)


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
    for seed in seeds:
        try:
            report = run(seed, {"attn_mask_type": "causal"}, kernels, **inputs)
        except AssertionError:  # wrong gradients
            continue
        assert report.findings, f"not found on seed {seed}: {report}"
