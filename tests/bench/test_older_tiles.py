"""The sweep over tiles of older GPUs: its launches are right, candidates compile for sm_80, and failures are results."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexattn.bench import older_candidates, older_rows, older_tiles, tiles
from flexattn.bench.older_candidates import Job
from flexattn.bench.older_tiles import Part
from flexattn.kernels_triton.common.tiles import FORWARD, row_of
from tests.conftest import ROOT

KERNELS = ("forward", "dq", "dkdv", "one_grid", "forward+bias", "dq+bias", "dkdv+bias")


@pytest.mark.parametrize(("kernel", "is_causal"), [*itertools.product(KERNELS, (True, False)), ("decode", False)])
def test_the_launches_of_a_candidate_are_right(kernel: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexattn.kernels_triton.runtime.launch import make

    monkeypatch.setattr(older_candidates, "CHECKED_LENGTH", 128)
    monkeypatch.setattr(older_candidates, "CHECKED_KEYS", 1024)  # the fewest that are split
    job = Job(kernel, 32, is_causal, "16x64x4x2" if kernel == "decode" else "32x64x4x2")
    cell = older_candidates.make_cell(older_candidates.workload_of(*job.cell, job.checked_length), "cpu")
    outputs = older_candidates.outputs_of(cell)
    launches = older_candidates.launches_of(job, cell, outputs)
    for launch in launches:
        make(launch, torch.device("cpu"))
    assert older_candidates.error_of(job, cell, outputs) < older_tiles.MAX_ERROR
    for wrong in (outputs.out, *outputs.gradients):
        wrong.zero_()
    assert older_candidates.error_of(job, cell, outputs) > 0.5


@pytest.mark.slow
def test_candidates_compile_for_sm_80_without_a_gpu(
    tmp_path: Path, fresh_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    out = tmp_path / "tiles.json"
    arguments = ["--compile-only", "--workers", "1", "--most", "2", "--head-dims", "32", "--masks", "full", "--kernels", "forward"]
    done = fresh_python("-m", "flexattn.bench.older_tiles", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text("utf-8"))
    assert content["complete"]
    assert [row["committed"] for row in content["rows"]].count([]) < 2  # the committed tiles are first
    assert all(row["registers"] > 0 and "failure" not in row for row in content["rows"])


def test_a_launch_is_padded_to_the_occupancy_of_the_older_gpu() -> None:
    part = Part(SimpleNamespace(num_warps=4, shared=32 << 10), [], 2, registers=128, spilled_bytes=0, registers_here=128)
    assert [older_tiles.programs_of_processor(part, sm) for sm in (80, 89, 90)] == [4, 3, 4]
    assert older_tiles.padded(part, 80) == 32 << 10  # registers limit both
    shared = older_tiles.padded(part, 89)
    assert shared is not None
    assert (228 << 10) // (shared + 1024) == 3
    assert older_tiles.padded(part._replace(binary=SimpleNamespace(num_warps=4, shared=120 << 10)), 89) is None


def test_a_candidate_that_does_not_compile_is_a_result() -> None:
    built = older_tiles.build(Job("forward", 64, True, "128x64x3x2"), [1024])  # three warps
    assert built.failure


def test_each_tile_of_the_space_is_distinct_and_parses() -> None:
    kernels = list(tiles.OLDER_SPACE)
    jobs = older_candidates.jobs_of([32, 64, 96, 128, 192, 256], kernels, ["causal", "full"])
    assert len({(*job.cell, job.tile) for job in jobs}) == len(jobs)
    assert all(tiles.tile_name(tiles.parse_tile(job.tile)) == job.tile for job in jobs)
    assert {job.kernel for job in jobs} == set(kernels)
    assert older_tiles.Built({older_candidates.CHECKED_LENGTH: []}, None, 0).parts_of(4096) == []


def test_the_summary_names_the_fastest_tile_and_the_gain() -> None:
    row = {"kernel": "dq", "head_dim": 64, "mask": "full"}
    rows = [
        {**row, "tile": "64x64x4x2", "committed": [80], "ms": {"s1024@80": 0.2}},
        {**row, "tile": "128x64x4x2", "committed": [], "ms": {"s1024@80": 0.1}},
        {**row, "tile": "16x16x4x2", "committed": [], "failure": "wrong"},
    ]
    assert older_rows.summary(rows) == ["dq d64 full s1024@80 128x64x4x2 0.100 2.00x"]


def test_rows_are_the_fastest_tiles() -> None:
    def row(tile: str, mask: str, long: float, short: float, committed: tuple[int, ...] = ()) -> dict[str, object]:
        times = {f"{length}@{sm}": ms for sm in (80, 89) for length, ms in (("s1024", short), ("s4096", long))}
        return {"kernel": "dq", "head_dim": 64, "mask": mask, "tile": tile, "committed": list(committed), "ms": times}

    rows = [
        row("64x64x4x2", "causal", 2.0, 1.0, (80, 86)),
        row("128x64x4x2", "causal", 1.0, 1.5),
        row("64x64x4x2", "full", 2.0, 2.0, (80, 86)),
        row("128x64x4x2", "full", 1.02, 1.0),
        row("32x32x4x2", "full", 1.0, 1.0),
        {"kernel": "dq", "head_dim": 64, "mask": "full", "tile": "16x16x4x2", "committed": [], "failure": "wrong"},
    ]
    assert older_rows.choose(rows, "dq", 64, 80) == ("128x64x4x2", None, "64x64x4x2", None)  # a gain of 1 % is a tie
    lines = older_rows.emit_rows(rows)
    first = lines[lines.index("DQ (80, 2):") + 1]
    assert first.startswith("        Row(128, Tile(128, 64, 4, 2), Tile(")
    assert first.endswith("short=Tile(64, 64, 4, 2)),")
    assert len(lines) > 12  # other rows stay
    assert older_rows.fastest({}, "64x64x4x2") == "64x64x4x2"


def test_a_rule_says_how_much_faster_flash_attention_is() -> None:
    row = {"head_dim": 128, "mask": "causal", "tile": "64x64x4x2", "committed": [80, 86]}
    times = {f"s{length}@80": 2.0 for length in (1024, 4096)}
    rows: list[dict[str, object]] = [{"kernel": kernel, **row, "ms": times} for kernel in ("forward", "dq", "dkdv")]
    flash = {"kernel": "flash forward", "head_dim": 128, "mask": "causal", "forward_ms": 1.0, "backward_ms": 4.0}
    rows += [{**flash, "length": length} for length in (1024, 4096)]
    (rule,) = older_rows.emit_rules(rows, "x.json")
    assert rule == (
        'Rule(use="sdpa", direction="forward", capability=80, head_dim_qk=128, head_dim_v=128, mask="causal", **_OLDER, gain=2.00, '
        'source="x.json"),'
    )


def test_tiles_for_few_queries_are_the_fastest_ones_on_file() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "older_tiles_h200.json").read_text("utf-8"))["rows"]
    for sm, capability in ((80, 80), (89, 86)):
        for width, head_dim in older_rows._HEAD_DIM_OF_ROW.items():
            few = row_of(FORWARD, capability, 2, width).few
            assert few is not None
            assert tiles.tile_name(few) == older_rows.choose_few(rows, head_dim, sm)
