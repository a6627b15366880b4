"""Attention whose results have layouts of their own, for other libraries' spellings: `attention` behind its defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn import call_cache
from flexattn.call_cache import CONSTANTS, split_of
from flexattn.dispatch.spec import Results
from flexattn.functional import run_first
from flexattn.prepare import prepare
from flexattn.shorthands import in_full


def attend(
    results: Results, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = True, **options: object
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Returns out, lse and max_logit of `attention`, with out and, in a backward, dq, dk and dv as `results` says.

    out has q's dims, in any order in memory. max_logit is None if it is not requested. lse is differentiable if return_lse is
    True, and must not be used otherwise. options: arguments of `attention`, without cu_seqlens, max_seqlen and mask. Raises the
    errors of `attention`, and TypeError for DTensors.
    """
    return attend_with(results, q, k, v, options | {"return_lse": return_lse})


def attend_with(
    results: Results, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Returns the results of `attend`, which takes the same options by name."""
    key = None
    if not torch.compiler.is_compiling():
        split = split_of(tuple(options))
        parts = split.parts([*CONSTANTS, split, q, k, v, *options.values()])
        if parts is not None:
            tensors, others, window, mods = parts
            key, call = call_cache.look_up(tensors, (*others, results), window, mods)
            if key is not None and call is not None:
                return call.run(key, options.get("return_lse", False))  # type: ignore[no-any-return]
    for name, t in (("q", q), ("k", k), ("v", v)):
        if type(t).__name__ == "DTensor":
            raise TypeError(f"{name} is a DTensor; accepted: a local tensor, as that of to_local()")
    arguments = in_full(q, k, options)
    return run_first(key, prepare(q, k, v, arguments, results=results), arguments)
