"""The commands: their list, `explain`, `doctor`; and `flexattn.warmup`."""

from __future__ import annotations

import argparse
import getpass
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flexattn
from flexattn import __main__ as command_line
from flexattn.cli import build as build_ahead
from flexattn.cli import doctor
from flexattn.cli import explain as question
from flexattn.dispatch.select import RuntimeFailure, backend_module, forget_rejections, select
from tests.conftest import FreshPython


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    select.cache_clear()
    yield
    forget_rejections()


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line.main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_a_reader_that_ends_early_is_no_wrong_option(capsys, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert command_line.main(["explain", "--q", "1,64,4,64"]) == 1
    assert capsys.readouterr().err == ""


def test_explain_describes_the_call_that_was_asked_about(capsys):
    question = ["--q", "2,4096,32,128", "--kv-heads", "8", "--mask", "causal", "--window", "128,0", "--capability", "9.0"]
    described = "bshd, bfloat16, 32 heads over 8, head dim 128, up to 4096 x 4096 tokens, causal, window (128, 0), cuda sm_90"
    runs = "runs on: triton / portable (forward and backward)"
    short = explained(capsys, *question).splitlines()
    assert short[:2] == [runs, f"call: {described}"]
    assert [line.partition(":")[0] for line in short[2:4]] == ["triton", "portable"]
    first, second, *rest = explained(capsys, *question, "--verbose").splitlines()
    assert (first, second) == (runs, f"{described}; backend='auto'")
    *directions, derivatives = (line for line in rest[1:] if not line.startswith(" "))
    assert directions == ["forward: triton (portable)", "backward: triton (portable)"]
    assert derivatives.startswith("tangents and second derivatives: ")
    assert rest[0].startswith("with torch ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no_mask"),
        ("--mask causal", "causal"),
        ("--mask padding", "padding"),
        ("--mask padding_causal", "padding_causal"),
        ("--mask causal_bottom_right --window 9,-1", "causal_bottom_right, window (9, 0)"),
        ("--mask causal --window 4", "causal, window (3, 0)"),
        ("--window 3,4", "no_mask, window (3, 4)"),
        ("--window -1,4", "no_mask, window (-1, 4)"),
        ("--mask padding --window 3,4", "padding, window (3, 4)"),
    ],
)
def test_a_mask_is_described_in_the_words_of_the_arguments(capsys, arguments, said):
    text = explained(capsys, "--q", "2,64,8,64", *arguments.split())
    assert f"up to 64 x 64 tokens, {said}, cpu" in text


def test_windows_without_a_spelling_of_their_own_are_described():
    q = torch.empty(1, 8, 2, 16, device="meta")
    before = str(flexattn.explain(q, q, q, window_size=flexattn.Window(None, -1)))
    top_left = str(flexattn.explain(q, q, q, window_size=(3, 4), bottom_right_diagonal=False))
    assert "no_mask, Window(None, -1), " in before
    assert "no_mask, window (3, 4) from the top-left diagonal, " in top_left


