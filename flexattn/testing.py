"""Inputs and error budgets for tests and benchmarks, flexattn's own and its users'.

```python
inputs = make_inputs("thd", lengths_q=[5, 0, 130], gap=3, dtype=torch.bfloat16)
out = attention(**inputs._asdict(), attn_mask_type="padding_causal")

spec, x = make_call(inputs, attn_mask_type="padding_causal")  # what a backend gets for the same call
ref, _, _ = reference_attention(spec, x)
eager, _, _ = reference_attention(spec, x, dtype=spec.dtype)
check_close("out", out, ref, eager)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BlockLists
from flexattn.call_options import DEFAULTS, ScoreOptions
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, make_band, parse_format
from flexattn.mods.trace import Traced

__all__ = [
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "Inputs",
    "check_close",
    "make_call",
    "make_dlse",
    "make_dout",
    "make_inputs",
    "reference_attention",
    "reference_gradients",
]

FORWARD_FACTOR = 2.0  # a fused kernel rounds in other places than eager code, not more often
GRADIENT_FACTOR = 3.0  # and a gradient rounds twice: in the recomputed weights and in the products with them
ROUNDING_STEPS = 4.0  # roundings of got's own dtype, granted where same-dtype eager happens to be exact
NAN = float("nan")
_OPERANDS = Operands._fields[: Operands._fields.index("mod_tensors")]


class Inputs(NamedTuple):
    """q, k, v and their lengths under the names of `attention`'s arguments; what the format does not need is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    qkv_format: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None


