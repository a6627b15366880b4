"""TransformerEngine's score_mod: callbacks that build a cuDNN graph, run here as any other score_mod, on every backend.

    from flexattn.integrations.te import TEScoreMod
    out = attention(q, k, v, score_mod=TEScoreMod(score_mod, score_mod_bprop, score_mod_tensors={"cap": cap}))

The callbacks get a graph with the names of cuDNN frontend's pointwise nodes. What they call is recorded as torch ops, and traced.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.mod_program import evaluate
from flexattn.dispatch.neutral import is_jit_traced, neutral_state
from flexattn.integrations.te.score_graph import AXES, GraphTensor, ScoreGraph, read_tensors
from flexattn.mods.trace import trace_mods
from flexattn.mods.tracer import MisusedType

Callback = Callable[..., Any]
Value = Tensor | float | int | bool
LIMIT = 1e-5  # share of the largest gradient that check_bprop grants to rounding in fp64 with float32 constants


class TEScoreMod:
    """A score_mod from TransformerEngine's callbacks; pass it as `score_mod` to `attention`.

    The form is that of TransformerEngine's pull requests 2984 (PyTorch) and 2985 (JAX).

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score. A bound method may keep what it computed on its object.
        score_mod_bprop: score_mod_bprop(graph, dP, tensors) -> the gradient of the score, or None: it is derived. It may use what
            score_mod kept on the object. It is run as it is given; `check_bprop` compares it with the derived one.
        score_mod_tensors: name -> a number of Python or NumPy, or a tensor of up to 4 dims, broadcast from the right against
            [b, h, sq, skv]: [skv] has a value for each key, [sq, skv] for each query and key, [h, sq, skv] for each head too, and a
            dim of 1 is broadcast. A tensor of one element on the CPU is a number that is read in each call, as cuDNN passes it by
            value. Without a bprop tensors that require gradients get them.
        score_mod_bprop_tensors: the same for the bprop; None: score_mod_tensors.

    Raises:
        TypeError: callbacks that are not callable, tensors that are no dict of tensors and numbers by names. ValueError: a
            bprop_tensors without a bprop, a tensor of more than 4 dims, or one that requires a gradient beside a bprop.
    """

    _flexattn_reads = ("forward", "bprop", "tensors", "tensors_of_bprop")  # all that a call of it depends on: see captures

    def __init__(
        self,
        score_mod: Callback,
        score_mod_bprop: Callback | None = None,
        score_mod_tensors: Mapping[str, Any] | None = None,
        score_mod_bprop_tensors: Mapping[str, Any] | None = None,
    ) -> None:
        for name, callback in (("score_mod", score_mod), ("score_mod_bprop", score_mod_bprop)):
            if not (callable(callback) or (callback is None and name == "score_mod_bprop")):
                raise TypeError(f"{name} is {callback!r}; accepted: a function of (graph, tensor, tensors)")
        if score_mod_bprop_tensors is not None and score_mod_bprop is None:
            raise ValueError(
                "score_mod_bprop_tensors is given without a score_mod_bprop; accepted: None, as the derived one has none"
            )
        self.forward = score_mod
        self.bprop = score_mod_bprop
        # names on the object that it is bound to
        self.attributes = tuple(getattr(getattr(score_mod, "__self__", None), "__dict__", ()))
        self.tensors = _readable("score_mod_tensors", score_mod_tensors)
        self.tensors_of_bprop = (
            self.tensors if score_mod_bprop_tensors is None else _readable("score_mod_bprop_tensors", score_mod_bprop_tensors)
        )
        if score_mod_bprop is not None:
            for name, tensor in self.tensors.items():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ValueError(
                        f"score_mod_tensors[{name!r}] requires a gradient, and score_mod_bprop gives it none; detach it, or leave "
                        "score_mod_bprop out, and the backward is derived for the tensors too"
                    )

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        callback, _ = self._on_a_copy()
        return self._run("score_mod", callback, score, self.tensors, (b, h, q_idx, kv_idx))

    @property
    def score_mod_gradient(self) -> Callback | None:
        """Returns the gradient of the score as the bprop gives it, for `flexattn.mods.trace.trace_mods`; None without a bprop."""
        return self._gradient if self.bprop is not None else None

    def _gradient(self, dscore: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        forward, bprop = self._on_a_copy()
        indices = (b, h, q_idx, kv_idx)
        self._run("score_mod", forward, score, self.tensors, indices)  # for what it keeps on its object
        return self._run("score_mod_bprop", bprop, dscore, self.tensors_of_bprop, indices)

    def _flexattn_state(self) -> dict[str, Any]:
        """Returns the attributes with the numbers that tensors on the CPU hold at this moment in their place."""
        state = vars(self)
        tensors = {name: _by_value(t) for name, t in self.tensors.items()}
        same = self.tensors_of_bprop is self.tensors
        of_bprop = tensors if same else {name: _by_value(t) for name, t in self.tensors_of_bprop.items()}
        return {**state, "tensors": tensors, "tensors_of_bprop": of_bprop}

    def _on_a_copy(self) -> tuple[Callback, Any]:
        """Binds both callbacks to one copy of their object, so that a trace leaves nothing behind on it."""
        owner = getattr(self.forward, "__self__", None)
        if not isinstance(self.forward, types.MethodType):
            return self.forward, self.bprop
        if torch.compiler.is_dynamo_compiling():  # which knows no copy.copy
            clone = object.__new__(type(owner))
            for name in self.attributes:
                setattr(clone, name, getattr(owner, name))
        else:
            clone = copy.copy(owner)
        bprop = self.bprop
        if isinstance(bprop, types.MethodType) and bprop.__self__ is owner:
            bprop = functools.partial(bprop.__func__, clone)
        return functools.partial(self.forward.__func__, clone), bprop

    def _run(self, role: str, callback: Callback, tensor: Any, tensors: Mapping[str, Value], indices: tuple[Any, ...]) -> Any:
        result = callback(ScoreGraph(indices, tensor), GraphTensor(tensor), read_tensors(tensors, indices, tensor))
        if not isinstance(result, GraphTensor):
            raise MisusedType(f"{role} {_name(callback)} returned {result!r}; accepted: a tensor of its graph")
        return result.value

    def _flexattn_check_sizes(self, *sizes: int | None) -> None:
        """Raises ValueError where a tensor does not fit a call's (b, h, sq, skv), so that it has no value for some score.

        None: a size that is not known. A tensor for longer sequences is read from its beginning.
        """
        for argument, tensors in (("score_mod_tensors", self.tensors), ("score_mod_bprop_tensors", self.tensors_of_bprop)):
            for name, t in tensors.items():
                if not isinstance(t, Tensor):
                    continue
                for axis, size, wanted in zip(("b", "h", "sq", "skv")[4 - t.dim() :], t.shape, sizes[4 - t.dim() :], strict=True):
                    is_longer = axis in ("sq", "skv") and wanted is not None and size > wanted
                    if wanted is not None and size not in (1, wanted) and not is_longer:
                        raise ValueError(
                            f"{argument}[{name!r}] has shape {tuple(t.shape)}, with {size} for {axis}, and the call has {wanted}; "
                            f"accepted: 1 or {wanted} there{'' if axis in ('b', 'h') else ', or more'}"
                        )

    def check_bprop(self, samples: int = 1000) -> None:
        """Compares score_mod_bprop with the derived gradient, at `samples` scores and positions, in fp64.

        Raises:
            ValueError: where they differ most, with both values; or there is no bprop.
        """
        if self.bprop is None:
            raise ValueError("check_bprop compares a score_mod_bprop with the derived one; this score_mod was given none")
        given = trace_mods(self, None, needs_grad=True)
        derived = trace_mods(self.__call__, None, needs_grad=True)
        generator = torch.Generator("cpu").manual_seed(0)
        values = {
            name: torch.randn(samples, generator=generator, dtype=torch.float64, device="cpu") * 3 for name in ("score", "dscore")
        }
        for name, size in zip(AXES, self._sizes(), strict=True):
            values[name] = torch.randint(0, size if size > 1 else 64, (samples,), generator=generator, device="cpu")
        results = []
        for traced in (given, derived):
            assert traced.program.derivative is not None
            captures = traced.program.inputs([t.detach().cpu() for t in traced.tensors], traced.numbers)
            result = evaluate(traced.program.derivative, {**values, **captures}, torch.float64)[0]
            results.append(torch.zeros(samples, dtype=torch.float64, device="cpu") if result is None else result.expand(samples))
        difference = (results[0] - results[1]).abs().nan_to_num(nan=torch.inf)
        worst = int(difference.argmax())
        if difference[worst] > LIMIT * max(1.0, float(results[1].abs().max())):
            at = ", ".join(f"{name} = {values[name][worst].item():.6g}" for name in ("score", *AXES))
            raise ValueError(
                f"score_mod_bprop gives {results[0][worst].item():.6g} and the derivative of score_mod is "
                f"{results[1][worst].item():.6g}, for dP = {values['dscore'][worst].item():.6g} at {at}; "
                f"{int((difference > LIMIT).sum())} of {samples} samples differ"
            )

    def _sizes(self) -> list[int]:
        """Returns the largest size of b, h, sq and skv that a tensor has; 1 where all are broadcast."""
        sizes = [1, 1, 1, 1]
        for t in (*self.tensors.values(), *self.tensors_of_bprop.values()):
            if isinstance(t, Tensor):
                for dim, size in enumerate(t.shape):
                    sizes[4 - t.dim() + dim] = max(sizes[4 - t.dim() + dim], size)
        return sizes


def _readable(argument: str, tensors: Any) -> dict[str, Value]:
    """Returns the tensors and numbers by name, tensors of one element as 0-d ones."""
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
                    "these, with 1 where one is broadcast"
                )
            readable[name] = t.reshape(()) if t.numel() == 1 else t
        elif type(t) in (bool, int, float):
            readable[name] = t
        elif type(t).__module__ == "numpy" and type(t).__name__ != "ndarray" and isinstance(t.item(), (bool, int, float)):
            readable[name] = t.item()
        else:
            raise TypeError(
                f"{argument}[{name!r}] is a {type(t).__module__}.{type(t).__name__}; accepted: {accepted}; torch.from_numpy makes "
                "a tensor of an array"
            )
    return readable


def _by_value(t: Value) -> Value:
    """Returns the number that a tensor without dims holds on the CPU; anything else as it is."""
    if not isinstance(t, Tensor) or type(t) not in (Tensor, torch.nn.Parameter):
        return t
    if t.dim() or t.device.type != "cpu" or t.requires_grad or not t.dtype.is_floating_point or is_jit_traced():
        return t
    if not torch._C._len_torch_dispatch_stack() and not torch._C._is_torch_function_mode_enabled():
        return float(t.item())
    with neutral_state():  # within a trace, whose modes know no values
        return float(t.item())


def _name(callback: Any) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
