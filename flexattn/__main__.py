"""`python -m flexattn`: the main job on this machine, which backend runs a call, what is installed, benchmark and playground."""

from __future__ import annotations

import argparse
import importlib
import sys

import flexattn
from flexattn.cli import build as build_ahead
from flexattn.cli import doctor
from flexattn.cli import explain as question
from flexattn.dispatch import options

TOOLS = {
    "bench": ("flexattn.bench.command", "attention measured beside its peers, on your shapes"),
    "code_hashes": ("flexattn.bench.code_hashes", "hashes of the kernels' PTX and SASS, and which a change left as they were"),
    "fp8": ("flexattn.bench.fp8", "how exact FP8 attention is, by recipe"),
    "host_cost": ("flexattn.bench.host_cost", "what a warm call costs the host, and where it goes, beside its peers"),
    "play": ("flexattn.bench.play", "a kernel checked, compiled and timed: with other tiles, or your own file"),
}
"""Subcommands that parse their own arguments: (module, help)."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in TOOLS:
        module, _ = TOOLS[argv[0]]
        status: int = importlib.import_module(module).main(argv[1:])
        return status
    parser = argparse.ArgumentParser(prog="python -m flexattn", description=__doc__)
    parser.add_argument("--version", action="version", version=flexattn.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="attention over a packed batch of documents, checked against the reference")
    demo_parser.add_argument("--tokens", type=int, metavar="N", help="tokens to pack (default: 65536 with a GPU, 6144 without)")
    demo_parser.add_argument("--backend", choices=options.REQUESTS, default="auto", help="default: %(default)s")
    for name, (_, text) in TOOLS.items():
        commands.add_parser(name, help=text)
    explain_parser = commands.add_parser("explain", help="which backend runs a call, why, and what is in the way of the others")
    question.add_arguments(explain_parser)
    explain_parser.add_argument("--build", action="store_true", help="build what would run first: the answer is then final")
    explain_parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the keys that each query sees, as PNG, SVG or PDF; sequences of thd are of equal lengths, a bias is left out",
    )
    build_parser = commands.add_parser("build", help="the Triton kernels of a call, compiled for a GPU that need not be here")
    build_ahead.add_arguments(build_parser)
    commands.add_parser("doctor", help="what is installed of all that flexattn can use, and how to get what is missing")
    args = parser.parse_args(argv)
    if args.command == "explain":
        return _explain(args, explain_parser)
    if args.command == "build":
        try:
            return build_ahead.run(args)
        except (TypeError, ValueError) as e:
            build_parser.error(str(e))
    if args.command == "doctor":
        return doctor.run()
    if args.tokens is not None and args.tokens < 1:
        demo_parser.error(f"--tokens is {args.tokens}; accepted: 1 or more")
    try:
        from flexattn.cli import demo
    except ModuleNotFoundError as e:
        if e.name != "rich":
            raise
        demo_parser.error("the demo needs rich, which is not installed: pip install 'flexattn[demo]'")
    try:
        return demo.run(args.tokens, args.backend)
    except flexattn.BackendError as e:
        demo_parser.exit(1, f"{e}\n")


def _explain(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        print(question.answer(args))  # noqa: T201
        if args.source:
            print(question.source(args))  # noqa: T201
        if args.picture is not None:
            question.draw(args)
    except (ImportError, TypeError, ValueError) as e:
        parser.error(str(e))
    except flexattn.BackendError as e:
        parser.exit(1, f"{e}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
