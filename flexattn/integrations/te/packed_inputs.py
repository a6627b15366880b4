"""Packed inputs of DotProductAttention: q, k and v as views, whose gradients become one tensor without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flexattn.packed_tensors import unpack
from flexattn.validation import describe

_DIMS = (-3, -2)


class Separate(NamedTuple):
    """q, k and v, and the packing of their gradients, "" for three tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    packing: str


def separate(layers: dict[str, Any], qkv_interleave_dim: int, qkv_format: str) -> Separate:
    """Returns q, k and v of three separate tensors, of q and a packed kv, or of a packed qkv.

    Args:
        layers: query_layer, key_layer, value_layer, qkv_layer and kv_layer; None for those that are not passed. qkv_layer has a
            dim of 3 at qkv_interleave_dim, and kv_layer a dim of 2. Both have one dim more than qkv_format.
        qkv_interleave_dim: -3 (3, h, d) or -2 (h, 3, d).
        qkv_format: the format of each part.

    Raises:
        ValueError, TypeError: for other combinations, shapes and dims.
    """
    passed = {name: t for name, t in layers.items() if t is not None}
    names = set(passed)
    if names == {"query_layer", "key_layer", "value_layer"}:
        return Separate(passed["query_layer"], passed["key_layer"], passed["value_layer"], "")
    if names not in ({"qkv_layer"}, {"query_layer", "kv_layer"}):
        raise ValueError(
            f"got {', '.join(passed) or 'no layer'}; accepted: query_layer, key_layer and value_layer; query_layer and kv_layer; "
            "or qkv_layer alone"
        )
    name, count = ("qkv_layer", 3) if "qkv_layer" in names else ("kv_layer", 2)
    packed = passed[name]
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is {describe(packed)}; accepted: a tensor")
    if qkv_interleave_dim not in _DIMS:
        raise ValueError(f"qkv_interleave_dim is {qkv_interleave_dim!r}; accepted: -3, -2")
    if packed.dim() != len(qkv_format) + 1 or packed.shape[qkv_interleave_dim] != count or packed.stride(-1) != 1:
        raise ValueError(
            f"{name} is {describe(packed)}; accepted in {qkv_format}: {len(qkv_format) + 1} dims, with {count} in dim "
            f"{qkv_interleave_dim}, and a contiguous last dim"
        )
    parts = unpack(packed, qkv_interleave_dim)
    if count == 3:
        return Separate(parts[0], parts[1], parts[2], "3hd" if qkv_interleave_dim == -3 else "h3d")
    return Separate(passed["query_layer"], parts[0], parts[1], "hd_2hd" if qkv_interleave_dim == -3 else "hd_h2d")
