"""FLEXATTN_CANARY=1: a wrong backend is caught on a small input and reported, and the next one runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn.dispatch import canary, eager_backend, explain, heuristics, triton_backend
from flexattn.dispatch.select import RuntimeFailure, forget_rejections
from flexattn.dispatch.spec import AttentionSpec, Operands
from tests.api.test_support import ROWS, make_case

CPU = torch.device("cpu")
CASES = {f"{section}: {name}": row for section, rows in ROWS.items() for name, row in rows.items()}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton first on a CPU, in the guise of the eager backend, so that only the test's own changes are wrong."""
    monkeypatch.setenv("FLEXATTN_CANARY", "1")
    monkeypatch.setattr("flexattn.warn._warned", set())
    monkeypatch.setattr(heuristics, "DEFAULTS", dict.fromkeys(("cpu", "cuda"), heuristics.DEFAULTS["cuda"]))
    for name in ("unsupported", "forward", "backward"):
        monkeypatch.setattr(triton_backend, name, getattr(eager_backend, name))
    monkeypatch.setattr(explain, "choice_of", lambda *call: None)  # it has none in this guise
    forget()
    yield
    forget()


def forget() -> None:
    canary.clear()
    forget_rejections()


def spoil(monkeypatch: pytest.MonkeyPatch, direction: str, which: int) -> list[AttentionSpec]:
    """Makes one result of the Triton backend a tenth too large; the list records its runs."""
    right, ran = getattr(eager_backend, direction), []

    def wrong(spec: AttentionSpec, *args: Any) -> Any:
        ran.append(spec)
        results = right(spec, *args)
        results[which].mul_(1.1)
        return results

    monkeypatch.setattr(triton_backend, direction, wrong)
    return ran


