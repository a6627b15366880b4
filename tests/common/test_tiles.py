"""Every row of the tile tables, compiled ahead of time for its architecture: shared memory, spills, matrix instructions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import triton

from flexattn.dispatch.triton_backend import WIDEST
from flexattn.kernels_triton.ahead_of_time.compile_report import (
    SHARED_MEMORY_LIMIT,
    CompileReport,
    CompileRequest,
    request_for,
)
from flexattn.kernels_triton.common import tiles as configs
from flexattn.kernels_triton.common.problem import Backward, BlockLists, Problem
from flexattn.kernels_triton.common.tiles import select_tile, split_head_dim
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.portable.score_gradients import bias_gradient
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from tests.support.compiled_kernels import compile_beside, compile_sound

SMS = (80, 86, 89, 90, 100, 120)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # the widest that each row serves, and dims in two parts
WIDE_HEAD_DIMS = (WIDEST,)
UNEVEN_HEAD_DIMS = ((256, 64), (64, 256), (192, 192))  # the largest sum that a row serves, all on one side
ONE_UNEVEN = {"forward": (64, 256), "dq": (256, 64), "dkdv": (192, 192)}
MATRIX_INSTRUCTION = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
FP8 = torch.float8_e4m3fn
FP8_INSTRUCTION = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}
# Spills in the loops, as a share of their instructions. Plain half precision has next to none. Calls with every feature have some,
# and so has fp32, whose products use ordinary registers. Head dims above 256 leave few registers. With half the keys their forward
# on sm_90 would spill nothing, but multiply half as much at a time.
LOOP_SPILLS = dict.fromkeys(("hybrid", "plain", "blocks", "short", "open", "latent", "alibi"), 0.01) | {
    "few": 0.0,
    "half": 0.0,
    "full": 0.08,
    "fp32": 0.08,
    "wide": 0.03,
    "biased": 0.04,  # measured with fewer registers (biased_tiles_h200.json)
    "biased brief": 0.04,
    "brief": 0.0,
}
# Spills stand for time, and these tiles' times were measured. They are the fastest, spills included (d256: tiles_d256_h200.json;
# FP8: fp8_tiles_h200.json; blocks: blocks_of_64_h200.json).
MEASURED_SPILLS = {
    "dkdv-sm90-bfloat16-d256x256-open": 0.06,
    "dq-sm90-bfloat16-d256x256-blocks": 0.11,
    "dkdv-sm90-bfloat16-d256x256-blocks": 0.11,
    "dkdv-sm90-float8_e4m3fn-d128x128-plain": 0.04,
    "dkdv-sm90-float8_e4m3fn-d128x128-hybrid": 0.04,
}


# The rows of these GPUs were measured as well: four warps with some spills were faster than eight without.
OLDER_SPILLS = {80: 0.06, 86: 0.03, 89: 0.03, 120: 0.04}


class Case(NamedTuple):
    kernel: str
    sm: int
    dtype: torch.dtype
    head_dims: tuple[int, int]
    features: str

    def __str__(self) -> str:
        dims = "x".join(map(str, self.head_dims))
        return f"{self.kernel}-sm{self.sm}-{str(self.dtype).removeprefix('torch.')}-d{dims}-{self.features}"

    @property
    def requests(self) -> list[CompileRequest]:
        return [request_for(launch, self.sm) for launch in _launches(self)]


def blocks_of(side: int, length: int) -> BlockLists:
    counts = torch.zeros(1, 1, configs.cdiv(length, side), dtype=torch.int32)
    return BlockLists(*(counts, counts[..., None].repeat(1, 1, 1, counts.shape[-1])) * 4, side, side)


@functools.cache
def _launches(case: Case) -> list[Launch]:
    """The kernel's launches as on the device, with the tile of the tables; dk and dv may have separate launches."""
    heads, (d_qk, d_v) = 4, case.head_dims
    full = case.features == "full"
    lengths = {
        "full": 64,
        "short": configs.BRIEF + 1,
        "brief": configs.TINY + 1,
        "biased": configs.SHORT + 8,
        "biased brief": configs.TINY + 4,
    }
    length = lengths.get(case.features, configs.SHORT + 1)
    shape = (2 * length, heads) if full else (2, length, heads)
    q, k = (torch.zeros(*shape, d_qk, dtype=case.dtype) for _ in "qk")
    if case.features in ("few", "half"):
        q = q[:, : 1 if case.features == "few" else configs.HALF].contiguous()
    v, dout = (torch.zeros(*shape, d_v, dtype=case.dtype) for _ in "vo")
    if case.features == "latent":
        v = k[..., :d_v]
    out = dout.to(torch.bfloat16) if case.dtype is FP8 else dout
    if case.features == "hybrid":
        dout = dout.to(torch.float8_e5m2)
    blocks = 2 if full else 1
    scales = {"descales": (torch.ones(2, heads, blocks),) * 4, "scale_rows": 128 if full else 0} if case.dtype is FP8 else {}
    lse = torch.zeros(heads, 2 * length) if full else torch.zeros(2, heads, length)
    cu_seqlens = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    features = {
        "window_left": 17,
        "bias": torch.zeros(1, heads, length, length),  # fp32 takes the most shared memory
        "alibi_slopes": None,
        "softcap": 30.0,
        "has_sink": True,
        "softmax_offset": torch.zeros(heads),
        "dropout_p": 0.1,
        "rng_state": torch.zeros(2, dtype=torch.int64),
        "max_seqlen_q": length,
        "max_seqlen_kv": length,
    } | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), cu_seqlens)
    alibi = {"alibi_slopes": torch.zeros(heads)} if case.features == "alibi" else {}
    if "biased" in case.features:
        alibi = {"bias": torch.zeros(1, heads, length, length, dtype=case.dtype)}
    band = {"window_right": None if case.features in ("open", "blocks", "biased", "biased brief") else 0}
    problem = Problem(q, k, v, softmax_scale=0.1, **band, **(features if full else alibi), **scales)
    if case.features == "blocks":
        problem = dataclasses.replace(problem, block_mask=blocks_of(64, length))

    def tile(table: configs.Table) -> configs.Tile:
        return problem.tile(table, case.sm)

    with recorded_launches() as launches:
        if case.kernel == "forward":
            attention_forward(problem, out, lse, torch.zeros(heads) if full else None, tile(configs.FORWARD))
        elif case.kernel == "dbias":
            statistics = (*torch.zeros(3, *lse.shape), torch.zeros(1, dtype=torch.int32), lse)
            bias_gradient(problem, statistics, dout, None, problem.bias.clone(), tile(configs.BIAS_GRADIENT))
        else:
            gradients = (torch.zeros_like(t, dtype=out.dtype) for t in (q, k, v))
            tiles = (tile(configs.DQ), tile(configs.DKDV))
            doffset = torch.zeros(heads) if full else None
            attention_backward(Backward(problem, out, lse, dout, lse if full else None, *gradients, doffset), *tiles)
    name = {"forward": "_attn_fwd_kernel"}.get(case.kernel, f"_attn_bwd_{case.kernel}_kernel")
    return [launch for launch in launches if launch.kernel.fn.__name__ == name]  # FP8 has transposed copies too


