"""Order of the query heads that share a key head, in backwards for sm_90: calls that alternate them, their order, gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn import emulator
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon import work_order
from flexattn.kernels_triton.gluon.query_walk import HeadParts, Walk, first_queries, next_queries, turn_of_program
from flexattn.kernels_triton.gluon.tile_scheduler import Work, swizzle_heads_for_l2
from flexattn.kernels_triton.gluon.work_order import walk_of_call
from flexattn.testing import make_call, make_dout, make_inputs
from tests.hopper.test_attention import FUSED, SPLIT, on_hopper
from tests.hopper.test_attention import check as check_on_gpu
from tests.hopper.test_attention import launches as launches
from tests.hopper.test_emulated import check, check_persistent
from tests.hopper.test_fp8_emulated import check_backward_of
from tests.support.gluon_calls import check_bits_repeat, without_gpu

TURN = 4
WHOLE = Walk(turn=2**20, wave=2**30)  # one head after the other


def problem_of(batch: int, tokens: int, heads: tuple[int, int], dim: int = 128, **more: Any) -> Problem:
    q, k = (torch.empty((batch, tokens, n, dim), dtype=torch.bfloat16, device="meta") for n in heads)
    return Problem(q, k, k, softmax_scale=0.1, **more)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "expected"),
    [
        (1, 8192, (64, 8), (2, Walk(TURN, 128))),  # 64 blocks of keys: a wave has the blocks of two heads
        (2, 4096, (64, 8), (4, Walk(TURN, 128))),
        (1, 16384, (64, 8), (1, Walk(TURN, 128))),
        (16, 1024, (32, 8), (16, Walk(TURN, 128))),
        (5, 3072, (32, 8), (5, Walk(TURN, 120))),
        (1, 6144, (64, 8), (8, Walk(TURN, 132))),  # two heads would leave 36 of 132 multiprocessors idle
        (1, 5120, (64, 8), (8, Walk(TURN, 132))),  # three leave 12, but two heads remain
        (3, 6144, (64, 8), (6, WHOLE)),  # too many heads to alternate
        (1, 32768, (64, 8), (6, WHOLE)),  # more blocks than multiprocessors
        (1, 8192, (8, 8), (6, None)),
    ],
    ids=str,
)
def test_waves(
    batch: int, tokens: int, heads: tuple[int, int], expected: tuple[int, Walk | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_order, "num_processors", lambda device: 132)
    assert walk_of_call(problem_of(batch, tokens, heads, window_right=0), tokens // 128, 6) == expected


def test_calls_without_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_order, "num_processors", lambda device: 132)
    call = (1, 8192, (64, 8))
    assert walk_of_call(problem_of(*call), 64, 6) == (6, None)
    assert walk_of_call(problem_of(*call, window_right=0, window_left=1023), 64, 6) == (6, None)
    assert walk_of_call(problem_of(*call, window_right=0, block_mask=object()), 64, 6) == (6, None)
    assert walk_of_call(problem_of(*call, dim=256, window_right=0), 64, 6) == (6, None)
    assert walk_of_call(problem_of(*call, dim=192, window_right=0), 64, 6, is_fused=True) == (2, Walk(TURN, 128))


@pytest.mark.parametrize(("tokens", "turn"), [(4096, WHOLE.turn), (4000, TURN)])
def test_packed_batches_have_turns_where_lengths_differ(tokens: int, turn: int) -> None:
    q, k = (torch.empty((tokens, n, 128), dtype=torch.bfloat16, device="meta") for n in (16, 4))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 1024, "max_seqlen_kv": 1024}
    assert walk_of_call(Problem(q, k, k, softmax_scale=0.1, window_right=0, **lengths), 8, 2) == (2, Walk(turn, WHOLE.wave))


class _Sequences(NamedTuple):
    batch: Any


class _Arguments(NamedTuple):
    work: Work
    lengths_kv: _Sequences


class _Block(NamedTuple):
    heads: Any
    num_blocks: Any
    turn: Any


@gluon.jit
def _work_of(blocks, heads, group, section, turn, wave):
    return Work(
        table_ptr=None,
        num_heads=heads * group,
        group_size=group,
        blocks=blocks,
        heads_per_l2_section=section,
        walk=Walk(turn=turn, wave=wave),
        parts=HeadParts(number=None, heads=None),
    )


@gluon.jit
def _turns_kernel(out_ptr, blocks, heads, batch, section, wave):
    work = _work_of(blocks, heads, 4, section, 3, wave)
    block, b_h = swizzle_heads_for_l2(gl.program_id(0), blocks, batch * heads, section)
    args = _Arguments(work=work, lengths_kv=_Sequences(batch=batch))
    gl.store(out_ptr + gl.program_id(0), turn_of_program(block, b_h % heads, b_h // heads, args))


@gluon.jit
def _walk_kernel(out_ptr, num_blocks, group, turn, size):
    work = _work_of(num_blocks, 1, group, 1, size, 1)
    block = _Block(heads=group, num_blocks=num_blocks, turn=turn)
    at = first_queries(block, work)
    for i in range(num_blocks * group):
        gl.store(out_ptr + 2 * i, at.head)
        gl.store(out_ptr + 2 * i + 1, at.n)
        at = next_queries(at, block, work)


def emulated(kernel: Any, programs: int, shape: tuple[int, ...], *arguments: int) -> list[Any]:
    """Returns the integers that the kernel wrote."""
    out = torch.full(shape, 99, dtype=torch.int32)
    assert not emulator.launch(kernel, (programs,), out, *arguments).findings
    return out.tolist()


@pytest.mark.parametrize(
    ("blocks", "heads", "batch", "section", "wave"),
    [(4, 2, 3, 2, 8), (3, 5, 1, 5, 4), (5, 3, 2, 4, 7), (2, 1, 1, 1, 2**30)],
    ids=str,
)
def test_every_other_wave_begins_at_the_last_queries(blocks: int, heads: int, batch: int, section: int, wave: int) -> None:
    tiles = blocks * heads * batch
    expected = [3 if t // wave % 2 else -3 for t in range(tiles)]
    assert emulated(_turns_kernel, tiles, (tiles,), blocks, heads, batch, section, wave) == expected


@pytest.mark.parametrize(
    ("num_blocks", "group", "turn", "expected"),
    [
        (5, 2, 2, [(0, [0]), (1, [0]), (0, [1, 2]), (1, [1, 2]), (0, [3, 4]), (1, [3, 4])]),
        (5, 2, -2, [(0, [3, 4]), (1, [3, 4]), (0, [1, 2]), (1, [1, 2]), (0, [0]), (1, [0])]),
        (4, 3, 2, [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (0, [2, 3]), (1, [2, 3]), (2, [2, 3])]),
        (3, 2, -1, [(0, [2]), (1, [2]), (0, [1]), (1, [1]), (0, [0]), (1, [0])]),
        (2, 3, 2**20, [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])]),
        (2, 2, -(2**20), [(0, [0, 1]), (1, [0, 1])]),
        (1, 4, 4, [(0, [0]), (1, [0]), (2, [0]), (3, [0])]),
    ],
    ids=str,
)
def test_heads_take_turns(num_blocks: int, group: int, turn: int, expected: list[tuple[int, list[int]]]) -> None:
    walked = emulated(_walk_kernel, 1, (num_blocks * group, 2), num_blocks, group, turn, abs(turn))
    assert walked == [[head, n] for head, blocks in expected for n in blocks]


# Keys that make two waves of complete heads, one list of all heads' blocks by length, and a packed batch, on four processors
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waves": ({"attn_mask_type": "causal"}, {"lengths_q": [250] * 2, "lengths_kv": [250] * 2, "num_heads_kv": 2}),
    "all heads": ({"attn_mask_type": "causal_bottom_right"}, {"lengths_q": [300], "lengths_kv": [330], "num_heads_kv": 2}),
    "packed": (
        {"attn_mask_type": "padding_causal"},
        {"lengths_q": [300, 0, 140], "lengths_kv": [300, 40, 190], "num_heads_kv": 1, "qkv_format": "thd", "gap": 3},
    ),
}


@pytest.fixture
def single_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_order, "_TURN", 1)
    monkeypatch.setattr(work_order, "num_processors", lambda device: 4)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.usefixtures("single_turns")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_emulated(name: str, dim: int) -> None:
    """Two kernels: one with a program for each block, and one with dynamic blocks; each head's data is read in its turn."""
    call, inputs = CALLS[name]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.3])
    inputs = inputs | {"num_heads": 4, "head_dim_qk": dim, "head_dim_v": dim}
    check(3, call | {"bias_type": "alibi", "alibi_slopes": slopes}, **inputs)
    check_persistent(4, call, "converting" if dim == 64 and name != "packed" else "persistent", **inputs)


@pytest.mark.slow
@pytest.mark.sample("name")
@without_gpu
@pytest.mark.usefixtures("single_turns")
@pytest.mark.parametrize("name", CALLS)
def test_fp8_emulated(name: str) -> None:
    call, inputs = CALLS[name]
    check_backward_of(5, call, num_heads=4, head_dim_qk=64, head_dim_v=64, is_persistent=name != "packed", **inputs)


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, turn: int, dim: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_order, "_TURN", turn)
    monkeypatch.setattr(work_order, "num_processors", lambda device: 4)
    call, inputs = CALLS[name]
    check_on_gpu(launches, call, num_heads=4, head_dim_qk=dim, head_dim_v=dim, **inputs)


@on_hopper
@pytest.mark.usefixtures("single_turns")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_bits_repeat(name: str, deterministic: bool, launches: list[str]) -> None:
    """Bits of dk and dv, and of dq if it is requested."""
    call, inputs = CALLS[name]
    given = make_inputs(num_heads=4, head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16, device="cuda", **inputs)
    spec, x = make_call(given, **call, deterministic=deterministic, return_max_logit=False)
    check_bits_repeat(spec, x, make_dout(given))
    assert set(launches[1:]) == set(SPLIT if deterministic else FUSED)
