"""Launchers around cuDNN: layouts, lengths, offsets, padding, queries that see nothing. cuDNN is emulated, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

from flexattn.dispatch import cudnn_backend, replay
from flexattn.dispatch.spec import AttentionSpec, Band, Gradients, Operands
from flexattn.kernels_cudnn import attention, execute
from flexattn.kernels_cudnn import plans as plans_module
from flexattn.kernels_cudnn.graphs import ALIGNMENT, band_arguments
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.api import test_slots
from tests.api.test_support import ROWS, Case, Row, make_case, on_h200, row_for
from tests.support import cudnn_emulator

CASES = {f"{section}: {name}": row for section, rows in ROWS.items() for name, row in rows.items() if not (row.pages or row.cached)}


@pytest.fixture(autouse=True, params=[True, False], ids=["reads all", "reads no ragged padding"])
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[cudnn_emulator.EmulatedPlans]:
    plans = cudnn_emulator.EmulatedPlans()
    monkeypatch.setattr(attention, "execute", cudnn_emulator.execute)
    monkeypatch.setattr(attention, "PLANS", plans)
    monkeypatch.setattr(plans_module, "PLANS", plans)  # `prepare` asks there
    monkeypatch.setattr(attention, "_reads_ragged_padding", lambda: request.param)
    monkeypatch.setattr(cudnn_emulator, "reads_ragged_padding", request.param)
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()
    yield plans
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()


def spec_of(case: Case, row: Row) -> AttentionSpec:
    """Returns the spec that the operators would make of a row on an H200."""
    return on_h200(case.spec, case.operands)._replace(return_max_logit="return_max_logit" in row.call)


@pytest.mark.sample("bucketed")
@pytest.mark.parametrize("bucketed", [False, True], ids=["exact", "bucketed"])
@pytest.mark.parametrize("name", CASES)
def test_row(name: str, bucketed: bool, monkeypatch: pytest.MonkeyPatch, emulated: cudnn_emulator.EmulatedPlans) -> None:
    """Every row of the support tables that cuDNN takes; the plan that is built ahead is the plan that runs."""
    row = row_for("cudnn", CASES[name])
    case = make_case(row, "cpu")
    spec, x = spec_of(case, row), case.operands
    if reason := cudnn_backend.rule_error(spec, "forward"):
        pytest.skip(f"refused: {reason}")
    if bucketed:
        monkeypatch.setattr(cudnn_backend, "EXACT_SHAPES", 0)
    cudnn_backend.prepare(spec, x, "forward")
    out, lse, max_logit = cudnn_backend.forward(spec, x)
    exact = reference_attention(case.spec, x)
    same_dtype = reference_attention(case.spec, x, dtype=case.spec.dtype)
    got = (out, lse, max_logit) if spec.return_max_logit else (out, lse)
    for what, g, ref, eager in zip(("out", "lse", "max_logit"), got, exact, same_dtype, strict=False):
        check_close(what, g, ref, eager)
    if cudnn_backend.rule_error(spec, "backward") is None:
        cudnn_backend.prepare(spec, x, "backward")
        gradients = cudnn_backend.backward(spec, x, out, lse, case.dout, None)
        exact_gradients = reference_gradients(case.spec, x, case.dout)
        budget = reference_gradients(case.spec, x, case.dout, dtype=case.spec.dtype)
        for what, g, ref, eager in zip(Gradients._fields, gradients, exact_gradients, budget, strict=True):
            assert (g is None) == (ref is None)
            if g is not None:
                check_close(what, g, ref, eager, factor=GRADIENT_FACTOR)
    assert emulated.asked[::2] == emulated.asked[1::2]
    assert len(emulated.asked) in (2, 4)


@pytest.mark.parametrize("padding", [False, True])
def test_parts_of_the_keys_add_up(padding: bool) -> None:
    """The backward uses the given out and lse of all keys, for the queries from a part's first key on."""
    inputs = make_inputs(lengths_q=[21, 17] if padding else [21, 21], padding=padding, num_heads=4, dtype=torch.bfloat16)
    spec, x = make_call(inputs, attn_mask_type="padding_causal" if padding else "causal")
    spec = spec._replace(device_type="cuda", capability=(9, 0), is_part=True)
    out, lse, _ = reference_attention(spec, x, torch.float64)
    out, lse, dout = out.to(x.q.dtype), lse.float(), make_dout(inputs)
    total = [torch.zeros(t.shape, dtype=torch.float64) for t in (x.q, x.k, x.v)]
    for begin, end in ((0, 8), (8, 21)):
        rows, keys = slice(begin, None), slice(begin, end)
        part = x._replace(q=x.q[:, rows], k=x.k[:, keys], v=x.v[:, keys], max_seqlen_q=21 - begin, max_seqlen_kv=end - begin)
        if padding:
            lengths = torch.tensor([21, 17]) - begin
            cu_q, cu_kv = (
                torch.tensor([0, *n.tolist()], dtype=torch.int32).cumsum(0) for n in (lengths, lengths.clamp(max=end - begin))
            )
            part = part._replace(cu_seqlens_q=cu_q.int(), cu_seqlens_kv=cu_kv.int())
        assert cudnn_backend.rule_error(spec, "backward") is None
        found = cudnn_backend.backward(spec, part, out[:, rows].contiguous(), lse[..., rows].contiguous(), dout[:, rows], None)
        for whole, at, gradient in zip(total, (rows, keys, keys), found[:3], strict=True):
            whole[:, at] += gradient
    exact, budget = (reference_gradients(spec, x, dout, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    for what, got, ref, eager in zip(("dq", "dk", "dv"), total, exact, budget, strict=False):
        check_close(what, got, ref, eager.double(), factor=GRADIENT_FACTOR)


SIDES = (None, 0, 1, 3, 100)


@pytest.mark.parametrize(("sq", "skv"), [(5, 5), (5, 9), (9, 5), (1, 7)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_a_band_means_to_cudnn_what_it_means_to_the_reference(bottom_right: bool, sq: int, skv: int) -> None:
    """cuDNN hides column j from row i unless j + left_bound > i + shift and j <= i + shift + right_bound."""
    inputs = make_inputs(lengths_q=[sq], lengths_kv=[skv], num_heads=1, num_heads_kv=1, head_dim_v=skv, dtype=torch.float64)
    inputs = inputs._replace(v=torch.eye(skv, dtype=torch.float64).reshape(1, skv, 1, skv))
    spec, x = make_call(inputs)
    for left, right in product(SIDES, SIDES):
        weights = reference_attention(spec._replace(band=Band(left, right, bottom_right)), x)[0][0, :, 0]
        said = band_arguments(left, right, bottom_right)
        if left is right is None:
            assert said == {}
            assert (weights > 0).all()
            continue
        assert said["diagonal_alignment"].name == ("BOTTOM_RIGHT" if bottom_right else "TOP_LEFT")
        left_bound, right_bound = (said.get(f"diagonal_band_{side}_bound") for side in ("left", "right"))
        i, j = torch.arange(sq)[:, None] + (skv - sq if bottom_right else 0), torch.arange(skv)
        visible = torch.ones(sq, skv, dtype=torch.bool)
        if left_bound is not None:
            visible &= j + left_bound > i
        if right_bound is not None:
            visible &= j <= i + right_bound
        assert torch.equal(weights > 0, visible), (left, right)


def test_a_window_past_32_bits_is_cut() -> None:
    said = band_arguments(2**40, 2**40, False)
    assert max(said["diagonal_band_left_bound"], said["diagonal_band_right_bound"]) < 2**31


def view_of(kind: str, t: torch.Tensor) -> torch.Tensor:
    """The same numbers, in a layout that a user may have."""
    if kind == "rows off 16 bytes":
        return torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype)[..., 3:].copy_(t)
    if kind == "starts off 16 bytes":
        return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].reshape(t.shape).copy_(t)
    if kind == "last dim strided":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t[:, :, :1].expand_as(t)


@pytest.mark.parametrize("kind", ["rows off 16 bytes", "starts off 16 bytes", "last dim strided", "heads expanded"])
def test_what_cudnn_cannot_read_is_copied(kind: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    inputs = make_inputs(lengths_q=[40, 40], lengths_kv=[50, 50], dtype=torch.bfloat16)
    inputs = inputs._replace(**{name: view_of(kind, getattr(inputs, name)) for name in "qkv"})
    spec, x = make_call(inputs, return_max_logit=False)
    dout = view_of(kind, make_dout(inputs))
    out, lse, _ = cudnn_backend.forward(spec, x)
    check_close("out", out, reference_attention(spec, x)[0], reference_attention(spec, x, dtype=spec.dtype)[0])
    gradients = cudnn_backend.backward(spec, x, out, lse, dout, None)
    exact, budget = reference_gradients(spec, x, dout), reference_gradients(spec, x, dout, dtype=spec.dtype)
    for name in ("dq", "dk", "dv"):
        check_close(name, getattr(gradients, name), getattr(exact, name), getattr(budget, name), factor=GRADIENT_FACTOR)
    for sdpa in emulated.asked:
        assert all(
            stride * 2 % ALIGNMENT == 0 for strides in (sdpa.strides_q, sdpa.strides_k, sdpa.strides_v) for stride in strides
        )


@pytest.mark.parametrize("lengths", [([0, 0], [5, 7]), ([5, 7], [0, 0]), ([], [])], ids=["no query", "no key", "no sequence"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_nothing_to_run(fmt: str, sink: bool, lengths: tuple[list[int], list[int]], emulated: cudnn_emulator.EmulatedPlans) -> None:
    inputs = make_inputs(fmt, lengths_q=lengths[0], lengths_kv=lengths[1], padding=True, gap=2 if fmt == "thd" else 0)
    offset = torch.randn(4) if sink else None
    spec, x = make_call(inputs, softmax_type="learnable" if sink else "vanilla", softmax_offset=offset)
    out, lse, max_logit = cudnn_backend.forward(spec, x)
    exact = reference_attention(spec, x)
    for got, ref in zip((out, lse, max_logit), exact, strict=True):
        torch.testing.assert_close(got.double(), ref)
    gradients = cudnn_backend.backward(spec, x, out, lse, make_dout(inputs), None)
    assert all(not g.any() for g in gradients if g is not None)
    assert all(sdpa.len_q and sdpa.len_kv for sdpa in emulated.asked)


def test_lengths_that_do_not_fit_stay_inside_the_tensors() -> None:
    """The emulator fails if a sequence lies outside its buffer."""
    inputs = make_inputs("thd", lengths_q=[40, 30], dtype=torch.bfloat16)
    for wrong in ([0, 5000, 90], [0, 60, 20], [0, -5, 70], [0, 9, 8]):
        cu = torch.tensor(wrong, dtype=torch.int32)
        spec, x = make_call(inputs._replace(cu_seqlens_q=cu, cu_seqlens_kv=cu), return_max_logit=False)
        out, lse, _ = cudnn_backend.forward(spec, x)
        assert out.isfinite().all()
        assert torch.equal(out.isfinite().all(-1).all(-1), torch.ones(70, dtype=torch.bool))
        cudnn_backend.backward(spec, x, out, lse, make_dout(inputs), None)


@pytest.mark.parametrize("name", test_slots.LAYOUTS)
def test_slots_in_any_order(name: str) -> None:
    layout = test_slots.LAYOUTS[name]
    (q, k, v), call, real = test_slots.arguments(layout, "cpu", torch.bfloat16)
    del call["qkv_format"]
    q, k, v = (t.detach().clone() for t in (q, k, v))
    inputs = make_inputs("thd", lengths_q=[1], dtype=torch.bfloat16)._replace(q=q, k=k, v=v, **call)
    spec, x = make_call(inputs, attn_mask_type="padding_causal", return_max_logit=False)
    out, lse, _ = cudnn_backend.forward(spec, x)
    dout = make_dout(inputs)
    found = [out, lse, *cudnn_backend.backward(spec, x, out, lse, dout, None)]
    exact, rounded = (
        [*reference_attention(spec, x, dtype=dtype)[:2], *reference_gradients(spec, x, dout, dtype=dtype)]
        for dtype in (torch.float64, torch.bfloat16)
    )
    for label, got, want, allowed in zip(("out", "lse", "dq", "dk", "dv"), found, exact, rounded, strict=False):
        rows = got.T if label == "lse" else got
        assert (rows[~real] == (-torch.inf if label == "lse" else 0)).all(), label
        check_close(label, got, want, allowed, factor=GRADIENT_FACTOR if label.startswith("d") else 2.0)


def test_a_gradient_of_lse_is_not_dropped() -> None:
    inputs = make_inputs(lengths_q=[40, 40], dtype=torch.bfloat16)
    spec, x = make_call(inputs, return_max_logit=False)
    out, lse, _ = cudnn_backend.forward(spec, x)
    with pytest.raises(ValueError, match="takes no gradient of lse"):
        cudnn_backend.backward(spec, x, out, lse, make_dout(inputs), torch.ones_like(lse))


def halved(x: Operands) -> Operands:
    """Other tensors of the same kind: floats are halved, and the lengths of the sequences reversed."""

    def changed(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point():
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t * 0.5)
        if t.dtype is torch.int32 and x.cu_seqlens_q_padded is None:
            return torch.cat([t[:1], t.diff().flip(0).cumsum(0, dtype=t.dtype)])
        return t.clone()

    named = {name: changed(t) for name, t in x._asdict().items() if isinstance(t, torch.Tensor)}
    return x._replace(**named, mod_tensors=[changed(t) for t in x.mod_tensors])


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
def test_what_surrounds_cudnn_is_played_as_it_was_taken_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_for("cudnn", CASES[name])
    case = make_case(row, "cpu")
    spec, x = spec_of(case, row), case.operands
    if reason := cudnn_backend.rule_error(spec, "forward"):
        pytest.skip(f"refused: {reason}")

    def run(plan: Any, buffers: dict[int, torch.Tensor], device: torch.device) -> None:
        with _disable_current_modes():  # cuDNN's own work is no op of torch
            cudnn_emulator.execute(plan, buffers, device)

    def told(plan: Any, buffers: dict[int, torch.Tensor], device: torch.device) -> None:
        run(plan, buffers, device)
        if watcher := getattr(execute._watchers, "current", None):
            watcher(plan, buffers)

    monkeypatch.setattr(attention, "execute", told)
    monkeypatch.setattr(execute, "execute", run)
    device, other = torch.device("cpu"), halved(x)

    def flat(x: Operands, *more: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [*x[: Operands._fields.index("max_seqlen_q")], *x.mod_tensors, *more]

    def played(made: replay.Recording | None, inputs: list[torch.Tensor | None]) -> list[Any]:
        assert made is not None
        return made.replay(inputs, [0 if t is None else t.data_ptr() for t in inputs])

    first, made = replay.record(cudnn_backend, lambda: cudnn_backend.forward(spec, x), flat(x), lambda r: r, device)
    want = cudnn_backend.forward(spec, other)
    for a, b in zip(played(made, flat(other)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if cudnn_backend.rule_error(spec, "backward") is not None:
        return
    dout, inputs = case.dout * 0.5, flat(x, *first[:2], case.dout)
    _, made = replay.record(
        cudnn_backend,
        lambda: cudnn_backend.backward(spec, x, *first[:2], case.dout, None),
        inputs,
        lambda g: (*g[:-1], *(g.dmod_tensors or ())),
        device,
    )
    wanted = cudnn_backend.backward(spec, other, *want[:2], dout, None)
    for a, b in zip(played(made, flat(other, *want[:2], dout)), wanted, strict=False):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
