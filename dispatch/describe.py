"""A spec in one line, and the versions that an answer holds for."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

from flexattn.dispatch.known_bad import version_text
from flexattn.dispatch.spec import AttentionSpec


def describe(spec: AttentionSpec) -> str:
    """One line with what sets a spec apart from plain attention."""
    formats = spec.q_format if spec.q_format == spec.kv_format else f"{spec.q_format}_2{spec.kv_format}"
    heads = f"{spec.num_heads} heads" if spec.group_size == 1 else f"{spec.num_heads} heads over {spec.num_heads_kv}"
    head_dim = str(spec.head_dim_qk) if spec.head_dim_qk == spec.head_dim_v else f"{spec.head_dim_qk}/{spec.head_dim_v}"
    left, right, bottom_right = spec.band
    parts = [formats, str(spec.dtype).removeprefix("torch."), heads, f"head dim {head_dim}"]
    if spec.length_q or spec.length_kv:
        parts.append(f"up to {spec.length_q} x {spec.length_kv} tokens")
    if spec.padding:
        parts.append("padding")
    if left is not None or right is not None:
        sides = ", ".join("open" if side is None else str(side) for side in (left, right))
        parts.append(f"band ({sides}) on the {'bottom-right' if bottom_right else 'top-left'} diagonal")
    if spec.bias_type != "no_bias":
        parts.append(spec.bias_type)
    if spec.softmax_type != "vanilla":
        parts.append(f"{spec.softmax_type} softmax")
    if spec.mods is not None:
        parts.append("score_mod or mask_mod")
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
