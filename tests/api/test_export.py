"""torch.export and AOTInductor with a dynamic batch and length, and torch's demands on the operators' schemas and fakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexattn
from flexattn import mods, ops
from tests.api.test_ops import OPCHECKS, op_arguments, permuted
from tests.conftest import FreshPython

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SHAPES = ((2, 5), (3, 9), (1, 2))


class Attention(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.slopes = torch.nn.Parameter(SLOPES.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call: dict[str, Any] = {"attn_mask_type": "causal"}
        if self.kind == "score_mod":
            call["score_mod"] = lambda s, b, h, i, j: s - self.slopes[h] * (i - j).abs()
        if self.kind == "lengths":
            call["mask_mod"] = mods.document(torch.arange(q.shape[1]) // 3)
        return flexattn.attention(q, k, v, **call)


def qkv(batch: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, length, heads, 8, generator=generator) for heads in (4, 2, 2))


def exported(kind: str, strict: bool) -> tuple[Attention, Any]:
    model = Attention(kind)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        return model, torch.export.export(model, qkv(2, 5), dynamic_shapes=[{0: batch, 1: length}] * 3, strict=strict)


@pytest.mark.sample
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["plain", "score_mod", "lengths"])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_export_with_a_dynamic_batch_and_length(kind: str, strict: bool) -> None:
    model, program = exported(kind, strict)
    assert torch.ops.flexattn.attention_forward.default in [node.target for node in program.graph.nodes]
    for shape in SHAPES:
        torch.testing.assert_close(program.module()(*qkv(*shape)), model(*qkv(*shape)))
    assert not program.constants or kind != "score_mod"  # a mod's capture is an input of the operator


COLD = """
import sys, torch
from flexattn import attention
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 1.5]))
    def forward(self, q, k, v):
        mask_mod = lambda b, h, i, j: (i - j).abs() < 4
        return attention(q, k, v, mask_mod=mask_mod, score_mod=lambda s, b, h, i, j: s * self.slopes[h])
q = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
path, step = sys.argv[1:]
if step != "load":
    torch.export.save(torch.export.export(Attention(), (q, q, q), strict=step == "strict"), path)
torch.testing.assert_close(torch.export.load(path).module()(q, q, q), Attention()(q, q, q))
"""


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("step", ["strict", "non-strict"])
@pytest.mark.slow
def test_a_mod_that_is_first_traced_in_an_export(step: str, tmp_path: Path, forked_python: FreshPython) -> None:
    """The program has nothing of the trace. It loads in its process and in another one."""
    for now in (step, "load"):
        result = forked_python("-W", "ignore", "-c", COLD, str(tmp_path / "attention.pt2"), now)
        assert result.returncode == 0, result.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["plain", "score_mod"])
def test_a_package_of_aot_inductor_runs_in_python(kind: str, tmp_path: Path) -> None:
    model, program = exported(kind, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    package = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for shape in SHAPES:
            torch.testing.assert_close(package(*qkv(*shape)), model(*qkv(*shape)))


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("layout", ["as given", "permuted"])
def test_opcheck_with_mods_and_a_block_mask(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    q, k, v = qkv(2, 5)
    if layout == "permuted":
        q, k, v = (permuted(t) for t in (q, k, v))
    slopes = torch.stack((SLOPES, SLOPES), 1)[:, 0]  # strided
    call = {
        "score_mod": mods.alibi(slopes.requires_grad_()),
        "block_mask": create_block_mask(causal, None, None, 32, 32, "cpu", BLOCK_SIZE=16),
    }
    arguments = op_arguments(monkeypatch, {"q": q.requires_grad_(), "k": k, "v": v, **call})
    arguments = tuple(
        t.detach()
        if isinstance(t, Tensor)
        else tuple(x.detach() for x in t)
        if isinstance(t, tuple) and t and isinstance(t[0], Tensor)
        else t
        for t in arguments
    )
    torch.library.opcheck(ops._forward_op, arguments, test_utils=OPCHECKS)
    out, lse, _ = ops._forward_op(*arguments)
    torch.library.opcheck(ops._backward_op, (permuted(out), None, out, lse, *arguments), test_utils=OPCHECKS)
