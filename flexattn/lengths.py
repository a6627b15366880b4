"""Checks of a call's lengths: cu_seqlens, seqused, page tables, and the longest sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Operands, as_index, length_class, with_padding
from flexattn.validation import NOT_READ, check_tensor, describe
from flexattn.warn import warn_once


class Side(NamedTuple):
    """One side of a call, queries or keys: its tensor and its lengths as passed."""

    x: Tensor
    fmt: str
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    seqused: Tensor | None = None
    page_table: Tensor | None = None  # for keys only

    @classmethod
    def of(cls, end: Literal["q", "kv"], x: Tensor, fmt: str, lengths: Mapping[str, Any]) -> Side:
        """Returns a side of a call. lengths: arguments of `attention`."""
        cu_seqlens, padded = lengths[f"cu_seqlens_{end}"], lengths[f"cu_seqlens_{end}_padded"]
        return cls(x, fmt, cu_seqlens, padded, lengths[f"seqused_{end}"], lengths["page_table"] if end == "kv" else None)

    @property
    def has_lengths(self) -> bool:
        return self.cu_seqlens is not None or self.seqused is not None


def check_lengths(attn_mask_type: str, q: Side, k: Side, also_missing: Sequence[str] = ()) -> int:
    """Returns the batch size. Raises if tensors and lengths imply different ones, or if lengths are missing.

    also_missing: names of other missing arguments of a packed call, which the same error names.
    """
    padding = "padding" in attn_mask_type
    if padding:
        _check_all_given(attn_mask_type, q, k, also_missing)
    batches: list[tuple[str, int]] = []
    for end, tensor, side in (("q", "q", q), ("kv", "k", k)):
        if side.page_table is not None:
            batches.append(check_page_table(side.page_table, tensor, side.x, side.fmt))
        if side.fmt != "thd":
            if side.page_table is None:
                batches.append((f"the batch of {tensor}", side.x.shape[side.fmt.index("b")]))
            if side.cu_seqlens_padded is not None:
                raise ValueError(
                    f"cu_seqlens_{end}_padded is given with format {side.fmt}; accepted: None, because only thd has gaps between "
                    f"sequences (cu_seqlens_{end} has a dense format's lengths)"
                )
        if padding:
            _check_given(end, side)
            batches += check_length_tensor(f"cu_seqlens_{end}", side.cu_seqlens, 1, q.x.device)
            batches += check_length_tensor(f"cu_seqlens_{end}_padded", side.cu_seqlens_padded, 1, q.x.device)
            batches += check_length_tensor(f"seqused_{end}", side.seqused, 0, q.x.device)
            continue
        for name, lengths in ((f"cu_seqlens_{end}", side.cu_seqlens), (f"seqused_{end}", side.seqused)):
            if lengths is not None:
                raise ValueError(
                    f"{name} is given with attn_mask_type {attn_mask_type!r}; accepted: None, or a mask type with padding in "
                    f"its name. Pass attn_mask_type={with_padding(attn_mask_type)!r}, which reads the lengths."
                )
        if side.page_table is not None:
            raise ValueError(
                f"page_table is given with attn_mask_type {attn_mask_type!r}; accepted: a mask type with padding in its name, and "
                "seqused_kv, because the last page of a sequence may be partly empty"
            )
    return check_one_batch(batches)


def check_page_table(table: Tensor, name: str, x: Tensor, fmt: str) -> tuple[str, int]:
    """Returns [(source, batch size)] of a page table, or []. Raises if the table or x, the pool of keys, does not fit.

    name: name of x in errors, "k" or "k_cache".
    """
    if fmt not in ("bshd", "bhsd"):
        raise ValueError(
            f"page_table is given with {name} and {name.replace('k', 'v', 1)} in {fmt}; accepted: pages [pages, page_size, h_kv, "
            "d] (bshd) or [pages, h_kv, page_size, d] (bhsd), as in qkv_format 'thd_2bshd'"
        )
    check_tensor("page_table", table, (torch.int32,), x.device)
    if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"page_table is {describe(table)}; accepted: int32 [b, columns], with contiguous rows")
    if 0 in x.shape or table.shape[1] == 0:
        raise ValueError(
            f"{name} is {describe(x)} and page_table {describe(table)}; accepted: at least one page, one token and one column"
        )
    return "the rows of page_table", table.shape[0]


def check_one_batch(batches: list[tuple[str, int]]) -> int:
    """Returns the common batch size of all (source, batch size); raises if they differ."""
    source, batch = batches[0]
    for name, size in batches[1:]:
        if size != batch:
            raise ValueError(f"{name} is {size} and {source} is {batch}; accepted: one batch size for all of them")
    return batch


def _check_all_given(attn_mask_type: str, q: Side, k: Side, also_missing: Sequence[str]) -> None:
    """Raises one error for all missing lengths, and one for all lengths of dtype int64."""
    missing, int64 = [], []
    for end, side, other in (("q", q, k), ("kv", k, q)):
        is_complete = side.has_lengths or (side.page_table is None and (other.seqused is not None or other.page_table is not None))
        if side.cu_seqlens is None and (side.fmt == "thd" or not is_complete):
            missing.append(f"cu_seqlens_{end}")
        lengths = ((f"cu_seqlens_{end}", side.cu_seqlens), (f"seqused_{end}", side.seqused))
        int64 += [name for name, t in lengths if isinstance(t, Tensor) and t.dtype is torch.int64]
    cause = "qkv_format 'thd'" if "thd" in (q.fmt, k.fmt) else f"attn_mask_type {attn_mask_type!r}"
    wrong = f"{_listed(int64)} {'have' if len(int64) > 1 else 'has'} dtype torch.int64" if int64 else ""
    if missing:
        names = [*missing, *also_missing]
        how = "an int32 tensor [batch + 1], the cumulative sequence lengths, for each side, or cu_seqlens for both"
        if "thd" not in (q.fmt, k.fmt):
            how += ", or seqused_q and seqused_kv, int32 [batch]"
        if also_missing:
            how += f", and an int for {_listed(also_missing)}"
        raise ValueError(
            f"{_listed(names)} {'are' if len(names) > 1 else 'is'} None with {cause}{' and ' + wrong if wrong else ''}. Pass "
            f"{how}; flexattn.packed([3, 5]) makes the arguments of a packed call."
        )
    if wrong:
        raise TypeError(f"{wrong}; accepted: torch.int32. Convert with .to(torch.int32), once for all layers.")


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)


def _check_given(end: str, side: Side) -> None:
    """Raises if a side's lengths are given twice."""
    name, used = f"cu_seqlens_{end}", f"seqused_{end}"
    if side.fmt == "thd":
        if side.seqused is not None and side.cu_seqlens_padded is not None:
            raise ValueError(
                f"{used} and {name}_padded are given; accepted: one of them: the slots in {name} and the used length of each in "
                f"{used}, or the lengths in {name} and the starts of the slots in {name}_padded"
            )
    elif side.cu_seqlens is not None and side.seqused is not None:
        raise ValueError(f"{name} and {used} are given with format {side.fmt}; accepted: one of them, the sequences' lengths")


