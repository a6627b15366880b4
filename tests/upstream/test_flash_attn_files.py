"""The program that runs FlashAttention's test files, on a made-up checkout whose tests have every outcome that it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, FreshPython
from tests.upstream import checkout, flash_attn

FILE = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.cute.testing import reference
from flash_attn.flash_attn_interface import _inner
from flash_attn.layers.rotary import apply_rotary_emb

CAPABILITY = torch.cuda.get_device_capability("cuda")

@pytest.mark.parametrize("seqlen", [3, 5, 9, 5000])
def test_passes(seqlen):
    assert CAPABILITY == (9, 0)
    q = torch.randn(1, seqlen, 2, 16, device="cuda")
    torch.testing.assert_close(flash_attn_func(q, q, q, causal=True, gqa_parallel=True), reference(q))
    assert apply_rotary_emb(q, torch.ones(9, 8), torch.zeros(9, 8)).equal(q)
    assert len(list(range(1000))) == 3

def test_fails():
    q = torch.randn(1, 3, 2, 16, device="cuda")
    assert torch.equal(flash_attn_func(q, q, q), q)

def test_refused():
    q = torch.randn(1, 3, 2, 16, device="cuda")
    flash_attn_func(q, q, q, 0.5, return_attn_probs=True)

def test_gone():
    q = torch.randn(1, 3, 2, 16, device="cuda")
    flash_attn_func(q, q, q, gone=1)

def test_private():
    _inner.fwd()

def test_skips_itself():
    pytest.skip()

def test_flash_attn_generator_arg_must_be_none():
    raise AssertionError
"""
REFERENCE = """
import torch

def reference(q):
    q = q.transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
"""
ROTARY = """
from flash_attn.ops.triton.rotary import apply_rotary

def apply_rotary_emb_torch(x, cos, sin, interleaved):
    return x * cos.repeat(1, 1, 2)[:, :, None] + 0 * sin.sum()
"""


@pytest.mark.slow
def test_every_outcome_is_counted(tmp_path: Path, forked_python: FreshPython) -> None:
    for name, text in (
        ("tests/test_flash_attn.py", FILE),
        ("flash_attn/cute/testing.py", REFERENCE),
        ("flash_attn/layers/rotary.py", ROTARY),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    out = tmp_path / "out.json"
    arguments = [str(tmp_path), "--only", "tests/test_flash_attn.py", "--sample", "2", "--out", str(out)]
    ran = forked_python("-m", "tests.upstream.flash_attn", *arguments)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(out.read_text("utf-8"))
    counts = ("collected", "too long for a CPU", "passed", "failed", "refused", "skipped")
    assert [found[name] for name in counts] == [10, 1, 2, 1, 2, 2], found
    assert found["do not apply"] == {"calls FlashAttention's C++ operator": 1}
    assert [*found["failures"]] == ["test_flash_attn.py::test_fails"]
    assert set(found["reasons"]) == {
        "return_attn_probs is True and dropout_p is 0.5, but the matrix with dropout is never computed",
        "passes `gone`, which FlashAttention's function does not take any more",
        "uses `_inner`, which is private to FlashAttention",
        "skips itself, without a reason",
    }
    assert "| `tests/test_flash_attn.py` | 10 | 1 | 2 | 1 | 2 | 2 |" in flash_attn.summary({"files": [found]})


def test_results_that_became_more_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a, b = m.flash_attn_with_kvcache(1)\na, *b = flash_attn_with_kvcache(1)\nc = 65536\n", "utf-8")
    assert checkout.on_cpu(tmp_path / "x.py") == (
        "a, b, *_ = m.flash_attn_with_kvcache(1)\na, *b = flash_attn_with_kvcache(1)\nc = 8192"
    )


@pytest.mark.parametrize(
    ("function", "parameters", "work"),
    [
        ("test", {"seqlen": 8, "d": 4}, 8 * 8 * 4),
        ("test", {"seqlen_q": 8, "seqlen_k": 2, "headdim": 4}, 8 * 2 * 4),
        ("test_mla", {"query_seqlen": 8, "context_seqlen": 2}, 8 * 2 * 128 * 64),
        ("test", {}, 128),
    ],
)
def test_work(function: str, parameters: dict[str, int], work: int) -> None:
    assert flash_attn.work_of(function, parameters) == work


def test_docs_show_the_kept_result() -> None:
    result = json.loads((ROOT / "bench" / "results" / "flash_attn_tests.json").read_text("utf-8"))
    page = (ROOT / "docs" / "doors.md").read_text("utf-8")
    assert flash_attn.summary(result) in page
    assert f"{sum(file['passed'] for file in result['files'])} cases pass, none fails" in page
    assert result["command"].removesuffix(" --seed 0") in page
    assert result["commit"][:8] in page
    assert [file["file"] for file in result["files"]] == [*flash_attn.FILES]
    assert all(file["failed"] == 0 and not file["failures"] and file["passed"] > 0 for file in result["files"])
