"""Regret of `auto`: the verdict of the result files on its picks, and the cells without one."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from flexattn.bench import command, record, regret
from flexattn.bench.implementations import CUDNN, PORTABLE, TRITON
from flexattn.bench.record import Record, Row
from flexattn.bench.rows import TIE
from flexattn.bench.shapes import ODD_SEQLENS, Workload, select, sweep
from flexattn.kernels_triton.runtime import interpreter
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"
CELLS = {  # each has one run
    "standard_h200.json": 114,
    "standard_h100.json": 114,
    "standard_again_h200.json": 114,
    "score_mods_h200.json": 12,
    "standard_forward_h200.json": 40,
    "standard_backward_h200.json": 25,
}
BETWEEN = {
    "standard_h200.json": 186,
    "standard_h100.json": 186,
    "standard_again_h200.json": 186,
    "standard_forward_h200.json": 48,
    "standard_backward_h200.json": 18,
}
# By more than TIE, each with its reason in notes/regret.md.
SLOWER: dict[str, dict[tuple[str, str], float]] = {}
# More than TIE slower in a run with other sections of heads (forwards), without turns (grouped backwards), with two kernels at head
# dims 192 and 128, or with the portable kernels at 256. These cells were measured again.
OLDER = {
    "standard_h200.json": {
        ("sweep-d128-full-s512", "forward"): 1.05,
        ("deepseek-v3-s4096", "backward"): 1.07,
        ("sweep-d256-causal-s512", "backward"): 1.22,
        ("sweep-d256-full-s512", "backward"): 1.06,
    },
    "standard_h100.json": {
        ("llama3-70b-s8192", "backward"): 1.06,
        ("deepseek-v3-s4096", "backward"): 1.03,
        ("sweep-d256-causal-s512", "backward"): 1.10,
    },
    "standard_backward_h200.json": {("deepseek-v3-s4096", "backward"): 1.06},
}
EXCEPTIONS = {  # like SLOWER, for lengths in between
    "standard_h200.json": {("sweep-d128-full-s512 at 641", "forward"): 1.03},
    "standard_h100.json": {},
    "standard_again_h200.json": {},
    "standard_forward_h200.json": {},
    "standard_backward_h200.json": {},
}
UNKNOWN = {
    "standard_h200.json": [("backward", 256, "causal"), ("backward", 256, "full")],
    "standard_h100.json": [("backward", 64, "causal"), ("backward", 128, "causal"), ("backward", 256, "causal")],
    "standard_again_h200.json": [],
    "standard_forward_h200.json": [],
    "standard_backward_h200.json": [],
}  # from 513 to 1023 tokens


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Picks are picks of compiled kernels."""
    monkeypatch.setattr(interpreter, "INTERPRETED", False)


def recorded(measured: list[tuple[str, Workload, str, float | None]]) -> Record:
    """Rows from (implementation, workload, direction, us). If us is None, the implementation refused."""
    found = [Row(name, "1", w.name, direction, "measured" if us else "refused", us=us) for name, w, direction, us in measured]
    device = {"type": "cuda", "name": "NVIDIA H200", "capability": [9, 0]}
    return Record("x", None, device, {}, None, {}, {w.name: w for _, w, _, _ in measured}, found)


@pytest.mark.parametrize("name", CELLS)
def test_no_pick_loses_more_than_a_tie_in_a_cell(name: str) -> None:
    found = regret.regrets(record.read(RESULTS / name))
    assert len(found) == CELLS[name]
    over = {(r.workload, r.direction): r.ratio or math.inf for r in found if r.ratio is None or r.is_bad}
    known = OLDER.get(name, {}) | SLOWER.get(name, {})
    assert over.keys() == known.keys()
    assert all(ratio <= known[cell] for cell, ratio in over.items())


@pytest.mark.slow
def test_what_loses_in_an_older_run_does_not_in_a_newer_one() -> None:
    found = {(r.workload, r.direction): r for r in regret.regrets(record.read(RESULTS / "standard_again_h200.json"))}
    for cell in itertools.chain(*OLDER.values()):
        assert found[cell].pick == found[cell].fastest == TRITON


@pytest.mark.sample
@pytest.mark.parametrize("name", BETWEEN)
def test_between_the_lengths_that_were_measured_the_exceptions_are_known(name: str) -> None:
    found = regret.between(record.read(RESULTS / name))
    assert len(found) == BETWEEN[name]
    over = {(r.workload, r.direction): r.ratio for r in found if r.ratio is not None and r.is_bad}
    assert over.keys() == EXCEPTIONS[name].keys()
    assert all(ratio <= EXCEPTIONS[name][cell] for cell, ratio in over.items())
    unknown = {
        (f"sweep-d{d}-{mask}-s512 at {length}", direction) for direction, d, mask in UNKNOWN[name] for length in (641, 769, 897)
    }
    assert {(r.workload, r.direction) for r in found if r.ratio is None} == unknown


