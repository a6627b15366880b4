"""`explain(..., build=True)`: kernels are built and not run, and the answer says how final it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import build_ahead
from flexattn.__main__ import main
from flexattn.dispatch import heuristics
from flexattn.dispatch.explain import Explanation
from flexattn.dispatch.select import BackendError, RuntimeFailure, backend_module, forget_rejections

NOT_ASKED = "cuDNN may refuse the plan"


class FakeCudnn:
    """cuDNN first in the order, with plans for all directions except the keys of `answers`, whose exceptions building raises."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, BaseException] = {}
        self.built: list[tuple[str, torch.Size]] = []
        self.is_here = True
        backend = backend_module("cudnn")
        order = heuristics.Preference(("cudnn", "eager", "triton"), "as the test wants", None)
        patch.setattr(heuristics, "DEFAULTS", {"cpu": order, "cuda": order})
        patch.setattr(backend, "unsupported", lambda spec, direction: None)
        patch.setattr(backend, "prepare", self.prepare)
        patch.setattr(backend, "cannot_build", lambda spec, x: None if self.is_here else "no such GPU is here")
        patch.setattr(backend, "provisional", self.provisional)
        for name in ("forward", "backward"):
            patch.setattr(backend, name, lambda *args: pytest.fail("explaining ran the call"))

    def prepare(self, spec: Any, x: Any, direction: str) -> None:
        if direction in self.answers:
            raise self.answers[direction]
        self.built.append((direction, x.q.shape))

    def provisional(self, spec: Any, x: Any, direction: str) -> str | None:
        return None if (direction, x.q.shape) in self.built else NOT_ASKED


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    forget_rejections()
    yield FakeCudnn(monkeypatch)
    monkeypatch.undo()
    forget_rejections()


def qkv(length: int = 5) -> Tensor:
    return torch.randn(1, length, 2, 8, requires_grad=True)


def explained(length: int = 5, **arguments: Any) -> Explanation:
    q = qkv(length)
    return flexattn.explain(q, q, q, **arguments)


def backends(answer: Explanation) -> tuple[str, str | None]:
    return answer.forward.backend, answer.backward and answer.backward.backend


def test_an_answer_is_provisional_until_its_plans_are_built(fake: FakeCudnn) -> None:
    before = explained()
    assert (before.is_final, backends(before)) == (False, ("cudnn", "cudnn"))
    assert before.details.count(f"  provisional: {NOT_ASKED}") == 2
    answer = explained(build=True)
    assert (answer.is_final, backends(answer)) == (True, ("cudnn", "cudnn"))
    assert [direction for direction, _ in fake.built] == ["backward", "forward"], "what a call asks first, first"
    assert answer.details.count("  final: what runs it is built") == 2
    assert "provisional" not in answer.details
    assert explained().is_final
    assert not explained(6).is_final, "another shape has another plan"


def test_a_refusal_moves_the_call_on_and_holds_for_its_shapes_alone(fake: FakeCudnn) -> None:
    fake.answers["backward"] = RuntimeFailure("no engine takes it")
    answer = explained(build=True)
    assert (answer.is_final, backends(answer)) == (True, ("cudnn", "eager"))
    assert answer.backward is not None
    assert answer.backward.rejected == (("cudnn", "no engine takes it"),)
    assert backends(explained()) == ("cudnn", "eager"), "known from now on"
    assert backends(explained(6)) == ("cudnn", "cudnn")
    with pytest.raises(BackendError, match="no engine takes it"):
        explained(build=True, backend="cudnn")


def test_with_dropout_a_refusal_of_one_direction_moves_both(fake: FakeCudnn) -> None:
    fake.answers["backward"] = RuntimeFailure("no engine takes it")
    answer = explained(build=True, dropout_p=0.5)
    assert (answer.is_final, backends(answer)) == (True, ("eager", "eager"))
    assert backends(explained(dropout_p=0.5)) == ("eager", "eager"), "whether the call brings its rng_state or not"
    assert backends(explained(dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int64))) == ("eager", "eager")


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("no memory"), OSError("no memory")], ids=repr)
def test_a_build_that_fails_for_other_reasons_is_raised_and_tried_again(fake: FakeCudnn, error: Exception) -> None:
    fake.answers["forward"] = error
    with pytest.raises(type(error), match="no memory"):
        explained(build=True)
    assert not explained().is_final
    del fake.answers["forward"]
    assert explained(build=True).is_final


def test_what_cannot_be_built_here_stays_provisional(fake: FakeCudnn) -> None:
    fake.is_here = False
    answer = explained(build=True)
    assert not answer.is_final
    assert not fake.built
    assert NOT_ASKED in str(answer)
    assert "final:" not in answer.details


def test_a_spec_has_no_shapes_to_build_for(fake: FakeCudnn) -> None:
    spec = explained().spec
    answer = flexattn.explain(spec)
    assert not answer.is_final
    assert "provisional: cudnn answers for shapes" in str(answer)
    with pytest.raises(ValueError, match="build is True with an AttentionSpec, which has no shapes"):
        flexattn.explain(spec, build=True)
    with pytest.raises(TypeError, match="build is 1"):
        explained(build=1)


def test_eager_needs_no_build(fake: FakeCudnn) -> None:
    answer = explained(build=True, backend="eager")
    assert answer.is_final
    assert not fake.built


def test_triton_kernels_are_compiled_for_a_gpu_that_need_not_be_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recording and compiling have tests of their own, in processes without Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    from flexattn.kernels_triton.runtime import interpreter

    asked: list[Any] = []

    def recorded(spec: Any, x: Any, directions: Any) -> list[Any]:
        assert x.q.device.type == "meta", "explaining takes no memory"
        return list(directions)

    def build_missing(launches: Any, capability: Any, directory: Any, **_: Any) -> int:
        asked.append((*launches, capability, directory))
        return len(launches)

    monkeypatch.setenv("FLEXATTN_KERNELS", "here")
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # nothing runs here
    monkeypatch.setattr(build_ahead, "recorded", recorded)
    monkeypatch.setattr(build_ahead, "build_missing", build_missing)
    arguments = ["explain", *["--q", "2,4096,4,128", "--capability", "9.0", "--backend", "triton"]]
    assert main(arguments) == 0
    assert asked == []
    assert "final" not in capsys.readouterr().out, "its rules are all that decides"
    assert main([*arguments, "--build", "--verbose"]) == 0
    assert asked == [("backward", (9, 0), "here"), ("forward", (9, 0), "here")]
    assert capsys.readouterr().out.count("  final: what runs it is built") == 2
