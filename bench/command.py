"""`python -m flexattn bench`: compares attention with other libraries, on your shapes, and checks every result before timing it."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import flexattn
from flexattn.bench import mma, record, tables
from flexattn.bench.implementations import EAGER, NAMED, TRITON, Implementation, ours
from flexattn.bench.model_tables import model_tables, own_table
from flexattn.bench.peers import FLEX, FLEX_MODE, peers
from flexattn.bench.run import Plan, compile_in_processes, compile_only, run
from flexattn.bench.shapes import DIRECTIONS, OLDER, PRESETS, PUBLISHED, WORKLOADS, Workload, is_unseen, select
from flexattn.cli import Parser, program

BUDGET_MS = {"cuda": 100.0, "cpu": 200.0}
RIVAL = 1.25  # largest time of a rival, that of the fastest peer being 1
DEFAULT_PRESET = {"cuda": "quick", "cpu": "tiny"}
ON_A_CPU = (
    "No GPU here: flexattn runs its eager backend, and the peers run their CPU code. The times mean something only beside each "
    "other, on this machine."
)
SHAPES = """shapes: b sequences of s tokens (queries/keys), h heads (of q/of k and v), head dim d (of q and k/of v);
  NAME-evened has about the tokens and the work of the packed shape NAME, in sequences of one length;
  models-NAME is a published model's, with its source in bench/model_shapes.py; no tile and no rule is chosen by an unseen one"""
EPILOGUE = """examples:
  %(prog)s --list                                            shapes, presets and peers
  %(prog)s --preset quick                                    FlashAttention's sweep at 4096 tokens
  %(prog)s --shapes llama3-8b-s8192 --directions both --peers 'SDPA*' --out result.json
  %(prog)s --from result.json --plots plots --csv result.csv
  %(prog)s --compare before.json after.json
"""


def make_parser() -> Parser:
    parser = Parser(
        prog=program("bench"),
        usage="%(prog)s [OPTION ...]",
        description="Measures attention beside other libraries, on your shapes. Every result is checked before it is timed.",
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--preset", choices=PRESETS, metavar="NAME", help="shapes by purpose, as in --list (default: quick; without a GPU tiny)"
    )
    what.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="shapes by name or pattern, as 'sweep-d64-*', instead of a preset"
    )
    what.add_argument(
        "--seqlens", type=int, nargs="+", metavar="S", help="of the chosen shapes, those whose longest sequence is one of these"
    )
    what.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=["forward", "backward"])
    what.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="of flexattn: triton, cudnn, score_mod, eager, sm_90, or auto, which selects (default: all; auto for preset models)",
    )
    what.add_argument(
        "--peers", nargs="*", metavar="NAME", default=["*"], help="by name or pattern; none to measure flexattn alone"
    )
    what.add_argument(
        "--rivals",
        type=Path,
        nargs="+",
        metavar="FILE",
        help=f"leave out peers that took more than {RIVAL} times as long as the fastest peer of a cell in these results",
    )
    what.add_argument("--mma-tiles", action="store_true", help="also candidates of tiles of the kernels for mma.sync")
    what.add_argument(
        "--flex-mode", default=FLEX_MODE, help="torch.compile's mode for FlexAttention, as max-autotune-no-cudagraphs"
    )
    how = parser.add_argument_group("how")
    parser.add_target()
    how.add_argument("--check", action="store_true", help="only check the results, and time nothing")
    how.add_argument("--budget-ms", type=float, help="device time for each implementation in each cell (default: 100)")
    how.add_argument(
        "--budget-s", type=float, default=float("inf"), help="for the whole run; what does not fit is recorded as left out"
    )
    how.add_argument(
        "--compile-processes", type=int, default=0, metavar="N", help="first compile everything in N processes at once"
    )
    how.add_argument("--compile-only", action="store_true", help="compile into the caches on disk, and measure nothing")
    how.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the result, cell by cell")
    show = parser.add_argument_group("instead of measuring")
    show.add_argument("--list", action="store_true", help="list the shapes, presets and implementations")
    show.add_argument("--from", dest="source", type=Path, nargs="+", metavar="FILE", help="show results that were written before")
    show.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two results side by side, with ratios")
    shown = parser.add_argument_group("files, of what was measured or is given with --from")
    shown.add_argument("--csv", type=Path, metavar="FILE")
    shown.add_argument("--plots", type=Path, metavar="FOLDER", help="SVG files")
    pages = parser.add_argument_group("for maintainers of flexattn: its tables and pages, from bench/results")
    pages.add_argument(
        "--emit-rows", type=Path, nargs="+", metavar="FILE", help="print rows of tile tables and heuristics, by results"
    )
    pages.add_argument(
        "--regret", type=Path, nargs="+", metavar="FILE", help="print what backend auto picks, beside the fastest that results have"
    )
    pages.add_argument("--page", type=Path, metavar="FILE.md", help="write docs/performance.md and its plots")
    pages.add_argument("--readme", type=Path, metavar="README.md", help="rewrite the README's section that results make")
    pages.add_argument("--picture", type=Path, metavar="FILE.svg", help="write the README's picture, docs/speed.svg")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. The exit status is 1 if a result is wrong or flexattn's first backend refuses a shape."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    parser.imitate(args.target)
    try:
        if args.list:
            print(listing())
            return 0
        if args.compare:
            a, b = map(record.read, args.compare)
            print(tables.compare(a, b, [str(path) for path in args.compare]))
            return 0
        if args.emit_rows:
            from flexattn.bench.rows import emit

            print(emit({path.name: record.read(path) for path in args.emit_rows}))
            return 0
        if args.regret:
            from flexattn.bench import regret

            print("\n".join(regret.text(path.name, record.read(path)) for path in args.regret))
            return 0
        if args.page or args.readme or args.picture:
            return _write_pages(args)
        if args.source:
            return _show({path.name: record.read(path) for path in args.source}, args)
        plan = _plan(args, arguments)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    if args.compile_only:
        if args.compile_processes:
            _compile_in_processes(plan, args, args.budget_s)
        else:
            compile_only(plan)
        return 0
    return _measure(plan, args)


