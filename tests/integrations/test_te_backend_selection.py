"""TransformerEngine's questions about backends: get_attention_backend, its reasons and its environment variables."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from flexattn.dispatch import cudnn_backend, triton_backend
from flexattn.functional import bind_call
from flexattn.integrations.te import (
    AttentionParams,
    FusedAttnBackend,
    explain_attention_backend,
    get_attention_backend,
    is_fused_attn_available,
)
from flexattn.integrations.te.backend_selection import spec_of
from flexattn.ops import spec_to_run

F16, FP8 = FusedAttnBackend.F16_arbitrary_seqlen, FusedAttnBackend.FP8


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a machine with an H200 and without cuDNN."""
    from flexattn.integrations.te import backend_selection

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_selection, "_capability", lambda: (9, 0))
    monkeypatch.setattr(triton_backend, "device_error", lambda *_: None)
    monkeypatch.setattr(cudnn_backend, "device_error", lambda *_: "no cuDNN here")


OVER_RANKS = {"context_parallel": True, "cp_size": 4}


@pytest.mark.usefixtures("on_sm_90")
def test_over_ranks() -> None:
    assert answer(**OVER_RANKS) == answer()
    assert answer(**OVER_RANKS, core_attention_bias_type="post_scale_bias")[2]
    assert answer(**OVER_RANKS, core_attention_bias_type="post_scale_bias", core_attention_bias_shape="111s", cp_comm_type="a2a")[2]
    assert answer(**OVER_RANKS, attention_dropout=0.1)[2]
    assert answer(**OVER_RANKS, fp8=True) == answer(fp8=True)
    assert spec_of(AttentionParams(**OVER_RANKS, attention_dropout=0.1)).has_origin
    assert not spec_of(AttentionParams(**OVER_RANKS, attention_dropout=0.1, is_training=False)).has_origin
    assert answer(**OVER_RANKS, qkv_layout="thd_thd_thd", max_seqlen_q=100, attn_mask_type="padding")[2]
    with pytest.raises(ValueError, match="cp_comm_type is 'tree'"):
        answer(**OVER_RANKS, cp_comm_type="tree")


def answer(**fields: Any) -> tuple[Any, ...]:
    return get_attention_backend(AttentionParams(**fields))


@pytest.mark.usefixtures("on_sm_90")
def test_on_a_gpu() -> None:
    assert answer() == (False, None, True, F16, False, [False, True, True])
    assert answer(fp8=True) == (False, None, True, FP8, False, [False, True, True])
    wide = answer(head_dim_qk=640, head_dim_v=512)
    assert wide == (False, None, False, None, True, [False, False, True])
    reasons = explain_attention_backend(AttentionParams(head_dim_qk=640))
    assert ("cudnn", "backward", "no cuDNN here") in reasons.rejected
    assert any("head dim of q and k is 640" in reason for name, _, reason in reasons.rejected if name == "triton")
    assert "attention runs unfused\n  not triton (forward): the head dim" in str(reasons)


@pytest.mark.usefixtures("on_sm_90")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**OVER_RANKS, "fp8": True, "fp8_output": True}, "cp_size is 4 with fp8_output; accepted: 1, or"),
        ({**OVER_RANKS, "attn_mask_type": "arbitrary"}, "with attn_mask_type 'arbitrary'"),
        ({**OVER_RANKS, "inference_params": object()}, "with inference_params"),
        ({**OVER_RANKS, "core_attention_bias_type": "post_scale_bias", "attn_mask_type": "padding"}, "with a bias and padding"),
        ({**OVER_RANKS, "core_attention_bias_type": "post_scale_bias", "cp_comm_type": "a2a"}, "a bias by cp_comm_type 'a2a'"),
        ({**OVER_RANKS, "num_heads": 2, "num_gqa_groups": 2, "cp_comm_type": "a2a"}, "num_heads 2, fewer than ranks"),
        ({**OVER_RANKS, "max_seqlen_kv": 124}, "max_seqlen_kv 124, not a multiple of 2 * cp_size"),
        ({"qkv_layout": "paged_kv_bshd_bshd_bshd"}, "pages, which have no gradients"),
        ({"inference_params": types.SimpleNamespace(is_paged=True, page_size=64)}, "pages, which have no gradients"),
    ],
)
def test_what_nothing_here_has(fields: dict[str, Any], reason: str) -> None:
    assert answer(**fields) == (False, None, False, None, False, [False, False, False])
    assert reason in str(explain_attention_backend(AttentionParams(**fields)))


@pytest.mark.usefixtures("on_sm_90")
def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert answer() == (False, None, False, None, True, [False, False, True])
    assert "not fused: NVTE_FUSED_ATTN is 0" in str(explain_attention_backend(AttentionParams()))
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert answer() == (False, None, False, None, False, [False, False, False])
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with pytest.warns(RuntimeWarning, match="NVTE_FLASH_ATTN is set but has no effect"):
        answer()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "yes")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN is 'yes'; accepted: 0, 1"):
        answer()