def qkv(requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 40, 2, 16, requires_grad=requires_grad) for _ in "qkv")


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_a_wrong_forward_is_replaced_and_said_to_be_wrong(monkeypatch, which):
    ran = spoil(monkeypatch, "forward", which)
    q, k, v = qkv()
    with pytest.warns(RuntimeWarning, match="forward will not run on triton: the canary found it wrong: (out|lse) is off by"):
        got = flexattn.attention(q, k, v, return_lse=True)
    assert len(ran) == 1
    expected = flexattn.attention(q, k, v, return_lse=True, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    flexattn.attention(q, k, v)
    assert len(ran) == 1, "it is not tried again"
    assert "not triton: the canary found it wrong" in str(flexattn.explain(q, k, v))


def test_one_nan_is_wrong(monkeypatch):
    def forward(spec: AttentionSpec, *args: Any) -> Any:
        results = eager_backend.forward(spec, *args)
        results[0].view(-1)[-1] = torch.nan
        return results

    monkeypatch.setattr(triton_backend, "forward", forward)
    with pytest.warns(RuntimeWarning, match="forward will not run on triton: the canary found it wrong: out is off by inf"):
        assert flexattn.attention(*qkv()).isfinite().all()


def test_a_wrong_backward_is_found_before_the_forward_runs(monkeypatch):
    ran = spoil(monkeypatch, "backward", 1)
    q, k, v = qkv(requires_grad=True)
    with pytest.warns(RuntimeWarning, match="backward will not run on triton: the canary found it wrong: dk"):
        out = flexattn.attention(q, k, v)
    assert len(ran) == 1
    assert flexattn.explain(q, k, v).forward.backend == "triton"
    grad = torch.autograd.grad(out.sum(), k)[0]
    expected = torch.autograd.grad(flexattn.attention(q, k, v, backend="eager").sum(), k)[0]
    assert torch.equal(grad, expected)


def test_a_backend_asked_for_by_name_does_not_run_wrong(monkeypatch):
    spoil(monkeypatch, "forward", 0)
    with (
        pytest.warns(RuntimeWarning, match="the canary found it wrong"),
        pytest.raises(flexattn.BackendError, match="triton: the canary found it wrong: out"),
    ):
        flexattn.attention(*qkv(), backend="triton")


def test_what_is_right_is_checked_once(monkeypatch):
    checked = []
    compare = canary._compare
    monkeypatch.setattr(canary, "_compare", lambda name, *rest: checked.append((name, rest[-1])) or compare(name, *rest))
    q, k, v = qkv(requires_grad=True)
    for _ in range(3):
        flexattn.attention(q, k, v).sum().backward()
    assert checked == [("triton", "backward"), ("triton", "forward")]


def test_off_it_checks_nothing(monkeypatch):
    monkeypatch.setenv("FLEXATTN_CANARY", "0")
    monkeypatch.setattr(canary, "mismatch", lambda *args: pytest.fail("it was asked"))
    flexattn.attention(*qkv())


def usual_slopes(x: Operands, spec: AttentionSpec) -> torch.Tensor:
    assert x.alibi_slopes is not None
    return torch.full_like(x.alibi_slopes, 0.1)


# Values that a backend may take instead of the call's, in a spec in which they matter: one each, as if it were not read.
IGNORED: dict[str, tuple[str, dict[str, Callable[[Operands, AttentionSpec], Any]]]] = {
    "softmax_scale": ("Masks: causal_bottom_right", {"softmax_scale": lambda x, spec: spec.head_dim_qk**-0.5}),
    "softcap": ("Scores: softcap", {"softcap": lambda x, spec: 20.0}),
    "softcap, and there is none": ("Scores: softcap", {"softcap": lambda x, spec: 0.0}),
    "alibi_slopes": ("Scores: alibi, slopes [h]", {"alibi_slopes": usual_slopes}),
    "alibi_slopes of other heads": ("Scores: alibi, slopes [h]", {"alibi_slopes": lambda x, spec: x.alibi_slopes.flip(-1)}),
    "dropout_p": ("Softmax: dropout", {"dropout_p": lambda x, spec: 0.25}),
    "seed": ("Softmax: dropout", {"rng_state": lambda x, spec: x.rng_state * torch.tensor([0, 1])}),
    "half of the seed": ("Softmax: dropout", {"rng_state": lambda x, spec: x.rng_state % torch.tensor([2**32, 2**62])}),
    "offset": ("Softmax: dropout", {"rng_state": lambda x, spec: x.rng_state * torch.tensor([1, 0])}),
    "gaps": (
        "Formats: thd",
        {"cu_seqlens_q_padded": lambda x, spec: None, "cu_seqlens_kv_padded": lambda x, spec: None},
    ),
    "gaps of keys": ("Formats: thd", {"cu_seqlens_kv_padded": lambda x, spec: None}),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("what", IGNORED)
def test_what_a_backend_does_not_read_is_found(monkeypatch, what, direction, dtype):
    name, taken = IGNORED[what]
    right = getattr(eager_backend, direction)

    def careless(spec: AttentionSpec, x: Operands, *rest: Any) -> Any:
        return right(spec, x._replace(**{field: value(x, spec) for field, value in taken.items()}), *rest)

    spec = make_case(CASES[name], "cpu").spec._replace(dtype=dtype)
    assert canary.mismatch("triton", spec, direction, CPU) is None
    canary.clear()
    monkeypatch.setattr(triton_backend, direction, careless)
    assert "the canary found it wrong" in str(canary.mismatch("triton", spec, direction, CPU))


def test_it_sees_nothing_of_the_callers_hooks_and_modes(monkeypatch):
    """A hook changes saved tensors, and another default dtype is set: a right backend stays right, and is not refused."""
    q, k, v = qkv(requires_grad=True)
    expected = flexattn.attention(q, k, v, bias_type="alibi", backend="eager")
    forget()
    packed = []
    torch.set_default_dtype(torch.float64)
    try:
        with (
            warnings.catch_warnings(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t * 0, lambda t: t),
        ):
            warnings.simplefilter("error")
            out = flexattn.attention(q, k, v, bias_type="alibi")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)
    assert packed
    assert all(max(shape) <= 40 for shape in packed), "what the canary saves is nobody's"


def test_both_kinds_of_checkpoint_work_under_it():
    q, k, v = qkv(requires_grad=True)
    found = []
    for use_reentrant in (None, False, True):
        forget()

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            return flexattn.attention(*tensors, attn_mask_type="causal", backend="triton")

        out = call(q, k, v) if use_reentrant is None else checkpoint(call, q, k, v, use_reentrant=use_reentrant)
        found.append(
            torch.autograd.grad(out.square().sum(), (q, k, v)) if use_reentrant is not True else through_backward(out, q, k, v)
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def through_backward(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor | None]:
    """Runs backward(), which the reentrant kind needs, because it refuses torch.autograd.grad."""
    out.square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_an_input_that_a_backend_refuses_says_nothing_of_the_calls(monkeypatch):
    """If a backend refuses the canary, whose lengths differ from the call's, the backend is still tried for the call."""
    right = eager_backend.forward

    def refuses_the_canarys(spec: AttentionSpec, x: Operands) -> Any:
        if x.q.shape[0] == 2:
            raise RuntimeFailure("no plan for a batch of two")
        return right(spec, x)

    monkeypatch.setattr(triton_backend, "forward", refuses_the_canarys)
    q, k, v = qkv()
    flexattn.attention(q, k, v, backend="triton")
    assert flexattn.explain(q, k, v, backend="triton").forward.backend == "triton"


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
def test_a_right_backend_passes_whatever_the_spec(name):
    """Generated inputs of the check match the spec, whatever its features are."""
    spec = make_case(CASES[name], "cpu").spec._replace(return_max_logit="max_logit" in name)
    for direction in ("forward", "backward"):
        assert canary.mismatch("triton", spec, direction, CPU) is None


@pytest.mark.parametrize("lengths", [(1, 4096), (1, 1), (128, 8), (4096, 1)], ids=str)
@pytest.mark.parametrize("name", ["Masks: causal_bottom_right", "Formats: thd", "Softmax: off-by-one"])
def test_it_keeps_to_the_lengths_of_the_spec(name, lengths):
    spec = make_case(CASES[name], "cpu").spec._replace(length_q=lengths[0], length_kv=lengths[1])
    shapes = canary._lengths(spec)
    assert all(1 <= max(found) <= most for found, most in zip(shapes, lengths, strict=True))
    for direction in ("forward", "backward"):
        assert canary.mismatch("triton", spec, direction, CPU) is None


def test_keys_in_fp8_are_checked(monkeypatch):
    spec = make_case(CASES["Masks: causal_bottom_right"], "cpu").spec
    spec = spec._replace(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, needs_grad=False)
    assert canary.mismatch("triton", spec, "forward", CPU) is None
    canary.clear()
    right = eager_backend.forward
    without = lambda spec, x: right(spec, x._replace(descales=[torch.ones_like(t) for t in x.descales]))  # noqa: E731
    monkeypatch.setattr(triton_backend, "forward", without)
    assert "the canary found it wrong" in str(canary.mismatch("triton", spec, "forward", CPU))


@pytest.mark.parametrize(("error", "is_wrong"), [(1e-3, False), (10.0, True)])
def test_a_gradient_that_cancels_may_have_roundings(monkeypatch, error, is_wrong):
    """The gradient of q is 0 if there is one key."""
    spec = make_case(CASES["Formats: thd"], "cpu").spec._replace(dtype=torch.float16, length_q=1, length_kv=1)
    right = eager_backend.backward

    def rounded(*call: Any) -> Any:
        gradients = right(*call)
        return gradients._replace(dq=gradients.dq + error)

    monkeypatch.setattr(triton_backend, "backward", rounded)
    assert (canary.mismatch("triton", spec, "backward", CPU) is not None) == is_wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_of_another_stream_is_not_judged(monkeypatch, direction):
    spec = make_case(ROWS["Softmax"]["dropout"], "cpu").spec
    monkeypatch.setattr(canary, "_compare", lambda *args: pytest.fail("it was judged"))
    assert canary.mismatch("cudnn", spec, direction, CPU) is None
