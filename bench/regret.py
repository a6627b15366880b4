"""Time that backend "auto" loses: its pick compared with the fastest of flexattn's backends, in every cell of a result file.

    python -m flexattn bench --regret bench/results/standard_h200.json

The current dispatcher picks for the device of the file, which may be absent; nothing runs. If the pick is the triton backend, its
kernel family counts too, because the portable family was measured separately. Between two neighbouring lengths of the same kind of
call, a pick is judged only if the same implementation was fastest at both; otherwise the answer is "unknown".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from flexattn import ops
from flexattn.bench.implementations import CUDNN, EAGER, PORTABLE, TRITON
from flexattn.bench.inputs import arguments_of, make_tensors
from flexattn.bench.record import Record
from flexattn.bench.rows import TIE
from flexattn.bench.shapes import Workload
from flexattn.bench.tables import AUTO, Table, is_ours
from flexattn.dispatch import heuristics, triton_backend
from flexattn.dispatch.plan import Device, large_l2_by_name
from flexattn.dispatch.spec import Direction
from flexattn.functional import bind_call

BACKENDS = {"triton": TRITON, "cudnn": CUDNN, "eager": EAGER}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
BETWEEN = (1.25, 1.5, 1.75)  # lengths between two neighbours, as shares of the shorter one, rounded to odd numbers


class Regret(NamedTuple):
    """One cell, or a length between two. ratio: None if no measurement gives the pick's time."""

    workload: str
    direction: str
    pick: str
    fastest: str
    ratio: float | None  # time of the pick / time of the fastest

    @property
    def is_bad(self) -> bool:
        return self.ratio is not None and self.ratio > 1 + TIE


def pick(workload: Workload, direction: Direction, device: Device, refused: Sequence[str] = ()) -> str:
    """Returns the implementation that `auto` runs on such a device, by its name in results.

    refused: backends that cannot run the workload, from a file of a machine with all backends.
    """
    from flexattn.kernels_triton.runtime.device import pretended_device

    tensors = make_tensors(workload, "meta")
    q, k, v = (t.requires_grad_("backward" in workload.directions) for t in tensors[:3])
    x, settings = bind_call(q, k, v, **arguments_of(workload, tensors))
    spec = ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=device.capability)
    order = heuristics.preference(spec, direction).order
    backend = next(name for name in order if name not in refused)
    if backend != "triton":
        return BACKENDS[backend]
    if direction == "backward":
        spec = spec.for_backward()
    with pretended_device(device.architecture, device.processors, has_large_l2=device.has_large_l2):
        choice = triton_backend.choice_of(spec, x, direction)
    return PORTABLE if choice is not None and choice.family.name == "portable" else TRITON


def _times(record: Record, name: str, direction: Direction) -> tuple[str, dict[str, float]]:
    """Returns the pick of a cell, and the microseconds of flexattn's backends and families in it."""
    names = (TRITON, PORTABLE, CUDNN, EAGER)
    rows = record.of(name, direction)
    times = {n: row.us for n, row in rows.items() if n in names and row.us is not None}
    refused = [backend for backend, n in BACKENDS.items() if n in rows and rows[n].us is None]
    picked = pick(record.workloads[name], direction, _device(record), refused)
    if picked == PORTABLE in times:
        times.pop(TRITON, None)  # the same kernels once more
    return picked, times


def with_auto(record: Record) -> Record:
    """Returns a record in which flexattn's only row of each cell is the one that `auto` selects, under the name AUTO."""
    rows = []
    for name, direction in record.cells():
        picked = record.of(name, direction)[_times(record, name, direction)[0]]  # type: ignore[arg-type]
        rows.append(picked._replace(implementation=AUTO))
    return record._replace(rows=[*rows, *(row for row in record.rows if not is_ours(row.implementation))])


def _device(record: Record) -> Device:
    """Raises ValueError for a file that does not say its capability."""
    major, minor = record.device.get("capability") or (0, 0)
    if not major:
        raise ValueError("the result is of no GPU; accepted: results whose device has a compute capability")
    return Device((major, minor), record.device.get("multiprocessors", 132), large_l2_by_name(record.device.get("name", "")))


