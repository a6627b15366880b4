"""Backends that torch runs in an XLA handler: the route of CUDA devices, taken on a CPU, and the handler's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flexattn
from flexattn import ops
from flexattn.testing import make_inputs
from tests.jax.test_attention import check, to_torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from jax.interpreters import mlir  # noqa: E402

from flexattn.jax import cuda, ffi, host, primitives  # noqa: E402

P = jax.sharding.PartitionSpec


@pytest.fixture
def as_cuda() -> Iterator[list[str]]:
    """Makes this machine's CPU a CUDA device for flexattn.jax; yields the texts of the calls that the handlers got."""
    both = (
        (primitives.local_forward_p, host.FORWARD, cuda.forward, primitives.forward_shapes),
        (primitives.local_backward_p, host.BACKWARD, cuda.backward, primitives.backward_shapes),
    )
    texts: list[str] = []
    handled = primitives._call_handler

    def noted(name: str, shapes: Any, call: Any, arrays: Any) -> Any:
        texts.append(name)
        return handled(name, shapes, call, arrays)

    primitives._call_handler = noted  # type: ignore[assignment]
    jax.clear_caches()
    for primitive, name, planned, shapes in both:
        rule = mlir.lower_fun(primitives._on_cuda(name, shapes, planned), multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
    with cuda.compiled_for((9, 0), processors=132):
        yield texts
    primitives._call_handler = handled
    for primitive, name, _, shapes in both:
        mlir.register_lowering(primitive, mlir.lower_fun(primitives._on_host(name, shapes), multiple_results=True), platform="cpu")
    jax.clear_caches()


def qkv(b: int = 2, s: int = 21, h: int = 4, d: int = 16) -> tuple[Any, Any, Any]:
    q, k, v = jax.random.normal(jax.random.key(0), (3, b, s, h, d))
    return q, k, v


def eager(*x: Any, **arguments: Any) -> Any:
    return fj.attention(*x, **{"attn_mask_type": "causal", "backend": "eager"} | arguments)


def both(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    out, pull = jax.vjp(lambda *x: eager(*x, **arguments), q, k, v)
    return out, *pull(out)


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_size": (9, 0), "softcap": 3.0, "attn_mask_type": "causal"},
        {"softmax_type": "learnable", "softmax_offset": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"bias_type": "post_scale_bias", "bias": torch.linspace(-2, 2, 4 * 17 * 23).view(1, 4, 17, 23)},
        {"dropout_p": 0.25, "rng_state": torch.tensor([2**33 + 5, 0])},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_eager_by_name_equals_the_reference(as_cuda: list[str], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    monkeypatch.setenv("FLEXATTN_BACKEND", "eager")
    check(make_inputs(lengths_q=[17, 17], lengths_kv=[23, 23]), **arguments)
    assert set(as_cuda) == {host.FORWARD, host.BACKWARD}


def test_packed_sequences_equal_the_reference(as_cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_BACKEND", "eager")
    check(make_inputs("thd", lengths_q=[5, 0, 19], lengths_kv=[7, 3, 13], gap=2), attn_mask_type="padding_causal")
    assert as_cuda


def test_fp8_equals_torchs(as_cuda: list[str]) -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())
    recipe = flexattn.fp8.Recipe(margin=1)  # dout is quantised before the backward, on every device
    out, dq, dk, dv = both(q, k, v, fp8_recipe=recipe)
    leaves = [to_torch(x).requires_grad_() for x in (q, k, v)]
    expected = flexattn.attention(*leaves, attn_mask_type="causal", fp8_recipe=recipe, backend="eager")
    assert torch.equal(to_torch(out), expected)
    for a, b in zip((dq, dk, dv), torch.autograd.grad(expected, leaves, expected.detach()), strict=True):
        assert torch.equal(to_torch(a), b)


@pytest.mark.slow
def test_mods_and_gradients_of_captures(as_cuda: list[str]) -> None:
    q, k, v = qkv()
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])

    def loss(attend: Any, q: Any, slopes: Any) -> Any:
        return (attend(q, slopes) ** 2).sum()

    def ours(q: Any, slopes: Any) -> Any:
        return eager(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))

    def plain(q: Any, slopes: Any) -> Any:
        i, j = jnp.arange(21)[:, None], jnp.arange(21)[None]
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 4 - slopes[:, None, None] * (i - j)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(i >= j, scores, -jnp.inf)), v)

    found = jax.jit(jax.grad(lambda *x: loss(ours, *x), (0, 1)))(q, slopes)
    with jax.enable_x64(True):
        q, k, v, slopes = (x.astype(jnp.float64) for x in (q, k, v, slopes))
        exact = jax.grad(lambda *x: loss(plain, *x), (0, 1))(q, slopes)
        for a, b in zip(found, exact, strict=True):
            assert abs(a - b).max() < 2e-5 * abs(b).max()


