"""batch_invariant calls in the forward for sm_90, in the emulator: the bits of a sequence alone, in a batch and in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from flexattn.kernels_triton.common import problem as problems
from flexattn.kernels_triton.hopper import conditions
from flexattn.kernels_triton.hopper import forward as hopper_forward
from tests.support.gluon_calls import without_gpu
from tests.support.invariant_calls import Kernel, check

LENGTHS = (300, 150, 600)
KERNEL = Kernel(hopper_forward, hopper_forward.hopper_forward, conditions, 90)
WAYS = [
    ([70, 70, 70], {"capacity": 640}),
    ([65, 3, 30], {}),
    ([1, 1, 1], {"capacity": 640, "page_size": 16}),
]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SPLIT_PIECE", 256)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("call", [{}, {"window_size": (200, 0)}, {"softcap": 5.0}], ids=str)
def test_alone_in_a_batch_and_in_chunks(call: dict[str, Any]) -> None:
    check(KERNEL, LENGTHS, WAYS, **call)
