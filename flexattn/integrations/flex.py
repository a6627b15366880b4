"""Stand-ins for torch's flex_attention and create_block_mask, with the same arguments, run by `flexattn.attention`.

They need no torch.compile.
The signatures are those of https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html, torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn import block_mask as block_masks
from flexattn.functional import attention
from flexattn.integrations.arguments import without_sign
from flexattn.mods.trace import Mod
from flexattn.statistics import AuxRequest as OwnRequest
from flexattn.validation import check_flags, describe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Returns attention with custom scores and masks, as torch.nn.attention.flex_attention.flex_attention does.

    Args:
        query: [b, h, sq, d]; float16, bfloat16, float32 or (on a CPU) float64.
        key, value: [b, h_kv, skv, d] and [b, h_kv, skv, d_v], of query's dtype. Their batch may be 1 if block_mask has query's
            batch.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> the modified score. Captured tensors that require a gradient receive
            it.
        block_mask: torch's BlockMask, by either create_block_mask, for exactly sq queries and skv keys.
        scale: scale of the scores. None: 1/sqrt(d).
        enable_gqa: whether query heads share heads of key and value: h is a multiple of h_kv.
        return_lse: if True, returns (out, lse); not with return_aux.
        kernel_options: torch's options, also with the prefix fwd_ or bwd_. They are checked and ignored: none changes the results.
        return_aux: torch's AuxRequest. If set, returns (out, AuxOutput) with the requested lse and max_scores. max_scores takes a
            second pass over the scores.

    Returns:
        out [b, h, sq, d_v] of query's dtype, 0 for a query that sees no key. lse is float32 (float64 for float64) [b, h, sq],
        -inf for such a query, and differentiable. max_scores has lse's shape and dtype, and is not differentiable.

    Raises:
        ValueError, TypeError: if shapes or dtypes do not match, a tensor is nested, or a mod cannot be traced.
        ValueError: if kernel_options has a name that torch does not document; also as `flexattn.attention`.
        BackendError: if no backend supports the call.
    """
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    _check(query, key, value, enable_gqa)
    _check_kernel_options(kernel_options)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse is True and return_aux is set; accepted: one of them, such as return_aux=AuxRequest(lse=True)")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise TypeError(f"return_aux is {describe(return_aux)}; accepted: torch's AuxRequest, or None")
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    if key.shape[0] != query.shape[0]:
        key, value = _expand_batch(query, key, value, block_mask)
    query, scale = without_sign(query, scale)
    arguments: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "softmax_scale": scale}
    if return_aux is None:
        out, lse = attention(query, key, value, qkv_format="bhsd", return_lse=True, **arguments)
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    request = OwnRequest(lse=bool(return_aux.lse), max_scores=bool(return_aux.max_scores))
    out, aux = attention(query, key, value, qkv_format="bhsd", return_aux=request, **arguments)
    return out, AuxOutput(lse=aux.lse, max_scores=None if aux.max_scores is None else aux.max_scores.detach())


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Returns torch's BlockMask, as torch.nn.attention.flex_attention.create_block_mask does, without a dense mask in memory.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the query sees the key.
        B, H: batch and query heads. Pass None or 1 if the mask is the same for all.
        Q_LEN, KV_LEN: number of queries and keys.
        device: device of the lists. None: the current accelerator, or the CPU if there is none.
        BLOCK_SIZE: queries and keys of a block, multiples of 16.
        _compile: ignored, because no dense mask is computed.
        separate_full_blocks: whether fully visible blocks are listed apart, so that mask_mod is not run in them.
        compute_dq_write_order: must be False.
        dq_kv_order: ignored without compute_dq_write_order.

    Raises:
        NotImplementedError: if compute_dq_write_order is True, because its lists are for another library's kernels.
        ValueError, TypeError: if a block size is not a multiple of 16, a length is below 0, or mask_mod cannot be traced.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_flags(separate_full_blocks=separate_full_blocks, compute_dq_write_order=compute_dq_write_order)
    if compute_dq_write_order:
        raise NotImplementedError(
            "compute_dq_write_order is True, which is for torch's FLASH kernels; accepted: False; for a deterministic backward, "
            "call torch.use_deterministic_algorithms(True), which needs no such lists"
        )
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    mask = block_masks.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    if separate_full_blocks:
        return mask
    visible = mask.to_dense()
    order = visible.argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32), order.int(), BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            raise ValueError(f"{name} is {describe(x)}; accepted: a dense tensor [batch, heads, tokens, head dim]")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}; accepted: the same, or enable_gqa=True, which shares "
            "the heads of key and value"
        )


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Raises ValueError if the mask is for other lengths, as torch does, because the intended part is unknown."""
    lengths, needed = getattr(block_mask, "seq_lengths", None), (query.shape[2], key.shape[2])
    if lengths is not None and tuple(lengths) != needed:
        raise ValueError(
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys but the call has {needed[0]} and {needed[1]}; accepted: "
            "a mask made for these lengths; flexattn.attention also accepts a longer one and reads its first queries and keys"
        )


def _expand_batch(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None) -> tuple[Tensor, Tensor]:
    """Returns key and value with query's batch; raises ValueError if they cannot be expanded."""
    batch = query.shape[0]
    if key.shape[0] != 1 or value.shape[0] != 1 or block_mask is None or block_mask.kv_num_blocks.shape[0] != batch:
        raise ValueError(
            f"query has batch {batch}, key {key.shape[0]} and value {value.shape[0]}; accepted: equal ones, or 1 for key and value "
            f"with a block_mask of batch {batch}"
        )
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _check_kernel_options(options: Mapping[str, object] | None) -> None:
    """Raises ValueError unless torch documents all names; none of these options changes the results."""
    if not options:
        return
    from torch.nn.attention.flex_attention import FlexKernelOptions

    known = FlexKernelOptions.__annotations__
    for name in options:
        if name.removeprefix("fwd_").removeprefix("bwd_") not in known:
            raise ValueError(f"kernel_options has {name!r}; accepted (and ignored): {', '.join(known)}, also after fwd_ or bwd_")