def test_the_first_line_says_what_runs_each_direction(capsys, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from flexattn.kernels_triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    lines = explained(capsys, "--q", "2,16384,16,128", "--mask", "causal", "--capability", "9.0").splitlines()
    assert lines[0] == "runs on: triton / sm_90 (forward), triton / sm_90 fused (backward)"
    assert [line.partition(":")[0] for line in lines[3:]] == ["sm_90 (forward)", "sm_90 fused (backward)"]
    short = explained(capsys, "--q", "2,64,16,128", "--no-grad", "--capability", "9.0").splitlines()
    assert short[0] == "runs on: triton / portable (forward)"
    assert [line.partition(":")[0] for line in short[3:6]] == ["portable", "not sm_90 few keys", "not sm_90"], (
        "why not the kernels for this GPU"
    )
    assert not any("sm_100" in line for line in short), "nothing about kernels for others"


def test_reasons_that_hold_for_both_directions_are_given_once(capsys):
    hopper = ["--q", "2,16384,16,128", "--mask", "causal", "--capability", "9.0"]
    lines = explained(capsys, *hopper).splitlines()
    assert len(lines) == len({*lines})
    assert [line.partition(":")[0] for line in lines[2:3]] == ["triton"]
    one, two = (explained(capsys, "--q", f"2,64,8,{dim}", "--capability", "9.0") for dim in (65, 64))
    assert "not triton: the head dim of q and k is 65" in one, "why auto takes a slower backend"
    assert "not cudnn" in one
    assert "not triton" not in two


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--q 1000,8,64 --format thd --mask padding --batch 3 --max-seqlen 400",
            "thd, bfloat16, 8 heads, head dim 64, up to 512 x 512",
        ),
        ("--q 2,8,100,64 --format bhsd --dtype fp16 --no-grad", "(forward)\n"),
        ("--q 2,100,8,64 --bias post_scale_bias", "post_scale_bias"),
        ("--q 2,100,8,64 --bias post_scale_bias --bias-shape 1,1,100,100 --capability 9.0", "post_scale_bias"),
        ("--q 2,100,8,64 --softmax learnable", "learnable softmax"),
        ("--q 2,100,8,64 --dropout 0.1 --softcap 5", "softcap, dropout"),
        ("--q 2,100,8,64 --deterministic --max-logit --capability sm_90", "return_max_logit, deterministic, cuda sm_90"),
        ("--q 2,100,8,192 --head-dim-v 128 --kv 2,300,4,192", "8 heads over 4, head dim 192/128, up to 128 x 512 tokens"),
        ("--q 2,100,8,64 --lse-grad --capability 9.0 --verbose", "cuDNN"),
    ],
)
def test_explain_takes_every_feature(capsys, arguments, said):
    assert said in explained(capsys, *arguments.split())


def test_explain_says_what_is_wrong_with_a_question(capsys):
    with pytest.raises(SystemExit) as e:
        command_line.main(["explain", "--q", "2,100,8,64", "--window", "3,4", "--mask", "causal"])
    assert e.value.code == 2
    assert "window_size is (3, 4) with attn_mask_type 'causal'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        command_line.main(["explain", *["--q", "2,100,8,64", "--softcap", "3", "--backend", "cudnn", "--capability", "8.0"]])
    assert e.value.code == 1
    assert "backend='cudnn' cannot run the backward of this call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "capability"),
    [(text, (9, 0)) for text in ("sm_90", "90", "9.0", "sm90", "sm_9.0", "9", "sm_90a")]
    + [(text, (10, 3)) for text in ("sm_103", "103", "10.3", "sm103")]
    + [(text, (12, 0)) for text in ("120", "sm_120", "12.0")]
    + [(text, (8, 9)) for text in ("89", "sm_89", "8.9")],
)
def test_a_capability_is_the_same_in_every_spelling(text, capability):
    for command in (question, build_ahead):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args(["--q", "2,100,8,64", "--capability", text, *(["--out", "x"] if command is build_ahead else [])])
        assert question.parse(args)[2].capability == capability


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--q 2,64,8,-4", "--q: it is '2,64,8,-4', with a size of -4; accepted: sizes of 1 or more"),
        ("--q 2,0,8,64", "with a size of 0"),
        ("--q 2,64,8,x", "--q: it is '2,64,8,x'; accepted: integers"),
        ("--q 2,64,8,64 --kv 2,64,0,64", "--kv: it is '2,64,0,64', with a size of 0"),
        ("--q 2,64,8,64 --kv-heads 0", "--kv-heads: it is '0'; accepted: an integer of 1 or more"),
        ("--q 2,64,8,64 --head-dim-v 0", "--head-dim-v: it is '0'"),
        ("--q 2,64,8,64 --head-dim-v -8", "--head-dim-v: it is '-8'"),
        ("--q 64,8,64 --format thd --batch 0", "--batch: it is '0'"),
        ("--q 64,8,64 --format thd --mask padding --max-seqlen 0", "--max-seqlen: it is '0'"),
        ("--q 2,64,8,64 --bias post_scale_bias --bias-shape 0,1,64,64", "--bias-shape"),
        ("--q 2,64,8,64 --capability Hopper", "--capability: it is 'Hopper'; accepted: a compute capability, as 9.0"),
        ("--q 2,64,8,64 --capability sm_9.0.1", "--capability"),
        ("--q 2,64,8,64 --capability -90", "--capability"),
        ("--q 2,64,8,64 --window 3", "window_size is 3 without a causal mask"),
        ("--q 2,64,8", "q"),
    ],
)
@pytest.mark.parametrize("command", [["explain"], ["build", "--out", "nowhere"]], ids=["explain", "build"])
def test_wrong_sizes_are_named(capsys, command, arguments, said):
    with pytest.raises(SystemExit) as e:
        command_line.main([*command, *arguments.split()])
    assert e.value.code == 2
    assert said in capsys.readouterr().err


