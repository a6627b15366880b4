"""What importing costs and needs, each in a fresh process: no compiler is imported before it is used, nor has to be installed."""

from __future__ import annotations

import pytest
from conftest import FreshPython

# The module looks as if it were not installed.
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""

# Padded bshd and thd through the eager backend, forward and backward, against the reference.
USE_EAGER = """
import torch
import flexattn
from flexattn.dispatch.reference import reference_attention
from flexattn.dispatch.spec import Operands

q, k, v, dout = torch.randn(4, 1, 9, 2, 8).unbind()
q.requires_grad_()
call = dict(attn_mask_type="causal", return_lse=True)
explanation = flexattn.explain(q, k, v, **call)
assert explanation.forward.backend == explanation.backward.backend == "eager", explanation
out, lse = flexattn.attention(q, k, v, **call)
out.backward(dout)
x = Operands(q.detach().double().requires_grad_(), k, v, *[None] * 8, 9, 9, 8 ** -0.5, 0.0, 0.0)
exact, exact_lse, _ = reference_attention(explanation.spec, x)
exact.backward(dout.double())
torch.testing.assert_close(out.double(), exact)
torch.testing.assert_close(lse.double(), exact_lse)
torch.testing.assert_close(q.grad.double(), x.q.grad)
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

HEAVY = ("triton", "cudnn", "einops", "rich", "hypothesis", "torch._dynamo", "torch._inductor")


def test_import_flexattn_imports_no_backend(fresh_python: FreshPython) -> None:
    code = f"import sys, flexattn; print([m for m in sys.modules if m.startswith(('flexattn.kernels_',)) or m in {HEAVY}])"
    ran = fresh_python("-c", code)
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr


@pytest.mark.parametrize("blocked", [("triton",), ("cudnn",), ("triton", "cudnn", "einops")], ids="-".join)
def test_reference_and_eager_run_without(blocked: tuple[str, ...], fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", BLOCK.format(blocked=blocked) + USE_EAGER, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.stdout == "right\n", ran.stdout + ran.stderr


def test_triton_backend_without_triton_says_what_to_install(fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", BLOCK.format(blocked=("triton",)) + USE_TRITON, env={"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stderr
    assert "triton" in ran.stdout
    assert "pip install" in ran.stdout


def test_triton_backend_on_a_cpu_says_how_to_interpret(fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", USE_TRITON, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    assert "TRITON_INTERPRET=1" in ran.stdout
