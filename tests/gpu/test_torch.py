"""torch on a GPU: Inductor, CUDA graphs of every backend that never wait and stay in their pool, SDPA, varlen_attn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from flexattn import mods
from flexattn.dispatch import cudnn_backend
from flexattn.integrations import torch_flash
from tests.gpu.test_gpu import no_synchronisation, offsets, randn, results

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

ROOM = 512  # the longest sequence that a graph is captured for
LENGTHS = ([500, 400], [512, 3], [0, 511], [1, 450])


def need_backend(name: str) -> None:
    if name == "cudnn" and (why := cudnn_backend.device_error("cuda", torch.cuda.get_device_capability())):
        pytest.skip(why)


def packed_call(cu_seqlens: Tensor, **more: Any) -> dict[str, Any]:
    q, k, v = (randn(900, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2))
    call = {"q": q, "k": k, "v": v, "qkv_format": "thd", "attn_mask_type": "padding_causal"}
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": ROOM, "max_seqlen_kv": ROOM}
    return call | lengths | more


def dense_call(**more: Any) -> dict[str, Any]:
    q, k, v = (randn(2, 384, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "attn_mask_type": "causal", **more}


def capture(call: dict[str, Any], dout: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of forward and backward after one warm call; waiting for the device during capture is an error."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(call, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_synchronisation():
        captured = results(call, dout)
    return graph, captured


@pytest.mark.parametrize("kind", ["thd", "bshd", "score_mod", "bias and sink", "dropout"])
@pytest.mark.parametrize("backend", ["triton", "cudnn", "eager"])
def test_a_graph_of_forward_and_backward_replays(backend: str, kind: str) -> None:
    """With new data, and new lengths within the captured bounds; no memory is allocated outside of the graph's pool."""
    need_backend(backend)
    if backend == "eager" and kind == "thd":
        pytest.skip("the eager backend reads lengths on the host, which it says")
    cu_seqlens = offsets(LENGTHS[0])
    more: dict[str, Any] = {"backend": backend}
    if kind == "score_mod":
        slopes = randn(4, dtype=torch.float32).requires_grad_(backend != "cudnn")
        more["score_mod"] = mods.alibi(slopes)
    elif kind == "bias and sink":
        more |= {"bias_type": "post_scale_bias", "bias": randn(1, 4, 384, 384).requires_grad_()}
        if backend != "cudnn":
            more |= {"softmax_type": "learnable", "softmax_offset": randn(4, dtype=torch.float32).requires_grad_()}
    elif kind == "dropout":
        more |= {"dropout_p": 0.25, "rng_state": torch.tensor([3, 5], device="cuda")}
    call = packed_call(cu_seqlens, **more) if kind == "thd" else dense_call(**more)
    dout = torch.randn_like(call["q"])
    try:
        flexattn.explain(**call)
    except flexattn.BackendError as e:
        pytest.skip(str(e))
    graph, captured = capture(call, dout)
    for step, lengths in enumerate(LENGTHS):
        with torch.no_grad():
            for name in "qkv":
                call[name].copy_(randn(*call[name].shape, seed=10 + step))
            cu_seqlens.copy_(offsets(lengths))
            if kind == "dropout":
                call["rng_state"] += 1
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == before
        for got, want in zip(captured, results(call, dout), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_warmup_alone_is_enough_to_capture(backend: str) -> None:
    need_backend(backend)
    cu_seqlens = offsets(LENGTHS[1])
    call = packed_call(cu_seqlens, backend=backend, window_size=(200, 0))
    call |= {name: torch.cat((call[name], call[name]), -1).detach()[..., 24:120].requires_grad_() for name in "qkv"}  # d = 96
    dout = torch.randn_like(call["q"])
    flexattn.warmup(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_synchronisation():
        captured = results(call, dout)
    graph.replay()
    for got, want in zip(captured, results(call, dout), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["dense", "thd", "score_mod", "dropout"])
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_nothing_waits(backend: str, kind: str) -> None:
    need_backend(backend)
    call = packed_call(offsets(LENGTHS[0]), backend=backend) if kind == "thd" else dense_call(backend=backend)
    if kind == "score_mod":
        call["score_mod"] = mods.softcap(20.0)
    if kind == "dropout":
        call["dropout_p"] = 0.25
    dout = torch.randn_like(call["q"])
    results(call, dout)
    with no_synchronisation():
        results(call, dout)


def test_dropout_in_a_graph_follows_the_seed() -> None:
    """torch.manual_seed before a replay decides which weights it drops, as for any other op of a graph."""
    q = randn(1, 300, 2, 64)
    flexattn.attention(q, q, q, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.attention(q, q, q, dropout_p=0.5)
    drawn = []
    for seed in (1, 2, 1):
        torch.cuda.manual_seed(seed)
        graph.replay()
        drawn.append(out.clone())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_with_and_without_its_graphs(mode: str) -> None:
    torch.compiler.reset()
    cu_seqlens = offsets(LENGTHS[0])
    slopes = randn(4, dtype=torch.float32)
    call = packed_call(cu_seqlens)
    q, k, v = (call.pop(name) for name in "qkv")

    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        more = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j)}
        return flexattn.attention(q * 1.5, k, v, **(call | more)).relu()

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(3):
        want = torch.autograd.grad(step(q, k, v, cu_seqlens).sum(), (q, k, v))
        got = torch.autograd.grad(compiled(q, k, v, cu_seqlens).sum(), (q, k, v))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.fixture
def active() -> Iterator[None]:
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flexattn")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that ran in flexattn."""
    from flexattn import ops

    ran: list[str] = []
    select = ops.select
    monkeypatch.setattr(ops, "select", lambda spec, way, *rest: ran.append(way) or select(spec, way, *rest))
    return ran


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_runs_flexattn(is_causal: bool, compiled: bool, active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    ran = counted(monkeypatch)
    leaves = [randn(2, 333, 4, 64, seed=i).transpose(1, 2).requires_grad_() for i in range(3)]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=is_causal)

    function = torch.compile(call, fullgraph=True) if compiled else call
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = function(*leaves)
        got = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
    assert {"forward", "backward"} <= set(ran)
    with sdpa_kernel(SDPBackend.MATH):
        want = sdpa(*(t.float() for t in leaves), is_causal=is_causal)
        expected = (want, *torch.autograd.grad(want.square().sum(), leaves))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)