def _left_rows(case: Case) -> int:
    """Rows of the left operand in the kernel's products."""
    tile = _launches(case)[0].tile
    return tile.block_n if case.kernel == "dkdv" else tile.block_m


def _cases(
    kernels: str, sms: tuple[int, ...], dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...], features: str
) -> list[Case]:
    return [Case(kernel, sm, dtype, dims, features) for kernel in kernels.split() for sm in sms for dims in head_dims]


FEW = [
    *_cases("forward", (80,), torch.bfloat16, ((128, 128),), "plain"),
    *_cases("dkdv", (90,), torch.bfloat16, ((128, 128),), "plain"),
    *_cases("forward", (90,), FP8, ((128, 128),), "plain"),
]
ALL = [
    *_cases("forward dq dkdv", SMS, torch.bfloat16, HEAD_DIMS, "plain"),
    *_cases("forward dq dkdv", SMS, torch.bfloat16, WIDE_HEAD_DIMS, "plain"),
    *_cases("forward", SMS, torch.bfloat16, WIDE_HEAD_DIMS, "latent"),
    *_cases("forward", SMS, torch.bfloat16, ((320, 320),), "plain"),
    *_cases("forward dq dkdv", SMS, torch.bfloat16, HEAD_DIMS, "open"),
    *_cases("forward dq dkdv", (90,), torch.bfloat16, HEAD_DIMS, "short"),
    *_cases("forward dq dkdv", (90,), torch.bfloat16, ((128, 128), (256, 256)), "blocks"),
    *_cases("forward", (90,), torch.bfloat16, ((32, 32), (48, 48), (64, 64), (80, 80)), "biased"),
    *_cases("forward", (90,), torch.bfloat16, ((48, 48), (64, 64), (80, 80)), "biased brief"),
    *_cases("forward", (90,), torch.bfloat16, ((64, 64),), "brief"),
    *_cases("forward dq dkdv", (90,), torch.float16, ((128, 128),), "plain"),
    *_cases("dq dkdv", (80, 86, 89, 120), torch.bfloat16, HEAD_DIMS, "alibi"),
    *_cases("forward dq dkdv", SMS, torch.bfloat16, UNEVEN_HEAD_DIMS, "plain"),
    *_cases("forward", (80, 86, 89, 90, 120), torch.bfloat16, (*HEAD_DIMS, *UNEVEN_HEAD_DIMS), "few"),
    *_cases("forward", (90,), torch.bfloat16, ((96, 96), (128, 128), (192, 128)), "half"),
    *_cases("forward dq dkdv dbias", SMS, torch.bfloat16, ((64, 64), (128, 128), (192, 128), (256, 256)), "full"),
    *_cases("forward dq dkdv", SMS, torch.float32, ((64, 64), (128, 128), (256, 256)), "plain"),
    *_cases("forward dq dkdv dbias", (90,), torch.float32, ((128, 128),), "full"),
    *_cases("forward dq dkdv", (90, 100), FP8, HEAD_DIMS, "plain"),
    *_cases("forward dq dkdv", (89, 120), FP8, ((128, 128), (256, 256)), "plain"),
    *_cases("dq dkdv", (89, 90, 100, 120), FP8, ((128, 128),), "hybrid"),
    *_cases("forward dq dkdv dbias", (90, 100), FP8, ((128, 128),), "full"),
]
WIDE = [
    *_cases("forward dq dkdv dbias", (80, 89, 90, 100), torch.bfloat16, WIDE_HEAD_DIMS, "full"),
]


