"""cuDNN's forward over pages of keys, which are gathered: the launchers around an emulated cuDNN, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

from flexattn.dispatch import cudnn_backend, replay, select, triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.functional import bind_call
from flexattn.kernels_cudnn import attention as launchers
from flexattn.kernels_cudnn import plans as plans_module
from flexattn.ops import make_spec
from flexattn.testing import check_close, reference_attention
from tests.api.test_support import on_h200
from tests.support import cudnn_emulator
from tests.support.pages import LAYOUTS, make_pool

HEADS, HEADS_KV, DIM, DIM_V = 8, 2, 32, 16
LENGTHS = (300, 0, 1, 129, 16)
COUNTS = (3, 2, 0, 9, 1)  # of queries
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"attn_mask_type": "padding"},
    "causal": {},
    "top left": {"attn_mask_type": "padding_causal"},
    "window": {"window_size": (50, 0)},
    "sink": {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 2, HEADS)},
    "max_logit": {"return_max_logit": True},
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[cudnn_emulator.EmulatedPlans]:
    """cuDNN in plain torch."""
    plans = cudnn_emulator.EmulatedPlans()
    monkeypatch.setattr(launchers, "execute", cudnn_emulator.execute)
    monkeypatch.setattr(launchers, "PLANS", plans)
    monkeypatch.setattr(plans_module, "PLANS", plans)
    monkeypatch.setattr(launchers, "_reads_ragged_padding", lambda: True)
    forget()
    yield plans
    forget()


def forget() -> None:
    cudnn_backend.exact_shapes.clear()
    cudnn_backend.prepared_calls.clear()


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def arguments(page_size: int = 16, layout: str = "bshd", packed: bool = False, **call: Any) -> dict[str, Any]:
    """A call over pages with garbage in unused entries and NaN in unused rows and queries."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(len(LENGTHS), max(LENGTHS), HEADS_KV, DIM, generator=generator).bfloat16()
    v = torch.randn(len(LENGTHS), max(LENGTHS), HEADS_KV, DIM_V, generator=generator).bfloat16()
    pool = make_pool(k, v, LENGTHS, page_size, layout)
    q = torch.randn(sum(COUNTS), HEADS, DIM, generator=generator).bfloat16()
    given: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "page_table": pool.page_table, **call}
    given |= {"k": pool.k, "v": pool.v, "seqused_kv": pool.seqused}
    if packed:
        starts = torch.tensor([0, *COUNTS]).cumsum(0).int()
        return {"q": q, "qkv_format": f"thd_2{pool.fmt}", "cu_seqlens_q": starts, "max_seqlen_q": max(COUNTS), **given}
    rows = torch.full((len(COUNTS), max(COUNTS), HEADS, DIM), float("nan")).bfloat16()
    for b, part in enumerate(q.split(COUNTS)):
        rows[b, : COUNTS[b]] = part
    if pool.fmt == "bhsd":
        rows = rows.transpose(1, 2).contiguous()
    return {"q": rows, "qkv_format": pool.fmt, "seqused_q": int32(*COUNTS), **given}


def call_of(**given: Any) -> tuple[AttentionSpec, Operands]:
    x, settings = bind_call(**given, return_lse=True)
    spec = on_h200(make_spec(x, settings, None), x)
    return spec._replace(return_max_logit="return_max_logit" in given), x


def check(spec: AttentionSpec, x: Operands, emulated: cudnn_emulator.EmulatedPlans) -> None:
    assert cudnn_backend.rule_error(spec, "forward") is None
    cudnn_backend.prepare(spec, x, "forward")
    found = cudnn_backend.forward(spec, x)
    exact, same = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, got, want, budget in zip(("out", "lse", "max_logit"), found, exact, same, strict=False):
        if name != "max_logit" or spec.return_max_logit:
            check_close(name, got, want, budget)
    assert emulated.asked[-2] == emulated.asked[-1], "the plan that is asked for ahead is not the one that runs"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "thd"])
