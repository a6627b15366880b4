"""Interpreted arithmetic against torch's, bit for bit; the interpreter is left unchanged."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from flexattn.kernels_triton.runtime.interpreter import INTERPRETED, right_arithmetic

SMALL_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# Tails after a bf16 value's 16 bits in fp32: exact, just below, at and just above a tie, and just below the next value.
FP32_TAILS = (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
BLOCK = 64
M, N, K = 16, 32, 64  # a dot's shape, with no two sides alike

interpreted = pytest.mark.skipif(
    not INTERPRETED,
    reason="this process compiles its kernels: test_in_a_process_that_interprets runs the test in another",
)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.cast(x, out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def _assembly_kernel(out_ptr, ASSEMBLY: tl.constexpr):
    zero = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr, zero + 1)


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "minimum":
        out = tl.minimum(x, y)
    elif OP == "maximum":
        out = tl.maximum(x, y)
    elif OP == "lt":
        out = x < y
    elif OP == "ge":
        out = x >= y
    elif OP == "eq":
        out = x == y
    elif OP == "where":
        out = tl.where(x > 0.5, x, y)
    elif OP == "fma":
        out = tl.fma(x, y, x)
    elif OP == "abs":
        out = tl.abs(x)
    elif OP == "neg":
        out = -x
    elif OP == "constant":
        out = x * 0.1 + 3
    tl.store(out_ptr + i, out)


@triton.jit
def _extremes_kernel(x_ptr, y_ptr, min_ptr, max_ptr, clamp_ptr, PROPAGATE: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(min_ptr + i, tl.minimum(x, y, propagate_nan=PROPAGATE))
    tl.store(max_ptr + i, tl.maximum(x, y, propagate_nan=PROPAGATE))
    tl.store(clamp_ptr + i, tl.clamp(x, -1.0, 1.0, propagate_nan=PROPAGATE))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    m = tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, COLUMNS)[None, :]
    a = tl.load(a_ptr + m * INNER + tl.arange(0, INNER)[None, :])
    b = tl.load(b_ptr + n * INNER + tl.arange(0, INNER)[:, None])  # stored transposed, like keys
    tl.store(out_ptr + m * COLUMNS + n, tl.dot(a, b, tl.load(c_ptr + m * COLUMNS + n)))


@triton.jit
def _sum_kernel(x_ptr, out_ptr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m = tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(x_ptr + m * COLUMNS + n)
    if AXIS is None:
        tl.store(out_ptr, tl.sum(tile))
    else:
        out = tl.sum(tile, axis=AXIS)
        tl.store(out_ptr + tl.arange(0, COLUMNS if AXIS == 0 else ROWS), out)


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _reductions_kernel(x_ptr, max_ptr, argmax_ptr, cumsum_ptr, added_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(max_ptr, tl.max(x, axis=0))
    tl.store(argmax_ptr, tl.argmax(x, axis=0))
    tl.store(cumsum_ptr + i, tl.cumsum(x, axis=0))
    tl.store(added_ptr, tl.reduce(x, 0, _add))


@triton.jit
def _loop_kernel(x_ptr, out_ptr, start, stop):
    total = 0.0
    for i in range(start, tl.minimum(stop, 5)):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


def _assert_same(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, signs of zeros too; any NaN equals any other."""
    assert out.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(out.float().isnan(), nan)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert torch.equal(out.view(bits)[~nan], expected.view(bits)[~nan])


