"""Keys split by lengths on the device: right for every feature, for other lengths in the same launches, bitwise, in bounds.

The portable kernel is interpreted here, and the sm_90 kernel emulated; tests/gpu/test_inference.py has such calls on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench import emulated as emulated_kernels
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.explain import _splits
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import split_kv
from flexattn.kernels_triton.common.problem import Forward, Problem
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS, PlannedTile, make_plan, number_of_splits, splits_of
from flexattn.kernels_triton.families import PORTABLE_FORWARD, Policy, choose
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, make, recorded_launches
from flexattn.testing import check_close, make_call, make_inputs, reference_attention
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, without_gpu
from tests.support.pages import make_pool

BF16 = torch.bfloat16
HEADS, HEADS_KV, CAPACITY = 4, 2, 500
LENGTHS_Q, LENGTHS_KV = (1, 3, 0, 1, 2), (0, 380, 20, 1, 490)  # three programs cut two tiles of these
SINKS = torch.tensor([-3.0, 0.0, 2.5, float("-inf")])

LEAST_KEYS, MOST_QUERIES = 1024, 16  # from the rules for splits
Call = tuple[AttentionSpec, Operands]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces may be as short as a block, so that these lengths have many pieces."""
    monkeypatch.setattr(split_kv, "SPLIT_KEYS", 1)


def paged(page_size: int = 16, dim: int = 64, heads: int = HEADS, dtype: torch.dtype = BF16, **call: Any) -> Call:
    generator = torch.Generator().manual_seed(page_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    k, v = normal(5, CAPACITY, HEADS_KV, dim), normal(5, CAPACITY, HEADS_KV, dim)
    pool = make_pool(k, v, LENGTHS_KV, page_size)
    given = {
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor([0, *LENGTHS_Q]).cumsum(0).int(),
        "max_seqlen_q": max(LENGTHS_Q),
        "seqused_kv": pool.seqused,
        "page_table": pool.page_table,
        "max_seqlen_kv": CAPACITY,
    }
    q = normal(sum(LENGTHS_Q) + 3, heads, dim)  # and rows without a sequence
    x, settings = bind_call(q=q, k=pool.k, v=pool.v, qkv_format="thd_2bshd", **given | call)
    return ops.spec_to_run(x, settings), x


def packed(fmt: str, **call: Any) -> Call:
    """Keys packed, or padded, with gaps between the sequences."""
    given = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (200, 0), **call}
    more = {"gap": 2, "padding": True, "num_heads": HEADS, "num_heads_kv": HEADS_KV, "dtype": BF16}
    return make_call(make_inputs(fmt, lengths_q=LENGTHS_Q, lengths_kv=LENGTHS_KV, head_dim_qk=64, head_dim_v=64, **more), **given)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (60, 0)},
    "window on the top left": {"attn_mask_type": "padding", "window_size": (40, 90), "bottom_right_diagonal": False},
    "sinks": {"softmax_type": "learnable", "softmax_offset": SINKS},
    "max_logit, softcap": {"return_max_logit": True, "softcap": 5.0},
    "alibi, sink": {"bias_type": "alibi", "softmax_type": "off-by-one"},
    "score_mod": {"score_mod": lambda score, b, h, i, j: score + 0.01 * (j - i) * (h + 1)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
}


def results_of(call: Call) -> list[Tensor]:
    return [t.fill_(float("nan")) for t in empty_outputs(*call)]


def run(call: Call, seed: int | None, **given: Any) -> list[Tensor]:
    """Returns out, lse and, if there is one, max_logit: by the portable kernel, or on a seed of the emulator."""
    spec, x = call
    out, lse, max_logit = found = results_of(call)
    largest = max_logit if spec.return_max_logit else None
    problem = triton_backend.to_problem(spec, x)
    if seed is None:
        attention_forward(problem, as_bshd(out, spec.q_format), lse, largest, splits=BY_LENGTHS)
    else:
        with emulated(seed, hopper_forward) as reports:
            hopper_forward.hopper_forward(problem, as_bshd(out, spec.q_format), lse, largest, splits=BY_LENGTHS, **given)
        findings = reports["_attn_fwd_hopper_kernel"].findings
        assert {finding.kind for finding in findings} <= HARMLESS, findings
    return found


def check(call: Call, found: list[Tensor]) -> None:
    spec, x = call
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    names = ("out", "lse", "max_logit") if spec.return_max_logit else ("out", "lse")
    for name, got, want, same_dtype in zip(names, found, exact, budget, strict=False):
        check_close(name, got, want, same_dtype)


