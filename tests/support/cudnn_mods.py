"""Mods for tests of cuDNN's graphs, on a GPU, in plans and in the emulator, with cuDNN's refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import mods
from flexattn.dispatch.spec import AttentionSpec, Operands, with_classes
from flexattn.integrations.te import TEScoreMod
from flexattn.mods.trace import trace_mods
from flexattn.testing import Inputs, make_call, make_inputs

BATCH, HEADS = 2, 6


class Case(NamedTuple):
    """make(sq, skv, device) -> (score_mod, mask_mod). refused, backward_refused: words of the reason if cuDNN refuses."""

    make: Callable[[int, int, Any], tuple[Any, Any]]
    refused: str = ""
    backward_refused: str = ""


def numbers(*shape: int, device: Any, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def documents(length: int, device: Any) -> Tensor:
    return (torch.arange(length) // 50).to(torch.int32).to(device)


def masked(make: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda sq, skv, device: (None, make(sq, skv, device))


def scored(make: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda sq, skv, device: (make(sq, skv, device), None)


def reads(name: str, *shape: str) -> Callable[..., tuple[Any, Any]]:
    """A score_mod that adds or multiplies by a tensor of these dims, read at its own positions."""

    def make(sq: int, skv: int, device: Any) -> tuple[Any, Any]:
        sizes = {"b": BATCH, "h": HEADS, "q": sq, "kv": skv}
        t = numbers(*(sizes[dim] for dim in shape), device=device)

        def read(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            at = {"b": b, "h": h, "q": q_idx, "kv": kv_idx}
            value = t[tuple(at[dim] for dim in shape)]
            return score + value if name == "add" else score * value

        return read, None

    return make


class TECallbacks:
    """Callbacks as TransformerEngine's users write them, on cuDNN's own graph."""

    def softcap(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.tanh = graph.tanh(input=graph.div(a=score, b=tensors["cap"]))
        return graph.mul(a=self.tanh, b=tensors["cap"])

    def softcap_bprop(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        return graph.mul(a=gradient, b=graph.sub(a=tensors["one"], b=graph.mul(a=self.tanh, b=self.tanh)))

    def causal(self, graph: Any, score: Any, tensors: Any) -> Any:
        keep = graph.cmp_ge(input=graph.gen_index(score, axis=2), comparison=graph.gen_index(score, axis=3))
        return graph.binary_select(input0=score, input1=tensors["hidden"], mask=keep)

    def causal_bprop(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        keep = graph.cmp_ge(input=graph.gen_index(gradient, axis=2), comparison=graph.gen_index(gradient, axis=3))
        return graph.binary_select(input0=gradient, input1=tensors["zero"], mask=keep)

    def bias(self, graph: Any, score: Any, tensors: Any) -> Any:
        return graph.add(a=score, b=tensors["bias"])


def scalar(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value)


def te_softcap(sq: int, skv: int, device: Any) -> Any:
    callbacks = TECallbacks()
    return TEScoreMod(callbacks.softcap, callbacks.softcap_bprop, {"cap": scalar(1.5), "one": scalar(1.0)})


def te_causal(sq: int, skv: int, device: Any) -> Any:
    callbacks = TECallbacks()
    return TEScoreMod(callbacks.causal, callbacks.causal_bprop, {"hidden": scalar(float("-inf"))}, {"zero": scalar(0.0)})


def te_bias(sq: int, skv: int, device: Any) -> Any:
    return TEScoreMod(TECallbacks().bias, score_mod_tensors={"bias": numbers(1, HEADS, sq, skv, device=device)})


def smooth(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every smooth node, of values from 1 to 2."""
    x = 1 + torch.sigmoid(score)
    total = torch.exp(x) + torch.log(x) + torch.sqrt(x) + torch.rsqrt(x) + torch.sin(x) + torch.cos(x) + torch.erf(x)
    total = total + torch.tanh(x) + 1 / x + x**3 + x**0.5 + torch.exp2(x) + torch.log2(x) + torch.log1p(x) + torch.expm1(x)
    return total / 4 + torch.nn.functional.gelu(score) + torch.tan(x / 2)


