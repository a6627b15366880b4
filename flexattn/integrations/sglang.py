"""flexattn as an attention backend of SGLang: `register`, which SGLang calls as a plugin, and the class that it registers.

SGLang makes a backend for each model runner. The backend makes the metadata of a batch, once for all layers, and each layer
calls `forward_extend` or `forward_decode`: https://docs.sglang.io/advanced_features/attention_backend.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.engines import (
    ANOTHER_BACKEND,
    FP8_CACHES,
    WIDEST_FP8_HEAD,
    BatchOptions,
    Descales,
    LayerOptions,
    batch_options,
    layer_options,
    refuse,
)

try:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
except ImportError as error:
    raise ImportError(
        f"SGLang's attention cannot be imported: {error}; flexattn.integrations.sglang needs sglang 0.5.23 or later; "
        "pip install sglang"
    ) from error

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME: Final = "flexattn"
_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2")


def register() -> None:
    """Registers `FlexattnAttnBackend` as "flexattn" in SGLang: `--attention-backend flexattn`.

    It is an entry point of the group `sglang.srt.plugins`, which SGLang calls in each process. A second call has no effect.
    """
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(FlexattnAttnBackend)
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


@dataclass
class FlexattnMetadata:
    """A batch.

    Attributes:
        call: the arguments of `attention` for the batch.
        window_call: the same for layers whose keys are in SGLang's pool for sliding windows, which has its own page numbers.
        window_slots: int64 [tokens], the places of new keys and values in that pool. None without it.
    """

    call: BatchOptions
    window_call: BatchOptions
    window_slots: Tensor | None


@dataclass
class _Memory:
    """Tensors of a batch. A CUDA graph keeps them, and each replay reads the values that were copied last."""

    page_tables: list[Tensor]  # one for each pool
    seqused_kv: Tensor
    cu_seqlens_q: Tensor
    window_slots: Tensor


class FlexattnAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang need not be installed, and has no type then
    """Attention over SGLang's paged pools, latent attention (MLA) included.

    Raises:
        NotImplementedError: if the runner's settings need speculative decoding, encoders, local attention, context parallelism,
            diffusion, unified memory, or a cache in other dtypes than `--kv-cache-dtype` auto, bfloat16, fp8_e4m3 and fp8_e5m2. For
            latent attention FP8 is refused too.
    """

    # A replay reads no lengths on the host: page tables have the columns of the longest context.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        model = model_runner.model_config
        _check_settings(model_runner)
        self._device = torch.device(model_runner.device)
        self._page_size: int = model_runner.page_size
        self._first_tokens = torch.arange(0, model.context_len, self._page_size, device=self._device)
        # SGLang's models read the pools here.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        self._has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._is_fp8 = model_runner.kv_cache_dtype in FP8_CACHES.values()
        self._latent_dim: int | None = model.kv_lora_rank if model_runner.use_mla_backend else None
        self._batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._layers: dict[RadixAttention, LayerOptions] = {}
        self._decode_memory: _Memory | None = None
        self._extend_memory: _Memory | None = None
        self.forward_metadata: FlexattnMetadata | None = None

    def support_triton(self) -> bool:
        """Returns whether SGLang may compute positions by Triton: not on a CPU."""
        return self._device.type != "cpu"

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of a sequence that pads a captured batch."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the tensors that graphs of decoding batches keep, for max_bs sequences and max_num_tokens tokens."""
        self._decode_memory = self._allocate(max_bs, len(self._first_tokens), max_num_tokens)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Makes the metadata of a batch that runs without a CUDA graph."""
        lengths, slots = forward_batch.seq_lens_cpu, forward_batch.out_cache_loc
        columns = len(self._first_tokens)
        if lengths is not None and len(lengths):
            columns = min(columns, max(1, -(-int(lengths.max()) // self._page_size)))
        memory = self._allocate(forward_batch.batch_size, columns, 0 if slots is None else len(slots))
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        self._fill(memory, forward_batch, 1 if is_decode else max(forward_batch.extend_seq_lens_cpu))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Copies a batch's metadata to tensors that stay the same, before a CUDA graph is captured or replayed."""
        if forward_batch.forward_mode.is_decode_or_idle():
            memory, most = self._decode_memory, 1
        else:
            most = forward_batch.positions.numel()  # a graph of prompts serves every division of its tokens
            if in_capture and self._extend_memory is None:
                self._extend_memory = self._allocate(forward_batch.batch_size, len(self._first_tokens), most)
            memory = self._extend_memory
        if memory is None:
            raise RuntimeError("a batch is replayed before init_cuda_graph_state or a capture; call them first")
        self._fill(memory, forward_batch, most)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: object,
    ) -> Tensor:
        """Returns out [tokens, h * d_v] of new tokens, whose keys and values it appends to the pool.

        Args:
            q: [tokens, h * d] or [tokens, h, d].
            k, v: [tokens, h_kv, d] and [tokens, h_kv, d_v], or None if the pool has them already.
            layer: SGLang's layer, with scale, window, soft cap, and the scales of a cache in FP8.
            forward_batch: the batch of the last `init_forward_metadata`.
            save_kv_cache: False: nothing is appended.
            sinks: [h], in any floating dtype.

        Raises:
            NotImplementedError: if the layer or another argument needs a feature that is missing.
        """
        for name, value in more.items():
            if value is not None and value is not False:
                refuse(name, type(value).__name__, "None", ANOTHER_BACKEND)
        metadata = self.forward_metadata
        if metadata is None:
            raise RuntimeError("init_forward_metadata has not been called; call it before a layer runs")
        options = self._layers.get(layer)
        if options is None:
            options = self._layers[layer] = self._options(layer)
        heads, d_v = layer.tp_q_head_num, layer.v_head_dim
        target = forward_batch._attn_output
        out = None if target is None else target.view(-1, heads, d_v)
        q = q.reshape(-1, heads, layer.qk_head_dim)
        if self._latent_dim is not None and d_v != self._latent_dim:
            if k is None or v is None or any(forward_batch.extend_prefix_lens_cpu):
                refuse("extend_prefix_lens", forward_batch.extend_prefix_lens_cpu, "0 before up-projected keys", ANOTHER_BACKEND)
            starts, most = metadata.call["cu_seqlens_q"], metadata.call["max_seqlen_q"]
            return attention(
                q,
                k,
                v,
                out=out,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                cu_seqlens_q=starts,
                cu_seqlens_kv=starts,
                max_seqlen_q=most,
                max_seqlen_kv=most,
                softmax_offset=sinks,
                **options,
            ).flatten(1)
        scales, descales = self._scales(layer)
        if save_kv_cache and k is not None:
            slots = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, *scales)
        is_window = self._has_window_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        batch = metadata.window_call if is_window else metadata.call
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        pages_k = paged_kv_view(keys, self._page_size, layer.tp_k_head_num, layer.qk_head_dim)
        pages_v = paged_kv_view(values, self._page_size, layer.tp_v_head_num, d_v)
        return attention(q, pages_k, pages_v, out=out, softmax_offset=sinks, **batch, **options, **descales).flatten(1)

    forward_decode = forward_extend

    def _allocate(self, sequences: int, columns: int, tokens: int) -> _Memory:
        def ids(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        pools = 2 if self._has_window_pool else 1
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=self._device)  # as decoding batches have them
        slots = torch.zeros(tokens if self._has_window_pool else 0, dtype=torch.int64, device=self._device)
        return _Memory([ids(sequences, columns) for _ in range(pools)], ids(sequences), starts, slots)

    def _fill(self, memory: _Memory, forward_batch: ForwardBatch, max_seqlen_q: int) -> None:
        mode, count = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
            refuse("forward_mode", mode.name, "EXTEND, MIXED, DECODE", ANOTHER_BACKEND)
        starts, lengths = memory.cu_seqlens_q[: count + 1], memory.seqused_kv[:count]
        lengths.copy_(forward_batch.seq_lens)
        if not mode.is_decode_or_idle():
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
        tables = [table[:count] for table in memory.page_tables]
        first_tokens = self._first_tokens[: tables[0].shape[1]]
        slots = [self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[:, None], first_tokens]]
        new_slots = None
        if self._has_window_pool:
            slots.append(self.token_to_kv_pool.translate_loc_from_full_to_swa(slots[0]))
            if forward_batch.out_cache_loc is not None:
                memory.window_slots.zero_()  # a graph writes its padding too, to slot 0
                new_slots = memory.window_slots[: len(forward_batch.out_cache_loc)]
                new_slots.copy_(self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc))
        for table, slot in zip(tables, slots, strict=True):
            torch.div(slot, self._page_size, rounding_mode="floor", out=table)
        calls = [batch_options(starts, max_seqlen_q, lengths, table) for table in tables]
        self.forward_metadata = FlexattnMetadata(calls[0], calls[-1], new_slots)

    def _options(self, layer: RadixAttention) -> LayerOptions:
        """Returns the options of a layer. Raises NotImplementedError if a layer needs a feature that is missing."""
        for name, accepted in (
            ("is_cross_attention", False),
            ("attn_type", AttentionType.DECODER),
            ("pos_encoding_mode", "NONE"),
            ("logit_capping_method", "tanh"),
            ("use_irope", False),
            ("xai_temperature_len", -1),
        ):
            if (value := getattr(layer, name)) != accepted:
                refuse(name, value, repr(accepted), ANOTHER_BACKEND)
        if self._is_fp8 and max(layer.qk_head_dim, layer.v_head_dim) > WIDEST_FP8_HEAD:
            refuse("head_dim", layer.qk_head_dim, f"up to {WIDEST_FP8_HEAD} with a cache in FP8", "pass --kv-cache-dtype auto")
        window = layer.sliding_window_size  # without a query's own key, unlike other libraries'
        return layer_options(layer.scaling, layer.logit_cap, window if window > -1 else None, self._batch_invariant)

    def _scales(self, layer: RadixAttention) -> tuple[tuple[Tensor | None, ...], Descales]:
        """Returns the scales by which SGLang divides new keys and values, and the same as arguments of `attention`."""
        if not self._is_fp8:
            return (), {}
        scales = (layer.k_scale, layer.v_scale)
        return scales, {} if layer.k_scale is None else {"descale_k": layer.k_scale, "descale_v": layer.v_scale}


