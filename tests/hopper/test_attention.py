"""The Gluon kernels for sm_90: compiled ahead of time and checked by gates anywhere, run against the oracle on such a GPU.

`FLEXATTN_HOPPER=always pytest tests/portable/test_attention.py tests/api/test_support.py` runs every other test of the Triton
backend with them.
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import Gradients
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common import preprocess as statistics
from flexattn.kernels_triton.common import tile_schedule as tile_schedule_module
from flexattn.kernels_triton.common.facts import facts_of
from flexattn.kernels_triton.common.problem import Backward, BlockLists, Problem
from flexattn.kernels_triton.common.tile_schedule import tile_schedule, zero_padding
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD, HOPPER_FUSED, HopperTile, select_hopper_backward_tile
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.gluon import dq_conversion, forward_launch, work_order
from flexattn.kernels_triton.gluon.descriptors import batch_steps, batch_steps_of, descriptor_error
from flexattn.kernels_triton.gluon.work_order import query_heads_per_l2_section, section_of_one_size
from flexattn.kernels_triton.hopper import backward as backward_kernels
from flexattn.kernels_triton.hopper import backward_fused as fused_kernels
from flexattn.kernels_triton.hopper import backward_fused_192 as fused_192_kernels
from flexattn.kernels_triton.hopper import backward_launch, conditions
from flexattn.kernels_triton.hopper import forward as forward_kernels
from flexattn.kernels_triton.runtime.device import capability_of, pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.conftest import FreshPython
from tests.support.compiled_kernels import TRITON, check_loops, compile_sound

HAS_HOPPER = torch.cuda.is_available() and capability_of(torch.device("cuda")) == 90
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="no GPU of compute capability 9.0; the compiled code is checked above")


def cumulative(lengths: list[int], gap: int = 0) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(n + gap for n in lengths)], dtype=torch.int32)


FEATURES: dict[str, dict[str, Any]] = {
    "open": {},
    "causal": {"window_right": 0},
    "softcap": {"window_right": 0, "softcap": 30.0},
    "window": {"window_left": 127, "window_right": 0},
    "everything": {"window_left": 999, "window_right": 0, "has_sink": True, "softmax_offset": torch.zeros(4), "bottom_right": True},
}


def launches_of(row: HopperTile, features: str, dtype: torch.dtype = torch.bfloat16, others: bool = False) -> dict[str, Launch]:
    """The kernels' launches by name, as on the device: the forward's with this row, the others' with its head dims.

    If `others` is set, the launches of the other kernels instead.
    """
    head_dims = d_qk, d_v = row.head_dim_qk, row.head_dim_v
    is_ragged = features == "everything"
    shape = (256, 4) if is_ragged else (2, 256, 4)  # queries for each consumer
    q, k = (torch.zeros(*shape, d_qk, dtype=dtype) for _ in "qk")
    v, out = (torch.zeros(*shape, d_v, dtype=dtype) for _ in "vo")
    lse = torch.zeros(4, 256) if is_ragged else torch.zeros(2, 4, 256)
    offsets = cumulative([128, 128])
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), offsets)
    lengths |= {"max_seqlen_q": 128, "max_seqlen_kv": 128}
    problem = Problem(q, k, v, softmax_scale=0.1, **FEATURES[features], **(lengths if is_ragged else {}))
    backward = Backward(problem, out, lse, out, None, *(torch.zeros_like(t) for t in (q, k, v)))
    with recorded_launches() as launches:
        forward_kernels.hopper_forward(problem, out, lse, tile=row)
        backward_kernels.hopper_backward(backward)
        if max(head_dims) <= 128:
            name = crossovers.fastest_tile("sm_90 fused", facts_of(problem, tokens=2048, packed=True))
            for is_persistent, converts in ((False, False), (True, False), (True, True)):
                tile = dataclasses.replace(HOPPER_FUSED[name], is_persistent=is_persistent, converts=converts)
                fused_kernels.fused_backward(backward, tile)
    if others:
        return {x.kernel.__name__: x for x in launches if "hopper" not in x.kernel.__name__}
    names = [x.kernel.__name__ for x in launches]  # _attn_fwd_hopper_kernel, _attn_bwd_dq_hopper_kernel, ...
    short = [name.removesuffix("_hopper_kernel").split("_", 3)[-1] for name in names]
    short = [FUSED_VARIANTS[short[:n].count(s)] if s == "fused" else s for n, s in enumerate(short)]
    return {s: x for s, name, x in zip(short, names, launches, strict=True) if "hopper" in name}


# In the order in which `launches_of` launches them
FUSED_VARIANTS = ("fused", "persistent", "converting")

# Instructions in one iteration of the main loop, by kernel, row and features, as compiled when the rates were measured. The
# forward's loop has only complete blocks. In a narrow window, with few complete ones, its blocks may be cut.
LOOP_INSTRUCTIONS: dict[tuple[str, int | str, str], int] = {
    ("fwd", 64, "open"): 424,
    ("fwd", 64, "causal"): 423,
    ("dq", 64, "open"): 504,
    ("dq", 64, "causal"): 536,
    ("dq", 64, "everything"): 666,
    ("dkdv", 64, "open"): 262,
    ("dkdv", 64, "causal"): 350,
    ("dkdv", 64, "everything"): 416,
    ("fused", 64, "open"): 665,
    ("fused", 64, "causal"): 760,
    ("fused", 64, "everything"): 894,
    ("fused", 64, "softcap"): 845,
    ("persistent", 64, "open"): 676,
    ("persistent", 64, "causal"): 770,
    ("persistent", 64, "everything"): 904,
    ("persistent", 64, "softcap"): 855,
    ("persistent", 128, "open"): 463,
    ("persistent", 128, "causal"): 508,
    ("persistent", 128, "everything"): 575,
    ("converting", 128, "open"): 468,
    ("fwd", "48", "open"): 440,
    ("fwd", "48", "causal"): 440,
    ("fwd", "64: 256x64", "open"): 272,
    ("fwd", "64: 256x64", "causal"): 272,
    ("fwd", "64: 256x64", "everything"): 274,
    ("fwd", "64: narrow window", "window"): 423,
    ("fwd", "64: 256x64", "window"): 424,
    ("fwd", "64: 128x128", "open"): 415,
    ("fwd", "64: 128x128", "causal"): 415,
    ("fwd", "64: 128x128", "everything"): 417,
    ("fwd", "64: few rows", "open"): 411,
    ("fwd", "64: few rows", "causal"): 411,
    ("fwd", "64: few rows", "everything"): 412,
    ("fwd", 128, "open"): 455,
    ("fwd", 128, "causal"): 461,
    ("fwd", 128, "everything"): 461,
    ("fwd", 128, "window"): 769,
    ("fwd", "128: narrow window", "window"): 465,
    ("fwd", "128: 192x64", "open"): 309,
    ("fwd", "128: 192x64", "window"): 465,
    ("dq", 128, "open"): 523,
    ("dq", 128, "causal"): 554,
    ("dq", 128, "everything"): 684,
    ("dkdv", 128, "open"): 295,
    ("dkdv", 128, "causal"): 384,
    ("dkdv", 128, "everything"): 450,
    ("fused", 128, "open"): 450,
    ("fused", 128, "causal"): 509,
    ("fused", 128, "everything"): 575,
    ("fwd", "128: 128x128", "causal"): 457,
    ("fwd", 192, "open"): 490,
    ("fwd", 192, "causal"): 495,
    ("fwd", 192, "everything"): 494,
    ("fwd", "192: narrow window", "window"): 495,
    ("fwd", "192: 192x64", "causal"): 349,
    ("fwd", "192: 192x64", "window"): 496,
    ("dq", 192, "open"): 352,
    ("dq", 192, "causal"): 367,
    ("dq", 192, "everything"): 432,
    ("dkdv", 192, "open"): 228,
    ("dkdv", 192, "causal"): 275,
    ("dkdv", 192, "everything"): 309,
    ("fwd", 256, "open"): 429,
    ("fwd", 256, "causal"): 430,
    ("fwd", 256, "everything"): 428,
    ("fwd", 256, "window"): 588,
    ("dq", 256, "open"): 371,
    ("dq", 256, "causal"): 386,
    ("dq", 256, "everything"): 454,
    ("dkdv", 256, "open"): 337,
    ("dkdv", 256, "causal"): 384,
    ("dkdv", 256, "everything"): 416,
}
SLACK = 0.05
# Instructions of 16 bytes: with more than 128 KiB of them forwards were slower by 4 to 22 % (bench/results/window_loops_h200.json).
CODE = 2**17 // 16
# Reloads of both warpgroups' addresses in shared memory, with Triton 3.7. The allocation of ptxas depends on line information too.
# The PTX of "converting" has 1 reload in the loop and 68 bytes of spills, or 3 and 48. Without line information it has 3.
LOOP_SPILLS = {("fused", 64, "everything"): 3, ("persistent", 64, "open"): 4, ("persistent", 64, "causal"): 4}
LOOP_SPILLS |= {("persistent", 64, "everything"): 11, ("converting", 128, "open"): 3}
# Later Tritons than the one of the rates' measurements have other compilers:
if TRITON >= (3, 8):  # each column of a block is compared with the end: 28 ISETP and 14 VIADD more, and a spill
    LOOP_INSTRUCTIONS["converting", 128, "open"] = 512
    LOOP_SPILLS["converting", 128, "open"] = 2
if TRITON >= (3, 9):
    # Triton asks ptxas for another allocation of registers (--regAllocOptLevel=2), which spills more
    LOOP_SPILLS |= {("persistent", 128, "causal"): 4, ("fused", 64, "everything"): 17, ("converting", 128, "open"): 10}
SOME = [case for case in LOOP_INSTRUCTIONS if case[1:] in ((128, "causal"), (256, "everything"), ("64: 256x64", "everything"))]
SOME.sort(key=lambda case: case[1] != 128)  # one of each kernel first
SOME += [("fused", 64, "everything"), ("converting", 128, "open"), ("fwd", "64: narrow window", "window")]


# Names of the forward's tiles, by the row of a case
TILES: dict[int | str, str] = {
    "48": "d48_long",
    64: "d64_long",
    "64: 256x64": "d64_short",
    "64: narrow window": "d64_narrow",
    "64: 128x128": "d64_two_consumers",
    "64: few rows": "d64_few_rows",
    128: "d128_long",
    "128: 128x128": "d128",
    "128: narrow window": "d128_narrow",
    "128: 192x64": "d128_three_consumers",
    192: "d192",
    "192: narrow window": "d192_narrow",
    "192: 192x64": "d192_three_consumers",
    256: "d256",
}


def check_compiled(cases: list[tuple[str, int | str, str]], dtype: torch.dtype = torch.bfloat16) -> None:
    tiles = [HOPPER_FORWARD[TILES[row]] for _, row, _ in cases]
    launches = (launches_of(tile, features, dtype) for tile, (_, _, features) in zip(tiles, cases, strict=True))
    requests = [request_for(launch[kernel], 90) for launch, (kernel, _, _) in zip(launches, cases, strict=True)]
    for case, report in zip(cases, compile_sound(requests), strict=True):
        spills = [loop.get("STL", 0) + loop.get("LDL", 0) for loop in report.loops if "HGMMA" in loop]
        assert sum(spills) <= LOOP_SPILLS.get(case, 0), f"{case}: {spills}, {report}"
        assert report.idle_barriers == 0, f"{case}: {report.idle_barriers} barriers that nothing uses"
        assert not report.warnings, f"{case}: {report.warnings}"  # C7510 and the like: ptxas serialised wgmma
        if case[0] in FUSED_VARIANTS:
            assert report.exposed_exponentials == 0, f"{case}: exp2 is behind the wait for the product that it should run under"
        assert set(report.matrix_instructions) == {"HGMMA"}, f"{case}: {report.matrix_instructions}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90], f"{case}: {report.shared_bytes}"
        assert {"UTMALDG", "UTMASTG"} <= report.instructions.keys(), case
        assert ("UTMAREDG" in report.instructions) == (case[0] in FUSED_VARIANTS), case
        loops = [loop for loop in report.loops if "HGMMA" in loop]
        consumers = HOPPER_FORWARD[TILES[case[1]]].block_m // 64 if case[0] == "fwd" else 2
        code = sum(report.instructions.values())
        assert code <= CODE, f"{case}: {code} instructions"
        expected = LOOP_INSTRUCTIONS[case]
        assert len(loops) == consumers, f"{case}: {loops}, not {expected} for each consumer"
        check_loops(case, loops, expected, SLACK)


@pytest.mark.parametrize("cases", [SOME[:1], pytest.param(SOME[1:], marks=pytest.mark.slow)], ids=["one", "more"])
def test_compiled(cases: list[tuple[str, int | str, str]]) -> None:
    check_compiled(cases)


@pytest.mark.slow
def test_kernels_launched_beside_them_compile_without_spills() -> None:
    launches = launches_of(HOPPER_FORWARD["d128_long"], "everything", others=True)
    assert {"_tile_schedule_kernel", "_padding_kernel", "_attn_bwd_dq_conversion_kernel"} < launches.keys()
    for name, report in zip(launches, compile_sound([request_for(x, 90) for x in launches.values()]), strict=True):
        assert report.spill_store_bytes == report.stack_bytes == 0, f"{name}: {report}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_row_compiled(dtype: torch.dtype) -> None:
    check_compiled(list(LOOP_INSTRUCTIONS), dtype)


def problem_of(shape: tuple[int, ...] = (2, 1024, 16, 128), dtype: torch.dtype = torch.bfloat16, **more: Any) -> Problem:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return Problem(x, x, x, **{"softmax_scale": 0.1, **more})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
        ({"shape": (2, 0, 16, 128)}, "nothing to load"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_calls_left_to_the_portable_kernel_have_a_reason(more: dict[str, Any], reason: str) -> None:
    problem = problem_of(**more)
    assert reason in str(conditions.forward_unsupported(problem, problem.q))
    assert conditions.forward_unsupported(problem_of(), problem_of().q) is None


def test_the_copy_engine_takes_tensors_by_their_strides() -> None:
    x = torch.empty(4, 6, 2, 64, dtype=torch.bfloat16)
    assert batch_steps(x) == (6, 0)  # bshd: in tokens
    assert batch_steps(x.permute(1, 0, 2, 3)) == (0, 2)  # sbhd: in heads
    bhsd = torch.empty(4, 2, 6, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert batch_steps(bhsd) == (12, 0)  # in rows of 64: two heads of 6
    assert batch_steps(x[0]) == batch_steps(x[:1]) == (0, 0)
    one_head = torch.empty(6, 4, 1, 64, dtype=torch.bfloat16).transpose(0, 1)
    assert batch_steps(one_head) == (0, 1)  # sbhd: the batch elements are the heads
    assert descriptor_error("q", x) is descriptor_error("q", one_head) is None
    assert "stride of 0" in str(descriptor_error("q", x[:, :, :1].expand(4, 6, 2, 64)))
    assert "stride of 68" in str(descriptor_error("q", torch.empty(4, 6, 2, 68, dtype=torch.bfloat16)[..., :64]))
    assert "16 bytes" in str(descriptor_error("q", torch.empty(9, 8, dtype=torch.bfloat16).view(-1)[1:65].view(1, 1, 8, 8)))
    uneven = torch.empty(4 * 800, dtype=torch.bfloat16).as_strided((4, 6, 2, 64), (776, 128, 64, 1))
    assert "batch stride" in str(descriptor_error("q", uneven))
    with pytest.raises(ValueError, match="batch stride must be a multiple"):
        batch_steps_of(x, uneven)


def slower(family: str, problem: Problem) -> str | None:
    """Returns why another family is faster for a problem, on an H200."""
    with pretended_device(90, 132):
        return crossovers.slower(family, conditions.forward_facts(problem) if family == "sm_90" else facts_of(problem))


def test_only_what_was_measured_to_be_faster_leaves_the_portable_kernel() -> None:
    families = {"forward": "sm_90", "backward": "sm_90 two-kernel", "fused": "sm_90 fused"}

    def faster(kernel: str, problem: Problem) -> bool:
        return slower(families[kernel], problem) is None

    assert faster("forward", problem_of((16, 1024, 16, 128)))
    assert faster("forward", problem_of((16, 1024, 16, 128), window_right=0))
    assert faster("forward", problem_of((1, 1024, 16, 128), window_right=0))
    assert not faster("forward", problem_of((1, 192, 2, 128)))  # the work is too small
    assert faster("forward", problem_of((64, 256, 16, 128)))
    assert not faster("forward", problem_of((16, 128, 16, 128)))
    assert faster("forward", problem_of((32, 201, 16, 128)))
    assert faster("forward", problem_of((32, 201, 16, 128), window_right=0))
    assert faster("forward", problem_of((64, 256, 16, 256)))
    assert faster("forward", problem_of((8, 2048, 32, 64)))
    for length, band, rows in (
        (2048, {}, 192),
        (1024, {}, 256),
        (2048, {"window_right": 0}, 192),
        (512, {"window_right": 0}, 256),
    ):
        assert faster("forward", problem_of((16384 // length, length, 32, 64), **band))
        assert conditions.forward_tile(problem_of((16384 // length, length, 32, 64), **band)).block_m == rows
    assert faster("forward", problem_of((64, 256, 32, 64), window_right=0))
    assert not faster("forward", problem_of((64, 320, 32, 64), window_right=0))
    k = torch.empty((2, 4096, 8, 64), dtype=torch.bfloat16, device="meta")
    for queries, heads, is_few in ((1, 32, True), (32, 32, True), (33, 32, False), (128, 8, True), (4, 96, True)):
        q = torch.empty((2, queries, heads, 64), dtype=torch.bfloat16, device="meta")
        assert (conditions.forward_tile(Problem(q, k, k, softmax_scale=0.1)).block_m == 128) == is_few
    for width, more, rows in ((256, {}, 192), (257, {}, 256), (256, {"softcap": 30.0}, 128), (256, {"dropout_p": 0.1}, 128)):
        narrow = problem_of((2, 8192, 32, 64), window_left=width - 1, window_right=0, **more)
        assert conditions.forward_tile(narrow).block_m == rows
    window = {"window_left": 1023, "window_right": 0}
    assert faster("forward", problem_of((2, 8192, 16, 128), **window))
    assert faster("forward", problem_of((8, 1024, 16, 128), **window))
    assert faster("forward", problem_of((16, 192, 16, 128), **window))
    assert not faster("forward", problem_of((2, 64, 16, 128), **window))
    assert faster("forward", problem_of((4, 8192, 32, 64), **window))
    assert faster("forward", problem_of((16, 1024, 32, 64), **window))
    assert not faster("forward", problem_of((16, 192, 32, 64), **window))
    for head_dim, width, rows in ((128, 128, 128), (128, 512, 192), (192, 128, 128), (192, 512, 192), (256, 512, 128)):
        x = torch.empty((2, 8192, 32, head_dim), dtype=torch.bfloat16, device="meta")
        v = x[..., :128] if head_dim == 192 else x
        wide = Problem(x, x, v, softmax_scale=0.1, window_left=width - 1, window_right=0)
        assert faster("forward", wide)
        assert conditions.forward_tile(wide).block_m == rows
    assert faster("backward", problem_of((16, 1024, 16, 128)))
    assert not faster("backward", problem_of((1, 65536, 1, 32)))
    assert not faster("backward", problem_of((8, 2048, 32, 64)))
    assert faster("fused", problem_of((4, 4096, 32, 64)))
    assert faster("fused", problem_of((32, 512, 32, 64)))
    assert not faster("fused", problem_of((32, 256, 32, 64), softcap=30.0))
    assert faster("fused", problem_of((16, 1024, 16, 128), window_right=0))
    for length, head_dim, without_mask, causal in (
        (160, 64, False, False),
        (197, 64, True, True),
        (300, 64, False, False),
        (500, 64, True, True),
        (320, 64, False, False),
        (384, 64, True, True),
        (160, 128, False, False),
        (77, 128, True, False),
        (192, 128, False, False),
        (300, 128, True, False),
        (128, 96, False, True),
    ):
        assert faster("fused", problem_of((64, length, 16, head_dim))) == without_mask
        assert faster("fused", problem_of((64, length, 16, head_dim), window_right=0)) == causal
    assert not faster("fused", problem_of((1, 2048, 2, 128)))  # there are too few programs
    for queries, keys, batch, is_faster in (
        (64, 4096, 8, True),
        (256, 4096, 1, True),
        (256, 768, 64, True),
        (256, 768, 2, False),
        (64, 768, 8, True),
        (64, 384, 8, False),
        (512, 2048, 1, True),
        (2048, 512, 1, False),
    ):
        q, k = (torch.empty((batch, length, 16, 128), dtype=torch.bfloat16, device="meta") for length in (queries, keys))
        assert faster("fused", Problem(q, k, k, softmax_scale=0.1)) == is_faster
    assert not faster("fused", problem_of((2, 4096, 16, 136)))
    assert faster("fused", problem_of((2, 4096, 16, 128), **window))
    assert faster("fused", problem_of((4, 4096, 16, 128), window_left=127, window_right=0))
    assert not faster("fused", problem_of((4, 4096, 16, 128), window_left=63, window_right=0))
    blocks = {"block_mask": BlockLists(*[None] * 8, 64, 64)}
    for more in ({"softcap": 30.0}, {"alibi_slopes": torch.empty(16)}, {"bias": torch.empty(1, 1, 1, 1)}, blocks):
        for dim, in_forward in ((64, "bias" in more or "block_mask" in more), (128, True)):
            modified = problem_of((8, 4096, 16, dim), window_right=0, **more)
            assert faster("forward", modified) == in_forward
            assert faster("backward", modified)
            assert faster("fused", modified) == ("bias" not in more)
    alibi = {"alibi_slopes": torch.empty(16)}
    for more, length, keys_of_a_block in (({}, 4096, 64), (alibi, 4096, 64), (alibi, 8192, 128)):
        capped = problem_of((4, length, 16, 128), window_right=0, softcap=30.0, **more)
        assert conditions.forward_tile(capped).block_n == keys_of_a_block
    dropout = {"dropout_p": 0.1, "window_right": 0}
    assert faster("forward", problem_of((8, 2048, 32, 64), **dropout))  # it is not faster without
    assert faster("fused", problem_of((8, 2048, 32, 64), **dropout))
    assert faster("forward", problem_of((64, 256, 16, 128), **dropout))
    assert not faster("forward", problem_of((8, 128, 16, 128), **dropout))  # all tiles run at once
    assert faster("backward", problem_of((8, 2048, 16, 256), **dropout))
    assert not faster("backward", problem_of((8, 64, 16, 256), **dropout))
    assert not faster("forward", problem_of((4, 8192, 32, 64), dropout_p=0.1, **window))
    for more, queries, dp_first in (({}, 128, True), (dropout | window, 64, False), (blocks, 64, False)):
        assert conditions.fused_tile(problem_of((8, 2048, 32, 64), **more)).queries == queries
        assert conditions.fused_tile(problem_of((2, 8192, 32, 128), **more)).dp_first == dp_first
    k = torch.empty((64, 2048, 8, 128), dtype=torch.bfloat16, device="meta")
    for queries, heads, keys, share in ((1, 32, 2048, True), (64, 32, 2048, True), (1, 8, 2048, False), (1, 32, 512, False)):
        q = torch.empty((64, queries, heads, 128), dtype=torch.bfloat16, device="meta")
        assert faster("forward", Problem(q, k[:, :keys], k[:, :keys], softmax_scale=0.1)) == share
    assert not faster("forward", Problem(q[:1], k[:1, :1024], k[:1, :1024], softmax_scale=0.1))  # there is too little to load
    for d_qk, d_v in itertools.product(range(8, 257, 8), repeat=2):
        q, v = (torch.empty(1, 64, 1, dim, dtype=torch.bfloat16, device="meta") for dim in (d_qk, d_v))
        for tile in (conditions.forward_tile(Problem(q, q, v, softmax_scale=0.1)), select_hopper_backward_tile(d_qk, d_v)):
            assert d_qk <= tile.head_dim_qk
            assert d_v <= tile.head_dim_v


@pytest.mark.parametrize(
    ("length", "num_heads_kv", "has_large_l2", "is_packed", "is_faster"),
    [
        (384, 16, True, False, True),
        (383, 16, True, False, False),
        (384, 4, True, False, True),
        (384, 4, True, True, True),
        (703, 4, False, True, False),  # packed batches; dense calls are faster from 640 tokens on
        (704, 4, False, True, True),
        (704, 16, False, True, True),
        (703, 16, False, False, False),
        (704, 16, False, False, True),
        (639, 4, False, False, False),
        (640, 4, False, False, True),
    ],
)
def test_short_causal_backwards_go_with_the_memory(
    length: int, num_heads_kv: int, has_large_l2: bool, is_packed: bool, is_faster: bool
) -> None:
    q, k = (torch.empty((48, length, heads, 128), dtype=torch.bfloat16, device="meta") for heads in (16, num_heads_kv))
    lengths = {"seqused_kv": torch.empty(48, dtype=torch.int32, device="meta")} if is_packed else {}
    problem = Problem(q, k, k, softmax_scale=0.1, window_right=0, **lengths)
    with pretended_device(90, 132, has_large_l2=has_large_l2):
        assert (crossovers.slower("sm_90 fused", facts_of(problem)) is None) == is_faster
    assert conditions.fused_tile(problem).is_persistent == (num_heads_kv == 16 and length >= 384)
    narrow = Problem(q[..., :64], k[..., :64], k[..., :64], softmax_scale=0.1, window_right=0, **lengths)
    assert conditions.fused_tile(narrow).is_persistent


def test_little_work_counts_where_memory_is_slower() -> None:
    small = problem_of((8, 768, 16, 128), window_right=0)
    assert slower("sm_90 fused", small) is None
    with pretended_device(90, 132, has_large_l2=False):
        assert "from 2**35 FLOPs on" in str(crossovers.slower("sm_90 fused", facts_of(small)))


@pytest.mark.parametrize(
    ("policy", "deterministic", "chosen"),
    [
        (Policy(ignores_measurements=True), False, "fused"),
        (Policy(ignores_measurements=True), True, "two kernels"),
        (Policy(), False, "two kernels"),
    ],
)
def test_the_fused_backward_is_for_what_need_not_repeat(
    policy: Policy, deterministic: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both families run anything here; measurements say that the two kernels alone are faster."""
    seen = []
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: policy)
    monkeypatch.setattr(crossovers, "slower", lambda use, facts: None if use == "sm_90 two-kernel" else "it is slower")
    for module, kernel, run in (
        (fused_kernels, "fused", "fused_backward"),
        (backward_kernels, "backward", "hopper_backward"),
    ):
        monkeypatch.setattr(conditions, f"{kernel}_unsupported", lambda *_: None)
        label = "fused" if kernel == "fused" else "two kernels"
        monkeypatch.setattr(module, run, lambda *_, label=label, **__: seen.append(label))
    spec, x = make_call(make_inputs(lengths_q=[8]), deterministic=deterministic)
    with pretended_device(90, 132):
        triton_backend.backward(spec, x, x.q, torch.zeros(1, 4, 8), x.q, None)
    assert seen == [chosen]


