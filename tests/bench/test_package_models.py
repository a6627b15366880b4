"""The benchmark of diffusers' and torchtitan's models, with tiny ones: an implementation that errs is never timed."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers, whose models are measured")

from flexattn.bench import package_models
from flexattn.bench.package_models import OURS, SUBJECTS, Sizes

TINY = Sizes(is_tiny=True, device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FLUX.1", "Stable Diffusion 1.5"])
def test_flexattn_passes_the_check(name: str) -> None:
    subject = SUBJECTS[name](TINY)
    assert package_models.error_of(subject) < package_models.WORST
    _step(subject)


@pytest.mark.slow
def test_llama_trains() -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan, whose own attention needs a GPU or a compiler")
    _step(SUBJECTS["Llama 3 8B, packed"](TINY))


def _step(subject: package_models.Subject) -> None:
    package_models.step(subject, subject.models[OURS])
    assert all(weight.grad is None for weight in subject.models[OURS].parameters())


@pytest.mark.slow
def test_a_wrong_model_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(sizes: Sizes) -> package_models.Subject:
        subject = package_models.flux(sizes)
        ours = subject.models[OURS]
        return subject._replace(run=lambda model: subject.run(model) + (1.0 if model is ours else 0.0))

    monkeypatch.setattr(package_models, "SUBJECTS", {"FLUX.1": spoilt})
    assert [row["status"] for row in package_models.measure(TINY)] == ["wrong"]


def test_a_missing_package_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setattr(package_models, "SUBJECTS", {"FLUX.1": package_models.flux})
    [row] = package_models.measure(TINY)
    assert row["status"] == "refused"
    assert "diffusers" in str(row["reason"])
