"""Result files that another program wrote, and kernel files that do not run: a named error, never a traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexattn.bench import command, play, record
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"

Content = dict[str, Any]


def a_file() -> Content:
    """Two cells of a kept run, in JSON's types."""
    content: Content = json.loads((RESULTS / "score_mods_h200.json").read_text())
    kept = [row for row in content["rows"] if row["status"] == "measured"][:2]
    names = {row["workload"] for row in kept}
    return {
        **content,
        "rows": kept,
        "workloads": {name: w for name, w in content["workloads"].items() if name in names},
        "left_out": [],
    }


def of_row(**fields: Any) -> Callable[[Content], object]:
    return lambda content: content["rows"][0].update(fields)


def without(*path: Any) -> Callable[[Content], object]:
    def remove(content: Content) -> None:
        *outer, last = path
        for key in outer:
            content = content[key]
        del content[last]

    return remove


FIRST = next(iter(a_file()["workloads"]))
WRONG: dict[str, tuple[Callable[[Content], object], str]] = {
    "a field of a later version in a row": (of_row(joules=3.0), "row 0 has joules, which another version of flexattn writes"),
    "a field of a later version at the top": (lambda c: c.update(weather="fair"), "the file has weather, which another version"),
    "a field of a later version in a workload": (
        lambda c: c["workloads"][FIRST].update(page_size=16),
        "has page_size, which another version",
    ),
    "another schema": (lambda c: c.update(schema=2), "schema 2; this version reads schema 1"),
    "no schema": (without("schema"), "has no schema"),
    "no workloads": (without("workloads"), "its workloads are missing"),
    "no rows": (without("rows"), "its rows are missing"),
    "rows that are none": (lambda c: c.update(rows={}), "its rows are a dict"),
    "a row that is none": (lambda c: c["rows"].append(7), "row 2 are a int"),
    "no device": (without("device"), "lacks device"),
    "no device's name": (without("device", "name"), "its device has no name"),
    "no status": (without("rows", 0, "status"), "row 0 lacks status"),
    "text for a time": (of_row(us="12.5"), "row 0 has us '12.5'; accepted: float"),
    "a list for a time": (of_row(us=[1.0]), "row 0 has us"),
    "a flag for a time": (of_row(us=True), "row 0 has us True"),
    "a time of 0": (of_row(us=0), "row 0 has us 0; accepted: a number above 0"),
    "a negative time": (of_row(us=-1.0), "row 0 has us -1.0"),
    "a negative rate": (of_row(tflops=-1.0), "row 0 has tflops -1.0"),
    "NaN": (of_row(us=math.nan), "it has NaN, which is no measurement"),
    "infinity": (of_row(us_q3=math.inf), "it has Infinity"),
    "a row twice": (lambda c: c["rows"].append(c["rows"][0]), "row 2 is the second of"),
    "a workload that is not described": (of_row(workload="mine"), "workload 'mine', which the file does not describe"),
    "a length that is text": (lambda c: c["workloads"][FIRST].update(lengths_q=["9"]), "has lengths_q"),
    "a window of three": (lambda c: c["workloads"][FIRST].update(window_size=[1, 2, 3]), "has window_size"),
    "a rate of the device that is text": (
        lambda c: c["ceilings"].update(matmul_tflops="many"),
        "ceilings have matmul_tflops 'many'",
    ),
    "what was left out, without a reason": (lambda c: c.update(left_out=[{}]), "left_out 0 lacks workload, direction or reason"),
}


@pytest.mark.parametrize("way", ["compare", "from"])
@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: str) -> None:
    spoil, reason = WRONG[name]
    content = a_file()
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    right.write_text(json.dumps(content))
    spoil(content)
    wrong.write_text(json.dumps(content))
    assert said_of(capsys, ["--compare", right, right] if way == "compare" else ["--from", right]) == ""
    said = said_of(capsys, ["--compare", right, wrong] if way == "compare" else ["--from", wrong])
    assert f"{wrong} is no result file of this version" in said
    assert reason in said


@pytest.mark.parametrize("text", ["", "{", "7", "[]", "null", "[" * 100_000, '"\ud800"', '{"schema": 1}'], ids=lambda t: t[:9])
def test_what_is_no_result_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert f"{wrong} is no result file" in said_of(capsys, ["--compare", wrong, wrong])


