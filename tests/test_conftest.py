"""The tests' own safety net: memory that nothing wrote is never a plausible number."""

from __future__ import annotations

import subprocess

import pytest
import torch
from conftest import FreshPython

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_uninitialised_memory_is_poisoned(dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(3, dtype=dtype, device=device)
    made = (
        torch.empty(3, dtype=dtype, device=device),
        torch.empty_like(x),
        torch.empty_strided((3,), (2,), dtype=dtype, device=device),
        x.new_empty(3),
        x.new_empty_strided((3,), (2,)),
    )
    for out in made:
        assert out.dtype is dtype
        values = out.double()
        assert (values.isnan() if dtype.is_floating_point else values == torch.iinfo(dtype).max).all()


def test_fresh_processes_inherit_no_settings(fresh_python: FreshPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_BACKEND", "eager")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran: subprocess.CompletedProcess[str] = fresh_python("-c", "import os; print(*sorted(os.environ), sep='\\n')")
    names = set(ran.stdout.split())
    assert not {"FLEXATTN_BACKEND", "TRITON_INTERPRET"} & names
    assert "PATH" in names


def test_every_test_has_one_thread() -> None:
    assert torch.get_num_threads() == 1
