"""Random calls of attention() against an oracle of their own: `python -m tests.fuzz --seconds 60`.

Each call that is drawn is made three times: twice with the same tensors, whose results must agree to the bit where that is
promised, and once with other values and lengths in them, by when the library plays what it kept. Results and gradients are compared
with the oracle's, inputs and the guard bytes around every tensor with what they were. `--only NAME` repeats a failure.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexattn.bench import record
from flexattn.dispatch.spec import Results
from tests.fuzz.calls import FEATURES, Config, Where, draw_config
from tests.fuzz.check import check_by_name, config_seed, place
from tests.support.guarded_memory import guarded_allocations

GRACE = 120.0  # seconds that a process may take beyond its time, to compile or to finish a call


def features(config: Config) -> list[str]:
    """Returns the names that a drawn call is counted under."""
    found = [config.kind, config.q_format if config.q_format == config.kv_format else "mixed formats", str(config.dtype)[6:]]
    found += ["pages"] * bool(config.page_size) + ["seqused"] * (config.lengths_in == "seqused" and config.has_lengths)
    found += ["results elsewhere"] * (config.results != Results())
    found += [config.bias_type, config.softmax_type, f"hopper {config.hopper}"]
    found += ["lengths"] if config.has_lengths else []
    found += ["large finite negatives"] if config.extreme else []
    found += ["score_mod"] if config.score_mod else []
    found += ["block_mask" if config.block_mask else "mask_mod"] if config.mask_mod else []
    found += ["dropout"] if config.dropout_p else []
    return found


def run(where: Where, first: int, seconds: float, values: int, note: Callable[[dict[str, Any]], None]) -> None:
    """Configurations from seed `first` on, `values` calls of each, until the time is up or a CUDA error ends all.

    note: is told the name of each call before it, and after it what it has and what is wrong.
    """
    from flexattn import call_cache

    until = time.monotonic() + seconds
    names = (f"{config}.{n}" for config in itertools.count(first) for n in range(values))
    with guarded_allocations() as allocations, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if time.monotonic() >= until:
                break
            config, is_over = draw_config(config_seed(name), where), False
            kept = call_cache.cache_info()["hits"]
            note({"begins": name})
            try:
                wrong = check_by_name(where, name, allocations)
            except Exception as e:
                wrong, is_over = traceback.format_exc().splitlines()[-12:], "CUDA error" in str(e)
            note({"name": name, "has": features(config), "kept": call_cache.cache_info()["hits"] - kept, "wrong": wrong})
            if is_over:
                break


def _write_line(file: Any, what: dict[str, Any]) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def main() -> None:
    options = parse()
    where = place(options.backend, options.device, options.without)
    os.environ.setdefault("FLEXATTN_CHECK", "0")  # lengths that do not fit are drawn on purpose
    if options.backend == "triton" and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if options.only:
        with guarded_allocations() as allocations, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = check_by_name(where, options.only, allocations)
        config = draw_config(config_seed(options.only), where)
        sys.stdout.write(
            "\n".join([*(f"{name}: {value}" for name, value in config._asdict().items()), *(wrong or ["right"])]) + "\n"
        )
        sys.exit(bool(wrong))
    if options.log:
        torch.set_num_threads(1)
        with open(options.log, "w") as file:
            run(where, options.first, options.seconds, options.values, lambda what: _write_line(file, what))
        return
    result = spawn(options)
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out:
        Path(options.out).write_text(text)
    sys.exit(bool(result["failures"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each process, its start included")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the run: process n begins with configuration seed * 10**9 + n * 10**6"
    )
    parser.add_argument("--backend", choices=("eager", "triton"), default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: triton runs in its interpreter")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--values", type=int, help="calls of each configuration; on cuda 200, as each compiles kernels, else 1")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES, help="what not to draw")
    parser.add_argument("--only", metavar="NAME", help="one call, as a failure names it")
    parser.add_argument("--out", metavar="FILE", help="where the JSON is written too")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)  # of one process that this one started
    options = parser.parse_args()
    options.values = options.values or (200 if options.device == "cuda" else 1)
    return options


def spawn(options: argparse.Namespace) -> dict[str, Any]:
    """All processes, each started again behind the configuration that it crashed or hung in."""
    begun = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        processes = [Process(options, Path(folder) / str(n), n) for n in range(options.processes)]
        waiting = list(processes)
        while waiting:
            time.sleep(0.1)
            waiting = [process for process in waiting if not process.is_over()]
    where = f"--backend {options.backend} --device {options.device}" + "".join(f" --without '{name}'" for name in options.without)
    failures = [
        {"name": name, "again": f"python -m tests.fuzz {where} --only {name}", "what": what}
        for process in processes
        for name, what in process.failures
    ]
    counts = sum((process.counts for process in processes), collections.Counter[str]())
    return {
        "command": shlex.join(["python", *sys.argv]),
        "started": begun,
        "device": record.device_facts(),
        "versions": record.versions(),
        "backend": options.backend,
        "seed": options.seed,
        "calls of attention": 3 * counts["drawn"],
        "kept calls among them": counts.pop("kept", 0),
        "drawn calls": dict(sorted(counts.items())),
        "failures": failures,
    }


class Process:
    def __init__(self, options: argparse.Namespace, log: Path, number: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[tuple[str, list[str]]] = []
        self._options = options
        self._log = log
        self._end = time.monotonic() + options.seconds
        self._start(options.seed * 10**9 + number * 10**6)

    def _start(self, first: int) -> None:
        o = self._options
        command = [sys.executable, "-m", "tests.fuzz", "--backend", o.backend, "--device", o.device, "--values", str(o.values)]
        command += ["--seconds", str(self._end - time.monotonic()), "--first", str(first), "--log", str(self._log)]
        command += ["--without", *o.without] if o.without else []
        self._log.write_text("")
        with self._log.with_suffix(".err").open("w") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)

    def is_over(self) -> bool:
        """Tells if it is done. Where it ended before its time it is started again, behind the configuration that ended it."""
        if self._process.poll() is None and time.monotonic() < self._end + GRACE:
            return False
        following = self._read(self._process.poll())
        if time.monotonic() < self._end and following is not None:
            self._start(following)
            return False
        return True

    def _read(self, status: int | None) -> int | None:
        """Takes the log in, with a crash or a hang (status None) as a failure; the configuration to go on with, if there is one."""
        if status is None:
            self._process.kill()
            self._process.wait()
        began = None
        for line in self._log.read_text().splitlines():
            event = json.loads(line)
            if "begins" in event:
                began = event["begins"]
                continue
            self.counts.update(["drawn", *event["has"]])
            self.counts["kept"] += event["kept"]
            if event["wrong"]:
                self.failures.append((event["name"], event["wrong"]))
        if status != 0:
            errors = self._log.with_suffix(".err").read_text().splitlines()[-8:]
            self.failures.append((str(began), ["hung" if status is None else f"ended with status {status}", *errors]))
        return None if began is None else config_seed(began) + 1


if __name__ == "__main__":
    main()