def complaints(case: Case, report: CompileReport) -> list[str]:
    found = []
    if report.shared_bytes > SHARED_MEMORY_LIMIT[case.sm]:
        found.append(f"{report.shared_bytes} bytes of shared memory, and there are {SHARED_MEMORY_LIMIT[case.sm]}")
    kind = "fp32" if case.dtype is torch.float32 else case.features
    if kind == "plain" and max(case.head_dims) > 256:
        kind = "wide"
    limit = MEASURED_SPILLS.get(str(case)) or LOOP_SPILLS[kind]
    if case.dtype is torch.bfloat16 and kind in ("plain", "short", "open"):
        limit = max(limit, OLDER_SPILLS.get(case.sm, 0))
    if report.loop_spill_share > limit:
        found.append(f"{report.loop_spill_share:.1%} of the loops' instructions are spills, more than {limit:.1%}")
    instructions = FP8_INSTRUCTION if case.dtype is FP8 else MATRIX_INSTRUCTION
    expected = (
        instructions[case.sm] if _left_rows(case) >= 64 or case.sm in (86, 89, 120) else "HMMA"
    )  # all others begin at 64 rows
    if case.dtype is not torch.float32 and set(report.matrix_instructions) != {expected}:
        found.append(f"matrix instructions are {report.matrix_instructions}, not {expected} alone")
    if case.dtype is FP8 and case.sm == 90 and case.kernel in ("forward", "dq") and case.features == "plain":
        # p and ds are operands directly, and v and k come transposed: nothing is stored to shared memory by hand
        found += [f"{loop['STS']} STS in a loop: a transposition" for loop in report.loops if "STS" in loop and "QGMMA" in loop]
    if not report.loops:
        found.append("no loop was found in the code")
    # With a bias: products of a head dim in two parts, and loops of small head dims, which need fewer registers so.
    may_be_serialized = case.features == "full" or (
        "biased" in case.features and (split_head_dim(case.head_dims[1])[1] > 0 or max(case.head_dims) <= 32)
    )
    if not may_be_serialized and case.dtype is not torch.float32 and any("serialized" in text for text in report.warnings):
        found.append(f"ptxas serialized wgmma: {report.warnings}")
    return [f"{case}: {text}" for text in found]


