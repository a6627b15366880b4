"""The choice of a backend: its order, its reasons, and who may ask for one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexattn
from flexattn import ops
from flexattn.dispatch import options
from flexattn.dispatch.context import attention_backend, requested_backend
from flexattn.dispatch.explain import explain
from flexattn.dispatch.heuristics import PREFERENCES
from flexattn.dispatch.select import BackendError, Decision, backend_module, select
from flexattn.dispatch.spec import BACKENDS, BIAS_TYPES, FORMATS, SOFTMAX_TYPES, AttentionSpec, Band, Direction

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

SPEC = AttentionSpec(
    q_format="bshd",
    kv_format="bshd",
    dtype=torch.float32,
    num_heads=4,
    num_heads_kv=2,
    head_dim_qk=16,
    head_dim_v=16,
    padding=False,
    band=Band(None, 0, False),
    bias_type="no_bias",
    bias_dims=None,
    softmax_type="vanilla",
    softcap=False,
    dropout=False,
    return_max_logit=False,
    needs_grad=True,
    needs_bias_grad=False,
    deterministic=False,
    device_type="cpu",
    capability=None,
)
ON_CUDA = SPEC._replace(device_type="cuda", capability=(9, 0))


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No decision outlives the backends that it was made with, and no setting of the user's decides."""
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch):
    """refuse(name, ...): these backends refuse everything, with a reason of their own; the others take everything."""

    def set_refusals(*names: str) -> None:
        select.cache_clear()
        for name in BACKENDS:
            reason = f"{name} lacks wings; give it wings" if name in names else None
            monkeypatch.setattr(backend_module(name), "support_error", lambda spec, direction, reason=reason: reason)

    return set_refusals


@pytest.mark.parametrize(
    ("spec", "refusing", "chosen"),
    [
        (ON_CUDA, (), "triton"),
        (ON_CUDA, ("triton",), "cudnn"),
        (ON_CUDA, ("triton", "cudnn"), "eager"),
        (SPEC, (), "eager"),
        (SPEC, ("eager",), "triton"),
        (SPEC, ("eager", "triton"), "cudnn"),
    ],
)
def test_auto_takes_the_first_that_can(refuse, spec, refusing, chosen):
    refuse(*refusing)
    for direction in DIRECTIONS:
        decision = select(spec, direction, "auto")
        assert decision.backend == chosen
        assert decision.rejected == tuple((name, f"{name} lacks wings; give it wings") for name in refusing)
        assert spec.device_type in decision.why


def test_the_directions_are_asked_apart(monkeypatch, refuse):
    refuse()
    no_way_back = {"forward": None, "backward": "no way back"}
    monkeypatch.setattr(backend_module("triton"), "support_error", lambda spec, direction: no_way_back[direction])
    assert select(ON_CUDA, "forward", "auto").backend == "triton"
    backward = select(ON_CUDA, "backward", "auto")
    assert (backward.backend, backward.rejected) == ("cudnn", (("triton", "no way back"),))


def test_a_backend_asked_for_by_name_never_falls_back(refuse):
    refuse("cudnn")
    for name, spec in product(("triton", "eager"), (SPEC, ON_CUDA)):
        assert select(spec, "forward", name)[:1] == (name,)
        assert select(spec, "forward", name).warning is None
    with pytest.raises(BackendError) as e:
        select(ON_CUDA, "forward", "cudnn")
    lines = str(e.value).splitlines()
    assert "backend='cudnn'" in lines[0]
    assert "forward" in lines[0]
    assert lines[1:] == [
        "  cudnn: cudnn lacks wings; give it wings",
        "  triton: can run it; ask for it with backend='triton'",
        "  eager: can run it; ask for it with backend='eager'",
    ]


def test_the_error_holds_every_reason_where_nothing_fits(refuse):
    refuse(*BACKENDS)
    with pytest.raises(BackendError) as e:
        select(SPEC, "backward", "auto")
    assert "backward" in str(e.value)
    for name in BACKENDS:
        assert f"\n  {name}: {name} lacks wings; give it wings" in str(e.value)


