"""The kernels that go through lists block by block, against the fp64 reference, interpreted, and compiled for other GPUs."""

from __future__ import annotations

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.kernels_triton import families
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.sparse import inversion
from tests.sparse.test_attention import call, check, launches_of
from tests.support.compiled_kernels import compile_sound
from tests.support.families import recorded_families

CASES = [
    ("long, causal, counts, softcap, wide blocks", torch.bfloat16, (16, 24)),
    ("long, packed lengths, three heads, one list, sink, wide blocks", torch.float16, (48, 40)),
    ("long, lengths, counts, sink, many heads, wide blocks", torch.bfloat16, (32, 16)),
]


@pytest.fixture(autouse=True)
def _on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: families.Policy(ignores_measurements=True))


@pytest.mark.parametrize(
    ("case", "dtype", "dims"), [CASES[1], *(pytest.param(*case, marks=pytest.mark.slow) for case in (CASES[0], CASES[2]))], ids=str
)
@pytest.mark.parametrize(
    "memory", [pytest.param(1 << 30, marks=pytest.mark.slow), 2 << 10], ids=["one chunk of queries", "chunks of queries"]
)
def test_results_and_gradients(
    case: str, dtype: torch.dtype, dims: tuple[int, int], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inversion, "MOST_BYTES", memory)
    with recorded_families() as chosen:
        check(call(case, dtype, dims), deterministic=True)
    assert chosen == {"sparse by block"}


SPILLS = 240  # bytes of a thread's registers, of 1020: the sums of 128 keys and values fill half of them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "block", "dim"), [(80, 64, 64), (90, 128, 128), pytest.param(100, 64, 128, marks=pytest.mark.exhaustive)]
)
def test_kernels_compile(sm: int, block: int, dim: int) -> None:
    q, k, v = (torch.randn(1, n, h, dim, dtype=torch.bfloat16, requires_grad=True) for n, h in ((8, 64), (512, 4), (512, 4)))
    lists = torch.zeros(1, 8, 4, 3, dtype=torch.int32)
    launches = launches_of({"q": q, "k": k, "v": v, "kv_indices": lists, "kv_block_size": (1, block)}, sm, False)
    launches = [launch for launch in launches if "_sparse_block_" in launch.kernel.__name__]
    assert len(launches) == 4
    for launch, report in zip(launches, compile_sound([request_for(launch, sm) for launch in launches]), strict=True):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]
        assert report.spill_load_bytes <= (SPILLS if "bwd" in launch.kernel.__name__ else 0), launch.kernel.__name__
