"""The error budget must fail if a result is wrong, and the inputs must have the promised values."""

from __future__ import annotations

import pytest
import torch

from flexattn.dispatch.spec import FORMATS
from flexattn.testing import check_close, make_dlse, make_dout, make_inputs

EPS = torch.finfo(torch.float32).eps


def test_check_close_accepts_errors_within_the_budget() -> None:
    ref = torch.ones(8, dtype=torch.float64)
    check_close("x", ref.float() + 1.9e-3, ref, ref.float() + 1e-3)
    check_close("x", ref.float() + 4 * EPS, ref, ref.float())  # eager happens to be exact
    check_close("x", torch.tensor([float("-inf"), 1.0]), *(torch.tensor([float("-inf"), 1.0], dtype=torch.float64),) * 2)
    check_close("x", torch.zeros(0), torch.zeros(0), torch.zeros(0))
    check_close("x", ref.float() + 30 * EPS, ref, ref.float(), largest_score=30)


@pytest.mark.parametrize("wrong", [1.01, float("nan"), float("inf"), float("-inf")])
def test_check_close_names_the_worst_element(wrong: float) -> None:
    ref = torch.ones(2, 3, dtype=torch.float64)
    got = ref.float()
    got[1, 2] = wrong
    with pytest.raises(AssertionError, match=r"dq: max error .*\n  \[1, 2\]: got "):
        check_close("dq", got, ref, ref.float() + 1e-3)


def test_check_close_sees_small_errors_everywhere() -> None:
    ref = torch.ones(1000, dtype=torch.float64)
    eager = ref.clone()
    eager[0] += 1e-3  # the same largest error, but in one place
    with pytest.raises(AssertionError, match="rms error"):
        check_close("x", ref + 1e-3, ref, eager)


def test_check_close_refuses_a_budget_that_is_not_finite() -> None:
    ref = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="no budget"):
        check_close("x", ref, ref, ref * float("nan"))
    with pytest.raises(AssertionError, match="shape"):
        check_close("x", ref[:1], ref, ref)


@pytest.mark.parametrize("qkv_format", FORMATS)
@pytest.mark.parametrize("strided", [False, True])
def test_inputs(qkv_format: str, strided: bool) -> None:
    lengths_q, lengths_kv, gap = [3, 0, 5], [2, 7, 0], 2
    inputs = make_inputs(qkv_format, lengths_q=lengths_q, lengths_kv=lengths_kv, padding=True, gap=gap, strided=strided)
    sizes = {"b": 3, "s": 5 + gap, "h": 4, "d": 16, "t": sum(lengths_q) + 3 * gap}
    assert inputs.q.shape == tuple(sizes[dim] for dim in qkv_format)
    assert inputs.q.is_contiguous() != strided
    assert inputs.q.stride(-1) == 1
    for t, lengths, heads in ((inputs.q, lengths_q, 4), (inputs.k, lengths_kv, 2), (inputs.v, lengths_kv, 2)):
        assert int((~t.isnan()).sum()) == sum(lengths) * heads * 16
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 3, 8]
    if qkv_format == "thd":
        assert inputs.cu_seqlens_q_padded is not None
        assert inputs.cu_seqlens_q_padded.tolist() == [0, 5, 7, 14]
        assert inputs.max_seqlen_kv == 7
        assert bool((~inputs.q[5:14, 0, 0].isnan()).nonzero().flatten().equal(torch.arange(2, 7)))
    else:
        assert inputs.cu_seqlens_q_padded is None
        assert inputs.max_seqlen_kv is None
    assert make_dout(inputs).isnan().equal(inputs.q.isnan())
    assert int((~make_dlse(inputs).isnan()).sum()) == sum(lengths_q) * 4


def test_outliers_and_seeds() -> None:
    plain, outliers = (make_inputs(lengths_q=[200], outliers=outliers).q for outliers in (False, True))
    assert plain.abs().max() < 8
    assert outliers.abs().max() > 16
    assert not plain.equal(make_inputs(lengths_q=[200], seed=1).q)


def test_unequal_lengths_need_padding() -> None:
    with pytest.raises(ValueError, match="padding=True"):
        make_inputs("bshd", lengths_q=[3, 4])
