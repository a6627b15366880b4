"""The description of a call: `AttentionSpec` has the facts that decide which kernel can run, and `Operands` has its data.

This file turns mask types, windows and alignments into a `Band` and lengths. Nothing below this file knows a mask type.
"""

from __future__ import annotations

import difflib
import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexattn.dispatch.mod_program import Program

Direction = Literal["forward", "backward"]

Format = Literal["bshd", "sbhd", "bhsd", "thd"]
QkvFormat = Literal[
    Format,
    "bshd_2sbhd",
    "bshd_2bhsd",
    "bshd_2thd",
    "sbhd_2bshd",
    "sbhd_2bhsd",
    "sbhd_2thd",
    "bhsd_2bshd",
    "bhsd_2sbhd",
    "bhsd_2thd",
    "thd_2bshd",
    "thd_2sbhd",
    "thd_2bhsd",
]
MaskType = Literal["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right"]
BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
BackendName = Literal["auto", "triton", "cudnn", "eager"]
Fp32Gradients = Literal["none", "dq", "dkv", "dqkv"]  # the gradients that are float32.

FORMATS: tuple[Format, ...] = get_args(Format)
MASK_TYPES: tuple[MaskType, ...] = get_args(MaskType)
BIAS_TYPES: tuple[BiasType, ...] = get_args(BiasType)
SOFTMAX_TYPES: tuple[SoftmaxType, ...] = get_args(SoftmaxType)
REQUESTS: tuple[BackendName, ...] = get_args(BackendName)  # "auto" selects one of the others.
BACKENDS = REQUESTS[1:]
FP32_GRADIENTS: tuple[Fp32Gradients, ...] = get_args(Fp32Gradients)


class Band(NamedTuple):
    """Query i sees key j if and only if i + shift - left <= j <= i + shift + right. None leaves a side open.

    If a side is negative, the band does not contain the diagonal. shift is len_kv - len_q of the sequence with `bottom_right`,
    else 0. ALiBi measures its distance from the same diagonal.
    """

    left: int | None
    right: int | None
    bottom_right: bool


class Window(NamedTuple):
    """A window_size with sides that may be negative. None leaves a side open; in a plain pair, -1 does.

    Query i sees keys i - left to i + right, counted from the diagonal. If a side is negative, the window ends before the diagonal,
    or begins after it. Window(None, -1) hides a query's own key, and Window(-3, 8) shows keys i + 3 to i + 8.
    """

    left: int | None
    right: int | None


def parse_format(qkv_format: str) -> tuple[str, str]:
    """Returns the format of q, and of k and v: 'bshd' -> ('bshd', 'bshd'), 'thd_2bshd' -> ('thd', 'bshd')."""
    q_format, _, kv_format = qkv_format.partition("_2")
    kv_format = kv_format or q_format
    if q_format not in FORMATS or kv_format not in FORMATS or qkv_format not in (q_format, f"{q_format}_2{kv_format}"):
        raise ValueError(
            f"qkv_format is {qkv_format!r}; accepted: {', '.join(FORMATS)}, or a format for q and one for k and v, such as "
            "'thd_2bshd'"
        )
    return q_format, kv_format


def with_padding(attn_mask_type: str) -> str:
    """Returns the same mask type for sequences that have their own lengths."""
    if "padding" in attn_mask_type:
        return attn_mask_type
    return "padding" if attn_mask_type == "no_mask" else f"padding_{attn_mask_type}"


OPEN_WINDOW = (-1, -1)  # the default window_size of a call.
# The largest side of a band. No sequence is longer, and positions plus windows stay within the kernels' integers.
LARGEST_WINDOW = 2**30


def as_index(value: object) -> int | None:
    """Returns an integer on the host as an int, or None for other values. It accepts Python's, numpy's, and 0-d CPU tensors."""
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value  # type: ignore[return-value]  # a SymInt is used as an int.
    if isinstance(value, Tensor):
        is_integer = not value.is_floating_point() and not torch.compiler.is_compiling() and is_host_number(value)
        return operator.index(value) if is_integer else None
    return operator.index(value) if isinstance(value, numbers.Integral) else None


