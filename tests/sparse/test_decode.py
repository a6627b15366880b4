"""Decoding by lists of keys: caches in FP8, keys split over programs, and rows of latents in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.sparse import forward as sparse
from flexattn.kernels_triton.sparse.tiles import forward_tile
from flexattn.ops import spec_to_run
from flexattn.testing import check_close
from tests.sparse.test_attention import DEVICE, call
from tests.support.compiled_kernels import compile_sound
from tests.support.fp8_caches import exact, make_case
from tests.support.key_lists import draw_lists

BF16 = torch.bfloat16


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in arguments.items()}


@pytest.mark.parametrize(
    ("scales", "page_size", "fp8"),
    [
        ("token and head", 4, torch.float8_e4m3fn),
        ("head", 4, torch.float8_e4m3fn),
        ("sequence and head", 0, torch.float8_e5m2),
        pytest.param("token and head", 0, torch.float8_e4m3fn, marks=pytest.mark.slow),
        pytest.param("none", 4, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
def test_caches_in_fp8(scales: str, page_size: int, fp8: torch.dtype) -> None:
    indices, counts = draw_lists((3, 2), 2, 40, 24)
    lists = {"kv_indices": indices, "kv_index_counts": counts}
    case = make_case(BF16, fp8, page_size=page_size, scales=scales, queries=2, dims=(32, 48), lengths=(40, 0, 23), **lists)
    out, lse = attention(**on_device(case.arguments), backend="triton", return_lse=True)
    case = case._replace(dense=on_device(case.dense))
    wanted, budget = exact(case, torch.float64), exact(case, BF16)
    check_close("out", out, wanted[0], budget[0])
    check_close("lse", lse, wanted[1], budget[1])


def split(given: dict[str, Any], splits: int) -> tuple[Tensor, Tensor]:
    """Returns out and lse of the kernels with this number of splits."""
    x, settings = bind_call(**given)
    spec = spec_to_run(x, settings)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    problem = triton_backend.to_problem(spec, x)
    sparse.sparse_forward(problem, as_bshd(out, spec.q_format), lse, forward_tile(problem), splits)
    return out, lse


@pytest.mark.parametrize("splits", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["many heads, packed lengths, counts, sink", "three heads, causal, sink, softcap, blocks"])
def test_splits_of_a_list(case: str, splits: int) -> None:
    given = {name: t.detach() if isinstance(t, Tensor) else t for name, t in call(case, BF16, (48, 40)).items()}
    out, lse = split(given, splits)
    whole = attention(**{**given, "backend": "eager"}, return_lse=True)
    precise = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in given.items()}
    wanted = attention(**{**precise, "backend": "eager"}, return_lse=True)
    check_close("out", out, wanted.out, whole.out)
    check_close("lse", lse, wanted.lse, whole.lse)


def test_few_queries_split_their_lists() -> None:
    given = call("many heads, causal", BF16)
    x, settings = bind_call(**given)
    problem = triton_backend.to_problem(spec_to_run(x, settings), x)
    assert sparse.num_splits(problem, forward_tile(problem)).count >= 1
    assert "programs" in sparse.num_splits(problem, forward_tile(problem)).why


def latents(page_size: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Returns a call over rows of latents, dense keys for the same call, and the numbers of keys of two sequences."""
    generator = torch.Generator().manual_seed(1)
    lengths, longest = torch.tensor([37, 12], dtype=torch.int32), 40
    q = torch.randn(2, 2, 5, 576, generator=generator).to(BF16)
    k = torch.randn(2, longest, 1, 576, generator=generator) * torch.rand(2, longest, 1, 1, generator=generator).exp()
    indices, counts = draw_lists((2, 2), 0, longest, 24)
    given = {
        "kv_indices": indices,
        "kv_index_counts": counts,
        "attn_mask_type": "padding_causal_bottom_right",
        "softmax_scale": 0.07,
    }
    given |= {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 1, 5), "q": q, "return_lse": True}
    if page_size:
        table = torch.randperm(2 * longest // page_size, generator=generator).view(2, -1).int()
        given |= {"page_table": table, "max_seqlen_kv": longest}
        rows = torch.full((2 * longest // page_size, page_size, 1, 656), 255, dtype=torch.uint8)
    else:
        rows = torch.full((2, longest, 1, 656), 255, dtype=torch.uint8)
    first = lengths - torch.tensor([30, 5])
    given, rows, k, lengths, first = on_device(given), *(t.to(DEVICE) for t in (rows, k, lengths, first))
    arguments = {"page_table": given["page_table"]} if page_size else {}
    new = [t[i, :n] for i, t, n in ((0, k, 37), (1, k, 12))]
    parts = (
        [first_part[: int(n)] for first_part, n in zip(new, first, strict=True)],
        [t[int(n) :] for t, n in zip(new, first, strict=True)],
    )
    for part, used in zip(parts, (torch.zeros_like(first.int()), first.int()), strict=True):
        bounds = torch.tensor([0, *(len(t) for t in part)], device=DEVICE).cumsum(0).int()
        flexattn.append_latents(rows, torch.cat(part), seqused_kv=used, cu_seqlens_q=bounds, qkv_format="thd_2bshd", **arguments)
    return {**given, "rows": rows, "seqused_kv": lengths}, flexattn.unpack_latents(flexattn.pack_latents(k)), lengths


@pytest.mark.parametrize("page_size", [8, 0])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_rows_of_latents(backend: str, page_size: int) -> None:
    given, k, _ = latents(page_size)
    out, lse = flexattn.latent_attention(**given, backend=backend)
    options = {name: value for name, value in given.items() if name not in ("rows", "page_table", "max_seqlen_kv", "q")}
    budget = attention(given["q"], k, k[..., :512], backend="eager", **options)
    precise = {**options, "softmax_offset": options["softmax_offset"].double()}
    wanted = attention(given["q"].double(), k.double(), k[..., :512].double(), backend="eager", **precise)
    check_close("out", out, wanted.out, budget.out)
    check_close("lse", lse, wanted.lse, budget.lse)


def test_rows_keep_numbers_of_their_format() -> None:
    x = torch.randn(3, 2, 576, generator=torch.Generator().manual_seed(0))
    x[0, 0, :512] = 0.0
    rows = flexattn.pack_latents(x)
    assert rows.shape == (3, 2, 656)
    back = flexattn.unpack_latents(rows, torch.float32)
    assert torch.equal(flexattn.pack_latents(back), rows)
    assert torch.equal(back[..., 512:], x[..., 512:].to(BF16).float())
    largest = x[..., :512].unflatten(-1, (4, 128)).abs().amax(-1)
    error = (back - x)[..., :512].unflatten(-1, (4, 128)).abs().amax(-1)
    assert bool((error <= largest * 2.0**-4).all())


def test_what_rows_of_latents_refuse() -> None:
    given, k, _ = latents(0)
    for change, message in (
        ({"rows": k}, "rows"),
        ({"rows": given["rows"][..., :640]}, "656 bytes"),
        ({"q": given["q"].float()}, "q"),
        ({"q": given["q"].clone().requires_grad_()}, "requires a gradient"),
        ({"softmax_offset": given["softmax_offset"].clone().requires_grad_()}, "requires a gradient"),
        ({"return_max_logit": True}, "return_max_logit is given"),
        ({"return_aux": flexattn.AuxRequest(lse=True)}, "return_aux is given"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            flexattn.latent_attention(**{**given, **change})
    with pytest.raises(ValueError, match="576"):
        flexattn.pack_latents(k[..., :512])


def test_latents_take_the_backend_of_the_context() -> None:
    given, _, _ = latents(0)
    with flexattn.attention_backend("cudnn"), pytest.raises(flexattn.BackendError, match="backend='cudnn' cannot run"):
        flexattn.latent_attention(**given)
    found = flexattn.latent_attention(**given, backend=None)
    assert all(torch.equal(a, b) for a, b in zip(found, flexattn.latent_attention(**given), strict=True))


def test_no_latents() -> None:
    rows = flexattn.pack_latents(torch.zeros(0, 1, 576))
    assert rows.shape == (0, 1, 656)
    assert flexattn.unpack_latents(rows).shape == (0, 1, 576)


@pytest.mark.slow
def test_kernels_over_fp8_compile_for_sm_90() -> None:
    sm = 90
    with pretended_device(sm, 132), recorded_launches() as launches:
        given, _, _ = latents(8)
        flexattn.latent_attention(
            **{**given, "q": given["q"].repeat(1, 1, 25, 1), "softmax_offset": torch.zeros(125, device=DEVICE)}, backend="triton"
        )
        indices, _ = draw_lists((3, 2), 2, 40, 300, repeats=True)
        case = make_case(BF16, torch.float8_e4m3fn, page_size=4, scales="token and head", queries=2, lengths=(40, 0, 23))
        attention(**on_device(case.arguments), kv_indices=indices.to(DEVICE), backend="triton")
    found = [launch for launch in launches if launch.kernel.__name__ == "_sparse_fwd_kernel"]
    assert len(found) == 2
    for report in compile_sound([request_for(launch, sm) for launch in found]):
        assert report.matrix_instructions
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]
        assert report.spill_instructions == 0
