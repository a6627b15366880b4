"""The peers, each in its best layout and with its best options. A missing or refusing peer has the reason in its row."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from flexattn import compat
from flexattn.bench.counts import band_of, largest_matrix_bytes
from flexattn.bench.cudnn_frontend import CUDNN_FRONTEND, prepare_cudnn
from flexattn.bench.implementations import Attend, Implementation, Unavailable, differentiable
from flexattn.bench.inputs import SOFTCAP, Tensors, bias_of, mask_mod_of, score_mod_of
from flexattn.bench.record import TRIANGLE, cudnn_version, installed
from flexattn.bench.shapes import Workload

FLEX = "FlexAttention"
FLEX_MODE = "default"
CUEQUIVARIANCE = "cuEquivariance"
PEERS_NOTE = (
    "SDPA flash gets bhsd views of bshd memory, SDPA efficient, cuDNN and math contiguous bhsd; FlexAttention contiguous bhsd, "
    "compiled for each shape (dynamic=False) with a BlockMask of the band and the documents, made beforehand; varlen_attn and "
    "flash-attn packed or bshd; what SDPA has no argument for, as a window or a bias, is a dense attn_mask made beforehand "
    "(in each call if a bias has gradients); FlexAttention has a dense bias with gradients in float32, so that their sum over "
    "sequences is in float32; cuEquivariance contiguous [b, n, h, s, d]"
)
LONGEST_TRIANGLE = 3000  # tokens
LARGEST_MASK = 2**31  # elements that create_block_mask may make uncompiled; compiling takes longer for small ones
LARGEST_MATH_BYTES = 2**30  # bytes of scores that SDPA math may materialise


def contiguous_bhsd(t: Tensor) -> Tensor:
    """Returns contiguous bhsd memory of bshd, or of a packed batch as one sequence."""
    return (t[None] if t.dim() == 3 else t).transpose(1, 2).contiguous()


def bhsd_view(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def _sdpa(backend: str, workload: Workload, tensors: Tensors) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if workload.is_ragged:
        raise Unavailable("scaled_dot_product_attention takes no cu_seqlens; varlen_attn is torch's function for packed batches")
    if workload.softmax_type != "vanilla" or workload.score == "softcap":
        raise Unavailable("scaled_dot_product_attention has no argument for a sink or a softcap")
    if backend == "MATH" and largest_matrix_bytes(workload) > LARGEST_MATH_BYTES:
        raise Unavailable(f"its score matrix would take {largest_matrix_bytes(workload) / 2**30:.0f} GiB")
    needs_mask = needs_dense_mask(workload)
    if needs_mask and workload.seqlen_q * workload.seqlen_kv > LARGEST_MASK:
        raise Unavailable(f"its dense mask would have {workload.seqlen_q * workload.seqlen_kv / 2**30:.0f} Gi elements")
    is_causal = workload.is_causal and not needs_mask
    enable_gqa = workload.group_size > 1
    bias = tensors.dense_bias
    is_made_in_calls = workload.repeats_bias or (bias is not None and bias.requires_grad)
    made = _dense_mask(workload, tensors) if needs_mask and not is_made_in_calls else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _dense_mask(workload, tensors) if is_made_in_calls else made
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa)

    return attend


def needs_dense_mask(workload: Workload) -> bool:
    """Returns whether SDPA has no argument for a workload's window, diagonal, bias or hidden keys."""
    left, _, bottom_right = band_of(workload)
    return left is not None or bool(workload.score or workload.hidden_keys) or (bottom_right and workload.is_causal)


def _dense_mask(workload: Workload, tensors: Tensors) -> Tensor:
    """Returns band, hidden keys and bias as one mask, [b | 1, h | 1, sq | 1, skv]: bool, or q's dtype with -inf for hidden keys."""
    left, right, bottom_right = band_of(workload)
    bias = bias_of(tensors, workload)
    if left is right is None and tensors.alibi_slopes is None:
        visible = None if tensors.sees is None else tensors.sees[:, None, None]
        if bias is None:
            assert visible is not None
            return visible
        return bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    assert tensors.sees is None, "no workload has a band and hidden keys"
    i = torch.arange(workload.seqlen_q, device=tensors.q.device)[:, None]
    j = torch.arange(workload.seqlen_kv, device=tensors.q.device)
    distance = j - i - (workload.seqlen_kv - workload.seqlen_q if bottom_right else 0)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if tensors.alibi_slopes is not None:
        bias = (-tensors.alibi_slopes[:, None, None] * distance.abs()).to(tensors.q.dtype)[None]
    return visible[None, None] if bias is None else bias.masked_fill(~visible, float("-inf"))


