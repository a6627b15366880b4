"""Whole attention kernels in the emulator: right and clean over formats, masks, lengths and schedules; planted bugs are found.

A planted bug is an edit of the kernels' text. Each must be reported on every seed, whichever order of events the seed gives. Edits
that look like bugs and are none must not be.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn import emulator
from tests.support import emulated_attention as emulated
from tests.support import gluon_attention

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


@pytest.mark.parametrize(("fmt", "mask", "window"), GRID)
def test_formats_and_masks(fmt: str, mask: str, window: tuple[int, int]) -> None:
    case = emulated.problem(qkv_format=fmt, padding=True, gap=2, mask=mask, window=window, dtype=torch.float16, **LENGTHS, **SHAPE)
    for seed in FEW[-2:]:
        forward(case, seed)
        backward(case, seed)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_ragged_lengths(length: int) -> None:
    case = emulated.problem(mask="causal", lengths_q=(length,), lengths_kv=(length,), dtype=torch.bfloat16, **SHAPE)
    for seed in FEW[-2:]:
        forward(case, seed, programs=2)
        if length > 1:  # the gradient of one logit is exactly 0 in the reference, which leaves no budget
            backward(case, seed)


@pytest.mark.sample("block_n", "programs")
@pytest.mark.parametrize(("block_n", "stages"), [(32, 1), (32, 3), (64, 1), (128, 2)])
@pytest.mark.parametrize("programs", [1, 5])
def test_tiles(block_n: int, stages: int, programs: int) -> None:
    for seed in FEW[-2:]:
        forward(emulated.problem(**EVERYTHING), seed, block_n=block_n, stages=stages, programs=programs)


@pytest.mark.parametrize("stages", [1, 3])
def test_backward_stages(stages: int) -> None:
    for seed in FEW[-2:]:
        backward(emulated.problem(**EVERYTHING), seed, stages=stages)


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


def dropped(line: str) -> list[tuple[str, str]]:
    return [(line, "pass")]


K_FULL = "mbarrier.wait(k_full.index(slot), phase)"
V_FULL = "mbarrier.wait(v_full.index(slot), phase)"
K_EMPTY = "mbarrier.wait(k_empty.index(slot), phase ^ 1)"
V_EMPTY = "mbarrier.wait(v_empty.index(slot), phase ^ 1)"
K_ARRIVE = "mbarrier.arrive(k_empty.index(slot), count=1)"
V_ARRIVE = "mbarrier.arrive(v_empty.index(slot), count=1)"
V_WAIT = "acc, p_operand = warpgroup_mma_wait(0, deps=[o_async, p_operand])"
K_EXPECT = "mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)"
V_EXPECT = "mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)"
S_WAIT = "s = warpgroup_mma_wait(0, deps=[s_async])"
Q_ARRIVE = "            mbarrier.arrive(q_empty.index(WG), count=1)\n"
OUT = "out_smem.index(WG).reshape([64, HEAD_DIM]).store(acc.to(k_smem.dtype))\n            "
STORED = "store_box(out_desc, [FAR, q_start + q_length, FAR - q_length + row0 + WG * 64, q_head + head, 0], out_smem.index(WG))"
SKIP = "                "

FORWARD_BUGS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "no wait for K": (dropped(K_FULL), {"race", "uninitialised-read"}),
    "no wait for V": (dropped(V_FULL), {"race"}),
    "no wait for Q": (dropped("mbarrier.wait(q_full.index(WG), turn & 1)"), {"race"}),
    "no wait for an empty slot of V": (dropped(V_EMPTY), {"race", "arrive-overflow"}),
    "no wait for an empty slot of K": (dropped(K_EMPTY), {"race", "arrive-overflow"}),
    "no wait for an empty Q": (dropped("mbarrier.wait(q_empty.index(wg), (turn & 1) ^ 1)"), {"race", "arrive-overflow"}),
    "no fence before out is stored": ([(OUT + "fence_async_shared()", OUT + "pass")], {"missing-fence"}),
    "the fence before the store to shared memory": (
        [(OUT + "fence_async_shared()", "fence_async_shared()\n            " + OUT.rstrip())],
        {"missing-fence"},
    ),
    "out overwritten while TMA reads it": ([("tma.store_wait(0)\n            out_smem", "out_smem")], {"race"}),
    "no wait for the last store of out": ([("tma.store_wait(0)\n    if WG == 0:", "if WG == 0:")], {"store-not-waited"}),
    "V released before its product": ([(V_WAIT, f"{V_ARRIVE}\n{SKIP}{V_WAIT}"), (f"{V_WAIT}\n{SKIP}{V_ARRIVE}", V_WAIT)], {"race"}),
    "K released before its product": ([(f"{S_WAIT}\n{SKIP}{K_ARRIVE}", f"{K_ARRIVE}\n{SKIP}{S_WAIT}")], {"race"}),
    "Q released before its last product": (
        [
            (Q_ARRIVE, ""),
            (
                "            for block in range(first, end):\n"
                + SKIP
                + "slot = count % STAGES\n"
                + SKIP
                + "phase = (count // STAGES) & 1\n"
                + SKIP
                + K_FULL,
                Q_ARRIVE
                + "            for block in range(first, end):\n"
                + SKIP
                + "slot = count % STAGES\n"
                + SKIP
                + "phase = (count // STAGES) & 1\n"
                + SKIP
                + K_FULL,
            ),
        ],
        {"race"},
    ),
    "Q never released": ([(Q_ARRIVE, "")], {"deadlock"}),
    "the producer waits for the other parity": ([(K_EMPTY, K_EMPTY.replace("phase ^ 1", "phase"))], {"deadlock"}),
    "the producer's parity never turns": (
        [(K_EMPTY, K_EMPTY.replace("phase ^ 1", "1"))],
        {"race", "phase-alias", "arrive-overflow"},
    ),
    "the consumer's parity turns every time": (
        [(K_FULL, K_FULL.replace("phase", "count & 1"))],
        {"deadlock", "phase-alias", "race"},
    ),
    "the parity of Q never turns": ([("q_full.index(WG), turn & 1", "q_full.index(WG), 0")], {"phase-alias", "race"}),
    "twice the bytes of V expected": ([(V_EXPECT, V_EXPECT[:-1] + " * 2)")], {"deadlock"}),
    "half the bytes of V expected": ([(V_EXPECT, V_EXPECT[:-1] + " // 2)")], {"expect-bytes"}),
    "16 bytes of K too many expected": ([(K_EXPECT, K_EXPECT[:-1] + " + 16)")], {"deadlock"}),
    "K counts on V's barrier": ([("k_full.index(slot), k_smem", "v_full.index(slot), k_smem")], {"deadlock", "expect-bytes"}),
    "V releases K's barrier": ([(V_ARRIVE, K_ARRIVE)], {"deadlock", "phase-alias", "arrive-overflow"}),
    "one arrival empties K": (
        [("k_empty = barriers(STAGES, 2)", "k_empty = barriers(STAGES, 1)")],
        {"phase-alias", "arrive-overflow"},
    ),
    "two arrivals fill V": ([("v_full = barriers(STAGES, 1)", "v_full = barriers(STAGES, 2)")], {"deadlock"}),
    "a barrier without init": (
        [("v_empty = barriers(STAGES, 2)", "v_empty = barriers(0, 2)")],
        {"illegal-program", "barrier-uninitialised", "shared-index"},
    ),
    "S waited for with one outstanding": ([(S_WAIT, S_WAIT.replace("(0,", "(1,"))], {"wgmma-wait"}),
    "out waited for with one outstanding": ([(V_WAIT, V_WAIT.replace("(0,", "(1,"))], {"wgmma-wait"}),
    "S used without a wait": ([(S_WAIT, "s = s_async")], {"illegal-program"}),
    "K loaded to the next slot": (
        [("k_full.index(slot), k_smem.index(slot)", "k_full.index(slot), k_smem.index((slot + 1) % STAGES)")],
        {"race"},
    ),
    "V read from the next slot": (
        [("v_smem.index(slot).reshape", "v_smem.index((slot + 1) % STAGES).reshape")],
        {"race", "uninitialised-read"},
    ),
    "the turns of the warpgroups swapped": ([("bar_arrive(10 - WG)", "bar_arrive(9 + WG)")], {"deadlock", "named-barrier"}),
    "nobody has the first turn": ([("if WG == 1:\n        bar_arrive(9)", "if WG == 2:\n        bar_arrive(9)")], {"deadlock"}),
    "half the threads at a named barrier": ([("{number}, 256;", "{number}, {128 if kind == 'sync' else 256};")], {"named-barrier"}),
    "a named barrier of Triton's own": (
        [
            ("bar_arrive(9)", "bar_arrive(2)"),
            ("bar_sync(9 + WG)", "bar_sync(2 + WG)"),
            ("bar_arrive(10 - WG)", "bar_arrive(3 - WG)"),
            ("bar_sync(9)  # takes", "bar_sync(2)  # takes"),
        ],
        {"named-barrier"},
    ),
    "a row's factor in the wrong layout": (
        [("gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]", "alpha[:, None]")],
        {"illegal-program"},
    ),
    "more registers than there are": ([("[240, 24])", "[240, 248])")], {"register-budget"}),
    "more shared memory than there is": (
        [("[STAGES] + v_desc.block_type.shape", "[STAGES * 64] + v_desc.block_type.shape")],
        {"smem-limit"},
    ),
    "the table of sequences read past its end": ([("gl.load(entry + 6)", "gl.load(entry + 700)")], {"out-of-bounds"}),
    "all programs take every tile": (
        [("for tile in range(gl.program_id(0), tiles, gl.num_programs(0))", "for tile in range(0, tiles, 1)")],
        {"global-write-race"},
    ),
}

DS = "ds_smem.index(WG).store(ds)\n            "
BACKWARD_BUGS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "no fence after dS": ([(DS + "fence_async_shared()", DS + "pass")], {"missing-fence"}),
    "no barrier before both halves of dS are read": (
        [("bar_sync(9)  # both halves", "pass  # both halves")],
        {"race", "named-barrier"},
    ),
    "no barrier after dS is read": ([("bar_sync(10)  # both have read dS", "pass")], {"race", "named-barrier"}),
    "dQ overwritten while TMA reads it": ([("tma.store_wait(0)\n            dq_smem", "dq_smem")], {"race"}),
    "Q released before dK": (
        [
            ("            mbarrier.arrive(q_empty.index(slot), count=1)\n", ""),
            (
                "            bar_sync(9)  # both halves",
                "            mbarrier.arrive(q_empty.index(slot), count=1)\n            bar_sync(9)  # both halves",
            ),
        ],
        {"race"},
    ),
    "dK waited for with three outstanding": (
        [("warpgroup_mma_wait(2, deps=[dk_async", "warpgroup_mma_wait(3, deps=[dk_async")],
        {"wgmma-wait"},
    ),
    "only K expected": (
        [("k_desc.block_type.nbytes * 2 + v_desc.block_type.nbytes * 2", "k_desc.block_type.nbytes * 2")],
        {"expect-bytes"},
    ),
    "dQ stored and not added": ([("reduce_add(dq_desc", "store_box(dq_desc")], {"global-write-race"}),
    "no wait for K and V": (dropped("mbarrier.wait(kv_full, 0)"), {"race"}),
    "no wait for dout": (dropped("mbarrier.wait(dout_full.index(slot), phase)"), {"race"}),
    "no wait for the last stores": (
        [("store_box(dv_desc, place, v_smem.index(WG))\n    tma.store_wait(0)", "store_box(dv_desc, place, v_smem.index(WG))")],
        {"store-not-waited"},
    ),
}

WRONG_NUMBERS = {
    "a product of the wrong half of dS": [("ds_smem.index(1).permute", "ds_smem.index(0).permute")],
    "dQ without its scale": [("dq * scale", "dq")],
}

BENIGN_FORWARD = {
    # the ping-pong only orders the warpgroups' turns at the tensor cores
    "no turns of the warpgroups": [
        ("bar_sync(9 + WG)", "pass"),
        ("bar_arrive(10 - WG)", "pass"),
        ("bar_arrive(9)  # the first", "pass  #"),
        ("bar_sync(9)  # takes", "pass  #"),
    ],
    # the release of V, which comes later, orders it
    "an earlier wait for V": [(V_FULL, "pass"), (K_FULL, f"{K_FULL}\n{SKIP}{V_FULL}")],
    "an expect of its own for each half of the bytes": [
        ("k_full = barriers(STAGES, 1)", "k_full = barriers(STAGES, 2)"),
        (K_EXPECT, f"{K_EXPECT[:-1]} // 2)\n{SKIP}{K_EXPECT[:-1]} // 2)"),
    ],
}
BENIGN_BACKWARD = {
    # TMA fills their dout with zeros, and what they add is 0
    "rows past the end count": [("seen & (rows < q_length)[None, :]", "seen & (rows >= 0)[None, :]")],
    # q_empty, which the producer waits for first and consumers release last, covers it
    "no release of dout": [
        ("mbarrier.wait(dout_empty.index(slot), phase ^ 1)", "pass"),
        ("mbarrier.arrive(dout_empty.index(slot), count=1)", "pass"),
    ],
    # every warpgroup has passed barrier 10 since its last product with K
    "no barrier before dK overwrites K": [("bar_sync(9)  # both have read K", "pass")],
}

SMALL = {"num_heads": 2, "num_heads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16, "mask": "no_mask"}
SMALL_FORWARD: dict[str, Any] = dict(SMALL, lengths_q=(200,), lengths_kv=(200,))
SMALL_BACKWARD: dict[str, Any] = dict(SMALL, head_dim_qk=128, head_dim_v=128, lengths_q=(200,), lengths_kv=(200,))


def check_found(found: list[emulator.Report], wanted: set[str]) -> None:
    for report in found:
        assert wanted & set(report.kinds), f"wanted one of {sorted(wanted)}\n{report}"


@pytest.mark.sample
@pytest.mark.parametrize("bug", FORWARD_BUGS)
@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_forward_bug(bug: str, seeds: Any, tmp_path: Path) -> None:
    edits, wanted = FORWARD_BUGS[bug]
    kernels, case = emulated.edited(edits, tmp_path), emulated.problem(**SMALL_FORWARD)
    check_found([emulated.forward(kernels, case, seed, programs=2, block_n=32)[0] for seed in seeds], wanted)


@pytest.mark.sample
@pytest.mark.parametrize("bug", BACKWARD_BUGS)
@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_backward_bug(bug: str, seeds: Any, tmp_path: Path) -> None:
    edits, wanted = BACKWARD_BUGS[bug]
    kernels, case = emulated.edited(edits, tmp_path), emulated.problem(**SMALL_BACKWARD)
    check_found([emulated.backward(kernels, case, seed)[0] for seed in seeds], wanted)


@pytest.mark.parametrize("bug", WRONG_NUMBERS)
def test_wrong_numbers_are_wrong(bug: str, tmp_path: Path) -> None:
    kernels, case = emulated.edited(WRONG_NUMBERS[bug], tmp_path), emulated.problem(**SMALL_BACKWARD)
    for seed in FEW:
        report, gradients = emulated.backward(kernels, case, seed)
        assert not report.bugs
        with pytest.raises(AssertionError, match="error"):
            emulated.check_backward(case, report, gradients)


@pytest.mark.parametrize("edit", BENIGN_FORWARD)
def test_legal_forward(edit: str, tmp_path: Path) -> None:
    kernels = emulated.edited(BENIGN_FORWARD[edit], tmp_path)
    for seed in FEW:
        forward(emulated.problem(**SMALL_FORWARD), seed, kernels, programs=2, block_n=32)


@pytest.mark.parametrize("edit", BENIGN_BACKWARD)
def test_legal_backward(edit: str, tmp_path: Path) -> None:
    kernels = emulated.edited(BENIGN_BACKWARD[edit], tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize(("line", "statement"), STATEMENTS, ids=[f"line {line}" for line, _ in STATEMENTS])
def test_every_synchronisation_is_missed(line: int, statement: str, tmp_path: Path) -> None:
    """Each wait, arrive, expect, fence and barrier deleted in turn: found, unless the kernel does not need it."""
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
