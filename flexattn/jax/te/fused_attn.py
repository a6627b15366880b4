"""TransformerEngine's `fused_attn` for JAX: its signature, over `flexattn.jax.attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexattn.dispatch.spec import as_index
from flexattn.integrations.te.backend_selection import environment
from flexattn.jax.front import attend
from flexattn.jax.te.names import AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout, member, name_of
from flexattn.jax.te.score_mod import recorded
from flexattn.jax.te.sequences import Rows, SequenceDescriptor, sequences_of
from flexattn.validation import describe


def fused_attn(
    qkv: tuple[jax.Array, ...],
    bias: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | None,
    seed: jax.Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: jax.Array | None = None,
    stripe_size: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bprop: Callable[..., Any] | None = None,
    score_mod_tensors: Mapping[str, Any] | None = None,
    score_mod_bprop_tensors: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Returns attention by the arguments of TransformerEngine's `transformer_engine.jax.attention.fused_attn`.

    Works wherever `flexattn.jax.attention` does: jit, grad, vmap, scan, checkpoint, shard_map. A score_mod goes with every other
    argument, where TransformerEngine takes it with none.

    Source of the signature: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py and, for
    score_mod, https://github.com/NVIDIA/TransformerEngine/pull/2985.

    Args:
        qkv: (qkv [b, s, 3, h, d],), (q [b, sq, h, d], kv [b, skv, 2, h_kv, d]) or (q, k [b, skv, h_kv, d], v [b, skv, h_kv, d_v]),
            as qkv_layout says; of the dtypes that `attention` takes.
        bias: [b, h, sq, skv] by places in the rows of q and k, where any dim may be 1, of q's dtype or float32, with a bias type;
            else None. Differentiable.
        sequence_descriptor: where sequences lie, read with a mask type that has PADDING in its name, as in TransformerEngine; None
            otherwise. Or a mask [b, 1, sq, skv], 1 for a hidden pair.
        seed: a key of jax.random, or the integers of one or several, whose first two count; None without dropout.
        scaling_factor: factor of q k^T.
        dropout_probability: probability that a softmax weight is dropped, if is_training.
        max_segments_per_seq: at least 1, and without effect: nothing is sized by it.
        window_size: (left, right), negative for open, None for both; with a causal type right is 0 or open.
        context_checkpoint_name: name that `jax.checkpoint` policies know the result and what the backward needs beside it by.
        softmax_offset: float32 [1, h, 1, 1] with LEARNABLE_SOFTMAX. Differentiable.
        score_mod, score_mod_bprop: callbacks (graph, score or dscore, tensors) that call cuDNN frontend's pointwise nodes.
            Positions that they ask for are those in the rows of q and k.
        score_mod_tensors, score_mod_bprop_tensors: name -> array of up to 4 dims that broadcasts to [b, h, sq, skv], or a Python
            or NumPy number, for these two. Without a score_mod_bprop arrays get gradients; with one, asking for them raises.
        context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis, stripe_size: their defaults.

    Returns [b, sq, h, d_v] in q's dtype. Padding, and a query that sees no key, get 0.

    Raises:
        ValueError, TypeError: an argument without meaning, or that does not go with another; the text names it.
        NotImplementedError: context parallelism.
        BackendError: as `attention`.
    """
    _refuse_context_parallelism(
        context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis, stripe_size
    )
    bias_type = member(AttnBiasType, "attn_bias_type", attn_bias_type)
    kind = member(AttnMaskType, "attn_mask_type", attn_mask_type)
    softmax = member(AttnSoftmaxType, "softmax_type", softmax_type)
    layout = member(QKVLayout, "qkv_layout", qkv_layout)
    q, k, v = separate(qkv, layout)
    if (as_index(max_segments_per_seq) or 0) < 1:
        raise ValueError(f"max_segments_per_seq is {describe(max_segments_per_seq)}; accepted: an int of at least 1")
    if (bias is None) != (bias_type is AttnBiasType.NO_BIAS):
        accepted = "None" if bias_type is AttnBiasType.NO_BIAS else "an array [b, h, sq, skv]"
        raise ValueError(f"bias is {_named(bias)} with attn_bias_type {bias_type.name}; accepted: {accepted}")
    rows = Rows(q.shape[0], (q.shape[1], k.shape[1]), layout.is_thd(), kind, window_of(window_size, kind))
    sequences = sequences_of(sequence_descriptor, rows, has_places=bias is not None or score_mod is not None)
    arguments = sequences.arguments | {
        "q": q,
        "k": k,
        "v": v,
        "bias_type": name_of(bias_type),
        "bias": bias,
        "softmax_type": name_of(softmax),
        "softmax_offset": _offset(softmax, softmax_offset, q.shape[2]),
        "softmax_scale": scaling_factor,
        "deterministic": environment().is_deterministic or None,
    }
    if is_training and dropout_probability:
        arguments |= {"dropout_p": dropout_probability, "rng_state": _words(seed)}
    if score_mod is not None:
        arguments["score_mod"] = recorded(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
    else:
        for name, value in (
            ("score_mod_bprop", score_mod_bprop),
            ("score_mod_tensors", score_mod_tensors),
            ("score_mod_bprop_tensors", score_mod_bprop_tensors),
        ):
            if value is not None:
                raise ValueError(f"{name} is given without a score_mod; accepted: None, or a score_mod beside it")
    if not sequences.is_packed:
        return attend(arguments, (context_checkpoint_name,) * 2)[0]
    arguments |= {name: x.reshape(-1, *x.shape[2:]) for name, x in (("q", q), ("k", k), ("v", v))}
    out = attend(arguments | {"qkv_format": "thd"}, (context_checkpoint_name,) * 2)[0]
    return out.reshape(*q.shape[:2], *out.shape[1:])


def separate(qkv: Any, layout: QKVLayout) -> tuple[Any, Any, Any]:
    """Returns q, k and v of the arrays that a layout has; raises ValueError, TypeError for other counts and shapes."""
    names = ("qkv",) if layout.is_qkvpacked() else ("q", "kv") if layout.is_kvpacked() else ("q", "k", "v")
    if not isinstance(qkv, (tuple, list)) or len(qkv) != len(names):
        came = f"a {type(qkv).__name__}" + (f" of {len(qkv)}" if isinstance(qkv, (tuple, list)) else "")
        raise ValueError(f"qkv is {came} with qkv_layout {layout.name}; accepted: ({', '.join(names)})")
    for name, x in zip(names, qkv, strict=True):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} of qkv is {describe(x)}; accepted: a JAX or NumPy array")
        parts = {"qkv": 3, "kv": 2}.get(name)
        if x.ndim != (4 if parts is None else 5) or (parts is not None and x.shape[2] != parts):
            accepted = "[b, s, h, d]" if parts is None else f"[b, s, {parts}, h, d]"
            raise ValueError(f"{name} of qkv has shape {x.shape} with qkv_layout {layout.name}; accepted: {accepted}")
    if layout.is_separate():
        return qkv[0], qkv[1], qkv[2]
    packed = jnp.asarray(qkv[-1])
    *first, k, v = (packed[:, :, i] for i in range(packed.shape[2]))
    return (first or qkv)[0], k, v


