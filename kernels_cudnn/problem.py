"""One attention problem for the cuDNN graphs: its input tensors, a band, lengths, and the sizes of a plan for it."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from flexattn.kernels_cudnn.graphs import ALIGNMENT, Strides
from flexattn.kernels_cudnn.lowering import Mods

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_LONG = 32768  # longer lengths are rounded up to multiples of this.


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one attention call in fp16, bf16 or FP8. The scales of FP8 are not in it.

    q is [b, sq, h, d_qk], k is [b, skv, h_kv, d_qk] and v is [b, skv, h_kv, d_v], with any strides. If packed, they are [total,
    h, d], and `cu_seqlens_*` has the place of each sequence. q may be packed if k and v are not, and the reverse.

    The other fields are as in `flexattn.attention`, with one band instead of a mask type: query i sees key j if and only if
    -window_left <= j - i - shift <= window_right. None leaves a side open. shift is len_kv - len_q with `bottom_right`, else 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    bias: Tensor | None = None  # [b | 1, h | 1, sq | 1, skv | 1], added after the scale.
    has_sink: bool = False
    softmax_offset: Tensor | None = None  # [h]. If None with a sink, the offset is 0.
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # int64 [2].
    cu_seqlens_q: Tensor | None = None  # int32 [b + 1]. If None, each sequence is as long as its dim.
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int = 0  # used for packed q only. A dense q has it in its shape.
    max_seqlen_kv: int = 0
    mods: Mods | None = None  # score_mod and mask_mod.
    # Inputs of the mods, in their order: numbers as 0-d tensors on the CPU, other tensors as [b | 1, h | 1, sq | 1, skv | 1] of
    # `sizes`.
    mod_inputs: tuple[Tensor, ...] = ()
    is_bucketed: bool = False  # whether a dense problem runs on a plan for rounded-up sizes. Packed problems always do.

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
        return self.max_seqlen_kv if self.k.dim() == 3 else self.k.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.q.dtype in FP8_DTYPES

    @property
    def has_padding(self) -> bool:
        """Returns whether some tokens may belong to no sequence. Such tokens must not be read, and zeros are written to them."""
        return self.cu_seqlens_q is not None

    @functools.cached_property
    def is_ragged(self) -> bool:
        """Returns whether each sequence begins at its own offset. If so, the plan is for rounded-up sizes."""
        return self.is_bucketed or self.q.dim() == 3 or self.k.dim() == 3

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no query or no key, so that nothing has to run."""
        return 0 in (self.batch, self.longest_q, self.longest_kv, *self.q.shape, *self.k.shape)

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Returns (batch, longest query sequence, longest key sequence) of the plan."""
        if self.is_ragged:
            return round_up_batch(self.batch), round_up_length(self.longest_q), round_up_length(self.longest_kv)
        return self.batch, self.longest_q, self.longest_kv


def without_data(t: Tensor) -> Tensor:
    """Returns `t` on the meta device, with the layout in which a plan reads `t`."""
    if not has_alignment(t):  # a copy of it is read instead.
        return torch.empty(t.shape, dtype=t.dtype, device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def has_alignment(t: Tensor) -> bool:
    """Returns whether cuDNN can read `t` without a copy: contiguous rows on 16-byte boundaries, and no expanded dim."""
    size = t.element_size()
    steps = zip(t.shape[:-1], t.stride(), strict=False)
    if any(n > 1 and (step <= 0 or step * size % ALIGNMENT) for n, step in steps):
        return False
    return (t.stride(-1) == 1 or t.shape[-1] == 1) and t.data_ptr() % ALIGNMENT == 0


def token_strides(t: Tensor, length: int, is_ragged: bool) -> Strides:
    """Returns the (b, h, s) strides of [b, s, h, d] or [total, h, d] in a plan for sequences of up to `length` tokens.

    The stride of a dim of size 1 is never used. It gets the value that a compact tensor has, so that equal calls share a plan.
    """
    heads, head_dim = t.shape[-2:]
    stride_h = t.stride(-2) if heads > 1 else head_dim
    stride_s = t.stride(-3) if t.shape[-3] > 1 else heads * head_dim
    if is_ragged:
        return length * stride_s, stride_h, stride_s
    return t.stride(0) if t.shape[0] > 1 else length * stride_s, stride_h, stride_s


def has_fixed_strides(t: Tensor) -> bool:
    """Returns whether the strides within a sequence do not depend on batch size and length.

    They do not if sequences lie one after the other, and the heads of a token lie together.
    """
    if t.dim() == 3:
        return True
    return t.stride(1) >= t.stride(2) and (t.shape[0] == 1 or t.stride(0) >= t.stride(1))


def bias_strides(bias: Tensor) -> Strides:
    """Returns the (b, h, s) strides of a bias. A dim of size 1 gets its stride in a compact tensor with aligned rows."""
    batch, heads, rows, columns = bias.shape
    stride_s = bias.stride(2) if rows > 1 else _aligned(columns)
    stride_h = bias.stride(1) if heads > 1 else rows * stride_s
    return bias.stride(0) if batch > 1 else heads * stride_h, stride_h, stride_s


def empty_aligned_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor of the shape of `like` whose rows begin on 16-byte boundaries."""
    *outer, columns = like.shape
    return like.new_empty((*outer, _aligned(columns)), dtype=dtype)[..., :columns]


def _aligned(columns: int) -> int:
    return -(-columns // 8) * 8  # 16 bytes of the smallest dtype, which has two bytes.


def round_up_batch(batch: int) -> int:
    """Returns the next power of two, or the next multiple of 512 if the batch is larger than 512."""
    return -(-batch // 512) * 512 if batch > 512 else 1 << (batch - 1).bit_length()


def round_up_length(length: int) -> int:
    """Returns the next number of the form 2**n or 3 * 2**(n - 1), at least 128. This adds at most half of the length.

    If the length is above 32768, the next multiple of 32768 is returned.
    """
    if length > _LONG:
        return -(-length // _LONG) * _LONG
    power = max(128, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 128 and length <= power * 3 // 4 else power