def check_length_tensor(name: str, t: Tensor | None, more: int, device: torch.device) -> list[tuple[str, int]]:
    """Returns [(source, batch size)] of a tensor of lengths with `more` entries than sequences; [] for None."""
    if t is None:
        return []
    value: Any = t
    if isinstance(value, (list, tuple)):
        how = "flexattn.packed(lengths)" if more else "torch.tensor(lengths, dtype=torch.int32, device=q.device)"
        raise TypeError(f"{name} is {describe(t)}; accepted: a tensor, int32 on q's device. {how} makes it.")
    check_tensor(name, t, (torch.int32,), device)
    if t.dim() != 1 or t.shape[0] < more or not t.is_contiguous():
        raise ValueError(f"{name} is {describe(t)}; accepted: a contiguous tensor of shape [batch{' + 1' if more else ''}]")
    return [(f"the length of {name}{' less one' if more else ''}", t.shape[0] - more)]


def check_pages(is_fp8: bool, needs_grad: bool) -> None:
    """Raises if a call cannot read pages."""
    if is_fp8:
        raise ValueError("page_table is given with q, k and v in FP8, or an fp8_recipe; accepted with pages: 16 or 32 bits")
    if needs_grad:
        raise ValueError(
            "page_table is given and a gradient is needed; accepted: a forward only, as under torch.no_grad(), or k and v gathered "
            "by k[page_table]"
        )


