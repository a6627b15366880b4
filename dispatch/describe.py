"""A spec in one line, and the versions that an answer holds for."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

from flexattn.dispatch.cudnn_rules import version_text
from flexattn.dispatch.spec import AttentionSpec, Band, Operands, misses_diagonal


def describe(spec: AttentionSpec, x: Operands | None = None) -> str:
    """Returns a call in one line: the shapes of its tensors or, if only the spec is known, heads and lengths."""
    formats = spec.q_format if spec.q_format == spec.kv_format else f"{spec.q_format}_2{spec.kv_format}"
    parts = [formats, str(spec.dtype).removeprefix("torch."), *(_sizes(spec) if x is None else _shapes(x)), *_mask(spec)]
    if spec.bias_type != "no_bias":
        parts.append(f"{spec.bias_type} shared by batch entries" if spec.bias_is_shared else spec.bias_type)
    if spec.softmax_type != "vanilla":
        parts.append(f"{spec.softmax_type} softmax")
    if spec.mods is not None:
        parts.append("score_mod or mask_mod")
    if spec.kv_lists:
        blocks = f" of blocks of {spec.kv_block} keys" if spec.kv_block > 1 else ""
        parts.append(f"kv_indices{blocks}{' for each key head' if spec.kv_lists > 1 else ''}")
    if spec.is_part:
        parts.append("part of the keys of out and lse")
    if spec.block_size is not None:
        parts.append(f"block mask of {spec.block_size[0]} x {spec.block_size[1]} tokens")
    if spec.fp8 is not None:
        scaled = [name for name, varies in zip(("batch", "head", "block"), spec.fp8.descale_dims, strict=True) if varies]
        block = f" of {spec.fp8.block_rows} rows" if spec.fp8.descale_dims[2] else ""
        parts.append(
            f"scaled per {' and '.join(scaled) or 'tensor'}{block}, out in {str(spec.fp8.out_dtype).removeprefix('torch.')}"
        )
        if spec.needs_grad:
            kind = (
                "of the 16-bit tensors"
                if spec.fp8.bf16_backward
                else f"by dout in {str(spec.fp8.grad_dtype).removeprefix('torch.')}"
            )
            parts.append(f"backward {kind}")
    lies = {"out": spec.results.out, "dq": spec.results.dq, "dk and dv": spec.results.dkv, "gradients": spec.results.packing}
    parts += [f"{name} in {fmt}" for name, fmt in lies.items() if fmt]
    if spec.results.fp32_out:
        parts.append("out in float32")
    if spec.results.fp32 != "none":
        parts.append(f"{spec.results.fp32} in float32")
    parts += [
        name for name in ("softcap", "dropout", "return_max_logit", "deterministic", "batch_invariant") if getattr(spec, name)
    ]
    capability = "" if spec.capability is None else f" sm_{spec.capability[0]}{spec.capability[1]}"
    return ", ".join([*parts, spec.device_type + capability])


def _sizes(spec: AttentionSpec) -> list[str]:
    heads = f"{spec.num_heads} heads" if spec.group_size == 1 else f"{spec.num_heads} heads over {spec.num_heads_kv}"
    head_dim = str(spec.head_dim_qk) if spec.head_dim_qk == spec.head_dim_v else f"{spec.head_dim_qk}/{spec.head_dim_v}"
    tokens = [f"up to {spec.length_q} x {spec.length_kv} tokens"] if spec.length_q or spec.length_kv else []
    return [heads, f"head dim {head_dim}", *tokens]


def _shapes(x: Operands) -> list[str]:
    q, k, v = (list(t.shape) for t in (x.q, x.k, x.v))
    return [f"q {q}", *([f"k and v {k}"] if k == v else [f"k {k}", f"v {v}"])]


def _mask(spec: AttentionSpec) -> list[str]:
    """Returns the mask in the words of attn_mask_type and window_size: ["causal", "window (128, 0)"]."""
    left, right, bottom_right = spec.band
    kind = "causal_bottom_right" if bottom_right else "causal"
    names = [name for name, is_there in (("padding", spec.padding), (kind, right == 0)) if is_there]
    if left is None and right in (None, 0):
        return ["_".join(names) or "no_mask"]
    return ["_".join(names) or "no_mask", _window(spec.band)]


def _window(band: Band) -> str:
    left, right, bottom_right = band
    if misses_diagonal(left, right):
        text = f"Window({left}, {right})"  # in a plain pair -1 is open
    else:
        text = f"window ({-1 if left is None else left}, {-1 if right is None else right})"
    return text if bottom_right or right == 0 else f"{text} from the top-left diagonal"


@functools.cache
def versions() -> str:
    """The versions that decide, found without importing anything."""
    found = [f"torch {torch.__version__.partition('+')[0]}"]
    for module, package in (("triton", "triton"), ("cudnn", "nvidia-cudnn-frontend")):
        found.append(f"{package} {_version(package) if importlib.util.find_spec(module) else 'missing'}")
    library = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return ", ".join([*found, f"cuDNN {version_text(library) if library else 'not loaded'}"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"  # a source tree, or files on the path
