"""FP8 in JAX on a GPU: delayed scaling and out in FP8 have torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexattn
from flexattn import fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import fp8 as jax_fp8  # noqa: E402
from tests.gpu.test_jax import CAUSAL, _needs_jax_on_cuda, qkv, randn, to_jax  # noqa: E402, F401


def same_bits(found: Any, expected: torch.Tensor) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    given = jax.lax.bitcast_convert_type(found, str(integers).removeprefix("torch."))
    assert torch.equal(torch.from_dlpack(given), expected.detach().contiguous().view(integers))


@pytest.mark.parametrize(
    "recipe",
    [{"fp8_format": "HYBRID", "out_dtype": torch.float8_e4m3fn}, {"granularity": "tensor", "rotation": True}],
    ids=lambda recipe: "-".join(recipe),
)
def test_steps_of_delayed_scaling(recipe: dict[str, Any]) -> None:
    made = fp8.Recipe(scaling="delayed", amax_history_len=3, **recipe)
    state, torch_state = jax_fp8.DelayedScaling.create(made, 8), fp8.DelayedScaling(made, 8, device="cuda")
    is_quantized = made.out_dtype is not None

    @jax.jit
    def step(leaves: Any, state: Any, dout: Any) -> Any:
        def call(leaves: Any, state: Any) -> Any:
            out = fj.attention(*leaves, **CAUSAL, fp8_recipe=made, fp8_state=state, deterministic=True)
            return (out.source if is_quantized else out), out

        _, pull, out = jax.vjp(call, leaves, state, has_aux=True)
        gradients, noted = pull(dout)
        return gradients, out, state.update(made, noted)

    for i in range(3):
        leaves, dout = [((i + 1) * x).requires_grad_() for x in qkv()], randn(2, 1024, 8, 128, seed=7)
        gradients, out, state = step([to_jax(x) for x in leaves], state, to_jax(dout))
        found = flexattn.attention(*leaves, **CAUSAL, fp8_recipe=made, fp8_state=torch_state, deterministic=True, backend="triton")
        expected = torch.autograd.grad(found.source if is_quantized else found, leaves, dout)
        torch_state.update()
        for a, b in zip(gradients, expected, strict=True):
            same_bits(a, b)
        for name in fp8.BUFFERS:
            same_bits(getattr(state, name), getattr(torch_state, name))
        for name in ("data", "descale", "amax", "source") if is_quantized else ():
            same_bits(getattr(out, name), getattr(found, name))
        if not is_quantized:
            same_bits(out, found)


def test_out_in_fp8_by_blocks() -> None:
    made = fp8.Recipe(granularity="block", out_dtype=torch.float8_e4m3fn)
    leaves = qkv()
    found = flexattn.attention(*leaves, **CAUSAL, fp8_recipe=made, backend="triton")
    out = jax.jit(lambda *x: fj.attention(*x, **CAUSAL, fp8_recipe=made))(*map(to_jax, leaves))
    for name in ("data", "descale", "amax"):
        same_bits(getattr(out, name), getattr(found, name))
    same_bits(jax_fp8.dequantize(out), fp8.dequantize(found, made))
    ours, torch_tensor = jax.jit(jax_fp8.quantize)(to_jax(leaves[0])), fp8.quantize(leaves[0])
    for name in ("data", "descale", "amax"):
        same_bits(getattr(ours, name), getattr(torch_tensor, name))
