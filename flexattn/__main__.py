"""`flexattn`, or `python -m flexattn`: the commands, each a module that is imported when it runs.

Neither this module nor the package imports torch for them, so that --help and a wrong name are answered at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NamedTuple

import flexattn
from flexattn.cli import program


class Command(NamedTuple):
    module: str  # with a function `main(arguments)` that returns the exit status
    does: str


USERS = {
    "demo": Command("flexattn.cli.demo", "attend to a packed batch of documents and check the results against a reference"),
    "explain": Command("flexattn.cli.explain", "say which kernels run a call, given by its shapes, and why"),
    "doctor": Command("flexattn.cli.doctor", "list what is installed, what is missing, and how to get it"),
    "bench": Command("flexattn.bench.command", "measure attention beside other libraries, on your shapes"),
    "fp8": Command("flexattn.bench.fp8", "measure how exact FP8 attention is, by recipe"),
    "build": Command("flexattn.cli.build", "compile the Triton kernels of a call ahead, for a GPU that need not be here"),
}
DEVELOPERS = {
    "play": Command("flexattn.bench.play", "check, compile and time a kernel, with other tiles or from your own file"),
    "host_cost": Command("flexattn.bench.host_cost", "measure what a warm call costs the host, and where the time goes"),
    "code_hashes": Command("flexattn.bench.code_hashes", "hash the code of the kernels, to see which a change leaves as they are"),
}
COMMANDS = USERS | DEVELOPERS

HELP = """usage: {program} [--help] [--version] COMMAND ...

Fused attention for PyTorch and JAX.

commands:
{users}

commands for developers of flexattn and of kernels:
{developers}

examples:
  {program} doctor                                       is all there, and what does attention() run on?
  {program} explain --q 2,4096,32,128 --mask causal      what runs this call?
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
        status: int = importlib.import_module(COMMANDS[name].module).main(arguments)
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
        "\n".join(f"  {name:12} {command.does}" for name, command in group.items()) for group in (USERS, DEVELOPERS)
    )
    return HELP.format(program=program(), users=users, developers=developers)


if __name__ == "__main__":
    sys.exit(main())
