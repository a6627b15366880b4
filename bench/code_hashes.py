"""`python -m flexattn code_hashes`: hashes of the PTX and SASS of every kernel that a list of calls launches, and what changed.

    python -m flexattn code_hashes --out before.json          in one checkout
    python -m flexattn code_hashes --compare before.json      in another

A change that moves source about leaves all of them as they are. One that only gives a kernel's arguments another order leaves the
operations. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flexattn.bench.environment import environment
from flexattn.bench.record import versions
from flexattn.cli import explain as question
from flexattn.progress import progress_bar
from flexattn.warm_up import recorded

DIMS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "192x128": (192, 128), "256": (256, 256)}
FEATURES = {
    "open": "",
    "short": "",
    "causal": "--mask causal",
    "window": "--mask causal_bottom_right --window 300,0 --softmax learnable --max-logit --lse-grad",
    "packed": "--format thd --mask padding_causal --softcap 20 --kv-heads 2",
    "bias": "--bias post_scale_bias --dropout 0.1",
    "alibi": "--mask causal --bias alibi",
    "score_mod": "--score-mod flexattn.bench.code_hashes:squared_distance",
    "mask_mod": "--mask-mod flexattn.bench.code_hashes:every_third",
    "deterministic": "--mask causal --deterministic",
}
"""Calls by what they ask for, as `python -m flexattn explain` takes them."""


def squared_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = q_idx - kv_idx
    return score - 0.001 * distance * distance


def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (kv_idx % 3 != 1)


class Case(NamedTuple):
    """One call on one architecture."""

    arch: int
    hopper: str  # FLEXATTN_HOPPER
    dtype: str
    dims: str
    features: str

    @property
    def name(self) -> str:
        return f"sm_{self.arch} hopper={self.hopper} {self.dtype} d {self.dims} {self.features}"

    @property
    def command(self) -> list[str]:
        d_qk, d_v = DIMS[self.dims]
        length = 300 if self.features == "short" else 2048
        shape = f"{2 * length},4,{d_qk}" if self.features == "packed" else f"2,{length},4,{d_qk}"
        words = f"--q {shape} --head-dim-v {d_v} --capability {self.arch / 10} --backend triton {FEATURES[self.features]}"
        kind = f"--dtype bf16 --fp8 {self.dtype[4:]}" if self.dtype.startswith("fp8") else f"--dtype {self.dtype}"
        return shlex.split(f"{words} {kind}")


def cases() -> Iterator[Case]:
    """Every row of the tile tables, and every feature on one row of the portable kernels and of those for sm_90."""
    both, dims = ("never", "always"), tuple(DIMS)
    for hopper in both:
        yield from (Case(90, hopper, "bf16", dim, "causal") for dim in dims)
        yield from (Case(90, hopper, "bf16", "128", features) for features in FEATURES if features != "causal")
        yield from (Case(90, hopper, "fp8 head", dim, "causal") for dim in (dims if hopper == "always" else ("128",)))
        yield Case(90, hopper, "fp8 block", "128", "packed")
        yield Case(90, hopper, "fp16", "128", "causal")
    yield from (Case(90, "never", "bf16", dim, features) for dim in ("64", "256") for features in ("open", "short"))
    yield from (Case(90, "always", "fp8 head", dim, "deterministic") for dim in ("64", "128", "192x128"))
    yield from (Case(arch, "never", "bf16", dim, "causal") for arch in (80, 89, 100, 120) for dim in dims)
    yield from (Case(80, "never", "bf16", "128", features) for features in ("open", "bias", "score_mod"))
    yield from (Case(90, "never", "fp32", dim, "causal") for dim in ("64", "128", "256"))
    yield from (Case(arch, "never", "fp32", "128", "causal") for arch in (80, 100))


def launches_of(case: Case) -> list[Any]:
    parser = argparse.ArgumentParser()
    question.add_arguments(parser)
    with environment({"FLEXATTN_HOPPER": case.hopper}):
        x, _, spec = question.parse(parser.parse_args(case.command))
        return recorded(spec, x, ("forward", "backward"))


def hashes(only: str, workers: int | None) -> dict[str, list[str]]:
    """Digests of PTX, SASS and SASS's operations by "case: kernel number"; of cases whose name has `only` in it."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileRequest, compile_many, request_for

    names: list[str] = []
    requests: list[CompileRequest] = []
    for case in cases():
        if only in case.name:
            for n, launch in enumerate(launches_of(case)):
                names.append(f"{case.name}: {launch.kernel.fn.__name__} {n}")
                requests.append(request_for(launch, case.arch))
    once = {repr(request): request for request in requests}
    step = 4 * (workers or os.cpu_count() or 1)
    found: dict[str, list[str]] = {}
    with progress_bar(len(once), "code_hashes", "kernel", True) as advance:
        for start in range(0, len(once), step):
            part = list(once)[start : start + step]
            for text, report in zip(part, compile_many([once[text] for text in part], workers), strict=True):
                found[text] = [report.ptx_digest, report.sass_digest, report.operations_digest]
                advance()
    return {name: found[repr(request)] for name, request in zip(names, requests, strict=True)}


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """A line for each kernel whose code is another, or which one side lacks."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            lines.append(f"{name}: only {'before' if name in before else 'now'}")
            continue
        _, is_sass, is_operations = (x == y for x, y in zip(before[name], after[name], strict=True))
        if before[name] != after[name]:
            same = "the same SASS" if is_sass else "the same operations in SASS" if is_operations else "other operations in SASS"
            lines.append(f"{name}: other PTX, {same}")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flexattn code_hashes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the hashes")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE.json", help="hashes that were written before; exit status 1 if any differs"
    )
    parser.add_argument(
        "--workers", type=question.positive, metavar="N", help="kernels compiled at a time (default: one for each core)"
    )
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(case.name for case in cases()))
        return 0
    found = hashes(args.only, args.workers)
    if not found:
        parser.error(f"--only is {args.only!r}, which no case has in its name; --list lists them")
    if args.out:
        args.out.write_text(json.dumps({"versions": versions(), "hashes": found}, indent=1) + "\n")
    if args.compare is None:
        if not args.out:
            print(
                "\n".join(
                    f"{name}: PTX {ptx}, SASS {sass}, operations {operations}" for name, (ptx, sass, operations) in found.items()
                )
            )
        return 0
    before = json.loads(args.compare.read_text())["hashes"]
    changed = differences({name: pair for name, pair in before.items() if args.only in name}, found)
    print("\n".join([*changed, f"{len(found)} kernels, {len(changed)} differ"]))
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
