"""Random calls of attention() against an oracle of their own: `python -m tests.fuzz --seconds 60`.

Each drawn call is made three times. Two calls have the same values, and their results must be equal to the bit if that is promised.
The third has other values and lengths, and the library replays its recording. The three may have other tensors and modes. Results
and gradients are compared with the oracle's. Inputs, and the guard bytes around every tensor, must not change. `--only NAME`
repeats a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from flexattn.bench import record
from flexattn.dispatch.options import imitated_target
from tests.fuzz import run
from tests.fuzz.check import check_by_name, config_of, place
from tests.fuzz.config import FEATURES, Where, features
from tests.fuzz.processes import GRACE, STRIDE, VALUES, Found, Job, command_of, failures, run_all


def main() -> None:
    options = parse()
    target = imitated_target()
    if target is not None and options.device == "cuda":
        from flexattn.kernels_triton.runtime import other_target  # imports triton, which a CPU's setting must precede

        other_target.imitate_named(target)
    where = place(options.backend, options.device, options.without)
    os.environ.setdefault("FLEXATTN_CHECK", "0")  # lengths that do not fit are drawn on purpose
    if options.backend == "triton" and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if options.only:
        sys.exit(repeat(where, options.only, not options.no_guards))
    if options.log:
        torch.set_num_threads(1)
        run.main(run.Plan(where, options.first, options.seconds, options.values, not options.no_guards), options.log)
        return
    begun = record.now()

    def write(found: Found) -> None:
        if options.out:
            Path(options.out).write_text(json.dumps(result(options, begun, found), indent=1) + "\n")

    more = [*(("--without", *options.without) if options.without else ()), *(("--no-guards",) if options.no_guards else ())]
    jobs = [
        Job(command_of(options.backend, options.device, options.values, *more), options.seed * 10**9 + n * STRIDE)
        for n in range(options.processes)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found, _ = run_all(jobs, Path(folder), options.seconds, options.grace, write)
    write(found)
    sys.stdout.write(json.dumps(result(options, begun, found), indent=1)[: options.most_output] + "\n")
    sys.exit(bool(found.failures))


def repeat(where: Where, name: str, has_guards: bool) -> bool:
    with run.memory(has_guards) as allocations, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = check_by_name(where, name, allocations)
    config = config_of(where, name)
    lines = [*(f"{name}: {value}" for name, value in config._asdict().items()), str(features(config)), *(wrong or ["right"])]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(wrong)


def result(options: argparse.Namespace, begun: str, found: Found) -> dict[str, Any]:
    where = f"--backend {options.backend} --device {options.device}" + "".join(f" --without '{name}'" for name in options.without)
    return {
        "command": shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]]),
        "started": begun,
        "device": record.device_facts(),
        "versions": record.versions(),
        "backend": options.backend,
        "seed": options.seed,
        "wrong": len(found.failures),
        "failures": failures(where, found),
        **found.summary(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each process, its start included")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the run: process n begins with configuration seed * 10**9 + n * 10**6"
    )
    parser.add_argument("--backend", choices=("eager", "triton"), default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: triton runs in its interpreter")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--values", type=int, help=f"calls of each configuration; {VALUES} on cuda, else 1")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES, help="features that are not drawn")
    parser.add_argument("--no-guards", action="store_true", help="for a memory checker, which then sees each tensor's end")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds without a call after which a process has hung")
    parser.add_argument("--only", metavar="NAME", help="one call, as a failure names it")
    parser.add_argument("--out", metavar="FILE", help="where the JSON is written too, every ten seconds")
    parser.add_argument("--most-output", type=int, default=100_000, help="characters that are printed at most")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)  # of one process that this one started
    options = parser.parse_args()
    options.values = options.values or (VALUES if options.device == "cuda" else 1)
    return options


if __name__ == "__main__":
    main()
