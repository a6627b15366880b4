"""Numbers on how the code is built, of this checkout or another one, from its syntax trees.

python tests/structure.py [CHECKOUT] [--json]
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn", "bench", "emulator", "tests")
KERNEL = re.compile(r"(\w+_)?kernel")  # decorators of functions that are launched
DEVICE = re.compile(rf"jit|{KERNEL.pattern}")
MOST_PARAMETERS = 8
FEW_UNDERSCORES = 3
UNCLEAR = ("What ", "Of ", "Whether ", "As that of ", "That ", "Those ", "Where ", "How ", "Which ")


class Module(NamedTuple):
    name: str  # as it is imported, "flexattn.dispatch.spec"
    path: Path
    text: str
    tree: ast.Module


def modules(checkout: Path, pattern: str = "") -> list[Module]:
    """The source files of a checkout, each once: the links inside flexattn/ are not followed.

    The files of tests have empty trees, and so have files without the pattern, because parsing takes most of the time.
    """
    found = []
    for folder in FOLDERS:
        links = [path for path in (checkout / folder).glob("*") if path.is_symlink()]
        for path in sorted((checkout / folder).rglob("*.py")):
            if not any(link in path.parents for link in links):
                parts = path.relative_to(checkout).with_suffix("").parts
                parts = parts if parts[0] in ("flexattn", "tests") else ("flexattn", *parts)
                text = path.read_text(encoding="utf-8")
                found.append(
                    Module(
                        ".".join(parts).removesuffix(".__init__"),
                        path.relative_to(checkout),
                        text,
                        ast.parse(text if folder != "tests" and re.search(pattern, text) else ""),
                    )
                )
    return found


def device_functions(module: Module) -> Iterator[ast.FunctionDef]:
    """Functions that Triton or Gluon compiles."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and any(DEVICE.fullmatch(_name(x)) for x in node.decorator_list):
            yield node


def has_kernel(module: Module) -> bool:
    return any(KERNEL.fullmatch(_name(x)) for node in device_functions(module) for x in node.decorator_list)


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def unpackings(function: ast.FunctionDef) -> Iterator[ast.Assign]:
    """Assignments that take a named tuple's place apart by position: of three names or more, from a plain name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Name):
            yield from [node] * (len(node.targets[0].elts) >= FEW_UNDERSCORES)


def unclear_docstrings(module: Module) -> Iterator[str]:
    """The first lines of docstrings that begin with neither a verb nor a noun that names their subject."""
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            if text.startswith(UNCLEAR):
                yield text.partition("\n")[0]


def unclear_comments(module: Module) -> Iterator[str]:
    """Comments behind code that begin with "of", so that their subject is left to the reader."""
    for line in module.text.splitlines():
        code, _, comment = line.rpartition("  # ")
        if code.strip() and comment.startswith("of "):
            yield line.strip()


def imports(found: list[Module]) -> dict[str, set[str]]:
    """By module the modules of the project that it imports, in functions too, but for those that only annotations need."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        wanted: set[str] = set()
        for node in _run(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted |= {part if part in names else node.module for part in parts}
            elif isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
        graph[module.name] = (wanted & names) - {module.name}
    return graph


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _run(child)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other by imports (Tarjan's strongly connected components), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


def depth(graph: dict[str, set[str]], within: str) -> int:
    """Modules on the longest way of imports inside a package."""
    inside = {name: {x for x in others if x.startswith(within)} for name, others in graph.items() if name.startswith(within)}
    known: dict[str, int] = {}

    def of(name: str, path: tuple[str, ...]) -> int:
        if name not in known:
            known[name] = 1 + max((of(x, (*path, name)) for x in inside[name] if x not in path), default=0)
        return known[name]

    return max((of(name, ()) for name in inside), default=0)


def measured(checkout: Path) -> dict[str, Any]:
    """The numbers, each under a name that says what it counts."""
    found = modules(checkout)
    kernels = [module for module in found if module.path.parts[0] == "kernels_triton"]
    functions = [(module, function) for module in kernels for function in device_functions(module)]
    graph = imports(found)
    with_kernels = {module.name for module in kernels if has_kernel(module)}
    lines = Counter[str]()
    for module in found:
        lines[module.path.parts[0]] += module.text.count("\n")
    largest = max(kernels, key=lambda module: module.text.count("\n"))
    widest_module, widest = max(functions, key=lambda pair: parameters(pair[1]))
    positional = [node for _, function in functions for node in unpackings(function)]
    return {
        "lines": dict(lines),
        "largest kernel file": f"{largest.path}, {largest.text.count(chr(10))} lines",
        "largest signature of a device function": f"{widest.name} in {widest_module.path}, {parameters(widest)} parameters",
        f"device functions with more than {MOST_PARAMETERS} parameters": sum(
            parameters(function) > MOST_PARAMETERS for _, function in functions
        ),
        "files of kernels that import files of kernels": sum(bool(graph[name] & with_kernels) for name in with_kernels),
        "modules on the longest way of imports in kernels_triton": depth(graph, "flexattn.kernels_triton"),
        "tuples taken apart by position in device functions": len(positional),
        "docstrings that do not name their subject": sum(len([*unclear_docstrings(module)]) for module in found),
        "circles of imports": [" <-> ".join(group) for group in circles(graph)],
    }


def main(argv: list[str]) -> None:
    checkout = next((Path(word) for word in argv if not word.startswith("-")), ROOT)
    numbers = measured(checkout)
    if "--json" in argv:
        print(json.dumps(numbers, indent=1))
        return
    for name, value in numbers.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main(sys.argv[1:])