def _varlen(workload: Workload, tensors: Tensors) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    if not workload.is_ragged:
        raise Unavailable("varlen_attn is for packed batches; on dense ones its kernel is SDPA flash's")
    if workload.score or workload.softmax_type != "vanilla":
        raise Unavailable("varlen_attn has no argument that modifies scores, and none for a sink")
    left, right, _ = band_of(workload)
    accepted = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in accepted:
        options["window_size"] = (-1 if left is None else left, -1 if right is None else right)
    elif left is None and "is_causal" in accepted:
        options["is_causal"] = workload.is_causal
    else:
        raise Unavailable(f"varlen_attn of torch {torch.__version__} has no window_size")
    if workload.group_size > 1 and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    lengths: tuple[Any, ...] = (tensors.cu_seqlens_q, tensors.cu_seqlens_kv, workload.seqlen_q, workload.seqlen_kv)
    return cast(Attend, lambda q, k, v: varlen_attn(q, k, v, *lengths, **options))


def _flex_attention(mode: str, workload: Workload, tensors: Tensors) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask

    compat.dynamo().reset()  # past its limit of recompilations a shape would run uncompiled
    compat.functorch_config().donated_buffer = False  # so that one graph's backward can run again and again
    mask_mod, score_mod = mask_mod_of(workload, tensors), score_mod_of(workload, tensors)
    is_packed = workload.is_ragged
    len_q, len_kv = (sum(workload.lengths_q), sum(workload.lengths_kv)) if is_packed else (workload.seqlen_q, workload.seqlen_kv)
    block_mask = None
    if mask_mod is not None:
        create = torch.compile(create_block_mask) if len_q * len_kv > LARGEST_MASK else create_block_mask
        block_mask = create(mask_mod, None, None, len_q, len_kv, device=tensors.q.device)
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": workload.group_size > 1}
    return compiled_flex(options, tensors.softmax_offset, mode)


def compiled_flex(options: dict[str, Any], offset: Tensor | None, mode: str = FLEX_MODE) -> Attend:
    """Returns a compiled call of FlexAttention. offset: the logits of sinks, [h], or None."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if offset is None:
            return cast(Tensor, flex_attention(q, k, v, **options))
        # A sink takes a share of the weights: exp(lse) / (exp(lse) + exp(offset)) of the output is left.
        out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return cast(Tensor, (out * torch.sigmoid(aux.lse - offset[:, None])[..., None]).to(q.dtype))

    return torch.compile(call, dynamic=False, mode=None if mode == FLEX_MODE else mode)


def import_peer(name: str, package: str) -> ModuleType:
    """Imports a module of an optional package. Raises Unavailable if the package is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Unavailable(f"{package} is not installed ({e})") from e


