"""TransformerEngine's score_mod: callbacks that build a cuDNN graph, run like any other score_mod, on every backend.

    from flexattn.integrations.te import TEScoreMod
    out = attention(q, k, v, score_mod=TEScoreMod(score_mod, score_mod_bprop, score_mod_tensors={"cap": cap}))

The callbacks receive a graph with the names of cuDNN frontend's pointwise nodes. Their calls are recorded as torch ops, and traced.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flexattn import compat
from flexattn.dispatch.mod_program import evaluate
from flexattn.dispatch.neutral import is_jit_traced, neutral_state
from flexattn.integrations.te.score_graph import AXES, GraphTensor, ScoreGraph, read_tensors
from flexattn.mods.trace import trace_mods
from flexattn.mods.tracer import MisusedType

Callback = Callable[..., object]
Value = Tensor | float | int | bool
LIMIT = 1e-5  # rounding error that check_bprop allows, relative to the largest gradient, in fp64 with float32 constants


class TEScoreMod:
    """A score_mod from TransformerEngine's callbacks; pass it as `score_mod` to `attention`.

    The form is that of TransformerEngine's pull requests 2984 (PyTorch) and 2985 (JAX).

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score. A bound method may store results on its object.
        score_mod_bprop: score_mod_bprop(graph, dP, tensors) -> the gradient of the score. None: the gradient is derived. It may
            use results that score_mod stored on the object. It is not checked; `check_bprop` compares it with the derived gradient.
        score_mod_tensors: name -> a number of Python or NumPy, or a tensor of up to 4 dims, broadcast from the right against
            [b, h, sq, skv]: [skv] has a value for each key, [sq, skv] for each query and key, [h, sq, skv] for each head too. A
            dim of 1 is broadcast. A CPU tensor of one element is a number that is read in each call, because cuDNN passes it by
            value. Without a bprop, tensors that require gradients receive them.
        score_mod_bprop_tensors: the same for the bprop. None: score_mod_tensors.

    Raises:
        TypeError: if a callback is not callable, or the tensors are not a dict from names to tensors and numbers.
        ValueError: if bprop tensors come without a bprop, or a tensor has more than 4 dims.
        ValueError: if there is a bprop, and a tensor requires a gradient.
    """

    _flexattn_reads = ("forward", "bprop", "tensors", "tensors_of_bprop")  # everything that a call depends on: see captures

    def __init__(
        self,
        score_mod: Callback,
        score_mod_bprop: Callback | None = None,
        score_mod_tensors: Mapping[str, object] | None = None,
        score_mod_bprop_tensors: Mapping[str, object] | None = None,
    ) -> None:
        for name, callback in (("score_mod", score_mod), ("score_mod_bprop", score_mod_bprop)):
            if not (callable(callback) or (callback is None and name == "score_mod_bprop")):
                raise TypeError(f"{name} is {callback!r}; accepted: a function of (graph, tensor, tensors)")
        if score_mod_bprop_tensors is not None and score_mod_bprop is None:
            raise ValueError(
                "score_mod_bprop_tensors comes without a score_mod_bprop; accepted: None, because the derived gradient has none"
            )
        self.forward = score_mod
        self.bprop = score_mod_bprop
        # Names of attributes of the object that score_mod is bound to.
        self.attributes = tuple(getattr(getattr(score_mod, "__self__", None), "__dict__", ()))
        self.tensors = _check_tensors("score_mod_tensors", score_mod_tensors)
        self.tensors_of_bprop = (
            self.tensors if score_mod_bprop_tensors is None else _check_tensors("score_mod_bprop_tensors", score_mod_bprop_tensors)
        )
        if score_mod_bprop is not None:
            for name, tensor in self.tensors.items():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ValueError(
                        f"score_mod_tensors[{name!r}] requires a gradient, which score_mod_bprop does not compute; detach it, or "
                        "leave score_mod_bprop out, so that the gradient is derived"
                    )

    def __call__(self, score: object, b: object, h: object, q_idx: object, kv_idx: object) -> Any:
        callback, _ = self._on_a_copy()
        return self._run("score_mod", callback, score, self.tensors, (b, h, q_idx, kv_idx))

    @property
    def score_mod_gradient(self) -> Callback | None:
        """The bprop's gradient of the score, for `flexattn.mods.trace.trace_mods`; None without a bprop."""
        return self._gradient if self.bprop is not None else None

    def _gradient(self, dscore: object, score: object, b: object, h: object, q_idx: object, kv_idx: object) -> Any:
        forward, bprop = self._on_a_copy()
        indices = (b, h, q_idx, kv_idx)
        self._run("score_mod", forward, score, self.tensors, indices)  # it may store results on its object
        return self._run("score_mod_bprop", bprop, dscore, self.tensors_of_bprop, indices)

    def _flexattn_state(self) -> dict[str, Any]:
        """Returns the attributes, with CPU tensors replaced by their current numbers."""
        state = vars(self)
        tensors = {name: _by_value(t) for name, t in self.tensors.items()}
        is_shared = self.tensors_of_bprop is self.tensors
        bprop_tensors = tensors if is_shared else {name: _by_value(t) for name, t in self.tensors_of_bprop.items()}
        return {**state, "tensors": tensors, "tensors_of_bprop": bprop_tensors}

    def _on_a_copy(self) -> tuple[Callback, Any]:
        """Returns both callbacks, bound to one copy of their object, so that a trace does not change the object."""
        owner = getattr(self.forward, "__self__", None)
        if not isinstance(self.forward, types.MethodType):
            return self.forward, self.bprop
        if torch.compiler.is_dynamo_compiling():  # Dynamo does not support copy.copy
            clone = object.__new__(type(owner))
            for name in self.attributes:
                setattr(clone, name, getattr(owner, name))
        else:
            clone = copy.copy(owner)
        bprop = self.bprop
        if isinstance(bprop, types.MethodType) and bprop.__self__ is owner:
            bprop = functools.partial(bprop.__func__, clone)
        return functools.partial(self.forward.__func__, clone), bprop

    def _run(self, role: str, callback: Callback, tensor: Any, tensors: Mapping[str, Value], indices: tuple[Any, ...]) -> object:
        result = callback(ScoreGraph(indices, tensor), GraphTensor(tensor), read_tensors(tensors, indices, tensor))
        if not isinstance(result, GraphTensor):
            raise MisusedType(f"{role} {_name(callback)} returned {result!r}; accepted: a tensor of its graph")
        return result.value

    def _flexattn_check_sizes(self, *sizes: int | None) -> None:
        """Raises ValueError if a tensor does not fit a call's (b, h, sq, skv), so that it lacks a value for some score.

        None: an unknown size. If a tensor is for longer sequences, its first values are read.
        """
        for argument, tensors in (("score_mod_tensors", self.tensors), ("score_mod_bprop_tensors", self.tensors_of_bprop)):
            for name, t in tensors.items():
                if not isinstance(t, Tensor):
                    continue
                for axis, size, expected in zip(("b", "h", "sq", "skv")[4 - t.dim() :], t.shape, sizes[4 - t.dim() :], strict=True):
                    is_longer = axis in ("sq", "skv") and expected is not None and size > expected
                    if expected is not None and size not in (1, expected) and not is_longer:
                        raise ValueError(
                            f"{argument}[{name!r}] has shape {tuple(t.shape)}, with {size} for {axis}, but the call has {expected}"
                            f"; accepted: 1 or {expected}{'' if axis in ('b', 'h') else ', or more'}"
                        )

    def check_bprop(self, samples: int = 1000) -> None:
        """Compares score_mod_bprop with the derived gradient, at `samples` scores and positions, in fp64.

        Raises:
            ValueError: if they differ, with both values at the largest difference; or if there is no bprop.
        """
        if self.bprop is None:
            raise ValueError("check_bprop compares a score_mod_bprop with the derived gradient; pass a score_mod_bprop")
        explicit = trace_mods(self, None, needs_grad=True)
        derived = trace_mods(self.__call__, None, needs_grad=True)
        generator = torch.Generator("cpu").manual_seed(0)
        values = {
            name: torch.randn(samples, generator=generator, dtype=torch.float64, device="cpu") * 3 for name in ("score", "dscore")
        }
        for name, size in zip(AXES, self._sizes(), strict=True):
            values[name] = torch.randint(0, size if size > 1 else 64, (samples,), generator=generator, device="cpu")
        results = []
        for traced in (explicit, derived):
            assert traced.program.derivative is not None
            captures = traced.program.inputs([t.detach().cpu() for t in traced.tensors], traced.numbers)
            result = evaluate(traced.program.derivative, {**values, **captures}, torch.float64)[0]
            results.append(torch.zeros(samples, dtype=torch.float64, device="cpu") if result is None else result.expand(samples))
        difference = (results[0] - results[1]).abs().nan_to_num(nan=torch.inf)
        worst = int(difference.argmax())
        if difference[worst] > LIMIT * max(1.0, float(results[1].abs().max())):
            position = ", ".join(f"{name} = {values[name][worst].item():.6g}" for name in ("score", *AXES))
            raise ValueError(
                f"score_mod_bprop gives {results[0][worst].item():.6g} and the derivative of score_mod is "
                f"{results[1][worst].item():.6g}, for dP = {values['dscore'][worst].item():.6g} at {position}; "
                f"{int((difference > LIMIT).sum())} of {samples} samples differ"
            )

    def _sizes(self) -> list[int]:
        """Returns the largest size of b, h, sq and skv in the tensors; 1 if all are broadcast."""
        sizes = [1, 1, 1, 1]
        for t in (*self.tensors.values(), *self.tensors_of_bprop.values()):
            if isinstance(t, Tensor):
                for dim, size in enumerate(t.shape):
                    sizes[4 - t.dim() + dim] = max(sizes[4 - t.dim() + dim], size)
        return sizes


