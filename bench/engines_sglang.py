"""SGLang's part of `flexattn.bench.engines`: its pools, batch and layer for a cell."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flexattn.bench.decode_cells import LATENT, WINDOW
from flexattn.bench.implementations import Unavailable

if TYPE_CHECKING:
    from flexattn.bench.engines import Work


@functools.cache
def _publish(device: str) -> None:
    """Gives SGLang's process the settings of a small model."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        publish(ServerArgs(model_path=folder, device=device, attention_backend="torch_native"), role="scheduler")


def _pool(work: Work) -> Any:
    """Returns SGLang's pool with the keys and values of the cell's pages."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    cell, (k, v) = work.cell, work.step[1:3]
    size, device = (len(k) - 1) * cell.page, str(k.device)  # a pool has a page more, for padding
    if cell.is_latent:
        pool: Any = MLATokenToKVPool(size, cell.page, k.dtype, LATENT, cell.head_dim - LATENT, 1, device, False)
        pool.get_kv_buffer(0)[0].copy_(k.flatten(0, 1))
        return pool
    pool = MHATokenToKVPool(size, cell.page, k.dtype, cell.heads_kv, cell.head_dim, 1, device, False)
    for buffer, pages in zip(pool.get_kv_buffer(0), (k, v), strict=True):
        buffer.copy_(pages.flatten(0, 1))
    return pool


def _runner(work: Work, pool: Any, context_len: int) -> Any:
    """Returns the attributes of SGLang's runner that flexattn's backend reads."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    cell, table = work.cell, work.wide_table
    requests = ReqToTokenPool(len(table), context_len, str(table.device), False)
    rows = torch.arange(cell.page, dtype=table.dtype, device=table.device)
    requests.req_to_token[: len(table)] = (table[..., None] * cell.page + rows).flatten(1)
    rank = LATENT if cell.is_latent else None
    model = {"context_len": context_len, "kv_lora_rank": rank, "is_encoder_decoder": False, "is_local_attention_model": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        device=str(table.device),
        page_size=cell.page,
        use_mla_backend=cell.is_latent,
        kv_cache_dtype=work.step.k.dtype,
        kv_cache_dtype_str="auto",
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        kv_index_translator=SimpleNamespace(is_translating=False),
    )


def _batch(work: Work) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    lengths, device = work.step.where["seqused_kv"], work.q.device
    more: dict[str, Any] = {}
    if max(work.cell.queries) > 1:
        more = {
            "extend_seq_lens": lengths - work.before,
            "extend_seq_lens_cpu": list(work.cell.queries),
            "extend_prefix_lens": work.before,
            "extend_prefix_lens_cpu": work.before.tolist(),
        }
    tokens = torch.zeros(len(work.q), dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.MIXED if more else ForwardMode.DECODE,
        batch_size=len(lengths),
        input_ids=tokens,
        positions=tokens,
        req_pool_indices=torch.arange(len(lengths), device=device),
        seq_lens=lengths.long(),
        seq_lens_cpu=lengths.cpu().long(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=work.slots,
        **more,
    )


def layer_of(work: Work) -> tuple[Callable[[], Any], Callable[[], object], Callable[[], object]]:
    """Returns the call of SGLang's layer, a function that makes the rows that it writes NaN, and one that makes the metadata.

    Raises:
        Unavailable: if SGLang is missing, or if the cache is in FP8.
    """
    try:
        from flexattn.integrations.sglang import FlexattnAttnBackend
    except ImportError as error:
        raise Unavailable(str(error)) from error
    from sglang.srt.layers.radix_attention import RadixAttention

    cell = work.cell
    if cell.is_fp8:
        raise Unavailable("SGLang divides new rows by the scales of an FP8 cache in place, so a replay would divide them again")
    _publish(work.q.device.type)
    pool, batch = _pool(work), _batch(work)
    backend = FlexattnAttnBackend(_runner(work, pool, work.wide_table.shape[1] * cell.page))
    d_v = LATENT if cell.is_latent else cell.head_dim
    window = WINDOW - 1 if "window" in cell.more else -1
    layer = RadixAttention(
        cell.heads, cell.head_dim, cell.head_dim**-0.5, cell.heads_kv, 0, sliding_window_size=window, v_head_dim=d_v
    )
    if max(cell.queries) > 1:
        build = functools.partial(backend.init_forward_metadata, batch)
    else:
        backend.init_cuda_graph_state(len(cell.keys), len(work.q))
        build = functools.partial(backend.init_forward_metadata_out_graph, batch, in_capture=True)
    build()
    sinks = work.step.where.get("softmax_offset")
    k, v = work.new or (None, None)
    shape = (len(work.q), cell.heads, d_v)

    def run() -> Any:
        more = {} if sinks is None else {"sinks": sinks}
        out = backend.forward_extend(work.q.flatten(1), k, v, layer, batch, save_kv_cache=bool(work.new), **more)
        return out.view(shape)

    pages = [buffer.unflatten(0, (-1, cell.page)) for buffer in pool.get_kv_buffer(0)]
    return run, lambda: work.spoil(*pages), build
