"""flex_attention and create_block_mask with torch's signatures, against torch's own and attention written out in float64."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.dispatch import eager_backend
from flexattn.integrations.flex import create_block_mask, flex_attention

Mod = Callable[..., Tensor]
H, SQ, SKV, D, D_V = 4, 50, 70, 8, 6


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def make(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(h_kv: int = H, b_kv: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((2, H, SQ, D), (b_kv, h_kv, SKV, D), (b_kv, h_kv, SKV, D_V))
    return [make(*size, seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)]


def written_out(
    tensors: list[Tensor], score_mod: Mod | None, mask_mod: Mod | None, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, lse and the largest score of each query."""
    q, k, v = tensors
    batch, heads, sq, _ = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1).expand(batch, -1, -1, -1) for t in (k, v))
    b, h, i, j = (torch.arange(n).view(-1, *(1,) * after) for n, after in ((batch, 3), (heads, 2), (sq, 1), (k.shape[2], 0)))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ v, scores.logsumexp(-1), scores.amax(-1)


def check(score_mod: Mod | None, mask_mod: Mod | None, h_kv: int = H, captured: tuple[Tensor, ...] = (), **named: Any) -> None:
    """Compares out and lse with torch's and with the written-out attention, and all leaves' gradients with the latter's."""
    tensors = qkv(h_kv)
    block_mask = None if mask_mod is None else torchs.create_block_mask(mask_mod, 2, H, SQ, SKV, "cpu", 32)
    out, aux = flex_attention(*tensors, score_mod, block_mask, enable_gqa=h_kv != H, return_aux=AuxRequest(True, True), **named)
    with torch.no_grad():
        theirs = torchs.flex_attention(*(t.detach() for t in tensors), score_mod, block_mask, enable_gqa=h_kv != H, **named)
    want, want_lse, maxima = written_out(tensors, score_mod, mask_mod, named.get("scale"))
    torch.testing.assert_close(out, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.lse, want_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(aux.max_scores, maxima.detach(), rtol=1e-12, atol=1e-12)
    assert not aux.max_scores.requires_grad
    dout, dlse = make(*out.shape, seed=9), make(*aux.lse.shape, seed=10)
    seen = want_lse > -math.inf
    leaves = [*tensors, *captured]
    total, written_total = ((o * dout).sum() + (lse[seen] * dlse[seen]).sum() for o, lse in ((out, aux.lse), (want, want_lse)))
    for a, b in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(written_total, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


SLOPES, TABLE = make(H, seed=3).requires_grad_(), make(H, SQ + SKV, seed=4).requires_grad_()
LENGTHS = torch.tensor([70, 33])
SCORES: dict[str, tuple[Mod | None, tuple[Tensor, ...]]] = {
    "as it is": (None, ()),
    "softcap": (lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), ()),
    "slopes to be learned": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), (SLOPES,)),
    "table to be learned": (lambda s, b, h, i, j: s + TABLE[h, i - j + SKV - 1], (TABLE,)),
    "a mask in the score": (lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")), ()),
}
MASKS: dict[str, Mod | None] = {
    "all": None,
    "causal": causal,
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "window by head": lambda b, h, i, j: (i >= j) & (i - j <= 4 * h),
    "queries without keys": lambda b, h, i, j: (i >= j) & (i > 3),
}


@pytest.mark.sample("score", "mask_mod")
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS.keys())
def test_mods(score: tuple[Mod | None, tuple[Tensor, ...]], mask_mod: Mod | None) -> None:
    score_mod, captured = score
    check(score_mod, mask_mod, captured=captured)


@pytest.mark.parametrize("h_kv", [1, 2])
def test_grouped_heads(h_kv: int) -> None:
    check(None, causal, h_kv)


@pytest.mark.parametrize("scale", [0.0, 0.7, -0.7])
def test_scale(scale: float) -> None:
    check(None, causal, scale=scale)


