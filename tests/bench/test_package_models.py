"""The benchmark of diffusers' and torchtitan's models, with tiny ones: an implementation that errs is never timed."""

from __future__ import annotations

import sys

import pytest
import torch

from flexattn.bench import harness, package_models
from flexattn.bench.measure import Calls, Samples
from flexattn.bench.package_models import OURS, OWN, SUBJECTS, Sizes

TINY = Sizes(is_tiny=True, device=torch.device("cpu"))
LLAMAS = [name for name in SUBJECTS if "Llama" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FLUX.1", "Stable Diffusion 1.5", "Llama 3 8B"])
def test_flexattn_passes_the_check(name: str) -> None:
    pytest.importorskip("torchtitan" if name in LLAMAS else "diffusers", reason="needs the package whose models are measured")
    subject = SUBJECTS[name](TINY)
    assert package_models.error_of(subject) < package_models.WORST
    _step(subject)


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMAS)
def test_llama_computes_one_document_after_the_other(name: str) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan, whose own attention needs a GPU or a compiler")
    subject = SUBJECTS[name](TINY)
    with torch.no_grad():
        torch.testing.assert_close(subject.run(subject.models[OURS]), subject.exact(), atol=1e-4, rtol=0)
    weights = [dict(model.named_parameters()) for model in subject.models.values()]
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    for name, package in ((OWN, "torchtitan"), (OURS, "flexattn")):
        inner = [module for path, module in subject.models[name].named_modules() if path.endswith("inner_attention")]
        assert {type(module).__module__.split(".")[0] for module in inner} == {package}
    _step(subject)


def _step(subject: package_models.Subject) -> None:
    package_models.step(subject, subject.models[OURS])
    assert all(weight.grad is None for weight in subject.models[OURS].parameters())


@pytest.mark.slow
def test_a_wrong_model_is_not_timed() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers, whose model is spoilt")

    def spoilt(sizes: Sizes) -> package_models.Subject:
        subject = package_models.flux(sizes)
        ours = subject.models[OURS]
        return subject._replace(run=lambda model: subject.run(model) + (1.0 if model is ours else 0.0))

    assert [row["status"] for row in package_models.measure(spoilt, TINY)] == ["wrong"]


def test_a_model_that_fails_while_it_is_timed_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subject: package_models.Subject) -> None:
        raise RuntimeError("no kernel")

    subject = package_models.Subject({}, lambda model: torch.ones(1), lambda: torch.ones(1), "")
    monkeypatch.setattr(package_models, "error_of", lambda subject: 1.0)
    monkeypatch.setattr(package_models, "timed", fail)
    [row] = package_models.measure(lambda sizes: subject, TINY)
    assert row["status"] == "refused"
    assert "no kernel" in row["reason"]


def test_speed_is_that_beside_the_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Calls, budget_ms: float) -> dict[str, Samples]:
        for call in calls.values():
            call()
        return {name: Samples([float(n)] * 3, []) for n, name in enumerate(calls, 1)}

    monkeypatch.setattr(harness, "time_on_device", timed)
    models = {name: torch.nn.Linear(2, 2, dtype=torch.bfloat16) for name in (OWN, OURS)}
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    subject = package_models.Subject(dict(models), lambda model: model(x), lambda: torch.zeros(1, 2), "theirs")
    monkeypatch.setattr(package_models, "error_of", lambda subject: 1.0)
    rows = list(package_models.measure(lambda sizes: subject, TINY))
    assert [(row["direction"], row["implementation"], row["speed"]) for row in rows] == [
        (direction, *one) for direction in ("forward", "step") for one in ((OWN, 1.0), (OURS, 0.5))
    ]
    assert {(row["own"], row["status"]) for row in rows} == {("theirs", "measured")}
    assert "step" in package_models.line({"model": "small", **rows[-1]})


def test_a_missing_package_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    [row] = package_models.measure(package_models.flux, TINY)
    assert row["status"] == "refused"
    assert "diffusers" in str(row["reason"])
