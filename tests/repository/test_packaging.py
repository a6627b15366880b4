"""The sdist holds every file, and the wheel built from it holds every source file under `flexattn` alone.

The README's links are valid, and a user's own modules never collide with ours.
"""

from __future__ import annotations

import ast
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import flexattn
from tests.conftest import ROOT, FreshPython

PACKAGE_FOLDERS = ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn", "bench")  # the emulator is for checkouts

IMPORTED_AS = {"nvidia-cudnn-frontend": "cudnn", "import-linter": "importlinter", "pytest-xdist": "xdist"}
CUDNN_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc")

# A directory that only exists on one machine; as a pattern, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|tmp|mnt|opt|Users)/\w|\b[A-Z]:\\\w")

# Names of flexattn's folders; each of these modules is fatal if it is imported instead.
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
def sdist(tmp_path_factory: pytest.TempPathFactory, tracked_files: list[Path], fresh_python: FreshPython) -> Path:
    """Built from a copy, by the backend itself: the result of pip, without its network and without litter in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked_files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path, follow_symlinks=False)
    (source / "tests" / "left_over.pyc").touch()
    return build("sdist", source, tmp_path_factory.mktemp("dist"), fresh_python)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, sdist: Path, fresh_python: FreshPython) -> Path:
    """Built from the unpacked sdist, as pip does if there is no wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("dist"), fresh_python)


def build(kind: str, source: Path, dist: Path, fresh_python: FreshPython) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(dist)!r})"
    built = fresh_python("-c", code, cwd=source, env={"PYTHONPATH": ""})
    assert built.returncode == 0, built.stderr
    return next(dist.glob("flexattn-*"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()


@pytest.mark.slow
def test_wheel_holds_every_source_file_under_flexattn(wheel: Path, tracked_files: list[Path]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    about = next(name for name in names if name.endswith("/METADATA")).removesuffix("METADATA")
    modules = [p for p in tracked_files if p.parts[0] in PACKAGE_FOLDERS and p.suffix == ".py"]
    expected = {(p if p.parts[0] == "flexattn" else Path("flexattn") / p).as_posix() for p in modules} | {"flexattn/py.typed"}
    assert {name for name in names if not name.startswith(about)} == expected
    assert f"{about}licenses/LICENSE" in names
    assert zipfile.ZipFile(wheel).read(f"{about}top_level.txt").decode().split() == ["flexattn"]


@pytest.mark.slow
def test_sdist_holds_every_file_but_links(sdist: Path, tracked_files: list[Path]) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    made = {name for name in names if name.startswith("flexattn.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == {path.as_posix() for path in tracked_files if not (ROOT / path).is_symlink()}


@pytest.mark.slow
def test_metadata_names_licence_python_and_addresses(metadata: str) -> None:
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    versions = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", metadata, re.MULTILINE)
    assert versions == [f"3.{minor}" for minor in range(10, 15)]  # from the oldest that Requires-Python accepts, without a gap
    assert len(re.findall(r"^Keywords: \S", metadata, re.MULTILINE)) == 1
    addresses = dict(re.findall(r"^Project-URL: (\w+), (https://\S+)$", metadata, re.MULTILINE))
    assert addresses.keys() == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}


@pytest.mark.slow
def test_the_version_stands_in_one_place_and_the_changelog_begins_with_it(metadata: str) -> None:
    assert f"\nVersion: {flexattn.__version__}\n" in metadata
    headings = re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == flexattn.__version__
    assert flexattn.__version__ not in (ROOT / "pyproject.toml").read_text("utf-8") + (ROOT / "setup.py").read_text("utf-8")


def test_a_citation_names_the_version_and_no_address() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {flexattn.__version__}\n" in citation
    assert f"version = {{{flexattn.__version__}}}" in (ROOT / "docs" / "citing.md").read_text("utf-8")
    assert "://" not in citation
    assert re.findall(r"^  - .*$", citation, re.MULTILINE) == ["  - name: The flexattn developers"]


@pytest.mark.slow
def test_links_of_the_readme_on_an_index_lead_to_the_versions_files(metadata: str) -> None:
    [repository] = re.findall(r"^Project-URL: Repository, (\S+)$", metadata, re.MULTILINE)
    links, here = (re.findall(r"\]\(([^)]*)\)", text) for text in (metadata, (ROOT / "README.md").read_text("utf-8")))
    assert len(links) == len(here) > 20
    for link, original in zip(links, here, strict=True):
        kind = "raw" if original.endswith(".svg") else "blob"  # an image must be the file, not a page about it
        assert link == f"{repository}/{kind}/v{flexattn.__version__}/{original}"


@pytest.mark.slow
def test_every_requirement_has_a_pin(metadata: str) -> None:
    requirements = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE)
    assert {name for name, rest in requirements if "extra ==" not in rest} == {"torch", "triton", "nvidia-cudnn-frontend"}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned |= {name for name, rest in requirements if rest.startswith("==")}
    assert {name for name, _ in requirements} - pinned == {"flexattn"}  # its own extras name it


@pytest.mark.slow
def test_the_versions_that_are_documented_are_those_that_pip_takes(metadata: str) -> None:
    assert refused_versions(metadata) == []


@pytest.mark.slow
def test_a_bound_that_refuses_a_documented_version_is_found(metadata: str) -> None:
    tightened = metadata.replace("Requires-Dist: triton<3.9,", "Requires-Dist: triton<3.8,")
    assert tightened != metadata
    assert refused_versions(tightened) == ["triton"]


def refused_versions(metadata: str) -> list[str]:
    """Returns the packages whose oldest, pinned or newest version on the page pip would refuse or not choose."""
    page = (ROOT / "docs" / "versioning.md").read_text("utf-8")
    rows = re.findall(r"^\| ([a-z-]+) +\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+) +\|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == {"torch", "triton", "nvidia-cudnn-frontend", "transformers", "diffusers", "jax"}
    required = {
        name: (oldest, first_refused)
        for name, first_refused, oldest in re.findall(r"^Requires-Dist: ([\w-]+)(?:<([\d.]+),)?>=([\d.]+)", metadata, re.MULTILINE)
    }
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return [
        name
        for name, oldest, pin, newest in rows
        if (oldest, pin) != (required[name][0], pinned[name])
        or not numbers(oldest) <= numbers(pin) <= numbers(newest)
        or (required[name][1] and numbers(newest) >= numbers(required[name][1]))
    ]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.slow
def test_every_requirement_is_imported(metadata: str, tracked_files: list[Path]) -> None:
    """Or it is a tool that CI runs, a plugin, or a library that cuDNN's own plans load."""
    imported = set()
    for path in tracked_files:
        if path.suffix == ".py" and not (ROOT / path).is_symlink():
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                imported |= {name.partition(".")[0] for name in names}
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))
    not_imported = {IMPORTED_AS.get(name, name) for name in required} - imported
    site_tools = {"mkdocs-material", "mkdocstrings"}
    assert not_imported == {"mypy", "ruff", "importlinter", *site_tools, *CUDNN_LIBRARIES}


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_file_names_a_path_of_somebodys_machine(tracked_files: list[Path]) -> None:
    found = []
    for path in tracked_files:
        if (ROOT / path).is_symlink():
            assert not (ROOT / path).readlink().is_absolute(), path
        else:
            text = (ROOT / path).read_text(encoding="utf-8", errors="ignore")
            found += [f"{path}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found
