"""Compiling for GPUs that may be absent, from a process whose own kernels may be interpreted."""

from __future__ import annotations

import dataclasses
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia import compiler as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from flexattn.kernels_triton.ahead_of_time import build, compile_report
from flexattn.kernels_triton.ahead_of_time.compile_report import (
    SHARED_MEMORY_LIMIT,
    CompileError,
    CompileRequest,
    _exposed_exponentials,
    compile_many,
    folded_operands,
    report_of,
)
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers
from flexattn.kernels_triton.runtime import compiler, launch, store
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.sass_registers import MiscompiledError, undefined_registers
from tests.support.compiled_kernels import compile_beside

MATRIX_INSTRUCTIONS = {
    ("bf16", 80): "HMMA",
    ("bf16", 89): "HMMA",
    ("bf16", 90): "HGMMA",
    ("bf16", 100): "UTCHMMA",
    ("fp8e4nv", 89): "QMMA",
    ("fp8e4nv", 90): "QGMMA",
    ("fp8e4nv", 100): "UTCQMMA",
}
STAGES = 3
TOO_LARGE = 256  # 256 x 256 fp32 accumulators are 512 registers a thread with 4 warps; a thread has 255


@triton.jit
def _load_tile(ptr, rows, columns, stride, DTYPE: tl.constexpr):
    return tl.load(ptr + rows * stride + columns).to(DTYPE)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, num_tiles, stride, SIZE: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr):
    m = tl.arange(0, SIZE)
    k = tl.arange(0, INNER)
    out = tl.zeros([SIZE, SIZE], tl.float32)
    for tile in range(num_tiles):
        columns = tile * INNER + k[None, :]
        a = _load_tile(a_ptr, m[:, None], columns, stride, DTYPE)
        b = _load_tile(b_ptr, m[:, None], columns, stride, DTYPE)
        out = tl.dot(a, b.T, out)
    tl.store(out_ptr + m[:, None] * SIZE + m[None, :], out)


def _request(sm: int, dtype: str = "bf16", size: int = 64, inner: int = 64) -> CompileRequest:
    return CompileRequest(
        module=__name__,
        kernel="dot_kernel",
        signature={"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "out_ptr": "*fp32", "num_tiles": "i32", "stride": "i32"},
        constexprs={"SIZE": size, "INNER": inner, "DTYPE": {"bf16": "tl.bfloat16", "fp8e4nv": "tl.float8e4nv"}[dtype]},
        sm=sm,
        num_warps=4,
        num_stages=STAGES,
        aligned=("a_ptr", "b_ptr", "out_ptr", "stride"),
    )


@pytest.mark.slow
def test_reports_in_the_order_of_the_requests():
    requests = [_request(sm, dtype) for dtype, sm in MATRIX_INSTRUCTIONS]
    *reports, again = compile_beside([*requests, requests[0]])
    digests = [(report.ptx_digest, report.sass_digest, report.operations_digest) for report in (*reports, again)]
    assert digests[0] == digests[-1]
    assert all(len(set(kind)) == len(requests) for kind in zip(*digests, strict=True))
    for ((dtype, sm), instruction), report in zip(MATRIX_INSTRUCTIONS.items(), reports, strict=True):
        assert list(report.matrix_instructions) == [instruction]
        assert report.instructions["LDGSTS"] > 0  # asynchronous copies, which an aligned stride allows
        assert 0 < report.registers <= 255
        assert report.stack_bytes == report.spill_store_bytes == report.spill_load_bytes == report.spill_instructions == 0
        assert report.warnings == report.undefined_registers == ()
        assert [loop for loop in report.loops if loop.get(instruction)]
        assert report.loop_spill_share == 0
        # sm_100 adds a few bytes of barriers to the tiles in flight
        tiles = 2 * 64 * 64 * (1 if dtype == "fp8e4nv" else 2) * (STAGES - 1)
        assert tiles <= report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]


def test_exponentials_behind_a_wait_for_all_products_are_seen():
    one_runs_on = "        /*0a10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
    none_does = one_runs_on.replace("0x1 ;", "0x0 ;")
    exp = "        /*0a20*/                   MUFU.EX2 R12, R12 ;"
    assert _exposed_exponentials([exp, one_runs_on, exp, none_does, exp, exp]) == 2
    assert _exposed_exponentials([one_runs_on, exp, none_does]) == _exposed_exponentials([exp]) == 0


