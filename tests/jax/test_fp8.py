"""FP8 in JAX: delayed scaling and out in FP8 have torch's bits, and a state's gradient has a call's statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import fp8
from flexattn.testing import check_close
from tests.jax.test_attention import to_jax, to_torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import cuda  # noqa: E402
from flexattn.jax import fp8 as jax_fp8  # noqa: E402

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
E4M3, CAUSAL = torch.float8_e4m3fn, {"attn_mask_type": "causal"}
DELAYED = {"scaling": "delayed", "amax_history_len": 3}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(step: int = 0, tokens: int = 40) -> list[Tensor]:
    sizes = ((0, 4), (1, 2), (2, 2))
    return [((step + 1) * normal(i + 10 * step, 2, tokens, h, 32)).bfloat16().requires_grad_() for i, h in sizes]


def same_bits(found: Any, expected: Tensor) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    given = jax.lax.bitcast_convert_type(found, str(integers).removeprefix("torch."))
    np.testing.assert_array_equal(np.asarray(given), expected.detach().contiguous().view(integers).numpy())


@pytest.mark.parametrize(
    "recipe",
    [
        {"fp8_format": "HYBRID", "out_dtype": E4M3, "margin": 1},
        {"granularity": "tensor", "amax_compute_algo": "most_recent", "rotation": True},
        pytest.param({"bf16_backward": True}, marks=pytest.mark.slow),
        pytest.param({"out_dtype": torch.float8_e5m2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_steps_of_delayed_scaling_have_torchs_bits(recipe: dict[str, Any]) -> None:
    made = fp8.Recipe(**DELAYED, **recipe)
    state, torch_state = jax_fp8.DelayedScaling.create(made, 4, 2), fp8.DelayedScaling(made, 4, 2)
    is_quantized = made.out_dtype is not None

    @jax.jit
    def step(leaves: Any, state: Any, weights: Any) -> Any:
        def loss(leaves: Any, state: Any) -> Any:
            out = fj.attention(*leaves, **CAUSAL, fp8_recipe=made, fp8_state=state)
            wide = jax_fp8.dequantize(out, dtype=jnp.dtype("float32")) if is_quantized else out.astype(jnp.float32)
            return (wide * weights).sum(), out

        (gradients, noted), out = jax.grad(loss, (0, 1), has_aux=True)(leaves, state)
        return gradients, noted, out, state.update(made, noted)

    for i in range(3):
        leaves, weights = qkv(i), normal(5, 2, 40, 4, 32)
        gradients, noted, out, state = step([to_jax(x) for x in leaves], state, to_jax(weights))
        found = flexattn.attention(*leaves, **CAUSAL, fp8_recipe=made, fp8_state=torch_state)
        wide = fp8.dequantize(found, made, dtype=torch.float32) if is_quantized else found.float()
        (wide * weights).sum().backward()
        for name in fp8.TENSORS:
            same_bits(getattr(noted, f"amax_history_{name}")[0], torch_state.history(name)[0])
            assert not getattr(noted, f"scale_{name}").any()
        torch_state.update()
        for name in fp8.BUFFERS:
            same_bits(getattr(state, name), getattr(torch_state, name))
        for a, b in zip(gradients, leaves, strict=True):
            same_bits(a, b.grad)
        if not is_quantized:
            same_bits(out, found)
            continue
        for name in ("data", "descale", "amax", "source"):
            same_bits(getattr(out, name), getattr(found, name))
    assert not (state.scale_q == 1).any()
    assert bool((state.scale_dout == 1).all()) == made.bf16_backward


LENGTHS = torch.tensor([0, 110, 110, 190], dtype=torch.int32)
STARTS = torch.tensor([85, 0, 0, 200], dtype=torch.int32)
OUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({}, CAUSAL),
    "blocks": ({"granularity": "block", "block_rows": 64}, {"qkv_format": "sbhd"}),
    "packed": ({"granularity": "batch_head"}, {"qkv_format": "thd"}),
    "packed, with gaps, in blocks": ({"granularity": "block", "block_rows": 64}, {"qkv_format": "thd", "gaps": True}),
    "tensor, of packed": ({"granularity": "tensor", "out_dtype": torch.float8_e5m2}, {"qkv_format": "thd"}),
}


BY_DEFAULT = ("blocks", "packed, with gaps, in blocks")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in OUTS])
def test_out_in_fp8_has_torchs_bits(name: str) -> None:
    recipe, arguments = OUTS[name]
    made, arguments = fp8.Recipe(**({"out_dtype": E4M3} | recipe)), dict(arguments)
    lengths: dict[str, Any] = {}
    leaves = qkv(tokens=200)
    if arguments.get("qkv_format") == "thd":
        leaves = [x.detach()[0].clone().requires_grad_() for x in leaves]
        lengths = {"cu_seqlens": LENGTHS}
        lengths |= {"cu_seqlens_padded": STARTS} if arguments.pop("gaps", False) else {}
        arguments |= {f"{n.replace('seqlens', f'seqlens_{side}')}": x for n, x in lengths.items() for side in ("q", "kv")}
        arguments |= {"attn_mask_type": "padding_causal", "max_seqlen_q": 110, "max_seqlen_kv": 110}
    elif arguments.get("qkv_format") == "sbhd":
        leaves = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in leaves]
    fmt = arguments.get("qkv_format", "bshd")
    found = flexattn.attention(*leaves, **arguments, fp8_recipe=made)
    wide = fp8.dequantize(found, made, qkv_format=fmt, **lengths)
    arrays = {n: to_jax(x) for n, x in arguments.items()}
    jax_lengths = {n: to_jax(x) for n, x in lengths.items()}

    def call(*leaves: Any) -> Any:
        out = fj.attention(*leaves, **arrays, fp8_recipe=made)
        return jax_fp8.dequantize(out, qkv_format=fmt, **jax_lengths), out

    ours, pull, out = jax.vjp(call, *(to_jax(x) for x in leaves), has_aux=True)
    for field in ("data", "descale", "amax", "source"):
        same_bits(getattr(out, field), getattr(found, field))
    same_bits(ours, wide)
    dout = normal(9, *wide.shape).bfloat16()
    for a, b in zip(pull(to_jax(dout)), torch.autograd.grad(wide, leaves, dout), strict=True):
        same_bits(a, b)


def test_out_of_no_sequences() -> None:
    x = jnp.zeros((5, 4, 32), jnp.bfloat16)
    none = jnp.zeros(1, jnp.int32)
    given = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": none, "cu_seqlens_kv": none}
    given |= {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    out = fj.attention(x, x, x, **given, fp8_recipe=fp8.Recipe(granularity="batch_head", out_dtype=E4M3))
    assert out.descale.shape == (0, 4, 1)
    assert not jax_fp8.dequantize(out, qkv_format="thd", cu_seqlens=none).any()


def test_inference_in_fp8_with_out_in_fp8() -> None:
    leaves = [fp8.quantize(x.detach()) for x in qkv()]
    descales = {f"descale_{n}": x.descale for n, x in zip("qkv", leaves, strict=True)}
    recipe = fp8.Recipe(out_dtype=E4M3)
    found = flexattn.attention(*(x.data for x in leaves), **descales, **CAUSAL, fp8_recipe=recipe)
    arrays = [jax.lax.bitcast_convert_type(to_jax(x.data.view(torch.uint8)), jnp.float8_e4m3fn) for x in leaves]
    out = jax.jit(lambda q, k, v, d: fj.attention(q, k, v, **d, **CAUSAL, fp8_recipe=recipe))(
        *arrays, {n: to_jax(x) for n, x in descales.items()}
    )
    for name in ("data", "descale", "amax"):
        same_bits(getattr(out, name), getattr(found, name))
    assert out.source.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["packed", pytest.param("blocks", marks=pytest.mark.slow)])
def test_quantize_has_torchs_bits(name: str) -> None:
    x, fmt = qkv(tokens=200)[0].detach(), "bshd"
    recipe = fp8.Recipe(granularity="block", block_rows=64, margin=-1)
    lengths: dict[str, Any] = {}
    if name == "packed":
        x, fmt, recipe = x[0], "thd", fp8.Recipe(granularity="batch_head", rotation=True)
        lengths = {"cu_seqlens": LENGTHS, "cu_seqlens_padded": STARTS, "max_seqlen": 110}
    found = fp8.quantize(x, recipe, qkv_format=fmt, **lengths, dtype=torch.float8_e5m2)
    arrays = {n: to_jax(v) for n, v in lengths.items() if n != "max_seqlen"}
    longest = lengths.get("max_seqlen")

    def call(x: Any, arrays: Any) -> Any:
        return jax_fp8.quantize(x, recipe, qkv_format=fmt, **arrays, max_seqlen=longest, dtype=jnp.float8_e5m2)

    ours = jax.jit(call)(to_jax(x), arrays)
    for field in ("data", "descale", "amax"):
        same_bits(getattr(ours, field), getattr(found, field))
    lengths.pop("max_seqlen", None)
    given = {"qkv_format": fmt, **arrays}
    same_bits(jax_fp8.dequantize(ours, **given), fp8.dequantize(found, recipe, qkv_format=fmt, **lengths))
    assert not jax.grad(lambda x: jax_fp8.dequantize(call(x, arrays), **given, dtype=jnp.dtype("float32")).sum())(to_jax(x)).any()
    twice = jax.vmap(lambda x: call(x, arrays))(jnp.stack([to_jax(x), 2 * to_jax(x)]))
    same_bits(twice.data[0], found.data)
    with pytest.raises(ValueError, match=r"recipe\.scaling is 'delayed'"):
        jax_fp8.quantize(to_jax(x), fp8.Recipe(**DELAYED))


def test_quantize_in_xlas_memory(interpreted: list[Any]) -> None:
    x = qkv()[0].detach()
    found = fp8.quantize(x)
    with cuda.compiled_for((8, 9), processors=4):
        ours = jax.jit(jax_fp8.quantize)(to_jax(x))
    for field in ("data", "descale", "amax"):
        same_bits(getattr(ours, field), getattr(found, field))
    assert interpreted
    with pytest.raises(flexattn.BackendError, match=r"compute capability 8\.0 has no conversions to FP8"):
        jax_fp8.quantize(to_jax(x))


def test_delayed_scaling_in_xlas_memory(interpreted: list[Any]) -> None:
    """The launches of a CUDA device record torch's statistics, and results are as exact as torch's on the same kernels."""
    made = fp8.Recipe(**DELAYED, out_dtype=E4M3)
    leaves, torch_state = qkv(), fp8.DelayedScaling(made, 4, 2)
    state = jax_fp8.DelayedScaling.create(made, 4, 2)
    dout = normal(7, 2, 40, 4, 32).bfloat16()
    with cuda.compiled_for((8, 9), processors=4):

        def call(leaves: Any, state: Any) -> Any:
            out = fj.attention(*leaves, **CAUSAL, fp8_recipe=made, fp8_state=state, deterministic=True)
            return jax_fp8.dequantize(out), out

        (_, pull, out) = jax.vjp(call, [to_jax(x) for x in leaves], state, has_aux=True)
        gradients, noted = pull(to_jax(dout))

    def by_torch(leaves: list[Tensor], **how: Any) -> list[Tensor]:
        out = flexattn.attention(*leaves, **CAUSAL, **how)
        source = out.source if isinstance(out, fp8.QuantizedTensor) else out
        return [source.detach(), *torch.autograd.grad(source, leaves, dout.to(source.dtype))]

    exact = by_torch([x.detach().double().requires_grad_() for x in leaves], backend="eager")
    budget = by_torch(leaves, fp8_recipe=made, fp8_state=torch_state, backend="triton")
    for name, *three in zip(("out", "dq", "dk", "dv"), [to_torch(x) for x in (out.source, *gradients)], exact, budget, strict=True):
        check_close(name, *three)
    for name in ("q", "k", "v", "dout"):
        same_bits(getattr(noted, f"amax_history_{name}")[0], torch_state.history(name)[0])
    np.testing.assert_allclose(noted.amax_history_out[0], torch_state.history("out")[0], rtol=2.0**-7)
    assert sum("quantize" in one.launch.kernel.__name__ for one in interpreted) > 2


def test_a_state_over_layers_and_devices() -> None:
    """Scan stacks the states of layers. If a call's scales are shared by all devices, XLA gathers the call."""
    made = fp8.Recipe(**DELAYED)
    leaves = [to_jax(x) for x in qkv()]
    states = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), jax_fp8.DelayedScaling.create(made, 4, 2))

    def loss(states: Any, leaves: Any) -> Any:
        def layer(q: Any, state: Any) -> Any:
            out = fj.attention(q, *leaves[1:], **CAUSAL, fp8_recipe=made, fp8_state=state)
            return out, out.astype(jnp.float32).sum()

        return jax.lax.scan(layer, leaves[0], states)[1].sum()

    noted = jax.jit(jax.grad(loss))(states, leaves)
    assert noted.amax_history_q.shape == (2, 3, 4)
    assert (noted.amax_history_k[0] == noted.amax_history_k[1]).all()
    assert (noted.amax_history_q[0] != noted.amax_history_q[1]).any()
    if len(jax.devices()) < 2:
        pytest.skip(f"JAX has {len(jax.devices())} device, and the mesh needs two")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in leaves]
    for a, b in zip(jax.jit(jax.grad(loss))(states, placed), noted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_is_refused() -> None:
    made = fp8.Recipe(**DELAYED)
    q = jnp.zeros((1, 32, 2, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match="fp8_state was made for 4 heads of q"):
        fj.attention(q, q, q, fp8_recipe=made, fp8_state=jax_fp8.DelayedScaling.create(made, 4))
    with pytest.raises(ValueError, match=r"fp8_state is given with .*; accepted: an fp8_recipe with scaling 'delayed'"):
        fj.attention(q, q, q, fp8_recipe=fp8.Recipe(), fp8_state=jax_fp8.DelayedScaling.create(made, 2))
    with pytest.raises(ValueError, match=r"recipe\.scaling is 'current'; accepted: 'delayed'"):
        jax_fp8.DelayedScaling.create(fp8.Recipe(), 2)
    with pytest.raises(ValueError, match="cu_seqlens is None with thd and scales for each sequence"):
        jax_fp8.dequantize(jax_fp8.QuantizedTensor(q[0], jnp.ones((2, 1, 1)), jnp.ones((2, 1, 1)), q[0]), qkv_format="thd")
