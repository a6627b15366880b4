"""Calls on a mesh of four CPU devices, split by XLA: the same numbers as on one, and no gathering if a call can be split."""

from __future__ import annotations

import json
from typing import Any

import pytest

import flexattn
from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import cuda  # noqa: E402

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
BOTH = P("data", None, "model")  # axes of [b, s, h, d]


@pytest.fixture(scope="module")
def mesh() -> Any:
    if len(jax.devices()) < 4:
        pytest.skip(f"JAX has {len(jax.devices())} devices, and the mesh needs four")
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def qkv(h: int = 8, h_kv: int = 4, s: int = 24) -> dict[str, Any]:
    return {"q": normal(0, 4, s, h, 16), "k": normal(1, 4, s, h_kv, 16), "v": normal(2, 4, s, h_kv, 16)}


def both(leaves: dict[str, Any], **arguments: Any) -> Any:
    """Returns out, lse and the gradients of a loss of both, by name."""

    def loss(leaves: dict[str, Any]) -> Any:
        given = {name: x for name, x in leaves.items() if name != "slopes"}
        more = {"score_mod": lambda s, b, h, i, j: s - leaves["slopes"][h] * (i - j)} if "slopes" in leaves else {}
        found = fj.attention(**given, **more, **arguments, return_lse=True)
        return (found[0] ** 2).sum() + found[1].sum(), found

    gradients, found = jax.grad(loss, has_aux=True)(leaves)
    return found, gradients


def sharded(mesh: Any, leaves: dict[str, Any], specs: dict[str, Any], **arguments: Any) -> tuple[str, Any]:
    """Returns the compiled program of `both`, whose arrays are on the mesh as `specs` says, and its results."""
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, BOTH if x.ndim == 4 else P()))) for name, x in leaves.items()
    }
    compiled = jax.jit(lambda x: both(x, **arguments)).lower(placed).compile()
    return compiled.as_text(), compiled(placed)


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert float(abs(x - y).max()) <= 2e-5 * max(1.0, float(abs(y).max()))


SPLIT: dict[str, Any] = {
    "causal": ({}, {"attn_mask_type": "causal"}),
    "grouped heads, window, softcap": ({}, {"window_size": (9, 3), "softcap": 5.0}),
    "bias for all sequences": ({"bias": (1, 8, 24, 24)}, {"bias_type": "post_scale_bias"}),
    "bias for all heads": ({"bias": (4, 1, 1, 24)}, {"bias_type": "pre_scale_bias"}),
    "sink": ({"softmax_offset": (8,)}, {"softmax_type": "learnable"}),
    "ALiBi": ({}, {"attn_mask_type": "causal", "bias_type": "alibi"}),
    "largest scores": ({}, {"return_max_logit": True}),
    "mod of positions": ({}, {"score_mod": lambda s, b, h, i, j: s - 0.1 * abs(i - j)}),
}

BY_DEFAULT = ("grouped heads, window, softcap", "bias for all sequences", "largest scores")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in SPLIT])
def test_split_over_batch_and_heads(mesh: Any, name: str) -> None:
    shapes, arguments = SPLIT[name]
    leaves = qkv() | {key: normal(5, *shape) for key, shape in shapes.items()}
    specs = {"bias": P(*("data" if n == 4 else None for n in shapes.get("bias", ())[:1])), "softmax_offset": P("model")}
    text, found = sharded(mesh, leaves, specs, **arguments)
    same(found, both(leaves, **arguments))
    gathers = [line for line in text.splitlines() if " all-gather(" in line and "[4,24" in line]
    assert not gathers, gathers
    assert found[1]["q"].sharding.spec[:3] == ("data", None, "model")
    assert found[1]["k"].sharding.spec[:3] == ("data", None, "model")


def test_captures_of_heads_are_split_over_the_batch_alone(mesh: Any) -> None:
    leaves = qkv() | {"slopes": normal(6, 8)}
    text, found = sharded(mesh, leaves, dict.fromkeys("qkv", P("data")), attn_mask_type="causal")
    same(found, both(leaves, attn_mask_type="causal"))
    assert " all-gather(" not in text
    assert " all-reduce(" in text  # the gradient of slopes


def test_packed_sequences_are_split_over_the_heads_alone(mesh: Any) -> None:
    leaves = {"q": normal(0, 40, 8, 16), "k": normal(1, 40, 4, 16), "v": normal(2, 40, 4, 16)}
    cu = jnp.array([0, 17, 17, 40], jnp.int32)
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    lengths = {"max_seqlen_q": 23, "max_seqlen_kv": 23}
    text, found = sharded(mesh, leaves, dict.fromkeys("qkv", P(None, "model")), **arguments, **lengths)
    same(found, both(leaves, **arguments, **lengths))
    assert " all-gather(" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"dropout_p": 0.5, "rng_state": jax.random.key(3)},
        {"mask_mod": lambda b, h, i, j: (i + h) % 3 != j % 3},
        pytest.param({"score_mod": lambda s, b, h, i, j: s * (b + 1)}, marks=pytest.mark.slow),
        pytest.param({"bias": normal(5, 2, 8, 24, 24)}, marks=pytest.mark.slow),  # pairs of sequences share an entry
        {"fp8_recipe": flexattn.fp8.Recipe()},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_depends_on_the_whole_is_gathered(mesh: Any, arguments: dict[str, Any]) -> None:
    leaves = qkv()
    if "fp8_recipe" in arguments:
        leaves = {name: x.astype(jnp.bfloat16) for name, x in leaves.items()}
    text, found = sharded(mesh, leaves, {}, **arguments)
    same(*jax.tree.map(lambda x: x.astype(jnp.float32), (found, both(leaves, **arguments))))
    assert " all-gather(" in text


