"""Random calls of flexattn.jax under JAX's transforms, compared with the fuzz's oracle.

`python -m tests.fuzz.jax_calls --seconds 60` draws calls as the fuzz does for torch, each several times with other values, and runs
them in a transform over some of their arrays. `--only NAME` repeats a failure.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from flexattn import BackendError
from flexattn.dispatch.spec import Results
from flexattn.jax import attention
from tests.fuzz.calls import Call
from tests.fuzz.check import EAGER, ON_GPU, Verdicts, compare
from tests.fuzz.config import DIFFERENTIABLE, HALF, Config, Where, draw_config
from tests.fuzz.delta import tangent_errors
from tests.fuzz.oracle import Problem, twice
from tests.fuzz.second import compare_one

TRANSFORMS = ("jit", "eager", "vmap", "vmap", "vmap", "vmap of jit", "scan", "map", "checkpoint", "shard_map")
OVER_INSTANCES = ("vmap", "vmap of jit", "scan", "map", "shard_map")
WITHOUT = frozenset({"fp8"})
PLACES: dict[str, Where] = {
    "cpu": EAGER._replace(dtypes=(*HALF, torch.float32), longest=(40, 70), most_heads=2, without=WITHOUT),
    "cuda": ON_GPU._replace(head_dims=tuple(range(8, 257, 8)), without=WITHOUT),
}
SCORE_MODS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Callable[..., Any]]] = {  # as tests/fuzz/mods.py has them
    "distance": lambda t, n: lambda s, b, h, i, j: s + t["by_head"][h] * abs(i - j),
    "checkered": lambda t, n: lambda s, b, h, i, j: jnp.where((i + j) % 3 == 0, s * t["by_head"][h], s - t["by_key"][b, j]),
    "affine": lambda t, n: lambda s, b, h, i, j: s * n["factor"] + n["shift"],
    "holes": lambda t, n: lambda s, b, h, i, j: jnp.where(j % 5 != h, s, -jnp.inf),
}


class Plan(NamedTuple):
    """How a configuration's call runs."""

    config: Config
    transform: str
    count: int  # calls with values of their own
    mapped: frozenset[str]  # tensors that differ among them; all lengths too, if these are "all"


def draw(seed: int, where: Where) -> Plan:
    """Returns a call that JAX accepts."""
    rng = Random(seed)
    config = draw_config(seed, where)
    while config.kind != "ordinary" or config.listed:
        config = draw_config(rng.randrange(2**31), where)
    config = config._replace(
        score_mod=config.score_mod if config.score_mod in SCORE_MODS else None,
        mask_mod=None,
        block_mask=None,
        extreme=None,
        page_size=0,
        lengths_in="cu_seqlens",
        is_second_order=Random(f"{seed} of second order").random() < 0.2,
        mod_tensors="closure",
        aux=(),
        results=Results(),
        layouts=collections.defaultdict(lambda: "plain"),
        hopper="auto",
    )
    transform = rng.choice(TRANSFORMS)
    many = transform in OVER_INSTANCES
    count = len(jax.devices()) if transform == "shard_map" else rng.choice([2, 3]) if many else 1
    names = [*DIFFERENTIABLE, *config.captures]
    mapped = rng.choice([{"all"}, {"all"}, {"q"}, {"bias", "softmax_offset"}, {name for name in names if rng.random() < 0.5}])
    return Plan(config, transform, count, frozenset(mapped))


class _Drawn(Call):
    def _draw_numbers(self) -> None:
        super()._draw_numbers()
        seed, offset = self._rng_state
        self._rng_state = seed % 2**63, offset  # as torch draws them, and as JAX's keys are made: not negative

    def again(self, with_lengths: bool) -> None:
        """Draws other values, and other lengths, of the same sizes."""
        if with_lengths:
            rows = zip(self._formats, self._longest, self._rows, strict=True)
            self._slots = [self._draw_slots(fmt, longest, n) for fmt, longest, n in rows]
        self._write()


class Instance(NamedTuple):
    """One call as `compare` takes it."""

    config: Config
    tensors: dict[str, Tensor]
    wanted: list[str]
    oracle_problem: Problem

    @property
    def meant(self) -> dict[str, Tensor]:
        return self.tensors

    @property
    def dout(self) -> Tensor | None:
        return self.tensors["dout"] if "out" in self.config.loss else None

    @property
    def dlse(self) -> Tensor | None:
        return self.tensors["dlse"] if "lse" in self.config.loss else None

    def problem(self) -> Problem:
        return self.oracle_problem


def to_jax(t: Tensor) -> Any:
    """Returns a tensor as an array of the same dtype; numbers of 64 bits as two words."""
    t = t.detach().cpu().contiguous()
    if t.dtype is torch.int64:
        return jnp.asarray(t.view(torch.int32).numpy().view(np.uint32))
    return jnp.asarray(t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype is torch.bfloat16 else t.numpy())


