"""A likeness of tensors: it matches tensors that differ only in their values, and no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn import call_cache
from flexattn.likeness import likeness_of


def tensors() -> list[Any]:
    """q, k and v, none, a table of lengths and the same again."""
    lengths = torch.tensor([0, 3, 5], dtype=torch.int32)
    return [*(torch.randn(2, 5, 4, 8) for _ in "qkv"), None, lengths, lengths]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def without_memory(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


def v_in_k(given: list[Any]) -> list[Any]:
    return [given[0], given[1], given[1].view(2, 5, 4, 8), *given[3:]]


CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "shape": lambda given: [given[0][:1], *given[1:]],
    "dims": lambda given: [given[0][None], *given[1:]],
    "strides": lambda given: [given[0].transpose(1, 2).contiguous().transpose(1, 2), *given[1:]],
    "dtype": lambda given: [given[0].half(), *given[1:]],
    "gradient": lambda given: [given[0].requires_grad_(), *given[1:]],
    "type": lambda given: [torch.nn.Parameter(given[0], requires_grad=False), *given[1:]],
    "device": lambda given: [given[0].to("meta"), *given[1:]],
    "negated": lambda given: [torch._neg_view(given[0]), *given[1:]],
    "address": lambda given: [torch.randn(321)[1:].view(2, 5, 4, 8), *given[1:]],
    "no memory": lambda given: [without_memory(given[0].clone()), *given[1:]],
    "one for two": lambda given: [given[0], given[0], *given[2:]],
    "v in k": v_in_k,
    "one for none": lambda given: [*given[:3], torch.randn(4), *given[4:]],
    "none for one": lambda given: [*given[:4], None, None],
    "two for one": lambda given: [*given[:5], given[5].clone()],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_no_likeness(name: str) -> None:
    likeness = likeness_of(tensors())
    assert likeness is not None
    like = tensors()
    assert [*(likeness.addresses(like) or ())] == [0 if t is None else t.data_ptr() for t in like]
    assert likeness.addresses(CHANGES[name](like)) is None


def test_modes_transforms_and_autocast_are_no_likeness() -> None:
    likeness, like = likeness_of(tensors()), tensors()
    assert likeness is not None
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(likeness.addresses(like))
        return x.sum()

    with Mode():
        look(like[0])
    torch.vmap(look)(like[0])
    torch.func.grad(look)(like[0])
    with torch.inference_mode():
        look(like[0])
    with torch.autocast("cpu"):
        look(like[0])
    assert seen == [None] * 5
    assert likeness.addresses(like) is not None


@pytest.mark.parametrize("name", ["address", "no memory"])
def test_such_tensors_have_none(name: str) -> None:
    assert likeness_of(CHANGES[name](tensors())) is None


@pytest.mark.parametrize("is_one", [False, True])
def test_v_in_k_is_like_v_in_k_alone(is_one: bool) -> None:
    """Also if v is k itself, which is not like a view of k."""

    def shared(given: list[Any]) -> list[Any]:
        return [*given[:2], given[1], *given[3:]] if is_one else v_in_k(given)

    likeness = likeness_of(shared(tensors()))
    assert likeness is not None
    like = shared(tensors())
    assert [*(likeness.addresses(like) or ())] == [0 if t is None else t.data_ptr() for t in like]
    assert likeness.addresses(tensors()) is None
    assert likeness.addresses(v_in_k(tensors()) if is_one else [*like[:2], like[1], *like[3:]]) is None


def test_warm_calls_are_found_by_likeness(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> list[Tensor]:
        short, long = torch.arange(160.0).view(1, 5, 4, 8), torch.arange(320.0).view(2, 5, 4, 8)
        return [flexattn.attention(x, x + 1, x + 2, attn_mask_type="causal") for x in (short.cos(), long.cos())]

    wanted = calls()
    calls()
    monkeypatch.setattr(call_cache, "_look_up_all", None)
    for _ in range(3):
        for out, want in zip(calls(), wanted, strict=True):
            assert torch.equal(out, want)
    assert call_cache.cache_info()["hits"] == 2 + 6


def test_a_call_that_was_forgotten_is_not_found() -> None:
    """The last ones are not found either: the comparison starts with the latest."""
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in "qkv")
    for _ in range(3):
        for mask in ("causal", "no_mask"):
            flexattn.attention(q, k, v, attn_mask_type=mask)
    assert call_cache.cache_info()["hits"] == 4
    call_cache.clear_cache()
    for mask in ("no_mask", "causal"):
        flexattn.attention(q, k, v, attn_mask_type=mask)
    assert call_cache.cache_info() == {"hits": 0, "misses": 2, "recordings": 0, "size": 2}


def test_a_backward_is_found_by_likeness_and_what_else_it_depends_on() -> None:
    q, k, v = leaves = [torch.randn(2, 5, 4, 8, requires_grad=True) for _ in "qkv"]

    def gradients(dlse_value: float, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = flexattn.attention(q, k, v, return_lse=True)
        outputs, given = ((out, lse), (dout, torch.full_like(lse, dlse_value))) if dlse_value else ((out,), (dout,))
        return torch.autograd.grad(outputs, leaves, given)

    dense = torch.randn(2, 5, 4, 8)
    cases = [
        (0.0, dense),
        (2.0, dense),
        (0.0, dense.transpose(1, 2).contiguous().transpose(1, 2)),
        (0.0, dense[:1].expand(2, 5, 4, 8)),
    ]
    wanted = []
    for case in cases:
        call_cache.clear_cache()
        wanted.append(gradients(*case))
    call_cache.clear_cache()
    for _ in range(4):
        gradients(*cases[0])
    (call,) = call_cache.kept_calls()
    assert call.replayed is not None
    for _ in range(3):
        for case, want in zip(cases, wanted, strict=True):
            for a, b in zip(gradients(*case), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_more_are_found_by_likeness_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_CALLS", 2)
    for scale in (0.1, 0.2, 0.3, 0.4):
        for length in range(1, 7):
            x, y, z = (torch.randn(2, length, 4, 8) for _ in range(3))
            for _ in range(3):
                flexattn.attention(x, y, z, softmax_scale=scale)
            found = [call for entries in call_cache._recent.values() for *_, call in entries]
            assert all(call in call_cache.kept_calls() for call in found)
    assert found
    monkeypatch.setattr(call_cache, "MOST_CALLS", 100)
    for length in range(1, 20):
        x, y, z = (torch.randn(2, length, 4, 8) for _ in range(3))
        for _ in range(2):
            flexattn.attention(x, y, z)
    assert max(len(found) for found in call_cache._recent.values()) == call_cache._MOST_RECENT


def test_a_likeness_keeps_no_tensor_alive() -> None:
    given = tensors()
    held = weakref.ref(given[0])
    likeness = likeness_of(given)
    del given
    assert held() is None
    assert likeness is not None
