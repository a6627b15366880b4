"""Calls on CUDA devices, without one: the launches of XLA run in its memory by Triton's interpreter; and exported programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexattn
from flexattn.testing import check_close, make_inputs
from tests.jax.arrays import normal
from tests.jax.test_attention import check, to_torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import cuda, custom_call  # noqa: E402

LENGTHS = [5, 0, 19]
TENSORS = ("bias", "alibi_slopes", "softmax_offset")


@pytest.mark.sample("arguments")
@pytest.mark.parametrize("d", [16, 40])
@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask_type": "causal_bottom_right", "window_size": (9, 0), "softcap": 3.0},
        {"bias_type": "alibi", "attn_mask_type": "causal", "alibi_slopes": (4,)},
        {"bias_type": "post_scale_bias", "bias": (1, 4, 17, 23)},
        {"bias_type": "pre_scale_bias", "bias": (2, 1, 17, 23), "softmax_type": "off-by-one"},
        {"softmax_type": "learnable", "softmax_offset": (4,)},
        {"dropout_p": 0.25, "rng_state": torch.tensor([2**33 + 5, 0])},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
def test_launches_in_xlas_memory_equal_the_reference(interpreted: list[Any], arguments: dict[str, Any], d: int) -> None:
    generator = torch.Generator().manual_seed(3)
    given = {
        name: torch.randn(x, generator=generator) if type(x) is tuple and name in TENSORS else x for name, x in arguments.items()
    }
    check(make_inputs(lengths_q=[17, 17], lengths_kv=[23, 23], head_dim_qk=d), **given)
    assert any("fwd" in one.launch.kernel.__name__ for one in interpreted)
    assert any("bwd" in one.launch.kernel.__name__ for one in interpreted)


def test_packed_sequences_in_xlas_memory_equal_the_reference(interpreted: list[Any]) -> None:
    check(make_inputs("thd", lengths_q=LENGTHS, lengths_kv=[7, 3, 13], gap=2), attn_mask_type="padding_causal")
    assert interpreted


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_fp8_is_as_right_as_torchs(interpreted: list[Any], granularity: str) -> None:
    """Its blocks differ on the interpreter's device."""
    q, k, v = (x.astype(jnp.bfloat16) for x in jax.random.normal(jax.random.key(0), (3, 2, 70, 2, 32)))
    recipe = flexattn.fp8.Recipe(granularity=granularity)
    with cuda.compiled_for((8, 9), processors=4):
        out, pull = jax.vjp(lambda *x: fj.attention(*x, attn_mask_type="causal", fp8_recipe=recipe, deterministic=True), q, k, v)
        ours = [to_torch(x) for x in (out, *pull(out))]

    def by_torch(leaves: list[torch.Tensor], **how: Any) -> list[torch.Tensor]:
        out = flexattn.attention(*leaves, attn_mask_type="causal", **how)
        return [out.detach(), *torch.autograd.grad(out, leaves, ours[0].to(out.dtype))]

    leaves = [to_torch(x).requires_grad_() for x in (q, k, v)]
    exact = by_torch([x.detach().double().requires_grad_() for x in leaves], backend="eager")
    for name, *three in zip(
        ("out", "dq", "dk", "dv"), ours, exact, by_torch(leaves, fp8_recipe=recipe, backend="triton"), strict=True
    ):
        check_close(name, *three)
    assert sum("quantize" in one.launch.kernel.__name__ for one in interpreted) > 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captures(interpreted: list[Any], deterministic: bool) -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 4, 16))
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])

    def loss(attend: Any, q: Any, slopes: Any) -> Any:
        return (attend(q, slopes) ** 2).sum()

    def ours(q: Any, slopes: Any) -> Any:
        how = {"attn_mask_type": "causal", "deterministic": deterministic}
        return fj.attention(q, k, v, **how, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))

    def plain(q: Any, slopes: Any) -> Any:
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 4
        i, j = jnp.arange(40)[:, None], jnp.arange(40)[None]
        scores = jnp.where(i >= j, scores - slopes[:, None, None] * (i - j), -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)

    found = jax.jit(jax.grad(lambda *x: loss(ours, *x), (0, 1)))(q, slopes)
    with jax.enable_x64(True):
        q, k, v, slopes = (x.astype(jnp.float64) for x in (q, k, v, slopes))
        exact = jax.grad(lambda *x: loss(plain, *x), (0, 1))(q, slopes)
        for a, b in zip(found, exact, strict=True):
            assert abs(a - b).max() < 2e-5 * abs(b).max()
    assert any("captures" in one.launch.kernel.__name__ for one in interpreted)


