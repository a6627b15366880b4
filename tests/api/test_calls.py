"""Cached calls: the content of their keys, calls without a key, and that they are right, few, and hold no tensors."""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn import call_cache, compat, functional
from flexattn.cached_call import CachedCall, Runs
from flexattn.dispatch import cpu_attention, eager_backend, replay
from flexattn.dispatch.recorder import Recorder
from flexattn.dispatch.select import forget_rejections, select
from flexattn.dispatch.spec import TENSOR_FIELDS, Operands
from flexattn.kernels_triton.runtime import direct, launch

pytestmark = pytest.mark.filterwarnings("ignore:max_seqlen")


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), **options)


def base() -> dict[str, Any]:
    return {name: randn(2, 5, 4, 8) for name in "qkv"}


CU = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = {
    **{name: randn(7, 4, 8) for name in "qkv"},
    "qkv_format": "thd",
    "attn_mask_type": "padding",
    "cu_seqlens_q": CU,
    "cu_seqlens_kv": CU,
    "max_seqlen_q": 4,
    "max_seqlen_kv": 4,
}


def halved(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * 0.5


def doubled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, by: Tensor) -> Tensor:
    return score * by


def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j + 2 * b <= i


PADDED = {**{name: randn(2, 5, 4, 8) for name in "qkv"}, "attn_mask_type": "padding"}
USED = torch.tensor([5, 2], dtype=torch.int32)
PAGED = PADDED | {"seqused_kv": USED, "page_table": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)}
LISTS = {"kv_indices": torch.arange(30, dtype=torch.int32).view(2, 5, 3) % 5}
BIAS = {"bias_type": "post_scale_bias", "bias": randn(1, 4, 5, 5)}
SINK = {"softmax_type": "learnable", "softmax_offset": randn(4)}
ALIBI = {"bias_type": "alibi"}
IN_HALF = {name: randn(2, 5, 4, 16).bfloat16() for name in "qkv"}
IN_FP8 = {name: t.to(torch.float8_e4m3fn) for name, t in IN_HALF.items()} | {"descale_v": torch.tensor(0.5)}
# For each argument a call and the change in it.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "q": ({}, {"q": randn(2, 3, 4, 8)}),
    "k": ({}, {name: randn(2, 6, 4, 8) for name in "kv"}),
    "v": ({}, {"v": randn(2, 5, 4, 16)}),
    "qkv_format": ({}, {"qkv_format": "sbhd"}),
    "causal": ({}, {"causal": True}),
    "attn_mask_type": ({}, {"attn_mask_type": "causal"}),
    "window_size": ({}, {"window_size": (2, -1)}),
    "mask": ({}, {"mask": torch.ones(5, 5, dtype=torch.bool).tril()}),
    "bottom_right_diagonal": (
        {"window_size": (1, 1), "k": randn(2, 6, 4, 8), "v": randn(2, 6, 4, 8)},
        {"bottom_right_diagonal": False},
    ),
    "cu_seqlens": ({"attn_mask_type": "padding", "seqused_q": USED}, {"seqused_q": None, "cu_seqlens": CU}),
    "max_seqlen": ({"qkv_format": "bshd"}, {"max_seqlen": 5}),
    "cu_seqlens_q": (PACKED, {"cu_seqlens_q": torch.cat([CU, CU[-1:]]), "cu_seqlens_kv": torch.cat([CU, CU[-1:]])}),
    "cu_seqlens_kv": (PACKED, {"cu_seqlens_kv": torch.tensor([0, 0, 0, 3, 7], dtype=torch.int32)[2:]}),
    "cu_seqlens_q_padded": (PACKED, {"cu_seqlens_q_padded": CU}),
    "cu_seqlens_kv_padded": (PACKED, {"cu_seqlens_kv_padded": CU}),
    "seqused_q": (PADDED | {"seqused_kv": USED}, {"seqused_q": USED}),
    "seqused_kv": (PADDED | {"seqused_q": USED}, {"seqused_kv": USED}),
    "page_table": (PAGED, {"page_table": torch.tensor([[0], [1]], dtype=torch.int32)}),
    "kv_indices": (LISTS, {"kv_indices": LISTS["kv_indices"][..., :2]}),
    "kv_index_counts": (LISTS, {"kv_index_counts": torch.ones(2, 5, dtype=torch.int32)}),
    "kv_block_size": (LISTS, {"kv_block_size": (1, 2)}),
    "max_seqlen_q": (PACKED, {"max_seqlen_q": 5}),
    "max_seqlen_kv": (PACKED, {"max_seqlen_kv": 5}),
    "bias_type": (BIAS, {"bias_type": "pre_scale_bias"}),
    "bias": (BIAS, {"bias": randn(1, 1, 5, 5)}),
    "alibi_slopes": (ALIBI, {"alibi_slopes": randn(2, 4).abs()}),
    "softmax_type": ({}, {"softmax_type": "off-by-one"}),
    "softmax_offset": (SINK, {"softmax_offset": randn(4).requires_grad_()}),
    "softmax_scale": ({}, {"softmax_scale": 0.1}),
    "softcap": ({}, {"softcap": 2.0}),
    "dropout_p": ({"rng_state": torch.tensor([1, 2])}, {"dropout_p": 0.5}),
    "rng_state": ({"dropout_p": 0.5}, {"rng_state": torch.tensor([1, 2])}),
    "score_mod": ({}, {"score_mod": halved}),
    "mask_mod": ({}, {"mask_mod": before}),
    "score_mod_tensors": (
        {"score_mod": doubled, "score_mod_tensors": (torch.tensor(2.0),)},
        {"score_mod_tensors": (torch.tensor(1),)},
    ),
    "block_mask": ({}, {"block_mask": flexattn.create_block_mask(before, 2, None, 5, 5, device="cpu")}),
    "fp8_recipe": (IN_HALF, {"fp8_recipe": flexattn.fp8.Recipe()}),
    "descale_q": (IN_FP8, {"descale_q": torch.tensor(2.0)}),
    "descale_k": (IN_FP8 | {"descale_k": torch.tensor(2.0)}, {"descale_k": torch.full((4,), 2.0)}),
    "descale_v": (IN_FP8 | {"fp8_recipe": flexattn.fp8.Recipe(out_dtype=torch.float16)}, {"descale_v": torch.full((2, 1), 2.0)}),
    "deterministic": ({}, {"deterministic": True}),
    "batch_invariant": ({}, {"batch_invariant": True}),
    "return_lse": ({}, {"return_lse": True}),
    "return_max_logit": ({}, {"return_max_logit": True}),
    "out": ({}, {"out": torch.empty(2, 5, 4, 8)}),
    "backend": ({}, {"backend": "eager"}),
}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys of the calls that are made, None for one without."""
    found: list[Any] = []
    original = call_cache.look_up

    def look_up(*arguments: Any) -> Any:
        key, call = original(*arguments)
        found.append(None if key is None else key.parts)
        return key, call

    monkeypatch.setattr(call_cache, "look_up", look_up)
    return found


def test_every_argument_has_a_change() -> None:
    # The key has the content of a state: tests/api/test_calls_fp8.py. A call with return_aux has no key.
    assert set(CHANGES) | {"fp8_state", "return_aux"} == set(inspect.signature(flexattn.attention).parameters)


# Of tensors on a CPU no other call is the same in any batch.
IN_THE_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU Triton does not interpret calls on a CPU")


@pytest.mark.parametrize("name", [pytest.param(x, marks=IN_THE_INTERPRETER if x == "batch_invariant" else ()) for x in CHANGES])
def test_a_changed_argument_is_another_key(name: str, keys: list[Any]) -> None:
    common, change = CHANGES[name]
    call = base() | common
    torch.manual_seed(0)
    wanted = flexattn.attention(**call)
    for _ in range(3):
        torch.manual_seed(0)
        again = flexattn.attention(**call)
        assert torch.equal(again, wanted)
    call_cache.clear_cache()
    fresh = flexattn.attention(**call | change)
    for _ in range(3):
        flexattn.attention(**call)
    torch.manual_seed(0)
    changed = flexattn.attention(**call | change)
    has_key = name != "score_mod_tensors"  # these are wrapped anew in each call
    assert (keys[0] is not None) == has_key
    if has_key:
        assert keys[-1] != keys[0]
        assert keys[0] == keys[1] == keys[2]
    if name not in ("rng_state",):  # it is drawn
        for a, b in zip(*([x] if isinstance(x, Tensor) else x for x in (fresh, changed)), strict=True):
            assert torch.equal(a, b)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[pytest.MonkeyPatch, dict[str, Any]], AbstractContextManager[Any] | None]] = {
    "grad mode": lambda patch, call: torch.no_grad(),
    "requires_grad": lambda patch, call: setattr(call["q"], "requires_grad", False),
    "deterministic": lambda patch, call: deterministic_algorithms(),
    "attention_backend": lambda patch, call: flexattn.attention_backend("eager"),
    "FLEXATTN_BACKEND": lambda patch, call: patch.setenv("FLEXATTN_BACKEND", "eager"),
    "FLEXATTN_HOPPER": lambda patch, call: patch.setenv("FLEXATTN_HOPPER", "never"),
    "FLEXATTN_BATCH_INVARIANT": lambda patch, call: patch.setenv("FLEXATTN_BATCH_INVARIANT", "1"),
    "failures": lambda patch, call: forget_rejections(),
    "selections": lambda patch, call: select.cache_clear(),
    "autocast": lambda patch, call: torch.autocast("cpu"),
    "a shape in place": lambda patch, call: call.update({n: call[n].resize_(2, 4, 4, 8) for n in "kv"}),
    "strides in place": lambda patch, call: call.update(k=call["k"].as_strided_((2, 5, 4, 8), (160, 8, 40, 1))),
    "data": lambda patch, call: setattr(call["v"], "data", randn(2, 5, 4, 16)),
    "an address": lambda patch, call: setattr(call["v"], "data", randn(2 * 5 * 4 * 8 + 1)[1:].view(2, 5, 4, 8)),
    "a parameter": lambda patch, call: call.update(q=torch.nn.Parameter(call["q"].detach(), requires_grad=False)),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=IN_THE_INTERPRETER if "INVARIANT" in x else ()) for x in STATES])
def test_what_is_around_a_call_is_in_its_key(name: str, keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = base()
    call["q"].requires_grad_()
    for _ in range(3):
        flexattn.attention(**call)
    with STATES[name](monkeypatch, call) or nullcontext():
        got = flexattn.attention(**call)
        call_cache.clear_cache()
        assert torch.equal(got, flexattn.attention(**call))
    assert keys[0] == keys[1] == keys[2]
    assert keys[0] is not None
    assert keys[3] != keys[0]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = [*getattr(self, "seen", []), func]
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_modes_transforms_subclasses_and_canaries_have_no_key(keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = base()
    for _ in range(3):
        wanted = flexattn.attention(**call)
    assert keys.pop() is not None
    keys.clear()
    with Mode() as mode:
        flexattn.attention(**call)
    assert torch.ops.flexattn.attention_forward.default in mode.seen
    flexattn.attention(**call | {"q": call["q"].as_subclass(Subclass)})
    flexattn.attention(**{name: t.to("meta") for name, t in call.items()})
    with torch.autograd.forward_ad.dual_level():
        flexattn.attention(**call)
    monkeypatch.setenv("FLEXATTN_CANARY", "1")
    flexattn.attention(**call)
    monkeypatch.delenv("FLEXATTN_CANARY")
    assert keys == [None] * 5
    for name in ("FLEXATTN_CHECK", "FLEXATTN_CANARY"):
        monkeypatch.setenv(name, "0")
    assert torch.equal(flexattn.attention(**call), wanted)
    assert keys[-1] is not None


@pytest.mark.sample("name", values=False)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "dout", "dlse"])
def test_what_is_stored_negated_is_read_as_it_is(name: str, backend: str, keys: list[Any], device: str) -> None:
    """The imaginary part of a conjugate is such a view: the operators resolve it, and memory has the other sign."""
    call = base() | BIAS | {"dout": randn(2, 5, 4, 8), "dlse": randn(2, 4, 5), "backend": backend}
    call |= {name: value.to(device) for name, value in call.items() if isinstance(value, Tensor)}

    def gradients(call: dict[str, Any]) -> tuple[Tensor, ...]:
        leaves = [call[name].requires_grad_() for name in ("q", "k", "v", "bias")]
        operands = {name: value for name, value in call.items() if name not in ("dout", "dlse")}
        out, lse = flexattn.attention(**operands, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (call["dout"], call["dlse"]))

    wanted = gradients({name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()})
    stored = torch._neg_view(call[name].neg())
    assert stored.is_neg()
    for _ in range(4):
        for found, want in zip(gradients(call | {name: stored.detach()}), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert name in ("dout", "dlse") or keys[1:] == [None] * 4


def test_what_a_hook_brings_back_negated_is_read_as_it_is(device: str) -> None:
    call = {name: value.to(device) for name, value in (base() | BIAS).items() if isinstance(value, Tensor)}
    leaves = [t.requires_grad_() for t in call.values()]
    wanted = torch.autograd.grad(flexattn.attention(**call, backend="triton").sin().sum(), leaves)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch._neg_view):
            out = flexattn.attention(**call, backend="triton")
        for found, want in zip(torch.autograd.grad(out.sin().sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(found, want)


class Tagged(Tensor):
    """A tensor that refuses access to its memory."""


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_a_gradient_of_a_subclass_goes_by_the_operators(name: str) -> None:
    leaves = [t.requires_grad_() for t in base().values()]
    given = {"dout": randn(2, 5, 4, 8), "dlse": randn(2, 4, 5)}
    seen: list[Any] = []

    def gradients(incoming: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(flexattn.attention(*leaves, return_lse=True), leaves, tuple(incoming.values()))

    want = gradients(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedCall, "backward", lambda *_: pytest.fail("the address of a subclass was read"))
        for _ in range(3):
            found = gradients(given | {name: given[name].as_subclass(Tagged)})
            seen += [torch.equal(a, b) for a, b in zip(found, want, strict=True)]
    assert all(seen)


def test_a_default_device_leaves_calls_their_key(keys: list[Any]) -> None:
    with torch.device("cpu"):
        for _ in range(3):
            flexattn.attention(**base())
    assert keys[0] is not None
    assert call_cache.cache_info()["hits"] == 2


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("softcap", False),
        ("dropout_p", False),
        ("return_lse", 0),
        ("return_max_logit", 0.0),
        ("deterministic", 0),
        ("window_size", (-1.0, -1)),
        ("max_seqlen_q", 5.0),
        ("softmax_scale", torch.tensor([0.5])),
        ("q", None),
        ("bias", "none"),
    ],
)
def test_what_is_equal_and_wrong_still_raises(argument: str, value: Any) -> None:
    call = base() | {"softmax_scale": 0.5, "deterministic": False, "max_seqlen_q": 5}
    for _ in range(3):
        flexattn.attention(**call)
    with pytest.raises((TypeError, ValueError), match=argument):
        flexattn.attention(**call | {argument: value})


def test_gradients_are_those_of_an_ordinary_call() -> None:
    call = base() | BIAS | SINK | {"return_max_logit": True, "softcap": 3.0}
    leaves = [call[name].requires_grad_() for name in ("q", "k", "v", "bias", "softmax_offset")]

    def gradients() -> tuple[Tensor, ...]:
        out, lse, max_logit = flexattn.attention(**call, return_lse=True)
        assert not max_logit.requires_grad
        return torch.autograd.grad((out.square().sum() + lse.sum()), leaves)

    wanted = gradients()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))
    assert call_cache.cache_info()["hits"] == 4
    out = flexattn.attention(**call)[0]
    only_lse = flexattn.attention(**call, return_lse=True)[1]
    assert only_lse.requires_grad
    with torch.no_grad():
        call["q"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_backward_is_kept_for_the_strides_of_dout() -> None:
    """A recording of it has them in its launches."""
    call = base()
    call["q"].requires_grad_()
    first = torch.randn(flexattn.attention(**call).shape)
    for dout in (first, first.transpose(1, 2).contiguous().transpose(1, 2)):
        for _ in range(3):
            flexattn.attention(**call).backward(dout)
    (kept,) = [one for one in call_cache.kept_calls() if one is not None]
    assert len(kept.backwards) == 2


@pytest.mark.parametrize("more", [{}, ALIBI, {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}], ids=["", "alibi", "dropout"])
def test_one_tensor_thrice_is_another_call_than_three(more: dict[str, Any], keys: list[Any]) -> None:
    call = base() | more
    wanted = flexattn.attention(**call)
    call_cache.clear_cache()
    one = dict.fromkeys("qkv", call["q"])
    for _ in range(3):
        thrice = flexattn.attention(**call | one)
    got = [flexattn.attention(**call) for _ in range(3)]
    assert all(torch.equal(out, wanted) for out in got)
    assert torch.equal(flexattn.attention(**call | one), thrice)
    flexattn.attention(**call | {"k": call["q"]})
    assert keys[0] == keys[4] != keys[1]
    assert keys[-1] not in keys[:-1]


def test_v_in_k_is_another_call(keys: list[Any]) -> None:
    """Kernels may load a tensor once if it is both k and v; the strides equal those of separate values."""
    cache, other = (randn(2, 5, 1, 24).mul(by).to(torch.float16) for by in (1, -1))
    call = {"q": randn(2, 5, 4, 24).to(torch.float16), "k": cache}
    inside, apart = call | {"v": cache[..., :16]}, call | {"v": other[..., :16]}
    got = [flexattn.attention(**inside) for _ in range(3)] + [flexattn.attention(**apart) for _ in range(3)]
    assert torch.equal(got[3], -got[0])
    assert torch.equal(got[5], -got[2])
    assert keys[0] == keys[2] != keys[3] == keys[5]


def test_captured_tensors_and_numbers_are_those_of_the_call() -> None:
    def biased(slopes: Tensor, by: float) -> Callable[..., Tensor]:
        return lambda score, b, h, i, j: score * by + slopes[h] * (i - j)

    call = base()
    slopes = randn(4).requires_grad_()
    mods = [biased(slopes, 1.0), biased(slopes, 1.0), biased(slopes, 1.0), biased(slopes, 2.0), biased(2 * slopes, 1.0)]
    for mod in mods:
        got = flexattn.attention(**call, score_mod=mod)
        gradient = torch.autograd.grad(got.sum(), slopes, retain_graph=True)[0]
        if mod is mods[-1]:
            call_cache.clear_cache()
        want = flexattn.attention(**call, score_mod=mod)
        assert torch.equal(got, want)
        assert torch.allclose(gradient, torch.autograd.grad(want.sum(), slopes, retain_graph=True)[0])


def test_gradients_go_to_the_captures_that_ask_for_them() -> None:
    """In every order of two that do and one that does not; the first call goes by the operators."""
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        call_cache.clear_cache()
        captured = [randn(4), randn(4).requires_grad_(), randn(4).requires_grad_()]
        first, second, third = (captured[i] for i in order)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * first[h] + second[h] * i + third[h] * j.cos()  # noqa: B023  # called within the turn

        call = base()
        wanted, *found = (
            torch.autograd.grad(flexattn.attention(**call, score_mod=score_mod).square().sum(), captured[1:]) for _ in range(4)
        )
        assert call_cache.cache_info()["hits"] >= 2
        assert not torch.allclose(*wanted)
        for gradients in found:
            for got, want in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(got, want)


def two_read(one: Tensor, other: Tensor, q: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score * other[h] + one[h]


def one_read(one: Tensor, other: Tensor, q: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * other[h] if q is not None else score + one[h]

    return score_mod


def an_argument(one: Tensor, other: Tensor, q: Tensor) -> Callable[..., Tensor]:
    first = (0,) * (q.dim() - 2)
    return lambda score, b, h, i, j: score * one[h] + q[(*first, h, 0)]


@pytest.mark.parametrize("make_mod", [two_read, one_read, an_argument])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bias_type": "alibi"},
        {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])},
        {"mask_mod": before},
        BIAS,
        {**PACKED, "attn_mask_type": "padding_causal"},
    ],
    ids=["alone", "slopes that are no argument", "dropout", "mask_mod", "bias", "packed"],
)
def test_what_is_captured_finds_its_place(make_mod: Callable[..., Any], more: dict[str, Any], keys: list[Any]) -> None:
    """Each call has other tensors, so that one in the place of another is seen."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        call = base() | more
        call["q"] = torch.rand(call["q"].shape, generator=generator)
        call["score_mod"] = make_mod(*torch.rand(2, 4, generator=generator), call["q"])
        made.append(call)
    got = [flexattn.attention(**call) for call in made]
    assert keys[0] is not None
    assert len(set(keys)) == 1
    for call, out in zip(made, got, strict=True):
        call_cache.clear_cache()
        assert torch.equal(flexattn.attention(**call), out)


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_another_scale_and_softcap_make_a_kept_call_of_one(
    softcap: float, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: dict[str, Any] = {name: t.to(device).requires_grad_() for name, t in base().items()}
    leaves = tuple(call.values())
    call |= {"backend": backend, "attn_mask_type": "causal"}
    numbers = [{"softmax_scale": 0.5 + 0.25 * n, "softcap": softcap * (n + 1)} for n in range(4)]

    def results(of: dict[str, float]) -> list[Tensor]:
        out = flexattn.attention(**call, **of)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    wanted = []
    for of in numbers:
        wanted.append(results(of))
        call_cache.clear_cache()
    for _ in range(3):
        results(numbers[0])
    monkeypatch.setattr(functional, "prepare", None)
    for of, want in [*zip(numbers, wanted, strict=True)] * 3:
        for a, b in zip(results(of), want, strict=True):
            assert torch.equal(a, b)
    assert call_cache.cache_info()["size"] == 4
    monkeypatch.undo()
    for wrong in ({"softmax_scale": -1.0}, {"softmax_scale": math.nan}, {"softmax_scale": math.inf}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            flexattn.attention(**call, **numbers[0] | wrong)
    for right in ({"softmax_scale": 0.0}, {"softcap": 3.0 - softcap}, {"softmax_scale": None}):
        found = flexattn.attention(**call, **numbers[0] | right)
        call_cache.clear_cache()
        assert torch.equal(found, flexattn.attention(**call, **numbers[0] | right))
        results(numbers[0])


def scaled(factor: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score * factor


def test_only_calls_that_differ_in_numbers_alone_share_recordings() -> None:
    def kept(**more: Any) -> CachedCall:
        call_cache.clear_cache()
        flexattn.attention(**base() | more)
        (call,) = call_cache.kept_calls()
        return call

    one = kept(score_mod=scaled(0.5), softmax_scale=0.5)
    assert one.numbers == (0.5, 0.0, 0.5)
    assert one.differs_in_numbers_alone(kept(score_mod=scaled(0.75), softmax_scale=0.25))
    assert not one.differs_in_numbers_alone(kept(score_mod=scaled(0.75), softcap=3.0))
    assert not one.differs_in_numbers_alone(kept(score_mod=scaled(0.75), attn_mask_type="causal"))
    assert not one.differs_in_numbers_alone(kept(score_mod=scaled(0.75), max_seqlen_q=5, dropout_p=0.5))
    assert not one.differs_in_numbers_alone(kept(score_mod=None))
    assert not one.differs_in_numbers_alone(kept(score_mod=scaled(0.75), **{n: randn(2, 6, 4, 8) for n in "qkv"}))


def test_a_mod_with_another_float_finds_recordings() -> None:
    for factor in (0.5, 0.75, 1.5):
        for _ in range(3):
            found = flexattn.attention(**base(), score_mod=scaled(factor))
        torch.testing.assert_close(found, flexattn.attention(**base(), softmax_scale=8**-0.5 * factor))
    assert len(call_cache._calls) == 2  # with the mod and without
    assert call_cache.cache_info()["size"] == 6


def test_calls_of_another_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_CALLS", 3)
    for n in range(1, 20):
        flexattn.attention(**{name: randn(2, n, 4, 8) for name in "qkv"}, softmax_scale=0.1, score_mod=scaled(0.5))
        assert call_cache.cache_info()["size"] == len(call_cache.kept_calls()) <= 3
    assert all(call_cache._calls.values())
    call_cache.clear_cache()
    call = {name: randn(2, 3, 4, 8) for name in "qkv"}
    for n in range(1, 20):
        flexattn.attention(**call, softmax_scale=0.1 + n)
        flexattn.attention(**call, softmax_scale=0.1)
        assert call_cache.cache_info()["size"] == len(call_cache.kept_calls()) <= 3
    assert call_cache.cache_info()["hits"] == 37  # each call is made of a kept one, or is the one in use


def test_at_most_so_many_are_kept_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_CALLS", 8)
    for _ in range(2):
        flexattn.attention(**base())
    for length in range(1, 40):
        flexattn.attention(**{name: randn(1, length, 2, 8) for name in "qkv"})
        flexattn.attention(**base())
    info = call_cache.cache_info()
    assert info == {"hits": 40, "misses": 40, "recordings": 1, "size": 8}
    call_cache.clear_cache()
    assert call_cache.cache_info() == {"hits": 0, "misses": 0, "recordings": 0, "size": 0}


def test_a_retained_graph_of_the_first_call_is_played_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second backward is taken down and the third is played, whichever call the graph is of; other strides are not played."""
    played: list[str] = []

    def record(backend: Any, run: Callable[[], Any], inputs: Any, results_of: Callable[[Any], Any], *_: Any) -> Any:
        result = run()
        found: Any = object.__new__(replay.Recording)
        found.can_replay = lambda: True
        kind = "forward" if len(results_of(result)) == 3 else "backward"
        found.replay = lambda tensors, addresses: (played.append(kind), results_of(result))[1]
        return result, found

    monkeypatch.setattr(replay, "record", record)
    monkeypatch.setattr(eager_backend, "can_be_recorded", lambda: True)
    monkeypatch.setattr(cpu_attention, "can_be_kept", lambda *_: False)
    call = base()
    leaves = [call[name].requires_grad_() for name in "qkv"]
    out = flexattn.attention(**call)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(3):
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert played == ["backward"] * 2
    torch.autograd.grad(out, leaves, dout.transpose(0, 1).contiguous().transpose(0, 1), retain_graph=True)
    assert played == ["backward"] * 2
    for _ in range(2):
        torch.autograd.grad(flexattn.attention(**call), leaves, dout)
    assert played == ["backward"] * 3 + ["forward", "backward"]
    forget_rejections()  # after it, another backend may be chosen
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert len(played) == 5
    monkeypatch.delenv("FLEXATTN_HOPPER")
    for _ in range(2):
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert len(played) == 6


def test_a_run_is_recorded_once_and_then_settled() -> None:
    """Whether it has a recording then, or none; another call with other numbers does not try again what cannot be recorded."""

    class Recorded:
        can_vary = True

        def can_replay(self) -> bool:
            return True

        def replay(self, tensors: Any, addresses: Any) -> tuple[str]:
            return ("replayed",)

        def with_numbers(self, numbers: Any) -> Any:
            return self if self.can_vary else None

    def several(runs: Runs, recording: Any) -> list[str]:
        found = []
        for _ in range(4):
            found += runs.run((), (), lambda _: ("computed",), lambda _: (("recorded",), recording))
        return found

    recording: Any = Recorded()
    with_it, without = Runs(), Runs()
    assert several(with_it, recording) == ["computed", "recorded", "replayed", "replayed"]
    assert several(without, None) == ["computed", "recorded", "computed", "computed"]
    assert several(with_it.with_numbers((1.0, 0.0)), None) == ["replayed"] * 4
    assert several(without.with_numbers((1.0, 0.0)), None) == ["computed"] * 4
    recording.can_vary = False
    alone = with_it.with_numbers((1.0, 0.0))
    assert several(alone, recording) == ["computed", "recorded", "replayed", "replayed"]
    for _ in range(5):  # numbers that change in each call
        alone = alone.with_numbers((1.0, 0.0))
        assert alone.run((), (), lambda _: ("computed",), lambda _: (("recorded",), recording)) == ("computed",)
    recording.can_vary = True
    computed = Runs()
    assert computed.run((), (), lambda _: ("computed",), lambda _: (("recorded",), recording)) == ("computed",)
    assert several(computed.with_numbers((1.0, 0.0)), recording) == ["recorded", *["replayed"] * 3]
    assert several(Runs().with_numbers((1.0, 0.0)), None) == ["computed", "recorded", "computed", "computed"]


def test_a_profiler_sees_the_operators() -> None:
    call = base()
    call["q"].requires_grad_()
    for _ in range(3):
        flexattn.attention(**call).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flexattn.attention(**call).sum().backward()
    assert {"flexattn::attention_forward", "flexattn::attention_backward"} <= {event.key for event in profile.key_averages()}
    assert call_cache.cache_info()["hits"] == 3


def test_no_tensor_is_kept_alive() -> None:
    call = base() | {"bias_type": "alibi"}
    for _ in range(3):
        flexattn.attention(**call)
    gone = [weakref.ref(call[name]) for name in "qkv"]
    del call
    assert [ref() for ref in gone] == [None] * 3


def test_threads() -> None:
    given = [{name: randn(1, length, 2, 8) for name in "qkv"} for length in range(3, 9)]
    wanted = [flexattn.attention(**call) for call in given]
    wrong: list[int] = []

    def work(start: int) -> None:
        for n in range(120):
            i = (start + n) % len(given)
            if not torch.equal(flexattn.attention(**given[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert call_cache.cache_info()["size"] == len(given)


CONSTANT = torch.arange(6.0)


def some_ops(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The ops have views, writes in place and through `out`, constants, and unused results."""
    out = torch.empty(2, 3)
    out.copy_(x.t())
    part = out[1:]
    part += y
    torch.empty(100)
    sums = x.new_empty(2)
    torch.sum(out, 1, out=sums)
    halves = torch.cat([sums, CONSTANT[1:3]], 0).view(2, 2)
    return out, halves.flatten() + 1


@pytest.fixture
def recorded() -> replay.Recording:
    inputs = (torch.zeros(3, 2), torch.zeros(3))
    recorder = Recorder(inputs)
    with recorder:
        results = some_ops(*inputs)
    return replay.Recording(recorder, [recorder.slot(t) for t in results], torch.device("cpu"))


def test_a_recording_of_torchs_ops(recorded: replay.Recording) -> None:
    for seed in range(3):
        x, y = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for shape in ((3, 2), (3,)))
        got = recorded.replay((x, y), (x.data_ptr(), y.data_ptr()))
        assert all(torch.equal(a, b) for a, b in zip(got, some_ops(x, y), strict=True))
    assert len(recorded.constants) == 1


def test_ops_in_place_are_made_again_on_the_tensors_of_the_call() -> None:
    """The views are of an input, a constant and a tensor of the call; they are not separate tensors."""
    counts, inputs = torch.zeros(2), (torch.ones(2), torch.ones(2))

    def ops(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        counts.add_(y)
        made = torch.empty(2).copy_(x).mul_(counts)
        return x.sub_(y), made

    recorder = Recorder(inputs)
    with recorder:
        results = ops(*inputs)
    played = replay.Recording(recorder, [recorder.slot(t) for t in results], torch.device("cpu"))
    for n in (2.0, 3.0):
        x, y = torch.full((2,), 5.0), torch.ones(2)
        first, second = played.replay((x, y), (x.data_ptr(), y.data_ptr()))
        assert first is x
        assert (first.tolist(), second.tolist(), counts.tolist()) == ([4.0] * 2, [5.0 * n] * 2, [n] * 2)


def test_a_launch_gets_the_addresses_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views are of tensors created in the call and of inputs, also if a view starts at an offset."""
    seen: list[Any] = []

    class Kernel:
        def tensors_of(self, arguments: tuple[Any, ...]) -> list[Any]:
            return list(arguments)

        def prepare(self, programs: int, arguments: tuple[Any, ...]) -> Any:
            return SimpleNamespace(launch=lambda stream, addresses: seen.append(addresses))

    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    monkeypatch.setattr(launch, "is_plain", lambda: True)
    inputs = (torch.zeros(4, 3), None, torch.zeros(5))
    recorder = Recorder(inputs)
    with recorder:
        made = torch.empty(3, 4)
        rows = torch.empty(2)
        recorder.on_launch(Kernel(), 1, (made[1], inputs[0][2], made, CONSTANT[2:]))
        recorder.on_launch(Kernel(), 1, (inputs[2][1:],))
        recorder.on_launch(Kernel(), 1, (inputs[0].t(), made[2], rows))
    played = replay.Recording(recorder, [recorder.slot(made), None, recorder.slot(inputs[2])], torch.device("cpu"))
    x, y = torch.ones(4, 3), torch.ones(5)
    got, nothing, same = played.replay((x, None, y), (x.data_ptr(), 0, y.data_ptr()))
    begin = got.data_ptr()
    assert (nothing, same) == (None, y)
    assert seen[0] == (begin + 16, x.data_ptr() + 24, begin, CONSTANT.data_ptr() + 8)
    assert seen[1] == (y.data_ptr() + 4,)
    assert seen[2][:2] == (x.data_ptr(), begin + 32)


def test_zeros_are_written_where_a_view_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver fills if kernels are launched; torch fills a view with gaps."""
    seen: list[Any] = []
    kernel = SimpleNamespace(
        tensors_of=lambda arguments: list(arguments),
        prepare=lambda programs, arguments: SimpleNamespace(launch=lambda stream, addresses: None),
    )
    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    monkeypatch.setattr(launch, "is_plain", lambda: True)
    monkeypatch.setattr(direct, "set_to_zero", lambda stream, address, size: seen.append((address, size)))
    recorder = Recorder(())
    with recorder:
        made = torch.empty(3, 4)
        made[1].zero_()
        made[:, 1].zero_()
        recorder.on_launch(kernel, 1, (made,))
    (played,) = replay.Recording(recorder, [recorder.slot(made)], torch.device("cpu")).replay((), ())
    assert seen == [(played.data_ptr() + 16, 16)]


def test_a_replay_is_made_on_the_recordings_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    seen: list[int] = []
    kernel = SimpleNamespace(
        tensors_of=lambda arguments: list(arguments),
        prepare=lambda programs, arguments: SimpleNamespace(launch=lambda stream, addresses: seen.append(current[0])),
    )
    monkeypatch.setattr(compat, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    x = torch.ones(3)
    recorder = Recorder((x,))
    with recorder:
        recorder.on_launch(kernel, 1, (x,))
    played = replay.Recording(recorder, [recorder.slot(x)], torch.device("cuda", 1))
    for current[0] in (0, 1, 2):
        before = current[0]
        assert played.replay((x,), (x.data_ptr(),)) == (x,)
        assert current[0] == before
    assert seen == [1, 1, 1]


def test_the_tensors_of_operands_come_first() -> None:
    assert Operands._fields[:17] == TENSOR_FIELDS
