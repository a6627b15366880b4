"""Calls whose tensors share a storage or do not, with equal shapes, strides and alignment, which is all that a cached call sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexattn
from flexattn import call_cache, fp8

BATCH, HEADS, HEADS_KV = 2, 2, 1
PAGE_SIZE = 16
ALIGNMENT = 64
E4M3 = torch.float8_e4m3fn

Tensors = dict[str, Tensor]


class Sizes(NamedTuple):
    """Sizes of a call, which are larger on a GPU."""

    length: int  # a multiple of 20
    dim: int
    dtype: torch.dtype


Call = tuple[Tensors, dict[str, Any]]  # the tensors, dout and dlse among them, and the other arguments


def dense(fmt: str = "bshd", **more: Any) -> Callable[[Sizes], Call]:
    """Returns a function that draws a call."""

    def draw(sizes: Sizes) -> Call:
        q_format, kv_format = fmt.split("_2") if "_2" in fmt else (fmt, fmt)
        dims = {"b": BATCH, "s": sizes.length, "d": sizes.dim}
        shapes = {"q": (q_format, HEADS), "k": (kv_format, HEADS_KV), "v": (kv_format, HEADS_KV), "dout": (q_format, HEADS)}
        tensors = {
            name: torch.randn([(dims | {"h": h})[dim] for dim in order], dtype=sizes.dtype) for name, (order, h) in shapes.items()
        }
        tensors["dlse"] = torch.randn(BATCH, HEADS, sizes.length)
        return tensors, {"qkv_format": fmt, "attn_mask_type": "causal", **more}

    return draw


def packed(sizes: Sizes) -> Call:
    total, longest = sizes.length * 3 // 2, sizes.length * 3 // 5
    head_counts = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV, "dout": HEADS}
    tensors = {name: torch.randn(total, h, sizes.dim, dtype=sizes.dtype) for name, h in head_counts.items()}
    tensors["dlse"] = torch.randn(HEADS, total)
    for side in ("q", "kv"):
        first, second = torch.randint(1, longest, (2,)).tolist()
        tensors[f"cu_seqlens_{side}"] = torch.tensor([0, first, first + second], dtype=torch.int32)
        tensors[f"cu_seqlens_{side}_padded"] = torch.tensor([0, longest, total], dtype=torch.int32)
    lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return tensors, {"qkv_format": "thd", "attn_mask_type": "padding_causal", **lengths}


def _forward_alone(call: Call) -> Call:
    return {name: t for name, t in call[0].items() if name not in ("dout", "dlse")}, call[1]


def cache(sizes: Sizes) -> Call:
    """A dense cache in FP8."""
    tensors, arguments = _forward_alone(dense()(sizes))
    tensors["q"] = tensors["q"].bfloat16()
    for name in "kv":
        tensors[name] = tensors[name].to(E4M3)
        tensors[f"descale_{name}"] = torch.rand(BATCH, HEADS_KV) + 0.5
    return tensors, arguments


def pages(sizes: Sizes) -> Call:
    """A cache in pages, in FP8 with descales."""
    columns = -(-sizes.length // PAGE_SIZE)
    tensors = {"q": torch.randn(BATCH, 3, HEADS, sizes.dim).bfloat16()}
    for name in "kv":
        tensors[name] = torch.randn(BATCH * columns + 1, PAGE_SIZE, HEADS_KV, sizes.dim).to(E4M3)
        tensors[f"descale_{name}"] = torch.rand(BATCH, HEADS_KV) + 0.5
    tensors["page_table"] = torch.randperm(BATCH * columns).view(BATCH, columns).int()
    tensors["seqused_kv"] = torch.randint(3, sizes.length, (BATCH,)).int()
    tensors["seqused_q"] = torch.randint(1, 4, (BATCH,)).int()
    return tensors, {"attn_mask_type": "padding_causal_bottom_right", "max_seqlen_kv": columns * PAGE_SIZE}


def in_fp8(sizes: Sizes) -> Call:
    tensors, arguments = _forward_alone(dense()(sizes))
    for name in "qkv":
        tensors[name] = tensors[name].to(E4M3)
        tensors[f"descale_{name}"] = torch.rand(()) + 0.5
    return tensors, arguments | {"fp8_recipe": fp8.Recipe(out_dtype=torch.bfloat16)}


def quantised(sizes: Sizes) -> Call:
    """A call with quantised inputs and a backward in FP8."""
    return dense("sbhd", fp8_recipe=fp8.Recipe())(sizes._replace(dtype=torch.bfloat16))


def features(sizes: Sizes) -> Call:
    options = {"softmax_type": "learnable", "bias_type": "post_scale_bias", "dropout_p": 0.2}
    tensors, arguments = dense("bhsd", **options)(sizes)
    tensors["bias"] = torch.randn(1, HEADS, sizes.length, sizes.length, dtype=sizes.dtype)
    tensors["softmax_offset"] = torch.randn(HEADS)
    tensors["rng_state"] = torch.randint(0, 99, (2,))
    return tensors, arguments


def captured(sizes: Sizes) -> Call:
    """A mod that captures two tensors, which are no arguments."""
    tensors, arguments = dense("sbhd")(sizes)
    return tensors | {"slopes": torch.rand(HEADS), "shifts": torch.rand(HEADS)}, arguments


CASES: dict[str, Callable[[Sizes], Call]] = {
    "bshd": dense("bshd"),
    "sbhd": dense("sbhd"),
    "bhsd": dense("bhsd"),
    "thd": packed,
    "sbhd_2bshd": dense("sbhd_2bshd"),
    "cache in FP8": cache,
    "pages in FP8": pages,
    "FP8": in_fp8,
    "quantised": quantised,
    "features": features,
    "captured": captured,
}


def apart(tensors: Tensors, device: str = "cpu") -> Tensors:
    """Returns copies with the same strides, each in a storage of its own."""
    return {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for name, t in tensors.items()}


def together(tensors: Tensors, device: str = "cpu") -> Tensors:
    """Returns copies in one storage, in the order of the tensors, which have no gaps."""
    starts, end = [], 0
    for t in tensors.values():
        starts.append(end)
        end += -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    made = {}
    for (name, t), start in zip(tensors.items(), starts, strict=True):
        made[name] = memory[start : start + t.numel() * t.element_size()].view(t.dtype).as_strided(t.shape, t.stride()).copy_(t)
    return made


def reversed_together(tensors: Tensors, device: str = "cpu") -> Tensors:
    placed = together(dict(reversed(tensors.items())), device)
    return {name: placed[name] for name in tensors}  # a call with its arguments in another order has another key


def slices(tensors: Tensors, device: str = "cpu") -> Tensors:
    """Returns copies in which q, k and v, of one shape, alternate in memory, like the slices of one projection."""
    whole = torch.stack([tensors[name] for name in "qkv"], -2).to(device)
    return apart(tensors, device) | dict(zip("qkv", whole.unbind(-2), strict=True))


Place = Callable[..., Tensors]
PLACES: dict[str, Place] = {"apart": apart, "one storage": together, "one storage, reversed": reversed_together}
_LEAVES = ("q", "k", "v", "bias", "softmax_offset")


def results(tensors: Tensors, arguments: dict[str, Any]) -> list[Tensor]:
    """Returns out and lse of a call, and the gradients if `tensors` has incoming ones."""
    operands = {name: t for name, t in tensors.items() if name not in ("dout", "dlse", "slopes", "shifts")}
    if "slopes" in tensors:
        slopes, shifts = tensors["slopes"], tensors["shifts"]
        arguments = arguments | {"score_mod": lambda score, b, h, i, j: score * slopes[h] + shifts[h] * (i - j)}
    options = {"backend": "triton", "deterministic": True, "return_lse": True}
    if "dout" not in tensors:
        return list(flexattn.attention(**operands, **arguments, **options))
    leaves = [operands[name].requires_grad_() for name in _LEAVES if name in operands]
    out, lse = flexattn.attention(**operands, **arguments, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (tensors["dout"], tensors["dlse"]))]


def check_replay(drawn: tuple[Call, Call], recorded: Place, replayed: Place, device: str = "cpu") -> None:
    """Records a call with its tensors in one place, and replays it with tensors in the other place."""
    (tensors, arguments), (others, _) = drawn
    call_cache.clear_cache()
    want = results(apart(others, device), arguments)
    call_cache.clear_cache()
    for _ in range(2):
        results(recorded(tensors, device), arguments)
    made = call_cache.cache_info()["recordings"]
    assert made == 1 + ("dout" in tensors)
    for n, (a, b) in enumerate(zip(results(replayed(others, device), arguments), want, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"result {n} of the replayed call is wrong"
    info = call_cache.cache_info()
    assert (info["recordings"], info["size"]) == (made, 1)