def test_one_batch_of_keys_for_all_queries() -> None:
    tensors = qkv(b_kv=1)
    mask_mod = MASKS["lengths"]
    mask = create_block_mask(mask_mod, 2, None, SQ, SKV, "cpu", 32)
    out, (want, *_) = flex_attention(*tensors, block_mask=mask), written_out(tensors, None, mask_mod)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    dout = make(*out.shape, seed=9)
    for a, b in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(want, tensors, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="key 1 and value 1; accepted: equal ones, or 1"):
        flex_attention(*tensors)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mask_mod", [m for m in MASKS.values() if m], ids=[n for n, m in MASKS.items() if m])
def test_block_masks_are_torchs(mask_mod: Mod, separate: bool) -> None:
    named: dict[str, Any] = {} if separate else {"separate_full_blocks": False}
    if not separate and "separate_full_blocks" not in inspect.signature(torchs.create_block_mask).parameters:
        pytest.skip(f"torch {torch.__version__} lists full blocks apart in any case")
    both = (create_block_mask, torchs.create_block_mask)
    made, theirs = (create(mask_mod, 2, H, 96, 64, "cpu", (32, 16), **named) for create in both)
    assert made.shape == theirs.shape
    assert made.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert (made.full_kv_num_blocks is None) == (not separate)
    for side in ("kv", "q"):
        for kind in ("", "full_")[: 1 + separate]:
            counts, indices = (getattr(theirs, f"{kind}{side}_{part}") for part in ("num_blocks", "indices"))
            assert torch.equal(getattr(made, f"{kind}{side}_num_blocks"), counts)
            used = torch.arange(indices.shape[-1]) < counts[..., None]
            assert torch.equal(getattr(made, f"{kind}{side}_indices")[used], indices[used])
    # If a block ends early and all its existing scores are visible, it is full here and partial there.
    made, theirs = (create(mask_mod, 2, H, 100, 70, "cpu", (32, 16), **named) for create in both)
    assert torch.equal(made.to_dense(), theirs.to_dense())
    q, k, v = make(2, H, 100, D), make(2, H, 70, D), make(2, H, 70, D)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), torchs.flex_attention(q, k, v, block_mask=theirs))
    torch.testing.assert_close(torchs.flex_attention(q, k, v, block_mask=made), torchs.flex_attention(q, k, v, block_mask=theirs))


def test_block_masks_are_made_on_the_current_device() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert create_block_mask(causal, None, None, 32, 32).kv_indices.device.type == (accelerator.type if accelerator else "cpu")


def test_block_masks_are_made_on_the_cpu_if_torch_knows_gpus_and_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert create_block_mask(causal, None, None, 32, 32).kv_indices.device.type == "cpu"


def test_what_is_returned() -> None:
    tensors = [t.detach() for t in qkv()]
    out = flex_attention(*tensors)
    assert isinstance(out, Tensor)
    with_lse = flex_attention(*tensors, return_lse=True)
    assert type(with_lse) is tuple
    assert torch.equal(with_lse[0], out)
    assert isinstance(with_lse[1], Tensor)
    for request in (AuxRequest(), AuxRequest(lse=True)):
        _, aux = flex_attention(*tensors, return_aux=request)
        assert isinstance(aux, torchs.AuxOutput)
        assert (aux.lse is None) != request.lse
        assert aux.max_scores is None


def test_maxima_are_found_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [t.detach() for t in qkv(2)]
    mask = create_block_mask(causal, None, None, SQ, SKV, "cpu", 32)
    request = AuxRequest(max_scores=True)
    _, whole = flex_attention(*tensors, block_mask=mask, enable_gqa=True, return_aux=request)
    monkeypatch.setattr(eager_backend, "SCORE_BYTES", 3 * H * SKV * 8)
    _, parts = flex_attention(*tensors, block_mask=mask, enable_gqa=True, return_aux=request)
    torch.testing.assert_close(parts.max_scores, whole.max_scores)
    torch.testing.assert_close(parts.max_scores, written_out(tensors, None, causal)[2])
    half = flex_attention(*(t.half() for t in tensors), block_mask=mask, enable_gqa=True, return_aux=request)[1]
    assert half.max_scores.dtype == torch.float32
    torch.testing.assert_close(half.max_scores.double(), whole.max_scores, rtol=4e-3, atol=4e-3)


