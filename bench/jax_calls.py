"""flexattn from JAX beside JAX's own attention and beside flexattn from torch, in one run.

    python -m flexattn.bench.jax_calls --out jax_calls.json

Every result is checked before anything is timed. A time is the wall time of calls that are enqueued one after another, divided by
their number, from the first's start until the last is done: the implementations take turns, and the median of their turns counts. A
kernel time is the sum of what CUPTI records of their kernels, copies and fills, divided by their number, likewise in turns. The
host's time of a call is that of returning from one whose kernels are done long before the next. Needs a GPU, and JAX with its CUDA
plugin.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import torch
import torch.utils.dlpack
from torch import Tensor

from flexattn.bench import record
from flexattn.bench.check import Checker
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.shapes import Workload, dense, select

SHAPES = (*(f"sweep-*-s{seqlen}" for seqlen in (1024, 4096, 16384)), "llama3-8b-s8192", "deepseek-v3-s4096")
DIRECTIONS = ("forward", "both")
TURNS, TURN_US, CALLS = 12, 20_000, (4, 20)  # calls of a turn: what takes so long, at least and at most
PROFILED_TURNS = 6
LONGEST_OF_XLA = 1024  # whose attention keeps all scores
HOST_SHAPE = dense("host", "host", 1, 128, (16, 16), (64, 64), attn_mask_type="causal")
HOST_CALLS = 300

Call = Callable[[], Any]


def to_jax(t: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(t.detach())


def jax_call(attend: Callable[..., Any], tensors: Tensors, direction: str) -> Call:
    """Returns a compiled call: of out, or of out and the gradients of q, k and v."""
    import jax

    if direction == "forward":
        compiled = jax.jit(lambda *x: [attend(*x)])
        return functools.partial(compiled, *map(to_jax, tensors[:3]))

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return [out, *pull(dout)]

    return functools.partial(jax.jit(both), *map(to_jax, tensors[:4]))


def torch_call(workload: Workload, tensors: Tensors, direction: str) -> Call:
    import flexattn

    attend = functools.partial(flexattn.attention, attn_mask_type=workload.attn_mask_type, backend="triton")
    if direction == "forward":
        return lambda: [attend(*tensors[:3])]
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]

    def both() -> list[Tensor]:
        out = attend(*leaves)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, leaves, tensors.dout)]

    return both


def calls_of(workload: Workload, tensors: Tensors, direction: str) -> dict[str, Call]:
    import jax

    import flexattn.jax

    masked: dict[str, Any] = {"attn_mask_type": workload.attn_mask_type}
    ours = functools.partial(flexattn.jax.attention, **masked)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=workload.is_causal)
    made = {
        "flexattn.jax": jax_call(ours, tensors, direction),
        "flexattn in torch": torch_call(workload, tensors, direction),
        "jax.nn, cudnn": jax_call(functools.partial(theirs, implementation="cudnn"), tensors, direction),
    }
    if workload.seqlen_kv <= LONGEST_OF_XLA:
        made["jax.nn, xla"] = jax_call(functools.partial(theirs, implementation="xla"), tensors, direction)
    return made


def results_of(call: Call) -> dict[str, Tensor]:
    names = ("out", "dq", "dk", "dv")
    found = [x.detach() if isinstance(x, Tensor) else torch.utils.dlpack.from_dlpack(x) for x in call()]
    torch.cuda.synchronize()
    return dict(zip(names, found, strict=False))


def wait(result: Any) -> None:
    for x in result:
        if not isinstance(x, Tensor):
            x.block_until_ready()
    torch.cuda.synchronize()


def turn(call: Call, calls: int) -> float:
    """Returns the microseconds of one of so many calls."""
    wait(call())
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait(last)
    return (time.perf_counter() - began) / calls * 1e6


def kernel_turn(call: Call, calls: int) -> float:
    """Returns the microseconds of one of so many calls' kernels, copies and fills, without what lies between them."""
    from torch.profiler import ProfilerActivity, profile

    wait(call())
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            last = call()
        wait(last)
    return float(sum(event.device_time for event in found.events())) / calls


