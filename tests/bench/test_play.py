"""The playground without a GPU: a kernel is checked in the interpreter, compiled, and refused if wrong; sweeps compile to prune."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.bench import compiled, implementations, play, record, run
from flexattn.bench.implementations import committed_tile
from flexattn.bench.inputs import make_tensors
from flexattn.bench.measure import Ceilings, Samples
from flexattn.bench.record import Row
from flexattn.bench.shapes import WORKLOADS
from flexattn.bench.subject import load
from flexattn.bench.tiles import SPACE, candidates, parse_tile, tile_name, with_options
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport
from flexattn.kernels_triton.runtime.device import Tile
from tests.conftest import ROOT
from tests.repository.test_docs import printed_as_shown

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the playground times; this is what it does without")

SHAPE = "sweep-d64-causal-s512"
FORWARD = (ROOT / "kernels_triton" / "portable" / "forward.py").read_text("utf-8")
RESCALED = "v0, acc0 * correction[:, None]"


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """own_file(name, source): a developer's kernel file, which is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        return path

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what a run times, with the interpreter in the GPU's place."""
    timed: list[str] = []

    def timer(calls: Any, budget_ms: float) -> dict[str, Samples]:
        for call in calls.values():
            call()
        timed.extend(calls)
        return {name: Samples([1.0 + n, 1.1 + n], [0.1, 0.1]) for n, name in enumerate(calls)}

    monkeypatch.setattr(run, "time_on_device", timer)
    monkeypatch.setattr(run, "measure_ceilings", lambda *_: Ceilings(700.0, 8192, "bfloat16", 4000.0, 2**30))
    monkeypatch.setattr(run, "make_tensors", lambda workload, _: make_tensors(workload, "cpu"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return timed


@pytest.mark.slow
def test_a_tile_is_checked_and_compiled_beside_the_committed_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["forward", "--shape", SHAPE, "--block-m", "32", "--num-stages", "2", "--arch", "80"]
    assert play.main([*arguments, "--dump", "ptx,sass", "--dump-folder", str(tmp_path)]) == play.PASSED
    said = capsys.readouterr().out
    assert re.search(r"tile 32x64x4x2 \(committed: 128x64x4x2\)", said)
    assert "right: within the budget" in said
    assert re.search(r"^this +\d+ .*HMMA", said, re.MULTILINE)
    assert re.search(r"^committed +\d+ .*HMMA", said, re.MULTILINE)
    assert "Not timed: no GPU here." in said
    assert "_attn_fwd_kernel" in (tmp_path / "_attn_fwd_kernel.ptx").read_text()
    assert "HMMA" in (tmp_path / "_attn_fwd_kernel.sass").read_text()


@pytest.mark.slow
def test_a_wrong_kernel_is_never_timed(
    own_file: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FORWARD.count(RESCALED) == 1
    path = own_file("kernel_that_forgets", FORWARD.replace(RESCALED, "v0, acc0"))
    monkeypatch.setattr(play, "time_beside", lambda *_: pytest.fail("timed"))
    assert play.main(["forward", "--shape", SHAPE, "--kernel-file", str(path), "--block-n", "32"]) == play.WRONG
    said = capsys.readouterr().out
    assert re.search(r"WRONG: out: max error .*worst:\n  \[\d+, \d+, \d+, \d+\]: got", said)
    assert "Not timed: it is wrong." in said
    assert re.search(r"^this +\d+ ", said, re.MULTILINE)  # the compiler's results are still shown


@pytest.mark.slow
def test_a_wrong_tile_in_a_sweep_is_never_timed(
    own_file: Callable[[str, str], Path], timed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measuring half of a sweep, with the interpreter in the GPU's place: a kernel is wrong if blocks have 64 keys."""
    path = own_file("kernel_of_32", FORWARD.replace(RESCALED, "v0, (acc0 * correction[:, None] if META.BLOCK_N == 32 else acc0)"))
    small = WORKLOADS[SHAPE].shortened(131)
    tiles = [Tile(32, 32, 4, 1), Tile(32, 64, 4, 1)]
    launchers = play.launchers_of("forward", path, {})
    subject = play.Subject("forward", small, launchers, tiles[0], committed_tile("forward", small, 0), 90)
    out = tmp_path / "tiles.json"
    assert play._time_tiles([subject], tiles, 1.0, out, "python -m flexattn play forward --sweep") == play.WRONG
    assert timed == ["forward 32x32x4x1 committed", "forward 32x32x4x1"]
    found = record.read(out)
    assert {r.implementation: r.status for r in found.rows} == {
        "forward 32x32x4x1 committed": "measured",
        "forward 32x32x4x1": "measured",
        "forward 32x64x4x1": "wrong",
    }
    assert "kernels_triton/common/tiles.py:" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kernel_is_timed_beside_the_committed_one_and_peers(
    timed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = WORKLOADS[SHAPE].shortened(131)
    tile, committed = Tile(32, 32, 4, 1), Tile(32, 64, 4, 1)
    launchers = play.launchers_of("forward", None, {"forward": tile})
    subject = play.Subject("forward", small, launchers, tile, committed, 90)
    out = tmp_path / "played.json"
    args = play.make_parser().parse_args(["forward", "--peers", "SDPA math", "--out", str(out)])
    assert play.time_beside(subject, args, "python -m flexattn play forward") == play.PASSED
    assert timed == ["forward 32x32x4x1 (this)", "forward 32x64x4x1 committed", "this", "flexattn triton", "SDPA math"]
    said = capsys.readouterr().out
    assert "The kernel takes 0.512 of the committed one's time." in said
    assert "The whole call takes 0.344 of the time of the best peer, SDPA math." in said
    found = record.read(out)
    assert [row.implementation for row in found.rows] == timed
    assert {"flops", "kernel_flops"} <= set(found.method)


def test_what_does_not_run_says_why(own_file: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = own_file("kernel_that_raises", FORWARD.replace("tile = tile or x.tile(FORWARD)", "raise RuntimeError('not yet')"))
    assert play.main(["forward", "--shape", SHAPE, "--kernel-file", str(path)]) == play.REFUSED
    assert "it does not run: RuntimeError: not yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--block-m", "48"], "--block-m is 48; accepted: powers of two from 16 on"),
        (["--num-warps", "3"], "--num-warps is 3; accepted: 1, 2, 4, 8, 16"),
        (["--num-stages", "0"], "--num-stages is 0"),
        (["--block-n", "32", "64"], "--block-n has several values; accepted: one, or several with --sweep"),
        (["--arch", "75"], "--arch is 75; accepted: 80, "),
        (["--shape", "llama"], "no workload is called 'llama'"),
        (["--shape", "small-*"], "--shape names 3 shapes"),
        (["--shape", "sweep-d64-full-s512", SHAPE.replace("64", "128"), "--sweep"], "several head dims"),
        (["--dump", "ptx,elf"], "--dump elf; accepted: ttir,"),
        (["--kernel-file", "no_such.py"], "no_such.py: there is no such file"),
        (["--kernel-file", "bench/tiles.py"], "has no attention_forward; begin with a copy of kernels_triton/portable/forward.py"),
        (["--kernel-file", "kernels_triton/common/addressing.py"], "has no attention_forward"),
        (["--kernel-file", "README.md"], "accepted: a Python file"),
    ],
)
def test_errors_name_the_option(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        play.main(["forward", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_must_not_hide_a_module(own_file: Callable[[str, str], Path]) -> None:
    path = own_file("tqdm", FORWARD)
    with pytest.raises(ValueError, match="a module 'tqdm' exists already"):
        load(path)


def test_tiles_are_read_and_written() -> None:
    for tile in (Tile(128, 64, 8, 3), Tile(32, 128, 8, 2, apart=True)):
        assert parse_tile(tile_name(tile)) == tile
    assert tile_name(Tile(32, 128, 8, 2, apart=True)) == "32x128x8x2xapart"
    for text in ("", "64x64x4", "64x64x4xtwo", "64x64x4x2xsideways"):
        with pytest.raises(ValueError, match="is no tile; accepted"):
            parse_tile(text)
    assert with_options(Tile(64, 64, 4, 3), {"block_n": 128, "apart": 1, "num_warps": None}) == Tile(64, 128, 4, 3, apart=True)


def test_the_space_of_a_sweep_begins_with_what_is_committed() -> None:
    committed = Tile(64, 64, 4, 3)
    tiles = candidates("forward", committed, {"block_m": [128], "block_n": None, "num_warps": [4, 8], "num_stages": [2]})
    assert tiles[0] == committed
    assert set(tiles[1:]) == {Tile(128, n, warps, 2) for n in SPACE["forward"]["block_n"] for warps in (4, 8)}
    assert all(tile.apart is False for tile in tiles)
    assert any(tile.apart for tile in candidates("dkdv", committed, {}))


def report(**more: Any) -> CompileReport:
    sound = {"registers": 200, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0, "shared_bytes": 1000}
    loop = {"HGMMA": 10, "FADD": 90}
    return CompileReport(**({**sound, "instructions": loop, "loops": (loop,), "warnings": ()} | more))


@pytest.mark.parametrize(
    ("made", "against"),
    [
        ([report()], []),
        ([report(), report(shared_bytes=300000)], ["300000 bytes of shared memory, and there are 232448"]),
        ([report(loops=({"HGMMA": 10, "STL": 10, "FADD": 30},))], ["20% of the loops' instructions are spills"]),
        ([report(loops=({"HGMMA": 10, "STL": 1, "FADD": 30},))], []),  # a few may pay: only time can tell
        ([report(instructions={"HMMA": 3})], ["matrix instructions are HMMA, not HGMMA alone"]),
        ([report(warnings=("Potential: wgmma serialized (C7510)",))], ["ptxas serialized wgmma"]),
        ([report(undefined_registers=("UR4",))], ["ptxas made code that reads registers before it writes them"]),
        ([report(folded_operands=("16x16, 8 a thread",))], ["Triton multiplies only a part of operands: 16x16, 8 a thread"]),
        ("1 of 1 kernels do not compile\n\nTypeError: no", ["TypeError: no"]),
    ],
)
def test_reasons_against_a_tile_are_named(made: Any, against: list[str]) -> None:
    assert compiled.complaints("forward", Tile(64, 64, 4, 3), 90, made) == against


@pytest.mark.slow
def test_a_sweep_prunes_by_compiling_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checked: list[str] = []

    def check(subject: play.Subject, *_: Any) -> tuple[list[Any], str | None]:
        checked.append(tile_name(subject.tile))
        return [], "broken"

    monkeypatch.setattr(play, "check", check)
    space = ["--block-m", "128", "--block-n", "64", "--num-warps", "8", "--num-stages", "2", "4"]
    assert play.main(["forward", "--shape", "sweep-d256-causal-s4096", "--sweep", *space]) == play.WRONG
    said = capsys.readouterr().out
    assert re.search(r"out: 128x64x8x4 +\d+ bytes of shared memory, and there are 232448", said)
    assert checked == ["128x64x8x2"]  # and never the tile that does not fit
    assert "1 of 2 are left" in said
    assert re.search(r"128x64x8x2 +WRONG: broken", said)
    assert "Not timed, so no row is proposed" in said


def test_where_a_kernel_stands() -> None:
    def row(name: str, us: float | None) -> Row:
        return Row(name, "1", SHAPE, "forward", "refused" if us is None else "measured", us=us)

    kernels = [row("forward 64x64x4x2 (this)", 90.0), row("forward 64x64x4x3 committed", 100.0)]
    whole = [row("this", 100.0), row(implementations.TRITON, 110.0), row("SDPA cuDNN", 80.0), row("FlexAttention", None)]
    assert play.standing(kernels, whole) == (
        "The kernel takes 0.900 of the committed one's time. The whole call takes 1.250 of the time of the best peer, SDPA cuDNN."
    )
    subject = play.Subject("forward", WORKLOADS[SHAPE], None, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), 90)  # type: ignore[arg-type]
    said = play.roofline_text(subject, Ceilings(800.0, 8192, "bfloat16", 4000.0, 2**30))
    assert said.endswith("800 TFLOP/s and 4000 GB/s, meet at 200: bound by memory, 512 TFLOP/s at most")


def test_watch_runs_again_on_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("stages = 3\n")
    runs: list[Sequence[str]] = []

    def in_a_fork(arguments: Sequence[str]) -> tuple[int, list[str]]:
        runs.append(arguments)
        return 1, ["right", f"this {240 - len(runs)}"]

    def sleep(_: float) -> None:
        sleeps.append(len(runs))
        if len(sleeps) == 2:
            path.write_text("stages = 2\n")
        if len(sleeps) == 4:
            raise KeyboardInterrupt

    sleeps: list[int] = []
    monkeypatch.setattr(play, "in_a_fork", in_a_fork)
    monkeypatch.setattr(time, "sleep", sleep)
    assert play.main(["forward", "--kernel-file", str(path), "--watch"]) == 1
    assert sleeps == [1, 1, 2, 2]  # one run at first, one after the save
    assert all("--watch" not in arguments and str(path) in arguments for arguments in runs)
    said = capsys.readouterr().out
    assert "--- mine.py ---\n-stages = 3\n+stages = 2\n" in said
    assert "Since the last save:\n-this 239\n+this 238\n" in said


@pytest.mark.slow
def test_a_fork_gives_its_status_and_what_it_printed() -> None:
    code = """if True:
        import sys
        from flexattn.bench import play
        found = play.in_a_fork([]), play.in_a_fork(["forward", "--kernel-file", "none.py"])
        assert not any(name.startswith(("triton", "flexattn.kernels_triton")) for name in sys.modules)
        assert found[0] == (0, play.overview().splitlines()), found
        assert found[1] == (2, []), found
    """
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "none.py: there is no such file" in ran.stderr


def test_play_alone_says_what_can_be_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert play.main([]) == play.PASSED
    said = capsys.readouterr().out
    for name in (*implementations.KERNELS, *play.EMULATED):
        assert re.search(rf"^  {name} ", said, re.MULTILINE), name


def page_blocks() -> list[str]:
    """The blocks of docs/playground.md that change a checkout; tests/repository/test_docs.py runs the others."""
    page = (ROOT / "docs" / "playground.md").read_text("utf-8")
    return [text for text in re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S) if text.startswith("$ cp ")]


@pytest.mark.exhaustive
def test_the_pages_walk_through_a_change_is_real(tmp_path: Path) -> None:
    """Each command of the walk, one after the other, in a checkout of its own."""
    for folder in ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn", "bench", "emulator"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results"))
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", "".join(page_blocks()), re.M):
        real = re.sub(r"^python ", f"{sys.executable} ", command)
        ran = subprocess.run(["bash", "-c", real], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode in (0, 1), ran.stderr
        assert printed_as_shown(ran.stdout, shown), f"{command}\n{ran.stdout}{ran.stderr}"


def test_the_walk_has_a_wrong_and_a_right_change_and_what_it_changed() -> None:
    wrong, right, in_place = page_blocks()
    assert "Not timed: it is wrong." in wrong
    assert "right: within the budget of the tests" in right
    assert "6 kernels, 1 differ" in in_place


def test_without_a_checkout_the_playground_says_where_the_emulator_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flexattn.emulator", None)
    with pytest.raises(SystemExit):
        play.main(["forward", "--emulate", "--shape", "sweep-d64-causal-s512"])
    assert "flexattn.emulator is not in the wheel. Run pip install" in capsys.readouterr().err
