"""Pages in the forward for sm_90, in the emulator: bitwise equal to dense keys, on many schedules; injected faults are found."""

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
from flexattn.dispatch.pages import without_pages
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.emulator import Report
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD, HopperTile
from flexattn.kernels_triton.gluon import forward_loader
from flexattn.kernels_triton.hopper import conditions
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import check_close, reference_attention
from tests.hopper.test_attention import slower
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, SINKS, without_gpu
from tests.support.inject import assign, drop, kernels_with, with_argument
from tests.support.pages import LAYOUTS, make_pool
from tests.support.trees import tree

LENGTHS_Q, LENGTHS_KV = (3, 0, 70, 1), (150, 40, 300, 0)
HEADS, HEADS_KV = 4, 2


def make_arguments(page_size: int, layout: str, dim: int, **call: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(page_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    k, v = normal(4, max(LENGTHS_KV), HEADS_KV, dim), normal(4, max(LENGTHS_KV), HEADS_KV, min(dim, 128))
    pool = make_pool(k, v, LENGTHS_KV, page_size, layout)
    return {
        "q": normal(sum(LENGTHS_Q), HEADS, dim),
        "k": pool.k,
        "v": pool.v,
        "qkv_format": f"thd_2{pool.fmt}",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor([0, *LENGTHS_Q]).cumsum(0).int(),
        "max_seqlen_q": max(LENGTHS_Q),
        "seqused_kv": pool.seqused,
        "page_table": pool.page_table,
        "max_seqlen_kv": max(LENGTHS_KV),
        **call,
    }


def run(
    seed: int,
    arguments: dict[str, Any],
    kernels: ModuleType = hopper_forward,
    splits: int | None = None,
    tile: HopperTile | None = None,
) -> tuple[Report, Tensor, Tensor]:
    """Returns the emulator's report, out and lse; tile: None for the committed one."""
    x, settings = bind_call(**arguments)
    spec = ops.spec_to_run(x, settings)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    with emulated(seed, kernels) as reports:
        problem = triton_backend.to_problem(spec, x)
        with pretended_device(90, 132):
            assert conditions.forward_unsupported(problem, as_bshd(out, spec.q_format)) is None
        kernels.hopper_forward(problem, as_bshd(out, spec.q_format), lse, splits=splits, tile=tile)
    return reports["_attn_fwd_hopper_kernel"], out, lse


def dense(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call over k and v gathered, with NaN beyond each length."""
    x, settings = bind_call(**arguments)
    _, x = without_pages(ops.spec_to_run(x, settings), x._replace(seqused_kv=None))
    same = {name: value for name, value in arguments.items() if name not in ("page_table", "max_seqlen_kv")}
    return {**same, "k": x.k, "v": x.v}


def committed_tile(arguments: dict[str, Any]) -> HopperTile:
    x, settings = bind_call(**arguments)
    return conditions.forward_tile(triton_backend.to_problem(ops.spec_to_run(x, settings), x))


def check(seed: int, arguments: dict[str, Any], splits: int | None = None, tile: HopperTile | None = None) -> None:
    """Compares a call with the reference, and bitwise with dense keys and the same tile."""
    how = {"splits": splits, "tile": tile or committed_tile(arguments)}
    report, out, lse = run(seed, arguments, **how)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    _, dense_out, dense_lse = run(seed, dense(arguments), **how)
    assert torch.equal(out, dense_out)
    assert torch.equal(lse, dense_lse)
    x, settings = bind_call(**arguments)
    spec = ops.spec_to_run(x, settings)
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 128, 256])
def test_page_sizes_and_layouts(page_size: int, layout: str, dim: int) -> None:
    check(page_size + dim, make_arguments(page_size, layout, dim))


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "call",
    [
        {"window_size": (60, 0)},
        {"softmax_type": "learnable", "softmax_offset": SINKS},
        {"softcap": 5.0},
        {"bias_type": "alibi"},
        {"score_mod": lambda score, b, h, i, j: score + 0.01 * (j - i) * (h + 1)},
        {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
        {"mask_mod": tree(LENGTHS_Q, LENGTHS_KV), "attn_mask_type": "padding"},
    ],
    ids=lambda call: "-".join(call),
)
def test_features(call: dict[str, Any], splits: int) -> None:
    check(3, make_arguments(16, "interleaved", 64, **call), splits)


ROWS = {
    "long": HOPPER_FORWARD["d64_two_consumers"],
    "short": HOPPER_FORWARD["d64_paged_short"],
    "narrow window": HOPPER_FORWARD["d64_narrow_two_consumers"],
}


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("band", [{}, {"window_size": (90, 0)}, {"attn_mask_type": "padding"}], ids=str)
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("row", ROWS)
def test_rows(row: str, page_size: int, band: dict[str, Any]) -> None:
    check(page_size + len(band), make_arguments(page_size, "bhsd", 64, **band), tile=ROWS[row])


FAULTS = {
    "no bound of the rows in a page": assign("valid", "page_size", within="_load_any_pages"),
    "ids as they come": with_argument("gl.minimum(num_pages)", 1, "2147483647", within="page_ids"),
    "an entry past the end": assign("last", "1000", within="page_ids"),
    "the wrong rows of a page": assign("in_page", "0", within="_load_any_pages", nth=0),
    "a page that is never left": assign("is_over", "in_page < 0", within="_load_any_pages"),
    "no wait for a free stage": drop("wait_empty(barriers.v_empty)", within="load_value_pages"),
    "too few bytes": with_argument("mbarrier.expect(full)", 1, "{} // 2", within="load_key_pages"),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((hopper_forward,), forward_loader, FAULTS[name], tmp_path)
    arguments = make_arguments(48 if name == "the wrong rows of a page" else 16, "bshd", 64)
    if name == "ids as they come":  # if a table is wrong, other pages are read, but nothing outside
        arguments["page_table"][0, 2] = 2147480000
    if name == "an entry past the end":  # of a table that ends with the last sequence's last page
        arguments["page_table"] = arguments["page_table"][:, :19].contiguous()
        arguments["seqused_kv"][3] = 300
    for seed in (2, 5):
        report, out, lse = run(seed, arguments, kernels)
        right, right_out, right_lse = run(seed, arguments)
        assert not right.bugs
        assert report.bugs or not (torch.equal(out, right_out) and torch.equal(lse, right_lse)), f"not found on seed {seed}"


def test_pages_that_copies_cannot_bring() -> None:
    arguments = make_arguments(12, "bshd", 64)
    x, settings = bind_call(**arguments)
    spec = ops.spec_to_run(x, settings)
    problem = triton_backend.to_problem(spec, x)
    with pretended_device(90, 132):
        reason = conditions.forward_unsupported(problem, as_bshd(empty_outputs(spec, x)[0], spec.q_format))
    assert reason == "its copies take 8 keys of a page or more, and pages have 12: no multiple of 8"


def problem_of(dim: int, queries: int, page_size: int, window: int | None = None, keys: int = 4096, decoding: int = 0) -> Problem:
    """Returns a causal call over pages: 8 sequences, or one, packed beside some that decode, with one query each."""
    batch = 1 + decoding if decoding else 8
    q = torch.zeros(*((queries + decoding,) if decoding else (batch, queries)), 32, dim, dtype=torch.bfloat16)
    k = torch.zeros(batch * keys // page_size, page_size, 8, dim, dtype=torch.bfloat16)
    table, used = torch.zeros(batch, keys // page_size, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    more: dict[str, Any] = {"window_left": window, "window_right": 0, "bottom_right": True}
    if decoding:
        more |= {"cu_seqlens_q": torch.zeros(batch + 1, dtype=torch.int32), "max_seqlen_q": queries}
    return Problem(q, k, k, softmax_scale=0.1, **more, seqused_kv=used, page_table=table, max_seqlen_kv=keys)


@pytest.mark.sample
@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_many_queries_have_two_consumers(dim: int, window: int | None) -> None:
    """One loading warp finds their pages; beside three or four consumers it is a warpgroup, which does not compile."""
    problem = problem_of(dim, 4096, 64, window)
    assert conditions.forward_tile(problem).block_m == 128


@pytest.mark.parametrize(
    ("keys", "window", "row"), [(4096, None, "long"), (2048, None, "short"), (4096, 1023, "short"), (2048, 127, "narrow window")]
)
@pytest.mark.parametrize("decoding", [0, 31])
def test_prefill_at_head_dim_64(keys: int, window: int | None, row: str, decoding: int) -> None:
    """Sequences of one query beside a long one do not decide the tile, even if there are more of them."""
    problem = problem_of(64, 512, 16, window, keys, decoding)
    assert conditions.forward_tile(problem) == ROWS[row]
    assert slower("sm_90", problem) is None


@pytest.mark.parametrize("keys", [128, 255])
def test_short_prefill_at_head_dim_64_is_the_portable_kernels(keys: int) -> None:
    reason = slower("sm_90", problem_of(64, 128, 1, keys=keys))
    assert f"from 256 tokens of the longest sequence on, and this call has {keys}" in str(reason)


@pytest.mark.parametrize(
    ("dim", "window", "is_slower"),
    [(64, 128, True), (64, 1024, False), (64, None, False), (128, 128, True), (128, 1024, True), (128, 2048, False)],
)
def test_narrow_windows_of_few_queries_are_the_portable_kernels(dim: int, window: int | None, is_slower: bool) -> None:
    reason = slower("sm_90", problem_of(dim, 1, 16, window))
    assert (reason is not None) == is_slower, reason


def launch_of(dim: int, queries: int, page_size: int, window: int | None = None, keys: int = 4096) -> Launch:
    """Returns the forward's launch."""
    problem = problem_of(dim, queries, page_size, window, keys)
    with pretended_device(90, 132), recorded_launches() as launches:
        hopper_forward.hopper_forward(problem, torch.zeros_like(problem.q), torch.zeros(8, 32, queries))
    return next(launch for launch in launches if "hopper" in launch.kernel.__name__)


# Bytes that the loading warp spills, at most: a block of 128 keys has 16 copies of pages of 8 keys.
SPILLS = {(64, 1, 8): 40, (64, 1, 16): 24, (128, 1, 16): 40, (128, 512, 16): 16, (128, 512, 64): 0, (256, 1, 64): 32}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k in ((128, 1, 16), (256, 1, 64)) else pytest.mark.exhaustive) for k in SPILLS],
    ids=str,
)
def test_compiled(kind: tuple[int, int, int]) -> None:
    check_compiled(launch_of(*kind), SPILLS[kind])


@pytest.mark.slow
@pytest.mark.sample(values=False)
# Includes the loading warp: 12 bytes with Triton 3.6 and 8 with 3.7.
@pytest.mark.parametrize(("keys", "window", "spills"), [(4096, None, 12), (2048, None, 12), (2048, 127, 0)], ids=list(ROWS))
def test_rows_compiled(keys: int, window: int | None, spills: int) -> None:
    check_compiled(launch_of(64, 512, 16, keys=keys, window=window), spills)


def check_compiled(launch: Launch, spills: int) -> None:
    (report,) = compile_sound([request_for(launch, 90)])
    assert report.spill_store_bytes <= spills
    assert report.idle_barriers == 0
    assert not report.warnings
