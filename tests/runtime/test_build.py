"""Kernels on disk: built ahead for a GPU that is not here, found without a compiler, and identical to those that a call makes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from flexattn.bench import stub_driver
from flexattn.kernels_triton.runtime import store

needs_compiler = pytest.mark.skipif(
    stub_driver.compiler() is None, reason="the driver that stands in for CUDA's needs a C compiler"
)

# A call, forward and backward, in a process whose driver does nothing; "no" forbids compiling.
CALL = """
import sys
import torch
from flexattn.bench import stub_driver
stub_driver.install()
from triton.runtime.jit import JITFunction
import flexattn
from flexattn.kernels_triton.runtime import launch

def refuse(*_, **__):
    raise AssertionError("Triton was asked to compile")

if sys.argv[1] == "no":
    JITFunction._do_compile = refuse
q, k, v = (torch.zeros(3, 200, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
for length in (200, 150):
    out = flexattn.attention(q[:, :length], k, v, attn_mask_type="causal", dropout_p=0.1, backend="triton")
    out.sum().backward()
print(launch.kernel_cache_info())
"""


@pytest.mark.slow
@needs_compiler
def test_what_is_built_ahead_is_what_a_call_compiles(forked_python, tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    what = ("--q", "1,190,4,64", "--mask", "causal", "--dropout", "0.1", "--capability", "9.0", "--workers", "2")
    env = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "FLEXATTN_HOPPER": "never"}
    built = forked_python("-m", "flexattn", "build", *what, "--out", str(shipped), env=env)
    assert built.returncode == 0, built.stderr
    assert built.stdout.startswith("3 built, 0 there already")
    refused = forked_python("-c", CALL, "no", env=env | {"FLEXATTN_KERNELS": str(own)})
    assert "was asked to compile" in refused.stderr
    ran = forked_python("-c", CALL, "no", env=env | {"FLEXATTN_KERNELS": str(shipped)})
    assert ran.stdout == "{'hits': 3, 'misses': 3, 'size': 3}\n", ran.stdout + ran.stderr

    readable = [shipped.stat().st_mode & 0o777, *{path.stat().st_mode & 0o777 for path in shipped.iterdir()}]
    assert readable == [0o755, 0o644], "an image may be made by one user and run by another"

    compiled = forked_python("-c", CALL, "yes", env=env | {"FLEXATTN_KERNELS": str(own)})
    assert compiled.returncode == 0, compiled.stderr
    assert {path.name: path.read_bytes() for path in own.iterdir()} == {path.name: path.read_bytes() for path in shipped.iterdir()}


WARM = """
import torch
from flexattn.bench import stub_driver
stub_driver.install()
from triton.runtime.jit import JITFunction
import flexattn

def refuse(*_, **__):
    raise AssertionError("Triton was asked to compile")

JITFunction._do_compile = refuse  # in this process: warmup compiles in others
calls = [dict(zip("qkv", [torch.zeros(1, 100, 4, d, dtype=torch.bfloat16)] * 3), backend="triton") for d in (64, 128)]
print([e.forward.backend for e in flexattn.warmup(*calls, workers=2)])
flexattn.attention(**calls[0])  # on sm_90: its tensor maps are made by Triton's driver, which nothing has asked for yet
"""


@needs_compiler
@pytest.mark.slow
def test_warmup_compiles_several_at_a_time(forked_python, tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "FLEXATTN_KERNELS": str(tmp_path / "kernels")}
    ran = forked_python("-c", WARM, env=env | {"FLEXATTN_HOPPER": "always"})
    assert ran.stdout == "['triton', 'triton']\n", ran.stdout + ran.stderr
    assert "flexattn.warmup" in ran.stderr
    assert len([*(tmp_path / "kernels").iterdir()]) == 2


def test_build_says_what_it_cannot(forked_python, tmp_path: Path) -> None:
    ran = forked_python("-m", "flexattn", "build", "--q", "1,64,4,60", "--capability", "9.0", "--out", str(tmp_path))
    assert ran.returncode == 2
    assert "head dim" in ran.stderr
    ran = forked_python(*("-m", "flexattn", "build", "--q", "1,64,4,64", "--out", str(tmp_path)), env={"CUDA_VISIBLE_DEVICES": ""})
    assert "--capability" in ran.stderr


BINARY = store.Binary("kernel", ["*bf16", ["i32", "fp32"], "constexpr"], 4, 1024, [{"swizzle": 3}], False, b"\x00\nbinary\n")


def test_a_file_says_all_or_nothing(tmp_path: Path) -> None:
    text = "what it is compiled for"
    assert store.find(tmp_path, text) is None
    store.keep(tmp_path, text, BINARY)
    assert store.find(tmp_path, text) == BINARY
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole[:20], b"", b"[]\n", whole.replace(text.encode(), b"something else entirely"), b"\xff\xfe\n"):
        path.write_bytes(wrong)
        assert store.find(tmp_path, text) is None
    head = json.loads(whole.split(b"\n")[1])
    assert head["text"] == text
    path.write_bytes(whole)
    store.keep(tmp_path, "another", BINARY)
    [other] = set(tmp_path.iterdir()) - {path}
    path.replace(other)
    assert store.find(tmp_path, "another") is None, "a whole file for something else"


def with_digest(content: bytes) -> bytes:
    return f"flexattn {store._KIND} {hashlib.sha256(content).hexdigest()}\n".encode() + content


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "what", "binary": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b"[]\n",
        b"7\n",
        b'{"text": "what", "binary": [1, 2]}\ncode',
        b'{"text": "what"}\n',
        b'{"text": "another", "binary": ["kernel", [], 4, 0, []]}\ncode',
        b'\xff{"text": "what"}\n',
        b"",
    ],
    ids=["deep", "list", "number", "short", "no binary", "another text", "no UTF-8", "nothing"],
)
def test_what_something_else_wrote_is_a_miss(tmp_path: Path, content: bytes) -> None:
    store._path(tmp_path, "what").write_bytes(with_digest(content))
    assert store.find(tmp_path, "what") is None
    store.keep(tmp_path, "what", BINARY)
    assert store.find(tmp_path, "what") == BINARY


def test_a_kernel_of_zeros_is_a_miss(tmp_path: Path) -> None:
    """The length and the header are right, as after a crash of the machine."""
    store.keep(tmp_path, "what", BINARY)
    path = store._path(tmp_path, "what")
    path.write_bytes(path.read_bytes().replace(BINARY.code, bytes(len(BINARY.code))))
    assert store.find(tmp_path, "what") is None
