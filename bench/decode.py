"""Attention over keys in a cache, in cells of serving: decode, pages, chunked prefill, shared prefixes, absorbed latents (MLA).

    python -m flexattn.bench.decode --out decode.json [--only PATTERN ...]

Each cell is the call of one step. Unused rows of the cache hold NaN, and unused entries of the page table are out of range. The
program times five variants in turns: the call, the same call with `batch_invariant`, over a dense cache, on cuDNN, and the peers of
`decode_peers`. A time is the replay of a CUDA graph after L2 is emptied. The eager backend in fp64 checks the result of a call, and
the results of replays before and after the timed ones. These replays write into an output of NaN after free memory is overwritten,
so a graph that reads freed memory is found. Needs a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.bench import harness
from flexattn.bench.decode_cells import CELLS, Cell, Step, bytes_of, exact, flops_of, make_steps
from flexattn.bench.decode_peers import peers
from flexattn.bench.harness import Call, Program, Row, host_us
from flexattn.bench.implementations import Unavailable
from flexattn.bench.measure import reason_of
from flexattn.cli import Parser

HOST_CALLS = 50
BUDGET_MS = 40.0  # device time of each implementation's replays
SLOW_US = 5000.0  # if a replay takes longer, the host's time is not measured


def implementations(cell: Cell, paged: Step, dense: Step) -> dict[str, Callable[[], Call]]:
    """Returns functions that prepare a call of the cell, by name. If a peer cannot run it, its function raises Unavailable."""
    from flexattn import attention, attention_with_prefix

    def ours(step: Step, **more: object) -> Callable[[], Call]:
        return lambda: functools.partial(attention, step.q, step.k, step.v, **step.where, **more)

    functions = {"flexattn": ours(paged, backend="triton")}
    if cell.prefix:
        functions["flexattn, attention_with_prefix"] = lambda: functools.partial(
            attention_with_prefix, paged.q, paged.k, paged.v, prefix_length=cell.prefix, **paged.where
        )
    functions["flexattn, batch_invariant"] = ours(paged, backend="triton", batch_invariant=True)
    functions["flexattn, dense"] = ours(dense, backend="triton")
    functions["flexattn, cuDNN"] = ours(paged, backend="cudnn")
    return functions | {peer.name: functools.partial(peer.prepare, cell, paged, dense) for peer in peers()}


class Captured(NamedTuple):
    """A CUDA graph of a call, with the tensors that it reads and writes, which must live as long."""

    graph: torch.cuda.CUDAGraph
    call: Call  # holds the tensors that the graph reads
    out: Tensor  # written by each replay
    spoil: Callable[[], object] = int  # makes all else that a replay writes NaN


def captured(call: Call) -> Captured:
    """Returns the call in a CUDA graph."""
    graph, out = harness.capture(call)
    return Captured(graph, call, out[0] if isinstance(out, tuple) else out, getattr(call, "spoil", int))


def poison_free_memory() -> None:
    """Overwrites the allocator's free memory outside of graphs with bytes that are NaN in floating dtypes and -1 in integers."""
    own = ((0, 0), torch.cuda.current_stream().cuda_stream)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [s for s in segments if (tuple(s["segment_pool_id"]), s["stream"]) == own]
    blocks = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    held = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255) for size in sorted(blocks, reverse=True)]
    del held


def error_of_replay(it: Captured, wanted: Tensor) -> float:
    """Returns the distance between the output of one more replay and `wanted`."""
    it.out.fill_(torch.nan)
    it.spoil()
    it.graph.replay()
    torch.cuda.synchronize()
    return harness.distance(it.out, wanted)


REFUSALS = (Unavailable, ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)


def _prepared(prepare: Callable[[], Call], wanted: Tensor, row: Row, is_timed: bool) -> Captured | None:
    """Returns the graph of an implementation if its result is right. `row` gets the error, or the reason of a refusal."""
    try:
        call = prepare()
        row["error"] = harness.distance(call(), wanted)
        if row["error"] < harness.WORST:
            row["status"] = "checked"
            return captured(call) if is_timed else None
        row["status"] = "wrong"
    except torch.AcceleratorError:  # after a fault on the device, this process cannot run anything
        raise
    except REFUSALS as e:  # a refusal is a row of the table
        row |= {"status": "refused", "reason": reason_of(e)}
    harness.free_memory()
    return None


def _check_replay(row: Row, it: Captured, wanted: Tensor) -> None:
    row["error_of_replay"] = max(error_of_replay(it, wanted), row.get("error_of_replay", 0.0), key=lambda x: (x != x, x))
    if not row["error_of_replay"] < harness.WORST:
        row["status"] = "wrong"


Functions = Callable[[Cell, Step, Step], dict[str, Callable[[], Call]]]


def measure(cell: Cell, is_timed: bool = True, functions_of: Functions | None = None) -> list[Row]:
    """Returns a row for each implementation of the cell, or a single row if its tensors do not fit in memory.

    functions_of: `implementations`, or another function like it. If a call has a method `spoil`, it runs before each check.
    """
    try:
        paged, dense = make_steps(cell)
        wanted = exact(dense, cell)
        functions = (functions_of or implementations)(cell, paged, dense)
        del paged, dense
    except torch.OutOfMemoryError as e:
        return [{"implementation": "all", "status": "refused", "reason": reason_of(e)}]
    rows: list[Row] = []
    graphs: dict[str, tuple[Row, Captured]] = {}
    for name, prepare in functions.items():
        print(name, end="\r", flush=True)  # names the implementation if the device faults
        row: Row = {"implementation": name}
        it = _prepared(prepare, wanted, row, is_timed)
        rows.append(row)
        if it is not None:
            graphs[name] = row, it
    poison_free_memory()
    for row, it in graphs.values():
        _check_replay(row, it, wanted)
    graphs = {name: (row, it) for name, (row, it) in graphs.items() if row["status"] == "checked"}
    times = harness.times({name: it.graph.replay for name, (_, it) in graphs.items()}, BUDGET_MS) if graphs else {}
    for name, (row, it) in graphs.items():
        _check_replay(row, it, wanted)
        if row["status"] == "checked":
            row |= {"status": "measured", **times[name]}
            row |= {"gb_s": bytes_of(cell) / row["us"] * 1e-3, "tflops": flops_of(cell) / row["us"] * 1e-6}
            row["host_us"] = host_us(it.call, HOST_CALLS, torch.cuda.synchronize) if row["us"] < SLOW_US else None
    return rows


def outcome(row: Row) -> str:
    if row["status"] == "measured":
        host = "" if row["host_us"] is None else f", host {row['host_us']:5.1f} us"
        return f"{row['us']:9.1f} us {row['gb_s']:6.0f} GB/s {row['tflops']:6.1f} TFLOP/s{host}"
    if row["status"] == "refused":
        return f"refused: {row['reason']}"
    return f"{row['status']}: error {row['error']:.2e}, of a replay {row.get('error_of_replay', 0.0):.2e}"


def line(row: Row) -> str:
    return f"{row['cell']:36} {row['implementation']:32} {outcome(row)}"


def add_check(parser: Parser) -> None:
    parser.add_argument("--check", action="store_true", help="compile and check everything, and time nothing")


PROGRAM = Program(
    "flexattn.bench.decode",
    __doc__,
    "cell",
    CELLS,
    lambda cell, options: measure(cell, not options.check),
    line,
    add_options=add_check,
    facts=lambda: {"peers": {peer.name: peer.version for peer in peers()}},
)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
