"""`append_kv`, which writes new keys and values into a cache, and its operator, `flexattn::append_kv`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch import options
from flexattn.dispatch.append import Appended, append
from flexattn.dispatch.spec import parse_format
from flexattn.lengths import check_cumulative
from flexattn.validation import DTYPES, check_tensor, describe

_library: Any = torch.library.Library("flexattn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor? page_table, Tensor seqused_kv, "
    "Tensor? cu_seqlens_q, Tensor? seqused_q, str qkv_format) -> ()"
)
_operator = torch.ops.flexattn.append_kv.default


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    seqused_kv: Tensor,
    page_table: Tensor | None = None,
    qkv_format: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    seqused_q: Tensor | None = None,
) -> None:
    """Writes new keys and values behind those of each sequence in a cache, in place, which `attention` then reads.

    Row i of sequence b's new ones goes to position seqused_kv[b] + i. So a step of decoding appends with the lengths before it, and
    attends with `seqused_kv` the lengths after it:

        append_kv(k_cache, v_cache, k, v, seqused_kv=lengths, page_table=table)
        out = attention(q, k_cache, v_cache, seqused_kv=lengths + new, page_table=table, ...)

    Nothing is read back from the device, and shapes alone decide what is launched: a CUDA graph that has captured the call writes
    where lengths and tables say at each replay. On GPUs from compute capability 8.0 on one Triton kernel does it, elsewhere torch
    ops do. Rows that do not fit, by a length below 0, a position beyond the cache or the table, or a page id out of range, are not
    written, and neither is anything else; with FLEXATTN_CHECK=1 they raise, at the cost of a transfer from the device. Where two
    sequences append to one page's row, either may remain.

    The arguments are those of `attention`, whose queries the new rows belong to; FlashAttention's `flash_attn_with_kvcache`
    (https://github.com/Dao-AILab/flash-attention) takes the same new rows as its k and v.

    Args:
        k_cache, v_cache: [b, s, h_kv, d] and [b, s, h_kv, d_v] in the second format of qkv_format, or with a page_table pools
            [pages, page_size, h_kv, d]; any strides with a contiguous last dim. Written to.
        k_new, v_new: [b, s_new, h_kv, d] or [total, h_kv, d], and d_v, in the first format of qkv_format, any strides with a
            contiguous last dim; of the caches' dtype, or of another floating dtype of 16 or 32 bits, from which they are rounded.
        seqused_kv: int32 [b]: how many rows each sequence has before.
        page_table: int32 [b, columns]: rows n * page_size and on of sequence b are in page page_table[b, n]. Ids in columns that
            nothing is appended to are not read.
        qkv_format: the format of k_new and v_new, then that of the caches: "bshd", "thd_2bshd", "bhsd", "bshd_2bhsd", and so on.
        cu_seqlens_q: int32 [b + 1]. For thd where each sequence's new rows begin and end; for other formats, where given, their
            differences are how many of a row's tokens are appended.
        seqused_q: int32 [b]: how many of its slot, or of its row, each sequence appends; None: all.

    Raises:
        ValueError, TypeError: arguments that do not fit together, named; a new row or a cache that requires a gradient, while
            gradients are recorded, as appending has none.
    """
    formats = parse_format(str(qkv_format))
    x = Appended(k_new, v_new, page_table, seqused_kv, cu_seqlens_q, seqused_q, formats)
    _check(k_cache, v_cache, x)
    _operator(k_cache, v_cache, *x[:-1], qkv_format)


def _check(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    new_format, cache_format = x.formats
    if cache_format == "thd" or (x.page_table is not None and cache_format == "sbhd"):
        room = (
            "'bshd' or 'bhsd' for pages" if x.page_table is not None else "'bshd', 'bhsd' or 'sbhd', with room behind each sequence"
        )
        raise ValueError(f"qkv_format has {cache_format!r} for the caches; accepted: {room}, as in '{new_format}_2bshd'")
    check_tensor("k_cache", k_cache, DTYPES, None)
    device = k_cache.device
    for name, t in (("v_cache", v_cache), ("k_new", x.k_new), ("v_new", x.v_new)):
        check_tensor(name, t, (k_cache.dtype,) if name == "v_cache" else _sources_of(k_cache.dtype), device)
    for name, t, fmt in (
        ("k_cache", k_cache, cache_format),
        ("v_cache", v_cache, cache_format),
        ("k_new", x.k_new, new_format),
        ("v_new", x.v_new, new_format),
    ):
        if t.dim() != len(fmt) or t.shape[-1] == 0 or t.shape[fmt.index("h")] == 0 or (t.stride(-1) != 1 and t.shape[-1] != 1):
            raise ValueError(f"{name} is {describe(t)}; accepted: the {len(fmt)} dims of {fmt}, none empty, the last contiguous")
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and appending to a cache has none; accepted: a call under torch.no_grad(), or "
                f"{name}.detach()"
            )
    _check_sizes((k_cache, v_cache), x)
    _check_lengths(k_cache, x)


def _sources_of(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that are rounded to a cache of `dtype`."""
    return (dtype,) if dtype is torch.float64 else (dtype, *(other for other in DTYPES if other not in (dtype, torch.float64)))


def _check_sizes(caches: tuple[Tensor, Tensor], x: Appended) -> None:
    """Raises unless k is to v as the caches are to each other, and the new rows have the caches' heads and head dims."""
    new_format, cache_format = x.formats
    for (kind, k), (_, v), fmt in (
        (("k_cache", caches[0]), ("v_cache", caches[1]), cache_format),
        (("k_new", x.k_new), ("v_new", x.v_new), new_format),
    ):
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"{kind} has shape {tuple(k.shape)} and its values {tuple(v.shape)} in {fmt}; accepted: the same but for the last "
                "dim"
            )
    for name, cache, new in (("k_new", caches[0], x.k_new), ("v_new", caches[1], x.v_new)):
        sizes = cache.shape[cache_format.index("h")], cache.shape[-1]
        if (new.shape[new_format.index("h")], new.shape[-1]) != sizes:
            raise ValueError(
                f"{name} has shape {tuple(new.shape)} in {new_format}; accepted: the cache's {sizes[0]} heads of {sizes[1]} "
                "elements"
            )


