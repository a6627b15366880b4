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

from flexattn.dispatch.spec import MaskType
from flexattn.functional import attention

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

    Raises:
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _options(dropout_p, softmax_scale, softcap, deterministic, s_aux)
    kind: MaskType = "causal_bottom_right" if causal else "no_mask"
    out: Tensor = attention(q, k, v, attn_mask_type=kind, window_size=_window(window_size, causal), **options)
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

    Raises:
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _options(dropout_p, softmax_scale, softcap, deterministic, s_aux)
    out: Tensor = attention(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right" if causal else "padding",
        window_size=_window(window_size, causal),
        cu_seqlens_q=cu_seqlens_q.to(torch.int32),
        cu_seqlens_kv=cu_seqlens_k.to(torch.int32),
        max_seqlen_q=int(max_seqlen_q),
        max_seqlen_kv=int(max_seqlen_k),
        **options,
    )
    return out


def _window(window_size: tuple[int | None, int | None], causal: bool) -> tuple[int, int]:
    left, right = (-1 if side is None or side < 0 else side for side in window_size)
    return left, 0 if causal else right


def _options(
    dropout_p: float, softmax_scale: float | None, softcap: float, deterministic: bool, s_aux: Tensor | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "softcap": softcap}
    if deterministic:
        options["deterministic"] = True
    if s_aux is not None:
        options |= {"softmax_type": "learnable", "softmax_offset": s_aux}
    return options
