"""Lowering of a mod's FX graph to the source of one Triton function, which the kernels inline.

A graph has aten ops on scalars. In the function the score is a tile, and q_idx and kv_idx have shapes that broadcast against it, in
either order. Floating point is float32. Integers mean int64, and are int32 if bounds on them show that nothing can overflow.

    function = lower(graph, "score_mod", captures)   # captures: the memory layout of each captured tensor
    print(source_of(function))
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx import Graph, Node

from flexattn.compat import tree_leaves
from flexattn.kernels_triton.common import encoded_sizes, exponents, tanh
from flexattn.kernels_triton.mods import interval_math, mod_math
from flexattn.kernels_triton.mods.hoisting import DIAGONAL, DISTANCE, HEAD, VARYING, inputs_of
from flexattn.kernels_triton.mods.lowering_ops import COMPARISONS, FINITE, OPS, Value, function
from flexattn.mod_values import INT32, INT64, Interval, ancestors, bounds_of, bounds_of_dtype, fits, kind_of, op_name

POSITION = (0, 2**30)  # no sequence is longer, because its tensors would exceed memory
TABLE_ENTRIES = len(mod_math.DiagonalTables._fields)  # entries after the captures, for all tables of a mod
_MODULES = {"tl": tl, "triton": triton, "mod_math": mod_math, "interval_math": interval_math}  # names in a generated source
# further parameters of an accumulation
_ACCUMULATION_PARAMETERS = {"sums": "sums", "scales": "scales", "MODE": "MODE: tl.constexpr"}
_RESERVED = {*_MODULES, "captures", *_ACCUMULATION_PARAMETERS}


# Sums and products of booleans: a sum in Triton would wrap.
_BOOLEAN_OPS = {"add": "bitwise_or", "maximum": "bitwise_or", "mul": "bitwise_and", "minimum": "bitwise_and"}


class Layout(NamedTuple):
    """One capture: its index in the tuple of captures, and the properties of its memory that the source depends on."""

    name: str
    dtype: torch.dtype
    ndim: int  # -1 for a number
    start: int  # index of its first entry in the tuple: the pointer, then sizes and strides, encoded; or the number
    is_row_contiguous: bool  # neighbours in the last dim are neighbours in memory
    is_wide: bool  # offsets need 64 bits


def layouts(captures: Sequence[tuple[str, torch.dtype, int]], tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """Returns the layouts of (name, dtype, ndim) with these tensors, in order; numbers have ndim -1 and no tensor."""
    capture_layouts, start, remaining_tensors = [], 0, iter(tensors)
    for name, dtype, ndim in captures:
        if ndim < 0:
            capture_layouts.append(Layout(name, dtype, ndim, start, False, False))
            start += 1
            continue
        t = next(remaining_tensors)
        span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        capture_layouts.append(Layout(name, t.dtype, ndim, start, ndim > 0 and t.stride(-1) == 1, span >= 2**31))
        start += 1 + 2 * ndim
    return tuple(capture_layouts)


def flatten(capture_layouts: Sequence[Layout], tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
    """Returns the tuple of captures as a kernel argument: pointers, sizes and strides, and numbers."""
    flat: list[object] = []
    remaining_tensors, remaining_numbers = iter(tensors), iter(numbers)
    for layout in capture_layouts:
        if layout.ndim < 0:
            flat.append(float(next(remaining_numbers)))
            continue
        t = next(remaining_tensors)
        flat.append(t)
        flat += map(encoded_sizes.encoded_size, (*t.shape, *t.stride()))
    return tuple(flat)


def reads_tiles(graph: Graph | None) -> bool:
    """Returns whether a graph reads a capture once for each query and key, so that a tile of it is beside the scores."""
    nodes = [] if graph is None else [node for node in graph.nodes if node.target is torch.ops.aten.index]
    return any({"q_idx", "kv_idx"} <= inputs_of(node) for node in nodes)


def dependencies(graph: Graph | None) -> set[str]:
    """Returns the names of the inputs that a graph's output depends on."""
    return set() if graph is None else inputs_of(next(node for node in graph.nodes if node.op == "output"))


def num_outputs(graph: Graph | None) -> int:
    """Returns the number of outputs of a graph whose output is a list."""
    return 0 if graph is None else len(next(node.args[0] for node in graph.nodes if node.op == "output"))


