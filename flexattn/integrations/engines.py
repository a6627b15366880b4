"""Calls of `attention` that the integrations of serving engines share: one batch over pages, and one layer."""

from __future__ import annotations

from typing import NoReturn, TypedDict

import torch
from torch import Tensor

from flexattn.dispatch.spec import MaskType, QkvFormat

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ANOTHER_BACKEND = "use another attention backend"
WIDEST_FP8_HEAD = 256  # the Triton kernels read keys and values in FP8 with head dims up to this one


class BatchOptions(TypedDict):
    """The arguments of `attention` that describe a batch."""

    qkv_format: QkvFormat
    attn_mask_type: MaskType
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqused_kv: Tensor
    page_table: Tensor


class LayerOptions(TypedDict):
    """The arguments of `attention` that describe a layer."""

    softmax_scale: float
    softcap: float
    window_size: tuple[int, int]
    batch_invariant: bool


class Descales(TypedDict, total=False):
    """The scales of a cache in FP8: float32 [] or [h_kv]."""

    descale_k: Tensor
    descale_v: Tensor


def batch_options(cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_kv: Tensor, page_table: Tensor) -> BatchOptions:
    """Returns the options of a batch whose queries are the last tokens of their sequences.

    Args:
        cu_seqlens_q: int32 [b + 1], the bounds of each sequence's queries.
        max_seqlen_q: at least the most queries of a sequence.
        seqused_kv: int32 [b], the tokens of each sequence, new ones included.
        page_table: int32 [b, columns].
    """
    return {
        "qkv_format": "thd_2bshd",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "seqused_kv": seqused_kv,
        "page_table": page_table,
    }


def layer_options(scale: float, softcap: float | None, keys_before: int | None, batch_invariant: bool) -> LayerOptions:
    """Returns the options of a layer. keys_before: the most keys before a query's own that it sees; None is all."""
    return {
        "softmax_scale": float(scale),
        "softcap": softcap or 0.0,
        "window_size": (-1, -1) if keys_before is None else (keys_before, 0),
        "batch_invariant": batch_invariant,
    }


def refuse(name: str, value: object, accepted: str, way_out: str) -> NoReturn:
    """Raises the error for an engine's setting that the integration does not support."""
    raise NotImplementedError(f"{name} is {value!r}; accepted: {accepted}; {way_out}")
