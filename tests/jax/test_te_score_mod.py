"""TransformerEngine's score_mod callbacks in JAX: the numeric cases of its pull request 2985, and its configurations."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from flexattn.testing import check_close
from tests.jax.test_attention import to_jax, to_torch
from tests.jax.test_te import PLAIN, by_ids, normal, pairs_seen, rows

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
te = pytest.importorskip("flexattn.jax.te")
pytest.importorskip(
    "cudnn", reason="nvidia-cudnn-frontend is not installed, which the callbacks of TransformerEngine's tests import"
)
from tests.support import te_callbacks  # noqa: E402

MASK, CAP = te_callbacks.MASK, te_callbacks.SOFTCAP


def arguments_of(name: str, with_bprop: bool) -> dict[str, Any]:
    """Returns the arguments of fused_attn in pull request 2985's test of this name, with numbers of Python."""
    softcap = te_callbacks.Softcap()
    forward, backward, tensors, bprop_tensors = {
        "post_scale_bias": (te_callbacks.post_scale_bias, te_callbacks.identity_bprop, None, None),
        "causal": (te_callbacks.causal, te_callbacks.causal_bprop, {"neg_inf": MASK}, {"zero": 0.0}),
        "softcap": (softcap.forward, softcap.backward, {"softcap": CAP}, {"softcap": CAP}),
    }[name]
    given = {"score_mod": forward, "score_mod_tensors": tensors}
    return given | ({"score_mod_bprop": backward, "score_mod_bprop_tensors": bprop_tensors} if with_bprop else {})


def expected(name: str, inputs: list[Any], dout: Any, scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v = (to_torch(x).to(dtype).requires_grad_() for x in inputs)
    at = torch.arange(q.shape[1])
    scores = te_callbacks.CASES[name].expected(torch.einsum("bihd,bjhd->bhij", q, k) * scale, at[:, None], at[None])
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), to_torch(dout).to(dtype))]


@pytest.mark.sample("dtype", "name", "with_bprop")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("with_bprop", [True, False])
@pytest.mark.parametrize(
    ("name", "shape"), [("post_scale_bias", (1, 64, 2, 128)), ("causal", (1, 64, 2, 128)), ("softcap", (1, 16, 2, 64))]
)
def test_cases_of_pull_request_2985(name: str, shape: tuple[int, ...], with_bprop: bool, dtype: str) -> None:
    size = 1.0 if name == "softcap" else shape[-1] ** -0.5  # scale of the inputs; a cap of 0.8 bends the scores
    inputs = [(normal(i, *shape) * size).astype(dtype) for i in range(3)]
    dout, scale = normal(2025, *shape).astype(dtype), shape[-1] ** -0.5
    given = PLAIN | {"scaling_factor": scale} | arguments_of(name, with_bprop)
    out, pull = jax.vjp(jax.jit(lambda *x: te.fused_attn(x, **given)), *inputs)
    wanted, budget = (expected(name, inputs, dout, scale, d) for d in (torch.float64, getattr(torch, dtype)))
    tolerance = te_callbacks.CASES[name].tolerance
    for one, got, want, same_dtype in zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), wanted, budget, strict=True):
        torch.testing.assert_close(to_torch(got).double(), want, atol=tolerance, rtol=tolerance)
        check_close(one, to_torch(got), want, same_dtype, factor=2.0 if one == "out" else 3.0)


