"""Lists of keys in JAX: results and gradients are torch's, on the host and by XLA's launches, in jit, vmap and forward mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from tests.support.key_lists import draw_lists

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import cuda  # noqa: E402


def array(t: Tensor) -> Any:
    return jnp.asarray(t.detach().numpy())


def to_torch(x: Any) -> Tensor:
    return torch.from_numpy(jax.device_get(x).copy())


def drawn(heads: int, block: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns q, k and v, and the arguments of a causal call; heads: of the lists, 0: all key heads share them."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(2, 10, h, 16, generator=generator, requires_grad=True) for h in (4, 2, 2))
    indices, counts = draw_lists((2, 10), heads, 10 // block, 5, repeats=True)
    options: dict[str, Any] = {"kv_indices": indices, "kv_index_counts": counts, "causal": True}
    return [q, k, v], options | ({"kv_block_size": (1, block)} if block > 1 else {})


def of_jax(options: dict[str, Any]) -> dict[str, Any]:
    return {name: array(value) if isinstance(value, Tensor) else value for name, value in options.items()}


def both(heads: int, block: int, transform: Any = lambda function: function, **more: Any) -> None:
    """Compares out and gradients with torch's."""
    leaves, options = drawn(heads, block)
    wanted = flexattn.attention(*leaves, backend="eager", **options)
    out, pull = jax.vjp(transform(lambda *x: fj.attention(*x, **of_jax(options), **more)), *map(array, leaves))
    torch.testing.assert_close(to_torch(out), wanted.detach(), rtol=1e-5, atol=1e-5)
    dout = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    for got, right in zip(pull(array(dout)), torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(to_torch(got), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "block"), [(2, 1), (0, 4)])
def test_on_the_host(heads: int, block: int) -> None:
    both(heads, block)
    both(heads, block, jax.jit)


def test_launches_in_xlas_memory(interpreted: list[Any]) -> None:
    both(2, 1, backend="triton")
    names = {one.launch.kernel.__name__ for one in interpreted}
    assert {"_sparse_fwd_kernel", "_sparse_bwd_dq_kernel"} <= names


def test_launches_of_packed_sequences_in_xlas_memory(interpreted: list[Any]) -> None:
    leaves, options = drawn(2, 1)
    lists = {name: array(options[name].flatten(0, 1)) for name in ("kv_indices", "kv_index_counts")}
    packed = {"qkv_format": "thd", "cu_seqlens": jnp.array([0, 10, 20], jnp.int32), "max_seqlen": 10, "backend": "triton"}

    def loss(*x: Any) -> Any:
        return (fj.attention(*x, causal=True, **lists, **packed) ** 2).sum()

    found = jax.grad(loss, (0, 1, 2))(*(array(t.flatten(0, 1)) for t in leaves))
    (flexattn.attention(*leaves, backend="eager", **options) ** 2).sum().backward()
    for got, t in zip(found, leaves, strict=True):
        assert t.grad is not None
        torch.testing.assert_close(to_torch(got), t.grad.flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_launches_that_xla_does_not_make_are_refused(interpreted: list[Any]) -> None:
    with pytest.raises(flexattn.BackendError, match="no GPU has run them for kv_indices in JAX; backend='triton' runs them"):
        both(2, 1)
    with pytest.raises(flexattn.BackendError, match="deterministic=True sorts kv_indices"):
        both(2, 1, backend="triton", deterministic=True)
    assert not interpreted


def test_vmap_runs_each_call() -> None:
    leaves, options = drawn(2, 1)
    arrays = of_jax(options)
    kept = {"causal": True}

    def one(q: Any, k: Any, v: Any, indices: Any, counts: Any) -> Any:
        return fj.attention(q[None], k[None], v[None], kv_indices=indices[None], kv_index_counts=counts[None], **kept)[0]

    out = jax.vmap(one)(*map(array, leaves), arrays["kv_indices"], arrays["kv_index_counts"])
    torch.testing.assert_close(to_torch(out), flexattn.attention(*leaves, **options).detach(), rtol=1e-5, atol=1e-5)


def test_the_tangent_is_the_gradients() -> None:
    leaves, options = drawn(2, 1)
    arrays = of_jax(options)

    def loss(*x: Any) -> Any:
        return (fj.attention(*x, **arrays) ** 2).sum()

    x = tuple(map(array, leaves))
    _, tangent = jax.jvp(loss, x, x)
    inner = sum(float((a * b).sum()) for a, b in zip(jax.grad(loss, (0, 1, 2))(*x), x, strict=True))
    assert abs(float(tangent) - inner) < 1e-3 * abs(inner)


def test_lists_of_query_blocks_are_refused() -> None:
    leaves, _ = drawn(2, 1)
    with pytest.raises(ValueError, match=r"kv_block_size is 16; accepted for JAX arrays: \(1, keys\)"):
        fj.attention(*map(array, leaves), kv_indices=jnp.zeros((1, 1, 1, 1), jnp.int32), kv_block_size=16)


def test_a_cuda_device_may_compile_lists() -> None:
    leaves, options = drawn(2, 1)
    q, k, v = (array(t).astype(jnp.bfloat16) for t in leaves)
    with cuda.compiled_for((9, 0), processors=132):
        text = str(fj.explain(q, k, v, **of_jax(options), backend="triton"))
    assert "kv_indices" in text
