"""attention() of jagged nested tensors, whose values and offsets are packed sequences: no copy and no synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flexattn.call_options import Arguments, CacheOptions, Fp8Options, LengthOptions, without_defaults
from flexattn.dispatch.spec import with_padding
from flexattn.validation import are_values_read

_LENGTHS = (*(name for name in LengthOptions.__annotations__ if name.startswith("cu_seqlens")), *CacheOptions.__annotations__)
_JAGGED_DIM = {"bshd": 1, "bhsd": 2}


def attend_nested(attend: Callable[..., Any], q: Any, k: Any, v: Any, arguments: Arguments) -> object:
    """Returns attend(q, k, v, **arguments) for jagged nested tensors q, k and v; out is one with q's sequences.

    Raises the errors of `packed_call`.
    """
    values, packed = packed_call((q, k, v), arguments)
    result = attend(*values, **without_defaults(packed))
    out, *others = result if isinstance(result, tuple) else (result,)
    is_bhsd = arguments["qkv_format"] == "bhsd"
    q = q.transpose(1, 2) if is_bhsd else q
    out = torch.nested.nested_tensor_from_jagged(
        out, q.offsets(), q.lengths(), min_seqlen=q._maybe_min_seqlen, max_seqlen=q._maybe_max_seqlen
    )
    out = out.transpose(1, 2) if is_bhsd else out
    return type(result)(out, *others) if others else out


def packed_call(qkv: tuple[Any, Any, Any], arguments: Arguments) -> tuple[tuple[object, object, object], Arguments]:
    """Returns q, k, v and the arguments of the packed call that equals a call of nested q, k and v.

    Raises ValueError for FP8, for a format other than "bshd" and "bhsd", for a jagged dim other than the format's s, for lengths as
    arguments, and for k and v with other sequences.
    """
    packed: dict[str, Any] = {**arguments}
    if any(packed[name] is not None for name in Fp8Options.__annotations__):
        raise ValueError("q, k and v are nested and the call is in FP8; accepted: their values() as thd, with their offsets()")
    fmt = arguments["qkv_format"]
    given = [name for name in (*_LENGTHS, "out", "kv_indices") if packed[name] is not None]
    if given:
        whys = {"out": "a nested result is a new tensor", "kv_indices": "lists of keys need the values() of q, k and v as thd"}
        why = whys.get(given[0], "nested tensors say their own lengths")
        raise ValueError(f"{given[0]} is given and q, k and v are nested; accepted: None, as {why}")
    for name, x in zip("qkv", qkv, strict=True):
        if fmt not in _JAGGED_DIM or x.dim() != 4 or x._ragged_idx != _JAGGED_DIM[fmt]:
            raise ValueError(
                f"{name} is nested with shape {tuple(x.shape)} and qkv_format is {fmt!r}; accepted: [batch, jagged, heads, head "
                'dim] with "bshd" and [batch, heads, jagged, head dim] with "bhsd"'
            )
    q, k, v = (x.transpose(1, 2) for x in qkv) if fmt == "bhsd" else qkv
    _check_same_tokens(k, v)
    packed |= {"qkv_format": "thd", "attn_mask_type": with_padding(str(arguments["attn_mask_type"]))}
    for side, x in (("q", q), ("kv", k)):
        packed |= {f"cu_seqlens_{side}{ending}": starts for ending, starts in _starts(x).items()}
        if packed[f"max_seqlen_{side}"] is None:  # the longest length, if x knows it without a look at its offsets
            packed[f"max_seqlen_{side}"] = x._maybe_max_seqlen
    return (q.values(), k.values(), v.values()), cast("Arguments", packed)


def _check_same_tokens(k: Any, v: Any) -> None:
    """Raises ValueError if the sequences of k and v differ, as far as that is known without a wait for the device."""
    if k.offsets() is v.offsets() and k.lengths() is v.lengths():
        return
    (ends, first), (ends_v, first_v) = ((x[""], x.get("_padded", x[""])[:-1]) for x in (_starts(k), _starts(v)))
    is_read = are_values_read(ends) and are_values_read(ends_v)
    if len(ends) != len(ends_v) or (is_read and not (torch.equal(ends, ends_v) and torch.equal(first, first_v))):
        lengths = f": {ends.diff().tolist()} and {ends_v.diff().tolist()} tokens" if is_read else ""
        raise ValueError(f"k and v are nested with different sequences{lengths}; accepted: the same lengths in the same places")


def _starts(x: Any) -> dict[str, Tensor]:
    """Returns x's cu_seqlens by the ending of their names, with the start of each sequence if there are gaps."""
    offsets, lengths = x.offsets().to(torch.int32), x.lengths()
    if lengths is None:
        return {"": offsets}
    return {"": torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), "_padded": offsets}
