"""`flexattn.integrations.torchtitan` beside torchtitan's own attention: calls, configurations and training of its debug model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("spmd_types", reason="needs spmd_types, which torchtitan requires")

from torchtitan.models.common import attention as titan
from torchtitan.models.common import decoder

from flexattn.integrations import torchtitan as door
from flexattn.integrations.torchtitan import FlexAttention, FlexattnConverter, ScaledDotProductAttention, VarlenAttention, convert
from tests.conftest import FreshPython
from tests.support.ranks import run_ranks
from tests.support.torchtitan_models import OWN, batch_of, build, config_of, losses

B, H, H_KV, D, D_V = 2, 4, 2, 16, 8
LENGTHS = (5, 11, 16)
S = sum(LENGTHS)
POSITIONS = batch_of(LENGTHS, B)[2]
NAMES = {"varlen": VarlenAttention, "flex": FlexAttention, "sdpa": ScaledDotProductAttention}


@pytest.fixture(autouse=True)
def _masks_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "create_attention_mask", create_block_mask)  # compiled it takes a minute


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, H, D), (B, S, H_KV, D), (B, S, H_KV, D_V))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _expected(qkv: list[Tensor], keep: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out and lse in plain torch. keep: bool, broadcastable to [b, h, s, s]."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(H // H_KV, 2) for x in (k, v))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).masked_fill(~keep, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def _document_mask() -> Tensor:
    mod = titan.get_document_mask_mod(POSITIONS)
    b, q, k = torch.meshgrid(torch.arange(B), torch.arange(S), torch.arange(S), indexing="ij")
    return mod(b, torch.tensor(0), q, k)[:, None]


def _sunk(out: Tensor, lse: Tensor) -> Tensor:
    """An epilogue such as GPT-OSS's, which needs the gradient of lse."""
    return out * torch.sigmoid(lse - 0.3).unsqueeze(-1)


def _compare(module: torch.nn.Module, masks: Any, keep: Tensor, **options: Any) -> None:
    qkv = _inputs()
    found = module(*qkv, attention_masks=masks, scale=0.3, enable_gqa=True, **options)
    out, lse = _expected(qkv, keep, 0.3)
    expected = options["out_transform"](out, lse) if "out_transform" in options else out
    for x, y in zip(
        [found, *torch.autograd.grad(found.square().sum(), qkv)],
        [expected, *torch.autograd.grad(expected.square().sum(), qkv)],
        strict=True,
    ):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (2, 4)])
@pytest.mark.parametrize("options", [{}, {"out_transform": _sunk}], ids=("plain", "sinks"))
def test_a_varlen_call(window: tuple[int, int], options: dict[str, Any]) -> None:
    module = VarlenAttention.Config(window_size=window).build()
    distance = torch.arange(S)[:, None] - torch.arange(S)  # of a query from a key
    left, right = (S if side < 0 else side for side in window)
    keep = _document_mask() & (distance <= left) & (-distance <= right)
    _compare(module, titan.create_varlen_metadata_for_document(POSITIONS), keep, **options)


@pytest.mark.parametrize("options", [{}, {"out_transform": _sunk}], ids=("plain", "sinks"))
def test_a_call_under_a_block_mask(options: dict[str, Any]) -> None:
    mask_mod = and_masks(titan.get_sliding_window_mask_mod(9), titan.get_document_mask_mod(POSITIONS))
    distance = torch.arange(S)[:, None] - torch.arange(S)
    keep = _document_mask() & (distance >= 0) & (distance < 9)
    masks = create_block_mask(mask_mod, B, None, S, S, device="cpu", BLOCK_SIZE=16)
    _compare(FlexAttention.Config(block_size=16).build(), masks, keep, **options)


