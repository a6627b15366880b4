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
from flexattn.mods.trace import trace_mods

Callback = Callable[..., Any]
LIMIT = 1e-5  # of the largest gradient: what check_bprop grants to rounding in fp64 with float32 constants
_OPERANDS = ("input", "a", "input0", "b", "input1", "comparison", "bias", "scale", "mask")  # in the order that cuDNN takes them


class GraphTensor:
    """Result of a node of the graph; its layout and type are the kernel's business, so setting them changes nothing."""

    is_trace_state = True  # kept on a user's object between the callbacks, it is no capture

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def _same(self, *_: Any, **__: Any) -> GraphTensor:
        return self

    set_data_type = set_dim = set_stride = set_name = set_is_virtual = set_output = _same


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


_NODES: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("exp", "log", "abs", "neg", "sqrt", "rsqrt", "sin", "cos", "tan", "erf", "floor", "ceil")
    },
    **{name: getattr(torch, name) for name in ("reciprocal", "sigmoid", "relu", "tanh", "logical_not")},
    "gelu": _gelu,
    "softplus": torch.nn.functional.softplus,
    "swish": torch.nn.functional.silu,
    "identity": lambda x: x,
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "logical_and", "logical_or")},
    "bias": torch.add,
    "scale": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": torch.fmod,
    "add_square": lambda x, y: x + y * y,
    **{f"cmp_{name}": getattr(torch, name if name != "neq" else "ne") for name in ("eq", "neq", "gt", "ge", "lt", "le")},
    "binary_select": lambda x, y, mask: torch.where(mask if mask.dtype is torch.bool else mask != 0, x, y),
}


class ScoreGraph:
    """The graph that a callback is given: one method for each pointwise node of cuDNN frontend's, and gen_index."""

    def __init__(self, indices: tuple[Tensor, ...]) -> None:
        self._indices = indices

    def gen_index(self, input: GraphTensor, axis: int, **_: Any) -> GraphTensor:
        """Returns the position in the batch (axis 0), among the heads (1), queries (2) or keys (3)."""
        return GraphTensor(self._indices[axis])

    def __getattr__(self, name: str) -> Callable[..., GraphTensor]:
        node = _NODES.get(name)
        if node is None:
            raise AttributeError(
                f"a score_mod's graph has no node {name!r}; it has: {', '.join(sorted(_NODES))}, gen_index; what else a "
                "score needs can be written as a score_mod in torch, which reads tensors at any computed index"
            )
        return functools.partial(self._call, node)

    def _call(self, node: Callable[..., Tensor], *given: Any, **named: Any) -> GraphTensor:
        operands = [*given, *(named[name] for name in _OPERANDS if name in named)]
        values = [x.value if isinstance(x, GraphTensor) else x for x in operands if x is not None]
        if node is torch.logical_not or node in (torch.logical_and, torch.logical_or):
            values = [value if value.dtype is torch.bool else value != 0 for value in values]
        return GraphTensor(node(*values))


