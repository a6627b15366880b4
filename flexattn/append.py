"""`append_kv`, which writes new keys and values into a cache, and its operator, `flexattn::append_kv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn import registered  # noqa: F401 (registers the operators)
from flexattn.dispatch import options
from flexattn.dispatch.append import Appended, append
from flexattn.dispatch.spec import parse_format
from flexattn.lengths import Side, check_length_tensor, check_one_batch, check_page_ids, check_page_table, checked_lengths
from flexattn.validation import DTYPES, FP8_DTYPES, check_local, check_tensor, describe


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
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
) -> None:
    """Appends new keys and values to each sequence of a cache, in place. `attention` then reads the cache.

    New row i of sequence b goes to position seqused_kv[b] + i. A step of decoding appends with the lengths before the step, and
    attends with the lengths after it:

        append_kv(k_cache, v_cache, k, v, seqused_kv=lengths, page_table=table)
        out = attention(q, k_cache, v_cache, seqused_kv=lengths + new, page_table=table, ...)

    The call reads nothing from the device, and shapes alone decide the launches. If a CUDA graph has captured the call, each replay
    writes to the positions given by the current lengths and tables. GPUs of compute capability 8.0 or later run one Triton kernel;
    other devices run torch ops. A row is skipped if its length is below 0, its position is beyond the cache or the table, or its
    page id is out of range. With FLEXATTN_CHECK=1 such a row raises, at the cost of a transfer from the device. If two sequences
    append to the same row of a page, either may remain.

    If the cache is in FP8, new rows are divided by its descales in float32 and rounded to the nearest number of its dtype. Larger
    values, including infinities, saturate (448 in E4M3, 57344 in E5M2: Micikevicius et al., "FP8 Formats for Deep Learning",
    https://arxiv.org/abs/2209.05433). NaN stays NaN.

    The arguments are those of the `attention` call with the same queries. FlashAttention's `flash_attn_with_kvcache`
    (https://github.com/Dao-AILab/flash-attention) takes the same new rows as its k and v.

    Args:
        k_cache, v_cache: [b, s, h_kv, d] and [b, s, h_kv, d_v] in the second format of qkv_format, or with a page_table pools
            [pages, page_size, h_kv, d]; any strides with a contiguous last dim. Written to.
        k_new, v_new: [b, s_new, h_kv, d] or [total, h_kv, d], and d_v, in the first format of qkv_format, any strides with a
            contiguous last dim. Their dtype is the caches' or another floating dtype of 16 or 32 bits, from which they are rounded.
            If they are in FP8, their rows are copied, and no descale is accepted.
        seqused_kv: int32 [b]: the number of rows of each sequence before the call.
        page_table: int32 [b, columns]: page page_table[b, n] holds the rows of sequence b that start at row n * page_size. Columns
            without new rows are not read.
        qkv_format: the format of k_new and v_new, then that of the caches: "bshd", "thd_2bshd", "bhsd", "bshd_2bhsd", and so on.
        cu_seqlens_q: int32 [b + 1]. For thd, the bounds of each sequence's new rows; for other formats, if given, their differences
            are the numbers of appended tokens.
        seqused_q: int32 [b]: the number of tokens that each sequence appends of its slot or row; None: all.
        descale_k, descale_v: float32 factors of the numbers in the caches, if these are in float8_e4m3fn or float8_e5m2.

            - [], [h_kv] or [b, h_kv], any dim of which may be 1, positive and finite: an input, as for `attention`. None is 1.
            - The dims of k_cache without the last, such as [pages, page_size, h_kv]: one for each token and head. The call computes
              and writes the descales of the new tokens: the largest finite absolute value of each head's row, divided by the
              largest number of the cache's dtype (1 if that is 0, or below 2**-120).

    Raises:
        ValueError, TypeError: arguments do not fit together; the text names them. A new row or a cache requires a gradient while
            gradients are recorded, because appending has no gradient.
    """
    formats = parse_format(str(qkv_format))
    x = checked(
        k_cache, v_cache, Appended(k_new, v_new, page_table, seqused_kv, cu_seqlens_q, seqused_q, formats, descale_k, descale_v)
    )
    torch.ops.flexattn.append_kv.default(k_cache, v_cache, *x[:6], qkv_format, *x[7:])


def checked(k_cache: Tensor, v_cache: Tensor, x: Appended) -> Appended:
    """Returns a call's checked tensors, with descales that the call writes in the fields for them."""
    _check(k_cache, v_cache, x)
    pairs = ((None, d) if d is not None and d.dim() == 3 else (d, None) for d in (x.descale_k, x.descale_v))
    read, written = zip(*pairs, strict=True)
    return Appended(*x[:7], *read, *written)


def _check(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    new_format, cache_format = x.formats
    if cache_format == "thd":
        raise ValueError(
            "qkv_format has 'thd' for the caches; accepted: 'bshd', 'bhsd' or, without pages, 'sbhd', with room after each "
            f"sequence, as in '{new_format}_2bshd'"
        )
    check_local({"k_cache": k_cache, "v_cache": v_cache} | x._asdict(), "")
    check_tensor("k_cache", k_cache, (*DTYPES, *FP8_DTYPES), None)
    device, dtype = k_cache.device, k_cache.dtype
    sources = (dtype, *(other for other in DTYPES if dtype is not torch.float64 and other not in (dtype, torch.float64)))
    for name, t in (("v_cache", v_cache), ("k_new", x.k_new), ("v_new", x.v_new)):
        check_tensor(name, t, (dtype,) if name == "v_cache" else sources, device)
    for name, t, fmt in (
        ("k_cache", k_cache, cache_format),
        ("v_cache", v_cache, cache_format),
        ("k_new", x.k_new, new_format),
        ("v_new", x.v_new, new_format),
    ):
        if t.dim() != len(fmt) or t.shape[-1] == 0 or t.shape[fmt.index("h")] == 0 or (t.stride(-1) != 1 and t.shape[-1] != 1):
            raise ValueError(f"{name} is {describe(t)}; accepted: the {len(fmt)} dims of {fmt}, none empty, the last contiguous")
        if name.endswith("_cache"):
            _check_written(name, t)
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and appending to a cache has none; accepted: a call under torch.no_grad(), or "
                f"{name}.detach()"
            )
    _check_sizes((k_cache, v_cache), x)
    batch = _check_lengths(k_cache, x)
    for name, cache, new, descale in (("k", k_cache, x.k_new, x.descale_k), ("v", v_cache, x.v_new, x.descale_v)):
        if descale is not None:
            _check_descale(name, cache, new, descale, (batch, cache_format))


def _check_written(name: str, t: Tensor) -> None:
    """Raises if several elements of a tensor share one place in memory: a write to one row would change others."""
    if 0 in t.stride() and any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)} and strides {t.stride()}, so several rows share memory; accepted: separate memory "
            f"for each row, as in {name}.contiguous()"
        )


