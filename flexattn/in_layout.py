"""Attention with results in layouts of their own, for other libraries' spellings: `attention` behind its defaults."""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flexattn import call_cache, fp8
from flexattn.cached_call import TENSOR_FIELDS
from flexattn.dispatch.spec import Results
from flexattn.functional import NO_TENSORS, attention, run_first
from flexattn.prepare import prepare
from flexattn.shorthands import in_full

_SIGNATURE = inspect.signature(attention).parameters
DEFAULTS = in_full(None, None, {name: p.default for name, p in _SIGNATURE.items() if p.kind is p.KEYWORD_ONLY})
_operands_of = itemgetter(*TENSOR_FIELDS[3:])  # all but q, k and v
_mods_of = itemgetter("score_mod", "mask_mod", "score_mod_tensors", "block_mask")
_descales_of = itemgetter("descale_q", "descale_k", "descale_v")
_others_of = itemgetter(
    *("qkv_format", "attn_mask_type", "bottom_right_diagonal", "max_seqlen_q", "max_seqlen_kv", "bias_type", "softmax_type"),
    *("softmax_scale", "softcap", "dropout_p", "deterministic", "batch_invariant", "return_max_logit", "backend"),
)


def attend(
    results: Results, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = True, **given: Any
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Returns out, lse and max_logit of `attention`, with out, and in a backward dq, dk and dv, where `results` says.

    out has q's dims, in whatever order they lie in memory. max_logit is None unless it is asked for; lse is differentiable where
    return_lse is True, and not to be used otherwise. given: other arguments of `attention`. Raises what it raises, and TypeError
    for DTensors.
    """
    return attend_with(results, q, k, v, DEFAULTS | given | {"return_lse": return_lse})


def attend_with(
    results: Results, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Returns what `attend` does. arguments: all of `attention`'s but q, k and v, those left at their defaults too."""
    return_lse: bool = arguments["return_lse"]
    key, call = None, None
    recipe, state = arguments["fp8_recipe"], arguments["fp8_state"]
    if not torch.compiler.is_compiling():
        tensors: tuple[Tensor | None, ...] = (q, k, v)
        operands, descales = _operands_of(arguments), _descales_of(arguments)
        is_fp8 = not (recipe is state is descales[0] is descales[1] is descales[2] is None)
        bias, slopes, offset, cu_q, cu_kv, cu_q_padded, cu_kv_padded, rng_state, used_q, used_kv, table, out = operands
        is_plain = bias is slopes is offset is cu_q is cu_kv is cu_q_padded is cu_kv_padded is rng_state is None
        if is_fp8 or not (is_plain and used_q is used_kv is table is out is None):
            tensors += operands
        others = (results, return_lse, *_others_of(arguments))
        mods: Any = _mods_of(arguments)
        if mods[0] is mods[1] is mods[3] is None and mods[2] is NO_TENSORS:
            mods = None
        of_state: tuple[Tensor, ...] | None = ()
        if is_fp8:
            of_state = fp8.state_tensors(state)
            if of_state is not None:
                tensors += (*descales, *of_state)
                others += (recipe, state is None or state.recipe is recipe or state.recipe)
        if of_state is not None:
            key, call = call_cache.look_up(tensors, others, arguments["window_size"], mods)
        if key is not None and call is not None:
            return call.run(key, return_lse)  # type: ignore[no-any-return]
    for name, t in (("q", q), ("k", k), ("v", v)):
        if type(t).__name__ == "DTensor":
            raise TypeError(f"{name} is a DTensor; accepted: a local tensor, as that of to_local()")
    prepared = prepare(q, k, v, **in_full(q, k, arguments), results=results)
    return run_first(key, prepared, arguments["alibi_slopes"], recipe, state, return_lse)
