"""The choice of a backend: its order, its reasons, and the ways to request one."""

from __future__ import annotations

import threading
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexattn
from flexattn import ops
from flexattn.dispatch import heuristics, options
from flexattn.dispatch import select as selection
from flexattn.dispatch.explain import explain
from flexattn.dispatch.heuristics import DEFAULTS
from flexattn.dispatch.options import attention_backend, requested_backend
from flexattn.dispatch.select import (
    BackendError,
    Decision,
    RuntimeFailure,
    backend_module,
    forget_rejections,
    mark_unsupported,
    reasons,
    select,
)
from flexattn.dispatch.spec import (
    BACKENDS,
    BIAS_TYPES,
    FORMATS,
    FP32_GRADIENTS,
    PACKINGS,
    SOFTMAX_TYPES,
    AttentionSpec,
    Band,
    Direction,
    Fp8,
    Operands,
    Results,
    length_class,
)
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.crossovers import Rule

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
    """No decision outlives its backends, and no setting of the user decides."""
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    select.cache_clear()
    yield
    forget_rejections()


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch):
    """refuse(name, ...): these backends refuse everything, with a reason of their own; all other backends accept everything."""

    def set_refusals(*names: str) -> None:
        select.cache_clear()
        for name in BACKENDS:
            reason = f"{name} lacks wings; give it wings" if name in names else None
            monkeypatch.setattr(backend_module(name), "unsupported", lambda spec, direction, reason=reason: reason)

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
        first = {"cuda": "the first choice on a GPU: ", "cpu": "the first choice on a CPU: "}[spec.device_type]
        assert decision.why.startswith("the first of " if refusing else first)


def test_the_directions_are_asked_apart(monkeypatch, refuse):
    refuse()
    no_way_back = {"forward": None, "backward": "no way back"}
    monkeypatch.setattr(backend_module("triton"), "unsupported", lambda spec, direction: no_way_back[direction])
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
    assert lines[1:4] == [
        "  cudnn: cudnn lacks wings; give it wings",
        "  triton: can run it; ask for it with backend='triton'",
        "  eager: can run it; ask for it with backend='eager'",
    ]
    assert lines[4].startswith("  the call: bshd, float32, 4 heads over 2")
    assert lines[5].startswith("  with: torch ")


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
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: ops.make_spec(x, settings, (9, 0))._replace(device_type="cuda"))
    monkeypatch.setattr("flexattn.warn._warned", set())
    q = torch.randn(1, 3, 2, 8)
    with pytest.warns(RuntimeWarning, match="forward runs on the eager backend"):
        flexattn.attention(q, q, q)
    flexattn.attention(q, q, q)  # a second warning would be an error


def test_a_decision_is_made_once_per_spec(monkeypatch, refuse):
    refuse()
    asked = []
    monkeypatch.setattr(backend_module("eager"), "unsupported", lambda spec, direction: asked.append((spec, direction)))
    for _ in range(3):
        select(SPEC, "forward", "auto")
    assert asked == [(SPEC, "forward")]
    select(SPEC._replace(num_heads=8), "forward", "auto")
    assert len(asked) == 2


def test_every_backend_has_a_place_in_every_order():
    for default in DEFAULTS.values():
        assert sorted(default.order) == sorted(BACKENDS)


PLAIN = ON_CUDA._replace(dtype=torch.bfloat16, head_dim_qk=128, head_dim_v=128, length_q=4096, length_kv=4096)
RULE = Rule(
    use="cudnn",
    direction="forward",
    capability=90,
    dtype="bfloat16",
    head_dim_qk=128,
    head_dim_v=128,
    mask="causal",
    layout="dense",
    kind="plain",
    tokens=(2048, 8192),
    gain=1.25,
    source="a_file.json",
)


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "cudnn"),
        ({"length_q": 1024}, "triton"),  # the numbers of queries and keys were equal
        ({"length_q": 1}, "triton"),
        ({"length_q": 1024, "length_kv": 1024}, "triton"),
        ({"length_kv": 16384}, "triton"),
        ({"dtype": torch.float16}, "triton"),
        ({"head_dim_v": 64}, "triton"),
        ({"capability": (8, 0)}, "triton"),
        ({"band": Band(None, None, True)}, "triton"),
        ({"band": Band(127, 0, False)}, "triton"),
        ({"band": Band(None, 0, True)}, "cudnn"),
        ({"padding": True}, "triton"),
        ({"padding": True, "q_format": "thd", "kv_format": "thd"}, "triton"),
        ({"bias_type": "alibi"}, "triton"),
        ({"softmax_type": "learnable"}, "triton"),
        ({"softcap": True}, "triton"),
        ({"deterministic": True}, "triton"),
        ({"return_max_logit": True}, "triton"),
        ({"block_size": (128, 128)}, "triton"),
    ],
)
def test_a_measured_row_holds_for_what_was_measured(monkeypatch, refuse, change, chosen):
    refuse()
    monkeypatch.setitem(crossovers.RULES, "cudnn", (RULE,))
    spec = PLAIN._replace(**change)
    forward = select(spec, "forward", "auto")
    assert forward.backend == chosen
    measured = "1.25 times as fast as triton for such a call (a_file.json)" in forward.why
    assert measured == (chosen == "cudnn")
    assert ("no benchmark shows" in forward.why) == (chosen == "triton")
    assert select(spec, "backward", "auto").backend == "triton", "each direction has rows of its own"


