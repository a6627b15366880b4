"""Stand-in for TransformerEngine's `DotProductAttention`, with the same arguments, run by `flexattn.attention`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexattn import fp8, ops
from flexattn.dispatch.spec import Results, parse_format
from flexattn.in_layout import attend
from flexattn.integrations.te import context_parallel
from flexattn.integrations.te.backend_selection import Environment, environment
from flexattn.integrations.te.inference import InferenceParams
from flexattn.integrations.te.layer_scaling import LayerScaling, is_recomputed
from flexattn.integrations.te.masks import (
    ARBITRARY,
    Window,
    check_unread_mask,
    lengths_of,
    mask_mod_of,
    mask_type_of,
    masks_of,
    window_of,
)
from flexattn.integrations.te.names import AttnBiasType, SoftmaxType
from flexattn.integrations.te.packed_inputs import separate
from flexattn.integrations.te.policies import DISPATCHES, calls_of, check_call, policies_of
from flexattn.integrations.te.quantizers import in_fp8
from flexattn.integrations.te.recipe import Recipe, active_recipe
from flexattn.integrations.te.score_mod import TEScoreMod
from flexattn.validation import check_count, check_flag, check_flags, check_name, describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMATS = ("sbhd", "bshd", "thd")


class DotProductAttention(torch.nn.Module):
    """Module for softmax(q k^T * softmax_scale) v, with TransformerEngine's arguments and semantics.

    docs/te.md lists the differences.

    Args:
        num_attention_heads: query heads of all ranks of tp_group.
        kv_channels: head dim of q, k and v, or a pair (of q and k, of v).
        num_gqa_groups: heads of k and v. None: num_attention_heads.
        attention_dropout: dropout probability of a weight, in training mode.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: one of `AttnMaskType`, optionally with "," in place of "_", or "arbitrary".
        window_size: (left, right), inclusive; -1 is open. None: the widest window that the mask type allows.
        bottom_right_diagonal: whether windows and ALiBi with no_mask and padding are aligned bottom-right. None: True.
        softcap: c above 0 turns each scaled score s into c * tanh(s / c), inside of a post-scale bias and ALiBi.
        sequence_parallel, tp_size, get_rng_state_tracker, tp_group: tensor parallelism. This rank has num_attention_heads //
            tp_size heads. Without sequence_parallel, the dropout seed is drawn inside the tracker's `fork()`.
        layer_number: this layer's number in the cache of `InferenceParams`.
        attention_type: "self" or "cross"; ignored.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in `set_context_parallel_group`.
        softmax_scale: scale of the scores. None: 1 / sqrt(head dim of q and k).
        softmax_type: "vanilla", "off-by-one" or "learnable", which adds a parameter softmax_offset, [h], initially zeros.
        return_max_logit: if True, `forward` returns (out, max_logit).
        name: ignored.

    Raises:
        ValueError, TypeError: if an argument is invalid.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | list[ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        check_name("qkv_format", qkv_format, FORMATS)
        check_name("attention_type", attention_type, ("self", "cross"))
        check_name("softmax_type", softmax_type, tuple(SoftmaxType))
        dims = kv_channels if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
        for argument, count in (
            ("num_attention_heads", num_attention_heads),
            ("num_gqa_groups", num_attention_heads if num_gqa_groups is None else num_gqa_groups),
            *(("kv_channels", dim) for dim in dims),
        ):
            check_count(argument, count, 1, "an int of at least 1")
        if len(dims) != 2:
            raise ValueError(f"kv_channels is {kv_channels!r}; accepted: an int, or a pair (head dim of q and k, of v)")
        check_flags(sequence_parallel=sequence_parallel, return_max_logit=return_max_logit)
        check_flag("bottom_right_diagonal", bottom_right_diagonal, optional=True)
        check_count("tp_size", tp_size, 1, "an int of at least 1, the ranks of tensor parallelism")
        ranks = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if not isinstance(attention_dropout, (int, float)) or not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout is {attention_dropout!r}; accepted: a probability in [0, 1)")
        if num_attention_heads % groups or groups % ranks:
            raise ValueError(
                f"num_attention_heads is {num_attention_heads}, num_gqa_groups {groups} and tp_size {ranks}; accepted: heads that "
                "are a multiple of the groups, and groups that are a multiple of the ranks"
            )
        self.head_dim_qk, self.head_dim_v = dims
        self.num_heads, self.num_heads_kv = num_attention_heads // ranks, groups // ranks
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.num_gqa_groups_per_partition = self.num_heads_kv
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = dims
        self.attention_type, self.sequence_parallel = attention_type, sequence_parallel
        self.tp_size, self.tp_group = ranks, tp_group
        self.qkv_format = qkv_format
        self.attn_mask_type = mask_type_of(attn_mask_type)
        self.window_size = window_of(self.attn_mask_type, window_size)
        self.bottom_right_diagonal, self.softcap = bottom_right_diagonal, softcap
        self.attention_dropout = attention_dropout
        self.layer_number = layer_number
        self.softmax_scale, self.softmax_type = softmax_scale, softmax_type
        self.return_max_logit = return_max_logit
        self.deterministic = self._environment().is_deterministic
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        self._last_recipe: Recipe | None = None  # recipe of the last forward
        self._scaling = LayerScaling(self.num_heads, self.num_heads_kv)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # on the GPU by default, as in TransformerEngine's modules
        if softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(self.num_heads, device=device), persistent=False)
        elif softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(self.num_heads, device=device))
        else:
            self.softmax_offset = None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | list[ProcessGroup] | None,
        cp_global_ranks: list[int] | None,
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Sets the ranks that share sequences. None or a group of one rank: each rank has whole sequences.

        `forward` then takes this rank's tokens. Rank r of n has chunks r and 2 * n - 1 - r of a sequence's 2 * n chunks. With thd
        each sequence is cut by itself, with its padding. cu_seqlens are those of the whole sequences, and are read on the host,
        once for each tensor. A bias has the rows of this rank's queries, and all keys.

        Args:
            cp_group: a process group; for "a2a+p2p" a list [a2a group, p2p group].
            cp_global_ranks: for "a2a+p2p" all global ranks, ascending, the ranks of an a2a group one after another; otherwise
                ignored.
            cp_stream: ignored; collectives use their own streams.
            cp_comm_type: "p2p" sends keys around a ring. "all_gather" gathers all keys. "a2a" exchanges heads for tokens.
                "a2a+p2p" exchanges heads within an a2a group, and sends keys around a ring between the groups.

        Raises:
            ValueError, TypeError: if an argument is invalid; the text names it, its value and the accepted values.
        """
        self._ranks = context_parallel.ranks_of(cp_group, cp_global_ranks, cp_comm_type)
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = cp_group, cp_global_ranks, cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: object = None,
        key_layer: object = None,
        value_layer: object = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., object] | None = None,
        score_mod_bprop: Callable[..., object] | None = None,
        score_mod_tensors: Mapping[str, object] | None = None,
        score_mod_bprop_tensors: Mapping[str, object] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Sequence[Mapping[str, object]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Any:
        """Returns attention's output with merged heads, [..., h * d_v], in q's format, or (out, max_logit) with return_max_logit.

        b is the batch, h the query heads of this rank, sq and skv the tokens of a sequence, t the tokens of all sequences.

        Args:
            query_layer, key_layer, value_layer: [sq, b, h, d], [b, sq, h, d] or [t, h, d], according to the format. They are
                float16, bfloat16 or float32; or FP8 tensors with one scale each, outside of autograd.
            attention_mask: bool, True for hidden keys. With a padding type and no cu_seqlens: [b, 1, 1, s], or a pair of them.
                With "arbitrary": broadcastable to [b, h, sq, skv]. Other types do not read it, and raise on a CPU or with
                FLEXATTN_CHECK=1 if the mask hides a key that the type shows. With a cp_group the mask is not checked.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softcap: None: the constructor's value.
            cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], with a padding type.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [b + 1], thd only, the sequences' start offsets.
            max_seqlen_q, max_seqlen_kv: thd only, at least the longest sequence. None: the total of tokens, which avoids a wait
                for the device.
            checkpoint_core_attention: if True, the backward recomputes attention, with the same weights dropped.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: [b, h, sq, skv]; any dim may be 1. Differentiable.
            alibi_slopes: float32 [h] or [b, h]. None: the slopes of Press et al. (2022).
            fast_zero_fill, num_splits: ignored.
            inference_params: the cache of keys and values, with a padding type; padding_causal means
                padding_causal_bottom_right.
            pad_between_seqs: whether the padded offsets are used. None: if they are not the same tensor as the plain offsets.
            fp8_output: if True, out is in FP8, a `flexattn.fp8.QuantizedTensor`. Needs FP8 tensors, or an `autocast` with fp8_dpa
                or fp8_mha.
            bf16_backward: if True, the backward of attention in FP8 runs on 16-bit tensors.
            score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors: as in `TEScoreMod`.
            qkv_layer: q, k and v in one tensor, with a dim of 3 at qkv_interleave_dim, -3 or -2.
            kv_layer: k and v in one tensor, with a dim of 2, beside query_layer. The gradient of a packed tensor is one tensor.
            thd_attention_policies: masks of their own for some of the packed sequences: dicts of sequence_ids (int32 or int64,
                ascending), mask_type (with padding in its name), window_size and optionally bottom_right_diagonal. Each sequence is
                in one of them. attn_mask_type and window_size are then None.
            thd_attention_policy_dispatch: "auto" or "grouped"; without effect.

        Raises:
            ValueError, TypeError: if an argument is invalid; the text names it, its value and the accepted values.
            BackendError: if no kernel supports the call; the text gives the reasons.
        """
        check_flags(checkpoint_core_attention=checkpoint_core_attention, fp8_output=fp8_output, bf16_backward=bf16_backward)
        for name, flag in (("bottom_right_diagonal", bottom_right_diagonal), ("pad_between_seqs", pad_between_seqs)):
            check_flag(name, flag, optional=True)
        if inference_params is not None and not isinstance(inference_params, InferenceParams):
            raise TypeError(f"inference_params is {describe(inference_params)}; accepted: flexattn.integrations.te.InferenceParams")
        fmt = self.qkv_format if qkv_format is None else qkv_format
        check_name("qkv_format", fmt, FORMATS)
        check_name("core_attention_bias_type", core_attention_bias_type, tuple(AttnBiasType))
        check_name("thd_attention_policy_dispatch", thd_attention_policy_dispatch, DISPATCHES)
        layers = {"query_layer": query_layer, "key_layer": key_layer, "value_layer": value_layer}
        q, k, v, packing = separate({**layers, "qkv_layer": qkv_layer, "kv_layer": kv_layer}, qkv_interleave_dim, fmt)
        q, k, v, fp8_arguments = _in_fp8((q, k, v))
        self._check_shapes((q, k, v), fmt)
        mask_type = self.attn_mask_type if attn_mask_type is None else mask_type_of(attn_mask_type)
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        policies = None
        if thd_attention_policies is not None:
            given = (attn_mask_type, window_size, attention_mask, core_attention_bias, inference_params, score_mod)
            is_fp8 = bool(fp8_arguments) or fp8_output or active_recipe() is not None
            check_call(fmt, given, core_attention_bias_type, is_fp8, self.return_max_logit)
            mask_type, window_size, policies = "padding", (-1, -1), policies_of(thd_attention_policies, diagonal)
        lengths = _Lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv)
        if self._ranks is not None:
            self._check_ranks(
                self._ranks,
                {
                    "attn_mask_type 'arbitrary'": mask_type == ARBITRARY,
                    "inference_params": inference_params is not None,
                    "FP8 tensors, which each rank would scale by itself": bool(fp8_arguments),
                    "fp8_output": fp8_output,
                    "thd_attention_policies": policies is not None,
                    "a core_attention_bias and padding": core_attention_bias is not None and "padding" in mask_type,
                },
            )
        if inference_params is not None:
            if packing:
                raise ValueError("inference_params comes with a packed tensor; accepted: query_layer, key_layer and value_layer")
            if inference_params.is_paged:
                named = dict(zip(layers, (q, k, v), strict=True)) | {"core_attention_bias": core_attention_bias}
                _check_pages(named | {"softmax_offset": self.softmax_offset}, bool(fp8_arguments) or active_recipe() is not None)
            k, v, fmt, mask_type, lengths = self._with_cache(inference_params, (k, v), fmt, mask_type)
        arguments: dict[str, object] = {
            "qkv_format": fmt,
            **masks_of(mask_type, window_of(mask_type, self.window_size if window_size is None else window_size), diagonal),
            "bias_type": core_attention_bias_type,
            "bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "return_max_logit": self.return_max_logit,
            "deterministic": True if self.deterministic else None,
            "backend": _backend(self._environment()),
            **self._softmax(softcap),
            **(fp8_arguments or self._fp8(q, fp8_output, bf16_backward)),
        }
        if inference_params is not None and inference_params.is_paged:
            arguments["page_table"] = inference_params.page_table(k.device)
        shape = _score_shape(q, k, fmt, 1 if self._ranks is None else self._ranks.size)
        if "padding" in mask_type:
            arguments |= _length_arguments(lengths, attention_mask, shape, fmt, pad_between_seqs)
        elif mask_type == ARBITRARY or (attention_mask is not None and self._ranks is None):
            arguments |= _mask_arguments(attention_mask, mask_type, shape, fmt, arguments)
        arguments |= _score_mod(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
        calls = [arguments] if policies is None else calls_of(policies, arguments)
        for call in calls:
            call |= self._dropout(q.device)
        run: Callable[..., tuple[object, Tensor | None]] = functools.partial(_attend, Results(packing=packing), calls)
        if self._ranks is not None:
            run = functools.partial(context_parallel.attend, self._ranks, arguments)
        if checkpoint_core_attention and torch.is_grad_enabled():
            out, max_logit = checkpoint(run, q, k, v, use_reentrant=False, preserve_rng_state=False)  # dropout has its own seed
        else:
            out, max_logit = run(q, k, v)
        out = _with_one_scale(out) if fp8_arguments and fp8_output else out
        return (out, max_logit) if self.return_max_logit else out

    def _dropout(self, device: torch.device) -> dict[str, object]:
        """Returns the arguments of one call's dropout, with a seed of its own that ranks share."""
        if not (self.training and self.attention_dropout > 0):
            return {}
        tracker = self.get_rng_state_tracker
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            state = ops.new_rng_state(device)
        return {"dropout_p": self.attention_dropout, "rng_state": state if self._ranks is None else self._ranks.shared(state)}

    def get_extra_state(self) -> Tensor:
        """Returns the scales and amax histories of delayed scaling as bytes, uint8; empty if there are none."""
        return self._scaling.to_bytes()

    def set_extra_state(self, state: object) -> None:
        """Loads `get_extra_state`'s result; any other state, such as TransformerEngine's own, resets the scales."""
        self._scaling.from_bytes(state)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: object) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", None)  # older checkpoints lack it
        for part in ("flash_attention", "fused_attention", "unfused_attention"):  # parts of older TransformerEngine modules
            state_dict.pop(f"{prefix}{part}._extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _softmax(self, softcap: float | None) -> dict[str, object]:
        offset = {"softmax_offset": self.softmax_offset} if self.softmax_type == "learnable" else {}
        cap = self.softcap if softcap is None else softcap
        return {"softmax_type": self.softmax_type, "softmax_scale": self.softmax_scale, "softcap": cap, **offset}

    def _environment(self) -> Environment:
        return environment()

    def _check_shapes(self, qkv: tuple[Tensor, Tensor, Tensor], fmt: str) -> None:
        for name, t, heads, dim in (
            ("query_layer", qkv[0], self.num_heads, self.head_dim_qk),
            ("key_layer", qkv[1], self.num_heads_kv, self.head_dim_qk),
            ("value_layer", qkv[2], self.num_heads_kv, self.head_dim_v),
        ):
            if t.dim() != len(fmt) or tuple(t.shape[-2:]) != (heads, dim):
                raise ValueError(f"{name} is {describe(t)}; accepted in {fmt}: {len(fmt)} dims, the last two {(heads, dim)}")

    @staticmethod
    def _check_ranks(ranks: context_parallel.Ranks, requests: dict[str, bool]) -> None:
        """Raises NotImplementedError for features that context parallelism lacks, before random numbers or communication."""
        for feature, is_requested in requests.items():
            if is_requested:
                raise NotImplementedError(
                    f"cp_group has {ranks.size} ranks in a call with {feature}; accepted: a group of one rank, or a call without it"
                )

    def _with_cache(
        self, params: InferenceParams, new: tuple[Tensor, Tensor], fmt: str, mask_type: str
    ) -> tuple[Tensor, Tensor, str, str, _Lengths]:
        if self.layer_number is None:
            raise ValueError("layer_number is None with inference_params; pass this layer's number to the constructor")
        if "padding" not in mask_type:
            raise ValueError(
                f"attn_mask_type is {mask_type!r} with inference_params; accepted: a type with padding in its name, because "
                "sequences have different lengths"
            )
        step = params.step(self.layer_number, *new, fmt)
        mask_type = "padding_causal_bottom_right" if mask_type == "padding_causal" else mask_type
        lengths = _Lengths(step.cu_seqlens_q, step.cu_seqlens_kv, max_seqlen_q=step.max_seqlen_q)
        return step.k, step.v, step.qkv_format, mask_type, lengths

    def _fp8(self, q: Tensor, fp8_output: bool, bf16_backward: bool) -> dict[str, object]:
        """Returns the FP8 arguments of a call on 16-bit tensors."""
        # torch's checkpoint recomputes outside of the autocast, so a recomputation uses the recipe of the layer's last forward.
        recipe = active_recipe() or (self._last_recipe if is_recomputed() else None)
        if not is_recomputed():
            self._last_recipe = recipe
        if recipe is None:
            if fp8_output:
                raise ValueError("fp8_output is True outside of an autocast with fp8_dpa or fp8_mha; accepted: False")
            return {}
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"query_layer has dtype {q.dtype} with attention in FP8; accepted: float16, bfloat16")
        fp8_recipe = recipe.attention_recipe(bf16_backward, torch.float8_e4m3fn if fp8_output else None)
        state = self._scaling.state_for(fp8_recipe, q.device, self.training) if fp8_recipe.scaling == "delayed" else None
        return {"fp8_recipe": fp8_recipe, "fp8_state": state}


