"""Integrations with other libraries: one file or folder per ecosystem, imported on use. Other spellings are converted only here."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

_FUNCTIONS = {"triangle_attention": "cuequivariance"}  # functions that are attributes of this package too, by their module


def __dir__() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(__path__)})


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
        if name.startswith("_") or name not in __dir__():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
