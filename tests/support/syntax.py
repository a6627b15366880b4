"""Edits of Python source by syntax: a fragment of code is found in a file's syntax tree, and another one takes its place.

A fragment is one expression, one keyword argument, or one or more statements in a row. Layout, comments and quotes do not matter. A
body `...` in the old fragment matches every body, which the statement `...` of the new fragment repeats. The rest of the file stays
as it is.
"""

from __future__ import annotations

import ast
import copy
import functools
import textwrap
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

Scope: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Dict, ast.Set, ast.Tuple)


class _Place(NamedTuple):
    """Nodes of a file that match a fragment."""

    nodes: list[ast.expr] | list[ast.keyword] | list[ast.stmt]
    body: list[ast.stmt]  # the statements that `...` stands for


def scopes(tree: ast.Module, where: str) -> list[Scope]:
    """Returns the functions and classes with a name, such as "f" or "Class.method". An empty name is the file."""
    if not where:
        return [tree]
    return [scope for name, scope in _named(tree, "") if f".{name}".endswith(f".{where}")]


def replaced(source: str, old: str, new: str, where: str = "") -> str:
    """Returns the source with `new` in the place of `old`, which stands once in the file, or in the function or class `where`."""
    old_statements, new_statements = _statements(old), _statements(new)
    found = scopes(_parsed(source), where)
    if not found:
        raise ValueError(f"where is {where!r}; accepted: the name of a function or class of the file")
    old_expression, new_expression = _expression(old_statements), _expression(new_statements)
    if old_expression is not None and new_expression is not None:
        kind = type(old_expression)
        places = [_Place([node], []) for node in _expressions(source, where) if type(node) is kind and _same(node, old_expression)]
    else:
        places = [place for scope in found for block in _blocks(scope) for place in _matches(block, old_statements)]
        if (keyword := _keyword(old_statements)) is not None and _keyword(new_statements) is not None:
            nodes = [node for scope in found for node in ast.walk(scope) if isinstance(node, ast.keyword)]
            places += [_Place([node], []) for node in nodes if _same(node, keyword)]
    if len(places) != 1:
        lines = ", ".join(str(place.nodes[0].lineno) for place in places) or "none"
        raise ValueError(f"{old!r} is there {len(places)} times in {where or 'the file'} (lines: {lines}); accepted: once")
    first, last = places[0].nodes[0], places[0].nodes[-1]
    if new_expression is not None and isinstance(first, ast.expr):
        text = ast.unparse(new_expression) if isinstance(new_expression, _ATOMS) else f"({ast.unparse(new_expression)})"
    elif isinstance(first, ast.keyword):
        text = ast.unparse(_keyword(new_statements) or first)
    else:
        text = _indented(_with_body(new_statements, places[0].body) or [ast.Pass()], first.col_offset // 4)
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    decorators = getattr(first, "decorator_list", [])
    first_line = min([first.lineno, *(node.lineno for node in decorators)]) - 1
    last_line = (last.end_lineno or last.lineno) - 1
    before = b"".join(lines[:first_line]) + lines[first_line][: first.col_offset]
    after = lines[last_line][last.end_col_offset :] + b"".join(lines[last_line + 1 :])
    return (before + text.encode() + after).decode()


def is_fragment(text: str) -> bool:
    """Whether a text is code that can be found by syntax."""
    try:
        return bool(_statements(text) or not text)
    except ValueError:
        return False


@functools.lru_cache(4)  # several faults of a file come one after another
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _statements(fragment: str) -> list[ast.stmt]:
    try:
        return ast.parse(textwrap.dedent(fragment)).body
    except SyntaxError as e:
        raise ValueError(f"{fragment!r} is not Python ({e}); accepted: one expression, or whole statements") from e


def _expression(statements: list[ast.stmt]) -> ast.expr | None:
    return statements[0].value if len(statements) == 1 and isinstance(statements[0], ast.Expr) else None


def _keyword(statements: list[ast.stmt]) -> ast.keyword | None:
    """Returns an assignment as an argument of a call, as which it reads the same."""
    if len(statements) == 1 and isinstance(statements[0], ast.Assign) and isinstance(statements[0].targets[0], ast.Name):
        return ast.keyword(statements[0].targets[0].id, statements[0].value)
    return None


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, Scope]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


@functools.lru_cache(16)
def _expressions(source: str, where: str) -> list[ast.expr]:
    """Returns the expressions in scopes, except for the parts of f-strings, whose positions Python 3.11 does not tell."""
    nodes: list[ast.AST] = [*scopes(_parsed(source), where)]
    found = []
    while nodes:
        for child in ast.iter_child_nodes(nodes.pop()):
            if isinstance(child, ast.expr):
                found.append(child)
            if not isinstance(child, ast.JoinedStr):
                nodes.append(child)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _blocks(scope: Scope) -> Iterator[list[ast.stmt]]:
    yield [scope]  # itself, in a fragment that changes its signature
    for node in ast.walk(scope):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _matches(block: list[ast.stmt], fragment: list[ast.stmt]) -> Iterator[_Place]:
    for i in range(len(block) - len(fragment) + 1):
        nodes, body = block[i : i + len(fragment)], []
        for node, pattern in zip(nodes, fragment, strict=True):
            if _has_open_body(pattern) and hasattr(node, "body"):
                body = node.body
                node = copy.copy(node)
                node.body = pattern.body
            if not _same(node, pattern):
                break
        else:
            yield _Place(nodes, body)


def _is_open(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and statement.value.value is ...


def _has_open_body(statement: ast.stmt) -> bool:
    body = getattr(statement, "body", None)
    return isinstance(body, list) and len(body) == 1 and _is_open(body[0])


def _with_body(statements: list[ast.stmt], body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements of a new fragment with a body in the place of `...`."""
    result: list[ast.stmt] = []
    for statement in statements:
        if body and _is_open(statement):
            result += body
            continue
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(statement, field, None), list):
                setattr(statement, field, _with_body(block, body))
        result.append(statement)
    return result


def _indented(statements: list[ast.stmt], levels: int) -> str:
    """Returns statements as text at a level of indentation, from the first one on, without a change in strings of several lines."""
    block = statements
    for _ in range(levels):
        block = [ast.If(ast.Constant(1), block, [])]
    text = ast.unparse(ast.fix_missing_locations(ast.Module(block, [])))
    return text.split("\n", levels)[-1].lstrip(" ")


def _same(node: ast.AST, other: ast.AST) -> bool:
    """Whether two nodes are the same code. A name that is read equals one that is written."""
    if type(node) is not type(other):
        return isinstance(node, ast.expr_context) and isinstance(other, ast.expr_context)
    return all(_same_field(getattr(node, field, None), getattr(other, field, None)) for field in node._fields)


def _same_field(value: object, other: object) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same_field, value, other))
    if isinstance(value, ast.AST) and isinstance(other, ast.AST):
        return _same(value, other)
    return type(value) is type(other) and value == other
