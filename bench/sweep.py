"""Many tiles of one kernel: pruned by compiling them, then checked and timed, and the row that the table should have."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flexattn.bench import compiled, counts, record
from flexattn.bench.check import Checker
from flexattn.bench.implementations import KERNELS, committed_launchers
from flexattn.bench.inputs import make_tensors
from flexattn.bench.measure import HOST, MEASURES, measure, measure_ceilings, time_on_device
from flexattn.bench.record import Record, Row
from flexattn.bench.run import line
from flexattn.bench.subject import PASSED, WRONG, Subject, alone, check, small_enough
from flexattn.bench.tiles import candidates, tile_name
from flexattn.progress import progress_bar

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.device import Tile


def prune(subject: Subject, tiles: Sequence[Tile]) -> dict[Tile, list[str]]:
    """Returns the complaints about each tile after compiling it for the subject's architecture. Nothing runs."""
    groups = [compiled.requests(subject.kernel, subject.with_tile(t).launchers, subject.workload, subject.arch) for t in tiles]
    with progress_bar(len(groups), f"compiled for sm_{subject.arch}", "tile") as advance:
        made = compiled.reports(groups, advance)
    return {tile: compiled.complaints(subject.kernel, tile, subject.arch, answer) for tile, answer in zip(tiles, made, strict=True)}


def sweep(
    subjects: Sequence[Subject], options: Mapping[str, Sequence[int] | None], budget_ms: float, out: Path | None, command: str
) -> int:
    """Prunes tiles, checks the others (in the interpreter if there is no GPU), times them on a GPU, and proposes one."""
    first = subjects[0]
    tiles = candidates(first.kernel, first.committed, options)
    print(f"{first.kernel}: {len(tiles)} tiles on {', '.join(s.workload.name for s in subjects)}, compiled for sm_{first.arch}")
    judged = prune(first, tiles)
    left = [tile for tile, against in judged.items() if not against]
    for tile, against in judged.items():
        if against:
            print(f"  out: {tile_name(tile):20} {'; '.join(against)}")
    print(f"{len(left)} of {len(tiles)} are left: {', '.join(map(tile_name, left)) or 'none'}")
    if not torch.cuda.is_available():
        return _check_only(first, left)
    return _measure(subjects, left, budget_ms, out, command)


def _check_only(subject: Subject, tiles: Sequence[Tile]) -> int:
    wrong = 0
    for tile in tiles:
        candidate = subject.with_tile(tile)
        _, failure = check(candidate, small_enough(subject.workload, tile), "cpu")
        wrong += failure is not None
        print(f"  {tile_name(tile):20} {'right, in the interpreter' if failure is None else f'WRONG: {failure}'}", flush=True)
    print("Not timed, so no row is proposed: no GPU here.")
    return WRONG if wrong else PASSED


def _measure(subjects: Sequence[Subject], tiles: Sequence[Tile], budget_ms: float, out: Path | None, command: str) -> int:
    from flexattn.bench.rows import emit

    kernel = subjects[0].kernel
    direction, _ = KERNELS[kernel]
    timer = functools.partial(time_on_device, budget_ms=budget_ms)
    ceilings = measure_ceilings(timer, "cuda")
    method = {"time": MEASURES["cuda"], "host": HOST, "flops": counts.KERNEL_FLOPS, "bytes": counts.KERNEL_BYTES}
    rows: list[Row] = []
    kept = Record(**record.facts(command, ceilings, method, [s.workload for s in subjects]), rows=rows, complete=False)
    for subject in subjects:
        tensors = make_tensors(subject.workload, "cuda")
        library = subject._replace(launchers=committed_launchers({})).with_tile(subject.committed)
        is_own_file = subject.launchers._replace(tiles={}) != library.launchers._replace(tiles={})
        tried = [subject.with_tile(tile) for tile in tiles if is_own_file or tile != subject.committed]
        implementations = [alone(library, f"{library.label} committed"), *(alone(s, s.label) for s in tried)]
        work = counts.kernel_work(subject.workload, kernel)
        new = measure(
            subject.workload, direction, implementations, tensors, Checker(subject.workload, tensors), work, ceilings, timer
        )
        rows += sorted(new, key=lambda row: float("inf") if row.us is None else row.us)
        print("\n".join(map(line, rows[-len(new) :])), flush=True)
        if out is not None:
            record.write(out, kept)
        del tensors
    done = kept._replace(complete=True)
    if out is not None:
        record.write(out, done)
    print(f"\n{emit({out.name if out else 'this run': done})}")
    return WRONG if any(row.status == "wrong" for row in rows) else PASSED
