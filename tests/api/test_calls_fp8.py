"""Replayed calls in FP8: quantising, attention and delayed scaling return the results of an ordinary call.

A CPU has no launches to replay, so the tests record the ops of the eager backend instead of kernels.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import call_cache, fp8
from flexattn.dispatch import eager_backend, triton_backend
from flexattn.kernels_triton.runtime import direct, launch

HEADS, HEADS_KV = 4, 2
RECIPES = {
    "current": fp8.Recipe(),
    "tensor, rotation, HYBRID": fp8.Recipe(granularity="tensor", rotation=True, fp8_format="HYBRID"),
    "block": fp8.Recipe(granularity="block", block_rows=64),
    "bf16_backward": fp8.Recipe(bf16_backward=True),
    "16 bits too": fp8.Recipe(keep_16_bit=True),
    "delayed": fp8.Recipe(scaling="delayed", amax_history_len=2, fp8_format="HYBRID"),
    "delayed by tensor": fp8.Recipe(scaling="delayed", granularity="tensor", amax_compute_algo="most_recent"),
}


class Kernel:
    """A launch that does nothing, because a recording needs a launch."""

    def tensors_of(self, arguments: tuple[Any, ...]) -> list[Any]:
        return []

    def prepare(self, programs: int, arguments: tuple[Any, ...]) -> Any:
        return SimpleNamespace(launch=lambda stream, addresses: None)


@pytest.fixture(autouse=True)
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def watched(watcher: Callable[..., None]) -> Iterator[None]:
        watcher(Kernel(), 1, ())
        yield

    monkeypatch.setattr(eager_backend, "watched", watched)
    monkeypatch.setattr(eager_backend, "can_be_recorded", lambda: True)
    monkeypatch.setattr(triton_backend, "_can_quantize", lambda device: False)
    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    monkeypatch.setattr(launch, "is_plain", lambda: True)
    monkeypatch.setattr(direct, "set_to_zero", lambda stream, address, size: ctypes.memset(address, 0, size))
    call_cache.clear_cache()


def make_arguments(seed: int) -> tuple[dict[str, Any], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (2, 70, HEADS, 32), "k": (2, 90, HEADS_KV, 32), "v": (2, 90, HEADS_KV, 16)}
    tensors = {name: torch.randn(*shape, generator=draw).bfloat16() * (1 + seed) for name, shape in shapes.items()}
    leaves = [t.requires_grad_() for t in tensors.values()]
    return tensors | {"attn_mask_type": "causal", "backend": "eager"}, leaves


def step(arguments: dict[str, Any], leaves: list[Tensor], state: fp8.DelayedScaling | None) -> list[Tensor]:
    out, lse = flexattn.attention(**arguments, fp8_state=state, return_lse=True)
    gradients = torch.autograd.grad([out, lse], leaves, [out.detach() * 3, torch.ones_like(lse)])
    if state is not None:
        state.update()
    return [out, lse, *gradients]


def in_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[Any]:
    patch = pytest.MonkeyPatch.context()
    inner = patch.__enter__()
    inner.setattr(call_cache, "look_up", lambda *_: (None, None))
    return contextlib.closing(SimpleNamespace(close=lambda: patch.__exit__(None, None, None)))


@pytest.mark.sample
@pytest.mark.parametrize("name", RECIPES)
def test_played_is_as_ordinary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]
    state = fp8.DelayedScaling(recipe, HEADS, HEADS_KV) if recipe.scaling == "delayed" else None
    same = copy.deepcopy(state)
    for seed in range(6):
        arguments, leaves = make_arguments(seed)
        arguments["fp8_recipe"] = recipe
        got = step(arguments, leaves, state)
        with in_the_ordinary_way(monkeypatch):
            wanted = step(arguments, leaves, same)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        if state is not None and same is not None:
            assert all(torch.equal(a, b) for a, b in zip(state.buffers(), same.buffers(), strict=True))
    info = call_cache.cache_info()
    assert (info["hits"], info["recordings"]) == (5, 2)
    with torch.no_grad():
        for _ in range(4):
            played = flexattn.attention(**arguments, fp8_state=state)
        with in_the_ordinary_way(monkeypatch):
            assert torch.equal(played, flexattn.attention(**arguments, fp8_state=same))
    assert call_cache.cache_info()["recordings"] == 3


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float8_e5m2])
def test_fp8_inputs(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        arguments, _ = make_arguments(seed)
        given = {n: fp8.quantize(arguments[n]) for n in "qkv"}
        blocks: dict[str, Any] = {} if out_dtype is torch.bfloat16 else {"granularity": "block", "block_rows": 64}
        arguments |= {n: t.data for n, t in given.items()} | {"fp8_recipe": fp8.Recipe(out_dtype=out_dtype, **blocks)}
        arguments |= {"descale_q": given["q"].descale, "descale_k": given["k"].descale.flatten()}
        got = flexattn.attention(**arguments)
        with in_the_ordinary_way(monkeypatch):
            wanted = flexattn.attention(**arguments)
        if out_dtype is torch.bfloat16:
            assert torch.equal(got, wanted)
        else:
            assert isinstance(got, fp8.QuantizedTensor)
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(got[:3], wanted[:3], strict=True))
            assert got.block_rows == 64
    assert call_cache.cache_info()["hits"] == 4
    assert call_cache.cache_info()["recordings"] == 1


def test_one_tape_for_two_layers_with_states_of_their_own() -> None:
    recipe = RECIPES["delayed"]
    states = [fp8.DelayedScaling(recipe, HEADS, HEADS_KV) for _ in range(2)]
    arguments, leaves = make_arguments(0)
    arguments["fp8_recipe"] = recipe
    for _ in range(3):
        step(arguments, leaves, states[0])
    before = [t.clone() for t in states[0].buffers()]
    larger, more = make_arguments(1)
    step(larger | {"fp8_recipe": recipe}, more, states[1])
    assert call_cache.cache_info()["misses"] == 1
    assert all(torch.equal(a, b) for a, b in zip(states[0].buffers(), before, strict=True))
    assert states[1].amax_history_dout.any()
    assert states[1].amax_history_q.any()


def test_a_checkpoint_and_hooks_on_what_is_saved() -> None:
    arguments, leaves = make_arguments(2)
    arguments["fp8_recipe"] = RECIPES["tensor, rotation, HYBRID"]
    wanted = step(arguments, leaves, None)
    for _ in range(3):
        step(arguments, leaves, None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexattn.attention(**arguments | {"q": q, "k": k, "v": v}, return_lse=True)

    for use_reentrant in (False, True):
        out, lse = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward([out, lse], [out.detach() * 3, torch.ones_like(lse)])
        assert all(torch.equal(leaf.grad, b) for leaf, b in zip(leaves, wanted[2:], strict=True))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attend(*leaves)
    assert sorted({str(t.dtype) for t in saved}) == ["torch.bfloat16", "torch.float32", "torch.float8_e4m3fn"]
    assert sum(t.dtype is torch.bfloat16 for t in saved) == 1  # out


def test_a_state_of_another_kind_has_no_key_and_a_wrong_one_raises() -> None:
    class Own(fp8.DelayedScaling):
        pass

    recipe = RECIPES["delayed"]
    arguments, _ = make_arguments(0)
    arguments["fp8_recipe"] = recipe
    for _ in range(3):
        flexattn.attention(**arguments, fp8_state=Own(recipe, HEADS, HEADS_KV))
    assert call_cache.cache_info()["misses"] == 0
    good = fp8.DelayedScaling(recipe, HEADS, HEADS_KV)
    for _ in range(3):
        flexattn.attention(**arguments, fp8_state=good)
    for bad in (
        fp8.DelayedScaling(RECIPES["delayed by tensor"], HEADS, HEADS_KV),
        fp8.DelayedScaling(recipe, 3, 3),
        None,
        good.scale_q,
    ):
        with pytest.raises((TypeError, ValueError), match="fp8_state"):
            flexattn.attention(**arguments, fp8_state=bad)