def test_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in said_of(capsys, ["--compare", tmp_path, tmp_path])


def said_of(capsys: pytest.CaptureFixture[str], arguments: list[Any]) -> str:
    """The error of a command that ends in one."""
    status: Any = 2
    with contextlib.suppress(SystemExit):
        status = command.main([str(a) for a in arguments])
    said = capsys.readouterr().err
    assert status == (2 if said else 0)
    return said


@pytest.mark.slow
def test_every_result_that_this_version_reads_can_be_compared_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = 0
    for path in sorted(RESULTS.glob("*.json")):
        if "workloads" in json.loads(path.read_text()):
            assert said_of(capsys, ["--from", path]) == "", path
            if any(row.us is not None for row in record.read(path).rows):
                assert said_of(capsys, ["--compare", path, path]) == "", path
                shown += 1
    assert shown > 10


def test_every_result_names_a_command_that_is_there() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        command = content.get("command", "") if isinstance(content, dict) else ""
        for module in re.findall(r"python3? -m ([\w.]+)", "" if "not kept" in command else command):
            assert importlib.util.find_spec(module) is not None, f"{path.name} was made by {module}"


KERNEL_FILES = {
    "raises": ("import math\n\nmath.sqrt(-1)\n", "line 3: ValueError: math domain error"),
    "does not parse": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "exits": ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    "exits in silence": ("raise SystemExit\n", "line 1: SystemExit"),
    "imports what is not there": (
        "x = 1\nimport no_such_module\n",
        "line 2: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "has nothing": ("", "has no attention_forward"),
}


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_a_kernel_file_that_does_not_run_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, reason = KERNEL_FILES[name]
    file = tmp_path / f"kernel_that_{name.replace(' ', '_')}.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))  # this also reverts changes of loading
    with pytest.raises(SystemExit) as ended:
        play.main(["forward", "--shape", "small-s128", "--kernel-file", str(file)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert reason in said


# Pages that cite files without a kept script for figures in their prose; each leaves this set when it is rewritten.
PAGES = [path for pattern in ("README.md", "bench/README.md", "docs/*.md", "notes/*.md") for path in sorted(ROOT.glob(pattern))]


def can_be_made_again(path: Path) -> bool:
    """Returns whether each command of a result file is a module of the project, or names a script in the repository."""
    content = json.loads(path.read_text("utf-8"))
    commands = [run.get("command", "") for run in content.get("runs", [content])]
    return all(
        "not kept" not in command
        and (_is_module(command) or any((ROOT / script).is_file() for script in re.findall(r"\w+/[\w/]+\.py\b", command)))
        for command in commands
    )


def _is_module(command: str) -> bool:
    """Returns whether a command runs a module of the project."""
    match = re.match(r"(?:FLEXATTN_\w+=\w+ )?(?:python|torchrun .*) -m ((?:flexattn|tests)\b[\w.]*)", command)
    return match is not None and importlib.util.find_spec(match[1]) is not None


def unmarked(text: str) -> list[str]:
    """Returns the result files that a page cites as evidence although nobody can make them again."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    cited = re.findall(r"\b(\w+\.json)\b(?!\) \(script not kept\))", text)
    return [name for name in cited if (RESULTS / name).is_file() and not can_be_made_again(RESULTS / name)]


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_each_cited_result_can_be_made_again_or_is_marked(page: str) -> None:
    found = unmarked((ROOT / page).read_text("utf-8"))
    assert not found, f"mark them with (script not kept), or do not cite them: {', '.join(found)}"


def test_a_result_without_a_script_is_found() -> None:
    cited = "[a](../bench/results/splits_h200.json), [b](../bench/results/decode_peers_h100.json)"
    assert unmarked(cited) == ["splits_h200.json"]
    assert unmarked(cited.replace("splits_h200.json)", "splits_h200.json) (script not kept)")) == []
    assert can_be_made_again(RESULTS / "context_parallel_h100.json")
    assert not can_be_made_again(RESULTS / "asked_blocks_h100.json")  # without a command
    assert not can_be_made_again(RESULTS / "short_backwards_h100.json")  # in part
    assert not can_be_made_again(RESULTS / "partial_results_h200.json")  # by a module that no longer exists
