"""Rows of tile tables and heuristics: the rows that a result file supports, and committed rows match the files."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from flexattn.bench import record, rows, tiles
from flexattn.bench.counts import band_of
from flexattn.bench.record import Record, Row
from flexattn.bench.rows import contradictions, emit, faster_rows, swept, tile_rows
from flexattn.bench.shapes import WORKLOADS, Workload, sweep
from flexattn.dispatch import heuristics
from flexattn.dispatch.spec import AttentionSpec, length_class
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common import tiles as configs
from flexattn.kernels_triton.common.crossovers import Rule
from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD
from flexattn.kernels_triton.runtime.device import Tile
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"
TILE_FILES = sorted(RESULTS.glob("tiles_*.json"))
TABLES = {"forward": FORWARD, "dq": DQ, "dkdv": DKDV}


def recorded(measured: list[tuple[str, Workload, str, float]], **more: Any) -> Record:
    """Rows from (implementation, workload, direction, us)."""
    found = [Row(name, "1", w.name, direction, "measured", us=us) for name, w, direction, us in measured]
    shapes = {w.name: w for _, w, _, _ in measured}
    device = {"type": "cuda", "name": "NVIDIA H200", "capability": [9, 0]}
    return Record("x", None, device, {}, None, {}, shapes, found, **more)


@pytest.mark.parametrize("path", TILE_FILES, ids=lambda path: path.name)
def test_no_file_speaks_against_a_committed_tile(path: Any) -> None:
    assert contradictions(path.name, record.read(path)) == []


def test_the_files_cover_the_tiles_that_were_chosen() -> None:
    covered = {(s.kernel, s.head_dims, s.slot) for path in TILE_FILES for s in swept(record.read(path))}
    assert {(kernel, width, slot) for kernel in TABLES for width in (128, 256, 512) for slot in ("tile", "open")} <= covered
    unshared = {
        (kernel, row.head_dims, slot)
        for kernel, table in TABLES.items()
        for row, wider in itertools.zip_longest(table[90, 2], table[90, 2][1:])
        for slot in ("open", "short")
        if getattr(row, slot) not in (None, getattr(wider, slot, None))
    }
    assert unshared <= covered


def test_a_faster_tile_is_proposed_and_a_tie_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    causal, full, short = sweep(128, "causal", 4096), sweep(128, "full", 4096), sweep(128, "causal", 512)
    committed, other = Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)
    table = {(90, 2): (configs.Row(256, committed, Tile(32, 32, 4, 1)), configs.Row(512, other, other))}
    monkeypatch.setitem(configs.__dict__, "FORWARD", table)
    names = [f"forward 128x64x8x3{mark}" for mark in (" committed", "")]
    measured = [
        (names[0], causal, "forward", 101.0),
        ("forward 64x64x4x2", causal, "forward", 100.0),  # within the difference between runs
        (names[0], full, "forward", 110.0),
        ("forward 64x64x4x2", full, "forward", 100.0),
        ("forward 64x64x4x2", short, "forward", 10.0),
        ("forward 128x64x8x3 (this)", short, "forward", 9.0),
    ]
    assert tile_rows("x.json", recorded(measured)) == [
        "FORWARD[90, 2]: Row(256, Tile(128, 64, 8, 3), Tile(32, 32, 4, 1), open=Tile(64, 64, 4, 2)),  "
        "# tile as committed, 101 us, the next 100; open 100 us, 10% faster than the committed 128x64x8x3; "
        "short as committed, 9 us, the next 10 (x.json)"
    ]
    assert contradictions("x.json", recorded(measured)) == [
        "x.json: forward 256 open 100 us, 10% faster than the committed 128x64x8x3"
    ]
    alone = recorded([("forward 64x64x4x2", causal, "forward", 100.0)])
    assert "the committed 128x64x8x3 was not measured beside it" in contradictions("x.json", alone)[0]


def test_only_workloads_where_all_were_measured_count() -> None:
    causal, longer = sweep(64, "causal", 4096), sweep(64, "causal", 8192)
    committed = tile = Tile(64, 64, 4, 3)
    measured = [
        ("forward 64x64x4x3 committed", causal, "forward", 100.0),
        ("forward 128x64x8x3", causal, "forward", 120.0),
        ("forward 64x64x4x3 committed", longer, "forward", 900.0),
    ]
    [found] = swept(recorded(measured))
    assert (found.head_dims, found.slot, found.committed, found.best) == (128, "tile", committed, tile)
    assert {t: round(us) for t, us in found.times.items()} == {tile: 100, Tile(128, 64, 8, 3): 120}


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("sweep-d64-causal-s4096", "tile"),
        ("sweep-d128-full-s1024", "open"),
        ("sweep-d256-causal-s1024", "short"),
        ("decode-kv2048", "few"),
        ("score-relative-bias", "loaded"),
    ],
)
def test_a_workload_has_the_tile_of_its_slot(name: str, slot: str) -> None:
    assert rows.slot_of(WORKLOADS[name]) == slot


def test_rows_of_older_gpus_are_the_fastest_candidates() -> None:
    causal, full, one = sweep(64, "causal", 4096), sweep(64, "full", 4096), WORKLOADS["decode-kv2048"]
    found = recorded(
        [
            ("flexattn portable tile dq 64x64x4x2", causal, "backward", 200.0),
            ("flexattn portable tile dq 128x64x4x2", causal, "backward", 100.0),
            ("flexattn portable tile dq 32x32x4x2", full, "backward", 100.0),
            ("flexattn portable tile forward 16x64x4x2", one, "forward", 10.0),
            ("flexattn portable", causal, "forward", 120.0),
            ("SDPA flash", causal, "forward", 100.0),
        ]
    )
    lines = emit({"x.json": found._replace(device={**found.device, "name": "sm_80 code on an NVIDIA H200"})}).splitlines()
    assert lines[0] == "kernels_triton/common/tiles.py:"
    assert lines[1].startswith("DQ[80, 2]: Row(128, Tile(128, 64, 4, 2), Tile(")
    assert "few=Tile(16, 64, 4, 2)),  # few 10 us; the committed" in lines[2]
    assert lines[4:] == [
        'Rule(use="sdpa", mask="causal", tokens=(4096, 4096), capability=80, direction="forward", dtype="bfloat16", '
        'head_dim_qk=64, head_dim_v=64, layout="dense", kind="plain", gain=1.2, source="x.json"),'
    ]


def test_tiles_for_few_queries_are_the_fastest_ones_on_file() -> None:
    """Tiles of one stage do not count, because a row also serves head dims in two parts."""
    found = json.loads((RESULTS / "older_tiles_h200.json").read_text("utf-8"))["rows"]
    for (sm, capability), (width, head_dim) in itertools.product(
        {80: 80, 89: 86}.items(), {128: 64, 192: 96, 256: 128, 384: 192, 512: 256}.items()
    ):
        cells = [f"s{length}@{sm}" for length in (1024, 4096)]
        decodes = [row for row in found if (row["kernel"], row.get("head_dim")) == ("decode", head_dim)]
        timed = {row["tile"]: math.prod(row["ms"][cell] for cell in cells) for row in decodes if cells[-1] in row.get("ms", {})}
        few = configs.row_of(FORWARD, capability, 2, width).few
        assert few is not None
        assert tiles.tile_name(few) == min((tile for tile in timed if not tile.endswith("x1")), key=lambda tile: timed[tile])


def rule(direction: str, mask: str, tokens: tuple[int, int], gain: float, source: str = "x.json", **more: Any) -> Rule:
    columns = {"capability": 90, "dtype": "bfloat16", "head_dim_qk": 128, "head_dim_v": 128, "layout": "dense", "kind": "plain"}
    measured: dict[str, Any] = {"mask": mask, "tokens": tokens, "gain": gain, "source": source}
    return Rule(use="cudnn", direction=direction, **columns | measured | more)  # type: ignore[arg-type]


def both(workload: Workload, triton: float, cudnn: float, direction: str = "forward") -> list[tuple[str, Workload, str, float]]:
    return [("flexattn triton", workload, direction, triton), ("flexattn cudnn", workload, direction, cudnn)]


def test_rows_of_heuristics_where_cudnn_was_faster() -> None:
    measured = [
        *both(sweep(128, "causal", 512), 99.0, 100.0),  # Triton, by default
        *both(sweep(128, "causal", 2048), 150.0, 100.0),
        *both(sweep(128, "causal", 4096), 240.0, 150.0),
        *both(WORKLOADS["llama3-8b-s8192"], 101.0, 100.0),  # a tie ends the run of lengths
        *both(sweep(128, "causal", 16384), 120.0, 100.0),
        *both(sweep(128, "full", 4096), 104.0, 100.0),
        *both(sweep(128, "full", 4096)._replace(name="loses more"), 100.0, 105.0),  # Triton then is the default
        *both(sweep(128, "full", 8192), 104.0, 100.0),
        *both(sweep(128, "full", 8192)._replace(name="loses less"), 100.0, 102.0),
        *both(sweep(128, "causal", 4096), 200.0, 100.0, "backward"),
        *both(WORKLOADS["ragged-log-normal"], 130.0, 100.0),
        *both(WORKLOADS["score-sliding-window"], 110.0, 100.0),
        *both(WORKLOADS["score-softcap"], 300.0, 100.0),  # not plain: no row
        *both(WORKLOADS["gpt-oss-full-s8192"], 300.0, 100.0),  # with a sink: a row of its own
        ("flexattn triton", sweep(64, "full", 512), "forward", 5.0),  # the other backend did not run it
    ]
    assert faster_rows("x.json", recorded(measured)) == [
        rule("forward", "causal", (2048, 4096), 1.55),
        rule("forward", "causal", (16384, 16384), 1.2),
        rule("forward", "open", (8192, 8192), 1.01),
        rule("backward", "causal", (4096, 4096), 2.0),
        rule("forward", "causal", (8192, 8192), 1.3, layout="packed"),
        rule("forward", "windowed", (8192, 8192), 1.1),
        rule("forward", "causal", (8192, 8192), 3.0, kind="sink", head_dim_qk=64, head_dim_v=64),
    ]
    assert emit({"x.json": recorded(measured)}).splitlines()[:2] == [
        "kernels_triton/common/crossovers.py:",
        'Rule(use="cudnn", mask="causal", tokens=(2048, 4096), capability=90, direction="forward", dtype="bfloat16", '
        'head_dim_qk=128, head_dim_v=128, layout="dense", kind="plain", gain=1.55, source="x.json"),',
    ]


def test_every_committed_preference_is_its_files() -> None:
    """Each rule for a backend is in its file's rules, word for word."""
    for committed in crossovers.RULES["cudnn"]:
        (name,) = committed.files
        supported = faster_rows(name, record.read(RESULTS / name))
        assert committed in supported, f"{committed!r} is not what {name} says: {supported}"