class _Lengths(NamedTuple):
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None


def _check_pages(tensors: Mapping[str, Tensor | None], is_fp8: bool) -> None:
    """Raises NotImplementedError if a call over pages is in FP8 or has a tensor that requires a gradient."""
    if is_fp8:
        raise NotImplementedError(
            "inference_params has is_paged=True in an autocast with fp8_dpa or fp8_mha, or FP8 tensors; accepted: 16 or 32 bits"
        )
    for name, t in tensors.items():
        if torch.is_grad_enabled() and t is not None and t.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient but inference_params has is_paged=True, which has no backward; accepted: a call under "
                "torch.no_grad()"
            )


def _in_fp8(qkv: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor, Tensor, dict[str, object]]:
    """Returns q, k and v as plain tensors, and the FP8 arguments if they are FP8 tensors."""
    tensors_by_name = {name: in_fp8(t, name) for name, t in zip(("query_layer", "key_layer", "value_layer"), qkv, strict=True)}
    fp8_tensors = [t for t in tensors_by_name.values() if t is not None]
    if not fp8_tensors:
        return *qkv, {}
    if len(fp8_tensors) < len(qkv):
        names = ", ".join(name for name, t in tensors_by_name.items() if t is not None)
        raise ValueError(f"only {names} in FP8; accepted: all of query_layer, key_layer and value_layer, or none")
    dtype = getattr(qkv[0], "dtype", torch.bfloat16)  # the dtype that an FP8 tensor represents
    recipe = fp8.Recipe(out_dtype=dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16)
    descales = dict(zip(("descale_q", "descale_k", "descale_v"), (t.descale for t in fp8_tensors), strict=True))
    return fp8_tensors[0].data, fp8_tensors[1].data, fp8_tensors[2].data, {"fp8_recipe": recipe, **descales}


