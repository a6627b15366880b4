"""Attention over keys in a cache, by the cells of serving: decode, pages, chunked prefill, shared prefixes, absorbed latents (MLA).

    python -m flexattn.bench.decode --out decode.json [--only PATTERN ...]

Each cell is one step's call. Rows of the cache that are not in use hold NaN, and unused entries of the page table numbers out of
range. Timed beside each other: the call, the same with `batch_invariant`, over a dense cache, on cuDNN, and the peers of
`decode_peers`. A time is that of the replay of a CUDA graph with L2 emptied before. Checked against the eager backend in fp64 are
the result of a call, and those of replays before and after the timed ones, into an output of NaN and with memory that nobody
holds overwritten, so that a graph that reads what has been freed is found. Needs a GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench.decode_cells import CELLS, DTYPE, Cell, Step, bytes_of, exact, flops_of, make_steps
from flexattn.bench.decode_peers import peers
from flexattn.bench.implementations import Unavailable

FLUSH_BYTES = 2**28  # written before each replay: empties L2
HOST_CALLS = 50
ROUNDS, CALLS = 5, 8  # turns of each implementation, and replays in each
SLOW_US = 5000.0  # from here on a turn is one replay, and the host's time is left out
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


class Captured(NamedTuple):
    """A CUDA graph of a call, and what the graph reads and writes, which must live as long."""

    graph: torch.cuda.CUDAGraph
    call: Call  # holds the tensors that the graph reads
    out: Tensor  # what each replay writes


def captured(call: Call) -> Captured:
    """A CUDA graph of the call, after calls that compile and warm what it needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return Captured(graph, call, out[0] if isinstance(out, tuple) else out)


def poison_free_memory() -> None:
    """Overwrites what the allocator has and nobody holds, outside of graphs, by NaN in each floating dtype, and -1 as a number."""
    own = ((0, 0), torch.cuda.current_stream().cuda_stream)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [s for s in segments if (tuple(s["segment_pool_id"]), s["stream"]) == own]
    blocks = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    held = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255) for size in sorted(blocks, reverse=True)]
    del held


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def error_of_replay(it: Captured, wanted: Tensor) -> float:
    """Distance between what one more replay writes and `wanted`."""
    it.out.fill_(torch.nan)
    it.graph.replay()
    torch.cuda.synchronize()
    return distance(it.out, wanted)


def time_replays(it: Captured, flush: Tensor, calls: int = CALLS) -> list[float]:
    """Microseconds of device time of each replay."""
    made = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    events = list(zip(made[::2], made[1::2], strict=True))
    for start, end in events:
        flush.zero_()
        start.record()
        it.graph.replay()
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
    wanted = merge_attention(*(side.double() for side in sides), qkv_format="thd")[0]
    row: dict[str, Any] = {"cell": "merge of 16384 queries", "implementation": "flexattn"}
    it = captured(functools.partial(merge_attention, *sides, qkv_format="thd"))
    row["error"] = error_of_replay(it, wanted)
    if not row["error"] < WORST:
        return row | {"status": "wrong"}
    us = statistics.median(us for _ in range(ROUNDS) for us in time_replays(it, flush))
    moved = 3 * sides[0].nbytes + 3 * sides[1].nbytes
    return row | {"status": "measured", "us": us, "gb_s": moved / us * 1e-3, "tflops": 0.0, "host_us": host_time(it.call)}


REFUSALS = (Unavailable, ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)
_ADVICE = ("Set TORCH", "For even more developer", "You can suppress", "target: ", "args[", "kwargs", "import torch._dynamo")


