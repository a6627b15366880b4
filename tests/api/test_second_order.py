"""Forward-mode and second derivatives of attention, against numerical derivatives and plain torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import attention, call_cache
from flexattn.dispatch import eager_backend, second_order
from flexattn.testing import make_call, make_inputs

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(*, batch: int = 2, sq: int = 5, skv: int = 6, heads: int = 4, heads_kv: int = 2, fmt: str = "bshd") -> dict[str, Tensor]:
    """Returns q, k and v in a dense format; for thd, batch is 1 and sq and skv are totals."""
    tensors = {
        "q": randn(batch, sq, heads, 4),
        "k": randn(batch, skv, heads_kv, 4, seed=1),
        "v": randn(batch, skv, heads_kv, 3, seed=2),
    }
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
    return {name: t[0] if fmt == "thd" else t.permute(order[fmt]).contiguous() for name, t in tensors.items()}


def scaled_by(table: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score) * table[h, kv_idx] + table[h, q_idx] * score.square()

    return score_mod


def with_given_derivative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + torch.sin(score)


def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < 2) | (kv_idx <= q_idx)


# name -> (tensors that are differentiated, other arguments)
CASES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "plain": (qkv(), {}),
    **{f"{mask}, {fmt}": (qkv(fmt=fmt), {"attn_mask_type": mask, "qkv_format": fmt}) for mask, fmt in (
        ("no_mask", "sbhd"), ("causal", "bhsd"), ("causal_bottom_right", "bshd"))},
    "packed": (
        qkv(batch=1, fmt="thd"),
        {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32), "max_seqlen_q": 3, "max_seqlen_kv": 4}
        | {"cu_seqlens_kv": torch.tensor([0, 2, 6], dtype=torch.int32), "attn_mask_type": "padding_causal_bottom_right"},
    ),
    "padding": (
        qkv(),
        {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32)}
        | {"cu_seqlens_kv": torch.tensor([0, 6, 6], dtype=torch.int32)},
    ),
    "window": (qkv(sq=6), {"window_size": (1, 2)}),
    "rows without keys": (qkv(sq=6, skv=3), {"attn_mask_type": "causal_bottom_right"}),
    "bias": (qkv() | {"bias": randn(2, 4, 5, 6)}, {}),
    "shared bias before the scale": (qkv() | {"bias": randn(1, 4, 1, 6)}, {"bias_type": "pre_scale_bias", "softcap": 1.5}),
    "bias of groups": (qkv(batch=4, sq=3, skv=3) | {"bias": randn(2, 4, 3, 3)}, {}),
    "sink": (qkv() | {"softmax_offset": randn(4)}, {"attn_mask_type": "causal"}),
    "off by one": (qkv(), {"softmax_type": "off-by-one"}),
    "softcap": (qkv(), {"softcap": 0.7, "softmax_scale": 1.3}),
    "alibi": (qkv(), {"bias_type": "alibi"}),
    "lse": (qkv(), {"return_lse": True, "attn_mask_type": "causal"}),
    "captures": (qkv() | {"table": randn(4, 6)}, {"score_mod": scaled_by}),
    "alibi, off by one": (
        qkv(fmt="sbhd"), {"bias_type": "alibi", "softmax_type": "off-by-one", "qkv_format": "sbhd", "attn_mask_type": "causal"}
    ),
    "given derivative": (qkv(), {"score_mod": with_given_derivative}),
    "mask_mod": (qkv(), {"mask_mod": prefix}),
    "block mask": (qkv(), {"block_mask": create_block_mask(prefix, None, None, 5, 6, device="cpu", BLOCK_SIZE=(128, 128))}),
    "dropout": (qkv(), {"dropout_p": 0.3, "rng_state": torch.tensor([3, 5])}),
}  # fmt: skip
PACKED = CASES["packed"][1]
# Each feature once, in few calls.
COMBINED: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "packed, bias, sink, lse": (
        qkv(batch=1, fmt="thd") | {"bias": randn(1, 4, 3, 4), "softmax_offset": randn(4)},
        PACKED | {"return_lse": True, "softcap": 1.5, "bias_type": "pre_scale_bias"},
    ),
    "captures, mask_mod, window, dropout": (
        qkv(sq=6, fmt="bhsd") | {"table": randn(4, 6)},
        {"score_mod": scaled_by, "mask_mod": prefix, "window_size": (3, 1), "qkv_format": "bhsd"}
        | {"dropout_p": 0.3, "rng_state": torch.tensor([3, 5])},
    ),
}
# No combined case has these.
APART = ("padding", "rows without keys", "bias of groups", "alibi, off by one", "given derivative", "block mask")


def function_of(tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Returns a function of a case's tensors, and the tensors, which require gradients."""
    names = tuple(tensors)

    def run(*values: Tensor) -> Any:
        given = dict(zip(names, values, strict=True))
        arguments = {**options}
        if "table" in given:
            arguments["score_mod"] = options["score_mod"](given.pop("table"))
        result = attention(**given, **arguments)
        return tuple(result) if options.get("return_lse") else result

    return run, tuple(t.clone().requires_grad_() for t in tensors.values())


