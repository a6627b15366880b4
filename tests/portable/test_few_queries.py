"""Query heads that share a tile of the portable forward if queries are few: the reference's numbers for every feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import empty_outputs
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import FORWARD
from flexattn.kernels_triton.portable.forward import attention_forward, heads_of_a_tile
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import check_close, make_call, make_inputs, reference_attention
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import as_bshd

HEADS = 8
SLOPES = torch.tensor([0.9, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01])


def by_head(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * (1.0 + 0.1 * h) - SLOPES[h] * (i - j).abs() + 0.1 * b


def hides(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + h + b) % 3 != 0


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal_bottom_right"},
    "window": {"attn_mask_type": "causal_bottom_right", "window_size": (11, 0)},
    "top-left window": {"window_size": (5, 7), "bottom_right_diagonal": False},
    "softcap": {"softcap": 3.0},
    "sink": {"softmax_type": "learnable", "softmax_offset": torch.linspace(-2, 2, HEADS)},
    "off by one": {"softmax_type": "off-by-one"},
    "alibi": {"bias_type": "alibi", "alibi_slopes": SLOPES},
    "bias": {"bias_type": "post_scale_bias", "bias": torch.randn(1, HEADS, 3, 45, generator=torch.Generator().manual_seed(3))},
    "bias before the scale": {
        "bias_type": "pre_scale_bias",
        "bias": torch.randn(1, 1, 3, 45, generator=torch.Generator().manual_seed(3)),
    },
    "score_mod": {"mods": (by_head, None)},
    "mask_mod": {"mods": (None, hides)},
}


def group_of(longest: int, heads_kv: int) -> int:
    """Heads of a tile in the interpreter, whose tiles have 32 rows."""
    return min(HEADS // heads_kv, 1 << ((32 // longest).bit_length() - 1)) if 2 * longest <= 32 else 1


def check(inputs: Any, splits: int | None, call: dict[str, Any], group: int, heads: int = HEADS) -> None:
    given = dict(call)
    if "mods" in given:
        given["mods"] = trace_mods(*given["mods"])
    spec, x = make_call(inputs, **given, return_max_logit=False)
    problem = triton_backend.to_problem(spec, x)
    assert heads_of_a_tile(problem, problem.tile(FORWARD)) == group
    out, lse, _ = empty_outputs(spec, x)
    attention_forward(problem, as_bshd(out, spec.q_format), lse, splits=splits)
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])


@pytest.mark.sample("name", "splits")
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_features(name: str, heads_kv: int, splits: int | None) -> None:
    inputs = make_inputs("bshd", lengths_q=[3, 3], lengths_kv=[45, 45], num_heads=HEADS, num_heads_kv=heads_kv)
    check(inputs, splits, CALLS[name], group_of(3, heads_kv))


@pytest.mark.sample("fmt", "splits", "heads_of_a_key_head")
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("heads_of_a_key_head", [3, 5, 6, 7])
@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "thd"])
def test_groups_of_any_size(fmt: str, heads_of_a_key_head: int, splits: int | None) -> None:
    """Rows of a tile without a head, between two key heads or after the last, leave nothing in the results."""
    heads = 2 * heads_of_a_key_head
    inputs = make_inputs(fmt, lengths_q=[3, 2], lengths_kv=[45, 9], padding=True, num_heads=heads, num_heads_kv=2)
    call = {"attn_mask_type": "padding_causal_bottom_right", "bias_type": "alibi", "softmax_type": "learnable"}
    call |= {"alibi_slopes": torch.linspace(0.1, 1, heads), "softmax_offset": torch.linspace(-2, 2, heads)}
    check(inputs, splits, call, heads_of_a_key_head, heads)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("place", ["in k", "apart"])
def test_latent_attention(place: str, splits: int | None) -> None:
    """Absorbed MLA: one key head of 576, whose first 512 columns are v; and other values with the same strides."""
    given = make_inputs(
        "bshd", lengths_q=[3, 3], lengths_kv=[45, 45], num_heads=HEADS, num_heads_kv=1, head_dim_qk=576, head_dim_v=512
    )
    rows = given.k if place == "in k" else given.k.flip(1)
    call = {"attn_mask_type": "causal_bottom_right", "window_size": (30, 0)}
    check(given._replace(v=rows[..., :512]), splits, call, 8)


@pytest.mark.sample("fmt")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths_q", [(2, 0, 1), (5, 3, 18), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_and_lengths(fmt: str, lengths_q: tuple[int, ...], dtype: torch.dtype) -> None:
    """Empty sequences, gaps between them, and rows past the last one."""
    inputs = make_inputs(
        fmt, lengths_q=lengths_q, lengths_kv=[40, 7, 21], padding=True, gap=2, num_heads=HEADS, num_heads_kv=1, dtype=dtype
    )
    longest = max(lengths_q) + (2 if not fmt.startswith("thd") else 0)
    check(inputs, None, {"attn_mask_type": "padding_causal_bottom_right"}, group_of(longest, 1))


def test_calls_that_keep_heads_apart() -> None:
    inputs = make_inputs(lengths_q=[1], lengths_kv=[40], num_heads=HEADS, num_heads_kv=1)
    spec, x = make_call(inputs, return_max_logit=False)
    problem = triton_backend.to_problem(spec, x)
    tile = problem.tile(FORWARD)
    assert heads_of_a_tile(problem, tile) == HEADS
    assert heads_of_a_tile(problem, tile, has_max_logit=True) == 1
    dropped = triton_backend.to_problem(*make_call(inputs, dropout_p=0.5, rng_state=torch.tensor([1, 2]), return_max_logit=False))
    assert heads_of_a_tile(dropped, tile) == 1
    many = make_inputs(lengths_q=[17], lengths_kv=[40], num_heads=HEADS, num_heads_kv=1)
    assert heads_of_a_tile(triton_backend.to_problem(*make_call(many, return_max_logit=False)), tile) == 1


@pytest.mark.slow
@pytest.mark.sample("kept_in", "capability", "dim")
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_compiled(kept_in: torch.dtype, capability: int, dim: int) -> None:
    """Decoding over pages, with lengths and splits."""
    if kept_in is torch.float8_e4m3fn and capability < 89:
        pytest.skip("the compiler knows float8_e4m3fn from compute capability 8.9 on")
    if kept_in.itemsize == 1 and dim > 256:
        pytest.skip("keys in FP8 end at head dim 256")
    q = torch.zeros(8, 1, 32, dim, dtype=torch.bfloat16)
    k = torch.zeros(8 * 512, 8, 8, dim, dtype=kept_in)
    table, used = torch.zeros(8, 512, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    scales = (torch.ones(8, 8, 1),) * 2 if kept_in.itemsize == 1 else ()
    problem = Problem(q, k, k, softmax_scale=0.1, seqused_kv=used, page_table=table, max_seqlen_kv=4096, descales_kv=scales)
    with pretended_device(capability, 132), recorded_launches() as launches:
        attention_forward(problem, torch.zeros_like(q), torch.zeros(8, 32, 1))
    (report,) = compile_sound([request_for(launches[0], capability)])
    assert report.loop_spill_share == 0 or (capability, dim) == (100, 128)  # because paged rows lie 64 bits apart
    assert report.spill_store_bytes <= 64
    assert not report.warnings