def test_only_a_fall_to_a_slower_class_of_path_warns(refuse):
    refuse("triton", "cudnn")
    warning = select(ON_CUDA, "forward", "auto").warning
    assert warning is not None
    assert "triton lacks wings" in warning
    assert "cudnn lacks wings" in warning
    assert select(SPEC, "forward", "auto").warning is None, "eager is the first choice on a CPU"
    assert select(ON_CUDA, "forward", "eager").warning is None, "it was asked for"
    refuse("triton")
    assert select(ON_CUDA, "forward", "auto").warning is None, "cudnn is fused too"


def test_the_warning_comes_once(monkeypatch, refuse):
    refuse("triton", "cudnn")
    monkeypatch.setattr(ops, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: ops.make_spec(x, settings, (9, 0))._replace(device_type="cuda"))
    monkeypatch.setattr("flexattn.warn._warned", set())
    q = torch.randn(1, 3, 2, 8)
    with pytest.warns(RuntimeWarning, match="forward runs on the eager backend"):
        flexattn.attention(q, q, q)
    flexattn.attention(q, q, q)  # a second warning would be an error


def test_a_decision_is_made_once_per_spec(monkeypatch, refuse):
    refuse()
    asked = []
    monkeypatch.setattr(backend_module("eager"), "support_error", lambda spec, direction: asked.append((spec, direction)))
    for _ in range(3):
        select(SPEC, "forward", "auto")
    assert asked == [(SPEC, "forward")]
    select(SPEC._replace(num_heads=8), "forward", "auto")
    assert len(asked) == 2


def test_every_backend_has_a_place_in_every_order():
    for row in PREFERENCES:
        assert sorted(row.order) == sorted(BACKENDS)


def test_cudnn_is_honest():
    for spec, direction in product((SPEC, ON_CUDA), DIRECTIONS):
        with pytest.raises(BackendError, match=r"cudnn: .*no cuDNN graphs; use backend="):
            select(spec, direction, "cudnn")


def test_the_argument_beats_the_context_and_the_context_the_environment(monkeypatch):
    assert requested_backend(None) == "auto"
    monkeypatch.setenv("FLEXATTN_BACKEND", "cudnn")
    assert requested_backend(None) == "cudnn"
    with attention_backend("triton"):
        assert requested_backend(None) == "triton"
        assert requested_backend("eager") == "eager"
        with attention_backend("auto"):
            assert requested_backend(None) == "auto", "asking for auto overrides the environment too"
        assert requested_backend(None) == "triton"
        with pytest.raises(KeyError), attention_backend("eager"):
            raise KeyError
        assert requested_backend(None) == "triton", "an exception leaves the block too"
    assert requested_backend(None) == "cudnn"
    monkeypatch.setenv("FLEXATTN_BACKEND", "")
    assert requested_backend(None) == "auto"


@pytest.mark.parametrize("backend", ["Triton", "flash", "", 3])
def test_unknown_backends_are_named(backend):
    q = torch.randn(1, 3, 2, 8)
    for attempt in (lambda: attention_backend(backend).__enter__(), lambda: flexattn.attention(q, q, q, backend=backend)):
        with pytest.raises(ValueError, match=rf"backend is {backend!r}; accepted: auto, triton, cudnn, eager"):
            attempt()


@pytest.mark.parametrize(("variable", "read"), [("FLEXATTN_BACKEND", options.backend), ("FLEXATTN_CHECK", options.check_values)])
def test_wrong_environment_variables_are_named(monkeypatch, variable, read):
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=rf"{variable} is 'yes'; accepted: "):
        read()


def test_explain_gives_every_backend_a_line(refuse):
    refuse("triton")
    explanation = flexattn.explain(ON_CUDA)
    assert explanation.forward.backend == explanation.backward.backend == "cudnn"
    forward, backward = str(explanation).split("\nbackward: ")
    for section in (forward.split("\nforward: ")[1], backward):
        assert section.splitlines()[0] == "cudnn"
        assert "why: the first that can run it in the order triton, cudnn, eager for cuda" in section
        assert "not triton: triton lacks wings; give it wings" in section
        assert "not eager: can run it; ask for it with backend='eager'" in section
    assert explain(ON_CUDA._replace(needs_grad=False), "auto").backward is None
    assert "backward: not needed" in str(explain(ON_CUDA._replace(needs_grad=False), "auto"))


