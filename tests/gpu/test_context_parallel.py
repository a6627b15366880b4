"""Attention over 2 and 4 GPUs of one host by NCCL, a process per rank: the cases of tests/distributed, and compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import FreshPython
from tests.support.ranks import CAPTURED_PARTS, COMPILED_PARTS, EIGHT_BITS_PARTS, MODULE, run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs at least 2 GPUs, and there are {GPUS}")

NUMBERS = tuple(
    pytest.param(ranks, marks=pytest.mark.skipif(ranks > GPUS, reason=f"needs {ranks} GPUs, and there are {GPUS}"))
    for ranks in (2, 4)
)
ON_FOUR = pytest.mark.skipif(GPUS < 4, reason=f"needs 4 GPUs, and there are {GPUS}")


def on_gpus(ranks: int) -> dict[str, str]:
    """Returns the settings of ranks that each have a GPU of their own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    return {"RANKS_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(visible[:ranks])}


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("part", range(CAPTURED_PARTS))
def test_captured_calls_replay_with_other_inputs(part: int, ranks: int, fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, f"captured_{part}", ranks, on_gpus(ranks))


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("part", range(EIGHT_BITS_PARTS))
def test_fp8_compiled(part: int, ranks: int, fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, f"kernels_in_eight_bits_{part}", ranks, on_gpus(ranks))


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("part", range(COMPILED_PARTS))
def test_every_feature_compiled(part: int, ranks: int, fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, f"kernels_{part}", ranks, on_gpus(ranks))


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize(
    "suite",
    [
        *("compiled", "compiled_graphs_of_kernels", "on_gpus", "same_bits", "decoding_over_long_caches", "features"),
        pytest.param("all_features", marks=pytest.mark.slow),
    ],
)
def test_cases_over_nccl(suite: str, ranks: int, fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, suite, ranks, on_gpus(ranks))


@ON_FOUR
@pytest.mark.parametrize("suite", ["in_hosts", "on_one_mesh", "sharded_dtensors"])
def test_meshes_of_two_dims(suite: str, fresh_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(fresh_python, tmp_path, suite, 4, on_gpus(4))


def torchrun(python: FreshPython, ranks: int, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments, env=env)


def test_a_rank_that_raises_does_not_leave_the_other_hanging(fresh_python: FreshPython) -> None:
    """A rank waits on its GPU for one that has raised; torchrun ends it."""
    found = torchrun(fresh_python, 2, "-m", MODULE, "one_does_not_come", "0", "2", "-", RANKS_DEVICE="cuda")
    assert found.returncode == 1
    assert "ValueError: this rank has no batch" in found.stderr


def test_training_has_the_same_losses_on_any_number_of_gpus(fresh_python: FreshPython, tmp_path: Path) -> None:
    printed = {}
    for ranks in (1, 2, 4)[: 3 if GPUS >= 4 else 2]:
        found = torchrun(fresh_python, ranks, "docs/train_packed.py")
        assert found.returncode == 0, found.stderr
        printed[ranks] = [float(loss) for loss in re.findall(r"loss (\S+)", found.stdout)]
        assert len(printed[ranks]) == 5
        assert printed[ranks] == pytest.approx(printed[1], abs=1e-4)
    assert printed[1][-1] < printed[1][0] - 0.3