def _sass(*lines: str) -> str:
    """Prints instructions and labels as nvdisasm does."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines)
    )


_PRODUCT = ("IADD3 R4, P2, R4, 0x2, RZ", "R2UR UR6, R4", "UMOV UR7, 0x1", "HGMMA.64x64x16.F32 R24, R56, gdesc[UR4], R24", "EXIT")


@pytest.mark.parametrize(
    ("code", "undefined"),
    [
        (("UMOV UR4, 0x1", "UIADD3 UR5, UR4, 0x2, URZ", "IMAD R2, R3, UR5, RZ", "EXIT"), ()),
        (("UIADD3 UR4, UP0, UR4, 0x2, URZ", "EXIT"), ("UR4",)),
        # written on one of two paths; on both; by the branch alone that always runs
        (("@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", ".L_x_0:", "ISETP.GE.AND P0, PT, R2, UR4, PT", "EXIT"), ("UR4",)),
        (
            ("@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", "BRA `(.L_x_1)", ".L_x_0:", "UMOV UR4, URZ", ".L_x_1:", "MOV R2, UR4", "EXIT"),
            (),
        ),
        (("BRA `(.L_x_0)", "STS [UR9], R2", ".L_x_0:", "EXIT"), ()),
        # in a loop, by the iteration before
        ((".L_x_0:", "MUFU.RCP R2, UR4", "UMOV UR4, 0x1", "@P0 BRA `(.L_x_0)", "EXIT"), ("UR4",)),
        (('BRX R2 -0x190 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', ".L_x_0:", "EXIT", ".L_x_1:", "FADD R2, RZ, UR7", "EXIT"), ("UR7",)),
        (("@!P0 EXIT", "VIADD R2, R3, UR8", "EXIT"), ("UR8",)),
        # a function returns its results; a call of a label is a jump
        (("CALL.REL.NOINC `($div)", "STS [UR4], R2", "EXIT", "$div:", "UMOV UR4, 0x1", "RET.REL.NODEC R2 `(kernel)"), ()),
        (("CALL.REL.NOINC `($div)", "EXIT", "$div:", "STS [UR4], R2", "RET.REL.NODEC R2 `(kernel)"), ("UR4",)),
        (("CALL.REL.NOINC `(.L_x_0)", "STS [UR4], R2", ".L_x_0:", "STS [UR5], R2", "EXIT"), ("UR5",)),
        # pairs, and descriptors: of both factors, of the second alone, in the upper half
        (("ULDC.64 UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"), ()),
        (("ULDC UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"), ("UR5",)),
        (("ULDC.64 UR4, c[0x0][0x208]", "UMOV UR6, 0x1", "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", "EXIT"), ("UR7",)),
        (("UIADD3.64 UR6, URZ, 0x2, URZ", "HGMMA.64x64x16.F32 R24, R56, gdesc[UR4].tnspB, R24", "EXIT"), ()),
        (("UIADD3.64 UR4, URZ, 0x2, URZ", "HGMMA.64x64x16.F32 R24, R56, gdesc[UR4].tnspB, R24", "EXIT"), ("UR6", "UR7")),
        (("R2UR UR8, R4", "ULDC.64 UR6, c[0x0][0x208]", "UTMALDG.1D [UR8], [UR6]", "EXIT"), ("UR9", "UR10")),
        (("ULDC.64 UR4, c[0x0][0x8]", "UIMAD.WIDE.U32 UR6, UP1, UR4, UR5, UR6", "EXIT"), ("UR6", "UR7")),
        (
            (
                "UMOV UR4, 0x1",
                "UMOV UR5, 0x1",
                "UIMNMX.S64 UPT, UPT, UR6, UR4, UR4, UPT, !UPT",
                "UIADD3.64 UR8, UR6, 0x1, URZ",
                "EXIT",
            ),
            (),
        ),
        # a copy is no use; a later use is reported, even if the copy was parked in an ordinary register
        (("UMOV UR5, UR4", "UMOV UR5, 0x1", "STS [UR5], R2", "EXIT"), ()),
        (("UMOV UR5, UR4", "STS [UR5], R2", "EXIT"), ("UR5",)),
        (("MOV R14, UR4", "R2UR UR5, R14", "UMOV UR5, 0x1", "STS [UR5], R2", "EXIT"), ()),
        (("MOV.SPILL R14, UR4", "R2UR.FILL UR5, R14", "EXIT"), ()),
        (("IMAD.U32 R14, RZ, RZ, UR4", "R2UR UR5, R14", "STS [UR5], R2", "EXIT"), ("UR5",)),
        (("MOV R14, UR4", "IADD3 R2, R14, R3, RZ", "EXIT"), ("R14",)),
        (("UMOV UR73, UR4", "STS [R9], R2", "STS [UR73], R2", "EXIT"), ("UR73",)),  # sm_100 has as many
        # a load from tensor memory writes as many registers as it says
        (("MOV.SPILL R35, UR4", "LDTM.x32 R4, tmem[UR5]", "FADD R2, R35, R3", "EXIT"), ("UR5",)),
        (("MOV.SPILL R36, UR4", "LDTM.x32 R4, tmem[UR5]", "FADD R2, R36, R3", "EXIT"), ("UR5", "R36")),
        # and one from shared memory or a special register
        (("MOV.SPILL R7, UR4", "LDSM.16.M88.4 R4, [R2]", "FADD R2, R7, R3", "EXIT"), ()),
        (("MOV.SPILL R6, UR4", "LDSM.16.M88.2 R4, [R2]", "FADD R2, R6, R3", "EXIT"), ("R6",)),
        (("LDG.E R4, [R2.64]", "CS2R R4, SRZ", *_PRODUCT), ()),
        (("LDG.E R4, [R2.64]", "CS2R R3, SRZ", *_PRODUCT), ()),
        (("LDG.E R4, [R2.64]", "CS2R.32 R3, SRZ", *_PRODUCT), ("gdesc[UR4]",)),
        # a descriptor's address is 14 bits; one from a number that was loaded for something else is wrong
        (("SGXT.U32 R4, R4, 0xe", *_PRODUCT), ()),
        (("LDG.E R4, [R2.64]", "LOP3.LUT R4, R4, 0x3fff, RZ, 0xc0, !PT", *_PRODUCT), ()),
        (("LDG.E R4, [R2.64]", *_PRODUCT), ("gdesc[UR4]",)),
        (("SGXT.U32 R4, R4, 0xe", "@P0 BRA `(.L_x_0)", "LDC R4, c[0x0][0x8]", ".L_x_0:", *_PRODUCT), ("gdesc[UR4]",)),
        (("SGXT.U32 R4, R4, 0xe", ".L_x_0:", *_PRODUCT[:-1], "FADD R4, R4, R4", "@P0 BRA `(.L_x_0)", "EXIT"), ("gdesc[UR4]",)),
        ((), ()),
    ],
)
def test_uniform_registers_that_nothing_wrote_are_seen(code: tuple[str, ...], undefined: tuple[str, ...]) -> None:
    assert undefined_registers(_sass(*code)) == undefined


@pytest.mark.parametrize(("product", "undefined"), [("wgmma", "UR6, UR7"), ("wgmma", ""), ("mma.sync", "UR6, UR7")])
def test_a_kernel_that_ptxas_made_wrong_code_of_is_not_launched(product, undefined, monkeypatch, tmp_path):
    """Launches, files and JAX's calls get their kernels by `binary_of`. nvdisasm is a script that prints code."""
    written = "UIADD3.64 UR4, URZ, 0x2, URZ" if undefined else "UIADD3.64 UR6, URZ, 0x2, URZ"
    (tmp_path / "sass").write_text(_sass(written, "HGMMA.64x64x16.F32 R24, R56, gdesc[UR4].tnspB, R24", "EXIT"))
    tool = tmp_path / "nvdisasm"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8" || cat {tmp_path}/sass\n')
    tool.chmod(0o755)
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tool))
    metadata = SimpleNamespace(name="attention_kernel", num_ctas=1, num_warps=4, shared=0)
    code = {"ptx": f"{product}.sync", "cubin": b"code"}
    compiled = SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature={"x_ptr": "*bf16"}), asm=code)
    if product == "wgmma" and undefined:
        with pytest.raises(MiscompiledError, match=rf"attention_kernel: the code reads {undefined} but never writes"):
            store.binary_of(compiled)
    else:
        assert store.binary_of(compiled).code == b"code"


