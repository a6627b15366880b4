"""Quantisation to FP8 by current scaling that reads each tensor once: programs hold what they read until its amax is there.

It was never run on a GPU: `quantize`, which reads each tensor twice, is used unless what never ran is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.quantize import (
    QuantizeArguments,
    Source,
    Waiting,
    clear_front,
    join_amax,
    largest_of_parts,
    launch_tile,
    load_item_tile,
    new_descales,
    quantize_arguments,
    rotations,
    rows_of_item,
    scale_of,
    store_item_tile,
)
from flexattn.kernels_triton.runtime.launch import kernel, launch, num_processors

_PROGRAMS = 4  # programs for each multiprocessor that draw items
_SECTIONS = 3  # sections that the items being held at a time should span, or more


class Drawn(NamedTuple):
    """Places of an item that was drawn, inside a kernel."""

    h: Any
    tile: Any
    section: Any
    num_items: Any  # items of the section
    end: Any  # items up to the section's end, of all tensors


class _DrawnTensor(NamedTuple):
    """`TensorArguments` of one of the tensors that items are drawn of, inside a kernel; current scaling has no history."""

    x: Any
    data: Any
    amax_ptr: Any
    descale_ptr: Any
    stride_b: Any
    stride_h: Any
    num_heads: Any
    num_items: Any
    heads_per_section: Any
    found_ptr: Any


@triton.jit
def _chosen_rows(is_first, first, second):
    return Rows(
        ptr=tl.where(is_first, first.ptr, second.ptr),
        stride_b=tl.where(is_first, first.stride_b, second.stride_b),
        stride_s=tl.where(is_first, first.stride_s, second.stride_s),
        stride_h=tl.where(is_first, first.stride_h, second.stride_h),
    )


@triton.jit
def _chosen_tensor(is_first, first, second):
    # Without pointers that are absent, which Triton 3.6 lets no function return
    return _DrawnTensor(
        x=_chosen_rows(is_first, first.x, second.x),
        data=_chosen_rows(is_first, first.data, second.data),
        amax_ptr=tl.where(is_first, first.amax_ptr, second.amax_ptr),
        descale_ptr=tl.where(is_first, first.descale_ptr, second.descale_ptr),
        stride_b=tl.where(is_first, first.stride_b, second.stride_b),
        stride_h=tl.where(is_first, first.stride_h, second.stride_h),
        num_heads=tl.where(is_first, first.num_heads, second.num_heads),
        num_items=tl.where(is_first, first.num_items, second.num_items),
        heads_per_section=tl.where(is_first, first.heads_per_section, second.heads_per_section),
        found_ptr=tl.where(is_first, first.found_ptr, second.found_ptr),
    )


@triton.jit
def _tensor_of_item(n, of_q, of_qk, args: QuantizeArguments):
    # `of_q` items are of q, `of_qk` of q and k.
    if args.k.x.ptr is None:
        return _chosen_tensor(True, args.q, args.q)
    elif args.v.x.ptr is None:
        return _chosen_tensor(n < of_q, args.q, args.k)
    else:
        return _chosen_tensor(n < of_q, args.q, _chosen_tensor(n < of_qk, args.k, args.v))


@triton.jit
def drawn_item(n, before, tensor):
    # The n-th item of all, `before` of which are of the tensors before: one section of heads comes after the other, and in a
    # section the heads of a tile are side by side.
    per_head = tensor.num_items // tensor.num_heads
    own = n - before
    section = own // (tensor.heads_per_section * per_head)
    first_head = section * tensor.heads_per_section
    heads = tl.minimum(tensor.heads_per_section, tensor.num_heads - first_head)
    place = own - first_head * per_head
    return Drawn(
        h=first_head + place % heads,
        tile=place // heads,
        section=section,
        num_items=heads * per_head,
        end=before + (first_head + heads) * per_head,
    )


@kernel
def _quantize_once_kernel(args: QuantizeArguments, META: tl.constexpr):
    # Programs draw items, and hold what they have read of one until the amax of its section is there. A program waits for a section
    # only if all of its items have been drawn; else it leaves the item, and reads it again once they have. Whoever has drawn an
    # item of that section has put it into the amax, or will when its wait for an earlier section is over: so no wait is for ever,
    # however few programs run at a time.
    ROWS: tl.constexpr = META.ROWS
    matrices = rotations(args.q.x.ptr.dtype.element_ty, META)
    of_q = args.q.num_items
    of_qk = of_q
    num_items = of_q
    if args.k.x.ptr is not None:
        of_qk += args.k.num_items
        num_items = of_qk
    if args.v.x.ptr is not None:
        num_items += args.v.num_items
    left = -1  # the last item that it left
    is_new = True
    n = tl.atomic_add(args.drawn_ptr, 1, sem="relaxed")
    following = n
    while n < num_items:
        is_q = n < of_q
        tensor = _tensor_of_item(n, of_q, of_qk, args)
        lengths = args.lengths_q
        if args.k.x.ptr is not None:
            of_q_side, of_kv_side = args.lengths_q, args.lengths_kv
            cu_seqlens_ptr, cu_seqlens_padded_ptr = of_q_side.cu_seqlens_ptr, of_q_side.cu_seqlens_padded_ptr
            if cu_seqlens_ptr is not None:
                cu_seqlens_ptr = tl.where(is_q, cu_seqlens_ptr, of_kv_side.cu_seqlens_ptr)
            if cu_seqlens_padded_ptr is not None:
                cu_seqlens_padded_ptr = tl.where(is_q, cu_seqlens_padded_ptr, of_kv_side.cu_seqlens_padded_ptr)
            lengths = Lengths(
                cu_seqlens_ptr=cu_seqlens_ptr,
                cu_seqlens_padded_ptr=cu_seqlens_padded_ptr,
                seqused_ptr=None,
                batch=tl.where(is_q, of_q_side.batch, of_kv_side.batch),
                num_tokens=tl.where(is_q, of_q_side.num_tokens, of_kv_side.num_tokens),
                max_seqlen=tl.where(is_q, of_q_side.max_seqlen, of_kv_side.max_seqlen),
            )
        drawn = drawn_item(n, tl.where(is_q, 0, tl.where(n < of_qk, of_q, of_qk)), tensor)
        own = rows_of_item(drawn.h, drawn.tile, tensor, lengths, META)
        parts = load_item_tile(own, 0, matrices, META)
        found_ptr = tensor.found_ptr + drawn.section
        if is_new:
            following = tl.atomic_add(args.drawn_ptr, 1, sem="relaxed")
            if own.is_there:
                join_amax(largest_of_parts(tl.zeros([ROWS], tl.float32), parts, META), tensor.amax_ptr + own.group)
            tl.atomic_add(found_ptr, 1, sem="release")
        if drawn.end <= following:
            # One thread joins the amax and then counts, with release; here it acquires, and a barrier hands that to the others.
            while tl.atomic_add(found_ptr, 0, sem="acquire") < drawn.num_items:
                pass
            if own.is_there:
                scale = scale_of(tl.load(tensor.amax_ptr + own.group), args.range_scale)
                if own.block == 0:
                    tl.store(tensor.descale_ptr + own.group, tl.div_rn(1.0, scale))
                store_item_tile(own, 0, parts, scale, META)
                clear_front(own, matrices, META)
            is_new = left < 0
            n = following
            if left >= 0:
                n = left
                left = tl.load(args.left_ptr + left)
        else:
            tl.store(args.left_ptr + n, left)
            left = n
            n = following


def _heads_per_section(source: Source, items: int, programs: int) -> int:
    """Returns how many heads share a section, whose amax is found before any of it is cast: all where they share a scale.

    With `programs` that hold one of the `items` each, they hold a few sections of some heads, if a head alone is not more.
    """
    heads = int(source.x.shape[-2])
    return heads if source.sizes[1] == 1 else min(heads, max(1, programs * heads // (_SECTIONS * items)))


def quantize_once(sources: Sequence[Source], margin: int) -> tuple[list[Tensor], Tensor]:
    """`quantize` of sources without known scales and blocks, by one launch, or by two where they differ in more than their places.

    What more items share an amax than programs hold at a time is read twice.
    """
    device, descales, counts = sources[0].x.device, new_descales(sources), [s.num_scales for s in sources]
    if sources[0].batch == 0:
        return descales, sources[0].x.new_zeros(sum(counts), dtype=torch.float32)
    metas = [s.meta(0, 1, is_drawn=True) for s in sources]
    align, is_wide = min(meta.ALIGN for meta in metas), any(meta.WIDE_STRIDES for meta in metas)
    metas = [meta._replace(ALIGN=align, WIDE_STRIDES=is_wide) for meta in metas]
    items = [source.items(meta) for source, meta in zip(sources, metas, strict=True)]
    has_lengths = [source.cu_seqlens is not None for source in sources]
    launches = [list(alike) for _, alike in itertools.groupby(range(len(sources)), lambda i: (metas[i], has_lengths[i]))]
    programs = [min(sum(items[i] for i in alike), _PROGRAMS * num_processors(device)) for alike in launches]
    heads = [_heads_per_section(sources[i], items[i], n) for alike, n in zip(launches, programs, strict=True) for i in alike]
    sections = [triton.cdiv(source.x.shape[-2], n) for source, n in zip(sources, heads, strict=True)]
    sizes = [sum(counts), sum(sections), len(launches), sum(items)]  # one allocation, though nobody reads what it left in the last
    amax, found, drawn, left = sources[0].x.new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
    waiting = [Waiting(*each) for each in zip(heads, found.view(torch.int32).split(sections), strict=True)]
    of_each = zip(sources, metas, amax.split(counts), descales, waiting, strict=True)
    tensors = [source.arguments(*more) for source, *more in of_each]
    lefts = left.view(torch.int32).split([sum(items[i] for i in alike) for alike in launches])
    for alike, n, own_drawn, own_left in zip(launches, programs, drawn.view(torch.int32).split(1), lefts, strict=True):
        own_sources = [sources[i] for i in alike]
        arguments = quantize_arguments(own_sources, [tensors[i] for i in alike], margin)
        arguments = arguments._replace(drawn_ptr=own_drawn, left_ptr=own_left)
        launch(_quantize_once_kernel, n, device, launch_tile(own_sources[0]), (arguments, metas[alike[0]]))
    return descales, amax
