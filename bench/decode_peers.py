"""The peers of `flexattn.bench.decode`, each over its kind of cache. A missing or refusing peer has the reason in its row.

SDPA and FlexAttention read a dense cache. flash-attn 4 and vLLM's unified kernel read pages by a page table. SGLang's decoding
kernel reads tokens by a list of positions. The program prepares this list, or a BlockMask, before the timing, because a serving
engine does so once a step. Peers get page tables with valid entries and caches without NaN, because not all of them accept others.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexattn import compat
from flexattn.bench.decode_cells import GARBAGE, SOFTCAP, WINDOW, Cell, Step
from flexattn.bench.harness import Call
from flexattn.bench.implementations import Unavailable
from flexattn.bench.peers import compiled_flex, import_peer
from flexattn.bench.record import installed

VLLM_SEGMENTS = (
    16  # parts of a sequence's keys, and most programs of a grid that has none: vllm/v1/attention/backends/triton_attn.py
)
VLLM_PROGRAMS = 128
SGLANG_SPLITS = (8, 32)  # parts of a sequence's keys; the server's default is 8


class Peer(NamedTuple):
    name: str
    version: str
    prepare: Callable[[Cell, Step, Step], Call]  # makes the call from the cell, its pages and its dense cache; raises Unavailable


def peers() -> list[Peer]:
    """Returns all of them; one that is not installed raises Unavailable when it is prepared."""
    torch_version = f"torch {torch.__version__}"

    def sglang(splits: int) -> Peer:
        return Peer(f"SGLang, {splits} splits", _version("sglang"), functools.partial(_sglang, splits))

    return [
        Peer("SDPA cuDNN, dense", torch_version, functools.partial(_sdpa, "CUDNN_ATTENTION")),
        Peer("SDPA flash, dense", torch_version, functools.partial(_sdpa, "FLASH_ATTENTION")),
        Peer("FlexAttention, dense", torch_version, _flex_attention),
        Peer("flash-attn 4", _version("flash-attn-4"), _flash_attn_4),
        Peer("vLLM, Triton", _version("vllm"), _vllm),
        *map(sglang, SGLANG_SPLITS),
    ]


def _version(package: str) -> str:
    return installed(package) or "not installed"


def _needs(is_so: bool, what: str) -> None:
    if not is_so:
        raise Unavailable(what)


def _rows(cell: Cell) -> int:
    """Returns the number of queries of each sequence."""
    _needs(len(set(cell.queries)) == 1, "sequences have different numbers of queries, which a dense call cannot have")
    return cell.queries[0]


def _clean(t: Tensor) -> Tensor:
    return t.nan_to_num() if bool(t.isnan().any()) else t


def _pages(cell: Cell, paged: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pools of k and v and the page table, without NaN and entries out of range."""
    _needs(not cell.is_fp8, "its caches in FP8 have one scale for a whole tensor")
    table = paged.where["page_table"]
    return _clean(paged.k), _clean(paged.v), table.where(table != GARBAGE, 0)


def _sdpa(backend: str, cell: Cell, paged: Step, dense: Step) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    is_plain = not (cell.more or cell.is_fp8 or cell.is_latent) and _rows(cell) == 1 and len(set(cell.keys)) == 1
    _needs(is_plain, "SDPA takes one query over equally many plain keys")
    q, k, v = dense.q[:, :, None], dense.k.transpose(1, 2), dense.v.transpose(1, 2)

    def call() -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=cell.heads != cell.heads_kv)
        return out[:, :, 0]

    return call


def _flex_attention(cell: Cell, paged: Step, dense: Step) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    _needs(not cell.is_fp8, "FlexAttention takes q, k and v of one dtype")
    rows, batch, longest = _rows(cell), len(cell.keys), max(cell.keys)
    lengths, tree = dense.where["seqused_kv"], dense.where.get("mask_mod")
    q = dense.q.view(batch, rows, cell.heads, cell.head_dim).transpose(1, 2).contiguous()
    k, v = (_clean(t)[:, :longest].transpose(1, 2).contiguous() for t in (dense.k, dense.v))

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        diagonal = lengths[b] - rows + i
        seen: Tensor = j <= diagonal
        if tree is not None:
            seen = (j < lengths[b]) & tree(b, h, i, j)
        elif "window" in cell.more:
            seen = seen & (j > diagonal - WINDOW)
        return seen

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    compat.dynamo().reset()  # past its limit of recompilations a shape would run uncompiled
    block_mask = create_block_mask(visible, batch, None, rows, longest, device=str(q.device))
    options: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": cell.heads != cell.heads_kv}
    options["score_mod"] = capped if cell.more == "softcap" else None
    compiled = compiled_flex(options, dense.where.get("softmax_offset"))
    return lambda: compiled(q, k, v).transpose(1, 2).flatten(0, 1)


