"""Tests that the emulated forwards and backwards of several Gluon families share.

A test module imports these tests and defines the fixture `check`: check(seed, call, **inputs) emulates a call of its kernels with
the schedule of a seed, and compares the results with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import pytest
import torch

from flexattn import emulator
from flexattn.dispatch.spec import AttentionSpec, Operands, Window
from flexattn.testing import make_call, make_inputs
from tests.hopper.test_mods import BANDS as BANDS_OF_MASKS
from tests.hopper.test_mods import BLOCK_MASKS, FEATURES, blocks_of, large_scores_past_the_end
from tests.support.gluon_calls import BANDS, EVERYTHING, SEEDS, SINKS, UNEVEN, without_gpu

DENSE = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
FORMATS = ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"]


class Check(Protocol):
    def __call__(self, seed: int, call: dict[str, Any], **inputs: Any) -> None: ...


def case_of(call: dict[str, Any], **inputs: Any) -> tuple[AttentionSpec, Operands]:
    """Returns a call in bf16 with head dims of 128, unless `inputs` name others."""
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return make_call(given, **{"return_max_logit": False, **call})


def assert_found(seeds: Sequence[int], run: Callable[[int], Sequence[emulator.Report]], harmless: Set[str] = frozenset()) -> None:
    """Raises AssertionError if a run with a fault has right results and no finding."""
    for seed in seeds:
        try:
            reports = run(seed)
        except AssertionError:  # wrong results
            continue
        kinds = {finding.kind for report in reports for finding in report.findings}
        assert kinds - harmless, f"not found on seed {seed}: {reports}"


# --- Tests of forwards and backwards. sample: the arguments of the mark `sample`.


def formats_and_bands(**sample: bool) -> Callable[..., None]:
    @pytest.mark.sample(**sample)
    @without_gpu
    @pytest.mark.parametrize("band", BANDS, ids=str)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test(check: Check, fmt: str, band: dict[str, Any]) -> None:
        seed = 2 + 4 * FORMATS.index(fmt) + BANDS.index(band)  # a schedule each
        dim = (64, 128)[(seed + seed // 4) % 2]
        inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [330, 9, 165], "num_heads": 2, "num_heads_kv": 1}
        check(seed, band, qkv_format=fmt, padding=True, gap=2, dtype=torch.float16, head_dim_qk=dim, head_dim_v=dim, **inputs)

    return test


def windows_beside_the_diagonal(*sample: str) -> Callable[..., None]:
    @pytest.mark.slow
    @pytest.mark.sample(*sample)
    @without_gpu
    @pytest.mark.parametrize("bottom_right", [True, False])
    @pytest.mark.parametrize("window", [(None, -40), (-30, None), (60, -20), (-25, 90), (None, -300), (5, -11)], ids=str)
    def test(check: Check, window: tuple[int | None, int | None], bottom_right: bool) -> None:
        band = {"attn_mask_type": "padding", "window_size": Window(*window), "bottom_right_diagonal": bottom_right}
        inputs = {"lengths_q": [70, 0, 300], "lengths_kv": [190, 9, 365], "num_heads": 2, "num_heads_kv": 1}
        dim = 64 if bottom_right else 128
        check(3 + (window[1] or -1) % 7, band, qkv_format="thd", padding=True, gap=2, head_dim_qk=dim, head_dim_v=dim, **inputs)

    return test


def mods_and_biases(dims: Sequence[int]) -> Callable[..., None]:
    @pytest.mark.sample(values=False)
    @without_gpu
    @pytest.mark.parametrize("name", FEATURES)
    def test(check: Check, name: str) -> None:
        seed = 2 + list(FEATURES).index(name)
        dim = dims[seed % len(dims)]
        features = {"attn_mask_type": "padding_causal", **FEATURES[name]("cpu")}
        check(seed, features, qkv_format="thd", gap=3, head_dim_qk=dim, head_dim_v=dim, **UNEVEN)

    return test


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_twenty_schedules(check: Check, dim: int) -> None:
    for seed in SEEDS:
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", head_dim_qk=dim, head_dim_v=dim, **UNEVEN)
        check(seed, {"attn_mask_type": "causal"}, head_dim_qk=dim, head_dim_v=dim, **DENSE)


# --- Tests of forwards


@without_gpu
def test_rows_whose_maximum_rises_by_much(check: Check) -> None:
    check(4, {"attn_mask_type": "causal"}, outliers=True, lengths_q=[500], lengths_kv=[500], num_heads=2, num_heads_kv=2)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("hidden_by", ["window", "block mask"])
def test_tiles_that_see_no_key(check: Check, hidden_by: str) -> None:
    """A tile without blocks of keys has no iteration, not even one without a mask."""
    features: dict[str, Any] = {"attn_mask_type": "padding", "window_size": Window(40, None), "bottom_right_diagonal": False}
    if hidden_by == "block mask":
        features = {"attn_mask_type": "padding", **blocks_of("whole blocks that the band cuts", 300, 40, 3, "cpu", block_size=256)}
    inputs = {"lengths_q": [300, 70, 9], "lengths_kv": [4, 0, 40], "num_heads": 4, "num_heads_kv": 4}
    check(2, features, qkv_format="bshd", padding=True, head_dim_qk=64, head_dim_v=64, **inputs)


@pytest.mark.slow
@pytest.mark.sample("shape")
@without_gpu
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
def test_post_scale_bias(check: Check, shape: tuple[int, int]) -> None:
    bias = torch.randn(*shape, 300, 330, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    inputs = {"lengths_q": [300] * 2, "lengths_kv": [330] * 2, "num_heads": 4, "num_heads_kv": 2}
    check(4, {"bias_type": "post_scale_bias", "bias": bias, "attn_mask_type": "causal"}, **inputs)


@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"bias_type": "alibi"}], ids=str)
def test_max_logit_beside_sinks(check: Check, features: dict[str, Any]) -> None:
    """A sink is not a key's logit, and comes last."""
    if "bias_type" in features:
        features = features | FEATURES["alibi"]("cpu")
    call = EVERYTHING | {"softmax_offset": SINKS, "return_max_logit": True} | features
    check(1 if "softcap" in call else 6, call, qkv_format="thd", gap=3, **UNEVEN)


