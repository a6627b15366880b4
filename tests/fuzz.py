"""Random calls of attention() against an oracle of their own: `PYTHONPATH=. python tests/fuzz.py --seconds 60`.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzz_calls import FEATURES, HALF, Call, Config, Where, draw_config
from fuzz_oracle import Problem, Result, exact, plain
from guarded_memory import Allocations, guarded_allocations
from torch import Tensor

from flexattn.bench import record

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0  # of plain torch's error in the same dtype, as flexattn.testing's
# Roundings granted where plain torch happens to be exact: of the result's own dtype; in a gradient also of the arithmetic, as dp
# and delta cancel; in float64, of which there is no wider truth.
STEPS, CANCELLED, STEPS_OF_DOUBLE = 4.0, 32.0, 256.0
SCORE_STEPS, OUT_STEPS = (
    8.0,
    4.0,
)  # in the gradient of a score that is nearly 0, of the arithmetic and of out, as the largest of many
DP = 16.0  # the size of dp, a product of rows of dout and v, which cancels against delta
NOTHING = 1e-4  # what that leaves of a gradient of 0
TANH, MOST_CAP = 6e-7, 8.0  # absolute error of tanh in half types, which a softcap multiplies; the largest cap of the mods
LEVEL = 2.0**-18  # relative error of lse where scores are beyond 2**13: log2(e) is multiplied in and out
GRACE = 120.0  # seconds that a process may take beyond its time, to compile or to finish a call

EAGER = Where("eager", "cpu", (*HALF, torch.float32, torch.float64), (16, 8, 24, 40, 1, 3, 64, 72, 128), (60, 130), 3)
INTERPRETED = Where("triton", "cpu", (*HALF, torch.float32), (16, 8, 24, 40, 64, 72), (24, 50), 2)
ON_GPU = Where("triton", "cuda", (*HALF, *HALF, torch.float32), (64, 128, 128, 8, 40, 72, 96, 192, 256), (150, 300), 3)


def place(backend: str, device: str, without: list[str]) -> Where:
    if device == "cuda":
        where = ON_GPU._replace(backend=backend)
        where = where._replace(dtypes=(*where.dtypes, torch.float64)) if backend == "eager" else where
    else:
        where = EAGER if backend == "eager" else INTERPRETED
    return where._replace(without=frozenset(without))


class Verdicts:
    """Comparisons, left on the device until they are all read at once: each an error, and the limit that it may reach."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: list[Tensor] = []

    def limit(self, what: str, error: Tensor, limit: Tensor) -> None:
        self._names.append(what)
        self._numbers += [error.double(), limit.double()]

    def never(self, what: str, is_wrong: Tensor) -> None:
        self.limit(what, is_wrong.double(), torch.zeros_like(is_wrong, dtype=torch.float64))

    def close(
        self, what: str, got: Tensor, ref: Tensor, same_dtype: Tensor, factor: float, rounding: Tensor, least: Tensor | float = 0.0
    ) -> None:
        """err(got, ref) <= factor * err(same_dtype, ref) + rounding of ref's size, in the maximum and in the root mean square.

        least: granted in any case.
        """
        if not ref.numel():
            return
        errors, budget = (torch.where(t == ref, 0.0, (t.double() - ref).abs()) for t in (got, same_dtype))
        size = ref.abs().masked_fill(ref.isinf(), 0.0)
        for kind, norm in (("largest", torch.amax), ("rms", _rms)):
            granted = torch.where(rounding == torch.inf, rounding, factor * norm(budget) + rounding * norm(size) + least)
            self.limit(f"{what}, {kind} error", norm(errors), granted)

    def failures(self) -> list[str]:
        if not self._names:
            return []
        device = max((t.device for t in self._numbers), key=lambda d: d.type == "cuda")
        numbers = torch.stack([t.to(device) for t in self._numbers]).tolist()
        pairs = zip(self._names, numbers[0::2], numbers[1::2], strict=True)
        self._names, self._numbers = [], []
        return [f"{what}: {error:.3e}, at most {limit:.3e}" for what, error, limit in pairs if not error <= limit]  # NaN too


