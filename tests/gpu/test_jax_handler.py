"""cuDNN and the eager backend by name from JAX on a GPU: the reference's numbers, torch's bits, and many calls at once."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import pytest
import torch

import flexattn
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.gpu.test_gpu import randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from tests.gpu.test_jax import CASES, qkv, to_jax  # noqa: E402
from tests.jax.test_attention import to_torch  # noqa: E402

REPEATS = 30


def on_gpu(t: torch.Tensor) -> Any:
    return to_jax(t.cuda())


@pytest.fixture(params=["cudnn", "eager"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from flexattn.dispatch import cudnn_backend
    from flexattn.jax import cuda

    if cuda.device() is None:
        pytest.skip("JAX has no CUDA device: pip install 'jax[cuda13]>=0.11.1'")
    name = str(request.param)
    if name == "cudnn" and (reason := cudnn_backend.library_error()):
        pytest.skip(reason)
    monkeypatch.setenv("FLEXATTN_BACKEND", name)
    jax.clear_caches()
    return name


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask_type": "causal"},
        {"attn_mask_type": "causal", "window_size": (100, 0)},
        {"bias_type": "post_scale_bias", "bias": torch.linspace(-2, 2, 4 * 640 * 640).view(1, 4, 640, 640).bfloat16()},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_reference(backend: str, arguments: dict[str, Any]) -> None:
    """Without a gradient of lse, which cuDNN does not support."""
    inputs = make_inputs(lengths_q=[640, 640], dtype=torch.bfloat16, head_dim_qk=64, head_dim_v=64)
    spec, x = make_call(inputs, **arguments)
    dout = make_dout(inputs)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    static = {n: t for n, t in arguments.items() if n not in tensors}

    def gradients(leaves: Any, dout: Any) -> Any:
        _, pull = jax.vjp(lambda x: fj.attention(**x, **static), leaves)
        return pull(dout)[0]

    leaves = {n: on_gpu(t) for n, t in tensors.items()}
    out, lse = jax.jit(lambda x: fj.attention(**x, **static, return_lse=True))(leaves)
    exact, budget = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    for name, *three in zip(("out", "lse"), (out, lse), exact, budget, strict=False):
        check_close(name, to_torch(three[0]), *three[1:])
    exact_g, budget_g = (reference_gradients(spec, x, dout, None, dtype) for dtype in (torch.float64, spec.dtype))
    for name, found in jax.jit(gradients)(leaves, on_gpu(dout)).items():
        field = f"d{name}"
        check_close(field, to_torch(found), getattr(exact_g, field), getattr(budget_g, field), factor=GRADIENT_FACTOR)


def test_what_cudnn_does_not_take_is_refused_when_it_is_compiled(backend: str) -> None:
    if backend != "cudnn":
        pytest.skip("the eager backend takes all of it")
    q, k, v = map(to_jax, qkv(s=512))
    for text, call in (
        ("deterministic backward", lambda q: both(q, k, v, q, deterministic=True)),
        ("takes no gradient of lse", jax.grad(lambda q: fj.attention(q, k, v, return_lse=True)[1].sum())),
        ("no softcap", lambda q: fj.attention(q, k, v, softcap=3.0)),
    ):
        with pytest.raises(flexattn.BackendError, match=text):
            jax.jit(call).lower(q)


def both(q: Any, k: Any, v: Any, dout: Any, **arguments: Any) -> Any:
    out, pull = jax.vjp(lambda *x: fj.attention(*x, **arguments), q, k, v)
    return out, *pull(dout)


def close(a: Any, b: Any) -> bool:
    a, b = (x.astype(jnp.float32) for x in (a, b))
    return bool(abs(a - b).max() <= 2**-6 * abs(b).max())


@pytest.mark.parametrize("name", ["causal", "causal, d 64", "grouped heads, window", "packed"])
def test_torchs_bits(backend: str, name: str) -> None:
    """The gradients have them too if the backend is deterministic; cuDNN is not."""
    if name == "grouped heads, window":
        tensors, arguments = qkv(h=16, h_kv=4), {"attn_mask_type": "causal", "window_size": (200, 0)}
    else:
        tensors, arguments = CASES[name]()
    dout = randn(*tensors[0].shape[:-1], tensors[2].shape[-1], seed=7)
    leaves = [t.detach().requires_grad_() for t in tensors]
    by_torch = flexattn.attention(*leaves, **arguments, backend=backend)
    assert isinstance(by_torch, torch.Tensor)
    expected = [to_jax(t) for t in (by_torch, *torch.autograd.grad(by_torch, leaves, dout))]
    given = {n: to_jax(x) for n, x in arguments.items()}
    static = {n: x for n, x in given.items() if not isinstance(x, jax.Array)}
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.Array)}
    call = jax.jit(lambda *x, **arrays: both(*x, **arrays, **static))
    operands = [*map(to_jax, tensors), to_jax(dout)]
    for _ in range(REPEATS):
        out, *gradients = call(*operands, **arrays)
        assert (out == expected[0]).all()
        for which, a, b in zip(("dq", "dk", "dv"), gradients, expected[1:], strict=True):
            assert (a == b).all() if backend == "eager" else close(a, b), f"{which} differs by {abs(a - b).max()}"


def test_scan_and_many_calls_at_once(backend: str) -> None:
    """They share torch's memory on XLA's stream."""
    q, k, v = map(to_jax, qkv(s=512))
    call = jax.jit(lambda q: both(q, k, v, q, attn_mask_type="causal"))
    inputs = [q + i for i in range(8)]
    expected = [jax.block_until_ready(call(x)) for x in inputs]
    at_once = [call(x) for x in inputs]
    step = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, both(x, k, v, x, attn_mask_type="causal")), 0, xs))
    _, stacked = step(jnp.stack(inputs))
    for i, one in enumerate(expected):
        for which, a in enumerate(one):
            for b in (at_once[i][which], stacked[which][i]):
                assert (a == b).all() if which == 0 or backend == "eager" else close(a, b)


def test_explain(backend: str) -> None:
    q, k, v = map(to_jax, qkv())
    found = fj.explain(q, k, v, attn_mask_type="causal")
    assert found.forward.backend == found.backward.backend == backend
