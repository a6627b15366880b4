"""Tables of calls over ranks: they are real tensors in every torch mode, and captured graphs keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flexattn import distributed
from flexattn.distributed import capture
from flexattn.distributed.plans import plan_of
from flexattn.integrations.te import context_parallel

CPU = torch.device("cpu")


@pytest.fixture
def captured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (capture, context_parallel):
            patch.setattr(module, "is_capturing", lambda device: True)
        yield
    capture._read.clear()


def _table(number: int, device: torch.device) -> Any:
    return torch.full((), number, device=device)


def test_a_table_belongs_to_no_mode() -> None:
    table = capture.tables(4)(_table)
    with FakeTensorMode():
        assert type(table(1, CPU)) is not torch.Tensor
    with FlopCounterMode(display=False), torch.inference_mode():
        kept = table(1, CPU)
    assert type(kept) is torch.Tensor
    assert not kept.is_inference()
    assert table(1, CPU) is kept
    with torch.device("meta"):
        assert table(2, CPU).item() == 2


@pytest.mark.usefixtures("captured")
def test_a_captured_graph_keeps_the_tables_that_it_reads() -> None:
    table = capture.tables(4)(_table)
    with pytest.raises(RuntimeError, match="cannot make the tables of a call while a CUDA graph is captured"):
        table(1, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda device: False)
        kept = table(1, CPU)
    with FlopCounterMode(display=False):
        assert table(1, CPU) is kept
    assert capture._read == {id(kept): kept}


def test_a_plan_made_under_fake_tensors_has_a_real_token() -> None:
    with FakeTensorMode():
        plan = distributed.plan(2, length=8)
    assert type(plan.token) is torch.Tensor
    assert plan_of(plan.token) is plan


def test_offsets_that_a_capture_cannot_read_are_refused(request: pytest.FixtureRequest) -> None:
    read, unread = (torch.tensor([0, 3, 8], dtype=torch.int32) for _ in range(2))
    assert context_parallel._on_host("cu_seqlens_q", read) == (0, 3, 8)
    request.getfixturevalue("captured")
    assert context_parallel._on_host("cu_seqlens_q", read) == (0, 3, 8)
    with pytest.raises(
        RuntimeError, match=r"cu_seqlens_q cannot be read on the host while a CUDA graph is captured\. Run the layer"
    ):
        context_parallel._on_host("cu_seqlens_q", unread)
