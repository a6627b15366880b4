"""`python -m flexattn replay`: runs a call again whose inputs a process with FLEXATTN_DUMP has written to a file."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn import ops
from flexattn.cli import Parser, program
from flexattn.dispatch.describe import describe
from flexattn.dispatch.spec import REQUESTS
from flexattn.watch import OPERATORS, copied

EXAMPLES = """examples:
  %(prog)s dumps/flexattn-4711-3.pt
  %(prog)s dumps/flexattn-4711-3.pt --backend eager --device cpu
"""
INCOMING = len(ops.Incoming._fields)  # arguments of the backward before the call's own


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if the call runs, 1 if it raises."""
    parser = Parser(prog=program("replay"), epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a file of FLEXATTN_DUMP")
    parser.add_argument("--device", help="where to run; default: the device of the call, or the CPU if it is missing")
    parser.add_argument("--backend", choices=REQUESTS, help="run this backend instead of the call's own request")
    given = parser.parse_args(arguments)
    try:
        saved = torch.load(given.file, map_location="cpu", weights_only=True)
        operator = saved["operator"]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        parser.error(f"{given.file} cannot be read as a file of FLEXATTN_DUMP: {error}")
    if operator not in OPERATORS:
        parser.error(f"{given.file} has the operator {operator!r}; accepted: {', '.join(OPERATORS)}")
    device = given.device or (saved["device"] if torch.cuda.is_available() else "cpu")
    values = copied(saved["arguments"], device)
    start = INCOMING if operator == "attention_backward" else 0
    x, settings = ops.call_of(tuple(values[start:]))
    settings = settings._replace(backend=given.backend or settings.backend)
    variables = " ".join(f"{name}={value}" for name, value in saved["variables"].items())
    _say(f"{operator} on {device}: {describe(ops.spec_to_run(x, settings), x)}")
    _say(f"written by flexattn {saved['version']} with torch {saved['torch']} and {variables}")
    _say(f"it failed with {saved['error']}")
    try:
        results = getattr(ops, f"{operator}_implementation")(*values[:start], *x, *settings)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        _say(f"it fails again with {type(error).__name__}: {error}")
        return 1
    finite = all(bool(torch.isfinite(t.float()).all()) for t in results if isinstance(t, Tensor) and t.is_floating_point())
    _say(f"it runs now; its results are {'finite' if finite else 'not all finite'}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
