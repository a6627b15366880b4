"""flexattn from JAX, compared with JAX's attention and with flexattn from torch, in one run.

    python -m flexattn.bench.jax_calls --out jax_calls.json

Every result is checked before anything is timed. A time is the wall time of several enqueued calls, from the start of the first to
the end of the last, divided by their number. The implementations alternate, and the median of their turns counts. A kernel time is
the sum of the kernels, copies and fills that CUPTI records, divided by the number of calls, also in turns. The host's time is the
time until a call returns, if its kernels end long before the next call. Needs a GPU, and JAX with its CUDA plugin.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # set before JAX reads it: torch needs memory too

import torch
import torch.utils.dlpack
from torch import Tensor

from flexattn.bench import record
from flexattn.bench.check import Checker
from flexattn.bench.harness import Row, Run, in_turns, make_parser, need_gpu, quartiles
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.shapes import Workload, dense, select

SHAPES = (*(f"sweep-*-s{seqlen}" for seqlen in (1024, 4096, 16384)), "llama3-8b-s8192", "deepseek-v3-s4096")
DIRECTIONS = ("forward", "both")
TURNS, TURN_US, CALLS = 12, 20_000, (4, 20)  # turns, time of a turn, and the least and most calls of a turn
PROFILED_TURNS = 6
LONGEST_OF_XLA = 1024  # XLA's attention stores all scores
HOST_SHAPE = dense("host", "host", 1, 128, (16, 16), (64, 64), attn_mask_type="causal")
HOST_CALLS = 300

Call = Callable[[], Any]


def to_jax(t: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(t.detach())


def jax_call(attend: Callable[..., Any], tensors: Tensors, direction: str) -> Call:
    """Returns a compiled call that returns out, or out and the gradients of q, k and v."""
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
    calls = {
        "flexattn.jax": jax_call(ours, tensors, direction),
        "flexattn in torch": torch_call(workload, tensors, direction),
        "jax.nn, cudnn": jax_call(functools.partial(theirs, implementation="cudnn"), tensors, direction),
    }
    if workload.seqlen_kv <= LONGEST_OF_XLA:
        calls["jax.nn, xla"] = jax_call(functools.partial(theirs, implementation="xla"), tensors, direction)
    return calls


def results_of(call: Call) -> dict[str, Tensor]:
    names = ("out", "dq", "dk", "dv")
    results = [x.detach() if isinstance(x, Tensor) else torch.utils.dlpack.from_dlpack(x) for x in call()]
    torch.cuda.synchronize()
    return dict(zip(names, results, strict=False))


def wait(result: Any) -> None:
    for x in result:
        if not isinstance(x, Tensor):
            x.block_until_ready()
    torch.cuda.synchronize()


def turn(call: Call, calls: int) -> float:
    """Returns the microseconds of a call, as the mean of `calls` calls."""
    wait(call())
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait(last)
    return (time.perf_counter() - began) / calls * 1e6


def kernel_turn(call: Call, calls: int) -> float:
    """Returns the microseconds of a call's kernels, copies and fills, without gaps, as the mean of `calls` calls."""
    from torch.profiler import ProfilerActivity, profile

    wait(call())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            last = call()
        wait(last)
    return float(sum(event.device_time for event in profiler.events())) / calls


def calls_of_turn(call: Call) -> int:
    """Returns the number of calls that take TURN_US, within CALLS."""
    return min(CALLS[1], max(CALLS[0], int(TURN_US / turn(call, CALLS[0]))))


def measure(workload: Workload, direction: str) -> list[Row]:
    """Returns a row for each implementation, with its times, or with the reason if it is refused or wrong."""
    tensors = make_tensors(workload, "cuda")
    checker = Checker(workload, tensors)
    rows: list[Row] = []
    timed: dict[str, Call] = {}
    ours: Mapping[str, Tensor] = {}
    for name, call in calls_of(workload, tensors, direction).items():
        row: Row = {"implementation": name, "workload": workload.name, "direction": direction}
        try:
            results = results_of(call)
        except Exception as e:  # any error of a peer becomes its row in the table
            rows.append(row | {"status": "refused", "reason": f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"})
            continue
        try:
            checker.check(direction, results)
        except AssertionError as e:
            rows.append(row | {"status": "wrong", "reason": str(e)[:500]})
            continue
        if name == "flexattn.jax":
            ours = results
        if name == "flexattn in torch" and ours:
            row["equal to flexattn.jax"] = {which: torch.equal(t, ours[which]) for which, t in results.items()}
        rows.append(row | {"status": "measured"})
        timed[name] = call
    numbers = {name: calls_of_turn(call) for name, call in timed.items()}
    times = in_turns(timed, TURNS, lambda name: [turn(timed[name], numbers[name])])
    kernels = in_turns(timed, PROFILED_TURNS, lambda name: [kernel_turn(timed[name], numbers[name])])
    for row in rows:
        if row["status"] == "measured":
            row |= quartiles(times[row["implementation"]]) | quartiles(kernels[row["implementation"]], "kernels_us")
    return rows


def host_times() -> dict[str, float]:
    """Returns the microseconds until a small call returns, and until the sum of two arrays returns."""
    import jax

    tensors = make_tensors(HOST_SHAPE, "cuda")
    calls = calls_of(HOST_SHAPE, tensors, "forward")
    q, k = map(to_jax, tensors[:2])
    total = jax.jit(lambda q, k: [q + k])
    calls["q + k"] = lambda: total(q, k)

    def one(name: str) -> list[float]:
        began = time.perf_counter()
        result = calls[name]()
        spent = time.perf_counter() - began
        wait(result)
        return [spent * 1e6]

    in_turns(calls, HOST_CALLS // 10, one)  # warms up
    return {name: statistics.median(us) for name, us in in_turns(calls, HOST_CALLS, one).items()}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="names or patterns of bench's shapes, not packed ones")
    options = parser.parse_args(argv)
    need_gpu(parser)
    import jax

    versions = record.versions() | {"jax": jax.__version__}
    run = Run("flexattn.bench.jax_calls", __doc__, options.out, argv, versions=versions, host_us=host_times())
    print("host, us:", {name: round(us, 1) for name, us in run.content["host_us"].items()}, flush=True)
    for workload in select(options.shapes):
        for direction in DIRECTIONS:
            for row in measure(workload, direction):
                times = f"{row['us']:9.1f} us, kernels {row['kernels_us']:9.1f}" if "us" in row else f"{row['status']:>30}"
                more = row.get("reason", row.get("equal to flexattn.jax", ""))
                run.add(row, f"{times} {row['workload']:26} {direction:8} {row['implementation']:18} {more}")
            torch.cuda.empty_cache()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
