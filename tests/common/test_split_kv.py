"""Keys split between programs, for few queries: right with every feature, bitwise repeatable, and only if the split pays.

Without a GPU the portable kernel is interpreted, and the sm_90 kernel emulated; with one both run compiled.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import split_kv as splits
from flexattn.kernels_triton.common.crossovers import SPLIT_KEYS, SPLIT_MOST
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD, HopperTile
from flexattn.kernels_triton.gluon import forward_launch, forward_rows, forward_work
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.portable import forward as forward_kernels
from flexattn.kernels_triton.runtime.device import Tile, capability_of, pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs, reference_attention, reference_gradients
from tests.support.compiled_kernels import compile_sound
from tests.support.fp8_calls import make_fp8_call
from tests.support.gluon_calls import HARMLESS, without_gpu
from tests.support.inject import Fault, assign, copy_with, drop, kernels_with, with_argument

LEAST_KEYS, MOST_QUERIES = 1024, 1024  # from the rules for splits
GPU = torch.cuda.is_available()
HAS_HOPPER = GPU and capability_of(torch.device("cuda")) == 90
FAMILIES = ("never", "always") if HAS_HOPPER else ("never",)
LONGER = 7 if GPU else 1  # because tiles are larger there
BF16 = torch.bfloat16


def split_in(count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keys are split in so many parts from here on; the list counts the times that parts were combined."""
    combined: list[int] = []
    for module in (forward_kernels, forward_launch):
        monkeypatch.setattr(module, "number_of_splits", lambda *_: count)
        monkeypatch.setattr(
            module, "combine_parts", lambda *given: (combined.append(given[1].out.shape[0]), splits.combine_parts(*given))
        )
    return combined


def check(spec: AttentionSpec, x: Operands, results: tuple[Tensor, ...]) -> None:
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    names = ("out", "lse", "max_logit") if spec.return_max_logit else ("out", "lse")
    for name, got, want, same_dtype in zip(names, results, exact, budget, strict=False):
        check_close(name, got, want, same_dtype)