@pytest.mark.parametrize(
    "case",
    [
        next(iter(COMBINED)),
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*COMBINED][1:] + [*APART]),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES if case not in APART),
    ],
)
def test_derivatives_equal_numerical_ones(case: str) -> None:
    run, tensors = function_of(*(CASES | COMBINED)[case])
    fast: dict[str, Any] = {"fast_mode": True, "check_batched_grad": False, "check_undefined_grad": False}
    assert gradcheck(run, tensors, check_forward_ad=True, **fast)
    assert gradgradcheck(run, tensors, check_fwd_over_rev=True, **fast)


def test_small_blocks_sum_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tensors = function_of(*COMBINED["packed, bias, sink, lse"])
    along = tuple(randn(*t.shape, seed=7) for t in tensors)

    def both() -> Any:
        return torch.func.jvp(torch.func.grad(lambda *x: sum((t**3).sum() for t in run(*x)), (0, 1, 2, 3, 4)), tensors, along)

    whole = both()
    monkeypatch.setattr(eager_backend, "SCORE_BYTES", 1)
    torch.testing.assert_close(both(), whole)


def test_padding_is_not_read_and_gets_zeros() -> None:
    inputs = make_inputs("thd", lengths_q=[3, 0, 2], lengths_kv=[2, 3, 4], gap=2, dtype=F64)
    spec, x = make_call(inputs)
    nan = inputs.q[..., :1].isnan()
    along = [t.nan_to_num(1.0) if isinstance(t, Tensor) else t for t in second_order.inputs(x)]
    out, lse = second_order.tangent(spec, x, along)
    dout = torch.ones_like(out)
    found = second_order.double_backward(spec, x, dout, None, along, [t is not None for t in along])
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert (out * nan == 0).all()
    for t, given in zip(found.inputs[:3], (inputs.q, inputs.k, inputs.v), strict=True):
        assert t is not None
        assert t.isfinite().all()
        assert not t[given.isnan()].any()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in plain torch operations."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return (s.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
QKV = tuple(randn(2, 5, 3, 4, seed=seed) for seed in range(3))
ALONG = tuple(randn(2, 5, 3, 4, seed=seed) for seed in range(3, 6))
WEIGHT = randn(4, 4).requires_grad_()


def cubes(attend: Attend) -> Attend:
    return lambda q, k, v: attend(q, k, v).pow(3).sum()


def dual(attend: Attend) -> Any:
    with forward_ad.dual_level():
        out = attend(*(forward_ad.make_dual(x, t) for x, t in zip(QKV, ALONG, strict=True)))
        return forward_ad.unpack_dual(out)  # type: ignore[no-untyped-call]


