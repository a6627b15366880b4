"""If there is no GPU, each file of these tests is imported, so that an error shows, and skipped as a whole.

Thousands of cases cannot run there, and collecting them takes seconds of each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch


class WithoutGpu(pytest.Module):
    def collect(self) -> NoReturn:
        _ = self.obj  # imports the file
        pytest.skip("needs a GPU, and torch.cuda.is_available() is False")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else WithoutGpu.from_parent(parent, path=module_path)
