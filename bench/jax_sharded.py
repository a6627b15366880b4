"""flexattn from JAX on several GPUs, compared with one GPU: heads, batch or sequence divided between them, in one run.

    python -m flexattn.bench.jax_sharded --out jax_sharded.json

Before anything is timed, the result of one GPU is checked, and each division is compared with it. A time is the wall time of
several enqueued calls, from the start of the first until the last ends on every GPU, divided by their number. The divisions
alternate, and the median of their turns counts. Needs at least two GPUs, and JAX with its CUDA plugin.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # set before JAX reads it: torch needs memory too

import torch

from flexattn.bench import record
from flexattn.bench.check import Checker
from flexattn.bench.harness import Row, Run, in_turns, make_parser, need_gpu, quartiles
from flexattn.bench.inputs import make_tensors
from flexattn.bench.jax_calls import DIRECTIONS, Call, calls_of_turn, results_of, to_jax, turn
from flexattn.bench.shapes import Workload, dense

SHAPES = (
    dense("gqa-s8192", "sharded", 2, 8192, (32, 8), (128, 128), attn_mask_type="causal"),
    dense("gqa-s16384", "sharded", 2, 16384, (32, 8), (128, 128), attn_mask_type="causal"),
    dense("mha-s4096", "sharded", 4, 4096, (16, 16), (128, 128), attn_mask_type="causal"),
)
TURNS = 8
NAMES = ("out", "dq", "dk", "dv")
CLOSE = 2.0**-6  # share of the largest: gradients of keys are rounded to bfloat16 twice, the second time after the sum over GPUs


def calls_of(workload: Workload, arrays: tuple[Any, ...], direction: str) -> dict[str, Call]:
    """Returns compiled calls by the name of the division. arrays: q, k, v and dout on the first GPU."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import flexattn.jax

    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    masked: dict[str, Any] = {"attn_mask_type": workload.attn_mask_type}
    attend = functools.partial(flexattn.jax.attention, **masked)
    count = len(arrays) if direction == "both" else 3

    def run(attend: Any) -> Any:
        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return [out, *pull(dout)]

        return both if direction == "both" else lambda *x: [attend(*x)]

    def placed(call: Any, spec: Any, order: Any = None) -> Call:
        ordered = (x if order is None else x[:, order] for x in arrays[:count])
        return functools.partial(jax.jit(call), *(jax.device_put(x, NamedSharding(mesh, spec)) for x in ordered))

    calls: dict[str, Call] = {"one GPU": functools.partial(jax.jit(run(attend)), *arrays[:count])}
    by_batch, by_heads, by_tokens = PartitionSpec("x"), PartitionSpec(None, None, "x"), PartitionSpec(None, "x")
    if workload.batch % len(devices) == 0:
        calls["batch, by XLA"] = placed(run(attend), by_batch)
    calls["heads, by XLA"] = placed(run(attend), by_heads)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    calls["heads, by shard_map"] = placed(mapped(run(attend), in_specs=by_heads, out_specs=by_heads), by_heads)
    over = functools.partial(flexattn.jax.attention_over_axis, axis_name="x", layout="zigzag")
    over = functools.partial(over, attn_mask_type=workload.attn_mask_type)
    order = flexattn.jax.sequence_order(workload.seqlen_q, len(devices))
    calls["sequence, zigzag"] = placed(mapped(run(over), in_specs=by_tokens, out_specs=by_tokens), by_tokens, order)
    return calls


def differences(name: str, workload: Workload, results: Any, one: Any) -> dict[str, float]:
    """Returns the largest difference of each result from one GPU's, relative to its largest value; 0 if they are identical."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexattn.jax

    off = {}
    for which, a, b in zip(NAMES, results, one, strict=False):
        a = jax.device_put(a, jax.devices()[0])
        if name.startswith("sequence"):
            a = a[:, np.argsort(flexattn.jax.sequence_order(workload.seqlen_q, len(jax.devices())))]
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        off[which] = float(abs(a - b).max() / abs(b).max())
    return off


def measure(workload: Workload, direction: str) -> list[Row]:
    """Returns a row for each division of the call."""
    import jax

    tensors = make_tensors(workload, "cuda:0")
    # The device is explicit: an import may take torch's current device for the array's, and JAX changes that when it starts.
    arrays = (jax.device_put(to_jax(t), jax.devices()[0]) for t in tensors[:4])
    calls = calls_of(workload, tuple(arrays), direction)
    one = calls["one GPU"]()
    rows: list[dict[str, Any]] = []
    timed: dict[str, Call] = {}
    try:
        Checker(workload, tensors).check(direction, results_of(calls["one GPU"]))
    except AssertionError as e:
        return [{"workload": workload.name, "direction": direction, "divided": "one GPU", "status": "wrong", "reason": str(e)}]
    for name, call in calls.items():
        row: dict[str, Any] = {"workload": workload.name, "shape": str(workload), "direction": direction, "divided": name}
        try:
            row["differs from one GPU"] = off = differences(name, workload, call(), one)
        except Exception as e:  # any error of a division becomes its row in the table
            rows.append(row | {"status": "refused", "reason": f"{type(e).__name__}: {str(e)[:500]}"})
            continue
        rows.append(row | {"status": "measured" if max(off.values()) < CLOSE else "wrong"})
        timed[name] = call
    numbers = {name: calls_of_turn(call) for name, call in timed.items()}
    times = in_turns(timed, TURNS, lambda name: [turn(timed[name], numbers[name])])
    for row in rows:
        if row["status"] == "measured":
            row |= quartiles(times[row["divided"]])
            row["of one GPU"] = row["us"] / statistics.median(times["one GPU"])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    options = parser.parse_args(argv)
    need_gpu(parser)
    import jax

    if len(jax.devices()) < 2:
        parser.error("JAX has one device; jax_sharded divides calls between several")
    torch.cuda.set_device(0)  # JAX makes the last device current when it starts
    versions = record.versions() | {"jax": jax.__version__}
    run = Run("flexattn.bench.jax_sharded", __doc__, options.out, argv, devices=len(jax.devices()), versions=versions)
    for workload in SHAPES:
        for direction in DIRECTIONS:
            for row in measure(workload, direction):
                times = f"{row['us']:9.1f} us, {row['of one GPU']:.3f}" if "us" in row else f"{row['status']:>19}"
                run.add(row, f"{times} {row['workload']:12} {direction:8} {row['divided']:20} {row.get('reason', '')}")
            torch.cuda.empty_cache()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
