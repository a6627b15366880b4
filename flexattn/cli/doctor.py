"""`python -m flexattn doctor`: lists the packages and devices that flexattn can use, those that are missing, and the backend.

If a probe fails, the list has a line with its error.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import flexattn
from flexattn import ops
from flexattn.cli import Parser, program
from flexattn.dispatch import cudnn_backend, options, triton_backend
from flexattn.dispatch.cudnn_rules import version_text
from flexattn.dispatch.explain import explain
from flexattn.dispatch.options import requested_backend
from flexattn.functional import bind_call

OK, NOTE, MISSING = "ok", "note", "missing"
_WORDS = set(options.VARIABLES) - {"FLEXATTN_PLANS", "FLEXATTN_KERNELS", "FLEXATTN_DUMP"}  # variables whose value names no folder


class Finding(NamedTuple):
    subject: str
    state: str
    verdict: str = OK
    remedy: str = ""  # a command, or a change to make


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog=program("doctor"),
        description="Lists the packages and devices that flexattn can use, their location, commands that install missing ones, and "
        "the backend of attention(). It always succeeds.",
    )
    parser.add_argument("--report", action="store_true", help="print it as Markdown for a bug report, without paths and names")
    args = parser.parse_args(arguments)
    return run(args.report)


def run(is_report: bool = False) -> int:
    """Prints the findings, as a table if rich is installed, or as Markdown for a bug report; returns 0."""
    findings = report()
    if is_report:
        print(markdown(findings))  # noqa: T201
        return 0
    if importlib.util.find_spec("rich") is None:
        for finding in findings:
            remedy = f"\n    {finding.remedy}" if finding.remedy else ""
            print(f"{finding.subject}: {finding.state} [{finding.verdict}]{remedy}")  # noqa: T201
    else:
        _print_table(findings)
    print(outcome())  # noqa: T201
    return 0


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", "")
    colours = {OK: "green", NOTE: "yellow", MISSING: "red"}
    for finding in findings:
        remedy = f"\n{finding.remedy}" if finding.remedy else ""
        table.add_row(
            finding.subject,
            finding.state + remedy,
            finding.verdict,
            style=None if finding.verdict == OK else colours[finding.verdict],
        )
    Console().print(table)


def outcome() -> str:
    """Returns one line about the backend of an ordinary call on this machine."""
    try:
        x = torch.empty(1, 2048, 16, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
        call, settings = bind_call(x, x, x, attn_mask_type="causal")
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        device_type = "cpu" if capability is None else "cuda"
        spec = ops.spec_to_run(call, settings)._replace(device_type=device_type, capability=capability)
        explanation = explain(spec, requested_backend(None), call)
    except Exception as e:  # for example if an environment variable names an unusable backend
        return f"attention() raises {type(e).__name__} here: {' '.join(str(e).splitlines()[:2])}"
    if explanation.forward.backend != "eager":
        return f"attention() runs on: {explanation.runs_on}, on {torch.cuda.get_device_name()}."
    if capability is None:
        return "attention() runs on: eager. Correct, but slow: no NVIDIA GPU was found."
    reason = next((reason for name, reason in explanation.forward.rejected if name == "triton"), explanation.forward.why)
    return f"attention() runs on: eager. Correct, but slow: {reason}."


def markdown(findings: Sequence[Finding]) -> str:
    """Returns a table in Markdown without the paths of files and the names of users and machines."""
    rows = [f"| {f.subject} | {_anonymous(f.state)} | {f.verdict} |" for f in findings]
    return "\n".join(["| what | found | |", "|---|---|---|", *rows, "", _anonymous(outcome())])


_SETTING = re.compile(r"(FLEXATTN_\w+)=([^,]*)")
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\,;'\"()|]+){2,}[/\\]?")
_PUBLIC = re.compile(r"site-packages.*|[^/\\]*\.so[.\d]*$")  # the end of a path that may be shown


def _anonymous(text: str) -> str:
    """Returns a text in one line, without folders, values of variables that name folders, and names of users and machines."""
    text = _SETTING.sub(lambda match: match[0] if match[1] in _WORDS else f"{match[1]} (set)", " ".join(text.split()))
    home = os.path.expanduser("~")
    for name in (home, os.path.basename(home), os.environ.get("USER", ""), platform.node()):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text) if len(name) > 1 else text
    text = _PATH.sub(lambda path: "".join(_PUBLIC.findall(path[0])) or "(a path)", text)
    return text.replace("|", "\\|")


def report() -> list[Finding]:
    """Returns all findings. A dependency comes before the packages that need it."""
    findings: list[Finding] = []
    for subject, probe in PROBES.items():
        findings += _guarded(subject, probe)
    return findings


def _guarded(subject: str, probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except Exception as e:  # a broken machine needs a report too
        return [Finding(subject, f"the probe failed: {type(e).__name__}: {e}", NOTE)]


def _python() -> list[Finding]:
    return [
        Finding("flexattn", f"{flexattn.__version__}, {Path(flexattn.__file__).parent}"),
        Finding("python", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"),
    ]


def _torch() -> list[Finding]:
    built = torch.version.cuda
    if built is None:
        remedy = "on a machine with an NVIDIA GPU: install a build for CUDA, as https://pytorch.org/get-started says"
        return [Finding("torch", f"{torch.__version__}, built without CUDA", NOTE, remedy)]
    return [Finding("torch", f"{torch.__version__}, built for CUDA {built}")]


def _gpu() -> list[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text().splitlines()[0] if driver.exists() else "none loaded"
    findings = [Finding("driver", version, OK if driver.exists() else MISSING)]
    if not torch.cuda.is_available():
        remedy = "the fused backends need an NVIDIA GPU; without one the eager backend runs"
        return [*findings, Finding("GPU", "torch sees none", MISSING, remedy)]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        state = f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
        findings.append(Finding(f"GPU {index}", state))
    return findings


def _triton() -> list[Finding]:
    if importlib.util.find_spec("triton") is None:
        return [Finding("triton", "not installed", MISSING, "pip install 'triton>=3.6'")]
    triton = importlib.import_module("triton")
    findings = [Finding("triton", f"{triton.__version__}, {Path(str(triton.__file__)).parent}")]
    if os.environ.get("TRITON_INTERPRET") == "1":
        findings.append(
            Finding("triton", "TRITON_INTERPRET=1: kernels run in its interpreter, slowly", NOTE, "unset TRITON_INTERPRET")
        )
    return findings


def _cudnn() -> list[Finding]:
    if importlib.util.find_spec("cudnn") is None:
        return [Finding("cuDNN frontend", "not installed", MISSING, "pip install 'nvidia-cudnn-frontend>=1.27'")]
    cudnn = importlib.import_module("cudnn")
    findings = [Finding("cuDNN frontend", f"{cudnn.__version__}, {Path(str(cudnn.__file__)).parent}")]
    error = cudnn_backend.library_error()
    if error is not None:
        reason, _, remedy = error.partition("; ")
        findings.append(Finding("cuDNN library", reason, MISSING, remedy))
    else:
        findings.append(Finding("cuDNN library", version_text(cudnn.backend_version())))
    return findings


def _libraries() -> list[Finding]:
    """Reports the loaded libcudnn and all others on disk, because a mix of two versions fails when a graph is built."""
    loaded = sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn.so" in line})
    patterns = [str(Path(folder) / "nvidia" / "cudnn" / "lib" / "libcudnn.so*") for folder in sys.path]
    patterns += [str(Path(folder) / "libcudnn.so*") for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    patterns += ["/usr/lib/*-linux-gnu/libcudnn.so*", "/usr/local/cuda*/lib64/libcudnn.so*"]
    on_disk = sorted({os.path.realpath(path) for pattern in patterns for path in glob.glob(pattern)})
    findings = [Finding("libcudnn loaded", ", ".join(loaded) or "none yet")]
    if len({os.path.dirname(path) for path in (*on_disk, *map(os.path.realpath, loaded))}) > 1:
        remedy = "keep one: pip uninstall the others, or set LD_LIBRARY_PATH to the folder of one"
        findings.append(Finding("libcudnn on disk", ", ".join(on_disk), NOTE, remedy))
    return findings


def _frontends() -> list[Finding]:
    """Reports packages that install the same module. If there are two, Python may import either."""
    findings = []
    for module in ("triton", "cudnn"):
        owners = sorted(set(importlib.metadata.packages_distributions().get(module, ())))
        if len(owners) > 1:
            remedy = f"pip uninstall all of them but one, then reinstall that one: {', '.join(owners)}"
            findings.append(Finding(module, f"{len(owners)} packages install it: {', '.join(owners)}", NOTE, remedy))
    return findings


def _backends() -> list[Finding]:
    """Reports whether each fused backend can run on the first device."""
    if not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(0)
    findings = []
    for name, error in (
        ("triton", triton_backend.device_error("cuda", capability)),
        ("cudnn", cudnn_backend.device_error("cuda", capability)),
    ):
        reason, _, remedy = (error or "").partition("; ")
        findings.append(Finding(f"backend {name}", reason or "can run here", OK if error is None else NOTE, remedy))
    return findings


def _settings() -> list[Finding]:
    set_here = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLEXATTN_")}
    findings = [
        Finding("settings", ", ".join(f"{name}={value}" for name, value in set_here.items()) or "no FLEXATTN_ variable is set")
    ]
    unknown = sorted(set(set_here) - set(options.VARIABLES))
    if unknown:
        findings.append(Finding("settings", f"unknown: {', '.join(unknown)}", NOTE, f"known: {', '.join(options.VARIABLES)}"))
    try:
        options.check_all()
    except ValueError as e:
        wrong, _, remedy = str(e).partition("; ")
        findings.append(Finding("settings", wrong, NOTE, remedy))
    return findings


PROBES: dict[str, Callable[[], list[Finding]]] = {
    "python": _python,
    "torch": _torch,
    "GPU": _gpu,
    "triton": _triton,
    "cuDNN": _cudnn,
    "libcudnn": _libraries,
    "packages": _frontends,
    "backends": _backends,
    "settings": _settings,
}
