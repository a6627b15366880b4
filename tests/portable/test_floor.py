"""The kernel that checks, for calls on a GPU, that masks hid the masked keys: lse must be above the floor."""

from __future__ import annotations

import math

import pytest
import torch
from triton.runtime.errors import InterpreterError

from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable import floor as kernels
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.validation import FLOOR
from tests.support.compiled_kernels import compile_sound

TEXT = "a query has no score above the floor"


@pytest.mark.parametrize("rows", [1, 2047, 2048, 5000])
def test_one_row_at_the_floor_fails(rows: int) -> None:
    lse = torch.full((rows,), 0.5)
    above = torch.nextafter(torch.tensor(FLOOR), torch.tensor(math.inf))
    for place in {0, rows // 2, rows - 1}:
        for value in (above, math.nan, math.inf):
            lse[place] = value
            kernels.check_floor(lse, FLOOR, TEXT)
        for value in (FLOOR, -1e9, -math.inf):
            lse[place] = value
            with pytest.raises(InterpreterError, match=TEXT):
                kernels.check_floor(lse, FLOOR, TEXT)
        lse[place] = 0.5


def test_rows_past_the_end_are_not_read() -> None:
    lse = torch.full((40,), -1e9)
    lse[:37] = 0.0
    kernels.check_floor(lse[:37], FLOOR, TEXT)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_compiled_with_its_assertion(capability: int) -> None:
    with pretended_device(capability, 132), recorded_launches() as launches:
        kernels.check_floor(torch.zeros(4, 16, 4096), FLOOR, TEXT)
    (launch,) = launches
    (report,) = compile_sound([request_for(launch, capability)])
    assert report.spill_store_bytes == 0
    assert report.instructions["CALL"] == 1  # the driver's __assertfail
