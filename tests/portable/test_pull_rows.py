"""Rows of several sources in one kernel: words of each size, at any offset, and nothing written beside them."""

from __future__ import annotations

import pytest
import torch

from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable.pull_rows import Words, pull_rows, rows_of_program
from flexattn.kernels_triton.runtime.interpreter import INTERPRETED
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound

DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = 7
SOURCES, ROWS = 3, 70

# the dtype of words, those of a row, the stride and the column of a row in a source, words before out
CASES = {
    "wide": (torch.int64, 256, 1024, 512, 0),
    "more than a program's columns": (torch.int64, 300, 600, 8, 0),
    "words of eight bytes": (torch.int64, 3, 9, 1, 1),
    "words of four bytes": (torch.int32, 8, 32, 16, 0),
    "bytes": (torch.uint8, 5, 17, 3, 3),
}


def moves_of(runs: list[tuple[int, int, int, int]], rows: int) -> torch.Tensor:
    parts = [(n, first + at, to + at, min(rows, size - at)) for n, first, to, size in runs for at in range(0, size, rows)]
    return torch.tensor(parts, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_come_to_their_places(case: tuple[torch.dtype, int, int, int, int]) -> None:
    dtype, width, stride, column, before = case
    torch.manual_seed(0)
    sources = [torch.randint(10, 120, (ROWS, stride), device=DEVICE).to(dtype) for _ in range(SOURCES)]
    addresses = torch.tensor([t.data_ptr() for t in sources], device=DEVICE)
    assert all(place % 16 == 0 for place in addresses.tolist())
    runs = [(0, 5, 0, 56), (2, 0, 60, 1), (1, 9, 61, 33)]  # no run writes row 56 to 59
    words = Words(width, SOURCES * width + 4, width, stride, column)
    room = torch.full((before + 100 * words.out_stride,), POISON, dtype=dtype, device=DEVICE)
    expected = room.clone()
    for source, first, to, size in runs:
        rows = expected[before:].view(100, -1)[to : to + size]
        rows[:, source * width : (source + 1) * width] = sources[source][first : first + size, column : column + width]
    pull_rows(room[before:], addresses, moves_of(runs, rows_of_program(width)), words)
    assert torch.equal(room, expected)


@pytest.mark.skipif(not INTERPRETED, reason="compiles ahead of time, which needs no GPU")
def test_compiled_for_loads_of_sixteen_bytes() -> None:
    out = torch.zeros(64 * 1024, dtype=torch.int64)
    with recorded_launches() as launches:
        pull_rows(out, torch.tensor([out.data_ptr()]), moves_of([(0, 0, 0, 1)], 16), Words(256, 1024, 256, 512, 256))
    [launch] = launches
    reports = compile_sound([request_for(launch, sm) for sm in (80, 90, 100)])
    for report in reports:
        # Of 32 KiB that 128 threads read, each has 16 loads of 16 bytes; the others are of the table and an address.
        assert 16 < report.instructions["LDG"] <= 24, report.instructions
        assert report.stack_bytes == 0
