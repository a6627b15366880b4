"""Tests, random calls and a memory check on one GPU in less than ten minutes. docs/status.md is made from the result file.

    python -m tests.device --out bench/results/device_h100.json --minutes 9
    python -m tests.device --out bench/results/device_h100_fuzz.json --minutes 9 --only fuzz --seed 2
    python -m tests.device --out bench/results/device_h100_slow.json --minutes 9 --only tests --marks "slow and not exhaustive"
    FLEXATTN_HOPPER=always python -m tests.device --as sm_80 --out mma.json --only tests fuzz racecheck --tests tests/mma

The file is written every few seconds, so a run that is killed keeps its results.
`python -m tests.device.status` then makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexattn.bench import record
from flexattn.dispatch.options import imitated_target
from flexattn.kernels_triton.runtime import other_target
from tests.device import steps
from tests.device.steps import Run
from tests.fuzz.processes import VALUES

SCHEMA = 1
# Each step's share of the run's time. A step that ends early leaves its time to later steps.
SHARES = {"tests": 0.34, "fuzz": 0.4, "jax": 0.12, "memcheck": 0.14, "racecheck": 0.14}
BY_DEFAULT = ("tests", "fuzz", "jax", "memcheck")
LAST = 12.0  # seconds for the writing, and for processes to end


def main() -> int:
    options = parse()
    target = options.target or imitated_target()
    if target is not None:
        os.environ["FLEXATTN_AS"] = target  # for the processes of the steps
        other_target.imitate_named(target)
    begun, end = time.monotonic(), time.monotonic() + 60.0 * options.minutes - LAST
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "tests.device", *sys.argv[1:]]),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions() | {"jax": record.installed("jax")},
        "seed": options.seed,
        "steps": {},
        "complete": False,
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def teller(name: str) -> Callable[[dict[str, Any]], None]:
        def tell(found: dict[str, Any]) -> None:
            content["steps"][name] = found
            write(out, content)

        return tell

    todo = [name for name in SHARES if name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        for n, name in enumerate(todo):
            left = end - time.monotonic()
            seconds = left * SHARES[name] / sum(SHARES[other] for other in todo[n:])
            place = Path(folder) / name
            place.mkdir()
            run = Run(place, seconds, options.processes, options.seed, options.device, options.tests, options.marks, options.values)
            began = time.monotonic()
            found = getattr(steps, name)(run, teller(name))
            found["took seconds"] = round(time.monotonic() - began)
            teller(name)(found)
            sys.stdout.write(f"{name}: {json.dumps(short(found))[:2500]}\n")
            sys.stdout.flush()
    content |= {"complete": True, "families": families(content["steps"]), "took seconds": round(time.monotonic() - begun)}
    write(out, content)
    sys.stdout.write(f"families: {json.dumps(content['families'])}\n")
    idle = [name for name, found in content["steps"].items() if not steps.has_run(name, found)]
    if idle:
        sys.stdout.write(f"not run: {', '.join(idle)}\n")
    return int(is_wrong(content["steps"]) or bool(idle))


def write(out: Path, content: dict[str, Any]) -> None:
    """Replaces the file at once."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(content | {"families": families(content["steps"])}, indent=1) + "\n")
    os.replace(partial, out)


def short(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a step, and its first failures."""
    kept = {name: value for name, value in found.items() if isinstance(value, (int, float, str))}
    return kept | {name: found[name][:4] for name in ("failures", "reports") if found.get(name)}


def is_wrong(steps: dict[str, Any]) -> bool:
    return any(found.get(name) for found in steps.values() for name in ("wrong", "failed", "errors", "crashed"))


def families(steps: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the kernel families that steps reached, and the device's families that no step reached."""
    import torch

    from flexattn.kernels_triton.families import BACKWARDS, FORWARDS

    reached = {name for found in steps.values() for name in found.get("families", ())}
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    capability = 10 * major + minor
    every = {
        f"{family.name} {family.direction}": family for order in (FORWARDS, BACKWARDS) for of in order.values() for family in of
    }
    own = [name for name, family in every.items() if not family.capabilities or capability in family.capabilities]
    others = [name for name in every if name not in own and name not in reached]
    return {
        "reached": sorted(reached),
        "not reached": [name for name in own if name not in reached],
        "for other devices": others,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the result file")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    parser.add_argument("--only", nargs="*", default=list(BY_DEFAULT), choices=list(SHARES), help="steps to run")
    parser.add_argument("--as", dest="target", metavar="sm_80", help="run the code of an older target; also by FLEXATTN_AS")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that use the GPU side by side")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the random calls")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="of the random calls; cpu: in Triton's interpreter"
    )
    parser.add_argument("--values", type=int, default=VALUES, help="random calls of each set of compiled kernels")
    parser.add_argument("--tests", nargs="*", default=list(steps.TESTS), help="files or folders of tests")
    parser.add_argument("--marks", default=steps.MARKS, help="marks of the tests, as pytest -m")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
