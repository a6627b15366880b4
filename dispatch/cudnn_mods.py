"""A program for cuDNN's graphs: its mods as pointwise nodes, and the tensors and numbers that the nodes read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.mod_program import Program, evaluate
from flexattn.dispatch.neutral import keep
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.lowering import Mods, Recipe

INDICES = ("b", "h", "q_idx", "kv_idx")
_ALIGNMENT = 16  # bytes.


class Lowered(NamedTuple):
    mods: Mods
    recipes: tuple[Recipe, ...]  # the rules to make the inputs of the mods, in their order.


@functools.lru_cache(maxsize=256)
def lowered(program: Program, direction: Direction) -> Lowered | str:
    """Returns the program for cuDNN, or the reason if no graph can express it."""
    from flexattn.kernels_cudnn.lowering import NotExpressible, lower

    captures = [(c.name, c.dtype, c.ndim) for c in program.captures]
    gradient = program.derivative if direction == "backward" else None
    if direction == "backward" and program.score is not None and gradient is None:
        return "the score_mod was traced for a call without gradients, and has no backward"
    try:
        return Lowered(*lower(program.score, program.mask, gradient, captures))
    except NotExpressible as e:
        return f"{e}; use backend='triton'"


def mods_error(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns why the mods of `spec` cannot run on cuDNN, if they cannot."""
    from flexattn.kernels_cudnn.lowering import LONGEST

    program = spec.mods
    assert program is not None
    if direction == "backward" and any(program.tensor_needs_grad):
        names = ", ".join(c.name for c in program.captures if c.needs_grad)
        return f"cuDNN computes no gradient of a score_mod's captures, and {names} requires one; detach it, or use backend='triton'"
    if direction == "backward" and spec.needs_bias_grad:
        return "with a score_mod or mask_mod, cuDNN computes no gradient of a bias; detach the bias, or use backend='triton'"
    if max(spec.length_q, spec.length_kv) > LONGEST:
        return f"with a score_mod or mask_mod, cuDNN supports up to {LONGEST} tokens in a sequence; use backend='triton'"
    result = lowered(program, direction)
    return result if isinstance(result, str) else None


def reads_tables(program: Program) -> bool:
    """Returns whether the mods read a tensor [queries, keys]. A plan for rounded-up sizes would need a copy of it."""
    result = lowered(program, "forward")
    return isinstance(result, Lowered) and any(recipe.read is not None for recipe in result.recipes)


