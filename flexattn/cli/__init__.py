"""The commands of `flexattn`, which is also `python -m flexattn`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn


def program(command: str = "") -> str:
    """Returns a command as the user types it, for usage and errors."""
    is_script = os.path.basename(sys.argv[0]) in ("flexattn", "flexattn.exe")
    return " ".join(["flexattn" if is_script else "python -m flexattn", *([command] if command else [])])


class Parser(argparse.ArgumentParser):
    """A parser whose errors point to --help instead of listing the options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # The pattern of Python 3.14, which does not read the value of "--window -1,4" as an option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options and their values\n")
