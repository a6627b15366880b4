"""The support tables of docs/support.md: each cell is a test through the public API, and the page must equal the tests."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.block_mask import block_lists
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.cudnn_rules import known_bad
from flexattn.dispatch.spec import (
    AttentionSpec,
    Direction,
    Gradients,
    Operands,
    Results,
    Window,
    as_bshd,
    parse_format,
    with_classes,
)
from flexattn.functional import bind_call
from flexattn.mods.trace import trace_mods
from flexattn.ops import make_spec
from flexattn.testing import (
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.conftest import ROOT
from tests.support.key_lists import draw_lists
from tests.support.pages import make_pool

E4M3 = torch.float8_e4m3fn
BACKENDS = ("triton", "eager", "cudnn")
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
PAGE = ROOT / "docs" / "support.md"
HEADER = ("feature", *(f"{backend} {direction}" for backend in BACKENDS for direction in ("forward", "backward")))
SCALE = 7 if torch.cuda.is_available() else 1  # of all lengths: small for the interpreter, past the largest compiled tile
RNG_STATE = (-7777777777777, 31415926535)  # a negative seed and an offset of more than 32 bits, as torch may draw them
DEFAULT_SLOPES = (2.0**-4, 2.0**-8)  # slopes of 2 heads: Press et al. (2022), section 3
BIAS_DIMS = ("bhss", "1hss", "b1ss", "11ss", "111s")
NEG_INF = float("-inf")

NO_FP64 = "the kernels support fp16, bf16 and fp32, not float64"
NO_GRADIENT = "page_table is given and a gradient is needed"
NO_FP8_GRADIENT = "with q in torch.bfloat16, and a gradient is needed"
OTHER_BITS = "the rounding of torch's matrix products may depend on the batch"
NO_HEAD_DIM = "the kernels support multiples of 8 up to"

HEADS = {"num_heads": 2, "num_heads_kv": 1}
LENGTHS = {**HEADS, "lengths_q": (37, 20), "lengths_kv": (29, 43)}  # one sequence has more keys than queries, the other fewer
EQUAL_LENGTHS = {**HEADS, "lengths_q": (37, 37), "lengths_kv": (45, 45)}  # as a dense format without padding needs them
PADDED = {**LENGTHS, "padding": True, "gap": 3}
PACKED = {**LENGTHS, "qkv_format": "thd", "gap": 3}
STRIDED = {**EQUAL_LENGTHS, "strided": True}
EQUAL = {**EQUAL_LENGTHS, "qkv_format": "bhsd"}
FOUR = {**PADDED, "lengths_q": (37, 20, 5, 11), "lengths_kv": (29, 43, 7, 3)}
LATENTS = {"head_dim_qk": 576, "head_dim_v": 512, "num_heads": 4, "num_heads_kv": 1, "dtype": torch.bfloat16}
NOTHING: dict[str, Any] = {}


class Row(NamedTuple):
    """One feature: a call with hostile inputs, and the backends that cannot run it."""

    inputs: dict[str, Any] = PADDED  # for `make_inputs`: sq != skv, grouped heads, NaN in the padding or around a strided view
    call: dict[str, Any] = NOTHING  # arguments of `attention`
    bias: str = ""  # the dims that a bias spans, as in "1hss"; n: half of the batch
    slopes: str = ""  # and those of alibi_slopes, "h" or "bh"
    dlse: bool = False  # whether a gradient comes in through lse too
    refusals: dict[str, str] = NOTHING  # backend -> why it cannot; cudnn's are its own rules, for a GPU that it is for
    pages: int = 0  # tokens of a page if k and v are in pages; pages have no backward
    cached: bool = False  # whether lengths are in seqused, as for keys in a cache
    fp8: bool = False  # whether k and v are kept in E4M3; they have no backward
    fp32: bool = False  # whether `attention_backward` is to give dq, dk and dv in float32
    lists: int = 0  # lists of keys for each query: 1, or one for each key head
    cudnn: Any = None  # the same feature without others that cudnn takes no call with: another Row


def mask(attn_mask_type: str, inputs: dict[str, Any], **call: Any) -> Row:
    return Row(inputs, {"attn_mask_type": attn_mask_type, **call})


def window(left: int, right: int, **call: Any) -> Row:
    return Row(PACKED, {"attn_mask_type": "padding", "window_size": (left, right), **call})


def heads(num_heads: int, num_heads_kv: int) -> Row:
    return Row({**PADDED, "num_heads": num_heads, "num_heads_kv": num_heads_kv})


def head_dims(qk: int, v: int, **refusals: str) -> Row:
    inputs = {"lengths_q": (37,), "lengths_kv": (29,), "strided": True, "num_heads": 2, "num_heads_kv": 1}
    if max(qk, v) > 256:
        inputs["dtype"] = torch.bfloat16
    return Row({**inputs, "head_dim_qk": qk, "head_dim_v": v}, {"attn_mask_type": "causal"}, refusals=refusals)


def bias(kind: str, dims: str) -> Row:
    alone = Row(EQUAL, {"bias_type": f"{kind}_scale_bias"}, bias=dims)
    return Row(PADDED, {"bias_type": f"{kind}_scale_bias", "softcap": 5.0}, bias=dims, cudnn=alone)


def fp8_inside(**fields: Any) -> Row:
    inputs = {**PACKED, "dtype": torch.bfloat16}
    return Row(inputs, {"attn_mask_type": "padding_causal", "fp8_recipe": flexattn.fp8.Recipe(**fields)})


def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((q_idx - kv_idx).abs() < 30 * (h + 1), score * 1.5 - (q_idx - kv_idx).abs() * 0.125, -1e4 - b)


def odd_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 2 == 1) | (kv_idx < q_idx)


ROWS: dict[str, dict[str, Row]] = {
    "Formats": {
        "bshd": Row(STRIDED),
        "sbhd": Row({**STRIDED, "qkv_format": "sbhd"}),
        "bhsd": Row({**STRIDED, "qkv_format": "bhsd"}),
        "bshd with lengths (cu_seqlens)": Row(PADDED),
        "sbhd with lengths (cu_seqlens)": Row({**PADDED, "qkv_format": "sbhd"}),
        "bhsd with lengths (cu_seqlens)": Row({**PADDED, "qkv_format": "bhsd"}),
        "thd": Row({**PACKED, "gap": 0, "strided": True}),
        "thd with gaps (cu_seqlens_padded)": Row(PACKED),
        "mixed: q thd, k and v bshd": Row({**PADDED, "qkv_format": "thd_2bshd"}),
        "mixed: q sbhd, k and v bhsd": Row({**STRIDED, "qkv_format": "sbhd_2bhsd"}),
        "strided views": Row({**PACKED, "strided": True}),
    },
    "Caches": {
        "seqused_q and seqused_kv": Row(cached=True),
        "page_table": Row(pages=16),
        "page_table, bhsd": Row({**PADDED, "qkv_format": "bhsd"}, pages=8),
        "page_table, q thd": Row({**PADDED, "qkv_format": "thd_2bshd"}, pages=16),
        "page_table, pages of 12 tokens": Row(pages=12),
        "page_table, a mask_mod": Row({**PADDED, "qkv_format": "thd_2bshd"}, {"mask_mod": odd_keys}, pages=16),
        "page_table, absorbed latents (576 and 512)": Row({**PADDED, **LATENTS}, pages=16),
        "k and v in E4M3": Row({**PADDED, "dtype": torch.bfloat16}, {"attn_mask_type": "padding_causal"}, cached=True, fp8=True),
        "k and v in E4M3, page_table": Row({**PADDED, "dtype": torch.bfloat16}, pages=16, fp8=True),
        "batch_invariant": Row(call={"batch_invariant": True}, cached=True, refusals={"eager": OTHER_BITS}),
    },
    "Dtypes": {
        "float16": Row({**PADDED, "dtype": torch.float16}),
        "bfloat16": Row({**PADDED, "dtype": torch.bfloat16}),
        "float32": Row({**PADDED, "dtype": torch.float32, "outliers": True}),
        "float64": Row({**PADDED, "dtype": torch.float64}, refusals={"triton": NO_FP64}),
        "bfloat16, gradients in float32 (fp32_gradients)": Row(
            {**PACKED, "dtype": torch.bfloat16}, {"attn_mask_type": "padding_causal"}, fp32=True
        ),
        "FP8 inside (fp8_recipe)": fp8_inside(),
        "FP8 inside, E5M2 gradients": fp8_inside(fp8_format="HYBRID", granularity="block", rotation=True),
    },
    "Masks": {
        "no_mask": mask("no_mask", STRIDED),
        "causal": mask("causal", STRIDED),
        "causal_bottom_right": mask("causal_bottom_right", STRIDED),
        "padding": mask("padding", PADDED),
        "padding_causal": mask("padding_causal", PADDED),
        "padding_causal_bottom_right": mask("padding_causal_bottom_right", PADDED),
        "window, bottom-right diagonal": window(9, 4),
        "window, top-left diagonal": window(9, 4, bottom_right_diagonal=False),
        "window beside the diagonal": Row(PACKED, {"attn_mask_type": "padding", "window_size": Window(9, -4)}),
        "window open on the left": window(-1, 4),
        "window open on the right": window(9, -1),
        "window under a causal mask": mask("causal", STRIDED, window_size=(9, 0)),
        "queries that see no key": mask("causal_bottom_right", {**STRIDED, "lengths_q": (45, 45), "lengths_kv": (21, 21)}),
        "sequences of length 0": mask(
            "padding_causal_bottom_right", {"qkv_format": "thd", "lengths_q": (0, 37, 20), "lengths_kv": (29, 0, 7), "gap": 3}
        ),
    },
    "Heads": {
        "grouped heads (GQA)": heads(6, 2),
        "one key head (MQA)": heads(5, 1),
        "one key head for more than 8 (split backward)": heads(9, 1),
        "sq < skv": Row({**STRIDED, "lengths_q": (5, 5)}),
        "sq > skv": Row({**STRIDED, "lengths_kv": (5, 5)}),
        "head dim 8": head_dims(8, 8),
        "head dim 40": head_dims(40, 40),
        "head dim 96": head_dims(96, 96),
        "head dim 256": head_dims(256, 256),
        "head dims 192 and 128 (d_qk != d_v)": head_dims(192, 128),
        "head dims 40 and 72 (d_qk != d_v)": head_dims(40, 72),
        "head dim 12 (no multiple of 8)": head_dims(12, 12, triton=NO_HEAD_DIM),
        "head dim 264 (more than 256)": head_dims(264, 264),
        "head dim 512": head_dims(512, 512),
        "head dims 576 and 512 (d_qk != d_v)": head_dims(576, 512),
        "head dim 520": head_dims(520, 520, triton=NO_HEAD_DIM),
    },
    "Scores": {
        **{f"pre_scale_bias {dims}": bias("pre", dims) for dims in BIAS_DIMS},
        **{f"post_scale_bias {dims}": bias("post", dims) for dims in BIAS_DIMS},
        "post_scale_bias nhss": Row(FOUR, {"bias_type": "post_scale_bias", "softcap": 5.0}, bias="nhss"),
        "alibi, default slopes": Row(PACKED, {"attn_mask_type": "padding_causal", "bias_type": "alibi"}),
        "alibi, slopes [h]": Row(PACKED, {"attn_mask_type": "padding", "bias_type": "alibi"}, slopes="h"),
        "alibi, slopes [b, h]": Row(PACKED, {"attn_mask_type": "padding", "bias_type": "alibi"}, slopes="bh"),
        "softmax_scale": Row(call={"softmax_scale": 0.7}),
        "softcap": Row(call={"softcap": 0.5, "softmax_scale": 1.0}),
    },
    "Mods": {
        "score_mod": Row(call={"score_mod": score_mod, "softcap": 5.0}, cudnn=Row(call={"score_mod": score_mod})),
        "score_mod that no cuDNN graph can say": Row(
            call={"score_mod": lambda score, b, h, i, j: score + torch.round((i - j) * 0.25)}
        ),
        "score_mod that ignores the score": Row(PACKED, {"score_mod": lambda score, b, h, i, j: (i + 2 * j) % 5 * 0.25}),
        "mask_mod": mask("padding_causal", PACKED, mask_mod=lambda b, h, i, j: (i + j) % 3 != h),
        "mask_mod that is a band": Row(STRIDED, {"mask_mod": lambda b, h, i, j: (i - j <= 9) & (i >= j)}),
        "kv_indices": Row(PACKED, {"attn_mask_type": "padding_causal_bottom_right", "softcap": 5.0}, lists=1),
        "block_mask": Row(STRIDED, {"block_mask": lambda b, h, i, j: (i // 16 + j // 16) % 2 == b}),
    },
    "Softmax": {
        "off-by-one": Row(call={"softmax_type": "off-by-one"}),
        "learnable sink": Row({**PADDED, "num_heads": 4, "num_heads_kv": 2}, {"softmax_type": "learnable"}),
        "dropout": Row(call={"dropout_p": 0.3}, cudnn=Row(EQUAL, {"dropout_p": 0.25})),
        "lse, with its gradient": Row(dlse=True),
        "max_logit": Row(call={"return_max_logit": True}),
        "deterministic": Row(
            {**PADDED, "num_heads": 9, "num_heads_kv": 1},
            {"deterministic": True, "softmax_type": "learnable"},
            bias="111s",
            cudnn=Row(EQUAL, {"deterministic": True}),
        ),
    },
}

CASES = [pytest.param(section, row, id=name) for section, rows in ROWS.items() for name, row in rows.items()]


def row_for(backend: str, row: Row) -> Row:
    """The row as a backend takes it: for cudnn in bfloat16, unless the row is about another dtype."""
    if backend != "cudnn":
        return row
    row = row.cudnn or row
    return row._replace(inputs={"dtype": torch.bfloat16, **row.inputs})


def on_h200(spec: AttentionSpec, x: Operands) -> AttentionSpec:
    return with_classes(spec, x)._replace(device_type="cuda", capability=(9, 0))


def cudnn_call(row: Row, direction: Direction) -> tuple[AttentionSpec, Operands]:
    """The row as `attention` would bring it to cuDNN on an H200."""
    arguments = make_case(row_for("cudnn", row), "cpu").arguments
    arguments["q"].requires_grad_(not (row.pages or row.fp8))
    x, settings = bind_call(**arguments, return_lse=True)
    spec = on_h200(make_spec(x, settings, None), x)._replace(needs_lse_grad=row.dlse and direction == "backward")
    if row.fp32 and direction == "backward":
        spec = spec._replace(is_part=True, results=Results(fp32="dqkv"))
    return spec, x


def refusal(backend: str, row: Row, direction: Direction, version: int = cudnn_backend.RUN_WITH[0]) -> str | None:
    """Returns the reason why a backend cannot run a row, or None: no or yes in docs/support.md. version: cuDNN's."""
    if (row.pages or row.fp8) and direction == "backward":
        return NO_GRADIENT if row.pages else NO_FP8_GRADIENT
    if "batch_invariant" in row.call:  # of a backend that is asked for by name, the forward comes first
        direction = "forward"
    if backend != "cudnn":
        return row.refusals.get(backend)
    spec, _ = cudnn_call(row, direction)
    return cudnn_backend.rule_error(spec, direction) or known_bad(spec, direction, version)


