"""flexattn.nn.qk_norm_rope compared with float64, with transformers' and diffusers' code, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import norm_rope
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable import norm_rope as kernels
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.nn import qk_norm_rope
from tests.support.compiled_kernels import compile_sound


class Case(NamedTuple):
    """Sizes and options of a call. The default has several blocks, the last of them with missing rows."""

    tokens: tuple[int, ...] = (2, 11)
    head_dim: int = 32
    rotated: int = 32  # 0: no rotation
    interleaved: bool = False
    zero_centered: bool = False
    has_norm: bool = True
    by_sequence: bool = False  # each sequence has positions of its own
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.float32


CASES = {
    "halves": Case(),
    "neighbours": Case(interleaved=True, dtype=torch.bfloat16),
    "partly": Case(head_dim=64, rotated=16, zero_centered=True, by_sequence=True, dtype=torch.bfloat16, table_dtype=torch.bfloat16),
    "odd sizes": Case(tokens=(1, 13), head_dim=40, rotated=20, interleaved=True, by_sequence=True, dtype=torch.float16),
    "packed": Case(tokens=(21,), head_dim=24, rotated=24),
    "no rotation": Case(rotated=0, zero_centered=True, dtype=torch.float16),
    "no norm": Case(head_dim=40, rotated=24, has_norm=False, dtype=torch.bfloat16),
    "odd head dim": Case(head_dim=17, rotated=8),
}
HEADS, HEADS_KV = 3, 2


class Inputs(NamedTuple):
    leaves: list[Tensor]  # q and k, parts of one projection, and the weights
    position_embeddings: tuple[Tensor, Tensor] | None
    dout: list[Tensor]


def inputs_of(case: Case, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    d = case.head_dim
    qkv = random(*case.tokens, (HEADS + 2 * HEADS_KV) * d).to(device, case.dtype)
    q, k = qkv[..., : HEADS * d].unflatten(-1, (HEADS, d)), qkv[..., HEADS * d :][..., : HEADS_KV * d].unflatten(-1, (HEADS_KV, d))
    weights = [(0.3 * random(d) + (not case.zero_centered)).to(device, case.dtype) for _ in range(2)] if case.has_norm else []
    table = None
    if case.rotated:
        angles = 3 * random(*(case.tokens if case.by_sequence else case.tokens[-1:]), case.rotated // 2)
        angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles, angles), -1)
        table = angles.cos().to(device, case.table_dtype), angles.sin().to(device, case.table_dtype)
    return Inputs([q, k, *weights], table, [random(*x.shape).to(device, case.dtype) for x in (q, k)])


Function = Callable[[Sequence[Tensor], tuple[Tensor, Tensor] | None, Case], Sequence[Tensor]]


def ours(leaves: Sequence[Tensor], table: tuple[Tensor, Tensor] | None, case: Case) -> Sequence[Tensor]:
    weights = dict(zip(("q_weight", "k_weight"), leaves[2:], strict=False))
    return qk_norm_rope(*leaves[:2], table, interleaved=case.interleaved, zero_centered=case.zero_centered, **weights)


def by_matrix(leaves: Sequence[Tensor], table: tuple[Tensor, Tensor] | None, case: Case) -> Sequence[Tensor]:
    """The same by another formula: a matrix rotates each head of each token."""
    results = []
    for x, weight in zip(leaves[:2], leaves[2:] or (None, None), strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + case.zero_centered)
        if table is not None:
            pairs, steps = case.rotated // 2, (2, 1) if case.interleaved else (1, case.rotated // 2)
            matrix = torch.zeros(*table[0].shape[:-1], case.head_dim, case.head_dim, dtype=x.dtype)
            for i in range(case.head_dim):
                matrix[..., i, i] = 1.0
            for n in range(pairs):
                a, b = n * steps[0], n * steps[0] + steps[1]
                matrix[..., a, a] = matrix[..., b, b] = table[0][..., a].to(x.dtype)
                matrix[..., b, a] = table[1][..., a].to(x.dtype)
                matrix[..., a, b] = -table[1][..., a].to(x.dtype)
            x = torch.einsum("...ij,...hj->...hi", matrix, x)
        results.append(x)
    return results


def gradients(function: Function, x: Inputs, case: Case) -> list[Tensor]:
    """Returns the results and all gradients."""
    leaves = [t.detach().requires_grad_() for t in x.leaves]
    results = function(leaves, x.position_embeddings, case)
    return [*results, *torch.autograd.grad(results, leaves, x.dout)]


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    with mock.patch.object(norm_rope, "kernel_error", return_value="a test turns it off"):
        yield


def check(got: Sequence[Tensor], exact: Sequence[Tensor], same: Sequence[Tensor]) -> None:
    for name, x, wanted, eager in zip(("q", "k", "dq", "dk", "dq_weight", "dk_weight"), got, exact, same, strict=False):
        error, budget = ((t.double().cpu() - wanted).abs().max() for t in (x, eager))
        limit = 2 * budget + torch.finfo(x.dtype).eps * wanted.abs().max()
        assert error <= limit, f"{name}: error {error:.2e}, budget {limit:.2e}"


def wide(x: Inputs) -> Inputs:
    return Inputs([t.double().cpu() for t in x.leaves], x.position_embeddings, [t.double().cpu() for t in x.dout])


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, device: str) -> None:
    case = CASES[name]
    x = inputs_of(case, device)
    with without_kernels():
        same = gradients(ours, x, case)
    with mock.patch.object(kernels, "norm_rope_backward", wraps=kernels.norm_rope_backward) as launched:
        got = gradients(ours, x, case)
    launched.assert_called_once()
    assert all(t.is_contiguous() and t.dtype is case.dtype for t in got)
    check(got, gradients(by_matrix, wide(inputs_of(case)), case), same)


def test_float64_in_torch_operations(device: str) -> None:
    case = CASES["partly"]
    x = wide(inputs_of(case))
    moved = Inputs([t.to(device) for t in x.leaves], inputs_of(case, device).position_embeddings, [t.to(device) for t in x.dout])
    for got, wanted in zip(gradients(ours, moved, case), gradients(by_matrix, x, case), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_strided_inputs_give_the_bits_of_contiguous_ones(device: str) -> None:
    """Strides: q beside a gate in each head, k as a view of [b, h, s, d], every second number, one gradient for all."""
    case = CASES["halves"]
    x = inputs_of(case, device)
    (q, k, *weights), table = x.leaves, x.position_embeddings
    gated = torch.stack((q, torch.full_like(q, torch.nan)), -2).flatten(-2)[..., : case.head_dim]
    by_head = k.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack((k, torch.full_like(k, torch.nan)), -1).flatten(-2)[..., ::2]
    dout = [torch.ones((), device=device).expand(t.shape) for t in (q, k)]
    packed = gradients(ours, Inputs([q.contiguous(), k.contiguous(), *weights], table, [t.contiguous() for t in dout]), case)
    for strided in (by_head, spread):
        got = gradients(ours, Inputs([gated, strided, *weights], table, dout), case)
        assert all(torch.equal(a, b) for a, b in zip(got, packed, strict=True))


@pytest.mark.parametrize("name", ["halves", "no rotation"])
def test_results_are_contiguous(name: str) -> None:
    """In torch operations too."""
    case = CASES[name]
    (q, k, *weights), table = inputs_of(case)[:2]
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k)]
    with without_kernels():
        assert all(t.is_contiguous() for t in ours([*strided, *weights], table, case))


def test_gradients_of_weights_are_finite_without_an_eps(device: str) -> None:
    """The last block has rows that do not exist, whose norms are 0."""
    q, k, *weights = inputs_of(CASES["no rotation"], device).leaves
    weights = [t.detach().requires_grad_() for t in weights]
    results = qk_norm_rope(q, k, q_weight=weights[0], k_weight=weights[1], eps=0.0)
    with_eps = qk_norm_rope(q, k, q_weight=weights[0], k_weight=weights[1], eps=1e-9)
    for got, wanted in zip(*(torch.autograd.grad(x, weights, (q, k)) for x in (results, with_eps)), strict=True):
        torch.testing.assert_close(got, wanted)


def test_no_tokens(device: str) -> None:
    case = Case(tokens=(2, 0))
    results = gradients(ours, inputs_of(case, device), case)
    assert [tuple(t.shape) for t in results[2:]] == [(2, 0, HEADS, 32), (2, 0, HEADS_KV, 32), (32,), (32,)]
    assert not any(t.any() for t in results[4:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partly", *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed", "no norm"))])
def test_compile_in_one_graph(name: str, device: str) -> None:
    case = CASES[name]
    x = inputs_of(case, device)
    compiled: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with mock.patch.object(kernels, "norm_rope_backward", wraps=kernels.norm_rope_backward) as launched:
        got = gradients(compiled, x, case)
    launched.assert_called_once()
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(ours, x, case), strict=True))


def test_the_operators_describe_themselves(device: str) -> None:
    x = inputs_of(CASES["halves"], device)
    assert x.position_embeddings is not None
    cos, sin = (t[None] for t in x.position_embeddings)
    call = (*x.leaves[:2], cos, sin, *x.leaves[2:], 1e-6, False, False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flexattn.qk_norm_rope.default, call, test_utils=tests)
    torch.library.opcheck(torch.ops.flexattn.qk_norm_rope_backward.default, (*x.dout, *call), test_utils=tests)
    with without_kernels(), pytest.raises(flexattn.BackendError, match="qk_norm_rope has no kernel here"):
        torch.ops.flexattn.qk_norm_rope(*call)


def test_second_and_forward_mode_derivatives(device: str) -> None:
    case = CASES["halves"]

    def second(x: Inputs, function: Function) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in x.leaves]
        results = function(leaves, x.position_embeddings, case)
        first = torch.autograd.grad(results, leaves, x.dout, create_graph=True)
        return list(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))

    def tangents(x: Inputs, function: Function) -> list[Tensor]:
        q, k, *weights = x.leaves
        _, found = torch.func.jvp(
            lambda q, k: tuple(function([q, k, *weights], x.position_embeddings, case)), (q, k), tuple(x.dout)
        )
        return list(found)

    for derivative in (second, tangents):
        for got, wanted in zip(
            derivative(inputs_of(case, device), ours), derivative(wide(inputs_of(case)), by_matrix), strict=True
        ):
            torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_of_k_alone(device: str) -> None:
    q, k, *weights = inputs_of(CASES["no rotation"], device).leaves
    k = k.detach().requires_grad_()
    _, out = qk_norm_rope(q, k, q_weight=weights[0], k_weight=weights[1])
    (dk,) = torch.autograd.grad(out.float().square().sum(), k, create_graph=True)
    (second,) = torch.autograd.grad(dk.float().square().sum(), k)
    assert second.isfinite().all()


@pytest.mark.slow
def test_transformers_qwen3(device: str) -> None:
    """The modules of Qwen3 and Qwen3.5, on [b, h, s, d]."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_5 import modeling_qwen3_5

    for module, norm, name in (
        (modeling_qwen3, modeling_qwen3.Qwen3RMSNorm, "halves"),
        (modeling_qwen3_5, modeling_qwen3_5.Qwen3_5RMSNorm, "partly"),
    ):
        case = CASES[name]._replace(by_sequence=True, dtype=torch.float32, table_dtype=torch.float32)

        def theirs(leaves: Sequence[Tensor], table: Any, case: Case, module: Any = module, norm: Any = norm) -> Sequence[Tensor]:
            normed = []
            for x, weight in zip(leaves[:2], leaves[2:], strict=True):
                layer = norm(case.head_dim, eps=1e-6).to(device)
                normed.append(torch.func.functional_call(layer, {"weight": weight}, (x,)).transpose(1, 2))
            return [x.transpose(1, 2) for x in module.apply_rotary_pos_emb(*normed, *table)]

        x = inputs_of(case, device)
        for got, wanted in zip(gradients(ours, x, case), gradients(theirs, x, case), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_diffusers_flux(device: str) -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    case = CASES["neighbours"]._replace(dtype=torch.float32)
    table = embeddings.get_1d_rotary_pos_embed(case.rotated, case.tokens[1], repeat_interleave_real=True, use_real=True)

    def theirs(leaves: Sequence[Tensor], table: Any, case: Case) -> Sequence[Tensor]:
        normed = [torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6) for x, w in zip(leaves[:2], leaves[2:], strict=True)]
        return [embeddings.apply_rotary_emb(x, table, sequence_dim=1) for x in normed]

    x = inputs_of(case, device)._replace(position_embeddings=tuple(t.to(device) for t in table))
    for got, wanted in zip(gradients(ours, x, case), gradients(theirs, x, case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


X, PACKED, WEIGHTS = zeros(1, 5, 2, 16), zeros(5, 2, 16), {"q_weight": zeros(16), "k_weight": zeros(16)}
TABLE = (zeros(5, 8), zeros(5, 8))
ERRORS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "dims": ((zeros(5, 16), zeros(5, 16), TABLE), {}, ValueError, r"q is .*accepted: \[b, s, h, d\]"),
    "other tokens": ((X, zeros(1, 6, 2, 16), TABLE), {}, ValueError, "k is .*except the heads"),
    "other dtype": ((X, X.half(), TABLE), {}, TypeError, "k has dtype torch.float16"),
    "nothing to do": ((X, X), {}, ValueError, "position_embeddings, q_weight and k_weight are None"),
    "one weight": ((X, X), {"k_weight": zeros(16)}, ValueError, "q_weight is None and k_weight"),
    "weight's size": ((X, X), WEIGHTS | {"k_weight": zeros(32)}, ValueError, r"k_weight is .*accepted: \[16\]"),
    "no pair": ((X, X, TABLE[0]), {}, TypeError, "position_embeddings is .*accepted: .cos, sin."),
    "other length": ((X, X, (zeros(6, 8), zeros(6, 8))), {}, ValueError, "cos of position_embeddings is .*position ids"),
    "odd": ((PACKED, PACKED, (zeros(5, 7), zeros(5, 7))), {}, ValueError, "an even last dim of at most 16"),
    "wide": ((PACKED, PACKED, (zeros(5, 18), zeros(5, 18))), {}, ValueError, "an even last dim of at most 16"),
    "unlike": ((PACKED, PACKED, (zeros(5, 8), zeros(1, 5, 8))), {}, ValueError, "one shape and one dtype"),
    "gradient": ((X, X, (zeros(5, 8), zeros(5, 8).requires_grad_())), {}, ValueError, "sin of .* requires a gradient"),
    "eps": ((X, X), WEIGHTS | {"eps": -1.0}, ValueError, "eps is -1.0"),
    "flag": ((X, X, TABLE), {"interleaved": "yes"}, TypeError, "interleaved is 'yes'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    arguments, options, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        qk_norm_rope(*arguments, **options)


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_these_kernels_compile_in_few_registers(capability: int) -> None:
    """The shapes of Qwen3, Qwen3.5 and FLUX, and a padded head dim. A processor holds all of its programs at a time."""
    launches = []
    for heads, heads_kv, head_dim, rotated, interleaved in (
        (32, 8, 128, 128, False),
        (16, 2, 256, 64, False),
        (24, 24, 128, 128, True),
        (32, 8, 96, 96, False),
    ):
        q, k = (torch.zeros(1, 64, h, head_dim, dtype=torch.bfloat16) for h in (heads, heads_kv))
        weight, table = torch.zeros(head_dim, dtype=torch.bfloat16), torch.zeros(1, 64, rotated)
        call = kernels.Call(q, k, table, table, weight, weight, kernels.Settings(1e-6, interleaved, False))
        with pretended_device(capability, 132), recorded_launches() as recorded:
            kernels.norm_rope(call)
            kernels.norm_rope_backward(call, (q, k))
        launches += recorded
    reports = compile_sound([request_for(launch, capability) for launch in launches])
    assert not any(report.spill_store_bytes for report in reports)
    assert max(report.registers for report in reports) <= 65536 // (128 * kernels.BLOCKS["backward"].programs)
