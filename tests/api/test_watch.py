"""FLEXATTN_LOG, FLEXATTN_DUMP and `python -m flexattn replay`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexattn import ops
from flexattn.cli import replay
from flexattn.watch import copied
from tests.conftest import FreshPython

CALL = """
import torch
from flexattn import attention
q, k = (torch.randn(2, 9, 4, 16, generator=torch.Generator().manual_seed(0)).transpose(1, 2) for _ in "qk")
for causal in (True, True, False):
    leaf = q.clone().requires_grad_()
    attention(leaf, k, k, qkv_format="bhsd", attn_mask_type="causal" if causal else "no_mask").sum().backward()
print("done")
"""
FAILS = (
    """
from flexattn.dispatch import eager_backend
def fail(*_):
    raise RuntimeError("the kernel failed")
eager_backend.{} = fail
"""
    + CALL
)


def test_each_distinct_call_is_logged_once(forked_python: FreshPython) -> None:
    result = forked_python("-c", CALL, env={"FLEXATTN_LOG": "info"})
    assert result.stdout == "done\n"
    first, second = (line for line in result.stderr.splitlines() if line.startswith("flexattn: "))
    assert "q [2, 4, 9, 16]" in first
    assert "causal" in first
    assert "causal" not in second


def test_every_run_is_logged_at_level_debug(forked_python: FreshPython) -> None:
    result = forked_python("-c", CALL, env={"FLEXATTN_LOG": "debug"})
    lines = [line for line in result.stderr.splitlines() if line.startswith(("flexattn: forward", "flexattn: backward"))]
    assert [line.split()[1] for line in lines] == ["forward:", "backward:"] * 3


def test_a_level_that_does_not_exist(forked_python: FreshPython) -> None:
    result = forked_python("-c", "import flexattn", env={"FLEXATTN_LOG": "all"})
    assert "FLEXATTN_LOG is 'all'; accepted: off, info, debug" in result.stderr


def test_calls_that_succeed_leave_no_files(forked_python: FreshPython, tmp_path: Path) -> None:
    result = forked_python("-c", CALL, env={"FLEXATTN_DUMP": str(tmp_path / "dumps")})
    assert result.stdout == "done\n", result.stderr
    assert list((tmp_path / "dumps").iterdir()) == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failing_call_is_kept_and_runs_again(
    direction: str, forked_python: FreshPython, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = forked_python("-c", FAILS.format(direction), env={"FLEXATTN_DUMP": str(tmp_path), "FLEXATTN_CHECK": "0"})
    assert result.returncode != 0
    [file] = tmp_path.iterdir()
    assert f"`python -m flexattn replay {file}` runs it again" in result.stderr
    assert replay.main([str(file), "--backend", "eager"]) == 0
    text = capsys.readouterr().out
    assert f"attention_{direction} on cpu: bhsd, float32" in text
    assert "FLEXATTN_CHECK=0" in text
    assert "it failed with RuntimeError: the kernel failed" in text
    assert "it runs now; its results are finite" in text

    def fail(*_: object) -> None:
        raise ValueError("still wrong")

    monkeypatch.setattr(ops, f"attention_{direction}_implementation", fail)
    assert replay.main([str(file)]) == 1
    assert "it fails again with ValueError: still wrong" in capsys.readouterr().out


def test_a_process_that_ends_in_a_call_leaves_its_inputs(forked_python: FreshPython, tmp_path: Path) -> None:
    code = "import os\nfrom flexattn.dispatch import eager_backend\neager_backend.forward = lambda *_: os._exit(3)\n" + CALL
    assert forked_python("-c", code, env={"FLEXATTN_DUMP": str(tmp_path)}).returncode == 3
    [file] = tmp_path.iterdir()
    assert torch.load(file, weights_only=True)["error"] == "the process ended during the call"


def test_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"operator": "another"}, tmp_path / "x.pt")
    for name, text in (("x.pt", "has the operator 'another'"), ("missing.pt", "cannot be read")):
        with pytest.raises(SystemExit):
            replay.main([str(tmp_path / name)])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "t", [torch.arange(24.0).view(2, 3, 4).transpose(0, 2)[1:], torch.ones(3, 1).expand(3, 5), torch.ones(0, 4)], ids=str
)
def test_copies_have_the_strides_and_no_other_memory(t: torch.Tensor) -> None:
    [copy] = copied((t,), "cpu")
    assert torch.equal(copy, t)
    assert copy.stride() == t.stride()
    assert copy.untyped_storage().nbytes() <= t.untyped_storage().nbytes()
