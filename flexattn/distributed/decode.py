"""Decoding: queries that every rank has, over keys that are split over ranks. One exchange of (out, lse), then a merge."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn import compat, functional, ops, validation
from flexattn.dispatch.spec import as_bshd, from_bshd, parse_format
from flexattn.distributed import agreement, capture
from flexattn.distributed.exchange import all_gather, waiting
from flexattn.functional import chosen
from flexattn.shorthands import softmax_type_of

NOT_TAKEN = {
    "dropout_p": "0, because decoding has no gradients",
    "alibi_slopes": "a score_mod with the position of this rank's first key",
    "return_max_logit": "False",
    "return_aux": "None, because statistics of parts are not merged; return_lse gives lse",
    "out": "None, because the results of ranks are merged into a new tensor",
    "batch_invariant": "False, because results depend on how keys are split",
    "fp8_recipe": "16 bits or more",
    "fp8_state": "16 bits or more",
}

_WAYS_OUT = "Call it under torch.no_grad(), or use `attention` with a plan"


def attention_over_ranks(q: Tensor, k: Tensor, v: Tensor, *, group: Any, **options: Any) -> Any:
    """Returns attention of common queries over the keys of all ranks, bitwise identical on each rank. Has no gradients.

    Each rank attends to its own keys. Then (out, lse) are exchanged once, in float32, as flash decoding merges the parts of a
    sequence (Dao et al., 2023, https://pytorch.org/blog/flash-decoding/). The messages are as long as the queries, not as the keys.

    Args:
        q: as in `flexattn.attention`, equal on all ranks.
        k, v: this rank's keys and values. Ranks may have different lengths, 0 included, in any order. Pools of pages work with this
            rank's own page_table.
        group: a process group, or a DeviceMesh of one dim.
        options: arguments of `flexattn.attention` for this rank's keys. Positions count from this rank's first key. One query sees
            all keys, so it needs no mask, or "padding" if a cache is not full. For several new queries, as in speculative decoding,
            the rank with their keys passes "causal_bottom_right" and the others "no_mask". softmax_type and softmax_offset must be
            equal on all ranks. The first rank alone adds the sink. return_lse returns (out, lse).

    Raises:
        ValueError, TypeError: an error of `flexattn.attention`; dropout, ALiBi or FP8, which cannot be split; a tensor requires a
            gradient while gradients are recorded. Under FLEXATTN_CHECK=1 every rank raises, also if shapes of q differ between
            ranks.
        RuntimeError: the exchange failed or timed out.
    """
    if hasattr(group, "get_group"):
        group = group.get_group()
    return_lse = options.pop("return_lse", False)
    offset = options.pop("softmax_offset", None)
    softmax_type = softmax_type_of(options.pop("softmax_type", None), offset)
    error, own = None, {}
    try:
        _refuse((q, k, v), options)
        x, settings = functional.bind_call(q, k, v, **options, softmax_type=softmax_type, softmax_offset=offset)
        if settings.needs_grad:
            raise ValueError("a bias, a sink or a captured tensor requires a gradient, and decoding has none. " + _WAYS_OUT)
        q_format, _ = parse_format(settings.qkv_format)
        own = {"q": (tuple(q.shape), str(x.q.dtype)), "v's head dim": v.shape[-1], "softmax_type": softmax_type}
    except (TypeError, ValueError) as e:
        error = e
    if error is None:
        capture.check(group, q.device)
    agreement.agree(group, "flexattn.distributed.attention_over_ranks", own, error)
    with torch.no_grad():
        ops.backend_name(ops.spec_to_run(x, settings), "forward", settings.backend, x)  # if none takes a sink, all ranks raise
        if dist.get_rank(group) == 0:  # not in the merge, where nothing tells a query without keys from a token of no sequence
            options |= {"softmax_type": softmax_type, "softmax_offset": offset}
        out, lse = functional.attention(q, k, v, **options, return_lse=True)
        out, lse = merge_over_ranks(out, lse, group=group, qkv_format=q_format)
    return chosen(out, lse, None, return_lse, False)


def _refuse(qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, object]) -> None:
    """Raises ValueError for arguments that cannot be split over ranks."""
    for name, accepted in NOT_TAKEN.items():
        value = options.get(name)
        if value is not None and (isinstance(value, Tensor) or value):
            raise ValueError(f"{name} is given to attention_over_ranks; accepted: {accepted}")
    if options.get("bias_type") == "alibi":
        raise ValueError("bias_type is 'alibi'. Use a score_mod with the position of this rank's first key")
    for name, t in zip("qkv", qkv, strict=True):
        if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and decoding has none. {_WAYS_OUT}")


def merge_over_ranks(
    out: Tensor, lse: Tensor, *, group: Any, qkv_format: str = "bshd", softmax_offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention over all ranks' keys, from each rank's (out, lse) for the same queries. Uses one all-gather.

    The formula is that of `flexattn.merge_attention`, for all parts at once, in float32 and in the order of ranks. Has no
    gradients.

    Args:
        out, lse: results of `flexattn.attention(..., return_lse=True)` without a sink. A rank without keys has out 0 and lse -inf.
        group: a process group, or a DeviceMesh of one dim.
        qkv_format: the format of the queries.
        softmax_offset: [h], a sink that is added once, or None. It becomes the lse of tokens beyond their sequence's length too.

    Raises:
        ValueError, TypeError: tensors that do not match. RuntimeError: the exchange failed.
    """
    if hasattr(group, "get_group"):
        group = group.get_group()
    fmt = validation.check_merge(out, lse, out, lse, qkv_format)
    statistics = lse.transpose(-1, -2).unsqueeze(-1)  # [b, s, h, 1] or [t, h, 1]
    own = torch.cat((as_bshd(out, fmt).to(lse.dtype), statistics), -1).contiguous()
    ranks = dist.get_world_size(group)
    received = own.new_empty(ranks * own.numel())
    with waiting("the exchange of partial results", group):
        all_gather(received, own.view(-1), group).wait()
    parts = received.view(ranks, *own.shape)
    outs, lses = parts[..., :-1], parts[..., -1:]
    if softmax_offset is not None:
        sink = softmax_offset.to(lse.dtype).unsqueeze(-1).expand_as(lses[:1])
        lses, outs = torch.cat((lses, sink)), torch.cat((outs, torch.zeros_like(outs[:1])))
    whole = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - torch.where(whole.isinf(), 0.0, whole))
    merged = from_bshd((shares * outs).sum(0), fmt).to(out.dtype)
    return merged.contiguous(), whole.squeeze(-1).transpose(-1, -2).contiguous()


compat.runs_as_it_is(attention_over_ranks)
compat.runs_as_it_is(merge_over_ranks)
