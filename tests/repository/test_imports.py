"""Imports, their cost and their needs, each in a fresh process: no compiler is imported before it is used, nor has to be
installed.
"""

from __future__ import annotations

import pytest

from tests.conftest import FreshPython

# As if it were not installed: importing it raises ModuleNotFoundError, and find_spec() finds nothing.
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


# What an import does without: kernels, backends that a call may not take, tools, commands, and the spellings of other libraries.
BACKENDS = ("dispatch.eager_backend", "dispatch.cudnn", "dispatch.reference", "dispatch.canary")
LATER = tuple(f"flexattn.{name}" for name in ("kernels_", *BACKENDS, "emulator", "bench", "cli", "integrations", "testing"))


def test_import_flexattn_imports_no_backend_and_adds_little_to_torch(fresh_python: FreshPython) -> None:
    """Modules, as a time would depend on the machine: torch's but for a few that it has not imported itself, and few of ours."""
    code = "import sys, torch; torch_s = {*sys.modules}; import flexattn; print(*torch_s, '/', *sorted({*sys.modules} - torch_s))"
    ran = fresh_python("-c", code)
    before, added = (part.split() for part in ran.stdout.split("/"))
    assert not {*HEAVY} & {*before, *added}, ran.stderr
    assert [name for name in added if name.startswith(LATER)] == []
    assert all(name.startswith(("flexattn", "torch.")) for name in added), added


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
    """Each of them is read and hashed by Triton as it is imported: half of the time of a process's first call."""
    ran = forked_python("-c", FORWARD, env={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    imported = ran.stdout.split()
    assert "portable.forward" in imported, ran.stderr
    later = ("portable.backward", "portable.score_gradients", "common.quantize", "common.preprocess", "hopper.fp8")
    assert [name for name in imported if name.startswith(later)] == []
