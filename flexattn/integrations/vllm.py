"""flexattn as an attention backend of vLLM: `register`, which vLLM calls as a plugin, and the classes that it registers.

vLLM describes a batch by `CommonAttentionMetadata`, from which a builder makes the metadata of a backend, once for each step and
group of layers: https://docs.vllm.ai/en/latest/design/attention_backends. A layer then calls `forward` of its implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.functional import attention
from flexattn.integrations.engines import (
    ANOTHER_BACKEND,
    FP8_CACHES,
    WIDEST_FP8_HEAD,
    BatchOptions,
    Descales,
    batch_options,
    layer_options,
    refuse,
)

try:
    import vllm.envs as envs
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention import backend as base
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ImportError as error:
    raise ImportError(
        f"vLLM's attention cannot be imported: {error}; flexattn.integrations.vllm needs vllm 0.32 or later; pip install vllm"
    ) from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionBackend, AttentionLayer, CommonAttentionMetadata, MultipleOf
    from vllm.v1.kv_cache_interface import AttentionSpec

_DTYPES = [torch.float16, torch.bfloat16]


def register() -> None:
    """Registers `FlexattnBackend` as "FLEXATTN" and `FlexattnMlaBackend` as "FLEXATTN_MLA" in vLLM.

    It is an entry point of the group `vllm.general_plugins`, which vLLM calls in each process. A second call has no effect.
    """
    for backend in (FlexattnBackend, FlexattnMlaBackend):
        name = backend.get_name()
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{backend.__module__}.{backend.__qualname__}")
            # A process that is spawned unpickles its configuration before it loads plugins.
            AttentionBackendEnum[name].__reduce_ex__ = lambda _, name=name: (_registered, (name,))


def _registered(name: str) -> AttentionBackendEnum:
    register()
    return AttentionBackendEnum[name]


class _Places(TypedDict):
    """The arguments of `append_kv` for a step."""

    page_table: Tensor
    seqused_kv: Tensor
    seqused_q: Tensor


@dataclass
class FlexattnMetadata(base.AttentionMetadata):  # type: ignore[misc]  # vLLM need not be installed, and has no type then
    """A step of a group of layers.

    Attributes:
        call: the arguments of `attention` for the step's queries and keys.
        slots: the arguments of `append_kv` for the places of new keys and values. Each token is a sequence of one row.
        tokens: rows of q, k and v. Rows after them are padding.
    """

    call: BatchOptions
    slots: _Places
    tokens: int


class FlexattnMetadataBuilder(base.AttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of a step's metadata.

    Nothing is read from the device. Tensors are vLLM's own or this builder's, and stay the same from step to step, so that a CUDA
    graph of any batch can be replayed.
    """

    _cudagraph_support: ClassVar[base.AttentionCGSupport] = base.AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self._slots = torch.zeros(3, most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlexattnMetadata:
        """Returns the metadata of a step. fast_build has no effect: the metadata takes few kernels.

        Raises:
            ValueError: if the queries are not causal, or if common_prefix_len is not 0.
        """
        x = common_attn_metadata
        if x.causal is not True:
            raise ValueError(f"common_attn_metadata.causal is {x.causal}; accepted: True; use another attention backend")
        if common_prefix_len:
            raise ValueError(f"common_prefix_len is {common_prefix_len}; accepted: 0, as vLLM passes it")
        call = batch_options(x.query_start_loc, x.max_query_len, x.seq_lens, x.block_table_tensor)
        return FlexattnMetadata(call, self._places(x.slot_mapping[: x.num_actual_tokens]), x.num_actual_tokens)

    def _places(self, slots: Tensor) -> _Places:
        """Returns the page and the row of each slot. Slots below 0 are of tokens that are not stored."""
        if len(slots) > self._slots.shape[1]:
            raise ValueError(
                f"slot_mapping has {len(slots)} tokens; accepted: {self._slots.shape[1]}; raise max_num_batched_tokens"
            )
        pages, rows, counts = self._slots[:, : len(slots)]
        size = self.kv_cache_spec.block_size
        torch.div(slots, size, rounding_mode="floor", out=pages)
        torch.remainder(slots, size, out=rows)
        torch.ge(slots, 0, out=counts)
        return {"page_table": pages[:, None], "seqused_kv": rows, "seqused_q": counts}


class _Backend:
    """Answers that both backends share."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[MultipleOf]:
        """Returns the page sizes that the kernels for sm_90 read fast."""
        return [base.MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Returns whether flexattn has kernels for a GPU."""
        return bool(capability.to_int() >= 80)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns True: VLLM_BATCH_INVARIANT=1 sets `batch_invariant`, for latent attention of the sequences that decode."""
        return True


class FlexattnBackend(_Backend, base.AttentionBackend):  # type: ignore[misc]
    """Attention with keys and values of the same heads: `--attention-backend FLEXATTN`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*_DTYPES, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        """Returns the name by which users choose the backend."""
        return "FLEXATTN"

    @staticmethod
    def get_impl_cls() -> type[FlexattnImpl]:
        """Returns the class that runs a layer."""
        return FlexattnImpl

    @staticmethod
    def get_builder_cls() -> type[FlexattnMetadataBuilder]:
        """Returns the class that makes the metadata of a step."""
        return FlexattnMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether a head dim is supported."""
        return head_size % 8 == 0 and head_size <= 512

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: object) -> str | None:
        """Returns why a layer cannot run, or None."""
        is_wide = head_size > WIDEST_FP8_HEAD and kv_cache_dtype in FP8_CACHES
        return f"an FP8 cache with head_size above {WIDEST_FP8_HEAD} not supported" if is_wide else None

    supports_sink = supports_sliding_window = supports_per_head_quant_scales = classmethod(lambda cls: True)


class FlexattnImpl(base.AttentionImpl):  # type: ignore[misc]
    """Attention of one layer: appends new keys and values to the pages, and attends to the pages.

    The arguments are vLLM's. sinks are [num_heads], in any floating dtype.

    Raises:
        NotImplementedError: if attn_type is not "decoder", or kv_cache_dtype is not one of the backend's.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = base.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        _check_decoder(attn_type, kv_cache_dtype, FlexattnBackend)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._sinks = sinks
        self._slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=torch.get_default_device())
        )
        keys_before = None if sliding_window is None else sliding_window - 1
        self._options = layer_options(scale, logits_soft_cap, keys_before, bool(envs.VLLM_BATCH_INVARIANT))

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlexattnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Returns output, into which out is written.

        Args:
            layer: vLLM's layer, with the scales of an FP8 cache: float32 [] or [h_kv].
            query: [tokens, h, d].
            key, value: [tokens, h_kv, d] and [tokens, h_kv, d_v], or None if the cache has them already.
            kv_cache: [pages, h_kv, page_size, d + d_v], in any strides with a contiguous last dim.
            attn_metadata: of `FlexattnMetadataBuilder`. None: vLLM measures memory, and output is filled with 0.
            output: [tokens, h, d_v].

        Raises:
            NotImplementedError: if output_scale or output_block_scale is given.
        """
        for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scale is not None:
                refuse(name, "a tensor", "None", "disable fuse_attn_quant in vLLM's pass_config")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.tokens
        descales: Descales = {}
        if self.kv_cache_dtype in FP8_CACHES:
            kv_cache = kv_cache.view(FP8_CACHES[self.kv_cache_dtype])
            descales = {"descale_k": layer._k_scale, "descale_v": layer._v_scale}
        pages = kv_cache.transpose(1, 2)
        pages_k, pages_v = pages[..., : self.head_size], pages[..., self.head_size :]
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            append_kv(pages_k, pages_v, key[:tokens, None], value[:tokens, None], **attn_metadata.slots, **descales)
        attention(
            query[:tokens],
            pages_k,
            pages_v,
            out=output[:tokens],
            softmax_offset=self._sinks,
            alibi_slopes=self._slopes,
            **attn_metadata.call,
            **self._options,
            **descales,
        )
        return output


def _check_decoder(attn_type: str, kv_cache_dtype: str, backend: type[AttentionBackend]) -> None:
    if attn_type != base.AttentionType.DECODER:
        refuse("attn_type", attn_type, "'decoder'", ANOTHER_BACKEND)
    if kv_cache_dtype not in backend.supported_kv_cache_dtypes:
        refuse("kv_cache_dtype", kv_cache_dtype, ", ".join(backend.supported_kv_cache_dtypes), "pass one of these")


@dataclass
class FlexattnMlaDecode(MLACommonDecodeMetadata):  # type: ignore[misc]
    """Sequences that decode, with the bounds of their queries and the most queries of a sequence."""

    cu_seqlens_q: Tensor
    max_seqlen_q: int


class FlexattnMlaMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder for latent attention. A sequence that decodes may have several queries, and another number than the next."""

    _cudagraph_support: ClassVar[base.AttentionCGSupport] = base.AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def _build_decode(self, query_start_loc_device: Tensor, max_query_len: int, **step: object) -> FlexattnMlaDecode:
        lengths = super()._build_decode(query_start_loc_device=query_start_loc_device, max_query_len=max_query_len, **step)
        return FlexattnMlaDecode(**vars(lengths), cu_seqlens_q=query_start_loc_device, max_seqlen_q=max_query_len)