@pytest.mark.parametrize(("heads", "gathers"), [((6, 1), False), ((6, 3), True)])
def test_key_heads_that_are_one_or_do_not_divide(mesh: Any, heads: tuple[int, int], gathers: bool) -> None:
    leaves = qkv(*heads)
    text, found = sharded(mesh, leaves, {"q": BOTH, "k": P("data"), "v": P("data")})
    same(found, both(leaves))
    assert gathers == (" all-gather(" in text)


def test_sums_over_devices_keep_64_bits(mesh: Any) -> None:
    with jax.enable_x64(True):
        leaves = {name: x.astype(jnp.float64) for name, x in (qkv() | {"bias": normal(5, 1, 1, 24, 24)}).items()}
        _, (_, found) = sharded(mesh, leaves, {"bias": P()})
        _, expected = both(leaves)
        assert float(abs(found["bias"] - expected["bias"]).max()) < 1e-12


def test_vmap_of_a_sharded_call(mesh: Any) -> None:
    q, k, v = (jnp.stack([x, 2 * x]) for x in qkv().values())
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "data", None, "model"))) for x in (q, k, v)]
    found = jax.jit(jax.vmap(fj.attention))(*placed)
    same(found, jnp.stack([fj.attention(q[i], k[i], v[i]) for i in range(2)]))


@pytest.mark.slow
def test_a_split_call_on_cuda_devices(mesh: Any, interpreted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has the launches of its part, in XLA's memory; sums over devices follow them."""
    kind = cuda.device()
    monkeypatch.setattr(cuda, "_first_device", lambda: kind)  # XLA partitions in a thread of its own, outside of `compiled_for`
    leaves = {name: x[:2, :16] for name, x in qkv(4, 2).items()} | {"bias": normal(5, 1, 4, 16, 16)}
    arguments = {"bias_type": "post_scale_bias", "attn_mask_type": "causal"}
    text, found = sharded(mesh, leaves, {"bias": P()}, **arguments)
    assert len(interpreted) > 2
    assert " all-reduce(" in text
    assert not [line for line in text.splitlines() if " all-gather(" in line and "[2,16" in line]

    def plain(leaves: dict[str, Any]) -> Any:
        q, k, v, bias = (leaves[name] for name in ("q", "k", "v", "bias"))
        scores = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / 4 + bias
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -jnp.inf)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), jnp.repeat(v, 2, 2))
        lse = jax.nn.logsumexp(scores, -1)
        return (out**2).sum() + lse.sum(), (out, lse)

    gradients, results = jax.grad(plain, has_aux=True)(leaves)
    same(found, (results, gradients))


EXPORTED = """
import json, os
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from flexattn.jax import attention, compiled_for, cuda
from flexattn.jax.custom_call import CustomCall

launches = []
def noted(step, *_):
    launches.append((step.launch.kernel.__name__, step.launch.programs))
    return CustomCall(b"", tuple(dict.fromkeys(step.buffers)))
cuda.custom_call = noted
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def call(*x):
    return jax.grad(lambda *x: attention(*x, attn_mask_type="causal").astype(jnp.float32).sum(), (0, 1, 2))(*x)
check = jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)
part = P(None, None, "x")
q, k = (jax.ShapeDtypeStruct((2, 4096, h, 128), jnp.bfloat16, sharding=NamedSharding(mesh, part)) for h in (16, 8))
sharded = jax.shard_map(call, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
with compiled_for((9, 0), processors=132):
    exported = jax.export.export(jax.jit(sharded), platforms=["cuda"], disabled_checks=[check])(q, k, k)
text = exported.mlir_module()
local = jax.ShapeDtypeStruct((2, 4096, 4, 128), jnp.bfloat16), *[jax.ShapeDtypeStruct((2, 4096, 2, 128), jnp.bfloat16)] * 2
on_mesh, launches = launches, []
with compiled_for((9, 0), processors=132):
    jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[check])(*local)
print(json.dumps([on_mesh, launches, text.count("@" + cuda.TARGET), exported.nr_devices]))
"""


@pytest.mark.slow
def test_exported_shard_map_has_the_launches_of_a_part(fresh_python: Any) -> None:
    """In a process of its own, because Triton's interpreter runs no kernels for sm_90."""
    done = fresh_python("-c", EXPORTED, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    on_mesh, alone, calls, devices = json.loads(done.stdout)
    assert on_mesh == alone
    assert calls == len(alone) > 2
    assert devices == 4
    assert "fwd_hopper" in alone[0][0]
