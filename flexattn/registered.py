"""Registers the operators of one process, `torch.ops.flexattn.*`, when flexattn is imported. It imports only torch.

A graph from torch.export or AOTInductor finds the operators by name if flexattn is imported. The module of an implementation is
imported when that first runs, because few processes run all of them. `distributed.compiled` has the operators over ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_CALL = """Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? softmax_offset,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_kv_padded, Tensor? rng_state,
    Tensor? seqused_q, Tensor? seqused_kv, Tensor? page_table, Tensor? kv_indices,
    Tensor? kv_index_counts, Tensor? memory,
    SymInt max_seqlen_q, SymInt max_seqlen_kv, Scalar softmax_scale, Scalar softcap, Scalar dropout_p,
    Tensor[] mod_tensors, float[] mod_numbers, Tensor[] block_mask, Tensor[] descales, Tensor[] copies16,
    str qkv_format, bool padding, int? window_left, int? window_right, bool bottom_right, str bias_type, str softmax_type,
    bool return_max_logit, bool needs_grad, bool needs_bias_grad, bool deterministic, str backend,
    str mods, bool has_floor, int block_size_q, int block_size_kv, str fp8_out, str fp8_grad, int fp8_block_rows,
    bool bf16_backward, bool is_part, str out_format, str dq_format, str dkv_format, str dqkv_packing,
    bool batch_invariant, str fp32_gradients='none', bool fp32_out=False, int kv_block=1"""
_LENGTHS = "Tensor? cu_seqlens{0}, Tensor? cu_seqlens{0}_padded, SymInt max_seqlen{0}"
_NORM_ROPE = """Tensor q, Tensor k, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight,
    float eps, bool interleaved, bool zero_centered"""
_KIND = "str granularity, int block_rows, int margin, bool rotation"

# name -> (schema, module). The module defines `<name>_implementation` and, for shapes alone, `<name>_fake`.
_OPERATORS = {
    "attention_forward": (f"({_CALL}) -> (Tensor out, Tensor lse, Tensor max_logit)", "flexattn.ops"),
    "attention_forward_out": (  # writes out into the caller's memory
        f"({_CALL.replace('Tensor? memory', 'Tensor(a!) memory')}) -> (Tensor lse, Tensor max_logit)",
        "flexattn.ops",
    ),
    "attention_backward": (
        f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL})"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsoftmax_offset, Tensor[] dmod_tensors)",
        "flexattn.ops",
    ),
    "attention_statistics": (
        f"(Tensor lse, Tensor? rows, bool max_scores, bool entropy, bool column_sums, {_CALL})"
        " -> (Tensor max_scores, Tensor entropy, Tensor column_sums, Tensor row_weights)",
        "flexattn.statistics",
    ),
    "quantize": (
        f"(Tensor x, {_LENGTHS.format('')}, Tensor? scale, Tensor(a!)? history, str fmt, str dtype, {_KIND})"
        " -> (Tensor data, Tensor descale, Tensor amax)",
        "flexattn.fp8_ops",
    ),
    "quantize_qkv": (
        f"(Tensor q, Tensor k, Tensor v, {_LENGTHS.format('_q')}, {_LENGTHS.format('_kv')},"
        f" Tensor? scale_q, Tensor? scale_k, Tensor? scale_v,"
        f" Tensor(a!)? history_q, Tensor(b!)? history_k, Tensor(c!)? history_v, str qkv_format, {_KIND})"
        " -> (Tensor q8, Tensor k8, Tensor v8, Tensor descale_q, Tensor descale_k, Tensor descale_v)",
        "flexattn.fp8_ops",
    ),
    "unrotate": ("(Tensor dq, Tensor dk) -> (Tensor, Tensor)", "flexattn.fp8_ops"),
    "append_kv": (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor? page_table, Tensor seqused_kv, "
        "Tensor? cu_seqlens_q, Tensor? seqused_q, str qkv_format, Tensor? descale_k=None, Tensor? descale_v=None, "
        "Tensor(c!)? token_descales_k=None, Tensor(d!)? token_descales_v=None) -> ()",
        "flexattn.append",
    ),
    "qk_norm_rope": (f"({_NORM_ROPE}) -> (Tensor, Tensor)", "flexattn.norm_rope"),
    "qk_norm_rope_backward": (
        f"(Tensor dq_out, Tensor dk_out, {_NORM_ROPE}) -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
        "flexattn.norm_rope",
    ),
}


def _later(module: str, name: str) -> Callable[..., Any]:
    def run(*arguments: object, **named: object) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **named)

    return run


def _refuse_vmap(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"flexattn::{name} has no rule for torch.vmap, as it may write to its arguments; call it outside of torch.vmap, for "
            "all entries at once with the mapped dim as a part of the batch dim, or for one entry after another"
        )

    return refuse


_library: Any = torch.library.Library("flexattn", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, (_schema, _module) in _OPERATORS.items():
    _library.define(f"{_name}{_schema}")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _later(_module, f"{_name}_implementation"), _key)
    # Fake tensors use this key too. `register_fake` would search for its caller in the files of all modules: 2 ms.
    _library.impl(_name, _later(_module, f"{_name}_fake"), "Meta")
    if "!" in _schema:  # torch's own error names neither a cause nor a remedy
        _library.impl(_name, _refuse_vmap(_name), "FuncTorchBatched")