def check_kept_keys(k: Tensor, q: Tensor, needs_grad: bool, has_recipe: bool) -> None:
    """Raises if a call cannot read keys and values in FP8 with queries in another dtype."""
    if has_recipe:
        raise ValueError(f"fp8_recipe is given with k and v in {k.dtype}; accepted: None, or q, k and v in 16 bits")
    if needs_grad:
        raise ValueError(
            f"k and v are in {k.dtype} with q in {q.dtype}, and a gradient is needed; accepted: a forward only, as under "
            "torch.no_grad()"
        )


def longest_in_pages(value: object, page_table: Tensor, page_size: int) -> int:
    """Returns the planned length of a call over pages: max_seqlen_kv, but at most the capacity of a row of the table."""
    capacity = page_table.shape[1] * page_size
    longest = as_index(value)
    if value is not None and longest is None:
        raise TypeError(f"max_seqlen_kv is {describe(value)}; accepted: an int or None, which is {capacity}, columns * page_size")
    if longest is None:
        return capacity
    if longest < 0:
        raise ValueError(f"max_seqlen_kv is {longest}; accepted: an int of at least the longest sequence, or None")
    return min(longest, capacity)


def resolve_max_seqlen(argument: str, value: object, x: Tensor, fmt: str, bias_size: int | None = None) -> int:
    """Returns the planned length of a call: a dense format's sequence dim, or for thd the argument, or the number of tokens.

    bias_size: size of the bias in that dim; None: there is no bias.
    """
    if value is not None:
        passed, value = value, as_index(value)
        if value is None:
            hint = f"; {NOT_READ}; keep the lengths on the host as well" if isinstance(passed, Tensor) else ""
            raise TypeError(f"{argument} is {describe(passed)}; accepted: an int or None{hint}")
    if fmt != "thd":
        length = x.shape[fmt.index("s")]
        if value is not None and value != length:
            raise ValueError(
                f"{argument} is {value} and the sequence dim is {length}; accepted with format {fmt}: None or {length}"
            )
        return length
    if value is None:
        if bias_size is not None:
            raise ValueError(f"{argument} is None with a bias and thd; accepted: the int in the bias' shape")
        if not torch.compiler.is_compiling():
            warn_once(
                argument,
                f"{argument} is None with thd, and finding it would wait for the device, so the total number of tokens replaces "
                "it: the kernels' grid is sized for batch x total tokens, and programs beyond a sequence's end exit at once. Pass "
                f"{argument} (an int, at least the longest sequence) to launch only the programs that are needed.",
            )
        return x.shape[0]
    if value < 0:
        raise ValueError(f"{argument} is {value}; accepted: an int of at least the longest sequence, or None")
    longest: int = value
    if torch.compiler.is_compiling():
        return longest
    # No sequence is longer than all tokens. Their total is rounded up to a power of two, to keep a constant argument constant.
    return min(longest, max(length_class(x.shape[0]), bias_size or 0))


def check_lengths_of(
    x: Tensor, fmt: str, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, max_seqlen: int | None
) -> int:
    """Returns the longest sequence of one tensor in format `fmt`. Raises if the lengths do not fit the tensor."""
    check_tensor("x", x, (torch.float16, torch.bfloat16, torch.float32), None)
    if x.dim() != len(fmt):
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: the {len(fmt)} dims of {fmt}")
    if x.shape[fmt.index("h")] == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)} in {fmt}; accepted: at least one head and a head dim of at least 1")
    if cu_seqlens is None and (fmt == "thd" or cu_seqlens_padded is not None):
        raise ValueError(
            f"cu_seqlens is None with {'thd' if fmt == 'thd' else 'cu_seqlens_padded'}; accepted: an int32 tensor [batch + 1]"
        )
    if cu_seqlens_padded is not None and fmt != "thd":
        raise ValueError(
            f"cu_seqlens_padded is given with format {fmt}; accepted: None, because only thd has gaps between sequences"
        )
    for name, cu in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if cu is None or cu_seqlens is None:
            continue
        check_tensor(name, cu, (torch.int32,), x.device)
        entries = cu_seqlens.shape[0] if fmt == "thd" else x.shape[fmt.index("b")] + 1
        if cu.dim() != 1 or cu.shape[0] < 1 or not cu.is_contiguous() or cu.shape[0] != entries:
            raise ValueError(f"{name} is {describe(cu)}; accepted: a contiguous tensor of shape [batch + 1]")
    return resolve_max_seqlen("max_seqlen", max_seqlen, x, fmt)


