"""`flexattn.integrations.diffusers` beside diffusers' own attention: calls, tiny models and pipelines with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="needs diffusers")

import diffusers
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend, dispatch_attention_fn
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

from flexattn.integrations import diffusers as door
from flexattn.integrations.diffusers import AttnProcessor, register
from tests.conftest import FreshPython
from tests.support.ranks import run_ranks

B, S, SKV, H, D = 2, 10, 14, 4, 8
EXACT = {"atol": 1e-12, "rtol": 0.0}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    _AttentionBackendRegistry.set_active_backend("native")


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _results(backend: str, h_kv: int = H, **options: Any) -> list[Tensor]:
    """Returns out and all gradients of one call."""
    leaves = [_numbers(B, S, H, D), _numbers(B, SKV, h_kv, D, seed=1), _numbers(B, SKV, h_kv, D, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask = mask.clone().requires_grad_()
        leaves.append(mask)
    out = dispatch_attention_fn(*leaves[:3], backend=backend, **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def _assert_near(found: Tensor, expected: Tensor) -> None:
    """Compares results of models in float64, which round time embeddings and positions to float32."""
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)


KEYS = torch.arange(SKV) < torch.tensor([[9], [SKV]])


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "keys": {"attn_mask": KEYS},
    "float keys": {"attn_mask": torch.where(KEYS, 0.0, -1.5).double()},
    "4-d keys": {"attn_mask": KEYS[:, None, None]},
    "bias": {"attn_mask": _numbers(B, H, S, SKV, seed=3)},
    "2-d bias": {"attn_mask": _numbers(S, SKV, seed=3)},
    "4-d mask": {"attn_mask": _numbers(1, 1, S, SKV, seed=3) > -1},
    "grouped": {"h_kv": 2, "enable_gqa": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_equals_native(name: str) -> None:
    options = CALLS[name]
    for found, expected in zip(_results("flexattn", **options), _results("native", **options), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


def test_results_with_lse() -> None:
    q, k, v = _numbers(B, S, H, D), _numbers(B, SKV, H, D, seed=1), _numbers(B, SKV, H, D, seed=2)
    out, lse = dispatch_attention_fn(q, k, v, backend="flexattn", attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), **EXACT)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), **EXACT)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attn_mask": torch.ones(B, S, SKV, dtype=torch.bool)}, r"Pass attn_mask\[:, None\]"),
        ({"attn_mask": torch.ones(B, 1, 1, SKV, dtype=torch.int64)}, r"attn_mask.bool\(\)"),
        ({"attn_mask": torch.ones(B, SKV + 1, dtype=torch.bool)}, "accepted: dims that broadcast"),
        ({"h_kv": 2}, "enable_gqa=True"),
    ],
    ids=("3-d", "integers", "too long", "heads"),
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        _results("flexattn", **options)


def test_the_name_is_a_member_of_diffusers_enumeration() -> None:
    names = type(_AttentionBackendRegistry.list_backends()[-1])
    register()
    assert [name for name in names if name == "flexattn"] == [names("flexattn")] == [names.FLEXATTN]
    with attention_backend("flexattn"):
        assert _AttentionBackendRegistry.get_active_backend()[0] is names.FLEXATTN


def _flux() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], **sizes
    )
    inputs = {"hidden_states": _numbers(2, 16, 4), "encoder_hidden_states": _numbers(2, 7, 32), "timestep": torch.ones(2)}
    positions = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}
    return model, inputs | positions | {"pooled_projections": _numbers(2, 32)}


def _wan() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16, "text_dim": 16}
    model = diffusers.WanTransformer3DModel(in_channels=4, out_channels=4, cross_attn_norm=True, rope_max_seq_len=32, **sizes)
    inputs = {"hidden_states": _numbers(1, 4, 2, 4, 4), "timestep": torch.tensor([5]), "encoder_hidden_states": _numbers(1, 6, 16)}
    return model, inputs


def _qwen_image() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16}
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, axes_dims_rope=(4, 6, 6), guidance_embeds=False, **sizes
    )
    inputs: dict[str, Any] = {"hidden_states": _numbers(2, 16, 16), "encoder_hidden_states": _numbers(2, 6, 16)}
    inputs["encoder_hidden_states_mask"] = torch.arange(6) < torch.tensor([[4], [6]])  # text of 4 and of 6 tokens
    return model, inputs | {"timestep": torch.ones(2), "img_shapes": [[(1, 4, 4)]] * 2}


@pytest.mark.slow
@pytest.mark.parametrize("make", [_flux, _wan, _qwen_image])
def test_a_transformer_equals_native(make: Callable[[], tuple[nn.Module, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.double()
    results, calls = {}, []
    function = _AttentionBackendRegistry._backends["flexattn"]
    monkeypatch.setitem(_AttentionBackendRegistry._backends, "flexattn", lambda **call: (calls.append(1), function(**call))[1])
    for backend in ("native", "flexattn"):
        model.set_attention_backend(backend)  # type: ignore[operator]
        sample = model(**inputs).sample
        results[backend] = [sample, *torch.autograd.grad(sample.square().sum(), list(model.parameters()), allow_unused=True)]
    assert calls
    for found, expected in zip(results["flexattn"], results["native"], strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(
                found, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0
            )  # models round to float32


@pytest.mark.slow
def test_a_unet_with_the_processor_equals_its_own() -> None:
    torch.manual_seed(0)
    unet = _unet().double()
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4).double()
    sample, text, keep = _numbers(2, 4, 8, 8), _numbers(2, 5, 12), torch.arange(5) < torch.tensor([[3], [5]])
    results = []
    for _ in range(2):
        noise = unet(sample, 3, text, encoder_attention_mask=keep).sample
        image = vae.decode(sample).sample
        results.append([noise, image, *torch.autograd.grad(noise.square().sum(), list(unet.parameters()), allow_unused=True)])
        unet.set_attn_processor(AttnProcessor())
        vae.set_attn_processor(AttnProcessor())
    for expected, found in zip(*results, strict=True):
        if expected is not None:
            _assert_near(found, expected)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (2, 2, 2), (4, 2)], ids=str)
def test_the_processor_reads_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    module = Attention(16, heads=2, dim_head=8).double()
    mask = torch.zeros(shape, dtype=torch.float64)
    mask.flatten(1)[0, 0] = -1e4
    results = []
    for processor in (AttnProcessor2_0(), AttnProcessor()):
        module.set_processor(processor)
        results.append(module(_numbers(2, 2, 16), attention_mask=mask))
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize(("module", "call"), [({"added_kv_proj_dim": 16}, {}), ({}, {"image_rotary_emb": torch.ones(2, 8)})])
def test_the_processor_refuses_parts_that_it_does_not_read(module: dict[str, Any], call: dict[str, Any]) -> None:
    attention = Attention(16, heads=2, dim_head=8, processor=AttnProcessor(), **module)
    with pytest.raises(NotImplementedError, match=f"{'add_k_proj' if module else 'image_rotary_emb'}.*accepted: the model's"):
        attention(torch.ones(2, 2, 16), **call)


@pytest.mark.slow
def test_a_compiled_call_has_no_graph_break() -> None:
    q, k, v = (_numbers(B, S, H, D, seed=seed) for seed in range(3))
    keep = torch.arange(S) < torch.tensor([[9], [S]])
    call = torch.compile(
        lambda: dispatch_attention_fn(q, k, v, attn_mask=keep, backend=names.FLEXATTN), fullgraph=True, backend="eager"
    )
    names = type(_AttentionBackendRegistry.list_backends()[-1])
    expected = dispatch_attention_fn(q, k, v, attn_mask=keep, backend="native")
    torch.testing.assert_close(call(), expected, **EXACT)


def _unet() -> nn.Module:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 12}
    return diffusers.UNet2DConditionModel(norm_num_groups=4, **sizes, **blocks)


def _flux_pipeline() -> tuple[Any, dict[str, Any]]:
    model, inputs = _flux()
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=1, shift_factor=0.0)
    pipeline = diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, model)
    text = {"prompt_embeds": inputs["encoder_hidden_states"], "pooled_prompt_embeds": inputs["pooled_projections"]}
    return pipeline, text | {"height": 8, "width": 8}


def _wan_pipeline() -> tuple[Any, dict[str, Any]]:
    model, inputs = _wan()
    sizes = {"base_dim": 4, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}
    vae = diffusers.AutoencoderKLWan(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    pipeline = diffusers.WanPipeline(None, None, vae, diffusers.FlowMatchEulerDiscreteScheduler(), model)
    text = {"prompt_embeds": inputs["encoder_hidden_states"], "negative_prompt_embeds": -inputs["encoder_hidden_states"]}
    return pipeline, text | {"height": 32, "width": 32, "num_frames": 5}


def _stable_diffusion_pipeline() -> tuple[Any, dict[str, Any]]:
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": None, "feature_extractor": None}
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, unet=_unet(), scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **parts
    )
    text = {"prompt_embeds": _numbers(1, 5, 12), "negative_prompt_embeds": -_numbers(1, 5, 12)}
    return pipeline, text | {"height": 8, "width": 8}


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("make", [_flux_pipeline, _wan_pipeline, _stable_diffusion_pipeline])
def test_a_pipeline_equals_native(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    pipeline, inputs = make()
    pipeline.set_progress_bar_config(disable=True)
    inputs = {name: x.float() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    results = []
    for backend in ("native", "flexattn"):
        if hasattr(pipeline, "transformer"):
            pipeline.transformer.set_attention_backend(backend)
        if backend == "flexattn":
            for part in (pipeline.vae, getattr(pipeline, "unet", None)):
                if hasattr(part, "set_attn_processor"):
                    part.set_attn_processor(AttnProcessor())
        output = pipeline(num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="pt", **inputs)
        results.append(output[0])
    assert results[0].std() > 1e-3
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_environment_selects_it(fresh_python: FreshPython) -> None:
    code = (
        "from flexattn.integrations.diffusers import register; register()\n"
        "from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry\n"
        "print(registry.get_active_backend()[0].value)"
    )
    result = fresh_python("-c", code, env={"DIFFUSERS_ATTN_BACKEND": "flexattn"})
    assert result.stdout.split() == ["flexattn"], result.stderr


class _Context:
    """Context of an autograd.Function."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_rank_under_autocast_has_the_gradients_of_a_call(is_ring: bool) -> None:
    leaves = [_numbers(B, S, H, D, seed=seed).float().requires_grad_() for seed in range(3)]
    context, config = _Context(), SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=1))
    with torch.autocast("cpu", torch.bfloat16):
        expected = dispatch_attention_fn(*leaves, backend="flexattn")
        with torch.no_grad():
            out, lse = door._forward(context, *leaves, None, 0.0, False, None, False, True, _save_ctx=True, _parallel_config=config)
    assert torch.equal(out, expected)
    # diffusers' ring passes its own tensors, out in query's dtype and lse of all ranks
    q, k, v = context.saved_tensors[:3]
    others = {"query": q, "key": k, "value": v, "out": out.float(), "lse": lse} if is_ring else {}
    dout = torch.ones_like(out)
    gradients = door._backward(context, dout.float() if is_ring else dout, **others)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(found.float(), wanted, atol=2**-7 * float(wanted.abs().max()), rtol=0)


@pytest.mark.slow
def test_ranks_equal_one_process(fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, "all", 2, module="tests.support.diffusers_ranks")
