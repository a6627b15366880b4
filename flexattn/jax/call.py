"""A call without its arrays: what its primitives carry as text, and the way between JAX arrays and torch tensors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import options
from flexattn.dispatch.quantization import amax_sizes
from flexattn.dispatch.spec import AttentionSpec, Operands, empty_gradients, empty_outputs, parse_format
from flexattn.fp8_ops import FUNCTIONS, Delayed, QuantizeConfig, planned, quantize_inputs
from flexattn.validation import FP8_DTYPES

if TYPE_CHECKING:
    from flexattn.fp8 import Recipe

DTYPES: dict[str, torch.dtype] = {
    **{name: getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8")},
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TENSORS = Operands._fields[: Operands._fields.index("max_seqlen_q")]  # each an array or None
NUMBERS = ("max_seqlen_q", "max_seqlen_kv", "softmax_scale", "softcap", "dropout_p")
LISTS = ("mod_tensors", "block_mask", "descales")
SCALED = ("q", "k", "v", "dout", "out")  # whose scales a call with delayed scaling takes, in this order


def torch_dtype(name: str, dtype: Any) -> torch.dtype:
    """Returns torch's dtype for JAX's; raises TypeError where it has none that attention takes."""
    found: torch.dtype | None = DTYPES.get(jnp.dtype(dtype).name)
    if found is None:
        raise TypeError(f"{name} has dtype {jnp.dtype(dtype).name}; accepted: {', '.join(DTYPES)}")
    return found


def jax_dtype(dtype: torch.dtype) -> Any:
    """Returns JAX's dtype for torch's."""
    return jnp.dtype(_NAMES[dtype])


def meta_tensor(name: str, aval: Any) -> Tensor:
    """Returns a tensor without memory, of an array's shape and dtype; raises ValueError for a size that is a symbol."""
    if not all(isinstance(size, int) for size in aval.shape):
        raise ValueError(
            f"{name} has shape {aval.shape}, with sizes that are symbols; accepted: sizes that are numbers, as they decide which "
            "kernels run: export the function once for each size, or pad to the largest one"
        )
    return torch.empty(tuple(aval.shape), dtype=torch_dtype(name, aval.dtype), device="meta")