@pytest.mark.parametrize("name", CALLS)
def test_features(name: str, packed: bool, emulated: cudnn_emulator.EmulatedPlans) -> None:
    check(*call_of(**arguments(packed=packed, **CALLS[name])), emulated)


@pytest.mark.sample("packed", "layout", "page_size")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "thd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 8, 64, 256])
def test_pages_and_layouts(page_size: int, layout: str, packed: bool, emulated: cudnn_emulator.EmulatedPlans) -> None:
    check(*call_of(**arguments(page_size, layout, packed)), emulated)


def test_one_query_each(emulated: cudnn_emulator.EmulatedPlans) -> None:
    given = arguments()
    given |= {"q": given["q"][:, :1].nan_to_num(1.0)}
    del given["seqused_q"]
    check(*call_of(**given), emulated)


@pytest.mark.parametrize("most", [290, 300, 303])
def test_lengths_beyond_max_seqlen_are_cut(most: int, emulated: cudnn_emulator.EmulatedPlans) -> None:
    given = arguments(max_seqlen_kv=most)
    check(*call_of(**(given | {"seqused_kv": given["seqused_kv"].clamp(max=most)})), emulated)


def test_values_out_of_range_read_nothing_outside(emulated: cudnn_emulator.EmulatedPlans) -> None:
    """Invalid ids and lengths: each id becomes the nearest page's, and each length is limited to the table."""
    given = arguments(max_seqlen_kv=304)
    given["k"], given["v"] = (given[name].nan_to_num(0.5) for name in ("k", "v"))
    pages = given["k"].shape[0]
    table = given["page_table"].clone()
    table[0, :3] = int32(2147480000, -2147480000, pages)
    lengths = int32(2147483647, -5, 1, 129, 16)
    spec, x = call_of(**(given | {"page_table": table, "seqused_kv": lengths}))
    out, lse, _ = cudnn_backend.forward(spec, x)
    right = call_of(**(given | {"page_table": table.clamp(0, pages - 1), "seqused_kv": lengths.clamp(0, 304)}))
    for got, want in zip((out, lse), cudnn_backend.forward(*right), strict=False):
        assert torch.equal(got, want)
    assert not out[:1, : COUNTS[0]].isnan().any()


def test_pools_off_16_bytes(emulated: cudnn_emulator.EmulatedPlans) -> None:
    given = arguments()
    k = given["k"]
    wide = torch.empty(*k.shape[:-1], DIM + 4, dtype=k.dtype)[..., 2 : DIM + 2]
    check(*call_of(**(given | {"k": wide.copy_(k)})), emulated)


