"""Statistics of the softmax weights, by the kernels and in plain torch, against fp64; and the kernels compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import eager_backend, reference
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.dispatch.statistics import Statistics, Wanted, empty_statistics, statistics, triton_unsupported
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.portable.weight_statistics import Outputs, weight_statistics
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import check_close, make_call, make_inputs, reference_attention
from tests.second_order.test_kernels import CASES, DEVICE, make
from tests.support.compiled_kernels import compile_sound

ROWS = torch.tensor([18, 3, 0, 2, 19, -1, 2**32], device=DEVICE)  # the last three are in no sequence
BY_DEFAULT = ("packed, causal, sink", "two parts, dropout, alibi", "captures, block mask", "padding, outliers")


def exact(spec: AttentionSpec, x: Operands, wanted: Wanted, dtype: torch.dtype) -> Statistics:
    """Returns the statistics by their formulas in `dtype`, from all scores of a sequence at once."""
    _, lse, _ = reference_attention(spec, x, dtype)
    found = empty_statistics(spec, x, lse, wanted)
    whole = reference.Differentiable.of(x).map(lambda t: t.to(dtype))
    for sequences in reference.split_sequences(spec, x):
        rows, cols = range(len(sequences.q)), range(len(sequences.kv))
        if not rows:
            continue
        block = reference.slice_block(spec, whole, sequences, rows, cols)
        scores = reference.masked_logits(spec, x, sequences, rows, cols, block)
        row_lse = reference.lse_view(lse, spec.q_format, sequences.batch, sequences.q)[..., None]
        p = torch.exp(scores - row_lse.masked_fill(row_lse.isneginf(), torch.inf))
        if cols:
            reference.lse_view(found.max_scores, spec.q_format, sequences.batch, sequences.q).copy_(scores.amax(-1))
        reference.lse_view(found.entropy, spec.q_format, sequences.batch, sequences.q).copy_(-torch.xlogy(p, p).sum(-1))
        reference.lse_view(found.column_sums, spec.kv_format, sequences.batch, sequences.kv).copy_(p.sum(2))
        for place, row in enumerate(ROWS.tolist()):
            if row in rows:
                found.row_weights[sequences.batch.start : sequences.batch.stop, :, place, : len(cols)] = p[:, :, row]
    return found


def check(spec: AttentionSpec, x: Operands, request: str) -> None:
    wanted = Wanted(ROWS, True, True, True)
    _, lse, max_logit = reference_attention(spec, x)
    ref, eager = (exact(spec, x, wanted, dtype) for dtype in (torch.float64, torch.float32))
    x = x._replace(dropout_p=0.0, rng_state=None)
    got = statistics(spec._replace(dropout=False), request, x, lse.float(), wanted)
    largest = float(max_logit.abs().masked_fill(max_logit.isinf(), 0.0).max())
    for name, one, exactly, budget in zip(Statistics._fields, got, ref, eager, strict=True):
        check_close(name, one, exactly, budget, largest_score=largest)


@pytest.mark.parametrize("request_", ["triton", "eager"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in BY_DEFAULT else [pytest.mark.slow]) for c in CASES])
def test_statistics_equal_the_formulas_in_fp64(case: str, request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, x, *_ = make(case, torch.bfloat16 if case == "padding, outliers" else torch.float32)
    monkeypatch.setattr(eager_backend, "SCORE_BYTES", 3 * 4 * 37 * 4)  # several blocks of queries
    assert request_ == "eager" or triton_unsupported(spec, request_) is None
    check(spec, x, request_)


@pytest.mark.parametrize("request_", ["triton", "eager"])
def test_an_lse_that_fp32_rounds_coarsely(request_: str) -> None:
    """All scores are 1e6, where fp32 numbers are 1/16 apart, so that weights relative to lse alone would be wrong by up to 3 %."""
    inputs = make_inputs(lengths_q=[19], lengths_kv=[19], device=DEVICE)
    bias = torch.full((1, 1, 1, 1), 1e6, device=DEVICE)
    spec, x = make_call(inputs._replace(q=inputs.q * 0), bias_type="post_scale_bias", bias=bias, attn_mask_type="causal")
    lse = reference_attention(spec, x)[1].float()
    got = statistics(spec, request_, x, lse, Wanted(ROWS, True, True, True))
    keys = torch.arange(1.0, 20.0, device=DEVICE)
    assert torch.all(got.max_scores == 1e6)
    torch.testing.assert_close(got.entropy, keys.log().expand(1, 4, 19), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.column_sums, (1 / keys).flip(0).cumsum(0).flip(0).expand(1, 4, 19), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.row_weights[0, 0, 0], torch.full((19,), 1 / 19, device=DEVICE), rtol=1e-5, atol=1e-6)


def test_lists_hide_blocks_that_the_mask_mod_shows() -> None:
    spec, x, *_ = make("block mask, bias", torch.float32)
    counts, indices, full_counts, *rest = x.block_mask
    hidden = torch.arange(counts.shape[-1], device=DEVICE) == 0  # the first block of queries sees full blocks alone
    x = x._replace(block_mask=[counts.masked_fill(hidden, 0), indices, full_counts, *rest])
    lse = reference_attention(spec, x)[1].float()
    triton, eager = (statistics(spec, request, x, lse, Wanted(ROWS, False, False, False)) for request in ("triton", "eager"))
    assert triton.row_weights[:, :, 1, :16].count_nonzero() == 0
    assert triton.row_weights[:, :, 0, :16].count_nonzero() > 0
    torch.testing.assert_close(triton.row_weights, eager.row_weights, rtol=1e-4, atol=1e-5)


def test_calls_without_kernels() -> None:
    inputs = make_inputs(lengths_q=[3], lengths_kv=[5], device=DEVICE)
    spec, _ = make_call(inputs)
    assert triton_unsupported(spec._replace(page_size=16), "triton") is None
    assert "'eager'" in str(triton_unsupported(spec, "eager"))
    assert "float64" in str(triton_unsupported(spec._replace(dtype=torch.float64), "auto"))


def launched(problem: Problem, capability: int, lse: Tensor) -> Any:
    b, h, skv = problem.batch, problem.num_heads, problem.longest_kv
    outputs = Outputs(lse, lse, torch.zeros(b, h, skv), torch.zeros(b, h, 8, skv))
    with pretended_device(capability, 132), recorded_launches() as launches:
        weight_statistics(problem, lse, outputs, torch.zeros(b, 8, dtype=torch.int32))
    assert len(launches) == 3
    return [request_for(launch, capability) for launch in launches]


@pytest.mark.slow
def test_these_kernels_compile() -> None:
    x = torch.zeros(1, 200, 4, 64, dtype=torch.bfloat16)
    requests = launched(Problem(x, x, x, softmax_scale=0.1, window_right=0), 90, torch.zeros(1, 4, 200))
    for report, kinds in zip(compile_sound(requests), ({"HGMMA"}, {"HGMMA"}, {"HMMA"}), strict=True):
        assert set(report.matrix_instructions) == kinds


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 72), (torch.bfloat16, 256), (torch.bfloat16, 512), (torch.float32, 64)]
)
def test_compiled(dtype: torch.dtype, dim: int, capability: int) -> None:
    x = torch.zeros(1, 200, 4, dim, dtype=dtype)
    problem = Problem(x, x, x, softmax_scale=0.1, softcap=2.0, bias=torch.zeros(1, 4, 200, 200, dtype=dtype), has_sink=True)
    for report in compile_sound(launched(problem, capability, torch.zeros(1, 4, 200))):
        assert report.shared_bytes <= 227 << 10
