"""Whole attention kernels in the emulator: right and clean over formats, masks, lengths and schedules; injected faults are found.

Every seed, with any order of events, must report each fault. If a change only looks like a fault, no seed may report it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from flexattn import emulator
from tests.support import emulated_attention as emulated
from tests.support import gluon_attention, inject
from tests.support.inject import add, assign, call_instead, drop, move, with_argument, wrong_phase

SEEDS = range(20)
FEW = (0, 1, 2, 5)  # eager, lazy, round-robin and one random schedule

EVERYTHING: dict[str, Any] = {  # ragged, an empty side each, rows that see nothing, grouped heads
    "qkv_format": "thd",
    "gap": 3,
    "lengths_q": (100, 0, 140, 1),
    "lengths_kv": (150, 40, 70, 0),
    "mask": "padding_causal_bottom_right",
    "num_heads": 4,
    "num_heads_kv": 2,
    "head_dim_qk": 128,
    "head_dim_v": 128,
    "dtype": torch.bfloat16,
}
LENGTHS = {"lengths_q": (70, 0, 130), "lengths_kv": (130, 9, 65)}
SHAPE = {"num_heads": 2, "num_heads_kv": 1, "head_dim_qk": 128, "head_dim_v": 128}
MASKS = (
    ("no_mask", "padding", (-1, -1)),
    ("causal", "padding_causal", (-1, -1)),
    ("bottom right", "padding_causal_bottom_right", (-1, -1)),
    ("window", "padding", (40, 20)),
    ("one-sided window", "padding_causal", (30, 0)),
)
FORMATS = ("bshd", "sbhd", "bhsd", "thd", "thd_2bshd")
GRID = [
    pytest.param(fmt, mask, window, id=f"{fmt}-{name}", marks=[] if default else [pytest.mark.exhaustive])
    for f, fmt in enumerate(FORMATS)
    for m, (name, mask, window) in enumerate(MASKS)
    for default in [f == m or fmt == "thd"]
]


def forward(case: emulated.Problem, seed: int, kernels: Any = gluon_attention, **tile: int) -> None:
    emulated.check_forward(case, *emulated.forward(kernels, case, seed, **tile))


def backward(case: emulated.Problem, seed: int, kernels: Any = gluon_attention, **tile: int) -> None:
    emulated.check_backward(case, *emulated.backward(kernels, case, seed, **tile))


@pytest.mark.slow
@pytest.mark.parametrize("run", [forward, backward])
def test_twenty_schedules(run: Any) -> None:
    for seed in SEEDS:
        run(emulated.problem(**EVERYTHING), seed)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(("fmt", "mask", "window"), GRID)
def test_formats_and_masks(fmt: str, mask: str, window: tuple[int, int]) -> None:
    case = emulated.problem(qkv_format=fmt, padding=True, gap=2, mask=mask, window=window, dtype=torch.float16, **LENGTHS, **SHAPE)
    for seed in FEW[-2:]:
        forward(case, seed)
        backward(case, seed)


@pytest.mark.sample
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_ragged_lengths(length: int) -> None:
    case = emulated.problem(mask="causal", lengths_q=(length,), lengths_kv=(length,), dtype=torch.bfloat16, **SHAPE)
    for seed in FEW[-2:]:
        forward(case, seed, programs=2)
        if length > 1:  # the gradient of one logit is exactly 0 in the reference, which leaves no budget
            backward(case, seed)


@pytest.mark.slow
@pytest.mark.sample("block_n", "stages", "programs")
@pytest.mark.parametrize(("block_n", "stages"), [(32, 1), (32, 3), (64, 1), (128, 2)])
@pytest.mark.parametrize("programs", [1, 5])
def test_tiles(block_n: int, stages: int, programs: int) -> None:
    for seed in FEW[-2:]:
        forward(emulated.problem(**EVERYTHING), seed, block_n=block_n, stages=stages, programs=programs)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_backward_stages(stages: int) -> None:
    for seed in FEW[-2:]:
        backward(emulated.problem(**EVERYTHING), seed, stages=stages)


@pytest.mark.slow
def test_head_dim_64() -> None:
    case = emulated.problem(**(EVERYTHING | {"head_dim_qk": 64, "head_dim_v": 64}))
    for seed in FEW:
        forward(case, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fmt", "mask", "window"), [param.values for param in GRID])
def test_twenty_schedules_of_each(fmt: str, mask: str, window: tuple[int, int]) -> None:
    case = emulated.problem(qkv_format=fmt, padding=True, gap=2, mask=mask, window=window, dtype=torch.bfloat16, **LENGTHS, **SHAPE)
    for seed in SEEDS:
        forward(case, seed)
        backward(case, seed)


Faults = inject.Fault | list[inject.Fault] | list[tuple[str, str]]
"""Calls that are not as they should be, or (old, new) text where no call is concerned."""

IN_FORWARD, IN_BACKWARD = {"within": "fwd_consumer"}, {"within": "bwd_consumer"}
FORWARD_FAULTS: dict[str, tuple[Faults, set[str]]] = {
    "no wait for K": (drop("wait(k_full)"), {"race", "uninitialised-read"}),
    "no wait for V": (drop("wait(v_full)"), {"race"}),
    "no wait for Q": (drop("wait(q_full)", **IN_FORWARD), {"race"}),
    "no wait for an empty slot of V": (drop("wait(v_empty)"), {"race", "arrive-overflow"}),
    "no wait for an empty slot of K": (drop("wait(k_empty)"), {"race", "arrive-overflow"}),
    "no wait for an empty Q": (drop("wait(q_empty)", within="fwd_producer"), {"race", "arrive-overflow"}),
    "no fence before out is stored": (drop("fence_async_shared()", **IN_FORWARD), {"missing-fence"}),
    "the fence before the store to shared memory": (
        move("fence_async_shared()", before="store(acc)", **IN_FORWARD),
        {"missing-fence"},
    ),
    "out overwritten while TMA reads it": (drop("tma.store_wait()", **IN_FORWARD, nth=0), {"race"}),
    "no wait for the last store of out": (drop("tma.store_wait()", **IN_FORWARD, nth=1), {"store-not-waited"}),
    "V released before its product": (move("arrive(v_empty)", before="warpgroup_mma_wait(o_async)"), {"race"}),
    "K released before its product": (move("arrive(k_empty)", before="warpgroup_mma_wait(s_async)", **IN_FORWARD), {"race"}),
    "Q released before its products": (move("arrive(q_empty)", after="wait(q_full)", **IN_FORWARD), {"race"}),
    "Q never released": (drop("arrive(q_empty)", **IN_FORWARD), {"deadlock"}),
    "the producer waits for the other parity": (wrong_phase("wait(k_empty)"), {"deadlock"}),
    "the producer's parity never turns": (with_argument("wait(k_empty)", 1, "1"), {"race", "phase-alias", "arrive-overflow"}),
    "the consumer's parity turns every time": (with_argument("wait(k_full)", 1, "count & 1"), {"deadlock", "phase-alias", "race"}),
    "the parity of Q never turns": (with_argument("wait(q_full)", 1, "0", **IN_FORWARD), {"phase-alias", "race"}),
    "twice the bytes of V expected": (with_argument("mbarrier.expect(v_full)", 1, "{} * 2"), {"deadlock"}),
    "half the bytes of V expected": (with_argument("mbarrier.expect(v_full)", 1, "{} // 2"), {"expect-bytes"}),
    "16 bytes of K too many expected": (with_argument("mbarrier.expect(k_full)", 1, "{} + 16"), {"deadlock"}),
    "K counts on V's barrier": (with_argument("load_rows(k_desc, k_full)", 5, "v_full.index(slot)"), {"deadlock", "expect-bytes"}),
    "V releases K's barrier": (
        with_argument("arrive(v_empty)", 0, "k_empty.index(slot)"),
        {"deadlock", "phase-alias", "arrive-overflow"},
    ),
    "one arrival empties K": (assign("k_empty", "barriers(STAGES, 1)"), {"phase-alias", "arrive-overflow"}),
    "two arrivals fill V": (assign("v_full", "barriers(STAGES, 2)"), {"deadlock"}),
    "a barrier without init": (assign("v_empty", "barriers(0, 2)"), {"illegal-program", "barrier-uninitialised", "shared-index"}),
    "S waited for with one outstanding": (with_argument("warpgroup_mma_wait(s_async)", 0, "1", **IN_FORWARD), {"wgmma-wait"}),
    "out waited for with one outstanding": (with_argument("warpgroup_mma_wait(o_async)", 0, "1"), {"wgmma-wait"}),
    "S used without a wait": (assign("s", "s_async", **IN_FORWARD, nth=0), {"illegal-program"}),
    "K loaded to the next slot": (with_argument("load_rows(k_desc, k_full)", 6, "k_smem.index((slot + 1) % STAGES)"), {"race"}),
    "V read from the next slot": (
        with_argument("warpgroup_mma(v_smem)", 1, "v_smem.index((slot + 1) % STAGES).reshape([BLOCK_N, HEAD_DIM])"),
        {"race", "uninitialised-read"},
    ),
    "the turns of the warpgroups swapped": (with_argument("bar_arrive(10 - WG)", 0, "9 + WG"), {"deadlock", "named-barrier"}),
    "nobody has the first turn": (drop("bar_arrive(9)", **IN_FORWARD), {"deadlock"}),
    "half the threads at a named barrier": ([("{number}, 256;", "{number}, {128 if kind == 'sync' else 256};")], {"named-barrier"}),
    "a named barrier of Triton's own": (
        [
            with_argument("bar_arrive(9)", 0, "2", **IN_FORWARD),
            with_argument("bar_sync(9 + WG)", 0, "2 + WG"),
            with_argument("bar_arrive(10 - WG)", 0, "3 - WG"),
            with_argument("bar_sync(9)", 0, "2", **IN_FORWARD),
        ],
        {"named-barrier"},
    ),
    "a row's factor in the wrong layout": (assign("acc", "acc * alpha[:, None]", **IN_FORWARD, nth=1), {"illegal-program"}),
    "more registers than there are": (
        with_argument("gl.warp_specialize()", 2, "[240, 248]", within="attention_fwd"),
        {"register-budget"},
    ),
    "more shared memory than there is": (
        with_argument("gl.allocate_shared_memory(v_desc)", 1, "[STAGES * 64] + v_desc.block_type.shape", within="attention_fwd"),
        {"smem-limit"},
    ),
    "the table of sequences read past its end": (with_argument("gl.load(entry + 6)", 0, "entry + 700"), {"out-of-bounds"}),
    "all programs take every tile": (
        [("for tile in range(gl.program_id(0), tiles, gl.num_programs(0))", "for tile in range(0, tiles, 1)")],
        {"global-write-race"},
    ),
}

BACKWARD_FAULTS: dict[str, tuple[Faults, set[str]]] = {
    "no fence after dS": (drop("fence_async_shared()", **IN_BACKWARD, nth=0), {"missing-fence"}),
    "no barrier before both halves of dS are read": (drop("bar_sync(9)", **IN_BACKWARD, nth=0), {"race", "named-barrier"}),
    "no barrier after dS is read": (drop("bar_sync(10)"), {"race", "named-barrier"}),
    "dQ overwritten while TMA reads it": (drop("tma.store_wait()", **IN_BACKWARD, nth=0), {"race"}),
    "Q released before dK": (move("arrive(q_empty)", before="bar_sync(9)", **IN_BACKWARD, nth_there=0), {"race"}),
    "dK waited for with three outstanding": (with_argument("warpgroup_mma_wait(dk_async)", 0, "3"), {"wgmma-wait"}),
    "only K expected": (with_argument("mbarrier.expect(kv_full)", 1, "k_desc.block_type.nbytes * 2"), {"expect-bytes"}),
    "dQ stored and not added": (call_instead("reduce_add(dq_desc)", "store_tile"), {"global-write-race"}),
    "no wait for K and V": (drop("wait(kv_full)"), {"race"}),
    "no wait for dout": (drop("wait(dout_full)"), {"race"}),
    "no wait for the last stores": (drop("tma.store_wait()", **IN_BACKWARD, nth=1), {"store-not-waited"}),
}

WRONG_NUMBERS = {
    "a product of the wrong half of dS": with_argument("warpgroup_mma(ds_smem.index(1))", 0, "ds_smem.index(0).permute([1, 0])"),
    "dQ without its scale": with_argument("store(dq * scale)", 0, "dq"),
}

BENIGN_FORWARD: dict[str, Faults] = {
    # the ping-pong only orders the warpgroups' turns at the tensor cores
    "no turns of the warpgroups": [
        *(drop(call, **IN_FORWARD) for call in ("bar_sync(9 + WG)", "bar_arrive(10 - WG)", "bar_arrive(9)", "bar_sync(9)"))
    ],
    # the release of V, which comes later, orders it
    "an earlier wait for V": move("wait(v_full)", before="bar_sync(9 + WG)"),
    "an expect of its own for each half of the bytes": [
        assign("k_full", "barriers(STAGES, 2)"),
        with_argument("mbarrier.expect(k_full)", 1, "{} // 2"),
        add("mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes // 2)", before="mbarrier.expect(k_full)"),
    ],
}
BENIGN_BACKWARD: dict[str, Faults] = {
    # TMA fills their dout with zeros, so they add 0
    "rows past the end count": with_argument("gl.where(seen)", 0, "seen & (rows >= 0)[None, :]", **IN_BACKWARD),
    # q_empty covers it: the producer waits for it first, and consumers release it last
    "no release of dout": [drop("wait(dout_empty)"), drop("arrive(dout_empty)")],
    # every warpgroup has passed barrier 10 since its last product with K
    "no barrier before dK overwrites K": drop("bar_sync(9)", **IN_BACKWARD, nth=1),
}

SMALL = {"num_heads": 2, "num_heads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16, "mask": "no_mask"}
SMALL_FORWARD: dict[str, Any] = dict(SMALL, lengths_q=(200,), lengths_kv=(200,))
SMALL_BACKWARD: dict[str, Any] = dict(SMALL, head_dim_qk=128, head_dim_v=128, lengths_q=(200,), lengths_kv=(200,))


def with_faults(faults: Faults, folder: Path) -> ModuleType:
    """Returns a copy of the kernels with faults."""
    if isinstance(faults, list) and isinstance(faults[0], tuple):
        return emulated.edited(cast("list[tuple[str, str]]", faults), folder)
    return inject.copy_with(gluon_attention, cast("inject.Fault | list[inject.Fault]", faults), folder)


def check_found(found: list[emulator.Report], wanted: set[str]) -> None:
    for report in found:
        assert wanted & set(report.kinds), f"wanted one of {sorted(wanted)}\n{report}"


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("fault", FORWARD_FAULTS)
@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_fault_of_the_forward_is_found(fault: str, seeds: Any, tmp_path: Path) -> None:
    faults, wanted = FORWARD_FAULTS[fault]
    kernels, case = with_faults(faults, tmp_path), emulated.problem(**SMALL_FORWARD)
    check_found([emulated.forward(kernels, case, seed, programs=2, block_n=32)[0] for seed in seeds], wanted)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_fault_of_the_backward_is_found(fault: str, seeds: Any, tmp_path: Path) -> None:
    faults, wanted = BACKWARD_FAULTS[fault]
    kernels, case = with_faults(faults, tmp_path), emulated.problem(**SMALL_BACKWARD)
    check_found([emulated.backward(kernels, case, seed)[0] for seed in seeds], wanted)


@pytest.mark.slow
@pytest.mark.sample("fault")
@pytest.mark.parametrize("fault", WRONG_NUMBERS)
def test_wrong_numbers_are_wrong(fault: str, tmp_path: Path) -> None:
    kernels, case = with_faults(WRONG_NUMBERS[fault], tmp_path), emulated.problem(**SMALL_BACKWARD)
    for seed in FEW:
        report, gradients = emulated.backward(kernels, case, seed)
        assert not report.bugs
        with pytest.raises(AssertionError, match="error"):
            emulated.check_backward(case, report, gradients)


@pytest.mark.slow
@pytest.mark.sample("edit")
@pytest.mark.parametrize("edit", BENIGN_FORWARD)
def test_legal_change_of_the_forward_is_none(edit: str, tmp_path: Path) -> None:
    kernels = with_faults(BENIGN_FORWARD[edit], tmp_path)
    for seed in FEW:
        forward(emulated.problem(**SMALL_FORWARD), seed, kernels, programs=2, block_n=32)


@pytest.mark.slow
@pytest.mark.sample("edit")
@pytest.mark.parametrize("edit", BENIGN_BACKWARD)
def test_legal_change_of_the_backward_is_none(edit: str, tmp_path: Path) -> None:
    kernels = with_faults(BENIGN_BACKWARD[edit], tmp_path)
    for seed in FEW:
        backward(emulated.problem(**SMALL_BACKWARD), seed, kernels)


SYNCHRONISES = re.compile(
    r"^ +((mbarrier\.(wait|arrive|expect)|fence_async_shared|bar_sync|bar_arrive|tma\.store_wait)\(.*\))", re.MULTILINE
)
STATEMENTS = [
    (text.count("\n", 0, match.start(1)) + 1, match[1])
    for text in [emulated.KERNELS.read_text()]
    for match in SYNCHRONISES.finditer(text)
]
SUPERFLUOUS = {  # each is among the legal edits above, or only tidies up
    "mbarrier.wait(dout_empty.index(slot), phase ^ 1)",
    "bar_sync(9)  # both have read K",
    "bar_sync(9)  # takes up the last arrival",
}


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize(("line", "statement"), STATEMENTS, ids=[f"line {line}" for line, _ in STATEMENTS])
def test_every_synchronisation_is_missed(line: int, statement: str, tmp_path: Path) -> None:
    """Each wait, arrive, expect, fence and barrier is deleted in turn: the emulator finds it if the kernel needs it."""
    lines = emulated.KERNELS.read_text().splitlines(keepends=True)
    needed = not any(known in lines[line - 1] for known in SUPERFLUOUS)
    is_forward = line < next(number for number, text in enumerate(lines, 1) if "def bwd_producer" in text)
    lines[line - 1] = lines[line - 1].replace(statement, "pass")
    kernels = emulated.edited([(emulated.KERNELS.read_text(), "".join(lines))], tmp_path)
    for seed in FEW[::3]:
        if is_forward:
            report, *_ = emulated.forward(kernels, emulated.problem(**SMALL_FORWARD), seed, programs=2, block_n=32)
        else:
            report, *_ = emulated.backward(kernels, emulated.problem(**SMALL_BACKWARD), seed)
        assert bool(report.bugs) == needed, f"{statement}\n{report}"
