"""TransformerEngine's fused_attn_fwd and fused_attn_bwd, against an oracle that shares nothing with the library."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexattn import call_cache
from flexattn.integrations.te import (
    AttnMaskType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    FusedAttnBackend,
    QKVLayout,
    fused_attn_bwd,
    fused_attn_fwd,
)
from flexattn.integrations.te.names import Layout, parse_layout
from tests.fuzz import oracle

BATCH, HEADS, SQ, SKV = 2, 4, 9, 9
F16, FP8 = FusedAttnBackend.F16_arbitrary_seqlen, FusedAttnBackend.FP8
LAYOUTS = [name for name in QKVLayout if not name.startswith("paged")]
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}  # for float32: sums of some ten products of numbers about 1
# The oracle's description of each layout, by hand: format of q, format of k and v, dim of 3 or 2, number of shared tensors.
BY_HAND = {
    "sb3hd": ("sbhd", "sbhd", 2, 3),
    "sbh3d": ("sbhd", "sbhd", 3, 3),
    "sbhd_sb2hd": ("sbhd", "sbhd", 2, 2),
    "sbhd_sbh2d": ("sbhd", "sbhd", 3, 2),
    "sbhd_sbhd_sbhd": ("sbhd", "sbhd", 0, 0),
    "bs3hd": ("bshd", "bshd", 2, 3),
    "bsh3d": ("bshd", "bshd", 3, 3),
    "bshd_bs2hd": ("bshd", "bshd", 2, 2),
    "bshd_bsh2d": ("bshd", "bshd", 3, 2),
    "bshd_bshd_bshd": ("bshd", "bshd", 0, 0),
    "t3hd": ("thd", "thd", 1, 3),
    "th3d": ("thd", "thd", 2, 3),
    "thd_t2hd": ("thd", "thd", 1, 2),
    "thd_th2d": ("thd", "thd", 2, 2),
    "thd_thd_thd": ("thd", "thd", 0, 0),
    "sbhd_bshd_bshd": ("sbhd", "bshd", 0, 0),
    "bshd_sbhd_sbhd": ("bshd", "sbhd", 0, 0),
    "thd_bshd_bshd": ("thd", "bshd", 0, 0),
    "thd_sbhd_sbhd": ("thd", "sbhd", 0, 0),
    "bhsd_bhsd_bhsd": ("bhsd", "bhsd", 0, 0),
}


class Case(NamedTuple):
    """A call, and its description for the oracle."""

    layout: str = "bshd_bshd_bshd"
    mask: str = "no_mask"
    bias: str = "no_bias"
    softmax: str = "vanilla"
    window: tuple[int, int] = (-1, -1)
    diagonal: bool | None = None
    dropout: float = 0.0
    heads_kv: int = HEADS
    sq: int = SQ
    skv: int = SKV
    dims: tuple[int, int] = (16, 16)
    gap: int = 0  # tokens between the sequences of a thd tensor
    dtype: torch.dtype = torch.float32
    o_format: str = ""
    dqkv_layout: str = ""
    scale: float | None = None


class Sides(NamedTuple):
    q: oracle.Side
    kv: oracle.Side
    cu: tuple[Tensor, Tensor]
    padded: tuple[Tensor | None, Tensor | None]


def side(fmt: str, size: int, lengths: list[int], gap: int) -> tuple[oracle.Side, int, Tensor, Tensor | None]:
    """(the oracle's side, total tokens, cu_seqlens, cu_seqlens_padded)."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if fmt != "thd":
        return oracle.Side(fmt, [b * size for b in range(BATCH)], lengths), BATCH * size, cu, None
    starts = [sum(lengths[:b]) + gap * (b + 1) for b in range(BATCH)]
    total = sum(lengths) + gap * (BATCH + 1)
    padded = torch.tensor([*starts, total], dtype=torch.int32) if gap else None
    return oracle.Side(fmt, starts, lengths), total, cu, padded


def shape_of(fmt: str, length: int, total: int, heads: int, dim: int) -> list[int]:
    sizes = {"b": BATCH, "s": length, "t": total, "h": heads, "d": dim}
    return [sizes[name] for name in fmt]


def ordered(t: Tensor, fmt: str, wanted: str) -> Tensor:
    return t.permute([fmt.index(name) for name in wanted])


def tensors_of(case: Case, totals: tuple[int, int], device: str = "cpu") -> list[Tensor]:
    """q, k and v as views of the layout's tensors, NaN outside of all sequences."""
    q_format, kv_format, dim, count = BY_HAND[case.layout]
    d_qk, d_v = case.dims
    q_shape = shape_of(q_format, case.sq, totals[0], HEADS, d_qk)
    k_shape, v_shape = (shape_of(kv_format, case.skv, totals[1], case.heads_kv, d) for d in (d_qk, d_v))
    if count == 3:
        return list(torch.randn([*q_shape[:dim], 3, *q_shape[dim:]]).to(device, case.dtype).unbind(dim))
    q = torch.randn(q_shape).to(device, case.dtype)
    if count == 2:
        return [q, *torch.randn([*k_shape[:dim], 2, *k_shape[dim:]]).to(device, case.dtype).unbind(dim)]
    return [q, torch.randn(k_shape).to(device, case.dtype), torch.randn(v_shape).to(device, case.dtype)]


def poison(t: Tensor, of: oracle.Side) -> None:
    """NaN in every token without a sequence."""
    rows = {"bshd": lambda: t, "sbhd": lambda: t.transpose(0, 1), "bhsd": lambda: t.transpose(1, 2), "thd": lambda: t[None]}[
        of.fmt
    ]()
    is_real = torch.zeros(rows.shape[0] * rows.shape[1], dtype=torch.bool)
    for start, length in zip(of.starts, of.lengths, strict=True):
        is_real[start : start + length] = True
    rows[~is_real.view(rows.shape[:2]).to(rows.device)] = float("nan")


def sink_gradient(out: Tensor, lse: Tensor, dout: Tensor, offset: Tensor, q_format: str) -> Tensor:
    """The gradient of a sink from the out that the backward got, [h]: -sum(exp(offset - lse) * sum(out * dout)) over queries."""
    delta = (out.double() * dout.double()).nan_to_num().sum(-1)
    delta = ordered(delta, q_format[:-1], "ht" if q_format == "thd" else "bhs")
    offsets = offset.double()[:, None].expand(lse.shape)
    weights = torch.where(lse.isinf(), 0.0, (offsets - lse.double()).exp())
    terms = weights * delta
    return -terms.sum([dim for dim in range(terms.dim()) if dim != terms.dim() - 2])


def run(case: Case, device: str = "cpu") -> None:
    """Runs a case forward and backward on a device, and compares it with the oracle on the CPU."""
    torch.manual_seed(0)
    q_format, kv_format, _, count = BY_HAND[case.layout]
    padding = "padding" in case.mask
    q_side, total_q, cu_q, padded_q = side(q_format, case.sq, [case.sq, case.sq - 4] if padding else [case.sq] * BATCH, case.gap)
    kv_side, total_kv, cu_kv, padded_kv = side(
        kv_format,
        case.skv,
        [case.skv - 3, case.skv]
        if padding and not (count or case.gap)
        else [case.skv, case.skv - 4]
        if padding
        else [case.skv] * BATCH,
        case.gap,
    )
    q, k, v = tensors_of(case, (total_q, total_kv), device)
    for t, of in ((q, q_side), (k, kv_side), (v, kv_side)):
        poison(t, of)
    named: dict[str, Tensor] = {"q": q.cpu(), "k": k.cpu(), "v": v.cpu()}
    bias = offset = None
    if case.bias.endswith("scale_bias"):
        named["bias"] = torch.randn(1, HEADS, case.sq, case.skv).to(case.dtype)
        bias = named["bias"].to(device)
    if case.softmax == "learnable":
        named["softmax_offset"] = torch.randn(HEADS)
        offset = named["softmax_offset"].view(1, HEADS, 1, 1).to(device)
    given = {
        "max_seqlen_q": case.sq,
        "max_seqlen_kv": case.skv,
        "cu_seqlens_q": cu_q.to(device),
        "cu_seqlens_kv": cu_kv.to(device),
        "fake_dtype": case.dtype,
        "fused_attention_backend": F16,
        "cu_seqlens_q_padded": None if padded_q is None else padded_q.to(device),
        "cu_seqlens_kv_padded": None if padded_kv is None else padded_kv.to(device),
        "attn_scale": case.scale,
        "dropout": case.dropout,
        "qkv_layout": case.layout,
        "o_format": case.o_format or q_format,
        "attn_bias_type": case.bias,
        "attn_mask_type": case.mask,
        "softmax_type": case.softmax,
        "window_size": case.window,
        "bottom_right_diagonal": case.diagonal,
    }
    forward = {"is_training": True, "q": q, "k": k, "v": v, "attn_bias": bias, "softmax_offset": offset, "return_max_logit": True}
    out, aux, max_logit = fused_attn_fwd(**given, **forward)
    stats, rng_state, *rest = aux
    assert [t is wanted for t, wanted in zip(rest, [t for t in (bias, offset) if t is not None], strict=True)] == [True] * len(rest)
    assert rng_state.dtype is torch.int64
    assert rng_state.shape == (2,)

    bottom_right = case.diagonal if case.diagonal is not None else case.mask.endswith("bottom_right")
    seed = (int(rng_state[0]), int(rng_state[1]))
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    scores = (case.bias, case.softmax, scale, 0.0, case.dropout, seed, None, None, False)
    window = tuple(None if side == -1 else side for side in case.window)
    problem = oracle.Problem(q_side, kv_side, case.mask, window, bottom_right, *scores)
    out_in_q = ordered(out, case.o_format or q_format, q_format).cpu()
    dout = torch.randn(out_in_q.shape).to(case.dtype)
    poison(dout, q_side)
    exact = oracle.exact(problem, named, dout.nan_to_num(), None, list(named))
    plain = oracle.plain(problem, named, dout.nan_to_num(), None, list(named)) if case.dtype is not torch.float32 else None

    def check(name: str, got: Tensor, want: Tensor, same_dtype: Tensor | None, from_given: Tensor | None = None) -> None:
        if same_dtype is None:
            torch.testing.assert_close(got.double(), want, **TOLERANCE, msg=lambda text: f"{name}: {text}")
            return
        error, budget = (float((t.double() - want).abs().nan_to_num(posinf=0).max()) for t in (got, same_dtype))
        is_of_given = from_given is not None and torch.allclose(got.double(), from_given, **TOLERANCE)
        assert is_of_given or error <= 3 * budget + 1e-6, f"{name} is off by {error}, plain torch by {budget}"

    check("out", out_in_q, exact.out, None if plain is None else plain.out)
    assert out.is_contiguous()
    assert stats.dtype is torch.float32
    lse = stats.squeeze(-1).transpose(0, 1) if q_format == "thd" else stats.squeeze(-1)
    assert stats.shape == ((total_q, HEADS, 1) if q_format == "thd" else (BATCH, HEADS, case.sq, 1))
    lse = lse.cpu()
    check("stats", lse.nan_to_num(neginf=-1e4), exact.lse.nan_to_num(neginf=-1e4), None if plain is None else plain.lse)
    check("max_logit", max_logit.cpu(), exact.max_logit, None if plain is None else plain.max_logit)
    assert max_logit.dtype is case.dtype

    do_format = case.o_format or q_format
    d_o = ordered(dout, q_format, do_format).contiguous().to(device)
    dqkv_layout = case.dqkv_layout or case.layout
    found = fused_attn_bwd(
        **given, q=q, k=k, v=v, o=out, d_o=d_o, aux_ctx_tensors=aux, do_format=do_format, dqkv_layout=dqkv_layout
    )
    to_q, to_kv, at, shared = BY_HAND[dqkv_layout]
    names = ("q", "k", "v", "bias", "softmax_offset")
    for name, got, fmt, own in zip(
        names, found, (to_q, to_kv, to_kv, "", ""), (q_format, kv_format, kv_format, "", ""), strict=True
    ):
        assert (got is None) == (name not in named)
        if got is not None:
            lies = ordered(got, fmt, own) if fmt else got.reshape(exact.gradients[name].shape)
            # A sink's gradient is a sum over all queries that uses out. In half types the backward gets out rounded.
            sink_from_given = sink_gradient(out_in_q, exact.lse, dout, named[name], q_format) if name == "softmax_offset" else None
            check(f"d{name}", lies.cpu(), exact.gradients[name], None if plain is None else plain.gradients[name], sink_from_given)
    assert found[4] is None or (found[4].shape == (1, HEADS, 1, 1) and found[4].dtype is torch.float32)
    together = found[:3][-shared:] if shared else []
    storages = {t.untyped_storage().data_ptr() for t in together}
    assert len(storages) == (1 if together else 0)
    for i, t in enumerate(together):
        step = t.shape[-1] * (t.shape[-2] if at == t.dim() - 2 else 1)
        assert t.storage_offset() == i * step
        assert t.stride(-1) == 1
    for t in () if shared else found[:3]:
        assert t.is_contiguous()


def cases(*fields: tuple[str, Any]) -> list[Any]:
    """Cases of all values of the fields that have a meaning."""
    found = []
    for values in itertools.product(*(values for _, values in fields)):
        case = Case(**dict(zip((name for name, _ in fields), values, strict=True)))
        if "thd" in BY_HAND[case.layout][0] and "padding" not in case.mask:
            continue
        found.append(case)
    return found


def by_difference(found: list[Case]) -> list[Any]:
    default = Case()
    return [
        pytest.param(case, id="-".join(str(value) for value, usual in zip(case, default, strict=True) if value != usual) or "plain")
        for case in found
    ]


GRID = [
    (case.layout, case.mask, case.bias, case.softmax)
    for case in cases(
        ("layout", LAYOUTS), ("mask", tuple(AttnMaskType)), ("bias", BIASES), ("softmax", ("vanilla", "off-by-one", "learnable"))
    )
]


@pytest.mark.sample("layout", "mask", "bias", "softmax")
@pytest.mark.parametrize(("layout", "mask", "bias", "softmax"), GRID)
def test_layouts_masks_biases_and_softmaxes(layout: str, mask: str, bias: str, softmax: str) -> None:
    run(Case(layout=layout, mask=mask, bias=bias, softmax=softmax))


@pytest.mark.sample("mask")
@pytest.mark.parametrize("mask", ["padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_tritons_interpreter(layout: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("FLEXATTN_BACKEND", "triton")
    run(Case(layout=layout, mask=mask, gap=3 if "thd" in layout else 0))


SEPARATE = {"sq": 7, "skv": 12, "heads_kv": 2}
OPEN = ("no_mask", "padding")
OTHERS = [
    *(
        Case(mask=mask, window=window, **SEPARATE)
        for mask in ("no_mask", "padding")
        for window in ((-1, -1), (3, 2), (2, 0), (-1, 0))
    ),
    *(
        Case(mask=mask, window=(3, 2), diagonal=diagonal, **SEPARATE)
        for mask in ("no_mask", "padding")
        for diagonal in (True, False)
    ),
    *(Case(mask=mask, window=(3, 0), **SEPARATE) for mask in AttnMaskType if "causal" in mask),
    Case(mask="no_mask", bias="alibi", diagonal=True, **SEPARATE),
    Case(layout="sbhd_sbhd_sbhd", mask="causal_bottom_right", dims=(32, 16), **SEPARATE),
    Case(mask="causal", dims=(192, 128), heads_kv=1),
    Case(layout="thd_thd_thd", mask="padding_causal", dims=(192, 128), gap=2, dqkv_layout="thd_thd_thd"),
    Case(mask="causal", dtype=torch.bfloat16),
    Case(layout="sb3hd", mask="causal", dtype=torch.float16, bias="post_scale_bias"),
    Case(mask="causal", scale=0.7),
    *(Case(mask="padding_causal", dropout=0.25, layout=layout) for layout in ("bshd_bshd_bshd", "sbh3d", "t3hd", "thd_thd_thd")),
    *(Case(layout="bs3hd", o_format=fmt, dqkv_layout=to) for fmt, to in (("sbhd", "sbh3d"), ("bhsd", "bshd_bsh2d"))),
    Case(layout="sbhd_sbhd_sbhd", o_format="bshd", dqkv_layout="bs3hd", mask="causal"),
    Case(layout="sbhd_bshd_bshd", o_format="bhsd", dqkv_layout="bhsd_bhsd_bhsd", **SEPARATE),
    Case(layout="bshd_bshd_bshd", o_format="sbhd", dqkv_layout="bhsd_bhsd_bhsd", mask="padding"),
]


@pytest.mark.parametrize("case", by_difference(OTHERS))
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.sample("backend", "case")
def test_other_features(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("FLEXATTN_BACKEND", backend)
    run(case)


def small(**more: Any) -> dict[str, Any]:
    """Arguments of fused_attn_fwd for a small call."""
    q, k, v = torch.randn(BATCH, SQ, 3, HEADS, 16).unbind(2)
    cu = torch.arange(BATCH + 1, dtype=torch.int32) * SQ
    lengths = {"max_seqlen_q": SQ, "max_seqlen_kv": SQ, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    kind = {"fake_dtype": q.dtype, "fused_attention_backend": F16, "qkv_layout": "bs3hd", "o_format": "bshd"}
    return {"is_training": True, **lengths, "q": q, "k": k, "v": v, **kind, "attn_mask_type": "causal"} | more


def small_backward(forward: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of fused_attn_bwd for the gradient of fused_attn_fwd's results for `forward`."""
    out, aux, *_ = fused_attn_fwd(**forward)
    names = ("is_training", "attn_bias", "softmax_offset", "return_max_logit", "o_quantizer", "rng_gen")
    kept = {name: value for name, value in forward.items() if name not in names}
    own = {"o": out, "aux_ctx_tensors": aux, "do_format": "bshd", "dqkv_layout": "bs3hd"}
    return kept | own | {"d_o": torch.randn(out.shape)} | more


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read the layout's own tensors, and write out and the gradients in place."""
    pytest.importorskip("triton", reason="triton is not installed")
    from flexattn.dispatch import triton_backend

    calls: list[Any] = []
    for name in ("_forward_call", "_backward_call"):
        real = getattr(triton_backend, name)
        monkeypatch.setattr(triton_backend, name, lambda *given, real=real: (calls.append(real(*given)), calls[-1])[1])
    monkeypatch.setenv("FLEXATTN_BACKEND", "triton")
    given = small(o_format="sbhd")
    out, aux = fused_attn_fwd(**given)
    backward = small_backward(small(), o=out, aux_ctx_tensors=aux, o_format="sbhd", q=given["q"], k=given["k"], v=given["v"])
    backward |= {"d_o": torch.randn_like(out), "do_format": "sbhd", "dqkv_layout": "sbh3d"}
    calls.clear()
    fused_attn_fwd(**given)
    gradients = fused_attn_bwd(**backward)
    forward, backward_call = calls
    for call in calls:
        for name in "qkv":
            assert getattr(call.problem, name).data_ptr() == given[name].data_ptr()
    assert forward.lse.data_ptr() != aux[0].data_ptr()
    assert backward_call.lse.data_ptr() == aux[0].data_ptr()
    assert backward_call.out.data_ptr() == out.data_ptr()
    assert backward_call.dout.data_ptr() == backward["d_o"].data_ptr()
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=False):
        assert getattr(backward_call, name).data_ptr() == gradient.data_ptr()


def test_dropout_in_inference_and_seeds() -> None:
    plain, (_, state) = fused_attn_fwd(**small(dropout=0.0))
    assert state.tolist() == [0, 0]
    given = small(dropout=0.5)
    generator = torch.Generator()
    results = [fused_attn_fwd(**given, rng_gen=generator.manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][1], results[1][1][1])
    assert not torch.equal(results[0][0], results[2][0])
    assert torch.equal(fused_attn_fwd(**given | {"is_training": False})[0], fused_attn_fwd(**given | {"dropout": 0.0})[0])
    assert plain.shape == results[0][0].shape


def test_no_graph_is_made() -> None:
    given = small()
    given["q"].requires_grad_()
    out, (stats, _) = fused_attn_fwd(**given)
    assert not out.requires_grad
    assert not stats.requires_grad
    assert not any(t.requires_grad for t in fused_attn_bwd(**small_backward(given))[:3])


RECIPES: dict[str, Callable[..., Any]] = {
    "delayed": lambda device="cpu": Float8Quantizer(
        torch.tensor([8.0], device=device), torch.zeros(1, device=device), torch.float8_e4m3fn
    ),
    "current": lambda device="cpu": Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
}


class Foreign:
    """A tensor of TransformerEngine's, with the attributes that are read."""

    def __init__(self, data: Tensor, scale_inv: Tensor, name: str) -> None:
        self._data, self._scale_inv = data, scale_inv
        self._fp8_dtype = type("DType", (), {"name": name})()
        self.shape = data.shape


FP8_LAYOUTS = ("bs3hd", "sbhd_sbhd_sbhd", "bshd_bs2hd", "t3hd")


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("layout", FP8_LAYOUTS)
@pytest.mark.parametrize("scaling", list(RECIPES))
@pytest.mark.sample
def test_fp8(scaling: str, layout: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("FLEXATTN_BACKEND", backend)
    run_fp8(scaling, layout)


def run_fp8(scaling: str, layout: str, device: str = "cpu", size: int = SQ, head_dim: int = 16) -> None:
    """Runs FP8 in and out, and its gradients, and compares with the oracle on the values of the FP8 tensors."""
    torch.manual_seed(0)
    q_format, kv_format, _, shared = BY_HAND[layout]
    mask = "padding_causal" if q_format == "thd" else "causal"
    case = Case(layout=layout, mask=mask, dtype=torch.bfloat16, sq=size, skv=size, dims=(head_dim, head_dim))
    q_side, total, cu, _ = side(q_format, size, [size] * BATCH, 0)
    kv_side = side(kv_format, size, [size] * BATCH, 0)[0]
    plain = tensors_of(case, (total, total), device)
    make, make_dout = functools.partial(RECIPES[scaling], device), Float8CurrentScalingQuantizer(torch.float8_e5m2)
    q8, k8, v8 = (make()(t * size) for t, size in zip(plain, (0.5, 1.0, 2.0), strict=True))  # so that scales differ
    q8 = Foreign(q8._data, q8._scale_inv, "kFloat8E4M3")
    o_quantizer, dqkv_quantizer = make(), make()
    lengths = {"max_seqlen_q": size, "max_seqlen_kv": size} | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu.to(device))
    given = lengths | {"fake_dtype": torch.bfloat16, "fused_attention_backend": "FP8", "qkv_layout": layout, "attn_mask_type": mask}
    given |= {"o_format": q_format, "s_quantizer": make()}
    tensors = {"q": q8, "k": k8, "v": v8}
    out, aux = fused_attn_fwd(is_training=True, **given, **tensors, o_quantizer=o_quantizer)
    assert out._data.dtype is torch.uint8
    out16, _ = fused_attn_fwd(is_training=True, **given, **tensors)
    assert out16.dtype is torch.bfloat16
    d_o = make_dout(torch.randn(out16.shape).to(device))
    stands_for = {
        name: (t._data.view(torch.float8_e4m3fn).double() * t._scale_inv.double()).cpu()
        for name, t in (("q", q8), ("k", k8), ("v", v8))
    }
    scores = ("no_bias", "vanilla", head_dim**-0.5, 0.0, 0.0, (0, 0), None, None, False)
    problem = oracle.Problem(q_side, kv_side, mask, (None, None), False, *scores)
    dout = d_o.dequantize(torch.float64).cpu()
    exact = oracle.exact(problem, stands_for, dout, None, list("qkv"))
    found = fused_attn_bwd(
        **given,
        **tensors,
        o=out,
        d_o=d_o,
        aux_ctx_tensors=aux,
        do_format=q_format,
        dqkv_layout=layout,
        dp_quantizer=make(),
        dqkv_quantizer=dqkv_quantizer,
    )
    # E4M3 has 4 significant bits, so weights and out have relative errors up to 2**-4. The gradient of the scores is in dout's
    # E5M2, which has 3. Errors of sums are smaller.
    gradients = [(got, want, 2.0**-3) for got, want in zip(found[:3], exact.gradients.values(), strict=True)]
    for got, want, rounding in ((out, exact.out, 2.0**-4), (out16, exact.out, 2.0**-4), *gradients):
        value = (got.double() if isinstance(got, Tensor) else got.dequantize(torch.float64)).cpu()
        assert float((value - want).norm() / want.norm()) < rounding
        assert float((value - want).abs().max()) < 2 * rounding * float(want.abs().max())
    if scaling == "delayed":
        torch.testing.assert_close(o_quantizer.amax, out16.float().abs().amax().view(1))
        assert float(out._scale_inv) == 0.125
        assert all(float(t._scale_inv) == 0.125 for t in found[:3])
        assert float(dqkv_quantizer.amax) > 0
    if shared:
        assert len({t._data.untyped_storage().data_ptr() for t in found[3 - shared : 3]}) == 1
        assert len({float(t._scale_inv) for t in found[3 - shared : 3]}) == 1


def test_a_gradient_in_16_bits_of_a_call_in_fp8() -> None:
    """dout may come in 16 bits; it is then rounded before the backward or in it."""
    make = RECIPES["current"]
    q, k, v = (make()(torch.randn(BATCH, SQ, HEADS, 16, dtype=torch.bfloat16)) for _ in range(3))
    given = small(q=q, k=k, v=v, fake_dtype=torch.bfloat16, fused_attention_backend=FP8, qkv_layout="bshd_bshd_bshd")
    out, aux = fused_attn_fwd(**given)
    dout = torch.randn(out.shape, dtype=torch.bfloat16)
    backward = small_backward(given, o=out, aux_ctx_tensors=aux)
    given_in_fp8, given_in_16 = (fused_attn_bwd(**backward | {"d_o": d_o})[:3] for d_o in (make()(dout), dout))
    for a, b in zip(given_in_fp8, given_in_16, strict=True):
        assert a.dtype is b.dtype is torch.bfloat16
        assert float((a - b).norm() / a.norm()) < 2.0**-4


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("d_o_in_fp8", [True, False])
@pytest.mark.parametrize("bias", ["no_bias", "post_scale_bias", "alibi"])
def test_a_backward_in_fp8_is_kept_and_takes_each_calls_own_tensors(bias: str, d_o_in_fp8: bool) -> None:
    """A later call has other data, descales and dout. Its gradients must equal those of the call alone."""
    make = RECIPES["current"]
    backwards = []
    for size in (1.0, 3.0, 0.25):
        q, k, v = (make()(torch.randn(BATCH, SQ, HEADS, 16, dtype=torch.bfloat16) * size) for _ in range(3))
        given = small(q=q, k=k, v=v, fake_dtype=torch.bfloat16, fused_attention_backend=FP8, qkv_layout="bshd_bshd_bshd")
        given |= {"attn_bias_type": bias, "attn_bias": torch.randn(1, HEADS, SQ, SQ) if bias == "post_scale_bias" else None}
        out, aux = fused_attn_fwd(**given)
        d_o = torch.randn(out.shape, dtype=torch.bfloat16)
        backwards.append(small_backward(given, o=out, aux_ctx_tensors=aux, d_o=make()(d_o) if d_o_in_fp8 else d_o))
    wanted = []
    for backward in backwards:
        call_cache.clear_cache()
        wanted.append(fused_attn_bwd(**backward))
    call_cache.clear_cache()
    for backward, want in zip(backwards, wanted, strict=True):
        for got, exact in zip(fused_attn_bwd(**backward), want, strict=True):
            assert (got is None) == (exact is None)
            assert got is None or torch.equal(got, exact)
    info = call_cache.cache_info()
    assert (info["misses"], info["hits"]) == (1, 2)


def test_a_bias_and_a_sink_beside_fp8() -> None:
    """Both and their gradients equal those of a call on the FP8 tensors' values, up to FP8's rounding of weights."""
    torch.manual_seed(0)  # one draw in ten of the sink's gradient, a sum that may cancel, is further off
    make = RECIPES["current"]
    in_fp8 = {name: make()(torch.randn(BATCH, SQ, HEADS, 16, dtype=torch.bfloat16)) for name in "qkv"}
    plain = {name: t.dequantize(torch.float32) for name, t in in_fp8.items()}
    bias, offset = torch.randn(1, HEADS, SQ, SQ), torch.randn(1, HEADS, 1, 1)
    scores = {"attn_bias_type": "post_scale_bias", "softmax_type": "learnable", "qkv_layout": "bshd_bshd_bshd"}
    kinds = ({"fake_dtype": torch.bfloat16, "fused_attention_backend": FP8} | in_fp8, plain)
    d_o = torch.randn(BATCH, SQ, HEADS, 16)
    results = []
    for kind in kinds:
        given = small(**scores, **kind, attn_bias=bias, softmax_offset=offset)
        out, aux = fused_attn_fwd(**given)
        gradients = fused_attn_bwd(**small_backward(given, o=out, aux_ctx_tensors=aux, d_o=d_o.to(out.dtype)))
        results.append((out, *gradients))
    for got, want in zip(*results, strict=True):
        assert float((got.float() - want).norm() / want.norm()) < 2.0**-4
    with pytest.raises(ValueError, match=r"attn_bias has dtype torch.bfloat16 and q is in FP8; accepted: torch.float32"):
        fused_attn_fwd(**small(**scores, **kinds[0], attn_bias=bias.bfloat16(), softmax_offset=offset))


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"qkv_layout": "hsbd"}, ValueError, "qkv_layout is 'hsbd'; accepted: sb3hd, sbh3d"),
        ({"page_table_k": torch.zeros(1)}, ValueError, "page_table_k comes with a qkv_layout without pages; accepted: None"),
        (
            {"qkv_scale_inv_format": "bhsd"},
            NotImplementedError,
            "qkv_scale_inv_format is 'bhsd', a format of MXFP8; accepted: None",
        ),
        ({"fused_attention_backend": -1}, ValueError, "fused_attention_backend is No_Backend; accepted"),
        ({"fused_attention_backend": 0}, ValueError, r"fused_attention_backend is 0; accepted: No_Backend \(-1\)"),
        ({"fused_attention_backend": "FP8"}, ValueError, "q is of dtype torch.float32 with fused_attention_backend FP8; accepted"),
        ({"attn_bias_type": "post_scale_bias"}, ValueError, "attn_bias is None with attn_bias_type 'post_scale_bias'; accepted"),
        (
            {"attn_bias_type": "pre_scale_bias", "attn_bias": torch.zeros(1, 1, SQ, SQ).half()},
            ValueError,
            "attn_bias has dtype torch.float16 and q has torch.float32; accepted: torch.float32",
        ),
        ({"attn_bias_type": "bias"}, ValueError, "attn_bias_type is 'bias'; accepted: no_bias, pre_scale_bias"),
        ({"attn_mask_type": "arbitrary"}, ValueError, "attn_mask_type is 'arbitrary'; accepted: no_mask, padding"),
        ({"softmax_type": "learnable"}, ValueError, "softmax_offset is None"),
        ({"window_size": (3, 2)}, ValueError, "window_size is .* with attn_mask_type 'causal'"),
        ({"o_format": "thd"}, ValueError, "o_format is 'thd'; accepted: bshd, sbhd, bhsd"),
        ({"o_format": None}, ValueError, "o_format is 'None'; accepted"),
        ({"qkv_layout": ["bs3hd"]}, ValueError, "qkv_layout is .*bs3hd.*; accepted"),
        ({"window_size": None}, ValueError, "window_size is None .*; accepted: a pair of ints"),
        ({"window_size": (1.5, 0)}, ValueError, "window_size is .*; accepted: a pair of ints"),
        ({"o_quantizer": 3}, TypeError, "o_quantizer is 3 .*; accepted: None, or a quantizer"),
        ({"dropout": -0.1}, ValueError, "dropout_p is -0.1; accepted"),
        ({"dropout": 0.1, "rng_gen": 5}, TypeError, "rng_gen is 5 .*; accepted: None, or a torch.Generator"),
        ({"q": [1.0]}, TypeError, "q is .*; accepted: a tensor, or a Float8Tensor"),
    ],
)
def test_wrong_arguments(more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_attn_fwd(**small(**more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"aux_ctx_tensors": []}, "aux_ctx_tensors is .*; accepted: the list that fused_attn_fwd returned"),
        ({"dqkv_layout": "bsh2d"}, "dqkv_layout is 'bsh2d'; accepted"),
        ({"d_o": torch.zeros(BATCH, SQ, HEADS, 8)}, "dout has shape"),
        ({"o_format": "sbhd"}, "out has shape"),
        ({"do_format": "thd"}, "do_format is 'thd'; accepted: bshd, sbhd, bhsd"),
        ({"d_o": torch.zeros(BATCH, SQ, HEADS * 16), "do_format": "sbhd"}, r"d_o has shape .*; accepted: the 4 dims of sbhd"),
        ({"aux_ctx_tensors": [1, 2]}, "aux_ctx_tensors begins with 1 .*; accepted: the list that fused_attn_fwd returned"),
    ],
)
def test_wrong_arguments_of_a_backward(more: dict[str, Any], message: str) -> None:
    backward = small_backward(small())
    with pytest.raises(ValueError, match=message):
        fused_attn_bwd(**backward | more)


