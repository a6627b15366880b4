"""The installed package: the wheel holds every source file under `flexattn` alone, and a user's own modules never collide with
ours.
"""

from __future__ import annotations

import ast
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, FreshPython

PACKAGE_FOLDERS = ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn", "bench", "emulator")

IMPORTED_AS = {"nvidia-cudnn-frontend": "cudnn", "import-linter": "importlinter", "pytest-xdist": "xdist"}
CUDNN_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc")

# A directory that only exists on somebody's machine; as a pattern, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|tmp|mnt|opt|Users)/\w|\b[A-Z]:\\\w")

# Named as flexattn's folders are, and fatal when one is imported in their place.
TRAP = "raise ImportError('the user module was imported in place of a part of flexattn')\n"

USER_SCRIPT = """
import sys
import torch
import flexattn, flexattn.dispatch.eager_backend
assert flexattn.__file__.startswith(sys.argv[1]), flexattn.__file__
q, k, v = torch.randn(3, 1, 5, 2, 8).unbind()
print(flexattn.attention(q, k, v, attn_mask_type="causal").shape)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, tracked_files: list[Path], fresh_python: FreshPython) -> Path:
    """Built from a copy, by the backend itself: what pip would do, without its network and without litter in the checkout."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in tracked_files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path, follow_symlinks=False)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(dist)!r})"
    built = fresh_python("-c", code, cwd=source, env={"PYTHONPATH": ""})
    assert built.returncode == 0, built.stderr
    return next(dist.glob("flexattn-*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()


def test_wheel_holds_every_source_file_under_flexattn(wheel: Path, tracked_files: list[Path]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    about = next(name for name in names if name.endswith("/METADATA")).removesuffix("METADATA")
    modules = [p for p in tracked_files if p.parts[0] in PACKAGE_FOLDERS and p.suffix == ".py"]
    expected = {(p if p.parts[0] == "flexattn" else Path("flexattn") / p).as_posix() for p in modules} | {"flexattn/py.typed"}
    assert {name for name in names if not name.startswith(about)} == expected
    assert f"{about}licenses/LICENSE" in names
    assert zipfile.ZipFile(wheel).read(f"{about}top_level.txt").decode().split() == ["flexattn"]


def test_metadata_names_licence_and_python(metadata: str) -> None:
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata


def test_every_requirement_has_a_pin(metadata: str) -> None:
    requirements = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE)
    assert {name for name, rest in requirements if "extra ==" not in rest} == {"torch", "triton", "nvidia-cudnn-frontend"}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned |= {name for name, rest in requirements if rest.startswith("==")}
    assert {name for name, _ in requirements} - pinned == {"flexattn"}  # which its own extras name


def test_every_requirement_is_imported(metadata: str, tracked_files: list[Path]) -> None:
    """Or is a tool that CI runs, a plugin, what builds the wheel, or a library that cuDNN's own plans load."""
    imported = set()
    for path in tracked_files:
        if path.suffix == ".py" and not (ROOT / path).is_symlink():
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                imported |= {name.partition(".")[0] for name in names}
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))
    not_imported = {IMPORTED_AS.get(name, name) for name in required} - imported
    of_site = {"mkdocs-material", "mkdocstrings"}
    assert not_imported == {"mypy", "ruff", "importlinter", "xdist", "setuptools", *of_site, *CUDNN_LIBRARIES}


def test_users_own_modules_do_not_break_an_installed_flexattn(wheel: Path, tmp_path: Path, fresh_python: FreshPython) -> None:
    site, user = tmp_path / "site", tmp_path / "user"
    zipfile.ZipFile(wheel).extractall(site)  # a wheel without compiled code is installed by unpacking it
    user.mkdir()
    for name in PACKAGE_FOLDERS[1:]:
        (user / f"{name}.py").write_text(TRAP)
    (user / "script.py").write_text(USER_SCRIPT)
    ran = fresh_python("script.py", str(site), cwd=user, env={"PYTHONPATH": str(site)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "torch.Size([1, 5, 2, 8])\n"


def test_no_file_names_a_path_of_somebodys_machine(tracked_files: list[Path]) -> None:
    found = []
    for path in tracked_files:
        if (ROOT / path).is_symlink():
            assert not (ROOT / path).readlink().is_absolute(), path
        else:
            text = (ROOT / path).read_text(encoding="utf-8", errors="ignore")
            found += [f"{path}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found
