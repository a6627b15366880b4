"""Fused backwards on sm_90: one program for each block of keys, persistent programs that draw blocks, and other variants.

    python -m flexattn.bench.fused_programs --out fused_programs.json [--only PATTERN ...]

A time is the median of replays of a CUDA graph of the whole backward after L2 is emptied; the kernels alternate. Gradients of up to
4096 tokens are checked against the reference. For all lengths, dk and dv of all variants must be bitwise identical and repeatable,
and an element that is not written would be NaN. The variant "converting" has persistent programs that also convert dq, so that no
kernel does it after them. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flexattn.bench.check import Checker
from flexattn.bench.decode import FLUSH_BYTES, captured, time_replays
from flexattn.bench.harness import Run, in_turns, make_parser
from flexattn.bench.implementations import problem_of
from flexattn.bench.inputs import make_tensors
from flexattn.bench.shapes import CAUSAL, DOCUMENTS, SWEEP_SEQLENS, Workload, dense, ragged, select

ROUNDS, CALLS = 7, 4  # turns of each, and replays in each
OTHERS = ("two kernels", "portable")
MOST_BESIDE = 512  # the most tokens of calls on which the other kernels are timed too
MOST_CHECKED = 4096  # the most tokens of calls that are checked against the reference
BETWEEN = (641, 777, 897)  # lengths around the thresholds of the rows
WINDOW = {**CAUSAL, "window_size": (1023, 0)}


def workloads() -> Iterator[Workload]:
    """Yields the lengths of the standard run at head dims 64 and 128, some lengths between, and other kinds of calls."""
    for dim in (64, 128):
        for mask in ("causal", "full"):
            yield from select([f"sweep-d{dim}-{mask}-s{length}" for length in SWEEP_SEQLENS])
        yield from select([f"odd-d{dim}-causal-s{length}" for length in BETWEEN])
    for dim, heads in ((64, 32), (128, 16)):
        for length in (512, 2048):
            yield dense(f"grouped-d{dim}-s{length}", "", 16384 // length, length, (heads, heads // 4), (dim, dim), **CAUSAL)
        yield dense(f"window-d{dim}-s8192", "", 2, 8192, (heads, heads), (dim, dim), **WINDOW)
        yield ragged(f"documents-d{dim}", DOCUMENTS, (heads, heads), (dim, dim), "")
        yield ragged(f"short-d{dim}", (300, 700, 512) * 10, (heads, heads), (dim, dim), "")
        for length in (1024, 4096):
            yield dense(
                f"softcap-d{dim}-s{length}", "", 16384 // length, length, (heads, heads), (dim, dim), **CAUSAL, score="softcap"
            )
    yield from select(["llama3-70b-s8192", "gpt-oss-full-s8192"])


def backwards_of(workload: Workload) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Returns the whole backward of the workload by each kernel. Elements that are not written are NaN, except in a graph."""
    from flexattn.kernels_triton.common.problem import Backward
    from flexattn.kernels_triton.hopper.backward import hopper_backward
    from flexattn.kernels_triton.hopper.backward_fused import fused_backward
    from flexattn.kernels_triton.hopper.conditions import fused_tile
    from flexattn.kernels_triton.hopper.forward import hopper_forward
    from flexattn.kernels_triton.portable.backward import attention_backward

    tensors = make_tensors(workload, "cuda")
    q, k, v, dout = tensors[:4]
    x = problem_of(workload, tensors)
    out = torch.empty_like(dout)
    shape = (workload.num_heads, q.shape[0]) if workload.is_ragged else (q.shape[0], workload.num_heads, q.shape[1])
    lse = torch.empty(shape, dtype=torch.float32, device="cuda")
    hopper_forward(x, out, lse)
    row = dataclasses.replace(fused_tile(x), is_persistent=False, converts=False)
    persistent = dataclasses.replace(row, is_persistent=True)

    def backward(run: Callable[..., None]) -> dict[str, Tensor]:
        is_captured = torch.cuda.is_current_stream_capturing()
        dq, dk, dv = memory if is_captured else (torch.full_like(t, float("nan")) for t in (q, k, v))
        doffset = torch.empty_like(tensors.softmax_offset) if tensors.softmax_offset is not None else None
        run(Backward(x, out, lse, dout, None, dq, dk, dv, doffset))
        return {"dq": dq, "dk": dk, "dv": dv}

    memory = [torch.empty_like(t) for t in (q, k, v)]
    runs: dict[str, Callable[..., None]] = {
        "one block": functools.partial(fused_backward, tile=row),
        "persistent": functools.partial(fused_backward, tile=persistent),
        "converting": functools.partial(fused_backward, tile=dataclasses.replace(persistent, converts=True)),
    }
    if workload.seqlen_q <= MOST_BESIDE:
        runs |= dict(zip(OTHERS, (hopper_backward, attention_backward), strict=True))
    return {name: functools.partial(backward, run) for name, run in runs.items()}


def check(workload: Workload, backwards: dict[str, Callable[[], dict[str, Tensor]]]) -> str:
    """Returns "measured", or "wrong: " and the reason."""
    variants = [name for name in backwards if name not in OTHERS]
    first = backwards["one block"]()
    largest = float(first["dq"].float().abs().amax())
    checker = Checker(workload, make_tensors(workload, "cuda")) if workload.seqlen_q <= MOST_CHECKED else None
    for name in variants + variants:
        gradients = backwards[name]()
        for gradient in ("dk", "dv"):
            if not torch.equal(gradients[gradient], first[gradient]):
                return f"wrong: {gradient} of {name} has other bits"
        apart = float((gradients["dq"].float() - first["dq"].float()).abs().amax())
        if not apart <= largest * 2.0**-6:
            return f"wrong: dq of {name} is {apart} off, of {largest}"
        if checker is not None and name in ("persistent", "converting"):
            try:
                checker.check("backward", gradients)
            except AssertionError as e:
                return f"wrong: {name}: {e}"
    return "measured"


def measure(workload: Workload, flush: Tensor) -> dict[str, Any]:
    """Returns the times in microseconds, and the time of "one block" over each."""
    backwards = backwards_of(workload)
    status = check(workload, backwards)
    graphs = {name: captured(backward) for name, backward in backwards.items()}
    for graph in graphs.values():
        time_replays(graph, flush, 2)
    times = in_turns(graphs, ROUNDS, lambda name: time_replays(graphs[name], flush, CALLS))
    us = {name: statistics.median(samples) for name, samples in times.items()}
    return {"status": status, "us": us, "speed": {name: us["one block"] / took for name, took in us.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="measure cells whose name matches a pattern")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("no CUDA device of compute capability 9.0, which the kernel needs")
    run = Run("flexattn.bench.fused_programs", __doc__, options.out, argv)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for workload in workloads():
        if any(fnmatch.fnmatchcase(workload.name, only) for only in options.only):
            figures = measure(workload, flush)
            run.add({"cell": workload.name, "shape": str(workload), **figures}, f"{workload.name} {figures}")
    return int(any(row["status"] != "measured" for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