def test_explain_follows_the_request(refuse):
    refuse("cudnn")
    assert flexattn.explain(SPEC, backend="triton").forward == Decision("triton", "it was asked for by name", (), None)
    with attention_backend("triton"):
        assert flexattn.explain(SPEC).forward.backend == "triton"
    with pytest.raises(BackendError, match="cudnn lacks wings"):
        flexattn.explain(SPEC, backend="cudnn")
    with pytest.raises(TypeError, match="softcap"):
        flexattn.explain(SPEC, softcap=1.0)


def test_what_is_explained_is_what_runs(monkeypatch):
    """The spec that explain() shows is the one that the operators select with, in both directions."""
    selected = []

    def recording_select(*what: Any) -> Decision:
        selected.append(what)
        return select(*what)

    monkeypatch.setattr(ops, "select", recording_select)
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 7, 2, 8)
    arguments = {"attn_mask_type": "causal", "window_size": (3, 0), "softcap": 2.0, "dropout_p": 0.5, "bias_type": "alibi"}
    state = torch.get_rng_state()
    explanation = flexattn.explain(q, k, k, return_lse=True, **arguments)
    assert torch.equal(torch.get_rng_state(), state), "explaining draws no random number"
    assert not selected
    flexattn.attention(q, k, k, **arguments).sum().backward()
    assert {direction for _, direction, _ in selected} == set(DIRECTIONS)
    assert all(spec == explanation.spec and request == explanation.request for spec, _, request in selected)


def test_a_backward_that_cannot_run_fails_before_the_forward_runs(monkeypatch, refuse):
    refuse()
    eager = backend_module("eager")
    monkeypatch.setattr(eager, "support_error", lambda spec, direction: "no way back" if direction == "backward" else None)
    monkeypatch.setattr(eager, "forward", lambda spec, x: pytest.fail("the forward ran"))
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    with pytest.raises(BackendError, match="no way back"):
        flexattn.attention(q, q, q, backend="eager")


def test_choosing_imports_no_kernel_library(fresh_python):
    """triton is only looked up, unless it is to run."""
    code = (
        "import sys, torch, flexattn\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "assert flexattn.explain(q, q, q).forward.backend == 'eager'\n"
        "flexattn.attention(q, q, q)\n"
        "assert not {'triton', 'cudnn'} & sys.modules.keys()\n"
    )
    result = fresh_python("-c", code)
    assert result.returncode == 0, result.stderr


optional_side = st.none() | st.integers(0, 2**31)
specs = st.builds(
    AttentionSpec,
    q_format=st.sampled_from(FORMATS),
    kv_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8]),
    num_heads=st.integers(1, 4).map(lambda n: 12 * n),
    num_heads_kv=st.sampled_from([1, 2, 3, 4, 6, 12]),
    head_dim_qk=st.integers(1, 300),
    head_dim_v=st.integers(1, 300),
    padding=st.booleans(),
    band=st.builds(Band, optional_side, optional_side, st.booleans()),
    bias_type=st.sampled_from(BIAS_TYPES),
    bias_dims=st.none() | st.tuples(*[st.booleans()] * 4),
    softmax_type=st.sampled_from(SOFTMAX_TYPES),
    softcap=st.booleans(),
    dropout=st.booleans(),
    return_max_logit=st.booleans(),
    needs_grad=st.booleans(),
    needs_bias_grad=st.booleans(),
    deterministic=st.booleans(),
    device_type=st.sampled_from(["cpu", "cuda"]),
    capability=st.none() | st.tuples(st.integers(7, 12), st.integers(0, 9)),
    mods=st.none(),
    block_size=st.none(),
)


@settings(deadline=None)  # the first choice imports the backends
@given(specs, st.sampled_from(DIRECTIONS), st.sampled_from(options.REQUESTS))
def test_select_is_deterministic_and_raises_nothing_but_backend_error(spec, direction, request):
    def choose() -> Decision | str:
        select.cache_clear()
        try:
            return select(spec, direction, request)
        except BackendError as e:
            return str(e)

    choice = choose()
    assert choose() == choice
    if isinstance(choice, Decision):
        assert request in ("auto", choice.backend)
        assert backend_module(choice.backend).support_error(spec, direction) is None
        for name, reason in choice.rejected:
            assert backend_module(name).support_error(spec, direction) == reason
    else:
        assert all(name in choice for name in BACKENDS)
