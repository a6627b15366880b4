"""batch_invariant calls in the forward for mma.sync, in the emulator: the bits of a sequence alone, in a batch and in chunks."""

from __future__ import annotations

import pytest

from flexattn.kernels_triton.common import problem as problems
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mma import forward as mma_forward
from tests.support.gluon_calls import without_gpu
from tests.support.invariant_calls import Kernel, check


@pytest.mark.sample
@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize("capability", [80, 86])
def test_alone_in_a_batch_and_in_chunks(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At head dim 128, few queries have blocks of 32 keys in other calls, and many have 64 on 8.0."""
    monkeypatch.setattr(problems, "SPLIT_PIECE", 128)
    ways = [([90, 1], {"capacity": 240}), ([1, 1], {"capacity": 240, "page_size": 16}), ([40, 1], {})]
    check(Kernel(mma_forward, mma_forward.mma_forward, conditions, capability), (150, 200), ways, dim=128)
