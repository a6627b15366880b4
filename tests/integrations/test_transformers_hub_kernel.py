"""The kernel of the Hub that transformers loads from a folder: its functions, and models on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.integrations.transformers import hub_kernel

H, H_KV, D, LENGTHS = 4, 2, 8, (5, 9, 3)
EXACT = {"atol": 1e-12, "rtol": 0.0}

MODELS = """
import sys
import torch, transformers
from tests.support.transformers_models import DECODERS, REFERENCE, config, make, register_both

register_both()
tokens = torch.randint(3, 90, (2, 21), generator=torch.Generator().manual_seed(1))
kept = torch.ones_like(tokens)
kept[0, :6] = 0
positions = torch.cat([torch.arange(n) for n in (9, 2, 10)])[None]
calls = [({}, slice(None)), ({"attention_mask": kept}, kept.bool()), ({"position_ids": positions}, slice(1))]
for name in ("llama", "mistral", "gemma2"):
    made = [
        make(transformers.AutoModelForCausalLM, config(*DECODERS[name]), implementation, torch.float32)
        for implementation in ("me/flash-flexattn", REFERENCE)
    ]
    for options, rows in calls:
        inputs = tokens[:1] if "position_ids" in options else tokens
        with torch.no_grad():
            got, wanted = (model(inputs, use_cache=False, **options).logits[rows] for model in made)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0.0)
print("ran")
"""


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float, sinks: Tensor | None) -> Tensor:
    """Attention of one sequence, [s, h, d]."""
    q, k, v = q.transpose(0, 1), *(x.repeat_interleave(H // H_KV, 1).transpose(0, 1) for x in (k, v))
    scores = q @ k.mT / D**0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (True, (3, 3)), (False, (2, None)), (False, (None, None))])
def test_both_functions_are_attention_in_float64(
    causal: bool, window: tuple[int | None, int | None], with_sinks: bool, softcap: float
) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, heads, D, dtype=torch.float64, requires_grad=True) for heads in (H, H_KV, H_KV))
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True) if with_sinks else None
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    options: dict[str, Any] = {"causal": causal, "window_size": window, "softcap": softcap, "s_aux": sinks, "deterministic": True}
    pieces = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        distance = torch.arange(end - begin) - torch.arange(end - begin)[:, None]
        left, right = (total if side in (None, -1) else side for side in window)
        seen = (distance >= -left) & (distance <= (0 if causal else right))
        piece = [x[begin:end] for x in (q, k, v)]
        pieces.append(_dense(*piece, seen, softcap, sinks))
        one = hub_kernel.flash_attn_func(*(x[None] for x in piece), **options)[0]
        torch.testing.assert_close(one, pieces[-1], **EXACT)
    got = hub_kernel.flash_attn_varlen_func(q, k, v, starts, starts, torch.tensor(max(LENGTHS)), max(LENGTHS), **options)
    wanted = torch.cat(pieces)
    torch.testing.assert_close(got, wanted, **EXACT)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, wanted)), **EXACT)


def test_another_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend is 'xpu'; accepted: 'cuda' or 'cpu'"):
        hub_kernel.write(tmp_path, "xpu")


@pytest.mark.slow
def test_models_run_on_the_folder(tmp_path: Path, forked_python: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed, whose models run on the kernel")
    pytest.importorskip("kernels", reason="kernels is not installed, by which transformers loads a kernel")
    folder = hub_kernel.write(tmp_path / "kernel", "cpu")
    script = tmp_path / "models.py"
    script.write_text(MODELS, "utf-8")
    ran = forked_python(
        str(script), env={"LOCAL_KERNELS": f"me/flash-flexattn={folder}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ran\n"