def check_values(spec: AttentionSpec, x: Operands, is_strict: bool) -> None:
    """Raises ValueError if a length passes the end of its tensor or the planned length.

    The check reads the tensors of lengths and the page table, and waits for them.

    is_strict: also raise if cu_seqlens decrease or do not begin with 0, slots overlap, or a page id is out of range.
    """
    values = x._asdict()
    sides = (
        ("q", Side.of("q", x.q, spec.q_format, values), x.max_seqlen_q),
        ("kv", Side.of("kv", x.k, spec.kv_format, values), x.max_seqlen_kv),
    )
    for end, side, max_seqlen in sides:
        lengths = checked_lengths(end, side, max_seqlen, is_strict)
        if side.page_table is not None and is_strict:
            spans = [(0, length) for length in lengths]
            check_page_ids(side.page_table, spans, side.x.shape[0], side.x.shape[side.fmt.index("s")])


def checked_lengths(end: str, side: Side, max_seqlen: int, is_strict: bool) -> list[int]:
    """Returns the lengths of a side's sequences. Raises ValueError as `check_values`."""
    name = f"cu_seqlens_{end}"
    room = f"max_seqlen_{end}" if side.fmt == "thd" or side.page_table is not None else f"the sequence dim of {side.fmt}"
    lengths: list[int] = []
    if side.cu_seqlens is not None:
        ends = side.cu_seqlens.tolist()
        check_cumulative(name, ends, side.x.shape[0] if side.fmt == "thd" else None, is_strict)
        lengths = [after - before for before, after in pairwise(ends)]
        if side.cu_seqlens_padded is not None and is_strict:
            _check_slots(f"{name}_padded", side.cu_seqlens_padded.tolist(), lengths, side.x.shape[0])
    if side.seqused is not None:
        slots, lengths = lengths, side.seqused.tolist()
        for i, length in enumerate(lengths):
            most = min(max_seqlen, slots[i]) if slots else max_seqlen
            if length > most or (is_strict and length < 0):
                limit = f"the slot of {slots[i]} and {room}" if slots else room
                raise ValueError(f"seqused_{end}[{i}] is {length}; accepted: 0 to {most}, by {limit}")
        return lengths
    for i, length in enumerate(lengths):
        if length > max_seqlen:
            raise ValueError(f"{name}[{i + 1}] - {name}[{i}] is {length}; accepted: at most {room}, {max_seqlen}")
    return lengths


def check_page_ids(page_table: Tensor, spans: list[tuple[int, int]], pages: int, page_size: int) -> None:
    """Raises unless the rows of each span (first, end) are in existing pages."""
    for i, (row, (first, end)) in enumerate(zip(page_table.tolist(), spans, strict=True)):
        for n in range(first // page_size, -(-end // page_size)):
            if not 0 <= row[n] < pages:
                raise ValueError(f"page_table[{i}, {n}] is {row[n]}; accepted: 0 to {pages - 1}, because there are {pages} pages")


def _check_slots(name: str, starts: list[int], lengths: list[int], total: int) -> None:
    """Raises unless each sequence, in any order, lies in the tensor and does not overlap another one."""
    last, free_from = -1, 0
    for start, i in sorted((start, i) for i, (start, length) in enumerate(zip(starts, lengths, strict=False)) if length):
        end = start + lengths[i]
        if start < 0 or end > total:
            raise ValueError(
                f"{name}[{i}] is {start}, the start of a sequence of {lengths[i]} tokens; accepted: 0 to {total - lengths[i]}, so "
                f"that it ends within the total number of tokens, {total}"
            )
        if start < free_from:
            raise ValueError(
                f"{name}[{i}] is {start}, and sequence {last}, of {lengths[last]} tokens, begins at {starts[last]}; accepted: "
                "slots that do not overlap, in any order"
            )
        last, free_from = i, end


def check_cumulative(name: str, values: list[int], total: int | None, is_strict: bool = True) -> None:
    """Raises ValueError if a value exceeds total or, if strict, the first value is not 0 or values decrease."""
    if is_strict and values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; accepted: 0")
    for i, (before, after) in enumerate(pairwise(values), start=1):
        if is_strict and after < before:
            raise ValueError(f"{name}[{i}] is {after} after {name}[{i - 1}] = {before}; accepted: values that do not decrease")
        if total is not None and after > total:
            raise ValueError(f"{name}[{i}] is {after}; accepted: at most the total number of tokens, {total}")