class Case(NamedTuple):
    """A row's tensors: those of `attention`, those of the oracle, and the incoming gradients."""

    arguments: dict[str, Any]
    inputs: Inputs
    spec: AttentionSpec
    operands: Operands
    dout: Tensor
    dlse: Tensor | None
    fp32: bool

    def attention(self, backend: str) -> tuple[Tensor, ...]:
        results = flexattn.attention(**self.arguments, backend=backend, return_lse=True)
        assert isinstance(results, tuple)
        return results

    def gradients(self, backend: str) -> Gradients:
        leaves = {
            name: self.arguments[name].detach().requires_grad_()
            for name in ("q", "k", "v", "bias", "softmax_offset")
            if self.arguments.get(name) is not None
        }
        out, lse, *_ = self._replace(arguments=self.arguments | leaves).attention(backend)
        if self.fp32:
            given = self.arguments | {"backend": backend, "out": out.detach(), "lse": lse.detach(), "fp32_gradients": "dqkv"}
            found = flexattn.attention_backward(self.dout, **given)
            assert {t.dtype for t in found[:3]} == {torch.float32}
            return Gradients(*found[:3], None, None)
        outputs, seeds = ([out], [self.dout]) if self.dlse is None else ([out, lse], [self.dout, self.dlse])
        named = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), seeds), strict=True))
        return Gradients(named["q"], named["k"], named["v"], named.get("bias"), named.get("softmax_offset"))

    def budget(self) -> tuple[Tensor, ...]:
        """The forward in plain torch: in the inputs' dtype, or in emulated FP8."""
        if "fp8_recipe" in self.arguments:
            return self.attention("eager")
        return reference_attention(self.spec, self.operands, dtype=self.spec.dtype)

    def gradient_budget(self) -> Gradients:
        if "fp8_recipe" in self.arguments:
            return self.gradients("eager")
        return reference_gradients(self.spec, self.operands, self.dout, self.dlse, dtype=self.spec.dtype)


