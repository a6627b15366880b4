"""`python -m flexattn play`: checks and compiles a kernel with other tiles, or your own, and compares times on a GPU."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import functools
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import flexattn
from flexattn.bench import compiled, counts, record
from flexattn.bench.check import Error
from flexattn.bench.emulated import KERNELS as EMULATED
from flexattn.bench.implementations import (
    KERNELS,
    TRITON,
    Implementation,
    capability_of,
    committed_launchers,
    committed_tile,
    with_launchers,
)
from flexattn.bench.peers import peers
from flexattn.bench.record import Ceilings, Row
from flexattn.bench.run import Plan
from flexattn.bench.run import run as bench
from flexattn.bench.shapes import Workload, select
from flexattn.bench.subject import NEEDED, PASSED, REFUSED, WRONG, Subject, alone, check, launchers_of, small_enough
from flexattn.bench.tables import Table
from flexattn.bench.tiles import FIELDS, candidates, tile_name, with_options
from flexattn.cli import Parser, program
from flexattn.progress import progress_bar

if TYPE_CHECKING:
    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport
    from flexattn.kernels_triton.runtime.device import Tile

DEFAULT_SHAPE = "sweep-d128-causal-s4096"
DEFAULT_ARCH = 90
POLL_SECONDS = 0.2
MOST_DIFFERENCES = 20  # lines of a saved file's changes that are shown
EPILOGUE = """examples:
  %(prog)s forward                                      the committed kernel and tile
  %(prog)s forward --shape llama3-8b-s8192 --block-m 128 --num-stages 2
  %(prog)s forward --kernel-file my_forward.py --watch  your copy of kernels_triton/portable/forward.py, on every save
  %(prog)s dkdv --sweep --block-n 64 128                other tiles, and the row that the table should have
  %(prog)s forward --emulate --seeds 8                  the kernel for sm_90 in the emulator, under 8 schedules
  %(prog)s --emulate my_kernel.py:run                   your own Gluon kernel there: run(seed) returns a report
