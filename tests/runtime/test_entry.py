"""Kernels that are written as functions of named groups, and launched with flat arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import Field, WidePointer, fields_of, flattening
from flexattn.kernels_triton.runtime.launch import kernel, launch, recorded_launches
from tests.support.compiled_kernels import compile_beside

TILE = Tile(16, 16, 1, 1)


class Row(NamedTuple):
    ptr: WidePointer
    stride: int


class Factors(NamedTuple):
    scale: float
    shift_ptr: Any


class Arguments(NamedTuple):
    x: Row
    out: Row
    factors: Factors | None
    size: int


class Constants(NamedTuple):
    BLOCK: int


@triton.jit
def _shifted(x, factors: Factors):
    y = x * factors.scale
    if factors.shift_ptr is not None:
        y += tl.load(factors.shift_ptr)
    return y


@kernel
def _scale_kernel(args: Arguments, META: tl.constexpr):
    place = tl.program_id(0) * META.BLOCK + tl.arange(0, META.BLOCK)
    x = tl.load(args.x.ptr + place * args.x.stride, mask=place < args.size, other=0.0)
    tl.store(args.out.ptr + place * args.out.stride, _shifted(x, args.factors), mask=place < args.size)


def scaled(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    args = Arguments(Row(x, x.stride(0)), Row(out, out.stride(0)), factors, x.numel())
    launch(_scale_kernel, triton.cdiv(x.numel(), 16), x.device, TILE, (args, Constants(16)))
    return out


@pytest.mark.parametrize("step", [1, 3, 16])
@pytest.mark.parametrize("has_shift", [False, True])
def test_groups_reach_the_kernel_under_their_names(has_shift: bool, step: int, device: str) -> None:
    x = torch.randn(50 * step, device=device)[::step]
    shift = torch.tensor(0.5, device=device) if has_shift else None
    torch.testing.assert_close(scaled(x, Factors(3.0, shift)), 3 * x + (0.5 if has_shift else 0.0))


def test_fields_are_named_by_their_path() -> None:
    assert fields_of(Arguments) == (
        *(Field("x_ptr", True), Field("x_stride", False), Field("out_ptr", True), Field("out_stride", False)),
        *(Field("factors_scale", False), Field("factors_shift_ptr", False), Field("size", False)),
    )
    args = Arguments(Row(1, 2), Row(3, 4), Factors(0.5, None), 6)
    assert flattening(Arguments)(args) == (1, 2, 3, 4, 0.5, None, 6)
    assert flattening(Arguments)(args._replace(factors=None)) == (1, 2, 3, 4, None, None, 6)


def test_two_fields_of_one_name_are_refused() -> None:
    class Twice(NamedTuple):
        x: Row
        x_ptr: int

    Twice.__annotations__ = {"x": Row, "x_ptr": int}
    with pytest.raises(TypeError, match="Twice has several fields named x_ptr; rename"):
        fields_of(Twice)


class _Elsewhere:
    class Row(NamedTuple):
        ptr: WidePointer
        stride: int


class Mixed(NamedTuple):
    x: Row
    out: _Elsewhere.Row


def test_two_groups_of_one_name_are_refused() -> None:
    def _mixed_kernel(args: Mixed): ...

    _mixed_kernel.__annotations__ = {"args": Mixed}
    with pytest.raises(TypeError, match="different classes named Row; rename one"):
        kernel(_mixed_kernel)


def test_a_number_is_compiled_for_no_value() -> None:
    """A number in a tuple that is launched with is different: Triton ignores do_not_specialize for it."""
    with recorded_launches() as launches:
        for step in (1, 3, 16):
            scaled(torch.zeros(64 * step)[::step], Factors(3.0, None))
    first, *others = (request_for(launch, 90) for launch in launches)
    assert first.aligned == ["x_ptr", "out_ptr"]
    assert all(other == first for other in others)
    [report] = compile_beside([first])
    assert report.instructions["STG"] > 0