def _tries(
    monkeypatch: pytest.MonkeyPatch, sound: set[object], shared: Mapping[int, int] = {}
) -> tuple[list[object], Callable[[int, str | None], Any]]:
    """Returns a list of the numbers of stages that are tried, and a compile function. sound: the numbers that give right code.

    "slow" stands for code without optimisations. shared: bytes of shared memory by the number of stages.
    """
    tried: list[object] = []

    def compile_with(num_stages: int, ptx_options: str | None = None) -> Any:
        tried.append(num_stages if ptx_options is None else "slow")
        metadata = SimpleNamespace(
            name="kernel",
            num_ctas=1,
            num_warps=4,
            shared=shared.get(num_stages, 0),
            num_stages=num_stages,
            ptx_options=ptx_options,
            target=SimpleNamespace(arch=90),
        )
        code = {"ptx": "wgmma", "cubin": str(tried[-1]).encode()}
        return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature={}), asm=code)

    def check_code(name: str, ptx: str, cubin: bytes) -> None:
        if cubin.decode() not in map(str, sound):
            raise MiscompiledError(f"with {cubin.decode()} stages")

    monkeypatch.setattr(store, "check_code", check_code)
    return tried, compile_with


@pytest.mark.parametrize(
    ("num_stages", "sound", "tried"),
    [
        *((3, {3, 2}, [3]), (3, {2, 1}, [3, 2]), (3, {1, 4}, [3, 2, 1]), (3, {4}, [3, 2, 1, 4]), (1, {2}, [1, 2])),
        (2, {"slow"}, [2, 1, 3, "slow"]),
    ],
)
def test_a_miscompiled_kernel_gets_another_number_of_stages(num_stages, sound, tried, monkeypatch):
    """The last resort is code that ptxas does not optimise."""
    found, compile_with = _tries(monkeypatch, sound)
    compiled, binary = store.sound(compile_with, num_stages)
    assert found == tried
    assert (compiled.metadata.num_stages, binary.code) == (
        num_stages if tried[-1] == "slow" else tried[-1],
        str(tried[-1]).encode(),
    )


