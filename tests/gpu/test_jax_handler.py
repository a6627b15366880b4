"""cuDNN and the eager backend by name from JAX on a GPU: the reference's numbers, torch's bits, and many calls at once."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import pytest
import torch

from flexattn.testing import make_inputs
from tests.gpu.test_gpu import randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from tests.gpu.test_jax import CASES, by_torch, qkv, to_jax  # noqa: E402

REPEATS = 30
CAUSAL = {"attn_mask_type": "causal", "deterministic": True}


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
        {"bias_type": "post_scale_bias", "bias": torch.linspace(-2, 2, 4 * 600 * 600).view(1, 4, 600, 600).bfloat16()},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_reference(backend: str, arguments: dict[str, Any]) -> None:
    from tests.jax.test_attention import check

    inputs = make_inputs(lengths_q=[600, 600], dtype=torch.bfloat16, head_dim_qk=64, head_dim_v=64)
    check(inputs, **arguments)


def both(q: Any, k: Any, v: Any, dout: Any, **arguments: Any) -> Any:
    out, pull = jax.vjp(lambda *x: fj.attention(*x, **arguments), q, k, v)
    return out, *pull(dout)


@pytest.mark.parametrize("name", ["causal", "causal, d 64", "grouped heads, window", "packed"])
def test_torchs_bits(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "grouped heads, window":
        tensors, arguments = qkv(h=16, h_kv=4), {"attn_mask_type": "causal", "window_size": (200, 0)}
    else:
        tensors, arguments = CASES[name]()
    dout = randn(*tensors[0].shape[:-1], tensors[2].shape[-1], seed=7)
    import flexattn

    attention = flexattn.attention
    monkeypatch.setattr(flexattn, "attention", lambda **given: attention(**given | {"backend": backend}))
    expected = by_torch(tensors, dout, arguments)
    given = {n: to_jax(x) for n, x in (arguments | {"deterministic": True}).items()}
    static = {n: x for n, x in given.items() if not isinstance(x, jax.Array)}
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.Array)}
    call = jax.jit(lambda *x, **arrays: both(*x, **arrays, **static))
    leaves = [*map(to_jax, tensors), to_jax(dout)]
    for _ in range(REPEATS):
        for which, a, b in zip(("out", "dq", "dk", "dv"), call(*leaves, **arrays), expected, strict=True):
            a = torch.from_dlpack(a)
            assert torch.equal(a, b), f"{which} differs from torch's by {(a.float() - b.float()).abs().max().item()}"


def test_scan_and_many_calls_at_once(backend: str) -> None:
    """Which share torch's memory on XLA's stream."""
    q, k, v = map(to_jax, qkv(s=512))
    call = jax.jit(lambda q: both(q, k, v, q, **CAUSAL))
    inputs = [q + i for i in range(8)]
    expected = [jax.block_until_ready(call(x)) for x in inputs]
    at_once = [call(x) for x in inputs]
    _, stacked = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, both(x, k, v, x, **CAUSAL)), 0, xs))(jnp.stack(inputs))
    for i, one in enumerate(expected):
        for which, (a, b) in enumerate(zip(one, at_once[i], strict=True)):
            assert (a == b).all()
            assert (a == stacked[which][i]).all()


def test_explain(backend: str) -> None:
    q, k, v = map(to_jax, qkv())
    found = fj.explain(q, k, v, attn_mask_type="causal")
    assert found.forward.backend == found.backward.backend == backend