def _with_one_scale(out: Tensor) -> fp8.QuantizedTensor:
    """Returns out in FP8; padding is 0, so that the amax is the tokens' amax."""
    quantized = fp8.quantize(out.reshape(1, -1, 1, out.shape[-1]), fp8.Recipe(granularity="tensor"))
    return quantized._replace(data=quantized.data.view(out.shape))


def _backend(allowed: Environment) -> str | None:
    """Returns the backend that NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN select, or None for any."""
    if not allowed.allows_fused and not allowed.allows_unfused:
        raise ValueError("NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are 0; accepted: at least one of them 1 or unset")
    return None if allowed.allows_fused else "eager"


def _score_shape(q: Tensor, k: Tensor, fmt: str, ranks: int) -> tuple[int, int, int, int] | None:
    """Returns (b, h, sq, skv) of dense q and k, over all ranks that share sequences; None for thd."""
    q_format, kv_format = parse_format(fmt)
    if "thd" in (q_format, kv_format):
        return None
    b, h, sq = (q.shape[q_format.index(name)] for name in "bhs")
    return b, h, sq * ranks, k.shape[kv_format.index("s")] * ranks


def _mask_arguments(
    attention_mask: object, mask_type: str, shape: tuple[int, int, int, int] | None, fmt: str, arguments: dict[str, object]
) -> dict[str, object]:
    """Returns the argument for an arbitrary mask, and checks a mask of a type that does not read it. shape: (b, h, sq, skv)."""
    if shape is None:
        raise ValueError(f"attn_mask_type is {mask_type!r} with {fmt}; accepted: a type with padding in its name")
    if mask_type == ARBITRARY:
        return {"mask_mod": mask_mod_of(attention_mask, shape)}
    check_unread_mask(attention_mask, arguments, shape)
    return {}


