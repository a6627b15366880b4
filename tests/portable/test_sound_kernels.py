"""Kernels of calls drawn at random, at all head dims, compiled for sm_90: their code reads no unwritten register."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from flexattn import attention
from flexattn.kernels_triton.ahead_of_time import build
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, CompileRequest, request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import DKDV, FORWARD, split_head_dim
from flexattn.kernels_triton.runtime import store
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.runtime.sass_registers import check_code
from tests.fuzz.calls import Call
from tests.fuzz.check import CALLS, ON_GPU, config_of
from tests.fuzz.config import FEATURES, HALF, Where, draw_config
from tests.fuzz.modes import attend
from tests.support.compiled_kernels import compile_beside, compile_sound
from tests.support.fp8_caches import SCALES, make_case

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DIMS = range(8, 257, 8)
# Head dims in two parts, whose kernels have more descriptors; above 256 the tiles with a bias or dropout have one stage.
IN_PARTS = tuple(dim for dim in range(8, 513, 8) if split_head_dim(dim)[1])


def by_head(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * (1.0 + 0.1 * h) - 0.01 * (i - j).abs()


def hides(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + h + b) % 3 != 0


def groups(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i // 33 == j // 33) | (h == 1)


def launched(run: Callable[[], Any], hopper: str, monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """Returns the kernels that a call launches on sm_90. hopper: FLEXATTN_HOPPER."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    with pretended_device(90, 132), recorded_launches() as launches:
        run()
    requests = [request_for(launch, 90) for launch in launches]
    return [request for request in requests if ".common." not in request.module]  # they multiply no tiles


def each_once(requests: list[CompileRequest]) -> list[CompileRequest]:
    return list({repr(request): request for request in requests}.values())


def call_over_fp8(dim: int, seed: int) -> tuple[dict[str, Any], str]:
    """Returns the arguments of a call over an FP8 cache, with features drawn at random, and FLEXATTN_HOPPER."""
    rng = Random(1000 * seed + dim)
    heads = rng.choice([(8, 1), (8, 2), (8, 8), (6, 2)])
    queries: Any = rng.choice([1, 1, 2, 4, 8, 40, 150, (1, 3, 2, 0)])
    more: dict[str, Any] = {"return_max_logit": rng.random() < 0.2}
    if rng.random() < 0.4:
        more["window_size"] = (rng.choice([5, 64, 200]), 0)
    if rng.random() < 0.3:
        more["softcap"] = 5.0
    if rng.random() < 0.3:
        more |= {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 1, heads[0])}
    if rng.random() < 0.3:
        bias = torch.zeros(1, heads[0], 1, 300)
        more |= rng.choice([{"bias_type": "alibi"}, {"bias_type": "post_scale_bias", "bias": bias}])
    if rng.random() < 0.3:
        more |= rng.choice([{"score_mod": by_head}, {"mask_mod": hides}])
    if rng.random() < 0.15:
        more |= {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])}
    case = make_case(
        rng.choice(HALF),
        rng.choice(FP8),
        page_size=rng.choice([0, 1, 3, 16, 64, 256]),
        scales=rng.choice(SCALES),
        queries=queries,
        heads=heads,
        dims=(dim, rng.choice([dim, dim, rng.choice(DIMS)])),
        **more,
    )
    return case.arguments, rng.choice(["never", "never", "auto"])