def make_case(row: Row, device: str) -> Case:
    scaled = {name: [SCALE * length for length in row.inputs[name]] for name in ("lengths_q", "lengths_kv")}
    inputs = make_inputs(**{**row.inputs, **scaled}, device=device)
    if row.fp8:  # what E4M3 has a number for
        inputs = inputs._replace(**{name: getattr(inputs, name).to(E4M3).to(inputs.q.dtype) for name in "kv"})
    batch, num_heads = len(scaled["lengths_q"]), row.inputs.get("num_heads", 4)
    padding = inputs.cu_seqlens_q is not None
    call = {"attn_mask_type": "padding" if padding else "no_mask", **row.call}
    generator = torch.Generator().manual_seed(3)
    if row.bias:
        gap = row.inputs.get("gap", 0)
        full = (batch, num_heads, max(scaled["lengths_q"]) + gap, max(scaled["lengths_kv"]) + gap)
        shape = [{"1": 1, "n": size // 2}.get(dim, size) for dim, size in zip(row.bias, full, strict=True)]
        call["bias"] = torch.randn(shape, generator=generator).to(device)
        call.setdefault("bias_type", "post_scale_bias")
    if row.slopes:
        shape = [{"b": batch, "h": num_heads}[dim] for dim in row.slopes]
        call["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if call.get("softmax_type") == "learnable":
        call["softmax_offset"] = torch.randn(num_heads, generator=generator).to(device)
    if "dropout_p" in call:
        call["rng_state"] = torch.tensor(RNG_STATE, device=device)
    oracle = dict(call)
    if call.get("bias_type") == "alibi" and not row.slopes:
        oracle["alibi_slopes"] = torch.tensor(DEFAULT_SLOPES, device=device)
    if "block_mask" in call:
        (sq, *_), (skv, *_) = scaled["lengths_q"], scaled["lengths_kv"]
        call["block_mask"] = flexattn.create_block_mask(call["block_mask"], batch, 1, sq, skv, device, 16)
        oracle["blocks"] = block_lists(oracle.pop("block_mask") and call["block_mask"], batch, num_heads, sq, skv, inputs.q.device)
        oracle["mask_mod"] = call["block_mask"].mask_mod
    for name in ("fp8_recipe", "batch_invariant"):
        oracle.pop(name, None)
    mods = {name: oracle.pop(name) for name in ("score_mod", "mask_mod") if name in oracle}
    if mods:
        oracle["mods"] = trace_mods(mods.get("score_mod"), mods.get("mask_mod"), needs_grad=True)
    spec, operands = make_call(inputs, **oracle)
    if row.lists:
        tokens = tuple(inputs.q.shape[:1] if "thd" in inputs.qkv_format else inputs.q.shape[:2])
        heads = row.lists if row.lists > 1 else 0
        lists, _ = draw_lists(tokens, heads, max(scaled["lengths_kv"]), 20, device=device)
        call["kv_indices"] = lists
        spec, operands = spec._replace(kv_lists=row.lists), operands._replace(kv_indices=lists)
    return Case(
        inputs._asdict() | kept_keys(row, inputs, scaled) | call,
        inputs,
        spec,
        operands,
        make_dout(inputs),
        make_dlse(inputs) if row.dlse else None,
        row.fp32,
    )


def kept_keys(row: Row, inputs: Inputs, lengths: dict[str, list[int]]) -> dict[str, Any]:
    """Returns the arguments of a call on `inputs`, with lengths in seqused, and with pages if the row has them."""
    used = {name: torch.tensor(lengths[f"lengths_{name}"], dtype=torch.int32, device=inputs.q.device) for name in ("q", "kv")}
    changes: dict[str, Any] = {}
    if row.pages or row.cached:
        changes = {"cu_seqlens_kv": None, "seqused_kv": used["kv"], "max_seqlen_kv": None}
        if "thd" not in inputs.qkv_format:
            changes |= {"cu_seqlens_q": None, "seqused_q": used["q"]}
    if row.pages:
        kv_format = parse_format(inputs.qkv_format)[1]
        k, v = (as_bshd(t, kv_format) for t in (inputs.k, inputs.v))
        pool = make_pool(k, v, lengths["lengths_kv"], row.pages, kv_format)
        changes |= {"k": pool.k, "v": pool.v, "page_table": pool.page_table}
    if row.fp8:
        changes |= {name: changes.get(name, getattr(inputs, name)).to(E4M3) for name in "kv"}
    return changes


def no_cudnn_here() -> str | None:
    if not torch.cuda.is_available():
        return "cudnn needs a GPU, and torch.cuda.is_available() is False"
    return cudnn_backend.device_error("cuda", torch.cuda.get_device_capability())


@pytest.fixture(
    params=["triton", "eager", pytest.param("cudnn", marks=pytest.mark.skipif(bool(no_cudnn_here()), reason=str(no_cudnn_here())))]
)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return request.param


def skip_other_dropout(backend: str, row: Row) -> None:
    if backend == "cudnn" and "dropout_p" in row.call:
        pytest.skip("cudnn drops other weights than the reference; tests/gpu/test_cudnn.py reads off which")


def expect_refusal(case: Case, backend: str, direction: Direction, reason: str) -> None:
    run = case.attention if direction == "forward" else case.gradients
    error = ValueError if reason in (NO_GRADIENT, NO_FP8_GRADIENT) else flexattn.BackendError
    with pytest.raises(error, match=re.escape(reason)):
        run(backend)


@pytest.mark.sample("section")
@pytest.mark.parametrize(("section", "row"), CASES)
def test_forward(section: str, row: Row, backend: str, device: str) -> None:
    reason, row = refusal(backend, row, "forward"), row_for(backend, row)
    case = make_case(row, device)
    if reason is not None:
        expect_refusal(case, backend, "forward", reason)
        return
    skip_other_dropout(backend, row)
    results = case.attention(backend)
    exact = reference_attention(case.spec, case.operands)
    same_dtype = case.budget()
    assert len(results) == (3 if "return_max_logit" in row.call else 2)
    for name, got, ref, eager in zip(("out", "lse", "max_logit"), results, exact, same_dtype, strict=False):
        check_close(name, got, ref, eager)
    out, lse = results[:2]
    blind = (lse == NEG_INF).transpose(-1, -2)  # padding, and queries that see no key
    assert not as_bshd(out, case.spec.q_format)[blind].any()
    assert blind[as_bshd(case.inputs.q, case.spec.q_format)[..., 0].isnan()].all()
    if row.call.get("deterministic"):
        assert all(torch.equal(again, first) for again, first in zip(case.attention(backend), results, strict=True))


@pytest.mark.slow
@pytest.mark.sample("section")
@pytest.mark.parametrize(("section", "row"), CASES)
def test_backward(section: str, row: Row, backend: str, device: str) -> None:
    reason, row = refusal(backend, row, "backward"), row_for(backend, row)
    case = make_case(row, device)
    if reason is not None:
        expect_refusal(case, backend, "backward", reason)
        return
    skip_other_dropout(backend, row)
    gradients = case.gradients(backend)
    exact = reference_gradients(case.spec, case.operands, case.dout, case.dlse)
    same_dtype = case.gradient_budget()
    for name, got, ref, eager in zip(Gradients._fields, gradients, exact, same_dtype, strict=True):
        assert (got is None) == (ref is None)
        if got is not None:
            check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)
    for got, given in zip(gradients, case.inputs[:3], strict=False):
        assert not got[given.isnan()].any()  # padding
    if row.call.get("deterministic"):
        again = case.gradients(backend)
        assert all(torch.equal(b, a) for a, b in zip(gradients[:-1], again[:-1], strict=True))


def gradients_of(call: dict[str, Any], dout: Tensor) -> Any:
    """Returns a function from q, k and v to their gradients, in which it can be differentiated."""

    def gradients(*qkv: Tensor) -> Any:
        def loss(*qkv: Tensor) -> Tensor:
            names = dict(zip("qkv", qkv, strict=True))
            return (flexattn.attention(**call | names) * dout).sum()  # type: ignore[no-any-return]

        return torch.func.grad(loss, (0, 1, 2))(*qkv)

    return gradients


DERIVATIVES = ("forward mode", "second derivatives")


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(derivative: str, backend: str, device: str) -> None:
    case = make_case(row_for(backend, ROWS["Masks"]["padding_causal"]), device)
    call = {**case.arguments, "backend": backend, "return_lse": False, "return_max_logit": False}
    qkv = tuple(call[name].detach().nan_to_num(0.0) for name in "qkv")
    found = []
    for dtype, name in ((qkv[0].dtype, backend), (torch.float64, "eager")):
        own = call | {"backend": name}
        tensors = tuple(t.to(dtype) for t in qkv)
        run = gradients_of(own, case.dout.nan_to_num(0.0).to(dtype))
        if derivative == "forward mode":
            run = lambda q, k, v, own=own: flexattn.attention(**own | {"q": q, "k": k, "v": v})  # noqa: E731
        found.append(torch.func.jvp(run, tensors, tensors)[1])
    atol = 1e-4 if qkv[0].dtype is torch.float32 else 5e-2
    torch.testing.assert_close(*found, rtol=atol, atol=atol, check_dtype=False)


def test_the_page_lists_the_derivatives() -> None:
    page = PAGE.read_text("utf-8").partition("## Derivatives\n")[2].partition("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")) for line in re.findall(r"^\|(.*)\|$", page, re.M)]
    assert rows[0] == ("derivative", *BACKENDS)
    assert rows[2:] == [(name, "yes", "yes", "yes") for name in DERIVATIVES]