@torch.no_grad()
def mod_inputs(
    program: Program, recipes: Sequence[Recipe], x: Operands, num_heads: int, sizes: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """Returns the inputs of the mods: numbers as 0-d tensors on the CPU, others as [b | 1, h | 1, sq | 1, skv | 1] for `sizes`.

    It does not wait for the device. On the meta device, the inputs have only shapes, strides and dtypes.
    """
    batch, len_q, len_kv = sizes
    full = (batch, num_heads, len_q, len_kv)
    captures = program.inputs(x.mod_tensors, x.mod_numbers)
    return tuple(_mod_input(recipe, captures, full, x.q.device) for recipe in recipes)


def without_data(t: Tensor) -> Tensor:
    """Returns a captured tensor on the meta device, with the same offset from 16-byte boundaries."""
    start = t.data_ptr() % _ALIGNMENT // t.element_size()
    span = start + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return torch.empty(span if t.numel() else 0, dtype=t.dtype, device="meta").as_strided(t.shape, t.stride(), start)


def _mod_input(recipe: Recipe, captures: dict[str, Any], full: tuple[int, ...], device: torch.device) -> Tensor:
    shape = tuple(size if spanned else 1 for size, spanned in zip(full, recipe.spans, strict=True))
    dtype = torch.float32 if recipe.kind == "float" else torch.int32
    if recipe.constant is not None:
        return _constant(recipe.constant, dtype)
    if recipe.read is not None:
        return _readable(_aligned_view(captures[recipe.read], recipe, shape), dtype)
    assert recipe.graph is not None
    names = {str(node.target) for node in recipe.graph.nodes if node.op == "placeholder"}
    if recipe.is_host:
        return evaluate(recipe.graph, {name: captures[name] for name in names}, torch.float32).to(dtype)  # type: ignore[no-any-return]
    batch, _, rows, columns = recipe.spans
    is_spread = columns or (batch and not rows)
    target = _empty((*shape[:3], full[3]) if is_spread else shape, dtype, device)
    # cuDNN 9.19 reads [., ., 1, skv] wrongly in a backward, and [b, h, 1, 1] in a forward (seen on an NVIDIA H200). It reads the
    # same memory correctly as [., ., sq, skv], with a stride of 0 between queries.
    view = target.expand(*shape[:2], *full[2:]) if is_spread else target
    if device.type == "meta":
        return view
    inputs = {name: captures[name] for name in names if name in captures}
    for dim, name in enumerate(INDICES):
        if name in names:
            inputs[name] = torch.arange(full[dim], device=device).reshape(*(-1 if d == dim else 1 for d in range(4)))
    target.copy_(evaluate(recipe.graph, inputs, torch.float32))
    return view


@keep(1024)
def _constant(value: float | int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def _aligned_view(t: Tensor, recipe: Recipe, shape: tuple[int, ...]) -> Tensor:
    """Returns a capture as [b | 1, h | 1, sq, skv], padded with 0, because a read outside of it gives 0."""
    dims: list[str] = []
    for index in recipe.indices:
        if isinstance(index, str):
            dims.append(index)
            continue
        dim, size = len(dims), t.shape[len(dims)]
        index = index + size if index < 0 else index
        t = t.select(dim, index) if 0 <= index < size else t.new_zeros((*t.shape[:dim], *t.shape[dim + 1 :]))
    t = t.permute(*(dims.index(name) for name in INDICES if name in dims))
    for dim, name in enumerate(INDICES):
        if name not in dims:
            t = t.unsqueeze(dim)
            continue
        t = t.narrow(dim, 0, min(t.shape[dim], shape[dim]))
    missing = [size - have for size, have in zip(shape, t.shape, strict=True)]
    if any(missing):
        t = torch.nn.functional.pad(t, [n for short in reversed(missing) for n in (0, short)])
    return t


def _readable(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `t`, or a copy that cuDNN can read: contiguous rows on 16-byte boundaries, in a dtype that it supports."""
    result_dtype = t.dtype if t.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32 else dtype
    unit = _ALIGNMENT // t.element_size()
    steps = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    fits = all(n == 1 or (step > 0 and step % unit == 0) for n, step in steps) and t.stride(-1) == 1
    start = t.storage_offset() * t.element_size() if t.device.type == "meta" else t.data_ptr()
    if t.dtype is result_dtype and fits and start % _ALIGNMENT == 0:
        return _with_plain_strides(t)
    return _empty(tuple(t.shape), result_dtype, t.device).copy_(t)


def _with_plain_strides(t: Tensor) -> Tensor:
    """Returns `t` with the strides of a compact tensor in dims of size 1. Such strides are never used, and one plan serves all."""
    strides = list(t.stride())
    for dim in (2, 1, 0):
        if t.shape[dim] == 1:
            strides[dim] = t.shape[dim + 1] * strides[dim + 1]
    return t.as_strided(t.shape, strides)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor whose rows begin on 16-byte boundaries. With a single key, heads do instead of rows."""
    unit = _ALIGNMENT // dtype.itemsize
    _, heads, rows, columns = shape
    row = -(-columns // unit) * unit if columns > 1 else 1
    head = rows * row if columns > 1 or rows == 1 else -(-rows // unit) * unit
    return torch.empty_strided(shape, (heads * head, head, row, 1), dtype=dtype, device=device)
