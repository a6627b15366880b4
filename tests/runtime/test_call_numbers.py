"""Numbers of a call in its launches: found by name, replaced by name, and nowhere else."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import dout_like
from flexattn.dispatch.spec import AttentionSpec, Operands, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.runtime import call_numbers, direct, entry, interpreter, launch
from flexattn.kernels_triton.runtime.store import Binary
from tests import structure
from tests.support.replayed import float_paths

NUMBERS = {"Scores": ("scale", "softcap"), "ConversionArguments": ("scale",)}  # fields of groups of arguments


def kernels() -> Iterator[Any]:
    """Yields all kernels that the library launches."""
    for path in sorted((structure.ROOT / "kernels_triton").rglob("*.py")):
        name = ".".join(path.relative_to(structure.ROOT).with_suffix("").parts)
        yield from (
            x for x in vars(importlib.import_module(f"flexattn.{name}")).values() if hasattr(x, "group") and hasattr(x, "arg_names")
        )


def numbers_of(group: type, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields (flat name, index of the number) for each field of a kernel's arguments that is a number of the call, by class."""
    for name, kind in entry._hints(group).items():
        if entry.is_group(kind):
            yield from numbers_of(kind, f"{path}{name}_")
        elif name == "captures":
            yield f"{path}{name}", 2
        elif name in NUMBERS.get(group.__name__, ()):
            yield f"{path}{name}", ("scale", "softcap").index(name)


def test_names_are_those_of_the_fields_of_every_kernel() -> None:
    seen = {}
    for kernel in kernels():
        found = call_numbers.places(kernel.arg_names, ((i,) for i in range(len(kernel.arg_names))))
        seen[kernel.__name__] = [(kernel.arg_names[path[0]], place) for place, path in found]
        assert seen[kernel.__name__] == list(numbers_of(kernel.group)), kernel.__name__
    assert len(seen) > 30
    assert sum(map(len, seen.values())) > 60


def test_captured_floats_are_counted_in_each_tuple() -> None:
    names = ("q_ptr", "dq_scores_scale", "dq_scores_captures", "keep_scale", "scores_softcap", "captures")
    floats = [(1,), (2, 1), (2, 4), (3,), (4,), (5, 0), (5, 3)]
    found = [(0, (1,)), (2, (2, 1)), (3, (2, 4)), (1, (4,)), (2, (5, 0)), (3, (5, 3))]
    assert call_numbers.places(names, floats) == found


def test_choices_are_all_that_host_code_asks_of_a_number() -> None:
    """If a comparison were missing, a call could replay the launches of another one that chooses other kernels."""
    asked = set()
    for folder in ("kernels_triton", "dispatch"):
        for path in (structure.ROOT / folder).rglob("*.py"):
            others = ("reference.py", "eager_backend.py", "cpu_attention.py", "cudnn_backend.py", "cudnn_block_lists.py")
            if path.name in (*others, "call_numbers.py"):
                continue  # other backends, whose recordings have no numbers by name
            text = path.read_text()
            if "softmax_scale" not in text and "softcap" not in text:
                continue
            tree = ast.parse(text)
            passed = {id(node) for call in ast.walk(tree) if isinstance(call, ast.keyword) for node in values(call.value)}
            for node in ast.walk(tree):
                parts = ast.iter_child_nodes(node)
                reads = [x for x in parts if isinstance(x, ast.Attribute) and x.attr in ("softmax_scale", "softcap")]
                if any(ast.unparse(x.value) in ("x", "self", "problem") and id(x) not in passed for x in reads):
                    asked.add(ast.unparse(node))
    allowed = {"x.softmax_scale == 0", "self.softcap > 0", "self.softcap > LARGE_SOFTCAP"}
    assert asked == allowed
    numbers = [(0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.5, 256.0), (0.5, 257.0), (0.0, 257.0)]
    assert [call_numbers.choices(x) for x in numbers].count(call_numbers.choices((0.25, 3.0))) == 2
    assert len({call_numbers.choices(x) for x in numbers}) == 5


def values(node: ast.expr) -> list[ast.expr]:
    """Returns the expressions of an argument that is passed unchanged."""
    is_float = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float"
    return [node, *node.args] if isinstance(node, ast.Call) and is_float else [node]