def check(cases: list[Case]) -> None:
    kernels = [(case, request) for case in cases for request in case.requests]
    distinct = {repr(request): request for _, request in kernels}  # short calls have the tile of long ones if nothing is faster
    reports = dict(zip(distinct, compile_sound([*distinct.values()]), strict=True))
    found = [text for case, request in kernels for text in complaints(case, reports[repr(request)])]
    assert not found, "\n".join(found)


def repeats(case: Case) -> bool:
    """Returns whether another case has all loops of this one, with the tile, the instructions and as much memory.

    A case without a mask repeats the one with a mask if the tile is the same, except on sm_90, whose rows were measured. A case for
    sm_80, 86 or 120 repeats the one for sm_89, whose code is identical; head dim 128 stands for the others.
    """
    masked = case._replace(features="plain")
    if case.features == "open" and case.sm != 90 and [x.tile for x in _launches(case)] == [x.tile for x in _launches(masked)]:
        return True
    twin = case._replace(sm=89)
    if case.sm not in (80, 86, 120) or case.head_dims == (128, 128) or twin not in ALL:
        return False
    return [dataclasses.replace(request, sm=89) for request in case.requests] == twin.requests


def test_a_tile_of_each_kind() -> None:
    check(FEW)


@pytest.mark.slow
def test_tiles_for_sm_90() -> None:
    """Each kind of call for the GPU of the tables' measurements, with one head dim; plain bf16 with each row's head dims."""
    check([case for case in ALL if case.sm == 90 and stands_for_others(case)])


def stands_for_others(case: Case) -> bool:
    """Returns whether the case is the one of its kind that `.ci/run` compiles."""
    if case.features == "plain" and case.dtype is torch.bfloat16:  # a row's widest head dims, and one of each kernel's uneven ones
        return case.head_dims not in UNEVEN_HEAD_DIMS or case.head_dims == ONE_UNEVEN[case.kernel]
    head_dims = [other.head_dims for other in ALL if other._replace(head_dims=case.head_dims) == case]
    is_rare = case.dtype is torch.float16 or (case.dtype is torch.float32 and case.features == "full")
    return not is_rare and case.head_dims == ((128, 128) if (128, 128) in head_dims else head_dims[0])


@pytest.mark.slow
def test_head_dim_128_of_other_architectures() -> None:
    """Code for sm_86 and sm_120 differs from code for sm_89 in the tiles of some rows alone: forwards stand for it."""
    basic = [case for case in ALL if case.head_dims == (128, 128) and _is_basic(case)]
    check([case for case in basic if case.sm in (80, 89, 100) or (case.sm in (86, 120) and case.kernel == "forward")])


def _is_basic(case: Case) -> bool:
    if case.dtype is torch.float32:
        return False
    return case.features == "plain" or (case.features, case.sm) in (("full", 80), ("alibi", 89))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sm", SMS)
