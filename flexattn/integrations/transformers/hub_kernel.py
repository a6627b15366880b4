"""FlashAttention's functions with transformers' signature for kernels of the Hub, and the folder of such a kernel.

They are for models that check whether FlashAttention is on, such as some vision towers, and for
`attn_implementation="<org>/flash-flexattn"`. For any other model, use `flexattn.integrations.transformers.register`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.flash_attn import sequences
from flexattn.integrations.flash_attn.options import Options, named
from flexattn.integrations.flash_attn.sequences import Lengths

NAME = "flash-flexattn"
_SOURCE = '''"""flexattn as a kernel for transformers; flexattn itself is to be installed beside it."""

from flexattn.integrations.transformers.hub_kernel import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
'''


def write(folder: str | Path, backend: str = "cuda") -> Path:
    """Writes the files of a kernel into a folder, and returns the folder.

    To use it, set `LOCAL_KERNELS="<org>/flash-flexattn=<folder>"` in the environment, and
    `attn_implementation="<org>/flash-flexattn"`. The layout is that of https://github.com/huggingface/kernels, kernels 0.16.

    Args:
        folder: parent of `build/torch-universal`.
        backend: device in the kernel's metadata, "cuda" or "cpu".

    Raises:
        ValueError: if the backend is another.
    """
    if backend not in ("cuda", "cpu"):
        raise ValueError(f"backend is {backend!r}; accepted: 'cuda' or 'cpu'")
    build = Path(folder) / "build" / "torch-universal"
    build.mkdir(parents=True, exist_ok=True)
    (build / "__init__.py").write_text(_SOURCE, "utf-8")
    metadata: dict[str, Any] = {"id": "flexattn", "name": NAME, "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": backend}}, indent=1) + "\n", "utf-8")
    return Path(folder)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """FlashAttention's dense function, with sinks; transformers passes only arguments that the signature has.

    After https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py.

    Args:
        q: [b, sq, h, d], float16, bfloat16 or float32.
        k: [b, skv, h_kv, d].
        v: [b, skv, h_kv, d_v].
        dropout_p: dropout probability of a softmax weight.
        softmax_scale: scale of the scores. None: 1/sqrt(d).
        causal: if True, query i sees the keys j <= i + skv - sq.
        window_size: (left, right) in tokens, a negative number or None for open; right is 0 if causal.
        softcap: c changes each score s to c * tanh(s / c). 0: no softcap.
        deterministic: if True, gradients are bitwise identical from run to run.
        s_aux: [h], logits of attention sinks.

    Returns:
        out [b, sq, h, d_v].

    Raises the errors of `flexattn.attention`.
    """
    options = Options(dropout_p, softmax_scale, causal, _closed(window_size), softcap, None, deterministic)
    out: Tensor = attention(q, k, v, **named(options, is_padded=False), softmax_offset=s_aux)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """FlashAttention's function of packed sequences. q is [t_q, h, d], k [t_k, h_kv, d], v [t_k, h_kv, d_v].

    Args:
        cu_seqlens_q, cu_seqlens_k: integers [sequences + 1], the sequences' offsets, and the number of tokens.
        max_seqlen_q, max_seqlen_k: the longest of them, ints or 0-d tensors.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux: as in `flash_attn_func`.

    Returns:
        out [t_q, h, d_v].

    Raises the errors of `flexattn.attention`.
    """
    options = Options(dropout_p, softmax_scale, causal, _closed(window_size), softcap, None, deterministic)
    lengths_q = Lengths(q, cu_seqlens_q.to(torch.int32), None, int(max_seqlen_q))
    lengths_k = Lengths(k, cu_seqlens_k.to(torch.int32), None, int(max_seqlen_k))
    lengths = sequences.named(lengths_q, lengths_k)
    out: Tensor = attention(q, k, v, **lengths, **named(options, is_padded=True), softmax_offset=s_aux)
    return out


def _closed(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """Returns the window with a negative side in place of None."""
    left, right = (-1 if side is None else side for side in window_size)
    return left, right
