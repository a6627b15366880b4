"""Hashes of compiled kernels: equal for equal code, and a difference is named."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from flexattn.bench import code_hashes
from flexattn.bench.code_hashes import Code, cases, differences
from tests.conftest import ROOT, FreshPython

LAUNCHED = """
from flexattn.bench.code_hashes import cases, launches_of
for case in cases():
    if case.dims == "128" and case.arch == 90:
        print(*(launch.kernel.fn.__name__ for launch in launches_of(case)))
"""


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_cases_reach_every_kernel_that_attends(forked_python: FreshPython) -> None:
    done = forked_python("-c", LAUNCHED)
    assert done.returncode == 0, done.stderr
    portable = {f"_attn_{name}_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_dbias")}
    hopper = {f"_attn_{name}_hopper_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused")}
    fp8 = {f"_attn_{name}_fp8_hopper_kernel" for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused")}
    assert portable | hopper | fp8 <= set(done.stdout.split()), done.stdout


def code(ptx: str, sass: str = "1", operations: str = "1", instructions: int = 10, spill_bytes: int = 0) -> Code:
    return Code("k", ptx, sass, operations, instructions, 168, spill_bytes)


def test_compared_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = tmp_path / "before.json", {"sm_80 open: 0": code("1"), "sm_90 open: 0": code("4")}
    monkeypatch.setattr(code_hashes, "hashes", lambda only, workers: {name: x for name, x in found.items() if only in name})
    assert code_hashes.main(["--out", str(file)]) == 0
    assert code_hashes.main(["--only", "sm_80", "--compare", str(file)]) == 0
    assert capsys.readouterr().out == "1 kernels, 0 differ\n"
    found["sm_90 open: 0"] = code("7")
    assert code_hashes.main(["--compare", str(file), "--out", str(tmp_path / "now.json")]) == 1
    said = "sm_90 open: 0: k: other PTX, the same SASS\n2 kernels, 1 differ, 1 other PTX, the same SASS\n"
    assert capsys.readouterr().out == said
    monkeypatch.setattr(code_hashes, "hashes", None)  # two files are compared with nothing compiled
    assert code_hashes.main(["--compare", str(file), "--with", str(tmp_path / "now.json")]) == 1
    assert capsys.readouterr().out == said


def test_differences_are_named() -> None:
    before = {name: code("1") for name in "abcdef"}
    after = {
        "a": code("1")._replace(kernel="another name"),
        "b": code("2", sass="2"),
        "c": code("2", "2", "2"),
        "d": code("2", "2", "2", instructions=12, spill_bytes=8),
        "e": code("1", sass="2"),
        "g": code("1"),
    }
    assert list(map(str, differences(before, after))) == [
        "b: k: other PTX, the same operations in SASS",
        "c: k: as many instructions in another order",
        "d: k: other instructions; instructions 10 -> 12; spill_bytes 0 -> 8",
        "e: k: other PTX, the same operations in SASS",
        "f: only before",
        "g: only now",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "has no hashes of this version"),
        ('{"fields": ["kernel"], "hashes": {}}', "its fields are kernel"),
        ('{"hashes": {}}', "KeyError"),
        (None, "No such file"),
    ],
)
def test_a_file_without_hashes_is_named(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "before.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        code_hashes.main(["--compare", str(file), "--with", str(file)])
    said = capsys.readouterr().err
    assert message in said
    assert "accepted: a file of code_hashes --out" in said


def test_two_files_are_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        code_hashes.main(["--with", str(tmp_path / "now.json")])
    assert "give --compare FILE.json" in capsys.readouterr().err


def test_a_case_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        code_hashes.main(["--only", "sm_70"])
    assert "--only is 'sm_70', which no case has in its name; --list lists them" in capsys.readouterr().err


def test_page_has_the_numbers_of_its_files() -> None:
    """The table of notes/bounds.md: kernels before, with their parameters in another order, and now."""
    page = (ROOT / "notes" / "bounds.md").read_text("utf-8")
    files = ROOT / "bench" / "results" / "code_hashes"
    before, reordered, now = (code_hashes.read(files / f"{name}.json") for name in ("before", "reordered", "now"))
    assert before.keys() == reordered.keys() == now.keys()
    same = {case for case in now if before[case].sass == now[case].sass}
    moved = {case for case in now if reordered[case].sass == now[case].sass} - same
    operations = {case for case in now if reordered[case].operations == now[case].operations} - same - moved
    rest = Counter(now[case].kernel for case in now.keys() - same - moved - operations)
    rows = [int(n) for n in re.findall(r"^\| (?:none|order|shared|arguments|the same)[^|]*\| (\d+) \|", page, re.M)]
    fused, fused_fp8 = rest["_attn_bwd_fused_hopper_kernel"], rest["_attn_bwd_fused_fp8_hopper_kernel"]
    pair = rest["_attn_bwd_dq_hopper_kernel"] + rest["_attn_bwd_dkdv_hopper_kernel"]
    pair_fp8 = rest["_attn_bwd_dq_fp8_hopper_kernel"] + rest["_attn_bwd_dkdv_fp8_hopper_kernel"]
    portable = sum(rest[f"_attn_{name}_kernel"] for name in ("fwd", "bwd_dq", "bwd_dkdv"))
    beside = rest["_attn_bwd_statistics_kernel"] + rest["_attn_bwd_dq_conversion_kernel"]
    groups = [fused, fused_fp8, pair, pair_fp8, rest["_attn_fwd_hopper_kernel"], portable, beside]
    assert rows == [len(same), len(moved), len(operations), *groups]
    assert sum(rows) == len(now)
    totals = [sum(x.instructions for x in found.values()) for found in (before, now)]
    totals += [sum(x.spill_bytes for x in found.values()) for found in (before, now)]
    assert "{:,} instructions became {:,}, and {:,} spilled bytes {:,}".format(*totals) in page
