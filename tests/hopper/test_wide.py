"""The forward for sm_90 at head dims above 256, in the emulator: right and race-free, with v apart from k or as its columns.

An injected fault must be found.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import problem as problems
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.hopper import conditions, wide_forward
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import check_close, make_call, make_inputs, reference_attention
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, SINKS, UNEVEN, without_gpu
from tests.support.inject import Fault, drop, kernels_with, move, with_argument, wrong_phase
from tests.support.pages import LAYOUTS, make_pool

BF16 = torch.bfloat16
SLOPES = torch.tensor([0.3, 0.02, 0.7, 0.11])
MLA = {"head_dim_qk": 576, "head_dim_v": 512, "num_heads_kv": 1}


def forward(
    seed: int, spec: AttentionSpec, x: Operands, kernels: ModuleType = wide_forward, splits: int | None = None
) -> tuple[bool, Tensor, Tensor]:
    """Returns whether the emulator found a bug, out and lse."""
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    rows = as_bshd(out, spec.q_format)
    problem = mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "forward")
    with pretended_device(90, 132):
        assert conditions.wide_unsupported(problem, rows, False) is None
    with emulated(seed, kernels) as reports:
        kernels.wide_forward(problem, rows, lse, splits=splits)
    report = reports["_attn_fwd_wide_hopper_kernel"]
    if kernels is wide_forward:
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    return bool(report.bugs), out, lse


def compare(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor) -> None:
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])


def check(seed: int, call: dict[str, Any], splits: int | None = None, latent: bool = False, **inputs: Any) -> None:
    given = make_inputs(**{"dtype": BF16, "head_dim_qk": 512, "head_dim_v": 512, **inputs})
    if latent:
        given = given._replace(v=given.k[..., : given.v.shape[-1]])
    spec, x = make_call(given, **call, return_max_logit=False)
    assert triton_backend.to_problem(spec, x).is_latent == latent
    _, out, lse = forward(seed, spec, x, splits=splits)
    compare(spec, x, out, lse)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (320, 320), (264, 40), (400, 264)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    call = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (90, 0)}
    call |= {"softmax_type": "learnable", "softmax_offset": SINKS}
    check(5, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (320, 256)], ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "thd", "sbhd", "bhsd"])
def test_v_is_columns_of_k(fmt: str, dims: tuple[int, int]) -> None:
    call = {"attn_mask_type": "padding_causal_bottom_right"}
    inputs = {"lengths_q": [3, 0, 70], "lengths_kv": [150, 40, 200], "num_heads": 2, "num_heads_kv": 1, "dtype": torch.float16}
    check(7, call, latent=True, qkv_format=fmt, padding=True, gap=2, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    "band",
    [{"attn_mask_type": mask} for mask in ("no_mask", "causal", "causal_bottom_right")]
    + [{"attn_mask_type": "no_mask", "window_size": window} for window in ((100, 20), (-1, 30))],
    ids=str,
)
def test_bands(band: dict[str, Any], latent: bool) -> None:
    check(1, band, latent=latent, lengths_q=[100], lengths_kv=[200], **MLA | {"num_heads": 2})


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(("heads", "heads_kv"), [(12, 1), (128, 1), (6, 2), (4, 4)])
def test_heads_that_share_a_tile(heads: int, heads_kv: int) -> None:
    for length in (1, 5):
        inputs = {"lengths_q": [length], "lengths_kv": [130], "num_heads": heads}
        check(4, {"attn_mask_type": "causal_bottom_right"}, latent=True, **MLA | inputs | {"num_heads_kv": heads_kv})


@without_gpu
def test_outliers() -> None:
    """Rows whose maximum rises by more than the lazy rescaling allows."""
    check(6, {"attn_mask_type": "causal"}, latent=True, outliers=True, lengths_q=[70], lengths_kv=[300], **MLA | {"num_heads": 1})


FEATURES: dict[str, dict[str, Any]] = {
    "learnable sinks": {"softmax_type": "learnable", "softmax_offset": SINKS},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"bias_type": "alibi", "alibi_slopes": SLOPES, "attn_mask_type": "causal"},
    "bias": {"bias_type": "post_scale_bias", "bias": torch.sin(torch.arange(4 * 70 * 300.0)).view(1, 4, 70, 300)},
    "dropout": {"dropout_p": 0.2, "rng_state": torch.tensor([3, 4])},
    "score_mod": {"mods": trace_mods(lambda score, b, h, i, j: score + 0.01 * (j - i) * (h + 1), None)},
    "mask_mod": {"mods": trace_mods(None, lambda b, h, i, j: (i + j) % 3 != 0)},
}


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, splits: int) -> None:
    inputs = {"lengths_q": [70], "lengths_kv": [300], "num_heads": 4} if name == "bias" else {"lengths_q": [9], "lengths_kv": [300]}
    check(3, FEATURES[name], splits, latent=splits == 1, **{**MLA, **inputs, "num_heads_kv": 1})


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("splits", [2, 1])
def test_block_masks(splits: int, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", 128)
    monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
    call = {"mods": trace_mods(None, lambda b, h, i, j: (j < 100) | (j > 300 + i))}
    check(5, call, splits, latent=latent, lengths_q=[150], lengths_kv=[460], **MLA | {"num_heads": 2})


LENGTHS_Q, LENGTHS_KV = (3, 0, 70, 1), (150, 40, 300, 0)


def make_paged(page_size: int, layout: str, latent: bool, **call: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(page_size)
    k = torch.randn(4, max(LENGTHS_KV), 1, 576, generator=generator).to(BF16)
    v = torch.randn(4, max(LENGTHS_KV), 1, 512, generator=generator).to(BF16)
    pool = make_pool(k, v, LENGTHS_KV, page_size, layout)
    return {
        "q": torch.randn(sum(LENGTHS_Q), 2, 576, generator=generator).to(BF16),
        "k": pool.k,
        "v": pool.k[..., :512] if latent else pool.v,
        "qkv_format": f"thd_2{pool.fmt}",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor([0, *LENGTHS_Q]).cumsum(0).int(),
        "max_seqlen_q": max(LENGTHS_Q),
        "seqused_kv": pool.seqused,
        "page_table": pool.page_table,
        "max_seqlen_kv": max(LENGTHS_KV),
        **call,
    }


def bound(arguments: dict[str, Any]) -> tuple[AttentionSpec, Operands]:
    x, settings = bind_call(**arguments)
    return ops.spec_to_run(x, settings), x


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 128])
@pytest.mark.parametrize("splits", [BY_LENGTHS, 3, None])
def test_pages(splits: int | None, page_size: int, layout: str, latent: bool) -> None:
    spec, x = bound(make_paged(page_size, layout, latent))
    _, out, lse = forward(page_size, spec, x, splits=splits)
    compare(spec, x, out, lse)


@pytest.mark.slow
@without_gpu
def test_a_sequence_has_its_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SPLIT_PIECE", 128)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 40, 4, 576, generator=generator).to(BF16)
    k = torch.randn(3, 300, 1, 576, generator=generator).to(BF16)

    def attend(batch: slice, first: int) -> tuple[Tensor, Tensor]:
        own = {"q": q[batch, first:], "k": k[batch], "v": k[batch, ..., :512]}
        spec, x = bound({**own, "attn_mask_type": "causal_bottom_right", "batch_invariant": True})
        return forward(3, spec, x)[1:]

    out, lse = attend(slice(0, 3), 0)
    for b, first in ((0, 0), (2, 0), (1, 39), (1, 30)):
        alone, lse_alone = attend(slice(b, b + 1), first)
        assert torch.equal(alone[0], out[b, first:])
        assert torch.equal(lse_alone[0], lse[b, :, first:])


FAULTS: dict[str, Fault] = {
    "weights are read before they are written": drop("wait_full(exchange.full)", within="_right_partition", nth=0),
    "weights are overwritten before they are read": drop("wait_empty(exchange.empty)", within="_left_partition", nth=0),
    "weights are read without a fence": drop("fence_async_shared()"),
    "the last factor overwrites a correction": drop("wait_empty(exchange.empty)", within="_left_partition", nth=1),
    "k is read before it has come": drop("wait_full(barriers.k_full)", within="_left_partition"),
    "v is read before it has come": drop("wait_full(barriers.v_full)", within="_left_partition"),
    "v's right half is released before it is read": move(
        "release(barriers.v_empty)", before="warpgroup_mma(exchange.p)", within="_right_partition"
    ),
    "v's left half is released before it is read": move(
        "release(barriers.v_empty)", before="warpgroup_mma_wait([acc])", within="_left_partition"
    ),
    "q is released before its last scores": move("release(barriers.q_empty)", before="gl.full()", within="_left_partition"),
    "both halves are the left one": with_argument("_store_half(HALF)", 1, "0"),
    "the right half has the left one's columns of v": with_argument("slice(HALF)", 0, "0", within="_right_partition"),
    "sums are not rescaled on the right": with_argument("rescaled(exchange.factor.load)", 1, "1.0 + 0.0 * {}"),
    "the phase of q is the other one": wrong_phase("wait_full(barriers.q_full)"),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", FAULTS)
@without_gpu
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((wide_forward,), wide_forward, FAULTS[name], tmp_path)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, heads, 576, generator=generator).to(BF16) for length, heads in ((130, 2), (200, 1)))
    v = k[..., :512]
    if name.startswith("v is"):
        v = v.contiguous()
    if "rescaled" in name:  # only rows with a large rise are
        q = 20 * q
    spec, x = bound({"q": q, "k": k, "v": v})
    _, right_out, right_lse = forward(2, spec, x)
    for seed in (2, 5):
        bug, out, lse = forward(seed, spec, x, kernels)
        assert bug or not (torch.equal(out, right_out) and torch.equal(lse, right_lse)), f"not found on seed {seed}"


def problem_of(queries: int, latent: bool, page_size: int = 0, dims: tuple[int, int] = (576, 512), **more: Any) -> Problem:
    """Two sequences of 64 heads over one and up to 4096 keys."""
    q = torch.zeros(2, queries, 64, dims[0], dtype=BF16)
    shape = (2 * 4096 // page_size, page_size) if page_size else (2, 4096)
    k = torch.zeros(*shape, 1, dims[0], dtype=BF16)
    v = k[..., : dims[1]] if latent else torch.zeros(*shape, 1, dims[1], dtype=BF16)
    if page_size:
        table, used = torch.zeros(2, 4096 // page_size, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        more = {**more, "page_table": table, "seqused_kv": used, "max_seqlen_kv": 4096}
    return Problem(q, k, v, softmax_scale=0.1, **more)


def launch_of(problem: Problem) -> Launch:
    out = torch.zeros(*problem.q.shape[:-1], problem.v.shape[-1], dtype=BF16)
    with pretended_device(90, 132), recorded_launches() as launches:
        wide_forward.wide_forward(problem, out, torch.zeros(2, 64, problem.longest_q))
    return next(launch for launch in launches if "wide" in launch.kernel.__name__)


BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
# The problem, and the bytes that the loading warp spills outside of the loops, at most: for pages of 16 keys.
COMPILED: dict[str, tuple[Problem, int]] = {
    "MLA, pages of 64": (problem_of(1, True, 64), 40),
    "MLA, prefill": (problem_of(512, True, **BOTTOM_RIGHT), 40),
    "MLA, pages of 16": (problem_of(1, True, 16), 364),  # the loading warp keeps the places of four copies, each in nine parts
    "v apart from k": (problem_of(512, False, **BOTTOM_RIGHT), 40),
    "512": (problem_of(512, False, dims=(512, 512), **BOTTOM_RIGHT), 40),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("MLA, pages of 64", "512") else pytest.mark.exhaustive)
        for name in COMPILED
    ],
)
def test_compiled(name: str) -> None:
    problem, spills = COMPILED[name]
    (report,) = compile_sound([request_for(launch_of(problem), 90)])
    assert report.loop_spill_share == 0
    assert report.spill_store_bytes <= spills
    assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
    assert set(report.matrix_instructions) == {"HGMMA"}
    assert report.idle_barriers == 0
    assert not report.warnings


def test_what_it_refuses() -> None:
    problem = problem_of(1, True)
    out = torch.zeros(2, 1, 64, 512, dtype=BF16)
    narrow = Problem(*(t[..., :128] for t in (problem.q, problem.k, problem.v)), softmax_scale=0.1)
    with pretended_device(90, 132):
        assert conditions.wide_unsupported(problem, out, False) is None
        assert conditions.wide_unsupported(problem, out, True) == "it does not return max_logit"
        assert conditions.wide_unsupported(narrow, out[..., :128], False) == "it takes head dims above 256"
        assert conditions.forward_unsupported(problem, out) == "it takes head dims up to 256"
        pages = problem_of(1, True, 4)
        assert str(conditions.wide_unsupported(pages, out, False)).startswith("its copies take 8 keys of a page or more")
