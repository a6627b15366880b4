"""The backend that "auto" prefers if several can run a call: an order for each kind of device, and the exceptions that the rules of
`kernels_triton/common/crossovers.py` name.

A rule for a backend applies only to its kind: plain attention, attention with a bias of [1, h, sq, skv] without a gradient, or with
a learnable sink. Specs with ALiBi, softcap, dropout, mods, max_logit or deterministic keep the default order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flexattn.dispatch.spec import AttentionSpec, Direction

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.crossovers import Facts


class Preference(NamedTuple):
    order: tuple[str, ...]
    why: str
    source: str | None  # the file in bench/results behind it, or None if no file shows a faster backend


DEFAULTS = {
    "cuda": Preference(
        ("triton", "cudnn", "eager"),
        "the Triton kernels support every feature, and no benchmark shows cuDNN to be faster for such a call",
        None,
    ),
    "cpu": Preference(
        ("eager", "triton", "cudnn"), "the Triton kernels run there only in Triton's interpreter, which is for tests", None
    ),
}


WITHOUT_CUDNN_IN_FP8 = "auto does not select cuDNN in FP8, because cuDNN returns its results in FP8"


LAYOUTS = ("dense", "decode", "padded", "packed")
KINDS = ("plain", "bias", "sink")


def mask_of(spec: AttentionSpec) -> str:
    """Returns the mask, on any diagonal: "causal" if the left side is open, "windowed" for any other band, "open" for none."""
    left, right, _ = spec.band
    if left is None and right is None:
        return "open"
    return "causal" if left is None and right == 0 else "windowed"


def layout_of(spec: AttentionSpec) -> str | None:
    """Returns the layout from LAYOUTS; None if queries and keys are of different lengths, except for a decode."""
    is_packed = "thd" in (spec.q_format, spec.kv_format)
    if spec.length_q == 1 and not is_packed and not spec.padding:
        return "decode"
    if spec.length_q != spec.length_kv:
        return None
    return "packed" if is_packed else "padded" if spec.padding else "dense"


def kind_of(spec: AttentionSpec) -> str | None:
    """Returns a spec's kind from KINDS, or None if no rule can apply to it."""
    features = (spec.softcap, spec.dropout, spec.return_max_logit, spec.deterministic, spec.needs_lse_grad, spec.needs_bias_grad)
    if any(features) or spec.mods is not None or spec.block_size is not None:
        return None
    if spec.bias_type == "no_bias":
        return {"vanilla": "plain", "learnable": "sink"}.get(spec.softmax_type)
    is_bias = spec.bias_type == "post_scale_bias" and spec.bias_dims == (False, True, True, True)
    return "bias" if is_bias and spec.softmax_type == "vanilla" else None


def facts_of(spec: AttentionSpec, direction: Direction) -> Facts:
    """Returns the columns of a spec in the rules for backends. `tokens` is a `length_class`."""
    major, minor = spec.capability or (0, 0)
    return {
        "direction": direction,
        "capability": 10 * major + minor,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        "mask": mask_of(spec),
        "layout": layout_of(spec),
        "tokens": spec.length_kv,
        "kind": kind_of(spec),
    }


def preference(spec: AttentionSpec, direction: Direction) -> Preference:
    """Returns the order of backends for a spec: a backend with a rule for it first, otherwise the default."""
    from flexattn.kernels_triton.common.crossovers import deciding

    default, facts = DEFAULTS.get(spec.device_type, DEFAULTS["cuda"]), facts_of(spec, direction)
    rules = ((backend, deciding(backend, facts)) for backend in default.order)
    backend, rule = next(((backend, rule) for backend, rule in rules if rule is not None), (None, None))
    if backend is None or rule is None:
        if spec.fp8 is None:
            return default
        order = tuple(name for name in default.order if name != "cudnn")
        return Preference(order, f"{default.why}; {WITHOUT_CUDNN_IN_FP8}", default.source)
    first, *others = (name for name in default.order if name != backend)
    why = f"{backend} was measured {rule.gain:.2f} times as fast as {first} for such a call"
    return Preference((backend, first, *others), why, ", ".join(rule.files))
