"""Imports and their cost, each in a fresh process: no compiler is imported, or has to be installed, before its first use."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import flexattn
from tests.conftest import FreshPython

# As if it were not installed: an import raises ModuleNotFoundError, and find_spec() finds nothing.
BLOCK = "import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"

# thd through the eager backend, forward and backward, against the reference.
USE_EAGER = """
import torch
import flexattn
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_dout, make_inputs
from flexattn.dispatch.reference import reference_attention, reference_gradients

inputs = make_inputs("thd", lengths_q=[9, 0, 5], gap=2)
dout = make_dout(inputs)
inputs.q.requires_grad_()
call = inputs._asdict() | dict(attn_mask_type="padding_causal")
explanation = flexattn.explain(**call)
assert explanation.forward.backend == explanation.backward.backend == "eager", explanation
out = flexattn.attention(**call)
out.backward(dout)
spec, x = make_call(inputs, attn_mask_type="padding_causal")
check_close("out", out, reference_attention(spec, x)[0], reference_attention(spec, x, spec.dtype)[0])
dq, eager_dq = (reference_gradients(spec, x, dout, dtype=dtype).dq for dtype in (torch.float64, spec.dtype))
check_close("dq", inputs.q.grad, dq, eager_dq, factor=GRADIENT_FACTOR)
print("right")
"""

USE_TRITON = """
import torch
import flexattn

q = torch.randn(1, 9, 2, 8)
try:
    flexattn.attention(q, q, q, backend="triton")
except flexattn.BackendError as e:
    print(e)
"""

HEAVY = ("triton", "cudnn", "rich", "hypothesis", "torch._dynamo", "torch._inductor")


# Modules that an import does not need: kernels, unused backends, tools, commands, other libraries' spellings, and modules that a
# call in 16 bits without a mod does not use.
BACKENDS = (
    "dispatch.eager_backend",
    "dispatch.cudnn",
    "dispatch.reference",
    "dispatch.canary",
    "dispatch.describe",
    "dispatch.recorder",
    "dispatch.replay",
)
OF_FEW_CALLS = (
    "append",
    "autograd",
    "backward",
    "block_mask",
    "call_recording",
    "dispatch.append",
    "dispatch.explain",
    "dispatch.heuristics",
    "dispatch.mod_program",
    "dispatch.philox",
    "dispatch.quantization",
    "fp8",
    "hints",
    "mods",
    "nested",
    "sharded",
)
FRONT_DOORS = ("kv_cache", "nn", "plot", "prefix", "warm_up")
TOOLS = ("emulator", "bench", "cli", "integrations", "testing")
LATER = tuple(f"flexattn.{name}" for name in ("kernels_", *BACKENDS, *OF_FEW_CALLS, *FRONT_DOORS, *TOOLS))
MOST = 28  # modules of the package that an import reads, each from a file of its own


IMPORT = """
import sys, torch
torch_s = {*sys.modules}
import flexattn
print(*torch_s, "/", *sorted({*sys.modules} - torch_s), "/", *sorted({
    kind.__qualname__
    for name, module in sys.modules.items() if name.startswith("flexattn")
    for kind in vars(module).values() if hasattr(kind, "__dataclass_fields__")
}))
"""


@pytest.mark.slow
def test_import_flexattn_imports_no_backend_and_adds_little_to_torch(fresh_python: FreshPython) -> None:
    """Counts modules, because a time would depend on the machine. The limit is torch's modules, a few more, and few of ours.

    No dataclass is among them, because making one takes three times as long as a NamedTuple.
    """
    ran = fresh_python("-c", IMPORT)
    before, added, dataclasses = (part.split() for part in ran.stdout.split("/"))
    assert not {*HEAVY} & {*before, *added}, ran.stderr
    assert [name for name in added if name.startswith(LATER)] == []
    assert all(name.startswith(("flexattn", "torch.")) for name in added), added
    assert len([name for name in added if name.startswith("flexattn")]) <= MOST, added
    assert dataclasses == []


def test_each_public_name_is_there_and_leads_to_what_a_type_checker_sees() -> None:
    tree = ast.parse(Path(flexattn.__file__).read_text())
    typed = [node for block in tree.body if isinstance(block, ast.If) for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in typed for alias in node.names}
    found = {name: name if module == "flexattn" else str(module).removeprefix("flexattn.") for name, module in seen.items()}
    assert found == flexattn._LATER | {name: name for name in flexattn._MODULES}
    assert {*flexattn._LATER} <= {*flexattn.__all__} <= {*dir(flexattn)}
    assert all(getattr(flexattn, name) is not None for name in flexattn.__all__)
    assert flexattn.warmup is importlib.import_module("flexattn.warm_up").warmup
    with pytest.raises(AttributeError, match="module 'flexattn' has no attribute 'atention'"):
        flexattn.atention  # noqa: B018


RECORDED = """
import contextlib, sys, torch
from flexattn.dispatch import replay