"""


def make_parser() -> Parser:
    parser = Parser(
        prog=program("play"), description=__doc__, epilog=EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kernel",
        choices=[*KERNELS, *(k for k in EMULATED if k not in KERNELS)],
        nargs="?",
        help="those behind dkdv with --emulate alone",
    )
    parser.add_argument(
        "--shape", nargs="+", default=[DEFAULT_SHAPE], metavar="NAME", help="of `bench --list`; a sweep takes several"
    )
    parser.add_argument(
        "--kernel-file", type=Path, metavar="FILE.py", help="your copy of kernels_triton/portable/forward.py or backward.py"
    )
    tile = parser.add_argument_group("tile", "in place of the committed one's; a sweep takes several values of each")
    for name in FIELDS[:-1]:
        tile.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+", metavar="N")
    tile.add_argument("--apart", action=argparse.BooleanOptionalAction, help="dk and dv by a launch each")
    see = parser.add_argument_group("what the compiler made")
    parser.add_target()
    see.add_argument(
        "--arch", type=int, metavar="SM", help="compute capability to compile for, as 80, 90, 100 (default: the GPU's, else 90)"
    )
    see.add_argument(
        "--dump", type=lambda text: text.split(","), default=[], metavar="KINDS", help=f"of {','.join(compiled.DUMPS)}"
    )
    see.add_argument("--dump-folder", type=Path, default=Path("dump"), metavar="FOLDER", help="default: %(default)s")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--emulate",
        nargs="?",
        const="",
        metavar="FILE.py:RUN",
        help="in the emulator: the kernel for sm_90, or your own, by a function of a seed (docs/emulator.md)",
    )
    how.add_argument("--seeds", type=int, default=8, metavar="N", help="schedules to emulate (default: %(default)s)")
    how.add_argument("--sweep", action="store_true", help="try many tiles: prune them by compiling, then check and time the rest")
    how.add_argument(
        "--watch", action="store_true", help="run again whenever the kernel file (or a file of kernels_triton) is saved"
    )
    how.add_argument(
        "--peers", nargs="*", default=["SDPA*", "FlexAttention", "cuDNN*"], metavar="NAME", help="whose best to time beside"
    )
    how.add_argument("--budget-ms", type=float, default=100.0, help="device time for each of those timed (default: %(default)s)")
    how.add_argument(
        "--out", type=Path, metavar="FILE.json", help="also write what was measured, for `bench --compare` and --emit-rows"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. The exit status is 0 if the kernel is right, 1 if it is wrong (and not timed), 2 if it cannot run."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if unknown := set(args.dump) - set(compiled.DUMPS):
        parser.error(f"--dump {','.join(sorted(unknown))}; accepted: {','.join(compiled.DUMPS)}")
    if not arguments:
        print(overview())
        return PASSED
    if args.watch:
        return watch([a for a in arguments if a != "--watch"], args)
    if args.emulate is not None:
        return emulate(parser, args)
    if args.kernel not in KERNELS:
        parser.error(f"name a kernel: {', '.join(KERNELS)}" + (f"; {args.kernel} is for --emulate" if args.kernel else ""))
    compiler = None
    if not torch.cuda.is_available() and "triton" not in sys.modules:
        torch.set_num_threads(1)  # the other cores are for the compiler
        compiler = None if args.sweep else compiled.Compiler()
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported; other processes compile
    args.arch = parser.imitate(args.target) if args.arch is None else args.arch
    try:
        return run(parser, args, record.command_line("flexattn play", arguments, args.out), compiler)
    finally:
        if compiler is not None:
            compiler.close()


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, command: str, compiler: compiled.Compiler | None) -> int:
    """Plays with the kernel that the options name, or sweeps over its tiles; the exit status."""
    try:
        subjects = [_subject(args, workload) for workload in select(args.shape)]
        _check_shapes(subjects, args.sweep)
    except (ValueError, FileNotFoundError) as e:
        parser.error(str(e))
    except ModuleNotFoundError as e:
        if e.name not in NEEDED:
            raise
        parser.error(f"the playground needs {e.name}, which is not installed: pip install 'flexattn[bench]'")
    return sweep(subjects, args, command) if args.sweep else play(subjects[0], args, command, compiler)


def emulate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Prints the emulator's verdict."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the emulator multiplies small tiles, which threads only slow down
    os.environ["TRITON_INTERPRET"] = "1"
    from flexattn.bench import emulated

    if bool(args.kernel) == bool(args.emulate):
        parser.error("--emulate takes a kernel's name before it, or FILE.py:RUN after it")
    try:
        if args.emulate:
            verdict = emulated.the_emulator().judge_by_name(args.emulate, range(args.seeds))
        else:
            [workload] = select(args.shape)
            verdict = emulated.judge(args.kernel, workload, range(args.seeds))
    except (ImportError, ValueError) as e:
        parser.error(str(e))
    print(verdict)
    return PASSED if verdict.is_clean else WRONG


def _check_shapes(subjects: Sequence[Subject], is_sweep: bool) -> None:
    shapes = [s.workload for s in subjects]
    if not is_sweep and len(shapes) > 1:
        raise ValueError(f"--shape names {len(shapes)} shapes; accepted: one, or several with --sweep")
    if len({(w.head_dim_qk, w.head_dim_v, w.dtype) for w in shapes}) > 1:
        raise ValueError("--shape names shapes of several head dims; accepted: one head dim in a sweep, as a row serves one")


def _subject(args: argparse.Namespace, workload: Workload) -> Subject:
    known = [sm for sm in compiled.MATRIX_INSTRUCTION if sm <= capability_of("cuda")]
    arch = args.arch or max(known, default=DEFAULT_ARCH)
    if arch not in compiled.MATRIX_INSTRUCTION:
        raise ValueError(f"--arch is {arch}; accepted: {', '.join(map(str, compiled.MATRIX_INSTRUCTION))}")
    committed = committed_tile(args.kernel, workload, arch)
    tile = committed
    if not args.sweep:
        for name in FIELDS[:-1]:
            if len(getattr(args, name) or []) > 1:
                raise ValueError(f"--{name.replace('_', '-')} has several values; accepted: one, or several with --sweep")
        options = {name: (getattr(args, name) or [None])[0] for name in FIELDS[:-1]}
        tile = with_options(committed, options | {"apart": args.apart})
    launchers = launchers_of(args.kernel, args.kernel_file, {args.kernel: tile})
    return Subject(args.kernel, workload, launchers, tile, committed, arch)


def play(subject: Subject, args: argparse.Namespace, command: str, compiler: compiled.Compiler | None = None) -> int:
    """Checks and compiles at the same time, times if there is a GPU, and prints each result when it is known."""
    kernel, workload, _, tile, committed, arch = subject
    on_gpu = torch.cuda.is_available()
    checked = workload if on_gpu else small_enough(workload, tile)
    file = f", from {args.kernel_file}" if args.kernel_file else ""
    torch_version = torch.__version__.partition("+")[0]
    device = record.device_facts()["name"] if on_gpu else "no GPU"
    print(f"flexattn {flexattn.__version__}, torch {torch_version}, triton {record.installed('triton')}, {device}")
    print(f"{kernel}{file}: tile {tile_name(tile)} (committed: {tile_name(committed)}) on {workload.name}: {workload}")
    print(f"\nAgainst the reference in fp64{'' if on_gpu else f', in the interpreter, as {checked}'}:", flush=True)
    groups = {"this": subject, "committed": subject._replace(launchers=committed_launchers({kernel: committed}))}
    if subject.tile == committed and not args.kernel_file:
        del groups["committed"]
    with ThreadPoolExecutor(1) as beside:
        try:
            asked = {name: compiled.requests(kernel, s.launchers, workload, arch) for name, s in groups.items()}
            compiling = beside.submit(
                compiled.reports, list(asked.values()), compile_many=None if compiler is None else compiler.compile_many
            )
            errors, failure = check(subject, checked, "cuda" if on_gpu else "cpu")
        except Exception as e:  # any error of a developer's kernel is the answer
            print(f"it does not run: {type(e).__name__}: {e}")
            return REFUSED
    print(error_table(errors))
    print("right: within the budget of the tests" if failure is None else f"WRONG: {failure}")

    print(f"\nCompiled for sm_{arch}:", flush=True)
    made = dict(zip(asked, compiling.result(), strict=True))
    print(compile_table(made, arch))
    for problem in compiled.complaints(kernel, tile, arch, made["this"]):
        print(f"this: {problem}")
    if args.dump:
        for path in compiled.dump(asked["this"], args.dump, args.dump_folder):
            print(f"wrote {path}")
    print(f"\n{roofline_text(subject, None)}")
    if failure is not None:
        print("Not timed: it is wrong.")
        return WRONG
    if not on_gpu:
        print("Not timed: no GPU here.")
        return PASSED
    return time_beside(subject, args, command)


def error_table(errors: Sequence[Error]) -> str:
    rows = []
    for error in errors:
        worst = ", ".join(f"{list(at)}" for at, _, _ in error.worst)
        numbers = [f"{x:.2e}" for x in (error.max, error.rms, error.eager_max, error.eager_rms)]
        rows.append((error.name, [*numbers, worst]))
    return Table("", ["max error", "RMS", "plain torch: max", "RMS", "worst at [b, s, h, d]"], rows).text().lstrip("\n")


def compile_table(made: dict[str, list[CompileReport] | str], arch: int) -> str:
    from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT

    rows: list[tuple[str, list[str]]] = []
    for name, answer in made.items():
        if isinstance(answer, str):
            return f"{name} does not compile: {answer}"
        for n, report in enumerate(answer):
            shared = f"{report.shared_bytes} ({report.shared_bytes / SHARED_MEMORY_LIMIT[arch]:.0%})"
            products = " ".join(f"{count} {instruction}" for instruction, count in report.matrix_instructions.items()) or "none"
            spills = f"{report.spill_store_bytes}+{report.spill_load_bytes} ({report.loop_spill_share:.1%})"
            part = f" {('dk', 'dv')[n]}" if len(answer) > 1 else ""
            loops = ", ".join(str(sum(loop.values())) for loop in report.loops) or "none"
            rows.append((name + part, [str(report.registers), spills, loops, shared, products, str(len(report.warnings))]))
    spilled = "spilled bytes, stored+loaded (of the loops)"
    columns = ["registers", spilled, "instructions of each loop", "shared bytes", "matrix instructions", "warnings"]
    return Table("", columns, rows).text().lstrip("\n")


def roofline_text(subject: Subject, ceilings: Ceilings | None) -> str:
    work = counts.kernel_work(subject.workload, subject.kernel)
    text = f"{work.flops:.3g} FLOP on {work.bytes:.3g} bytes: {work.flops / work.bytes:.0f} FLOP per byte"
    if ceilings is None:
        return text
    found = counts.roofline(work, ceilings.matmul_tflops, ceilings.copy_gb_s)
    return (
        f"{text}; the ceilings of this run, {ceilings.matmul_tflops:.0f} TFLOP/s and {ceilings.copy_gb_s:.0f} GB/s, meet at "
        f"{found.ridge:.0f}: bound by {found.bound}, {found.attainable_tflops:.0f} TFLOP/s at most"
    )


def time_beside(subject: Subject, args: argparse.Namespace, command: str) -> int:
    """Times the kernel and its whole call, the committed ones, and the peers. CUDA only."""
    kernel, workload, _, _, committed, _ = subject
    direction, _ = KERNELS[kernel]
    library = subject._replace(launchers=committed_launchers({kernel: committed}), tile=committed)
    kernels = [alone(subject, subject.label + " (this)"), alone(library, library.label + " committed")]
    plan = Plan(command, [workload], [direction], kernels, "cuda", args.budget_ms, float("inf"), kernel=kernel)
    print(f"\nThe kernel alone ({counts.KERNEL_FLOPS}):")
    by_itself = bench(plan)
    assert by_itself.ceilings is not None
    print(roofline_text(subject, Ceilings(**by_itself.ceilings)))
    mine = by_itself.rows[0]
    if mine.roofline_share is not None:
        print(f"this kernel: {mine.tflops:.0f} TFLOP/s, {mine.roofline_share:.0%} of what the roofline allows")

    def whole(s: Subject, name: str) -> Implementation:
        return Implementation(name, flexattn.__version__, functools.partial(with_launchers, s.launchers))

    wanted = [p for p in peers() if any(fnmatch.fnmatch(p.name, pattern) for pattern in args.peers)]
    everyone = [whole(subject, "this"), whole(library, TRITON), *wanted]
    print(f"\nThe whole {direction} ({counts.FLOPS}):")
    done = bench(plan._replace(implementations=everyone, kernel=""))
    print(standing(by_itself.rows, done.rows))
    if args.out is not None:
        method = {**done.method, "kernel_flops": counts.KERNEL_FLOPS}
        record.write(args.out, done._replace(method=method, rows=[*by_itself.rows, *done.rows]))
    return PASSED if done.rows[0].us is not None else WRONG


def prune(subject: Subject, tiles: Sequence[Tile]) -> dict[Tile, list[str]]:
    """Returns the complaints about each tile after compiling it for the subject's architecture. Nothing runs."""
    groups = [compiled.requests(subject.kernel, subject.with_tile(t).launchers, subject.workload, subject.arch) for t in tiles]
    with progress_bar(len(groups), f"compiled for sm_{subject.arch}", "tile") as advance:
        made = compiled.reports(groups, advance)
    return {tile: compiled.complaints(subject.kernel, tile, subject.arch, answer) for tile, answer in zip(tiles, made, strict=True)}


