"""Calls of flexattn.jax.attention on a CPU: results and gradients against the reference in fp64, and errors as in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexattn
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.conftest import FreshPython
from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

LENGTHS = [5, 0, 19]


def to_jax(value: Any) -> Any:
    """Returns a tensor as an array of its dtype, and any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.dtype is torch.bfloat16:
        return jnp.asarray(value.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(value.contiguous().numpy())


def to_torch(array: Any) -> torch.Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(array))


def check(inputs: Any, **arguments: Any) -> None:
    """Compares out, lse, max_logit and every gradient with the reference."""
    spec, x = make_call(inputs, **arguments)
    dout, dlse = make_dout(inputs), make_dlse(inputs)
    named = {name: to_jax(value) for name, value in {**inputs._asdict(), **arguments}.items()}
    leaves = {name: named.pop(name) for name in ("q", "k", "v", "bias", "softmax_offset") if named.get(name) is not None}
    mask = arguments.get("attn_mask_type") or ("padding" if inputs.cu_seqlens_q is not None else "no_mask")
    named["attn_mask_type"] = mask
    if arguments.get("rng_state") is not None:  # the same words, as a key's
        words = arguments["rng_state"].view(torch.int32).numpy().view(np.uint32)
        named["rng_state"] = jnp.asarray(words)

    def call(leaves: Any) -> Any:
        return fj.attention(**leaves, **named, return_lse=True, return_max_logit=True)

    @jax.jit
    def both(leaves: Any) -> Any:
        results, pull = jax.vjp(call, leaves)
        (gradients,) = pull((to_jax(dout), to_jax(dlse), jnp.zeros_like(results[2])))
        return results, gradients

    results, gradients = both(leaves)
    exact, budget = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    for name, *three in zip(("out", "lse", "max_logit"), results, exact, budget, strict=True):
        check_close(name, to_torch(three[0]), *three[1:])
    exact_g, budget_g = (reference_gradients(spec, x, dout, dlse, dtype) for dtype in (torch.float64, spec.dtype))
    for name, found in gradients.items():
        field = f"d{name}"
        check_close(field, to_torch(found), getattr(exact_g, field), getattr(budget_g, field), factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"])
def test_formats_with_padding(fmt: str) -> None:
    inputs = make_inputs(fmt, lengths_q=LENGTHS, lengths_kv=[7, 3, 13], padding=True, gap=2, head_dim_v=8)
    check(inputs, attn_mask_type="padding_causal")


def test_bfloat16() -> None:
    check(make_inputs(lengths_q=[33], dtype=torch.bfloat16), attn_mask_type="causal")


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_size": (5, 2)},
        {"attn_mask_type": "causal_bottom_right", "softcap": 3.0, "softmax_scale": 0.5},
        {"bias_type": "alibi", "attn_mask_type": "causal"},
        {"bias_type": "post_scale_bias", "bias": (1, 4, 17, 1)},
        {"bias_type": "pre_scale_bias", "bias": (2, 1, 17, 23), "softmax_type": "off-by-one"},
        {"softmax_type": "learnable", "softmax_offset": (4,)},
        {"dropout_p": 0.25, "rng_state": torch.tensor([2**33 + 5, 0])},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
def test_arguments(arguments: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    given = {
        name: torch.randn(value, generator=generator) if name in ("bias", "softmax_offset") else value
        for name, value in arguments.items()
    }
    if given.get("bias_type") == "alibi":
        given["alibi_slopes"] = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])  # the default
        inputs = make_inputs(lengths_q=[17, 17], lengths_kv=[23, 23])
        without = {name: to_jax(t) for name, t in inputs._asdict().items()}
        a = fj.attention(**without, bias_type="alibi", attn_mask_type="causal")
        b = fj.attention(**without, bias_type="alibi", attn_mask_type="causal", alibi_slopes=to_jax(given["alibi_slopes"]))
        assert jnp.array_equal(a, b)
    check(make_inputs(lengths_q=[17, 17], lengths_kv=[23, 23]), **given)


def qkv(*shape: int, count: int = 3, dtype: Any = np.float32) -> list[Any]:
    return [normal(seed, *(shape or (2, 21, 4, 16))).astype(dtype) for seed in range(count)]


def test_fp8_equals_torch() -> None:
    """Its FP8 is compared with the reference in its own tests."""
    q, k, v = qkv(dtype=jnp.bfloat16)
    recipe = flexattn.fp8.Recipe()
    out, pull = jax.vjp(lambda *x: fj.attention(*x, attn_mask_type="causal", fp8_recipe=recipe), q, k, v)
    leaves = [to_torch(x).requires_grad_() for x in (q, k, v)]
    expected = flexattn.attention(*leaves, attn_mask_type="causal", fp8_recipe=recipe)
    assert torch.equal(to_torch(out), expected)
    for a, b in zip(pull(out), torch.autograd.grad(expected, leaves, expected.detach()), strict=True):
        assert torch.equal(to_torch(a), b)


def test_numpy_arrays_have_the_dtypes_that_jax_gives_them() -> None:
    q, k, v = qkv()
    table = np.arange(4.0)
    out = fj.attention(np.asarray(q, np.float64), k, v, score_mod=lambda s, b, h, i, j: s + jnp.asarray(table)[h] + table[1])
    assert out.dtype == jnp.float32
    assert jnp.allclose(out, fj.attention(q, k, v), atol=1e-6)  # one number for all keys of a row


def test_only_wanted_gradients_are_asked_for() -> None:
    q, k, v = qkv()
    bias = jnp.zeros((1, 1, 21, 21))

    def loss(q: Any, bias: Any) -> Any:
        return fj.attention(q, k, v, bias=bias, bias_type="post_scale_bias").sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(q, bias))
    assert "needs_bias_grad=False" in text
    assert "needs_bias_grad=True" in str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, bias))