@pytest.mark.parametrize("fmt", ["sbhd", pytest.param("bhsd", marks=pytest.mark.slow)])
def test_sums_over_split_keys_in_formats_with_other_strides(interpreted: list[Any], fmt: str) -> None:
    """dk and dv are sums of several parts, which are copied into tensors with other strides."""
    q, k, v = (jax.random.normal(jax.random.key(heads), (2, 17, heads, 16)) for heads in (4, 1, 1))
    there = ["bshd".index(letter) for letter in fmt]
    back = [fmt.index(letter) for letter in "bshd"]

    def loss(fmt: str, *x: Any) -> Any:
        return (fj.attention(*x, qkv_format=fmt) ** 2).sum()

    with cuda.compiled_for((8, 0), processors=132):
        found = jax.jit(jax.grad(lambda *x: loss(fmt, *x), (0, 1, 2)))(*(x.transpose(there) for x in (q, k, v)))
    assert any(one.launch.kernel.__name__ == "_attn_bwd_dkdv_kernel" for one in interpreted)
    for a, b in zip(found, jax.grad(lambda *x: loss("bshd", *x), (0, 1, 2))(q, k, v), strict=True):
        assert abs(a.transpose(back) - b).max() < 2e-5 * abs(b).max()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_block_mask_with_the_gradient_of_a_bias(interpreted: list[Any], batch_invariant: bool) -> None:
    """The kinds of blocks are made of the lists in each call. Floor division by a number takes the number's sign."""
    q, k, v = (normal(heads, 2, 40, heads, 16) for heads in (4, 2, 2))

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i // 16 + j // 16) % 2 == 0

    def results(bias: Any, **mask: Any) -> Any:
        def loss(bias: Any) -> Any:
            out = fj.attention(q, k, v, bias=bias, batch_invariant=batch_invariant, **mask)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, has_aux=True))(bias)

    bias, visible = normal(5, 1, 4, 40, 40), (jnp.arange(40)[:, None] // 16 + jnp.arange(40) // 16) % 2 == 0
    found = results(bias, block_mask=fj.create_block_mask(mask_mod, None, None, 40, 40, 16))
    for a, b in zip(found, results(jnp.where(visible, bias, -jnp.inf)), strict=True):
        assert abs(a - b).max() < 1e-5 * abs(b).max()
    assert any("dbias" in one.launch.kernel.__name__ for one in interpreted)


def test_gradients_of_several_captures_deterministic(interpreted: list[Any]) -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 24, 2, 16))
    tables = (jnp.array([0.5, 0.25]), jnp.array([0.125, -0.5]))

    def loss(deterministic: bool, *tables: Any) -> Any:
        mod = lambda s, b, h, i, j: s * tables[0][h] + tables[1][h] * j  # noqa: E731
        return (fj.attention(q, k, v, score_mod=mod, deterministic=deterministic) ** 2).sum()

    found, other = (jax.jit(jax.grad(lambda *x, d=d: loss(d, *x), (0, 1)))(*tables) for d in (True, False))
    for a, b in zip(found, other, strict=True):
        assert abs(a - b).max() < 1e-5 * abs(b).max()
    assert sum("captures" in one.launch.kernel.__name__ for one in interpreted) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "softcap", "post_scale_bias", "masks and a bias"])
