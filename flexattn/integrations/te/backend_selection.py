"""TransformerEngine's backend queries, answered by the rules that select a call's backend, with the reasons.

Flash attention is never available, "fused" is a Triton or cuDNN kernel, and "unfused" is the eager backend.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import torch

from flexattn.dispatch.select import unsupported
from flexattn.dispatch.spec import AttentionSpec, Direction, Fp8, length_class, make_band
from flexattn.integrations.te.context_parallel import STRATEGIES
from flexattn.integrations.te.names import AttnBiasType, AttnMaskType, FusedAttnBackend, SoftmaxType, parse_layout
from flexattn.validation import check_name
from flexattn.warn import warn_once

FUSED = ("triton", "cudnn")
UNFUSED = ("eager",)
_BIAS_SHAPES = ("bhss", "1hss", "b1ss", "11ss", "111s")
# Variables that select TransformerEngine's backends and have no effect in flexattn.
_IGNORED = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN_BACKEND", "NVTE_FUSED_ATTN_USE_FAv2_BWD", "NVTE_APPLY_QK_LAYER_SCALING")
_DEFAULT_PAGE_SIZE = 64  # tokens
_MODEL_CONFIG_NAMES = {
    "core_attention_bias_type": "attn_bias_type",
    "core_attention_bias_shape": "bias_shape",
    "attention_dropout": "dropout_p",
}


class Environment(NamedTuple):
    """TransformerEngine's environment variables that flexattn reads.

    allows_fused: NVTE_FUSED_ATTN is not 0. allows_unfused: NVTE_UNFUSED_ATTN is not 0. is_deterministic:
    NVTE_ALLOW_NONDETERMINISTIC_ALGO is 0.
    """

    allows_fused: bool
    allows_unfused: bool
    is_deterministic: bool


def environment(ignored: tuple[str, ...] = _IGNORED) -> Environment:
    """Returns the variables' current values, and warns once about set variables that have no effect.

    ignored: names of these variables.

    Raises ValueError if a value is neither 0 nor 1.
    """
    for name in ignored:
        if name in os.environ:
            warn_once(name, f"{name} is set but has no effect: flexattn selects its kernels itself (docs/te.md)")
    return Environment(_flag("NVTE_FUSED_ATTN"), _flag("NVTE_UNFUSED_ATTN"), not _flag("NVTE_ALLOW_NONDETERMINISTIC_ALGO"))


def _flag(name: str) -> bool:
    value = os.environ.get(name, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}; accepted: 0, 1")
    return value == "1"


@dataclasses.dataclass(eq=True)
class AttentionParams:
    """A call of DotProductAttention without its tensors, in TransformerEngine's fields and with its defaults.

    Lengths are tokens; `core_attention_bias_shape` is one of bhss, 1hss, b1ss, 11ss, 111s. These fields are accepted and ignored:
    qkv_type, batch_size, alibi_slopes_shape, pad_between_seqs, fp8_meta, num_splits, checkpoint_core_attention, has_score_mod,
    has_score_mod_bprop (`flexattn.explain` checks a score_mod).
    If context_parallel is True and cp_size is above 1, lengths are those of the whole sequence. The answer is then for the call of
    one part, and fp8_output is unsupported. Otherwise fp8_output is ignored.
    """

    qkv_type: Any = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = True
    softcap: float = 0.0
    alibi_slopes_shape: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: str | None = "1hss"
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: Any = None
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False


class Answer(NamedTuple):
    """Result of `get_attention_backend`, with the reasons.

    rejected: (kind or backend, direction or "", reason) for each backend that cannot run the call.
    """

    use_fused_attention: bool
    use_unfused_attention: bool
    fused_attention_backend: FusedAttnBackend | None
    has_fused: bool
    has_unfused: bool
    rejected: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        chosen = "fused" if self.use_fused_attention else "unfused" if self.use_unfused_attention else "nowhere"
        lines = [f"not {name}{f' ({direction})' if direction else ''}: {reason}" for name, direction, reason in self.rejected]
        return "\n".join([f"attention runs {chosen}", *(f"  {line}" for line in lines)])


Backends = tuple[bool, None, bool, FusedAttnBackend | None, bool, list[bool]]


def get_attention_backend(attention_params: AttentionParams) -> Backends:
    """Returns the kind of backend that runs a call, as TransformerEngine's function of the same name does.

    Nothing is run or built, so cuDNN's answer is preliminary: its plan is not built. `explain_attention_backend` returns the
    reasons. The device is the current CUDA device, or the CPU if there is none.

    Returns:
        (use_flash_attention, flash_attention_backend, use_fused_attention, fused_attention_backend, use_unfused_attention,
        available_backends). The first is always False and the second None. available_backends is [flash, fused, unfused]; the
        first available kind is used.

    Raises:
        ValueError, TypeError: if a parameter is invalid; the text names it.
    """
    answer = explain_attention_backend(attention_params)
    available = [False, answer.has_fused, answer.has_unfused]
    return False, None, answer.use_fused_attention, answer.fused_attention_backend, answer.use_unfused_attention, available


def is_fused_attn_available(
    config: object, dtype: torch.dtype, qkv_layout: str = "bshd_bshd_bshd", is_training: bool = True
) -> bool:
    """Returns whether a fused kernel runs a configuration, like the function of the same name in TransformerEngine's tests.

    config: an `AttentionParams`, or an object with some of its fields as attributes, such as TransformerEngine's ModelConfig,
    whose attn_bias_type, bias_shape and dropout_p are read too.
    """
    names = [field.name for field in dataclasses.fields(AttentionParams)]
    fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
    fields |= {name: getattr(config, other) for name, other in _MODEL_CONFIG_NAMES.items() if hasattr(config, other)}
    fields |= {"qkv_dtype": dtype, "qkv_layout": qkv_layout, "is_training": is_training}
    return get_attention_backend(AttentionParams(**fields))[2]


def explain_attention_backend(attention_params: AttentionParams) -> Answer:
    """Returns `get_attention_backend`'s decision, with the reason against each backend that cannot run the call. Print it.

    Raises the same errors as `get_attention_backend`.
    """
    if not isinstance(attention_params, AttentionParams):
        raise TypeError(f"attention_params is {type(attention_params).__name__}; accepted: an AttentionParams")
    p, variables = attention_params, environment()
    spec = spec_of(p, variables.is_deterministic)
    rejected = [("every backend", "", reason) for reason in _unsupported_features(p)]
    directions: tuple[Direction, ...] = ("forward", "backward") if p.is_training else ("forward",)
    has: dict[str, bool] = {}
    for kind, names in (("fused", FUSED), ("unfused", UNFUSED)):
        reasons = {(name, d): unsupported(name, spec, d, name) for name in names for d in directions}
        rejected += [(name, d, reason) for (name, d), reason in reasons.items() if reason is not None]
        by_direction = [{name for name in names if reasons[name, d] is None} for d in directions]
        # Each backend has its own dropout mask, so both directions of a call with dropout must run on the same backend.
        has[kind] = bool(set.intersection(*by_direction)) if spec.dropout else all(by_direction)
    has["unfused"] &= not (p.cuda_graph and spec.padding)
    if p.cuda_graph and spec.padding:
        rejected.append(("eager", "", "it reads cu_seqlens on the host, which a CUDA graph cannot capture"))
    for kind, allowed, name in (
        ("fused", variables.allows_fused, "NVTE_FUSED_ATTN"),
        ("unfused", variables.allows_unfused, "NVTE_UNFUSED_ATTN"),
    ):
        if not allowed:
            rejected.append((kind, "", f"{name} is 0"))
            has[kind] = False
    if _unsupported_features(p):
        has = dict.fromkeys(has, False)
    fused_kind = FusedAttnBackend.FP8 if p.fp8 else FusedAttnBackend.F16_arbitrary_seqlen
    use_fused = has["fused"]
    use_unfused = has["unfused"] and not use_fused
    return Answer(use_fused, use_unfused, fused_kind if use_fused else None, has["fused"], has["unfused"], tuple(rejected))


def _unsupported_features(p: AttentionParams) -> list[str]:
    """Returns errors for features of a call that no backend supports."""
    errors = []
    if p.context_parallel and p.cp_size > 1:
        errors += _unsupported_over_ranks(p)
    if _page_size(p):
        if p.is_training:
            errors.append("keys and values are in pages, which have no gradients; accepted: is_training=False")
        if p.fp8:
            errors.append("keys and values are in pages, which FP8 does not support; accepted: fp8=False")
        if "padding" not in p.attn_mask_type:
            errors.append(
                f"k and v are in pages and attn_mask_type is {p.attn_mask_type!r}; accepted: a type with padding in its name"
            )
    return errors


def _unsupported_over_ranks(p: AttentionParams) -> list[str]:
    """Returns errors for features that context parallelism does not support."""
    check_name("cp_comm_type", p.cp_comm_type, tuple(STRATEGIES))
    has_bias = p.core_attention_bias_type in ("pre_scale_bias", "post_scale_bias")
    is_dense = parse_layout(p.qkv_layout).q_format != "thd"
    exchanges_heads = p.cp_comm_type.startswith("a2a")
    lengths = {"max_seqlen_q": p.max_seqlen_q, "max_seqlen_kv": p.max_seqlen_kv} if is_dense else {}
    requests = {
        f"attn_mask_type {p.attn_mask_type!r}": p.attn_mask_type == "arbitrary",
        "inference_params": p.inference_params is not None,
        "fp8_output": p.fp8_output,
        "a bias and padding": has_bias and (not is_dense or "padding" in p.attn_mask_type),
        f"a bias by cp_comm_type {p.cp_comm_type!r}": has_bias and exchanges_heads and p.core_attention_bias_shape != "111s",
        f"num_heads {p.num_heads}, fewer than ranks": p.cp_comm_type == "a2a" and p.num_heads < p.cp_size,
    } | {f"{name} {length}, not a multiple of 2 * cp_size": length % (2 * p.cp_size) != 0 for name, length in lengths.items()}
    return [
        f"cp_size is {p.cp_size} with {feature}; accepted: 1, or a call without it"
        for feature, is_requested in requests.items()
        if is_requested
    ]


def _page_size(p: AttentionParams) -> int:
    """Returns the tokens of a page: `_DEFAULT_PAGE_SIZE` if only the layout indicates pages, and 0 without pages."""
    if getattr(p.inference_params, "is_paged", False):
        return int(p.inference_params.page_size)
    return _DEFAULT_PAGE_SIZE if parse_layout(p.qkv_layout).is_paged else 0


def spec_of(p: AttentionParams, is_deterministic: bool = False) -> AttentionSpec:
    """Returns the spec of a call with these parameters, without its score_mod and its arbitrary mask.

    Raises ValueError for unknown names, and for thd without a padding mask.
    """
    check_name("attn_mask_type", p.attn_mask_type, (*AttnMaskType, "arbitrary"))
    check_name("core_attention_bias_type", p.core_attention_bias_type, tuple(AttnBiasType))
    check_name("softmax_type", p.softmax_type, tuple(SoftmaxType))
    layout = parse_layout(p.qkv_layout)
    mask = "no_mask" if p.attn_mask_type == "arbitrary" else p.attn_mask_type
    if layout.q_format == "thd" and "padding" not in mask:
        raise ValueError(f"attn_mask_type is {mask!r} with qkv_layout {p.qkv_layout!r}; accepted: a type with padding in its name")
    is_causal = "causal" in mask
    left, right = (-1, -1) if p.window_size is None else p.window_size
    diagonal = None if is_causal else p.bottom_right_diagonal
    has_bias = p.core_attention_bias_type in ("pre_scale_bias", "post_scale_bias")
    bias_dims = None
    if has_bias:
        shape = p.core_attention_bias_shape
        check_name("core_attention_bias_shape", shape, _BIAS_SHAPES)
        bias_dims = tuple(size != "1" for size in str(shape))
    is_cuda = torch.cuda.is_available()
    fp8 = Fp8((False, False, False), 0, p.qkv_dtype, torch.float8_e4m3fn, bf16_backward=False)
    return AttentionSpec(
        q_format=layout.q_format,
        kv_format="bshd" if _page_size(p) else layout.kv_format,
        dtype=torch.float8_e4m3fn if p.fp8 else p.qkv_dtype,
        num_heads=p.num_heads,
        num_heads_kv=p.num_gqa_groups,
        head_dim_qk=p.head_dim_qk,
        head_dim_v=p.head_dim_v,
        padding="padding" in mask,
        band=make_band(mask, (left, 0 if is_causal else right), diagonal),
        bias_type=p.core_attention_bias_type,
        bias_dims=bias_dims,  # type: ignore[arg-type]  # a tuple of four
        softmax_type=p.softmax_type,
        softcap=p.softcap != 0,
        dropout=p.is_training and p.attention_dropout > 0,
        return_max_logit=p.return_max_logit,
        needs_grad=p.is_training,
        needs_bias_grad=p.is_training and has_bias and p.core_attention_bias_requires_grad,
        deterministic=p.deterministic or is_deterministic,
        device_type="cuda" if is_cuda else "cpu",
        capability=_capability() if is_cuda else None,
        length_q=length_class(p.max_seqlen_q),
        length_kv=length_class(p.max_seqlen_kv),
        dropout_in_sixteenths=p.attention_dropout * 16 % 1 == 0,
        fp8=fp8 if p.fp8 else None,
        page_size=_page_size(p),
        has_origin=p.is_training and p.attention_dropout > 0 and p.context_parallel and p.cp_size > 1,
    )


@functools.cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