def mean_flow(attend: Attend) -> Any:
    """The gradients of a loss of out and of its tangent."""
    out, tangent = torch.func.jvp(lambda q: attend(q @ WEIGHT, QKV[1] @ WEIGHT, QKV[2]), QKV[:1], ALONG[:1])
    stopped = torch.autograd.grad((out + tangent.detach()).square().sum(), WEIGHT, retain_graph=True)
    return stopped, torch.autograd.grad(tangent.square().sum(), WEIGHT)


def penalty(attend: Attend) -> Any:
    leaves = [t.clone().requires_grad_() for t in QKV]
    gradients = torch.autograd.grad(cubes(attend)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(t.square().sum() for t in gradients), leaves)


def checkpointed(attend: Attend) -> Any:
    """The gradient of a loss of a checkpoint with a jvp in it, and of a jvp with a checkpoint around it."""
    leaves = [t.clone().requires_grad_() for t in QKV]

    def block(*x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(attend, x, ALONG)
        return out + tangent.sin()

    return torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False).square().sum(), leaves)


def over_nothing(attend: Attend) -> Any:
    """Derivatives of no entries of q, and the gradients of zero that they have for k."""
    q, k, v = QKV[0][:, None][:0], *QKV[1:]

    def gradient(q: Tensor, k: Tensor) -> Any:
        return torch.func.grad(lambda q: cubes(attend)(q, k[:1], v[:1]))(q)

    tangents = torch.func.vmap(lambda q: torch.func.jvp(lambda q: attend(q, k[:1], v[:1]), (q,), (q,)))(q)
    second = torch.func.grad(lambda k: torch.func.vmap(gradient, (0, None))(q, k).sum())(k)
    return tangents, torch.func.vmap(gradient, (0, None), out_dims=1)(q, k), second


USES: dict[str, Callable[[Attend], Any]] = {
    "jvp": lambda attend: torch.func.jvp(attend, QKV, ALONG),
    "jvp of one tensor": lambda attend: torch.func.jvp(lambda k: attend(QKV[0], k, QKV[2]), QKV[1:2], ALONG[:1]),
    "dual tensors": dual,
    "grad": lambda attend: torch.func.grad(cubes(attend), (0, 1, 2))(*QKV),
    "jvp of grad": lambda attend: torch.func.jvp(torch.func.grad(cubes(attend), (0, 1, 2)), QKV, ALONG),
    "vjp of grad": lambda attend: torch.func.vjp(torch.func.grad(cubes(attend), (0, 1, 2)), *QKV)[1](ALONG),
    "grad of jvp": lambda attend: torch.func.grad(lambda *x: torch.func.jvp(attend, x, ALONG)[1].square().sum(), (0, 1, 2))(*QKV),
    "hessian": lambda attend: torch.func.hessian(lambda q: cubes(attend)(q, *(t[:1, :2, :1] for t in QKV[1:])))(QKV[0][:1, :2, :1]),
    "vmap of jvp": lambda attend: torch.func.vmap(lambda t: torch.func.jvp(lambda q: attend(q, *QKV[1:]), QKV[:1], (t,))[1])(
        torch.stack(ALONG)
    ),
    "vmap of grad": lambda attend: torch.func.vmap(torch.func.grad(lambda q: attend(q[None], *(t[:1] for t in QKV[1:])).sum()))(
        QKV[0]
    ),
    "vmap over nothing": over_nothing,
    "hvp": lambda attend: torch.autograd.functional.hvp(cubes(attend), QKV, ALONG)[1],
    "mean flow": mean_flow,
    "penalty": penalty,
    "checkpoint": checkpointed,
}


@pytest.mark.sample
@pytest.mark.parametrize("use", USES)
def test_transforms_equal_those_of_plain_operations(use: str) -> None:
    wanted = USES[use](plain)
    call_cache.clear_cache()
    for _ in range(3):  # later calls are kept ones
        torch.testing.assert_close(USES[use](ours), wanted, rtol=1e-9, atol=1e-9)