def test_doctor_names_a_setting_that_is_not_accepted(monkeypatch):
    monkeypatch.setenv("FLEXATTN_HOPPER", "ALWAYS")
    said = [finding.state for finding in doctor.report() if finding.subject == "settings"]
    assert "the environment variable FLEXATTN_HOPPER is 'ALWAYS'" in said


def test_doctor_finds_what_is_here(capsys):
    assert command_line.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert flexattn.__version__ in text
    assert torch.__version__ in text
    assert "probe failed" not in text


def test_doctor_does_not_fail_where_everything_does(monkeypatch, capsys):
    def broken() -> list[doctor.Finding]:
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "PROBES", dict.fromkeys(doctor.PROBES, broken))
    monkeypatch.setattr(doctor, "bind_call", lambda *call, **named: broken())
    for arguments in ([], ["--report"]):
        assert doctor.main(arguments) == 0
        said = capsys.readouterr().out
        assert said.count("probe failed: OSError") == len(doctor.PROBES)
        assert said.splitlines()[-1] == "attention() raises OSError here: disk on fire"


def test_doctor_ends_with_what_attention_does(monkeypatch, capsys):
    def last_line(*capability: int) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capability))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA Tensor 9")
        return doctor.outcome()

    importlib.import_module("flexattn.kernels_triton.families")  # kernels are interpreted if the setting is there at their import
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert last_line() == "attention() runs on: eager. Correct, but slow: no NVIDIA GPU was found."
    assert command_line.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last_line()
    monkeypatch.setattr(backend_module("triton"), "unsupported", lambda spec, direction: None)
    assert last_line(8, 0) == "attention() runs on: triton / portable (forward and backward), on NVIDIA Tensor 9."
    for name in ("triton", "cudnn"):
        monkeypatch.setattr(backend_module(name), "unsupported", lambda spec, direction: "triton is not here; pip install it")
    forget_rejections()
    assert last_line(9, 0) == "attention() runs on: eager. Correct, but slow: triton is not here; pip install it."
    monkeypatch.setenv("FLEXATTN_BACKEND", "cudnn")
    assert last_line().startswith("attention() raises BackendError here: backend='cudnn' cannot run ")


