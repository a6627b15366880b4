"""The arguments of a call with packed sequences, computed from their lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from flexattn.dispatch.spec import QkvFormat, as_index
from flexattn.validation import check_device, describe


class Packed(TypedDict):
    """Arguments of `attention` for packed sequences."""

    qkv_format: QkvFormat
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int


def packed(
    lengths: Sequence[int] | Tensor, lengths_kv: Sequence[int] | Tensor | None = None, *, device: torch.device | str | None = None
) -> Packed:
    """Returns the arguments of `attention` for packed sequences of these lengths, to be passed with `**`.

    Call this once for a batch and pass the result to every layer, because each call copies the lengths to the device.

    Args:
        lengths (sequence of int, or a 1-d integer tensor or numpy array on a CPU): tokens of each sequence, in the order in which
            they are packed.
        lengths_kv (the same, optional): tokens of each sequence in k and v. Default: `lengths`. If they differ, a causal call names
            its diagonal: attn_mask_type "causal" or "causal_bottom_right".
        device (torch.device or str, optional): q's device. Default: torch's default device.

    Returns:
        A dict of qkv_format ("thd"), cu_seqlens_q and cu_seqlens_kv (int32 [b + 1], one tensor if the lengths are the same), and
        max_seqlen_q and max_seqlen_kv.

    Raises:
        TypeError, ValueError: no sequence, lengths that are not integers of 0 or more, another number of sequences in k and v, or
            more than 2**31 - 1 tokens.

    Examples:
        >>> import torch, flexattn
        >>> x = torch.randn(168, 8, 64)  # three sequences of 100, 7 and 61 tokens
        >>> flexattn.attention(x, x, x, causal=True, **flexattn.packed([100, 7, 61])).shape
        torch.Size([168, 8, 64])
    """
    check_device("device", device)
    lengths_q = _checked("lengths", lengths)
    cu_seqlens = _running_sum(lengths_q, device)
    if lengths_kv is None:
        key_lengths, cu_seqlens_kv = lengths_q, cu_seqlens
    else:
        key_lengths = _checked("lengths_kv", lengths_kv)
        if len(key_lengths) != len(lengths_q):
            raise ValueError(
                f"lengths has {len(lengths_q)} sequences and lengths_kv has {len(key_lengths)}. Pass as many for both."
            )
        cu_seqlens_kv = _running_sum(key_lengths, device)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_kv": max(key_lengths),
    }


def _checked(name: str, lengths: Sequence[int] | Tensor) -> list[int]:
    if isinstance(lengths, Tensor) and (lengths.device.type != "cpu" or lengths.dim() != 1):
        hint = "a list of ints, or a 1-d tensor on the CPU, because reading a tensor waits for its device"
        raise TypeError(f"{name} is {describe(lengths)}. Pass {hint}.")
    values: Any = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    indices = [as_index(n) for n in values] if isinstance(values, Sequence) else []
    counts = [n for n in indices if n is not None]
    if not counts or len(counts) < len(indices):
        raise TypeError(
            f"{name} is {describe(lengths)}. Pass a list with the number of tokens of each sequence, such as [100, 7, 61]."
        )
    if min(counts) < 0 or sum(counts) >= 2**31:
        raise ValueError(f"{name} is {describe(lengths)}. Pass lengths of 0 or more, of fewer than 2**31 tokens together.")
    return counts


def _running_sum(lengths: list[int], device: torch.device | str | None) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
