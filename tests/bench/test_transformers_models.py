"""The benchmark of transformers' models: if an implementation gives other logits, it is never timed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed, whose models are measured")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexattn.bench import harness, transformers_models
from flexattn.bench.measure import Calls, Samples
from flexattn.integrations.transformers import register

CPU = torch.device("cpu")


@pytest.mark.slow
def test_flexattn_passes_the_check_before_it_is_timed() -> None:
    register()
    for model in transformers_models.MODELS.values():
        found = transformers_models.errors(model, "flexattn", 256, CPU)
        assert set(found) == set(model.batches)
        assert max(found.values()) < transformers_models.WORST


@pytest.mark.slow
def test_an_implementation_that_drops_the_softcap_fails_the_check() -> None:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("no_softcap", lambda *args, softcap=None, **keywords: sdpa(*args, **keywords))
    AttentionMaskInterface.register("no_softcap", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    assert (
        min(transformers_models.errors(transformers_models.MODELS["gemma2"], "no_softcap", 256, CPU).values())
        > transformers_models.WORST
    )


def test_a_step_reaches_every_batch() -> None:
    register()
    batches = transformers_models.batches(128, CPU)
    for model in (transformers_models.MODELS[name] for name in ("gpt_oss", "minilm", "vit")):
        subject = transformers_models.build(model, "flexattn", torch.float32, CPU)
        for name in model.batches:
            transformers_models.step(subject, batches[name])
            assert all(weight.grad is None for weight in subject.parameters())


def test_a_wrong_batch_is_a_row_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Calls, budget_ms: float) -> dict[str, Samples]:
        return {name: Samples([1.0, 2.0, 3.0], []) for name, call in calls.items() if call() is None}

    monkeypatch.setattr(harness, "time_on_device", timed)
    monkeypatch.setattr(harness, "free_memory", lambda: None)
    monkeypatch.setattr(transformers_models, "peak_bytes", lambda call: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(transformers_models, "TOKENS", 128)
    model = transformers_models.MODELS["minilm"]._replace(batches=("right-padded", "one sequence"))
    small = model._replace(large=model.small)
    off = {"right-padded": 1.0, "one sequence": 3.0}
    monkeypatch.setattr(transformers_models, "errors", lambda *_: off)
    right, wrong, refused = transformers_models.measure(small, ["sdpa", "no_such"], CPU)
    assert (right["status"], right["ms"], right["peak_gib"]) == ("measured", 2.0, 2.0)
    assert (wrong["status"], wrong["error"]) == ("wrong", 3.0)
    assert "ms" not in wrong
    assert (refused["implementation"], refused["status"]) == ("no_such", "refused")
    assert "2.0 ms" in transformers_models.line({"model": "minilm", **right})


def test_it_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        transformers_models.PROGRAM.run([])
    assert "no CUDA device" in capsys.readouterr().err
