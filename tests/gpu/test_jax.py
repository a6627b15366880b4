"""flexattn.jax on a GPU: the reference's numbers, torch's bits, no copies by XLA, and calls inside scan and shard_map."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import numpy as np
import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.testing import make_inputs
from tests.gpu.test_gpu import offsets, randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

REPEATS = 30
LENGTHS = (300, 0, 211, 513)


@pytest.fixture(autouse=True)
def _needs_jax_on_cuda() -> None:
    from flexattn.jax import cuda

    if cuda.device() is None:
        pytest.skip("JAX has no CUDA device: pip install 'jax[cuda13]>=0.11.1'")


def to_jax(value: Any) -> Any:
    return jax.dlpack.from_dlpack(value.detach().contiguous()) if isinstance(value, Tensor) else value


def qkv(b: int = 2, s: int = 1024, h: int = 8, d: int = 128, h_kv: int | None = None, d_v: int | None = None) -> list[Tensor]:
    sizes = ((h, d), (h_kv or h, d), (h_kv or h, d_v or d))
    return [randn(b, s, *size, seed=seed) for seed, size in enumerate(sizes)]


def packed() -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [randn(sum(LENGTHS), heads, 64, seed=heads) for heads in (8, 4, 4)]
    lengths = {"cu_seqlens_q": offsets(LENGTHS), "cu_seqlens_kv": offsets(LENGTHS), "max_seqlen_q": 513, "max_seqlen_kv": 513}
    return tensors, {"qkv_format": "thd", "attn_mask_type": "padding_causal", **lengths}


CAUSAL = {"attn_mask_type": "causal"}
CASES: dict[str, Any] = {
    "causal": lambda: (qkv(), CAUSAL),
    "causal, d 64": lambda: (qkv(h=16, d=64), CAUSAL),
    "causal, d 256": lambda: (qkv(s=4096, d=256), CAUSAL),
    "causal, d 192 and 128": lambda: (qkv(s=4096, d=192, d_v=128), CAUSAL),
    "causal, 4096 tokens": lambda: (qkv(s=4096), CAUSAL),
    "full, 160 tokens": lambda: (qkv(s=160, d=64), {}),
    "grouped heads, window, softcap": lambda: (qkv(h=16, h_kv=4), {**CAUSAL, "window_size": (200, 0), "softcap": 30.0}),
    "ALiBi": lambda: (qkv(), {**CAUSAL, "bias_type": "alibi", "alibi_slopes": torch.rand(8, device="cuda")}),
    "bias": lambda: (qkv(), {"bias_type": "post_scale_bias", "bias": randn(1, 8, 1024, 1024, seed=9)}),
    "sink": lambda: (qkv(), {**CAUSAL, "softmax_type": "learnable", "softmax_offset": torch.rand(8, device="cuda")}),
    "packed": packed,
}


def by_torch(leaves: list[Tensor], dout: Tensor, arguments: dict[str, Any]) -> list[Tensor]:
    """Returns out, and the gradients of leaves: q, k, v, and the bias or offset if there is one."""
    names = ("q", "k", "v", "bias", "softmax_offset")
    given = dict(zip(("q", "k", "v"), leaves, strict=True)) | arguments
    wanted = {name: given[name].detach().requires_grad_() for name in names if isinstance(given.get(name), Tensor)}
    out = flexattn.attention(**(given | wanted), backend="triton", deterministic=True)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, list(wanted.values()), dout)]


def by_jax(arguments: dict[str, Any]) -> Any:
    """Returns the same by name, as a compiled function of the leaves and the other arrays by name, and dout."""
    static = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}

    @jax.jit
    def both(leaves: Any, others: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda x: fj.attention(**x, **others, **static, deterministic=True), leaves)
        return {"out": out, **pull(dout)[0]}

    return both


@pytest.mark.parametrize("name", CASES)
def test_torchs_bits(name: str) -> None:
    tensors, arguments = CASES[name]()
    dout = randn(*tensors[0].shape[:-1], tensors[2].shape[-1], seed=7)
    expected = by_torch(tensors, dout, arguments)
    arrays = {n: to_jax(x) for n, x in arguments.items() if isinstance(x, Tensor)}
    leaves = dict(zip(("q", "k", "v"), map(to_jax, tensors), strict=True))
    leaves |= {n: arrays.pop(n) for n in ("bias", "softmax_offset") if n in arrays}
    call = by_jax(arguments)
    for _ in range(REPEATS):
        got = call(leaves, arrays, to_jax(dout))
        for which, b in zip(("out", *leaves), expected, strict=True):
            a = torch.from_dlpack(got[which])
            assert torch.equal(a, b), f"{which} differs from torch's by {(a.float() - b.float()).abs().max().item()}"


@pytest.mark.parametrize(
    "arguments",
    [{"attn_mask_type": "causal"}, {"window_size": (100, 50), "softcap": 20.0}, {"dropout_p": 0.25}],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_reference(arguments: dict[str, Any], head_dim: int) -> None:
    """The call is not deterministic: the backward runs in one pass."""
    from tests.jax.test_attention import check

    more = {"rng_state": torch.tensor([2**33 + 5, 0])} if "dropout_p" in arguments else {}
    inputs = make_inputs(lengths_q=[600, 600], dtype=torch.bfloat16, head_dim_qk=head_dim, head_dim_v=head_dim)
    check(inputs, **arguments, **more)


def test_mods_and_gradients_of_captures() -> None:
    q, k, v = (to_jax(t) for t in qkv(b=1, s=512, h=4, d=64))
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])

    def ours(q: Any, slopes: Any) -> Any:
        return fj.attention(q, k, v, **CAUSAL, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j)).astype(jnp.float32)

    def plain(q: Any, slopes: Any) -> Any:
        q, k_, v_ = (x.astype(jnp.float64) for x in (q, k, v))
        i, j = jnp.arange(512)[:, None], jnp.arange(512)[None]
        scores = jnp.einsum("bihd,bjhd->bhij", q, k_) / 8 - slopes.astype(jnp.float64)[:, None, None] * (i - j)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(i >= j, scores, -jnp.inf)), v_)

    found = jax.jit(jax.grad(lambda *x: (ours(*x) ** 2).sum(), (0, 1)))(q, slopes)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        exact = jax.jit(jax.grad(lambda *x: (plain(*x) ** 2).sum(), (0, 1)))(q, slopes)
    for a, b in zip(found, exact, strict=True):
        assert float(abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()) < 0.02 * float(abs(b).max())


def test_fp8_with_descales_equals_torch() -> None:
    tensors = [t.clamp(-4, 4).to(torch.float8_e4m3fn) for t in qkv(s=512)]
    descales = {f"descale_{n}": torch.full((2, 8), 0.5, device="cuda") for n in "qkv"}
    expected = flexattn.attention(*tensors, **descales, **CAUSAL, backend="triton")
    arrays = [jax.lax.bitcast_convert_type(to_jax(t.view(torch.uint8)), jnp.float8_e4m3fn) for t in tensors]
    given = {n: to_jax(x) for n, x in descales.items()}
    got = jax.jit(lambda q, k, v, d: fj.attention(q, k, v, **d, **CAUSAL))(*arrays, given)
    assert isinstance(expected, Tensor)
    assert torch.equal(torch.from_dlpack(got), expected)


@pytest.mark.parametrize("recipe", [{}, {"granularity": "block"}, {"rotation": True}, {"bf16_backward": True}], ids=str)
def test_fp8_recipes_have_torchs_bits(recipe: dict[str, Any]) -> None:
    tensors, arguments = qkv(), {**CAUSAL, "fp8_recipe": flexattn.fp8.Recipe(**recipe)}
    dout = randn(*tensors[0].shape, seed=7)
    expected = by_torch(tensors, dout, arguments)
    leaves = dict(zip(("q", "k", "v"), map(to_jax, tensors), strict=True))
    got = by_jax(arguments)(leaves, {}, to_jax(dout))
    for which, b in zip(("out", *leaves), expected, strict=True):
        a = torch.from_dlpack(got[which])
        assert torch.equal(a, b), f"{which} differs from torch's by {(a.float() - b.float()).abs().max().item()}"


def test_xla_copies_nothing() -> None:
    """The compiled programs of the forward and of the gradients have no copy larger than a counter."""
    q, k, v = map(to_jax, qkv())
    call = jax.jit(lambda *x: fj.attention(*x, **CAUSAL))
    gradients = jax.jit(lambda q, k, v, dout: jax.vjp(lambda *x: fj.attention(*x, **CAUSAL), q, k, v)[1](dout))
    for compiled in (call.lower(q, k, v).compile(), gradients.lower(q, k, v, q).compile()):
        lines = [line for line in compiled.as_text().splitlines() if " copy(" in line or " copy-start(" in line]
        assert all("[1]" in line or "[]" in line for line in lines), "\n".join(lines)


def test_scan_of_calls_and_their_gradients() -> None:
    """XLA of jaxlib 0.11.2 passes a slice of the scan's results to a call, if it can, though the kernel writes elsewhere."""
    q, k, v = map(to_jax, qkv(h=8))

    def both(q: Any) -> Any:
        out, pull = jax.vjp(lambda q: fj.attention(q, k, v, **CAUSAL, deterministic=True), q)
        return out, *pull(out)

    expected = jax.jit(both)(q)
    _, stacked = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, both(x)), 0, xs))(jnp.stack([q] * 3))
    for some, one in zip(stacked, expected, strict=True):
        for i in range(3):
            assert (some[i] == one).all()
    only_forward = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, fj.attention(x, k, v, **CAUSAL)), 0, xs)[1])
    assert (only_forward(jnp.stack([q] * 3))[2] == expected[0]).all()