def _check_descale(name: str, cache: Tensor, new: Tensor, descale: Tensor, layout: tuple[int, str]) -> None:
    """Raises if the descale of "k" or "v" does not fit. layout: the batch size and the cache's format."""
    batch, fmt = layout
    for source, dtype in ((f"{name}_cache", cache.dtype), (f"{name}_new", new.dtype)):
        if (dtype in FP8_DTYPES) == (source == f"{name}_new"):
            accepted = "None, or a cache in FP8" if source == f"{name}_cache" else "None (FP8 rows are copied), or 16 or 32 bits"
            raise ValueError(f"descale_{name} is given with {source} in {dtype}; accepted: {accepted}")
    check_tensor(f"descale_{name}", descale, (torch.float32,), cache.device)
    heads, token_shape = cache.shape[fmt.index("h")], tuple(cache.shape[:-1])
    sizes = (1,) * (2 - descale.dim()) + tuple(descale.shape)
    is_input = len(sizes) == 2 and all(size in (1, most) for size, most in zip(sizes, (batch, heads), strict=True))
    if not is_input and tuple(descale.shape) != token_shape:
        raise ValueError(
            f"descale_{name} has shape {tuple(descale.shape)}; accepted: [], [h] or [b, h] = {[batch, heads]}, any of which may be "
            f"1, or the cache's dims but the last, {list(token_shape)}, for descales of each token and head that the call writes"
        )
    if not is_input:
        _check_written(f"descale_{name}", descale)
    if torch.is_grad_enabled() and descale.requires_grad:
        raise ValueError(f"descale_{name} requires a gradient, and appending has none; accepted: descale_{name}.detach()")