def test_causal_lower_right_counts_from_the_bottom_right_corner(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.bias import causal_lower_right

    ran = counted(monkeypatch)
    leaves = [randn(2, n, 4, 64, seed=i).transpose(1, 2).requires_grad_() for i, n in enumerate((77, 333, 333))]
    sdpa, mask = torch.nn.functional.scaled_dot_product_attention, causal_lower_right(77, 333)
    out = sdpa(*leaves, mask)
    got = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
    assert {"forward", "backward"} <= set(ran)
    want = sdpa(*(t.float() for t in leaves), mask._materialize("cuda"))
    expected = (want, *torch.autograd.grad(want.square().sum(), leaves))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)


def test_varlen_attn_runs_flexattn(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.varlen import varlen_attn

    ran = counted(monkeypatch)
    cu_seqlens = offsets(LENGTHS[0])
    call = packed_call(cu_seqlens)
    leaves = [randn(900, 4, 64, seed=i).requires_grad_() for i in range(3)]
    window = {"window_size": (-1, 0)} if "window_size" in varlen_attn.__code__.co_varnames else {"is_causal": True}
    out = varlen_attn(*leaves, cu_seqlens, cu_seqlens, ROOM, ROOM, **window)
    got = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
    assert ran == ["forward", "backward"] or {"forward", "backward"} <= set(ran)
    call |= dict(zip("qkv", leaves, strict=True))
    want = flexattn.attention(**call)
    for a, b in zip(got, (want, *torch.autograd.grad(want.float().square().sum(), leaves)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
