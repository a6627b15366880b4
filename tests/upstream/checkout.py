"""FlashAttention's test files: from a checkout to files that run on a CPU and find flexattn under FlashAttention's names."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.integrations import flash_attn

HELPERS = {"hopper": ("padding.py", "test_util.py")}  # imported by the neighbouring test files

# Arguments that choose a kernel. An older FlashAttention 3 takes them and no later one does: calls are made without them.
GONE = ("gqa_parallel", "max_seqlen_k_hint")
UNPACKED = "flash_attn_with_kvcache"  # its results are unpacked as two, but newer versions return four
MANY, FEW = 50, 3  # repeats of a call to find races between a GPU's threads, there and here
SMALLER = {"65536": 8192, "70 * 1024 ** 3": 1}  # tokens of a cache that no test fills; a GPU's memory


class _Private:
    """A private name of FlashAttention's: a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"uses `{self._name}`, which is private to FlashAttention")

    def __getattr__(self, name: str) -> Any:
        return self() if not name.startswith("__") else object.__getattribute__(self, name)

    def __bool__(self) -> bool:
        return False


class _OnCpu(ast.NodeTransformer):
    """Rewrites a test file: device "cuda" to "cpu", arguments or results of older versions, repeats, memory."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant | ast.BinOp) and (text := ast.unparse(node)) in SMALLER:
            return ast.copy_location(ast.Constant(SMALLER[text]), node)
        return super().visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu" if node.value == "cuda" else node.value), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in GONE]
        if isinstance(node.func, ast.Name) and node.func.id == "range" and isinstance(node.args[-1], ast.Constant):
            times = node.args[-1].value
            node.args[-1] = ast.Constant(times if times < MANY else FEW)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target, value = node.targets[0], node.value
        is_call = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(UNPACKED)
        if is_call and isinstance(target, ast.Tuple) and not any(isinstance(name, ast.Starred) for name in target.elts):
            target.elts.append(ast.Starred(ast.Name("_", ast.Store()), ast.Store()))
        return self.generic_visit(node)


def on_cpu(path: Path) -> str:
    """Returns a file's text, rewritten for a CPU."""
    return ast.unparse(_OnCpu().visit(ast.parse(path.read_text("utf-8"))))


def written(checkout: Path, file: str, folder: Path) -> Path:
    """Writes a test file, and its neighbours that it imports, for a CPU; returns its path."""
    for name in (Path(file).name, *HELPERS.get(Path(file).parts[0], ())):
        (folder / name).write_text(on_cpu((checkout / file).with_name(name)), "utf-8")
    return folder / Path(file).name


def _from_checkout(name: str, path: Path) -> types.ModuleType:
    """Returns a module of the checkout, rewritten for a CPU, imported under a name of its own."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(on_cpu(path), str(path), "exec"), module.__dict__)
    return module


def _rotary(checkout: Path) -> types.ModuleType:
    """Returns `flash_attn.layers.rotary` with its function in torch, at any offsets, in place of its Triton kernel."""
    kernel = sys.modules["flash_attn.ops.triton.rotary"] = types.ModuleType("flash_attn.ops.triton.rotary")
    kernel.apply_rotary = _Private("apply_rotary")  # type: ignore[attr-defined]
    module: Any = _from_checkout("flash_attn.layers.rotary", checkout / "flash_attn" / "layers" / "rotary.py")

    def apply_rotary_emb(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, *, seqlen_offsets: int | torch.Tensor = 0
    ) -> torch.Tensor:
        positions = torch.as_tensor(seqlen_offsets).view(-1, 1) + torch.arange(x.shape[1])
        rotated: torch.Tensor = module.apply_rotary_emb_torch(
            x.float(), cos[positions].float(), sin[positions].float(), interleaved
        )
        return rotated.to(x.dtype)

    module.apply_rotary_emb = apply_rotary_emb
    return module


def provide(checkout: Path, file: str) -> None:
    """Puts flexattn under FlashAttention's names, with the other imports of its test files.

    These are the checkout's reference (`flash_attn.cute.testing`, torch alone), its rotary embedding in torch, and placeholders
    for private names. torch.cuda describes a GPU of the files' own kernels. If it described another, FlashAttention 4's tests
    would skip most.
    """
    cuda: Any = torch.cuda
    capability = (10, 0) if "cute" in file else (9, 0)
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    flash_attn.install()
    _from_checkout("flash_attn.cute.testing", checkout / "flash_attn" / "cute" / "testing.py")
    _rotary(checkout)
    for node in ast.walk(ast.parse((checkout / file).read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("flash_attn"):
            continue
        assert node.module is not None
        module = sys.modules.setdefault(node.module, types.ModuleType(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                setattr(module, alias.name, _Private(alias.name))
