"""Attention in FP8: recipes, quantised tensors with their scales, and the state of delayed scaling.

The terms are TransformerEngine's: `data` = x * scale in float8 stores a tensor x, and x ≈ data * `descale`. A scale is
fp8_max / amax * 2**-margin, with the amax of this step ("current") or of earlier steps ("delayed").
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flexattn import fp8_ops, ops
from flexattn.dispatch.quantization import BLOCK_ROWS, GRANULARITIES, Granularity, dequantize_one, note_amax, scale_of
from flexattn.dispatch.spec import Operands, parse_format
from flexattn.function_context import FunctionContext
from flexattn.lengths import check_lengths_of
from flexattn.ops import Settings
from flexattn.validation import DTYPES, FP8_DTYPES, check_count, check_device, check_flag, check_local, check_name, describe

__all__ = ["DelayedScaling", "QuantizedTensor", "Recipe", "dequantize", "quantize"]

Fp8Format = Literal["E4M3", "HYBRID"]
Scaling = Literal["current", "delayed"]
FORMATS: tuple[Fp8Format, ...] = get_args(Fp8Format)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
ALGORITHMS = ("max", "most_recent")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
TENSORS = ("q", "k", "v", "dout", "out")
BUFFERS = tuple(f"{kind}_{name}" for kind in ("scale", "amax_history") for name in TENSORS)  # buffers of a DelayedScaling
MOST_MARGIN = 14  # with a larger margin, a tensor's largest value would be below E4M3's normal numbers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of FP8 in `attention`; frozen and hashable. A field that would have no effect raises.

    Args:
        fp8_format: "E4M3", or "HYBRID": dout and the gradient of the scores inside the backward are in E5M2, which has more range
            and half the precision.
        scaling: "current": scales come from the amax of the tensors; "delayed": scales come from the amax of earlier steps, which
            the `DelayedScaling` passed as `fp8_state` stores. Values beyond the range saturate.
        granularity: the unit that has its own scale: "tensor", "head", "batch_head" or "block" (rows of each sequence and head).
            Delayed scaling accepts "tensor" and "head". On compute capability 9.0, current scaling without a margin always scales
            each 128 rows of a head of dout, because the first kernel that reads dout computes these scales.
        block_rows: rows of a block if granularity is "block", a multiple of 64; None: 128.
        margin: scales are 2**margin smaller than those that fill the range. At -14 all but the smallest values saturate; at 14 the
            largest value is just a normal number of E4M3.
        amax_history_len, amax_compute_algo: for delayed scaling, the number of steps in the history (None: 16), and whether the
            "max" (None) or the "most_recent" of them gives the scale.
        rotation: multiply q and k with one orthogonal matrix, a Hadamard matrix with signs, which does not change q k^T and spreads
            outliers over all channels. If the head dim is not a power of two, the matrix acts within blocks of the largest one in
            it.
        bf16_backward: run the backward on the 16-bit q, k, v and dout, without FP8.
        keep_16_bit: keep the 16-bit q and k for a backward in FP8, which has products with 16-bit operands. That takes two more
            bytes for each of their elements until the backward, and saves a pass that dequantises them. None: True on compute
            capability 9.0, whose kernels read them, and without rotation.
        out_dtype: bfloat16, float16 or a float8 dtype, with which `attention` returns a `QuantizedTensor` as out. None: q's dtype,
            or bfloat16 if q is in FP8.
    """

    fp8_format: Fp8Format = "E4M3"
    scaling: Scaling = "current"
    granularity: Granularity = "head"
    block_rows: int | None = None
    margin: int = 0
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    rotation: bool = False
    bf16_backward: bool = False
    keep_16_bit: bool | None = None
    out_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_name("fp8_format", self.fp8_format, FORMATS)
        check_name("scaling", self.scaling, SCALINGS)
        check_name("granularity", self.granularity, GRANULARITIES)
        check_flag("rotation", self.rotation)
        check_flag("bf16_backward", self.bf16_backward)
        check_flag("keep_16_bit", self.keep_16_bit, optional=True)
        if self.keep_16_bit and (self.rotation or self.bf16_backward):
            other = "rotation" if self.rotation else "bf16_backward"
            raise ValueError(f"keep_16_bit is True with {other}, and has no effect with it; accepted: None, False")
        margins = f"an int from {-MOST_MARGIN} to {MOST_MARGIN}, the power of two that divides scales"
        check_count("margin", self.margin, -MOST_MARGIN, margins, MOST_MARGIN)
        if self.out_dtype is not None and self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype is {self.out_dtype}; accepted: None, {', '.join(map(str, OUT_DTYPES))}")
        if self.block_rows is not None:
            if self.granularity != "block":
                raise ValueError(
                    f"block_rows is given with granularity {self.granularity!r}; accepted: None, or granularity 'block'"
                )
            if (
                isinstance(self.block_rows, bool)
                or not isinstance(self.block_rows, int)
                or self.block_rows < 64
                or self.block_rows % 64
            ):
                raise ValueError(f"block_rows is {self.block_rows!r}; accepted: a multiple of 64")
        if self.scaling == "current":
            for name in ("amax_history_len", "amax_compute_algo"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is given with scaling 'current', which has no history; accepted: None, or 'delayed'")
            return
        if self.granularity not in ("tensor", "head"):
            raise ValueError(
                f"granularity is {self.granularity!r} with scaling 'delayed', whose scales outlive a batch; accepted: tensor, head"
            )
        length = self.amax_history_len
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"amax_history_len is {length!r}; accepted: an int of at least 1, or None for 16")
        if self.amax_compute_algo is not None:
            check_name("amax_compute_algo", self.amax_compute_algo, ALGORITHMS)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of dout and of the scores' gradient."""
        return torch.float8_e5m2 if self.fp8_format == "HYBRID" else torch.float8_e4m3fn

    def keeps_16_bit(self, device: torch.device) -> bool:
        """Returns whether a forward also keeps q and k in 16 bits, for a backward in FP8 on the device."""
        if self.keep_16_bit is not None:
            return self.keep_16_bit
        return not (self.rotation or self.bf16_backward) and _reads_16_bit(device)

    def quantises_dout(self, device: torch.device, backend: str) -> bool:
        """Returns whether dout is quantised before the backward. If not, the backward does it, with a scale per BLOCK_ROWS rows."""
        return (
            self.scaling == "delayed" or chooses_scales(self.margin, self.rows) or backend == "cudnn" or not _reads_16_bit(device)
        )

    @property
    def rows(self) -> int:
        """Rows of a block; 0 if granularity is not "block"."""
        return (self.block_rows or BLOCK_ROWS) if self.granularity == "block" else 0


