"""Plans of calls: their buffers, steps and results, recorded without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.plan import Device, Kernel, Op, PlanError, View, Zero, large_l2_by_name, record
from flexattn.testing import make_call, make_inputs

DEVICE = Device((8, 0), 4)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def launched(*tensors: torch.Tensor) -> None:
    """Launches a kernel that gets these tensors."""
    from flexattn.kernels_triton.runtime.device import Tile
    from flexattn.kernels_triton.runtime.launch import Launch, make

    class Anything:
        __name__ = "anything"

    make(Launch(Anything(), Tile(16, 16, 4, 1), (tensors, 3), 1), tensors[0].device)


def test_plan_of_a_call() -> None:
    spec, x = make_call(make_inputs(lengths_q=[17, 17]), attn_mask_type="causal")
    spec, x = spec._replace(device_type="cuda", capability=DEVICE.capability), triton_backend.on_meta(x)
    plan = record(lambda: triton_backend.forward(spec, x), [x.q, x.k, x.v], DEVICE)
    step, largest = plan.steps
    assert isinstance(step, Kernel)
    assert isinstance(largest, Op)
    assert step.launch.kernel.__name__ == "_attn_fwd_kernel"
    assert set(plan.inputs) < set(step.buffers)
    out, lse, max_logit = plan.results
    assert out.shape == (2, 17, 4, 16)
    assert max_logit.shape == (4,)
    assert {out.buffer, lse.buffer, max_logit.buffer, largest.arguments[0].buffer} == plan.written()


@pytest.mark.parametrize("is_large", [True, False])
def test_a_plan_is_for_a_device_with_a_large_l2_or_a_small_one(is_large: bool) -> None:
    from flexattn.kernels_triton.runtime.device import has_large_l2

    found = []

    def run() -> list[torch.Tensor]:
        found.append(has_large_l2(torch.device("cuda")))
        return [meta(2)]

    record(run, [meta(2)], DEVICE._replace(has_large_l2=is_large))
    assert found == [is_large]


def test_gpus_with_a_small_l2_are_known_by_name() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200")
    assert [large_l2_by_name(name) for name in names] == [False, False, True, True, True]


def test_views_that_lie_apart_are_buffers_of_their_own() -> None:
    x = meta(4)

    def run() -> list[torch.Tensor]:
        both = torch.empty(2, 8, device="meta")
        launched(x, *both)
        return [both[1]]

    plan = record(run, [x], DEVICE)
    assert [buffer.size for buffer in plan.buffers] == [4, 8, 8]
    assert plan.steps[0].buffers == (0, 1, 2)  # type: ignore[union-attr]
    assert plan.results == (View(2, 0, (8,), torch.float32),)


def test_zeros_of_several_buffers() -> None:
    x = meta(4)

    def run() -> list[torch.Tensor]:
        parts = torch.zeros(6, device="meta").split((4, 2))
        launched(x, *parts)
        return [parts[1]]

    plan = record(run, [x], DEVICE)
    *zeros, kernel = plan.steps
    assert zeros == [Zero(View(1, 0, (4,), torch.float32)), Zero(View(2, 0, (2,), torch.float32))]
    assert isinstance(kernel, Kernel)
    assert kernel.buffers == (0, 1, 2)


def test_what_torch_computes_stands_between_the_launches() -> None:
    x = meta(4)

    def run() -> list[torch.Tensor]:
        sums = torch.zeros(3, 4, device="meta")
        launched(x, sums)
        total = sums.sum(0)
        launched(total)
        return [total]

    plan = record(run, [x], DEVICE)
    zero, first, op, last = plan.steps
    assert isinstance(zero, Zero)
    assert isinstance(first, Kernel)
    assert isinstance(op, Op)
    assert isinstance(last, Kernel)
    assert op.arguments[0] == View(zero.view.buffer, 0, (3, 4), torch.float32)
    assert zero.view.shape == (12,)
    assert (op.results[0].buffer,) == last.buffers


@pytest.mark.parametrize("num_queries", [0, 17])
def test_kernels_get_an_address_of_each_tensor_without_elements(num_queries: int) -> None:
    """A call without keys, or without queries too. Results without elements have no buffer."""
    x, k, v = (meta(1, n, 1, 16) for n in (num_queries, 0, 0))

    def run() -> list[torch.Tensor]:
        dk = torch.empty_like(k)
        launched(x, k, v, dk)
        launched(dk, k)
        return [dk]

    plan = record(run, [x, k, v], DEVICE)
    first, second = plan.steps
    assert isinstance(first, Kernel)
    assert isinstance(second, Kernel)
    assert len(set(first.buffers)) == 4
    assert second.buffers == (first.buffers[3], first.buffers[1])
    assert [plan.buffers[i].size for i in first.buffers] == [16 * num_queries, 0, 0, 0]
    assert plan.inputs[1:] == (None, None)
    assert not plan.written()
    assert plan.results == (View(None, 0, (1, 0, 1, 16), torch.float32),)


def gets_part_of_a_buffer(x: torch.Tensor) -> list[torch.Tensor]:
    whole = torch.empty(8, device="meta")
    launched(x, whole, whole[4:])
    return []


def gives_every_second(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(8, device="meta")[::2]]


@pytest.mark.parametrize(
    ("run", "text"),
    [(gets_part_of_a_buffer, "begins within another's memory"), (gives_every_second, "has gaps in memory")],
)
def test_what_a_plan_cannot_hold(run: Any, text: str) -> None:
    x = meta(4)
    with pytest.raises(PlanError, match=text):
        record(lambda: run(x), [x], DEVICE)


def test_inputs_that_share_memory_are_refused() -> None:
    x = meta(4)
    with pytest.raises(PlanError, match="two inputs of a call share their memory"):
        record(list, [x, x.view(2, 2)], DEVICE)
