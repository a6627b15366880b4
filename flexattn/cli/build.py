"""`python -m flexattn build`: compiles the Triton kernels of a call into a directory to ship, if needed for an absent GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flexattn import kept_files
from flexattn.build_ahead import build_missing, recorded
from flexattn.cli import explain as question

EXAMPLES = """examples:
  %(prog)s --q 2,4096,32,128 --kv-heads 8 --mask causal --capability 9.0 --out kernels
  FLEXATTN_KERNELS=kernels python train.py
"""


def main(arguments: Sequence[str]) -> int:
    parser = question.make_parser("build", EXAMPLES, "--q SHAPE --out DIR")
    add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        return run(args)
    except (ImportError, OSError, TypeError, ValueError) as e:
        parser.error(str(e))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    question.add_arguments(parser)
    parser.description = (
        "Compiles the Triton kernels of a call. Names and defaults are those of flexattn.attention().\n"
        "Kernels depend on the magnitude of lengths, and not on the batch size. Run it once for each kind of call.\n"
        "On the machine that runs them, set FLEXATTN_KERNELS to the directory."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory; kernels that are there stay")
    parser.add_argument(
        "--workers", type=question.positive, metavar="N", help="kernels compiled at a time (default: one for each core)"
    )


def run(args: argparse.Namespace) -> int:
    """Builds the missing kernels and prints the result. Raises ValueError if the Triton backend cannot run the call."""
    x, _, spec = question.parse(args)
    if spec.capability is None:
        raise ValueError("--capability is missing, and this machine has no GPU; pass the GPU's, such as 9.0")
    launches = recorded(spec, x, ("forward", "backward") if spec.needs_grad else ("forward",))
    built = build_missing(launches, spec.capability, args.out, args.workers, "flexattn build")
    kept_files.let_all_read(args.out, ".kernel")
    names = sorted({launch.kernel.fn.__name__ for launch in launches})
    print(f"{built} built, {len(launches) - built} there already, in {args.out}: {', '.join(names)}")  # noqa: T201
    return 0
