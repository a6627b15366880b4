"""Attention over keys in a cache, by the cells of serving: decode, pages, chunked prefill, shared prefixes, absorbed latents (MLA).

    python -m flexattn.bench.decode --out decode.json [--only PATTERN ...]

Each cell is one step's call. Rows of the cache that are not in use hold NaN, and unused entries of the page table numbers out of
range. Timed beside each other: the call, the same with `batch_invariant`, over a dense cache, on cuDNN, and the peers of
`decode_peers`. Each result is checked against the eager backend in fp64 before it is timed; a time is that of the replay of a CUDA
graph with L2 emptied before. Needs a GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.bench.decode_cells import CELLS, DTYPE, Cell, Step, bytes_of, exact, flops_of, make_steps
from flexattn.bench.decode_peers import peers
from flexattn.bench.implementations import Unavailable

FLUSH_BYTES = 2**28  # written before each replay: empties L2
HOST_CALLS = 50
ROUNDS, CALLS = 5, 8  # turns of each implementation, and replays in each
WORST = 2.0**-6  # |got - exact| / |exact| in the Euclidean norm: several times the rounding of bf16, far below a wrong result

Call = Callable[[], Any]


def implementations(cell: Cell, paged: Step, dense: Step) -> dict[str, Callable[[], Call]]:
    """Returns functions that make a call which computes the cell, by name; a peer that cannot raises Unavailable."""
    from flexattn import attention, attention_with_prefix

    def ours(step: Step, **more: Any) -> Callable[[], Call]:
        return lambda: functools.partial(attention, step.q, step.k, step.v, **step.where, **more)

    made = {"flexattn": ours(paged, backend="triton")}
    if cell.prefix:
        made["flexattn, attention_with_prefix"] = lambda: functools.partial(
            attention_with_prefix, paged.q, paged.k, paged.v, prefix_length=cell.prefix, **paged.where
        )
    made["flexattn, batch_invariant"] = ours(paged, backend="triton", batch_invariant=True)
    made["flexattn, dense"] = ours(dense, backend="triton")
    made["flexattn, cuDNN"] = ours(paged, backend="cudnn")
    return made | {peer.name: functools.partial(peer.prepare, cell, paged, dense) for peer in peers()}


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, after calls that compile and warm what it needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, flush: Tensor, calls: int = CALLS) -> list[float]:
    """Microseconds of device time of each replay."""
    made = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    events = list(zip(made[::2], made[1::2], strict=True))
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def host_time(call: Call) -> float:
    """Microseconds until an ordinary call returns to Python, with nothing before it in the device's queue."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - before))
    return statistics.median(times)


def measure_merge(flush: Tensor) -> dict[str, Any]:
    """Returns a row for `merge_attention` of the results of two calls, 16384 queries of 32 heads of 128."""
    from flexattn import merge_attention

    sides = [torch.randn(16384, 32, 128, device="cuda", dtype=DTYPE), torch.randn(32, 16384, device="cuda")]
    sides += [torch.randn_like(side) for side in sides]
    call = functools.partial(merge_attention, *sides, qkv_format="thd")
    wanted = merge_attention(*(side.double() for side in sides), qkv_format="thd")
    error = float((call()[0].double() - wanted[0]).norm() / wanted[0].norm())
    row: dict[str, Any] = {"cell": "merge of 16384 queries", "implementation": "flexattn", "error": error}
    if not error < WORST:
        return row | {"status": "wrong"}
    graph = captured(call)
    times = [us for _ in range(ROUNDS) for us in time_replays(graph, flush)]
    moved = 3 * sides[0].nbytes + 3 * sides[1].nbytes
    us = statistics.median(times)
    return row | {"status": "measured", "us": us, "gb_s": moved / us * 1e-3, "tflops": 0.0, "host_us": host_time(call)}


def measure(name: str, cell: Cell, flush: Tensor) -> list[dict[str, Any]]:
    """Returns a row for each implementation of the cell."""
    from flexattn import BackendError

    paged, dense = make_steps(cell)
    wanted = exact(dense, cell)
    rows: list[dict[str, Any]] = []
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for implementation, prepare in implementations(cell, paged, dense).items():
        row: dict[str, Any] = {"cell": name, "implementation": implementation}
        try:
            call = prepare()
            got = call()
        except (
            Unavailable,
            BackendError,
            ValueError,
            TypeError,
            RuntimeError,
            AssertionError,
        ) as e:  # a refusal is a row of the table
            lines = str(e).strip().splitlines()
            rows.append(row | {"status": "refused", "reason": lines[min(1, len(lines) - 1)].strip()[:300]})
            continue
        error = float((got.double() - wanted).norm() / wanted.norm())
        if not error < WORST:
            rows.append(row | {"status": "wrong", "error": error})
            continue
        rows.append(row | {"status": "measured", "error": error, "host_us": host_time(call)})
        graphs[implementation] = captured(call)
    times: dict[str, list[float]] = {implementation: [] for implementation in graphs}
    for graph in graphs.values():
        time_replays(graph, flush, 2)
    for _ in range(ROUNDS):
        for implementation, graph in graphs.items():
            times[implementation] += time_replays(graph, flush)
    for row in rows:
        if row["status"] == "measured":
            q1, median, q3 = statistics.quantiles(times[row["implementation"]], n=4)
            rates = {"gb_s": bytes_of(cell) / median * 1e-3, "tflops": flops_of(cell) / median * 1e-6}
            row |= {"us": median, "us_q1": q1, "us_q3": q3, **rates}
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every cell")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cells whose name matches one, as 'MLA*'")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and measure nothing")
    options = parser.parse_args(argv)
    chosen = {name: cell for name, cell in CELLS.items() if any(fnmatch.fnmatchcase(name, only) for only in options.only)}
    if options.list:
        print("\n".join(chosen))
        return 0
    if not torch.cuda.is_available():
        parser.error("no CUDA device; decode measures device time")
    from flexattn.bench import record

    facts = {
        "command": record.command_line("flexattn.bench.decode", sys.argv[1:], options.out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions(),
        "peers": {peer.name: peer.version for peer in peers()},
        "method": __doc__,
    }
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, cell in [*chosen.items(), ("merge", None)]:
        if cell is None and "*" not in options.only:
            continue
        new = [measure_merge(flush)] if cell is None else measure(name, cell, flush)
        for row in new:
            said = (
                f"{row['us']:9.1f} us {row['gb_s']:6.0f} GB/s {row['tflops']:6.1f} TFLOP/s, host {row['host_us']:5.1f} us"
                if row["status"] == "measured"
                else f"{row['status']}: {row.get('reason', row.get('error'))}"
            )
            print(f"{name:36} {row['implementation']:32} {said}", flush=True)
        rows += new
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