def lower(
    graph: Graph,
    name: str,
    arguments: Sequence[str],
    captures: Sequence[Layout],
    is_fp32: bool = True,
    appended: Appended | None = None,
) -> object:
    """Lowers a graph to a Triton function of (*arguments, captures); `arguments` are the names of its inputs other than captures.

    is_fp32: True if q, k and v are fp32; otherwise tanh is `tanh.tanh_in_half`, like the built-in softcap's. appended: the
    entries of the tuple after the captures. Raises NotImplementedError for an op that is not in `OPS`.
    """
    return compile_named(name, _Lowering(graph, captures, is_fp32, appended).source(name, arguments))


def lower_accumulation(
    graph: Graph, arguments: Sequence[str], captures: Sequence[Layout], is_fp32: bool = True, appended: Appended | None = None
) -> object:
    """Returns a function of (*arguments, captures, sums, scales, MODE) that adds a derivative to the gradients of captures."""
    lowering = _Lowering(graph, captures, is_fp32, appended)
    return compile_named("accumulate", lowering.source("accumulate", arguments, accumulates=True))


class Appended(NamedTuple):
    """Values after the captures in the tuple that a mod's functions get: its tables, and then the values of the head."""

    per_head: object  # the Triton function (b, h, captures) -> the values, a tuple; None: no values
    inputs: dict[str, Value]  # by the names from `hoisting`


def lower_per_head(graph: Graph | None, num_tables: int, captures: Sequence[Layout], is_fp32: bool = True) -> Appended:
    """Lowers the values that `hoist` extracted for a head, and the pointers into the tables that the functions read."""
    start = sum(1 if layout.ndim < 0 else 1 + 2 * layout.ndim for layout in captures)
    lowering = _Lowering(graph or Graph(), captures, is_fp32)
    values = lowering.values()
    inputs = {f"{HEAD}{n}": value for n, value in enumerate(values)}
    results = [value.text for value in values]
    for n in range(num_tables):
        in_orders = [lowering._named(f"{side}{n}") for side in ("keys", "queries")]
        lowering.lines.append(f"{', '.join(in_orders)} = mod_math.diagonals_of_head(b, h, captures, {start}, {n})")
        inputs[f"{DIAGONAL}{n}"] = Value(f"{len(results)}", "float")
        results += in_orders
    if not results:
        return Appended(None, {})
    first = start + (TABLE_ENTRIES if num_tables else 0)
    for name, value in inputs.items():
        if name.startswith(HEAD):
            text = f"captures[{first + int(name.removeprefix(HEAD))}]"
        else:
            n, length = first + int(value.text), start + 1
            text = f"mod_math.read_diagonal(captures[{n}], captures[{n + 1}], captures[{length}], q_idx, kv_idx)"
        inputs[name] = value._replace(text=text)
    source = lowering.function("per_head", ("b", "h"), [f"({', '.join(results)},)"])
    return Appended(compile_named("per_head", source), inputs)


def lower_per_distance(graph: Graph, captures: Sequence[Layout], is_fp32: bool = True) -> object:
    """Returns a Triton function (b, h, distance, captures) -> a tuple of fp32 tiles: the values that `hoist` extracted for a
    distance.
    """
    lowering = _Lowering(graph, captures, is_fp32)
    results = [lowering._as(value, "float", INT64).text for value in lowering.values()]
    source = lowering.function("per_distance", ("b", "h", DISTANCE), [f"({', '.join(results)},)"])
    return compile_named("per_distance", source)


def compile_named(name: str, source: str) -> object:
    """Returns the @triton.jit function of a source that begins with `def name`, under a unique name."""
    # Triton identifies a compiled kernel by the text of its constants, and for a function in a tuple that is only its name. So the
    # name has a hash of the source and of the helpers that it calls.
    digest = hashlib.sha256((source + _helpers()).encode()).hexdigest()[:16]
    return compile_source(f"{name}_{digest}", source.replace(f"def {name}(", f"def {name}_{digest}(", 1))


@functools.cache
def _helpers() -> str:
    return "".join(inspect.getsource(module) for module in (mod_math, interval_math, encoded_sizes, exponents, tanh))