def test_doctor_gives_no_advice_to_run_the_doctor(monkeypatch):
    cudnn = backend_module("cudnn")
    frontend = pytest.importorskip("cudnn", reason="cudnn is not installed")
    cudnn.library_error.cache_clear()
    monkeypatch.setattr(frontend, "backend_version", lambda: 1 // 0)
    said = [finding for finding in doctor.report() if finding.subject == "cuDNN library"]
    cudnn.library_error.cache_clear()
    assert [finding.remedy for finding in said] == ["pip install nvidia-cudnn-cu13"]


def test_a_report_for_a_bug_says_neither_where_files_are_nor_whose_they_are(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLEXATTN_KERNELS", str(tmp_path / "mine"))
    monkeypatch.setenv("FLEXATTN_TOKEN", "secret")
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    monkeypatch.setattr(platform, "node", lambda: "host-of-mine")
    paths = ("/".join(["", "home", "jo", "x.py"]), "\\".join(["C:", "Users", "jo", "x"]), "~/jo/x")
    odd = doctor.Finding("odd", f"host-of-mine, {paths[0]}, {paths[1]} and {paths[2]} | /usr/lib/libcudnn.so.9")
    monkeypatch.setitem(doctor.PROBES, "odd", lambda: [odd])
    assert command_line.main(["doctor", "--report"]) == 0
    text = capsys.readouterr().out
    for private in ("secret", "mine", "jo", str(tmp_path), os.path.expanduser("~"), sys.prefix, "/"):
        assert private not in re.sub(r"site-packages/\S*", "", text), private
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
    assert "FLEXATTN_HOPPER=never, FLEXATTN_KERNELS (set), FLEXATTN_TOKEN (set)" in text
    assert "| odd | ..., (a path), (a path) and (a path) \\| libcudnn.so.9 | ok |" in text
    for known in (flexattn.__version__, torch.__version__, platform.python_version()):
        assert known in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows), "a table that Markdown shows"
    assert text.splitlines()[-1].startswith("attention() runs on: ")


def test_the_list_of_commands(capsys):
    for arguments in (["--help"], ["-h"]):
        assert command_line.main(arguments) == 0
        users, developers = capsys.readouterr().out.split("\ncommands for developers")
        for name, command in command_line.COMMANDS.items():
            group = users if name in ("demo", "explain", "doctor", "verify", "bench", "fp8", "build", "replay") else developers
            assert f"\n  {name} " in group
            assert command.summary in group
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{flexattn.__version__}\n"
    assert command_line.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_examples_of_help_are_right(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() % {"prog": "x"} for line in question.EXAMPLES.splitlines()[1:]]
    for line in lines:
        explained(capsys, *line.split()[1:])
    assert (tmp_path / "mask.png").exists()
    (line, _) = (line.strip() % {"prog": "x"} for line in build_ahead.EXAMPLES.splitlines()[1:])
    parser = question.make_parser("build", build_ahead.EXAMPLES)
    build_ahead.add_arguments(parser)
    assert question.parse(parser.parse_args(line.split()[1:]))[2].capability == (9, 0)


def test_a_command_that_there_is_not_has_an_answer(capsys):
    assert command_line.main(["explian", "--q", "1"]) == 2
    assert "there is no command 'explian'; did you mean 'explain'?" in capsys.readouterr().err
    assert command_line.main(["--verbose"]) == 2
    assert "accepted: demo, explain, doctor, verify, bench" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(command_line.COMMANDS))
def test_each_command_explains_itself_and_what_is_wrong(name, monkeypatch, capsys):
    for script, program in (("/usr/bin/flexattn", "flexattn"), ("/x/flexattn/__main__.py", "python -m flexattn")):
        monkeypatch.setattr(sys, "argv", [script])
        with pytest.raises(SystemExit) as e:
            command_line.main([name, "--help"])
        assert e.value.code == 0
        assert f"usage: {program} {name} " in capsys.readouterr().out
        with pytest.raises(SystemExit) as e:
            command_line.main([name, "--no-such-option"])
        assert e.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{program} {name}: error: ")
        assert said.endswith(f"`{program} {name} --help` lists the options and their values\n")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
