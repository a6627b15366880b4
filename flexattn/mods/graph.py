"""Turns a mod's traced FX graph into a program's graph: one vocabulary of ops, and one index per dim in each read of a capture."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flexattn.compat import OpOverload, tree_leaves, tree_map
from flexattn.dispatch.mod_program import GRADIENT, OPS, Capture, call, new_graph
from flexattn.dispatch.neutral import neutral_state
from flexattn.mod_values import op_name

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

_INSTEAD = {
    "sum": "a mod sees one score at a time; a reduction over others has no meaning in it",
    "mean": "a mod sees one score at a time; a reduction over others has no meaning in it",
    "softmax": "a mod sees one score at a time; the softmax comes after it",
    "mm": "compute the product before the call, capture it, and read it at computed indices",
    "matmul": "compute the product before the call, capture it, and read it at computed indices",
    "rand": "draw the numbers before the call, capture the tensor, and read it; for dropout use dropout_p",
    "gather": "index the tensor instead: t[i, j]",
    "take": "index the tensor instead: t[i]",
    "index_select": "index the tensor instead: t[i]",
    "view": "index the captured tensor with its own dims, t[i, j], or reshape it before the call",
    "reshape": "index the captured tensor with its own dims, t[i, j], or reshape it before the call",
    "cat": "a mod gives one score; choose between values with torch.where",
    "stack": "a mod gives one score; choose between values with torch.where",
}


def place_of(line: tuple[str, int]) -> str:
    text = linecache.getline(*line).strip()
    return f" at {line[0]}:{line[1]}" + (f", `{text}`" if text else "")


_OUTSIDE = -(2**62)  # an index that is outside of every tensor, even if counted from its end


class _Free(NamedTuple):
    """A dim of a capture that has no index yet: its number in the view, and the slice of it that the view shows."""

    dim: int
    start: int = 0
    step: int = 1
    length: int | None = None  # None: all of it


class _View(NamedTuple):
    """A captured tensor read through views: an index for each of its dims, or a `_Free` if the dim has no index yet."""

    capture: Node
    at: tuple[Any, ...]
    ndim: int
    is_detached: bool = False


def normalised(role: str, traced: Graph, arguments: Sequence[str], captures: Sequence[Capture]) -> Graph:
    graph, inputs = new_graph(arguments, captures)
    by_name = {capture.name: capture for capture in captures}
    values: dict[Node, Any] = {}  # by traced node: a node of the new graph, a number, or a _View
    placeholders = iter(inputs.values())
    for node in traced.nodes:
        if node.op == "placeholder":
            new = next(placeholders)
            capture = by_name.get(str(new.target))
            if capture is None or capture.is_number:
                values[node] = new
            else:
                free = tuple(_Free(dim) for dim in range(capture.ndim))
                values[node] = _settled(graph, _View(new, free, capture.ndim))
        elif node.op == "call_function":
            values[node] = converted(role, graph, node, values)
        elif node.op == "output":
            result = values[node.args[0]]
            if isinstance(result, _View):
                raise ValueError(f"{role} returns a tensor of {result.ndim} dims; accepted: one value, a 0-d tensor or a number")
            wanted = torch.bool if role == "mask_mod" else torch.float32
            graph.output(as_dtype(graph, result, wanted))
        else:
            raise ValueError(f"{role} creates a tensor{_line_of(node)}; create it before the call and capture it")
    graph.eliminate_dead_code()
    return graph


def converted(role: str, graph: Graph, node: Node, values: Mapping[Node, object]) -> Any:
    name = node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else str(node.target)
    args = tree_map(lambda x: values[x] if isinstance(x, Node) else x, tuple(node.args))
    kwargs = {key: values[x] if isinstance(x, Node) else x for key, x in node.kwargs.items()}
    result = node.meta.get("val")
    if args and isinstance(args[0], _View):
        return _viewed(role, graph, node, name, args, kwargs)
    if any(isinstance(x, _View) for x in tree_leaves((args, kwargs))):
        _refuse(role, node, name, "a mod works on scalars: index the captured tensor first, as in t[h, q_idx]")
    if not isinstance(result, Tensor):
        _refuse(role, node, name, "a mod gives one score")
    dtype = torch.float32 if result.dtype is torch.float64 else result.dtype
    if name == "copy_":
        return as_dtype(graph, args[1], dtype)
    if name.endswith("_"):  # in place; only the result of this op is used afterwards
        name = name[:-1]
    if name in ("alias", "detach", "clone", "lift_fresh_copy", "view", "expand", "squeeze", "unsqueeze", "view_of", "reshape"):
        if result.dim() == 0:
            is_stop = name == "detach" and role == "score_mod" and dtype.is_floating_point and not _is_constant(args[0])
            return call(graph, "detach", (args[0],), dtype) if is_stop else args[0]
        _refuse(role, node, name, "a mod works on scalars")
    if name in ("scalar_tensor", "full", "full_like", "zeros", "ones", "empty", "zeros_like", "ones_like"):
        if result.dim() != 0:
            _refuse(role, node, name, "a mod works on scalars; create the tensor before the call and capture it")
        fill = args[-1] if name in ("scalar_tensor", "full", "full_like") else float("ones" in name)
        return as_dtype(graph, fill, dtype)
    if name in ("_to_copy", "convert_element_type", "to"):
        return as_dtype(graph, args[0], dtype)
    if name == "sgn":
        name = "sign"
    if name in ("clamp_min", "clamp_max"):
        name, args = "clamp", (args[0], args[1], None) if name == "clamp_min" else (args[0], None, args[1])
    if name == "clamp" and any(isinstance(x, Node) for x in args[1:]):
        x = args[0]
        for bound, op in ((args[1] if len(args) > 1 else None, "maximum"), (args[2] if len(args) > 2 else None, "minimum")):
            if bound is not None:
                x = call(graph, op, (x, _node(graph, bound, dtype)), dtype)
        return x
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        alpha = kwargs["alpha"]
        args = (args[0], call(graph, "mul", (_node(graph, args[1], dtype), alpha), dtype))
    kwargs = {key: x for key, x in kwargs.items() if key == "rounding_mode" and x is not None}
    if name == "ne" and _is_truth(args[0]) and args[1] in (0, False):  # mask != 0, which callers write if the dtype is unknown
        return args[0]
    if name == "where":
        args = (args[0], *(_node(graph, x, dtype) for x in args[1:]))
    if name not in OPS or result.dim() != 0 or dtype not in (torch.float32, torch.float16, torch.bfloat16, *INTEGERS):
        _refuse(
            role,
            node,
            name,
            _INSTEAD.get(name.strip("_"), "pointwise arithmetic, comparisons, torch.where and reads of captured tensors"),
        )
    if not any(isinstance(x, Node) for x in args):
        args = (_node(graph, args[0], dtype), *args[1:])
    return (
        _folded(graph, name, args, dtype, **kwargs)
        if all(map(_is_constant, args))
        else call(graph, name, tuple(args), dtype, **kwargs)
    )


def _is_truth(x: object) -> bool:
    return isinstance(x, Node) and x.meta["dtype"] is torch.bool


def cancel_factors(graph: Graph) -> None:
    """Turns x * c * y / c into x * y if c is constant in a head. Autograd leaves such pairs, for example of c * tanh(x / c)."""
    varying = _varying(graph)
    for root in reversed([node for node in graph.nodes if _is_product(node)]):
        if not root.users or any(_is_product(user) for user in root.users):
            continue  # removed before, or part of a longer product
        above: list[object] = []
        below: list[object] = []
        _factors(root, root, above, below)
        kept = list(above)
        left_below = []
        for factor in below:
            match = next((i for i, x in enumerate(kept) if factor not in varying and _is_same(x, factor)), None)
            if match is None:
                left_below.append(factor)
            else:
                kept.pop(match)
        if len(kept) == len(above) or not any(isinstance(factor, Node) for factor in kept):
            continue
        kept.sort(key=lambda factor: not isinstance(factor, Node))
        with graph.inserting_before(root):
            result = kept[0]
            for op, factors in (("mul", kept[1:]), ("div", left_below)):
                for factor in factors:
                    result = call(graph, op, (result, factor), torch.float32)
        root.replace_all_uses_with(result)
        graph.eliminate_dead_code()


def _is_product(node: Node) -> bool:
    if node.op != "call_function" or node.meta["dtype"] is not torch.float32 or node.kwargs:
        return False
    return op_name(node) in ("mul", "div")


def _factors(root: Node, x: object, above: list[object], below: list[object]) -> None:
    """Appends the factors and divisors of a product, and of inner products if nothing else uses them."""
    if isinstance(x, Node) and _is_product(x) and (x is root or len(x.users) == 1):
        left, right = x.args
        _factors(root, left, above, below)
        _factors(root, right, *((above, below) if op_name(x) == "mul" else (below, above)))
    else:
        above.append(x)


def _is_same(x: object, y: object) -> bool:
    return x is y if isinstance(x, Node) or isinstance(y, Node) else x == y != 0


def _varying(graph: Graph) -> set[Node]:
    """Returns the nodes that differ from score to score."""
    varying: set[Node] = set()
    for node in graph.nodes:
        is_varying = node.op == "placeholder" and node.target in ("score", "q_idx", "kv_idx", GRADIENT)
        if is_varying or any(x in varying for x in node.all_input_nodes):
            varying.add(node)
    return varying


def _viewed(role: str, graph: Graph, node: Node, name: str, args: Sequence[Any], kwargs: Mapping[str, object]) -> object:
    """Returns a captured tensor that is not fully indexed yet after one more op."""
    view: _View = args[0]
    fake = cast(Node, node.args[0]).meta["val"]
    at = list(view.at)
    free = {
        entry.dim: i for i, entry in enumerate(at) if isinstance(entry, _Free)
    }  # dim of the view -> dim of the capture; a new dim has no entry
    if name == "index":
        removed = {dim: index for dim, index in enumerate(args[1]) if index is not None}
    elif name == "select":
        removed = {args[1] % view.ndim: args[2]}
    elif name == "slice":
        dim = (args[1] if len(args) > 1 else 0) % view.ndim
        chosen = range(fake.shape[dim])[slice(*(*args[2:], None, None)[:3])]
        if dim in free and len(chosen) < fake.shape[dim]:
            shown = at[free[dim]]
            at[free[dim]] = _Free(dim, shown.start + chosen.start * shown.step, shown.step * chosen.step, len(chosen))
        return view._replace(at=tuple(at))
    elif name in ("permute", "transpose", "t", "numpy_T"):
        order = list(range(view.ndim))
        if name == "permute":
            order = [dim % view.ndim for dim in args[1]]
        elif view.ndim > 1:
            a, b = (0, 1) if len(args) < 3 else (args[1] % view.ndim, args[2] % view.ndim)
            order[a], order[b] = order[b], order[a]
        for new, old in enumerate(order):
            if old in free:
                at[free[old]] = view.at[free[old]]._replace(dim=new)
        return view._replace(at=tuple(at))
    elif name == "unsqueeze":
        dim = args[1] % (view.ndim + 1)
        for old, i in free.items():
            at[i] = at[i]._replace(dim=old + (old >= dim))
        return view._replace(at=tuple(at), ndim=view.ndim + 1)
    elif name in ("alias", "detach", "clone", "lift_fresh_copy"):
        is_stop = name == "detach" and role == "score_mod" and fake.is_floating_point()
        return view._replace(is_detached=view.is_detached or is_stop)
    else:
        _refuse(
            role, node, name, _INSTEAD.get(name.strip("_"), "index the captured tensor first, as in t[h, q_idx], and then compute")
        )
    # Fix the dims in `removed`, and close the gaps that they leave.
    for dim, index in removed.items():
        if dim in free:
            try:
                at[free[dim]] = _in_slice(graph, index, at[free[dim]])
            except IndexError as e:
                _refuse(role, node, name, str(e))
    for dim, i in free.items():
        if dim not in removed:
            at[i] = at[i]._replace(dim=dim - sum(gone < dim for gone in removed))
    return _settled(graph, view._replace(at=tuple(at), ndim=view.ndim - len(removed)))


def _in_slice(graph: Graph, index: Any, shown: _Free) -> object:
    """Returns the capture's index for an index into a slice. If that is outside the slice, the result is outside the capture.

    A read outside the capture gives 0.
    """
    length = shown.length
    if length is None:
        return index
    if isinstance(index, Node) and index.op == "call_function" and op_name(index) == "full":
        index = index.args[1]
    if not isinstance(index, Node):
        if not -length <= index < length:
            raise IndexError(f"an index within the slice of {length} entries instead of {index}")
        return shown.start + index % length * shown.step

    def integer(op: str, *args: object) -> Node:
        return call(graph, op, args, torch.int64)

    def holds(op: str, *args: object) -> Node:
        return call(graph, op, args, torch.bool)

    index = integer("where", holds("lt", index, 0), integer("add", index, length), index)
    inside = holds("bitwise_and", holds("ge", index, 0), holds("lt", index, length))
    at = integer("add", integer("mul", index, shown.step), shown.start)
    return integer("where", inside, at, _node(graph, _OUTSIDE, torch.int64))


def _settled(graph: Graph, view: _View) -> object:
    """Returns a read of the capture if every dim has an index, else the view."""
    if view.ndim > 0:
        return view
    read = call(graph, "index", (view.capture, list(view.at)), view.capture.meta["dtype"])
    return call(graph, "detach", (read,), view.capture.meta["dtype"]) if view.is_detached else read


def _is_constant(x: object) -> bool:
    """Returns whether x is a number, or a tensor that is filled with one: torch's compiler detaches such tensors."""
    return not isinstance(x, Node) or (x.op == "call_function" and op_name(x) == "full")