TOO_MUCH = SHARED_MEMORY_LIMIT[90] + 1


@pytest.mark.parametrize(("sound", "shared"), [(set(), {}), ({3}, {3: TOO_MUCH})])
def test_a_kernel_that_no_number_of_stages_makes_right_is_an_error(sound, shared, monkeypatch):
    """The error is that of the requested number; one stage more may need too much shared memory."""
    tried, compile_with = _tries(monkeypatch, sound, shared)
    with pytest.raises(MiscompiledError, match="with 2 stages"):
        store.sound(compile_with, 2)
    assert tried == [2, 1, 3, "slow"]


def test_a_kernel_without_room_in_shared_memory_gets_fewer_stages(monkeypatch):
    tried, compile_with = _tries(monkeypatch, {1, 2, 3}, {3: TOO_MUCH, 2: TOO_MUCH, 1: TOO_MUCH - 1})
    assert store.sound(compile_with, 3)[1].code == b"1"
    assert tried == [3, 2, 1]
    _, compile_with = _tries(monkeypatch, {1, 2}, {2: TOO_MUCH, 1: TOO_MUCH})
    with pytest.raises(OutOfResources, match=f"shared memory, Required: {TOO_MUCH}"):
        store.sound(compile_with, 1)


def test_each_way_to_a_kernel_takes_the_stages_that_are_right(monkeypatch, tmp_path):
    """A launch of its own, one by Triton under a profiler, and one that is built ahead, whose file has the requested name."""
    tried, compile_with = _tries(monkeypatch, {2})
    launched: list[Any] = []

    class Kernel:
        fn, arg_names, parts_of = "a kernel", (), staticmethod(lambda *_: ())

        def warmup(self, *_: Any, grid: Any, num_warps: int, num_stages: int, enable_fp_fusion: bool) -> Any:
            return compile_with(num_stages)

        def __getitem__(self, grid: Any) -> Any:
            return lambda **options: launched.append(options["num_stages"])

    tile = Tile(64, 64, 4, 1)
    monkeypatch.setattr(launch, "Direct", SimpleNamespace(of=lambda binary, names: binary))
    monkeypatch.setattr(launch, "_directory", tmp_path)
    monkeypatch.setattr(store, "description", lambda _, __, options, ___: f"{options['num_stages']} stages")
    for _ in range(2):  # the second is found on disk
        assert launch._find_or_compile(Kernel(), (), 90, tile, ()).code == b"2"
    assert tried == [1, 2]
    monkeypatch.setattr(launch, "is_plain", lambda: False)
    monkeypatch.setattr(launch, "_options", OrderedDict())
    for _ in range(2):
        launch._launch(Kernel(), 1, torch.device("cpu"), tile, ())
    assert launched == [2, 2]
    assert tried == [1, 2] * 2
    monkeypatch.setattr(compile_report, "compiled_from", lambda request, _: compile_with(request.num_stages))
    assert build._build(CompileRequest("module", "kernel", {}, {}, 90, 4, 1), "1 stages, built", tmp_path) == ""
    assert store.find(tmp_path, "1 stages, built").code == b"2"