def reason_of(error: Exception) -> str:
    """Returns why an implementation did not run: the error's class, and what it says without stack and advice."""
    from flexattn import BackendError

    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_ADVICE)]
    if isinstance(error, Unavailable):
        return " ".join(lines)[:300]
    if isinstance(error, BackendError):  # the first line names the call
        return (lines[1:] or lines)[0][:300]
    return ": ".join([type(error).__name__, " ".join(lines)][: 1 + bool(lines)])[:300]


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _prepared(prepare: Callable[[], Call], wanted: Tensor, row: dict[str, Any], is_timed: bool) -> Captured | None:
    """Returns the graph of an implementation that is right; `row` is told its error, or the reason why there is none."""
    try:
        call = prepare()
        row["error"] = distance(call(), wanted)
        if row["error"] < WORST:
            row["status"] = "checked"
            return captured(call) if is_timed else None
        row["status"] = "wrong"
    except torch.AcceleratorError:  # a fault on the device: nothing can run in this process any more
        raise
    except REFUSALS as e:  # a refusal is a row of the table
        row |= {"status": "refused", "reason": reason_of(e)}
    _free_memory()
    return None


def _check_replay(row: dict[str, Any], it: Captured, wanted: Tensor) -> None:
    row["error_of_replay"] = max(error_of_replay(it, wanted), row.get("error_of_replay", 0.0), key=lambda x: (x != x, x))
    if not row["error_of_replay"] < WORST:
        row["status"] = "wrong"


def measure(name: str, cell: Cell, flush: Tensor, is_timed: bool = True) -> list[dict[str, Any]]:
    """Returns a row for each implementation of the cell; where memory is not enough for its tensors, one that says so."""
    try:
        paged, dense = make_steps(cell)
        wanted = exact(dense, cell)
        functions = implementations(cell, paged, dense)
    except torch.OutOfMemoryError as e:
        return [{"cell": name, "implementation": "all", "status": "refused", "reason": reason_of(e)}]
    rows: list[dict[str, Any]] = []
    graphs: list[tuple[dict[str, Any], Captured]] = []
    for implementation, prepare in functions.items():
        print(f"{name}: {implementation}", end="\r", flush=True)  # so that a fault on the device has a name
        row: dict[str, Any] = {"cell": name, "implementation": implementation}
        it = _prepared(prepare, wanted, row, is_timed)
        rows.append(row)
        if it is not None:
            graphs.append((row, it))
    poison_free_memory()
    for row, it in graphs:
        _check_replay(row, it, wanted)
    graphs = [(row, it) for row, it in graphs if row["status"] == "checked"]
    times: list[list[float]] = [[] for _ in graphs]
    calls = [CALLS if time_replays(it, flush, 2)[1] < SLOW_US else 1 for _, it in graphs]
    for _ in range(ROUNDS):
        for of_one, (_, it), count in zip(times, graphs, calls, strict=True):
            of_one += time_replays(it, flush, count)
    for of_one, (row, it), count in zip(times, graphs, calls, strict=True):
        _check_replay(row, it, wanted)
        if row["status"] == "checked":
            q1, median, q3 = statistics.quantiles(of_one, n=4)
            rates = {"gb_s": bytes_of(cell) / median * 1e-3, "tflops": flops_of(cell) / median * 1e-6}
            host = {"host_us": host_time(it.call) if count > 1 else None}
            row |= {"status": "measured", "us": median, "us_q1": q1, "us_q3": q3, **rates, **host}
    return rows


def _said(row: dict[str, Any]) -> str:
    if row["status"] == "measured":
        host = "" if row["host_us"] is None else f", host {row['host_us']:5.1f} us"
        return f"{row['us']:9.1f} us {row['gb_s']:6.0f} GB/s {row['tflops']:6.1f} TFLOP/s{host}"
    if row["status"] == "refused":
        return f"refused: {row['reason']}"
    return f"{row['status']}: error {row['error']:.2e}, of a replay {row.get('error_of_replay', 0.0):.2e}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every cell")
    of_only = "cells whose name matches one, as 'MLA*', in the order of the patterns"
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help=of_only)
    parser.add_argument("--check", action="store_true", help="compile and check everything, and time nothing")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and measure nothing")
    options = parser.parse_args(argv)
    chosen = {name: cell for only in options.only for name, cell in CELLS.items() if fnmatch.fnmatchcase(name, only)}
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
        if cell is None and (options.check or "*" not in options.only):
            continue
        new = [measure_merge(flush)] if cell is None else measure(name, cell, flush, not options.check)
        _free_memory()
        for row in new:
            print(f"{name:36} {row['implementation']:32} {_said(row)}", flush=True)
        rows += new
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
