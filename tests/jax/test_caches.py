"""Caches in JAX: calls over pages and lengths compared with torch's, and new rows written in place if XLA may."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.testing import check_close
from tests.api.test_append import Case
from tests.jax.test_attention import to_jax, to_torch
from tests.support.pages import make_pool

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
LENGTHS = (70, 0, 33, 5)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def check_equal(arguments: dict[str, Any], results: int = 2) -> None:
    """Compares a call with torch's eager backend: to the bit, or, if kernels run, through the reference in fp64."""
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()}
    exact = flexattn.attention(**wide, return_lse=True, backend="eager")
    budget = flexattn.attention(**arguments, return_lse=True, backend="eager")
    static = {n: x for n, x in arguments.items() if not isinstance(x, Tensor)}
    arrays = {n: to_jax(x) for n, x in arguments.items() if isinstance(x, Tensor)}
    found = jax.jit(lambda arrays: fj.attention(**arrays, **static, return_lse=True))(arrays)
    for name, *three in zip(("out", "lse"), map(to_torch, found), exact, budget, strict=True):
        check_close(name, *three)


def paged(layout: str = "bshd", queries: int = 1, page_size: int = 16) -> dict[str, Any]:
    q, k, v = normal(0, 4, queries, 4, 16), normal(1, 4, max(LENGTHS), 2, 16), normal(2, 4, max(LENGTHS), 2, 8)
    pool = make_pool(k, v, LENGTHS, page_size, layout)
    given = {"q": q, "k": pool.k, "v": pool.v, "page_table": pool.page_table, "seqused_kv": pool.seqused}
    return given | {"attn_mask_type": "padding_causal_bottom_right", "qkv_format": f"bshd_2{pool.fmt}"}


def dense() -> dict[str, Any]:
    given = {"q": normal(0, 4, 9, 4, 16), "k": normal(1, 4, 70, 2, 16), "v": normal(2, 4, 70, 2, 8), "seqused_kv": int32(*LENGTHS)}
    return given | {"attn_mask_type": "padding", "window_size": (20, 0), "seqused_q": int32(9, 2, 0, 5)}


def packed() -> dict[str, Any]:
    more = paged("bhsd") | {"q": normal(0, 12, 4, 16), "cu_seqlens_q": int32(0, 5, 6, 12, 12), "max_seqlen_q": 6}
    return more | {"qkv_format": "thd_2bhsd", "softcap": 5.0}


CALLS = {
    "pages": paged,
    "pages of bhsd, five queries": lambda: paged("bhsd", 5, 32),
    "lengths of dense caches": dense,
    "packed queries over pages": packed,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_over_caches(name: str) -> None:
    check_equal(CALLS[name]())


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "pages" else pytest.mark.slow) for name in CALLS])
def test_launches_over_caches_in_xlas_memory(interpreted: list[Any], name: str) -> None:
    check_equal(CALLS[name]())
    assert any("fwd" in one.launch.kernel.__name__ for one in interpreted)


def test_batch_invariant_calls_have_the_bits_of_one_sequence() -> None:
    given = {n: to_jax(x) if isinstance(x, Tensor) else x for n, x in paged(queries=3).items()}
    whole = fj.attention(**given, batch_invariant=True)
    for i in range(4):
        one = {n: given[n][i : i + 1] for n in ("q", "page_table", "seqused_kv")}
        assert (fj.attention(**(given | one), batch_invariant=True)[0] == whole[i]).all()


