"""The emulated language: numbers as on sm_90, Gluon's rules, TMA and wgmma against torch, and valid arguments of a launch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

from flexattn import emulator
from flexattn.emulator import inline_asm
from flexattn.emulator.dtypes import round_to
from flexattn.emulator.translate import function_for
from tests.support import gluon_samples as samples

NARROW = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # casts to these saturate
SEEDS = range(6)


def clean(report: emulator.Report) -> None:
    assert not report.findings, str(report)
    assert report.error is None


def descriptor(t: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), NARROW.get(t.dtype, gl.float32))
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block), layout)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_are_torchs_and_fp8_saturates(dtype: torch.dtype) -> None:
    ties = torch.tensor([0.489, 1 + 2**-9, 1 + 3 * 2**-9, -0.0, 1e9, -1e9, 2**-10, 3 * 2**-10])
    x = torch.cat([torch.randn(1024 - len(ties)) * 10 ** torch.empty(1024 - len(ties)).uniform_(-3, 2), ties])
    y = torch.empty(1024)
    clean(emulator.launch(samples.round_trip, (1,), x, y, DTYPE=NARROW[dtype]))
    limit = LARGEST.get(dtype, math.inf)
    assert torch.equal(y, x.clamp(-limit, limit).to(dtype).float())
    assert round_to([math.inf], NARROW[dtype]).item() == limit


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, 3)])
def test_integers_divide_towards_zero(a: int, b: int) -> None:
    out = torch.zeros(6, dtype=torch.int32)
    clean(emulator.launch(samples.integers, (1,), out, a, b))
    quotient = math.trunc(a / b)
    assert out.tolist() == [quotient, a - b * quotient, math.trunc((a + b - 1) / b), min(a, b), a >> 1, quotient]


def test_a_slice_of_what_a_reshape_gave() -> None:
    x, factors, y = torch.randn(64, 16), torch.randn(64), torch.full((64, 4), math.nan)
    clean(emulator.launch(samples.scaled_sums, (1,), x, factors, y))
    torch.testing.assert_close(y, x.view(64, 2, 4, 2).sum((1, 3)) * factors[:, None])


def test_a_scalar_that_wraps_is_found() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    report = emulator.launch(samples.product, (1,), out, 1 << 20, 1 << 12)
    assert report.kinds == ["int-overflow"]
    assert out.item() == 0
    wide = torch.zeros(1, dtype=torch.int64)
    clean(emulator.launch(samples.product, (1,), wide, 1 << 40, 3))
    assert wide.item() == 3 << 40


def test_reductions_and_functions() -> None:
    x, y = torch.randn(128), torch.empty(128)
    clean(emulator.launch(samples.softmax, (1,), x, y, N=128))
    torch.testing.assert_close(y, torch.softmax(x * math.log(2), 0))


def test_a_jit_function_as_constexpr() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    clean(emulator.launch(samples.applied, (1,), out, FUNCTION=samples.multiply_add))
    assert out.item() == 11


def test_triton_functions_and_a_configuration_with_functions() -> None:
    for x, clamped in ((-3, 0), (7, 7), (70, 50)):
        out = torch.zeros(1, dtype=torch.int32)
        clean(emulator.launch(samples.configured, (1,), out, x, META=samples.Meta(samples.multiply_add, 50)))
        assert out.item() == clamped + 2


def test_what_tritons_interpreter_leaves_behind_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("static_range", "range"):
        monkeypatch.setattr(core, name, lambda *_: pytest.fail("the interpreter's own"))
    out = torch.zeros(1, dtype=torch.int32)
    function_for.cache_clear()
    clean(emulator.launch(samples.loops, (1,), out, 4, TIMES=3))
    assert out.item() == 3 + 1 + 2 + 3


def test_packing_asm_and_bitcasts() -> None:
    x, y = torch.randn(128, 2), torch.empty(128, 2)
    clean(emulator.launch(samples.packed, (1,), x, y))
    assert torch.equal(y, x.bfloat16().float())


def test_bits_of_a_number() -> None:
    x, bits, y = torch.tensor([-0.3]), torch.empty(1, dtype=torch.int32), torch.empty(1)
    clean(emulator.launch(samples.bits_of_a_number, (1,), x, bits, y))
    assert torch.equal(bits, x.view(torch.int32))
    assert torch.equal(y, x)


def test_unknown_asm_can_be_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_asm, "_KNOWN", list(inline_asm._KNOWN))
    x, y = torch.randn(128), torch.empty(128)
    report = emulator.launch(samples.doubled, (1,), x, y)
    assert report.kinds == ["not-modelled"]
    assert "register_asm" in str(report)
    emulator.register_asm(r"add\.f32 \$0, \$1, \$1;", lambda operand: operand + operand)
    clean(emulator.launch(samples.doubled, (1,), x, y))
    assert torch.equal(y, x + x)


@pytest.mark.parametrize(
    ("dtype", "k_major", "in_registers"),
    [
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, True),
        (torch.float16, False, False),
        (torch.float8_e4m3fn, True, False),
        (torch.float8_e5m2, True, True),
    ],
)
def test_wgmma(dtype: torch.dtype, k_major: bool, in_registers: bool) -> None:
    a, b = torch.randn(64, 64).to(dtype), torch.randn(*((128, 64) if k_major else (64, 128))).to(dtype)
    want = a.double() @ (b.double().T if k_major else b.double())
    for seed in SEEDS:
        out = torch.empty(64, 128)
        operands = descriptor(a, (64, 64)), descriptor(b, (b.shape[0], b.shape[1]))
        clean(emulator.launch(samples.matmul, (1,), *operands, out, K_MAJOR=k_major, IN_REGISTERS=in_registers, seed=seed))
        torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-5)


def test_wgmma_gives_a_row_the_same_bits_wherever_it_lies() -> None:
    row, b = torch.randn(64).bfloat16(), torch.randn(64, 128).bfloat16()
    out = torch.empty(64, 128)
    clean(emulator.launch(samples.matmul, (1,), *(descriptor(t, t.shape) for t in (row.repeat(64, 1), b)), out, False, False))
    assert torch.equal(out, out[:1].expand(64, 128))


def test_mma_sync() -> None:
    a, b, out = torch.randn(4, 16, 32).half(), torch.randn(4, 32, 8).half(), torch.empty(4, 16, 8)
    clean(emulator.launch(samples.mma_sync, (1,), a, b, out, WHAT=""))
    torch.testing.assert_close(out.double(), a.double() @ b.double() + 1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("accumulator", "the accumulator of mma.sync has layout"),
        ("operand", "operand a of mma.sync has layout"),
        ("width", "k_width 4 and 2"),
        ("dtypes", "operands of mma.sync are"),
        ("shape", "mma.sync of [4, 16, 32] and [4, 32, 8] into [4, 8, 8]"),
    ],
)
def test_mma_sync_that_gluon_refuses(what: str, said: str) -> None:
    a, b, out = torch.randn(4, 16, 32).half(), torch.randn(4, 32, 8).half(), torch.empty(4, 16, 8)
    report = emulator.launch(samples.mma_sync, (1,), a, b, out, WHAT=what)
    assert report.kinds == ["illegal-program"], str(report)
    assert said in str(report)


def test_fp8_products_of_words() -> None:
    a, b = torch.randn(64, 64).to(torch.float8_e4m3fn), torch.randn(32, 64).to(torch.float8_e5m2)
    rows_out, columns_out = torch.empty(64, 32), torch.empty(64, 64)
    clean(emulator.launch(samples.fp8_products, (1,), a, b.view(torch.int16), rows_out, columns_out))
    torch.testing.assert_close(rows_out.double(), a.double() @ b.double().T, atol=1e-5, rtol=1e-5)
    columns = torch.cat([b[:, ::2].double(), b[:, 1::2].double()], 1)
    torch.testing.assert_close(columns_out.double(), a[:, :32].double() @ columns, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pairs_of_fp8(dtype: torch.dtype) -> None:
    x = torch.arange(512).to(torch.uint8).view(dtype)
    y = torch.empty(512, dtype=torch.float16)
    clean(emulator.launch(samples.pairs_of_fp8, (1,), x.view(torch.int32), y.view(torch.int32), KIND=str(dtype)[13:17]))
    torch.testing.assert_close(y, x.half(), atol=0.0, rtol=0.0, equal_nan=True)


def test_wgmma_of_two_kinds_of_fp8() -> None:
    a, b = torch.randn(64, 64).to(torch.float8_e5m2), torch.randn(128, 64).to(torch.float8_e4m3fn)
    out = torch.empty(64, 128)
    operands = descriptor(a, (64, 64)), descriptor(b, (128, 64))
    clean(emulator.launch(samples.matmul, (1,), *operands, out, K_MAJOR=True, IN_REGISTERS=False, seed=3))
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-5)


def test_fp8_operands_must_be_k_major() -> None:
    a, b = torch.randn(64, 64).to(torch.float8_e4m3fn), torch.randn(64, 128).to(torch.float8_e4m3fn)
    operands = descriptor(a, (64, 64)), descriptor(b, (64, 128))
    report = emulator.launch(samples.matmul, (1,), *operands, torch.empty(64, 128), K_MAJOR=False, IN_REGISTERS=False)
    assert report.kinds == ["illegal-program"]
    assert "K-major" in str(report)


def test_tma_fills_what_lies_outside_with_zeros() -> None:
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    out = torch.empty(64, 128)
    operands = descriptor(a, (64, 64)), descriptor(b, (128, 64))
    clean(emulator.launch(samples.matmul, (1,), *operands, out, K_MAJOR=True, IN_REGISTERS=False, seed=3))
    torch.testing.assert_close(out[:40].double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-5)
    assert (out[40:] == 0).all()


def test_a_box_within_its_tensor_but_outside_the_memory_is_found() -> None:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    given = SimpleNamespace(base=torch.zeros(40 * 64), shape=[64, 64], strides=[64, 1], block_shape=[64, 64], layout=layout)
    report = emulator.launch(samples.tma_misuse, (1,), given, given, WHAT="", seed=3)
    assert report.kinds == ["out-of-bounds"]
    assert "load_tile(" in str(report)
    assert "reaches elements 0 to 4095 of a buffer of 2560" in str(report)


@pytest.mark.parametrize("nan", [False, True])
def test_descriptors_made_in_the_kernel(nan: bool) -> None:
    x = torch.randn(24, 32)
    for seed in SEEDS:
        y = torch.full((24, 32), -1.0)
        clean(emulator.launch(samples.copy_rows, (3,), x, y, 20, COLUMNS=32, NAN=nan, seed=seed))
        assert torch.equal(y[:, :20], x[:, :20])
        assert y[:, 20:].isnan().all() if nan else (y[:, 20:] == 0).all()


def test_atomics_add_up() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    clean(emulator.launch(samples.counted, (5,), out))
    assert out.tolist() == [20] * 8


def test_a_counter_lies_in_memory_of_another_dtype() -> None:
    x = torch.full((64,), 7.0)
    x[0] = 0.0
    clean(emulator.launch(samples.counted_beside, (1,), x, x.view(torch.int32)))
    assert x.view(torch.int32)[0] == 3
    assert x[1:32].eq(7.0).all()
    assert x[32:].equal(torch.arange(32.0))


def test_views_of_one_storage_share_it() -> None:
    storage = torch.randn(256)
    clean(emulator.launch(samples.softmax, (1,), storage[128:], storage[:128], N=128))
    torch.testing.assert_close(storage[:128], torch.softmax(storage[128:] * math.log(2), 0))


@pytest.mark.parametrize("what", ["layouts", "warps", "power of two", "slice", "condition", "constexpr", "Python"])
def test_programs_that_gluon_refuses_are_refused(what: str) -> None:
    report = emulator.launch(samples.language_misuse, (1,), torch.zeros(128, dtype=torch.int32), WHAT=what)
    assert report.kinds == ["illegal-program"], str(report)
    assert report.error is not None
    assert "gluon_samples.py:" in str(report)  # the kernel's own line


@pytest.mark.parametrize(("kernel", "node"), [(samples.unpacks, "Starred"), (samples.breaks, "Break")], ids=["starred", "break"])
def test_python_that_triton_does_not_compile(kernel: Any, node: str) -> None:
    report = emulator.launch(kernel, (1,), torch.zeros(1, dtype=torch.int32))
    assert report.kinds == ["illegal-program"]
    assert f"has Python's {node}, which Triton does not compile" in str(report)


def test_a_launch_refuses_wrong_arguments() -> None:
    x = torch.randn(128)
    with pytest.raises(TypeError, match=r"missing: \['y_ptr'\], unknown: \['z'\]"):
        emulator.launch(samples.softmax, (1,), x, N=128, z=1)
    with pytest.raises(TypeError, match=r"twice: \['x_ptr'\]"):
        emulator.launch(samples.softmax, (1,), x, x_ptr=x, y_ptr=x, N=128)
    with pytest.raises(TypeError, match="kernel is a function; accepted"):
        emulator.launch(clean, (1,), x)
    with pytest.raises(TypeError, match="y_ptr is a list"):
        emulator.launch(samples.softmax, (1,), x, [1.0], N=128)
    with pytest.raises(TypeError, match="is on meta"):
        emulator.launch(samples.softmax, (1,), x, x.to("meta"), N=128)
    with pytest.raises(ValueError, match="grid is"):
        emulator.launch(samples.softmax, (0,), x, x, N=128)
    with pytest.raises(ValueError, match="schedule is 'fair'"):
        emulator.Options(schedule="fair")


@pytest.mark.parametrize(("block", "strides"), [((512, 64), (64, 1)), ((8, 4), (64, 1)), ((8, 64), (66, 1)), ((8, 64), (1, 64))])
def test_descriptors_that_the_driver_refuses(block: tuple[int, int], strides: tuple[int, int]) -> None:
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)
    given = SimpleNamespace(base=torch.zeros(65536).bfloat16(), shape=[8, 64], strides=strides, block_shape=block, layout=layout)
    with pytest.raises(emulator.GluonError, match="a descriptor with"):
        emulator.launch(samples.tma_misuse, (1,), given, given, WHAT="")


@pytest.mark.parametrize(
    ("first", "equal", "says"), [(8, 8, ""), (4, 8, "multiple_of: the first of 8"), (8, 4, "max_constancy: 8")]
)
def test_facts_for_the_compiler_are_checked(first: int, equal: int, says: str) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    report = emulator.launch(samples.facts, (1,), out, first, equal)
    if says:
        assert says in str(report)
    else:
        clean(report)
