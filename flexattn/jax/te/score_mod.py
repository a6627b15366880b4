"""TransformerEngine's score_mod callbacks in JAX: recorded like those of `flexattn.integrations.te`, with arrays as tensors.

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
    """A dict of callbacks' tensors, split: numbers are part of the call, arrays are its operands."""

    values: dict[str, object]  # numbers, and None for each array
    arrays: dict[str, jax.Array]

    def joined(self, tensors: dict[str, Tensor]) -> dict[str, object]:
        """Returns the dict with tensors in place of the arrays, in the original order."""
        return self.values | tensors


def split(argument: str, tensors: object) -> _Tensors:
    """Splits a dict of callbacks' tensors into arrays, of 0 to 4 dims, and Python and NumPy numbers.

    Raises TypeError if it is not a dict, or if a name is not a str.
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


def recorded(score_mod: Callback, score_mod_bprop: Callback | None, tensors: object, bprop_tensors: object) -> InTorch:
    """Returns callbacks as a score_mod of `flexattn.jax.attention`.

    Equal callbacks with tensors of equal shapes share a program, even if they are different objects.

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score.
        score_mod_bprop: score_mod_bprop(graph, dscore, tensors) -> the gradient of the score. None: the gradient is derived.
        tensors: name -> array or number, for score_mod. Arrays, [b, h, sq, skv] or the last of these dims, with 1 for a broadcast
            dim, may be traced. If score_mod_bprop is None, they receive gradients.
        bprop_tensors: the same for score_mod_bprop.

    Raises:
        TypeError, ValueError: as `flexattn.integrations.te.TEScoreMod`; ValueError if a gradient of one of the tensors is needed
            although there is a score_mod_bprop, when the call is traced.
    """
    if bprop_tensors and score_mod_bprop is None:
        raise ValueError(
            "score_mod_bprop_tensors comes without a score_mod_bprop; accepted: None, because the derived gradient has none"
        )
    forward, backward = split("score_mod_tensors", tensors), split("score_mod_bprop_tensors", bprop_tensors)

    def make(stand_ins: tuple[Tensor, ...]) -> TEScoreMod:
        count = len(forward.arrays)
        forward_tensors = dict(zip(forward.arrays, stand_ins[:count], strict=True))
        backward_tensors = dict(zip(backward.arrays, stand_ins[count:], strict=True))
        if score_mod_bprop is None:
            return TEScoreMod(score_mod, None, forward.joined(forward_tensors))
        for argument, tensors_of_role in (("score_mod_tensors", forward_tensors), ("score_mod_bprop_tensors", backward_tensors)):
            for name, t in tensors_of_role.items():
                if t.requires_grad:
                    raise ValueError(
                        f"{argument}[{name!r}] is differentiated, but score_mod_bprop does not compute its gradient; accepted: "
                        "jax.lax.stop_gradient of it, or no score_mod_bprop, so that the gradient is derived"
                    )
        return TEScoreMod(score_mod, score_mod_bprop, forward.joined(forward_tensors), backward.joined(backward_tensors))

    return InTorch(make, (*forward.arrays.values(), *backward.arrays.values()))