def test_a_row_for_decoding_is_for_one_query_alone(monkeypatch, refuse):
    refuse()
    monkeypatch.setitem(crossovers.RULES, "cudnn", (replace(RULE, layout="decode"),))
    assert select(PLAIN._replace(length_q=1), "forward", "auto").backend == "cudnn"
    assert select(PLAIN, "forward", "auto").backend == "triton"
    assert select(PLAIN._replace(length_q=1, length_kv=16384), "forward", "auto").backend == "triton"


def test_a_row_for_a_sink_is_for_a_learnable_one(monkeypatch, refuse):
    refuse()
    monkeypatch.setitem(crossovers.RULES, "cudnn", (replace(RULE, kind="sink"),))
    assert select(PLAIN._replace(softmax_type="learnable"), "forward", "auto").backend == "cudnn"
    assert select(PLAIN._replace(softmax_type="off-by-one"), "forward", "auto").backend == "triton"
    assert select(PLAIN, "forward", "auto").backend == "triton"


def test_a_row_for_a_bias_is_for_that_bias_alone(monkeypatch, refuse):
    refuse()
    monkeypatch.setitem(crossovers.RULES, "cudnn", (replace(RULE, kind="bias"),))
    biased = PLAIN._replace(bias_type="post_scale_bias", bias_dims=(False, True, True, True))
    assert select(biased, "forward", "auto").backend == "cudnn"
    for other in (
        PLAIN,
        biased._replace(bias_dims=(True, True, True, True)),
        biased._replace(needs_bias_grad=True),
        biased._replace(bias_type="pre_scale_bias"),
    ):
        assert select(other, "forward", "auto").backend == "triton"


def test_a_measured_row_does_not_make_a_backend_able(monkeypatch, refuse):
    refuse("cudnn")
    monkeypatch.setitem(crossovers.RULES, "cudnn", (RULE,))
    decision = select(PLAIN, "forward", "auto")
    assert (decision.backend, decision.rejected) == ("triton", (("cudnn", "cudnn lacks wings; give it wings"),))


def test_every_rule_for_a_backend_has_its_result_file_and_can_apply():
    for rule in (rule for rule in crossovers.CROSSOVERS if rule.use in BACKENDS):
        assert rule.files
        assert rule.mask in ("open", "causal", "windowed")
        assert rule.layout in heuristics.LAYOUTS
        assert rule.kind in heuristics.KINDS
        assert all(length_class(length) == length for length in rule.tokens), rule
        assert rule.gain > 1.0, f"{rule}: a rule is for a backend that is faster than the default"