NUMBERS = torch.Generator().manual_seed(0)
SINKS = torch.tensor([-3.0, 0.0, 2.5, float("-inf")])
SLOPES = torch.rand(2, 4, generator=NUMBERS)
BIAS = torch.randn(1, 4, 6, 300 * LONGER, generator=NUMBERS)
TABLE = torch.randn(4, 40, generator=NUMBERS)
RAGGED = {"gap": 2, "lengths_q": [5, 0, 30, 3], "lengths_kv": [300 * LONGER, 20, 33, 0]}
FEW = {"lengths_q": [3] * 2, "lengths_kv": [300 * LONGER] * 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({}, FEW | {"lengths_q": [1] * 2, "num_heads": 8, "num_heads_kv": 2, "dtype": BF16}),
    "rows that see nothing": ({"attn_mask_type": "causal_bottom_right"}, {"lengths_q": [64], "lengths_kv": [50]}),
    "causal": ({"attn_mask_type": "causal"}, FEW | {"lengths_q": [40] * 2, "dtype": torch.float16}),
    "window of fewer blocks than splits": ({"window_size": (20, 30), "bottom_right_diagonal": True}, FEW | {"dtype": BF16}),
    "window, both edges cut": ({"window_size": (150, 9), "bottom_right_diagonal": True}, FEW),
    "thd, learnable sinks": (
        {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "learnable", "softmax_offset": SINKS},
        RAGGED | {"qkv_format": "thd", "dtype": BF16},
    ),
    "padded, sink": (
        {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one", "window_size": (250, 0)},
        RAGGED | {"qkv_format": "sbhd", "padding": True},
    ),
    "ALiBi, mixed formats": (
        {"attn_mask_type": "padding", "bias_type": "alibi", "alibi_slopes": SLOPES},
        {"qkv_format": "bhsd_2thd", "padding": True, "lengths_q": [7, 2], "lengths_kv": [90, 330 * LONGER], "dtype": BF16},
    ),
    "bias, softcap, dropout": (
        {"bias_type": "post_scale_bias", "bias": BIAS, "softcap": 4.0, "dropout_p": 0.2, "rng_state": torch.tensor([3, 4])},
        FEW | {"lengths_q": [6] * 2, "dtype": BF16, "outliers": True},
    ),
    "strided, uneven head dims": ({"softmax_scale": 0.3}, FEW | {"strided": True, "head_dim_qk": 40, "head_dim_v": 72}),
    "head dims 192 and 128": ({}, FEW | {"head_dim_qk": 192, "head_dim_v": 128, "dtype": BF16}),
    "head dim 96": ({}, FEW | {"head_dim_qk": 96, "head_dim_v": 96, "dtype": torch.float16, "num_heads": 6}),
    "head dim 256": ({"attn_mask_type": "causal_bottom_right"}, FEW | {"head_dim_qk": 256, "head_dim_v": 256, "dtype": BF16}),
}


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


@pytest.mark.sample
@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_features(name: str, hopper: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    call, inputs = CASES[name]
    spec, x = make_call(make_inputs(device=device, **inputs), **on(device, call))
    combined = split_in(5, monkeypatch)
    results = triton_backend.forward(spec, x)
    check(spec, x, results)
    for again, once in zip(triton_backend.forward(spec, x), results, strict=True):
        assert torch.equal(again, once)
    assert combined == [5, 5]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("has_blocks", [False, True])
def test_mods(has_blocks: bool, hopper: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each split of a block mask has a share of the masked blocks, and one of the full ones."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    queries = 128 if GPU and has_blocks else 40
    if has_blocks:
        monkeypatch.setattr(mask_blocks, "BLOCK", queries if GPU else 32)
        monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
    table = TABLE.to(device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * 1.5 + table[h, j % 40]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < 80) | (j > 150 + 20 * i)

    inputs = {"lengths_q": [queries], "lengths_kv": [330 * LONGER], "head_dim_qk": 64, "head_dim_v": 64, "dtype": BF16}
    spec, x = make_call(make_inputs(device=device, **inputs), mods=trace_mods(score_mod, mask_mod), window_size=(300 * LONGER, -1))
    given = mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "forward")
    assert (given.block_mask is not None) == has_blocks
    combined = split_in(3, monkeypatch)
    check(spec, x, triton_backend.forward(spec, x))
    assert combined == [3]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_fp8(granularity: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel splits in FP8 too: partial results are in fp32."""
    if GPU and capability_of(torch.device("cuda")) < 89:
        pytest.skip("FP8 matrix instructions begin with compute capability 8.9")
    given = make_inputs("thd", lengths_q=[3, 20], lengths_kv=[300 * LONGER, 90], dtype=BF16, device=device)
    spec, x, *_ = make_fp8_call(given, {"granularity": granularity}, attn_mask_type="padding_causal_bottom_right")
    whole = triton_backend.forward(spec, x)
    combined = split_in(4, monkeypatch)
    parts = triton_backend.forward(spec, x)
    assert combined == [4]
    exact = reference_attention(spec, x)
    for got, once, want in zip(parts[:2], whole[:2], exact[:2], strict=True):
        errors = [(t.double() - want.double()).nan_to_num(neginf=0.0, posinf=0.0).abs().max() for t in (got, once)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3


@pytest.mark.slow
def test_gradients_of_a_split_forward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(3, monkeypatch)
    inputs = make_inputs(lengths_q=[20], lengths_kv=[300], device=device)
    leaves = [getattr(inputs, name).requires_grad_() for name in "qkv"]
    out, lse = flexattn.attention(*leaves, attn_mask_type="causal_bottom_right", backend="triton", return_lse=True)
    dout, dlse = torch.sin(out.detach()), torch.cos(lse.detach())
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    spec, x = make_call(inputs, attn_mask_type="causal_bottom_right")
    exact, budget = (reference_gradients(spec, x, dout, dlse, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    for name, gradient, want, same_dtype in zip(("dq", "dk", "dv"), got, exact[:3], budget[:3], strict=True):
        check_close(name, gradient, want, same_dtype, factor=GRADIENT_FACTOR)


def forward_emulated(seed: int, module: Any, call: dict[str, Any], tile: HopperTile | None = None, **inputs: Any) -> None:
    """The sm_90 kernel in the emulator, right and clean, with keys in three parts."""
    given = make_inputs(**{"dtype": BF16, "head_dim_qk": 128, "head_dim_v": 128, "num_heads": 4, "num_heads_kv": 2, **inputs})
    spec, x = make_call(given, **call)
    problem = mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "forward")
    out, lse, max_logit = empty_outputs(spec._replace(return_max_logit=True), x)
    with emulated(seed, module) as reports:
        module.hopper_forward(
            problem, as_bshd(out, spec.q_format), lse, max_logit if spec.return_max_logit else None, tile, splits=3
        )
    [report] = reports.values()
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    check(spec, x, (out, lse, max_logit))


EMULATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({}, {"lengths_q": [1] * 2, "lengths_kv": [500] * 2, "num_heads": 8}),
    "two tiles of queries": ({"attn_mask_type": "causal_bottom_right"}, {"lengths_q": [150], "lengths_kv": [500], "num_heads": 2}),
    "thd, learnable sinks": (
        {
            "attn_mask_type": "padding_causal_bottom_right",
            "softmax_type": "learnable",
            "softmax_offset": SINKS,
            "return_max_logit": False,
        },
        {"qkv_format": "thd", "gap": 3, "lengths_q": [9, 0, 64, 1], "lengths_kv": [600, 40, 50, 0]},
    ),
    "window, head dims 192 and 128": (
        {"attn_mask_type": "padding", "window_size": (200, 20), "softmax_type": "off-by-one", "bottom_right_diagonal": True},
        {"padding": True, "qkv_format": "sbhd", "lengths_q": [9, 70], "lengths_kv": [600, 90], "head_dim_qk": 192},
    ),
    "softcap, dropout, head dim 256": (
        {"softcap": 4.0, "dropout_p": 0.2, "rng_state": torch.tensor([3, 4]), "attn_mask_type": "causal_bottom_right"},
        {"lengths_q": [33], "lengths_kv": [450], "head_dim_qk": 256, "head_dim_v": 256},
    ),
    "ALiBi, head dim 40 and 72, one head a tile": (
        {"bias_type": "alibi", "alibi_slopes": SLOPES[0], "attn_mask_type": "causal"},
        {"lengths_q": [128], "lengths_kv": [500], "head_dim_qk": 40, "head_dim_v": 72, "dtype": torch.float16},
    ),
}


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", EMULATED)
def test_features_emulated(name: str) -> None:
    call, inputs = EMULATED[name]
    forward_emulated(list(EMULATED).index(name) + 3, hopper_forward, call, **inputs)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(
    "tile",
    [HOPPER_FORWARD["d64_long"], HOPPER_FORWARD["d64_few_rows"], HOPPER_FORWARD["d256"]],
    ids=lambda tile: f"{tile.head_dim_qk}: {tile.block_m}",
)
def test_rows_emulated(tile: HopperTile) -> None:
    """Consumers without queries, and consumers that skip blocks that only others see."""
    call = {"attn_mask_type": "padding", "window_size": (90, 0), "softmax_type": "off-by-one", "bottom_right_diagonal": True}
    inputs = {"lengths_q": [100, 3], "lengths_kv": [450, 300], "head_dim_qk": tile.head_dim_qk, "head_dim_v": tile.head_dim_v}
    forward_emulated(7, hopper_forward, call, tile, padding=True, **inputs)


@pytest.mark.slow
@without_gpu
def test_block_mask_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", 128)
    monkeypatch.setattr(mask_blocks, "SHORTEST", 1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < 200) | (j > 500 + i)

    forward_emulated(5, hopper_forward, {"mods": trace_mods(None, mask_mod)}, lengths_q=[40], lengths_kv=[1100])


def problem_of(sq: int, skv: int, heads: int = 32, dim: int = 128, dtype: torch.dtype = BF16, **more: Any) -> Problem:
    q, k = (torch.empty(1, length, h, dim, dtype=dtype, device="meta") for length, h in ((sq, heads), (skv, 8)))
    return Problem(q, k, k, **{"softmax_scale": 0.1, **more})


@pytest.mark.parametrize(
    ("problem", "tiles", "count"),
    [
        (problem_of(1, 65536), 8, 16),  # 128 programs
        (problem_of(1, 65536), 66, 2),
        (problem_of(1, 65536), 67, 1),  # 134 would be more than fit
        (problem_of(1, 65536), 1, 128),
        (problem_of(1, 4096), 1, 4096 // SPLIT_KEYS),
        (problem_of(1, LEAST_KEYS), 8, LEAST_KEYS // SPLIT_KEYS),
        (problem_of(1, LEAST_KEYS - 1), 8, 1),
        (problem_of(MOST_QUERIES, 65536), 8, 16),
        (problem_of(MOST_QUERIES + 1, 65536), 8, 1),
        (problem_of(512, 4096, 8), 32, 4),
        (problem_of(512, 2048, 8), 32, 1),  # combining 4,096 rows takes longer than passing 1,536 keys
        (problem_of(1, 1024), 66, 1),
        (problem_of(16, 65536, window_right=0), 8, 1),  # on the top left diagonal they see 16 keys
        (problem_of(16, 65536, window_right=0, bottom_right=True), 8, 16),
        (problem_of(1, 65536, window_left=2047, window_right=0, bottom_right=True), 8, 16),
    ],
)
def test_how_many_splits(problem: Problem, tiles: int, count: int) -> None:
    found = splits.splits_of(problem, tiles, programs=132)
    assert found.count == splits.number_of_splits(problem, tiles, programs=132) == count
    assert found.count <= SPLIT_MOST
    assert bool(found.why) == (problem.longest_q <= MOST_QUERIES)


def test_what_is_launched() -> None:
    """Both families split a decoded token's keys by shapes alone, and launch nothing else if there is no split."""
    for keys, is_split in ((65536, True), (600, False)):
        problem = problem_of(1, keys)
        for forward, programs in ((forward_kernels.attention_forward, (8, 264)), (hopper_forward.hopper_forward, (8, 128))):
            with pretended_device(90, 132), recorded_launches() as launches:
                forward(problem, torch.empty_like(problem.q), problem.q.new_empty((1, 32, 1), dtype=torch.float32))
            assert [launch.programs for launch in launches] == ([programs[1], 32] if is_split else [programs[0]])


def launches_of(forward: Any, sm: int, dims: tuple[int, int], **more: Any) -> list[Launch]:
    problem = problem_of(4, 4096, dim=dims[0], **more)
    problem = dataclasses.replace(problem, v=problem.k[..., : dims[1]].contiguous())
    out, lse = (
        problem.q.new_empty(shape, dtype=dtype) for shape, dtype in (((1, 4, 32, dims[1]), BF16), ((1, 32, 4), torch.float32))
    )
    with pretended_device(sm, 132), recorded_launches() as launches:
        forward(problem, out, lse, splits=5)
    return launches


BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}


@pytest.mark.slow
def test_compiled() -> None:
    """No spills in the loops, no wgmma serialised, and parts written and read several numbers at a time."""
    launches = [(90, launch) for dim in (128, 256) for launch in launches_of(hopper_forward.hopper_forward, 90, (dim, dim))]
    launches += [(sm, launches_of(forward_kernels.attention_forward, sm, (128, 128), **BOTTOM_RIGHT)[0]) for sm in (80, 90)]
    reports = compile_sound([request_for(launch, sm) for sm, launch in launches])
    for (sm, launch), report in zip(launches, reports, strict=True):
        assert report.loop_spill_share <= 0.0, f"{launch.kernel.__name__}: {report}"
        assert report.idle_barriers == 0, f"{launch.kernel.__name__}: {report}"
        assert not report.warnings, f"{launch.kernel.__name__}: {report.warnings}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]
        if "combine" not in launch.kernel.__name__:
            is_wide = sm == 90 and launch.tile.block_m >= 64
            assert set(report.matrix_instructions) == {"HGMMA" if is_wide else "HMMA"}


@pytest.mark.slow
def test_the_combining_kernel_compiled() -> None:
    """No tile spills, and threads load several numbers of a part at a time."""
    launches = []
    for queries in (1, 4096):
        for dim in (64, 128, 256, 512):
            q, lse = torch.empty(1, queries, 32, dim, dtype=BF16, device="meta"), torch.empty(1, 32, queries, device="meta")
            parts = splits.Parts.empty(5, lse, dim, True)
            with pretended_device(90, 132), recorded_launches() as recorded:
                splits.combine_parts(Problem(q, q, q, 1.0), parts, (q, lse), None, splits.PlannedTile(1, 1, 1, 1, True))
            launches += recorded
    assert len({launch.tile for launch in launches}) > 2
    for launch, report in zip(launches, compile_sound([request_for(launch, 90) for launch in launches]), strict=True):
        assert report.spill_instructions == 0, f"{launch.tile}: {report}"
        # single numbers of 16 parts of 256 columns would take 128
        assert report.instructions["LDG"] <= 80, f"{launch.tile}: {report}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_every_row_compiled(sm: int) -> None:
    launches = []
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for band in ({}, BOTTOM_RIGHT, BOTTOM_RIGHT | {"window_left": 900, "has_sink": True}):
            launches += launches_of(forward_kernels.attention_forward, sm, dims, **band)
            if sm == 90:
                launches += launches_of(hopper_forward.hopper_forward, sm, dims, **band)
    for launch, report in zip(launches, compile_sound([request_for(launch, sm) for launch in launches]), strict=True):
        # decoding waits for memory; for 10.0, without a timed tile, the compiler spills some
        assert report.loop_spill_share <= (0.04 if sm == 100 else 0.01), f"{launch.kernel.__name__}: {report}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]
        assert not report.warnings, f"{launch.kernel.__name__}: {report.warnings}"


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("hopper", FAMILIES)
def test_in_a_graph(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the partial results is the graph's own."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    q, k, v = (torch.randn(1, length, h, 128, dtype=BF16, device="cuda") for length, h in ((1, 32), (8000, 8), (8000, 8)))
    wanted = flexattn.attention(q, k, v, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.attention(q, k, v, backend="triton")
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("tile", [Tile(1, 16, 1, 1), Tile(8, 4, 4, 1), Tile(4, 2, 1, 1)], ids=str)
def test_results_depend_on_no_tile_of_the_combining_kernel(tile: Tile, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise of batch invariance needs this, because the number of rows selects the tile."""
    inputs = {"lengths_q": [3, 11, 0, 7], "lengths_kv": [90, 300, 5, 0], "gap": 2, "dtype": BF16, "device": device}
    spec, x = make_call(make_inputs("thd", **inputs), softmax_type="off-by-one")
    split_in(5, monkeypatch)
    wanted = triton_backend.forward(spec, x)
    monkeypatch.setattr(splits, "_combining_tile", lambda *_: tile)
    for got, want in zip(triton_backend.forward(spec, x), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("longest", "launches"), [(32, 1), (2048, 2)])
def test_rows_that_are_combined_are_no_more_than_twice_the_rows(longest: int, launches: int) -> None:
    """This holds for any longest sequence of a packed batch. If its padding needs more rows, another kernel handles it."""
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4224, 4, 128), (130, 4096, 1, 128)))
    lengths = {"cu_seqlens_q": torch.empty(131, dtype=torch.int32, device="meta"), "max_seqlen_q": longest}
    problem = Problem(q, k, k, softmax_scale=1.0, seqused_kv=torch.empty(130, dtype=torch.int32, device="meta"), **lengths)
    lse = torch.empty(4, 4224, device="meta")
    with pretended_device(90, 132), recorded_launches() as recorded:
        splits.combine_parts(problem, splits.Parts.empty(3, lse, 128, False), (q, lse), None, splits.PlannedTile(1, 1, 1, 1, True))
    assert len(recorded) == launches
    assert (recorded[0].programs - 1) * recorded[0].tile.block_m < 2 * lse.numel()


FAULTS_IN_GLUON: dict[str, tuple[ModuleType, Fault]] = {
    "every split has the sink": (forward_rows, drop("gl.where(tile.split == 0)")),
    "all splits take the first one's keys": (forward_work, with_argument("blocks_of_split()", 0, "0")),
    "parts lie in each other's place": (forward_rows, with_argument("part_row(tile.split)", 0, "0")),
    "work is handed out once for a tile": (
        forward_work,
        assign("amount", "amount", within="num_tiles_of_programs", nth=-1),
    ),
    "queries past the end leave a part too": (
        forward_rows,
        with_argument("gl.store(is_query)", "mask", "None", within="_store_part"),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS_IN_GLUON)
def test_injected_fault_is_found_by_the_emulator(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((hopper_forward,), *FAULTS_IN_GLUON[name], tmp_path)
    call, inputs = EMULATED["thd, learnable sinks"]
    for seed in (0, 1, 5):  # eager, lazy, random
        with pytest.raises(AssertionError):
            forward_emulated(seed, kernels, call, **inputs)


FAULTS = {
    "every split has the sink": drop("tl.where(tile.split == 0)"),
    "every split has the first one's keys": with_argument("range_of_split()", 1, "0"),
    "parts lie in each other's place": assign("lse_ptr", "0", nth=-1),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    faulty = copy_with(forward_kernels, FAULTS[name], tmp_path)
    call, inputs = CASES["thd, learnable sinks"]
    spec, x = make_call(make_inputs(**inputs), **call | {"window_size": (250, 0)})
    problem = triton_backend.to_problem(spec, x)
    for module in (forward_kernels, faulty):
        out, lse = torch.empty_like(x.q), torch.empty(spec.num_heads, x.q.shape[0])
        module.attention_forward(problem, out, lse, splits=3)
        if module is faulty:
            with pytest.raises(AssertionError):
                check(spec._replace(return_max_logit=False), x, (out, lse))
        else:
            check(spec._replace(return_max_logit=False), x, (out, lse))
