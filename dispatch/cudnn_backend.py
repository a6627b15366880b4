"""The cuDNN backend: its name is known and its answer honest, so that asking for it says what to do instead."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Direction, Operands

_REASON = 'this version of flexattn has no cuDNN graphs; use backend="triton" or backend="auto"'


def support_error(spec: AttentionSpec, direction: Direction) -> str | None:
    return _REASON


def forward(spec: AttentionSpec, x: Operands) -> NoReturn:
    raise NotImplementedError(_REASON)


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> NoReturn:
    raise NotImplementedError(_REASON)