def _plan(args: argparse.Namespace, arguments: Sequence[str]) -> Plan:
    """Returns the plan of the options. Raises ValueError if a name matches nothing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workloads = select(args.shapes or [args.preset or DEFAULT_PRESET[device]])
    if args.seqlens:
        workloads = [w for w in workloads if w.seqlen_kv in args.seqlens]
    if not workloads:
        raise ValueError(f"none of the chosen shapes has a longest sequence of {', '.join(map(str, args.seqlens))}")
    return Plan(
        command=record.command_line("flexattn bench", arguments, args.out),
        workloads=workloads,
        directions=[d for d in DIRECTIONS if d in args.directions],
        implementations=_implementations(args, device, workloads),
        device=device,
        budget_ms=args.budget_ms or BUDGET_MS[device],
        budget_s=args.budget_s,
        only_check=args.check,
        out=args.out,
    )


def _measure(plan: Plan, args: argparse.Namespace) -> int:
    print(f"{record.device_facts()['name']}; {', '.join(f'{name} {text}' for name, text in record.versions().items() if text)}")
    if plan.device == "cpu" and not args.check:
        print(ON_A_CPU)
    if args.compile_processes:
        plan = plan._replace(budget_s=plan.budget_s - _compile_in_processes(plan, args, args.budget_s / 2))
    done = run(plan, show=_printer())
    _show({args.out.name if args.out else "this run": done}, args)
    return int(
        any(r.status == "wrong" or (r.implementation in (TRITON, EAGER, tables.AUTO) and r.status == "refused") for r in done.rows)
    )


def _compile_in_processes(plan: Plan, args: argparse.Namespace, most: float) -> float:
    """Compiles the plan's cells in processes, for `most` seconds; returns how many it took."""
    backends = [
        i.name.removeprefix("flexattn ") for i in plan.implementations if tables.is_ours(i.name) and not tables.is_candidate(i.name)
    ]
    same = ["--directions", *plan.directions, "--backends", *backends, "--peers", *args.peers]
    same += ["--rivals", *map(str, args.rivals)] if args.rivals else []
    same += ["--mma-tiles"] * args.mma_tiles
    names = [w.name for w in plan.workloads]
    seconds = compile_in_processes([*same, "--flex-mode", args.flex_mode], names, args.compile_processes, most)
    print(f"compiled in {args.compile_processes} processes: {seconds:.0f} s")
    return seconds