def _refuse_context_parallelism(strategy: Any, is_balanced: Any, axis: Any, stripe_size: Any) -> None:
    given = {
        "context_parallel_strategy": None if getattr(strategy, "name", strategy) == "DEFAULT" else strategy,
        "context_parallel_causal_load_balanced": is_balanced or None,
        "context_parallel_axis": axis or None,
        "stripe_size": stripe_size,
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is {value!r}, and sequences are not split over devices; accepted: its default (batch and heads may be "
                "split: docs/jax.md, Devices)"
            )


def window_of(window_size: Any, kind: AttnMaskType) -> tuple[int, int]:
    """Returns (left, right), -1 for open; raises ValueError for what is no window of the mask type."""
    sides = (-1, -1) if window_size is None else tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    whole = [as_index(side) for side in sides]
    if len(whole) != 2 or None in whole:
        raise ValueError(f"window_size is {window_size!r}; accepted: None, or a pair of ints (left, right), negative for open")
    left, right = (max(side, -1) for side in whole if side is not None)
    if kind.is_causal() and right > 0:
        raise ValueError(f"window_size is {(left, right)} with attn_mask_type {kind.name}; accepted: 0, or open, on the right")
    return left, right


def _offset(kind: AttnSoftmaxType, offset: Any, heads: int) -> Any:
    """Returns the offset of each head, [h], or None."""
    if kind is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
        if offset is not None:
            raise ValueError(f"softmax_offset is given with softmax_type {kind.name}; accepted: None")
        return None
    if offset is None or jnp.shape(offset) != (1, heads, 1, 1) or offset.dtype != jnp.float32:
        raise ValueError(f"softmax_offset is {_named(offset)} with {kind.name}; accepted: float32 {(1, heads, 1, 1)}")
    return jnp.asarray(offset).reshape(heads)


def _words(seed: Any) -> Any:
    """Returns the first two words of a seed, as a key of jax.random has them."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if not isinstance(seed, (jax.Array, np.ndarray)) or not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size < 2:
        raise ValueError(
            f"seed is {_named(seed)} with dropout; accepted: a key of jax.random, or an array of two uint32 or more, as of "
            "jax.random.key_data(key)"
        )
    return jnp.asarray(seed).reshape(-1)[:2].astype(jnp.uint32)


def _named(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") and hasattr(x, "shape") else describe(x)