def _check_tensors(argument: str, tensors: object) -> dict[str, Value]:
    """Returns the checked tensors and numbers by name, with tensors of one element as 0-d tensors."""
    if tensors is None:
        return {}
    accepted = "a dict from names to tensors and numbers"
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{argument} is a {type(tensors).__name__}; accepted: {accepted}, or None")
    readable: dict[str, Value] = {}
    for name, t in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the name {name!r}, a {type(name).__name__}; accepted: {accepted}, with str names")
        if isinstance(t, Tensor):
            if t.dim() > 4 and t.numel() != 1:
                raise ValueError(
                    f"{argument}[{name!r}] has shape {tuple(t.shape)}; accepted: up to 4 dims, [b, h, sq, skv] or the last of "
                    "these, with 1 for a broadcast dim"
                )
            readable[name] = t.reshape(()) if t.numel() == 1 else t
        elif type(t) in (bool, int, float):
            readable[name] = t
        elif type(t).__module__ == "numpy" and type(t).__name__ != "ndarray" and isinstance(t.item(), (bool, int, float)):
            readable[name] = t.item()
        else:
            raise TypeError(
                f"{argument}[{name!r}] is a {type(t).__module__}.{type(t).__name__}; accepted: {accepted}; to convert an array, "
                "call torch.from_numpy"
            )
    return readable


def _by_value(t: Value) -> Value:
    """Returns the number in a 0-d CPU tensor; other values are returned unchanged."""
    if not isinstance(t, Tensor) or type(t) not in (Tensor, torch.nn.Parameter):
        return t
    if t.dim() or t.device.type != "cpu" or t.requires_grad or not t.dtype.is_floating_point or is_jit_traced():
        return t
    if not compat.num_dispatch_modes() and not compat.has_function_mode():
        return float(t.item())
    with neutral_state():  # within a trace, whose modes hide values
        return float(t.item())


def _name(callback: object) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