def test_lengths_are_told_apart_by_magnitude_alone():
    assert [length_class(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    q, k = (torch.randn(1, n, 2, 8) for n in (1000, 600))
    spec = flexattn.explain(q, k, k).spec
    assert (spec.length_q, spec.length_kv) == (1024, 1024)
    shorter = flexattn.explain(q[:, :513], k[:, :513], k[:, :513]).spec
    assert shorter == spec


def test_what_is_refused_while_running_goes_to_the_next(monkeypatch, refuse):
    """cuDNN refuses so, because it only knows when a plan is built; the second call does not try it again."""
    refuse("triton")
    spec = SPEC._replace(needs_grad=False)
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: ops.make_spec(x, settings, (9, 0))._replace(device_type="cuda"))
    monkeypatch.setattr("flexattn.warn._warned", set())
    tried = []

    def refusing(spec: AttentionSpec, x: Any) -> None:
        tried.append(spec)
        raise RuntimeFailure("no plan today")

    monkeypatch.setattr(backend_module("cudnn"), "forward", refusing)
    q = torch.randn(1, 3, 2, 8)
    with pytest.warns(RuntimeWarning, match="no plan today"):
        out = flexattn.attention(q, q, q)
    assert torch.equal(out, flexattn.attention(q, q, q, backend="eager"))
    flexattn.attention(q, q, q)
    assert len(tried) == 1
    with pytest.raises(BackendError, match="cudnn: no plan today"):
        flexattn.attention(q, q, q, backend="cudnn")
    assert "not cudnn: no plan today" in flexattn.explain(q, q, q).details
    assert select(spec._replace(num_heads=8), "forward", "cudnn").backend == "cudnn", "another spec may be asked"


@pytest.mark.parametrize("request_", ["auto", "cudnn"])
def test_what_one_shape_was_refused_is_no_other_shapes(monkeypatch, refuse, request_):
    """Two calls have one spec. The first is refused for a property that no spec has: its batch, or its lengths."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    refuse("triton")
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: on_a_gpu(x, settings))
    monkeypatch.setattr("flexattn.warn._warned", set())
    eager, ran = backend_module("eager"), []

    def forward(spec: AttentionSpec, x: Any) -> Any:
        if x.q.shape[0] > 3 or x.max_seqlen_q == 70:
            raise RuntimeFailure(f"no plan for {tuple(x.q.shape)}")
        ran.append(tuple(x.q.shape[:2]))
        return eager.forward(spec, x)

    monkeypatch.setattr(backend_module("cudnn"), "forward", forward)
    shapes = [(1, 100), (4, 100), (1, 70), (2, 100), (1, 100), (4, 100), (1, 70), (1, 100)]
    for b, s in shapes:
        q = torch.randn(b, s, 2, 8)
        is_refused = b > 3 or s == 70
        if is_refused and request_ == "cudnn":
            for ask in (flexattn.attention, flexattn.explain) if ran.count((1, 100)) > 1 else (flexattn.attention,):
                with pytest.raises(BackendError, match=rf"cudnn: no plan for \({b}, {s}, 2, 8\)"):
                    ask(q, q, q, backend=request_)
        elif is_refused:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flexattn.attention(q, q, q)
            assert f"not cudnn: no plan for ({b}, {s}, 2, 8)" in flexattn.explain(q, q, q).details
        else:
            flexattn.attention(q, q, q, backend=request_)
            assert flexattn.explain(q, q, q, backend=request_).forward.backend == "cudnn"
    assert ran == [shape for shape in shapes if shape[0] <= 3 and shape[1] != 70]


def on_a_gpu(x: Any, settings: Any) -> AttentionSpec:
    return ops.make_spec(x, settings, (9, 0))._replace(device_type="cuda", length_q=128, length_kv=128)


def test_failures_are_bounded(monkeypatch):
    monkeypatch.setattr(selection, "_CAPACITY", 3)
    q = torch.randn(1, 4, 2, 8)
    for n in range(6):
        x = Operands(q[:, : n + 1], q, q, *[None] * 14, n, 4, 1.0, 0.0, 0.0)
        spec = SPEC._replace(num_heads=n)
        for known in (selection.failures_of(x), selection._by_request.get(("cudnn", spec, "forward"))):
            assert not known
        selection.remember_call(x, ("cudnn", spec, "forward"), "no")
        mark_unsupported("cudnn", spec, "forward", "no")
        assert selection.failures_of(x) == ((("cudnn", spec, "forward"), "no"),)
        assert selection._by_request.get(("cudnn", spec, "forward")) == "no"
    assert len(selection._by_shape) == len(selection._by_request) == 3


def test_a_decision_begun_before_the_cache_was_emptied_is_not_found_after(monkeypatch, refuse):
    """A thread decides while another one learns that the backend about to be chosen is wrong."""
    refuse()
    spec = ON_CUDA._replace(num_heads=24)
    preference = heuristics.preference

    def learn_meanwhile(*what: Any) -> Any:
        monkeypatch.setattr("flexattn.dispatch.heuristics.preference", preference)
        found = select(spec, "forward", "auto")  # the other thread's, which is quicker
        assert found.backend == "triton"
        mark_unsupported("triton", spec, "forward", "it was found wrong")
        return preference(*what)._replace(order=("eager",))  # as this thread saw it before

    monkeypatch.setattr("flexattn.dispatch.heuristics.preference", learn_meanwhile)
    assert select(spec, "forward", "auto").backend == "eager"
    assert select(spec, "forward", "auto").backend == "cudnn"


def test_a_backward_that_building_refuses_goes_to_the_next_before_the_forward_runs(monkeypatch, refuse):
    refuse("triton")
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: ops.make_spec(x, settings, (9, 0))._replace(device_type="cuda"))
    monkeypatch.setattr("flexattn.warn._warned", set())
    cudnn, order = backend_module("cudnn"), []

    def prepare(spec: AttentionSpec, x: Any, direction: Direction) -> None:
        order.append(direction)
        raise RuntimeFailure("no plan for that")

    monkeypatch.setattr(cudnn, "prepare", prepare)
    monkeypatch.setattr(cudnn, "forward", lambda spec, x: order.append("forward ran") or backend_module("eager").forward(spec, x))
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    out = flexattn.attention(q, q, q)
    assert order == ["backward", "forward ran"]
    with pytest.warns(RuntimeWarning, match="backward runs on the eager backend"):
        out.sum().backward()


def test_dropout_keeps_both_directions_on_backends_that_drop_the_same(monkeypatch, refuse):
    refuse()
    spec = PLAIN._replace(dropout=True, dropout_in_sixteenths=True)
    only_forward = {"forward": None, "backward": "no way back"}
    monkeypatch.setattr(heuristics, "DEFAULTS", {"cuda": DEFAULTS["cuda"]._replace(order=("cudnn", "triton", "eager"))})
    for direction in DIRECTIONS:
        assert select(spec, direction, "auto").backend == "cudnn"
    monkeypatch.setattr(backend_module("cudnn"), "unsupported", lambda spec, direction: only_forward[direction])
    select.cache_clear()
    for direction in DIRECTIONS:
        decision = select(spec, direction, "auto")
        assert decision.backend == "triton"
        assert "no way back" in dict(decision.rejected)["cudnn"]
    no_gradient = spec._replace(needs_grad=False)
    assert select(no_gradient, "forward", "auto").backend == "cudnn"
    plain = spec._replace(dropout=False)
    assert [select(plain, direction, "auto").backend for direction in DIRECTIONS] == ["cudnn", "triton"]


def test_dropout_of_a_forward_elsewhere_bars_the_backend_from_the_backward(monkeypatch, refuse):
    refuse()
    no_way_there = {"forward": "no way there", "backward": None}
    monkeypatch.setattr(heuristics, "DEFAULTS", {"cuda": DEFAULTS["cuda"]._replace(order=("cudnn", "triton", "eager"))})
    monkeypatch.setattr(backend_module("cudnn"), "unsupported", lambda spec, direction: no_way_there[direction])
    decision = select(PLAIN._replace(dropout=True, dropout_in_sixteenths=True), "backward", "auto")
    assert decision.backend == "triton"
    assert decision.rejected == (
        ("cudnn", "the forward runs on triton, and cudnn drops other weights; name one backend for both, or leave out dropout"),
    )


def test_a_decision_is_logged_once_with_the_whole_text(refuse):
    refuse("triton")
    with unittest.TestCase().assertLogs("flexattn.dispatch.select", "INFO") as log:
        for _ in range(3):
            select(ON_CUDA, "forward", "auto")
    [text] = [record.getMessage() for record in log.records]
    assert text.startswith("forward of bshd, float32, 4 heads over 2, head dim 16")
    assert "not triton: triton lacks wings; give it wings" in text
    assert "not eager: can run it" in text


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


def test_blocks_of_two_threads_overlap():
    """Each thread has its own request while both are inside, and none is left when the blocks have ended, in any order."""
    inside, first_left = threading.Event(), threading.Event()
    seen = []

    def enter_second_and_leave_last() -> None:
        seen.append(options.current())
        with attention_backend("triton"):
            inside.set()
            first_left.wait(10.0)
            seen.append(options.current())
        seen.append(options.current())

    other = threading.Thread(target=enter_second_and_leave_last)
    with attention_backend("eager"):
        other.start()
        assert inside.wait(10.0)
        assert options.current() == "eager"
    first_left.set()
    other.join()
    assert seen == [None, "triton", None]
    assert options.current() is None


@pytest.mark.parametrize("backend", ["Triton", "flash", "", 3])
def test_unknown_backends_are_named(backend):
    q = torch.randn(1, 3, 2, 8)
    for attempt in (lambda: attention_backend(backend).__enter__(), lambda: flexattn.attention(q, q, q, backend=backend)):
        with pytest.raises(ValueError, match=rf"backend is {backend!r}; accepted: auto, triton, cudnn, eager"):
            attempt()


@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("FLEXATTN_BACKEND", lambda: requested_backend(None)),
        ("FLEXATTN_CHECK", options.check_values),
        ("FLEXATTN_CANARY", options.canary),
    ],
)
def test_wrong_environment_variables_are_named(monkeypatch, variable, read):
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=rf"{variable} is 'yes'; accepted: "):
        read()


@pytest.mark.parametrize(
    ("variable", "accepted"),
    [
        ("FLEXATTN_BACKEND", "auto, triton, cudnn, eager"),
        ("FLEXATTN_CHECK", "0, 1"),
        ("FLEXATTN_CANARY", "0, 1"),
        ("FLEXATTN_HOPPER", "auto, always, never"),
        ("FLEXATTN_BATCH_INVARIANT", "0, 1"),
    ],
)
@pytest.mark.parametrize("value", ["true", "ALWAYS", " 1"])
def test_wrong_environment_variables_are_named_at_once(monkeypatch, variable, accepted, value):
    """Any call finds them, even without lengths, with no GPU and a backend of its own. So do explain and a warm call."""
    q = torch.randn(1, 3, 2, 8)
    for _ in range(3):
        flexattn.attention(q, q, q, backend="eager")
    monkeypatch.setenv(variable, value)
    for ask in (flexattn.attention, flexattn.explain, flexattn.attention):
        with pytest.raises(ValueError, match=rf"{variable} is '{value}'; accepted: {accepted}"):
            ask(q, q, q, backend="eager")
    with pytest.raises(ValueError, match=variable):
        flexattn.explain(SPEC, backend="eager")
    monkeypatch.setenv(variable, "")
    flexattn.attention(q, q, q, backend="eager")


@pytest.mark.parametrize("directions", [("backward",), ("forward", "backward"), ("forward",)], ids=str)
@pytest.mark.parametrize("request_", ["auto", "eager"])
def test_explain_raises_what_the_call_raises(monkeypatch, refuse, directions, request_):
    refuse("triton", "cudnn")
    monkeypatch.setattr(
        backend_module("eager"), "unsupported", lambda spec, direction: f"no {direction}" if direction in directions else None
    )
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    said = []
    for ask in (flexattn.attention, flexattn.explain):
        with pytest.raises(BackendError) as e:
            ask(q, q, q, backend=request_)
        said.append(str(e.value))
    assert said[0] == said[1]


def test_explain_gives_every_backend_a_line(refuse):
    refuse("triton")
    explanation = flexattn.explain(ON_CUDA)
    assert explanation.forward.backend == explanation.backward.backend == "cudnn"
    forward, backward = explanation.details.split("\nbackward: ")
    for section in (forward.split("\nforward: ")[1], backward):
        assert section.splitlines()[0] == "cudnn"
        assert "why: the first of triton, cudnn, eager that can run the call" in section
        assert "not triton: triton lacks wings; give it wings" in section
        assert "not eager: can run it; ask for it with backend='eager'" in section
    assert explain(ON_CUDA._replace(needs_grad=False), "auto").backward is None
    assert "backward: not needed" in explain(ON_CUDA._replace(needs_grad=False), "auto").details


def test_explain_follows_the_request(refuse):
    refuse("cudnn")
    assert flexattn.explain(SPEC, backend="triton").forward == Decision("triton", "requested by name", (), None)
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
        selected.append(what[:3])
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
    monkeypatch.setattr(eager, "unsupported", lambda spec, direction: "no way back" if direction == "backward" else None)
    monkeypatch.setattr(eager, "forward", lambda spec, x: pytest.fail("the forward ran"))
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    with pytest.raises(BackendError, match="no way back"):
        flexattn.attention(q, q, q, backend="eager")


def test_choosing_imports_no_kernel_library(forked_python):
    """triton is only looked up, unless it will run."""
    code = (
        "import sys, torch, flexattn\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "assert flexattn.explain(q, q, q).forward.backend == 'eager'\n"
        "flexattn.attention(q, q, q)\n"
        "assert not {'triton', 'cudnn'} & sys.modules.keys()\n"
    )
    result = forked_python("-c", code)
    assert result.returncode == 0, result.stderr


optional_side = st.none() | st.integers(0, 2**31)
fields = {
    "q_format": st.sampled_from(FORMATS),
    "kv_format": st.sampled_from(FORMATS),
    "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8]),
    "num_heads": st.integers(1, 4).map(lambda n: 12 * n),
    "num_heads_kv": st.sampled_from([1, 2, 3, 4, 6, 12]),
    "head_dim_qk": st.integers(1, 300),
    "head_dim_v": st.integers(1, 300),
    "padding": st.booleans(),
    "band": st.builds(Band, optional_side, optional_side, st.booleans()),
    "bias_type": st.sampled_from(BIAS_TYPES),
    "bias_dims": st.none() | st.tuples(*[st.booleans()] * 4),
    "softmax_type": st.sampled_from(SOFTMAX_TYPES),
    "softcap": st.booleans(),
    "dropout": st.booleans(),
    "return_max_logit": st.booleans(),
    "needs_grad": st.booleans(),
    "needs_bias_grad": st.booleans(),
    "deterministic": st.booleans(),
    "device_type": st.sampled_from(["cpu", "cuda"]),
    "capability": st.none() | st.just((9, 0)) | st.tuples(st.integers(7, 12), st.integers(0, 9)),
    "length_q": st.integers(0, 2**20).map(length_class),
    "length_kv": st.integers(0, 2**20).map(length_class),
    "dropout_in_sixteenths": st.booleans(),
    "needs_lse_grad": st.booleans(),
    "mods": st.none(),
    "block_size": st.none(),
    "fp8": st.none()
    | st.builds(
        Fp8,
        st.tuples(*[st.booleans()] * 3),
        st.sampled_from([0, 64, 128]),
        st.sampled_from([torch.float16, torch.bfloat16]),
        st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
        st.booleans(),
    ),
    "is_part": st.booleans(),
    "results": st.builds(
        Results,
        *[st.sampled_from(("", *FORMATS))] * 3,
        packing=st.sampled_from(("", *PACKINGS)),
        fp32=st.sampled_from(FP32_GRADIENTS),
        fp32_out=st.booleans(),
    ),
    "batch_invariant": st.booleans(),
    "kv_dtype": st.none() | st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
    "page_size": st.sampled_from([0, 1, 16, 48, 256]),
    "has_origin": st.booleans(),
    "bias_is_shared": st.booleans(),
    "kv_lists": st.sampled_from([0, 0, 1, 3]),
    "kv_block": st.sampled_from([1, 64]),
}
specs = st.fixed_dictionaries(fields).map(
    lambda given: AttentionSpec(**given | ({} if given["fp8"] is None else {"dtype": torch.float8_e4m3fn}))
)
assert fields.keys() == set(AttentionSpec._fields), "a spec is drawn by all its fields"
some_failures = st.dictionaries(
    st.sampled_from([(name, d) for name in BACKENDS for d in DIRECTIONS]), st.just("it crashed; try another")
)


@settings(deadline=None, max_examples=50)  # the first choice imports the backends
@given(specs, st.sampled_from(DIRECTIONS), st.sampled_from(options.REQUESTS), some_failures)
def test_any_spec_gets_one_decision_and_every_other_backend_a_reason(spec, direction, request, failures):
    forget_rejections()
    for (name, which), reason in failures.items():
        mark_unsupported(name, spec, which, reason)

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
        assert backend_module(choice.backend).unsupported(spec, direction) is None
        assert (choice.backend, direction) not in failures
        lines = reasons(spec, direction, choice)
        assert lines[0] == f"why: {choice.why}"
        others = [name for name in BACKENDS if name != choice.backend]
        for name, line in zip(others, lines[1:], strict=True):
            assert line.startswith(f"not {name}: ")
            assert len(line) > len(f"not {name}: ")
    else:
        assert all(f"\n  {name}: " in choice for name in BACKENDS)


@settings(deadline=None, max_examples=50)
@given(specs, st.sampled_from(options.REQUESTS))
def test_any_spec_is_explained(spec, request):
    forget_rejections()
    try:
        text = explain(spec, request).details
    except BackendError:
        return  # the test above reads its text
    assert text.count("  why: ") == (2 if spec.needs_grad else 1)
    for name in BACKENDS:
        assert text.count(f"  not {name}: ") + text.count(f": {name}\n") == (2 if spec.needs_grad else 1)


def test_auto_prefers_triton_for_lists_of_keys_on_a_gpu() -> None:
    assert select(ON_CUDA._replace(kv_lists=1), "forward", "auto").backend == "triton"