@pytest.mark.parametrize(
    ("shape", "place", "held", "is_folded"),
    [
        *(("16x64", 0, 8, False), ("16x16", 0, 4, False), ("16x16", 0, 8, True)),
        *(("64x16", 1, 8, False), ("32x8", 1, 8, False), ("16x64", 1, 8, True)),
        *(("2x128x32", 0, 2, False), ("2x32x16", 1, 8, False), ("64x16x16", 0, 8, True)),
    ],
)
def test_operands_with_fewer_elements_than_their_threads_hold_are_seen(shape: str, place: int, held: int, is_folded: bool) -> None:
    operand = f"tensor<{shape}xbf16, #ttg.dot_op<{{opIdx = {place}, parent = #mma1, kWidth = {held}}}>>"
    line = f"%acc = tt.dot %p, %v, %zero : {operand} * {operand} -> tensor<16x64xf32, #mma1>"
    assert folded_operands(line) == ((f"{shape}, {held} a thread",) if is_folded else ())


@gluon.jit
def _barriers(HAS_IDLE: gl.constexpr):
    used = allocate_barriers(2, 1)
    alone = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(alone, count=1)
    if HAS_IDLE:
        allocate_barriers(2, 1)
    else:
        mbarrier.arrive(alone, count=1)
    mbarrier.arrive(used.index(1), count=1)
    mbarrier.wait(used.index(1), 0)


@gluon.jit
def _wait_for(barriers):
    mbarrier.wait(barriers.index(0), 0)


@gluon.jit
def _arrive_at(barriers):
    mbarrier.arrive(barriers.index(0), count=1)


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _barriers_of_workers():
    barriers = allocate_barriers(2, 1)
    gl.warp_specialize([(_nothing, ()), (_wait_for, (barriers,)), (_arrive_at, (barriers,))], [1, 1], [24, 24])


def test_barriers_that_workers_alone_use_are_used():
    [report] = compile_beside([CompileRequest(__name__, "_barriers_of_workers", {}, {}, 90, 4, 1)])
    assert report.idle_barriers == 0


def test_barriers_that_nothing_uses_are_counted():
    """One of two arrays has a use of one element; each other barrier has none, or one."""
    requests = [CompileRequest(__name__, "_barriers", {}, {"HAS_IDLE": has_idle}, 90, 4, 1) for has_idle in (False, True)]
    assert [report.idle_barriers for report in compile_beside(requests)] == [0, 2]


