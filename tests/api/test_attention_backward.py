"""attention_backward(): gradients for parts of the keys, with out and lse of all keys, add up to the undivided gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention_backward, call_cache, ops
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.describe import describe
from flexattn.dispatch.reference import reference_gradients
from flexattn.dispatch.spec import FP32_GRADIENTS, Results
from flexattn.functional import bind_call
from flexattn.prepare import prepare
from flexattn.shorthands import in_full
from flexattn.testing import GRADIENT_FACTOR, check_close

BACKENDS = ("eager", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton is interpreted
HALVES = (torch.float16, torch.bfloat16)
SQ, SKV, HEADS, HEADS_KV, DIM, DIM_V = 21, 21, 4, 2, 16, 24
CUTS = {2: (0, 8, SKV), 3: (0, 5, 13, SKV)}
ALL = slice(None)
FP64 = 1e-12  # roundings of sums of some hundred numbers near 1: the reference, being of the same dtype, gives no budget


class Part(NamedTuple):
    keys: slice
    rows: slice = ALL
    arguments: dict[str, Any] = {}  # noqa: RUF012


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def qkv(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"q": (2, SQ, HEADS, DIM), "k": (2, SKV, HEADS_KV, DIM), "v": (2, SKV, HEADS_KV, DIM_V)}
    return {name: randn(i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def pieces(count: int) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(CUTS[count])]


def plain(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    return {"softmax_scale": 0.3}, [Part(keys, arguments={"softmax_scale": 0.3}) for keys in pieces(count)]


def softcap(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    same = {"softcap": 2.0, "deterministic": True}
    return same, [Part(keys, arguments=same) for keys in pieces(count)]


def bias(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    whole = randn(7, 1, HEADS, SQ, SKV, dtype=dtype).requires_grad_()
    parts = [
        Part(keys, arguments={"bias_type": "pre_scale_bias", "bias": whole.detach()[..., keys].requires_grad_()})
        for keys in pieces(count)
    ]
    return {"bias_type": "pre_scale_bias", "bias": whole}, parts


def row_bias(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    """A number for all keys, which changes the share of a part."""
    shared = {"bias": randn(7, 1, HEADS, SQ, 1, dtype=dtype).requires_grad_()}
    return shared, [Part(keys, arguments=shared) for keys in pieces(count)]


def sink(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    """The last part has it, in which the first rows see no key."""
    same = {"softmax_type": "learnable", "softmax_offset": randn(8, HEADS).requires_grad_()}
    *first, last = causal(dtype, count)[1]
    start = last.keys.start
    # The rows that see none of the last part's keys have a share of the sink too.
    mask = {"mask_mod": lambda b, h, i, j: j + start <= i}
    return {"attn_mask_type": "causal"} | same, [*first, Part(last.keys, arguments=mask | same)]


def causal(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    """Queries from the first key of the part on: strided views of lse."""
    parts = [Part(keys, slice(keys.start, None), {"attn_mask_type": "causal"}) for keys in pieces(count)]
    return {"attn_mask_type": "causal"}, parts


def window(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    """A part's keys end before its last queries, which see none of them; and by the end of both, the other diagonal."""
    left = {"attn_mask_type": "causal", "window_size": (4, 0)}
    *first, last = pieces(count)
    parts = [Part(keys, slice(keys.start, None), left) for keys in first]
    right = {"attn_mask_type": "causal_bottom_right", "window_size": (4, 0)}
    return left, [*parts, Part(last, slice(last.start - 2, None), right)]


def mods(dtype: torch.dtype, count: int) -> tuple[dict[str, Any], list[Part]]:
    """Row 3 sees no key at all, and some rows none of a part."""
    slopes = randn(9, HEADS, dtype=torch.float64 if dtype is torch.float64 else torch.float32).requires_grad_()

    def of(first: int) -> dict[str, Any]:
        return {
            "score_mod": lambda score, b, h, i, j: score + slopes[h] * (j + first - i) * 0.1,
            "mask_mod": lambda b, h, i, j: (j + first <= i) & (i != 3),
        }

    return of(0), [Part(keys, arguments=of(keys.start)) for keys in pieces(count)]


CASES: dict[str, Callable[..., tuple[dict[str, Any], list[Part]]]] = {
    function.__name__: function for function in (plain, softcap, bias, row_bias, sink, causal, window, mods)
}