def _every_value(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def _around_every_bf16() -> torch.Tensor:
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([upper | tail for tail in FP32_TAILS] + [upper] * 3)  # filled up to a power of two
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def _cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    with right_arithmetic():
        _cast_kernel[(1,)](x, out, SIZE=x.numel(), ROUNDING=rounding)
    return out


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast, after the saturation of cvt.rn.satfinite, which torch's cast lacks."""
    if dtype == x.dtype or dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers over eight powers of two; multiples of 1/16 whose sums and products are exact in fp32."""
    bits = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 7)
    return (torch.randint(-(2**bits), 2**bits + 1, shape) / 16).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
def test_casts_from_fp32_round_to_nearest_even(dtype):
    x = _around_every_bf16()
    _assert_same(_cast(x, dtype), _saturated(x, dtype))


@interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in cast:RuntimeWarning")  # numpy's, for the infinities and NaNs among the inputs
@pytest.mark.parametrize("source", [*SMALL_DTYPES, torch.float16])
@pytest.mark.parametrize("target", [*SMALL_DTYPES, torch.float16, torch.float32, torch.float64])
def test_casts_between_small_dtypes(source, target):
    x = _every_value(source)
    _assert_same(_cast(x, target), _saturated(x, target))


@interpreted
def test_ties_of_fp8_go_to_even():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = _every_value(dtype).float()
        finite = values[values.isfinite()].unique()
        ties = ((finite[1:] + finite[:-1]) / 2).repeat(2)[:256]
        _assert_same(_cast(ties, dtype), ties.to(dtype))


@interpreted
def test_fp8_saturates():
    x = torch.tensor([448.0, 464.0, 500.0, 6e4, 1e9, float("inf"), -float("inf"), -1e9])
    assert _cast(x, torch.float8_e4m3fn).float().tolist() == [448.0] * 6 + [-448.0] * 2
    assert _cast(x, torch.float8_e5m2).float().tolist() == [448.0, 448.0, 512.0, 57344.0, 57344.0, 57344.0, -57344.0, -57344.0]


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_casts_toward_zero(dtype):
    x = _around_every_bf16()
    x = torch.where(x.isfinite(), x, 1.0)
    out = _cast(x, dtype, rounding="rtz").float()
    assert out.isfinite().all()
    assert (out.abs() <= x.abs()).all()
    nearest = _saturated(x, dtype)
    step_down = (nearest.view(torch.int16 if dtype.itemsize == 2 else torch.int8) - 1).view(dtype).float()
    _assert_same(out, torch.where(nearest.float().abs() <= x.abs(), nearest.float(), step_down))


@interpreted
def test_casts_to_and_from_integers():
    integers = torch.tensor([0, 1, -1, 255, 257, -(2**20) - 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    _assert_same(_cast(integers, torch.bfloat16), integers.bfloat16())
    x = torch.tensor([0.0, -0.5, 0.996, 1.5, -2.75, 300.0, -1e6, 1e9]).bfloat16()
    assert torch.equal(_cast(x, torch.int32), x.int())


@interpreted
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y),
        ("div", lambda x, y: x / y),
        ("minimum", torch.minimum),
        ("maximum", torch.maximum),
        ("lt", lambda x, y: x < y),
        ("ge", lambda x, y: x >= y),
        ("eq", lambda x, y: x == y),
        ("where", lambda x, y: torch.where(x > 0.5, x, y)),
        ("fma", lambda x, y: x * y + x),
        ("abs", lambda x, y: x.abs()),
        ("neg", lambda x, y: -x),
    ],
)
def test_elementwise(dtype, op, expected):
    x, y = torch.randn(2, BLOCK).mul(4).to(dtype).float()
    x, y = torch.where(x == 0, 1.0, x).to(dtype), torch.where(y == 0, 1.0, y).to(dtype)  # -0.0 is 0.0 in some versions of Triton
    y[::8] = x[::8]
    reference = expected(x.float(), y.float())
    out = torch.empty(BLOCK, dtype=torch.bool if reference.dtype == torch.bool else dtype)
    with right_arithmetic():
        _binary_kernel[(1,)](x, y, out, OP=op, SIZE=BLOCK)
    _assert_same(out, reference if reference.dtype == torch.bool else _saturated(reference, dtype))


@interpreted
def test_bf16_constants():
    x = torch.randn(BLOCK).bfloat16()
    out = torch.empty_like(x)
    with right_arithmetic():
        _binary_kernel[(1,)](x, x, out, OP="constant", SIZE=BLOCK)
    _assert_same(out, x * torch.tensor(0.1).bfloat16() + 3)  # Triton rounds the constant to the tensor's dtype


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extremes_skip_nan_unless_asked(dtype):
    x = torch.tensor([float("nan"), 1.0, float("nan"), 2.0], dtype=dtype)
    y = torch.tensor([-1.0, float("nan"), float("nan"), 3.0], dtype=dtype)
    for propagate, minimum, maximum in (
        (tl.PropagateNan.NONE, torch.fmin, torch.fmax),
        (tl.PropagateNan.ALL, torch.minimum, torch.maximum),
    ):
        smaller, larger, clamped = torch.empty(3, 4, dtype=dtype)
        with right_arithmetic():
            _extremes_kernel[(1,)](x, y, smaller, larger, clamped, PROPAGATE=propagate, SIZE=4)
        _assert_same(smaller, minimum(x, y))
        _assert_same(larger, maximum(x, y))
        one = torch.ones(4, dtype=dtype)
        _assert_same(clamped, minimum(maximum(x, -one), one))


@interpreted
@pytest.mark.parametrize("dtype", [*SMALL_DTYPES, torch.float16, torch.float32])
def test_dot_accumulates_in_fp32(dtype):
    a, b, c = _values(dtype, M, K), _values(dtype, N, K), torch.randint(-9, 9, (M, N)) / 256
    out = torch.empty(M, N)
    with right_arithmetic():
        _dot_kernel[(1,)](a, b, c, out, ROWS=M, COLUMNS=N, INNER=K)
    _assert_same(out, a.float() @ b.float().T + c)


@triton.jit
def _transposed_dots_kernel(a_ptr, b_ptr, out_ptr, transposed_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    m, n, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    a = tl.load(a_ptr + m[:, None] * INNER + k[None, :])
    b = tl.load(b_ptr + n[:, None] * INNER + k[None, :])
    tl.store(out_ptr + m[:, None] * COLUMNS + n[None, :], tl.dot(a, b.T))
    tl.store(transposed_ptr + m[None, :] * COLUMNS + n[:, None], tl.dot(b, a.T))


@interpreted
def test_a_dot_and_its_transpose_are_equal():
    a, b = torch.randn(M, K), torch.randn(N, K)
    out, transposed = torch.empty(M, N), torch.empty(M, N)
    with right_arithmetic():
        _transposed_dots_kernel[(1,)](a, b, out, transposed, ROWS=M, COLUMNS=N, INNER=K)
    _assert_same(out, (a.double() @ b.double().T).float())
    _assert_same(transposed, out)


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@interpreted
def test_fma_of_fp32_rounds_once():
    x, y = torch.randn(K), torch.randn(K)
    z = -(x * y)  # the rest of the sum is the product's rounding error, which two roundings lose
    out = torch.empty(K)
    with right_arithmetic():
        _fma_kernel[(1,)](x, y, z, out, SIZE=K)
    _assert_same(out, (x.double() * y.double() + z.double()).float())
    assert out.any()


@interpreted
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_sum_of_bf16(axis):
    x = _values(torch.bfloat16, M, N)
    expected = x.float().sum() if axis is None else x.float().sum(axis)
    out = torch.empty(expected.shape, dtype=torch.bfloat16)
    with right_arithmetic():
        _sum_kernel[(1,)](x, out, AXIS=axis, ROWS=M, COLUMNS=N)
    _assert_same(out, expected.bfloat16())


@interpreted
def test_other_reductions_of_bf16():
    x = _values(torch.bfloat16, BLOCK)
    x[3:5] = 100.0
    largest, added = torch.empty(2, 1, dtype=torch.bfloat16)
    index, running = torch.empty(1, dtype=torch.int32), torch.empty(BLOCK, dtype=torch.bfloat16)
    with right_arithmetic():
        _reductions_kernel[(1,)](x, largest, index, running, added, SIZE=BLOCK)
    assert largest.item() == 100.0
    assert index.item() == 3
    _assert_same(running, x.float().cumsum(0).bfloat16())
    one_by_one = x[0]
    for value in x[1:]:
        one_by_one = one_by_one + value
    _assert_same(added, one_by_one[None])


@interpreted
def test_loop_with_bounds_known_at_run_time():
    x, out = torch.arange(8.0), torch.empty(1)
    with right_arithmetic():
        _loop_kernel[(1,)](x, out, 2, 7)
    assert out.item() == 2 + 3 + 4


def _operands() -> list[object]:
    """Possible operands of an operation: numbers, and tensors of many types and shapes, scalars and pointers too."""
    from triton.runtime.interpreter import TensorHandle

    numbers = [0, -0.0, 3, -3, 200, 2**31, 2**63, 1.5, 1e300, float("inf"), True]
    dtypes = [
        *[(tl.int1, np.bool_), (tl.int8, np.int8), (tl.uint8, np.uint8), (tl.int32, np.int32), (tl.uint32, np.uint32)],
        *[(tl.int64, np.int64), (tl.float8e4nv, np.uint8), (tl.float16, np.float16), (tl.bfloat16, np.uint16)],
        *[(tl.float32, np.float32), (tl.float64, np.float64)],
        *[(tl.pointer_type(tl.float32), np.uint64), (tl.pointer_type(tl.int32), np.uint64)],
    ]
    tensors = [
        tl.tensor(
            TensorHandle(np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(data), dtype),
            dtype if shape == (1,) else tl.block_type(dtype, list(shape)),
        )
        for dtype, data in dtypes
        for shape in ((1,), (4, 1), (4, 8), (8,), (2, 8))
        if shape in ((1,), (4, 8)) or dtype.name in ("int32", "fp32", "bf16")
    ]
    compared = [  # their handles keep the type of the compared values
        tl.tensor(TensorHandle(np.array([True]), tl.int32), tl.int1),
        tl.tensor(TensorHandle(np.array([[True], [False]]), tl.int32), tl.block_type(tl.int1, [2, 1])),
    ]
    return [*numbers, *tensors, *compared]


def _checked(semantic: object, lhs: object, rhs: object, options: dict[str, bool]) -> object:
    """Types, shapes and bits of the two operands that an operation gets, or its error."""
    try:
        results = semantic.binary_op_type_checking_impl(lhs, rhs, **options)
    except Exception as error:
        return type(error), str(error)
    return [(x.type, x.dtype, [s.value for s in x.shape], *_content(x)) for x in results]


def _content(x: tl.tensor) -> tuple[object, ...]:
    """The handle's dtype and bytes; of a comparison only its truth, because Triton gives it the dtype of its operands."""
    return _bytes(x.handle.data.astype(bool)) if x.dtype == tl.int1 else (x.handle.dtype, *_bytes(x.handle.data))


def _bytes(data: np.ndarray) -> tuple[object, ...]:
    return data.dtype, data.shape, data.tobytes()


@interpreted
@interpreted
def test_assembly_raises_unless_it_only_orders_launches():
    out = torch.zeros(1, dtype=torch.int32)
    with right_arithmetic():
        _assembly_kernel[(1,)](out, ASSEMBLY="griddepcontrol.wait; mov.b32 $0, $1;")
        with pytest.raises(InterpreterError, match="inline_asm not supported"):
            _assembly_kernel[(1,)](out, ASSEMBLY="mov.b32 $0, $1;")
    assert out.item() == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_operands_become_what_triton_makes_of_them():
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder

    names = ("binary_op_type_checking_impl", "broadcast_impl_value")
    own = type("Own", (TritonSemantic,), {name: vars(TritonSemantic)[name] for name in names})(InterpreterBuilder())
    pointers = {"allow_lhs_ptr": True, "allow_rhs_ptr": True}
    compared = 0
    with right_arithmetic():
        ours, operands = TritonSemantic(InterpreterBuilder()), _operands()
        for lhs, rhs in itertools.product(operands, operands):
            if not (isinstance(lhs, tl.tensor) or isinstance(rhs, tl.tensor)):
                continue  # is computed in Python, and reaches no operation
            for options in ({}, pointers, {"div_or_mod": True}, {"arithmetic_check": False, "div_or_mod": True}):
                expected = _checked(own, lhs, rhs, options)
                assert _checked(ours, lhs, rhs, options) == expected, (lhs, rhs, options)
                compared += isinstance(expected, list)
    assert compared > 3000


@interpreted
def test_operators_give_what_triton_gives(monkeypatch):
    from triton.runtime.interpreter import TensorHandle

    from flexattn.kernels_triton.runtime import interpreter

    names, found, dtypes = list(interpreter._OPERATORS), [], ("fp32", "int32", "int64", "uint32", "pointer<fp32>")
    for is_direct in (True, False):
        if not is_direct:
            monkeypatch.setattr(interpreter, "_OPERATORS", {})
        with right_arithmetic():
            operands = [x for x in (1e-40, *_operands()) if not isinstance(x, tl.tensor) or x.dtype.name in dtypes]
            operands.append(tl.tensor(TensorHandle(np.float32([-0.0, 1e-40]), tl.float32), tl.block_type(tl.float32, [2])))
            tensors = [x for x in operands if isinstance(x, tl.tensor)]
            found.append([_applied(name, lhs, rhs) for name in names for lhs in tensors for rhs in operands])
    for i, (direct, expected) in enumerate(zip(*found, strict=True)):
        assert direct == expected, (names[i // (len(tensors) * len(operands))], direct, expected)
    assert sum(result is not None for result in found[1]) > 1000


def _applied(name: str, lhs: tl.tensor, rhs: object) -> list[object] | None:
    """The type, shape and bits of an operator's result, or None if it raises."""
    try:
        x = getattr(tl.tensor, name)(lhs, rhs)
    except Exception:
        return None
    return [x.type, x.dtype, [s.value for s in x.shape], *_content(x)]


@interpreted
def test_columns_rows_and_casts_are_tritons():
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder

    get_item, cast = tl.tensor.__getitem__, TritonSemantic.cast
    with right_arithmetic():
        semantic = TritonSemantic(InterpreterBuilder())
        tensors = [x for x in _operands() if isinstance(x, tl.tensor) and x.type.is_block()]
        for x in tensors:
            for index in ((slice(None), None), (None, slice(None)), (None,), (slice(None), None, slice(None))):
                got, want = x[index], get_item(x, index, _semantic=semantic)
                assert [got.type, got.dtype, got.shape, *_content(got)] == [want.type, want.dtype, want.shape, *_content(want)]
            if x.dtype.name in ("int32", "fp32", "bf16"):
                assert all(_content(x.to(to)) == _content(cast(semantic, x, to)) for to in (tl.int32, tl.float32, tl.bfloat16))
            with pytest.raises(ValueError, match="unsupported tensor index"):
                x[slice(0, 2), None]
    assert len(tensors) > 20


@interpreted
def test_a_value_is_no_wider_than_its_type():
    from triton.runtime.interpreter import TensorHandle

    with right_arithmetic():
        for values, dtype in ((np.zeros(1, np.int64), tl.int32), (np.zeros(1, np.float32), tl.bfloat16)):
            with pytest.raises(ValueError, match="exceeds"):
                TensorHandle(values, dtype)
        assert TensorHandle(np.zeros(1, bool), tl.int1).attr == {}
        assert TensorHandle(np.zeros(1, np.uint64), tl.pointer_type(tl.int8), {"a": 1}).attr == {"a": 1}


def _state() -> list[dict[str, object]]:
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreters = (
        interpreter,
        TritonSemantic,
        interpreter.TensorHandle,
        interpreter.InterpreterBuilder,
        interpreter.ReduceOps,
        interpreter.ScanOps,
    )
    language = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.block_type, tl.dtype)
    return [dict(vars(owner)) for owner in (*language, *interpreters)]


@interpreted
def test_outside_the_context_the_interpreter_is_untouched():
    before = _state()
    with right_arithmetic():
        inside = _state()
        with right_arithmetic():
            assert _state() == inside
        assert _state() == inside
        with pytest.raises(InterpreterError), right_arithmetic():
            _loop_kernel[(1,)](None, None, 0, 1)
        assert _state() == inside
    assert inside != before
    assert _state() == before


@interpreted
def test_a_patch_of_another_since_the_last_context_stays(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    with right_arithmetic():
        pass
    called: list[bool] = []
    create_fma = InterpreterBuilder.create_fma
    monkeypatch.setattr(InterpreterBuilder, "create_fma", lambda *arguments: called.append(True) or create_fma(*arguments))
    before, x = _state(), torch.tensor([-2.0])
    with right_arithmetic():
        _binary_kernel[(1,)](x, x, x, "fma", 1)
    assert called
    assert _state() == before


@interpreted
def test_one_thread_at_a_time_is_inside():
    """Triton's interpreter has one grid index for all threads: if launches overlapped, they would run each other's programs."""
    before = _state()
    entered = threading.Event()

    def enter() -> None:
        with right_arithmetic():
            entered.set()

    thread = threading.Thread(target=enter)
    with right_arithmetic():
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(10.0)
    thread.join()
    assert _state() == before


def test_in_a_process_that_interprets(fresh_python):
    if INTERPRETED:
        pytest.skip("this process interprets its kernels: the other tests of this file have run here")
    run = fresh_python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0, run.stdout + run.stderr


FRESH_SCRIPT = """
import torch
import triton
import triton.language as tl
from flexattn.kernels_triton.runtime.interpreter import right_arithmetic

@triton.jit
def total_kernel(x_ptr, out_ptr, n, SIZE: tl.constexpr):
    total = tl.zeros([SIZE], tl.bfloat16)
    for i in range(0, n):
        total += tl.load(x_ptr + i * SIZE + tl.arange(0, SIZE))
    tl.store(out_ptr, tl.sum(total, 0))

x = torch.full((3, 4), 0.5, dtype=torch.bfloat16)
out = torch.zeros(1, dtype=torch.bfloat16)
with right_arithmetic():
    total_kernel[(1,)](x, out, 3, SIZE=4)
print(out.item())
"""


@pytest.mark.slow
def test_a_fresh_process_with_what_is_installed(fresh_python, tmp_path: Path):
    script = tmp_path / "total.py"
    script.write_text(FRESH_SCRIPT)
    run = fresh_python(str(script), env={"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["6.0"]


@pytest.mark.slow
def test_a_process_that_compiles_needs_no_numpy(fresh_python):
    run = fresh_python(
        "-c",
        "import sys; sys.modules['numpy'] = None\n"
        "from flexattn.kernels_triton.runtime import interpreter\n"
        "with interpreter.right_arithmetic(): print(interpreter.INTERPRETED)",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False"]