def over_fp8(arguments: dict[str, Any], hopper: str, monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    return launched(lambda: attention(**arguments, backend="triton"), hopper, monkeypatch)


@pytest.mark.parametrize("dim", [40, 96])
def test_two_fp8_caches(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls, whose kernels ptxas 12.8 miscompiles if head dims have two parts."""
    case = make_case(torch.float16, page_size=0, scales="none", dims=(dim, dim))
    compile_sound(over_fp8(case.arguments, "never", monkeypatch))


@pytest.mark.slow
def test_a_kernel_that_ptxas_miscompiles_with_one_stage_gets_another(
    monkeypatch: pytest.MonkeyPatch, forked_python: Any, tmp_path: Path
) -> None:
    """ptxas 12.8 makes code of this forward that reads UR50, which nothing wrote."""
    q, k, v = (torch.zeros(*sizes, dtype=HALF[0]) for sizes in ((3, 150, 4, 152), (16, 2, 152), (16, 2, 368)))
    monkeypatch.setenv("FLEXATTN_HOPPER", "auto")
    with pretended_device(90, 132), recorded_launches() as launches:
        attention(
            q,
            k,
            v,
            qkv_format="bshd_2thd",
            attn_mask_type="padding",
            cu_seqlens_q=torch.tensor([0, 118, 268, 275], dtype=torch.int32),
            cu_seqlens_kv=torch.tensor([0, 1, 2, 7], dtype=torch.int32),
            cu_seqlens_kv_padded=torch.tensor([4, 0, 6, 13], dtype=torch.int32),
            max_seqlen_kv=8,
            bias_type="pre_scale_bias",
            bias=torch.zeros(3, 4, 1, 8, dtype=HALF[0]),
            softmax_type="off-by-one",
            mask_mod=groups,
            return_lse=True,
            backend="triton",
        )
    [launch] = [launch for launch in launches if launch.kernel.__name__ == "_attn_fwd_kernel"]
    request, job = dataclasses.replace(request_for(launch, 90), num_stages=1), tmp_path / "job"
    [report] = compile_beside([request])
    assert "UR50" in report.undefined_registers or not triton.knobs.nvidia.ptxas.version.startswith("12.8")
    job.write_bytes(pickle.dumps((1, [(request, "forward")], tmp_path)))
    done = forked_python("-m", build.__name__, str(job))
    binary = store.find(tmp_path, "forward")
    assert binary is not None, done.stdout + done.stderr
    check_code(binary.name, "wgmma", binary.code)


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("6501014000010.0", "_attn_fwd_kernel"), ("6501002000042.0", "_attn_bwd_dq_kernel")],
    ids=["code", "memory"],
)
def test_a_call_of_the_fuzz_gets_a_kernel_that_can_run(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch, forked_python: Any, tmp_path: Path
) -> None:
    """ptxas 12.8 miscompiles the first with each number of stages. The second needs 233,472 bytes of shared memory with two."""
    config = config_of(ON_GPU, name)
    config = config._replace(where=config.where._replace(device="cpu"))
    call = Call(config, int(name.split(".")[0]) * CALLS)
    requests = launched(lambda: attend(call), config.hopper, monkeypatch)
    [request] = {request.kernel: request for request in requests if request.kernel == kernel}.values()
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((1, [(request, kernel)], tmp_path)))
    done = forked_python("-m", build.__name__, str(job))
    binary = store.find(tmp_path, kernel)
    assert binary is not None, done.stdout + done.stderr
    check_code(binary.name, "wgmma", binary.code)
    assert binary.shared <= SHARED_MEMORY_LIMIT[90]


@pytest.mark.slow
def test_dropout_at_wide_head_dims_has_no_descriptor_made_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.8 makes one with a single stage: the product then reads memory that is out of bounds."""
    q, k, v = (torch.zeros(2, 40, 2, dim, dtype=HALF[0]) for dim in (288, 288, 368))
    state = torch.tensor([1, 2])
    call = {"qkv_format": "bshd", "dropout_p": 0.1, "rng_state": state, "bias_type": "alibi", "backend": "triton"}
    [request] = launched(lambda: attention(q, k, v, **call), "never", monkeypatch)
    with_one, as_it_is = compile_beside([dataclasses.replace(request, num_stages=1), request])
    assert as_it_is.undefined_registers == ()
    is_affected = triton.knobs.nvidia.ptxas.version.startswith("12.8")
    assert any(name.startswith("gdesc") for name in with_one.undefined_registers) == is_affected


def test_no_forward_of_sm_90_has_one_stage() -> None:
    """Head dims are in two parts at any sum of them."""
    rows = [row for size in (1, 2) for row in FORWARD[90, size]]
    assert min(tile.num_stages for row in rows for tile in (row.tile, row.loaded, row.open, row.short) if tile) > 1


@pytest.mark.parametrize("dim", DIMS)
def test_head_dims_over_an_fp8_cache_are_in_one_part(dim: int) -> None:
    q, k = torch.zeros(1, 1, 2, dim, dtype=torch.float16), torch.zeros(1, 9, 2, dim, dtype=FP8[0])
    problem = Problem(q, k, k, softmax_scale=1.0, descales_kv=(torch.ones(()).expand(1, 2, 1),) * 2)
    meta = problem.meta(problem.tile(FORWARD, 90))
    assert (meta.QK1, meta.V1) == (0, 0)
    assert dim <= meta.QK0 == meta.V0 < 2 * dim + 16


@pytest.mark.parametrize("dims", [(384, 72), (192, 192), (160, 256), (256, 160)], ids=str)
def test_head_dims_in_two_parts_have_no_tile_of_one_stage_for_an_open_band(dims: tuple[int, int]) -> None:
    q, v = (torch.zeros(1, 9, 2, dim, dtype=torch.float16) for dim in dims)
    problem = Problem(q, q, v, softmax_scale=1.0)
    assert problem.tile(DKDV, 90) == dataclasses.replace(problem, window_right=0).tile(DKDV, 90)
    whole = torch.zeros(1, 9, 2, 256, dtype=torch.float16)
    assert Problem(whole, whole, whole, softmax_scale=1.0).tile(DKDV, 90).num_stages == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_fp8_caches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call at each head dim."""
    kernels = [request for dim in DIMS for request in over_fp8(*call_over_fp8(dim, seed), monkeypatch)]
    compile_sound(each_once(kernels))


WHERE = Where("triton", "cpu", HALF, IN_PARTS, (270, 300), 2, frozenset(FEATURES))


def both_ways(seed: int) -> Callable[[], None]:
    """Returns a call that is drawn with a seed, forward and backward."""
    config = draw_config(seed, WHERE)._replace(kind="ordinary", is_offset=False)
    call = Call(config, seed)

    def run() -> None:
        out = attention(**call.arguments())
        out = out if isinstance(out, tuple) else (out,)
        given = [(t, d) for t, d in zip(out, (call.dout, call.dlse), strict=False) if d is not None and t.requires_grad]
        if given:
            torch.autograd.backward(*map(list, zip(*given, strict=True)))

    return run


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a call without max_seqlen, a mod that is traced again
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.exhaustive if n else pytest.mark.slow) for n in range(60)])
def test_forwards_and_backwards(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five calls of each seed, by the portable kernels."""
    runs = [both_ways(5 * seed + n) for n in range(5 if seed else 2)]
    compile_sound(each_once([request for run in runs for request in launched(run, "never", monkeypatch)]))
