"""A result file: measurements with their workloads, device, versions and command, in one schema.

{"schema": 1, "command": ..., "started": ..., "device": {...}, "versions": {...}, "ceilings": {...}, "method": {...},
 "workloads": {name: {...}}, "rows": [...], "left_out": [...], "complete": true}
"""

from __future__ import annotations

import csv
import datetime
import functools
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch

import flexattn
from flexattn.bench.shapes import Workload

SCHEMA = 1
TRIANGLE = ("cuequivariance-ops-torch-cu13", "cuequivariance-ops-torch-cu12")  # cuEquivariance's packages with kernels
PACKAGES = ("triton", "nvidia-cudnn-frontend", "flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4", *TRIANGLE)


class Ceilings(NamedTuple):
    """Rates measured in the same run; None if an older run has no such rate."""

    matmul_tflops: float
    matmul_size: int  # the product is square
    matmul_dtype: str
    copy_gb_s: float  # bytes read and written
    copy_bytes: int


class Row(NamedTuple):
    """One implementation in one workload and direction. A field is None if it was not measured; `reason` has the cause."""

    implementation: str
    version: str
    workload: str
    direction: str
    status: str  # "measured", "checked" (right, and not timed), "wrong" or "refused"
    reason: str | None = None
    calls: int | None = None
    us: float | None = None  # median
    us_q1: float | None = None
    us_q3: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    share: float | None = None  # share of the matrix product's TFLOP/s
    roofline_share: float | None = None  # share of the rate that the ceilings allow at the workload's FLOP per byte
    host_us: float | None = None  # median of the host's time to enqueue the call
    host_us_p99: float | None = None
    peak_mib: float | None = None


Content = Mapping[str, Any]  # a result file, as read


class Record(NamedTuple):
    command: str
    started: str | None  # UTC, ISO 8601
    device: Mapping[str, Any]
    versions: Mapping[str, str | None]
    ceilings: Mapping[str, Any] | None
    method: Mapping[str, str]  # how times, operations, bytes, checks and memory are counted, in words
    workloads: Mapping[str, Workload]
    rows: Sequence[Row]
    left_out: Sequence[Mapping[str, str]] = ()  # {"workload", "direction", "reason"}
    complete: bool = True  # False: the run was still going, or was killed

    def of(self, workload: str, direction: str) -> dict[str, Row]:
        """Returns the rows of one cell, by implementation."""
        return {r.implementation: r for r in self.rows if r.workload == workload and r.direction == direction}

    def cells(self) -> list[tuple[str, str]]:
        """Returns (workload, direction) of each cell, in the order of measurement."""
        return list(dict.fromkeys((r.workload, r.direction) for r in self.rows))

    def implementations(self) -> list[str]:
        return list(dict.fromkeys(r.implementation for r in self.rows))


def device_facts() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    from flexattn.kernels_triton.runtime import imitation

    found = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": imitation.label(found.name),
        "capability": [found.major, found.minor],
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
    }


def cudnn_version() -> str | None:
    found = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return str(found) if found else None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "flexattn": flexattn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(),
    }
    return found | {package: installed(package) for package in PACKAGES}


def installed(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_line(module: str, arguments: Sequence[str], out: Path | None) -> str:
    """Returns the command for a record. If it names the result file, the path is the one in bench/results."""
    kept = [f"bench/results/{out.name}" if out is not None and argument == str(out) else argument for argument in arguments]
    return f"python -m {module} {shlex.join(kept)}".rstrip()


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def facts(command: str, ceilings: Ceilings | None, method: Mapping[str, str], workloads: Sequence[Workload]) -> dict[str, Any]:
    """Returns the facts of a run that starts now, under the names of a Record's fields."""
    return {
        "command": command,
        "started": now(),
        "device": device_facts(),
        "versions": versions(),
        "ceilings": None if ceilings is None else ceilings._asdict(),
        "method": method,
        "workloads": {w.name: w for w in workloads},
    }


def write(path: Path, record: Record) -> None:
    """Replaces `path` atomically, so that no reader sees half a file, even if the run is killed."""
    content = {"schema": SCHEMA, **record._asdict()}
    content["workloads"] = {name: w._asdict() for name, w in record.workloads.items()}
    content["rows"] = [{key: value for key, value in row._asdict().items() if value is not None} for row in record.rows]
    replace(path, content)


def replace(path: Path, content: Mapping[str, object]) -> None:
    """Writes `content` as JSON in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(_json(content))
    os.replace(partial, path)


def _json(content: Content) -> str:
    """Returns JSON with one line for each workload and row, so that the diff of a change is short."""
    parts = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, (Mapping, list, tuple)) for item in value.values()):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(w)}" for name, w in value.items())
            parts.append(f' "{key}": {{\n{lines}\n }}')
        elif isinstance(value, (list, tuple)) and value:
            lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
            parts.append(f' "{key}": [\n{lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(path: Path) -> Record:
    """Returns the record in a result file.

    Raises ValueError with the file and the cause if this version did not write it: it is not a result file, has another version,
    a wrong type or number, or a row twice.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("it has no schema")
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"it has schema {schema!r}; this version reads schema {SCHEMA}")
        return _record(content)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no result file of this version of flexattn's bench: {type(e).__name__}: {e}") from e


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it has {name}, which is no measurement")