sys.argv = ["/usr/bin/flexattn"]
from flexattn.__main__ import main
status = main({arguments!r})
assert not any(name.startswith("torch.") for name in sys.modules)
sys.exit(status)
"""


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--version"], 0), (["dotcor"], 2)])
def test_the_list_of_commands_needs_no_torch(arguments: list[str], status: int, fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", WITHOUT_TORCH.format(arguments=arguments))
    assert ran.returncode == status, ran.stderr


def test_python_m_flexattn_needs_no_torch_for_its_help(fresh_python: FreshPython, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", "utf-8")
    ran = fresh_python("-m", "flexattn", "--help", env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert "usage: python -m flexattn [--help]" in ran.stdout


def test_the_script_is_the_commands() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    (entry,) = re.findall(r'^\[project\.scripts\]\nflexattn = "(.+)"$', text, re.MULTILINE)
    module, _, function = entry.partition(":")
    assert getattr(importlib.import_module(module), function) is command_line.main


BARE = """
import argparse
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from flexattn.__main__ import main
raise SystemExit(main(["doctor"]))
"""


@pytest.mark.sample
@pytest.mark.parametrize("blocked", [("triton", "cudnn", "rich"), ("rich",), ("triton",), ("cudnn",)], ids="-".join)
def test_doctor_without(blocked: tuple[str, ...], forked_python: FreshPython) -> None:
    ran = forked_python("-c", BARE.format(blocked=blocked), env={"FLEXATTN_BACKED": "triton"})
    assert ran.returncode == 0, ran.stderr
    if "triton" in blocked:
        assert "pip install 'triton>=3.6'" in ran.stdout
    if "cudnn" in blocked:
        assert "nvidia-cudnn-frontend>=1.27" in ran.stdout
    assert "unknown: FLEXATTN_BACKED" in " ".join(ran.stdout.split())


def test_doctor_finds_two_cudnns(monkeypatch, tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name / "nvidia" / "cudnn" / "lib"
        folder.mkdir(parents=True)
        (folder / "libcudnn.so.9").touch()
        monkeypatch.syspath_prepend(str(tmp_path / name))
    (finding,) = [finding for finding in doctor._libraries() if finding.subject == "libcudnn on disk"]
    assert finding.verdict == doctor.NOTE
    assert all(str(tmp_path / name) in finding.state for name in ("a", "b"))
    assert "pip uninstall" in finding.remedy


def calls() -> list[dict[str, Any]]:
    q = torch.randn(2, 40, 2, 16)
    k = torch.randn(2, 30, 1, 16, requires_grad=True)
    return [{"q": q, "k": k, "v": k}, {"q": q, "k": k.detach(), "v": k.detach(), "attn_mask_type": "causal", "dropout_p": 0.5}]


def test_warmup_prepares_what_each_call_needs(monkeypatch):
    asked = []
    for name in ("triton", "eager"):
        monkeypatch.setattr(
            backend_module(name), "prepare", lambda spec, x, direction, name=name: asked.append((name, direction, spec.dropout))
        )
    given, state = calls(), torch.get_rng_state()
    explanations = flexattn.warmup(*given, progress=False)
    assert asked == [("eager", "forward", False), ("eager", "backward", False), ("eager", "forward", True)]
    assert [e.forward.backend for e in explanations] == ["eager", "eager"]
    assert explanations[1].backward is None
    asked.clear()
    flexattn.warmup(explanations[0].spec, backend="triton", progress=False)
    assert asked == [("triton", "forward", False), ("triton", "backward", False)]
    assert torch.equal(torch.get_rng_state(), state), "no random number is drawn"


def test_warmup_learns_what_is_refused(monkeypatch):
    def refusing(*args: Any) -> None:
        raise RuntimeFailure("not even compiled")

    eager = backend_module("eager")
    monkeypatch.setattr(eager, "prepare", refusing)
    monkeypatch.setattr(backend_module("triton"), "prepare", lambda *args: None)
    (explanation, *_) = flexattn.warmup(*calls(), progress=False)
    assert explanation.forward.backend == "triton"
    assert explanation.forward.rejected == (("eager", "not even compiled"),)


def test_warmup_runs_the_triton_kernels_on_made_up_operands():
    spec = flexattn.explain(**calls()[0]).spec._replace(length_q=32, length_kv=16)
    for name in ("triton", "eager"):
        assert flexattn.warmup(spec, backend=name, progress=False)[0].forward.backend == name


def test_warmup_shows_progress(capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    flexattn.warmup(*calls())
    assert "flexattn.warmup" in capsys.readouterr().err


def test_warmup_refuses_what_is_no_call():
    with pytest.raises(TypeError, match="accepted: a dict of attention's arguments, or an AttentionSpec"):
        flexattn.warmup(torch.randn(1, 2, 3, 8))


MODS = """
import torch