def with_bias(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.add(a=graph.mul(a=score, b=tensors["factor"]), b=tensors["bias"])


def test_arrays_get_gradients_beside_masks_and_a_bias() -> None:
    """TransformerEngine lacks this combination: the callback's scores, then the bias, then segments and a window."""
    b, s, h, d = 2, 12, 4, 16
    inputs = [normal(i, b, s, n, d) for i, n in enumerate((h, 2, 2))]
    bias, tensor, factor = normal(3, 1, h, s, s), normal(4, h, 1, s), normal(5, b, h, s, s)
    parts = rows([[(0, 4), (4, 6)], [(1, 11)]], s)
    kind, window = te.AttnMaskType.PADDING_CAUSAL_MASK, (5, 0)
    seen = torch.from_numpy(pairs_seen(kind, window, (parts[0],) * 2, (parts[1],) * 2))[:, None]
    given = PLAIN | {
        "attn_mask_type": kind,
        "qkv_layout": te.QKVLayout.THD_THD_THD,
        "window_size": window,
        "sequence_descriptor": by_ids(parts, parts),
        "attn_bias_type": te.AttnBiasType.POST_SCALE_BIAS,
        "score_mod": with_bias,
    }

    def call(q: Any, k: Any, v: Any, bias: Any, tensor: Any, factor: Any) -> Any:
        tensors = {"bias": tensor, "factor": factor}
        return te.fused_attn((q, k, v), **given | {"bias": bias, "score_mod_tensors": tensors})

    leaves = (*inputs, bias, tensor, factor)
    out, pull = jax.vjp(jax.jit(call), *leaves)
    dout = normal(9, *out.shape)
    results = []
    for dtype in (torch.float64, torch.float32):
        q, k, v, *others = tensors = [to_torch(x).to(dtype).requires_grad_() for x in leaves]
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * PLAIN["scaling_factor"]
        scores = (scores * others[2] + others[1] + others[0]).masked_fill(~seen, -torch.inf)
        weights = scores.masked_fill(~seen.any(3, keepdim=True), 0.0).softmax(3) * seen
        x = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
        results.append([x.detach(), *torch.autograd.grad(x, tensors, to_torch(dout).to(dtype))])
    for name, *three in zip(("out", "dq", "dk", "dv", "dbias", "dtensor", "dfactor"), (out, *pull(dout)), *results, strict=True):
        check_close(name, to_torch(three[0]), *three[1:], factor=2.0 if name == "out" else 3.0)


def call_of(function: Any, *arrays: Any) -> Any:
    """Returns the parameters of flexattn's primitive in a function's trace, and its number of arrays."""

    def found(jaxpr: Any) -> Any:
        for e in jaxpr.eqns:
            if e.primitive.name == "flexattn_forward":
                return e.params["call"], len(e.invars)
            for inner in e.params.values():
                one = getattr(inner, "jaxpr", None)
                if one is not None and (result := found(one)) is not None:
                    return result
        return None

    result = found(jax.make_jaxpr(function)(*arrays).jaxpr)
    assert result is not None
    return result


def traced(**given: Any) -> Any:
    x = jnp.ones((1, 8, 1, 16))
    return call_of(jax.grad(lambda q: te.fused_attn((q, x, x), **PLAIN | given).sum()), x)


def test_arrays_are_operands_and_numbers_are_not() -> None:
    def score_mod(graph: Any, score: Any, tensors: Any) -> Any:
        return graph.max(input0=graph.add(a=score, b=tensors["tensor"]), input1=tensors["floor"])

    call, count = traced(score_mod=score_mod, score_mod_tensors={"tensor": jnp.ones((1, 1, 1, 1)), "floor": -1e9})
    assert count == 4
    assert call.mod_numbers == (-1e9,)


def test_equal_callbacks_are_one_program() -> None:
    """They may be bound to different objects, with or without a score_mod_graph_cache_key: recording determines the program."""
    one = traced(**arguments_of("softcap", True))
    again = traced(**arguments_of("softcap", True))
    assert one == again
    assert hash(one) == hash(again)
    given = arguments_of("softcap", True)
    assert traced(**given | {"score_mod_tensors": {"softcap": 0.5}}) != one
    assert traced(**given | {"score_mod_bprop": te_callbacks.identity_bprop}) != one


def _scaled(factor: float) -> Any:
    return lambda graph, score, tensors: graph.mul(a=score, b=factor)


def test_callbacks_that_look_alike_are_not_one_program() -> None:
    """Addresses may be reused."""
    x = normal(0, 1, 8, 2, 16)
    outs = [te.fused_attn((x, x, x), **PLAIN | {"score_mod": _scaled(factor)}) for factor in (0.25, 1.0, 2.0, -3.0)]
    assert all(not jnp.allclose(a, b, atol=1e-3) for i, a in enumerate(outs) for b in outs[:i])


def test_jit_compiles_once_for_new_objects_and_new_values() -> None:
    count = 0

    @jax.jit
    def call(x: Any, cap: Any) -> Any:
        nonlocal count
        count += 1
        softcap = te_callbacks.Softcap()
        given = {"score_mod": softcap.forward, "score_mod_tensors": {"softcap": cap}}
        return te.fused_attn((x, x, x), **PLAIN | given)

    x = normal(0, 1, 8, 2, 16) * 3
    results = [call(x, jnp.full((1, 1, 1, 1), cap)) for cap in (0.5, 2.0)]
    assert count == 1
    assert not jnp.allclose(*results, atol=1e-3)


def asks(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.mul(a=score, b=tensors["factor"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"score_mod": 3}, "score_mod is 3; accepted: a function of (graph, tensor, tensors)"),
        ({"score_mod": asks, "score_mod_tensors": [1]}, "score_mod_tensors is a list; accepted: a dict"),
        ({"score_mod": asks, "score_mod_tensors": {1: 1.0}}, "score_mod_tensors has the name 1, a int; accepted: str names"),
        (
            {"score_mod": asks, "score_mod_tensors": {"factors": 1.0}},
            "tensors['factor'], which was not passed; accepted: 'factors'",
        ),
        ({"score_mod": asks, "score_mod_tensors": {"factor": "1"}}, "score_mod_tensors['factor'] is a builtins.str; accepted"),
        (
            {"score_mod": asks, "score_mod_tensors": {"factor": jnp.ones(3)}},
            "score_mod_tensors['factor'] has shape (3,), with 3 for skv",
        ),
        (
            {"score_mod": asks, "score_mod_bprop_tensors": {"factor": 1.0}},
            "score_mod_bprop_tensors comes without a score_mod_bprop",
        ),
        ({"score_mod": lambda graph, score, tensors: graph.matmul(score, score)}, "a score_mod's graph has no node 'matmul'"),
        ({"score_mod": lambda graph, score, tensors: 1.0}, "returned 1.0; accepted: a tensor of its graph"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x[:20],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    x = jnp.ones((1, 8, 1, 16))
    with pytest.raises((ValueError, TypeError)) as caught:
        te.fused_attn((x, x, x), **PLAIN | arguments)
    assert text in str(caught.value)


def test_a_bprop_gives_arrays_no_gradient_and_says_so() -> None:
    x = jnp.ones((1, 8, 1, 16))

    def loss(factor: Any, stop: Any = lambda x: x) -> Any:
        tensors = {"factor": stop(factor)}
        given = {"score_mod": asks, "score_mod_bprop": asks, "score_mod_tensors": tensors, "score_mod_bprop_tensors": tensors}
        return te.fused_attn((x, x, x), **PLAIN | given).sum()

    factor = to_jax(torch.full((1, 1, 1, 1), 2.0))
    with pytest.raises(ValueError, match=r"score_mod_tensors\['factor'\] is differentiated.*stop_gradient"):
        jax.grad(loss)(factor)
    assert jax.grad(functools.partial(loss, stop=jax.lax.stop_gradient))(factor).sum() == 0
    assert jnp.isfinite(loss(factor))


def test_split_over_batch_and_heads() -> None:
    """TransformerEngine's distributed case: softcap with a bprop, at (4, 16, 4, 64)."""
    if len(jax.devices()) < 4:
        pytest.skip(f"JAX has {len(jax.devices())} devices, and the mesh needs four")
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "tp"))
    inputs, dout = [normal(i, 4, 16, 4, 64) for i in range(3)], normal(2025, 4, 16, 4, 64)

    @jax.jit
    def call(*given: Any) -> Any:
        out, pull = jax.vjp(lambda *x: te.fused_attn(x, **PLAIN | arguments_of("softcap", True)), *given[:3])
        return (out, *pull(given[3]))

    found = call(*(jax.device_put(x, split) for x in (*inputs, dout)))
    wanted, budget = (expected("softcap", inputs, dout, PLAIN["scaling_factor"], d) for d in (torch.float64, torch.float32))
    for name, got, want, same_dtype in zip(("out", "dq", "dk", "dv"), found, wanted, budget, strict=True):
        assert got.sharding.spec == split.spec
        check_close(name, to_torch(got), want, same_dtype, factor=2.0 if name == "out" else 3.0)
