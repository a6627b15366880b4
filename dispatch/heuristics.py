"""The backend that "auto" prefers if several can run a call: an order for each kind of device, and measured exceptions."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.dispatch.spec import AttentionSpec, Direction


class Preference(NamedTuple):
    order: tuple[str, ...]
    why: str
    source: str | None  # the file in bench/results behind it, or None if no file shows a faster backend.


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


class Measured(NamedTuple):
    """One result: for these specs, `backend` was `factor` times as fast as the first backend in the default order.

    A row applies only to its kind: plain attention, attention with a bias of [1, h, sq, skv] without a gradient, or with a
    learnable sink. Specs with ALiBi, softcap, dropout, mods, max_logit or deterministic keep the default order. `lengths` are the
    `length_class`es of queries and keys, which are equal. For a decode, they are the keys' classes.
    """

    backend: str
    direction: Direction
    capability: tuple[int, int]
    dtypes: tuple[str, ...]  # such as "bfloat16".
    head_dims: tuple[int, int]  # d_qk and d_v.
    mask: str  # one of MASKS.
    layout: str  # one of LAYOUTS.
    lengths: tuple[int, int]  # the smallest and the largest length class, both included.
    factor: float
    source: str  # the file in bench/results.
    kind: str = "plain"  # one of KINDS.


MASKS = ("full", "causal", "window")
LAYOUTS = ("dense", "decode", "padded", "packed")
KINDS = ("plain", "bias", "sink")

# The output of `python -m flexattn bench --emit-rows`, with a line for each result. If no row applies to a spec, it keeps the
# default order, and `explain` says that no benchmark shows another backend to be faster.
MEASURED: tuple[Measured, ...] = (
    Measured(
        "cudnn",
        "forward",
        (9, 0),
        ("bfloat16",),
        (128, 128),
        "causal",
        "dense",
        (4096, 4096),
        1.21,
        "standard_forward_h200.json",
        "bias",
    ),
)


def mask_of(spec: AttentionSpec) -> str:
    """Returns the mask of MEASURED, on any diagonal: "causal" if the left side is open, "window" for any other band."""
    left, right, _ = spec.band
    if left is None and right is None:
        return "full"
    return "causal" if left is None and right == 0 else "window"


def layout_of(spec: AttentionSpec) -> str:
    """Returns "packed" for thd, "padded" if a dense format has lengths, "decode" for one query each, else "dense"."""
    if "thd" in (spec.q_format, spec.kv_format):
        return "packed"
    if spec.padding:
        return "padded"
    return "decode" if spec.length_q == 1 else "dense"


def kind_of(spec: AttentionSpec) -> str | None:
    """Returns a spec's kind from KINDS, or None if no row of MEASURED can apply to it."""
    features = (spec.softcap, spec.dropout, spec.return_max_logit, spec.deterministic, spec.needs_lse_grad, spec.needs_bias_grad)
    if any(features) or spec.mods is not None or spec.block_size is not None:
        return None
    if spec.bias_type == "no_bias":
        return {"vanilla": "plain", "learnable": "sink"}.get(spec.softmax_type)
    is_bias = spec.bias_type == "post_scale_bias" and spec.bias_dims == (False, True, True, True)
    return "bias" if is_bias and spec.softmax_type == "vanilla" else None


def applies(row: Measured, spec: AttentionSpec, direction: Direction) -> bool:
    """Returns whether a row applies to `spec`."""
    smallest, largest = row.lengths
    return (
        row.direction == direction
        and row.capability == spec.capability
        and str(spec.dtype).removeprefix("torch.") in row.dtypes
        and row.head_dims == (spec.head_dim_qk, spec.head_dim_v)
        and row.mask == mask_of(spec)
        and row.layout == layout_of(spec)
        and (row.layout == "decode" or spec.length_q == spec.length_kv)
        and smallest <= spec.length_kv <= largest
        and row.kind == kind_of(spec)
    )


def preference(spec: AttentionSpec, direction: Direction) -> Preference:
    """Returns the order of backends for a spec: that of the first row of MEASURED that applies, else the default."""
    default = DEFAULTS.get(spec.device_type, DEFAULTS["cuda"])
    row = next((row for row in MEASURED if applies(row, spec, direction)), None)
    if row is None and spec.fp8 is not None:
        order = tuple(name for name in default.order if name != "cudnn")
        return Preference(order, f"{default.why}; {WITHOUT_CUDNN_IN_FP8}", default.source)
    if row is None:
        return default
    order = (row.backend, *(name for name in default.order if name != row.backend))
    first = next(name for name in default.order if name != row.backend)
    return Preference(order, f"{row.backend} was measured {row.factor:.2f} times as fast as {first} for such a call", row.source)