def _flash_attn(module_name: str, package: str, workload: Workload, tensors: Tensors) -> Attend:
    """flash-attn 2, 3 and 4 under their different names; their causal masks are bottom-right."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # flash-attn 4 then caches compiled kernels on disk
    module = import_peer(module_name, package)
    function = getattr(module, "flash_attn_varlen_func" if workload.is_ragged else "flash_attn_func")
    left, right, bottom_right = band_of(workload)
    if not bottom_right and workload.lengths_q != workload.lengths_kv:
        raise Unavailable(f"the diagonal of {package} is the bottom-right one, and this workload's is not")
    accepted = inspect.signature(function).parameters
    options: dict[str, object] = {"causal": workload.is_causal}
    if left is not None:
        options["window_size"] = (left, 0 if right is None and workload.is_causal else right)
    wanted = {"softcap": SOFTCAP if workload.score == "softcap" else None, "alibi_slopes": tensors.alibi_slopes}
    wanted |= {"bias": tensors.bias_table, "learnable_sink": tensors.softmax_offset}
    wanted |= {"dense bias": tensors.dense_bias, "key mask": tensors.sees}
    for name, value in wanted.items():
        if value is not None and name not in accepted:
            raise Unavailable(f"{package} has no argument {name}")
        options |= {name: value} if value is not None else {}
    if workload.is_ragged:
        options |= {"cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_k": tensors.cu_seqlens_kv}
        options |= {"max_seqlen_q": workload.seqlen_q, "max_seqlen_k": workload.seqlen_kv}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    return attend


def _rows(workload: Workload, t: Tensor) -> Tensor:
    """Returns bshd memory as [biases, batch / biases, h, s, d], contiguous."""
    rows = contiguous_bhsd(t)
    return rows.view(workload.biases, -1, *rows.shape[1:])


def _cuequivariance(workload: Workload, tensors: Tensors) -> Attend:
    """Triangle attention: rows of an entry share a bias."""
    if workload.score != "dense_bias" or workload.attn_mask_type != "no_mask" or workload.group_size > 1:
        raise Unavailable("triangle_attention is for a dense bias, without a causal mask and without grouped heads")
    if max(workload.seqlen_q, workload.seqlen_kv) > LONGEST_TRIANGLE:
        raise Unavailable(f"triangle_attention fails above {LONGEST_TRIANGLE} tokens (issue 136 of cuEquivariance)")
    function = import_peer("cuequivariance_ops_torch", "cuequivariance-ops-torch").triangle_attention
    sees = None if tensors.sees is None else tensors.sees.view(workload.biases, -1, 1, 1, workload.seqlen_kv)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert tensors.dense_bias is not None
        return cast(Tensor, function(q, k, v, tensors.dense_bias[:, None], mask=sees))

    return attend


def peers(flex_mode: str = FLEX_MODE) -> list[Implementation]:
    """Returns all peers. If one is not installed, preparing it raises Unavailable."""
    torch_version = f"torch {torch.__version__}"
    cudnn_versions = f"{torch_version}, cuDNN {cudnn_version()}"

    def flex(workload: Workload, tensors: Tensors, direction: str) -> Any:
        attend = functools.partial(_flex_attention, flex_mode)
        if direction != "forward" and tensors.dense_bias is not None:
            tensors = tensors._replace(dense_bias=tensors.dense_bias.float())
        layouts = contiguous_bhsd, lambda t: t.transpose(1, 2)[0] if workload.is_ragged else t.transpose(1, 2)
        return differentiable(attend, *layouts)(workload, tensors, direction)

    def triangle(workload: Workload, tensors: Tensors, direction: str) -> Any:
        layouts = functools.partial(_rows, workload), lambda t: t.flatten(0, 1).transpose(1, 2)
        return differentiable(_cuequivariance, *layouts)(workload, tensors, direction)

    def sdpa(name: str, backend: str, layout: Callable[[Tensor], Tensor], version: str = torch_version) -> Implementation:
        return Implementation(name, version, differentiable(functools.partial(_sdpa, backend), layout, bhsd_view))

    def flash(name: str, module: str, package: str, compiles: bool = False) -> Implementation:
        run = differentiable(functools.partial(_flash_attn, module, package))
        return Implementation(name, installed(package) or "not installed", run, compiles)

    return [
        sdpa("SDPA flash", "FLASH_ATTENTION", bhsd_view),
        sdpa("SDPA efficient", "EFFICIENT_ATTENTION", contiguous_bhsd),
        sdpa("SDPA cuDNN", "CUDNN_ATTENTION", contiguous_bhsd, cudnn_versions),
        sdpa("SDPA math", "MATH", contiguous_bhsd),
        Implementation("varlen_attn", torch_version, differentiable(_varlen)),
        Implementation(FLEX, f"{torch_version}, mode {flex_mode}", flex, compiles=True),
        Implementation(CUDNN_FRONTEND, f"{installed('nvidia-cudnn-frontend')}, {cudnn_versions.partition(', ')[2]}", prepare_cudnn),
        flash("flash-attn 2", "flash_attn", "flash-attn"),
        flash("flash-attn 3", "flash_attn_interface", "flash-attn-3"),
        flash("flash-attn 3 forward", "fa3_fwd_interface", "fa3-fwd"),  # a wheel with only its forward
        flash("flash-attn 4", "flash_attn.cute", "flash-attn-4", compiles=True),
        Implementation(CUEQUIVARIANCE, next(filter(None, map(installed, TRIANGLE)), "not installed"), triangle, compiles=True),
    ]