def _python(value: Any, dtype: torch.dtype) -> bool | float | int:
    if dtype in (torch.float16, torch.bfloat16):  # a kernel computes in fp32, and would not round the number
        with neutral_state():
            return torch.tensor(value, dtype=dtype, device="cpu").item()
    return bool(value) if dtype is torch.bool else (float(value) if dtype.is_floating_point else int(value))


def _node(graph: Graph, value: object, dtype: torch.dtype) -> Node:
    return value if isinstance(value, Node) else call(graph, "full", ([], _python(value, dtype)), dtype)


def as_dtype(graph: Graph, value: object, dtype: torch.dtype) -> Node:
    node = _node(graph, value, dtype)
    if node.meta["dtype"] == dtype:
        return node
    return _folded(graph, "_to_copy", (node,), dtype) if _is_constant(node) else call(graph, "_to_copy", (node,), dtype)


def _folded(graph: Graph, op: str, args: Sequence[Any], dtype: torch.dtype, **kwargs: Any) -> Any:
    """Returns the constant that an op makes of constants: a kernel has a constant as a number, which its functions do not take."""

    def computed(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype is torch.float32 else dtype  # the backend may compute in float64

    with neutral_state():
        tensors = [
            torch.tensor(x.args[1], dtype=computed(x.meta["dtype"]), device="cpu") if isinstance(x, Node) else x for x in args
        ]
        return _node(graph, getattr(torch.ops.aten, op)(*tensors, **kwargs).to(computed(dtype)).item(), dtype)


def _line_of(node: Node) -> str:
    line = node.meta.get("line")
    return "" if line is None else place_of(line)


def _refuse(role: str, node: Node, name: str, instead: str) -> NoReturn:
    raise ValueError(f"{role} uses {name}{_line_of(node)}, which no kernel can run for one score; use instead: {instead}")
