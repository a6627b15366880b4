"""The fuzz on a GPU: its modes, its guards on two devices, and calls that random runs found."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from torch import Tensor

from flexattn import attention
from tests.fuzz.check import ON_GPU, check_by_name, config_of
from tests.support.guarded_memory import Allocations, guarded_allocations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

WITHOUT = frozenset({"extreme", "huge", "fp8"})
FEW = 3  # calls of a mode, each of a configuration of its own
REPEATS = 40


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocations]:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")
    with guarded_allocations() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


@pytest.mark.parametrize("mode", ["graph", "checkpoint", "stream", "thread"])
def test_modes(mode: str, allocations: Allocations) -> None:
    where = ON_GPU._replace(without=WITHOUT, head_dims=(64,))
    drawn = ((name, config_of(where, name)) for name in (f"{seed}.0" for seed in count()))
    has_mode = (name for name, c in drawn if mode in c.modes and c.wants & {"q", "k", "v"} and not (c.score_mod or c.mask_mod))
    for name in islice(has_mode, FEW):
        assert check_by_name(where, name, allocations) == [], name


def test_a_write_beside_memory_of_either_device_is_found() -> None:
    with guarded_allocations() as allocations:
        for damaged in ("cpu", "cuda"):
            for device in ("cpu", "cuda"):
                out = torch.empty(5, device=device)
                if device == damaged:
                    out.as_strided((1,), (1,), out.storage_offset() + 5).fill_(0.0)
            assert allocations.are_damaged()
        torch.empty(5, device="cpu"), torch.empty(5, device="cuda")
        assert not allocations.are_damaged()


@pytest.mark.parametrize("is_garbage_collected", [True, False])
def test_a_graph_behind_calls_on_the_same_leaves(is_garbage_collected: bool) -> None:
    """Captures a forward and backward on a new stream, without a run on it before, after two calls that left no graph."""
    q, k, v = (torch.randn(2, 50, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv")
    dout, dlse = torch.randn_like(q).detach(), torch.randn(2, 4, 50, device="cuda")

    def both() -> list[Tensor]:
        out, lse = attention(q, k, v, return_lse=True, backend="triton", deterministic=True)
        gradients = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
        return [out.detach(), lse.detach(), *gradients]

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            expected = both()
        if is_garbage_collected:
            gc.collect()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = both()
            finally:
                graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
    finally:
        gc.enable()
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("is_one_memory", [False, True], ids=["apart", "v in k"])
@pytest.mark.parametrize("length", [1, 5, 300])
def test_a_float32_forward_over_pages_repeats_to_the_bit(length: int, is_one_memory: bool) -> None:
    """One query of each sequence, at an address off 16 bytes, over pages of one key, with a softcap and a sink."""
    columns, heads = 303, 2
    own = torch.Generator("cuda").manual_seed(length)
    k = torch.full((609, heads, 1, 128), float("nan"), device="cuda")
    v = k[..., :40] if is_one_memory else torch.full_like(k, float("nan"))[..., :40]
    table = torch.full((2, columns), 2147480000, dtype=torch.int32, device="cuda")
    places = torch.randperm(609, generator=own, device="cuda")[: 2 * length].view(2, length)
    table[:, :length] = places.int()
    k[places.flatten()] = torch.randn(2 * length, heads, 1, 128, device="cuda", generator=own)
    if not is_one_memory:
        v[places.flatten()] = k[places.flatten(), ..., :40]
    q = torch.randn(7 + 2 * 4 * 128, device="cuda", generator=own)[7:].view(2, 4, 1, 128)
    cu_q = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    cu_kv = torch.tensor([0, length, 2 * length], dtype=torch.int32, device="cuda")
    sink = torch.randn(4, device="cuda", generator=own)
    found: list[tuple[Tensor, Tensor]] = []
    for n in range(REPEATS):
        junk = torch.full((1000 * (n + 1),), float("nan"), device="cuda")  # memory of the next tensors, once it is freed
        del junk
        found.append(
            attention(
                q,
                k,
                v,
                qkv_format="bhsd",
                attn_mask_type="padding",
                cu_seqlens_q=cu_q,
                cu_seqlens_kv=cu_kv,
                page_table=table,
                max_seqlen_kv=columns,
                softcap=20.0,
                softmax_type="learnable",
                softmax_offset=sink,
                return_lse=True,
                backend="triton",
            )
        )
    assert all(t.isfinite().all() for t in found[0])
    for out, lse in found[1:]:
        assert torch.equal(lse, found[0][1])
        assert torch.equal(out, found[0][0])