def test_callbacks_of_transformer_engine_in_xlas_memory(interpreted: list[Any], name: str) -> None:
    from tests.jax import test_te_score_mod as cases

    if name == "masks and a bias":
        cases.test_arrays_get_gradients_beside_masks_and_a_bias()
    else:
        cases.test_cases_of_pull_request_2985(name, (1, 16, 2, 64), True, "float16")
    assert any("bwd" in one.launch.kernel.__name__ for one in interpreted)


def test_a_finite_number_that_masks_is_computed(interpreted: list[Any]) -> None:
    """The call cannot read lse where it runs, so the number becomes no band."""
    q, k, v, dout = jax.random.normal(jax.random.key(0), (4, 1, 24, 1, 16))

    def plain(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(24)[:, None], jnp.arange(24)[None]
        scores = jnp.where(i < j, -1e9, jnp.einsum("bihd,bjhd->bhij", q, k) / 4)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)

    out, pull = jax.vjp(lambda *x: fj.attention(*x, score_mod=lambda s, b, h, i, j: jnp.where(i < j, -1e9, s)), q, k, v)
    found = (out, *pull(dout))
    with jax.enable_x64(True):
        exact, pull_exact = jax.vjp(plain, *(x.astype(jnp.float64) for x in (q, k, v)))
        for a, b in zip(found, (exact, *pull_exact(dout.astype(jnp.float64))), strict=True):
            assert abs(a - b).max() < 2e-5 * abs(b).max()
    assert any("bwd" in one.launch.kernel.__name__ for one in interpreted)


EXPORTED = """
import json, sys
import jax, jax.numpy as jnp
from flexattn.jax import attention, compiled_for, cuda

from flexattn.jax.custom_call import _jaxlib

names, zeros, custom_call, parameter = [], [], cuda.custom_call, _jaxlib().create_array_parameter
def noted(step, *rest):
    names.append(step.launch.kernel.__name__)
    return custom_call(step, *rest)
def described(size, alignment):
    zeros.extend([size] if size else [])
    return parameter(size, alignment)
cuda.custom_call, _jaxlib().create_array_parameter = noted, described
*shape, key_heads = map(int, sys.argv[2].split())
q, k = (jax.ShapeDtypeStruct((*shape[:2], heads, shape[3]), jnp.bfloat16) for heads in (shape[2], key_heads))
call = jax.grad(lambda *x: attention(*x, attn_mask_type="causal").astype(jnp.float32).sum(), (0, 1, 2))
check = jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)
major, minor = map(int, sys.argv[1].split("."))
with compiled_for((major, minor), processors=132):
    text = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[check])(q, k, k).mlir_module()
counts = [text.count(it) for it in ("@" + cuda.TARGET, "#stablehlo.output_operand_alias<", "stablehlo.optimization_barrier")]
print(json.dumps([names, zeros, *counts]))
"""


@pytest.mark.parametrize(
    ("capability", "shape", "zeros", "aliases", "names"),
    [
        (  # dk and dv are sums of four parts in fp32, in the portable kernels
            "8.0",
            "1 512 32 64 1",
            [4 * 512 * 64 * 4] * 2,
            11,
            ["_attn_fwd_kernel", "_attn_bwd_dq_kernel", "_attn_bwd_dkdv_kernel"],
        ),
        (
            "9.0",
            "2 4096 8 128 8",
            [4],
            11,
            [
                *("_attn_fwd_hopper_kernel", "_attn_bwd_preprocess_kernel", "_attn_bwd_fused_hopper_kernel"),
                "_attn_bwd_dq_conversion_kernel",
            ],
        ),
    ],
)
def test_exported_program_has_the_launches(
    fresh_python: Any, capability: str, shape: str, zeros: list[int], aliases: int, names: list[str]
) -> None:
    try:
        from jax._src.lib import gpu_triton
    except ImportError as e:
        pytest.skip(f"JAX's CUDA plugin, which describes kernels, is not installed: {e}")
    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("JAX's CUDA plugin, which describes kernels, is not installed: pip install --no-deps jax-cuda13-plugin")
    if capability == "9.0" and not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        pytest.skip("tensor maps, which the kernels for sm_90 need, come with jaxlib 0.11.1")
    wish = "never" if names[0] == "_attn_fwd_kernel" else "auto"
    done = fresh_python("-c", EXPORTED, capability, shape, env={"JAX_PLATFORMS": "cpu", "FLEXATTN_HOPPER": wish})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [names, zeros, len(names), aliases, 2 * len(names)]


