"""Conversion of calls with pages of keys, or with lengths in seqused, to equal calls without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, from_bshd


def without_pages(spec: AttentionSpec, x: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns an equal call with dense k and v and its lengths in cu_seqlens. The pages of each sequence are copied in order.

    If an id is out of range, the nearest page is used, as in the kernels. The copy has max_seqlen_kv keys for each sequence.
    """
    if x.page_table is not None:
        table = x.page_table[:, : -(-x.max_seqlen_kv // spec.page_size)].clamp(0, x.k.shape[0] - 1).long()
        k, v = (_gathered(t, table, x.max_seqlen_kv, spec.kv_format) for t in (x.k, x.v))
        descales = [_gathered(d, table, x.max_seqlen_kv, spec.kv_format) if d.dim() == 4 else d for d in x.descales]
        x, spec = x._replace(k=k, v=v, page_table=None, descales=descales), spec._replace(page_size=0)
    return spec, with_cu_seqlens(x, (spec.q_format, spec.kv_format))


def _gathered(pages: Tensor, table: Tensor, length: int, fmt: str) -> Tensor:
    return from_bshd(as_bshd(pages, fmt)[table].flatten(1, 2)[:, :length], fmt)


def with_cu_seqlens(x: Operands, formats: tuple[str, str]) -> Operands:
    """Returns an equal call whose lengths are in cu_seqlens instead of seqused. With pages, the queries' lengths are too.

    It does not wait for the device.
    """
    if x.seqused_q is None and x.seqused_kv is None and x.page_table is None:
        return x
    packings = {"q": _cumulative(x.q, formats[0], *x.packing("q")[:2], x.seqused_q)}
    if x.page_table is not None and x.seqused_kv is not None:
        lengths = x.seqused_kv.clamp(0, x.max_seqlen_kv)
        packings["kv"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), None
    else:
        packings["kv"] = _cumulative(x.k, formats[1], *x.packing("kv")[:2], x.seqused_kv)
    fields: dict[str, Any] = {"seqused_q": None, "seqused_kv": None}
    for end, packing in packings.items():
        fields[f"cu_seqlens_{end}"], fields[f"cu_seqlens_{end}_padded"] = packing
    return x._replace(**fields)


def _cumulative(
    x: Tensor, fmt: str, cu_seqlens: Tensor | None, padded: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns one side's cu_seqlens and cu_seqlens_padded."""
    if used is None:
        if cu_seqlens is not None:
            return cu_seqlens, padded
        rows, tokens = x.shape[fmt.index("b")], x.shape[fmt.index("s")]
        return torch.arange(0, rows + 1, dtype=torch.int32, device=x.device) * tokens, None
    slots = cu_seqlens.diff() if cu_seqlens is not None else x.shape[fmt.index("s")]
    lengths = torch.minimum(used, slots).clamp(min=0) if isinstance(slots, Tensor) else used.clamp(0, slots)
    cumulative = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cumulative, cu_seqlens