_DEFAULTS = tuple(
    (field.name, field.default) for field in dataclasses.fields(Recipe)
)  # computed here because Dynamo does not trace dataclasses.fields


def chooses_scales(margin: int, rows: int) -> bool:
    """Returns whether a recipe with this margin and block size needs other scales of dout than the kernel would compute."""
    return margin != 0 or rows not in (0, BLOCK_ROWS)


class QuantizedTensor(NamedTuple):
    """x ≈ data * descale. `data` is float8 in x's layout; descale and amax are fp32 [b | 1, h | 1, blocks | 1], by granularity."""

    data: Tensor
    descale: Tensor
    amax: Tensor  # largest magnitude of x's finite values
    source: Tensor | None = None  # x in 16 bits, from `attention` in training; its gradient is that of data * descale
    block_rows: int = 0  # rows that share a descale if granularity is "block", else 0


class DelayedScaling(torch.nn.Module):
    """The amax history and the scales of one attention layer, as buffers: `deepcopy`, `pickle`, `state_dict` and `to` apply.

    The buffers stay float32. If the module or its model is cast, they only move to another device; if `load_state_dict` loads
    another dtype, it is converted.

    Every call records its amax. The scales follow when `update` is called: once a step, after the backward. If activation
    checkpointing repeats a forward, it therefore finds the same scales.

    Args:
        recipe: a recipe with scaling "delayed".
        num_heads, num_heads_kv: heads of q and dout, and of k and v (None: same as q).
    """

    def __init__(
        self, recipe: Recipe, num_heads: int, num_heads_kv: int | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        _check_is_recipe(recipe)
        if recipe.scaling != "delayed":
            raise ValueError(f"recipe.scaling is {recipe.scaling!r}; accepted: 'delayed' (current scaling has no state)")
        check_count("num_heads", num_heads, 1, "an int of at least 1, the heads of q")
        if num_heads_kv is not None:
            check_count("num_heads_kv", num_heads_kv, 1, "an int of at least 1, the heads of k and v, or None for those of q")
        check_device("device", device)
        self.recipe = recipe
        all_heads = (num_heads, num_heads if num_heads_kv is None else num_heads_kv)
        with torch.inference_mode(False):  # calls outside of inference mode cannot change an inference tensor
            for name in TENSORS:
                for kind, shape in _shapes(recipe, name, all_heads).items():
                    fill = 1.0 if kind == "scale" else 0.0
                    self.register_buffer(f"{kind}_{name}", torch.full(shape, fill, dtype=torch.float32, device=device))

    def _apply(self, fn: object, recurse: bool = True) -> DelayedScaling:
        before = [self._buffers[name] for name in BUFFERS]
        with torch.inference_mode(False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, t in zip(BUFFERS, before, strict=True):
                now = self._buffers[name]
                if t is not None and now is not None and now.dtype is not t.dtype:
                    self._buffers[name] = t.to(now.device)
        return self

    def _load_from_state_dict(self, *arguments: object) -> None:
        super()._load_from_state_dict(*arguments)
        with torch.inference_mode(False):
            for name in BUFFERS:
                t = self._buffers[name]
                if t is not None:
                    self._buffers[name] = t.to(torch.float32).contiguous()  # with assign=True, t is the checkpoint's tensor

    def scale(self, name: str) -> Tensor:
        """Returns the factor that quantises a tensor, fp32 [heads], or [1] by granularity "tensor"; 1 before the first `update`."""
        check_name("name", name, TENSORS)
        scale: Tensor = getattr(self, f"scale_{name}")
        return scale

    def history(self, name: str) -> Tensor:
        """Returns a tensor's amax history, fp32 [amax_history_len, heads | 1]: row 0 is this step so far, then earlier steps."""
        check_name("name", name, TENSORS)
        history: Tensor = getattr(self, f"amax_history_{name}")
        return history

    def note(self, name: str, amax: Tensor) -> None:
        """Records a tensor's amax, [1, heads | 1, 1], in this step; the largest of a step counts."""
        note_amax(self.history(name), amax)

    @torch.no_grad()
    def update(self) -> None:
        """Ends the step: computes the scales from the history, and shifts the history by one."""
        for name in TENSORS:
            history = self.history(name)
            amax = history.amax(0) if self.recipe.amax_compute_algo != "most_recent" else history[0]
            scale, dtype = self.scale(name), delayed_dtype(self.recipe, name)
            scale.copy_(torch.where(amax > 0, scale_of(amax, dtype, self.recipe.margin), scale))
            history.copy_(history.roll(1, 0))
            history[0].zero_()


def delayed_dtype(recipe: Recipe, name: str) -> torch.dtype:
    """Returns the float8 dtype of one of TENSORS under delayed scaling."""
    if name == "out":
        return recipe.out_dtype if recipe.out_dtype in FP8_DTYPES else torch.float8_e4m3fn
    return recipe.grad_dtype if name == "dout" else torch.float8_e4m3fn


def quantize(
    x: Tensor,
    recipe: Recipe | None = None,
    *,
    qkv_format: str = "bshd",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    max_seqlen: int | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedTensor:
    """Quantises x to FP8 with current scaling, for `attention` with descale_q, descale_k or descale_v. Not differentiable.

    Args:
        x: float16, bfloat16 or float32, in one of `attention`'s formats.
        recipe: its granularity, block_rows, margin and rotation apply. With rotation, quantise both q and k with it, but not v.
        qkv_format: the format of x.
        cu_seqlens, cu_seqlens_padded, max_seqlen: the lengths of x, as for `attention`. Tokens beyond a length become 0 and do not
            count for the amax.
        dtype: float8_e4m3fn or float8_e5m2.

    NaN and infinite elements become NaN and do not count for the amax. If no other elements are left, or all are 0, the scale is 1.

    Raises:
        ValueError, TypeError: an argument has no meaning; the text names it.
    """
    recipe = Recipe() if recipe is None else recipe
    how = quantize_arguments(x, recipe, qkv_format, (cu_seqlens, cu_seqlens_padded, max_seqlen), dtype)
    data, descale, amax = fp8_ops.quantize(x.detach(), *how)
    return QuantizedTensor(data, descale, amax, block_rows=recipe.rows)


def quantize_arguments(
    x: Tensor, recipe: Any, qkv_format: Any, lengths: tuple[Tensor | None, Tensor | None, int | None], dtype: Any
) -> tuple[Any, ...]:
    """Returns the operator's checked arguments after x. lengths: cu_seqlens, cu_seqlens_padded and max_seqlen of `quantize`."""
    _check_is_recipe(recipe)
    if recipe.scaling != "current":
        raise ValueError("recipe.scaling is 'delayed'; accepted: 'current', because quantize has no history")
    for name, default in (("fp8_format", "E4M3"), ("bf16_backward", False), ("keep_16_bit", None), ("out_dtype", None)):
        if getattr(recipe, name) != default:
            raise ValueError(f"recipe.{name} is {getattr(recipe, name)!r}, which quantize does not use; accepted: {default!r}")
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, FP8_DTYPES))}")
    fmt = _format_of_one(qkv_format)
    cu_seqlens, cu_seqlens_padded, max_seqlen = lengths
    check_local({"x": x, "cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}, ", whose amax is its own")
    longest = check_lengths_of(x, fmt, cu_seqlens, cu_seqlens_padded, max_seqlen)
    how = (str(dtype).removeprefix("torch."), recipe.granularity, recipe.rows, recipe.margin, recipe.rotation)
    return (cu_seqlens, cu_seqlens_padded, longest, None, None, fmt, *how)


def _format_of_one(qkv_format: object) -> str:
    fmt, kv_format = parse_format(str(qkv_format))
    if fmt != kv_format:
        raise ValueError(f"qkv_format is {qkv_format!r}; accepted: the format of x, one of bshd, sbhd, bhsd, thd")
    return fmt


class _Dequantized(torch.autograd.Function):
    """`dequantize_one` of the arguments behind `source`, which gets the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor | None, *call: Any) -> Tensor:
        return dequantize_one(*call)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: Tensor) -> None:
        source = inputs[0]
        ctx.dtype = None if source is None else source.dtype

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Any, ...]:
        return gradient if ctx.dtype is None else gradient.to(ctx.dtype), *(None,) * (len(ctx.needs_input_grad) - 1)


def dequantize(
    x: QuantizedTensor,
    recipe: Recipe | None = None,
    *,
    qkv_format: str = "bshd",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns data * descale in the layout of data. Differentiable if x is an output of `attention` in training.

    Args:
        x: the result of `quantize`, or an output of `attention`.
        recipe: the recipe that quantised x. If x is scaled by blocks, granularity and block_rows must match. A rotated x stays
            rotated.
        qkv_format, cu_seqlens, cu_seqlens_padded: the arguments that quantised x.
        dtype: dtype of the result. None: the dtype of x.source, or bfloat16 if there is no source. The product is computed in
            float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: format, recipe or lengths do not match x; the text names them.
    """
    recipe = Recipe() if recipe is None else recipe
    _check_is_recipe(recipe)
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"x is {describe(x)}; accepted: a QuantizedTensor from quantize or attention")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: None, {', '.join(map(str, DTYPES))}")
    for name, cu in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if cu is not None and not isinstance(cu, Tensor):
            raise TypeError(f"{name} is {describe(cu)}; accepted: an int32 tensor [batch + 1], or None")
    fmt = _format_of_one(qkv_format)
    if x.data.dim() != len(fmt):
        raise ValueError(f"x.data has shape {tuple(x.data.shape)}; accepted: the {len(fmt)} dims of {fmt}")
    blocks = x.descale.shape[2]
    if blocks > 1 and recipe.rows != x.block_rows:
        raise ValueError(
            f"recipe has granularity {recipe.granularity!r} and block_rows {recipe.rows or None}, and x is scaled by blocks of "
            f"{x.block_rows} rows (x.block_rows); accepted: the recipe that made x"
        )
    if fmt == "thd" and cu_seqlens is None and (x.descale.shape[0] > 1 or blocks > 1):
        raise ValueError("cu_seqlens is None with thd and scales for each sequence; accepted: an int32 tensor [batch + 1]")
    batch = x.data.shape[fmt.index("b")] if "b" in fmt else x.descale.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads = x.data.shape[fmt.index("h")]
    if x.descale.shape[0] not in (1, batch) or x.descale.shape[1] not in (1, heads):
        raise ValueError(
            f"x.descale has shape {tuple(x.descale.shape)}; accepted: [{batch} | 1, {heads} | 1, blocks], to match x.data"
        )
    if dtype is None:
        dtype = torch.bfloat16 if x.source is None else x.source.dtype
    if fmt == "thd" and cu_seqlens is None:  # one scale for all tokens
        cu_seqlens = torch.tensor([0, x.data.shape[0]], dtype=torch.int32, device=x.data.device)
    how = (fmt, cu_seqlens, cu_seqlens_padded, recipe.rows, dtype)
    return _Dequantized.apply(x.source, x.data, x.descale, *how)  # type: ignore[no-any-return, no-untyped-call]


def check_unpacked(q: object, k: object, v: object) -> None:
    """Raises TypeError if q, k or v is a QuantizedTensor."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, QuantizedTensor):
            raise TypeError(
                f"{name} is a QuantizedTensor; accepted: {name}.data, with descale_{name}={name}.descale (for scales by block "
                "also an fp8_recipe with granularity 'block' and its block_rows)"
            )


def _check_is_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {describe(recipe)}; accepted: a flexattn.fp8.Recipe")


def check_recipe(recipe: object, state: object) -> None:
    """Raises if recipe or state has a wrong type, or unless a state is given exactly if scaling is delayed."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"fp8_recipe is {describe(recipe)}; accepted: a flexattn.fp8.Recipe, or None")
    is_delayed = recipe is not None and recipe.scaling == "delayed"
    if state is not None and not isinstance(state, DelayedScaling):
        raise TypeError(f"fp8_state is {describe(state)}; accepted: a flexattn.fp8.DelayedScaling, or None")
    if (state is not None) != is_delayed:
        raise ValueError(
            f"fp8_state is {'given' if state is not None else 'None'} with "
            f"{'no fp8_recipe' if recipe is None else f'scaling {recipe.scaling!r}'}; accepted: a DelayedScaling with scaling "
            "'delayed', else None"
        )


def quantize_config(
    recipe: Recipe | None,
    state: DelayedScaling | None,
    q: Tensor,
    heads: tuple[int, int],
    needs_grad: bool,
    dropout: bool,
    backend: str,
) -> tuple[fp8_ops.QuantizeConfig | None, dict[str, object]]:
    """Returns the config to quantise q, k and v (None if they are in FP8 or stay in 16 bits), and the FP8 fields of `Settings`."""
    is_quantized = q.dtype in FP8_DTYPES
    if recipe is None and not is_quantized:
        return None, {}
    if state is not None:
        _check_state(state, recipe, q, heads)
    recipe = Recipe() if recipe is None else recipe
    to_fp8 = recipe.out_dtype in FP8_DTYPES
    if needs_grad and is_quantized:
        raise ValueError(
            "an argument requires a gradient and q, k and v are FP8, which are for inference; accepted: q, k and v in float16 or "
            "bfloat16 with an fp8_recipe, or torch.no_grad()"
        )
    if needs_grad and recipe.out_dtype not in (None, q.dtype, *FP8_DTYPES):
        raise ValueError(
            f"fp8_recipe.out_dtype is {recipe.out_dtype} and a gradient is needed; accepted: None, q's dtype, {q.dtype}, or a "
            "float8 dtype"
        )
    out_dtype = (torch.bfloat16 if is_quantized else q.dtype) if recipe.out_dtype is None or to_fp8 else recipe.out_dtype
    fields = {
        "fp8_out": str(out_dtype).removeprefix("torch."),
        "fp8_grad": str(recipe.grad_dtype).removeprefix("torch."),
        "fp8_block_rows": recipe.rows,
        "bf16_backward": recipe.bf16_backward and needs_grad,
    }
    if is_quantized:
        used = {"out_dtype"} | ({"granularity", "block_rows"} if recipe.granularity == "block" or to_fp8 else set())
        used |= {"scaling", "margin", "amax_history_len", "amax_compute_algo"} if to_fp8 else set()
        for name, default in _DEFAULTS:
            if name not in used and getattr(recipe, name) != default:
                raise ValueError(
                    f"fp8_recipe.{name} is {getattr(recipe, name)!r}, which has no effect if q, k and v are in FP8; accepted: "
                    f"{default!r}"
                )
        return None, fields
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q has dtype {q.dtype} with an fp8_recipe; accepted: torch.float16, torch.bfloat16, or FP8 with descales")
    if recipe.bf16_backward and dropout:
        raise ValueError(
            "fp8_recipe.bf16_backward is True with dropout_p, and another backend's backward would drop other weights; accepted: "
            "dropout_p 0, or a backward in FP8"
        )
    grad_dtype = str(recipe.grad_dtype).removeprefix("torch.")
    how = (recipe.granularity, recipe.rows, recipe.margin, recipe.rotation, grad_dtype, recipe.keeps_16_bit(q.device))
    return fp8_ops.QuantizeConfig(*how, recipe.quantises_dout(q.device, backend)), fields


def _reads_16_bit(device: torch.device) -> bool:
    """Returns whether a backward in FP8 on the device reads q, k and dout in 16 bits."""
    return ops.capability_of(device) == (9, 0)


# The flag that torch.compiler.assume_constant_result sets; calling that would import Dynamo.
_reads_16_bit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_state(state: DelayedScaling, recipe: Recipe | None, q: Tensor, heads: tuple[int, int]) -> None:
    if state.recipe != recipe:
        raise ValueError(f"fp8_state was made for {state.recipe} and fp8_recipe is {recipe}; accepted: the same recipe")
    for name in TENSORS:
        for kind, shape in _shapes(state.recipe, name, heads).items():
            t = state.scale(name) if kind == "scale" else state.history(name)
            if t.device != q.device:
                raise ValueError(f"fp8_state.{kind}_{name} is on {t.device} and q is on {q.device}; accepted: the same device")
            if t.dtype is not torch.float32 or t.dim() != len(shape) or not t.is_contiguous():
                raise ValueError(
                    f"fp8_state.{kind}_{name} is {describe(t)}; accepted: a contiguous torch.float32 tensor of shape {shape}"
                )
            if t.shape[-1] != shape[-1]:
                raise ValueError(
                    f"fp8_state was made for {t.shape[-1]} heads of {name} ({kind}_{name}), which has {shape[-1]}; accepted: "
                    "DelayedScaling(recipe, num_heads, num_heads_kv) of the call's heads"
                )
            if tuple(t.shape) != shape:
                raise ValueError(f"fp8_state.{kind}_{name} has shape {tuple(t.shape)}; accepted: {shape}")


def _shapes(recipe: Recipe, name: str, heads: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tensor's buffers in a DelayedScaling. heads: numbers of heads of q, and of k and v."""
    count = 1 if recipe.granularity == "tensor" else heads[1] if name in ("k", "v") else heads[0]
    return {"amax_history": (recipe.amax_history_len or 16, count), "scale": (count,)}


def state_tensors(state: DelayedScaling | None) -> tuple[Tensor, ...] | None:
    """Returns the tensors that a call reads and writes of a state, in the order of BUFFERS; None if there may be more."""
    if state is None:
        return ()
    if type(state) is not DelayedScaling or not all(name in state._buffers for name in BUFFERS):
        return None
    return tuple(state._buffers[name] for name in BUFFERS)  # type: ignore[misc]  # none is None


def quantize_out(
    out: Tensor, x: Operands, settings: Settings, recipe: Recipe, delayed: fp8_ops.Delayed, passes: fp8_ops.Passes
) -> QuantizedTensor:
    """Returns out in the FP8 dtype and with the scaling of the recipe.

    In training the result also holds the 16-bit out: the backward keeps it for its sums with dout, which FP8's rounding would
    spoil.
    """
    fmt, _ = parse_format(settings.qkv_format)
    dtype = str(recipe.out_dtype).removeprefix("torch.")
    kind = (fmt, dtype, recipe.granularity, recipe.rows, recipe.margin, False)
    data, descale, amax = passes.quantize(out.detach(), *x.packing("q"), delayed.scale_out, delayed.history_out, *kind)
    return QuantizedTensor(data, descale, amax, out if out.requires_grad else None, recipe.rows)