HOPPER = """
import json, os
import jax, jax.numpy as jnp
from flexattn.jax import attention, compiled_for, cuda
from flexattn.jax.custom_call import CustomCall

names = []
def noted(step, *_):
    names[-1].append(step.launch.kernel.__name__)
    return CustomCall(b"", tuple(dict.fromkeys(step.buffers)))
cuda.custom_call = noted
x = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
def loss(*x):
    return attention(*x, attn_mask_type="causal").astype(jnp.float32).sum()
check = jax.export.DisabledSafetyCheck.custom_call(cuda.TARGET)
with compiled_for((9, 0), processors=132):
    for value in ("auto", "never"):
        os.environ["FLEXATTN_HOPPER"] = value
        names.append([])
        call = jax.jit(jax.grad(lambda *x: loss(*x)))  # a new function, as JAX keeps the trace of one
        jax.export.export(call, platforms=["cuda"], disabled_checks=[check])(x, x, x)
print(json.dumps(names))
"""


def test_a_change_of_the_environment_takes_effect(fresh_python: Any) -> None:
    """In a function that is compiled anew; in a process of its own, because Triton's interpreter runs no kernels for sm_90."""
    done = fresh_python("-c", HOPPER, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    auto, never = json.loads(done.stdout)
    assert len(auto) > 2
    assert all("hopper" in name for name in (auto[0], auto[2]))
    assert not any("hopper" in name for name in never)


def test_a_call_knows_the_environment_that_it_was_traced_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX keeps compiled calls by it, so a call outside of jit is compiled anew."""
    q = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))

    def text() -> str:
        return str(jax.make_jaxpr(lambda *x: fj.attention(*x))(q, q, q))  # a new function, because JAX keeps the trace of one

    before = text()
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    assert text() == before.replace("hopper='auto'", "hopper='never'") != before
    monkeypatch.setenv("FLEXATTN_HOPPER", "seldom")
    with pytest.raises(ValueError, match="FLEXATTN_HOPPER is 'seldom'"):
        fj.attention(q, q, q)


def test_parameters_move_by_their_names() -> None:
    ptx = """.version 8.7
.visible .entry kernel(
\t.param .align 64 .b8 kernel_param_0[128],
\t.param .u64 .ptr .global .align 1 kernel_param_1,
\t.param .u32 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
)
.reqntid 128
{ ld.param.b32 %r1, [kernel_param_2]; }
"""
    moved = custom_call._with_parameters_in_order(ptx, [1, 2, 0])
    declared, body = moved.split("\n)\n")
    assert [line.rstrip(",").split()[-1] for line in declared.splitlines()[2:]] == [
        *("kernel_param_1", "kernel_param_2", "kernel_param_0[128]", "kernel_param_3")
    ]
    assert body == ptx.split("\n)\n")[1]


OPTIMISED = {"xla_backend_optimization_level": 3}  # conftest.py lowers XLA's default


def test_quotients_are_rounded_to_nearest() -> None:
    """torch rounds so; XLA does not for float32 on a GPU. Below the normal numbers they are 0, as in XLA on a CPU."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 3.0, -448.0, 57344.0, 2.0**-126, 3.4028235e38, -3.4028235e38]
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (2, 200_000), np.uint32).view(np.float32)  # of every exponent
    mantissas = rng.integers(2**23, 2**24, (2, 200_000)).astype(np.float32)  # all quotients are normal
    given = np.concatenate([bits, mantissas, np.array(np.meshgrid(special, special), np.float32).reshape(2, -1)], 1)
    x, y = np.where(abs(given) < 2.0**-126, np.copysign(np.float32(0), given), given)
    with np.errstate(all="ignore"):
        expected = x / y
    expected = np.where(abs(expected) < 2.0**-126, np.copysign(np.float32(0), expected), expected)
    for quotient in (cuda.quotient, jax.jit(cuda.quotient, compiler_options=OPTIMISED)):
        found = np.asarray(quotient(jnp.asarray(x), jnp.asarray(y)))
        is_same = (found.view(np.int32) == expected.view(np.int32)) | (np.isnan(found) & np.isnan(expected))
        assert found.dtype == np.float32
        assert is_same.all(), (x[~is_same][:4], y[~is_same][:4], found[~is_same][:4])
    by_number = cuda.quotient(jnp.asarray(mantissas[0]), 3.0)
    assert (np.asarray(by_number) == mantissas[0] / np.float32(3.0)).all()