def in_turns(
    calls: dict[str, Call], numbers: dict[str, int], turns: int, one: Callable[[Call, int], float]
) -> dict[str, list[float]]:
    """Returns what `one` gives for each call, in every turn; nobody always follows the same one, since they warm the GPU."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = [*calls]
    for i in range(turns):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(one(calls[name], numbers[name]))
    return found


def measure(workload: Workload, direction: str) -> list[dict[str, Any]]:
    """Returns a row for each implementation that runs and is right, and for one that does not with its reason."""
    tensors = make_tensors(workload, "cuda")
    checker = Checker(workload, tensors)
    rows: list[dict[str, Any]] = []
    timed: dict[str, Call] = {}
    ours: Mapping[str, Tensor] = {}
    for name, call in calls_of(workload, tensors, direction).items():
        row: dict[str, Any] = {"implementation": name, "workload": workload.name, "direction": direction}
        try:
            found = results_of(call)
        except Exception as e:  # whatever keeps a peer from running is its row in the table
            rows.append(row | {"status": "refused", "reason": f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"})
            continue
        try:
            checker.check(direction, found)
        except AssertionError as e:
            rows.append(row | {"status": "wrong", "reason": str(e)[:500]})
            continue
        if name == "flexattn.jax":
            ours = found
        if name == "flexattn in torch" and ours:
            row["equal to flexattn.jax"] = {which: torch.equal(t, ours[which]) for which, t in found.items()}
        rows.append(row | {"status": "measured"})
        timed[name] = call
    numbers = {name: min(CALLS[1], max(CALLS[0], int(TURN_US / turn(call, CALLS[0])))) for name, call in timed.items()}
    times, kernels = in_turns(timed, numbers, TURNS, turn), in_turns(timed, numbers, PROFILED_TURNS, kernel_turn)
    for row in rows:
        if row["status"] == "measured":
            name = row["implementation"]
            row["us_q1"], row["us"], row["us_q3"] = statistics.quantiles(times[name], n=4)
            row["kernels_us_q1"], row["kernels_us"], row["kernels_us_q3"] = statistics.quantiles(kernels[name], n=4)
    return rows


def host_times() -> dict[str, float]:
    """Returns the microseconds until a small call returns, and those of a sum of two arrays."""
    import jax

    tensors = make_tensors(HOST_SHAPE, "cuda")
    calls = calls_of(HOST_SHAPE, tensors, "forward")
    q, k = map(to_jax, tensors[:2])
    total = jax.jit(lambda q, k: [q + k])
    calls["q + k"] = lambda: total(q, k)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(HOST_CALLS):
        for name, call in calls.items():
            began = time.perf_counter()
            result = call()
            spent = time.perf_counter() - began
            wait(result)
            if i >= HOST_CALLS // 10:
                found[name].append(spent * 1e6)
    return {name: statistics.median(us) for name, us in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="names or patterns of bench's shapes, not packed ones")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; jax_calls measures device time")
    rows = []
    host = host_times()
    print("host, us:", {name: round(us, 1) for name, us in host.items()}, flush=True)
    for workload in select(options.shapes):
        for direction in DIRECTIONS:
            for row in measure(workload, direction):
                rows.append(row)
                what = (
                    f"{row['us']:9.1f} us, kernels {row['kernels_us']:9.1f}"
                    if row["status"] == "measured"
                    else f"{row['status']:>30}"
                )
                more = row.get("reason", row.get("equal to flexattn.jax", ""))
                print(f"{what} {row['workload']:26} {direction:8} {row['implementation']:18} {more}", flush=True)
            torch.cuda.empty_cache()
            if options.out is not None:  # after each, as a run may be cut short
                options.out.write_text(json.dumps(_result(options.out, host, rows), indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


def _result(out: Path, host: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    import jax

    return {
        "command": record.command_line("flexattn.bench.jax_calls", sys.argv[1:], out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions() | {"jax": jax.__version__},
        "method": __doc__,
        "host_us": host,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
