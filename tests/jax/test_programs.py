"""Programs for CUDA devices, without one: memory that a kernel writes holds one array, in the program that XLA compiles too."""

from __future__ import annotations

import json
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
pytest.importorskip("flexattn.jax")
from flexattn.jax import cuda  # noqa: E402
from flexattn.jax.custom_call import CustomCall  # noqa: E402
from tests.support import xla_programs  # noqa: E402

FEW = [
    *("splits", "sinks, splits, loop", "captures, deterministic", "captures, vmap", "FP8, delayed", "no keys"),
    *("append, equal caches, loop", "append, zeros, scan"),
]


@pytest.mark.parametrize("name", FEW)
def test_written_operands_come_from_one_barrier(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """XLA merges two equal operands, such as zeros, unless they are results of one instruction."""

    def described(step: Any, written: Any, architecture: int, zeros: Any) -> CustomCall:
        operands = tuple(dict.fromkeys(step.buffers))
        return CustomCall(b"", operands, (), frozenset(zeros.keys() & set(operands)))

    monkeypatch.setattr(cuda, "custom_call", described)
    function, arrays = xla_programs.programs()[name]
    check = jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)
    with cuda.compiled_for((8, 9), processors=132):
        text = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])(*arrays).mlir_module()
    assert text.count(f"@{cuda.TARGET}(")
    assert [*xla_programs.unprotected(text)] == []


@pytest.mark.parametrize("names", [FEW, pytest.param([], marks=pytest.mark.slow, id="all")])
def test_compiled_programs_give_each_result_its_own_memory(fresh_python: Any, names: list[str]) -> None:
    """XLA compiles them for an H100, which needs JAX's CUDA plugin, and no GPU."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="XLA for CUDA is not installed: pip install --no-deps jax-cuda13-pjrt")
    done = fresh_python("-m", "tests.support.xla_programs", *names, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(names or xla_programs.programs())
    assert all(count for count, *_ in found.values())
    assert {name: wrong for name, (_, *wrong) in found.items() if wrong} == {}


COMPILED = """
%dynamic-slice-fusion (p0: f32[8,64], p1: s32[], p2: f32[64]) -> (f32[64], f32[64]) {
  %dynamic_slice.2 = f32[1,64]{1,0} dynamic-slice(%p0, %p1, %constant_4), dynamic_slice_sizes={1,64}
  %bitcast.3 = f32[64]{0} bitcast(%dynamic_slice.2)
  ROOT %ffi_call.0 = (f32[64]{0}, f32[64]{0}) custom-call(OPERANDS), custom_call_target="triton_kernel_call_ffi", \
operand_layout_constraints={f32[64]{0}, f32[64]{0}, f32[64]{0}}, output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}, \
api_version=API_VERSION_TYPED_FFI
}
"""


@pytest.mark.parametrize(
    ("operands", "wrong"),
    [
        ("%p0, %p2, %p3", 0),
        ("%bitcast.3, %p2, %p2", 2),  # the same memory for two results
        ("%p2, %p3, %p2", 1),  # written tensors are read, too
        ("%p3, %bitcast.3, %p2", 1),  # a slice
    ],
)
def test_the_search_finds(operands: str, wrong: int) -> None:
    assert len([*xla_programs.shared(COMPILED.replace("OPERANDS", operands))]) == wrong