def _sequences_of(name: str, t: Any, more: int, device: torch.device) -> int:
    """Returns the number of sequences that a tensor of lengths, which has `more` entries than that, is of."""
    check_tensor(name, t, (torch.int32,), device)
    if t.dim() != 1 or t.shape[0] < more or not t.is_contiguous():
        raise ValueError(f"{name} is {describe(t)}; accepted: a contiguous tensor of shape [batch{' + 1' if more else ''}]")
    return t.shape[0] - more  # type: ignore[no-any-return]


def _check_lengths(k_cache: Tensor, x: Appended) -> None:
    """Raises where lengths are missing or of wrong types, or tell of other batch sizes."""
    (new_format, cache_format), device = x.formats, k_cache.device
    batches = []
    lengths = (("seqused_kv", x.seqused_kv, 0), ("seqused_q", x.seqused_q, 0), ("cu_seqlens_q", x.cu_seqlens_q, 1))
    for name, t, more in lengths:
        if t is not None or name == "seqused_kv":
            batches.append((f"the batch of {name}", _sequences_of(name, t, more, device)))
    if new_format == "thd" and x.cu_seqlens_q is None:
        raise ValueError(
            "cu_seqlens_q is None with new rows in thd; accepted: an int32 tensor [batch + 1], where each sequence begins"
        )
    if new_format != "thd":
        batches.append(("the batch of k_new", x.k_new.shape[new_format.index("b")]))
        if x.cu_seqlens_q is not None and x.seqused_q is not None:
            raise ValueError(f"cu_seqlens_q and seqused_q are given with format {new_format}; accepted: one of them")
    table = x.page_table
    if table is None:
        batches.append(("the batch of k_cache", k_cache.shape[cache_format.index("b")]))
    else:
        check_tensor("page_table", table, (torch.int32,), device)
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(
                f"page_table is {describe(table)}; accepted: int32 [b, columns], with the entries of a row side by side"
            )
        if 0 in k_cache.shape or table.shape[1] == 0:
            raise ValueError(
                f"k_cache is {describe(k_cache)} and page_table {describe(table)}; accepted: at least one page, of one token, and "
                "one column"
            )
        batches.append(("the rows of page_table", table.shape[0]))
    source, batch = batches[0]
    for name, size in batches[1:]:
        if size != batch:
            raise ValueError(f"{name} is {size} and {source} is {batch}; accepted: one batch size for all of them")


def _check_values(k_cache: Tensor, x: Appended) -> None:
    """Raises ValueError, under FLEXATTN_CHECK=1, for lengths and page ids by which a row would be left out; waits for them."""
    new_format, cache_format = x.formats
    used = x.seqused_kv.tolist()
    slots = [x.k_new.shape[new_format.index("s")]] * len(used) if new_format != "thd" else []
    if x.cu_seqlens_q is not None:
        ends = x.cu_seqlens_q.tolist()
        check_cumulative("cu_seqlens_q", ends, x.k_new.shape[0] if new_format == "thd" else None)
        given, rooms = [after - before for before, after in pairwise(ends)], slots
        for i, (count, room) in enumerate(zip(given, rooms, strict=False)):
            if count > room:
                raise ValueError(
                    f"cu_seqlens_q[{i + 1}] - cu_seqlens_q[{i}] is {count}; accepted: at most {room}, the rows of k_new"
                )
        slots = given
    counts = slots if x.seqused_q is None else x.seqused_q.tolist()
    rows = k_cache.shape[cache_format.index("s")]
    table = None if x.page_table is None else x.page_table.tolist()
    capacity = rows if table is None else rows * len(table[0]) if table else 0
    for i, (before, count, slot) in enumerate(zip(used, counts, slots, strict=True)):
        if not 0 <= count <= slot:
            raise ValueError(f"seqused_q[{i}] is {count}; accepted: 0 to {slot}, what the sequence has in k_new")
        if count == 0:
            continue
        if not 0 <= before <= capacity - count:
            where = "the cache's rows" if table is None else "columns * page_size"
            raise ValueError(
                f"seqused_kv[{i}] is {before} with {count} new rows; accepted: 0 to {capacity - count}, so that they fit {where}, "
                f"{capacity}"
            )
        if table is not None:
            for n in range(before // rows, -(-(before + count) // rows)):
                if not 0 <= table[i][n] < k_cache.shape[0]:
                    raise ValueError(
                        f"page_table[{i}, {n}] is {table[i][n]}, where new rows go; accepted: 0 to {k_cache.shape[0] - 1}, as "
                        f"there are {k_cache.shape[0]} pages"
                    )


def _append(k_cache: Tensor, v_cache: Tensor, *call: Any) -> None:
    x = Appended._make((*call[:-1], parse_format(call[-1])))
    options.check_all()
    if options.check_values():
        _check_values(k_cache, x)
    append(k_cache, v_cache, x)
    if not torch.is_inference(k_cache):
        torch.autograd.graph.increment_version((k_cache, v_cache))


def _append_fake(*call: Any) -> None:
    """Does nothing: the operator returns nothing, and what it writes has a shape already."""


for _key in ("CPU", "CUDA"):
    _library.impl("append_kv", _append, _key)
torch.library.register_fake("flexattn::append_kv", _append_fake, lib=_library)