def test_gradients_of_unequal_shapes_have_no_one_tensor() -> None:
    given = small(qkv_layout="bshd_bshd_bshd", k=torch.randn(BATCH, SQ, 2, 16), v=torch.randn(BATCH, SQ, 2, 16))
    with pytest.raises(ValueError, match=r"dqkv_layout is 'sbh3d', which packs .* q, k and v have .*such as 'sbhd_sbhd_sbhd'"):
        fused_attn_bwd(**small_backward(given, dqkv_layout="sbh3d"))


@pytest.mark.parametrize("name", list(QKVLayout))
def test_layout_names(name: str) -> None:
    layout = parse_layout(name)
    if name.startswith("paged_kv_"):
        assert layout == Layout(name.split("_")[2], name.split("_")[3], "", is_paged=True)
        return
    q_format, kv_format, dim, shared = BY_HAND[name]
    packing = {0: "", 2: "hd_2hd", 3: "3hd"}[shared]
    if shared and dim == len(q_format) - 1:
        packing = packing.replace("2hd", "h2d").replace("3hd", "h3d")
    assert layout == Layout(q_format, kv_format, packing, is_paged=False)


def test_backends() -> None:
    assert FusedAttnBackend["FP8"] == 2
    assert FusedAttnBackend.No_Backend == -1
    foreign = type("Enum", (), {"name": "NVTE_FP8"})()
    assert [FusedAttnBackend.cast(value) for value in ("FP8", 2, FP8, foreign)] == [FP8] * 4


