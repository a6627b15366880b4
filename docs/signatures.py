"""An extension of griffe: a function decorated with `taking` is shown with all its arguments, as `help` shows it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Takes parameters and docstrings of decorated functions from the imported package. Functions for JAX need it installed."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any("taking" in str(decorator.value) for decorator in func.decorators):
            return
        try:
            function = getattr(importlib.import_module(func.module.canonical_path), func.name)
        except ImportError:
            return
        func.docstring = griffe.Docstring(inspect.getdoc(function) or "", parent=func)
        func.parameters = griffe.Parameters(*map(_parameter, inspect.signature(function).parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    is_required = parameter.default is parameter.empty
    return griffe.Parameter(
        parameter.name,
        annotation=None if parameter.annotation is parameter.empty else parameter.annotation,
        kind=griffe.ParameterKind(parameter.kind.description),
        default=None if is_required else repr(parameter.default),
    )