def sweep(subjects: Sequence[Subject], args: argparse.Namespace, command: str) -> int:
    """Prunes tiles, checks the others (in the interpreter if there is no GPU), times them on a GPU, and proposes one."""
    first = subjects[0]
    options = {name: getattr(args, name) for name in FIELDS[:-1]}
    options["apart"] = None if args.apart is None else [int(args.apart)]
    tiles = candidates(first.kernel, first.committed, options)
    print(f"{first.kernel}: {len(tiles)} tiles on {', '.join(s.workload.name for s in subjects)}, compiled for sm_{first.arch}")
    judged = prune(first, tiles)
    left = [tile for tile, against in judged.items() if not against]
    for tile, against in judged.items():
        if against:
            print(f"  out: {tile_name(tile):20} {'; '.join(against)}")
    print(f"{len(left)} of {len(tiles)} are left: {', '.join(map(tile_name, left)) or 'none'}")
    if not torch.cuda.is_available():
        return _check_only(first, left)
    return _time_tiles(subjects, left, args.budget_ms, args.out, command)


def _check_only(subject: Subject, tiles: Sequence[Tile]) -> int:
    wrong = 0
    for tile in tiles:
        candidate = subject.with_tile(tile)
        _, failure = check(candidate, small_enough(subject.workload, tile), "cpu")
        wrong += failure is not None
        print(f"  {tile_name(tile):20} {'right, in the interpreter' if failure is None else f'WRONG: {failure}'}", flush=True)
    print("Not timed, so no row is proposed: no GPU here.")
    return WRONG if wrong else PASSED