def test_plans_are_shared_beyond_some_shapes(emulated: cudnn_emulator.EmulatedPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for rounded-up sizes: extra sequences and columns have no keys, and their pages exist."""
    monkeypatch.setattr(cudnn_backend, "EXACT_SHAPES", 0)
    spec, x = call_of(**arguments(max_seqlen_kv=300))
    check(spec, x, emulated)
    assert (emulated.asked[-1].batch, emulated.asked[-1].len_kv) == (8, 384)


@pytest.mark.parametrize("changed", ["max_seqlen_kv", "pool"])
def test_a_new_bound_and_a_new_pool_are_new_shapes(
    changed: str, emulated: cudnn_emulator.EmulatedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_backend, "EXACT_SHAPES", 1)
    check(*call_of(**arguments(max_seqlen_kv=304)), emulated)
    assert emulated.asked[-1].len_kv == 304
    spec, x = call_of(**arguments(max_seqlen_kv=303 if changed == "max_seqlen_kv" else 304))
    if changed == "pool":
        x = x._replace(k=torch.cat((x.k, x.k)), v=torch.cat((x.v, x.v)))
    check(spec, x, emulated)
    assert emulated.asked[-1].len_kv == 384


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "thd"])
def test_a_recording_follows_tables_and_lengths(
    packed: bool, emulated: cudnn_emulator.EmulatedPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is recorded once, as for a CUDA graph; later calls have other pages, and garbage in other places."""
    from flexattn.kernels_cudnn import execute

    def run(plan: Any, buffers: dict[int, Tensor], device: torch.device) -> None:
        with _disable_current_modes():  # cuDNN does not run through torch's dispatcher
            cudnn_emulator.execute(plan, buffers, device)

    def watched_run(plan: Any, buffers: dict[int, Tensor], device: torch.device) -> None:
        run(plan, buffers, device)
        watcher = getattr(execute._watchers, "current", None)
        if watcher is not None:
            watcher(plan, buffers)

    monkeypatch.setattr(launchers, "execute", watched_run)
    monkeypatch.setattr(execute, "execute", run)
    given = arguments(packed=packed, max_seqlen_kv=304)
    given["k"], given["v"] = (given[name].nan_to_num(0.5) for name in ("k", "v"))
    spec, x = call_of(**given)
    table = x.page_table.roll(1, 0).clone()
    table[2, 5:] = 2147480000
    other = x._replace(page_table=table, seqused_kv=int32(17, 300, 0, 2147483647, -1), k=x.k.flip(0), q=x.q.roll(1, 0))

    def flat(x: Operands) -> list[Tensor | None]:
        return [*x[: Operands._fields.index("max_seqlen_q")], *x.mod_tensors]

    _, made = replay.record(cudnn_backend, lambda: cudnn_backend.forward(spec, x), flat(x), lambda r: r, torch.device("cpu"))
    assert made is not None
    inputs = flat(other)
    found = made.replay(inputs, [0 if t is None else t.data_ptr() for t in inputs])
    for got, want in zip(found, cudnn_backend.forward(spec, other), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_auto_falls_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "unsupported", lambda *_: "not today")
    monkeypatch.setattr(cudnn_backend, "device_error", lambda *_: None)
    monkeypatch.setattr(cudnn_backend, "_version", lambda: 91900)  # the library may not be there
    spec, _ = call_of(**arguments())
    select.select.cache_clear()
    try:
        decision = select.select(spec, "forward", "auto")
    finally:
        select.select.cache_clear()
    assert decision.backend == "cudnn"
    assert "not run over pages yet" in str(cudnn_backend.not_run_yet(spec))
    assert cudnn_backend.not_run_yet(spec._replace(page_size=0)) is None
    assert ("triton", "not today") in decision.rejected


def test_a_bias_over_pages(emulated: cudnn_emulator.EmulatedPlans) -> None:
    bias = torch.randn(1, HEADS, max(COUNTS), 304, generator=torch.Generator().manual_seed(7)).bfloat16()
    call = {"attn_mask_type": "padding", "bias_type": "post_scale_bias", "bias": bias, "max_seqlen_kv": 304}
    check(*call_of(**arguments(**call)), emulated)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "page size": ({"page_size": 48}, "page sizes that are a power of two, not 48"),
    "mods": ({"score_mod": lambda s, b, h, i, j: s * 0.5}, "score_mod and mask_mod over pages"),
    "dropout": ({"dropout_p": 0.25, "rng_state": torch.zeros(2, dtype=torch.int64)}, "dropout over pages"),
    "softcap": ({"softcap": 3.0}, "no softcap"),
    "batch invariance": ({"batch_invariant": True}, "leave out batch_invariant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, reason = REFUSED[name]
    spec, _ = call_of(**arguments(**call))
    assert reason in str(cudnn_backend.rule_error(spec, "forward"))
    assert cudnn_backend.rule_error(call_of(**arguments())[0], "forward") is None


def test_keys_in_fp8_are_refused() -> None:
    given = arguments()
    k, v = (given[name].to(torch.float8_e4m3fn) for name in ("k", "v"))
    spec, _ = call_of(**(given | {"k": k, "v": v}))
    assert "only one dtype for q, k and v" in str(cudnn_backend.rule_error(spec, "forward"))