# --- Tests of backwards


@without_gpu
def test_heads_of_a_group_add_up(check: Check) -> None:
    inputs = {"lengths_q": [140], "lengths_kv": [260], "num_heads": 6, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}
    check(1, {"attn_mask_type": "causal_bottom_right"}, **inputs)


@pytest.mark.slow
@without_gpu
def test_outliers_and_slots_in_reverse(check: Check) -> None:
    inputs = {"lengths_q": [70, 0, 130, 20], "lengths_kv": [130, 9, 165, 40], "num_heads": 2, "num_heads_kv": 1}
    check(5, {"attn_mask_type": "padding_causal"}, qkv_format="thd", gap=3, in_reverse=True, outliers=True, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(("shape", "name"), [((2, 4), "post_scale_bias"), ((1, 1), "pre_scale_bias")], ids=str)
def test_biases(check: Check, shape: tuple[int, ...], name: str) -> None:
    bias = torch.randn(*shape, 300, 330, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    call = {"bias_type": name, "bias": bias, "attn_mask_type": "causal"}
    check(4, call, **(DENSE | {"num_heads": 4, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}))


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks(check: Check, name: str) -> None:
    heads_kv = 4 if BLOCK_MASKS[name][1] else 2
    inputs = {"lengths_q": [300, 210], "lengths_kv": [330, 100], "num_heads": 4, "num_heads_kv": heads_kv}
    features = {**BANDS_OF_MASKS.get(name, {"attn_mask_type": "padding"}), **blocks_of(name, 300, 330, 2, "cpu")}
    check(3, features, qkv_format="bshd", padding=True, head_dim_qk=64, head_dim_v=64, **inputs)


@pytest.mark.slow
@without_gpu
def test_large_scores_past_the_end(check: Check) -> None:
    inputs = {"lengths_q": [170], "lengths_kv": [256], "num_heads": 4, "num_heads_kv": 4, "head_dim_qk": 64, "head_dim_v": 64}
    check(4, large_scores_past_the_end(170, 256, "cpu"), qkv_format="thd", **inputs)


@without_gpu
def test_keys_past_the_end_beside_very_negative_scores(check: Check) -> None:
    """The weight of a key past the end would be infinite; no row of dq may have a part of it."""
    bias = torch.full((1, 1, 1, 100), -200.0)
    inputs = {"lengths_q": [70], "lengths_kv": [100], "num_heads": 2, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}
    check(6, {"bias_type": "post_scale_bias", "bias": bias}, **inputs)
