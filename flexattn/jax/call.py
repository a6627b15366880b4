"""A call without its arrays: the text that its primitives carry, and conversions between JAX arrays and torch tensors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.typing import DTypeLike
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import options
from flexattn.dispatch.quantization import amax_sizes
from flexattn.dispatch.spec import TENSOR_FIELDS, AttentionSpec, Operands, empty_gradients, empty_outputs, parse_format
from flexattn.fp8_ops import FUNCTIONS, Delayed, QuantizeConfig, planned, quantize_inputs
from flexattn.validation import FP8_DTYPES

if TYPE_CHECKING:
    from flexattn.fp8 import Recipe

DTYPES: dict[str, torch.dtype] = {
    **{name: getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8")},
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMBERS = ("max_seqlen_q", "max_seqlen_kv", "softmax_scale", "softcap", "dropout_p")
LISTS = ("mod_tensors", "block_mask", "descales")
SCALED = ("q", "k", "v", "dout", "out")  # tensors with scales, in the order of a call with delayed scaling


def torch_dtype(name: str, dtype: DTypeLike) -> torch.dtype:
    """Returns torch's dtype for JAX's; raises TypeError if attention does not support it."""
    torch_type: torch.dtype | None = DTYPES.get(jnp.dtype(dtype).name)
    if torch_type is None:
        raise TypeError(f"{name} has dtype {jnp.dtype(dtype).name}; accepted: {', '.join(DTYPES)}")
    return torch_type


def jax_dtype(dtype: torch.dtype) -> object:
    """Returns JAX's dtype for torch's."""
    return jnp.dtype(_NAMES[dtype])


def meta_tensor(name: str, aval: jax.core.ShapedArray) -> Tensor:
    """Returns a meta tensor of an array's shape and dtype; raises ValueError if a size is symbolic."""
    if not all(isinstance(size, int) for size in aval.shape):
        raise ValueError(
            f"{name} has shape {aval.shape}, with symbolic sizes; accepted: sizes that are numbers, because they determine the "
            "kernels: export the function once for each size, or pad to the largest one"
        )
    return torch.empty(tuple(aval.shape), dtype=torch_dtype(name, aval.dtype), device="meta")


