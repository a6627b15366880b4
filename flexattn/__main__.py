"""`flexattn`, or `python -m flexattn`: the commands, each a module that is imported when it runs.

Neither this module nor the package imports torch for them, so that --help and a wrong name are answered at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import NamedTuple

import flexattn
from flexattn.cli import program


class Command(NamedTuple):
    module: str  # with a function `main(arguments)` that returns the exit status
    summary: str


USERS = {
    "demo": Command("flexattn.cli.demo", "attend to a packed batch of documents and check the results against a reference"),
    "explain": Command("flexattn.cli.explain", "say which kernels run a call, given by its shapes, and why"),
    "doctor": Command("flexattn.cli.doctor", "list installed and missing packages, and how to get them"),
    "verify": Command("flexattn.cli.verify", "check the kernels on your GPU, and time a few calls"),
    "bench": Command("flexattn.bench.command", "compare attention with other libraries, on your shapes"),
    "fp8": Command("flexattn.bench.fp8", "measure the errors of FP8 attention, by recipe"),
    "build": Command("flexattn.cli.build", "compile the Triton kernels of a call ahead, also for a GPU that is not here"),
    "replay": Command("flexattn.cli.replay", "run a call again whose inputs FLEXATTN_DUMP has kept"),
}
DEVELOPERS = {
    "play": Command("flexattn.bench.play", "check, compile and time a kernel, with other tiles or from your own file"),
    "host_cost": Command("flexattn.bench.host_cost", "measure the host time of a warm call, and each part of it"),
    "code_hashes": Command("flexattn.bench.code_hashes", "hash the code of the kernels, to see which kernels a change affects"),
}
COMMANDS = USERS | DEVELOPERS

HELP = """usage: {program} [--help] [--version] COMMAND ...

Fused attention for PyTorch and JAX.

commands:
{users}

commands for developers of flexattn and of kernels:
{developers}

examples:
  {program} doctor                                       is anything missing, and which backend runs?
  {program} explain --q 2,4096,32,128 --mask causal      which kernels run this call?
  {program} bench --shapes 'llama3-8b-*' --peers 'SDPA*'

`{program} COMMAND --help` lists the options of a command."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(help_text())  # noqa: T201
        return 0
    if name == "--version":
        print(flexattn.__version__)  # noqa: T201
        return 0
    if name in COMMANDS:
        try:
            status: int = importlib.import_module(COMMANDS[name].module).main(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            return 1
        return status
    if not name:
        print(help_text(), file=sys.stderr)  # noqa: T201
        return 2
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"accepted: {', '.join(COMMANDS)}"
    text = f"{program()}: error: there is no command {name!r}; {hint}\n`{program()} --help` lists the commands"
    print(text, file=sys.stderr)  # noqa: T201
    return 2


def help_text() -> str:
    """Returns the text of --help."""
    users, developers = (
        "\n".join(f"  {name:12} {command.summary}" for name, command in group.items()) for group in (USERS, DEVELOPERS)
    )
    return HELP.format(program=program(), users=users, developers=developers)


if __name__ == "__main__":
    sys.exit(main())
