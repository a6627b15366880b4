"""The families of kernels that run calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flexattn.kernels_triton import families


@contextmanager
def recorded_families() -> Iterator[set[str]]:
    """The names of the families that are chosen in it."""
    names: set[str] = set()
    choose = families.choose

    def noted(call: Any, policy: Any) -> Any:
        choice = choose(call, policy)
        names.add(choice.family.name)
        return choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "choose", noted)
        yield names