_functions: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def compile_source(name: str, source: str) -> object:
    """Returns the @triton.jit function `name` of a generated source. The name must identify the source.

    Tracebacks and inspect find the source through linecache, as long as the function exists.
    """
    function = _functions.get(name)
    if function is not None:
        return function
    file = f"<flexattn {name}>"
    entry = (len(source), None, source.splitlines(keepends=True), file)
    linecache.cache[file] = entry
    namespace: dict[str, object] = {**_MODULES, "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    function = _functions[name] = namespace.pop(name)  # otherwise its own globals would keep it alive
    weakref.finalize(function, _forget_source, file, entry).atexit = False
    return function


def _forget_source(file: str, entry: object) -> None:
    if linecache.cache.get(file) is entry:
        del linecache.cache[file]


def source_of(function: Any) -> str:
    """Returns the source of a function from `lower`."""
    return "".join(linecache.getlines(function.fn.__code__.co_filename))


def _whole_tile(value: str) -> str:
    # Gluon, which also inlines mods, has no tile without a layout: this one has the score's.
    return f"tl.where(score == score, {value}, {value})"


class _Lowering:
    def __init__(self, graph: Graph, captures: Sequence[Layout], is_fp32: bool, appended: Appended | None = None) -> None:
        self.graph = graph
        self.appended = {} if appended is None else appended.inputs
        self.is_fp32 = is_fp32
        self.captures = {layout.name: layout for layout in captures}
        self.lines: list[str] = []
        self.values_of: dict[Node, Value] = {}
        self.unpacked: set[str] = set()
        self.accumulated: set[str] = set()
        self.needed: set[Node] = set()
        self.taken = {*_RESERVED, *(node.name for node in graph.nodes)}
        self.names = {node: self._named(node.name) if node.name in _RESERVED else node.name for node in graph.nodes}
        for node in graph.nodes:  # a read is named after the tensor that it reads
            if node.op == "call_function" and node.target is torch.ops.aten.index:
                self.names[node] = self._named(f"{self.names[node.args[0]]}_value")
        # for each pointer the names of its sizes and strides, one for each dim
        self.sizes: dict[str, list[str]] = {}
        self.strides: dict[str, list[str]] = {}

    def _named(self, base: str) -> str:
        """Returns a name that is unique in the generated function."""
        name, n = base, 2
        while name in self.taken:
            name, n = f"{base}{n}", n + 1
        self.taken.add(name)
        return name

    def source(self, name: str, arguments: Sequence[str], accumulates: bool = False) -> str:
        results: list[str] = []
        outputs = next(node.args[0] for node in self.graph.nodes if node.op == "output")
        if accumulates:
            self.accumulated = {[*self.captures][position] for position, _, _ in outputs[1:]}
        wanted = outputs[1:] if accumulates else (outputs[:1] if isinstance(outputs, (list, tuple)) else [outputs])
        self.needed = ancestors(x for x in tree_leaves(wanted) if isinstance(x, Node))
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self.needed:
                continue
            if node.op == "placeholder":
                self.values_of[node] = self._input(node)
            elif node.op == "call_function":
                self.values_of[node] = self._call(node)
            else:
                if accumulates:
                    self._accumulate(outputs[1:])
                else:
                    results.append(self._guarded(outputs[0]) if isinstance(outputs, (list, tuple)) else self._result(outputs))
        return self.function(name, arguments, results, tuple(_ACCUMULATION_PARAMETERS.values()) if accumulates else ())

    def values(self) -> list[Value]:
        """Returns the outputs of a graph whose output is a list; none for an empty graph."""
        self.needed = set(self.graph.nodes)
        outputs: Sequence[Node] = ()
        for node in self.graph.nodes:
            if node.op == "output":
                outputs = node.args[0]
            else:
                self.values_of[node] = self._input(node) if node.op == "placeholder" else self._call(node)
        return [self.values_of[node] for node in outputs]

    def function(self, name: str, arguments: Sequence[str], results: Sequence[str], more: Sequence[str] = ()) -> str:
        """Returns the source of a function with the lines of this lowering."""
        placeholder_names = {str(node.target): self.names[node] for node in self.graph.nodes if node.op == "placeholder"}
        parameters = [
            *(placeholder_names.get(argument) or self._named(argument.rstrip(":")) for argument in arguments),
            "captures",
            *more,
        ]
        body = [*self.lines, *(f"return {result}" for result in results)]
        return "\n".join(["@triton.jit", f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in body), ""])

    def _input(self, node: Node) -> Value:
        text, target = self.names[node], str(node.target)
        if target in self.captures:
            layout = self.captures[target]
            if node in self.needed and layout.ndim < 0:
                self.lines.append(f"{text} = captures[{layout.start}]")
            elif layout.ndim >= 0 and (node in self.needed or target in self.accumulated):
                sizes = self.sizes[text] = [self._named(f"{text}_size{d}") for d in range(layout.ndim)]
                strides = self.strides[text] = [self._named(f"{text}_stride{d}") for d in range(layout.ndim)]
                self.lines.append(f"{text} = captures[{layout.start}]")
                for i, part in enumerate((*sizes, *strides)):
                    if not (layout.is_row_contiguous and part == strides[-1]):
                        self.lines.append(f"{part} = mod_math.read_size(captures[{layout.start + 1 + i}])")
            return Value(text, "float" if layout.ndim < 0 else "pointer")
        kind = kind_of(node.meta["dtype"])
        if target in self.appended:
            value = self.appended[target]
            if node in self.needed:
                self.lines.append(f"{text} = {value.text}" + (" != 0.0" if kind != value.kind else ""))
            return Value(text, kind, value.bounds)
        return Value(text, kind, (-POSITION[1], POSITION[1]) if target == DISTANCE else POSITION)

    def _result(self, first: Any) -> str:
        """Returns the only output, as a separate tile even if the graph ignores the score."""
        if first is None:
            return _whole_tile("0.0")
        value = self._operand(first)
        if value.kind == "bool":
            return value.text
        depends = inputs_of(first)
        return value.text if depends & {"score", "dscore"} else _whole_tile(value.text)

    def _guarded(self, gradient: Any) -> str:
        """Returns the gradient of the score, which is 0 if the incoming gradient is 0, even if the derivative is infinite."""
        text = self._result(gradient)
        return text if gradient is None or _is_finite(gradient) else f"tl.where(dscore == 0.0, 0.0, {text})"

    def _operand(self, x: Any) -> Value:
        if isinstance(x, Node):
            return self.values_of[x]
        if isinstance(x, bool):
            return Value(str(int(x)), "bool", (int(x), int(x)), True)
        if isinstance(x, int):
            return Value(str(x), "int", (x, x), True)
        return Value(repr(x) if math.isfinite(x) else f'float("{x}")', "float", is_literal=True)

    def _assign(self, node: Node, text: str, kind: str, bounds: Interval = INT64) -> Value:
        name = self.names[node]
        self.lines.append(f"{name} = {text}")
        return Value(name, kind, bounds)

    def _integer(self, node: Node, text: str, bounds: Interval) -> Value:
        """Assigns an integer, which wraps as the node's dtype does."""
        dtype = node.meta["dtype"]
        limits = bounds_of_dtype(dtype)
        if fits(bounds, limits):
            return self._assign(node, text, "int", bounds)
        text = f"({text}).to(tl.{_name(dtype)})" + ("" if dtype is torch.int32 else ".to(tl.int32)")
        return self._assign(node, text, "int", limits)

    def _call(self, node: Node) -> Value:
        op = op_name(node)
        if op == "index":
            return self._read(node)
        kind = kind_of(node.meta["dtype"])
        if op == "full":
            value: Any = node.args[1]
            return self._operand(bool(value) if kind == "bool" else (float(value) if kind == "float" else int(value)))
        operands = [self._operand(x) for x in node.args if x is not None]
        if op == "_to_copy":
            return self._converted(node, operands[0], node.meta["dtype"])
        if op == "clamp":
            return self._clamped(node, kind)
        if op == "div" and node.kwargs.get("rounding_mode") is not None:
            op = "floor_divide" if node.kwargs["rounding_mode"] == "floor" else "trunc_divide"
        lowered = OPS.get(op)
        if lowered is None:
            raise NotImplementedError(f"Triton has no lowering for {op}")
        bounds = (
            bounds_of(op, [operand.bounds if operand.kind == "int" else (0, 1) for operand in operands]) if kind == "int" else INT64
        )
        operands = self._promoted(op, kind, bounds, operands)
        if op == "tanh" and not self.is_fp32:
            lowered = function("mod_math.tanh_in_half")
        if op == "div" and isinstance(node.args[1], Node) and not inputs_of(node.args[1]) & VARYING:
            operands[1] = operands[1]._replace(text=f"(1.0 / {operands[1].text})")  # once for a whole tile, outside the loop
            op, lowered = "mul", OPS["mul"]
        if kind == "bool" and op in _BOOLEAN_OPS:
            lowered = OPS[_BOOLEAN_OPS[op]]
        text = lowered(kind, *operands)
        if kind == "int":
            return self._integer(node, text, bounds)
        if kind == "float" and node.meta["dtype"] in (torch.float16, torch.bfloat16):
            text = f"({text}).to(tl.{_name(node.meta['dtype'])}).to(tl.float32)"
        return self._assign(node, text, kind)

    def _promoted(self, op: str, kind: str, bounds: Interval, operands: list[Value]) -> list[Value]:
        """Returns the operands in the type that the op computes in, which is torch's promotion of their types."""
        kinds = {operand.kind for operand in operands}
        if op in COMPARISONS:
            kind = "float" if "float" in kinds else ("int" if "int" in kinds else "bool")
        if op in ("logical_and", "logical_or", "logical_xor", "logical_not"):
            return [
                self._as(x, "bool", bounds) if x.kind == "bool" else x._replace(text=f"({x.text} != 0)", kind="bool")
                for x in operands
            ]
        if op == "where":
            return [self._as(operands[0], "bool", bounds), *(self._as(x, kind, bounds) for x in operands[1:])]
        bounds = bounds if op not in COMPARISONS else INT32
        if any(x.is_literal and x.is_wide for x in operands):  # Triton gives a literal the other operand's type
            bounds = INT64
        return [self._as(x, kind, bounds) for x in operands]

    def _as(self, x: Value, kind: str, bounds: Interval) -> Value:
        if x.is_literal:
            if kind == "bool" and x.kind == "bool":  # a number would make the result int32, which tl.where does not take
                return x._replace(text=str(x.text == "1"))
            if kind == "float" and x.kind != "float":
                return x._replace(text=f"{float(int(x.text))!r}", kind="float")
            return x
        if kind == "float" and x.kind != "float":
            return x._replace(text=f"{x.text}.to(tl.float32)", kind="float")
        if kind == "int":
            wide = not fits(bounds)
            if wide and not x.is_wide:
                return x._replace(text=f"{x.text}.to(tl.int64)", kind="int")
            if x.kind == "bool":
                return x._replace(text=f"{x.text}.to(tl.int32)", kind="int")
        return x

    def _converted(self, node: Node, x: Value, dtype: torch.dtype) -> Value:
        kind = kind_of(dtype)
        if kind == "bool":
            return self._assign(node, f"{x.text} != 0", "bool")
        if kind == "float":
            text = self._as(x, "float", INT64).text
            if dtype in (torch.float16, torch.bfloat16):
                text = f"{text}.to(tl.{_name(dtype)}).to(tl.float32)"
            return self._assign(node, text, "float")
        if x.kind == "float":
            return self._integer(node, f"{x.text}.to(tl.int64)", INT64)
        bounds = x.bounds if x.kind == "int" else (0, 1)
        return self._integer(node, self._as(x, "int", bounds).text, bounds)

    def _clamped(self, node: Node, kind: str) -> Value:
        x, low, high = cast("tuple[Any, Any, Any]", (*node.args, None, None)[:3])
        value = self._operand(x)
        bounds = list(value.bounds)
        is_wide = value.is_wide or any(isinstance(limit, int) and self._operand(limit).is_wide for limit in (low, high))
        text = self._as(value, kind, INT64 if is_wide else INT32).text
        module = "mod_math" if kind == "float" else "tl"
        for bound, name, i in ((low, "maximum", 0), (high, "minimum", 1)):
            if bound is not None:
                text = f"{module}.{name}({text}, {self._as(self._operand(bound), kind, INT64).text})"
                if kind == "int":
                    bounds = [max(b, bound) for b in bounds] if i == 0 else [min(b, bound) for b in bounds]
        return self._integer(node, text, (bounds[0], bounds[1])) if kind == "int" else self._assign(node, text, kind)

    def _accumulate(self, gradients: Sequence[Any]) -> None:
        """Adds each addend at the index of its read, in a contiguous tensor of the capture's shape."""
        wanted = sorted({position for position, _, _ in gradients})
        named = list(self.captures.values())
        for number, (position, indices, value) in enumerate(gradients):
            layout = named[position]
            pointer = next(self.names[n] for n in self.graph.nodes if n.op == "placeholder" and n.target == layout.name)
            texts, inside = self._indices(indices, pointer, f"gradient{number}")
            offset = "0"
            for dim, (text, _) in enumerate(texts):
                wide = f"tl.cast({text}, tl.int64)" if layout.is_wide else text
                offset = wide if dim == 0 else f"({offset}) * {self.sizes[pointer][dim]} + {wide}"
            depends = set().union(*(inputs_of(i) for i in indices if isinstance(i, Node)))
            over = f"{'q_idx' not in depends}, {'kv_idx' not in depends}"
            sums = wanted.index(position)
            addend = f"tl.where(dscore == 0.0, 0.0, {self._operand(value).text})"
            where = " & ".join(inside) or "True"
            scale = f"scales[{sums}] if MODE == 'fixed' else None"
            self.lines.append(f"mod_math.accumulate(sums[{sums}], {scale}, {offset}, {where}, {addend}, {over}, MODE)")

    def _indices(self, indices: Sequence[object], pointer: str, name: str) -> tuple[list[tuple[str, bool]], list[str]]:
        """Returns (each index and whether it has 64 bits, conditions that all are inside); a negative index counts from the end."""
        texts, inside = [], []
        for dim, index in enumerate(indices):
            i = self._operand(index)
            text, size = i.text, self.sizes[pointer][dim]
            if i.bounds[0] < 0:
                if i.bounds[1] < 0:
                    text = f"({text} + {size})"
                else:
                    text = self._named(f"{name}_at{dim}")
                    self.lines.append(f"{text} = tl.where({i.text} < 0, {i.text} + {size}, {i.text})")
                inside.append(f"({text} >= 0)")
            inside.append(f"({text} < {size})")
            texts.append((text, i.is_wide))
        return texts, inside

    def _read(self, node: Node) -> Value:
        capture, indices = cast("tuple[Node, list[Any]]", node.args)
        layout, pointer = self.captures[str(capture.target)], self.names[capture]
        kind = kind_of(layout.dtype)
        offsets = []
        texts, inside = self._indices(indices, pointer, self.names[node])
        for dim, (text, is_wide) in enumerate(texts):
            wide = f"tl.cast({text}, tl.int64)" if layout.is_wide or is_wide else text
            is_unit = layout.is_row_contiguous and dim == layout.ndim - 1
            offsets.append(wide if is_unit else f"{wide} * {self.strides[pointer][dim]}")
        offset = offsets[0] if len(offsets) == 1 and "*" not in offsets[0] else f"({' + '.join(offsets)})"
        if not indices:
            text = f"tl.load({pointer})"
        else:
            other = "0.0" if kind == "float" else "0"
            text = f"tl.load({pointer} + {offset}, mask={' & '.join(inside)}, other={other})"
        if kind == "float" and layout.dtype is not torch.float32:
            text += ".to(tl.float32)"
        if kind == "bool":
            text += " != 0"
        bounds = bounds_of_dtype(layout.dtype)
        if kind == "int" and layout.dtype not in (torch.int32, torch.int64):
            text += ".to(tl.int32)"
        return self._assign(node, text, kind, bounds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_finite(graph: Graph | None) -> bool:
    """Returns whether a graph's first output is finite for every finite score, whatever tensors single scores read."""
    if graph is None:
        return True
    outputs = next(node.args[0] for node in graph.nodes if node.op == "output")
    first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    return first is None or _is_finite(first)


def _is_finite(result: Node) -> bool:
    for node in ancestors([result]):
        if node.op == "placeholder" and str(node.target).startswith(DIAGONAL):
            return False
        op = None if node.op == "placeholder" else op_name(node)
        divisor = node.args[1] if op == "div" else None
        if op is None or op in FINITE or not node.meta["dtype"].is_floating_point or _is_same_for_a_head(node):
            continue
        if divisor is None or not (isinstance(divisor, (int, float)) or _is_same_for_a_head(divisor)):
            return False
    return True


def _is_same_for_a_head(node: object) -> bool:
    return isinstance(node, Node) and not inputs_of(node) & VARYING