def _time_tiles(subjects: Sequence[Subject], tiles: Sequence[Tile], budget_ms: float, out: Path | None, command: str) -> int:
    from flexattn.bench.rows import emit

    def for_workload(subject: Subject, name: str, workload: Workload) -> Implementation:
        return alone(subject, name)._replace(serves=lambda measured, direction: measured == workload)

    kernel = subjects[0].kernel
    implementations = []
    for subject in subjects:
        library = subject._replace(launchers=committed_launchers({})).with_tile(subject.committed)
        is_own_file = subject.launchers._replace(tiles={}) != library.launchers._replace(tiles={})
        tried = [subject.with_tile(tile) for tile in tiles if is_own_file or tile != subject.committed]
        named = {f"{library.label} committed": library, **{s.label: s for s in tried}}
        implementations += [for_workload(s, name, subject.workload) for name, s in named.items()]
    workloads, direction = [s.workload for s in subjects], KERNELS[kernel][0]
    done = bench(Plan(command, workloads, [direction], implementations, "cuda", budget_ms, float("inf"), out=out, kernel=kernel))
    print(f"\n{emit({out.name if out else 'this run': done})}")
    return WRONG if any(row.status == "wrong" for row in done.rows) else PASSED


def standing(kernel_rows: Sequence[Row], rows: Sequence[Row]) -> str:
    """In a sentence: against the committed kernel, and against the best peer."""
    this, committed = kernel_rows
    said = []
    if this.us is not None and committed.us is not None:
        said.append(f"The kernel takes {this.us / committed.us:.3f} of the committed one's time.")
    mine, *others = rows
    timed = [r for r in others if r.us is not None and r.implementation != TRITON]
    if mine.us is not None and timed:
        best = min(timed, key=lambda r: r.us or 0.0)
        assert best.us is not None
        said.append(f"The whole call takes {mine.us / best.us:.3f} of the time of the best peer, {best.implementation}.")
    return " ".join(said)