def whole_of(arguments: dict[str, Any], tensors: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = flexattn.attention(**tensors, **arguments, return_lse=True, backend=backend)
    return out, lse


def add_up(
    parts: list[Part], tensors: dict[str, Tensor], dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, backend: str
) -> dict[str, Tensor]:
    """The whole's gradients in fp64."""
    total = {f"d{name}": torch.zeros(t.shape, dtype=torch.float64, device=DEVICE) for name, t in tensors.items()}
    biases, others = [], []
    for keys, rows, arguments in parts:
        found = attention_backward(
            dout[:, rows],
            tensors["q"][:, rows],
            tensors["k"][:, keys],
            tensors["v"][:, keys],
            out[:, rows],
            lse[..., rows],
            dlse=None if dlse is None else dlse[..., rows],
            **arguments,
            backend=backend,
        )
        assert not any(t.requires_grad for t in (found.dq, found.dk, found.dv))
        assert (found.dbias is None) == ("bias" not in arguments)
        total["dq"][:, rows] += found.dq
        total["dk"][:, keys] += found.dk
        total["dv"][:, keys] += found.dv
        biases += [] if found.dbias is None else [found.dbias.double()]
        if found.dsoftmax_offset is not None:
            total["dsoftmax_offset"] = found.dsoftmax_offset.double()
        others.append([gradient.double() for _, gradient in found.dcaptures])
    if biases:
        total["dbias"] = torch.cat(biases, -1) if biases[0].shape[-1] > 1 else torch.stack(biases).sum(0)
    if any(others):
        total["dslopes"] = torch.stack([gradient for (gradient,) in others]).sum(0)
    return total


def check_case(case: str, count: int, backend: str, dtype: torch.dtype, has_dlse: bool = True, times: int = 1) -> None:
    arguments, parts = CASES[case](dtype, count)
    tensors = qkv(dtype)
    out, lse = whole_of(arguments, tensors, backend)
    dout, dlse = randn(4, *out.shape, dtype=dtype), randn(5, *lse.shape, dtype=lse.dtype) if has_dlse else None
    x, settings = bind_call(**{name: t.requires_grad_() for name, t in tensors.items()}, **arguments)
    tensors = {name: t.detach() for name, t in tensors.items()}
    spec = ops.spec_to_run(x, settings)
    exact, budget = (reference_gradients(spec, x, dout, dlse, kind) for kind in (torch.float64, dtype))
    for _ in range(times):
        with torch.no_grad():
            found = add_up(parts, tensors, dout, out, lse, dlse, backend)
        names = {"dslopes": "dmod_tensors"}
        for name, got in found.items():
            want, same_dtype = (getattr(gradients, names.get(name, name)) for gradients in (exact, budget))
            if name == "dslopes":
                (want,), (same_dtype,) = want, same_dtype
            if dtype is torch.float64:
                torch.testing.assert_close(got, want, rtol=FP64, atol=FP64)
            else:
                # In the parts' dtype, whose roundings are granted, not those of the fp64 that they were added up in.
                check_close(name, got.to(same_dtype.dtype), want, same_dtype, factor=GRADIENT_FACTOR)


@pytest.mark.sample("case")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up(case: str, backend: str) -> None:
    check_case(case, 3, backend, torch.float32)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("backend", "dtype"), [("eager", torch.float64), *((backend, dtype) for backend in BACKENDS for dtype in HALVES)]
)
@pytest.mark.parametrize("case", ["plain", "mods"])
def test_parts_add_up_in_other_dtypes(case: str, backend: str, dtype: torch.dtype) -> None:
    check_case(case, 2, backend, dtype)


class Errors(NamedTuple):
    """Errors by gradient: of sums over `COUNT` parts that were rounded, or kept in float32, and of the whole."""

    rounded: dict[str, float]
    kept: dict[str, float]
    whole: dict[str, float]


COUNT = 8  # parts whose roundings add up


