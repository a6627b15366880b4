"""Switches of a call that kernels are compiled for, which every Meta contains."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple


class Features(NamedTuple):
    """Constants of a call that every attention kernel is compiled for; `with_features` puts them before a kernel's own."""

    IS_RAGGED_Q: bool  # q is [total, h, d]
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_LEFT: bool  # the band has a left side
    HAS_RIGHT: bool
    HAS_PRE_SCALE_BIAS: bool
    HAS_POST_SCALE_BIAS: bool
    BIAS_ALIGN: int  # up to 8: divides the strides and keys of a bias whose keys are neighbours in memory; 0: another or no bias
    HAS_ALIBI: bool
    HAS_SOFTCAP: bool
    HAS_EXACT_TANH: bool  # for the softcap, `tanh.tanh`
    IS_UNBOUNDED: bool  # logits may have any size, whatever q and k are
    HAS_DROPOUT: bool
    ORIGIN: int  # columns of an rng_state with origins, for dropout at positions of a larger problem; 0: no origins
    HAS_SCORE_MOD: bool
    HAS_MASK_MOD: bool
    BLOCK_SIZE_Q: int  # queries of a block of the block mask; 0: no block mask
    BLOCK_SIZE_KV: int
    LISTS_ARE_CUT: bool  # the block mask's lists omit blocks that the band or the end hides
    PIECE: int  # keys of a KV split that is cut at multiples of PIECE; 0: the splits share the keys that a tile sees


def with_features(kernel_fields: Any) -> Any:
    """Returns a NamedTuple class with the fields of `Features`, then the fields of `kernel_fields`, a NamedTuple class, and its
    name.

    The result is flat, so that kernels and shared functions read `META.HAS_LEFT` whatever else a kernel is compiled for.
    """
    combined: Any = namedtuple(  # type: ignore[misc]
        kernel_fields.__name__,
        (*Features._fields, *kernel_fields._fields),
        defaults=[*kernel_fields._field_defaults.values()],
        module=kernel_fields.__module__,  # pickle finds the class by it
    )
    combined.__doc__ = kernel_fields.__doc__
    return combined


def is_plain(features: Features) -> bool:
    """Returns whether a logit is a scaled score and nothing else."""
    x = features
    return not (x.HAS_PRE_SCALE_BIAS or x.HAS_POST_SCALE_BIAS or x.HAS_ALIBI or x.HAS_SOFTCAP or x.HAS_SCORE_MOD)