def test_the_page_has_what_the_files_say() -> None:
    page = " ".join((ROOT / "notes" / "regret.md").read_text("utf-8").split())
    for name, cells in CELLS.items():
        assert f"{cells} cells of [{name.removesuffix('.json')}](../bench/results/{name})" in page
    for name, lengths in BETWEEN.items():
        unknown = 3 * len(UNKNOWN[name])
        assert (
            f"{lengths} lengths in {name.removesuffix('.json')}: {len(EXCEPTIONS[name])} lose more, {unknown} are unknown" in page
        )


def test_a_pick_that_is_slower_is_found() -> None:
    causal, short = sweep(128, "causal", 4096), sweep(64, "causal", 256)
    measured = [
        (TRITON, causal, "forward", 110.0),
        (PORTABLE, causal, "forward", 130.0),
        (CUDNN, causal, "forward", 100.0),
        (TRITON, causal, "backward", 100.0),
        (CUDNN, causal, "backward", None),
        (PORTABLE, causal, "backward", 100.0 / (1 + TIE)),
        (TRITON, short, "backward", 80.0),  # the portable kernels, which have a row of their own
        (PORTABLE, short, "backward", 100.0),
        (CUDNN, short, "backward", 200.0),
        (TRITON, short, "forward", 100.0),  # nothing else was measured
    ]
    found = regret.regrets(recorded(measured))
    assert [(r.direction, r.pick, r.fastest, r.is_bad) for r in found] == [
        ("forward", TRITON, CUDNN, True),
        ("backward", TRITON, PORTABLE, False),
        ("backward", PORTABLE, PORTABLE, False),
    ]
    assert found[0].ratio == pytest.approx(1.1)


def test_where_the_first_choice_refused_the_next_is_the_pick() -> None:
    [biased] = select(["score-relative-bias"])  # a row prefers cuDNN's forward for these
    times: list[Any] = [(TRITON, biased, "forward", 100.0), (PORTABLE, biased, "forward", 120.0)]
    assert [r.pick for r in regret.regrets(recorded([*times, (CUDNN, biased, "forward", 90.0)]))] == [CUDNN]
    assert [r.pick for r in regret.regrets(recorded([*times, (CUDNN, biased, "forward", None)]))] == [TRITON]


def test_between_two_lengths_only_what_both_say_counts() -> None:
    shorter, longer = sweep(128, "causal", 2048), sweep(128, "causal", 8192)

    def at(first: float, last: float) -> list[regret.Regret]:
        """Triton takes 100 us at both lengths."""
        rows = [(TRITON, w, "forward", 100.0) for w in (shorter, longer)]
        return regret.between(recorded([*rows, (CUDNN, shorter, "forward", first), (CUDNN, longer, "forward", last)]))

    assert {r.ratio for r in at(150.0, 120.0)} == {1.0}
    assert {r.ratio for r in at(80.0, 120.0)} == {None}
    assert {r.ratio for r in at(120.0, 80.0)} == {None}
    loses = [r.ratio for r in at(80.0, 50.0)]
    assert all(ratio is not None and 1.25 < ratio < 2.0 for ratio in loses)
    assert loses == sorted(loses, key=lambda ratio: ratio or 0.0)
    assert all(r.ratio is not None and 1.0 < r.ratio < 100 / 99 for r in at(99.0, 150.0))


def test_the_command_prints_a_line_a_cell(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    w = sweep(128, "causal", 4096)
    path = tmp_path / "r.json"
    record.write(path, recorded([(TRITON, w, "forward", 110.0), (CUDNN, w, "forward", 100.0)]))
    assert command.main(["--regret", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^sweep-d128-causal-s4096 forward +1\.100 +flexattn triton +flexattn cudnn +\*$", said, re.MULTILINE)
    assert "1 cells, 1 over 1.02, 0 unknown; the worst 1.100, sweep-d128-causal-s4096 forward" in said
    on_a_cpu = recorded([(TRITON, w, "forward", 110.0), (CUDNN, w, "forward", 100.0)])._replace(device={"type": "cpu"})
    with pytest.raises(ValueError, match="of no GPU"):
        regret.regrets(on_a_cpu)


def test_odd_lengths_can_be_measured() -> None:
    shapes = select(["odd"])
    assert {w.seqlen_q for w in shapes} == set(ODD_SEQLENS)
    assert {(w.head_dim_qk, w.is_causal) for w in shapes} == {(d, causal) for d in (64, 128, 256) for causal in (True, False)}
    assert all(8000 < w.batch * w.seqlen_q <= 16384 for w in shapes)