def cumulative(lengths: jax.Array) -> jax.Array:
    """Returns 0 and the running sum of lengths, int32 [b + 1]."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def shape_of_words(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the int64 shape of an rng_state in words of uint32, JAX's form: [2], or [b, 5 or 6] for a part of a sequence."""
    return (*shape[:-1], shape[-1] // 2)


class Out8(NamedTuple):
    """Settings for quantising out."""

    dtype: str
    granularity: str
    block_rows: int
    margin: int


class Call(NamedTuple):
    """A call without its arrays; hashable, and with the same text in every process."""

    settings: ops.Settings
    config: QuantizeConfig | None  # quantisation of q, k and v inside the call
    present: tuple[str, ...]  # the TENSOR_FIELDS that are passed
    counts: tuple[int, ...]  # length of each of LISTS
    numbers: tuple[float, ...]  # NUMBERS
    mod_numbers: tuple[float, ...]
    hopper: str  # FLEXATTN_HOPPER at trace time; another value is another program
    out8: Out8 | None = None  # if set, the results are out, lse, max_logit, and the data, descale and amax of out
    is_delayed: bool = False  # if True, scales follow all other operands, and amaxes all other results, each [heads | 1]

    @classmethod
    def of(cls, x: Operands, settings: ops.Settings, config: QuantizeConfig | None, recipe: Recipe | None) -> Call:
        """Returns the call for `prepare`'s results; recipe: the argument fp8_recipe."""
        out8 = None
        if recipe is not None and recipe.out_dtype in FP8_DTYPES:
            out8 = Out8(_NAMES[recipe.out_dtype], recipe.granularity, recipe.rows, recipe.margin)
        return cls(
            settings,
            config,
            tuple(name for name in TENSOR_FIELDS if getattr(x, name) is not None),
            tuple(len(getattr(x, name)) for name in LISTS),
            tuple(getattr(x, name) for name in NUMBERS),
            tuple(x.mod_numbers),
            options.hopper(),
            out8,
            recipe is not None and recipe.scaling == "delayed",
        )

    @property
    def num_operands(self) -> int:
        return len(self.present) + sum(self.counts) + (len(SCALED) if self.is_delayed else 0)

    def names(self) -> tuple[str, ...]:
        """Returns each operand's field name."""
        lists = (name for name, count in zip(LISTS, self.counts, strict=True) for _ in range(count))
        return (*self.present, *lists, *(("scales",) * len(SCALED) if self.is_delayed else ()))

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """Returns the call's operands; tensors: in the order of `flat`."""
        remaining = iter(tensors)
        fields: dict[str, Any] = dict.fromkeys(TENSOR_FIELDS) | {name: next(remaining) for name in self.present}
        fields |= zip(NUMBERS, self.numbers, strict=True)
        fields |= {name: tuple(next(remaining) for _ in range(n)) for name, n in zip(LISTS, self.counts, strict=True)}
        return Operands(**fields, mod_numbers=self.mod_numbers)

    def spec(self, x: Operands) -> AttentionSpec:
        """Returns the spec of the call with operands x, including FP8, for x's device."""
        planned_x = x if self.config is None else planned(x, self.settings, self.config)
        return ops.make_spec(planned_x, self.settings, None)

    def delayed(self, tensors: Sequence[Tensor]) -> Delayed:
        """Returns the scales among the operands' tensors, with histories for this call only; empty with current scaling."""
        if not self.is_delayed:
            return Delayed()
        scales = tensors[self.num_operands - len(SCALED) : self.num_operands]
        return Delayed(*scales, *(scale.new_zeros(1, scale.shape[0]) for scale in scales))

    def quantized(self, x: Operands, delayed: Delayed) -> Operands:
        """Returns the operands, with q, k and v in FP8 if the call quantises them."""
        if self.config is None:
            return x
        return quantize_inputs(x, self.settings.qkv_format, self.config, delayed, FUNCTIONS)

    def quantized_for_backward(self, x: Operands, delayed: Delayed) -> Operands:
        """Returns the operands of a backward: with q and k in 16 bits too, if FP8 needs them."""
        if self.config is None or self.settings.bf16_backward:
            return x
        in_16_bits = (x.q, x.k) if self.config.keeps_16_bit else ()
        return self.quantized(x, delayed)._replace(copies16=in_16_bits)

    def forward(
        self, x: Operands, delayed: Delayed, attend: Callable[[Operands], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        """Returns the results of `attend`, on q, k and v in FP8 if the call quantises them, followed by FP8's own results."""
        out, lse, max_logit = attend(self.quantized(x, delayed))
        results = [out, lse, max_logit]
        if self.out8 is not None:
            fmt, _ = parse_format(self.settings.qkv_format)
            lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
            dtype, *kind = self.out8
            results += FUNCTIONS.quantize(out, *lengths, delayed.scale_out, delayed.history_out, fmt, dtype, *kind, False)
        if self.is_delayed:
            histories = (delayed.history_q, delayed.history_k, delayed.history_v, delayed.history_out)
            results += [history.view(-1) for history in histories if history is not None]
        return tuple(results)

    def results(self, x: Operands, scales: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns empty tensors for the results of `forward`; scales: scales of delayed scaling."""
        results = list(empty_outputs(self.spec(x), x))
        if self.out8 is not None:
            fmt, _ = parse_format(self.settings.qkv_format)
            sizes = amax_sizes(results[0], fmt, x.cu_seqlens_q, x.max_seqlen_q, self.out8.granularity, self.out8.block_rows)
            results += [results[0].to(DTYPES[self.out8.dtype]), *(results[1].new_empty(sizes) for _ in range(2))]
        return results + [torch.empty_like(scale) for name, scale in zip(SCALED, scales, strict=False) if name != "dout"]

    def gradients(self, x: Operands, scales: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns empty tensors for the backward's gradients: those of q, k, v, bias, softmax_offset and captures that are needed.

        With scales of delayed scaling, the amax of dout follows.
        """
        empty = empty_gradients(self.spec(x), x)
        offset = None if x.softmax_offset is None else torch.empty_like(x.softmax_offset)
        tensors = (empty.dq, empty.dk, empty.dv, empty.dbias, offset, *(empty.dmod_tensors or ()))
        return [t for t in tensors if t is not None] + [torch.empty_like(scale) for scale in scales[SCALED.index("dout") :][:1]]

    def wanted(self) -> list[int]:
        """Returns the operand of each of `gradients`, without dout's amax."""
        names = self.names()
        fields = ["q", "k", "v", *(["bias"] if self.settings.needs_bias_grad else []), "softmax_offset"]
        dense = [names.index(name) for name in fields if name in names]
        first = len(self.present)
        captures = ops.captures_with_gradients(self.settings.mods)
        return dense + [first + i for i, needs_grad in enumerate(captures) if needs_grad]


def flat(x: Operands) -> list[Tensor]:
    """Returns the operands' tensors in the primitives' order."""
    dense = [t for t in (getattr(x, name) for name in TENSOR_FIELDS) if t is not None]
    return dense + [t for name in LISTS for t in getattr(x, name)]


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Call:
    """Returns the call for a text."""
    settings, config, *lists, hopper, out8, is_delayed = json.loads(text)
    config, out8 = None if config is None else QuantizeConfig(*config), None if out8 is None else Out8(*out8)
    present, counts, numbers, mod_numbers = map(tuple, lists)
    return Call(ops.Settings(*settings), config, present, counts, numbers, mod_numbers, hopper, out8, is_delayed)


def shaped(tensors: Sequence[Tensor]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of tensors as JAX structs."""
    return [jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in tensors]
