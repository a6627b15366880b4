"""The forward for FP8 caches on sm_90: right in the emulator, without an invalid read, and its compiled code.

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
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, request_for
from flexattn.kernels_triton.common.problem import Forward
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.families import HOPPER_FP8_CACHE
from flexattn.kernels_triton.hopper import fp8_cache, fp8_cache_operands
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import check_close
from tests.support.compiled_kernels import TRITON, compile_sound
from tests.support.fp8_caches import BF16, E4M3, SCALES, Case, exact, make_case
from tests.support.gluon_calls import without_gpu
from tests.support.inject import Fault, assign, kernels_with, with_argument

FP16, E5M2 = torch.float16, torch.float8_e5m2


def bound(arguments: dict[str, Any]) -> tuple[AttentionSpec, Operands]:
    x, settings = bind_call(**arguments)
    return ops.spec_to_run(x, settings), x


def forward(case: Case, splits: int | None = None, kernels: ModuleType = fp8_cache) -> tuple[bool, Tensor, Tensor]:
    """Returns whether the emulator found a bug, out and lse."""
    spec, x = bound(case.arguments)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    rows, problem = as_bshd(out, spec.q_format), triton_backend.to_problem(spec, x)
    with pretended_device(90, 132):
        assert kernels.unsupported(problem, rows, False) is None
    with emulated(3, kernels) as reports:
        kernels.fp8_cache_forward(problem, rows, lse, splits=splits)
    report = reports["_attn_fwd_fp8_cache_kernel"]
    if kernels is fp8_cache:
        assert not report.findings, str(report)
    return bool(report.findings), out, lse


def check(splits: int | None = None, **given: Any) -> None:
    case = make_case(**given)
    _, out, lse = forward(case, splits)
    wanted, budget = (exact(case, dtype) for dtype in (torch.float64, case.arguments["q"].dtype))
    check_close("out", out, wanted[0], budget[0])
    check_close("lse", lse, wanted[1], budget[1])


@without_gpu
@pytest.mark.sample("dtype", "fp8")
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_pages_and_dtypes(scales: str, page_size: int, dtype: torch.dtype, fp8: torch.dtype) -> None:
    check(scales=scales, page_size=page_size, dtype=dtype, fp8=fp8)


@without_gpu
@pytest.mark.sample("queries")
@pytest.mark.parametrize("splits", [None, 3, BY_LENGTHS])
@pytest.mark.parametrize("queries", [2, (1, 3, 0, 2)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (256, 256), (256, 64)], ids=str)
def test_queries_head_dims_and_splits(dims: tuple[int, int], queries: int | tuple[int, ...], splits: int | None) -> None:
    check(splits, dims=dims, queries=queries, scales="token and head" if splits == 3 else "head")


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(("heads", "queries"), [((12, 2), 1), ((4, 4), 3), ((32, 1), 1), ((12, 1), 2), ((6, 2), 20)], ids=str)
def test_heads_that_share_a_tile(heads: tuple[int, int], queries: int) -> None:
    check(heads=heads, queries=queries, splits=BY_LENGTHS)
    check(heads=heads, queries=queries, splits=1)


FEATURES: dict[str, dict[str, Any]] = {
    "off-by-one sinks": {"softmax_type": "off-by-one"},
    "learnable sinks": {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 3, 8)},
    "softcap": {"softcap": 3.0},
    "window": {"window_size": (40, 0), "queries": 4},
    "ALiBi": {"bias_type": "alibi"},
    "ALiBi and sinks": {"bias_type": "alibi", "softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 3, 8)},
    "bias": {"bias_type": "pre_scale_bias", "bias": torch.linspace(-2, 2, 300).view(1, 1, 1, 300)},
    "score_mod": {"score_mod": lambda score, b, h, i, j: score * 0.5 + 0.01 * (j - i) * (h + 1)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (j % 3 == 0) | (j < 4)},
}


@without_gpu
@pytest.mark.sample("splits")
@pytest.mark.parametrize("splits", [1, BY_LENGTHS])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, splits: int) -> None:
    check(splits, **FEATURES[name])


@without_gpu
@pytest.mark.parametrize("size", [1e-38, 3e4, 1e30])
def test_queries_of_any_size(size: float) -> None:
    """Numbers of bf16 that fp16 lacks."""
    case = make_case(softmax_scale=0.1 / size)
    case.arguments["q"].mul_(size)
    case.dense["q"].copy_(case.arguments["q"])
    _, out, lse = forward(case)
    wanted, budget = (exact(case, dtype) for dtype in (torch.float64, torch.float32))
    check_close("lse", lse, wanted[1], budget[1])
    check_close("out", out, wanted[0], wanted[0].to(BF16))


@pytest.mark.slow
@without_gpu
def test_a_page_has_the_bits_of_dense_rows() -> None:
    for scales in ("head", "token and head"):
        for splits in (1, BY_LENGTHS):
            _, *dense = forward(make_case(scales=scales, page_size=0), splits)
            for page_size in (1, 16, 48):
                _, *paged = forward(make_case(scales=scales, page_size=page_size), splits)
                assert all(torch.equal(got, want) for got, want in zip(paged, dense, strict=True))


def test_what_is_not_a_number_shows() -> None:
    case = make_case()
    case.arguments["q"][3, 0, 5, 7] = float("nan")
    case.arguments["q"][0, 0, 2, 9] = float("inf")
    _, out, _ = forward(case)
    is_nan = out.isnan().all(-1)
    assert is_nan[3, 0, 5]
    assert is_nan[0, 0, 2]
    assert is_nan.sum() == 2


FAULTS: dict[str, tuple[ModuleType, Fault]] = {
    "keys past the end are read": (fp8_cache_operands, assign("in_run", "in_run", within="_places", nth=1)),
    "entries past the end are read": (fp8_cache, with_argument("Keys()", "last_run", "{} + 1000", within="_attend")),
    "ids of pages are not clamped": (fp8_cache_operands, with_argument("gl.minimum(page)", 1, "2147483647")),
    "pages of the block before are taken": (
        fp8_cache,
        with_argument("find_pages(value_layout)", 0, "visible.begin", within="_sums_of_blocks", nth=1),
    ),
    "a run begins at the first key of its page": (
        fp8_cache_operands,
        with_argument("_column()", 0, "{} * 0", within="_places"),
    ),
    "edges hide nothing": (fp8_cache, assign("is_cut", "first < 0", within="_sums_of_blocks")),
    "the next keys come twice": (fp8_cache, with_argument("load_keys(first)", 0, "first", within="_sums_of_blocks")),
    "the next values come twice": (fp8_cache, with_argument("load_values(first)", 0, "first", within="_sums_of_blocks")),
    "sums are not corrected": (fp8_cache, assign("row_sum", "sums.row_sum + gl.sum(p, 2)", within="_weights")),
    "warps' sums have maxima of their own": (
        fp8_cache,
        assign("correction", "1.0 + 0.0 * sums.row_max", within="_sums_of_warps", nth=1),
    ),
    "rows of q are not scaled back": (fp8_cache, assign("qk", "qk", within="_weights", nth=1)),
    "k's factors of tokens are v's": (
        fp8_cache_operands,
        assign("factors_k", "_token_factors(args.inputs.scales.v, first, pages, keys, args, META)", nth=0),
    ),
    "sums keep the unit that they had": (fp8_cache, assign("change", "1.0 + 0.0 * inverse_power(unit)", within="_weights")),
    "sums are left in their unit": (fp8_cache, assign("unit", "1.0 + 0.0 * sums.unit.to(gl.float32)", within="_sums_of_warps")),
    "columns are in the product's order": (
        fp8_cache_operands,
        with_argument("gl.permute(parts)", 1, "[0, 1, 2, 3, 4]", within="sum_of_warps"),
    ),
}


def launch_of(case: Case, splits: int | None = None) -> Launch:
    spec, x = bound(case.arguments)
    out, lse, _ = empty_outputs(spec, x)
    with pretended_device(90, 132), recorded_launches() as launches:
        fp8_cache.fp8_cache_forward(triton_backend.to_problem(spec, x), as_bshd(out, spec.q_format), lse, splits=splits)
    return next(launch for launch in launches if "fp8_cache" in launch.kernel.__name__)


FAULTY: dict[str, dict[str, Any]] = {
    "the next keys come twice": {"page_size": 0},
    "the next values come twice": {"page_size": 0},
    "rows of q are not scaled back": {"softmax_scale": 1.0},
    "k's factors of tokens are v's": {"scales": "token and head"},
    "sums keep the unit that they had": {"scales": "token and head"},
    "sums are left in their unit": {"scales": "token and head"},
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    module, fault = FAULTS[name]
    (kernels,) = kernels_with((fp8_cache,), module, fault, tmp_path)
    case = make_case(**FAULTY.get(name, {}))
    if "page_table" in case.arguments:
        case.arguments["page_table"][3, 2] = 2147480000
    _, right_out, right_lse = forward(case, splits=2)
    found, out, lse = forward(case, 2, kernels)
    assert found or not (torch.equal(out, right_out) and torch.equal(lse, right_lse))


# Tensors of the call, and instructions of an iteration at most; head dim 256 has no registers for some 20 numbers
COMPILED: dict[str, tuple[dict[str, Any], int]] = {
    "dense": ({"page_size": 0}, 670),
    "head dim 256": ({"dims": (256, 256)}, 740),
    "pages": ({}, 740),
    "head dim 64": ({"dims": (64, 64)}, 540),
    "factors of tokens": ({"scales": "token and head"}, 1040),
    "factors of tokens, fp16": ({"scales": "token and head", "dtype": FP16}, 1070),
    "E5M2, pages of 3": ({"fp8": E5M2, "page_size": 3}, 1200),
    "softcap, sinks": ({"softcap": 3.0, "softmax_type": "off-by-one"}, 1000),
}
# In the loop, at head dim 256. From Triton 3.9 on, ptxas allocates registers in another way (--regAllocOptLevel=2).
SPILLS = 0.06 if TRITON < (3, 9) else 0.08


def mainloop(report: CompileReport) -> dict[str, int]:
    return max(report.loops, key=lambda loop: loop.get("HMMA", 0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("dense", "head dim 256", "factors of tokens") else pytest.mark.exhaustive
        )
        for name in COMPILED
    ],
)
def test_compiled(name: str) -> None:
    given, instructions = COMPILED[name]
    (report,) = compile_sound([request_for(launch_of(make_case(**given), BY_LENGTHS), 90)])
    loop = mainloop(report)
    assert set(report.matrix_instructions) == {"HMMA"}
    assert sum(loop.values()) <= instructions
    assert report.loop_spill_share <= (SPILLS if name == "head dim 256" else 0.0)
    assert report.registers <= 256  # eight warps share a multiprocessor's 65536
    assert not loop.keys() & {"BAR", "STS", "LDS", "LDSM"}  # warps exchange nothing before the end
    assert not report.warnings
    if name == "dense":  # 16 bytes a load
        assert loop["LDG"] == 2 * 32 * 128 // (32 * 16)  # k and v: keys of a warp, columns; threads, bytes


@without_gpu
def test_any_strides_of_dims_of_size_1() -> None:
    """The copy of a permuted tensor has a stride of 1 for such a dim, which is no multiple of four bytes."""
    case = make_case(page_size=0, scales="none", queries=1, heads=(4, 1), dims=(64, 64), lengths=(40, 9))
    odd = {name: case.arguments[name].as_strided((2, 40, 1, 64), (2560, 64, 1, 1)) for name in ("k", "v")}
    odd["q"] = case.arguments["q"].as_strided((2, 1, 4, 64), (256, 1, 64, 1))
    (_, *got), (_, *wanted) = (forward(Case(given, {})) for given in (case.arguments | odd, case.arguments))
    assert all(map(torch.equal, got, wanted))


def test_words_of_dims_of_size_1() -> None:
    x = torch.arange(2 * 3 * 64).to(E4M3).as_strided((2, 3, 1, 64), (192, 64, 1, 1))
    rows = fp8_cache_operands.words_of(x)
    assert (rows.stride_b, rows.stride_s, rows.stride_h) == (12, 4, 0)
    assert torch.equal(rows.ptr.view(E4M3).float(), x.float())


def test_what_it_refuses() -> None:
    def refusal(case: Case, has_max_logit: bool = False) -> str | None:
        spec, x = bound(case.arguments)
        out, lse, _ = empty_outputs(spec, x)
        with pretended_device(90, 132):
            problem = triton_backend.to_problem(spec, x)
            call = Forward(problem, as_bshd(out, spec.q_format), lse, lse if has_max_logit else None)
            return HOPPER_FP8_CACHE.unsupported(call)

    case = make_case()
    assert refusal(case) is None
    assert refusal(case, has_max_logit=True) == "it does not return max_logit"
    assert refusal(make_case(torch.float32)) == "it takes q in bf16 and fp16, not float32"
    assert refusal(make_case(dims=(96, 64))) == "it takes head dims 64, 128 and 256, not 96 and 64"
    assert "differ bitwise" in str(refusal(make_case(batch_invariant=True)))
    assert refusal(make_case(softmax_scale=0.0)) == "it does not support a softmax_scale of 0"
    wide = {name: torch.zeros(*x.shape[:-1], 136).to(E4M3)[..., :128] for name, x in case.arguments.items() if name in ("k", "v")}
    assert "not all rows of k begin at multiples of that" in str(refusal(Case(case.arguments | wide, {})))
    half = {name: case.arguments[name].to(BF16) for name in ("k", "v")}
    given = {name: x for name, x in case.arguments.items() if not name.startswith("descale")}
    assert refusal(Case(given | half, {})) == "it needs k and v in FP8 with q in 16 bits"