class FlexattnMlaBackend(_Backend, MLACommonBackend):  # type: ignore[misc]
    """Absorbed latent attention (MLA): `--attention-backend FLEXATTN_MLA`.

    It runs the sequences that decode. vLLM's MLA prefill backend runs prompts, and vLLM writes the cache.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = _DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Returns the name by which users choose the backend."""
        return "FLEXATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlexattnMlaImpl]:
        """Returns the class that runs a layer."""
        return FlexattnMlaImpl

    @staticmethod
    def get_builder_cls() -> type[FlexattnMlaMetadataBuilder]:
        """Returns the class that makes the metadata of a step."""
        return FlexattnMlaMetadataBuilder


class FlexattnMlaImpl(MLACommonImpl):  # type: ignore[misc]
    """Latent attention of one layer. The arguments are vLLM's.

    Raises:
        NotImplementedError: if attn_type is not "decoder", if the cache is in FP8, or if alibi_slopes or a sliding_window is given.
    """

    def __init__(
        self,
        *,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        **sizes: object,
    ) -> None:
        _check_decoder(attn_type, kv_cache_dtype, FlexattnMlaBackend)
        options = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window}
        for name, value in options.items():
            if value is not None:
                refuse(name, value, "None with latent attention", ANOTHER_BACKEND)
        super().__init__(**options, kv_cache_dtype=kv_cache_dtype, logits_soft_cap=logits_soft_cap, attn_type=attn_type, **sizes)
        self.supports_quant_query_input = False
        self._options = layer_options(self.scale, logits_soft_cap, None, bool(envs.VLLM_BATCH_INVARIANT))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, None]:
        """Returns out [tokens, h, kv_lora_rank] of the sequences that decode, and None in place of lse.

        Args:
            q: [tokens, h, kv_lora_rank + rope], or its two parts.
            kv_c_and_k_pe_cache: [pages, page_size, kv_lora_rank + rope].
            attn_metadata: of `FlexattnMlaMetadataBuilder`.
            layer: vLLM's layer, which is not read: the cache has no scales.
        """
        latents = kv_c_and_k_pe_cache.unsqueeze(2)
        decode = attn_metadata.decode
        call = batch_options(decode.cu_seqlens_q, decode.max_seqlen_q, decode.seq_lens, decode.block_table)
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return attention(queries, latents, latents[..., : self.kv_lora_rank], **call, **self._options), None