def penalty_of(q: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(ours(q, *QKV[1:]).pow(2).sum(), q, create_graph=True)
    return gradient.square().sum()


def test_third_derivatives_are_refused() -> None:
    q = QKV[0].clone().requires_grad_()
    (second,) = torch.autograd.grad(penalty_of(q), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivatives up to the second"):
        torch.autograd.grad(second.sum(), q)
    loss = torch.func.grad(lambda x: torch.func.grad(lambda y: ours(y, *QKV[1:]).pow(2).sum())(x).square().sum())
    with pytest.raises(RuntimeError, match="derivatives up to the second"):
        torch.func.jvp(loss, QKV[:1], ALONG[:1])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(ours(forward_ad.make_dual(q, ALONG[0]), *QKV[1:])).tangent
        with pytest.raises(RuntimeError, match=r"backward of a tangent after dual_level\(\), not in it"):
            torch.autograd.grad(tangent.square().sum(), q, retain_graph=True)
    torch.autograd.grad(tangent.square().sum(), q)


def test_forward_mode_twice_is_refused() -> None:
    def tangent(q: Tensor) -> Tensor:
        return torch.func.jvp(lambda q: ours(q, *QKV[1:]), (q,), ALONG[:1])[1]  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"forward-mode derivative of a forward-mode derivative.*jvp of torch\.func\.grad"):
        torch.func.jvp(tangent, QKV[:1], ALONG[:1])


def test_calls_that_do_not_combine_are_refused() -> None:
    half = [t.bfloat16() for t in QKV]
    with pytest.raises(RuntimeError, match="in FP8 has no forward-mode"):
        torch.func.jvp(lambda q: attention(q, *half[1:], fp8_recipe=flexattn.fp8.Recipe()), (half[0],), (half[0],))
    pool, table = randn(3, 128, 3, 4), torch.zeros(2, 1, dtype=torch.int32)
    used = torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="page_table"):
        torch.func.jvp(
            lambda q: attention(q, pool, pool, page_table=table, seqused_kv=used, attn_mask_type="padding"), QKV[:1], ALONG[:1]
        )
    with pytest.raises(RuntimeError, match=r"attention_backward\(\) has no derivative"):
        out, lse = attention(*QKV, return_lse=True)
        torch.func.jvp(lambda q: flexattn.attention_backward(q, *QKV, out, lse).dq, QKV[:1], ALONG[:1])


def sdpa_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.sdpa import scaled_dot_product_attention

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flex_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.flex import flex_attention

    def causal(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, score, float("-inf"))

    out: Any = flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=causal)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def flash_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)  # type: ignore[no-any-return]


def flash_packed_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.flash_attn import flash_attn_qkvpacked_func

    return flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True)  # type: ignore[no-any-return]


def xformers_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.xformers import memory_efficient_attention

    bias = torch.full((5, 5), float("-inf"), dtype=F64).triu(1)
    return memory_efficient_attention(q, k, v, attn_bias=bias.expand(2, 3, 5, 5))


def module_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = flexattn.nn.MultiheadAttention(12, 3, bias=False, batch_first=True, dtype=F64)
    torch.nn.init.eye_(module.out_proj.weight)
    state = {name: torch.eye(12, dtype=F64).repeat(3 if "in_proj" in name else 1, 1) for name in module.state_dict()}
    module.load_state_dict(state)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return module(*(t.flatten(2) for t in (q, k, v)), attn_mask=mask, need_weights=False)[0].view(2, 5, 3, 4)  # type: ignore[no-any-return]


def transformers_door(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flexattn.integrations.transformers import attention_forward

    module = torch.nn.Module()
    module.is_causal = True
    return attention_forward(module, *(t.transpose(1, 2) for t in (q, k, v)), None)[0]  # type: ignore[no-any-return]


DOORS = [sdpa_door, flex_door, flash_door, flash_packed_door, xformers_door, module_door, transformers_door]


@pytest.mark.sample("door", "use")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "use", ["jvp of grad", "mean flow", *(pytest.param(use, marks=pytest.mark.slow) for use in ("jvp", "penalty"))]
)
def test_doors(door: Attend, use: str) -> None:
    wanted = USES[use](plain)
    for _ in range(2):
        torch.testing.assert_close(USES[use](door), wanted, rtol=1e-9, atol=1e-9)