def test_a_launch_with_other_numbers_has_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_load", lambda binary: 16)
    monkeypatch.setattr(direct, "_library", lambda: type("Library", (), {"cuLaunchKernelEx": None}))
    signature = ["*fp32", "fp32", "i32", ["fp32", "i64", "fp32"], "fp32", "fp32", "constexpr"]
    names = ["out_ptr", "inputs_scores_scale", "n", "inputs_scores_captures", "inputs_scores_softcap", "keep_scale", "META"]
    binary = Binary(name="k", signature=signature, num_warps=4, shared=0, maps=[], waits=False, code=b"")
    kernel, memory = direct.Direct(binary, names), torch.zeros(4)

    def prepared(scale: float, softcap: float, first: float, second: float) -> direct.Prepared:
        return kernel.prepare(2, (memory, scale, 7, (first, 9, second), softcap, 2.0, None))

    def bytes_of(prepared: direct.Prepared) -> bytes:
        start = prepared.buffer.offset
        return bytes(prepared.buffer.memory[start : start + kernel.size])

    one = prepared(0.5, 3.0, 2.0, -1.0)
    before = bytes_of(one)
    assert one.has_numbers((0.5, 3.0, 2.0, -1.0))
    for wrong in ((0.5, 3.0, -1.0, 2.0), (0.25, 3.0, 2.0, -1.0), (0.5, 3.0, 2.0), (0.5, 3.0)):
        assert not one.has_numbers(wrong)
    other = one.with_numbers((0.25, 1e300, -0.0, 8.0))  # past the largest of float32
    assert bytes_of(other) == bytes_of(prepared(0.25, float("inf"), -0.0, 8.0))
    assert other.has_numbers((0.25, 1e300, -0.0, 8.0))
    assert bytes_of(one) == before
    assert other.buffer.lock is not one.buffer.lock
    assert bytes_of(other.with_numbers((0.5, 3.0, 2.0, -1.0))) == before


SLOPE = 0.75


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPE * (i - j)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


CU = torch.empty(3, dtype=torch.int32, device="meta")
CALLS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {  # lengths, arguments
    "causal": ((512, 512), {"attn_mask_type": "causal"}),
    "long": ((4096, 4096), {"attn_mask_type": "causal", "deterministic": True}),
    "few queries": ((1, 8192), {}),
    "window": ((2048, 2048), {"attn_mask_type": "causal", "window_size": (255, 0), "dropout_p": 0.1}),
    "score_mod": ((512, 512), {"score_mod": relative}),
    "bias": ((256, 256), {"bias_type": "post_scale_bias", "bias": meta(1, 8, 256, 256)}),
    "padding": ((512, 512), {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "return_max_logit": True}),
}


def launches(spec: AttentionSpec, x: Operands, has_backward: bool) -> list[launch.Launch]:
    with torch.no_grad(), triton_backend.recorded_on(spec) as found:
        triton_backend.forward(spec, x)
        if has_backward:
            out, lse, _ = empty_outputs(spec, x)
            triton_backend.backward(spec.for_backward(), x, out, lse, dout_like(spec, x, out), None)
    return found


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_launches_of_two_values_differ_in_them_alone(
    name: str, head_dim: int, capability: tuple[int, int], softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # so that the conditions of kernels for sm_90 are checked
    (sq, skv), more = CALLS[name]
    q, k, v = meta(2, sq, 8, head_dim), meta(2, skv, 4, head_dim), meta(2, skv, 4, head_dim)
    x, settings = bind_call(q, k, v, softmax_scale=0.5, softcap=softcap, **more)
    if x.dropout_p > 0:
        x = x._replace(rng_state=torch.empty(2, dtype=torch.int64, device="meta"))
    spec = ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=capability)
    assert x.mod_numbers == ((SLOPE,) if name == "score_mod" else ())
    numbers = (0.5, softcap, *x.mod_numbers)
    others = (0.125, 7.0 if softcap else 0.0, -3.0)[: len(numbers)]
    has_backward = sq > 1
    first = launches(spec, x, has_backward)
    again = launches(spec, x._replace(softmax_scale=others[0], softcap=others[1], mod_numbers=others[2:]), has_backward)
    assert len(first) == len(again) > 0
    seen = set()
    for a, b in zip(first, again, strict=True):
        assert (a.kernel, a.tile, a.programs) == (b.kernel, b.tile, b.programs)
        named = {path: place for place, path in call_numbers.places(a.kernel.arg_names, float_paths(a.arguments))}
        for (path, left), (_, right) in zip(flat(a.arguments), flat(b.arguments), strict=True):
            if path in named:
                seen.add(named[path])
                assert (left, right) == (numbers[named[path]], others[named[path]])
            elif isinstance(left, Tensor):
                assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
            elif hasattr(left, "block_shape"):
                assert (left.shape, left.strides, left.block_shape) == (right.shape, right.strides, right.block_shape)
            else:
                assert left == right
    assert seen == set(range(len(others)))


def flat(arguments: tuple[Any, ...], path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    return [leaf for i, x in enumerate(arguments) for leaf in (flat(x, (*path, i)) if type(x) is tuple else (((*path, i), x),))]