def _score_mod(score_mod: Any, *others: Any) -> dict[str, object]:
    """Returns the argument for a callback. others: its bprop, its tensors and its bprop's tensors."""
    if score_mod is not None:
        return {"score_mod": TEScoreMod(score_mod, *others)}
    if any(x is not None for x in others):
        raise ValueError("score_mod is None but its bprop or tensors are set; accepted: a score_mod with them")
    return {}


def _length_arguments(
    lengths: _Lengths, attention_mask: object, shape: tuple[int, int, int, int] | None, fmt: str, pad_between_seqs: bool | None
) -> dict[str, object]:
    """Returns `flexattn.attention`'s length arguments for a padding mask type; shape: (b, h, sq, skv), None for thd."""
    formats = parse_format(fmt)
    cu_seqlens = [lengths.cu_seqlens_q, lengths.cu_seqlens_kv]
    if cu_seqlens[0] is None or cu_seqlens[1] is None:
        if shape is None or attention_mask is None:
            also = "" if shape is None else ", or an attention_mask [b, 1, 1, s]"
            raise ValueError(
                f"cu_seqlens_q or cu_seqlens_kv is None with a padding mask type and {fmt}; accepted: int32 tensors [b + 1]{also}"
            )
        cu_seqlens = list(lengths_of(attention_mask, shape[0], shape[2:]))
    arguments: dict[str, object] = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_kv": cu_seqlens[1]}
    padded = (lengths.cu_seqlens_q_padded, lengths.cu_seqlens_kv_padded)
    sides = zip(("q", "kv"), formats, cu_seqlens, padded, (lengths.max_seqlen_q, lengths.max_seqlen_kv), strict=True)
    for side, side_format, plain, starts, longest in sides:
        if side_format != "thd":
            continue
        arguments[f"max_seqlen_{side}"] = longest
        has_gaps = starts is not None and starts is not plain if pad_between_seqs is None else pad_between_seqs
        if has_gaps:
            if starts is None:
                raise ValueError(
                    f"pad_between_seqs is True but cu_seqlens_{side}_padded is None; accepted: int32 [b + 1], the start offsets"
                )
            arguments[f"cu_seqlens_{side}_padded"] = starts
    return arguments


def _attend(results: Results, calls: Sequence[dict[str, object]], q: Tensor, k: Tensor, v: Tensor) -> tuple[object, Tensor | None]:
    """Returns out with merged heads, and max_logit in q's dtype, or None if it is not requested.

    calls: the arguments of each call. The results of several calls are added; each is 0 for the sequences of the others.
    """
    arguments, *others = calls
    out, _, max_logit = attend(results, q, k, v, return_lse=False, **arguments)
    if isinstance(out, fp8.QuantizedTensor):
        source = None if out.source is None else out.source.flatten(-2)
        out = out._replace(data=out.data.flatten(-2), source=source)
    else:
        out = out.flatten(-2)
    for other in others:
        out = out + _attend(results, [other], q, k, v)[0]
    return out, None if max_logit is None else max_logit.to(q.dtype)
