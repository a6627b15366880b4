"""The supported PTX of gl.inline_asm_elementwise: named barriers, fences, conversions, approximations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as tl
from triton.experimental.gluon.language import _layouts as layouts

from flexattn.emulator.context import program
from flexattn.emulator.dtypes import Array, DType, from_bits, round_to, to_bits
from flexattn.emulator.report import GluonError
from flexattn.emulator.values import Operand, Tensor, binary, common_layout, scalar, unary, where

_TENSOR_FENCE = re.compile(r"tcgen05\.fence::(before|after)_thread_sync")
_BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)?\s+(\d+)\s*,\s*(\d+)\s*;")


def _pack(*values: Array) -> Array:
    """Packs two 16-bit or four 8-bit patterns into an int32, with the first one in the lowest bits."""
    width = 32 // len(values)
    packed = sum((bits.astype(np.int64) & ((1 << width) - 1)) << (width * i) for i, bits in enumerate(values))
    return np.asarray(packed).astype(np.uint32).view(np.int32)


def _packed_cvt(dtype: DType) -> Callable[..., Tensor]:
    def convert(*tensors: Tensor) -> Tensor:
        if len(tensors) == 1:  # the asm packs neighbouring numbers of one tensor, which stay numbers of a tensor
            return Tensor(round_to(tensors[0].data, dtype), dtype, tensors[0].layout)
        layout = common_layout(tensors[0].layout, tensors[1].layout, "inline asm")
        return Tensor(_pack(*(to_bits(round_to(x.data, dtype), dtype) for x in tensors)), tl.int32, layout)

    return convert


def _approximation(function: Callable[[Operand], Operand]) -> Callable[[object], object]:
    return lambda x: unary(function, x)


def _wide_product(a: Operand, b: Operand) -> tuple[Any, Any]:
    """Returns the lower and the upper word of a product of two uint32."""
    wide = (a if isinstance(a, Tensor) else scalar(a)).to(tl.uint64)
    product = binary("mul", wide, scalar(b).to(tl.uint64))
    return product.to(tl.uint32), (product >> 32).to(tl.uint32)


def _choice(x: Tensor, bits: Tensor, mask: Tensor) -> Operand:
    return where(binary("ne", binary("and", bits, mask), 0), x, 0.0)


def _bytes_of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lower and the upper bytes of 16-bit words."""
    both = np.ascontiguousarray(words.data)[..., None].view(np.int8)
    lower, upper = (Tensor(both[..., i].copy(), tl.int8, words.layout) for i in (0, 1))
    return lower, upper


def _cvt_to_fp8(name: str) -> re.Pattern[str]:
    cvt = rf"cvt\.rn\.satfinite\.{name}x2\.f32"
    return re.compile(
        rf"^\s*\{{\s*\.reg \.b16 a, b;\s*{cvt} a, \$2, \$1;\s*{cvt} b, \$4, \$3;\s*mov\.b32 \$0, \{{a, b\}};\s*\}}\s*$"
    )