def spec_of(w: Workload, direction: str) -> AttentionSpec:
    """Returns the spec that `attention` would pass to the dispatcher on the measured device."""
    has_bias = w.score == "relative_bias"
    return AttentionSpec(
        q_format=w.qkv_format,
        kv_format=w.qkv_format,
        dtype=getattr(torch, w.dtype),
        num_heads=w.num_heads,
        num_heads_kv=w.num_heads_kv,
        head_dim_qk=w.head_dim_qk,
        head_dim_v=w.head_dim_v,
        padding=w.is_ragged,
        band=band_of(w),
        bias_type="alibi" if w.score == "alibi" else "post_scale_bias" if has_bias else "no_bias",
        bias_dims=(False, True, True, True) if has_bias else None,
        softmax_type=w.softmax_type,
        softcap=w.score == "softcap",
        dropout=False,
        return_max_logit=False,
        needs_grad=direction == "backward",
        needs_bias_grad=False,
        deterministic=False,
        device_type="cuda",
        capability=(9, 0),
        length_q=length_class(w.seqlen_q),
        length_kv=length_class(w.seqlen_kv),
    )


def test_the_dispatcher_prefers_what_was_fastest() -> None:
    """Its first choice is within TIE, or RESOLUTION_US, of the fastest backend in each cell, by the newest run that has it."""
    names = ("standard", "standard_forward", "standard_backward", "standard_again")  # the oldest first
    records = (record.read(RESULTS / f"{name}_h200.json") for name in names)
    newest = {cell: measured for measured in records for cell in measured.cells()}
    slower = []
    for (name, direction), measured in newest.items():
        cell = measured.of(name, direction)
        times = {b: cell[f"flexattn {b}"].us for b in ("triton", "cudnn") if f"flexattn {b}" in cell}
        found = {backend: us for backend, us in times.items() if us is not None}
        chosen = next(b for b in heuristics.preference(spec_of(measured.workloads[name], direction), direction).order if b in found)
        fastest = min(found.values())
        if found[chosen] > max((1 + rows.TIE) * fastest, fastest + rows.RESOLUTION_US):
            slower.append((name, direction, chosen, found))
    assert not slower
    assert len(newest) > 100


def test_a_preference_that_its_file_does_not_support_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = rule("forward", "open", (512, 512), 9.0, "rates_h200.json", head_dim_qk=64, head_dim_v=64)
    monkeypatch.setitem(crossovers.RULES, "cudnn", (planted,))
    with pytest.raises(AssertionError, match=r"is not what rates_h200\.json says"):
        test_every_committed_preference_is_its_files()


def test_a_file_that_supports_no_row_is_named() -> None:
    name = "rates_h200.json"
    with pytest.raises(ValueError, match=r"rates_h200\.json supports no row: .*of flexattn: flexattn triton"):
        emit({name: record.read(RESULTS / name)})
    assert rows.TIE < 0.05