@pytest.mark.usefixtures("four_devices")
def test_transforms_have_the_bits_of_plain_calls(as_cuda: list[str]) -> None:
    q, k, v = qkv(b=4)
    expected = both(q, k, v)
    jitted = jax.jit(both)
    for _ in range(30):
        assert all((a == b).all() for a, b in zip(jitted(q, k, v), expected, strict=True))
    _, stacked = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, both(x, k, v)), 0, xs))(jnp.stack([q] * 3))
    mapped = jax.jit(jax.vmap(both))(*(x[:, None] for x in (q, k, v)))
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False))(q, k, v)
    for some, folded, sharded, one in zip(stacked, mapped, parts, expected, strict=True):
        assert all((some[i] == one).all() for i in range(3))
        assert (folded[:, 0] == one).all()
        assert (sharded == one).all()


def test_donated_buffers(as_cuda: list[str]) -> None:
    q, k, v = qkv()
    expected = both(q, k, v)
    copies = [jnp.array(x, copy=True) for x in (q, k, v)]
    found = jax.jit(both, donate_argnums=(0, 1, 2))(*copies)
    assert all(x.is_deleted() for x in copies)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


MANY = """
import faulthandler, os, threading
faulthandler.dump_traceback_later(120, exit=True)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp
from flexattn.jax import attention

q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
call = jax.jit(jax.grad(lambda *x: (attention(*x, attn_mask_type="causal", backend="eager") ** 2).sum(), (0, 1, 2)))
expected = call(q, k, v)
wrong = []

def many(device):
    x = jax.device_put((q, k, v), device)
    found = [call(*x) for _ in range(20)]  # all enqueued before the first is waited for
    for one in jax.block_until_ready(found):
        wrong.extend(i for i in range(3) if not (jax.device_put(one[i], jax.devices()[0]) == expected[i]).all())

threads = [threading.Thread(target=many, args=(device,)) for device in jax.devices() for _ in range(2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(len(wrong))
"""