def _check_settings(runner: ModelRunner) -> None:
    """Raises NotImplementedError for a setting of the runner that the backend does not support."""
    model, parallel = runner.model_config, get_parallel()
    for name, value, accepted in (
        ("--speculative-algorithm", get_spec().speculative_algorithm, None),
        ("--dllm-algorithm", get_exec().dllm.dllm_algorithm, None),
        ("--dcp-size", parallel.attn_dcp_size, 1),
        ("--attn-cp-size", parallel.attn_cp_size, 1),
        ("--enable-unified-memory", runner.kv_index_translator.is_translating, False),
        ("model_config.is_encoder_decoder", model.is_encoder_decoder, False),
        ("model_config.is_local_attention_model", model.is_local_attention_model, False),
    ):
        if value != accepted:
            refuse(name, value, repr(accepted), f"leave it at {accepted!r}, or {ANOTHER_BACKEND}")
    if runner.kv_cache_dtype_str not in _CACHE_DTYPES:
        refuse("--kv-cache-dtype", runner.kv_cache_dtype_str, ", ".join(_CACHE_DTYPES), "pass one of these")
    if runner.use_mla_backend and runner.kv_cache_dtype in FP8_CACHES.values():
        refuse(
            "--kv-cache-dtype", runner.kv_cache_dtype_str, "16 bits with latent attention (MLA)", "pass --kv-cache-dtype bfloat16"
        )