def test_every_tile(sm: int) -> None:
    check([case for case in ALL if case.sm == sm and not repeats(case)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sm", (80, 86, 89, 100, 120))
def test_what_repeats_other_tiles(sm: int) -> None:
    check([case for case in ALL if case.sm == sm and repeats(case)])


@pytest.mark.exhaustive
def test_every_feature_of_wide_heads() -> None:
    check(WIDE)


@pytest.mark.slow
def test_the_defect_of_ptxas_is_seen() -> None:
    """Rows that are loaded element by element show it, in a forward of two loops; 12.8 is the ptxas release with the defect."""
    q, k, v = (torch.zeros(2, 300, 4, 97, dtype=torch.float16)[..., :96] for _ in range(3))
    with pretended_device(90, 132), recorded_launches() as launches:
        attention_forward(Problem(q, k, v, softmax_scale=0.1, window_right=0), torch.zeros(2, 300, 4, 96), torch.zeros(2, 4, 300))
    (launch,) = (x for x in launches if x.kernel.fn.__name__ == "_attn_fwd_kernel")
    [report] = compile_beside([request_for(launch, 90)])
    assert set(report.matrix_instructions) == {"HGMMA"}
    assert bool(report.undefined_registers) == (triton.knobs.nvidia.ptxas.version == "12.8"), report.undefined_registers


def under_blocks(block: int, head_dim: int = 128) -> Problem:
    x = torch.zeros(1, 512, 2, head_dim, dtype=torch.bfloat16)
    return Problem(x, x, x, softmax_scale=1.0, block_mask=blocks_of(block, 512))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_blocks_of_64_take_their_own_tiles(head_dim: int) -> None:
    with pretended_device(90, 132):
        for table in (configs.FORWARD, configs.DQ, configs.DKDV):
            own = configs.row_of(table, 90, 2, 2 * head_dim).blocks
            for block in (64, 128):
                problem = under_blocks(block, head_dim)
                other = problem.cut(problem.without_block_mask().tile(table))
                assert problem.tile(table) == (own if block == 64 and own else other)
            narrow = under_blocks(32, head_dim).tile(table)
            assert max(narrow.block_m, narrow.block_n) == 32
            loaded = dataclasses.replace(under_blocks(64, head_dim), dropout_p=0.5)
            assert loaded.tile(table) != own


def test_head_dims_are_split_into_powers_of_two() -> None:
    for head_dim in range(8, 577, 8):
        first, second = split_head_dim(head_dim)
        assert first + second >= head_dim
        assert first > second
        assert all(part in (0, 16, 32, 64, 128, 256, 512) for part in (first, second))
    assert [split_head_dim(d) for d in (8, 16, 40, 64, 72, 80, 96, 112, 160, 192, 256)] == [
        *[(16, 0), (16, 0), (32, 16), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 32), (128, 64), (256, 0)]
    ]


@pytest.mark.parametrize("table", [configs.FORWARD, configs.DQ, configs.DKDV, configs.BIAS_GRADIENT])
def test_every_head_dim_has_a_tile(table: configs.Table) -> None:
    widths = [{sum(split_head_dim(d)) for d in range(8, widest + 1, 8)} for widest in (*WIDEST, 256)]
    for capability in (configs.INTERPRETER, 80, 86, 87, 89, 90, 100, 103, 120, 121):
        for element_size in (2, 4) if capability and capability < 89 else (1, 2, 4):
            widths_qk, widths_v = widths[:2] if element_size == 2 else (widths[2], widths[2])
            for total in {a + b for a in widths_qk for b in widths_v}:
                for loaded, is_open, length in itertools.product((None, configs.Loaded()), (False, True), (1, configs.SHORT + 1)):
                    kind = {"is_whole": total % 3 > 0, "loaded": loaded, "is_open": is_open}
                    tile = select_tile(table, capability, element_size, total, length=length, **kind)
                    assert all(n >= 16 and n & (n - 1) == 0 for n in tile[:2])


@pytest.mark.parametrize("table", [configs.FORWARD, configs.DQ, configs.DKDV, configs.BIAS_GRADIENT])
def test_one_length_alone_decides_a_tile(table: configs.Table) -> None:
    for (capability, element_size), rows in table.items():
        for row in rows:
            tile = functools.partial(select_tile, table, capability, element_size, row.head_dims, is_whole=True)
            banded = functools.partial(tile, loaded=None, is_open=False)
            assert {banded(length=length) for length in (1, 100, configs.BRIEF)} == {row.brief or row.short or row.tile}
            assert {banded(length=length) for length in (configs.BRIEF + 1, configs.SHORT)} == {row.short or row.tile}
            assert {banded(length=length) for length in (configs.SHORT + 1, 10**6)} == {row.tile}
            assert tile(length=10**6, loaded=None, is_open=True) == (row.open or row.tile)
            assert tile(length=1, loaded=None, is_open=True) == (row.brief or row.open or row.short or row.tile)

            def biased(length: int, align: int = 0, tile: Any = tile, **more: bool) -> Any:
                return tile(length=length, loaded=configs.Loaded(align, **more), is_open=True)

            assert biased(configs.TINY) == (row.tiny or row.loaded)
            assert biased(configs.TINY + 1) == row.loaded
            assert {biased(length, 8) for length in (configs.BRIEF + 1, 10**6)} == {row.biased or row.loaded}
            assert biased(configs.BRIEF + 1, 4) == row.loaded
            assert {biased(length, 1) for length in (1, configs.BRIEF)} <= {row.biased_brief or row.tiny or row.loaded, row.loaded}
            assert biased(10**6, has_band=True) == (row.biased_band or row.loaded)
            assert biased(10**6, has_mask=True) == (row.biased_mask or row.loaded)
            parts = tile(length=1, loaded=configs.Loaded(), is_open=True, is_whole=False)
            assert parts in ((row.tiny, row.loaded) if row.tiny is None or row.tiny.num_stages > 1 else (row.loaded,))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("heads_kv", "queries", "name"),
    [
        (2, 4, "few"),
        (2, 5, "half"),
        (8, 16, "few"),
        (8, 17, "half"),
        (8, 64, "half"),
        (8, 65, "tile"),
        (2, 17, "tile"),
        (1, 2, "few"),
    ],
)
def test_few_queries_have_a_tile(heads_kv: int, queries: int, name: str, capability: int) -> None:
    """A query of n heads of one key head is n queries, rounded up to a power of two."""
    q, k = torch.zeros(1, queries, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 4096, heads_kv, 128, dtype=torch.bfloat16)
    problem = Problem(q, k, k, softmax_scale=0.1)
    row = configs.row_of(configs.FORWARD, capability, 2, 256)
    expected = getattr(row, name) or row.tile
    assert row.few is not None
    assert (row.half is not None) == (capability == 90)
    assert problem.tile(configs.FORWARD, capability) == expected
    assert dataclasses.replace(problem, is_batch_invariant=True).tile(configs.FORWARD, capability) == row.tile
    slopes = torch.zeros(8)
    assert dataclasses.replace(problem, alibi_slopes=slopes).tile(configs.FORWARD, capability) == expected
    biased = dataclasses.replace(problem, bias=torch.zeros(1, 8, queries, 4096))
    assert biased.tile(configs.FORWARD, capability) == row.loaded