def shape_of_words(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape as int64 of an rng_state in words of uint32, as which JAX has it: [2], or [b, 5 or 6] of a part."""
    return (*shape[:-1], shape[-1] // 2)


class Out8(NamedTuple):
    """Settings of quantising out."""

    dtype: str
    granularity: str
    block_rows: int
    margin: int


class Call(NamedTuple):
    """All of a call but its arrays; hashable, and as text the same in every process."""

    settings: ops.Settings
    config: QuantizeConfig | None  # how q, k and v are quantised inside the call
    present: tuple[str, ...]  # which of TENSORS there are
    counts: tuple[int, ...]  # length of each of LISTS
    numbers: tuple[float, ...]  # NUMBERS
    mod_numbers: tuple[float, ...]
    hopper: str  # FLEXATTN_HOPPER when the call was traced; another value is another program
    out8: Out8 | None = None  # results are then out, lse, max_logit, and the data, descale and amax of out
    is_delayed: bool = False  # behind all other operands are scales, and behind all other results amaxes, each [heads | 1]

    @classmethod
    def of(cls, x: Operands, settings: ops.Settings, config: QuantizeConfig | None, recipe: Recipe | None) -> Call:
        """Returns the call that `prepare` gave; recipe: the argument fp8_recipe."""
        dtype = None if recipe is None else recipe.out_dtype
        out8 = (
            None
            if recipe is None or dtype not in FP8_DTYPES
            else Out8(_NAMES[dtype], recipe.granularity, recipe.rows, recipe.margin)
        )
        return cls(
            settings,
            config,
            tuple(name for name in TENSORS if getattr(x, name) is not None),
            tuple(len(getattr(x, name)) for name in LISTS),
            tuple(getattr(x, name) for name in NUMBERS),
            tuple(x.mod_numbers),
            options.hopper(),
            out8,
            recipe is not None and recipe.scaling == "delayed",
        )

    @property
    def text(self) -> str:
        """The call as JSON, which `parse` reads."""
        return json.dumps(self, separators=(",", ":"))

    @property
    def num_operands(self) -> int:
        return len(self.present) + sum(self.counts) + (len(SCALED) if self.is_delayed else 0)

    def names(self) -> tuple[str, ...]:
        """Returns the field of each operand."""
        lists = (name for name, count in zip(LISTS, self.counts, strict=True) for _ in range(count))
        return (*self.present, *lists, *(("scales",) * len(SCALED) if self.is_delayed else ()))

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """Returns the call's operands; tensors: in the order of `flat`."""
        left = iter(tensors)
        given: dict[str, Any] = dict.fromkeys(TENSORS) | {name: next(left) for name in self.present}
        given |= zip(NUMBERS, self.numbers, strict=True)
        given |= {name: tuple(next(left) for _ in range(n)) for name, n in zip(LISTS, self.counts, strict=True)}
        return Operands(**given, mod_numbers=self.mod_numbers)

    def spec(self, x: Operands) -> AttentionSpec:
        """Returns the spec of the call with operands x, FP8 included, as on x's device."""
        planned_x = x if self.config is None else planned(x, self.settings, self.config)
        return ops.make_spec(planned_x, self.settings, None)

    def delayed(self, tensors: Sequence[Tensor]) -> Delayed:
        """Returns the scales among the operands' tensors, and histories of this call alone; with current scaling none."""
        if not self.is_delayed:
            return Delayed()
        scales = tensors[self.num_operands - len(SCALED) : self.num_operands]
        return Delayed(*scales, *(scale.new_zeros(1, scale.shape[0]) for scale in scales))

    def quantized(self, x: Operands, delayed: Delayed) -> Operands:
        """Returns the operands, with q, k and v in FP8 where the call quantises them."""
        if self.config is None:
            return x
        return quantize_inputs(x, self.settings.qkv_format, self.config, delayed, FUNCTIONS)

    def quantized_for_backward(self, x: Operands, delayed: Delayed) -> Operands:
        """Returns the operands as a backward gets them: with q and k in 16 bits too, where FP8 needs them there."""
        if self.config is None or self.settings.bf16_backward:
            return x
        in_16_bits = (x.q, x.k) if self.config.keeps_16_bit else ()
        return self.quantized(x, delayed)._replace(copies16=in_16_bits)

    def forward(
        self, x: Operands, delayed: Delayed, attend: Callable[[Operands], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        """Returns the results of `attend`, of q, k and v in FP8 where the call quantises them, and those of FP8 behind them."""
        out, lse, max_logit = attend(self.quantized(x, delayed))
        found = [out, lse, max_logit]
        if self.out8 is not None:
            fmt, _ = parse_format(self.settings.qkv_format)
            lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
            dtype, *kind = self.out8
            found += FUNCTIONS.quantize(out, *lengths, delayed.scale_out, delayed.history_out, fmt, dtype, *kind, False)
        if self.is_delayed:
            histories = (delayed.history_q, delayed.history_k, delayed.history_v, delayed.history_out)
            found += [history.view(-1) for history in histories if history is not None]
        return tuple(found)

    def results(self, x: Operands, scales: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns room for the results of `forward`; scales: of delayed scaling."""
        found = list(empty_outputs(self.spec(x), x))
        if self.out8 is not None:
            fmt, _ = parse_format(self.settings.qkv_format)
            sizes = amax_sizes(found[0], fmt, x.cu_seqlens_q, x.max_seqlen_q, self.out8.granularity, self.out8.block_rows)
            found += [found[0].to(DTYPES[self.out8.dtype]), *(found[1].new_empty(sizes) for _ in range(2))]
        return found + [torch.empty_like(scale) for name, scale in zip(SCALED, scales, strict=False) if name != "dout"]

    def gradients(self, x: Operands, scales: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns room for the gradients that the backward gives: of q, k, v, bias, softmax_offset, captures, as far as wanted.

        And behind them for the amax of dout, with the scales of delayed scaling.
        """
        found = empty_gradients(self.spec(x), x)
        offset = None if x.softmax_offset is None else torch.empty_like(x.softmax_offset)
        given = (found.dq, found.dk, found.dv, found.dbias, offset, *(found.dmod_tensors or ()))
        return [t for t in given if t is not None] + [torch.empty_like(scale) for scale in scales[SCALED.index("dout") :][:1]]

    def wanted(self) -> list[int]:
        """Returns the operand that each of `gradients` is the gradient of, but for dout's amax behind them."""
        names = self.names()
        fields = ["q", "k", "v", *(["bias"] if self.settings.needs_bias_grad else []), "softmax_offset"]
        dense = [names.index(name) for name in fields if name in names]
        first = len(self.present)
        captures = ops.captures_with_gradients(self.settings.mods)
        return dense + [first + i for i, needs_grad in enumerate(captures) if needs_grad]


def flat(x: Operands) -> list[Tensor]:
    """Returns the operands' tensors in the order in which the primitives take them."""
    dense = [t for t in (getattr(x, name) for name in TENSORS) if t is not None]
    return dense + [t for name in LISTS for t in getattr(x, name)]


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Call:
    """Returns the call that a text says."""
    settings, config, present, counts, numbers, mod_numbers, hopper, out8, is_delayed = json.loads(text)
    return Call(
        ops.Settings(*settings),
        None if config is None else QuantizeConfig(*config),
        tuple(present),
        tuple(counts),
        tuple(numbers),
        tuple(mod_numbers),
        hopper,
        None if out8 is None else Out8(*out8),
        is_delayed,
    )


def shaped(tensors: Sequence[Tensor]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of tensors as JAX has them."""
    return [jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in tensors]
