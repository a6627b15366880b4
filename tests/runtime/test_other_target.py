"""Code of an older target on a newer GPU: names, keys, and code that is compiled for the one and assembled for the other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from flexattn.kernels_triton.runtime import imitation, other_target

COMPILES = """
import re, sys
import torch
from flexattn.kernels_triton.runtime import other_target, store
from flexattn.kernels_triton.ahead_of_time.compile_report import compiled_from, request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import description_of, recorded_launches

q = torch.zeros(1, 128, 2, 32, dtype=torch.bfloat16)
with pretended_device(89, 100), recorded_launches() as launches:
    attention_forward(Problem(q, q, q, 1.0), torch.empty_like(q), torch.empty(1, 2, 128))
request = request_for(launches[0], 89)
plain, text = compiled_from(request), description_of(launches[0], 89)
other_target.install(89, 90)
assert description_of(launches[0], 89) != text
found = compiled_from(request)
assert found.hash != plain.hash
print(*sorted(set(re.findall(r"\\.target (\\w+)", found.asm["ptx"]))), found.metadata.target.arch)
for code in (plain, found):
    flags = code.asm["cubin"][48:52]  # of the ELF header: one of its bytes is the architecture, which one depends on ptxas
    print(max(sm for sm in (89, 90) if sm in flags))
from triton.runtime import driver
from triton.backends.nvidia.driver import CudaDriver
print(CudaDriver.get_current_target(None).arch)
"""


@pytest.mark.slow
def test_code_is_compiled_for_the_target_and_assembled_for_the_gpu(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = fresh_python("-c", COMPILES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sm_89", "89", "89", "90", "89"]


@pytest.mark.parametrize(("text", "capability"), [("sm_80", 80), ("86", 86), ("8.9", 89), ("sm_120", 120), ("12.0", 120)])
def test_a_target_is_named_in_three_ways(text: str, capability: int) -> None:
    assert other_target.parse(text) == capability


@pytest.mark.parametrize("text", ["", "sm_90", "ampere", "7.5", "sm_8"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: sm_80, sm_86, sm_89, sm_120"):
        other_target.parse(text)


def test_a_result_names_the_code_and_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imitation.label("NVIDIA H100") == "NVIDIA H100"
    assert imitation.code_key() == ""
    monkeypatch.setattr(imitation, "current", imitation.Imitation(80, 90))
    assert imitation.label("NVIDIA H100") == "sm_80 code on an NVIDIA H100"
    assert imitation.imitated() == 80
    monkeypatch.setattr(imitation, "current", imitation.Imitation(120, 90))
    assert imitation.label("Tesla T4") == "sm_89 code with tiles of sm_120 on a Tesla T4"


def test_a_process_imitates_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitation, "current", imitation.Imitation(80, 90))
    other_target.imitate(80)
    with pytest.raises(RuntimeError, match="imitates 80 already"):
        other_target.imitate(86)
    with pytest.raises(ValueError, match="accepted: 80, 86, 89, 120"):
        other_target.imitate(75)


@pytest.mark.parametrize(
    ("capability", "shared", "registers", "warps", "programs"),
    [
        (80, 96 << 10, 255, 4, 1),
        (80, 64 << 10, 255, 4, 2),
        (89, 32 << 10, 128, 4, 3),
        (89, 96 << 10, 255, 8, 1),
        (120, 0, 32, 4, 12),
    ],
)
def test_a_multiprocessor_holds_as_many_programs_as_the_older_gpu(
    capability: int, shared: int, registers: int, warps: int, programs: int
) -> None:
    padded = other_target.padded_shared(capability, 90, shared, registers, warps)
    assert other_target._programs(capability, shared, registers, warps) == programs
    assert other_target._programs(90, padded, registers, warps) == programs
    assert padded >= shared
