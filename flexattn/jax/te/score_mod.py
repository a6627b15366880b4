"""TransformerEngine's score_mod callbacks in JAX: recorded by the recorder of `flexattn.integrations.te`, with arrays for tensors.

The form is that of TransformerEngine's pull request 2985, https://github.com/NVIDIA/TransformerEngine/pull/2985.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor

from flexattn.integrations.te.score_mod import TEScoreMod
from flexattn.jax.mods import InTorch

Callback = Callable[..., Any]


class _Tensors(NamedTuple):
    """A dict of callbacks' tensors, taken apart: numbers are part of the call, arrays its operands."""

    values: dict[Any, Any]  # numbers, and None where there is an array
    arrays: dict[Any, Any]

    def joined(self, tensors: dict[Any, Tensor]) -> dict[Any, Any]:
        """Returns the dict with tensors in the place of the arrays, in the order in which it was given."""
        return self.values | tensors


def split(argument: str, tensors: Any) -> _Tensors:
    """Returns the arrays of a dict of callbacks' tensors, of 0 to 4 dims, apart from its Python and NumPy numbers.

    Raises TypeError for what is no dict, and for a name that is no str.
    """
    if tensors is None:
        return _Tensors({}, {})
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{argument} is a {type(tensors).__name__}; accepted: a dict from names to arrays and numbers, or None")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the name {name!r}, a {type(name).__name__}; accepted: str names")
    arrays = {name: jnp.asarray(x) for name, x in tensors.items() if isinstance(x, (jax.Array, np.ndarray))}
    return _Tensors({name: None if name in arrays else x for name, x in tensors.items()}, arrays)


def recorded(score_mod: Callback, score_mod_bprop: Callback | None, tensors: Any, tensors_of_bprop: Any) -> InTorch:
    """Returns callbacks as a score_mod of `flexattn.jax.attention`.

    Equal callbacks with tensors of equal shapes are one program, whatever objects they are: the program is what they record.

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score.
        score_mod_bprop: score_mod_bprop(graph, dscore, tensors) -> the gradient of the score; None: it is derived.
        tensors: name -> array or number, for score_mod. Arrays, [b, h, sq, skv] or the last of these dims, with 1 where one is
            broadcast, may be traced. They get gradients where score_mod_bprop is None.
        tensors_of_bprop: the same for score_mod_bprop.

    Raises:
        TypeError, ValueError: what `flexattn.integrations.te.TEScoreMod` raises; ValueError where a gradient of one of the tensors
            is asked for beside a score_mod_bprop, when the call is traced.
    """
    if tensors_of_bprop and score_mod_bprop is None:
        raise ValueError("score_mod_bprop_tensors is given without a score_mod_bprop; accepted: None, as the derived one has none")
    forward, backward = split("score_mod_tensors", tensors), split("score_mod_bprop_tensors", tensors_of_bprop)

    def make(stand_ins: tuple[Tensor, ...]) -> TEScoreMod:
        count = len(forward.arrays)
        of_forward = dict(zip(forward.arrays, stand_ins[:count], strict=True))
        of_backward = dict(zip(backward.arrays, stand_ins[count:], strict=True))
        if score_mod_bprop is None:
            return TEScoreMod(score_mod, None, forward.joined(of_forward))
        for argument, given in (("score_mod_tensors", of_forward), ("score_mod_bprop_tensors", of_backward)):
            for name, t in given.items():
                if t.requires_grad:
                    raise ValueError(
                        f"{argument}[{name!r}] is differentiated, and score_mod_bprop gives it no gradient; accepted: "
                        "jax.lax.stop_gradient of it, or no score_mod_bprop, and the backward is derived for it too"
                    )
        return TEScoreMod(score_mod, score_mod_bprop, forward.joined(of_forward), backward.joined(of_backward))

    return InTorch(make, (*forward.arrays.values(), *backward.arrays.values()))