class TEScoreMod:
    """A score_mod from TransformerEngine's callbacks; pass it as `score_mod` to `attention`.

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score. A bound method may keep what it computed on its object.
        score_mod_bprop: score_mod_bprop(graph, dP, tensors) -> the gradient of the score, or None: it is derived. It may use what
            score_mod kept on the object. It is run as it is given; `check_bprop` compares it with the derived one.
        score_mod_tensors: name -> tensor, [b, h, sq, skv] with 1 where it is broadcast. Without a bprop they get gradients.
        score_mod_bprop_tensors: the same for the bprop; None: score_mod_tensors.

    Raises:
        TypeError: callbacks that are not callable. ValueError: a bprop_tensors without a bprop, or a tensor that is not 4-d.
    """

    _flexattn_reads = ("forward", "bprop", "tensors", "bprop_tensors")  # all that a call of it depends on: see captures

    def __init__(
        self,
        score_mod: Callback,
        score_mod_bprop: Callback | None = None,
        score_mod_tensors: Mapping[str, Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        for name, callback in (("score_mod", score_mod), ("score_mod_bprop", score_mod_bprop)):
            if not (callable(callback) or (callback is None and name == "score_mod_bprop")):
                raise TypeError(f"{name} is {callback!r}; accepted: {name}(graph, tensor, tensors)")
        if score_mod_bprop_tensors is not None and score_mod_bprop is None:
            raise ValueError(
                "score_mod_bprop_tensors is given without a score_mod_bprop; accepted: None, as the derived one has none"
            )
        self.forward = score_mod
        self.bprop = score_mod_bprop
        self.attributes = tuple(getattr(getattr(score_mod, "__self__", None), "__dict__", ()))  # of the object that it is bound to
        self.tensors = _readable("score_mod_tensors", score_mod_tensors or {})
        self.bprop_tensors = (
            self.tensors if score_mod_bprop_tensors is None else _readable("score_mod_bprop_tensors", score_mod_bprop_tensors)
        )
        if score_mod_bprop is not None:
            for name, tensor in self.tensors.items():
                if tensor.requires_grad:
                    raise ValueError(
                        f"score_mod_tensors[{name!r}] requires a gradient, and score_mod_bprop gives it none; detach it, or leave "
                        "score_mod_bprop out, and the backward is derived for the tensors too"
                    )

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        callback, _ = self._on_a_copy()
        return self._run(callback, score, self.tensors, (b, h, q_idx, kv_idx))

    @property
    def score_mod_gradient(self) -> Callback | None:
        """Returns the gradient of the score as the bprop gives it, for `flexattn.mods.trace.trace_mods`; None without a bprop."""
        return self._gradient if self.bprop is not None else None

    def _gradient(self, dscore: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        forward, bprop = self._on_a_copy()
        self._run(forward, score, self.tensors, (b, h, q_idx, kv_idx))  # for what it keeps on its object
        return self._run(bprop, dscore, self.bprop_tensors, (b, h, q_idx, kv_idx))

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

    def _run(self, callback: Callback, tensor: Any, tensors: Mapping[str, Tensor], indices: tuple[Any, ...]) -> Any:
        read = {name: GraphTensor(_read(t, indices)) for name, t in tensors.items()}
        result = callback(ScoreGraph(indices), GraphTensor(tensor), read)
        if not isinstance(result, GraphTensor):
            raise ValueError(f"score_mod returned {result!r}; accepted: a tensor of its graph")
        return result.value

    def check_bprop(self, samples: int = 1000) -> None:
        """Compares score_mod_bprop with the derived gradient, at `samples` scores and positions, in fp64.

        Raises:
            ValueError: where they differ most, with both values; or there is no bprop.
        """
        if self.bprop is None:
            raise ValueError("check_bprop compares a score_mod_bprop with the derived one; this score_mod was given none")
        given = trace_mods(self, None, needs_grad=True)
        derived = trace_mods(self.__call__, None, needs_grad=True)
        generator = torch.Generator().manual_seed(0)
        values = {name: torch.randn(samples, generator=generator, dtype=torch.float64) * 3 for name in ("score", "dscore")}
        sizes = [
            max((t.shape[d] for t in (*self.tensors.values(), *self.bprop_tensors.values()) if t.dim()), default=1)
            for d in range(4)
        ]
        for name, size in zip(("b", "h", "q_idx", "kv_idx"), sizes, strict=True):
            values[name] = torch.randint(0, size if size > 1 else 64, (samples,), generator=generator)
        results = []
        for traced in (given, derived):
            assert traced.program.derivative is not None
            captures = traced.program.inputs([t.detach().cpu() for t in traced.tensors], traced.numbers)
            result = evaluate(traced.program.derivative, {**values, **captures}, torch.float64)[0]
            results.append(torch.zeros(samples, dtype=torch.float64) if result is None else result.expand(samples))
        difference = (results[0] - results[1]).abs().nan_to_num(nan=torch.inf)
        worst = int(difference.argmax())
        if difference[worst] > LIMIT * max(1.0, float(results[1].abs().max())):
            at = ", ".join(f"{name} = {values[name][worst].item():.6g}" for name in ("score", "b", "h", "q_idx", "kv_idx"))
            raise ValueError(
                f"score_mod_bprop gives {results[0][worst].item():.6g} and the derivative of score_mod is "
                f"{results[1][worst].item():.6g}, for dP = {values['dscore'][worst].item():.6g} at {at}; "
                f"{int((difference > LIMIT).sum())} of {samples} samples differ"
            )


def _readable(argument: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors, those of one element as 0-d: on the CPU they are numbers, as for cuDNN's pass by value."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or (t.dim() != 4 and t.numel() != 1):
            shape = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{argument}[{name!r}] is {shape}; accepted: a tensor [b, h, sq, skv] with 1 where it is broadcast")
    return {name: t.reshape(()) if t.numel() == 1 else t for name, t in tensors.items()}


def _read(t: Tensor, indices: tuple[Any, ...]) -> Tensor:
    if t.dim() == 0:
        return t * 1
    return t[tuple(index if size > 1 else 0 for index, size in zip(indices, t.shape, strict=True))]
