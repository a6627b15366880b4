"""Measures of how simple the code is, each beside its target: `python -m tests.targets [--root CHECKOUT] [--static]`.

Every number is measured in the checkout. The exit status is 1 if a target that was reached is missed: `Target.holds`, and
tests/repository/test_targets.py tests it. `--static` leaves out the calls, which run in processes of their own.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import structure, style
from tests.support import syntax, visits

ROOT = Path(__file__).parent.parent
KERNELS = "flexattn.kernels_triton"
PRIMITIVES = f"{KERNELS}.common.primitives"
MANY = 9  # arguments of attention in one listing
ONE_ARGUMENT = "cu_seqlens_q_padded"
DOORS = {"cli", "distributed", "integrations", "jax", "mods"}  # folders of flexattn that are not the call itself
LONG_SENTENCE = 25
OPENING = re.compile(r"(Of|Over|Beside|Under|Where|What|Behind|Whose|Those|Within|Among) [a-z]")


class Target(NamedTuple):
    """A measure, and the value that it is to have at most, or at least."""

    name: str
    most: float | None = None
    least: float | None = None
    holds: bool = False  # reached: a change must not miss it again

    def is_met(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


# Features that came after the targets were set, with the files and folders that hold nothing else.
LATER = {
    "mma.sync": ("kernels_triton/mma", "kernels_triton/runtime/other_target.py", "bench/mma.py"),
    "lists of blocks": ("kernels_triton/sparse/block_forward.py", "kernels_triton/sparse/block_backward.py"),
    "lists of keys": (
        *("kernels_triton/sparse", "dispatch/key_lists.py", "flexattn/key_lists.py", "flexattn/indexer.py"),
        *("flexattn/latent_rows.py", "flexattn/integrations/transformers/selection.py"),
    ),
    "forwards with a tangent": ("kernels_triton/hopper/tangent.py",),
    "second derivatives": (
        *(
            "kernels_triton/second_order",
            "kernels_triton/common/row_tiles.py",
            "dispatch/second_order.py",
            "dispatch/triton_second_order.py",
        ),
        *("flexattn/second_order.py", "flexattn/mods/second.py", "flexattn/jax/derivatives.py", "bench/second_order.py"),
    ),
    "statistics": ("kernels_triton/portable/weight_statistics.py", "flexattn/statistics.py"),
    "shared biases": (
        "kernels_triton/portable/shared_bias_gradient.py",
        "kernels_triton/portable/own_bias_gradient.py",
        "flexattn/integrations/cuequivariance.py",
    ),
    "few keys and head dims in parts": ("kernels_triton/hopper/few_keys.py", "kernels_triton/hopper/forward_parts.py"),
    "backward above head dim 256": ("kernels_triton/hopper/backward_wide.py",),
    "diffusers": ("flexattn/integrations/diffusers.py",),
    "trainers": (
        *("flexattn/integrations/megatron.py", "flexattn/integrations/torchtitan.py"),
        "bench/package_models.py",
    ),
    "engines": (
        *(f"flexattn/integrations/{name}.py" for name in ("engines", "sglang", "vllm")),
        "bench/engines.py",
    ),
    "QK-norm and rotary positions": (
        *("kernels_triton/portable/norm_rope.py", "dispatch/norm_rope.py"),
        *("flexattn/norm_rope.py", "bench/norm_rope.py"),
    ),
    "verify and models": ("flexattn/cli/verify.py", "bench/model_shapes.py", "bench/model_tables.py"),
}

TARGETS = [
    Target("lines of source, without later features", most=65_000),
    *(Target(f"lines of source for {feature}") for feature in LATER),
    Target("lines in the wheel, without later features", most=61_000),
    Target("lines of device code, without later features", most=8_200, holds=True),  # 218 are for head dims in parts
    Target("lines of device code for mma.sync", most=750, holds=True),
    Target("lines of device code for lists of keys", most=1_050, holds=True),
    Target("lines of device code for lists of blocks", most=220, holds=True),
    Target("lines of device code for second derivatives", most=480, holds=True),
    Target("lines of device code for forwards with a tangent", most=400, holds=True),
    Target("lines of device code for statistics", most=150, holds=True),
    Target("lines of device code for few keys and head dims in parts", most=300, holds=True),
    Target("lines of device code for backward above head dim 256", most=220, holds=True),
    Target("lines of device code for shared biases", most=100, holds=True),
    Target("lines of device code for QK-norm and rotary positions", most=180, holds=True),
    Target("lines of tests"),
    Target(f"listings of {MANY} or more arguments of attention", most=8, holds=True),
    Target(f"files of flexattn (without {', '.join(sorted(DOORS))}) and dispatch that name {ONE_ARGUMENT}", most=6, holds=True),
    Target("first eager call: files", most=14, holds=True),
    Target("first eager call: functions", most=90, holds=True),
    Target("warm eager call: files", most=7, holds=True),
    Target("warm eager call: functions", most=13, holds=True),
    Target("warm call over two ranks: files", most=15, holds=True),
    Target("warm call over two ranks: functions", most=80, holds=True),
    Target("warm call of JAX outside of jit: files", most=10, holds=True),
    Target("warm call of JAX outside of jit: functions"),
    Target("functions named slower", most=1, holds=True),
    Target("files of dispatch and kernels_triton whose constants cite a result file (thresholds)", most=1, holds=True),
    Target("longest chain of imports in kernels_triton", most=10, holds=True),
    Target("files that import common/primitives.py", most=0, holds=True),
    Target("modules of hopper that blackwell imports", most=0, holds=True),
    Target("lines of the largest function on the host", most=150, holds=True),
    Target("lines of the largest device function", most=120, holds=True),
    Target("stage arithmetic in device functions (n % STAGES, n // STAGES)", most=6, holds=True),
    Target("reads of a work tile's numbers by position", most=0, holds=True),
    Target("lines that mypy does not check", most=9_000, holds=True),
    Target("uses of Any in source", most=1_200, holds=True),
    Target("source: if, when per 1,000 words of comments and docstrings", least=3.5, holds=True),
    Target("source: where, what per 1,000 words of comments and docstrings", most=3, holds=True),
    Target("source: % of sentences with more than 25 words", most=5, holds=True),
    Target("source: % of sentences that open with a late subject", most=1, holds=True),
    Target("tests: if, when per 1,000 words of comments and docstrings", least=3.5, holds=True),
    Target("tests: where, what per 1,000 words of comments and docstrings", most=3, holds=True),
    Target("names in source that begin with of_", most=0, holds=True),
    Target("words of docs", most=55_000),
    Target("faults that are text edits", most=0, holds=True),
]


def measured(root: Path) -> dict[str, float]:
    """Returns the measures of a checkout that need no call, by name."""
    found = structure.modules(root)
    source = [module for module in found if module.path.parts[0] != "tests"]
    kernels = [module for module in source if module.path.parts[0] == "kernels_triton"]
    device = [(module, function) for module in kernels for function in structure.device_functions(module)]
    device_lines = {(module.path, line) for module, function in device for line in _lines(function)}
    graph = structure.imports(found)
    blackwell = {other for name, others in graph.items() if name.startswith(f"{KERNELS}.blackwell") for other in others}
    inside = {id(node) for _, function in device for node in ast.walk(function)}
    host = [node for m in source for node in ast.walk(m.tree) if isinstance(node, ast.FunctionDef) and id(node) not in inside]
    thresholds = [m for m in source if m.path.parts[0] in ("dispatch", "kernels_triton") and cites(m, result_files(root))]
    callers = [
        m for m in source if m.path.parts[0] == "dispatch" or (m.path.parts[0] == "flexattn" and m.path.parts[1] not in DOORS)
    ]
    names = arguments_of_attention(source)
    values: dict[str, float] = {
        "lines in the wheel, without later features": sum(
            _length(module) for module in source if is_in_wheel(module, root) and later_feature(module.path) is None
        ),
        "lines of tests": sum(_length(module) for module in found if module.path.parts[0] == "tests"),
        f"listings of {MANY} or more arguments of attention": sum(
            listings(module.tree, names, may_sign=module.path.parts[:2] == ("flexattn", "integrations")) for module in source
        ),
        f"files of flexattn (without {', '.join(sorted(DOORS))}) and dispatch that name {ONE_ARGUMENT}": sum(
            bool(re.search(rf"\b{ONE_ARGUMENT}\b", module.text)) for module in callers
        ),
        "functions named slower": sum(bool(re.search(r"(^|_)slower$", function.name)) for function in host),
        "files of dispatch and kernels_triton whose constants cite a result file (thresholds)": len(thresholds),
        "longest chain of imports in kernels_triton": structure.depth(graph, KERNELS),
        "files that import common/primitives.py": sum(PRIMITIVES in others for others in graph.values()),
        "modules of hopper that blackwell imports": sum(other.startswith(f"{KERNELS}.hopper") for other in blackwell),
        "lines of the largest function on the host": max(map(_height, host)),
        "lines of the largest device function": max((_height(function) for _, function in device), default=0),
        "stage arithmetic in device functions (n % STAGES, n // STAGES)": sum(
            is_stage_arithmetic(node) for _, function in device for node in ast.walk(function)
        ),
        "reads of a work tile's numbers by position": sum(
            is_read_by_position(node) for _, function in device for node in ast.walk(function)
        ),
        "lines that mypy does not check": sum(unchecked_lines(module, root) for module in source),
        "uses of Any in source": sum(
            isinstance(node, ast.Name) and node.id == "Any" for module in source for node in ast.walk(module.tree)
        ),
        "names in source that begin with of_": sum(
            token.type == tokenize.NAME and token.string.startswith("of_") for module in source for token in _tokens(module.text)
        ),
        "words of docs": sum(style.words(page.read_text("utf-8")) for page in (root / "docs").rglob("*.md")),
        "faults that are text edits": text_edits(root),
    }
    for feature in (None, *LATER):
        end = f" for {feature}" if feature else ", without later features"
        values["lines of source" + end] = sum(_length(module) for module in source if later_feature(module.path) == feature)
        values["lines of device code" + end] = sum(later_feature(path) == feature for path, _ in device_lines)
    for part, modules in (("source", source), ("tests", [module for module in found if module.path.parts[0] == "tests"])):
        values |= {f"{part}: {name}": value for name, value in rates([module.text for module in modules]).items()}
    return values


@functools.cache
def later_feature(path: Path) -> str | None:
    """Returns the name in LATER of the feature that a file is for, if any."""
    return next((feature for feature, places in LATER.items() if any(path.is_relative_to(place) for place in places)), None)


def _length(module: structure.Module) -> int:
    return module.text.count("\n")


def _lines(function: ast.FunctionDef) -> range:
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    return range(first, (function.end_lineno or first) + 1)


def _height(function: ast.FunctionDef) -> int:
    return len(_lines(function))


@functools.cache
def _pyproject(root: Path) -> str:
    return (root / "pyproject.toml").read_text("utf-8")


def is_in_wheel(module: structure.Module, root: Path) -> bool:
    packages = re.search(r"^packages = \[(.*?)^\]", _pyproject(root), re.MULTILINE | re.DOTALL)
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    return packages is not None and f'"{package}"' in packages[1]


def unchecked_lines(module: structure.Module, root: Path) -> int:
    """Returns the number of lines that mypy skips: a module whose errors it ignores, or functions without types."""
    if is_unchecked(module, root):
        return module.text.count("\n")
    return len({line for function in untyped_functions(module, root) for line in _lines(function)})


def is_unchecked(module: structure.Module, root: Path) -> bool:
    """Whether mypy ignores the errors of a module, by pyproject.toml or by a comment of its own."""
    by_comment = re.search(r"^# mypy: .*ignore-errors", module.text, re.MULTILINE)
    return bool(by_comment) or _is_set(module, root, ["ignore_errors = true", 'follow_imports = "skip"'], "ignore_errors = false")


def untyped_functions(module: structure.Module, root: Path) -> list[ast.FunctionDef]:
    """Functions without types, which mypy skips, if pyproject.toml permits them."""
    if not may_be_untyped(module, root):
        return []
    functions = [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef)]
    return [x for x in functions if not any(y.annotation for y in ast.walk(x.args) if isinstance(y, ast.arg)) and not x.returns]


def may_be_untyped(module: structure.Module, root: Path) -> bool:
    return _is_set(module, root, ["disallow_untyped_defs = false"], "disallow_untyped_defs = true")


def _is_set(module: structure.Module, root: Path, on: list[str], off: str) -> bool:
    """Whether a table of mypy's overrides has a setting for a module; mypy prefers the name of a module to a pattern."""
    is_on = False
    for table in re.split(r"^\[\[?", _pyproject(root), flags=re.MULTILINE):
        names = re.search(r"^module *= *(\[.*?\]|\".*?\")", table, re.MULTILINE | re.DOTALL)
        if not table.startswith("tool.mypy.overrides") or not names:
            continue
        patterns = re.findall(r'"([^"]+)"', names[1])
        if off in table and module.name in patterns:
            return False
        if any(setting in table for setting in on):
            is_on = is_on or any(
                re.fullmatch(re.escape(pattern).replace(r"\.\*", r"(\..*)?").replace(r"\*", ".*"), module.name)
                for pattern in patterns
            )
    return is_on