def test_batch_invariant_calls_have_one_tile_wherever_v_is() -> None:
    """The first columns of k as v have a tile of their own on compute capability 8.0: its blocks of keys are twice as large."""
    latent = torch.zeros(1, 300, 1, 576, dtype=torch.bfloat16)
    values = latent[..., :512]
    problems = [Problem(latent, latent, v, softmax_scale=0.1) for v in (values, values.clone())]
    assert len({x.tile(configs.FORWARD, 80) for x in problems}) == 2
    assert len({dataclasses.replace(x, is_batch_invariant=True).tile(configs.FORWARD, 80) for x in problems}) == 1


@pytest.mark.slow
def test_each_loop_of_a_plain_forward_copies_keys_ahead() -> None:
    """Also the loop of the last keys: without a pipeline, 577 tokens take 7 % more time on an H200 (models_h200.json)."""
    [report] = compile_sound(Case("forward", 90, torch.bfloat16, (64, 64), "open").requests)
    assert [loop["LDGSTS"] > 0 for loop in report.loops if "HGMMA" in loop] == [True, True]


def test_a_bad_report_is_found() -> None:
    """The gates of this file can fail, for each number that they check."""
    case, reports = Case("forward", 90, torch.bfloat16, (256, 256), "plain"), []
    for loop, matrix in (({"HGMMA": 90, "STL": 10}, {"HGMMA": 90}), ({"HMMA": 100}, {"HMMA": 100})):
        numbers: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(CompileReport)), 0)
        reports.append(CompileReport(**numbers | {"instructions": Counter(matrix), "loops": [Counter(loop)], "warnings": []}))
    spilled, without_wgmma = reports
    assert [text.partition(": ")[2] for text in complaints(case, spilled)] == [
        "10.0% of the loops' instructions are spills, more than 1.0%"
    ]
    assert "matrix instructions" in complaints(case, without_wgmma)[0]
    for change, said in (
        ({"shared_bytes": 10**6}, "shared memory"),
        ({"loops": []}, "no loop"),
        ({"warnings": ["C7510: wgmma is serialized"]}, "serialized wgmma"),
    ):
        assert said in "\n".join(complaints(case, dataclasses.replace(spilled, **change)))


@pytest.mark.slow
def test_a_bad_tile_is_found() -> None:
    """The gates of this file can fail: a forward tile that fits neither registers nor shared memory."""
    case = Case("forward", 90, torch.bfloat16, (256, 256), "plain")
    [launch] = _launches(case)
    [report] = compile_sound([request_for(launch._replace(tile=configs.Tile(128, 64, 4, 4)), 90)])
    text = "\n".join(complaints(case, report))
    assert "shared memory" in text
    assert "spills" in text
