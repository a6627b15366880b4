"""Attention of tensors that are split over ranks, with gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn import compat
from flexattn.dispatch.spec import Band, make_band
from flexattn.distributed.blocks import Blocks, read_blocks
from flexattn.distributed.layout import chunks
from flexattn.distributed.mask import Mask
from flexattn.distributed.plans import MASK, Plan
from flexattn.distributed.whole_call import Options, checked_call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack


def attention(q: Tensor, k: Tensor, v: Tensor, *, plan: Plan, strategy: str | None = None, **options: Unpack[Options]) -> Any:
    """Returns attention of this rank's queries over the keys of all ranks, as one process computes it for the full sequence.

    Every rank of the plan's group must call it with the same options, and must differentiate it. The gradients of q, k and v belong
    to this rank's tokens. Each rank has some tensors in full: bias, softmax_offset and score_mod_tensors. Their gradient on a rank
    is the part from this rank's queries or heads. Sum these parts as you sum those of weights, with FSDP, DDP or an all-reduce.
    Results equal those of one process up to the order of sums. Gradients of keys are summed over ranks in float32, in the order of
    ranks. Second derivatives are not supported.

    Args:
        q: this rank's tokens, in the plan's order (`shard`). [b, s, h, d] as `qkv_format` says, or [t, h, d] if the plan has
            documents. float16, bfloat16, float32, or float64 on the eager backend.
        k, v: this rank's keys and values, as `shard(plan, k, keys=True)` returns them.
        plan: a result of `plan`, with a group.
        strategy: "gather" (all keys on each rank), "halo" (only the keys that its queries see), "ulysses" (heads for tokens),
            "ring" (keys travel from rank to rank) or "ulysses+ring" (heads inside a host, a ring between hosts). "auto": the least
            predicted time. None: the plan's strategy.
        qkv_format: "bshd", "sbhd" or "bhsd". Only "thd" for a plan with documents. None: "thd" or "bshd".
        attn_mask_type, window_size, bottom_right_diagonal, block_mask: None for all means the plan's mask. Else they are the mask
            of this call over the plan's tokens, so layers with and without a window can share a plan. Name every part of the plan's
            mask then, for example window_size=(-1, -1) if only the plan has a window. A block_mask describes the full sequence.
        bias: [b, h, sq, skv] of the full sequence, on each rank. Or only the rows of this rank's queries ("gather", "halo",
            "ring"), whose gradients are then complete. Not for plans with documents.
        alibi_slopes: of all heads. For packed documents [documents, h] or [h]. None uses the default slopes of all heads.
        softmax_offset: of all heads.
        dropout_p: as in `flexattn.attention`. The position in the full sequence decides whether a weight is dropped. So any number
            of ranks and any strategy drop the same weights as one process, on the eager backend or the portable Triton kernels.
        rng_state: int64 [2], equal on all ranks. None: all ranks use a new state of rank 0, and wait for it.
        score_mod, mask_mod: as in `flexattn.attention`. They see the batch row (or the document), the head and the positions in the
            full sequence. Captured tensors must be equal on all ranks. Pass a captured tensor in score_mod_tensors if it requires a
            gradient.
        fp8_recipe, fp8_state: as in `flexattn.attention`. Scales use the tokens of all ranks, and the state on each rank records
            them. descale_q, descale_k, descale_v: for q, k and v in FP8, of the full sequence, equal on all ranks.
        bias_type, softmax_type, softmax_scale, softcap, score_mod_tensors, deterministic, backend: as in `flexattn.attention`.
        return_lse, return_max_logit: return (out, lse), (out, max_logit) or (out, lse, max_logit), as in `flexattn.attention`. lse
            belongs to this rank's queries, and has a gradient. max_logit is the maximum over all ranks' queries.

    Raises:
        ValueError, TypeError: an argument that is invalid or cannot be split. All ranks raise before anything is sent if all got
            the same arguments. Under FLEXATTN_CHECK=1 they always do, because ranks compare their calls first.
        RuntimeError: a collective failed or timed out, for example because another rank does not take part.
    """
    if torch.compiler.is_compiling():
        from flexattn.distributed.compiled import attend  # imported here, because it imports Dynamo

        return attend(q, k, v, plan, strategy, dict(options))
    return checked_call(q, k, v, plan, strategy, dict(options)).run()


def attend_over_sequence(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, lengths: tuple[int, int], arguments: dict[str, Any]
) -> Any:
    """Returns `attention` of this rank's tokens of DTensors, which are split as Shard splits them: a contiguous layout.

    lengths: numbers of all queries and keys. arguments: those of `flexattn.attention`, for the full sequence.
    """
    band = make_band(*(arguments[name] for name in MASK[:3]))
    blocks = None if arguments["block_mask"] is None else read_blocks(arguments["block_mask"], lengths)
    taken = {name: arguments[name] for name in Options.__annotations__ if name in arguments and name not in MASK}
    return attention(q, k, v, plan=_plan(group, lengths, band, blocks), **taken)


compat.runs_as_it_is(attend_over_sequence)  # because it makes plans


@functools.lru_cache(maxsize=64)
def _plan(group: ProcessGroup, lengths: tuple[int, int], band: Band, blocks: Blocks | None) -> Plan:
    queries, keys = lengths
    runs = (chunks(queries, group.size()), chunks(keys, group.size()))
    mask = Mask(*band, (queries,), (keys,), blocks)
    return Plan(group.size(), "contiguous", "auto", False, *runs, mask, group.size(), group)