def is_host_number(t: Tensor) -> bool:
    """Returns whether a tensor is one number that can be read without waiting for a device and without losing a gradient."""
    return t.device.type == "cpu" and t.dim() == 0 and t.dtype is not torch.bool and not (t.is_complex() or t.requires_grad)


def misses_diagonal(left: int | None, right: int | None) -> bool:
    """Returns whether a band with these sides does not contain its diagonal."""
    return (left is not None and left < 0) or (right is not None and right < 0)


def make_band(attn_mask_type: str, window_size: int | tuple[int, int] | Window, bottom_right_diagonal: bool | None) -> Band:
    """Returns the band of a mask type and a window, aligned as in TransformerEngine.

    The diagonal is top-left for causal and padding_causal, else bottom-right. For no_mask and padding, `bottom_right_diagonal`
    overrides it. The names of all other types fix the diagonal.
    """
    if attn_mask_type not in MASK_TYPES:
        value: Any = attn_mask_type
        hint = {"None": "Leave it out for 'no_mask'.", "True": "Pass causal=True, or one of these names."}.get(str(value))
        if hint is None:
            near = difflib.get_close_matches(str(value), MASK_TYPES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Pass a mask of another shape as mask= or mask_mod=."
        raise ValueError(f"attn_mask_type is {value!r}; accepted: {', '.join(MASK_TYPES)}. {hint}")
    left = right = None
    if window_size is not OPEN_WINDOW:
        sides = window_of(window_size, attn_mask_type)
        left, right = (None if side is None else max(-LARGEST_WINDOW, min(side, LARGEST_WINDOW)) for side in sides)
    causal = "causal" in attn_mask_type
    if causal and right is not None and right > 0:
        raise ValueError(
            f"window_size is {window_size} with attn_mask_type {attn_mask_type!r}: a causal mask sees nothing to the right "
            "of the diagonal, so the right side must be 0 or -1"
        )
    bottom_right = attn_mask_type not in ("causal", "padding_causal")
    if bottom_right_diagonal is not None:
        if causal and bottom_right_diagonal != bottom_right:
            other = attn_mask_type.removesuffix("_bottom_right") if bottom_right else f"{attn_mask_type}_bottom_right"
            raise ValueError(
                f"bottom_right_diagonal is {bottom_right_diagonal} with attn_mask_type {attn_mask_type!r}, whose name fixes the "
                f"diagonal; use attn_mask_type {other!r}"
            )
        bottom_right = bottom_right_diagonal
    return Band(left, 0 if causal and right is None else right, bottom_right)


def window_of(window_size: object, attn_mask_type: str = "") -> Window:
    """Returns a call's window_size with None for open sides. Raises ValueError if it is not a window.

    With a causal mask, a single number is the number of keys that a query sees, including its own.
    """
    keys = None if isinstance(window_size, (tuple, list)) else as_index(window_size)
    if keys is not None:
        if keys < 1:
            raise ValueError(
                f"window_size is {keys}. Pass at least 1, for the query's own key, or a pair (left, right) with -1 for open."
            )
        if "causal" not in attn_mask_type:
            raise ValueError(
                f"window_size is {keys} without a causal mask, which has two meanings. Pass window_size={keys} with causal=True "
                f"for the last {keys} keys, or ({keys}, {keys}) for {keys} keys on each side."
            )
        return Window(keys - 1, 0)
    sides: tuple[Any, ...] = ()
    is_signed = isinstance(window_size, Window)
    if isinstance(window_size, (tuple, list)):
        sides = tuple(window_size)
    elif isinstance(window_size, Tensor) and window_size.device.type == "cpu" and window_size.dim() == 1:
        sides = window_size.unbind()
    integers = [as_index(side) for side in sides]
    if len(integers) == 2 and all(n is not None or (is_signed and side is None) for n, side in zip(integers, sides, strict=True)):
        left, right = integers
        if is_signed:
            return Window(left, right)
        assert left is not None
        assert right is not None
        if min(left, right) < -1:
            raise ValueError(
                f"window_size is {(left, right)}; accepted for each side: -1 (open) or the number of tokens seen beyond the "
                f"diagonal; for a window that ends before the diagonal use flexattn.Window, in which None is open"
            )
        return Window(None if left == -1 else left, None if right == -1 else right)
    tensors = [x for x in (*sides, window_size) if isinstance(x, Tensor)][:1]
    value, hint = repr(window_size), ""
    if tensors:
        value = f"given by a {tensors[0].dtype} tensor of shape {tuple(tensors[0].shape)} on {tensors[0].device}"
        hint = "; reading such a tensor would wait for its device, so pass its value"
    raise ValueError(
        f"window_size is {value}; accepted: a pair of ints (left, right), inclusive, -1 for open, or a flexattn.Window{hint}; "
        "with a causal mask also one int, the number of keys"
    )


class Fp8(NamedTuple):
    """Settings of q, k and v in FP8, in addition to their dtype. Their values are data * descale."""

    descale_dims: tuple[bool, bool, bool]  # whether any descale varies over batches, heads, blocks of rows.
    block_rows: int  # rows of a block, or 0 if there is one block.
    out_dtype: torch.dtype  # dtype of out, dq, dk and dv.
    grad_dtype: torch.dtype  # dtype of dout, which a backward gets in FP8, and of the gradient of the scores.
    bf16_backward: bool  # whether the backward uses q, k and v from before their quantisation.


# The number of tensors that share a buffer, and the dim that separates them.
PACKINGS = {"3hd": (3, -3), "h3d": (3, -2), "hd_2hd": (2, -3), "hd_h2d": (2, -2)}
# dq, dk and dv as they are stored. If some share a buffer, it takes the place of the first of them, and the others are None.
Flat = Sequence[Any]  # tensors of a call in one list, with None for those that it does not have
Stored = tuple[Tensor, Any, Any]


class Results(NamedTuple):
    """Memory formats of the results. If a format is "", the result has the format of q, or of k and v.

    The order of the dims of a result is always that of q, or of k and v. With a packing, dq, dk and dv ("3hd", "h3d") or dk and dv
    ("hd_2hd", "hd_h2d") are views of one buffer. The buffer has a dim of 3 or 2 before or after the heads.

    If q has fewer than 32 bits, `fp32`, one of FP32_GRADIENTS, names the gradients in float32. `fp32_out` says whether out is
    float32, in a call without gradients.
    """

    out: str = ""
    dq: str = ""
    dkv: str = ""
    packing: str = ""
    fp32: str = "none"
    fp32_out: bool = False

    def gradient_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of dq, and of dk and dv, if out is in `dtype`."""
        dq_dtype, dkv_dtype = (torch.float32 if self.fp32 in (name, "dqkv") else dtype for name in ("dq", "dkv"))
        return dq_dtype, dkv_dtype

    def empty_out(self, q: Tensor, q_format: str, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for out, with q's dims and `head_dim` last."""
        return _empty(q, (*q.shape[:-1], head_dim), q_format, self.out, torch.float32 if self.fp32_out else dtype)

    def empty_dqkv(self, qkv: tuple[Tensor, Tensor, Tensor], formats: tuple[str, str], dtype: torch.dtype) -> Stored:
        """Returns memory for dq, dk and dv, in the shapes of q, k and v. dtype: the dtype of out."""
        q, k, v = qkv
        q_format, kv_format = formats
        if not self.packing:
            dq_dtype, dkv_dtype = self.gradient_dtypes(dtype)
            dq = _empty(q, q.shape, q_format, self.dq, dq_dtype)
            dk, dv = (_empty(t, t.shape, kv_format, self.dkv, dkv_dtype) for t in (k, v))
            return dq, dk, dv
        count, dim = PACKINGS[self.packing]
        first, fmt, memory = (q, q_format, self.dq) if count == 3 else (k, kv_format, self.dkv)
        sizes = [first.shape[fmt.index(name)] for name in memory or fmt]
        sizes.insert(len(sizes) + dim + 1, count)
        buffer = first.new_empty(sizes, dtype=dtype)
        return (buffer, None, None) if count == 3 else (_empty(q, q.shape, q_format, self.dq, dtype), buffer, None)

    def views(self, stored: Stored, formats: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv, with the dims of q, k and v, as views of the memory of `empty_dqkv`."""
        dq, dk, dv = stored
        if self.packing:
            count, dim = PACKINGS[self.packing]
            if count == 3:
                dq, dk, dv = (in_format(t, self.dq, formats[0]) for t in dq.unbind(dim))
            else:
                dk, dv = (in_format(t, self.dkv, formats[1]) for t in dk.unbind(dim))
        return dq, dk, dv

    def stored(self, dqkv: tuple[Tensor, Tensor, Tensor], formats: tuple[str, str], dtype: torch.dtype) -> Stored:
        """Returns gradients of any dtype and layout as `empty_dqkv` stores them. They are copied if they are stored otherwise."""
        if self._replace(out="", fp32="none") == Results():
            dq, dk, dv = dqkv
            dq_dtype, dkv_dtype = self.gradient_dtypes(dtype)
            return dq.to(dq_dtype), dk.to(dkv_dtype), dv.to(dkv_dtype)
        stored = self.empty_dqkv(dqkv, formats, dtype)
        for target, t in zip(self.views(stored, formats), dqkv, strict=True):
            target.copy_(t)
        return stored


def dense_in(t: Tensor, fmt: str, memory: str) -> Tensor:
    """Returns t, with its dims named in `fmt`, without gaps in the order of `memory`. It is copied only if it has gaps there."""
    return in_format(in_format(t, fmt, memory or fmt).contiguous(), memory, fmt)


def in_format(t: Tensor, fmt: str, target: str) -> Tensor:
    """Returns a view of t, with its dims named in `fmt`, in the order of `target`. If a format is "", t itself is returned."""
    return t if not fmt or not target or fmt == target else t.permute([fmt.index(name) for name in target])


def _empty(like: Tensor, shape: tuple[int, ...], fmt: str, memory: str, dtype: torch.dtype) -> Tensor:
    if not memory or memory == fmt:
        return like.new_empty(shape, dtype=dtype)
    sizes, strides, step = dict(zip(fmt, shape, strict=True)), {}, 1
    for name in reversed(memory):
        strides[name] = step
        step = step * sizes[name]
    return like.new_empty_strided(shape, [strides[name] for name in fmt], dtype=dtype)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of a GPU, or None for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


class AttentionSpec(NamedTuple):
    """All static facts that decide which kernel can run. It is hashable and has no tensors, no scalar inputs and no exact lengths.

    It is a NamedTuple because each call builds and hashes one, which takes longer with a dataclass.
    """

    q_format: str
    kv_format: str
    dtype: torch.dtype
    num_heads: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    padding: bool  # whether cu_seqlens and seqused, not the shapes, have the sequences' lengths.
    band: Band
    bias_type: str
    bias_dims: tuple[bool, bool, bool, bool] | None  # whether the bias spans b, h, sq and skv. It is broadcast over the others.
    softmax_type: str
    softcap: bool
    dropout: bool
    return_max_logit: bool
    needs_grad: bool
    needs_bias_grad: bool
    deterministic: bool
    device_type: str
    capability: tuple[int, int] | None  # CUDA compute capability, or None on other devices.
    # Only an operator's kernel knows the next three, because a trace has no numbers. If unknown, they are 0 and False.
    length_q: int = 0  # `length_class` of max_seqlen_q.
    length_kv: int = 0
    dropout_in_sixteenths: bool = False  # whether dropout_p is a multiple of 1/16.
    needs_lse_grad: bool = False  # backward only: whether lse has a gradient.
    mods: Program | None = None  # score_mod and mask_mod.
    block_size: tuple[int, int] | None = None  # queries and keys of a block of the block mask, or None without one.
    fp8: Fp8 | None = None  # settings, if q, k and v are FP8.
    is_part: bool = False  # backward only: whether out and lse are of more keys than this call has.
    results: Results = Results()  # memory formats and dtypes of out, dq, dk and dv.
    batch_invariant: bool = False  # whether a sequence's out and lse must not depend on the rest of the batch, bitwise.
    kv_dtype: torch.dtype | None = None  # the FP8 dtype of k and v if q is in `dtype`. If None, they are in `dtype` too.
    page_size: int = 0  # keys of a page if k and v are pools of pages, else 0.
    has_origin: bool = False  # whether dropout uses the positions in a larger call, which rng_state has for each sequence.
    bias_is_shared: bool = False  # whether groups of consecutive batch entries share an entry of the bias.
    kv_lists: int = 0  # lists of keys for each query, from kv_indices: 1, or one for each key head. 0 without kv_indices.
    kv_block: int = 1  # keys of a block that an entry of kv_indices names.

    @property
    def group_size(self) -> int:
        """Returns the number of query heads per key/value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def out_dtype(self) -> torch.dtype:
        """Returns the dtype of out and of the gradients of q, k and v."""
        return self.dtype if self.fp8 is None else self.fp8.out_dtype

    def for_backward(self) -> AttentionSpec:
        """Returns the spec of the backward."""
        return self if self.fp8 is None or not self.fp8.bf16_backward else self._replace(dtype=self.fp8.out_dtype, fp8=None)


def length_class(length: int) -> int:
    """Returns the least power of two that is at least `length`, or 0 for 0. A spec thus changes only with a length's magnitude."""
    return 1 << (length - 1).bit_length() if length > 0 else 0


class Packing(NamedTuple):
    """The places of the sequences of queries or of keys."""

    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    max_seqlen: int


class Operands(NamedTuple):
    """The values that vary from call to call and never cause a rebuild: tensors, lengths and scalar inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None  # fp32, [h] or [b, h].
    softmax_offset: Tensor | None  # [h].
    cu_seqlens_q: Tensor | None  # int32 [b + 1].
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    rng_state: Tensor | None  # int64 [2]: Philox seed and offset. Or [b, 5 or 6], as `philox.ORIGIN` describes.
    seqused_q: Tensor | None  # int32 [b]: the number of tokens that a sequence uses. If None, it uses all of its slot.
    seqused_kv: Tensor | None
    page_table: Tensor | None  # int32 [b, columns]: the pages of each sequence in the pools k and v.
    kv_indices: Tensor | None  # int32, q's dims without h and d, then [n] or [h_kv, n]: the keys that each query sees.
    kv_index_counts: Tensor | None  # int32, kv_indices' dims without the last: the entries of each list that count.
    out: Tensor | None  # memory for the out of a forward, from the caller. If None, a backend allocates it.
    max_seqlen_q: int
    max_seqlen_kv: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    mod_tensors: Sequence[Tensor] = ()  # tensors that the mods capture, in the order of Program.captures.
    mod_numbers: Sequence[float] = ()
    block_mask: Sequence[Tensor] = ()  # the tensors of a BlockMask, in the order of `block_mask.BLOCK_MASK_TENSORS`.
    # Descales of q, k, v and dout, if they are in FP8: fp32 [b | 1, h | 1, blocks | 1], with each tensor's own heads. If only
    # keys are in FP8, they may have one for each token and head, with k's dims, of which the last is 1.
    descales: Sequence[Tensor] = ()
    copies16: Sequence[Tensor] = ()  # 16-bit originals for a backward in FP8: dout if it comes in FP8, then q and k if kept.

    def packing(self, end: Literal["q", "kv"]) -> Packing:
        """Returns the places of one side's sequences."""
        names = (f"cu_seqlens_{end}", f"cu_seqlens_{end}_padded", f"max_seqlen_{end}")
        return Packing(*(getattr(self, name) for name in names))

    def shared_with(self, kind: type) -> dict[str, Any]:
        """Returns the values that are fields of a dataclass too, by name."""
        names, values_of = _shared_fields(kind)
        return dict(zip(names, values_of(self), strict=True))


@functools.lru_cache
def _shared_fields(kind: Any) -> tuple[tuple[str, ...], Callable[[Operands], tuple[object, ...]]]:
    names = tuple(name for name in kind.__dataclass_fields__ if name in Operands._fields)
    return names, operator.attrgetter(*names)


TENSOR_FIELDS = Operands._fields[: Operands._fields.index("max_seqlen_q")]  # they come first
NUM_TENSORS = len(TENSOR_FIELDS)


class Gradients(NamedTuple):
    """Gradients of a call. A backend returns dq, dk and dv as `Stored`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsoftmax_offset: Tensor | None
    dmod_tensors: tuple[Tensor, ...] | None = None  # gradients of the captures that need one, or None if no capture does.

    def flat(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients as one tuple, those of captured tensors last."""
        return (*self[:-1], *(self.dmod_tensors or ()))


DIFFERENTIABLE = tuple(name.removeprefix("d") for name in Gradients._fields[:-1])  # operands with a gradient


def as_bshd(x: Tensor, fmt: str) -> Tensor:
    """Returns a dense tensor of format `fmt` as a [b, s, h, d] view. A thd tensor ([total, h, d]) is returned as is."""
    if fmt == "sbhd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if fmt == "bhsd" else x


def from_bshd(x: Tensor, fmt: str) -> Tensor:
    """Returns a [b, s, h, d] tensor as a view in format `fmt`: the inverse of `as_bshd`."""
    return as_bshd(x, fmt)  # each of these permutations is its own inverse.


def lists_of_a_query(kv_indices: Tensor, q_format: str) -> int:
    """Returns the number of lists of keys that each query has: 1, or one for each key head."""
    return 1 if kv_indices.dim() == len(q_format) - 1 else kv_indices.shape[-2]


def batch_size(spec: AttentionSpec, x: Operands) -> int:
    return batch_of(spec.q_format, x)


def batch_of(q_format: str, x: Operands) -> int:
    """Returns the batch size of operands, whose queries are in `q_format`."""
    if x.cu_seqlens_q is not None:
        return x.cu_seqlens_q.shape[0] - 1
    return x.q.shape[q_format.index("b")]


def empty_outputs(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory for (out, lse, max_logit), as every backend and every fake lays them out.

    All are contiguous. If the operands have an `out`, it is returned. Otherwise out is in q's format, or in that of spec.results.
    lse is [b, h, sq], or [h, total_q] for thd. max_logit is [h], or [0] if it is not requested. Both are fp32, or fp64 for fp64
    inputs, which only the eager backend supports.
    """
    statistics = torch.float64 if spec.dtype is torch.float64 else torch.float32
    out = x.out
    if out is None:
        out = spec.results.empty_out(x.q, spec.q_format, spec.head_dim_v, spec.out_dtype)
    if spec.q_format == "thd":
        lse_shape: tuple[int, ...] = (spec.num_heads, x.q.shape[0])
    else:
        lse_shape = (batch_size(spec, x), spec.num_heads, x.q.shape[spec.q_format.index("s")])
    lse = x.q.new_empty(lse_shape, dtype=statistics)
    max_logit = x.q.new_empty((spec.num_heads if spec.return_max_logit else 0,), dtype=statistics)
    return out, lse, max_logit


def empty_gradients(spec: AttentionSpec, x: Operands) -> Gradients:
    """Returns memory for the gradients, as every backend lays them out. The gradient of softmax_offset is fp32.

    The gradients of captures are zeroed, because the derivative may not write to all of them.
    """
    dq, dk, dv = spec.results.empty_dqkv((x.q, x.k, x.v), (spec.q_format, spec.kv_format), spec.out_dtype)
    dbias = torch.empty_like(x.bias, memory_format=torch.contiguous_format) if spec.needs_bias_grad and x.bias is not None else None
    doffset = x.q.new_empty(spec.num_heads, dtype=torch.float32) if x.softmax_offset is not None else None
    captured = spec.mods.wanted(x.mod_tensors) if spec.mods else ()
    dmod_tensors = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in captured)
    return Gradients(dq, dk, dv, dbias, doffset, dmod_tensors or None)


def dqkv_of(spec: AttentionSpec, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv. If they share a buffer, they are views."""
    return spec.results.views(gradients[:3], (spec.q_format, spec.kv_format))


def with_classes(spec: AttentionSpec, x: Operands) -> AttentionSpec:
    """Returns the spec with the facts that depend on the operands' values: the classes of the lengths and of the dropout rate."""
    return spec._replace(
        length_q=length_class(x.max_seqlen_q),
        length_kv=length_class(x.max_seqlen_kv),
        dropout_in_sixteenths=x.dropout_p * 16 % 1 == 0,
    )
