"""The type of an autograd Function's context."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class FunctionContext(FunctionCtx):
    """torch's context, with the attributes that its backward and jvp read, and any attribute that a Function sets. Only a type."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: object) -> None: ...  # tensors or None, which torch checks

    def save_for_forward(self, *tensors: object) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