def _implementations(args: argparse.Namespace, device: str, workloads: Sequence[Workload]) -> list[Implementation]:
    """Returns the chosen implementations. Raises ValueError if a pattern matches none."""
    everyone = {i.name: i for i in (*ours(device), *mma.implementations(device), *peers(args.flex_mode))}
    chosen: dict[str, Implementation] = {}
    backends = args.backends or (["auto"] if all(w.group == PUBLISHED for w in workloads) else ["*"])
    for patterns, prefix in ((backends, "flexattn "), (args.peers, "")):
        pool = [name for name in everyone if tables.is_ours(name) == bool(prefix)]
        for pattern in patterns:
            found = [n for n in fnmatch.filter(pool, prefix + pattern) if n not in NAMED or n == prefix + pattern]
            if not found:
                accepted = ", ".join(name.removeprefix(prefix) for name in pool)
                raise ValueError(f"nothing to measure on {device} is called {pattern!r}; accepted: {accepted}")
            chosen |= {name: everyone[name] for name in found}
    if args.preset == OLDER and FLEX in chosen:
        chosen[FLEX] = chosen[FLEX]._replace(serves=mma.is_beside_flex)
    if args.rivals:
        earlier = [record.read(path) for path in args.rivals]
        chosen = {name: i if tables.is_ours(name) else _as_rival(i, earlier) for name, i in chosen.items()}
    if args.mma_tiles:
        chosen |= {i.name: i for i in mma.tile_implementations(flexattn.__version__)}
    return list(chosen.values())


def _as_rival(peer: Implementation, records: Sequence[record.Record]) -> Implementation:
    """Returns the peer without the cells in which the records show it far behind the fastest peer."""
    is_rival: dict[tuple[str, str], bool] = {}  # by cell
    for earlier in records:
        for cell in earlier.cells():
            times = {name: row.us for name, row in earlier.of(*cell).items() if row.us is not None and not tables.is_ours(name)}
            if peer.name in times:
                is_rival[cell] = is_rival.get(cell, False) or times[peer.name] <= RIVAL * min(times.values())

    def serves(workload: Workload, direction: str) -> bool:
        return peer.serves(workload, direction) and is_rival.get((workload.name, direction), True)

    return peer._replace(serves=serves)


def _printer() -> Callable[[str], object]:
    try:
        from tqdm import tqdm
    except ImportError:
        return print
    return lambda text: tqdm.write(text)


def _show(records: dict[str, record.Record], args: argparse.Namespace) -> int:
    """Prints the tables, and writes the files that the options name."""
    for name, shown in records.items():
        shown = shown._replace(rows=[row for row in shown.rows if not tables.is_candidate(row.implementation)])
        print("\n".join(["", *([name, tables.headline(shown)] if args.source else []), _ceilings(shown)]))
        shown_tables = [*tables.tables(shown), *model_tables(shown), *own_table(shown), *tables.verdict(shown)]
        print("\n\n".join(["", *(t.text() for t in shown_tables)]))
        if shown.left_out:
            print(f"left out: {len(shown.left_out)} cells, as {shown.left_out[0]['reason']}")
        if not shown.complete:
            print("This run did not measure all that it set out to.")
    for path in filter(None, (args.csv, args.plots)):
        [only] = records.values() if len(records) == 1 else [None]
        if only is None:
            raise ValueError(f"--csv and --plots show one result, and --from names {len(records)}")
        if path == args.csv:
            record.write_csv(path, only)
        else:
            from flexattn.bench import charts

            charts.write(path, only)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _write_pages(args: argparse.Namespace) -> int:
    from flexattn.bench import page, picture

    if args.page:
        page.write(args.page)
    if args.readme:
        args.readme.write_text(page.with_readme_section(args.readme.read_text("utf-8"), page.sources()), "utf-8")
    if args.picture:
        args.picture.write_text(picture.svg(page.sources().main), "utf-8")
    return 0


def _ceilings(shown: record.Record) -> str:
    if shown.ceilings is None and any(r.us is not None for r in shown.rows):
        return "Timed without a matrix product to compare with."
    if shown.ceilings is None:
        return "Not timed: " + ("memory alone." if any(r.peak_mib is not None for r in shown.rows) else "checked alone.")
    found = shown.ceilings
    product = f"matrix product {found['matmul_size']}^3 {found['matmul_dtype']}: {found['matmul_tflops']:.4g} TFLOP/s"
    copy = f"; copy: {found['copy_gb_s']:.0f} GB/s" if found.get("copy_gb_s") is not None else ""
    return f"{product}{copy}; TFLOP/s, share of the matrix product's; {shown.method.get('flops', 'no FLOPs were counted')}"


def listing() -> str:
    """The shapes, presets and implementations."""
    presets = [f"  {name:12} {' '.join(patterns)}" for name, patterns in PRESETS.items()]
    shapes = [f"  {w.name:26} {w}{' (unseen)' if is_unseen(w) else ''}" for w in WORKLOADS.values()]
    names = [i.name for i in (*ours("cuda"), *mma.implementations("cuda"), *ours("cpu"), *peers())]
    return "\n".join(["presets", *presets, "", SHAPES, *shapes, "", "flexattn and its peers", f"  {', '.join(names)}"])
