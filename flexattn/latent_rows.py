"""Caches of latents in rows of 656 bytes, FlashMLA's format for sparse decoding, and attention by lists of keys over them.

A row is a key of absorbed latent attention: 512 numbers in E4M3, the float32 factors of each 128 of them, and 64 numbers in
bfloat16 for the positions. Its values are its first 512 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.dispatch import eager_backend, triton_backend
from flexattn.dispatch.pages import without_pages
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.functional import OutLse, bind_call
from flexattn.ops import run, spec_to_run
from flexattn.validation import DTYPES, check_tensor, describe

LATENT, ROPE, GROUP = 512, 64, 128  # numbers of a latent, of its positions, and of a group with its own factor
_SCALES = 4 * LATENT // GROUP  # bytes
BYTES = LATENT + _SCALES + 2 * ROPE
_LARGEST = 448.0  # the largest number in E4M3


def pack_latents(x: Tensor) -> Tensor:
    """Returns latents as rows of bytes: uint8 [..., 656] of x [..., 576], whose first 512 numbers become FP8.

    The factor of 128 numbers is the largest absolute value, divided by 448, or 1 if that is 0. The other 64 numbers are rounded to
    bfloat16.

    Raises:
        ValueError, TypeError: x is no tensor of 16 or 32 bits with 576 columns.
    """
    check_tensor("x", x, DTYPES, None)
    if x.shape[-1:] != (LATENT + ROPE,):
        raise ValueError(
            f"x is {describe(x)}; accepted: a last dim of {LATENT + ROPE}, {LATENT} for the latent and {ROPE} for positions"
        )
    groups = x[..., :LATENT].float().reshape(*x.shape[:-1], LATENT // GROUP, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    numbers = (groups / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    parts = numbers, scales.squeeze(-1), x[..., LATENT:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack_latents(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the latents of rows of bytes: [..., 576] in `dtype` of uint8 [..., 656]. Numbers are multiplied in float32.

    Raises:
        ValueError, TypeError: rows are no uint8 tensor with 656 columns.
    """
    _check_rows(rows)
    numbers = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float().reshape(*rows.shape[:-1], LATENT // GROUP, GROUP)
    scales = rows[..., LATENT : LATENT + _SCALES].contiguous().view(torch.float32)
    positions = rows[..., LATENT + _SCALES :].contiguous().view(torch.bfloat16)
    return torch.cat([(numbers * scales[..., None]).flatten(-2).to(dtype), positions.to(dtype)], -1)


def append_latents(rows: Tensor, new: Tensor, *, seqused_kv: Tensor, **options: Any) -> None:
    """Appends new latents to each sequence of a cache of rows, in place.

    New row i of sequence b goes to position seqused_kv[b] + i, as in `append_kv`.

    Args:
        rows: uint8 [b, s, 1, 656], or with a page_table a pool [pages, page_size, 1, 656].
        new: [b, s_new, 1, 576], or [total, 1, 576] for "thd"; packed by `pack_latents`.
        seqused_kv: int32 [b]: the number of rows of each sequence before the call.
        options: page_table, qkv_format, cu_seqlens_q and seqused_q of `append_kv`.

    Raises:
        ValueError, TypeError: errors of `pack_latents` and `append_kv`.
    """
    _check_rows(rows)
    if torch.is_grad_enabled() and new.requires_grad:
        raise ValueError("new requires a gradient, and appending has none; accepted: a call under torch.no_grad(), or new.detach()")
    parts = [t.view(torch.float8_e4m3fn) for t in (rows, pack_latents(new))]
    halves = [half for t in parts for half in (t[..., :LATENT], t[..., LATENT:])]  # bytes are copied as they are
    append_kv(*halves, seqused_kv=seqused_kv, **options)


def latent_attention(
    q: Tensor, rows: Tensor, *, kv_indices: Tensor, backend: str | None = None, return_lse: bool = False, **options: Any
) -> Tensor | OutLse:
    """Computes `attention` by lists of keys over a cache of rows: k = unpack_latents(rows, q.dtype) and v = k[..., :512].

    Triton kernels unpack the listed rows alone, so a query reads 656 bytes for each key; other backends unpack all rows first. The
    call has no gradient, and torch.compile does not trace it.

    Args:
        q: [b, sq, h, 576] or [t, h, 576], float16 or bfloat16.
        rows: uint8 [b, s, 1, 656], or with a page_table a pool [pages, page_size, 1, 656].
        kv_indices: lists of keys, as for `attention`.
        backend, return_lse, options: arguments of `attention`, which has the same defaults. FP8 recipes and descales have no
            meaning here. return_max_logit and return_aux raise.

    Returns:
        out [.., h, 512], or OutLse(out, lse).

    Raises:
        ValueError, TypeError: arguments do not fit together, or a tensor requires a gradient while gradients are recorded.
        BackendError: no backend can run the call. E4M3 needs compute capability 8.9 in kernels.
    """
    for name in ("return_max_logit", "return_aux"):
        if options.get(name):
            raise ValueError(f"{name} is given to latent_attention(); accepted: return_lse")
    check_tensor("q", q, (torch.float16, torch.bfloat16), None)
    _check_rows(rows)
    if rows.device != q.device:
        raise ValueError(f"rows are on {rows.device} and q on {q.device}; accepted: one device")
    k = q.new_zeros(LATENT + ROPE).expand(*rows.shape[:-1], -1)  # stands for the keys in all checks, without memory
    given = options | {"kv_indices": kv_indices, "backend": backend, "return_lse": return_lse}
    x, settings = bind_call(q, k, k[..., :LATENT], **given)
    if settings.needs_grad:
        raise ValueError(
            "a tensor of the call requires a gradient, and a cache of latents has none; accepted: a call under torch.no_grad(), or "
            "detached tensors"
        )
    spec = spec_to_run(x, settings)

    def forward(module: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        if module is triton_backend:
            if spec.capability is not None and spec.capability < (8, 9):
                raise BackendError("rows of latents in E4M3 need compute capability 8.9; use backend='eager'")
            results = triton_backend.forward(spec, x, rows)
        elif module is eager_backend:
            results = eager_backend.forward(*_unpacked(spec, x, rows))
        else:
            raise BackendError("rows of latents have kernels on backend='triton' alone; use it, or backend='eager'")
        return results

    out, lse, _ = run(spec, "forward", settings.backend, x, forward)
    return OutLse(out, lse) if return_lse else out


def _unpacked(spec: AttentionSpec, x: Operands, rows: Tensor) -> tuple[AttentionSpec, Operands]:
    """Returns the call with 16-bit keys, of the sequences' own pages."""
    spec, x = without_pages(spec, x._replace(k=rows, v=rows))
    k = unpack_latents(x.k, spec.dtype)
    return spec, x._replace(k=k, v=k[..., :LATENT])


def _check_rows(rows: Tensor) -> None:
    check_tensor("rows", rows, (torch.uint8,), None)
    if rows.dim() < 2 or rows.shape[-1] != BYTES or rows.stride(-1) != 1:
        raise ValueError(f"rows are {describe(rows)}; accepted: a contiguous last dim of {BYTES} bytes, from flexattn.pack_latents")
    if any(stride % 16 for stride in rows.stride()[:-1]) or rows.storage_offset() % 16:
        raise ValueError(f"rows have strides {rows.stride()}; accepted: multiples of 16 bytes, as in rows.contiguous()")
