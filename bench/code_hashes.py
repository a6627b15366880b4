"""`python -m flexattn code_hashes`: hashes of the PTX and SASS of every kernel that a list of calls launches, and their changes.

    python -m flexattn code_hashes --out before.json                        in one checkout
    python -m flexattn code_hashes --compare before.json                    in another
    python -m flexattn code_hashes --compare before.json --with now.json    of two files, without compiling

If a change only moves source or renames a kernel or an argument, all hashes stay the same. If it only reorders a kernel's
arguments, the hashes of the operations stay the same. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexattn.bench import record
from flexattn.bench.implementations import environment
from flexattn.build_ahead import recorded
from flexattn.cli import Parser, program
from flexattn.cli import explain as question
from flexattn.progress import progress_bar

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
    """Yields a case for every row of the tile tables, and for every feature on one row of the portable and of the sm_90 kernels."""
    both, dims = ("never", "always"), tuple(DIMS)
    for hopper in both:
        yield from (Case(90, hopper, "bf16", dim, "causal") for dim in dims)
        yield from (Case(90, hopper, "bf16", "128", features) for features in FEATURES if features != "causal")
        yield from (Case(90, hopper, "fp8 head", dim, "causal") for dim in (dims if hopper == "always" else ("128",)))
        yield Case(90, hopper, "fp8 block", "128", "packed")
        yield Case(90, hopper, "fp16", "128", "causal")
    yield from (Case(90, "never", "bf16", dim, features) for dim in ("64", "256") for features in ("open", "short"))
    yield from (Case(90, "always", "fp8 head", dim, "deterministic") for dim in ("64", "128", "192x128"))
    yield Case(90, "always", "bf16", "192x128", "deterministic")  # with two kernels
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


class Code(NamedTuple):
    """Digests and figures of one compiled kernel, from `compile_report.CompileReport`."""

    kernel: str  # the function's name
    ptx: str
    sass: str
    operations: str  # digest of the SASS without operands
    instructions: int  # static, in SASS
    registers: int
    spill_bytes: int  # that ptxas stores to and loads from local memory


class Difference(NamedTuple):
    """Difference between the code of one kernel in two checkouts."""

    case: str
    kind: str  # a key of KINDS
    before: Code | None
    now: Code | None

    def __str__(self) -> str:
        if self.before is None or self.now is None:
            return f"{self.case}: {self.kind}"
        changed = [
            f"{name} {getattr(self.before, name)} -> {getattr(self.now, name)}"
            for name in ("kernel", "instructions", "registers", "spill_bytes")
            if getattr(self.before, name) != getattr(self.now, name)
        ]
        return "; ".join([f"{self.case}: {self.now.kernel}: {self.kind}", *changed])


KINDS: Mapping[str, Callable[[Code, Code], bool]] = {
    "other PTX, the same SASS": lambda a, b: a.sass == b.sass,
    "other PTX, the same operations in SASS": lambda a, b: a.operations == b.operations,
    "as many instructions in another order": lambda a, b: _figures(a) == _figures(b),
    "other instructions": lambda a, b: True,
}
"""Kinds of differences by how near they are to none; the first that holds counts."""


def _figures(code: Code) -> tuple[int, int]:
    return code.instructions, code.spill_bytes


def hashes(only: str, workers: int | None) -> dict[str, Code]:
    """Returns the compiled code by "case: number of the kernel in the call" for cases whose name contains `only`."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileRequest, compile_many, request_for

    requests: dict[str, CompileRequest] = {}
    for case in cases():
        if only in case.name:
            for n, launch in enumerate(launches_of(case)):
                requests[f"{case.name}: {n}"] = request_for(launch, case.arch)
    once = {repr(request): request for request in requests.values()}
    step = 4 * (workers or os.cpu_count() or 1)
    found: dict[str, Code] = {}
    with progress_bar(len(once), "code_hashes", "kernel", True) as advance:
        for start in range(0, len(once), step):
            part = list(once)[start : start + step]
            for text, x in zip(part, compile_many([once[text] for text in part], workers), strict=True):
                found[text] = Code(
                    kernel=once[text].kernel,
                    ptx=x.ptx_digest,
                    sass=x.sass_digest,
                    operations=x.operations_digest,
                    instructions=sum(x.instructions.values()),
                    registers=x.registers,
                    spill_bytes=x.spill_store_bytes + x.spill_load_bytes,
                )
                advance()
    return {name: found[repr(request)] for name, request in requests.items()}


def differences(before: Mapping[str, Code], after: Mapping[str, Code]) -> list[Difference]:
    """Returns a difference for each kernel whose code changed or that only one side has."""
    found = []
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case), after.get(case)
        if old is None or new is None:
            found.append(Difference(case, "only before" if new is None else "only now", old, new))
        elif (old.ptx, old.sass) != (new.ptx, new.sass):
            found.append(Difference(case, next(kind for kind, holds in KINDS.items() if holds(old, new)), old, new))
    return found


def summary(compared: int, found: Sequence[Difference]) -> str:
    """Returns the last line of a comparison: the number of kernels, and the number of differences of each kind."""
    counts = Counter(x.kind for x in found)
    return ", ".join([f"{compared} kernels", f"{len(found)} differ", *(f"{n} {kind}" for kind, n in counts.most_common())])


def read(path: Path) -> dict[str, Code]:
    """Returns the hashes in a file of --out; raises ValueError for another one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if tuple(content["fields"]) != Code._fields:
            raise ValueError(f"its fields are {', '.join(content['fields'])}")
        return {name: Code(*values) for name, values in content["hashes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{path} has no hashes of this version ({type(e).__name__}: {e}); accepted: a file of code_hashes --out"
        ) from e


def main(argv: list[str]) -> int:
    parser = Parser(prog=program("code_hashes"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the hashes")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE.json", help="hashes that were written before; exit status 1 if any differs"
    )
    parser.add_argument("--with", dest="now", type=Path, metavar="FILE.json", help="take these for now's instead of compiling")
    parser.add_argument(
        "--workers", type=question.positive, metavar="N", help="kernels compiled at a time (default: one for each core)"
    )
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(case.name for case in cases()))
        return 0
    if args.now and (args.out or not args.compare):
        parser.error("--with takes the place of compiling in a comparison; give --compare FILE.json, and no --out")
    try:
        before = read(args.compare) if args.compare else None
        given = read(args.now) if args.now else None
    except ValueError as e:
        parser.error(str(e))
    found = hashes(args.only, args.workers) if given is None else {name: x for name, x in given.items() if args.only in name}
    if not found:
        parser.error(f"--only is {args.only!r}, which no case has in its name; --list lists them")
    if args.out:
        record.replace(args.out, {"versions": record.versions(), "fields": Code._fields, "hashes": found})
    if before is not None:
        before = {name: code for name, code in before.items() if args.only in name}
        changed = differences(before, found)
        print("\n".join([*map(str, changed), summary(len(before.keys() | found.keys()), changed)]))
        return bool(changed)
    if not args.out:
        for name, x in found.items():
            print(f"{name} {x.kernel}: PTX {x.ptx}, SASS {x.sass}, operations {x.operations}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
