"""The benchmark of callbacks: every spelling of a score is the same attention, so that their times may be compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import attention
from flexattn.bench import callbacks

TRUTH: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"attn_mask_type": "causal"}, "softcap": {"softcap": callbacks.CAP}}


@pytest.mark.parametrize("score", ["plain", "causal", "softcap", "distance"])
def test_spellings_of_a_score_agree(score: str) -> None:
    leaves = [torch.randn(2, 40, 2, 16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 40, 2, 16)
    ours = {spelling: how for (of, spelling), how in callbacks.spellings().items() if of == score}
    exact = callbacks.wanted(leaves, dout, TRUTH.get(score) or next(iter(ours.values())))
    for spelling, how in ours.items():
        out = attention(*leaves, **how, backend="eager")
        for got, ref in zip((out, *torch.autograd.grad(out, leaves, dout)), exact, strict=True):
            torch.testing.assert_close(got, ref, atol=2e-5, rtol=2e-4, msg=lambda text, spelling=spelling: f"{spelling}: {text}")
    assert len(ours) == {"plain": 1, "causal": 3, "softcap": 4, "distance": 3}[score]


def test_it_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        callbacks.main([])
    assert "no CUDA device" in capsys.readouterr().err
