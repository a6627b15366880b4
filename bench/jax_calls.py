"""flexattn from JAX, compared with JAX's attention and with flexattn from torch, in one run.

    python -m flexattn.bench.jax_calls --out jax_calls.json

Results are checked, and written in the format of `python -m flexattn bench`. A time is the wall time of several enqueued calls,
from the start of the first to the end of the last, divided by their number. The host's time is the time until a call returns, if
its kernels end long before the next call. Needs a GPU, and JAX with its CUDA plugin.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # set before JAX reads it: torch needs memory too

import torch
import torch.utils.dlpack
from torch import Tensor

from flexattn.bench import implementations, record
from flexattn.bench.harness import Call, make_parser, need_gpu
from flexattn.bench.implementations import Implementation, Prepared, Unavailable
from flexattn.bench.inputs import Tensors
from flexattn.bench.measure import Samples, in_turns
from flexattn.bench.run import Plan, run
from flexattn.bench.shapes import Workload, dense, select

SHAPES = (*(f"sweep-*-s{seqlen}" for seqlen in (1024, 4096, 16384)), "llama3-8b-s8192", "deepseek-v3-s4096")
SMALL = dense("host", "small", 1, 128, (16, 16), (64, 64), attn_mask_type="causal")
DIRECTIONS = ("forward", "both")
TURNS, TURN_US, CALLS = 12, 20_000, (4, 20)  # turns, time of a turn, and the least and most calls of a turn
HOST_CALLS = 100
LONGEST_OF_XLA = 1024  # XLA's attention stores all scores
METHOD = "wall time of enqueued calls, from the start of the first to the end of the last, divided by their number"


def prepare(make: Callable[[Workload], Callable[..., Any]], workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    """Prepares a compiled call of JAX that returns out, or out and the gradients of q, k and v."""
    import jax

    attend = make(workload)
    arrays = [jax.dlpack.from_dlpack(t.detach()) for t in tensors[:4]]

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return [out, *pull(dout)]

    if direction == "forward":
        call: Call = functools.partial(jax.jit(lambda *x: [attend(*x)]), *arrays[:3])
    else:
        call = functools.partial(jax.jit(both), *arrays)

    def results() -> Mapping[str, Tensor]:
        found = [torch.utils.dlpack.from_dlpack(x) for x in wait(call())]
        return dict(zip(("out", "dq", "dk", "dv"), found, strict=False))

    return Prepared(results, call)


def wait(result: object) -> Any:
    """Returns the results of a call of JAX or torch when the device has ended."""
    import jax

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return jax.block_until_ready(result)


def calls_from_jax() -> list[Implementation]:
    """Returns flexattn from JAX and from torch, and JAX's own attention."""
    import jax

    import flexattn.jax

    def ours(workload: Workload) -> Callable[..., Any]:
        mask: Any = workload.attn_mask_type
        return functools.partial(flexattn.jax.attention, attn_mask_type=mask)

    def theirs(kind: str, workload: Workload) -> Callable[..., object]:
        if kind == "xla" and workload.seqlen_kv > LONGEST_OF_XLA:
            raise Unavailable(f"it stores all scores, and is measured up to {LONGEST_OF_XLA} keys")
        return functools.partial(jax.nn.dot_product_attention, is_causal=workload.is_causal, implementation=kind)

    peers = {f"jax.nn, {kind}": functools.partial(theirs, kind) for kind in ("cudnn", "xla")}
    found = [Implementation(name, f"jax {jax.__version__}", functools.partial(prepare, make)) for name, make in peers.items()]
    in_torch = next(i for i in implementations.ours("cuda") if i.name == implementations.TRITON)
    return [Implementation("flexattn jax", flexattn.__version__, functools.partial(prepare, ours)), in_torch, *found]


def turn(call: Call, calls: int) -> float:
    """Returns the milliseconds of a call, as the mean of `calls` calls."""
    wait(call())
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait(last)
    return (time.perf_counter() - began) / calls * 1e3


def time_calls(calls: Mapping[str, Call]) -> dict[str, Samples]:
    """Times all calls in turns. A turn takes about TURN_US."""
    numbers = {name: min(CALLS[1], max(CALLS[0], int(TURN_US / 1e3 / turn(call, CALLS[0])))) for name, call in calls.items()}
    times = in_turns(calls, TURNS, lambda name: [turn(calls[name], numbers[name])])

    def host(name: str) -> list[float]:
        began = time.perf_counter()
        result = calls[name]()
        spent = time.perf_counter() - began
        wait(result)
        return [spent * 1e3]

    host_times = in_turns(calls, HOST_CALLS, host)
    return {name: Samples(times[name], host_times[name]) for name in calls}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", help="names or patterns of bench's shapes, not packed ones")
    options = parser.parse_args(argv)
    need_gpu(parser)
    workloads = select(options.shapes) if options.shapes else [SMALL, *select(SHAPES)]
    arguments = sys.argv[1:] if argv is None else argv
    command = record.command_line("flexattn.bench.jax_calls", arguments, options.out)
    plan = Plan(command, workloads, DIRECTIONS, calls_from_jax(), "cuda", 0.0, float("inf"), out=options.out, time=METHOD)
    done = run(plan, timer=time_calls)
    return int(any(row.status == "wrong" for row in done.rows))


if __name__ == "__main__":
    sys.exit(main())
