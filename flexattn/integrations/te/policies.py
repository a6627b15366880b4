"""Policies of packed sequences: a mask type and a window for some of the sequences of a call, with TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.integrations.te.masks import mask_type_of, masks_of, window_of
from flexattn.validation import are_values_read, describe

_NEEDED = ("sequence_ids", "mask_type", "window_size")
_NOT_GIVEN = ("attn_mask_type", "window_size", "attention_mask", "core_attention_bias", "inference_params", "score_mod")
DISPATCHES = ("auto", "grouped")


class Policy(NamedTuple):
    """Sequences of a packed batch with one mask.

    sequence_ids: int32 or int64, ascending. masks: the arguments of `flexattn.attention` for their mask.
    """

    sequence_ids: Tensor
    masks: dict[str, object]


def policies_of(policies: object, bottom_right_diagonal: bool | None) -> list[Policy]:
    """Returns the policies of `DotProductAttention.forward`'s thd_attention_policies that have sequences.

    bottom_right_diagonal: of policies without their own.

    Raises:
        ValueError, TypeError: if a policy is invalid; the text names it, its value and the accepted values.
    """
    if not isinstance(policies, (list, tuple)) or not policies:
        raise ValueError(f"thd_attention_policies is {describe(policies)}; accepted: a list of at least one dict")
    found = []
    for index, policy in enumerate(policies):
        name = f"thd_attention_policies[{index}]"
        if not isinstance(policy, Mapping) or not {*_NEEDED} <= policy.keys() <= {*_NEEDED, "bottom_right_diagonal"}:
            given = sorted(map(str, policy)) if isinstance(policy, Mapping) else describe(policy)
            raise ValueError(f"{name} is or has {given}; accepted: {', '.join(_NEEDED)}, and bottom_right_diagonal or not")
        ids, mask_type = policy["sequence_ids"], mask_type_of(policy["mask_type"])
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}['sequence_ids'] is {describe(ids)}; accepted: an int32 or int64 tensor of one dim")
        if "padding" not in mask_type:
            raise ValueError(f"{name}['mask_type'] is {mask_type!r}; accepted: a type with padding in its name")
        own = policy.get("bottom_right_diagonal")
        diagonal = bottom_right_diagonal if own is None else own
        if len(ids):
            found.append(Policy(ids, masks_of(mask_type, window_of(mask_type, policy["window_size"]), diagonal)))
    return found


def check_call(fmt: str, given: Sequence[object], bias_type: str, is_fp8: bool, return_max_logit: bool) -> None:
    """Raises ValueError for arguments that do not go with policies, as TransformerEngine does.

    given: the values of `_NOT_GIVEN`.
    """
    if fmt != "thd":
        raise ValueError(f"thd_attention_policies comes with qkv_format {fmt!r}; accepted: 'thd'")
    for name, value in zip(_NOT_GIVEN, given, strict=True):
        if value is not None:
            raise ValueError(f"thd_attention_policies comes with {name}; accepted: None")
    if bias_type != "no_bias":
        raise ValueError(f"thd_attention_policies comes with core_attention_bias_type {bias_type!r}; accepted: 'no_bias'")
    if is_fp8 or return_max_logit:
        raise ValueError("thd_attention_policies comes with attention in FP8 or return_max_logit; accepted: a call without")


def calls_of(policies: Sequence[Policy], lengths: Mapping[str, Any]) -> list[dict[str, object]]:
    """Returns the arguments of one call for each policy, in which only its sequences have tokens.

    Other tokens are padding of such a call, whose result there is 0, so that the results add up to the whole.

    lengths: the arguments of a call of the whole batch.

    Raises ValueError if the policies do not have every sequence once. The numbers are read on a CPU, and with FLEXATTN_CHECK=1.
    """
    sequences = len(lengths["cu_seqlens_q"]) - 1
    every = [policy.sequence_ids for policy in policies]
    count = sum(map(len, every))
    is_known = bool(every) and are_values_read(every[0])
    is_wrong = is_known and sorted(i for ids in every for i in ids.tolist()) != list(range(sequences))
    if count != sequences or is_wrong:
        raise ValueError(
            f"thd_attention_policies has {count} sequence_ids for {sequences} sequences; accepted: each one in one policy"
        )
    for policy in policies:
        if is_known and bool((policy.sequence_ids.diff() <= 0).any()):
            raise ValueError(
                f"sequence_ids is {policy.sequence_ids.tolist()} in thd_attention_policies; accepted: ascending numbers"
            )
    if len(policies) < 2:
        return [{**lengths, **policies[0].masks} if policies else dict(lengths)]
    return [{**_part(policy.sequence_ids, lengths), **policy.masks} for policy in policies]


def _part(ids: Tensor, lengths: Mapping[str, Any]) -> dict[str, object]:
    part = dict(lengths)
    for side in ("q", "kv"):
        ends = lengths[f"cu_seqlens_{side}"]
        starts = lengths.get(f"cu_seqlens_{side}_padded", ends)
        part[f"cu_seqlens_{side}"] = torch.nn.functional.pad(ends.diff()[ids].cumsum(0, dtype=torch.int32), (1, 0))
        part[f"cu_seqlens_{side}_padded"] = torch.cat((starts[ids], starts[-1:]))
    return part