SHARED = {"qkv_layout": "sbh3d", "o_format": "sbhd", "attn_bias_type": "no_bias", "attn_mask_type": "padding", "dropout": 0.0}
SHARED |= {"softmax_type": "vanilla", "window_size": (-1, -1), "fast_zero_fill": True, "cuda_graph": False}
NONE = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "s_quantizer", "attn_scale", "qkv_scale_inv_format", "bottom_right_diagonal")
LENGTHS = ["max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v"]


@pytest.mark.parametrize(
    ("function", "first", "own", "none"),
    [
        (
            fused_attn_fwd,
            ["is_training", *LENGTHS, "fake_dtype", "fused_attention_backend"],
            {"return_max_logit": False},
            ("attn_bias", "page_table_k", "page_table_v", "o_quantizer", "rng_gen", "softmax_offset"),
        ),
        (
            fused_attn_bwd,
            [*LENGTHS, "o", "d_o", "fake_dtype", "aux_ctx_tensors", "fused_attention_backend"],
            {"do_format": "sbhd", "dqkv_layout": "sbh3d", "deterministic": False},
            ("dp_quantizer", "dqkv_quantizer", "do_scale_inv_format"),
        ),
    ],
)
def test_arguments_and_defaults(function: Any, first: list[str], own: dict[str, Any], none: tuple[str, ...]) -> None:
    """They equal TransformerEngine's."""
    found = inspect.signature(function).parameters
    assert [name for name, p in found.items() if p.default is inspect.Parameter.empty] == first
    defaults = {name: p.default for name, p in found.items() if name not in first}
    assert defaults == SHARED | own | dict.fromkeys((*NONE, *none))