def test_gradient_of_lse_alone() -> None:
    q, k, v = qkv()
    found = jax.grad(lambda q: fj.attention(q, k, v, return_lse=True)[1].sum())(q)
    leaf = to_torch(q).requires_grad_()
    flexattn.attention(leaf, to_torch(k), to_torch(v), return_lse=True)[1].sum().backward()
    assert leaf.grad is not None
    assert torch.equal(to_torch(found), leaf.grad)


def test_scan_and_checkpoint() -> None:
    q, k, v = qkv()

    def layer(x: Any, _: Any) -> Any:
        return x + fj.attention(x, k, v, attn_mask_type="causal"), None

    def loop(x: Any) -> Any:
        for _ in range(3):
            x, _ = layer(x, None)
        return (x**2).sum()

    def scanned(x: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0] ** 2).sum()

    a, b = jax.jit(jax.grad(loop))(q), jax.jit(jax.grad(scanned))(q)
    assert jnp.allclose(a, b, rtol=1e-6, atol=1e-6)
    policy = jax.checkpoint_policies.save_only_these_names("flexattn_out", "flexattn_lse")
    kept = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda q: (fj.attention(q, k, v) ** 2).sum(), policy=policy)))(q)
    assert str(kept).count("flexattn_forward") == 1


@pytest.mark.parametrize(
    "make",
    [jax.random.key, jax.random.PRNGKey, partial(jax.random.key, impl="rbg")],
    ids=["key", "words", "rbg"],
)
def test_dropout_depends_on_the_key_alone(make: Callable[[int], Any]) -> None:
    q, k, v = qkv()
    key = make(7)
    a, b = (jax.jit(lambda key: fj.attention(q, k, v, dropout_p=0.5, rng_state=key))(key) for _ in range(2))
    assert jnp.array_equal(a, b)
    assert not jnp.array_equal(a, fj.attention(q, k, v, dropout_p=0.5, rng_state=jax.random.key(8)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"attn_mask_type": "diagonal"}, ValueError, "attn_mask_type is 'diagonal'; accepted: no_mask"),
        ({"k": np.ones((2, 21, 3, 16), np.float32)}, ValueError, "v has heads 4 and k has 3 (format bshd)"),
        ({"q": np.ones((2, 21, 4), np.float32)}, ValueError, "q has 3 dims, shape (2, 21, 4); accepted: the 4 dims of bshd"),
        ({"q": None}, TypeError, "q is None"),
        ({"bias": [1.0]}, TypeError, "bias is [1.0] (list); accepted: a JAX or NumPy array"),
        ({"v": np.ones((2, 21, 4, 16), np.uint16)}, TypeError, "v has dtype uint16; accepted:"),
        ({"dropout_p": 0.5}, ValueError, "rng_state is None with dropout_p > 0; accepted: a key of jax.random"),
        ({"dropout_p": np.float32(0.5)}, ValueError, "rng_state is None with dropout_p > 0; accepted: a key of jax.random"),
        ({"dropout_p": 0.5, "rng_state": np.zeros(2, np.int64)}, TypeError, "rng_state is int64 of shape (2,); accepted: one key"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"block_mask": 3}, TypeError, "block_mask is a int; accepted: what flexattn.jax.create_block_mask gives"),
        ({"fp8_state": 3}, TypeError, "fp8_state is 3 (int); accepted: a flexattn.jax.fp8.DelayedScaling, or None"),
        ({"score_mod_tensors": (np.ones(3),)}, ValueError, "score_mod_tensors is given without a score_mod"),
        ({"backend": "fast"}, ValueError, "backend is 'fast'; accepted:"),
    ],
    ids=lambda value: None,
)
def test_errors(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = qkv()
    with pytest.raises(error) as caught:
        jax.jit(lambda: fj.attention(**({"q": q, "k": k, "v": v} | arguments)))()
    assert text in str(caught.value)


def test_a_backend_that_cannot_run_says_why_when_it_is_compiled() -> None:
    q, k, v = qkv()
    with pytest.raises(flexattn.BackendError, match="cuDNN runs on CUDA devices"):
        jax.jit(lambda q: fj.attention(q, k, v, backend="cudnn")).lower(q)


def test_a_failure_at_run_time_comes_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexattn import ops

    def fail(*_: Any) -> Any:
        raise ValueError("planted")

    q, k, v = qkv()
    monkeypatch.setattr(ops, "run_forward", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: planted"):
        jax.block_until_ready(fj.attention(q, k, v, softcap=3.0))


def test_explain_names_the_backend() -> None:
    q, k, v = qkv()
    found = fj.explain(q, k, v, attn_mask_type="causal")
    assert (found.forward.backend, found.backward.backend) == ("eager", "eager")
    with pytest.raises(TypeError, match="was given colour"):
        fj.explain(q, k, v, colour=3)


def test_flexattn_does_not_import_jax(forked_python: Any) -> None:
    ran = forked_python("-c", "import sys, flexattn; sys.exit('jax' in sys.modules)")
    assert ran.returncode == 0, ran.stderr


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from jax._src import xla_bridge
print(sorted(xla_bridge._backends))
"""


def test_collecting_the_gpu_tests_starts_no_client_of_jax(forked_python: FreshPython) -> None:
    # Its threads would end the captures of other tests.
    files = sorted((Path(__file__).parents[1] / "gpu").glob("test_jax*.py"))
    ran = forked_python("-c", IMPORTS, *(f"tests.gpu.{file.stem}" for file in files))
    assert len(files) > 4
    assert ran.stdout == "[]\n", ran.stderr