@pytest.mark.slow
def test_spills_and_warnings_are_seen():
    [report] = compile_many([_request(90, size=TOO_LARGE, inner=16)])
    assert report.registers == 255
    assert report.stack_bytes > 0
    assert report.spill_store_bytes > 0
    assert report.spill_load_bytes > 0
    assert report.instructions["STL"] + report.instructions["LDL"] == report.spill_instructions > 0
    assert 0 < report.loop_spill_share < 1
    assert [warning for warning in report.warnings if "C7511" in warning]  # wgmma is serialised because registers are short


@pytest.mark.slow
def test_a_cached_kernel_gives_the_same_report(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compile_many([_request(90)])
    cached = compile_many([_request(90)])
    [log] = tmp_path.rglob("ptxas.log")
    log.unlink()  # the kernel was compiled for a launch
    made_again = compile_many([_request(90)])
    assert len({str(report) for [report] in (made, cached, made_again)}) == 1
    assert made[0].instructions == cached[0].instructions == made_again[0].instructions


def test_failures_name_their_requests_with_the_compilers_message():
    wrong_size = _request(90, size=96)
    unsupported = _request(80, "fp8e4nv")
    missing = dataclasses.replace(_request(90), kernel="no_such_kernel")
    with pytest.raises(CompileError) as failure:
        compile_beside([wrong_size, _request(90), unsupported, missing])
    message = str(failure.value)
    assert "3 of 4" in message
    for request, reason in ((wrong_size, "power of 2"), (unsupported, "fp8e4nv not supported"), (missing, "no_such_kernel")):
        assert f"{request}\n" in message
        assert reason in message
    assert f"{_request(90)}\n" not in message


@pytest.mark.slow
def test_arguments_are_checked():
    request = _request(90)
    unnamed = dataclasses.replace(request, signature={"a_ptr": "*bf16"})
    misaligned = dataclasses.replace(request, aligned=("a_stride",))
    with pytest.raises(CompileError, match=r"(?s)wrong or missing: b_ptr, num_tiles, out_ptr, stride.*wrong or missing: a_stride"):
        compile_beside([unnamed, misaligned])


@triton.jit
def _multiply_add_kernel(x_ptr, y_ptr):
    at = tl.arange(0, 32)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * tl.load(y_ptr + at) + 3.0)


@pytest.mark.sample
@pytest.mark.parametrize("default", ["0", "1", None])
def test_a_product_and_a_sum_are_one_operation_whatever_tritons_default_is(default, monkeypatch):
    if default is None:
        monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    else:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    # compiled, in a process whose kernels are interpreted
    monkeypatch.setattr(sys.modules[__name__], "_multiply_add_kernel", JITFunction(_multiply_add_kernel.fn))
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Triton 3.9 warns if nothing says whether they are
        report = report_of(CompileRequest(__name__, "_multiply_add_kernel", signature, {}, sm=90, num_warps=1, num_stages=1))
    assert report.instructions["FFMA"] == 1
    assert not {"FADD", "FMUL"} & report.instructions.keys()


def test_the_librarys_own_kernels_alone_go_without_the_slp_vectorizer():
    seen = []
    llvm = compiler._Llvm(SimpleNamespace(optimize_module=lambda module, **options: seen.append((module, options)), other=3))
    llvm.optimize_module("a user's", flags=["x"])
    with compiler.compiling():
        with compiler.compiling():
            pass
        llvm.optimize_module("ours", flags=["x"], disable_slp_vectorizer=False)
        thread = threading.Thread(target=llvm.optimize_module, args=("a user's in another thread",))
        thread.start()
        thread.join()
    llvm.optimize_module("a user's again")
    assert seen == [
        ("a user's", {"flags": ["x"]}),
        ("ours", {"flags": ["x"], "disable_slp_vectorizer": True}),
        ("a user's in another thread", {}),
        ("a user's again", {}),
    ]
    assert llvm.other == 3
    has_it = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    assert isinstance(nvidia.llvm, compiler._Llvm) == has_it


def test_an_interpreted_kernel_is_refused():
    with pytest.raises(TypeError, match="compile_many"):
        report_of(CompileRequest(__name__, "_multiply_add_kernel", {}, {}, sm=90, num_warps=4, num_stages=1))


def test_no_requests_start_no_process(monkeypatch):
    monkeypatch.setattr("subprocess.run", None)
    assert compile_many([]) == []
