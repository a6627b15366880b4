"""One attention problem as the cuDNN graphs see it: tensors in, a band, lengths; and the sizes that a plan for it has."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from flexattn.kernels_cudnn.graphs import ALIGNMENT, Strides
from flexattn.kernels_cudnn.lowering import Mods

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_LONG = 32768  # from here on, lengths are rounded up to multiples of this


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one attention call: fp16, bf16, or FP8, of which the scales are apart.

    q is [b, sq, h, d_qk], k [b, skv, h_kv, d_qk] and v [b, skv, h_kv, d_v] (views: any strides), or [total, h, d] with
    `cu_seqlens_*` saying where each sequence lies; q may be of one kind and k, v of the other. The rest is as in
    `flexattn.attention`, with one band instead of a mask type: query i sees key j iff
    -window_left <= j - i - shift <= window_right, None leaving a side open, shift = len_kv - len_q with `bottom_right` else 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    bias: Tensor | None = None  # [b | 1, h | 1, sq | 1, skv | 1], added after the scale
    has_sink: bool = False
    softmax_offset: Tensor | None = None  # [h]; None with a sink: 0
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # int64 [2]
    cu_seqlens_q: Tensor | None = None  # int32 [b + 1]; None: each sequence is as long as its dim
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int = 0  # only for [total, h, d]; else the sequence dim
    max_seqlen_kv: int = 0
    mods: Mods | None = None  # score_mod and mask_mod
    # What they read, in their order: numbers as 0-d tensors on the CPU, else [b | 1, h | 1, sq | 1, skv | 1] of `sizes`.
    mod_inputs: tuple[Tensor, ...] = ()
    page_table: Tensor | None = None  # int32 [b, columns]: k and v are pools [pages, page_size, h_kv, d]; then with both cu_seqlens
    is_bucketed: bool = False  # a dense problem that runs on a plan for rounded-up sizes, as [total, h, d] always does

    @functools.cached_property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.cu_seqlens_q is not None else self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @functools.cached_property
    def longest_q(self) -> int:
        return self.max_seqlen_q if self.q.dim() == 3 else self.q.shape[1]

    @functools.cached_property
    def longest_kv(self) -> int:
        return self.max_seqlen_kv if self.k.dim() == 3 or self.page_table is not None else self.k.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.q.dtype in FP8_DTYPES

    @property
    def has_padding(self) -> bool:
        """Returns whether some tokens may belong to no sequence: they are not to be read, and are written as zeros."""
        return self.cu_seqlens_q is not None

    @functools.cached_property
    def is_ragged(self) -> bool:
        """Returns whether each sequence begins at an offset of its own; the plan is then one for rounded-up sizes.

        Keys in pages are found by the table all the same.
        """
        return self.is_bucketed or self.q.dim() == 3 or self.k.dim() == 3

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no query or no key at all, so that there is nothing to run."""
        return 0 in (self.batch, self.longest_q, self.longest_kv, *self.q.shape, *self.k.shape)

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """(batch, longest query sequence, longest key sequence) that the plan is compiled for."""
        if self.is_ragged:
            return round_up_batch(self.batch), round_up_length(self.longest_q), round_up_length(self.longest_kv)
        return self.batch, self.longest_q, self.longest_kv


def without_data(t: Tensor) -> Tensor:
    """`t` on the meta device: what is asked about with it is what will run with `t`."""
    if not has_alignment(t):  # it is copied before it is read
        return torch.empty(t.shape, dtype=t.dtype, device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def has_alignment(t: Tensor) -> bool:
    """Returns whether cuDNN can read `t` as it is: rows contiguous, no dim expanded, and all on 16-byte boundaries."""
    size = t.element_size()
    steps = zip(t.shape[:-1], t.stride(), strict=False)
    if any(n > 1 and (step <= 0 or step * size % ALIGNMENT) for n, step in steps):
        return False
    return (t.stride(-1) == 1 or t.shape[-1] == 1) and t.data_ptr() % ALIGNMENT == 0


def token_strides(t: Tensor, length: int, is_ragged: bool) -> Strides:
    """(b, h, s) strides of [b, s, h, d] or [total, h, d] in a plan for sequences of up to `length` tokens.

    The stride of a dim of size 1 is never used, so it is given the one value that a compact tensor would have.
    """
    heads, head_dim = t.shape[-2:]
    stride_h = t.stride(-2) if heads > 1 else head_dim
    stride_s = t.stride(-3) if t.shape[-3] > 1 else heads * head_dim
    if is_ragged:
        return length * stride_s, stride_h, stride_s
    return t.stride(0) if t.shape[0] > 1 else length * stride_s, stride_h, stride_s


def has_fixed_strides(t: Tensor) -> bool:
    """Returns whether strides within a sequence are the same for all batch sizes and lengths: tokens in rows, heads in tokens."""
    if t.dim() == 3:
        return True
    return t.stride(1) >= t.stride(2) and (t.shape[0] == 1 or t.stride(0) >= t.stride(1))


def bias_strides(bias: Tensor) -> Strides:
    """(b, h, s) strides; of a dim of size 1, what a compact tensor with aligned rows would have."""
    batch, heads, rows, columns = bias.shape
    stride_s = bias.stride(2) if rows > 1 else _aligned(columns)
    stride_h = bias.stride(1) if heads > 1 else rows * stride_s
    return bias.stride(0) if batch > 1 else heads * stride_h, stride_h, stride_s


def empty_aligned_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of the shape of `like` whose rows begin on 16-byte boundaries."""
    *outer, columns = like.shape
    return like.new_empty((*outer, _aligned(columns)), dtype=dtype)[..., :columns]


def _aligned(columns: int) -> int:
    return -(-columns // 8) * 8  # 16 bytes of the smallest dtype, two bytes


def round_up_batch(batch: int) -> int:
    """The next power of two; beyond 512 the next multiple of 512."""
    return -(-batch // 512) * 512 if batch > 512 else 1 << (batch - 1).bit_length()


def round_up_length(length: int) -> int:
    """At least 128; the next of 2**n and 3 * 2**(n - 1), so at most a half more; beyond 32768 the next multiple of it."""
    if length > _LONG:
        return -(-length // _LONG) * _LONG
    power = max(128, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 128 and length <= power * 3 // 4 else power