def _record(content: Mapping[str, object]) -> Record:
    workloads = _plain(content.get("workloads"), dict, "workloads")
    rows = _plain(content.get("rows"), list, "rows")
    found = {name: _typed(Workload, fields, f"workload {name!r}") for name, fields in workloads.items()}
    typed = [_typed(Row, fields, f"row {n}") for n, fields in enumerate(rows)]
    cells = set()
    for n, row in enumerate(typed):
        if row.workload not in found:
            raise ValueError(f"row {n} is of workload {row.workload!r}, which the file does not describe")
        for name in _NUMBERS:
            number = getattr(row, name)
            if number is not None and (number < 0 or (number == 0 and name in _TIMES)):
                raise ValueError(f"row {n} has {name} {number}; accepted: a number above 0")
        cell = (row.implementation, row.workload, row.direction)
        if cell in cells:
            raise ValueError(f"row {n} is the second of {row.implementation} in {row.workload} {row.direction}")
        cells.add(cell)
    record: Record = _typed(Record, {**content, "workloads": found, "rows": typed}, "the file")
    if not isinstance(record.device.get("name"), str):
        raise ValueError("its device has no name")
    if record.ceilings is not None:
        for name, hint in get_type_hints(Ceilings).items():
            if not _is(record.ceilings.get(name), hint | None):
                raise ValueError(f"its ceilings have {name} {record.ceilings[name]!r:.80}; accepted: {hint.__name__}")
        if record.ceilings.get("matmul_tflops") is None:
            record = record._replace(ceilings=None)
    for n, left in enumerate(record.left_out):
        if not isinstance(left, dict) or not {"workload", "direction", "reason"} <= left.keys():
            raise ValueError(f"left_out {n} lacks workload, direction or reason")
    return record


_TIMES = ("us", "us_q1", "us_q3")
_NUMBERS = (*_TIMES, "calls", "tflops", "gb_s", "share", "roofline_share", "host_us", "host_us_p99", "peak_mib")


def _plain(value: object, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"its {name} are {'missing' if value is None else f'a {type(value).__name__}'}; accepted: a {kind.__name__}"
        )
    return value


_hints = functools.cache(get_type_hints)  # it evaluates each annotation anew, and a file has thousands of rows


def _typed(kind: Any, fields: Any, name: str) -> Any:
    """Returns a NamedTuple of `fields`, whose names and types must match."""
    _plain(fields, dict, f"fields of {name}")
    hints = _hints(kind)
    if unknown := sorted(fields.keys() - hints.keys()):
        raise ValueError(f"{name} has {', '.join(unknown)}, which another version of flexattn writes")
    if missing := sorted(hints.keys() - fields.keys() - kind._field_defaults.keys()):
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    values = {
        key: tuple(value) if isinstance(value, list) and get_origin(hints[key]) is tuple else value for key, value in fields.items()
    }
    for key, value in values.items():
        if not _is(value, hints[key]):
            raise ValueError(f"{name} has {key} {value!r:.80}; accepted: {getattr(hints[key], '__name__', hints[key])}")
    return kind(**values)


def _is(value: object, hint: object) -> bool:
    """Returns whether a value from JSON is of the type of a NamedTuple's field."""
    if hint is type(value) or hint is Any or (hint is float and type(value) is int):
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is(value, one) for one in arguments)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is, value, kinds))
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_is(one, arguments[1]) for one in value.values())
    if origin is not None:  # a sequence
        return isinstance(value, (list, tuple)) and all(_is(one, arguments[0]) for one in value)
    return False


def write_csv(path: Path, record: Record) -> None:
    """Writes every row with its shape, after lines that begin with # and have the run's facts."""
    with path.open("w", newline="") as file:
        for name in ("command", "started", "device", "versions", "ceilings", "method"):
            file.write(f"# {name}: {json.dumps(getattr(record, name))}\n")
        writer = csv.writer(file)
        writer.writerow([*Row._fields, "shape"])
        writer.writerows([*row, str(record.workloads[row.workload])] for row in record.rows)