def kinked(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every node with a kink or a jump, which random scores do not hit."""
    x = torch.where(score > 0.3, score, 0.5 * score) + torch.relu(score) + score.abs() + score.clamp(-1.0, 0.7)
    return x + torch.maximum(score, -score) * 0.25 + torch.floor(score * 2) * 0.125 + torch.sign(score) * 0.25


def positions(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Whole numbers of both positions: signs, remainders, divisions."""
    distance = q_idx - kv_idx
    x = torch.where(distance % 3 == 1, score, score * 0.5) + (distance % 5) * 0.125
    x = x + ((q_idx + 2 * kv_idx) // 7 % 4) * 0.25 - distance.abs().clamp(max=100) * 0.01
    return torch.where((distance > 5) ^ (kv_idx > 20), x, x + torch.sign(distance))


CASES: dict[str, Case] = {
    "causal": Case(masked(lambda sq, skv, device: mods.causal())),
    "sliding window": Case(masked(lambda sq, skv, device: mods.sliding_window(9, 4))),
    "dilated": Case(masked(lambda sq, skv, device: mods.dilated_sliding_window(20, 3))),
    "document": Case(masked(lambda sq, skv, device: mods.document(documents(max(sq, skv), device)))),
    "document [b, s]": Case(
        masked(lambda sq, skv, device: mods.document(torch.stack([documents(max(sq, skv), device) // n for n in (1, 2)])))
    ),
    "document of int64": Case(
        masked(lambda sq, skv, device: mods.document(documents(max(sq, skv), device).long())), "int32 tensor"
    ),
    "prefix-LM": Case(masked(lambda sq, skv, device: mods.prefix_lm(torch.tensor([5, 70], device=device)))),
    "NATTEN": Case(masked(lambda sq, skv, device: mods.natten_2d(18, 19, 7))),
    "document and causal": Case(
        masked(lambda sq, skv, device: mods.both(mods.document(documents(max(sq, skv), device)), mods.causal()))
    ),
    "document or window": Case(
        masked(lambda sq, skv, device: mods.either(mods.document(documents(max(sq, skv), device)), mods.sliding_window(70, 0)))
    ),
    "a mask [q, kv]": Case(
        masked(
            lambda sq, skv, device: (lambda t: lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx])(numbers(sq, skv, device=device) > 0)
        )
    ),
    "queries that see no key": Case(
        masked(lambda sq, skv, device: lambda b, h, q_idx, kv_idx: (q_idx % 4 != 1) & (kv_idx < 90 + h))
    ),
    "nothing is seen": Case(masked(lambda sq, skv, device: lambda b, h, q_idx, kv_idx: (b == 1) & (q_idx >= 0))),
    "softcap": Case(scored(lambda sq, skv, device: mods.softcap(1.5))),
    "softcap of a tensor": Case(scored(lambda sq, skv, device: mods.softcap(torch.tensor(1.5, device=device)))),
    "softcap of a tensor, with its gradient": Case(
        scored(lambda sq, skv, device: mods.softcap(torch.tensor(1.5, device=device).requires_grad_())),
        backward_refused="no gradient of a score_mod's captures, and cap requires one",
    ),
    "ALiBi": Case(scored(lambda sq, skv, device: mods.alibi(numbers(HEADS, device=device).abs() * 0.1))),
    "relative bias": Case(scored(lambda sq, skv, device: mods.relative_bias(numbers(32, HEADS, device=device))), "no gather"),
    "softcap under a document mask": Case(
        lambda sq, skv, device: (mods.softcap(1.5), mods.document(documents(max(sq, skv), device)))
    ),
    "a temperature for each head": Case(reads("mul", "h")),
    "a temperature for each batch entry and head": Case(reads("mul", "b", "h")),
    "a factor for each query": Case(reads("mul", "b", "h", "q")),
    "a factor for each key": Case(reads("mul", "b", "kv")),
    "a bias [q, kv]": Case(reads("add", "q", "kv")),
    "a bias [h, q, kv]": Case(reads("add", "h", "q", "kv")),
    "a bias [b, h, q, kv]": Case(reads("add", "b", "h", "q", "kv")),
    "a bias [kv, q]": Case(reads("add", "kv", "q")),
    "a bias [q, kv] of half the size": Case(
        scored(
            lambda sq, skv, device: (lambda t: lambda score, b, h, q_idx, kv_idx: score + t[q_idx, kv_idx])(
                numbers(sq // 2, skv // 2, device=device)
            )
        )
    ),
    "a score that ignores the score": Case(scored(lambda sq, skv, device: lambda score, b, h, i, j: (i + 2 * j) % 5 * 0.25)),
    "smooth ops": Case(scored(lambda sq, skv, device: smooth)),
    "ops with kinks": Case(scored(lambda sq, skv, device: kinked)),
    "whole numbers": Case(scored(lambda sq, skv, device: positions)),
    "a sum of conditions": Case(scored(lambda sq, skv, device: lambda score, b, h, i, j: score + ((i >= j) + (i - j < 9)) * 0.5)),
    "bits of one position": Case(scored(lambda sq, skv, device: lambda score, b, h, i, j: score + (i ^ 5) * 0.01 + (j & 3) * 0.25)),
    "bits of both positions": Case(
        scored(lambda sq, skv, device: lambda score, b, h, i, j: score + ((i ^ j) & 3) * 0.25), "no node for the bits of integers"
    ),
    "a quotient of a quotient": Case(scored(lambda sq, skv, device: lambda score, b, h, i, j: score + (i + j) // 2 // 3 * 0.01)),
    "scores of -inf": Case(
        scored(lambda sq, skv, device: lambda score, b, h, i, j: torch.where((i >= j) & (score > -1.0), score, float("-inf")) + 0.5)
    ),
    "infinite where it is hidden": Case(
        lambda sq, skv, device: (
            lambda score, b, h, i, j: score + torch.sqrt((i - j).to(torch.float32)) + torch.log(score.abs() * (i - j + 1)),
            lambda b, h, i, j: i > j,
        )
    ),
    "round": Case(scored(lambda sq, skv, device: lambda score, b, h, i, j: torch.round(score)), "no node for round"),
    "three values for each query": Case(
        scored(
            lambda sq, skv, device: (
                lambda x, y, z: lambda score, b, h, i, j: torch.where(i > j, score * x[i] + y[i] * j, score * z[i])
            )(*(numbers(sq, device=device, seed=n) for n in range(3)))
        ),
        backward_refused="3 different values for each query",
    ),
    "TransformerEngine's softcap": Case(scored(te_softcap)),
    "TransformerEngine's causal": Case(scored(te_causal)),
    "TransformerEngine's bias": Case(scored(te_bias)),
}


class Shape(NamedTuple):
    """A call for tests of mods: its format, the lengths for `make_inputs`, and the other arguments."""

    fmt: str
    lengths: str  # key of the test's table of lengths
    call: dict[str, Any]
    inputs: dict[str, Any] = {}  # noqa: RUF012  # further arguments of `make_inputs`, never changed


SHAPES = {
    "dense": Shape("bshd", "equal", {}),
    "lengths": Shape("sbhd", "uneven", {"attn_mask_type": "padding"}, {"padding": True, "gap": 5}),
    "packed": Shape("thd", "uneven", {"attn_mask_type": "padding"}, {"gap": 5}),
}

WITH = ("softcap under a document mask", "whole numbers", "queries that see no key")  # the cases that the following are tried with
CALLS = {
    "causal": Shape("bshd", "equal", {"attn_mask_type": "causal"}),
    "causal_bottom_right": Shape("bhsd", "equal", {"attn_mask_type": "causal_bottom_right"}),
    "sq > skv": Shape("bshd", "fewer keys", {"attn_mask_type": "causal_bottom_right"}),
    "window": Shape("bshd", "equal", {"window_size": (70, 9)}),
    "padding_causal": Shape("bshd", "uneven", {"attn_mask_type": "padding_causal"}, {"padding": True, "gap": 5}),
    "padding_causal_bottom_right": Shape("bhsd", "uneven", {"attn_mask_type": "padding_causal_bottom_right"}, {"padding": True}),
    "packed, causal_bottom_right": Shape("thd", "uneven", {"attn_mask_type": "padding_causal_bottom_right"}, {"gap": 5}),
    "packed, window": Shape("thd", "uneven", {"attn_mask_type": "padding", "window_size": (40, 9)}, {"gap": 5}),
    "packed, empty sequences": Shape("thd", "empty", {"attn_mask_type": "padding_causal"}, {"gap": 5}),
    "mixed formats": Shape("thd_2bshd", "uneven", {"attn_mask_type": "padding"}, {"padding": True, "gap": 5}),
    "sink": Shape("bshd", "equal", {"softmax_type": "learnable"}),
    "sink with lengths": Shape("bshd", "uneven", {"attn_mask_type": "padding", "softmax_type": "off-by-one"}, {"padding": True}),
    "max_logit": Shape("bshd", "equal", {"return_max_logit": True}),
    "strided": Shape("bshd", "equal", {}, {"strided": True}),
    "head dim 128": Shape(
        "bshd", "equal", {"attn_mask_type": "causal"}, {"head_dim_qk": 128, "head_dim_v": 128, "dtype": torch.float16}
    ),
    "head dims 192 and 128": Shape("bshd", "equal", {}, {"head_dim_qk": 192, "head_dim_v": 128}),
    "head dim 256": Shape("bshd", "equal", {}, {"head_dim_qk": 256, "head_dim_v": 256}),
    "head dim 8": Shape("bshd", "equal", {}, {"head_dim_qk": 8, "head_dim_v": 8}),
    "one key head": Shape("bshd", "equal", {}, {"num_heads_kv": 1}),
    "keys in whole tiles": Shape("bshd", "whole tiles", {}),
    "keys in a half tile": Shape("bshd", "half a tile", {}),
    "few keys": Shape("bshd", "few keys", {}),
}


def mods_call(
    case: Case, shape: Shape, lengths: dict[str, tuple[list[int], list[int]]], device: Any
) -> tuple[AttentionSpec, Operands, Inputs]:
    """A call with a case's mods as `attention` would bring it to a backend: but without their band, so that nodes say all of it."""
    lengths_q, lengths_kv = lengths[shape.lengths]
    heads = {"num_heads": HEADS, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16}
    given = make_inputs(shape.fmt, lengths_q=lengths_q, lengths_kv=lengths_kv, device=device, **{**heads, **shape.inputs})
    traced = trace_mods(*case.make(max(lengths_q), max(lengths_kv), device), needs_grad=True)
    traced = traced._replace(tensors=tuple(t.to(device) for t in traced.tensors))  # as `attention` does with 0-d ones
    call = {"return_max_logit": False, **shape.call}
    if call.get("softmax_type") == "learnable":
        call["softmax_offset"] = numbers(HEADS, device=device)
    spec, x = make_call(given, mods=traced, **call)
    return with_classes(spec, x), x, given
