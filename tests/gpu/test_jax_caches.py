"""Caches in JAX on a GPU: torch's bits over pages, dense caches and keys in FP8, and new rows written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from tests.gpu.test_gpu import randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from tests.gpu.test_jax import _needs_jax_on_cuda, to_jax  # noqa: E402, F401

LENGTHS = (1900, 0, 700, 64, 1, 2048, 333, 1024)
BATCH, TOKENS, PAGE = len(LENGTHS), 2048, 64


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def eight(t: Tensor) -> Any:
    if t.dtype is not torch.float8_e4m3fn:
        return to_jax(t)
    return jax.lax.bitcast_convert_type(to_jax(t.view(torch.uint8)), jnp.float8_e4m3fn)


def arrays_of(given: dict[str, Any]) -> dict[str, Any]:
    return {n: eight(x) for n, x in given.items() if isinstance(x, Tensor)}


def paged(queries: int = 1, heads: int = 16, dims: tuple[int, int] = (128, 128), heads_kv: int = 4) -> dict[str, Any]:
    pages = BATCH * TOKENS // PAGE
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(BATCH, -1).cuda()
    pools = {n: randn(pages, PAGE, heads_kv, d, seed=i) for i, (n, d) in enumerate(zip("kv", dims, strict=True), 1)}
    given = {"q": randn(BATCH, queries, heads, dims[0], seed=3), **pools, "page_table": table, "seqused_kv": int32(*LENGTHS)}
    return given | {"attn_mask_type": "padding_causal_bottom_right"}


def dense(fp8: bool = False) -> dict[str, Any]:
    caches: dict[str, Tensor] = {n: randn(BATCH, TOKENS, 4, 128, seed=i) for i, n in enumerate("kv", 1)}
    given: dict[str, Any] = {"q": randn(BATCH, 1, 16, 128, seed=3), **caches, "seqused_kv": int32(*LENGTHS)}
    if fp8:
        given |= {n: x.clamp(-4, 4).to(torch.float8_e4m3fn) for n, x in caches.items()}
        given |= {f"descale_{n}": torch.rand(BATCH, TOKENS, 4, device="cuda") + 0.5 for n in "kv"}
    return given | {"attn_mask_type": "padding_causal_bottom_right"}


CALLS = {
    "pages": paged,
    "prefill over pages": lambda: paged(queries=300),
    "latents": lambda: paged(heads=64, dims=(576, 512), heads_kv=1),
    "dense": dense,
    "keys in fp8": lambda: dense(fp8=True),
    "batch invariant": lambda: paged(queries=2) | {"batch_invariant": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_torchs_bits_over_caches(name: str) -> None:
    given = CALLS[name]()
    static = {n: x for n, x in given.items() if not isinstance(x, Tensor)}
    expected = flexattn.attention(**given, return_lse=True, backend="triton")
    call = jax.jit(lambda arrays: fj.attention(**arrays, **static, return_lse=True))
    for _ in range(3):
        for which, a, b in zip(("out", "lse"), call(arrays_of(given)), expected, strict=True):
            assert torch.equal(torch.from_dlpack(a), b), which


@pytest.mark.parametrize("name", ["pages", "fp8, a descale for each token"])
def test_append_writes_what_torchs_does(name: str) -> None:
    made = paged()
    given = {
        "k_cache": made["k"],
        "v_cache": made["v"],
        "page_table": made["page_table"],
        "seqused_kv": int32(*(n // 2 for n in LENGTHS)),
    }
    if name != "pages":
        given |= {n: given[n].clamp(-4, 4).to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
        given |= {f"descale_{n}": torch.ones(made["k"].shape[:3], device="cuda") for n in "kv"}
    given |= {f"{n}_new": randn(BATCH, 5, 4, 128, seed=i) for i, n in enumerate("kv", 7)}
    arrays = {n: jnp.copy(x) for n, x in arrays_of(given).items()}
    written = [n for n in ("k_cache", "v_cache", "descale_k", "descale_v") if n in given]
    caches, rest = {n: arrays[n] for n in written}, {n: x for n, x in arrays.items() if n not in written}
    step = jax.jit(lambda caches, rest: fj.append_kv(**caches, **rest), donate_argnums=0)
    text = step.lower(caches, rest).compile().as_text()
    assert " copy(" not in text, text
    flexattn.append_kv(**given)
    kept = jax.jit(lambda caches, rest: fj.append_kv(**caches, **rest))(caches, rest)
    addresses = [caches[n].unsafe_buffer_pointer() for n in written]
    found = step(caches, rest)
    assert [x.unsafe_buffer_pointer() for x in found] == addresses
    for which, a, b in zip(written, found, kept, strict=True):
        assert (jax.lax.bitcast_convert_type(a, jnp.uint8) == jax.lax.bitcast_convert_type(eight(given[which]), jnp.uint8)).all()
        assert (jax.lax.bitcast_convert_type(b, jnp.uint8) == jax.lax.bitcast_convert_type(a, jnp.uint8)).all()


def test_a_decoding_loop_in_scan() -> None:
    """Twelve steps through a cache, inside one program, equal the same steps in torch."""
    rows = {n: randn(12, 2, 1, heads, 128, seed=i) for i, (n, heads) in enumerate((("q", 16), ("k", 4), ("v", 4)))}
    start = [randn(2, TOKENS, 4, 128, seed=i) for i in (7, 8)]
    used, mask = int32(1000, 3), {"attn_mask_type": "padding_causal_bottom_right"}

    def step(carry: Any, new: Any) -> Any:
        caches, used = carry
        caches = fj.append_kv(*caches, new["k"], new["v"], seqused_kv=used)
        return (caches, used + 1), fj.attention(new["q"], *caches, seqused_kv=used + 1, **mask)

    carry = (tuple(jnp.copy(to_jax(x)) for x in start), to_jax(used))
    _, found = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))(carry, {n: to_jax(x) for n, x in rows.items()})
    for i in range(12):
        flexattn.append_kv(*start, rows["k"][i], rows["v"][i], seqused_kv=used + i)
        expected = flexattn.attention(rows["q"][i], *start, seqused_kv=used + i + 1, **mask, backend="triton")
        assert isinstance(expected, Tensor)
        assert torch.equal(torch.from_dlpack(found[i]), expected), i