def test_the_compiler_divides_in_fp64(tmp_path: Path) -> None:
    """LLVM must not turn it back into a float32 division, whose rounding differs on a GPU alone."""
    x = jnp.ones(1000, jnp.float32)
    jax.jit(cuda.quotient).lower(x, x).compile(compiler_options=OPTIMISED | {"xla_dump_to": str(tmp_path)})
    lines = [line for path in tmp_path.glob("*ir-with-opt.ll") for line in path.read_text().splitlines() if " fdiv " in line]
    assert lines
    assert all("double" in line for line in lines), lines


def test_explain_names_the_kernels() -> None:
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 32)).astype(jnp.bfloat16)
    with cuda.compiled_for((9, 0), processors=132):
        found = fj.explain(q, q, q, attn_mask_type="causal").details
    assert "forward: triton" in found, found
    assert "sm_90" in found


def test_no_gpu_and_no_kind_named() -> None:
    q = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.float32)
    with pytest.raises(NotImplementedError, match="compiled_for"):
        jax.export.export(jax.jit(fj.attention), platforms=["cuda"])(q, q, q)


WIDE = (1, 32, 2, 600)
DELAYED = flexattn.fp8.Recipe(scaling="delayed")
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "cudnn": ({"backend": "cudnn", "q": (1, 32, 2, 20)}, flexattn.BackendError, "backend='cudnn' cannot run the forward"),
    "head dim": (
        {"q": WIDE},
        flexattn.BackendError,
        r"q and k is 600.* 'auto' tries no other backend; for torch's, pass backend='cudnn' or backend='eager'",
    ),
    "no state": ({"fp8_recipe": DELAYED}, ValueError, "fp8_state is None with scaling 'delayed'; accepted: a DelayedScaling"),
    "a state of torch": (
        {"fp8_recipe": DELAYED, "fp8_state": flexattn.fp8.DelayedScaling(DELAYED, 2)},
        TypeError,
        r"fp8_state is .*; accepted: a flexattn\.jax\.fp8\.DelayedScaling, or None",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_run_on_cuda_says_so(arguments: dict[str, Any], error: Any, text: str) -> None:
    """The error comes when the call is compiled, and in explain, with the same text."""
    given = {name: value for name, value in arguments.items() if name != "q"}
    q = jax.ShapeDtypeStruct(arguments.get("q", (1, 32, 2, 16)), jnp.bfloat16)
    with cuda.compiled_for((9, 0), processors=132):
        with pytest.raises(error, match=text) as compiled:
            jax.export.export(jax.jit(lambda *x: fj.attention(*x, **given)), platforms=["cuda"])(q, q, q)
        with pytest.raises(error, match=text) as explained:
            fj.explain(*[jnp.zeros(q.shape, q.dtype)] * 3, **given)
    assert str(explained.value) == str(compiled.value)


def test_a_backend_of_the_environment_is_refused_as_one_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.zeros((1, 32, 2, 16), jnp.bfloat16)
    monkeypatch.setenv("FLEXATTN_BACKEND", "cudnn")
    with cuda.compiled_for((9, 0), processors=132), pytest.raises(flexattn.BackendError, match="backend='cudnn' cannot run the"):
        fj.explain(q, q, q, bias_type="alibi", dropout_p=0.5, rng_state=jax.random.key(0), softcap=3.0)
