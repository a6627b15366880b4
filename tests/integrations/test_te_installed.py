"""The function compared with TransformerEngine itself, if it is installed and there is a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flexattn.integrations import te

theirs: Any = pytest.importorskip(
    "transformer_engine.pytorch.cpp_extensions.fused_attn",
    reason="TransformerEngine is not installed, with which these functions are compared",
    exc_type=ImportError,
)


@pytest.mark.parametrize("name", ["fused_attn_fwd", "fused_attn_bwd"])
def test_signatures(name: str) -> None:
    """Ours has all parameters of TransformerEngine's, in the same order and with the same defaults."""
    ours, wanted = (inspect.signature(getattr(module, name)).parameters for module in (te, theirs))
    shared = [parameter for parameter in ours if parameter in wanted]
    assert [parameter for parameter in wanted if parameter not in ours] == []
    assert shared == list(wanted)
    for parameter in shared:
        assert ours[parameter].default == wanted[parameter].default


@pytest.mark.parametrize("name", ["QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType"])
def test_names(name: str) -> None:
    ours, wanted = getattr(te, name), getattr(theirs, name)
    assert set(ours) == set(wanted)
    assert all(int(value) == ours[key] for key, value in wanted.items())


@pytest.mark.parametrize("name", ["META_QKV", "META_DQKV", "META_O", "META_DO", "META_S", "META_DP"])
def test_indices(name: str) -> None:
    assert int(getattr(theirs, name)) == getattr(te, name)


@pytest.mark.parametrize("layout", ["sbh3d", "bs3hd", "bshd_bs2hd", "sbhd_sbhd_sbhd"])
def test_results(layout: str) -> None:
    """bf16: the two round at different points, by a unit in the last place of numbers about 1."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch.cuda.is_available() is False")
    q_format = te.names.parse_layout(layout).q_format
    shape = (2, 128) if q_format == "bshd" else (128, 2)
    q, k, v = (torch.randn(*shape, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    if layout == "bs3hd":
        q, k, v = torch.stack((q, k, v), 2).unbind(2)
    elif layout == "sbh3d":
        q, k, v = torch.stack((q, k, v), 3).unbind(3)
    elif layout == "bshd_bs2hd":
        k, v = torch.stack((k, v), 2).unbind(2)
    cu = torch.arange(3, dtype=torch.int32, device="cuda") * 128
    call = {"max_seqlen_q": 128, "max_seqlen_kv": 128, "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "q": q, "k": k, "v": v}
    call |= {"qkv_layout": layout, "o_format": q_format, "attn_mask_type": "causal"}
    d_o = torch.randn(*shape, 4, 64, dtype=torch.bfloat16, device="cuda")
    found = []
    for module, dtype in ((te, torch.bfloat16), (theirs, torch.bfloat16)):
        kind = {"fake_dtype": dtype, "fused_attention_backend": module.FusedAttnBackend["F16_arbitrary_seqlen"]}
        out, aux, *_ = module.fused_attn_fwd(is_training=True, **call, **kind)
        own = {"o": out, "d_o": d_o, "aux_ctx_tensors": aux, "do_format": q_format, "dqkv_layout": layout}
        found.append((out, aux[0], *module.fused_attn_bwd(**call, **kind, **own)[:3]))
    for ours, wanted in zip(*found, strict=True):
        assert ours.shape == wanted.shape
        assert ours.stride() == wanted.stride()
        torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)