def regrets(record: Record) -> list[Regret]:
    """Returns a line for each cell of one direction in which two or more of flexattn's backends or families were measured."""
    found = []
    for name, direction in record.cells():
        if direction == "both":
            continue
        picked, times = _times(record, name, direction)  # type: ignore[arg-type]
        if len(times) > 1:
            fastest = min(times, key=lambda n: times[n])
            us = times.get(picked)
            found.append(Regret(name, direction, picked, fastest, None if us is None else us / times[fastest]))
    return found


def with_length(workload: Workload, length: int) -> Workload:
    """Returns a dense workload with sequences of another length, and about as many tokens."""
    batch = max(1, workload.batch * workload.seqlen_kv // length)
    lengths = (length,) * batch
    return workload._replace(name=f"{workload.name} at {length}", lengths_q=lengths, lengths_kv=lengths)


def _kind(workload: Workload) -> tuple[object, ...] | None:
    """Returns a key that is equal for workloads that differ only in length; None if it is ragged or has few queries."""
    if workload.is_ragged or workload.seqlen_q != workload.seqlen_kv:
        return None
    return (workload.batch * workload.seqlen_q, *workload._replace(name="", group="", lengths_q=(), lengths_kv=()))


def between(record: Record) -> list[Regret]:
    """Returns a line for each length of BETWEEN two neighbours that were measured."""
    device = _device(record)
    kinds: dict[tuple[object, ...], list[Workload]] = {}
    for name in dict.fromkeys(name for name, _ in record.cells()):
        kind = _kind(record.workloads[name])
        if kind is not None:
            kinds.setdefault(kind, []).append(record.workloads[name])
    found = []
    for workloads in kinds.values():
        ordered = sorted(workloads, key=lambda w: w.seqlen_kv)
        for shorter, longer in pairwise(ordered):
            for direction in DIRECTIONS:
                ends = [_times(record, w.name, direction)[1] for w in (shorter, longer)]
                if min(map(len, ends)) < 2:
                    continue
                for length in (int(shorter.seqlen_kv * share) | 1 for share in BETWEEN):
                    if length < longer.seqlen_kv:
                        asked = with_length(shorter, length)
                        at = math.log(length / shorter.seqlen_kv) / math.log(longer.seqlen_kv / shorter.seqlen_kv)
                        found.append(_interpolated(asked, direction, pick(asked, direction, device), ends, at))
    return found


def _interpolated(workload: Workload, direction: Direction, picked: str, ends: Sequence[Mapping[str, float]], at: float) -> Regret:
    """Returns the regret of a length between two, `at` of the way by the logarithm of the length.

    It is unknown if the pick was not measured at both ends, or if no implementation is fastest at both. Within TIE all are fastest.
    """
    fast = [{name for name, us in times.items() if us <= min(times.values()) * (1 + TIE)} for times in ends]
    fastest = " or ".join(sorted(fast[0] & fast[1]))
    if not fastest or not all(picked in times for times in ends):
        firsts = (min(times, key=lambda n: times[n]) for times in ends)
        return Regret(workload.name, direction, picked, ", then ".join(firsts), None)
    first, last = (times[picked] / min(times.values()) for times in ends)
    return Regret(workload.name, direction, picked, fastest, first ** (1 - at) * last**at)


def text(name: str, record: Record) -> str:
    """The table of a file: each cell, each length between two, the worst, and how many are over TIE or unknown."""
    lines = []
    for title, found in ((f"{name}: cells", regrets(record)), (f"{name}: lengths between", between(record))):
        rows = [
            (f"{r.workload} {r.direction}", ["unknown" if r.ratio is None else f"{r.ratio:.3f}", r.pick, r.fastest, "*" * r.is_bad])
            for r in found
        ]
        lines.append(Table(title, ["ratio", "pick", "fastest", ""], rows).text())
        known = [r for r in found if r.ratio is not None]
        worst = max(known, key=lambda r: r.ratio or 0.0, default=None)
        over = sum(r.is_bad for r in found)
        summary = f"  {len(found)} cells, {over} over {1 + TIE:.2f}, {len(found) - len(known)} unknown"
        lines.append(summary + (f"; the worst {worst.ratio:.3f}, {worst.workload} {worst.direction}" if worst else ""))
    return "\n".join(lines)
