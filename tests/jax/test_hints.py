"""Foreign argument names, given to `flexattn.jax.attention`."""

from __future__ import annotations

import inspect

import pytest

import flexattn

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
fj = pytest.importorskip("flexattn.jax")
NOT_TAKEN = pytest.importorskip("flexattn.jax.front").NOT_TAKEN


def test_foreign_names_and_positions_raise_what_is_ours() -> None:
    x = jax.numpy.ones((1, 3, 2, 8))
    with pytest.raises(TypeError, match=r"no argument 'is_causal', the name in SDPA, jax.nn"):
        fj.attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="FlashAttention's order these are dropout_p="):
        jax.jit(lambda x: fj.attention(x, x, x, 0.0))(x)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        fj.attention(x, x)
    ours = [name for name in inspect.signature(flexattn.attention).parameters if name not in NOT_TAKEN]
    assert [*inspect.signature(fj.attention).parameters] == ours


def test_short_forms_are_those_of_torch() -> None:
    q, k = (jax.random.normal(jax.random.key(i), (1, s, 2, 8)) for i, s in enumerate((5, 7)))
    written_out = fj.attention(q, q, q, attn_mask_type="causal", window_size=(2, 0))
    assert (fj.attention(q, q, q, causal=True, window_size=3) == written_out).all()
    bias = jax.random.normal(jax.random.key(2), (1, 1, 5, 5))
    assert (fj.attention(q, q, q, bias=bias) == fj.attention(q, q, q, bias=bias, bias_type="post_scale_bias")).all()
    sink = jax.numpy.ones(2)
    assert (
        fj.attention(q, q, q, softmax_offset=sink) == fj.attention(q, q, q, softmax_offset=sink, softmax_type="learnable")
    ).all()
    x, cu_seqlens = q[0], jax.numpy.array([0, 2, 5], jax.numpy.int32)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": 3, "max_seqlen_kv": 3}
    packed = fj.attention(x, x, x, qkv_format="thd", attn_mask_type="padding_causal", **lengths)
    assert (fj.attention(x, x, x, qkv_format="thd", causal=True, cu_seqlens=cu_seqlens, max_seqlen=3) == packed).all()
    with pytest.raises(ValueError, match="causal is True and there are 5 queries and 7 keys"):
        fj.attention(q, k, k, causal=True)
    with pytest.raises(TypeError, match="no argument 'mask'"):
        fj.attention(q, q, q, mask=bias)