def test_a_score_mod_equals_torchs() -> None:
    masks = create_block_mask(titan.get_causal_mask_mod(), B, None, S, S, device="cpu")
    call = {"attention_masks": masks, "score_mod": lambda score, b, h, i, j: score + 0.1 * (j - i) * (h + 1), "enable_gqa": True}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(titan.FlexAttention, "_compiled_flex_attn", titan.flex_attention)
        found, expected = (
            module.Config().build()(*(x.detach() for x in _inputs()), **call) for module in (FlexAttention, titan.FlexAttention)
        )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_call_without_masks(is_causal: bool) -> None:
    keep = torch.ones(S, S, dtype=torch.bool)
    _compare(ScaledDotProductAttention.Config().build(), None, keep.tril() if is_causal else keep, is_causal=is_causal)


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("varlen", {"attention_masks": None}, TypeError, "NoneType; accepted: a VarlenMetadata"),
        ("flex", {"attention_masks": None}, TypeError, "NoneType; accepted: a BlockMask"),
        ("sdpa", {"attention_masks": 3}, ValueError, "attention_masks is a int; accepted: None"),
        ("sdpa", {"enable_gqa": False}, ValueError, "4 heads and k_BLNH has 2; accepted: equal counts, or enable_gqa=True"),
        ("varlen", {"enable_gqa": False}, ValueError, "enable_gqa=True"),
        ("varlen", {"block_table": 1}, TypeError, "block_table"),
        ("flex", {"is_causal": True}, TypeError, "is_causal"),
        ("sdpa", {"score_mod": None}, TypeError, "score_mod"),
    ],
)
def test_wrong_arguments(name: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    masks = {"varlen": titan.create_varlen_metadata_for_document(POSITIONS), "sdpa": None, "flex": None}[name]
    with pytest.raises(error, match=text):
        NAMES[name].Config().build()(*_inputs(), **{"attention_masks": masks, "enable_gqa": True} | options)


def test_batch_invariance_is_passed_on_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "is_in_batch_invariant_mode", lambda: True)
    masks = create_block_mask(titan.get_causal_mask_mod(), B, None, S, S, device="cpu")
    with pytest.raises(NotImplementedError, match="accepted: VarlenAttention"):
        FlexAttention.Config().build()(*_inputs(), attention_masks=masks, enable_gqa=True)
    seen: list[Any] = []
    monkeypatch.setattr(door, "attention", lambda q, *_, **options: seen.append(options) or (q, q[..., 0].T))
    metadata = titan.create_varlen_metadata_for_document(POSITIONS)
    VarlenAttention.Config().build()(*_inputs(), attention_masks=metadata, enable_gqa=True)
    assert seen[0]["batch_invariant"] is True


@pytest.mark.parametrize("backend", ["flex", "varlen"])
@pytest.mark.parametrize("model", ["llama3", "qwen3", "deepseek_v3", "gpt_oss", "muse_glimmer"])
def test_the_converter_replaces_every_inner_attention(model: str, backend: str) -> None:
    registry = importlib.import_module(f"torchtitan.models.{model}").model_registry
    try:
        own = registry("debugmodel", attn_backend=backend).model
    except (NotImplementedError, ValueError) as error:
        pytest.skip(f"torchtitan has no such model: {error}")
    config = convert(registry("debugmodel", attn_backend=backend).model)
    pairs = zip(own.traverse(OWN[backend].Config), config.traverse(OWN[backend].Config), strict=True)
    count = 0
    for (place, before, *_), (same_place, after, *_) in pairs:
        assert place == same_place
        assert type(after) is NAMES[backend].Config
        assert before.to_dict() == after.to_dict()
        count += 1
    assert count >= 2
    assert convert(config) is config
    assert isinstance(after.build(), NAMES[backend])


def test_the_converter_is_one_of_torchtitans() -> None:
    spec = importlib.import_module("torchtitan.models.llama3").model_registry(
        "debugmodel", attn_backend="varlen", converters=[FlexattnConverter.Config()]
    )
    assert type(spec.model.layers[0].attention.inner_attention) is VarlenAttention.Config


@pytest.mark.parametrize(("config", "text"), [("norm", "without an inner attention"), ("inner", "the configuration of a model")])
def test_a_configuration_without_attention(config: str, text: str) -> None:
    model = config_of(titan.FlexAttention.Config())
    with pytest.raises(ValueError, match=text):
        convert(model.norm if config == "norm" else model.layers[0].attention.inner_attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["varlen", "flex"])
def test_training_on_packed_documents_has_the_losses_of_torchtitans_attention(name: str) -> None:
    own = losses(build(config_of(OWN["sdpa"].Config())), LENGTHS, is_split=True)  # which knows no documents
    found = losses(build(config_of(NAMES[name].Config())), LENGTHS)
    assert own[-1] < own[0] - 0.1
    torch.testing.assert_close(found, own, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_training_on_one_document_has_the_losses_of_torchtitans_attention() -> None:
    found, own = (losses(build(config_of(module.Config())), (S,), is_split=True) for module in (NAMES["sdpa"], OWN["sdpa"]))
    torch.testing.assert_close(found, own, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_ranks_equal_one_process(fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, "all", 2, module="tests.support.torchtitan_ranks")
