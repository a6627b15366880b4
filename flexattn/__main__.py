"""`python -m flexattn demo`: the library's main job, checked and timed on this machine."""

from __future__ import annotations

import argparse
import sys

import flexattn
from flexattn.dispatch import options


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flexattn", description=__doc__)
    parser.add_argument("--version", action="version", version=flexattn.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="attention over a packed batch of documents, checked against the reference")
    demo_parser.add_argument("--tokens", type=int, metavar="N", help="tokens to pack (default: 65536 with a GPU, 6144 without)")
    demo_parser.add_argument("--backend", choices=options.REQUESTS, default="auto", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.tokens is not None and args.tokens < 1:
        demo_parser.error(f"--tokens is {args.tokens}; accepted: 1 or more")
    try:
        from flexattn import demo
    except ModuleNotFoundError as e:
        if e.name != "rich":
            raise
        demo_parser.error("the demo needs rich, which is not installed: pip install 'flexattn[demo]'")
    try:
        return demo.run(args.tokens, args.backend)
    except flexattn.BackendError as e:
        demo_parser.exit(1, f"{e}\n")


if __name__ == "__main__":
    sys.exit(main())
