"""The commands of `flexattn`, which is `python -m flexattn` too."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn


def program(command: str = "") -> str:
    """Returns how the user spells a command, for its usage and errors."""
    is_script = os.path.basename(sys.argv[0]) in ("flexattn", "flexattn.exe")
    return " ".join(["flexattn" if is_script else "python -m flexattn", *([command] if command else [])])


class Parser(argparse.ArgumentParser):
    """A parser whose errors say where the options are listed, and do not list them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # That of Python 3.14, for which the value of "--window -1,4" is no option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options and what they take\n")
