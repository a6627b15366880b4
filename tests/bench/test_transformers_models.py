"""The benchmark of transformers' models: if an implementation gives other logits, it is never timed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed, whose models are measured")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexattn.bench import transformers_models
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


def test_it_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        transformers_models.PROGRAM.run([])
    assert "no CUDA device" in capsys.readouterr().err