def capped(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)

def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() % 3 < 2

number = 3
"""


@pytest.fixture
def mods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_mods.py").write_text(MODS, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_mods", raising=False)


@pytest.mark.usefixtures("mods")
def test_the_source_of_a_mod_is_shown(capsys) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    call = ["--q", "2,64,4,32", "--score-mod", "some_mods:capped", "--mask-mod", "some_mods:near"]
    said = explained(capsys, *call, "--capability", "9.0", "--source", "--verbose")
    assert "score_mod or mask_mod" in said
    assert "not cudnn: can run it" in said or "not cudnn: the cuDNN" in said
    for part in ("def score_mod_", "def score_mod_gradient_", "def mask_mod_", "mod_math.tanh_in_half("):
        assert part in said
    assert "def score_mod_" not in explained(capsys, *call)


@pytest.mark.usefixtures("mods")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source"], "--source is for mods"),
        (["--score-mod", "some_mods:nothing"], "accepted: package.module:function"),
        (["--score-mod", "no_such_module:f"], "accepted: package.module:function"),
        (["--mask-mod", "some_mods:number"], "is a int; accepted: package.module:function"),
        (["--score-mod", "torch:tanh"], "score_mod cannot be traced"),
    ],
)
def test_a_mod_that_is_none_is_named(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["explain", "--q", "2,64,4,32", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--q 2,16384,16,128 --mask causal",
            [
                "forward: triton (sm_90)",
                "backward: triton (sm_90 fused)",
                "  sm_90: the fastest in benchmarks of such calls; rule: head_dim 128, mask causal",
                "  tile: 128 queries x 128 keys",
            ],
        ),
        (
            "--q 2,16384,16,128 --mask causal --deterministic",
            ["backward: triton (sm_90 two-kernel)", "  not sm_90 fused or sm_90 fused 192: its dq is not deterministic"],
        ),
        (
            "--q 2,4096,16,128 --window 99,0",
            [
                "forward: triton (sm_90)",
                "  not sm_90 fused: it is faster from 127 keys left of the diagonal on, and this call has 99",
            ],
        ),
        ("--q 2,16384,16,128 --dtype fp32", ["(portable)", "not sm_90: it takes bf16 and fp16, not float32"]),
        ("--q 2,64,16,128", ["not sm_90: it is faster from 2**31 FLOPs on, and this call has 6.71e+07"]),
        ("--q 1,1,32,128 --kv 1,65536,8,128", ["forward: triton (sm_90)", "keys in 16 splits: 8 tiles of up to 65536 keys"]),
        (
            "--q 64,1,32,128 --kv 64,8192,8,128",
            ["keys not split: 512 tiles of up to 8192 keys, on a device with room for 132 programs"],
        ),
        ("--q 1,1,32,128 --kv 1,65536,8,128 --fp8 head", ["(portable)", "keys in 8 splits: 32 tiles"]),
        (
            "--q 2,16384,16,128 --capability 8.0",
            [
                "(mma.sync fused)",
                "  not sm_90 fused or sm_90 fused 192 or sm_90 two-kernel or sm_90 wide two-kernel: "
                "compute capability 9.0 is needed",
            ],
        ),
        (
            "--q 1,8192,16,512 --kv 1,8192,1,512 --mask causal",
            ["runs on: triton / sm_90 wide (forward), triton / sm_90 wide two-kernel (backward)"],
        ),
    ],
)
def test_explain_names_the_kernels(arguments: str, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from flexattn.kernels_triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    text = explained(capsys, "--capability", "9.0", "--backend", "triton", "--verbose", *arguments.split())
    for part in said:
        assert part in text


def test_explain_of_a_spec_names_no_kernels() -> None:
    explanation = flexattn.explain(**calls()[0])
    assert flexattn.explain(explanation.spec, backend="triton").forward_kernels is None
