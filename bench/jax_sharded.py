"""flexattn from JAX on several GPUs beside one: heads, batch and sequence divided between them, in one run.

    python -m flexattn.bench.jax_sharded --out jax_sharded.json

Each way to divide is compared with one GPU's result, which is checked, before anything is timed. A time is the wall time of calls
that are enqueued one after another, divided by their number, from the first's start until the last is done on every GPU: the ways
take turns, and the median of their turns counts. Needs two GPUs or more, and JAX with its CUDA plugin.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import torch

from flexattn.bench import record
from flexattn.bench.check import Checker
from flexattn.bench.inputs import make_tensors
from flexattn.bench.jax_calls import CALLS, DIRECTIONS, TURN_US, Call, in_turns, results_of, to_jax, turn
from flexattn.bench.shapes import Workload, dense

SHAPES = (
    dense("gqa-s8192", "sharded", 2, 8192, (32, 8), (128, 128), attn_mask_type="causal"),
    dense("gqa-s16384", "sharded", 2, 16384, (32, 8), (128, 128), attn_mask_type="causal"),
    dense("mha-s4096", "sharded", 4, 4096, (16, 16), (128, 128), attn_mask_type="causal"),
)
TURNS = 8
NAMES = ("out", "dq", "dk", "dv")
CLOSE = 2.0**-6  # beside the largest: two roundings to bfloat16, as gradients of keys are summed over GPUs and rounded once more


def calls_of(workload: Workload, arrays: tuple[Any, ...], direction: str) -> dict[str, Call]:
    """Returns compiled calls by how they are divided; arrays: q, k, v and dout on the first GPU."""
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
        given = (x if order is None else x[:, order] for x in arrays[:count])
        return functools.partial(jax.jit(call), *(jax.device_put(x, NamedSharding(mesh, spec)) for x in given))

    made: dict[str, Call] = {"one GPU": functools.partial(jax.jit(run(attend)), *arrays[:count])}
    by_batch, by_heads, by_tokens = PartitionSpec("x"), PartitionSpec(None, None, "x"), PartitionSpec(None, "x")
    if workload.batch % len(devices) == 0:
        made["batch, by XLA"] = placed(run(attend), by_batch)
    made["heads, by XLA"] = placed(run(attend), by_heads)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    made["heads, by shard_map"] = placed(mapped(run(attend), in_specs=by_heads, out_specs=by_heads), by_heads)
    over = functools.partial(flexattn.jax.attention_over_axis, axis_name="x", layout="zigzag")
    over = functools.partial(over, attn_mask_type=workload.attn_mask_type)
    order = flexattn.jax.sequence_order(workload.seqlen_q, len(devices))
    made["sequence, zigzag"] = placed(mapped(run(over), in_specs=by_tokens, out_specs=by_tokens), by_tokens, order)
    return made


def differences(name: str, workload: Workload, found: Any, one: Any) -> dict[str, float]:
    """Returns the largest difference of each result from one GPU's, relative to its largest; 0 where all bits are equal."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexattn.jax

    off = {}
    for which, a, b in zip(NAMES, found, one, strict=False):
        a = jax.device_put(a, jax.devices()[0])
        if name.startswith("sequence"):
            a = a[:, np.argsort(flexattn.jax.sequence_order(workload.seqlen_q, len(jax.devices())))]
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        off[which] = float(abs(a - b).max() / abs(b).max())
    return off


def measure(workload: Workload, direction: str) -> list[dict[str, Any]]:
    """Returns a row for each way to divide the call."""
    import jax

    tensors = make_tensors(workload, "cuda:0")
    # Named, as an import may take torch's current device for the array's, and JAX changes that one when it starts.
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
        except Exception as e:  # whatever keeps a way from running is its row in the table
            rows.append(row | {"status": "refused", "reason": f"{type(e).__name__}: {str(e)[:500]}"})
            continue
        rows.append(row | {"status": "measured" if max(off.values()) < CLOSE else "wrong"})
        timed[name] = call
    numbers = {name: min(CALLS[1], max(CALLS[0], int(TURN_US / turn(call, CALLS[0])))) for name, call in timed.items()}
    times = in_turns(timed, numbers, TURNS, turn) if timed else {}
    for row in rows:
        if row["status"] == "measured":
            row["us_q1"], row["us"], row["us_q3"] = statistics.quantiles(times[row["divided"]], n=4)
            row["of one GPU"] = row["us"] / statistics.median(times["one GPU"])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; jax_sharded measures device time")
    import jax

    if len(jax.devices()) < 2:
        parser.error("JAX has one device; jax_sharded divides calls between several")
    torch.cuda.set_device(0)  # JAX leaves the last one current where it starts
    rows = []
    for workload in SHAPES:
        for direction in DIRECTIONS:
            for row in measure(workload, direction):
                rows.append(row)
                what = f"{row['us']:9.1f} us, {row['of one GPU']:.3f}" if row["status"] == "measured" else f"{row['status']:>19}"
                print(f"{what} {row['workload']:12} {direction:8} {row['divided']:20} {row.get('reason', '')}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(_result(options.out, rows), indent=1) + "\n")
            torch.cuda.empty_cache()
    return int(any(row["status"] == "wrong" for row in rows))


def _result(out: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import jax

    return {
        "command": record.command_line("flexattn.bench.jax_sharded", sys.argv[1:], out),
        "started": record.now(),
        "device": record.device_facts(),
        "devices": len(jax.devices()),
        "versions": record.versions() | {"jax": jax.__version__},
        "method": __doc__,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
