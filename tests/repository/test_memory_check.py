"""The check of kernels' accesses finds one element too many, read, written and added to, and nothing in correct kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.runtime.interpreter import INTERPRETED
from tests.support.memory_check import checked_memory

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer checks kernels that are compiled")


@triton.jit
def _shifted_copy(x_ptr, y_ptr, sum_ptr, from_x, from_y, from_sum, COUNT: tl.constexpr):
    n = tl.arange(0, COUNT)
    x = tl.load(x_ptr + from_x + n)
    tl.store(y_ptr + from_y + n, x)
    tl.atomic_add(sum_ptr + from_sum + n, x)


@pytest.mark.parametrize(
    ("shifts", "found"),
    [((0, 0, 0), ""), ((1, 0, 0), "reads 1 of 8"), ((0, -1, 0), "writes 1 of 8"), ((0, 0, 3), "adds to 3 of 8")],
)
def test_what_lies_outside_is_found(shifts: tuple[int, int, int], found: str) -> None:
    memory = torch.zeros(3, 16)
    inside = [t.clone() for t in memory[:, :8]]  # storages of their own
    with checked_memory():
        if not found:
            _shifted_copy[(1,)](*inside, *shifts, 8)
        else:
            with pytest.raises(triton.runtime.errors.InterpreterError, match=found):
                _shifted_copy[(1,)](*inside, *shifts, 8)


def test_masked_elements_may_lie_anywhere() -> None:
    @triton.jit
    def masked(x_ptr, COUNT: tl.constexpr):
        n = tl.arange(0, COUNT)
        tl.store(x_ptr + n, tl.load(x_ptr + n, mask=n < 5) + 1, mask=n < 5)

    x = torch.zeros(5)
    with checked_memory():
        masked[(1,)](x, 8)
    assert (x == 1).all()