def test_kernel_options_change_nothing() -> None:
    tensors = [t.detach() for t in qkv()]
    options = {"BLOCK_M": 64, "bwd_BLOCK_N1": 32, "fwd_num_warps": 4, "PRESCALE_QK": True, "BACKEND": "TRITON"}
    assert torch.equal(flex_attention(*tensors, kernel_options=options), flex_attention(*tensors))
    with pytest.raises(ValueError, match="kernel_options has 'FLOAT32_PRECISION'; accepted"):
        flex_attention(*tensors, kernel_options={"FLOAT32_PRECISION": "'ieee'"})


def test_half_precision() -> None:
    tensors = [t.detach().half() for t in qkv()]
    mask = create_block_mask(causal, None, None, SQ, SKV, "cpu", 32)
    out = flex_attention(*tensors, block_mask=mask)
    assert out.dtype == torch.float16
    want, *_ = written_out([t.double() for t in tensors], None, causal)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    tensors = qkv(2, dtype=torch.float32)
    mask, slopes = create_block_mask(causal, None, None, SQ, SKV, "cpu", 32), make(H, dtype=torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        request = AuxRequest(lse=True, max_scores=True)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (i - j), mask, enable_gqa=True, return_aux=request)

    out, aux = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors, slopes)
    want, want_aux = run(*tensors, slopes)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, want_aux.lse)
    torch.testing.assert_close(aux.max_scores, want_aux.max_scores)


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_signatures_begin_as_the_installed_torchs(name: str) -> None:
    ours = inspect.signature(flex_attention if name == "flex_attention" else create_block_mask).parameters
    theirs = inspect.signature(getattr(torchs, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {n: (p.default, p.kind) for n, p in theirs.items()} == {n: (ours[n].default, ours[n].kind) for n in theirs}


def sliced() -> BlockMask:
    return torchs.create_block_mask(causal, 2, None, SQ, SKV, "cpu", 32)[0:1]


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "grouped heads": (lambda q, k, v: flex_attention(q, k[:, :2], v[:, :2]), ValueError, "enable_gqa=True"),
    "three dims": (lambda q, k, v: flex_attention(q[0], k, v), ValueError, "query is .*accepted: a dense tensor"),
    "nested": (
        lambda q, k, v: flex_attention(q, torch.nested.nested_tensor(list(k), layout=torch.jagged), v),
        ValueError,
        "key is a nested tensor",
    ),
    "both returns": (
        lambda q, k, v: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True)),
        ValueError,
        "return_lse is True and return_aux is set",
    ),
    "a mask of other lengths": (
        lambda q, k, v: flex_attention(q[:, :, :32], k, v, block_mask=create_block_mask(causal, None, None, SQ, SKV, "cpu", 32)),
        ValueError,
        "for 50 queries and 70 keys but the call has 32 and 70",
    ),
    "a sliced mask": (lambda q, k, v: flex_attention(q, k, v, block_mask=sliced()), ValueError, "sliced BlockMask"),
    "no mask": (lambda q, k, v: flex_attention(q, k, v, block_mask=causal), TypeError, "block_mask is a function"),
    "write order": (
        lambda *_: create_block_mask(causal, None, None, 32, 32, "cpu", compute_dq_write_order=True),
        NotImplementedError,
        "compute_dq_write_order is True",
    ),
    "an odd block": (lambda *_: create_block_mask(causal, None, None, 32, 32, "cpu", 20), ValueError, "20"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[Callable[..., Any], type[Exception], str]) -> None:
    call, error, text = case
    with pytest.raises(error, match=text):
        call(*(t.detach() for t in qkv()))


def test_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flex_attention.md").read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {"__name__": "page"})