def _rms(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()


def attend(call: Call) -> dict[str, Tensor]:
    """One call with its backward: what it returns, and the gradients by "d" and a name."""
    from flexattn import attention

    config, arguments = call.config, call.arguments()
    names = ["out", *(["lse"] if config.return_lse else []), *(["max_logit"] if config.return_max_logit else [])]
    found = attention(**arguments)
    results = dict(zip(names, found if len(names) > 1 else (found,), strict=True))
    wanted = call.wanted
    if wanted:
        seeds = {"out": call.dout, "lse": call.dlse}
        outputs = [name for name in ("out", "lse") if seeds[name] is not None]
        leaves = [call.tensors[name] for name in wanted]
        gradients = torch.autograd.grad(
            [results[name] for name in outputs], leaves, [seeds[name] for name in outputs], allow_unused=True
        )
        for name, leaf, gradient in zip(wanted, leaves, gradients, strict=True):
            results[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: t.detach() for name, t in results.items()}


def compare(verdicts: Verdicts, when: str, call: Call, got: dict[str, Tensor]) -> None:
    """The results of a call with the oracle's, of the tensors as they are now."""
    config, wanted = call.config, call.wanted
    problem, dtype, is_double = call.problem(), config.dtype, config.dtype is torch.float64
    seeds = {"dout": call.dout, "dlse": call.dlse}
    ref, same = (oracle(problem, call.tensors, **seeds, wanted=wanted) for oracle in (exact, plain))
    eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
    of_tanh = TANH * (problem.softcap + MOST_CAP) if dtype in HALF else 0.0
    of_scores = ref.largest * eps + of_tanh
    steps = STEPS_OF_DOUBLE if is_double else STEPS
    vague = _row_of_out(ref.is_vague, config.q_format)
    for name, t in got.items():
        what = f"{when}: {name}"
        if name == "out":
            assert t.dtype == dtype, f"out has dtype {t.dtype}"
            rounding = steps * torch.finfo(dtype).eps + of_scores
            verdicts.close(what, *(x.masked_fill(vague, 0.0) for x in (t, ref.out, same.out)), FORWARD_FACTOR, rounding)
            verdicts.never(f"{what} is not finite", ~t.isfinite().all())
        elif name == "lse":
            large = ref.is_level | ref.is_vague
            verdicts.close(
                what,
                *(x.masked_fill(large, 0.0) for x in (t, ref.lse, same.lse)),
                FORWARD_FACTOR,
                steps * eps + of_scores,
                steps * eps + of_tanh,
            )
            if config.extreme and t.numel():
                error = torch.where(large, (t.double() - ref.lse).abs() / ref.lse.abs(), 0.0)
                verdicts.limit(f"{what} of large scores, relative error", error.max(), torch.full_like(error.max(), LEVEL))
        elif name == "max_logit":
            size = ref.max_logit.abs().masked_fill(ref.max_logit.isinf(), 0.0).clamp(min=1.0)
            error, budget = (
                torch.where(x == ref.max_logit, 0.0, (x.double() - ref.max_logit).abs()) / size for x in (t, same.max_logit)
            )
            roundings = (STEPS_OF_DOUBLE if is_double else CANCELLED) * eps + of_tanh
            verdicts.limit(what, error.max(), FORWARD_FACTOR * budget.max() + roundings)
        else:
            _compare_gradient(verdicts, what, call, name[1:], t, ref, same, problem)


def _compare_gradient(
    verdicts: Verdicts, what: str, call: Call, name: str, got: Tensor, ref: Result, same: Result, problem: Problem
) -> None:
    config, leaf = call.config, call.tensors[name]
    if got.dtype != leaf.dtype or got.shape != leaf.shape:
        raise AssertionError(f"{what} is {got.dtype} {tuple(got.shape)}, of {leaf.dtype} {tuple(leaf.shape)}")
    verdicts.never(f"{what} is not finite", ~got.isfinite().all())
    if name in config.captures and config.dtype in HALF:
        return  # the rounding of out, which all keys of a row share, adds up there (docs/score_mod.md, Gradients)
    eps = torch.finfo(torch.float64 if config.dtype is torch.float64 else torch.float32).eps
    steps = STEPS_OF_DOUBLE if config.dtype is torch.float64 else STEPS
    cancelled = (STEPS_OF_DOUBLE if config.dtype is torch.float64 else CANCELLED) * eps / (1.0 - config.dropout_p)
    coarsest = max(torch.finfo(dtype).eps for dtype in (config.dtype, got.dtype))  # out's, which delta is made of, and the result's
    rounding = torch.where(ref.is_vague.any(), torch.inf, steps * coarsest + cancelled + ref.largest * eps)
    wanted = ref.gradients[name]
    # A score's gradient is a difference of dp and delta, sums over head_dim_v. In half types delta is made of out once that is
    # rounded, which plain torch does not do: where few rows are summed its luck is no budget. Of one visible key out is v, and
    # exact, unless dropout or a sink divides it, and nothing else may be left of a gradient.
    of_out = torch.finfo(config.dtype).eps if config.dtype in HALF else 0.0
    is_divided = config.dropout_p > 0.0 or config.softmax_type != "vanilla"
    of_delta = (OUT_STEPS if is_divided else OUT_STEPS / 16.0) * of_out + SCORE_STEPS * eps
    if name in ("q", "k", "v"):
        queries = (
            sum(problem.q.lengths) * config.group / max(1, len(problem.q.lengths)) if name == "k" else 1.0
        )  # that a key sums over
        rounded = of_delta * config.head_dim_v**0.5 * problem.scale * max(1.0, queries) ** 0.5
        least = torch.where(wanted.any(), rounded, max(rounded, NOTHING))
    else:  # sums of the gradients of many scores, which may cancel altogether
        rounded = of_delta / 4.0 * config.head_dim_v**0.5
        terms = (ref.lse.numel() if name == "softmax_offset" else ref.num_scores) / max(1, leaf.numel())
        least = (cancelled * (ref.dscore + DP) + of_out / 4.0 * ref.dscore + rounded) * max(1.0, terms) ** 0.5
    verdicts.close(what, got, wanted, same.gradients[name], GRADIENT_FACTOR, rounding, least)


def _row_of_out(of_lse: Tensor, q_format: str) -> Tensor:
    """What lse's shape has for each row, to broadcast over out."""
    if q_format == "thd":
        return of_lse.T[..., None]
    return of_lse.permute(["bhs".index(dim) for dim in q_format[:-1]])[..., None]


def repeats_to_the_bit(config: Config, name: str) -> bool:
    """What docs/semantics.md (Determinism) promises; on a CPU nothing runs side by side, so there all repeats."""
    return not name.startswith("d") or config.deterministic is True or config.where.device == "cpu"


def check(config: Config, seed: int, allocations: Allocations) -> list[str]:
    """What is wrong with one drawn call, made three times."""
    call, verdicts = Call(config, seed), Verdicts()
    is_judged = config.kind != "wrong lengths"
    first, second = attend(call), attend(call)
    for name, t in first.items():
        if repeats_to_the_bit(config, name) and is_judged:
            verdicts.never(f"a repeated call has another {name}", (t != second[name]).any())
    verdicts.never("an input was changed", call.is_changed())
    if is_judged:
        compare(verdicts, "first call", call, first)
    call.refill()
    third = attend(call)
    verdicts.never("an input was changed by the third call", call.is_changed())
    verdicts.never("memory beside an output was written", allocations.are_damaged())
    if is_judged:
        compare(verdicts, "third call, with other values", call, third)
    return verdicts.failures()


def check_by_name(where: Where, name: str, allocations: Allocations) -> list[str]:
    """A name is a configuration's seed, a point, and that of a call of it."""
    config = draw_config(_config_seed(name), where)
    with settings(config):
        return check(config, int(name.split(".")[1]), allocations)


@contextmanager
def settings(config: Config) -> Iterator[None]:
    """What a configuration says beside the call's arguments."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, FLEXATTN_HOPPER=config.hopper))
        if config.where.backend == "eager" and config.has_small_blocks:
            from flexattn.dispatch import eager_backend

            stack.enter_context(mock.patch.multiple(eager_backend, BAND_ROWS=16, SCORE_BYTES=1 << 14))
        if config.where == INTERPRETED._replace(without=config.where.without):
            from flexattn.kernels_triton.mods import mask_blocks
            from flexattn.kernels_triton.portable import forward

            def number_of_splits(*_: Any) -> int:
                return config.splits

            if config.splits:
                stack.enter_context(mock.patch.object(forward, "number_of_splits", number_of_splits))
            if config.has_small_blocks:
                stack.enter_context(mock.patch.multiple(mask_blocks, BLOCK=32, SHORTEST=1))
        yield


def features(config: Config) -> list[str]:
    """What a drawn call is counted under."""
    found = [config.kind, config.q_format if config.q_format == config.kv_format else "mixed formats", str(config.dtype)[6:]]
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
    from flexattn import calls

    until = time.monotonic() + seconds
    names = (f"{config}.{n}" for config in itertools.count(first) for n in range(values))
    with guarded_allocations() as allocations, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if time.monotonic() >= until:
                break
            config, is_over = draw_config(_config_seed(name), where), False
            kept = calls.cache_info()["hits"]
            note({"begins": name})
            try:
                wrong = check_by_name(where, name, allocations)
            except Exception as e:
                wrong, is_over = traceback.format_exc().splitlines()[-12:], "CUDA error" in str(e)
            note({"name": name, "has": features(config), "kept": calls.cache_info()["hits"] - kept, "wrong": wrong})
            if is_over:
                break


def _write_line(file: Any, what: dict[str, Any]) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def _config_seed(name: str) -> int:
    return int(name.split(".")[0])


def main() -> None:
    options = parse()
    where = place(options.backend, options.device, options.without)
    if options.backend == "triton" and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if options.only:
        with guarded_allocations() as allocations, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = check_by_name(where, options.only, allocations)
        config = draw_config(_config_seed(options.only), where)
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
        {"name": name, "again": f"PYTHONPATH=. python tests/fuzz.py {where} --only {name}", "what": what}
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
        command = [sys.executable, __file__, "--backend", o.backend, "--device", o.device, "--values", str(o.values)]
        command += ["--seconds", str(self._end - time.monotonic()), "--first", str(first), "--log", str(self._log)]
        command += ["--without", *o.without] if o.without else []
        self._log.write_text("")
        with self._log.with_suffix(".err").open("w") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)

    def is_over(self) -> bool:
        """Whether it is done. Where it ended before its time it is started again, behind the configuration that ended it."""
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
        return None if began is None else _config_seed(began) + 1


if __name__ == "__main__":
    main()