def overview() -> str:
    """Returns the list of kernels that can be played with, and how."""
    files = {k: f"kernels_triton/portable/{direction}.py" for k, (direction, _) in KERNELS.items()}
    lines = ["Kernels that can be checked and compiled, and on a GPU timed, with other tiles or from your copy of their file:"]
    lines += [f"  {kernel:14}{file}" for kernel, file in files.items()]
    lines += ["", "Kernels for sm_90, and two for sm_100, with --emulate:"]
    lines += [f"  {kernel:14}{played.kernel}" for kernel, played in EMULATED.items()]
    return "\n".join([*lines, "", EPILOGUE % {"prog": "python -m flexattn play"}]) + "options: python -m flexattn play --help"


def watch(arguments: Sequence[str], args: argparse.Namespace) -> int:
    """Runs `play` now and after each save, until interrupted; the status of the last run.

    This process imports torch once and nothing of the kernels, so that each run is a fork of it that imports them as they are now.
    """
    package = Path(flexattn.__file__).parent
    own = args.kernel_file or (Path(args.emulate.partition(":")[0]) if args.emulate else None)
    files = [*(package / "kernels_triton").rglob("*.py"), *([own] if own else [])]
    seen: dict[Path, str] = {}
    said: list[str] = []
    status = PASSED
    try:
        while True:
            now = {path: path.read_text("utf-8") for path in files if path.exists()}
            if now != seen:
                changed = [path for path in now if seen and now[path] != seen.get(path)]
                print(f"\n--- {', '.join(path.name for path in changed) or 'first run'} ---", flush=True)
                for path in changed:
                    print(
                        "\n".join(differences(seen.get(path, "").splitlines(), now[path].splitlines())[:MOST_DIFFERENCES]),
                        flush=True,
                    )
                before, seen = said, now
                status, said = in_a_fork(arguments)
                if before:
                    print("\nSince the last save:", *(differences(before, said) or ["nothing changed"]), sep="\n")
                print("watching; Ctrl-C ends it", flush=True)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return status


def differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lines that went, marked by -, and lines that came, by +."""
    found = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in found if not line.startswith("@@")]


def in_a_fork(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Runs `main` in a fork of this process; its status, and the lines that it printed, which are printed as they come."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = REFUSED
        try:
            os.close(ours)
            os.dup2(theirs, 1)
            os.close(theirs)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            status = main(arguments)
        except SystemExit as e:  # argparse's, for a file that does not parse
            status = int(e.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(theirs)
    lines = []
    with os.fdopen(ours, encoding="utf-8") as text:
        for line in text:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines
