"""The bench of the kernels for mma.sync: its cells, tiles, table and rules, and the committed rules of the first run."""

from __future__ import annotations

import itertools
import json
from statistics import geometric_mean
from typing import Any

import pytest
import torch

from flexattn.bench import command, mma, page, record, rows
from flexattn.bench.implementations import PORTABLE, Unavailable
from flexattn.bench.inputs import make_tensors
from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import OLDER, WORKLOADS, Workload, select, sweep, windowed
from flexattn.kernels_triton.common.crossovers import CROSSOVERS, Rule
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.mma import tiles
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.conftest import ROOT
from tests.support.rules import is_repeated

FIRST = "mma_first_h200.json"
LATER = ("mma_sm_80_tiles_h200.json", "mma_sm_89_tiles_h200.json")  # of tiles that came after the other runs
DIMS = (64, 96, 128, 256)


def recorded(us: dict[tuple[str, str, str], float], name: str = "sm_80 code on an NVIDIA H200") -> Record:
    """Returns a record of (implementation, workload, direction) with times."""
    made = [Row(i, "1", w, direction, "measured", us=time) for (i, w, direction), time in us.items()]
    workloads: dict[str, Workload] = {w: WORKLOADS[w] for _, w, _ in us}
    return Record("x", None, {"type": "cuda", "name": name, "capability": [9, 0]}, {}, None, {}, workloads, made)


def test_the_preset_has_sixty_cells_of_every_kind() -> None:
    chosen = select([OLDER])
    assert sum(1 + ("backward" in w.directions) for w in chosen) >= 60
    assert {w.head_dim_qk for w in chosen} == {*DIMS, 192}
    assert {256, 512, 1024, 4096, 8192, 16384} <= {w.seqlen_q for w in chosen}
    assert all(any(test(w) for w in chosen) for test in (lambda w: w.is_ragged, lambda w: w.score, lambda w: w.group_size > 1))
    assert {WORKLOADS[f"older-d{d}-window-s4096"] for d in (64, 128, 256)} <= set(chosen)


@pytest.mark.parametrize(("kind", "head_dim"), list(itertools.product(mma.CANDIDATES, DIMS)))
def test_the_committed_tiles_are_among_the_candidates(kind: str, head_dim: int) -> None:
    """And each candidate is written as it is read."""
    x = torch.empty(1, 4096, 2, head_dim, dtype=torch.bfloat16, device="meta")
    for capability, right in itertools.product((80, 89), (0, None)):
        problem = mma_problem(x, right)
        choose = {"forward": tiles.forward_tile, "backward": tiles.backward_tile, "dq": tiles.dq_tile}[kind]
        assert str(choose(problem, capability)) in mma.CANDIDATES[kind][head_dim]
    for text in mma.CANDIDATES[kind][head_dim]:
        assert str(mma.tile_of(kind, head_dim, text)) == text


def mma_problem(x: torch.Tensor, right: int | None) -> Any:
    return Problem(x, x, x, softmax_scale=0.1, window_right=right)


def test_a_candidate_is_launched_with_its_tile() -> None:
    workload = sweep(64, "causal", 1024)._replace(lengths_q=(1024,), lengths_kv=(1024,))
    tensors = make_tensors(workload, "cpu")
    names = {}
    for implementation in mma.tile_implementations("1"):
        for direction in ("forward", "backward"):
            if implementation.serves(workload, direction):
                with pretended_device(80, 108), recorded_launches() as launches:
                    implementation.prepare(workload, tensors, direction).timed()
                names[implementation.name] = [(x.kernel.__name__, x.tile) for x in launches if "mma" in x.kernel.__name__]
    assert len(names) == sum(len(texts[64]) for texts in mma.CANDIDATES.values())
    for name, launches in names.items():
        numbers = name.removeprefix(mma.TILES).split()[1].split("x")
        kernel = {"forward": "_attn_fwd_mma_kernel", "backward": "_attn_bwd_mma_kernel", "dq": "_attn_bwd_dq_mma_kernel"}
        own = [tile for found, tile in launches if found == kernel[name.removeprefix(mma.TILES).split()[0]]]
        assert [[str(n) for n in tile[:4]] for tile in own[-1:]] == [numbers]


def test_flex_attention_is_measured_in_some_cells() -> None:
    args = command.make_parser().parse_args(["--preset", OLDER, "--backends", "mma", "--peers", "FlexAttention", "--mma-tiles"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
        chosen = command._implementations(args, "cuda", select([OLDER]))
    assert [i.name for i in chosen][:2] == [mma.MMA, mma.FLEX]
    [flex] = [i for i in chosen if i.name == mma.FLEX]
    cells = [(w, d) for w in select([OLDER]) for d in ("forward", "backward") if flex.serves(w, d)]
    assert len(cells) == 2 * (6 + 8 + 3 + 2)
    assert any(i.name.startswith(mma.TILES) for i in chosen)


def test_a_cell_that_other_kernels_would_run_says_why() -> None:
    """Here the interpreter runs the call, which runs no Gluon."""
    workload = WORKLOADS["small-s128"]._replace(num_heads=1, num_heads_kv=1)
    tensors = make_tensors(workload, "cpu")
    for direction in ("forward", "backward"):
        with pytest.raises(Unavailable, match=r"mma\.sync.*: .*interpreter"):
            mma._prepare({}, workload, tensors, direction)


def test_candidates_are_timed_in_plain_cells_of_the_sweep() -> None:
    kind, text = "forward", mma.CANDIDATES["forward"][128][0]
    assert mma._serves(kind, text, sweep(128, "full", 4096), "forward")
    assert not mma._serves(kind, text, sweep(128, "full", 4096), "backward")
    assert not mma._serves(kind, text, sweep(128, "full", 16384), "forward")
    assert not mma._serves(kind, text, windowed(128), "forward")
    assert not mma._serves(kind, text, WORKLOADS["score-softcap"], "forward")


TIMES = {
    ("flexattn mma", "sweep-d64-causal-s512", "forward"): 10.0,
    (PORTABLE, "sweep-d64-causal-s512", "forward"): 9.0,
    ("flexattn mma", "sweep-d64-causal-s4096", "forward"): 100.0,
    (PORTABLE, "sweep-d64-causal-s4096", "forward"): 120.0,
    ("SDPA flash", "sweep-d64-causal-s4096", "forward"): 80.0,
    ("flexattn mma", "ragged-documents", "backward"): 100.0,
    (PORTABLE, "ragged-documents", "backward"): 150.0,
    ("flexattn mma", "decode-kv8192", "forward"): 100.0,
    (PORTABLE, "decode-kv8192", "forward"): 110.0,
    ("flexattn mma", "score-softcap", "forward"): 100.0,
    (PORTABLE, "score-softcap", "forward"): 90.0,
}


def test_rules_are_for_calls_that_are_faster_from_some_length_on() -> None:
    every = {"capability": 80, "dropout": False, "paged": False, "source": "x.json"}
    found = [{n: v for n, v in vars(rule).items() if v not in (None, "", ())} for rule in mma.rules("x.json", recorded(TIMES))]
    assert found == [
        every | {"use": "mma.sync", "head_dim": 64, "mask": ("causal",), "packed": False, "queries": (4096, None), "gain": 1.2},
        every
        | {
            "use": "mma.sync",
            "head_dim": 128,
            "mask": ("open",),
            "packed": False,
            "queries": (None, 1),
            "keys_from": 8192,
            "gain": 1.1,
        },
        every
        | {"use": "mma.sync fused", "head_dim": 128, "mask": ("causal",), "packed": True, "queries": (4096, None), "gain": 1.5},
    ]
    (sdpa,) = mma.sdpa_rules("x.json", recorded(TIMES))
    assert (sdpa.use, sdpa.direction, sdpa.gain, sdpa.tokens) == ("sdpa beside mma.sync", "forward", 1.25, (4096, 4096))
    assert 'Rule(use="mma.sync fused"' in rows.emit({"x.json": recorded(TIMES)})


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("sm_80 code on an NVIDIA H200", 80),
        ("sm_89 code on an NVIDIA H200", (86, 89, 120)),
        ("sm_89 code with tiles of sm_120 on an NVIDIA H200", (86, 89, 120)),
    ],
)
def test_a_run_says_whose_code_it_had(name: str, targets: Any) -> None:
    assert mma.targets(recorded(TIMES, name)) == targets


