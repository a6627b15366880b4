"""Common mods: each function returns a mask_mod or a score_mod for `attention`. Their source is also an example of a mod.

Masks (for `mask_mod` or `create_block_mask`): causal, sliding_window, dilated_sliding_window, document, prefix_lm, tree and
natten_2d.
`both` and `either` combine masks. Scores (for `score_mod`): softcap, alibi, relative_bias.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch import options
from flexattn.dispatch.neutral import is_capturing, is_traced
from flexattn.mods.trace import Mod, refuse_misplaced
from flexattn.validation import check_flag, describe


def causal() -> Mod:
    """mask_mod: a query sees the keys up to and including its position."""
    return _causal


def sliding_window(left: int, right: int) -> Mod:
    """mask_mod: a query sees the key at its position, `left` keys before it and `right` keys after it."""
    _check_counts(left=left, right=right)
    return functools.partial(_sliding_window, left=left, right=right)


def dilated_sliding_window(window: int, dilation: int) -> Mod:
    """mask_mod: a query sees every `dilation`-th key, `window` of them to each side (Longformer, Beltagy et al., 2020)."""
    _check_counts(window=window, dilation=dilation)
    if dilation == 0:
        raise ValueError("dilation is 0; accepted: at least 1")
    return functools.partial(_dilated_sliding_window, window=window, dilation=dilation)


def document(document_ids: Tensor) -> Mod:
    """mask_mod: a query sees the keys of its document. document_ids: integers, [s], or [b, s] if batch entries differ."""
    _check_tensor("document_ids", document_ids)
    if document_ids.dim() not in (1, 2) or document_ids.is_floating_point():
        raise ValueError(
            f"document_ids is a {document_ids.dtype} tensor of shape {tuple(document_ids.shape)}; accepted: integers, [s] or [b, s]"
        )
    return _reading(
        functools.partial(_document, document_ids=document_ids), "document_ids", document_ids, "bs"[-document_ids.dim() :]
    )


def prefix_lm(prefix_lengths: Tensor) -> Mod:
    """mask_mod: causal, but every query also sees the first prefix_lengths[b] keys. prefix_lengths: integers, [b]."""
    _check_tensor("prefix_lengths", prefix_lengths)
    if prefix_lengths.dim() != 1 or prefix_lengths.is_floating_point():
        raise ValueError(
            f"prefix_lengths is a {prefix_lengths.dtype} tensor of shape {tuple(prefix_lengths.shape)}; accepted: integers, [b]"
        )
    return _reading(functools.partial(_prefix_lm, prefix_lengths=prefix_lengths), "prefix_lengths", prefix_lengths, "b")


def tree(parents: Tensor, starts: Tensor, ends: Tensor, tokens: int) -> Mod:
    """mask_mod: a token sees the earlier tokens of its segment, and all tokens of the segment's ancestors.

    A packed tree holds each shared prefix once, such as one prompt before its sampled answers. Its segments lie in one row in
    depth-first order: a segment follows its parent, or ends the subtree of an earlier child. Then the tokens that see a key are
    those from the key's position to the end of its segment's subtree.

    Args:
        parents: [n], integers: the index of each segment's parent, or -1 for a root.
        starts, ends: [n], integers: position of each segment's first token, and of the token behind its last one. Positions ascend.
        tokens: length of the row. A token outside of all segments sees nothing.

    Raises:
        TypeError, ValueError: a tensor has another dtype or shape, or the segments are in another order. Values on a GPU are
            checked if `FLEXATTN_CHECK=1`.
    """
    _check_counts(tokens=tokens)
    for name, x in (("parents", parents), ("starts", starts), ("ends", ends)):
        _check_tensor(name, x)
        if x.dim() != 1 or x.is_floating_point() or x.shape != parents.shape or not x.numel() or x.device != parents.device:
            raise ValueError(
                f"{name} is a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}; accepted: integers, [segments] with at "
                f"least one segment, for parents, starts and ends alike, on one device"
            )
    if not is_traced() and (parents.device.type == "cpu" or (options.check_values() and not is_capturing())):
        _check_tree(parents.tolist(), starts.tolist(), ends.tolist(), tokens)
    parents, starts, ends = (x.long() for x in (parents, starts, ends))
    # In each round, `last` is the end of the descendants fewer than 2**round levels below, `ancestors` the one 2**round above
    last, ancestors = ends, parents
    for _ in range((len(parents) - 1).bit_length()):
        has_ancestor = ancestors >= 0
        target = ancestors.clamp(min=0)
        last = last.scatter_reduce(0, target, torch.where(has_ancestor, last, 0), "amax")
        ancestors = torch.where(has_ancestor, ancestors[target], -1)
    positions = torch.arange(tokens, device=parents.device)
    segments = torch.searchsorted(ends, positions, right=True)
    is_inside = segments < len(ends)
    segments = segments.clamp(max=len(ends) - 1)
    last_query = torch.where(is_inside & (positions >= starts[segments]), last[segments], 0).int()
    return _reading(functools.partial(_tree, last_query=last_query), "the tree", last_query, "s")


def natten_2d(height: int, width: int, kernel_size: int) -> Mod:
    """mask_mod: neighbourhood attention (Hassani et al., "Neighborhood Attention Transformer", 2023) in an image, row by row.

    A query sees the kernel_size x kernel_size keys around it. At a border the square moves inward, so that each query sees the
    same number of keys. kernel_size is odd and at most height and width.
    """
    _check_counts(height=height, width=width, kernel_size=kernel_size)
    if kernel_size % 2 == 0 or not 1 <= kernel_size <= min(height, width):
        raise ValueError(
            f"kernel_size is {kernel_size} for an image of {height} x {width}; accepted: odd, from 1 to {min(height, width)}"
        )
    return functools.partial(_natten_2d, height=height, width=width, half=kernel_size // 2)


def both(*mask_mods: Mod) -> Mod:
    """mask_mod: a query sees a key if all of the masks show it."""
    _check_masks("both", mask_mods)
    return _checking_parts(functools.partial(_both, mask_mods=mask_mods))


def either(*mask_mods: Mod) -> Mod:
    """mask_mod: a query sees a key if any of the masks shows it."""
    _check_masks("either", mask_mods)
    return _checking_parts(functools.partial(_either, mask_mods=mask_mods))


def softcap(cap: float | Tensor) -> Mod:
    """score_mod: cap * tanh(score / cap). A 0-d tensor as cap gets a gradient."""
    if isinstance(cap, bool) or not ((isinstance(cap, (int, float)) and cap > 0) or (isinstance(cap, Tensor) and cap.dim() == 0)):
        raise ValueError(f"cap is {describe(cap)}; accepted: a number above 0, or a 0-d tensor")
    return functools.partial(_softcap, cap=cap)


def alibi(slopes: Tensor) -> Mod:
    """score_mod: -slopes[h] * |q_idx - kv_idx| (Press et al., "Train Short, Test Long", 2022). slopes [h] get a gradient."""
    _check_tensor("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"slopes has shape {tuple(slopes.shape)}; accepted: [h]")
    return _reading(functools.partial(_alibi, slopes=slopes), "slopes", slopes, "h")


def relative_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Mod:
    """score_mod: T5's relative position bias (Raffel et al., 2020, section 2.1): + table[bucket(kv_idx - q_idx), h].

    table: [buckets, h], gets a gradient. If bidirectional, each direction has half of the buckets. The first half of a direction's
    buckets holds one distance each; the others widen logarithmically up to max_distance, and all larger distances share the last.
    The buckets equal those of T5 in the transformers library.
    """
    _check_tensor("table", table)
    check_flag("bidirectional", bidirectional)
    _check_counts(max_distance=max_distance)
    if table.dim() != 2:
        raise ValueError(f"table has shape {tuple(table.shape)}; accepted: [buckets, h]")
    bucket_of = _t5_buckets(table.shape[0], bidirectional, max_distance).to(table.device)
    mod = functools.partial(_relative_bias, table=table, bucket_of=bucket_of, max_distance=max_distance)
    return _reading(mod, "table", table, "-h")


# Checks of a call's sizes. `attention` calls them if a mod has any: a read past the end of a tensor has no value.


def _reading(mod: Mod, name: str, tensor: Tensor, axes: str) -> Mod:
    """Attaches a check to a mod, which refuses a call if `tensor` is too small for it. axes: the index of each dim, as a letter."""
    if not torch.compiler.is_compiling():  # Dynamo cannot trace this, and a compiled call makes no such checks
        setattr(mod, "_flexattn_check_sizes", functools.partial(_check_sizes, name, tuple(tensor.shape), axes))  # noqa: B010
    return mod


def _check_sizes(
    name: str, shape: tuple[int, ...], axes: str, batch: int, heads: int, longest_q: int | None, longest_kv: int | None
) -> None:
    """Raises ValueError if a dim has fewer entries than the call has sequences (b), heads (h) or positions (s).

    A length is None if it is not known.
    """
    sizes = {"b": ("sequences", batch), "h": ("heads", heads), "s": ("positions", max(longest_q or 0, longest_kv or 0))}
    for dim, axis in enumerate(axes):
        unit, size = sizes.get(axis, ("", 0))
        if shape[dim] < size:
            raise ValueError(
                f"{name} has shape {shape}, with {shape[dim]} {unit} in dim {dim}, and the call has {size}; accepted: at least "
                f"{size} there"
            )


def _checking_parts(mod: Any) -> Mod:
    """Attaches the checks of all parts to a combination of mask_mods."""
    checks = [getattr(part, "_flexattn_check_sizes", None) for part in mod.keywords["mask_mods"]]
    checks = [check for check in checks if check is not None]
    if checks and not torch.compiler.is_compiling():
        setattr(mod, "_flexattn_check_sizes", functools.partial(_check_all, checks))  # noqa: B010
    return mod  # type: ignore[no-any-return]


def _check_all(checks: list[Any], *sizes: object) -> None:
    for check in checks:
        check(*sizes)


# The mods themselves: functions of the module, not closures, so that an object that holds one can be pickled.


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, left: int, right: int) -> Tensor:
    return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)


def _dilated_sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, window: int, dilation: int) -> Tensor:
    distance = (q_idx - kv_idx).abs()
    return (distance <= window * dilation) & (distance % dilation == 0)


def _document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, document_ids: Tensor) -> Tensor:
    row = document_ids if document_ids.dim() == 1 else document_ids[b]
    return row[q_idx] == row[kv_idx]


def _prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, prefix_lengths: Tensor) -> Tensor:
    return (q_idx >= kv_idx) | (kv_idx < prefix_lengths[b])


def _tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, last_query: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (q_idx < last_query[kv_idx])


def _natten_2d(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, height: int, width: int, half: int) -> Tensor:
    center_y = (q_idx // width).clamp(half, height - 1 - half)
    center_x = (q_idx % width).clamp(half, width - 1 - half)
    return ((kv_idx // width - center_y).abs() <= half) & ((kv_idx % width - center_x).abs() <= half)


def _both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, mask_mods: tuple[Mod, ...]) -> Tensor:
    visible: Tensor = mask_mods[0](b, h, q_idx, kv_idx)
    for mask_mod in mask_mods[1:]:
        visible = visible & mask_mod(b, h, q_idx, kv_idx)
    return visible


def _either(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, mask_mods: tuple[Mod, ...]) -> Tensor:
    visible: Tensor = mask_mods[0](b, h, q_idx, kv_idx)
    for mask_mod in mask_mods[1:]:
        visible = visible | mask_mod(b, h, q_idx, kv_idx)
    return visible


def _softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, cap: float | Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


def _alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor) -> Tensor:
    return score - slopes[h] * (q_idx - kv_idx).abs()


def _relative_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, table: Tensor, bucket_of: Tensor, max_distance: int
) -> Tensor:
    distance = (kv_idx - q_idx).clamp(-max_distance, max_distance) + max_distance
    return score + table[bucket_of[distance], h]


def _t5_buckets(num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """int32 [2 * max_distance + 1]: the bucket of each kv_idx - q_idx, starting at -max_distance. The logarithms are in fp64."""
    relative = torch.arange(-max_distance, max_distance + 1, device="cpu")
    side_buckets = num_buckets // 2 if bidirectional else num_buckets
    offset = (relative > 0) * side_buckets if bidirectional else torch.zeros_like(relative)
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    exact = side_buckets // 2
    if not 1 <= exact < max_distance:
        raise ValueError(
            f"table has {num_buckets} buckets and max_distance is {max_distance}; accepted: fewer exact buckets than distances"
        )
    widening = torch.log(distance.clamp(min=1).double() / exact) / math.log(max_distance / exact) * (side_buckets - exact)
    bucket = torch.where(distance < exact, distance, (exact + (widening + 1e-9).long()).clamp(max=side_buckets - 1))
    return (bucket + offset).to(torch.int32)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is {value!r}; accepted: a number of tokens, an int of at least 0")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {describe(value)}; accepted: a tensor")


def _check_tree(parents: list[int], starts: list[int], ends: list[int], tokens: int) -> None:
    """Raises ValueError if positions do not ascend within the row, or the segments are not in depth-first order."""
    path: list[int] = []  # the last segment and its ancestors, the root first
    position = 0
    for n, (parent, start, end) in enumerate(zip(parents, starts, ends, strict=True)):
        if not position <= start <= end <= tokens:
            raise ValueError(
                f"starts[{n}] is {start} and ends[{n}] is {end}; accepted: {position} <= start <= end <= {tokens}, the end of the "
                "segment before and the tokens of the row"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            before = "-1, because no segment precedes" if n == 0 else f"-1, {n - 1} or one of its ancestors: depth-first order"
            raise ValueError(f"parents[{n}] is {parent}; accepted: {before}")
        path.append(n)
        position = end


def _check_masks(name: str, mask_mods: tuple[object, ...]) -> None:
    if not mask_mods:
        raise TypeError(f"mods.{name}() has no mask_mod; accepted: at least one")
    for i, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise TypeError(f"mask_mods[{i}] of mods.{name}() is {describe(mask_mod)}; accepted: a function of b, h, q_idx, kv_idx")
        refuse_misplaced(f"mask_mods[{i}] of mods.{name}()", "mask_mod", mask_mod)