def test_cudnn_asked_for_on_another_device_says_so(device: str) -> None:
    if (reason := no_cudnn_here()) is None:
        pytest.skip("cudnn runs here, so every row has its own answer above")
    call = make_case(ROWS["Masks"]["causal"], device).arguments
    with pytest.raises(flexattn.BackendError, match="backend='cudnn' cannot run the forward"):
        flexattn.attention(**call, backend="cudnn")
    assert "not cudnn: " in flexattn.explain(**call, backend="eager").details
    assert reason


def test_max_logit_carries_no_gradient(backend: str, device: str) -> None:
    case = make_case(row_for(backend, ROWS["Softmax"]["max_logit"]), device)
    q = case.arguments["q"].detach().requires_grad_()
    *_, max_logit = case._replace(arguments=case.arguments | {"q": q}).attention(backend)
    assert not max_logit.requires_grad


def test_the_inputs_are_hostile(device: str) -> None:
    """Each row is worth running: it has uneven lengths, grouped heads, NaN next to real values, and queries that see no key."""
    case = make_case(ROWS["Masks"]["queries that see no key"], device)
    assert (reference_attention(case.spec, case.operands)[1] == NEG_INF).any()
    for section in ROWS.values():
        for name, row in section.items():
            case = make_case(row, device)
            assert case.spec.group_size > 1, name
            assert row.inputs["lengths_q"] != row.inputs["lengths_kv"], name
            assert any(length & (length - 1) for length in row.inputs["lengths_q"]), name
            assert row.inputs.get("strided") or row.inputs.get("gap"), name


def cells(name: str, row: Row) -> tuple[str, ...]:
    answers = (refusal(backend, row, direction) for backend in BACKENDS for direction in ("forward", "backward"))
    return (name, *("yes" if reason is None else "no" for reason in answers))


def read_tables(page: str) -> dict[str, list[tuple[str, ...]]]:
    """The page's support tables by their headings, without their header and rule."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for heading, text in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", page, re.M | re.S):
        lines = re.findall(r"^\|(.*)\|$", text, re.M)
        rows = [tuple(cell.strip(" `") for cell in line.split("|")) for line in lines]
        if rows and rows[0] == HEADER:
            tables[heading] = rows[2:]
    return tables


def test_the_page_says_what_the_tests_say() -> None:
    page = PAGE.read_text("utf-8")
    assert read_tables(page) == {heading: [cells(name, row) for name, row in rows.items()] for heading, rows in ROWS.items()}