def make_inputs(
    qkv_format: str = "bshd",
    *,
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int] | None = None,
    padding: bool = False,
    gap: int = 0,
    in_reverse: bool = False,
    num_heads: int = 4,
    num_heads_kv: int = 2,
    head_dim_qk: int = 16,
    head_dim_v: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    outliers: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> Inputs:
    """Standard normal q, k and v whose padding is NaN; the same numbers on every device.

    Args:
        lengths_q, lengths_kv: real tokens of each sequence (lengths_kv as lengths_q when None).
        padding: give cu_seqlens for dense formats too; without it all lengths of a dense format must be equal. thd always has them.
        gap: padding tokens after each sequence of thd (whose starts are given then), or after the longest of a
            dense format.
        in_reverse: the slots of thd lie the other way round, the first sequence's last, and each gap before its sequence.
        outliers: one element in 64 is 16 times as large, as in the activations of trained models.
        strided: q, k and v are views with a contiguous last dim into larger tensors, which are NaN elsewhere.

    Raises:
        ValueError: lengths that a dense format without padding cannot hold.
    """
    q_format, kv_format = parse_format(qkv_format)
    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    has_lengths = padding or "thd" in (q_format, kv_format)
    if not has_lengths and (gap or len(set(lengths_q)) > 1 or len(set(lengths_kv)) > 1):
        raise ValueError(
            f"lengths_q is {list(lengths_q)}, lengths_kv {list(lengths_kv)} and gap {gap}: {qkv_format!r} holds unequal lengths or "
            "a gap only with padding=True"
        )
    generator = torch.Generator("cpu").manual_seed(seed)

    def tokens(fmt: str, lengths: Sequence[int], heads: int, head_dim: int) -> Tensor:
        margin = 8 if strided else 0
        width = max(lengths, default=0) + gap
        # One row per sequence and token, real or not; thd then drops what lies beyond each sequence's gap.
        values = torch.randn(len(lengths), width, heads, head_dim, generator=generator, dtype=torch.float64, device="cpu")
        if outliers:
            values = torch.where(torch.rand(values.shape, generator=generator, device="cpu") < 1 / 64, 16 * values, values)
        position = torch.arange(width, device="cpu").expand(len(lengths), width)
        length = torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
        values[position >= length] = NAN
        values = values[position < length + gap] if fmt == "thd" else as_bshd(values, fmt)
        if fmt == "thd" and in_reverse and lengths:
            slots = torch.split(values, [n + gap for n in lengths])
            values = torch.cat([slot.roll(gap, 0) for slot in reversed(slots)])
        larger = torch.full(
            (*values.shape[:-2], values.shape[-2] + margin // 8, head_dim + margin), NAN, dtype=dtype, device=device
        )
        view = larger[..., : values.shape[-2], :head_dim]
        return view.copy_(values)

    def offsets(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def padded(fmt: str, lengths: Sequence[int]) -> Tensor | None:
        if fmt != "thd" or not (gap or in_reverse):
            return None
        slots = [n + gap for n in lengths]
        if not in_reverse:
            return offsets(slots)
        starts = [sum(slots[b + 1 :]) + gap for b in range(len(slots))]
        return torch.tensor([*starts, sum(slots)], dtype=torch.int32, device=device)

    sides: dict[str, Any] = {}
    for end, fmt, lengths in (("q", q_format, lengths_q), ("kv", kv_format, lengths_kv)):
        sides[f"cu_seqlens_{end}"] = offsets(lengths) if has_lengths else None
        sides[f"cu_seqlens_{end}_padded"] = padded(fmt, lengths)
        sides[f"max_seqlen_{end}"] = max(lengths, default=0) if fmt == "thd" else None
    return Inputs(
        q=tokens(q_format, lengths_q, num_heads, head_dim_qk),
        k=tokens(kv_format, lengths_kv, num_heads_kv, head_dim_qk),
        v=tokens(kv_format, lengths_kv, num_heads_kv, head_dim_v),
        qkv_format=qkv_format,
        **sides,
    )


def make_dout(inputs: Inputs, seed: int = 1) -> Tensor:
    """A standard normal gradient of out, contiguous in q's format; NaN at padding."""
    generator = torch.Generator("cpu").manual_seed(seed)
    dout = torch.randn((*inputs.q.shape[:-1], inputs.v.shape[-1]), generator=generator, dtype=torch.float64, device="cpu").to(
        inputs.q
    )
    return dout.masked_fill(inputs.q[..., :1].isnan(), NAN)


def make_dlse(inputs: Inputs, seed: int = 2) -> Tensor:
    """A standard normal gradient of lse, [b, h, sq] or [h, total_q], fp32 or for fp64 inputs fp64; NaN at padding."""
    q_format, _ = parse_format(inputs.qkv_format)
    token_is_nan = as_bshd(inputs.q, q_format)[..., 0].isnan().transpose(-1, -2)
    generator = torch.Generator("cpu").manual_seed(seed)
    dlse = torch.randn(token_is_nan.shape, generator=generator, dtype=torch.float64, device="cpu")
    dtype = torch.float64 if inputs.q.dtype is torch.float64 else torch.float32
    return dlse.to(inputs.q.device, dtype).masked_fill(token_is_nan, NAN)


def make_call(
    inputs: Inputs,
    *,
    mods: Traced | None = None,
    blocks: BlockLists | None = None,
    deterministic: bool = False,
    return_max_logit: bool = True,
    **options: object,
) -> tuple[AttentionSpec, Operands]:
    """Returns the spec and the operands of `attention(**inputs._asdict(), ...)`, for tests of one backend. Nothing is validated.

    options: `ScoreOptions`, with the same meaning as for `attention`. `mods` is a result of `flexattn.mods.trace.trace_mods`, and
    `blocks` one of `flexattn.block_mask.block_lists`. The default attn_mask_type is padding if there are cu_seqlens, else no_mask.
    Every gradient is asked for.
    """
    if not options.keys() <= ScoreOptions.__annotations__.keys():
        raise TypeError(f"make_call() was given {', '.join(options)}; accepted: {', '.join(ScoreOptions.__annotations__)}")
    q, k, v = inputs.q, inputs.k, inputs.v
    q_format, kv_format = parse_format(inputs.qkv_format)
    padding = inputs.cu_seqlens_q is not None
    types = {"bias_type": "no_bias", "softmax_type": "vanilla", "attn_mask_type": "padding" if padding else "no_mask"}
    full = DEFAULTS | types | inputs._asdict() | {name: value for name, value in options.items() if value is not None}
    bias, rng_state, scale = full["bias"], full["rng_state"], full["softmax_scale"]
    sq = inputs.max_seqlen_q if inputs.max_seqlen_q is not None else q.shape[q_format.index("s")]
    skv = inputs.max_seqlen_kv if inputs.max_seqlen_kv is not None else k.shape[kv_format.index("s")]
    bias_dims = None if bias is None else tuple(size != 1 for size in bias.shape)
    batch = q.shape[q_format.index("b")] if inputs.cu_seqlens_q is None else len(inputs.cu_seqlens_q) - 1
    # Does not use ops.make_spec: a fault there would be the reference's too, and no comparison would show it.
    spec = AttentionSpec(
        q_format=q_format,
        kv_format=kv_format,
        dtype=q.dtype,
        num_heads=q.shape[q_format.index("h")],
        num_heads_kv=k.shape[kv_format.index("h")],
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        padding=padding,
        band=make_band(full["attn_mask_type"], full["window_size"], full["bottom_right_diagonal"]),
        bias_type=full["bias_type"],
        bias_dims=bias_dims,
        softmax_type=full["softmax_type"],
        softcap=full["softcap"] != 0.0,
        dropout=full["dropout_p"] != 0.0,
        return_max_logit=return_max_logit,
        needs_grad=True,
        needs_bias_grad=bias is not None,
        deterministic=deterministic,
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        mods=None if mods is None else mods.program,
        block_size=None if blocks is None else blocks.block_size,
        has_origin=rng_state is not None and rng_state.dim() == 2,
        bias_is_shared=bias is not None and bias.shape[0] not in (1, batch),
    )
    sizes = {"max_seqlen_q": sq, "max_seqlen_kv": skv, "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale}
    operands = Operands(
        **({name: full[name] for name in _OPERANDS} | sizes),
        mod_tensors=() if mods is None else mods.tensors,
        mod_numbers=() if mods is None else mods.numbers,
        block_mask=() if blocks is None else blocks.tensors,
    )
    return spec, operands


def check_close(
    name: str,
    got: Tensor,
    ref: Tensor,
    same_dtype_eager: Tensor,
    *,
    factor: float = FORWARD_FACTOR,
    largest_score: float = 0.0,
    atol: float | None = None,
) -> None:
    """Asserts err(got, ref) <= factor * err(same_dtype_eager, ref) + atol, for the largest error and for the root mean square.

    Args:
        got: the result under test.
        ref: the same in fp64, as `reference_attention` gives it.
        same_dtype_eager: the same by plain torch in the inputs' dtype, as `reference_attention(spec, x, dtype=spec.dtype)` gives
            it; its error is the budget.
        factor: FORWARD_FACTOR, or GRADIENT_FACTOR for a gradient.
        largest_score: max_logit where it is far above 1, as with outliers: rounding a score s moves its weight by |s| roundings,
            and by chance more in one order of summation than in another.
        atol: None grants 4 roundings of got's dtype and largest_score roundings of the arithmetic (fp32, fp64 for an fp64 got),
            relative to the largest value of ref and to its root mean square.

    Infinities must agree exactly; a NaN anywhere fails. The AssertionError shows the worst elements. The rule is FlashAttention's.
    """
    assert got.shape == ref.shape == same_dtype_eager.shape, (
        f"{name}: got has shape {tuple(got.shape)}, ref {tuple(ref.shape)}, same_dtype_eager {tuple(same_dtype_eager.shape)}"
    )
    if got.numel() == 0:
        return
    got64, ref64, eager64 = (t.detach().to(ref.device, torch.float64) for t in (got, ref, same_dtype_eager))
    errors, eager_errors = _errors(got64, ref64), _errors(eager64, ref64)
    scale = ref64[ref64.isfinite()].abs()
    scale = scale if scale.numel() else scale.new_zeros(1)
    arithmetic = torch.float64 if got.dtype is torch.float64 else torch.float32
    rounding = ROUNDING_STEPS * torch.finfo(got.dtype).eps + largest_score * torch.finfo(arithmetic).eps
    for kind, norm in (("max", torch.max), ("rms", lambda t: t.square().mean().sqrt())):
        error, budget, size = (float(norm(t)) for t in (errors, eager_errors, scale))
        assert budget < float("inf"), f"{name}: same_dtype_eager is no budget: it is NaN, or infinite where ref is not"
        limit = factor * budget + (rounding * size if atol is None else atol)
        if not error <= limit:
            raise AssertionError(
                f"{name}: {kind} error {error:.3e} > {limit:.3e} (same-dtype eager {budget:.3e}, factor {factor:g}); worst:\n"
                + _worst(errors, got64, ref64, eager64)
            )


def _errors(values: Tensor, ref: Tensor) -> Tensor:
    difference = torch.where(values == ref, 0.0, (values - ref).abs())
    return difference.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _worst(errors: Tensor, got: Tensor, ref: Tensor, eager: Tensor, count: int = 5) -> str:
    lines = []
    for flat in errors.flatten().topk(min(count, errors.numel())).indices.tolist():
        at = tuple(int(n) for n in torch.unravel_index(torch.tensor(flat, device="cpu"), errors.shape))
        lines.append(f"  {list(at)}: got {float(got[at]):.6g}, ref {float(ref[at]):.6g}, same-dtype eager {float(eager[at]):.6g}")
    return "\n".join(lines)
