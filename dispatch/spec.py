"""The description of a call without its data: `AttentionSpec` is all that decides which kernel can run, `Operands` all the rest.

Here mask types, windows and alignments become one thing, a `Band`, and lengths; nothing below this file knows a mask type.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Sequence
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
Fp32Gradients = Literal["none", "dq", "dkv", "dqkv"]  # gradients in float32: none, dq alone, dk and dv, all three

FORMATS: tuple[Format, ...] = get_args(Format)
MASK_TYPES: tuple[MaskType, ...] = get_args(MaskType)
BIAS_TYPES: tuple[BiasType, ...] = get_args(BiasType)
SOFTMAX_TYPES: tuple[SoftmaxType, ...] = get_args(SoftmaxType)
REQUESTS: tuple[BackendName, ...] = get_args(BackendName)  # "auto" picks one of the others
BACKENDS = REQUESTS[1:]  # in order of preference
FP32_GRADIENTS: tuple[Fp32Gradients, ...] = get_args(Fp32Gradients)


class Band(NamedTuple):
    """Query i sees key j iff i + shift - left <= j <= i + shift + right; None leaves that side open.

    A negative side ends the band on the other side of the diagonal, which then is not in it.
    shift is len_kv - len_q of the sequence with `bottom_right`, else 0. ALiBi measures its distance from the same diagonal.
    """

    left: int | None
    right: int | None
    bottom_right: bool


class Window(NamedTuple):
    """A window_size whose sides may be negative, as a plain pair's may not, in which -1 is open: here None is.

    Query i sees keys i - left to i + right, counted from the diagonal. A negative side ends the window before the diagonal, or
    begins it behind: Window(None, -1) hides a query's own key, and Window(-3, 8) shows keys i + 3 to i + 8.
    """

    left: int | None
    right: int | None


def parse_format(qkv_format: str) -> tuple[str, str]:
    """'bshd' -> ('bshd', 'bshd'); 'thd_2bshd' (q's format, then k's and v's) -> ('thd', 'bshd')."""
    q_format, _, kv_format = qkv_format.partition("_2")
    kv_format = kv_format or q_format
    if q_format not in FORMATS or kv_format not in FORMATS or qkv_format not in (q_format, f"{q_format}_2{kv_format}"):
        raise ValueError(
            f"qkv_format is {qkv_format!r}; accepted: {', '.join(FORMATS)}, or a format for q and one for k and v, as 'thd_2bshd'"
        )
    return q_format, kv_format


def with_padding(attn_mask_type: str) -> str:
    """Returns the mask type that does the same for sequences with lengths of their own."""
    if "padding" in attn_mask_type:
        return attn_mask_type
    return "padding" if attn_mask_type == "no_mask" else f"padding_{attn_mask_type}"


OPEN_WINDOW = (-1, -1)  # what a call's window_size is where none is given
LARGEST_WINDOW = 2**30  # that a band keeps: no sequence is longer, and positions and windows add up within what kernels count in


def as_index(value: Any) -> int | None:
    """A whole number of any kind that is on the host, as an int: Python's, numpy's, or a 0-d tensor's on a CPU. Else None."""
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value  # type: ignore[return-value]  # a SymInt is an int to all that follows
    if isinstance(value, Tensor):
        is_whole = not value.is_floating_point() and not torch.compiler.is_compiling() and is_host_number(value)
        return operator.index(value) if is_whole else None
    return operator.index(value) if isinstance(value, numbers.Integral) else None


def is_host_number(t: Tensor) -> bool:
    """Returns whether reading a tensor gives one number, waits for nothing, and loses no gradient."""
    return t.device.type == "cpu" and t.dim() == 0 and t.dtype is not torch.bool and not (t.is_complex() or t.requires_grad)


def misses_diagonal(left: int | None, right: int | None) -> bool:
    """Returns whether a band with these sides has not its diagonal in it."""
    return (left is not None and left < 0) or (right is not None and right < 0)


def make_band(attn_mask_type: str, window_size: int | tuple[int, int] | Window, bottom_right_diagonal: bool | None) -> Band:
    """One band for a mask type and a window, aligned as TransformerEngine does.

    The diagonal is top-left for causal and padding_causal, else bottom-right; `bottom_right_diagonal` overrides it for
    no_mask and padding, the only types whose name does not already say which.
    """
    if attn_mask_type not in MASK_TYPES:
        given: Any = attn_mask_type
        hint = {"None": "Leave it out for 'no_mask'.", "True": "Pass causal=True, or one of these names."}.get(str(given))
        if hint is None:
            near = difflib.get_close_matches(str(given), MASK_TYPES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Pass a mask of another shape as mask= or mask_mod=."
        raise ValueError(f"attn_mask_type is {given!r}; accepted: {', '.join(MASK_TYPES)}. {hint}")
    window = window_of(window_size, attn_mask_type)
    causal = "causal" in attn_mask_type
    if causal and window.right is not None and window.right > 0:
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
    left, right = (None if side is None else max(-LARGEST_WINDOW, min(side, LARGEST_WINDOW)) for side in window)
    return Band(left, 0 if causal and right is None else right, bottom_right)


def window_of(window_size: Any, attn_mask_type: str = "") -> Window:
    """Returns a call's window_size with None for open sides; raises ValueError for what is none.

    One number is how many keys a query sees, itself included, under a causal mask.
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
    whole = [as_index(side) for side in sides]
    if len(whole) == 2 and all(side is not None or (is_signed and given is None) for side, given in zip(whole, sides, strict=True)):
        left, right = whole
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
    found = [x for x in (*sides, window_size) if isinstance(x, Tensor)][:1]
    came, hint = repr(window_size), ""
    if found:
        came = f"given by a {found[0].dtype} tensor of shape {tuple(found[0].shape)} on {found[0].device}"
        hint = "; reading such a tensor would wait for its device, so pass its value"
    raise ValueError(
        f"window_size is {came}; accepted: a pair of ints (left, right), inclusive, -1 for open, or a flexattn.Window{hint}; "
        "with a causal mask also one int, the number of keys"
    )


class Fp8(NamedTuple):
    """Settings of q, k and v in FP8 beside their dtype; their values are data * descale."""

    descale_dims: tuple[bool, bool, bool]  # whether any descale varies over batches, heads, blocks of rows
    block_rows: int  # rows of a block; 0 where there is one block
    out_dtype: torch.dtype  # dtype of out, dq, dk and dv
    grad_dtype: torch.dtype  # dtype of dout, which comes in FP8 to a backward, and of the gradient of the scores
    bf16_backward: bool  # the backward is that of q, k and v before they were quantised


# How many tensors share a buffer, and the dim that tells them apart.
PACKINGS = {"3hd": (3, -3), "h3d": (3, -2), "hd_2hd": (2, -3), "hd_h2d": (2, -2)}
Stored = tuple[Tensor, Any, Any]  # dq, dk and dv, or the buffer in the place of the first that lies in it, and None for the others


class Results(NamedTuple):
    """Formats in which results lie in memory, "" for that of q, or of k and v. The order of their dims is q's, or k's and v's.

    With a packing, dq, dk and dv ("3hd", "h3d") or dk and dv ("hd_2hd", "hd_h2d") are views of one buffer, with a dim of 3 or 2 in
    front of the heads or behind them. Where q has fewer bits, `fp32`, one of FP32_GRADIENTS, says which gradients are in
    float32, and `fp32_out` whether out is, of a call without gradients.
    """

    out: str = ""
    dq: str = ""
    dkv: str = ""
    packing: str = ""
    fp32: str = "none"
    fp32_out: bool = False

    def gradient_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of dq, and of dk and dv, of a call whose out is in `dtype`."""
        of_q, of_kv = (torch.float32 if self.fp32 in (name, "dqkv") else dtype for name in ("dq", "dkv"))
        return of_q, of_kv

    def empty_out(self, q: Tensor, q_format: str, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns room for out, of q's dims with `head_dim` last."""
        return _empty(q, (*q.shape[:-1], head_dim), q_format, self.out, torch.float32 if self.fp32_out else dtype)

    def empty_dqkv(self, qkv: tuple[Tensor, Tensor, Tensor], formats: tuple[str, str], dtype: torch.dtype) -> Stored:
        """Returns room for dq, dk and dv, of the shapes of q, k and v; dtype: out's."""
        q, k, v = qkv
        q_format, kv_format = formats
        if not self.packing:
            of_q, of_kv = self.gradient_dtypes(dtype)
            dq = _empty(q, q.shape, q_format, self.dq, of_q)
            dk, dv = (_empty(t, t.shape, kv_format, self.dkv, of_kv) for t in (k, v))
            return dq, dk, dv
        count, dim = PACKINGS[self.packing]
        first, fmt, memory = (q, q_format, self.dq) if count == 3 else (k, kv_format, self.dkv)
        sizes = [first.shape[fmt.index(name)] for name in memory or fmt]
        sizes.insert(len(sizes) + dim + 1, count)
        buffer = first.new_empty(sizes, dtype=dtype)
        return (buffer, None, None) if count == 3 else (_empty(q, q.shape, q_format, self.dq, dtype), buffer, None)

    def views(self, stored: Stored, formats: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv, in the dims of q, k and v, of what `empty_dqkv` gave room for."""
        dq, dk, dv = stored
        if self.packing:
            count, dim = PACKINGS[self.packing]
            if count == 3:
                dq, dk, dv = (in_format(t, self.dq, formats[0]) for t in dq.unbind(dim))
            else:
                dk, dv = (in_format(t, self.dkv, formats[1]) for t in dk.unbind(dim))
        return dq, dk, dv

    def stored(self, dqkv: tuple[Tensor, Tensor, Tensor], formats: tuple[str, str], dtype: torch.dtype) -> Stored:
        """Returns gradients that lie anywhere, in any dtype, as `empty_dqkv` has them, with a copy where they do not lie so."""
        if self._replace(out="", fp32="none") == Results():
            dq, dk, dv = dqkv
            of_q, of_kv = self.gradient_dtypes(dtype)
            return dq.to(of_q), dk.to(of_kv), dv.to(of_kv)
        made = self.empty_dqkv(dqkv, formats, dtype)
        for to, t in zip(self.views(made, formats), dqkv, strict=True):
            to.copy_(t)
        return made


def dense_in(t: Tensor, fmt: str, memory: str) -> Tensor:
    """Returns t, whose dims are named as in `fmt`, without gaps in the order of `memory`: itself where it lies so."""
    return in_format(in_format(t, fmt, memory or fmt).contiguous(), memory, fmt)


def in_format(t: Tensor, fmt: str, wanted: str) -> Tensor:
    """Returns a view of t, whose dims are named as in `fmt`, with its dims in the order of `wanted`; t itself where one is ""."""
    return t if not fmt or not wanted or fmt == wanted else t.permute([fmt.index(name) for name in wanted])


def _empty(like: Tensor, shape: tuple[int, ...], fmt: str, memory: str, dtype: torch.dtype) -> Tensor:
    if not memory or memory == fmt:
        return like.new_empty(shape, dtype=dtype)
    sizes, strides, step = dict(zip(fmt, shape, strict=True)), {}, 1
    for name in reversed(memory):
        strides[name] = step
        step = step * sizes[name]
    return like.new_empty_strided(shape, [strides[name] for name in fmt], dtype=dtype)


class AttentionSpec(NamedTuple):
    """Everything static that decides which kernel can run; frozen and hashable, no tensors, no lengths but their magnitude, no
    scalar inputs.

    A NamedTuple and no dataclass: one is built and hashed on each call.
    """

    q_format: str
    kv_format: str
    dtype: torch.dtype
    num_heads: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    padding: bool  # the sequences' lengths come from cu_seqlens and seqused, not from the shapes
    band: Band
    bias_type: str
    bias_dims: tuple[bool, bool, bool, bool] | None  # which of (b, h, sq, skv) the bias spans; it is broadcast over the others
    softmax_type: str
    softcap: bool
    dropout: bool
    return_max_logit: bool
    needs_grad: bool
    needs_bias_grad: bool
    deterministic: bool
    device_type: str
    capability: tuple[int, int] | None  # CUDA compute capability; None off CUDA
    # What only an operator's kernel knows, as a trace has no numbers; 0 and False where it is not known.
    length_q: int = 0  # `length_class` of max_seqlen_q
    length_kv: int = 0
    dropout_in_sixteenths: bool = False  # dropout_p is a multiple of 1/16
    needs_lse_grad: bool = False  # backward: a gradient comes in through lse
    mods: Program | None = None  # score_mod and mask_mod
    block_size: tuple[int, int] | None = None  # queries and keys of a block of the block mask, if there is one
    fp8: Fp8 | None = None  # where q, k and v are FP8
    is_part: bool = False  # backward: out and lse are of more keys than these
    results: Results = Results()  # where out, dq, dk and dv lie otherwise than q, k and v
    batch_invariant: bool = False  # the bits of a sequence's out and lse depend on nothing else of the call
    kv_dtype: torch.dtype | None = None  # FP8, of keys and values beside q in `dtype`; None: they are in `dtype` too
    page_size: int = 0  # keys of a page, where k and v are pages that a table names; 0: they are not
    has_origin: bool = False  # dropout is drawn at positions of a whole, which rng_state has for each sequence

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of out and of the gradients of q, k and v."""
        return self.dtype if self.fp8 is None else self.fp8.out_dtype

    def of_backward(self) -> AttentionSpec:
        """The spec that the backward runs by."""
        return self if self.fp8 is None or not self.fp8.bf16_backward else self._replace(dtype=self.fp8.out_dtype, fp8=None)


def length_class(length: int) -> int:
    """The power of two that is at least `length`, so that a spec changes with a length's magnitude alone; 0 for 0, 1 for 1."""
    return 1 << (length - 1).bit_length() if length > 0 else 0


class Operands(NamedTuple):
    """All that varies from call to call and must never cause a rebuild: tensors, lengths and scalar inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None  # fp32, [h] or [b, h]
    softmax_offset: Tensor | None  # [h]
    cu_seqlens_q: Tensor | None  # int32 [b + 1]
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    rng_state: Tensor | None  # int64 [2]: Philox seed and offset; or [b, 5 or 6], `philox.ORIGIN`
    seqused_q: Tensor | None  # int32 [b]: how many tokens of its slot a sequence uses; None: as many as cu_seqlens_q or q says
    seqused_kv: Tensor | None
    page_table: Tensor | None  # int32 [b, columns]: the pages of each sequence, of which k and v are a pool
    out: Tensor | None  # memory for a forward's out, which the caller gave; None: a backend allocates it
    max_seqlen_q: int
    max_seqlen_kv: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    mod_tensors: Sequence[Tensor] = ()  # what the mods capture, in the order of Program.captures
    mod_numbers: Sequence[float] = ()
    block_mask: Sequence[Tensor] = ()  # the tensors of a BlockMask, as `block_mask.BLOCK_MASK_TENSORS` names them
    # Keys in FP8 beside other queries may have one for each token and head: k's dims, the last of them 1.
    descales: Sequence[Tensor] = ()  # for q, k, v and dout, as far as in FP8: fp32 [b | 1, h | 1, blocks | 1], h as their own
    copies16: Sequence[Tensor] = ()  # for a backward in FP8, as they came: dout where it is given in FP8, and q and k if kept

    def on_meta(self) -> Operands:
        """The same with tensors that have no memory, strides included."""
        return Operands._make(map(_on_meta, self))


class Gradients(NamedTuple):
    """Gradients of a call. A backend gives dq, dk and dv as they are stored: a buffer that some share, and None for the others."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsoftmax_offset: Tensor | None
    dmod_tensors: tuple[Tensor, ...] | None = None  # gradients of the captures that need one; None where none does


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return tuple(map(_on_meta, value)) if isinstance(value, (tuple, list)) else value


def as_bshd(x: Tensor, fmt: str) -> Tensor:
    """A dense tensor of format `fmt` as a [b, s, h, d] view; thd ([total, h, d]) is returned as it is."""
    if fmt == "sbhd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if fmt == "bhsd" else x


def from_bshd(x: Tensor, fmt: str) -> Tensor:
    """The inverse of `as_bshd`."""
    return as_bshd(x, fmt)  # both permutations are their own inverse


def batch_size(spec: AttentionSpec, x: Operands) -> int:
    if x.cu_seqlens_q is not None:
        return x.cu_seqlens_q.shape[0] - 1
    return x.q.shape[spec.q_format.index("b")]


def empty_outputs(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) as every backend and every fake lays them out: contiguous, out in q's format or that of spec.results.

    out is the operands' where they have one.

    lse is [b, h, sq], or [h, total_q] for thd; max_logit is [h], or [0] when it is not asked for. Both are fp32 (fp64 for
    fp64 inputs, which only the eager backend takes).
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
    """Memory for the gradients as every backend lays them out, that of softmax_offset in fp32.

    Those of captures are zeroed, as the derivative may not reach one.
    """
    dq, dk, dv = spec.results.empty_dqkv((x.q, x.k, x.v), (spec.q_format, spec.kv_format), spec.out_dtype)
    dbias = torch.empty_like(x.bias, memory_format=torch.contiguous_format) if spec.needs_bias_grad and x.bias is not None else None
    doffset = x.q.new_empty(spec.num_heads, dtype=torch.float32) if x.softmax_offset is not None else None
    captured = spec.mods.wanted(x.mod_tensors) if spec.mods else ()
    dmod_tensors = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in captured)
    return Gradients(dq, dk, dv, dbias, doffset, dmod_tensors or None)


def dqkv_of(spec: AttentionSpec, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv, as views where they share a buffer."""
    return spec.results.views(gradients[:3], (spec.q_format, spec.kv_format))


def with_classes(spec: AttentionSpec, x: Operands) -> AttentionSpec:
    """The spec with what it says of the operands' values: the classes of their lengths and of the dropout rate."""
    return spec._replace(
        length_q=length_class(x.max_seqlen_q),
        length_kv=length_class(x.max_seqlen_kv),
        dropout_in_sixteenths=x.dropout_p * 16 % 1 == 0,
    )