def test_a_mesh_of_all_devices() -> None:
    q, k, v = map(to_jax, qkv(h=8))
    call = lambda q, k, v: fj.attention(q, k, v, **CAUSAL)  # noqa: E731
    mesh = jax.make_mesh((len(jax.devices()),), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec(None, None, "heads")
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=part, out_specs=part, check_vma=False))(q, k, v)
    assert (sharded == call(q, k, v)).all()


@pytest.mark.parametrize(
    "mask", [{"attn_mask_type": "padding_causal"}, {"attn_mask_type": "padding", "window_size": (90, 30)}], ids=["causal", "window"]
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_packed_documents_over_an_axis(mask: dict[str, Any], dropout_p: float) -> None:
    """All devices, which have two parts each, compute the results of one call, dropout included."""
    cu = jnp.asarray(np.cumsum([0, 300, 0, 211, 1, 512]), jnp.int32)
    how = {"qkv_format": "thd", "cu_seqlens_q": cu, "max_seqlen_q": 512, **mask, "dropout_p": dropout_p, "deterministic": True}
    how |= {"rng_state": jax.random.key(3)} if dropout_p else {}
    q, k, v, dout = (to_jax(randn(1024, heads, 64, seed=seed)) for seed, heads in enumerate((8, 2, 2, 8)))
    order = fj.sequence_order(1024, len(jax.devices()))
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_tokens = jax.sharding.PartitionSpec("x")

    def both(attend: Any, *given: Any) -> Any:
        *leaves, dout = given
        out, pull = jax.vjp(attend, *leaves)
        return [out, *pull(dout)]

    part = lambda *x: fj.attention_over_axis(*x, **how, axis_name="x", layout="zigzag")  # noqa: E731
    sharded = jax.shard_map(part, mesh=mesh, in_specs=by_tokens, out_specs=by_tokens, check_vma=False)
    whole = lambda *x: fj.attention(*x, **how, cu_seqlens_kv=cu, max_seqlen_kv=512)  # noqa: E731
    expected = jax.jit(partial(both, whole))(q, k, v, dout)
    on_mesh = jax.device_put([x[order] for x in (q, k, v, dout)], jax.sharding.NamedSharding(mesh, by_tokens))
    found = jax.jit(partial(both, sharded))(*on_mesh)
    for a, b in zip(jax.device_get(found), jax.device_get(expected), strict=True):
        a, b = a[np.argsort(order)].astype(np.float32), b.astype(np.float32)
        assert abs(a - b).max() <= 2.0**-6 * abs(b).max()  # two roundings to bfloat16, relative to the largest


def test_decode_by_splits_equals_torch() -> None:
    q, k, v = randn(4, 1, 16, 128, seed=1), *(randn(4, 8192, 4, 128, seed=seed) for seed in (2, 3))
    expected = flexattn.attention(q, k, v, backend="triton")
    assert isinstance(expected, Tensor)
    got = jax.jit(fj.attention)(*map(to_jax, (q, k, v)))
    assert torch.equal(torch.from_dlpack(got), expected)
