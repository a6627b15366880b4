"""The kernel for lists of keys on sm_90, in the emulator: right and race-free. An injected fault must be found."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import Window, attention
from flexattn.bench.emulated import emulated
from flexattn.dispatch import reference, triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton import families
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.kernels_triton.sparse import conditions, gathering, hopper_wide_forward
from flexattn.ops import make_spec
from flexattn.testing import check_close
from tests.sparse.test_attention import call
from tests.support.compiled_kernels import compile_sound
from tests.support.families import recorded_families
from tests.support.gluon_calls import HARMLESS, without_gpu
from tests.support.inject import Fault, assign, drop, kernels_with, move, with_argument
from tests.support.key_lists import draw_lists

BF16 = torch.bfloat16


def long_lists(entries: int, heads: int = 40, dims: tuple[int, int] = (320, 256)) -> dict[str, Any]:
    """Returns a call whose lists have several blocks of keys, in one sequence; the first query's list is empty."""
    generator = torch.Generator().manual_seed(entries)
    q, k = (torch.randn(1, n, h, dims[0], generator=generator).to(BF16) for n, h in ((3, heads), (400, 1)))
    indices, _ = draw_lists((1, 3), 0, 400, entries, repeats=True)
    counts = torch.tensor([[0, entries, entries - 70]], dtype=torch.int32)
    return {"q": 3 * q, "k": k, "v": k[..., : dims[1]], "kv_indices": indices, "kv_index_counts": counts}


def forward(seed: int, given: dict[str, Any], kernels: ModuleType = hopper_wide_forward) -> tuple[Any, Tensor, Tensor]:
    """Returns the emulator's report, out and lse."""
    x, settings = bind_call(**given)
    spec = make_spec(x, settings, None)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    problem = triton_backend.to_problem(spec, x)
    with pretended_device(90, 132):
        assert conditions.wide_unsupported(problem) is None
    with emulated(seed, kernels) as reports:
        kernels.wide_forward(problem, as_bshd(out, spec.q_format), lse)
    [report] = reports.values()
    return report, out, lse


def check(seed: int, given: dict[str, Any]) -> None:
    report, out, lse = forward(seed, given)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    x, settings = bind_call(**given)
    spec = make_spec(x, settings, None)
    exact, eager = reference.reference_attention(spec, x), reference.reference_attention(spec, x, dtype=x.q.dtype)
    check_close("out", out, exact[0], eager[0])
    check_close("lse", lse, exact[1], eager[1])


CASES = [
    ("many heads, packed lengths, counts, sink, latent", (320, 256)),
    ("three heads, packed lengths, counts, sink, softcap, latent", (512, 512)),
]
MORE_CASES = [
    ("three heads, causal, counts, softcap, latent", (320, 256)),
    ("many heads, causal, sink, blocks, latent", (512, 448)),
]


@without_gpu
@pytest.mark.parametrize(("case", "dims"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str)
def test_features(case: str, dims: tuple[int, int]) -> None:
    check(3, call(case, torch.float16 if "three heads" in case else BF16, dims))


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize("dims", [(576, 512), (296, 256), (512, 512), (392, 392)], ids=str)
def test_latent_head_dims(dims: tuple[int, int]) -> None:
    check(5, long_lists(150, 128, dims))


@without_gpu
@pytest.mark.parametrize("dims", [(320, 256), (512, 512)], ids=["two parts", "one part"])
@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(n, marks=pytest.mark.slow if n < 6 else pytest.mark.exhaustive) for n in (0, 1, *range(3, 20)))]
)
def test_schedules(seed: int, dims: tuple[int, int]) -> None:
    check(seed, long_lists(330, dims=dims))


@without_gpu
@pytest.mark.parametrize("dims", [(320, 256), pytest.param((512, 512), marks=pytest.mark.slow)], ids=str)
def test_keys_may_lie_in_pages(dims: tuple[int, int]) -> None:
    given = long_lists(150, dims=dims)
    _, out, lse = forward(3, given)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:25].view(1, 25).int()
    pool = torch.full((40, 16, 1, dims[0]), float("nan"), dtype=BF16)
    pool[table[0].long()] = given["k"].view(25, 16, 1, dims[0])
    paged = {"k": pool, "v": pool[..., : dims[1]], "page_table": table, "max_seqlen_kv": 400}
    report, of_pages, lse_of_pages = forward(
        3, {**given, **paged, "seqused_kv": torch.tensor([400], dtype=torch.int32), "attn_mask_type": "padding"}
    )
    assert not report.bugs, report
    assert torch.equal(of_pages, out)
    assert torch.equal(lse_of_pages, lse)


@without_gpu
def test_a_window_may_end_before_its_diagonal() -> None:
    check(3, {**long_lists(150), "attn_mask_type": "causal_bottom_right", "window_size": Window(300, -20)})


