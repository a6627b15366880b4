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

    def add_target(self) -> None:
        """Adds --as, whose value `imitate` takes."""
        self.add_argument(
            "--as",
            dest="target",
            metavar="sm_80",
            help="compile for an older target, sm_80, sm_86, sm_89 or sm_120, and run that code on the GPU at hand",
        )

    def imitate(self, target: str | None) -> int | None:
        """Makes this process, and bench processes that it starts, imitate the GPU that --as or FLEXATTN_AS names.

        Returns its compute capability, or None without one. If there is no GPU, only the return value shows it.
        """
        from flexattn.dispatch import options

        target = target or options.imitated_target()
        if target is None:
            return None
        from flexattn.kernels_triton.runtime import other_target

        os.environ["FLEXATTN_AS"] = target
        try:
            return other_target.imitate_named(target)
        except (ValueError, RuntimeError) as error:
            self.error(f"--as {target}: {error}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options and their values\n")