def check_twice(call: Call, seed: int | None) -> None:
    """A second schedule gives bitwise identical results."""
    found = run(call, seed)
    check(call, found)
    for again, once in zip(run(call, seed and seed + 1), found[: 2 + call[0].return_max_logit], strict=False):
        assert torch.equal(again, once)


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", CALLS)
def test_features(name: str) -> None:
    call = paged(dtype=torch.float32, **CALLS[name])
    check(call, run(call, None))


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", CALLS)
def test_features_emulated(name: str) -> None:
    call = paged(**CALLS[name])
    check(call, run(call, 1 + list(CALLS).index(name)))


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("fmt", ["thd", "bshd", "sbhd", "thd_2bshd"])
def test_formats(fmt: str, seed: int | None) -> None:
    check_twice(packed(fmt), seed)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("heads", "dim"), [(6, 64), (2, 128), (4, 256)])
def test_heads_and_head_dims(heads: int, dim: int, seed: int | None) -> None:
    """Three query heads per key head, whose tile has rows without a head; one head; a head dim in two parts."""
    call = paged(heads=heads, dim=dim, bias_type="alibi")
    check(call, run(call, seed))


@without_gpu
def test_keys_in_fp8() -> None:
    k = torch.randn(5, CAPACITY, HEADS_KV, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    q = torch.randn(5, 2, HEADS, 32)
    key_options = {"seqused_kv": torch.tensor(LENGTHS_KV, dtype=torch.int32), "attn_mask_type": "padding_causal_bottom_right"}
    found, wanted = (
        run((ops.spec_to_run(x, settings), x), None)
        for x, settings in (
            bind_call(q=q, k=k, v=k, descale_k=torch.tensor(0.5), descale_v=torch.tensor(3.0), **key_options),
            bind_call(q=q, k=k.float() * 0.5, v=k.float() * 3.0, **key_options),
        )
    )
    for got, want in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def set_lengths(call: Call, generator: torch.Generator) -> None:
    """Changes the lengths of queries and keys, and the page table, in the call's tensors."""
    _, x = call
    lengths = torch.randint(0, CAPACITY + 1, (5,), generator=generator) // torch.randint(1, 40, (5,), generator=generator)
    x.seqused_kv.copy_(lengths)
    x.cu_seqlens_q[1:] = torch.randint(0, 3, (5,), generator=generator).cumsum(0)
    x.page_table.copy_(torch.randint(0, x.k.shape[0], x.page_table.shape, generator=generator))


def replayed(launches: list[Launch], seed: int | None) -> None:
    from flexattn import emulator

    for launch in launches:
        if "hopper" in launch.kernel.__name__:
            emulator.launch(launch.kernel, (launch.programs,), *launch.arguments, num_warps=4, seed=seed)
        else:
            make(launch, torch.device("cpu"))


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize(("seed", "replays"), [pytest.param(None, 20, marks=pytest.mark.slow), (3, 4)])
def test_the_same_launches_for_other_lengths(seed: int | None, replays: int) -> None:
    """A CUDA graph replays them like this: launches contain no lengths and no tables."""
    generator = torch.Generator().manual_seed(1)
    call = paged(dim=16 if seed is None else 64, dtype=torch.float32 if seed is None else BF16)
    spec, x = call
    x.k.nan_to_num_(), x.v.nan_to_num_()  # any page may have any row
    out, lse, _ = found = results_of(call)
    problem = triton_backend.to_problem(spec, x)
    forward = attention_forward if seed is None else hopper_forward.hopper_forward
    with pretended_device(0 if seed is None else 90, 4), recorded_launches() as launches:
        forward(problem, as_bshd(out, spec.q_format), lse, splits=BY_LENGTHS)
    assert [launch.kernel.__name__ for launch in launches][::2] == ["_split_plan_kernel", "_combine_splits_kernel"]
    for _ in range(replays):
        set_lengths(call, generator)
        for t in found:
            t.fill_(float("nan"))
        replayed(launches, seed)
        check(call, found)


@without_gpu
@pytest.mark.parametrize(
    ("band", "rows"),
    [
        ({}, 1),
        ({"window_right": 0, "bottom_right": True}, 3),
        ({"window_left": 70, "window_right": 20}, 7),
        ({"window_left": 70, "window_right": 0, "bottom_right": True}, 40),
        ({"window_left": 30}, 5),
    ],
)
def test_the_plan_counts_what_tiles_see(band: dict[str, Any], rows: int) -> None:
    lengths_q, lengths_kv = [rows, 0, max(1, rows - 2), rows, 1], [500, 7, 33, 0, 64]
    q, k = torch.zeros(5, rows, 6, 16), torch.zeros(5, 500, 2, 16)
    used_q, used_kv = (torch.tensor(lengths, dtype=torch.int32) for lengths in (lengths_q, lengths_kv))
    problem = Problem(q, k, k, softmax_scale=1.0, seqused_q=used_q, seqused_kv=used_kv, **band)
    tile = PlannedTile(heads=3, queries=4, seen=4, keys=32, writes_whole=False)
    plan = make_plan(problem, tile, 7)
    counts = []
    for len_q, len_kv in zip(lengths_q, lengths_kv, strict=True):
        shift = (len_kv - len_q) if problem.bottom_right else 0
        for first in range(0, rows, 4):
            i, j = torch.arange(first, first + 4)[:, None] + shift, torch.arange(len_kv)
            left, right = (10**6 if side is None else side for side in (problem.window_left, problem.window_right))
            blocks = ((j - i <= right) & (i - j <= left)).any(0).nonzero()[:, 0] // 32
            seen = int(blocks[-1] - blocks[0]) + 1 if len(blocks) else 1
            counts.append(2 * seen if first < len_q else 0)
    share = -(-sum(counts) // 7)
    assert plan.before_ptr.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist(), share]


@without_gpu
@pytest.mark.parametrize(
    ("lengths", "programs", "share"),
    [
        ([4096] * 64, 66, 128),  # complete tiles; shares of the same size have 125 blocks
        ([4096] * 64, 33, 256),
        ([4096] * 64, 40, 205),  # two tiles are too many
        ([4096] * 63 + [100], 66, 128),
        ([4096, *[32] * 63], 66, 3),
    ],
)
def test_shares_of_whole_tiles(lengths: list[int], programs: int, share: int) -> None:
    q, k = torch.zeros(64, 1, 4, 16), torch.zeros(64, 4096, 1, 16)
    problem = Problem(q, k, k, softmax_scale=1.0, seqused_kv=torch.tensor(lengths, dtype=torch.int32))
    assert int(make_plan(problem, PlannedTile(4, 8, 8, 32, False), programs).before_ptr[-1]) == share


@without_gpu
def test_one_long_sequence_among_short_ones_is_shared_evenly() -> None:
    used = torch.tensor([4096, *[32] * 63], dtype=torch.int32)
    q, k = torch.zeros(64, 1, 8, 16), torch.zeros(64, 4096, 2, 16)
    plan = make_plan(Problem(q, k, k, softmax_scale=1.0, seqused_kv=used), PlannedTile(4, 8, 8, 32, False), 132)
    total, share = plan.before_ptr[-2:].tolist()
    assert (plan.teams, plan.programs) == (2, 66)  # a team for the tile of each key head
    assert total == 128 + 63
    assert share == -(-total // 66)
    assert 128 / share > 40  # programs that have a part of the long one of one head; the fewest blocks that 66 programs can have


def test_teams_are_as_many_as_tiles_of_an_entry() -> None:
    """Or teams are a divisor of that number, if many programs had no team otherwise."""
    assert [split_kv._number_of_teams(n, 132) for n in (1, 2, 3, 4, 8, 40, 71)] == [1, 2, 3, 4, 8, 10, 1]
    assert [split_kv._number_of_teams(n, 3) for n in (1, 2, 3, 6)] == [1, 1, 3, 3]


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("programs", [4, 6])
def test_tiles_that_read_the_same_keys_emulated(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of a key head in tiles of their own, and two teams of six programs. Each team's third has keys of two sequences."""
    call = paged(heads=4, return_max_logit=True)
    monkeypatch.setattr(emulated_kernels, "PROGRAMS", programs)
    check(call, run(call, programs, group=1))


@pytest.mark.parametrize("capacity", [2048, 131072])
def test_memory_is_bounded_by_tiles_and_programs(capacity: int) -> None:
    """The cache's length does not matter: there are as many parts, with as many rows as a tile has queries and heads."""
    for sm, forward, programs in ((80, attention_forward, 2 * 132), (90, hopper_forward.hopper_forward, 132)):
        problem = problem_of(64, capacity)
        with pretended_device(sm, 132), recorded_launches() as launches:
            forward(problem, torch.empty_like(problem.q), problem.q.new_empty((64, 32, 1), dtype=torch.float32))
        assert [launch.kernel.__name__ for launch in launches][::2] == ["_split_plan_kernel", "_combine_splits_kernel"]
        parts = [t for t in launches[2].arguments if isinstance(t, Tensor) and t.dtype is torch.float32 and t.dim() == 3]
        most = 64 * 8 + programs // 8 * 8 - 8  # each of eight teams has its tiles and one part for each of its programs, minus one
        assert [tuple(t.shape) for t in parts[:2]] == [(most, 4, 128), (1, most, 4)]


def problem_of(batch: int, capacity: int, queries: int = 1, **more: Any) -> Problem:
    q, k = (torch.empty(batch, length, h, 128, dtype=BF16, device="meta") for length, h in ((queries, 32), (capacity, 8)))
    used = torch.empty(batch, dtype=torch.int32, device="meta")
    return Problem(q, k, k, **{"softmax_scale": 0.1, "seqused_kv": used, **more})


@pytest.mark.parametrize(
    ("problem", "is_by_lengths"),
    [
        (problem_of(64, 8192), True),
        (problem_of(64, 8192, MOST_QUERIES), True),
        (problem_of(64, 8192, MOST_QUERIES + 1), False),
        (problem_of(64, 8192, seqused_kv=None), False),  # all are as long as the cache
        (problem_of(1, 131072), False),  # one number is right for one sequence
        (problem_of(64, LEAST_KEYS - 1), False),
        (problem_of(64, 8192, window_left=99, window_right=0, bottom_right=True), False),  # no tile sees enough
        (problem_of(64, 8192, is_batch_invariant=True), False),
        (problem_of(2, LEAST_KEYS), True),
        (dataclasses.replace(problem_of(2, LEAST_KEYS), k=torch.empty(2, LEAST_KEYS, 4, 128, dtype=BF16, device="meta")), False),
    ],
)
def test_when_it_is_used(problem: Problem, is_by_lengths: bool) -> None:
    assert (number_of_splits(problem, 512, 132) == BY_LENGTHS) == is_by_lengths


def test_explained() -> None:
    problem = problem_of(64, 8192)
    why = "132 programs evenly share the work of 512 tiles with up to 8192 keys each"
    assert splits_of(problem, 512, 132) == (BY_LENGTHS, why)
    with pretended_device(80, 132):
        choice = choose(Forward(problem, problem.q, problem.q), Policy(portable_only="a test"))
    assert choice.family is PORTABLE_FORWARD
    assert _splits(choice._replace(splits=splits_of(problem, 512, 132))) == [f"keys split by their lengths: {why}"]


def compiled_launches(kinds: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Launch]]:
    for sm, dim in kinds:
        q, k = torch.zeros(8, 1, 32, dim, dtype=BF16), torch.zeros(512, 64, 8, dim, dtype=BF16)
        table, used = torch.zeros(8, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        more = {"window_right": 0, "bottom_right": True, "seqused_kv": used, "page_table": table, "max_seqlen_kv": 4096}
        for forward in (attention_forward, hopper_forward.hopper_forward)[: 1 + (sm == 90)]:
            with pretended_device(sm, 132), recorded_launches() as launches:
                forward(Problem(q, k, k, softmax_scale=0.1, **more), torch.zeros_like(q), torch.zeros(8, 32, 1))
            yield from ((sm, launch) for launch in launches)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([(sm, 128) for sm in (80, 90, 100)], marks=pytest.mark.slow),
        pytest.param([(90, 64), (90, 256)], marks=pytest.mark.exhaustive),
    ],
    ids=["some", "others"],
)
def test_compiled(kinds: list[tuple[int, int]]) -> None:
    launches = list(compiled_launches(kinds))
    reports = compile_sound([request_for(launch, sm) for sm, launch in launches])
    for (sm, launch), report in zip(launches, reports, strict=True):
        name = f"{launch.kernel.__name__} for {sm}: {report}"
        assert report.loop_spill_share <= (0.04 if sm == 100 else 0.0), name
        assert report.idle_barriers == 0, name
        assert not report.warnings, name
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm], name
        if "plan" in name or "combine" in name:
            assert report.spill_instructions == 0, name
        if "hopper" in name:  # a program's own copy of arguments, which it makes once
            assert report.spill_store_bytes <= 32, name