def test_threads_that_enqueue_many_calls_do_not_wait_for_each_other(fresh_python: Any) -> None:
    done = fresh_python("-c", MANY, env={"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr[-3000:]


def test_cudnn_by_name_reaches_torch(as_cuda: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Torch then reports that this is no CUDA device: the running program fails with that text, and prints it."""
    from flexattn.dispatch import cudnn_backend

    monkeypatch.setattr(cudnn_backend, "library_error", lambda: None)
    monkeypatch.setattr(cudnn_backend, "_known_bad", lambda *_: None)
    cuda.select.cache_clear()
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"BackendError: [^\n]*\n  cudnn: cuDNN runs on CUDA devices, not on 'cpu'"
    ):
        jax.block_until_ready(jax.jit(lambda *x: eager(*x, backend="cudnn"))(q, k, v))
    assert "Traceback" in capfd.readouterr().err
    assert as_cuda == [host.FORWARD]
    cuda.select.cache_clear()


def test_explain_says_who_runs_it(as_cuda: list[str]) -> None:
    q, k, v = qkv()
    named = fj.explain(q, k, v, backend="eager")
    assert (named.forward.backend, named.backward.backend, named.forward.why) == ("eager", "eager", "requested by name")
    planned = dict(fj.explain(q, k, v).forward.rejected)
    assert planned["eager"] == "torch would run it; ask for it with backend='eager'"
    assert "cudnn" in planned


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has a device and torch has none."""
    monkeypatch.setattr(cuda, "_first_device", lambda: cuda.Device((9, 0), 132))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    q, k, v = qkv()
    text = r"is 'eager', which torch runs, but torch .* sees no CUDA device; install torch for CUDA"
    with pytest.raises(flexattn.BackendError, match=text):
        fj.explain(q, k, v, backend="eager")
    with pytest.raises(flexattn.BackendError, match=text):
        jax.jit(lambda *x: eager(*x)).trace(q, k, v).lower(lowering_platforms=("cuda",))


def test_export_names_the_handlers(as_cuda: list[str]) -> None:
    q, k, v = qkv()
    call = jax.jit(lambda *x: eager(*x))
    with pytest.raises(ValueError, match="flexattn_forward"):
        jax.export.export(call, platforms=["cuda"])(q, k, v)


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        (ValueError("planted é"), "ValueError: planted é"),
        (KeyboardInterrupt("planted"), "KeyboardInterrupt: planted"),
        (SystemExit(3), "SystemExit: 3"),
        (_Unprintable(), "_Unprintable"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_exception_is_lost(monkeypatch: pytest.MonkeyPatch, capfd: Any, planted: BaseException, text: str) -> None:
    def fail(*_: Any) -> Any:
        raise planted

    q, k, v = qkv()
    monkeypatch.setattr(ops, "run_forward", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(fj.attention(q, k, v))
    assert type(planted).__name__ in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out: out[:1], r"result 0 is torch.float32 \(1, 21, 4, 16\) but XLA expects torch.float32 \(2, 21, 4, 16\)"),
        (lambda out: out.double(), "result 0 is torch.float64"),
    ],
)
def test_a_result_of_another_shape_or_dtype_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    run = ops.run_forward
    monkeypatch.setattr(ops, "run_forward", lambda *x: (change(run(*x)[0]), *run(*x)[1:]))
    q, k, v = qkv()
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(fj.attention(q, k, v))


_RAN: list[tuple[int, int]] = []
_local = threading.local()


def _count(text: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    _local.count = getattr(_local, "count", 0) + 1
    _RAN.append((threading.get_native_id(), _local.count))
    return [tensors[0] + 1]


# They live as long as the process, because XLA keeps their addresses.
_HANDLERS = {"counting": ffi.handler(_count, "cpu"), "on_a_stream": ffi.handler(_count, "cuda")}


def _called(name: str) -> Any:
    jax.ffi.register_ffi_target(f"test_{name}", ffi.capsule(_HANDLERS[name]), platform="cpu")
    return jax.jit(lambda x: jax.ffi.ffi_call(f"test_{name}", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, call=""))


@pytest.mark.usefixtures("four_devices")
def test_thread_locals_live_from_call_to_call_in_xlas_threads() -> None:
    """Then cuDNN's handles, one for each thread, are not made anew in each call."""
    _RAN.clear()
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    call = jax.jit(jax.shard_map(_called("counting"), mesh=mesh, in_specs=P("device"), out_specs=P("device"), check_vma=False))
    x = jnp.zeros((4,))
    for _ in range(20):
        x = call(x)
    assert (x == 20).all()
    counts_by_thread = {one: [count for thread, count in _RAN if thread == one] for one, _ in _RAN}
    assert max(len(counts) for thread, counts in counts_by_thread.items() if thread != threading.get_native_id()) > 1
    for counts in counts_by_thread.values():
        assert counts == list(range(1, len(counts) + 1))


def test_a_frame_without_a_stream_is_an_error_of_xlas() -> None:
    """A CPU has none; the text is XLA's own."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RuntimeError: XLA's (ordinal_get|stream_get) failed: .+"):
        jax.block_until_ready(_called("on_a_stream")(jnp.zeros((3,))))