def _flash_attn_4(cell: Cell, paged: Step, dense: Step) -> Call:
    module = import_peer("flash_attn.cute", "flash-attn-4")
    _needs(cell.more != "tree", "flash-attn 4 takes a mask_mod as a function of its own language alone")
    k, v, table = _pages(cell, paged)
    options: dict[str, Any] = {
        "cu_seqlens_q": paged.where["cu_seqlens_q"],
        "max_seqlen_q": max(cell.queries),
        "max_seqlen_k": max(cell.keys),
        "seqused_k": paged.where["seqused_kv"],
        "page_table": table,
        "causal": True,
        "softcap": SOFTCAP if cell.more == "softcap" else 0.0,
        "num_splits": 1 if torch.cuda.get_device_capability()[0] == 9 else 0,  # it splits only on Blackwell, by a heuristic
    }
    if "window" in cell.more:
        options["window_size"] = (WINDOW - 1, 0)
    if "sinks" in cell.more:
        options["learnable_sink"] = paged.where["softmax_offset"].to(paged.q.dtype)
    attend = module.flash_attn_varlen_func

    def call() -> Tensor:
        out = attend(paged.q, k, v, **options)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    return call


def _vllm(cell: Cell, paged: Step, dense: Step) -> Call:
    attend = import_peer("vllm.v1.attention.ops.triton_unified_attention", "vllm").unified_attention
    _needs(cell.more != "tree", "vLLM's kernel takes no mask of one's own")
    _needs(not cell.is_latent, "vLLM's unified kernel takes k and v of one head dim")
    k, v, table = _pages(cell, paged)
    threshold = VLLM_PROGRAMS // cell.heads_kv  # sequences up to which keys are split
    parts = (threshold, cell.heads, VLLM_SEGMENTS)
    out, sums = torch.empty_like(paged.q), functools.partial(torch.empty, device=paged.q.device, dtype=torch.float32)
    options: dict[str, Any] = {
        "cu_seqlens_q": paged.where["cu_seqlens_q"],
        "max_seqlen_q": max(cell.queries),
        "seqused_k": paged.where["seqused_kv"],
        "max_seqlen_k": max(cell.keys),
        "softmax_scale": 1.0 / math.sqrt(cell.head_dim),
        "causal": True,
        "window_size": (WINDOW - 1, 0) if "window" in cell.more else (-1, -1),
        "block_table": table,
        "softcap": SOFTCAP if cell.more == "softcap" else 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": sums((*parts, 1 << (cell.head_dim - 1).bit_length())),
        "softmax_segm_max": sums(parts),
        "softmax_segm_expsum": sums(parts),
        "sinks": paged.where.get("softmax_offset"),
    }
    accepted = inspect.signature(attend).parameters
    options = {name: value for name, value in options.items() if name in accepted}

    def call() -> Tensor:
        attend(q=paged.q, k=k, v=v, out=out, **options)
        return out

    return call


def _sglang(splits: int, cell: Cell, paged: Step, dense: Step) -> Call:
    attend = import_peer("sglang.kernels.ops.attention.decode_attention", "sglang").decode_attention_fwd
    _needs(_rows(cell) == 1, "SGLang's decoding kernel takes one query of a sequence")
    _needs("window" not in cell.more, "SGLang makes a list of the tokens in a window for each step")
    k, v, table = _pages(cell, paged)
    device, batch = paged.q.device, len(cell.keys)
    tokens = torch.cat(
        [
            (row.long()[:, None] * cell.page + torch.arange(cell.page, device=device)).flatten()[:n]
            for row, n in zip(table, cell.keys, strict=True)
        ]
    )
    starts = torch.tensor((0, *torch.tensor(cell.keys).cumsum(0)), dtype=torch.int32, device=device)
    out = torch.empty(batch, cell.heads, v.shape[-1], dtype=paged.q.dtype, device=device)
    sums = torch.empty(batch, cell.heads, splits, v.shape[-1], dtype=torch.float32, device=device)
    logsums = torch.empty(batch, cell.heads, splits, dtype=torch.float32, device=device)
    taken = torch.full((batch,), splits, dtype=torch.int32, device=device)
    options: dict[str, Any] = {
        "kv_indptr": starts,
        "kv_indices": tokens,
        "attn_logits": sums,
        "attn_lse": logsums,
        "num_kv_splits": taken,
        "max_kv_splits": splits,
        "sm_scale": 1.0 / math.sqrt(cell.head_dim),
        "k_scale": 1.0,
        "v_scale": 1.0,
        "logit_cap": SOFTCAP if cell.more == "softcap" else 0.0,
        "sinks": paged.where.get("softmax_offset"),
    }
    accepted = inspect.signature(attend).parameters
    options = {name: value for name, value in options.items() if name in accepted}
    k, v = k.flatten(0, 1), v.flatten(0, 1)

    def call() -> Tensor:
        attend(paged.q, k, v, out, **options)
        return out

    return call