@functools.cache
def errors_of_sums(backend: str, dtype: torch.dtype) -> Errors:
    """Root mean square errors: of dq over parts of the keys, and of dk and dv over parts of the queries."""
    tensors = {"q": randn(0, 1, 64, 2, 16, dtype=dtype), "k": randn(1, 1, 64, 2, 16, dtype=dtype)}
    tensors["v"] = randn(2, 1, 64, 2, 16, dtype=dtype)
    out, lse = whole_of({}, tensors, backend)
    dout = randn(4, *out.shape, dtype=dtype)
    x, settings = bind_call(**{name: t.clone().requires_grad_() for name, t in tensors.items()})
    exact = reference_gradients(ops.spec_to_run(x, settings), x, dout, None, torch.float64)
    size = 64 // COUNT

    def errors(count: int, fp32: str) -> dict[str, float]:
        totals = {name: torch.zeros(t.shape, device=DEVICE) for name, t in tensors.items()}
        for part in range(count):
            cut = slice(part * size, (part + 1) * size) if count > 1 else ALL
            for rows, keys, names in ((ALL, cut, "q"), (cut, ALL, "kv")) if count > 1 else ((ALL, ALL, "qkv"),):
                found = attention_backward(
                    *(dout[:, rows], tensors["q"][:, rows], tensors["k"][:, keys], tensors["v"][:, keys], out[:, rows]),
                    lse[..., rows],
                    backend=backend,
                    fp32_gradients=fp32,
                )
                for name in names:
                    totals[name][:, rows if name == "q" else keys] += getattr(found, f"d{name}")
        return {
            name: float((t.to(dtype).double() - getattr(exact, f"d{name}")).square().mean().sqrt()) for name, t in totals.items()
        }

    return Errors(errors(COUNT, "none"), errors(COUNT, "dqkv"), errors(1, "none"))


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_gradients_in_float32_are_as_exact_as_the_whole(backend: str, dtype: torch.dtype) -> None:
    """Sums of rounded parts are not equal."""
    rounded, kept, whole = errors_of_sums(backend, dtype)
    for name in "qkv":
        assert kept[name] <= 1.02 * whole[name], (name, kept, whole)
        assert rounded[name] >= 1.1 * whole[name], (name, rounded, whole)


@pytest.mark.sample
@pytest.mark.parametrize("fp32", FP32_GRADIENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_named_are_in_float32_and_round_to_the_same_bits(backend: str, fp32: str) -> None:
    call = arguments_of_a_call(torch.bfloat16) | {"backend": backend, "deterministic": True}
    wanted = attention_backward(**call)
    for _ in range(4):  # known calls too
        found = attention_backward(**call, fp32_gradients=fp32)
        for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=False):
            is_named = name in {"none": (), "dq": ("dq",), "dkv": ("dk", "dv"), "dqkv": ("dq", "dk", "dv")}[fp32]
            assert got.dtype is (torch.float32 if is_named else torch.bfloat16)
            assert got.is_contiguous()
            assert torch.equal(got.bfloat16(), want)
            assert bool((got != want).any()) is is_named


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_gradients_stay_as_they_are(dtype: torch.dtype) -> None:
    call = arguments_of_a_call(dtype) | {"backend": "eager"}
    for got, want in zip(attention_backward(**call, fp32_gradients="dqkv")[:3], attention_backward(**call)[:3], strict=True):
        assert got.dtype is dtype
        assert torch.equal(got, want)


def test_backends_without_gradients_in_float32_are_not_taken() -> None:
    call = arguments_of_a_call(torch.bfloat16)
    with pytest.raises(flexattn.BackendError, match="cuDNN"):
        attention_backward(**call, backend="cudnn", fp32_gradients="dkv")
    x, settings = bind_call(*(call[name] for name in "qkv"))
    spec = ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=(9, 0), results=Results(fp32="dkv"))
    assert "cuDNN returns gradients in 16 bits" in str(cudnn_backend.rule_error(spec, "backward"))
    assert "dkv in float32" in describe(spec)


def without_cudnn() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU, and torch.cuda.is_available() is False; the emulator's run of it is in test_cudnn_launchers.py"
    return cudnn_backend.device_error("cuda", torch.cuda.get_device_capability())


@pytest.mark.skipif(without_cudnn() is not None, reason=str(without_cudnn()))
@pytest.mark.parametrize("case", ["plain", "causal", "window"])
def test_parts_add_up_on_cudnn(case: str) -> None:
    check_case(case, 2, "cudnn", torch.bfloat16, has_dlse=False)


