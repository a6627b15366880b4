"""A result file: what was measured, of what, on what, with which versions and by which command. One schema for everything.

{"schema": 1, "command": ..., "started": ..., "device": {...}, "versions": {...}, "ceilings": {...}, "method": {...},
 "workloads": {name: {...}}, "rows": [...], "left_out": [...], "complete": true}
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flexattn
from flexattn.bench.shapes import Workload

SCHEMA = 1
PACKAGES = ("triton", "nvidia-cudnn-frontend", "flash-attn", "flash-attn-3", "flash-attn-4")


class Ceilings(NamedTuple):
    """Rates measured in the same run; None where the recording of an older run has none."""

    matmul_tflops: float
    matmul_size: int  # the product is square
    matmul_dtype: str
    copy_gb_s: float  # bytes read and written
    copy_bytes: int


class Row(NamedTuple):
    """One implementation in one workload and direction. What is None was not measured, and `reason` says why."""

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
    share: float | None = None  # of the matrix product's TFLOP/s
    roofline_share: float | None = None  # of what the ceilings allow at the workload's FLOP per byte
    host_us: float | None = None  # of the host's time to enqueue the call: median
    host_us_p99: float | None = None
    peak_mib: float | None = None


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
        """The rows of one cell, by implementation."""
        return {r.implementation: r for r in self.rows if (r.workload, r.direction) == (workload, direction)}

    def cells(self) -> list[tuple[str, str]]:
        """(workload, direction), in the order they were measured."""
        return list(dict.fromkeys((r.workload, r.direction) for r in self.rows))

    def implementations(self) -> list[str]:
        return list(dict.fromkeys(r.implementation for r in self.rows))


def device_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": found.name,
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
    """Its version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_line(module: str, arguments: Sequence[str], out: Path | None) -> str:
    """The command as a record keeps it: with the result where results are kept, and not where it was on one machine."""
    kept = [f"bench/results/{out.name}" if out is not None and argument == str(out) else argument for argument in arguments]
    return f"python -m {module} {shlex.join(kept)}".rstrip()


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write(path: Path, record: Record) -> None:
    """Replaces `path` at once, so that a reader, or a run that is killed, never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, **record._asdict()}
    content["workloads"] = {name: w._asdict() for name, w in record.workloads.items()}
    content["rows"] = [{key: value for key, value in row._asdict().items() if value is not None} for row in record.rows]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(_json(content))
    os.replace(partial, path)


def _json(content: Mapping[str, Any]) -> str:
    """One line for each workload and row: short, and a change of one shows as one."""
    parts = []
    for key, value in content.items():
        if key == "workloads":
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(w)}" for name, w in value.items())
            parts.append(f' "{key}": {{\n{lines}\n }}')
        elif isinstance(value, (list, tuple)) and value:
            lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
            parts.append(f' "{key}": [\n{lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(path: Path) -> Record:
    """Raises ValueError, naming the file, for one that is no result file of this schema."""
    try:
        content = json.loads(path.read_text())
        schema = content.pop("schema")
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as e:
        raise ValueError(f"{path} is no result file of flexattn's bench: {type(e).__name__}: {e}") from e
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this version reads schema {SCHEMA}")
    content["workloads"] = {name: _workload(fields) for name, fields in content["workloads"].items()}
    content["rows"] = [Row(**row) for row in content["rows"]]
    return Record(**content)


def _workload(fields: Mapping[str, Any]) -> Workload:
    as_tuples: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Workload(**as_tuples)


def write_csv(path: Path, record: Record) -> None:
    """Every row with its shape; how it was made stands above, in lines that begin with #."""
    with path.open("w", newline="") as file:
        for name in ("command", "started", "device", "versions", "ceilings", "method"):
            file.write(f"# {name}: {json.dumps(getattr(record, name))}\n")
        writer = csv.writer(file)
        writer.writerow([*Row._fields, "shape"])
        writer.writerows([*row, str(record.workloads[row.workload])] for row in record.rows)
