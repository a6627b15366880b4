"""The graph of a plan's mods in plain torch: the results of its nodes, and checks that cuDNN accepts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cudnn
import torch
from torch import Tensor

from flexattn.kernels_cudnn.graphs import ALIGNMENT, Sdpa

_TORCH = {
    cudnn.data_type.FLOAT: torch.float32,
    cudnn.data_type.INT32: torch.int32,
    cudnn.data_type.HALF: torch.float16,
    cudnn.data_type.BFLOAT16: torch.bfloat16,
}


def _select(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    assert mask.dtype is torch.int32
    return torch.where(mask != 0, x, y)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


_NODES: dict[str, Callable[..., Tensor]] = {
    **{op: getattr(torch, op) for op in ("exp", "log", "abs", "neg", "sqrt", "rsqrt", "sin", "cos", "tan", "erf", "floor", "ceil")},
    **{op: getattr(torch, op) for op in ("reciprocal", "sigmoid", "tanh", "add", "sub", "mul", "logical_and", "logical_or")},
    **{f"cmp_{op}": getattr(torch, op if op != "neq" else "ne") for op in ("eq", "neq", "gt", "ge", "lt", "le")},
    "logical_not": torch.logical_not,
    "div": _divide,
    "mod": torch.fmod,
    "max": torch.maximum,
    "min": torch.minimum,
    "identity": lambda x: x,
    "binary_select": _select,
}


class Value:
    """A tensor of the graph, for one sequence: broadcastable to [heads, rows, columns]."""

    def __init__(self, value: Tensor, is_given: bool) -> None:
        self.value = value
        self.is_given = is_given  # not computed in the graph

    def set_data_type(self, data_type: Any) -> Value:
        self.value = self.value.to(_TORCH[data_type])
        return self


class ModGraph:
    """Sequence `b` of a plan. Rows and columns are whole tiles; cuDNN's loads return 0 past the real ones."""

    def __init__(self, x: Sdpa, buffers: dict[int, Tensor], b: int, rows: int, columns: int) -> None:
        self.x, self.buffers, self.b, self.rows, self.columns = x, buffers, b, rows, columns

    def tensor(
        self, *, name: str, dim: list[int], stride: list[int], data_type: Any, uid: int, is_pass_by_value: bool = False
    ) -> Any:
        buffer = self.buffers[uid]
        assert buffer.dtype is _TORCH[data_type], name
        assert list(buffer.shape) == dim, name
        assert all(n == 1 or have == said for n, have, said in zip(dim, buffer.stride(), stride, strict=True)), name
        assert is_pass_by_value == (buffer.device.type == "cpu" and dim == [1, 1, 1, 1]) or dim == [1, 1, 1, 1]
        if not is_pass_by_value:
            assert buffer.data_ptr() % ALIGNMENT == 0, name
        full = (self.x.batch, self.x.num_heads, self.x.len_q, self.x.len_kv)
        assert all(n in (1, most) for n, most in zip(dim, full, strict=True)), name
        part = buffer[self.b if dim[0] > 1 else 0]
        missing = [0 if part.shape[d] == 1 else size - part.shape[d] for d, size in ((2, self.columns), (1, self.rows))]
        part = part[:, : self.rows, : self.columns]
        return Value(torch.nn.functional.pad(part, (0, max(missing[0], 0), 0, max(missing[1], 0))), is_given=True)

    def gen_index(self, anchor: Value, *, axis: int, compute_data_type: Any) -> Value:
        assert compute_data_type is cudnn.data_type.INT32
        size = {2: self.rows, 3: self.columns}[axis]
        index = torch.arange(size, dtype=torch.int32)
        return Value(index[:, None] if axis == 2 else index, is_given=False)

    def __getattr__(self, op: str) -> Any:
        return partial(self._node, op)

    def _node(self, op: str, *operands: Value, compute_data_type: Any) -> Value:
        assert not operands[0].is_given, f"the first operand of {op} is not computed in the graph, and cuDNN has no plan for it"
        values = [x.value for x in operands]
        compute = _TORCH[compute_data_type]
        if op != "identity":
            taken = values[:2] if op == "binary_select" else values
            for x, value in zip(operands, taken, strict=False):
                wide = value.float() if x.is_given and value.dtype in (torch.float16, torch.bfloat16) else value
                assert wide.dtype is compute, f"{op} computes in {compute} and gets {value.dtype}"
            values = [value.float() if value.dtype in (torch.float16, torch.bfloat16) else value for value in values]
        return Value(_NODES[op](*values), is_given=False)