@pytest.mark.parametrize("case", ["plain", "sink", "mods"])
def test_kept_calls_give_the_same_as_the_first(case: str) -> None:
    check_case(case, 2, "eager", torch.float32, has_dlse=case != "plain", times=4)
    assert call_cache.cache_info()["hits"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences(backend: str) -> None:
    lengths, cut = (7, 0, 9), 4
    cu = torch.tensor([0, 7, 7, 16], dtype=torch.int32, device=DEVICE)
    tensors = {"q": randn(0, 16, HEADS, DIM), "k": randn(1, 16, HEADS_KV, DIM), "v": randn(2, 16, HEADS_KV, DIM)}
    lengths_of = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    whole = lengths_of | {"cu_seqlens_kv": cu}
    out, lse = whole_of(whole, tensors, backend)
    dout, dlse = randn(4, *out.shape), randn(5, *lse.shape)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    x, settings = bind_call(**leaves, **whole)
    exact, budget = (
        reference_gradients(ops.spec_to_run(x, settings), x, dout, dlse, kind) for kind in (torch.float64, torch.float32)
    )
    starts, found = [0, 7, 7], {name: torch.zeros_like(t) for name, t in tensors.items()}
    for begin, end in ((0, cut), (cut, 9)):
        tokens = [list(range(start + min(begin, n), start + min(end, n))) for start, n in zip(starts, lengths, strict=True)]
        cu_kv = torch.tensor([0, *map(len, tokens)], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        rows = list(itertools.chain(*tokens))
        part = attention_backward(
            *(dout, tensors["q"], tensors["k"][rows], tensors["v"][rows], out, lse),
            dlse=dlse,
            **lengths_of,
            cu_seqlens_kv=cu_kv,
            backend=backend,
        )
        found["q"] += part.dq
        found["k"][rows] = part.dk
        found["v"][rows] = part.dv
    for name, got in found.items():
        want, same_dtype = (getattr(gradients, f"d{name}") for gradients in (exact, budget))
        check_close(f"d{name}", got, want, same_dtype.double(), factor=GRADIENT_FACTOR)


@pytest.mark.sample
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_is_a_part_too_with_dropout(backend: str) -> None:
    """rng_state drops the same weights as the forward; gradients equal autograd's."""
    tensors = {name: t.requires_grad_() for name, t in qkv(torch.float32).items()}
    same = {"dropout_p": 0.25, "rng_state": torch.tensor([11, 5], device=DEVICE), "backend": backend}
    out, lse = flexattn.attention(**tensors, **same, return_lse=True)
    dout = randn(4, *out.shape)
    want = torch.autograd.grad(out, list(tensors.values()), dout)
    found = attention_backward(dout, *tensors.values(), out.detach(), lse.detach(), **same)
    for got, wanted in zip(found, want, strict=False):
        torch.testing.assert_close(got.detach(), wanted, rtol=1e-4, atol=1e-5)
    other = attention_backward(
        dout, *tensors.values(), out.detach(), lse.detach(), **same | {"rng_state": torch.tensor([12, 5], device=DEVICE)}
    )
    assert (other.dv - found.dv).abs().max() > 0.1


def test_a_function_of_ones_own_is_made_of_it() -> None:
    """Runs a ring: the forward without a graph, merged, and gradients with grad mode off."""

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [flexattn.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in pieces(2)]
            out, lse = flexattn.merge_attention(*parts[0], *parts[1])
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            parts = [attention_backward(dout, q, k[:, keys], v[:, keys], out, lse) for keys in pieces(2)]
            return sum(part.dq for part in parts), *(torch.cat(dkv, 1) for dkv in zip(*(part[1:3] for part in parts), strict=True))

    tensors = [t.requires_grad_() for t in qkv(torch.float64).values()]
    dout = randn(4, 2, SQ, HEADS, DIM_V, dtype=torch.float64)
    want = torch.autograd.grad(flexattn.attention(*tensors), tensors, dout)
    for _ in range(3):
        found = torch.autograd.grad(Halves.apply(*tensors), tensors, dout)
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def arguments_of_a_call(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    tensors = qkv(dtype)
    out, lse = whole_of({}, tensors, "eager")
    return {"dout": randn(4, *out.shape, dtype=dtype), **tensors, "out": out, "lse": lse}


def test_a_derivative_of_its_gradients_raises() -> None:
    call = arguments_of_a_call()
    for name in ("dout", "q"):
        found = attention_backward(**call | {name: call[name].clone().requires_grad_()})
        with pytest.raises(RuntimeError, match="no second derivative"):
            found.dk.sum().backward()


@pytest.mark.slow
def test_compiled_with_gradients_in_float32() -> None:
    call = arguments_of_a_call(torch.bfloat16)

    def run(**tensors: Tensor) -> tuple[Tensor, ...]:
        found = attention_backward(**tensors, fp32_gradients="dkv")
        return found.dq * 2, found.dk * 2, found.dv * 2

    wanted = run(**call)
    for got, want in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(**call), wanted, strict=True):
        assert torch.equal(got, want)
        assert got.dtype is want.dtype
    x, settings, _ = prepare(*(call[name] for name in "qkv"), in_full(None, None, {}), is_backward=True, results=Results(fp32="dq"))
    given = call["dout"], None, call["out"], call["lse"]
    torch.library.opcheck(ops._backward_op, (*given, *x, *settings), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_compiled() -> None:
    call = arguments_of_a_call()
    slopes = randn(9, HEADS).requires_grad_()

    def run(**tensors: Tensor) -> tuple[Any, ...]:
        found = attention_backward(**tensors, score_mod=lambda score, b, h, i, j: score * slopes[h])
        return found.dq, found.dk, found.dv, found.dcaptures[0][1]

    wanted = run(**call)
    for got, want in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(**call), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_rows_that_see_nothing_at_all_give_no_gradient() -> None:
    call = arguments_of_a_call()
    call["lse"][0, 1, 2] = -torch.inf
    found = attention_backward(**call)
    assert not found.dq[0, 2, 1].any()
    assert all(gradient.isfinite().all() for gradient in found[:3])


zeros = functools.partial(torch.zeros, device=DEVICE)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dout's shape": ({"dout": zeros(2, SQ, HEADS, DIM)}, r"dout has shape \(2, 21, 4, 16\); accepted: \(2, 21, 4, 24\)"),
    "dout's dtype": ({"dout": zeros(2, SQ, HEADS, DIM_V).half()}, "dout has dtype torch.float16; accepted: torch.float32"),
    "no dout": ({"dout": None}, "dout is None"),
    "out's shape": ({"out": zeros(2, SQ - 1, HEADS, DIM_V)}, r"out has shape \(2, 20, 4, 24\)"),
    "out's dtype": ({"out": zeros(2, SQ, HEADS, DIM_V).bfloat16()}, "out has dtype torch.bfloat16"),
    "no out": ({"out": None}, "out is None"),
    "lse's shape": ({"lse": zeros(2, SQ, HEADS)}, r"lse has shape \(2, 21, 4\); accepted: \(2, 4, 21\), \[b, h, sq\]"),
    "lse's dtype": ({"lse": zeros(2, HEADS, SQ).double()}, "lse has dtype torch.float64; accepted: torch.float32"),
    "no lse": ({"lse": None}, "lse is None"),
    "dlse's shape": ({"dlse": zeros(2, HEADS, 1)}, r"dlse has shape \(2, 4, 1\)"),
    "dlse's dtype": ({"dlse": zeros(2, HEADS, SQ).half()}, "dlse has dtype torch.float16"),
    "no rng_state": ({"dropout_p": 0.1, "backend": "eager"}, "rng_state is None with dropout_p > 0"),
    "dropout on any backend": (
        {"dropout_p": 0.1, "rng_state": zeros(2, dtype=torch.int64)},
        "backend is 'auto' with dropout_p",
    ),
    "what is in float32": ({"fp32_gradients": "dk"}, "fp32_gradients is 'dk'; accepted: none, dq, dkv, dqkv"),
    "no name of it": ({"fp32_gradients": True}, "fp32_gradients is True; accepted: none, dq, dkv, dqkv"),
    "a mask type": ({"attn_mask_type": "casual"}, "attn_mask_type is 'casual'"),
    "an argument of the forward alone": ({"causal": True}, r"attention_backward\(\) got an unexpected keyword argument 'causal'"),
    "k": ({"k": zeros(2, SKV, 3, DIM)}, "accepted: "),
    "FP8": ({name: zeros(2, 16, 4, 16).to(torch.float8_e4m3fn) for name in "qkv"}, "q has dtype torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_has_no_meaning_is_named(case: str) -> None:
    wrong, sentence = WRONG[case]
    call = arguments_of_a_call()
    for _ in range(3):  # also where calls like the right one are kept
        attention_backward(**call)
    with pytest.raises((ValueError, TypeError), match=sentence):
        attention_backward(**call | wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_in_inference_mode_gives_the_same_numbers(dtype: torch.dtype) -> None:
    def gradients() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 9, 2, 16, generator=generator).to(dtype) for _ in range(3))
        out, lse = flexattn.attention(q, k, v, return_lse=True, softcap=3.0, backend="eager")
        return flexattn.attention_backward(out, q, k, v, out, lse, softcap=3.0, backend="eager")[:3]

    with torch.inference_mode():
        got = gradients()
    for x, y in zip(got, gradients(), strict=True):
        assert torch.equal(x, y)
