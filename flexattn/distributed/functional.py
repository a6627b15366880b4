"""Attention of tensors that lie over ranks, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.distributed.plans import Plan
from flexattn.distributed.whole_call import Options, checked

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    strategy: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Returns attention of this rank's queries over the keys of all ranks, as `flexattn.attention` of the whole has them.

    Every rank of the plan's group calls it, with the same options, and every rank differentiates it. The gradients of q, k and v
    are those of this rank's tokens. A tensor that all ranks have whole (bias, softmax_offset, score_mod_tensors) gets on each rank
    the part of its gradient that comes from this rank's queries or heads, as a weight does from this rank's tokens: FSDP, DDP or an
    all-reduce sums both alike. Numbers are those of one process, up to the order of sums: gradients of keys are summed over ranks
    in float32, in the ranks' order. There are no second derivatives.

    Args:
        q: this rank's tokens, in the plan's order (`shard`): [b, s, h, d] as `qkv_format` says, or, where the plan has documents,
            [t, h, d]. float16, bfloat16, float32, or float64 on the eager backend.
        k, v: this rank's keys and values, as `shard(plan, k, keys=True)` gives them.
        plan: what `plan` made, with a group.
        strategy: "gather" (all keys come to each rank), "halo" (those keys that its queries see), "ulysses" (heads for tokens),
            "ring" (keys travel from rank to rank), "ulysses+ring" (heads inside a host, a ring between hosts), "auto" (the least
            time predicted), or None for the plan's.
        qkv_format: "bshd", "sbhd" or "bhsd"; "thd" and nothing else for a plan with documents. None is the one that fits.
        attn_mask_type, window_size, bottom_right_diagonal, block_mask: all None for the plan's mask; else the mask of this call,
            over the plan's tokens: layers with a window and layers without one share a plan. Such a mask names all that the plan's
            has: window_size=(-1, -1) where the plan has a window and the call has none. A block_mask is the whole's.
        bias: [b, h, sq, skv] of the whole, on each rank, or with the rows of this rank's queries alone ("gather", "halo", "ring"),
            whose gradients are then complete; for a plan without documents.
        alibi_slopes: of all heads, and for packed documents [documents, h] or [h]. None takes the defaults of all heads.
        softmax_offset: of all heads.
        dropout_p: as `flexattn.attention` takes it. A weight is dropped by its place in the whole, so that any number of ranks,
            and any strategy, drops what one process does, on the eager backend or the portable Triton kernels.
        rng_state: int64 [2], the same on each rank; None: each draws one, and all take that of rank 0, which waits for it.
        score_mod, mask_mod: as `flexattn.attention` takes them. They see the batch row (or the document), the head and the
            positions of the whole. Tensors that they capture are the same on each rank; one that requires a gradient is to come in
            score_mod_tensors.
        fp8_recipe, fp8_state: as `flexattn.attention` takes them; scales are of all ranks' tokens, and a state on each rank notes
            the whole's. descale_q, descale_k, descale_v: with q, k and v in FP8, the whole's, the same on each rank.
        bias_type, softmax_type, softmax_scale, softcap, score_mod_tensors, deterministic, backend: as `flexattn.attention` has
            them.
        return_lse, return_max_logit: whether to return (out, lse), (out, max_logit) or (out, lse, max_logit), as
            `flexattn.attention` has them: lse, differentiable, of this rank's queries, and max_logit of all, on each rank.

    Raises:
        ValueError, TypeError: an argument that has no meaning or that cannot be split, before anything is sent; on all ranks if
            all were given the same, and in any case under FLEXATTN_CHECK=1, which compares the ranks' calls first.
        RuntimeError: a collective failed, or its group's timeout passed, because another rank does not take part.
    """
    if torch.compiler.is_compiling():
        from flexattn.distributed.compiled import attend  # here, as it imports Dynamo

        return attend(q, k, v, plan, strategy, dict(options))
    return checked(q, k, v, plan, strategy, dict(options)).run()
