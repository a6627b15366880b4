"""Rows of several sources in one kernel: words of each size, several tensors, and no write beside their rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from flexattn.distributed.peer_memory import OWN
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable.pull_rows import Block, Table, make_table, pull_rows
from flexattn.kernels_triton.runtime.interpreter import INTERPRETED
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound

DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = 7
SOURCES, SOURCE_ROWS, ROWS = 3, 70, 100

# bytes of a row, of a source's row, before the row in it, and of one read
CASES = {
    "wide": (2048, 8192, 4096, 16),
    "more than a program's columns": (4800, 9600, 64, 16),
    "words of eight bytes": (24, 72, 8, 8),
    "words of four bytes": (36, 128, 12, 4),
    "words of two bytes": (6, 18, 2, 2),
    "bytes": (5, 17, 3, 1),
}


def table_of(blocks: list[Block], first_source: int = 1) -> Table:
    table = make_table(blocks, first_source)
    return table._replace(blocks=table.blocks.to(DEVICE))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_come_to_their_places(case: tuple[int, int, int, int]) -> None:
    width, stride, column, unit = case
    torch.manual_seed(0)
    sources = [torch.randint(10, 120, (SOURCE_ROWS, stride), device=DEVICE, dtype=torch.uint8) for _ in range(SOURCES)]
    addresses = torch.tensor([t.data_ptr() for t in sources], device=DEVICE)
    own = torch.randint(10, 120, (SOURCE_ROWS, stride), device=DEVICE, dtype=torch.uint8)
    blocks, outs, expected = [], [], []
    for out, runs in enumerate(
        ([(0, 5, 0, 56), (2, 0, 60, 1), (1, 9, 61, 33)], [(1, 0, 3, 40), (OWN, 7, 43, 31)])
    ):  # some rows are in no run
        stride_out = (SOURCES * width if out == 0 else width) + 4 * unit
        room = torch.full((ROWS, stride_out), POISON, device=DEVICE, dtype=torch.uint8)
        want = room.clone()
        for source, first, to, rows in runs:
            at = source * width if out == 0 else 0
            of = own if source == OWN else sources[source]
            want[to : to + rows, at : at + width] = of[first : first + rows, column : column + width]
            blocks.append(Block(out, source, first * stride + column, to * stride_out + at, rows, width, stride, stride_out))
        outs.append(room)
        expected.append(want)
    table = table_of(blocks)
    assert table.word * table.align == unit
    pull_rows(outs, [own, own], addresses, table)
    assert all(map(torch.equal, outs, expected))


def test_sources_are_read_in_turns() -> None:
    """Ranks begin with different sources. Each reads equally from all sources while they have rows."""
    blocks = [Block(0, source, 0, 2048 * 64 * source, rows, 2048, 2048, 2048) for source, rows in enumerate((64, 48, 64))]
    order = make_table(blocks, first_source=1).blocks[:, 1].tolist()
    assert order[:9] == [1, 2, 0] * 3
    assert Counter(order) == {0: 4, 1: 3, 2: 4}


def test_nothing_to_move() -> None:
    assert make_table([], 0).blocks.shape == (0, 8)
    assert make_table([Block(0, 0, 0, 0, 0, 16, 16, 16)], 0).blocks.shape == (0, 8)


@pytest.mark.skipif(not INTERPRETED, reason="compiles ahead of time, which needs no GPU")
def test_compiled_for_loads_of_sixteen_bytes() -> None:
    out = torch.zeros(64 * 1024, dtype=torch.int64)
    with recorded_launches() as launches:
        pull_rows([out], [out], torch.tensor([out.data_ptr()]), table_of([Block(0, 0, 0, 0, 1, 2048, 2048, 2048)]))
    [launch] = launches
    reports = compile_sound([request_for(launch, sm) for sm in (80, 90, 100)])
    for report in reports:
        # Each of 128 threads has 16 loads of 16 bytes of the 32 KiB. The other loads read the table and an address.
        assert 16 < report.instructions["LDG"] <= 26, report.instructions
        assert report.stack_bytes == 0