def test_keys_in_fp8_beside_other_queries() -> None:
    k, v = (normal(i, 4, 70, 2, 16) for i in (1, 2))
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    q, used = normal(0, 4, 1, 4, 16), int32(*LENGTHS)
    scales = {f"descale_{n}": torch.rand(4, 70, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i, n in enumerate("kv")}
    for given in ({}, scales, {n: x[0, 0] for n, x in scales.items()}):
        expected = flexattn.attention(q, k8, v8, **given, seqused_kv=used, attn_mask_type="padding")
        eight = [jax.lax.bitcast_convert_type(to_jax(x.view(torch.uint8)), jnp.float8_e4m3fn) for x in (k8, v8)]
        arrays = {n: to_jax(x) for n, x in given.items()}
        found = fj.attention(to_jax(q), *eight, **arrays, seqused_kv=to_jax(used), attn_mask_type="padding")
        assert torch.equal(to_torch(found), expected)


def test_what_has_no_gradient_says_so() -> None:
    given = {n: to_jax(x) if isinstance(x, Tensor) else x for n, x in paged().items()}
    with pytest.raises(ValueError, match="page_table is given and a gradient is needed"):
        jax.grad(lambda q: fj.attention(**(given | {"q": q})).sum())(given["q"])
    with pytest.raises(NotImplementedError, match="append_kv has no gradient"):
        jax.grad(lambda x: fj.append_kv(x, x, x, x, seqused_kv=jnp.zeros(1, jnp.int32))[0].sum())(jnp.ones((1, 4, 2, 8)))


SLOTS: dict[str, Any] = {
    "qkv_format": "thd",
    "cu_seqlens_q": int32(0, 9, 11, 11, 20),
    "max_seqlen_q": 9,
    "cu_seqlens_kv": int32(0, 20, 20, 90, 100),
    "max_seqlen_kv": 70,
}
WITH_GRADIENTS: dict[str, Any] = {
    "both sides": dense,
    "keys alone": lambda: {n: x for n, x in dense().items() if n != "seqused_q"},
    "slots": lambda: dense() | SLOTS | {"q": normal(0, 20, 4, 16), "k": normal(1, 100, 2, 16), "v": normal(2, 100, 2, 8)},
    "more than there is": lambda: dense() | {"seqused_kv": int32(99, -3, 20, 70)},
    "FP8": lambda: {n: x.bfloat16() if n in "qkv" else x for n, x in dense().items()} | {"fp8_recipe": flexattn.fp8.Recipe()},
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_lengths_in_use_have_torchs_gradients(name: str) -> None:
    given = WITH_GRADIENTS[name]()
    leaves = {n: given.pop(n).requires_grad_() for n in "qkv"}
    out = flexattn.attention(**leaves, **given, backend="eager")
    assert isinstance(out, Tensor)
    dout = normal(9, *out.shape).to(out.dtype)
    expected = torch.autograd.grad(out, [*leaves.values()], dout)
    static = {n: x for n, x in given.items() if not isinstance(x, Tensor)}
    arrays = {n: to_jax(x) for n, x in given.items() if isinstance(x, Tensor)}

    @jax.jit
    def both(leaves: Any, arrays: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda leaves: fj.attention(**leaves, **arrays, **static), leaves)
        return out, pull(dout)[0]

    found, gradients = both({n: to_jax(x) for n, x in leaves.items()}, arrays, to_jax(dout))
    assert torch.equal(to_torch(found), out.detach())
    for n, b in zip("qkv", expected, strict=True):
        assert torch.equal(to_torch(gradients[n]), b), n


def test_vmap_goes_over_caches() -> None:
    given = {n: to_jax(x) if isinstance(x, Tensor) else x for n, x in paged().items()}
    tables = jnp.stack([given["page_table"], given["page_table"][::-1]])
    used = jnp.stack([given["seqused_kv"], given["seqused_kv"][::-1]])
    found = jax.vmap(lambda table, used: fj.attention(**(given | {"page_table": table, "seqused_kv": used})))(tables, used)
    assert (found[0] == fj.attention(**given)).all()
    assert (found[1] == fj.attention(**(given | {"page_table": tables[1], "seqused_kv": used[1]}))).all()


APPENDS = ("dense", "pages", "packed into pages", "fp8, a descale for each token", "fp8, given descales")


def append_arguments(name: str) -> dict[str, Any]:
    case = Case()
    used, new = int32(*case.before), int32(*case.new)
    (k_new, v_new), (k_cache, v_cache) = case.rows(), case.caches()
    if name == "dense":
        return {"k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new, "seqused_kv": used, "seqused_q": new}
    longest = max(case.after)
    pool = make_pool(case.k, case.v, case.after, 16)
    given = {"k_cache": pool.k, "v_cache": pool.v, "seqused_kv": used, "page_table": pool.page_table, "seqused_q": new}
    for x in (pool.k, pool.v):
        x.fill_(7.0)
    if name.startswith("fp8"):
        given |= {n: given[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
        by_token = torch.ones(given["k_cache"].shape[:3])
        descales = (by_token, by_token.clone()) if "each" in name else (torch.tensor([0.5, 2.0]), torch.tensor(0.25))
        given |= dict(zip(("descale_k", "descale_v"), descales, strict=True))
    if name == "packed into pages":
        k_new, v_new = case.packed()
        given |= {"cu_seqlens_q": torch.tensor([0, *new.cumsum(0)], dtype=torch.int32), "qkv_format": "thd_2bshd"}
        del given["seqused_q"]
    assert longest > 70
    return given | {"k_new": k_new, "v_new": v_new}


def eight(t: Tensor) -> Any:
    if t.dtype is not torch.float8_e4m3fn:
        return to_jax(t)
    return jax.lax.bitcast_convert_type(to_jax(t.view(torch.uint8)), jnp.float8_e4m3fn)


def bits(x: Any) -> np.ndarray:
    x = jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
    return np.asarray(x)


def check_append(name: str) -> None:
    given = append_arguments(name)
    arrays, static = (
        {n: eight(x) for n, x in given.items() if isinstance(x, Tensor)},
        {"qkv_format": given.get("qkv_format", "bshd")},
    )
    before = {n: bits(arrays[n]).copy() for n in arrays}
    found = jax.jit(lambda arrays: fj.append_kv(**arrays, **static))(arrays)
    flexattn.append_kv(**given)
    written = ("k_cache", "v_cache", *(("descale_k", "descale_v") if "each" in name else ()))
    assert len(found) == len(written)
    for n, x in zip(written, found, strict=True):
        np.testing.assert_array_equal(bits(x), bits(eight(given[n])), err_msg=n)
        assert not np.array_equal(before[n], bits(x), equal_nan=before[n].dtype.kind == "f"), n
    for n, x in before.items():
        np.testing.assert_array_equal(x, bits(arrays[n]), err_msg=n)  # all inputs are unchanged


@pytest.mark.parametrize("name", APPENDS)
def test_append_writes_what_torchs_does(name: str) -> None:
    check_append(name)


@pytest.mark.parametrize("name", ["dense", "packed into pages"])
def test_append_by_the_kernel_in_xlas_memory(interpreted: list[Any], name: str) -> None:
    check_append(name)
    assert [one.launch.kernel.__name__ for one in interpreted] == ["_append_kernel"]


def test_donated_caches_are_written_in_place() -> None:
    given = {n: to_jax(x) for n, x in append_arguments("dense").items()}
    caches = {n: given.pop(n) for n in ("k_cache", "v_cache")}
    step = jax.jit(lambda caches, rest: fj.append_kv(**caches, **rest), donate_argnums=0)
    text = step.lower(caches, given).compile().as_text()
    assert " copy(" not in text, text
    addresses = [caches[n].unsafe_buffer_pointer() for n in ("k_cache", "v_cache")]
    k, v = step(caches, given)
    assert [x.unsafe_buffer_pointer() for x in (k, v)] == addresses
    assert caches["k_cache"].is_deleted()


def test_a_decoding_loop_in_scan() -> None:
    """Steps through a cache give the rows of one causal call."""
    q, k, v = (to_jax(normal(i, 2, 12, heads, 16)) for i, heads in enumerate((4, 2, 2)))

    def step(carry: Any, new: Any) -> Any:
        caches, used = carry
        q, k, v = (x[:, None] for x in new)
        caches = fj.append_kv(*caches, k, v, seqused_kv=used)
        out = fj.attention(q, *caches, seqused_kv=used + 1, attn_mask_type="padding_causal_bottom_right")
        return (caches, used + 1), out[:, 0]

    empty = (jnp.full((2, 16, 2, 16), jnp.nan),) * 2
    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v))
    _, out = jax.jit(lambda xs: jax.lax.scan(step, (empty, jnp.zeros(2, jnp.int32)), xs))(steps)
    expected = fj.attention(q, k, v, attn_mask_type="causal")
    assert abs(jnp.moveaxis(out, 0, 1) - expected).max() < 1e-6


@pytest.mark.parametrize("name", ["dense", "fp8, a descale for each token", "fp8, given descales"])
def test_caches_split_over_heads(name: str) -> None:
    """No part of a cache travels, neither for an append nor for attention."""
    if len(jax.devices()) < 2:
        pytest.skip(f"JAX has {len(jax.devices())} device, and the mesh needs two")
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    given = {n: eight(x) for n, x in append_arguments(name).items()}
    q = to_jax(normal(5, 4, 1, 4, given["k_cache"].shape[-1]))
    spec = {4: P(None, None, "heads"), 3: P(None, None, "heads")}

    def step(q: Any, given: dict[str, Any]) -> Any:
        found = fj.append_kv(**given)
        more = {n: given[n] for n in ("descale_k", "descale_v") if n in given}
        more |= zip(("descale_k", "descale_v"), found[2:], strict=False)
        used = given["seqused_kv"] + given["seqused_q"]
        table = {n: given[n] for n in ("page_table",) if n in given}
        return found, fj.attention(q, *found[:2], **more, **table, seqused_kv=used, attn_mask_type="padding")

    expected = jax.jit(step)(q, given)
    placed = {n: jax.device_put(x, NamedSharding(mesh, spec.get(x.ndim, P()))) for n, x in given.items()}
    q = jax.device_put(q, NamedSharding(mesh, spec[4]))
    compiled = jax.jit(step).lower(q, placed).compile()
    assert " all-gather(" not in compiled.as_text()
    found = compiled(q, placed)
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    assert abs(found[1] - expected[1]).max() < 1e-6


EXPORTED = """
import json
import jax, jax.numpy as jnp
from flexattn.jax import append_kv, attention, compiled_for, cuda
from flexattn.jax.custom_call import CustomCall

launches = []
def noted(step, *_):
    launches[-1].append(step.launch.kernel.__name__)
    return CustomCall(b"", tuple(dict.fromkeys(step.buffers)))
cuda.custom_call = noted
array = jax.ShapeDtypeStruct
pool, table, used = array((512, 64, 4, 128), jnp.bfloat16), array((8, 64), jnp.int32), array((8,), jnp.int32)
pool8, scales = array(pool.shape, jnp.float8_e4m3fn), array(pool.shape[:3], jnp.float32)
q, new = array((8, 1, 16, 128), jnp.bfloat16), array((8, 1, 4, 128), jnp.bfloat16)
def decode(q, k, v, table, used, *scales):
    given = dict(zip(("descale_k", "descale_v"), scales))
    return attention(q, k, v, page_table=table, seqused_kv=used, attn_mask_type="padding_causal_bottom_right", **given)
def append(k, v, k_new, v_new, table, used, *scales):
    given = dict(zip(("descale_k", "descale_v"), scales))
    return append_kv(k, v, k_new, v_new, page_table=table, seqused_kv=used, **given)
check = jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)
aliases = []
for call, arrays in (
    (decode, (q, pool, pool, table, used)),
    (decode, (q, pool8, pool8, table, used, scales, scales)),
    (append, (pool, pool, new, new, table, used)),
    (append, (pool8, pool8, new, new, table, used, scales, scales)),
):
    launches.append([])
    with compiled_for((9, 0), processors=132):
        exported = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[check])(*arrays)
    aliases.append(exported.mlir_module().count("stablehlo.output_operand_alias<"))
print(json.dumps([launches, aliases]))
"""


@pytest.mark.slow
def test_exported_programs_have_the_launches(fresh_python: Any) -> None:
    """In a process of its own, because Triton's interpreter runs no kernels for sm_90; an append writes the caches, and scales."""
    done = fresh_python("-c", EXPORTED, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    launches, aliases = json.loads(done.stdout)
    assert launches == [
        ["_split_plan_kernel", "_attn_fwd_hopper_kernel", "_combine_splits_kernel"],
        ["_split_plan_kernel", "_attn_fwd_fp8_cache_kernel", "_combine_splits_kernel"],
        *[["_append_kernel"]] * 2,
    ]
    assert aliases[2:] == [2, 4]


def test_errors_are_torchs() -> None:
    given = {n: to_jax(x) for n, x in append_arguments("dense").items()}
    with pytest.raises(ValueError, match=r"k_new has shape .* accepted: the cache's 2 heads of 16 elements"):
        fj.append_kv(**(given | {"k_new": given["k_new"][..., :8]}))
    with pytest.raises(TypeError, match=r"seqused_kv has dtype torch\.float32; accepted: torch.int32"):
        fj.append_kv(**(given | {"seqused_kv": jnp.zeros(4)}))
    with pytest.raises(TypeError, match=r"seqused_kv is None \(NoneType\); accepted: a JAX or NumPy array"):
        fj.append_kv(**(given | {"seqused_kv": None}))
    with pytest.raises(TypeError, match=r"page_table has dtype torch.float32"):
        given = {n: to_jax(x) if isinstance(x, Tensor) else x for n, x in paged().items()}
        fj.attention(**(given | {"page_table": given["page_table"].astype(jnp.float32)}))