def test_the_table_has_a_row_for_each_workload() -> None:
    """Lengths share a row, which has the geometric mean of their speeds. Workloads that no other library ran have none."""
    run = recorded(TIMES)
    table = mma.table(run)
    assert table.rows == [("Head dim 64, causal", ["0.80", "-", "-", "-"])]
    text = page.older_gpus({"an A100": [run, run]})
    assert "faster than PyTorch's FlashAttention-2 in 0 of 1 and than the portable kernels in 3 of 5 cells." in text
    assert "This is the code for an A100." in text


def test_a_later_run_replaces_the_cells_that_it_has() -> None:
    [(name, workload, direction)] = [key for key in TIMES if key[0] == mma.FLASH]
    own = TIMES[mma.MMA, workload, direction]
    later = recorded({(mma.MMA, workload, direction): own, (name, workload, direction): 2 * own})
    assert mma.table(recorded(TIMES), later).rows == [("Head dim 64, causal", ["2.00", "-", "-", "-"])]
    assert "FlashAttention-2 in 1 of 1 and than the portable kernels in 3 of 5 cells" in mma.claim(recorded(TIMES), later)


def test_tiles_are_compared_with_the_committed_one() -> None:
    cell = ("sweep-d64-causal-s4096", "forward")
    lines = mma.tile_lines(recorded({(mma.MMA, *cell): 100.0, (f"{mma.TILES} forward 64x64x4x2 q", *cell): 80.0}))
    assert lines == ["sweep-d64-causal-s4096 forward: 64x64x4x2 q, 1.250 of the committed tile's speed (64x64x4x2 q 80)"]


def is_replaced(rule: Rule, later: record.Record) -> bool:
    """Returns whether a later run has the cells of a rule for SDPA."""
    cells = [(d, w.head_dim_qk, w.head_dim_v, mma._mask(w)) for w, d in ((later.workloads[name], d) for name, d in later.cells())]
    is_same = mma.targets(later) == rule.capability
    return is_same and (rule.direction, rule.head_dim_qk, rule.head_dim_v, rule.mask) in cells


def test_the_rules_are_those_of_the_files() -> None:
    """Every rule for these kernels is what a result file supports, unless later ones say the same or more."""
    committed = [rule for rule in CROSSOVERS if "mma.sync" in rule.use and "FP8" not in rule.use]
    files = {name: record.read(ROOT / "bench" / "results" / name) for rule in committed for name in rule.files}
    supported = []
    for name, found in files.items():
        later = [files[other] for other in LATER if other != name]
        own = [*mma.rules(name, found), *mma.sdpa_rules(name, found)]
        supported += [rule for rule in own if not any(is_replaced(rule, other) for other in later)]
    supported = [rule for n, rule in enumerate(supported) if not is_repeated(rule, supported[n + 1 :])]
    assert {str(rule) for rule in committed} == {str(rule) for rule in supported}
    assert {(rule.use, rule.gain) for rule in committed} == {(rule.use, rule.gain) for rule in supported}


def test_the_rules_in_fp8_are_those_of_the_probe() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "mma_fp8_sm_89_h200.json").read_text("utf-8"))["rows"]
    for rule in (rule for rule in CROSSOVERS if rule.use == "mma.sync FP8"):
        tile = str(next(tile for tile in tiles._FP8 if tile.head_dim_qk == rule.head_dim))
        speeds = [row["fp8_beside_portable"] for row in rows if (row["head_dim"], row["tile"]) == (rule.head_dim, tile)]
        assert len(speeds) == 6
        assert round(geometric_mean(speeds), 2) == rule.gain
        assert min(speeds) > 1.0
