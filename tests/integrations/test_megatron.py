"""`flexattn.integrations.megatron` beside Megatron-Core's own attention: calls, specs, checkpoints and training of a small GPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention as OwnAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from flexattn.integrations.megatron import DotProductAttention, with_flexattn
from flexattn.integrations.te import context_parallel, dot_product_attention
from tests.conftest import FreshPython
from tests.support.megatron_models import build, causal_mask, config_of, losses, packed_of, run_on_a_cpu, start
from tests.support.ranks import run_ranks

S, B, H, H_KV, D = 12, 2, 4, 2, 8
LENGTHS = (5, 11, 8)


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        run_on_a_cpu(patch)
        start()
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _inputs(d_v: int = D) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, B, H, D), (S, B, H_KV, D), (S, B, H_KV, d_v))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _module(kind: Any, mask_type: str = "causal", **options: Any) -> torch.nn.Module:
    layer = {name: options.pop(name) for name in ("k_channels", "v_channels", "softmax_scale") if name in options}
    module: torch.nn.Module = kind(config_of(**options), 1, AttnMaskType[mask_type], "self", **layer).cpu()
    if getattr(module, "softmax_offset", None) is not None and options["softmax_type"] == "learnable":
        torch.nn.init.normal_(module.softmax_offset, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    return module


def _results(module: torch.nn.Module, mask: Tensor | None, **call: Any) -> list[Tensor]:
    leaves = _inputs()
    out = module(*leaves, mask, **call)
    leaves += list(module.parameters())
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


HIDDEN = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) > 0.7
HIDDEN[..., 0] = False  # Megatron's own attention gives a query that sees no key the mean of all values
KEYS = torch.arange(S).expand(B, S)[:, None, None] >= torch.tensor([9, S]).view(B, 1, 1, 1)
DISTANCE = torch.arange(S)[:, None] - torch.arange(S)

CALLS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "causal": ({"attn_mask_type": "causal"}, causal_mask(S)),
    "scale": ({"attn_mask_type": "causal", "softmax_scale": 0.7}, causal_mask(S)),
    "layer scaling": ({"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, causal_mask(S)),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, HIDDEN),
    "a mask with no_mask": ({"attn_mask_type": "no_mask"}, HIDDEN),
    "padding": ({"attn_mask_type": "padding"}, KEYS),
    "padding before tokens": ({"attn_mask_type": "padding"}, KEYS.flip(-1)),
    "off-by-one": ({"softmax_type": "off-by-one"}, causal_mask(S)),
    "learnable": ({"softmax_type": "learnable"}, causal_mask(S)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_equals_megatrons(name: str) -> None:
    options, mask = CALLS[name]
    mask_type = options.get("attn_mask_type", "causal")
    options = {key: value for key, value in options.items() if key != "attn_mask_type"}
    found, own = (
        _results(_module(kind, mask_type, **options), mask, attn_mask_type=AttnMaskType[mask_type])
        for kind in (DotProductAttention, OwnAttention)
    )
    for x, y in zip(found, own, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=0)


def test_a_window_of_a_layer() -> None:
    options = {"window_size": (3, 0), "window_attn_skip_freq": 2}
    hidden = ((DISTANCE < 0) | (DISTANCE > 3))[None, None]
    for layer, mask in ((1, hidden), (2, causal_mask(S))):
        module = DotProductAttention(config_of(**options), layer, AttnMaskType.causal, "self")
        found, own = _results(module, None), _results(_module(OwnAttention), mask)
        torch.testing.assert_close(found, own, atol=2e-5, rtol=0)
    q, k, v = _inputs()
    one = DotProductAttention(config_of(**options), 1, AttnMaskType.causal, "self")(q[-1:], k, v, None, AttnMaskType.no_mask)
    torch.testing.assert_close(one, _results(_module(OwnAttention), hidden)[0][-1:], atol=2e-5, rtol=0)


def test_a_bias_and_head_dims_of_their_own() -> None:
    q, k, v = _inputs(d_v=12)
    bias = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(1), requires_grad=True)
    module = _module(DotProductAttention, k_channels=D, v_channels=12)
    out = module(q, k, v, None, attention_bias=bias)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(2, 2)) / D**0.5 + bias
    weights = scores.masked_fill(causal_mask(S), -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, v.repeat_interleave(2, 2)).flatten(2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    found, gradient = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, expected))
    torch.testing.assert_close(found, gradient, atol=1e-4, rtol=0)


def test_packed_sequences_with_padding_between_them() -> None:
    q, k, v = (x.detach()[:, 0] for x in _inputs())
    ends, padded = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32)
    params = PackedSeqParams("thd", ends, ends, padded, padded, 5, 5)
    out = _module(DotProductAttention)(q, k, v, None, AttnMaskType.causal, packed_seq_params=params)
    for start_, length in ((0, 3), (4, 5)):
        part = slice(start_, start_ + length)
        alone = _module(OwnAttention)(q[part, None], k[part, None], v[part, None], causal_mask(length))
        torch.testing.assert_close(out[part], alone[:, 0], atol=1e-5, rtol=0)


def test_the_largest_logits_are_kept_for_qk_clip() -> None:
    module, largest = _module(DotProductAttention, qk_clip=True), []
    for factor in (1.0, 3.0, 2.0):
        q, k, v = (x * factor for x in _inputs())
        assert module(q, k, v, None).shape == (S, B, H * D)
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(2, 2)) / D**0.5
        largest.append(scores.masked_fill(causal_mask(S), -torch.inf).amax((0, 2, 3)))
    torch.testing.assert_close(module.current_max_attn_logits, torch.stack(largest).amax(0).detach())


def test_dropout_uses_megatrons_tracker() -> None:
    module = _module(DotProductAttention, attention_dropout=0.5)
    before = torch.get_rng_state()
    first, second = (module(*_inputs(), None) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(module.eval()(*_inputs(), None), _module(DotProductAttention)(*_inputs(), None))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ({"attention_mask": HIDDEN}, ValueError, "attn_mask_type .arbitrary. with a mask"),
        ({"attention_mask": KEYS}, ValueError, "hides keys that attn_mask_type .causal_bottom_right. shows"),
        ({"attention_mask": causal_mask(S), "packed_seq_params": packed_of((5, 7))}, ValueError, "in thd; accepted: None"),
        ({"packed_seq_params": PackedSeqParams(local_cp_size=2)}, ValueError, "local_cp_size is 2 without a cp_group"),
        ({"rotary_pos_emb": None}, TypeError, "rotary_pos_emb"),
    ],
)
def test_wrong_arguments(call: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _module(DotProductAttention)(*_inputs(), **{"attention_mask": None} | call)


def test_a_mask_of_a_rank_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = _module(DotProductAttention), _inputs()
    module._ranks = context_parallel.Ranks(dist.group.WORLD, None, "p2p", 2)
    monkeypatch.setattr(context_parallel, "attend", lambda ranks, arguments, q, k, v: (q, None))
    mask = torch.ones(1, 1, S, 2 * S).bool()  # as Megatron cuts it: this rank's queries and all keys
    assert module(*inputs, mask) is inputs[0]


def test_an_unknown_field_of_packed_sequences() -> None:
    params = dataclasses.make_dataclass("Newer", [("new_field", Any, 3)], bases=(PackedSeqParams,))()
    with pytest.raises(TypeError, match=r"packed_seq_params\.new_field is set"):
        _module(DotProductAttention)(*_inputs(), None, packed_seq_params=params)


@pytest.mark.parametrize("name", ["fp8_dot_product_attention", "fp8_multi_head_attention", "batch_invariant_mode"])
def test_unsupported_settings(name: str) -> None:
    config = config_of()
    setattr(config, name, True)
    with pytest.raises(NotImplementedError, match=rf"config\.{name} is True; accepted: False"):
        DotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_deterministic_mode() -> None:
    config = config_of()
    config.deterministic_mode = True
    assert DotProductAttention(config, 1, AttnMaskType.causal, "self").deterministic


@pytest.mark.parametrize(("name", "backend"), [("auto", None), ("flash", None), ("local", None), ("unfused", "eager")])
def test_the_backend_that_a_configuration_names(name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FLASH", "FUSED", "UNFUSED"):  # as Megatron sets them for each but auto
        monkeypatch.setenv(f"NVTE_{variable}_ATTN", str(int(name == variable.lower())))
    seen: list[Any] = []
    monkeypatch.setattr(dot_product_attention, "attend", lambda _, q, *__, **options: seen.append(options) or (q, None, None))
    _module(DotProductAttention, attention_backend=AttnBackend[name])(*_inputs(), None)
    assert seen[0]["backend"] == backend


def test_specs_of_layers_and_blocks() -> None:
    layer = get_gpt_layer_local_spec()
    own = layer.submodules.self_attention.submodules.core_attention
    changed = with_flexattn(layer)
    assert changed.submodules.self_attention.submodules.core_attention is DotProductAttention
    assert layer.submodules.self_attention.submodules.core_attention is own is OwnAttention
    assert changed.submodules.mlp is layer.submodules.mlp
    block = with_flexattn(get_gpt_decoder_block_spec(config_of(), use_transformer_engine=False))
    found = [spec.submodules.self_attention.submodules.core_attention for spec in block.layer_specs]
    assert found == [DotProductAttention] * 2
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(OwnAttention)
    spec = with_flexattn(layer).submodules.self_attention.submodules.core_attention
    assert spec == ModuleSpec(DotProductAttention)


def test_a_spec_without_attention() -> None:
    with pytest.raises(ValueError, match="without a core_attention"):
        with_flexattn(get_gpt_layer_local_spec().submodules.mlp)


def test_state_dicts_have_megatrons_names() -> None:
    own, found = (_module(kind, softmax_type="learnable") for kind in (OwnAttention, DotProductAttention))
    assert own.state_dict().keys() == found.state_dict().keys() == {"softmax_offset"}
    found.load_state_dict(own.state_dict())
    found.load_state_dict(own.state_dict() | {"_extra_state": torch.zeros(0)})  # TransformerEngine's
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = found.sharded_state_dict("x.", metadata=metadata)  # type: ignore[operator]
    assert sharded.keys() == {"x.softmax_offset"}
    assert _module(DotProductAttention).sharded_state_dict("x.", metadata=metadata) == {}  # type: ignore[operator]


@pytest.mark.slow
def test_training_has_the_losses_of_megatrons_attention() -> None:
    own = losses(build(config_of()), (16,), batch=2)
    found = losses(build(config_of(), with_flexattn(get_gpt_layer_local_spec())), (16,), batch=2)
    assert own[-1] < own[0] - 0.1
    torch.testing.assert_close(found, own, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_training_on_packed_documents_has_the_losses_of_each_by_itself() -> None:
    own = losses(build(config_of()), LENGTHS)
    found = losses(build(config_of(), with_flexattn(get_gpt_layer_local_spec())), LENGTHS, is_packed=True)
    torch.testing.assert_close(found, own, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_recomputed_attention_has_the_same_losses() -> None:
    spec = with_flexattn(get_gpt_layer_local_spec())
    options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    found = losses(build(config_of(**options), spec), (16,))
    torch.testing.assert_close(found, losses(build(config_of(), spec), (16,)), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_model_with_latent_attention_trains() -> None:
    spec = with_flexattn(get_gpt_layer_local_spec(multi_latent_attention=True))
    try:
        model = build(config_of(is_mla=True), spec)
    except TypeError as error:
        pytest.skip(f"this version of Megatron-Core has no latent attention without TransformerEngine: {error}")
    found = losses(model, (16,))
    assert found[-1] < found[0] - 0.1


@pytest.mark.slow
def test_ranks_equal_one_process(fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, "all", 2, module="tests.support.megatron_ranks")