class Backend:
    watched = staticmethod(lambda watcher: contextlib.nullcontext())

x = torch.ones(3)
(found, _), _ = replay.record(Backend, lambda: (x + 1, x.new_empty(2)), (x,), tuple, x.device)
assert torch.equal(found, x + 1)
print(*sorted(HEAVY & {*sys.modules}))
"""


@pytest.mark.slow
def test_recording_a_call_imports_no_dynamo(fresh_python: FreshPython) -> None:
    """torch imports it with the first op under a dispatch mode, which takes most of a second in a process's second call."""
    ran = fresh_python("-c", RECORDED.replace("HEAVY", repr({*HEAVY})))
    assert ran.stdout.split() == [], ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr


OPERATORS = """
import sys, torch, flexattn
from torch._subclasses import FakeTensorMode

x = torch.arange(256.0).view(1, 4, 2, 32)
call = (None, None, 4, None, None, "bshd", "float8_e4m3fn", "tensor", 0, 0, False)
assert "flexattn.fp8_ops" not in sys.modules and "flexattn.append" not in sys.modules
with FakeTensorMode() as mode:
    data, descale, _ = torch.ops.flexattn.quantize(mode.from_tensor(x), *call)
assert data.shape == x.shape and data.dtype is torch.float8_e4m3fn and type(data).__name__ == "FakeTensor", data
data, descale, amax = torch.ops.flexattn.quantize(x, *call)
assert amax.item() == 255.0 and data.float().max() == 448.0, (amax, data)
cache, new = torch.zeros(1, 8, 2, 32), x[:, :1].clone()
torch.ops.flexattn.append_kv(cache, cache.clone(), new, new, None, torch.tensor([3], dtype=torch.int32), None, None, "bshd")
assert torch.equal(cache[:, 3:4], new), cache
print("right")
"""


@pytest.mark.slow
def test_operators_run_though_what_they_do_is_imported_later(fresh_python: FreshPython) -> None:
    """A graph that was exported elsewhere calls them so: among fake tensors, before any implementation is imported."""
    ran = fresh_python("-c", OPERATORS, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.stdout == "right\n", ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [("triton", "cudnn"), ("triton",), ("cudnn",)], ids="-".join)
def test_reference_and_eager_run_without(blocked: tuple[str, ...], fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", BLOCK.format(blocked=blocked) + USE_EAGER, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.stdout == "right\n", ran.stdout + ran.stderr


def test_triton_backend_without_triton_says_what_to_install(forked_python: FreshPython) -> None:
    ran = forked_python("-c", BLOCK.format(blocked=("triton",)) + USE_TRITON, env={"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stderr
    assert "triton" in ran.stdout
    assert "pip install" in ran.stdout


def test_triton_backend_on_a_cpu_says_how_to_interpret(forked_python: FreshPython) -> None:
    ran = forked_python("-c", USE_TRITON, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    assert "TRITON_INTERPRET=1" in ran.stdout


FORWARD = """
import sys
import torch
import flexattn

q = torch.randn(1, 9, 2, 8)
flexattn.attention(q, q, q, backend="triton")
print(*(name.removeprefix("flexattn.kernels_triton.") for name in sys.modules if name.startswith("flexattn.kernels_triton.")))
"""


def test_a_forward_imports_no_kernels_of_a_backward_or_of_fp8(forked_python: FreshPython) -> None:
    """Triton reads and hashes each of them when it is imported: half of the time of a process's first call."""
    ran = forked_python("-c", FORWARD, env={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    imported = ran.stdout.split()
    assert "portable.forward" in imported, ran.stderr
    later = ("portable.backward", "portable.score_gradients", "common.quantize", "common.preprocess", "hopper.fp8", "mods.")
    assert [name for name in imported if name.startswith(later)] == []


@pytest.mark.slow
def test_portable_kernels_import_no_gluon(fresh_python: FreshPython) -> None:
    names = "(name for name in sys.modules if name.startswith('triton.experimental'))"
    ran = fresh_python("-c", f"import sys, flexattn.kernels_triton.families; print(*{names})")
    assert ran.stdout.split() == [], ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