FAULTS: dict[str, tuple[ModuleType, Fault]] = {
    "rows are read before they have come": (hopper_wide_forward, drop("wait_full(ring.full)", within="_left_partition")),
    "rows are announced before they have come": (hopper_wide_forward, drop("async_copy.wait_group()", within="_load_partition")),
    "rows are announced without a fence": (gathering, drop("fence_async_shared()")),
    "a stage is refilled before it is read": (gathering, drop("wait_empty(ring.empty)")),
    "q is read before it has come": (hopper_wide_forward, drop("wait_full(ring.q_full)", within="_right_partition")),
    "weights are read before they are written": (
        hopper_wide_forward,
        drop("mbarrier.wait(exchange.full)", within="_left_partition"),
    ),
    "weights are read without a fence": (hopper_wide_forward, drop("fence_async_shared()")),
    "weights overwrite keys that are read": (
        hopper_wide_forward,
        with_argument("_publish()", 2, "exchange.weights.index(there)", within="_left_partition"),
    ),
    "a stage is released before its product": (
        hopper_wide_forward,
        move("release(ring.empty, own)", before="warpgroup_mma_wait([acc])", within="_left_partition", nth_there=0),
    ),
    "sums are added before they are written": (hopper_wide_forward, drop("mbarrier.wait(exchange.summed)")),
    "the other warpgroup's maximum is lost": (hopper_wide_forward, assign("row_max", "row_max", within="_left_partition", nth=0)),
    "both halves are the left one": (hopper_wide_forward, with_argument("slice(SIDE * HALF)", 0, "0")),
    "the sink counts twice": (hopper_wide_forward, with_argument("first_statistics()", 2, "True", within="_right_partition")),
    "a key that the query does not see counts": (gathering, with_argument("gl.where(is_seen)", 2, "j")),
}


FAST = ("rows are announced without a fence",)


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS])
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    module, fault = FAULTS[name]
    (copy,) = kernels_with((hopper_wide_forward,), module, fault, tmp_path)
    given = long_lists(330) | {"softmax_offset": torch.linspace(-1, 6, 40)}
    given = {**given, "softmax_type": "learnable"}
    _, right_out, right_lse = forward(2, given)
    for seed in (2, 5):
        report, out, lse = forward(seed, given, copy)
        assert report.bugs or not (torch.equal(out, right_out) and torch.equal(lse, right_lse)), f"not found on seed {seed}"


def launches(given: dict[str, Any]) -> list[Launch]:
    with pretended_device(90, 132), recorded_launches() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "policy_of", lambda spec: families.Policy(takes_what_never_ran=True))
        attention(backend="triton", **given)
    return found


ON_A_GPU = [
    (4096, 128, (576, 512), 2048),
    (4096, 128, (512, 512), 2048),
    (2048, 64, (512, 448), 640),
    (2048, 20, (320, 256), 700),
]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "heads", "dims", "entries"), ON_A_GPU)
def test_on_a_gpu(
    length: int, heads: int, dims: tuple[int, int], entries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every run the same bits, and the numbers of the reference for the last queries."""
    monkeypatch.setattr(
        triton_backend, "policy_of", lambda spec: families.Policy(ignores_measurements=True, takes_what_never_ran=True)
    )
    generator = torch.Generator("cuda").manual_seed(entries)
    q, k = (torch.randn(1, length, h, dims[0], generator=generator, device="cuda").to(dtype) for h in (heads, 1))
    v = k[..., : dims[1]]
    last = torch.arange(length, device="cuda")[None, :, None] + 1
    indices = (torch.rand(1, length, entries, generator=generator, device="cuda") * last).int() - (last % 7 == 0).int()
    options = {"kv_indices": indices, "attn_mask_type": "causal_bottom_right", "return_lse": True}
    with recorded_families() as chosen:
        out, lse = attention(q, k, v, backend="triton", **options)
    assert chosen == {"sm_90 sparse latent"}
    for _ in range(3):
        again = attention(q, k, v, backend="triton", **options)
        assert torch.equal(again.out, out)
        assert torch.equal(again.lse, lse)
    options["kv_indices"] = indices[:, -64:]
    budget = attention(q[:, -64:], k, v, backend="eager", **options)
    exact = attention(*(t.double() for t in (q[:, -64:], k, v)), backend="eager", **options)
    check_close("out", out[:, -64:], exact.out, budget.out)
    check_close("lse", lse[..., -64:], exact.lse, budget.lse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dims"),
    [
        ("many heads, causal, counts, sink, latent", (576, 512)),
        ("many heads, packed lengths, counts, softcap, sink, latent", (512, 512)),
    ],
)
def test_kernels_compile_without_spills(case: str, dims: tuple[int, int]) -> None:
    given = {key: t.detach() if isinstance(t, Tensor) else t for key, t in call(case, BF16, dims).items()}
    given["v"] = given["k"][..., : dims[1]]
    [launch] = [launch for launch in launches(given) if launch.kernel.__name__ == "_sparse_fwd_wide_hopper_kernel"]
    [report] = compile_sound([request_for(launch, 90)])
    assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
    assert report.spill_instructions == 0
    assert not report.warnings
