"""The commands of `flexattn`, which is `python -m flexattn` too."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn


def program(command: str = "") -> str:
    """Returns how the user spells a command, for its usage and errors."""
    is_script = os.path.basename(sys.argv[0]) in ("flexattn", "flexattn.exe")
    return " ".join(["flexattn" if is_script else "python -m flexattn", *([command] if command else [])])


class Parser(argparse.ArgumentParser):
    """A parser whose errors say where the options are listed."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\n`{self.prog} --help` lists the options and what they take")