def test_fused_leaves_other_calls_to_others() -> None:
    narrow, wide = problem_of((1, 64, 2, 128)), problem_of((1, 64, 2, 136))
    assert conditions.fused_unsupported(narrow, narrow.q, narrow.q) is None
    assert "up to 128" in str(conditions.fused_unsupported(wide, wide.q, wide.q))
    modified = problem_of((1, 64, 2, 128), softcap=30.0)
    assert conditions.fused_unsupported(modified, modified.q, modified.q) is None


@pytest.mark.sample("lengths", "gap", "side", "by_sequence")
@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("lengths", [[100, 300, 0, 1, 129], [0], [64] * 70, [500], [4300, 70]], ids=lambda x: f"{len(x)}x{max(x)}")
def test_table_of_work(lengths: list[int], gap: int, side: Literal["q", "kv"], by_sequence: bool, device: str) -> None:
    """Queries that see the most keys come first, or keys that the most queries see: of all sequences, or of the longest."""
    block, longest = 64, max(lengths)
    q = torch.zeros(sum(lengths) + gap * len(lengths), 2, 16, dtype=torch.bfloat16, device=device)
    cu_seqlens, padded = (cumulative(lengths, n).to(device) for n in (0, gap))
    given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    if gap:
        given |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    table = tile_schedule(Problem(q, q, q, softmax_scale=1.0, **given), block, side, by_sequence=by_sequence).tolist()
    blocks = max(1, -(-longest // block))
    places = []  # (first kernels, entry)
    for b, length in enumerate(lengths):
        count = -(-length // block)
        for m in range(count):
            after = m if side == "q" else count - 1 - m
            places.append(((-count, b, -after) if by_sequence else (-after, b), b * blocks + m))
    assert table[: 2 + len(places)] == [0, len(places), *(entry for _, entry in sorted(places))]


def test_sections_of_heads_fit_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's keys and values take 512 bytes a token: of all sequences if there are lengths, otherwise of one sequence."""
    packed = torch.empty(32768, 16, 128, dtype=torch.bfloat16)
    lengths = {"cu_seqlens_q": cumulative([2048] * 16), "cu_seqlens_kv": cumulative([2048] * 16)}
    lengths |= {"max_seqlen_q": 2048, "max_seqlen_kv": 2048}
    problem = Problem(packed, packed[:, :8], packed[:, :8], softmax_scale=0.1, **lengths)
    assert query_heads_per_l2_section(problem) == 2 * 2  # heads of keys, and the query heads of each
    dense = packed.view(16, 2048, 16, 128)
    assert query_heads_per_l2_section(Problem(dense, dense, dense, softmax_scale=0.1)) == 8  # all tiles are equally long
    causal = Problem(dense, dense, dense, softmax_scale=0.1, window_right=0)
    assert query_heads_per_l2_section(causal) == 32
    five = dense[:5]  # 80 heads: two sections of 40, and not two of 32 and one of 16
    assert query_heads_per_l2_section(Problem(five, five, five, softmax_scale=0.1, window_right=0)) == 40
    monkeypatch.setattr(work_order, "has_large_l2", lambda device: False)
    assert query_heads_per_l2_section(causal) == 16


@pytest.mark.parametrize(
    ("heads", "most", "size"), [(16, 5, 4), (64, 10, 8), (256, 12, 16), (17, 5, 6), (2, 1, 1), (3, 3, 3), (1, 1, 1)]
)
def test_sections_have_one_size_or_nearly(heads: int, most: int, size: int) -> None:
    assert section_of_one_size(heads, most) == size


@pytest.mark.parametrize("by_sequence", [False, True])
def test_table_of_work_holds_wrong_lengths(by_sequence: bool, device: str) -> None:
    q = torch.zeros(100, 2, 16, dtype=torch.bfloat16, device=device)
    overlapping = torch.tensor([0, 100, 0, 100, -7, 1000], dtype=torch.int32, device=device)
    given = {"cu_seqlens_q": overlapping, "cu_seqlens_kv": overlapping, "max_seqlen_q": 100, "max_seqlen_kv": 100}
    table = tile_schedule(Problem(q, q, q, softmax_scale=1.0, **given), 16, "q", by_sequence=by_sequence).tolist()
    blocks = 7
    assert table[1] <= len(table) - 2
    assert all(0 <= entry < 5 * blocks for entry in table[2 : 2 + table[1]])


@pytest.mark.sample
@pytest.mark.parametrize(
    "programs", [1024, 27], ids=["a head each", "some heads each"]
)  # 80 programs, and 48: for 2, 2 and 1 heads
@pytest.mark.parametrize(("fmt", "in_reverse"), [("thd", False), ("thd", True), ("bshd", False), ("bhsd", False)])
def test_padding_alone_is_zeroed(fmt: str, in_reverse: bool, programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_schedule_module, "_MOST_PROGRAMS", programs)
    lengths = {"lengths_q": [70, 0, 5, 200], "padding": True, "gap": 3, "in_reverse": in_reverse}
    given = make_inputs(fmt, **lengths, num_heads=5, num_heads_kv=5, dtype=torch.bfloat16, device=device)
    spec, x = make_call(given, attn_mask_type="padding")
    problem = triton_backend.to_problem(spec, x)
    out = torch.full_like(problem.q, 7.0)
    lse = torch.full((5, out.shape[0]) if fmt == "thd" else (4, 5, out.shape[1]), 7.0, device=device)
    zero_padding(problem, out, "q", lse)
    is_padding = problem.q[..., 0].isnan()
    assert not out[is_padding].any()
    assert (out[~is_padding] == 7.0).all()
    assert (lse == float("-inf")).equal(is_padding.transpose(-1, -2))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all launches, by these kernels if they can run the call."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    seen: list[str] = []
    launch = forward_launch.launch

    def noted(kernel: Any, *arguments: Any) -> None:
        seen.append(kernel.__name__)
        launch(kernel, *arguments)

    for module in (forward_launch, backward_launch, fused_192_kernels, dq_conversion, statistics):
        monkeypatch.setattr(module, "launch", noted)
    return seen


SPLIT = ["_attn_bwd_preprocess_kernel", "_attn_bwd_dq_hopper_kernel", "_attn_bwd_dkdv_hopper_kernel"]
CONVERTING = ["_attn_bwd_preprocess_kernel", "_attn_bwd_fused_hopper_kernel"]
FUSED = [*CONVERTING, "_attn_bwd_dq_conversion_kernel"]
FUSED_192 = ["_attn_bwd_fused_192_hopper_kernel" if "fused" in name else name for name in FUSED]


def check(
    launches: list[str], call: dict[str, Any], fused: list[str] = FUSED, forward: str = "_attn_fwd_hopper_kernel", **inputs: Any
) -> None:
    """Forward and backward against the oracle, with every kernel that has a backward of plain scores."""
    given = make_inputs(**{"dtype": torch.bfloat16, "device": "cuda", "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    spec, x = make_call(given, **call, return_max_logit=False)
    out, lse, _ = triton_backend.forward(spec, x)
    exact, same_dtype = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    for name, got, want, budget in zip(("out", "lse"), (out, lse), exact, same_dtype, strict=False):
        check_close(name, got, want, budget)
    dout, dlse = make_dout(given), make_dlse(given)
    wanted = reference_gradients(spec, x, dout, dlse)
    budgets = reference_gradients(spec, x, dout, dlse, dtype=spec.dtype)
    if spec.head_dim_qk > 128 or spec.head_dim_v > 128:
        fused = FUSED_192 if 128 < spec.head_dim_qk <= 192 and spec.head_dim_v <= 128 else []
    for deterministic in (True, False) if fused else (True,):
        gradients = triton_backend.backward(spec._replace(deterministic=deterministic), x, out, lse, dout, dlse)
        for name, got, want, budget in zip(Gradients._fields, gradients, wanted, budgets, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                check_close(name, got, want, budget, factor=GRADIENT_FACTOR)
    assert launches == [forward, *SPLIT, *fused]


HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72), (96, 96), (136, 64), (64, 200)]
BANDS: list[dict[str, Any]] = [
    {},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding_causal_bottom_right"},
    {"window_size": (300, 70)},
    {"window_size": (40, 0), "bottom_right_diagonal": True},
]
UNEVEN = {"lengths_q": [300, 0, 1, 700, 129, 260], "lengths_kv": [333, 50, 500, 600, 0, 40]}


@on_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_head_dims_and_bands(dims: tuple[int, int], band: dict[str, Any], launches: list[str]) -> None:
    call = {"attn_mask_type": "padding", **band}
    check(launches, call, qkv_format="thd", head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "sbhd_2thd"])
def test_formats(fmt: str, band: dict[str, Any], dtype: torch.dtype, launches: list[str]) -> None:
    call = {"attn_mask_type": "padding", **band}
    check(launches, call, qkv_format=fmt, dtype=dtype, padding=True, gap=13, num_heads=6, num_heads_kv=2, **UNEVEN)


@on_hopper
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_dense(fmt: str, mask: str, sq: int, skv: int, launches: list[str]) -> None:
    call = {"attn_mask_type": mask}
    forward = "_attn_fwd_few_keys_hopper_kernel" if skv == 1 else "_attn_fwd_hopper_kernel"
    check(launches, call, forward=forward, qkv_format=fmt, lengths_q=[sq] * 3, lengths_kv=[skv] * 3, strided=fmt == "bshd")


@on_hopper
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks(softmax_type: str, launches: list[str]) -> None:
    offset = torch.tensor([0.5, float("-inf"), -3.0, 20.0], device="cuda") if softmax_type == "learnable" else None
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": softmax_type, "softmax_offset": offset}
    check(launches, call, qkv_format="thd", **UNEVEN)


@on_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_bits_repeat(dims: tuple[int, int], launches: list[str]) -> None:
    """The assignment of blocks to programs is dynamic. If a result is requested as deterministic, it does not depend on it."""
    given = make_inputs("thd", **UNEVEN, num_heads=16, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16, device="cuda")
    spec, x = make_call(given, attn_mask_type="padding_causal", deterministic=True, return_max_logit=False)
    dout = make_dout(given)

    def run() -> list[torch.Tensor]:
        out, lse, _ = triton_backend.forward(spec, x)
        return [out, lse, *triton_backend.backward(spec, x, out, lse, dout, None)[:3]]

    first = run()
    for _ in range(100):
        assert all(torch.equal(again, once) for again, once in zip(run(), first, strict=True))
    assert set(launches) == {"_attn_fwd_hopper_kernel", *SPLIT}


def check_bits_but_for_dq(dims: tuple[int, int], mask: str) -> None:
    """A hundred backwards of a packed batch: dk and dv are bitwise identical, dq is compared with the oracle."""
    given = make_inputs("thd", **UNEVEN, num_heads=16, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16, device="cuda")
    spec, x = make_call(given, attn_mask_type=mask, return_max_logit=False)
    dout = make_dout(given)
    out, lse, _ = triton_backend.forward(spec, x)
    first = triton_backend.backward(spec, x, out, lse, dout, None)
    wanted, budget = (reference_gradients(spec, x, dout, dtype=dtype).dq for dtype in (torch.float64, spec.dtype))
    for _ in range(100):
        again = triton_backend.backward(spec, x, out, lse, dout, None)
        assert torch.equal(again.dk, first.dk)
        assert torch.equal(again.dv, first.dv)
        check_close("dq", again.dq, wanted, budget, factor=GRADIENT_FACTOR)


@on_hopper
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_of_fused_repeat_but_for_dq(
    dim: int, is_persistent: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_persistent:
        choose_persistent(monkeypatch)
    check_bits_but_for_dq((dim, dim), "padding_causal")
    assert set(launches) == {"_attn_fwd_hopper_kernel", *FUSED}


def choose_persistent(monkeypatch: pytest.MonkeyPatch, *, converts: bool = False) -> None:
    """Gives the fused backward persistent programs in any call."""
    chosen, form = conditions.fused_tile, {"is_persistent": True, "converts": converts}
    monkeypatch.setattr(conditions, "fused_tile", lambda problem: dataclasses.replace(chosen(problem), **form))


@on_hopper
def test_many_sequences_and_outliers(launches: list[str]) -> None:
    lengths = torch.randint(0, 400, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    check(launches, {"attn_mask_type": "padding_causal"}, qkv_format="thd", lengths_q=lengths, outliers=True)


@on_hopper
@pytest.mark.parametrize("is_persistent", [False, True])
def test_wrong_lengths_stay_inside(is_persistent: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside of the tensors is read or written; compute-sanitizer runs this."""
    if is_persistent:
        choose_persistent(monkeypatch)
    given = make_inputs("thd", lengths_q=[300, 200], dtype=torch.bfloat16, head_dim_qk=64, head_dim_v=64, device="cuda")
    for values in ([0, 500, 0, 500, 200], [-5, 1000, 3, 7, 10**6], [500, 400, 300, 200, 100]):
        wrong = torch.tensor(values, dtype=torch.int32, device="cuda")
        spec, x = make_call(
            given._replace(cu_seqlens_q=wrong, cu_seqlens_kv=wrong), attn_mask_type="padding", return_max_logit=False
        )
        out, lse, _ = triton_backend.forward(spec, x)
        for deterministic in (True, False):
            triton_backend.backward(spec._replace(deterministic=deterministic), x, out, lse, out, None)
    torch.cuda.synchronize()
    assert launches == 3 * ["_attn_fwd_hopper_kernel", *SPLIT, *FUSED]


SHARED = """
import torch, flexattn
for dim in (64, 128):
    shape = (2, 8192, 2048 // dim, dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    for mask in ("no_mask", "causal"):
        for _ in range(12):
            out = flexattn.attention(q, k, v, attn_mask_type=mask, backend="triton")
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert all(t.isfinite().all() for t in (out, *gradients))
"""


@on_hopper
def test_processes_share_the_device(fresh_python: FreshPython) -> None:
    """Their kernels are suspended and resumed, so they run in other orders than in a process of its own."""
    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(lambda _: fresh_python("-c", SHARED), range(4)):
            assert done.returncode == 0, done.stderr[-2000:]
