"""Hashes of compiled kernels: equal for equal code, and a difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexattn.bench import code_hashes
from flexattn.bench.code_hashes import cases, differences
from tests.conftest import FreshPython

LAUNCHED = """
from flexattn.bench.code_hashes import cases, launches_of
for case in cases():
    if case.dims == "128" and case.arch == 90:
        print(*(launch.kernel.fn.__name__ for launch in launches_of(case)))
"""


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_cases_reach_every_kernel_that_attends(forked_python: FreshPython) -> None:
    done = forked_python("-c", LAUNCHED)
    assert done.returncode == 0, done.stderr
    portable = {f"_attn_{name}_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_dbias")}
    hopper = {f"_attn_{name}_hopper_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused")}
    fp8 = {f"_attn_{name}_fp8_hopper_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused")}
    assert portable | hopper | fp8 <= set(done.stdout.split()), done.stdout


def test_compared_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = tmp_path / "before.json", {"sm_80 open: k 0": ["1", "2", "3"], "sm_90 open: k 0": ["4", "5", "6"]}
    monkeypatch.setattr(code_hashes, "hashes", lambda only, workers: {name: x for name, x in found.items() if only in name})
    assert code_hashes.main(["--out", str(file)]) == 0
    assert code_hashes.main(["--only", "sm_80", "--compare", str(file)]) == 0
    assert capsys.readouterr().out == "1 kernels, 0 differ\n"
    found["sm_90 open: k 0"] = ["7", "5", "6"]
    assert code_hashes.main(["--compare", str(file)]) == 1
    assert capsys.readouterr().out == "sm_90 open: k 0: other PTX, the same SASS\n2 kernels, 1 differ\n"


def test_differences_are_named() -> None:
    before = {"a": ["1", "1", "1"], "b": ["1", "1", "1"], "c": ["1", "1", "1"], "d": ["1", "1", "1"]}
    after = {"a": ["1", "1", "1"], "b": ["2", "2", "1"], "c": ["2", "2", "2"], "e": ["1", "1", "1"]}
    assert differences(before, after) == [
        "b: other PTX, the same operations in SASS",
        "c: other PTX, other operations in SASS",
        "d: only before",
        "e: only now",
    ]


def test_a_case_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        code_hashes.main(["--only", "sm_70"])
    assert "--only is 'sm_70', which no case has in its name; --list lists them" in capsys.readouterr().err