_FP8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def _pairs_of_fp8(kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that converts four FP8 numbers in 32 bits to two pairs of fp16."""

    def convert(words: Tensor) -> tuple[Tensor, Tensor]:
        numbers = np.ascontiguousarray(words.data)[..., None].view(np.uint8)
        bits = to_bits(round_to(from_bits(numbers, _FP8[kind]), tl.float16), tl.float16)
        first, second = (Tensor(_pack(bits[..., i], bits[..., i + 1]), tl.int32, words.layout) for i in (0, 2))
        return first, second

    return convert


_KNOWN: list[tuple[re.Pattern[str], Callable[..., object]]] = [
    (re.compile(r"^\s*ex2\.approx(\.ftz)?\.f32 \$0, \$1;\s*$"), _approximation(np.exp2)),
    (re.compile(r"^\s*lg2\.approx(\.ftz)?\.f32 \$0, \$1;\s*$"), _approximation(np.log2)),
    (re.compile(r"^\s*rcp\.approx(\.ftz)?\.f32 \$0, \$1;\s*$"), _approximation(lambda x: np.float32(1) / x)),
    (re.compile(r"^\s*tanh\.approx\.f32 \$0, \$1;\s*$"), _approximation(np.tanh)),
    (re.compile(r"^\s*cvt\.rn\.bf16x2\.f32 \$0, \$2, \$1;\s*$"), _packed_cvt(tl.bfloat16)),
    (re.compile(r"^\s*cvt\.rn\.f16x2\.f32 \$0, \$2, \$1;\s*$"), _packed_cvt(tl.float16)),
    (_cvt_to_fp8("e4m3"), _packed_cvt(tl.float8e4nv)),
    (_cvt_to_fp8("e5m2"), _packed_cvt(tl.float8e5)),
    *(
        (re.compile(rf"cvt\.rn\.f16x2\.{kind}x2 \$0, a; cvt\.rn\.f16x2\.{kind}x2 \$1, b; }}$"), _pairs_of_fp8(kind))
        for kind in _FP8
    ),
    (re.compile(r"^\{ \.reg \.b64 p; mul\.wide\.u32 p, \$2, \$3; mov\.b64 \{\$0, \$1\}, p; \}$"), _wide_product),
    (re.compile(r"and\.b32 b, \$2, \$3; setp\.ne\.b32 p, b, 0; selp\.f32 \$0, \$1, 0f00000000, p; \}$"), _choice),
    (re.compile(r"^prmt\.b32 \$0, \$2, \$3, 0x6420; prmt\.b32 \$1, \$2, \$3, 0x7531;$"), _bytes_of_words),
    (re.compile(r"vote\.sync\.any.*@!p bra SAME; mul\.f32"), lambda x, factor: x * factor),
    (re.compile(r"vote\.sync\.any.*nanosleep"), lambda x: x),
    (re.compile(r"^\s*mov\.b32 \$0, 0;\s*$"), lambda _: scalar(0)),
    (re.compile(r"^griddepcontrol\.(wait|launch_dependents); mov\.b32 \$0, \$1;$"), scalar),  # kernels run one by one.
    (re.compile(r"^\s*mov\.[bf]32 \$0, \$1;\s*$"), lambda x: x),
]


def register_asm(pattern: str, function: Callable[..., object]) -> None:
    """Adds an elementwise inline-asm text to the emulator.

    pattern: a regular expression that is searched in the text.
    function: a function from the operands (values.Tensor with numpy `data`, or scalars) to the result. If several patterns match,
        the last registered one is used.
    """
    _KNOWN.insert(0, (re.compile(pattern, re.DOTALL), function))


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Any], dtype: DType, is_pure: bool, pack: int, **_: Any
) -> Operand:
    """Executes inline asm. Raises NotImplementedError if the text is neither known nor registered."""
    cta, first = program(), args[0]
    text = asm if isinstance(first, Tensor) else asm.replace("$1", str(int(first)))  # a barrier's number may be an operand.
    if barriers := _BARRIER.findall(text):
        if is_pure:
            cta.find("named-barrier", "asm with a barrier has is_pure=True, so the compiler may move it or leave it out")
        times = _runs_per_thread(first, pack)
        for kind, number, count in barriers:
            cta.named_barrier(kind, int(number), int(count), times)
        return first if isinstance(first, Tensor) else scalar(0)
    if "fence.proxy.async" in asm:
        cta.fence()
        return first
    if fence := _TENSOR_FENCE.search(asm):
        cta.tensor_fence(fence[1])
        return first if isinstance(first, Tensor) else scalar(0)
    if "cp.async.bulk.wait_group 0" in asm:
        cta.store_wait(0)
        return first
    for known, function in _KNOWN:
        if known.search(asm):
            return function(*args)
    raise NotImplementedError(f"the inline asm {asm!r}; emulator.register_asm teaches it")


def _runs_per_thread(operand: Operand, pack: int) -> int:
    """Returns the number of times that each thread runs the asm: once for a scalar, else once per `pack` elements of the thread."""
    if not isinstance(operand, Tensor):
        return 1
    partition, layout = program().current, operand.layout
    threads = partition.threads
    if isinstance(layout, layouts.BlockedLayout):
        threads = math.prod(layout.threads_per_warp) * math.prod(layout.warps_per_cta)
    if threads != partition.threads:
        raise GluonError(f"the operand of asm has a layout for {threads} threads, and {partition.name} has {partition.threads}")
    return max(1, operand.numel // pack // threads)