@pytest.mark.slow  # torch.compile takes seconds
@pytest.mark.parametrize("layout", ["thd_th2d", "thd_t2hd"])
def test_a_backward_into_one_tensor_compiles(layout: str) -> None:
    dim = layout.index("2") - len("thd_t") + 1
    q, kv = torch.randn(12, 4, 16), torch.randn(12, 2, 16).unsqueeze(dim).repeat_interleave(2, dim)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)

    def function(q: Tensor, kv: Tensor, dout: Tensor) -> list[Tensor]:
        given = (7, 7, lengths, lengths, q, *kv.unbind(dim))
        names = {"qkv_layout": layout, "o_format": "thd", "attn_mask_type": "padding_causal"}
        out, aux = fused_attn_fwd(True, *given, torch.float32, FusedAttnBackend.F16_arbitrary_seqlen, **names)
        names |= {"do_format": "thd", "dqkv_layout": layout}
        return fused_attn_bwd(*given, out, dout, torch.float32, aux, FusedAttnBackend.F16_arbitrary_seqlen, **names)[:3]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = compiled(q, kv, torch.ones_like(q))
    for got, want in zip(found, function(q, kv, torch.ones_like(q)), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


@pytest.mark.slow  # torch.compile takes seconds
def test_compiled() -> None:
    given = small(o_format="sbhd")

    def function(q: Tensor) -> tuple[Tensor, Tensor]:
        out, (stats, _) = fused_attn_fwd(**given | {"q": q})
        return out, stats

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(given["q"]), function(given["q"]), strict=True):
        torch.testing.assert_close(got, want)
