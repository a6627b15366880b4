"""attention() of jagged nested tensors, whose values and offsets are packed sequences: nothing is copied, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.spec import with_padding

_OWN = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("seqused_q", "seqused_kv", "page_table", "out"),
)
_FP8 = ("fp8_recipe", "fp8_state", "descale_q", "descale_k", "descale_v")
_JAGGED_DIM = {"bshd": 1, "bhsd": 2}


def attend_nested(attend: Callable[..., Any], q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
    """Returns attend(q, k, v, **arguments), where q, k and v are jagged nested tensors; out is one with q's sequences.

    Raises what `packed_call` raises.
    """
    result = attend(**packed_call(arguments | {"q": q, "k": k, "v": v}))
    out, *others = result if isinstance(result, tuple) else (result,)
    is_bhsd = arguments["qkv_format"] == "bhsd"
    q = q.transpose(1, 2) if is_bhsd else q
    out = torch.nested.nested_tensor_from_jagged(
        out, q.offsets(), q.lengths(), min_seqlen=q._maybe_min_seqlen, max_seqlen=q._maybe_max_seqlen
    )
    out = out.transpose(1, 2) if is_bhsd else out
    return type(result)(out, *others) if others else out


def packed_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of packed sequences that does what one of nested q, k and v does.

    Raises ValueError for FP8, a format other than "bshd" and "bhsd", a jagged dim that is not that format's s, and for lengths that
    are given.
    """
    if any(arguments.get(name) is not None for name in _FP8):
        raise ValueError("q, k and v are nested and the call is in FP8; accepted: their values() as thd, with their offsets()")
    fmt = arguments["qkv_format"]
    given = [name for name in _OWN if arguments[name] is not None]
    if given:
        why = "a nested result is a new tensor" if given[0] == "out" else "nested tensors say their own lengths"
        raise ValueError(f"{given[0]} is given and q, k and v are nested; accepted: None, as {why}")
    tensors = {name: arguments[name] for name in ("q", "k", "v")}
    for name, x in tensors.items():
        if fmt not in _JAGGED_DIM or x.dim() != 4 or x._ragged_idx != _JAGGED_DIM[fmt]:
            raise ValueError(
                f"{name} is nested with shape {tuple(x.shape)} and qkv_format is {fmt!r}; accepted: [batch, jagged, heads, head "
                'dim] with "bshd" and [batch, heads, jagged, head dim] with "bhsd"'
            )
    if fmt == "bhsd":
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
    mask = with_padding(str(arguments["attn_mask_type"]))
    packed = arguments | {name: x.values() for name, x in tensors.items()} | {"qkv_format": "thd", "attn_mask_type": mask}
    for side, x in (("q", tensors["q"]), ("kv", tensors["k"])):
        packed |= {f"cu_seqlens_{side}{ending}": starts for ending, starts in _starts(x).items()}
        if packed[f"max_seqlen_{side}"] is None:  # what x knows without a look at its offsets, if it does
            packed[f"max_seqlen_{side}"] = x._maybe_max_seqlen
    return packed


def is_jagged(x: Any) -> bool:
    """Returns whether x is a jagged nested tensor; quick where it is a plain one."""
    return type(x) is not Tensor and isinstance(x, Tensor) and x.layout == torch.jagged


def _starts(x: Any) -> dict[str, Tensor]:
    """Returns the cu_seqlens of x, by the ending of their names, with where each sequence starts where there are gaps."""
    offsets, lengths = x.offsets().to(torch.int32), x.lengths()
    if lengths is None:
        return {"": offsets}
    return {"": torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), "_padded": offsets}
