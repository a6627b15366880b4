"""`flexattn.integrations.sglang`: SGLang's pools, batches and layers beside fp64 arithmetic and SGLang's own backend for torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="needs sglang")
pytest.importorskip("flexattn.integrations.sglang", reason="needs what SGLang's attention imports", exc_type=ImportError)

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec, publish
from sglang.srt.server_args import ServerArgs

from flexattn.integrations import sglang as door
from flexattn.integrations.sglang import FlexattnAttnBackend
from tests.integrations.engine_reference import BATCHES, COLUMNS, PAGES, Expected, page_tables, random_rows

HEADS, HEADS_KV, D = 4, 2, 32
SLOTS = PAGES * 16
RANK, ROPE = 512, 64
SCALE = D**-0.5
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives SGLang's process the settings of a small model."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    publish(ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native"), role="scheduler")


def _window_pool(page_size: int, dtype: torch.dtype) -> SWAKVPool:
    """Returns a pool whose layer 1 has a window. Its pages are those of layer 0 in reverse order, but page 0."""
    sizes: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "head_num": HEADS_KV, "head_dim": D, "device": "cpu"}
    pool = SWAKVPool(SLOTS - page_size, SLOTS - page_size, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], **sizes)
    slots = torch.arange(SLOTS).view(-1, page_size)
    pool.full_to_swa_index_mapping = torch.cat((slots[:1], slots[1:].flip(0))).flatten()
    return pool


class Step:
    """A batch in SGLang's objects. runner: attributes of the runner that differ from the usual ones."""

    def __init__(
        self,
        batch: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        pool: Any = None,
        window: int = -1,
        layer_id: int = 0,
        **runner: Any,
    ) -> None:
        self.page_size = page_size
        if pool is None:
            pool = MHATokenToKVPool(SLOTS - page_size, page_size, dtype, HEADS_KV, D, 1, "cpu", False)
        before, new = (torch.tensor(x) for x in zip(*batch, strict=True))
        table = page_tables(len(batch), COLUMNS * 16 // page_size, SLOTS // page_size)
        tokens = (table[..., None] * page_size + torch.arange(page_size)).flatten(1)
        requests = ReqToTokenPool(8, COLUMNS * 16, "cpu", False)
        self.requests = torch.arange(len(batch)) * 2 + 1
        requests.req_to_token[self.requests, : tokens.shape[1]] = tokens.int()
        self.slots = torch.cat([tokens[i, b : b + n] for i, (b, n) in enumerate(batch)])
        self.pool, self.before, self.new = pool, before, new
        model = SimpleNamespace(
            context_len=COLUMNS * 16, kv_lora_rank=RANK, is_encoder_decoder=False, is_local_attention_model=False
        )
        usual = {"kv_cache_dtype_str": "auto", "kv_cache_dtype": pool.dtype, "use_mla_backend": False, "model_config": model}
        pools = {
            "req_to_token_pool": requests,
            "token_to_kv_pool": pool,
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }
        self.runner = SimpleNamespace(**(usual | pools | {"device": "cpu", "page_size": page_size} | runner))
        self.layer = RadixAttention(HEADS, D, SCALE, HEADS_KV, layer_id, sliding_window_size=window)
        is_decode = max(n for _, n in batch) == 1
        mode = ForwardMode.DECODE if is_decode else ForwardMode.MIXED if min(n for _, n in batch) == 1 else ForwardMode.EXTEND
        self.batch = self._forward_batch(mode)
        self.expected = Expected(torch.nn.functional.pad(new.cumsum(0), (1, 0)), before + new, table)

    def _forward_batch(self, mode: ForwardMode) -> ForwardBatch:
        lengths = self.before + self.new
        extend = {
            "extend_seq_lens": self.new.int(),
            "extend_seq_lens_cpu": self.new.tolist(),
            "extend_prefix_lens": self.before.int(),
            "extend_prefix_lens_cpu": self.before.tolist(),
        }
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(len(self.slots), dtype=torch.int64),
            positions=torch.zeros(len(self.slots), dtype=torch.int64),
            req_pool_indices=self.requests,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=self.slots.long(),
            **({} if mode == ForwardMode.DECODE else extend),
        )

    def expect_window_pool(self) -> None:
        """Makes slots and the expected page table those of the pool for windows."""
        mapping = self.pool.full_to_swa_index_mapping
        self.slots = mapping[self.slots]
        self.expected.page_table = mapping[self.expected.page_table * self.page_size] // self.page_size

    def fill(self, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns k and v of the pool, with random values."""
        buffers: tuple[Tensor, Tensor] = self.pool.get_kv_buffer(self.layer.layer_id)
        generator = torch.Generator().manual_seed(1)
        for buffer in buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * factor)
        return buffers

    def pages(self, buffers: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns k and v after the step, [pages, page_size, h_kv, d], written token by token."""
        k, v = (buffer.clone() for buffer in buffers)
        for slot, token_k, token_v in zip(self.slots.tolist(), *new, strict=True):
            k[slot], v[slot] = token_k, token_v
        return k.unflatten(0, (-1, self.page_size)), v.unflatten(0, (-1, self.page_size))


def _call(backend: Any, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None, **arguments: Any) -> Tensor:
    """Returns out [tokens, h, d_v] by the call of a layer. k and v are copied, because SGLang divides them in place."""
    k, v = (None if x is None else x.clone() for x in (k, v))
    with torch.inference_mode():
        out: Tensor = backend.forward(q.flatten(1), k, v, step.layer, step.batch, **arguments)
    return out.view(len(q), HEADS, -1)


def _run(backend: Any, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None, **arguments: Any) -> Tensor:
    backend.init_forward_metadata(step.batch)
    return _call(backend, step, q, k, v, **arguments)


def _new(step: Step, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_rows(len(step.slots), (HEADS, HEADS_KV, HEADS_KV), D, dtype)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_appends_and_attends(batch: str, page_size: int) -> None:
    step = Step(BATCHES[batch], page_size=page_size)
    buffers = step.fill()
    q, k, v = _new(step)
    pages = step.pages(buffers, (k, v))
    out = _run(FlexattnAttnBackend(step.runner), step, q, k, v)
    for buffer, page in zip(buffers, pages, strict=True):
        assert torch.equal(buffer, page.flatten(0, 1))
    step.expected.check(out, q, pages, SCALE)
    torch.testing.assert_close(out, _run(TorchNativeAttnBackend(step.runner), step, q, k, v))


@pytest.mark.parametrize("options", [{"window": 7}, {"sinks": SINKS}, {"window": 20, "softcap": 2.0, "sinks": SINKS.bfloat16()}])
def test_options_of_a_layer(options: dict[str, Any]) -> None:
    window, sinks, softcap = (options.get(name) for name in ("window", "sinks", "softcap"))
    step = Step(BATCHES["mixed"], torch.bfloat16, window=-1 if window is None else window)
    step.layer.logit_cap = softcap or 0.0
    buffers = step.fill()
    q, k, v = _new(step, torch.bfloat16)
    pages = step.pages(buffers, (k, v))
    out = _run(FlexattnAttnBackend(step.runner), step, q, k, v, **({} if sinks is None else {"sinks": sinks}))
    step.expected.check(out, q, pages, SCALE, keys_before=window, sinks=sinks, softcap=softcap or 0.0)
    if options.keys() == {"window"}:
        native = _run(TorchNativeAttnBackend(step.runner), step, q, k, v)
        torch.testing.assert_close(out, native, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("layer_id", [0, 1])
def test_layers_with_a_window_have_a_pool_of_their_own(layer_id: int, batch: str) -> None:
    pool = _window_pool(4, torch.float32)
    step = Step(BATCHES[batch], page_size=4, pool=pool, window=11 if layer_id else -1, layer_id=layer_id)
    backend = FlexattnAttnBackend(step.runner)
    if layer_id:
        step.expect_window_pool()
    buffers = step.fill()
    q, k, v = _new(step)
    pages = step.pages(buffers, (k, v))
    out = _run(backend, step, q, k, v)
    for buffer, page in zip(buffers, pages, strict=True):
        assert torch.equal(buffer, page.flatten(0, 1))
    step.expected.check(out, q, pages, SCALE, keys_before=11 if layer_id else None)


@pytest.mark.parametrize("scales", [None, (0.02, 0.01)])
@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_a_cache_in_fp8_is_scaled(name: str, dtype: torch.dtype, scales: tuple[float, float] | None) -> None:
    step = Step(BATCHES["mixed"], dtype, kv_cache_dtype_str=name)
    by_k, by_v = scales or (1.0, 1.0)
    buffers = step.fill(1 / by_k)
    if scales:
        step.layer.k_scale, step.layer.v_scale = torch.tensor(by_k), torch.tensor(by_v)
    q, k, v = _new(step, torch.bfloat16)
    quantised = step.pages(buffers, ((k / by_k).to(dtype), (v / by_v).to(dtype)))
    out = _run(FlexattnAttnBackend(step.runner), step, q, k, v)
    for buffer, page in zip(step.pool.get_kv_buffer(0), quantised, strict=True):
        assert torch.equal(buffer.view(torch.uint8), page.flatten(0, 1).view(torch.uint8))
    step.expected.check(out, q, (quantised[0].float() * by_k, quantised[1].float() * by_v), SCALE)


def _latent_step(batch: Sequence[tuple[int, int]]) -> Step:
    pool = MLATokenToKVPool(SLOTS - 16, 16, torch.bfloat16, RANK, ROPE, 1, "cpu", False)
    step = Step(batch, pool=pool, use_mla_backend=True)
    step.layer = RadixAttention(HEADS, RANK + ROPE, 192**-0.5, 1, 0, v_head_dim=RANK)
    return step


@pytest.mark.parametrize("batch", ["decode", "chunked prefill"])
def test_latent_attention_reads_its_pool(batch: str) -> None:
    step = _latent_step(BATCHES[batch])
    latents, _ = step.fill()
    q, k = random_rows(len(step.slots), (HEADS, 1), RANK + ROPE, torch.bfloat16)
    pages, _ = step.pages((latents, latents), (k, k))
    out = _run(FlexattnAttnBackend(step.runner), step, q, k, k[..., :RANK])
    assert torch.equal(latents, pages.flatten(0, 1))
    step.expected.check(out, q, (pages, pages[..., :RANK]), 192**-0.5)


def test_prompts_of_latent_attention_attend_to_their_own_keys() -> None:
    step = _latent_step(BATCHES["prefill"])
    step.layer = RadixAttention(HEADS, 48, SCALE, HEADS, 0, v_head_dim=D)
    q, k = random_rows(len(step.slots), (HEADS, HEADS), 48, torch.bfloat16)
    [v] = random_rows(len(step.slots), (HEADS,), D, torch.bfloat16)
    backend = FlexattnAttnBackend(step.runner)
    out = _run(backend, step, q, k, v, save_kv_cache=False)
    empty = [torch.zeros(SLOTS, *x.shape[1:], dtype=x.dtype) for x in (k, v)]
    step.expected.check(out, q, step.pages(empty, (k, v)), SCALE)
    step.batch.extend_prefix_lens_cpu = [0, 3]
    with pytest.raises(NotImplementedError, match="extend_prefix_lens"):
        _run(backend, step, q, k, v, save_kv_cache=False)


def test_a_graph_of_decoding_batches_keeps_its_memory() -> None:
    """SGLang pads a batch by sequences of one token, in page 0."""
    pool = _window_pool(4, torch.float32)
    steps = [
        Step(batch, page_size=4, pool=pool, window=11, layer_id=1) for batch in ([(0, 1), (41, 1), (15, 1)], [(7, 1), (30, 1)])
    ]
    backend = FlexattnAttnBackend(steps[0].runner)
    backend.init_cuda_graph_state(4, 4)
    addresses = []
    for step in steps:
        backend.req_to_token_pool = step.runner.req_to_token_pool
        live, batch = len(step.slots), step.batch
        batch.batch_size = 3
        for name, padding in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
            setattr(batch, name, torch.nn.functional.pad(getattr(batch, name), (0, 3 - live), value=padding))
        step.expect_window_pool()
        buffers = step.fill()
        q, k, v = random_rows(3, (HEADS, HEADS_KV, HEADS_KV), D, torch.float32)
        pages = step.pages(buffers, (k[:live], v[:live]))
        backend.init_forward_metadata_out_graph(batch, in_capture=step is steps[0])
        step.expected.check(_call(backend, step, q, k, v)[:live], q[:live], pages, SCALE, keys_before=11)
        metadata = backend.forward_metadata
        assert metadata is not None
        assert metadata.window_slots is not None
        kept = [*(x for x in metadata.window_call.values() if isinstance(x, Tensor)), metadata.window_slots]
        addresses.append([x.data_ptr() for x in kept])
    assert addresses[0] == addresses[1]
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_a_graph_of_prompts_serves_every_division_of_its_tokens() -> None:
    pool = _window_pool(16, torch.float32)
    steps = [Step(batch, pool=pool, window=11, layer_id=1) for batch in ([(0, 9), (0, 37)], [(20, 30), (16, 6)])]
    backend = FlexattnAttnBackend(steps[0].runner)
    addresses = []
    for step in steps:
        backend.req_to_token_pool = step.runner.req_to_token_pool
        step.expect_window_pool()
        buffers = step.fill()
        q, k, v = _new(step)
        pages = step.pages(buffers, (k, v))
        backend.init_forward_metadata_out_graph(step.batch, in_capture=step is steps[0])
        step.expected.check(_call(backend, step, q, k, v), q, pages, SCALE, keys_before=11)
        metadata, memory = backend.forward_metadata, backend._extend_memory
        assert metadata is not None
        assert memory is not None
        assert metadata.call["max_seqlen_q"] == len(q)
        assert memory.window_slots[len(q) :].count_nonzero() == 0, "a graph writes padding into a slot"
        addresses.append([x.data_ptr() for x in metadata.call.values() if isinstance(x, Tensor)])
    assert addresses[0] == addresses[1]


def test_a_layer_that_shares_its_cache_writes_nothing_and_out_may_be_given() -> None:
    step = Step(BATCHES["decode"])
    buffers = step.fill()
    pages = step.pages(buffers, [buffer[step.slots] for buffer in buffers])
    q, k, v = _new(step)
    step.batch._attn_output = torch.full((len(q), HEADS * D), float("nan"))
    for rows_k, rows_v, saves in ((k, v, False), (None, None, True)):
        out = _run(FlexattnAttnBackend(step.runner), step, q, rows_k, rows_v, save_kv_cache=saves)
        assert out.data_ptr() == step.batch._attn_output.data_ptr()
        assert all(torch.equal(buffer, page.flatten(0, 1)) for buffer, page in zip(buffers, pages, strict=True))
        step.expected.check(out, q, pages, SCALE)


def test_the_name_is_registered_once_for_every_setting() -> None:
    door.register()
    door.register()
    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert names.count("flexattn") == 1
    step = Step(BATCHES["decode"])
    backend = ATTENTION_BACKENDS["flexattn"](step.runner)
    assert isinstance(backend, FlexattnAttnBackend)
    assert not backend.support_triton()
    assert not backend._options(step.layer)["batch_invariant"]
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=step.batch):  # as models find the pools
        assert get_token_to_kv_pool() is step.pool
        assert get_req_to_token_pool() is step.runner.req_to_token_pool
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        assert FlexattnAttnBackend(step.runner)._options(step.layer)["batch_invariant"]


def _check_refused(text: str, **runner: Any) -> None:
    step = Step(BATCHES["decode"], **runner)
    with pytest.raises(NotImplementedError, match=text):
        FlexattnAttnBackend(step.runner)


def test_errors_name_a_setting() -> None:
    model = Step(BATCHES["decode"]).runner.model_config
    for name in ("is_encoder_decoder", "is_local_attention_model"):
        changed = SimpleNamespace(**(vars(model) | {name: True}))
        _check_refused(f"model_config.{name} is True; accepted: False", model_config=changed)
    _check_refused("--enable-unified-memory is True", kv_index_translator=SimpleNamespace(is_translating=True))
    _check_refused("--kv-cache-dtype is 'mxfp8'; accepted: auto", kv_cache_dtype_str="mxfp8")
    _check_refused("16 bits with latent attention", dtype=torch.float8_e4m3fn, use_mla_backend=True)
    with get_spec().override(speculative_algorithm="EAGLE"):
        _check_refused("--speculative-algorithm is 'EAGLE'; accepted: None")
    with get_parallel().override(attn_dcp_size=2):
        _check_refused("--dcp-size is 2; accepted: 1")
    with get_parallel().override(tp_size=2, attn_tp_size=1, attn_cp_size=2, moe_tp_size=2):
        _check_refused("--attn-cp-size is 2; accepted: 1")
    with get_exec().dllm.override(dllm_algorithm="LowConfidence"):
        _check_refused("--dllm-algorithm is 'LowConfidence'; accepted: None")


def test_errors_name_an_argument_of_a_layer() -> None:
    step = Step(BATCHES["decode"])
    backend = FlexattnAttnBackend(step.runner)
    q, k, v = _new(step)
    for name, value in (
        ("is_cross_attention", True),
        ("attn_type", AttentionType.ENCODER_ONLY),
        ("pos_encoding_mode", "ROPE_LLAMA"),
        ("logit_capping_method", "sigmoid"),
        ("use_irope", True),
        ("xai_temperature_len", 64),
    ):
        layer = RadixAttention(HEADS, D, SCALE, HEADS_KV, 0)
        setattr(layer, name, value)
        with pytest.raises(NotImplementedError, match=f"{name} is .*; accepted: .*; use another attention backend"):
            backend._options(layer)
    for name, given in (("q_rope", q), ("rel_bias", q), ("return_lse", True)):
        with pytest.raises(NotImplementedError, match=f"{name} is '.*'; accepted: None"):
            _run(backend, step, q, k, v, **{name: given})
    fp8 = FlexattnAttnBackend(Step(BATCHES["decode"], torch.float8_e4m3fn, kv_cache_dtype_str="fp8_e4m3").runner)
    with pytest.raises(NotImplementedError, match="head_dim is 512; accepted: up to 256"):
        fp8._options(RadixAttention(HEADS, 512, SCALE, HEADS_KV, 0))


def test_errors_name_the_order_of_calls_and_the_mode() -> None:
    step = Step(BATCHES["decode"])
    backend = FlexattnAttnBackend(step.runner)
    q, k, v = _new(step)
    with pytest.raises(RuntimeError, match="init_forward_metadata has not been called"):
        backend.forward_decode(q, k, v, step.layer, step.batch)
    with pytest.raises(RuntimeError, match="replayed before init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(step.batch)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND):
        step.batch.forward_mode, step.batch.extend_seq_lens_cpu = mode, [1, 1, 1]
        with pytest.raises(NotImplementedError, match=f"forward_mode is '{mode.name}'; accepted: EXTEND, MIXED, DECODE"):
            backend.init_forward_metadata(step.batch)
