"""A forward into the caller's memory: every backend writes to it, even if an earlier call of this kind had other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import flexattn
from flexattn import attention, call_cache, ops
from flexattn.dispatch import options
from tests.support.replayed import replay_on_cpus


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base(**changes: Any) -> dict[str, Any]:
    q, k, v = (tokens(2, 17, 4, d, seed=i) for i, d in enumerate((16, 16, 8)))
    return {"q": q, "k": k, "v": v, **changes}


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": base,
    "one head dim": lambda: base(v=tokens(2, 17, 4, 16)),  # which torch's own operator runs on a CPU
    "bhsd": lambda: {name: t.transpose(1, 2) for name, t in base().items()} | {"qkv_format": "bhsd"},
    "sbhd": lambda: {name: t.transpose(0, 1) for name, t in base().items()} | {"qkv_format": "sbhd"},
    "half": lambda: {name: t.half() for name, t in base().items()},
    "packed": lambda: {name: t.flatten(0, 1) for name, t in base().items()} | {"causal": True, **flexattn.packed([20, 0, 14])},
    "mods and a sink": lambda: base(mask=tokens(17, 17) > 0, softmax_offset=torch.ones(4), softcap=3.0),
    "few queries": lambda: base(q=tokens(2, 1, 4, 16)),
    "pages": lambda: base(
        k=tokens(6, 8, 4, 16),
        v=tokens(6, 8, 4, 8),
        page_table=torch.tensor([[0, 3], [5, 1]], dtype=torch.int32),
        seqused_kv=torch.tensor([9, 16], dtype=torch.int32),
        attn_mask_type="padding",
    ),
    "FP8": lambda: (
        {name: t[:1, :, :1].half() for name, t in base(v=tokens(2, 17, 4, 16)).items()} | {"fp8_recipe": flexattn.fp8.Recipe()}
    ),
}


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "FP8" else ()) for name in CALLS])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_each_call_writes_into_the_memory_that_it_is_given(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call, a second one, which is recorded, and replays."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        replay_on_cpus(monkeypatch)
    call_cache.clear_cache()
    call = CALLS[name]() | {"backend": backend}
    with torch.no_grad():
        wanted, lse = attention(**call, return_lse=True)
        memory = [torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format) for _ in range(4)]
        for out in memory:
            found = attention(**call, out=out, return_lse=True)
            assert found.out is out
            assert torch.equal(out, wanted)
            assert torch.equal(found.lse, lse)
            out.fill_(torch.nan)
            assert attention(**call, out=out) is out
            assert torch.equal(out, wanted)
            out.fill_(7.0)
        assert all((out == 7.0).all() for out in memory), "a later call wrote into the memory of an earlier one"
        assert torch.equal(attention(**call), wanted)
        assert all((out == 7.0).all() for out in memory)


def test_replays_are_made() -> None:
    """Else the test above shows nothing of them."""
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        replay_on_cpus(patch)
        call_cache.clear_cache()
        call = base(backend="triton")
        for _ in range(3):
            attention(**call, out=torch.empty(2, 17, 4, 8))
        assert call_cache.cache_info()["recordings"] == 1
    call_cache.clear_cache()


def test_nothing_of_outs_size_is_allocated() -> None:
    """By a profiler's count of the operators: no allocation and no copy of out's shape."""
    call = base(causal=True)
    out = torch.empty(2, 17, 4, 8)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        attention(**call, out=out, backend="eager")
    sizes = [shape for event in profile.events() if event.name in ("aten::copy_", "aten::clone") for shape in event.input_shapes]
    assert [2, 17, 4, 8] not in sizes


def test_a_view_of_a_larger_buffer_is_memory_too() -> None:
    call = base()
    buffer = torch.full((5, 17, 4, 8), torch.nan)
    with torch.no_grad():
        attention(**call, out=buffer[2:4])
        assert torch.equal(buffer[2:4], attention(**call))
    assert buffer[:2].isnan().all()
    assert buffer[4:].isnan().all()


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_memory_of_an_input_is_refused_by_each_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a warm call does not say whether tensors share memory."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        replay_on_cpus(monkeypatch)
    call_cache.clear_cache()
    call = base(v=tokens(2, 17, 4, 16), backend=backend)
    memory = torch.zeros(5, 17, 4, 16)
    with torch.no_grad():
        for _ in range(3):
            attention(**call, out=torch.empty(2, 17, 4, 16))
            for name in ("q", "k", "v"):
                part = memory[:2].copy_(call[name])
                with pytest.raises(ValueError, match=f"out may share memory with {name}"):
                    attention(**call | {name: part}, out=memory[1:3])
                assert torch.equal(part, call[name])
                attention(**call | {name: part}, out=memory[2:4])


def test_memory_of_another_input_is_refused() -> None:
    memory = torch.zeros(2, 17, 4, 8)
    table, out = memory.view(-1)[-4:], torch.empty(2, 17, 4, 8)
    packed = {name: t.flatten(0, 1) for name, t in base().items()} | flexattn.packed([17, 17])
    lengths = memory.view(torch.int32).view(-1)[:3].copy_(packed["cu_seqlens_q"])
    others = {
        "softmax_offset": base(softmax_offset=table),
        "bias or mask": base(mask=memory.view(-1)[:17]),
        "a tensor that a mod captures": base(score_mod=lambda score, b, h, i, j: score + table[h]),
        "cu_seqlens_q": packed | {"cu_seqlens_q": lengths},
    }
    with torch.no_grad():
        for name, call in others.items():
            call_cache.clear_cache()
            for _ in range(3):
                attention(**call, out=out.view(call["q"].shape[:-1] + (8,)))
                with pytest.raises(ValueError, match=f"out may share memory with {name}"):
                    attention(**call, out=memory.view(call["q"].shape[:-1] + (8,)))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_autograd_knows_of_the_write(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an operator saved for its backward makes that backward raise."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        replay_on_cpus(monkeypatch)
    call_cache.clear_cache()
    weight = torch.ones(2, 17, 4, 8, requires_grad=True)
    for _ in range(3):
        out = torch.zeros(2, 17, 4, 8)
        product = weight * out
        attention(**base(backend=backend), out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.slow
def test_a_compiled_call_writes_there() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call, out = base(causal=True), torch.full((2, 17, 4, 8), torch.nan)
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            out.fill_(torch.nan)
            assert compiled(**call, out=out, return_lse=True).out is out
            assert torch.equal(out, attention(**call))
    assert counter.frame_count == 1


def test_opcheck() -> None:
    from tests.api.test_ops import op_arguments

    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        arguments = list(op_arguments(patch, base()))
    arguments[ops.Operands._fields.index("out")] = torch.empty(2, 17, 4, 8)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops._forward_out_op, tuple(arguments), test_utils=tests)


@pytest.mark.slow
def test_checked_calls_compare_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexattn import checked_call

    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    monkeypatch.setattr(checked_call, "_draw", lambda: 0.0)
    replay_on_cpus(monkeypatch)
    options.check_all()
    call_cache.clear_cache()
    call = base(backend="triton")
    with torch.no_grad():
        wanted = attention(**call)
        for _ in range(4):
            out = torch.full_like(wanted, torch.nan)
            assert torch.equal(attention(**call, out=out), wanted)
    call_cache.clear_cache()


def test_what_cannot_be_written_is_refused() -> None:
    out = torch.empty(2, 17, 4, 16)
    half = {name: t.half() for name, t in base(v=tokens(2, 17, 4, 16)).items()}
    with pytest.raises(ValueError, match="out_dtype is an FP8 dtype"), torch.no_grad():
        attention(**half, out=out.half(), fp8_recipe=flexattn.fp8.Recipe(out_dtype=torch.float8_e4m3fn))
    nested = torch.nested.nested_tensor([tokens(3, 4, 8), tokens(5, 4, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="out is given and q, k and v are nested"):
        attention(nested, nested, nested, out=torch.empty(8, 4, 8))