def test_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        "flexattn.integrations.te.backend_selection.unsupported", lambda name, spec, *_: seen.append(spec.deterministic)
    )
    answer()
    answer(deterministic=True)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    answer()
    assert [seen[0], seen[6], seen[12]] == [False, True, True]


@pytest.mark.usefixtures("on_sm_90")
def test_a_captured_graph_has_no_eager_backend_with_lengths() -> None:
    assert answer(cuda_graph=True)[-1] == [False, True, True]
    assert answer(cuda_graph=True, attn_mask_type="padding")[-1] == [False, True, False]


def test_both_directions_of_dropout_run_on_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    only = {"triton": "forward", "cudnn": "backward", "eager": "forward"}
    monkeypatch.setattr(
        "flexattn.integrations.te.backend_selection.unsupported",
        lambda name, spec, direction, request: None if only[name] == direction else "a test",
    )
    assert answer()[2]
    assert not answer(attention_dropout=0.1)[2]
    assert answer(attention_dropout=0.1, is_training=False)[2]


CASES = [
    ({}, {}, {}),
    ({"qkv_layout": "sbh3d", "attn_mask_type": "causal"}, {"qkv_format": "sbhd", "attn_mask_type": "causal"}, {}),
    ({"window_size": (5, 3), "bottom_right_diagonal": False}, {"window_size": (5, 3), "bottom_right_diagonal": False}, {}),
    (
        {"attn_mask_type": "causal_bottom_right", "window_size": (5, -1)},
        {"attn_mask_type": "causal_bottom_right", "window_size": (5, 0)},
        {},
    ),
    ({"softmax_type": "off-by-one", "return_max_logit": True}, {"softmax_type": "off-by-one", "return_max_logit": True}, {}),
    (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "b1ss"},
        {"bias_type": "post_scale_bias"},
        {"bias": (2, 1)},
    ),
    ({"attention_dropout": 0.25, "num_gqa_groups": 4}, {"dropout_p": 0.25}, {"kv": 4}),
]


@pytest.mark.parametrize(("fields", "arguments", "more"), CASES)
def test_the_spec_is_the_one_that_runs(fields: dict[str, Any], arguments: dict[str, Any], more: dict[str, Any]) -> None:
    fmt = arguments.get("qkv_format", "bshd")
    fields = {"qkv_layout": "bshd_bshd_bshd", "max_seqlen_q": 32, "max_seqlen_kv": 32} | fields
    shape = (2, 32) if fmt == "bshd" else (32, 2)
    q = torch.empty(*shape, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.empty(*shape, more.get("kv", 16), 64, dtype=torch.bfloat16) for _ in range(2))
    if "bias" in more:
        arguments = arguments | {"bias": torch.empty(*more["bias"], 32, 32, dtype=torch.bfloat16, requires_grad=True)}
    x, settings = bind_call(q, k, v, **arguments)
    assert spec_of(AttentionParams(**fields)) == spec_to_run(x, settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qkv_layout": "bsd"}, "qkv_layout is 'bsd'; accepted: sb3hd"),
        ({"qkv_layout": "t3hd"}, "attn_mask_type is 'no_mask' with qkv_layout 't3hd'; accepted: a type with padding"),
        ({"attn_mask_type": "diagonal"}, "attn_mask_type is 'diagonal'; accepted: no_mask, .*, arbitrary"),
        ({"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "hss"}, "core_attention_bias_shape is 'hss'"),
    ],
)
def test_wrong_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answer(**fields)


def test_something_else_than_parameters() -> None:
    with pytest.raises(TypeError, match="attention_params is dict; accepted: an AttentionParams"):
        get_attention_backend({})  # type: ignore[arg-type]


def test_the_fields() -> None:
    assert len(dataclasses.fields(AttentionParams)) == 36
    assert AttentionParams() == AttentionParams()
    assert AttentionParams() != AttentionParams(batch_size=2)


@pytest.mark.usefixtures("on_sm_90")
def test_is_fused_attn_available() -> None:
    config = types.SimpleNamespace(num_heads=16, head_dim_qk=64, attn_bias_type="alibi", dropout_p=0.1, attn_mask_type="causal")
    assert is_fused_attn_available(config, torch.bfloat16)
    assert is_fused_attn_available(AttentionParams(), torch.float16, qkv_layout="sbh3d", is_training=False)
    assert not is_fused_attn_available(types.SimpleNamespace(head_dim_qk=640), torch.bfloat16)
    for config in (AttentionParams(core_attention_bias_type="nothing"), types.SimpleNamespace(attn_bias_type="nothing")):
        with pytest.raises(ValueError, match="core_attention_bias_type is 'nothing'"):
            is_fused_attn_available(config, torch.bfloat16)
