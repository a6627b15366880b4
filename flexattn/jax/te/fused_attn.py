"""Stand-ins for TransformerEngine's `fused_attn` and its query for kernels in JAX, with their signatures, run by `flexattn.jax`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from torch import Tensor

from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import as_index
from flexattn.integrations.te.backend_selection import environment
from flexattn.integrations.te.score_mod import TEScoreMod
from flexattn.jax.front import attend, explain
from flexattn.jax.mods import InTorch
from flexattn.jax.te.names import AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout, member, name_of
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
    score_mod: Callable[..., object] | None = None,
    score_mod_bprop: Callable[..., object] | None = None,
    score_mod_tensors: Mapping[str, object] | None = None,
    score_mod_bprop_tensors: Mapping[str, object] | None = None,
) -> jax.Array:
    """Returns attention with the arguments of TransformerEngine's `transformer_engine.jax.attention.fused_attn`.

    Works in all transforms of `flexattn.jax.attention`: jit, grad, vmap, scan, checkpoint, shard_map. A score_mod combines with
    every other argument; TransformerEngine allows none.

    Source of the signature: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py and, for
    score_mod, https://github.com/NVIDIA/TransformerEngine/pull/2985.

    Args:
        qkv: (qkv,), (q, kv) or (q, k, v), according to qkv_layout, in the dtypes of `attention`. qkv is [b, s, 3, h, d], q
            [b, sq, h, d], kv [b, skv, 2, h_kv, d], k [b, skv, h_kv, d] and v [b, skv, h_kv, d_v].
        bias: [b, h, sq, skv], by positions in the rows of q and k; any dim may be 1. In q's dtype or float32, with a bias type;
            otherwise None. Differentiable.
        sequence_descriptor: positions of the sequences, used if the mask type has PADDING in its name, as in TransformerEngine;
            otherwise None. Or a mask [b, 1, sq, skv], 1 for a hidden pair.
        seed: a key of jax.random, or the integers of one or several keys, of which the first two are used. None without dropout.
        scaling_factor: scale of q k^T.
        dropout_probability: dropout probability of a softmax weight, if is_training is True.
        max_segments_per_seq: at least 1, otherwise ignored.
        window_size: (left, right), negative for open. None: both open. With a causal type right must be 0 or open.
        context_checkpoint_name: name of the result, and of the backward's other inputs, for `jax.checkpoint` policies.
        softmax_offset: float32 [1, h, 1, 1] with LEARNABLE_SOFTMAX. Differentiable.
        score_mod, score_mod_bprop: callbacks (graph, score or dscore, tensors) that call cuDNN frontend's pointwise nodes. Their
            positions are those in the rows of q and k.
        score_mod_tensors, score_mod_bprop_tensors: name -> array of up to 4 dims that broadcasts to [b, h, sq, skv], or a Python
            or NumPy number, for the callbacks. Without a score_mod_bprop, arrays receive gradients; with one, these raise.
        context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis, stripe_size: must be the defaults.

    Returns [b, sq, h, d_v] in q's dtype. Padding, and a query that sees no key, get 0.

    Raises:
        ValueError, TypeError: if an argument is invalid, or does not combine with another; the text names it.
        NotImplementedError: for context parallelism.
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
        raise ValueError(f"bias is {_describe(bias)} with attn_bias_type {bias_type.name}; accepted: {accepted}")
    rows = Rows(q.shape[0], (q.shape[1], k.shape[1]), layout.is_thd(), kind, window_of(window_size, kind))
    sequences = sequences_of(sequence_descriptor, rows, has_positions=bias is not None or score_mod is not None)
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
        arguments["score_mod"] = _recorded(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
    else:
        for name, value in (
            ("score_mod_bprop", score_mod_bprop),
            ("score_mod_tensors", score_mod_tensors),
            ("score_mod_bprop_tensors", score_mod_bprop_tensors),
        ):
            if value is not None:
                raise ValueError(f"{name} comes without a score_mod; accepted: None, or a score_mod with it")
    if not sequences.is_packed:
        return attend(arguments, (context_checkpoint_name,) * 2)[0]
    arguments |= {name: x.reshape(-1, *x.shape[2:]) for name, x in (("q", q), ("k", k), ("v", v))}
    out = attend(arguments | {"qkv_format": "thd"}, (context_checkpoint_name,) * 2)[0]
    return out.reshape(*q.shape[:2], *out.shape[1:])


def separate(qkv: Sequence[jax.Array], layout: QKVLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k and v from the arrays of a layout; raises ValueError or TypeError for other counts and shapes."""
    names = ("qkv",) if layout.is_qkvpacked() else ("q", "kv") if layout.is_kvpacked() else ("q", "k", "v")
    if not isinstance(qkv, (tuple, list)) or len(qkv) != len(names):
        description = f"a {type(qkv).__name__}" + (f" of {len(qkv)}" if isinstance(qkv, (tuple, list)) else "")
        raise ValueError(f"qkv is {description} with qkv_layout {layout.name}; accepted: ({', '.join(names)})")
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


def _refuse_context_parallelism(strategy: object, is_balanced: object, axis: object, stripe_size: object) -> None:
    non_defaults = {
        "context_parallel_strategy": None if getattr(strategy, "name", strategy) == "DEFAULT" else strategy,
        "context_parallel_causal_load_balanced": is_balanced or None,
        "context_parallel_axis": axis or None,
        "stripe_size": stripe_size,
    }
    for name, value in non_defaults.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is {value!r}, but sequences are not split over devices; accepted: its default (batch and heads may be "
                "split: docs/jax.md, Devices)"
            )


def window_of(window_size: object, kind: AttnMaskType) -> tuple[int, int]:
    """Returns (left, right), -1 for open; raises ValueError for a window that the mask type does not support."""
    sides = (-1, -1) if window_size is None else tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    ints = [as_index(side) for side in sides]
    if len(ints) != 2 or None in ints:
        raise ValueError(f"window_size is {window_size!r}; accepted: None, or a pair of ints (left, right), negative for open")
    left, right = (max(side, -1) for side in ints if side is not None)
    if kind.is_causal() and right > 0:
        raise ValueError(f"window_size is {(left, right)} with attn_mask_type {kind.name}; accepted: 0, or open, on the right")
    return left, right


def _offset(kind: AttnSoftmaxType, offset: jax.Array | None, heads: int) -> jax.Array | None:
    """Returns the offset of each head, [h], or None."""
    if kind is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
        if offset is not None:
            raise ValueError(f"softmax_offset is set with softmax_type {kind.name}; accepted: None")
        return None
    if offset is None or jnp.shape(offset) != (1, heads, 1, 1) or offset.dtype != jnp.float32:
        raise ValueError(f"softmax_offset is {_describe(offset)} with {kind.name}; accepted: float32 {(1, heads, 1, 1)}")
    return jnp.asarray(offset).reshape(heads)


def _words(seed: jax.Array) -> jax.Array:
    """Returns the first two words of a seed, as in a key of jax.random."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if not isinstance(seed, (jax.Array, np.ndarray)) or not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size < 2:
        raise ValueError(
            f"seed is {_describe(seed)} with dropout; accepted: a key of jax.random, or an array of at least two uint32, such as "
            "jax.random.key_data(key)"
        )
    return jnp.asarray(seed).reshape(-1)[:2].astype(jnp.uint32)


def _describe(x: object) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") and hasattr(x, "shape") else describe(x)


def _split(argument: str, tensors: object) -> tuple[dict[str, object], dict[str, jax.Array]]:
    """Splits a dict of callbacks' tensors: numbers are part of the call, arrays of 0 to 4 dims are its operands.

    Returns the dict with None for each array, and the arrays. Raises TypeError if it is not a dict, or if a name is not a str.
    """
    if tensors is None:
        return {}, {}
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{argument} is a {type(tensors).__name__}; accepted: a dict from names to arrays and numbers, or None")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the name {name!r}, a {type(name).__name__}; accepted: str names")
    arrays = {name: jnp.asarray(x) for name, x in tensors.items() if isinstance(x, (jax.Array, np.ndarray))}
    return {name: None if name in arrays else x for name, x in tensors.items()}, arrays


def _recorded(
    score_mod: Callable[..., Any], score_mod_bprop: Callable[..., Any] | None, tensors: object, bprop_tensors: object
) -> InTorch:
    """Returns callbacks as a score_mod of `flexattn.jax.attention`.

    Equal callbacks with tensors of equal shapes share a program, even if they are different objects.

    Args:
        score_mod: score_mod(graph, score, tensors) -> the modified score.
        score_mod_bprop: score_mod_bprop(graph, dscore, tensors) -> the gradient of the score. None: the gradient is derived.
        tensors: name -> array or number, for score_mod. Arrays, [b, h, sq, skv] or the last of these dims, with 1 for a broadcast
            dim, may be traced. If score_mod_bprop is None, they receive gradients.
        bprop_tensors: the same for score_mod_bprop.

    Raises:
        TypeError, ValueError: as `flexattn.integrations.te.TEScoreMod`; ValueError if a gradient of one of the tensors is needed
            although there is a score_mod_bprop, when the call is traced.
    """
    if bprop_tensors and score_mod_bprop is None:
        raise ValueError(
            "score_mod_bprop_tensors comes without a score_mod_bprop; accepted: None, because the derived gradient has none"
        )
    values, arrays = _split("score_mod_tensors", tensors)
    bprop_values, bprop_arrays = _split("score_mod_bprop_tensors", bprop_tensors)

    def make(stand_ins: tuple[Tensor, ...]) -> TEScoreMod:
        forward_tensors = dict(zip(arrays, stand_ins[: len(arrays)], strict=True))
        backward_tensors = dict(zip(bprop_arrays, stand_ins[len(arrays) :], strict=True))
        if score_mod_bprop is None:
            return TEScoreMod(score_mod, None, values | forward_tensors)
        for argument, tensors_of_role in (("score_mod_tensors", forward_tensors), ("score_mod_bprop_tensors", backward_tensors)):
            for name, t in tensors_of_role.items():
                if t.requires_grad:
                    raise ValueError(
                        f"{argument}[{name!r}] is differentiated, but score_mod_bprop does not compute its gradient; accepted: "
                        "jax.lax.stop_gradient of it, or no score_mod_bprop, so that the gradient is derived"
                    )
        return TEScoreMod(score_mod, score_mod_bprop, values | forward_tensors, bprop_values | backward_tensors)

    return InTorch(make, (*arrays.values(), *bprop_arrays.values()))


def is_fused_attn_kernel_available(
    is_training: bool,
    q_dtype: DTypeLike,
    kv_dtype: DTypeLike,
    qkv_layout: QKVLayout,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    softmax_type: AttnSoftmaxType,
    dropout_probability: float,
    q_num_heads: int,
    kv_num_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size: tuple[int, int] | None = None,
) -> bool:
    """Returns whether `fused_attn` supports such calls and their gradients on JAX's target: its first CUDA device, or a CPU.

    Dtypes are JAX's. dropout_probability is only used if is_training is True. Nothing is run.

    Source of the signature: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py

    Raises ValueError if an argument is not a member of its enumeration, or if the window is invalid.
    """
    kind = member(AttnMaskType, "attn_mask_type", attn_mask_type)
    layout = member(QKVLayout, "qkv_layout", qkv_layout)
    softmax = member(AttnSoftmaxType, "softmax_type", softmax_type)
    bias_type = member(AttnBiasType, "attn_bias_type", attn_bias_type)
    rows = Rows(1, (q_max_seqlen, kv_max_seqlen), layout.is_thd(), kind, window_of(window_size, kind))
    batch_dim = () if layout.is_thd() else (1,)
    kv = (*batch_dim, kv_max_seqlen, kv_num_heads)
    arrays = {
        "q": jax.ShapeDtypeStruct((*batch_dim, q_max_seqlen, q_num_heads, head_dim_qk), q_dtype),
        "k": jax.ShapeDtypeStruct((*kv, head_dim_qk), kv_dtype),
        "v": jax.ShapeDtypeStruct((*kv, head_dim_v), kv_dtype),
    }
    arguments: dict[str, object] = {"qkv_format": "thd" if layout.is_thd() else "bshd"}
    arguments |= {"bias_type": name_of(bias_type), "softmax_type": name_of(softmax)}
    arguments |= rows.padded_band if kind.is_padding() else rows.band
    if kind.is_padding():
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jax.ShapeDtypeStruct((2,), jnp.int32))
    if layout.is_thd():
        arguments |= {"max_seqlen_q": q_max_seqlen, "max_seqlen_kv": kv_max_seqlen}
    if bias_type is not AttnBiasType.NO_BIAS:
        arrays["bias"] = jax.ShapeDtypeStruct((1, q_num_heads, q_max_seqlen, kv_max_seqlen), q_dtype)
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        arrays["softmax_offset"] = jax.ShapeDtypeStruct((q_num_heads,), jnp.float32)
    if is_training and dropout_probability:
        arrays["rng_state"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
        arguments["dropout_p"] = dropout_probability

    def run_explain(operands: dict[str, object]) -> None:
        explain(**operands, **arguments)

    try:
        jax.eval_shape(run_explain, arrays)
    except (BackendError, ValueError, TypeError):
        return False
    return True