def _check_sizes(caches: tuple[Tensor, Tensor], x: Appended) -> None:
    """Raises unless k and v have equal shapes up to the head dim, and the new rows have the caches' heads and head dims."""
    new_format, cache_format = x.formats
    for (kind, k), (_, v), fmt in (
        (("k_cache", caches[0]), ("v_cache", caches[1]), cache_format),
        (("k_new", x.k_new), ("v_new", x.v_new), new_format),
    ):
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"{kind} has shape {tuple(k.shape)} and its values have {tuple(v.shape)} in {fmt}; accepted: equal shapes, except "
                "for the last dim"
            )
    for name, cache, new in (("k_new", caches[0], x.k_new), ("v_new", caches[1], x.v_new)):
        sizes = cache.shape[cache_format.index("h")], cache.shape[-1]
        if (new.shape[new_format.index("h")], new.shape[-1]) != sizes:
            raise ValueError(
                f"{name} has shape {tuple(new.shape)} in {new_format}; accepted: the cache's {sizes[0]} heads of {sizes[1]} "
                "elements"
            )


def _check_lengths(k_cache: Tensor, x: Appended) -> int:
    """Returns the batch size. Raises if lengths are missing, have wrong types, or imply different batch sizes."""
    (new_format, cache_format), device = x.formats, k_cache.device
    check_tensor("seqused_kv", x.seqused_kv, (torch.int32,), device)
    batches = check_length_tensor("seqused_kv", x.seqused_kv, 0, device)
    batches += check_length_tensor("seqused_q", x.seqused_q, 0, device)
    batches += check_length_tensor("cu_seqlens_q", x.cu_seqlens_q, 1, device)
    if new_format == "thd" and x.cu_seqlens_q is None:
        raise ValueError(
            "cu_seqlens_q is None with new rows in thd; accepted: an int32 tensor [batch + 1], the start of each sequence"
        )
    if new_format != "thd":
        batches.append(("the batch of k_new", x.k_new.shape[new_format.index("b")]))
        if x.cu_seqlens_q is not None and x.seqused_q is not None:
            raise ValueError(f"cu_seqlens_q and seqused_q are given with format {new_format}; accepted: one of them")
    if x.page_table is None:
        batches.append(("the batch of k_cache", k_cache.shape[cache_format.index("b")]))
    else:
        batches.append(check_page_table(x.page_table, "k_cache", k_cache, cache_format))
    return check_one_batch(batches)


def _check_values(k_cache: Tensor, x: Appended) -> None:
    """Raises ValueError if a length or a page id would skip a row, or if a descale is wrong. Only FLEXATTN_CHECK=1 runs this check.

    It waits for the device.
    """
    for name, descale in (("descale_k", x.descale_k), ("descale_v", x.descale_v)):
        if descale is not None and not bool(((descale > 0) & descale.isfinite()).all()):
            raise ValueError(f"{name} has a value that is not positive and finite; accepted: the factors of the cache's numbers")
    new_format, cache_format = x.formats
    used, slot = x.seqused_kv.tolist(), x.k_new.shape[0 if new_format == "thd" else new_format.index("s")]
    side = Side(x.k_new, new_format, x.cu_seqlens_q, None, x.seqused_q)
    counts = checked_lengths("q", side, slot, is_strict=True) if side.has_lengths else [slot] * len(used)
    rows = k_cache.shape[cache_format.index("s")]
    capacity = rows if x.page_table is None else rows * x.page_table.shape[1]
    spans = []
    for i, (before, count) in enumerate(zip(used, counts, strict=True)):
        spans.append((before, before + count) if count else (0, 0))
        if count and not 0 <= before <= capacity - count:
            limit = "the cache's rows" if x.page_table is None else "columns * page_size"
            raise ValueError(
                f"seqused_kv[{i}] is {before} with {count} new rows; accepted: 0 to {capacity - count}, so that they fit {limit}, "
                f"{capacity}"
            )
    if x.page_table is not None:
        check_page_ids(x.page_table, spans, k_cache.shape[0], rows)


def append_kv_implementation(k_cache: Tensor, v_cache: Tensor, *call: Any) -> None:
    fields = [*call[:6], parse_format(call[6]), *call[7:]]  # trailing arguments with default values may be missing
    x = Appended(*fields)
    options.check_all()
    if options.check_values():
        _check_values(k_cache, x)
    append(k_cache, v_cache, x)
    written = [t for t in (k_cache, v_cache, x.token_descales_k, x.token_descales_v) if t is not None and not t.is_inference()]
    torch.autograd.graph.increment_version(written)


def append_kv_fake(*call: object) -> None:
    """Does nothing: the operator returns nothing, and the tensors that it writes already have shapes."""