def arguments_of_attention(source: list[structure.Module]) -> set[str]:
    """Returns the names of attention's options: in its signature, and in the typed dicts that its signature is made of."""
    names: set[str] = set()
    for module in source:
        if module.path.parts[0] != "flexattn" or module.path.parts[1] in DOORS:
            continue
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "attention":
                names |= {x.arg for x in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Options") and "Dict" in module.text:
                names |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    return names - {"q", "k", "v"}


def listings(tree: ast.Module, names: set[str], may_sign: bool = False) -> int:
    """Returns how many nodes list many of the names: signatures, calls, classes, dicts, tuples, conditions and strings.

    may_sign: whether signatures do not count, because they are those of another library.
    """
    nodes = (node for node in ast.walk(tree) if not (may_sign and isinstance(node, ast.arguments)))
    return sum(len(names.intersection(_listed(node))) >= MANY for node in nodes)


def _listed(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.arguments):
        yield from (x.arg for x in (*node.args, *node.kwonlyargs))
    elif isinstance(node, ast.Call):
        yield from (x.arg for x in node.keywords if x.arg)
        yield from map(_word, node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            yield from _word(node.func.value).split()
    elif isinstance(node, ast.ClassDef):
        yield from (_word(x.target) for x in node.body if isinstance(x, ast.AnnAssign))
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        yield from map(_word, node.elts)
    elif isinstance(node, ast.Dict):
        yield from (_word(x) for x in node.keys if x is not None)
    elif isinstance(node, ast.BoolOp):
        yield from (x.id for value in node.values for x in ast.walk(value) if isinstance(x, ast.Name))


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_stage_arithmetic(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)) and "STAGES" in _word(node.right)


def is_read_by_position(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("numbers", "tile", "message")


@functools.cache
def result_files(root: Path) -> tuple[str, ...]:
    return tuple(path.stem for path in sorted((root / "bench" / "results").glob("*.json")))


def cites(module: structure.Module, results: tuple[str, ...]) -> bool:
    """Whether a constant of a module, or the comment above it, names a result file, as a threshold does that was measured."""
    lines = module.text.splitlines()
    for node in module.tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            first = node.lineno - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            text = "\n".join(lines[first : node.end_lineno])
            if any(re.search(rf"\b{re.escape(name)}\b", text) for name in results):
                return True
    return False


def text_edits(root: Path) -> int:
    """Returns the number of faults in the list that are edits of text, not of syntax."""
    faults = json.loads((root / "tests" / "faults.json").read_text("utf-8"))
    has_syntax = (root / "tests" / "support" / "syntax.py").exists()
    return sum(not (has_syntax and syntax.is_fragment(fault["old"]) and syntax.is_fragment(fault["new"])) for fault in faults)


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def prose(text: str) -> list[str]:
    """Returns the units of prose in a file: paragraphs of docstrings, blocks of comments, and each comment behind code.

    Code in backticks and indented blocks behind "::" count as no words. An item, such as the description of an argument, is a unit.
    """
    units: list[str] = []
    block, last = [], -1
    for token in _tokens(text):
        if token.type != tokenize.COMMENT or re.match(r"#(!|:| *(noqa|type:|mypy:|ruff:|fmt:|pragma))", token.string):
            continue
        comment = token.string.lstrip("# ").rstrip()
        is_alone = not token.line[: token.start[1]].strip()
        if is_alone and token.start[0] == last + 1:
            block.append(comment)
        else:
            units.append(" ".join(block))
            block = [comment]
        last = token.start[0] if is_alone else -1
    units.append(" ".join(block))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = re.sub(r"::\n\n((?: +.*\n|\n)+)", ".\n\n", (ast.get_docstring(node) or "") + "\n")
            for paragraph in docstring.split("\n\n"):
                units += re.split(r"\n(?= {4}[\w*, ]+: |[-*] |\w+: )", paragraph)
    return [" ".join(re.sub(r"``.+?``|`[^`]+`", "Code", unit).split()) for unit in units if unit.strip()]


def rates(texts: list[str]) -> dict[str, float]:
    """Returns the rates of words and sentences in the prose of files."""
    units = [unit for text in texts for unit in prose(text)]
    words = [word for unit in units for word in re.findall(r"[a-z']+", unit.lower())]
    sentences = [x for unit in units for x in style.sentences(unit) if len(x.split()) > 3]
    per_thousand = 1000 / max(len(words), 1)
    percent = 100 / max(len(sentences), 1)
    return {
        "if, when per 1,000 words of comments and docstrings": per_thousand * sum(word in ("if", "when") for word in words),
        "where, what per 1,000 words of comments and docstrings": per_thousand * sum(word in ("where", "what") for word in words),
        f"% of sentences with more than {LONG_SENTENCE} words": percent * sum(len(x.split()) > LONG_SENTENCE for x in sentences),
        "% of sentences that open with a late subject": percent * sum(bool(OPENING.match(x)) for x in sentences),
    }


def _ran(root: Path, case: str) -> list[tuple[str, str]] | None:
    """Returns the functions of a checkout that a call visits; None if the call cannot run here. Prints the reason."""
    ranks = 2 if case == "two_ranks" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-P" if sys.version_info >= (3, 11) else "-B",
                visits.__file__,
                case,
                *((str(i), port) if ranks > 1 else ()),
            ],
            env=environment,
            cwd=root.anchor,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(ranks)
    ]
    (out, error), *_ = [process.communicate() for process in processes]
    if processes[0].returncode:
        print(f"{case}: {error.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return [(file, name) for file, name in json.loads(out)]


CALLS = {
    "first eager call": "first",
    "warm eager call": "warm",
    "warm call over two ranks": "two_ranks",
    "warm call of JAX outside of jit": "jax",
}


def called(root: Path, ran: Callable[[Path, str], Any] = _ran) -> dict[str, float]:
    """Returns the measures of calls, by name, without those that cannot run here."""
    values: dict[str, float] = {}
    for name, case in CALLS.items():
        if (visited := ran(root, case)) is not None:
            values |= {f"{name}: files": len({file for file, _ in visited}), f"{name}: functions": len(set(visited))}
    return values


def missed(values: dict[str, float]) -> list[str]:
    """Returns the targets that must hold and do not."""
    held = [target for target in TARGETS if target.holds and target.name in values]
    return [f"{target.name}: {values[target.name]:g}" for target in held if not target.is_met(values[target.name])]


def table(columns: dict[str, dict[str, float]]) -> str:
    """Returns the measures of checkouts side by side, in Markdown."""
    lines = [f"| | {' | '.join(columns)} | target | |", f"|---|{'---:|' * len(columns)}---:|---|"]
    for target in TARGETS:
        goal = f"at most {target.most:,g}" if target.most is not None else f"at least {target.least:g}" if target.least else ""
        shown = [f"{values[target.name]:,.5g}" if target.name in values else "-" for values in columns.values()]
        last = [*columns.values()][-1].get(target.name)
        verdict = "" if not goal or last is None else "reached" if target.is_met(last) else "not reached"
        lines.append(f"| {target.name} | {' | '.join(shown)} | {goal} | {verdict}{', must hold' * target.holds} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout, with its links")
    parser.add_argument("--before", type=Path, help="a checkout for a column before it")
    parser.add_argument("--static", action="store_true", help="without the calls")
    arguments = parser.parse_args(argv)
    roots = {"before": arguments.before, "now": arguments.root}
    columns = {
        name: measured(root.resolve()) | ({} if arguments.static else called(root.resolve()))
        for name, root in roots.items()
        if root
    }
    print(table(columns))
    failures = missed(columns["now"])
    for failure in failures:
        print(f"missed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