def with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, score_mod=scaled_by(table), bias=bias)  # type: ignore[no-any-return]


def with_table_plainly(q: Tensor, k: Tensor, v: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = torch.tanh(s) * table[:, None, :] + table[:, :, None] * s.square() + bias
    return (s.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("use", ["jvp", "grad of jvp", "jvp of grad"])
def test_captures_under_a_transform(use: str) -> None:
    """No tensor requires a gradient outside of the transform, and the captures and the bias are tensors of it."""
    x, along = (*QKV, randn(3, 5), randn(1, 3, 5, 5)), (*ALONG, randn(3, 5, seed=9), randn(1, 3, 5, 5, seed=9))

    def run(attend: Callable[..., Tensor]) -> Any:
        def tangent(*x: Tensor) -> Any:
            return torch.func.jvp(attend, x, along)[1]

        def gradient(*x: Tensor) -> Any:
            return torch.func.grad(lambda table, bias: attend(*x[:3], table, bias).pow(3).sum(), (0, 1))(*x[3:])

        if use == "jvp":
            return torch.func.jvp(lambda table: attend(*x[:3], table, x[4]), x[3:4], along[3:4]), tangent(*x)
        if use == "jvp of grad":
            return torch.func.jvp(gradient, x, along)
        return torch.func.grad(lambda *x: tangent(*x).square().sum(), (0, 1, 2, 3, 4))(*x)

    torch.testing.assert_close(run(with_table), run(with_table_plainly), rtol=1e-9, atol=1e-9)


def test_a_bias_of_a_transform_alone() -> None:
    bias, along = randn(1, 3, 5, 5), randn(1, 3, 5, 5, seed=9)

    def gradient(attend: Callable[..., Tensor]) -> Any:
        def tangent(bias: Tensor) -> Any:
            return torch.func.jvp(lambda b: attend(*QKV, torch.zeros(3, 5, dtype=F64), b), (bias,), (along,))[1].square().sum()

        return torch.func.grad(tangent)(bias)

    def with_bias(q: Tensor, k: Tensor, v: Tensor, _: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, softmax_scale=0.0, bias=bias)  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(with_bias), gradient(with_table_plainly), rtol=1e-9, atol=1e-9)


def test_no_backend_sees_dual_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager backend's operations would pass tangents on; kernels would lose them."""
    monkeypatch.setattr(second_order, "tangent", lambda spec, x, along: (torch.zeros_like(x.q), x.q.new_zeros(2, 3, 5)))
    assert not dual(ours).tangent.any()


def test_the_first_backward_does_not_run_again_in_the_second() -> None:
    """It is behind out, which is a function of the inputs: its derivative is in the second backward."""
    leaves = [torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out, dout, runs = attention(*leaves), torch.randn(1, 8, 2, 16, dtype=torch.float64), []
    gradients = torch.autograd.grad(out, leaves, dout, create_graph=True)
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda *_: runs.append(1))
    torch.autograd.grad(gradients, leaves, gradients, retain_graph=True)
    assert not runs
    torch.autograd.grad(out, leaves, dout)
    assert runs == [1]


@pytest.mark.slow
def test_torch_compile_around_a_jvp() -> None:
    torch.compiler.reset()

    def step(attend: Attend) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(q: Tensor, t: Tensor) -> Tensor:
            out, tangent = torch.func.jvp(lambda q: attend(q @ WEIGHT, QKV[1], QKV[2]), (q,), (t,))
            return (out + tangent.sin()).square().mean()

        return loss

    compiled = torch.compile(step(ours), backend="aot_eager")
    wanted = step(plain)(QKV[0], ALONG[0])
    for _ in range(2):
        found = compiled(QKV[0], ALONG[0])
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, WEIGHT), torch.autograd.grad(wanted, WEIGHT, retain_graph=True))
