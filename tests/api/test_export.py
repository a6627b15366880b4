"""torch.export and AOTInductor with a dynamic batch and length, and torch's demands on the operators' schemas and fakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexattn
import flexattn.nn
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


class Call(torch.nn.Module):
    """A module of one function, with the modules that it calls."""

    def __init__(self, function: Any, *modules: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, torch.nn.ModuleList(modules)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*self.inner, *tensors)


def export(call: Call, tensors: tuple[Tensor, ...], open_dims: tuple[dict[int, str], ...], strict: bool) -> Any:
    sizes = {"b": torch.export.Dim("b", min=2), "s": torch.export.Dim("s", min=2)}
    shapes = tuple({i: sizes[name] for i, name in dims.items()} for dims in open_dims)
    return torch.export.export(call, tensors, dynamic_shapes=(shapes,), strict=strict)


def heads_mask(mha: Any, x: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = mha(x, x, x, need_weights=False, attn_mask=mask)[0]
    return out


# For each argument that has one of several shapes: a call, its tensors and their open dims. 2 is the first size of the argument's
# other shape, or 8, the number of heads times the batch.
OPEN_SIZES: dict[str, Any] = {
    "rng_state": (
        Call(lambda q, state: flexattn.attention(q, q, q, dropout_p=0.5, rng_state=state)),
        lambda b, s: (torch.ones(b, s, 2, 8), torch.tensor([1, 2])),
        ({0: "b", 1: "s"}, {}),
    ),
    "slopes": (
        Call(lambda q, slopes: flexattn.attention(q, q, q, alibi_slopes=slopes)),
        lambda b, s: (torch.ones(b, s, 2, 8), torch.ones(b, 2)),
        ({0: "b", 1: "s"}, {0: "b"}),
    ),
    "attn_mask": (
        Call(heads_mask, flexattn.nn.MultiheadAttention(16, 2, batch_first=True)),
        lambda _, s: (torch.ones(4, s, 16), torch.ones(8, s, s)),
        ({1: "s"}, {1: "s", 2: "s"}),
    ),
    "position_embeddings": (
        Call(lambda q, cos: flexattn.nn.qk_norm_rope(q, q, (cos, cos))[0]),
        lambda b, s: (torch.ones(b, s, 2, 8), torch.ones(s, 8)),
        ({0: "b", 1: "s"}, {0: "s"}),
    ),
}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPEN_SIZES)
def test_an_argument_with_one_of_several_shapes_leaves_sizes_open(name: str, strict: bool) -> None:
    call, tensors, open_dims = OPEN_SIZES[name]
    program = export(call, tensors(4, 6), open_dims, strict)
    for sizes in ((2, 2), (4, 8), (3, 9)):
        torch.testing.assert_close(program.module()(*tensors(*sizes)), call(*tensors(*sizes)))


def test_each_export_leaves_the_sizes_of_a_mask_open() -> None:
    """Whether a dim of the mask is 1 is a torch.SymBool then, which the mask's function reads."""
    call = Call(lambda q, mask: flexattn.attention(q, q, q, mask=mask))
    for _ in range(2):
        mask = torch.ones(4, 1, 6, 6, dtype=torch.bool).tril()
        program = export(call, (torch.ones(4, 6, 2, 8), mask), ({0: "b", 1: "s"}, {0: "b", 2: "s", 3: "s"}), strict=False)
        tensors = torch.randn(3, 9, 2, 8), torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
        torch.testing.assert_close(program.module()(*tensors), call(*tensors))


def test_a_mod_that_reads_an_open_size_fixes_it() -> None:
    def attend(q: Tensor) -> Tensor:
        length = q.shape[1]
        return flexattn.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j) / length)

    q = torch.randn(4, 6, 2, 8)
    with pytest.raises(Exception, match="You marked s as dynamic but your code specialized it to be a constant"):
        export(Call(attend), (q,), ({0: "b", 1: "s"},), strict=False)
    program = export(Call(attend), (q,), ({0: "b"},), strict=False)
    torch.testing.assert_close(program.module()(q[:2]), attend(q[:2]))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_score_mod_leaves_more_queries_or_more_keys_open(strict: bool) -> None:
    """A finite score is a mask only if there are no more queries than keys, and a program may run with either."""
    hides = Call(lambda q, k: flexattn.attention(q, k, k, score_mod=lambda s, b, h, i, j: torch.where(i - j <= 2, s, -1e9)))
    program = export(hides, (torch.ones(4, 6, 2, 8), torch.ones(4, 9, 2, 8)), ({1: "b"}, {1: "s"}), strict)
    for queries, keys in ((9, 3), (3, 9)):
        tensors = torch.randn(4, queries, 2, 8), torch.randn(4, keys, 2, 8)
        torch.testing.assert_close(program.module()(*tensors), hides(*tensors))


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