def to_torch(x: Any, device: str) -> Tensor:
    """Returns an array as a tensor of the same dtype."""
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(x)).to(device)


def function_of(call: _Drawn, remat: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the call as a function of its arrays by name, dout and dlse among them: results, and gradients by "d" and a name."""
    config, wanted = call.config, call.wanted
    static = {name: x for name, x in call.arguments().items() if not isinstance(x, Tensor) and name != "score_mod"}
    if config.where.device == "cuda":
        static["backend"] = None
    names = ["out", *(["lse"] if config.return_lse else []), *(["max_logit"] if config.return_max_logit else [])]

    def attend(leaves: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        arrays = leaves | others
        given = {name: x for name, x in arrays.items() if name not in config.captures}
        if config.score_mod is not None:
            given["score_mod"] = SCORE_MODS[config.score_mod](arrays, call._numbers)
        found = attention(**given, **static)
        return dict(zip(names, found if len(names) > 1 else (found,), strict=True))

    def both(arrays: dict[str, Any]) -> dict[str, Any]:
        seeds = {"out": arrays["dout"] if "out" in config.loss else None, "lse": arrays["dlse"] if "lse" in config.loss else None}
        leaves = {name: arrays[name] for name in wanted}
        others = {name: x for name, x in arrays.items() if name not in (*wanted, "dout", "dlse")}
        attend_leaves = lambda leaves: attend(leaves, others)  # noqa: E731
        results, pull = jax.vjp(jax.checkpoint(attend_leaves) if remat else attend_leaves, leaves)
        if not wanted:
            return results  # type: ignore[no-any-return]
        cotangents = {name: jnp.zeros_like(x) if seeds.get(name) is None else seeds[name] for name, x in results.items()}
        found = results | {f"d{name}": x for name, x in pull(cotangents)[0].items()}
        if not config.is_second_order:
            return found
        tangents = jax.jvp(attend_leaves, (leaves,), (leaves,))[1]
        second = jax.jvp(lambda x: jax.vjp(attend_leaves, x)[1](cotangents)[0], (leaves,), (leaves,))[1]
        found |= {f"tangent of {name}": t for name, t in tangents.items() if name != "max_logit"}
        return found | {f"second derivative for {name}": t for name, t in second.items()}

    return both


def transformed(both: Callable[..., Any], plan: Plan, is_mapped: dict[str, bool]) -> Callable[..., Any]:
    """Returns a function of arrays. If there are several calls, arrays that differ are stacked, and so are results."""

    def separate(parts: dict[str, Any], arrays: dict[str, Any]) -> Any:
        return both(arrays | parts)

    def over(loop: Callable[..., Any]) -> Callable[..., Any]:
        def run(arrays: dict[str, Any]) -> Any:
            parts = {name: x for name, x in arrays.items() if is_mapped[name]}
            return loop(lambda one: separate(one, arrays), parts)

        return run

    if plan.transform in ("vmap", "vmap of jit"):
        axes = ({name: 0 if mapped else None for name, mapped in is_mapped.items()},)
        return jax.jit(jax.vmap(jax.jit(both) if plan.transform == "vmap of jit" else both, in_axes=axes))
    if plan.transform == "scan":
        return jax.jit(over(lambda f, parts: jax.lax.scan(lambda carry, one: (carry, f(one)), 0, parts)[1]))
    if plan.transform == "map":
        return jax.jit(over(jax.lax.map))
    if plan.transform == "shard_map":
        mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = {
            name: jax.sharding.PartitionSpec("x") if mapped else jax.sharding.PartitionSpec() for name, mapped in is_mapped.items()
        }

        def part(arrays: dict[str, Any]) -> Any:
            own = {name: x[0] if is_mapped[name] else jax.lax.pcast(x, "x", to="varying") for name, x in arrays.items()}
            return jax.tree.map(lambda x: x[None], both(own))

        return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(spec,), out_specs=jax.sharding.PartitionSpec("x")))
    return both if plan.transform == "eager" else jax.jit(both)


def check(name: str, where: Where) -> tuple[list[str], list[str]]:
    """Returns the features of a drawn call, and its defects. A name is the configuration's seed, a point, and the call's seed."""
    seed, number = map(int, name.split("."))
    plan = draw(seed, where)
    config, many = plan.config, plan.transform in OVER_INSTANCES
    call = _Drawn(config, number)
    is_all = "all" in plan.mapped
    names = set(call.tensors)
    lengths = {name for name in names if name.startswith("cu_")}
    mapped = (names - {"rng_state"} if is_all else (names & plan.mapped) | (names & {"dout", "dlse"})) if many else set()
    snapshots: list[dict[str, Tensor]] = []
    instances = []
    for i in range(plan.count):
        if i:
            call.again(with_lengths=is_all)
        snapshots.append({name: t.detach().clone() for name, t in call.tensors.items()})
        own = {name: snapshots[i if name in mapped else 0][name] for name in names}
        instances.append(Instance(config, own, call.wanted, call.problem()))
    assert lengths <= mapped or not many or not is_all
    arrays = {
        name: to_jax(torch.stack([one[name] for one in snapshots]) if name in mapped else snapshots[0][name]) for name in names
    }
    run = transformed(function_of(call, plan.transform == "checkpoint"), plan, {name: name in mapped for name in names})
    found = run(arrays)
    verdicts = Verdicts()
    for i, instance in enumerate(instances):
        got = {key: to_torch(x[i] if many else x, where.device) for key, x in found.items()}
        derivatives = {key: got.pop(key) for key in tuple(got) if " " in key}
        compare(verdicts, f"{plan.transform}, call {i}", instance, got)  # type: ignore[arg-type]
        if derivatives:
            compare_along(verdicts, instance, derivatives)
    return features(plan), verdicts.failures()


def compare_along(verdicts: Verdicts, instance: Instance, got: dict[str, Tensor]) -> None:
    """Compares derivatives along the tensors themselves; got: by what they are and the name of a tensor."""
    along = {name: instance.tensors[name] for name in instance.wanted}
    given = instance.problem(), instance.tensors, instance.dout, instance.dlse, along
    ref, same = (twice(*given, is_exact=exact, delta_errors=partial(tangent_errors, instance)) for exact in (True, False))
    for what, t in got.items():
        compare_one(verdicts, instance, what, t, what.rpartition(" ")[2], ref, same)


def features(plan: Plan) -> list[str]:
    """Returns the names that a drawn call is counted under."""
    c = plan.config
    found = [plan.transform, c.q_format if c.q_format == c.kv_format else "mixed formats", str(c.dtype)[6:], f"d {c.head_dim_qk}"]
    found += [c.bias_type, c.softmax_type] + ["lengths"] * c.has_lengths + ["score_mod"] * (c.score_mod is not None)
    found += (
        ["second order"] * c.is_second_order
        + ["dropout"] * (c.dropout_p > 0)
        + ["grouped heads"] * (c.group > 1)
        + ["no gradient"] * (not c.wants)
    )
    if plan.transform in OVER_INSTANCES:
        found.append("over " + ", ".join(sorted(plan.mapped)))
    return found


def run(where: Where, first: int, seconds: float, note: Callable[[dict[str, Any]], None]) -> None:
    """Draws calls from seed `first` on until the time is up; note: receives the features and defects of each."""
    until = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in itertools.count(first):
            if time.monotonic() >= until:
                break
            name, has = f"{seed}.{seed}", ["raised"]
            try:
                has, wrong = check(name, where)
            except BackendError:
                has, wrong = ["refused"], []
            except Exception:
                wrong = traceback.format_exc().splitlines()[-12:]
            note({"name": name, "has": has, "wrong": wrong})
            if seed % 20 == 19:
                jax.clear_caches()  # each call compiles programs of its own


def main() -> None:
    os.environ.setdefault("FLEXATTN_CHECK", "0")  # lengths above max_seqlen are drawn on purpose
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the run: it begins with configuration seed * 10**9")
    parser.add_argument("--device", choices=tuple(PLACES), default="cpu")
    parser.add_argument("--only", metavar="NAME", help="one call, as a failure names it")
    parser.add_argument("--out", metavar="FILE", help="where the JSON is written too, with a line for each call in FILE.log")
    options = parser.parse_args()
    where = PLACES[options.device]
    if options.only:
        plan = draw(int(options.only.split(".")[0]), where)
        has, wrong = check(options.only, where)
        sys.stdout.write(
            "\n".join([*(f"{name}: {value}" for name, value in plan._asdict().items()), *has, *(wrong or ["right"])]) + "\n"
        )
        sys.exit(bool(wrong))
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    log = open(f"{options.out}.log", "w") if options.out else None  # noqa: SIM115

    def note(what: dict[str, Any]) -> None:
        counts.update(["drawn", *what["has"]])
        if what["wrong"]:
            again = f"python -m tests.fuzz.jax_calls --device {options.device} --only {what['name']}"
            failures.append({"name": what["name"], "again": again, "what": what["wrong"]})
        if log:
            log.write(json.dumps(what) + "\n")
            log.flush()

    run(where, options.seed * 10**9, options.seconds, note)
    versions = {"jax": jax.__version__, "torch": torch.__version__, "device": jax.devices()[0].device_kind}
    result = {"versions": versions, "seed": options.seed, "drawn calls": dict(sorted(counts.items())), "failures": failures}
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out:
        Path(options.out).write_text(text)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
