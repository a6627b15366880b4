"""Targets of tests/targets.py: each measure finds its example, and reached targets hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import structure, targets

NAMES = {f"x{i}" for i in range(targets.MANY)}
PARAMETERS = ", ".join(sorted(NAMES))
# These modules replace functions of Triton that have no types.
REPLACING = {f"{targets.KERNELS}.runtime.{name}" for name in ("gluon_names", "interpreter")}
KEYWORDS = ", ".join(f"{name}={name}" for name in sorted(NAMES))


@pytest.mark.parametrize(
    "code",
    [
        f"def f(*, {PARAMETERS}): ...",
        f"f({KEYWORDS})",
        f"f(*{sorted(NAMES)})",
        f"({PARAMETERS})",
        f"dict({KEYWORDS})",
        f"'{' '.join(sorted(NAMES))}'.split()",
        "class Options:\n" + "".join(f"    {name}: int\n" for name in sorted(NAMES)),
        " or ".join(f"{name} is None" for name in sorted(NAMES)),
        "{" + ", ".join(f"'{name}': 0" for name in sorted(NAMES)) + "}",
    ],
)
def test_a_listing_is_found_once(code: str) -> None:
    assert targets.listings(ast.parse(code), NAMES) == 1
    assert targets.listings(ast.parse(code.replace("x0", "y")), NAMES) == 0


def test_arguments_of_attention_are_those_of_its_signature_and_typed_dicts() -> None:
    text = "from typing import TypedDict\n\nclass Options(TypedDict):\n    bias: int\n\ndef attention(q, k, v, *, mask): ...\n"
    module = structure.Module("flexattn.functional", Path("flexattn/functional.py"), text, ast.parse(text))
    assert targets.arguments_of_attention([module]) == {"bias", "mask"}
    assert targets.arguments_of_attention([module._replace(path=Path("flexattn/jax/front.py"))]) == set()


def test_files_of_later_features_exist_and_are_told_apart() -> None:
    assert all((targets.ROOT / place).exists() for places in targets.LATER.values() for place in places)
    paths = ("kernels_triton/mma/forward.py", "dispatch/key_lists.py", "kernels_triton/common/tiles.py", "bench/mma_rows.py")
    assert [targets.later_feature(Path(path)) for path in paths] == ["mma.sync", "lists of keys", None, None]


@pytest.mark.parametrize("code", ["n % STAGES", "(n // META.KV_STAGES) & 1"])
def test_stage_arithmetic_is_found(code: str) -> None:
    assert sum(map(targets.is_stage_arithmetic, ast.walk(ast.parse(code)))) == 1


def test_a_read_by_position_is_found() -> None:
    assert sum(map(targets.is_read_by_position, ast.walk(ast.parse("numbers[4] + numbers[META.NUMBERS - 2] + rows[0]")))) == 2


TEXT = '''
"""Returns a row.

Args:
    a: the first row
    b: the second row, if `where` is code
"""
x = 1  # of a
y = 2  # of b
# A comment of
# two lines.
z = 3  # noqa: E501
'''


def test_units_of_prose_are_not_joined() -> None:
    rows = ["Args:", "a: the first row", "b: the second row, if Code is code"]
    assert sorted(targets.prose(TEXT)) == sorted(["Returns a row.", *rows, "of a", "of b", "A comment of two lines."])


def test_rates_of_words_and_sentences() -> None:
    text = f'"""{"If the row is empty, it is what it was. " * 2}Where it is {"very " * 25}long, it is cut."""\n'
    rates = targets.rates([text])
    assert [round(value) for value in rates.values()] == [round(2000 / 52), round(3000 / 52), 33, 33]


def test_files_that_mypy_does_not_check_are_known(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        'packages = [\n    "flexattn",\n]\n[[tool.mypy.overrides]]\nmodule = ["flexattn.kernels_triton.*"]\nignore_errors = true\n'
        '[[tool.mypy.overrides]]\nmodule = ["jax.*"]\nignore_missing_imports = true\n'
        '[[tool.mypy.overrides]]\nmodule = ["flexattn.kernels_triton.host"]\nignore_errors = false\n'
    )
    kernel = structure.Module("flexattn.kernels_triton.x", Path("kernels_triton/x.py"), "", ast.parse(""))
    front = structure.Module("flexattn.front", Path("flexattn/front.py"), "", ast.parse(""))
    assert [targets.is_unchecked(module, tmp_path) for module in (kernel, front)] == [True, False]
    assert not targets.is_unchecked(kernel._replace(name="flexattn.kernels_triton.host"), tmp_path)
    assert targets.is_unchecked(front._replace(text="# mypy: ignore-errors\n"), tmp_path)
    assert [targets.is_in_wheel(module, tmp_path) for module in (kernel, front)] == [False, True]


def test_lines_of_functions_without_types_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[[tool.mypy.overrides]]\nmodule = ["flexattn.kernels_triton.*"]\ndisallow_untyped_defs = false\n'
        '[[tool.mypy.overrides]]\nmodule = ["flexattn.kernels_triton.host"]\ndisallow_untyped_defs = true\n'
    )
    text = "@jit\ndef f(x):\n    def g(y):\n        return y\n    return g(x)\n\ndef h(x: int):\n    pass\n"
    kernel = structure.Module("flexattn.kernels_triton.x", Path("kernels_triton/x.py"), text, ast.parse(text))
    assert targets.unchecked_lines(kernel, tmp_path) == 5
    assert targets.unchecked_lines(kernel._replace(name="flexattn.kernels_triton.host"), tmp_path) == 0


NOT_PARSED = r"(?!)"  # a pattern that no text has


@pytest.mark.slow
def test_mypy_checks_every_function_that_is_not_device_code() -> None:
    source = [module for module in structure.modules(targets.ROOT, NOT_PARSED) if module.path.parts[0] != "tests"]
    assert [module.name for module in source if targets.is_unchecked(module, targets.ROOT)] == []
    for module in source:
        if not targets.may_be_untyped(module, targets.ROOT):
            continue
        module = module._replace(tree=ast.parse(module.text))
        device = {id(node) for function in structure.device_functions(module) for node in ast.walk(function)}
        untyped = [function for function in targets.untyped_functions(module, targets.ROOT) if id(function) not in device]
        host = [x.name for x in untyped if not any("constexpr_function" in ast.unparse(y) for y in x.decorator_list)]
        assert not host or module.name in REPLACING, f"{module.name}: {host}"


def test_a_missed_target_is_named() -> None:
    held = next(target for target in targets.TARGETS if target.holds and target.most is not None)
    assert targets.missed({held.name: held.most or 0}) == []
    assert targets.missed({held.name: (held.most or 0) + 1}) == [f"{held.name}: {(held.most or 0) + 1:g}"]
    assert f"| {held.name} | {(held.most or 0) + 1:,.5g} |" in targets.table({"now": {held.name: (held.most or 0) + 1}})


def test_a_constant_that_cites_a_result_file_is_found() -> None:
    for text, is_found in (
        ("# Measured in standard_h200.\n# Tokens.\nFROM = 2048\n", True),
        ('ROWS = [\n    Rule("x", source="standard_h200"),\n]\n', True),
        ("import math\n\ndef f():\n    return 1  # as in standard_h200\n", False),
    ):
        module = structure.Module("flexattn.dispatch.x", Path("dispatch/x.py"), text, ast.parse(text))
        assert targets.cites(module, ("standard_h200",)) == is_found


@pytest.mark.slow
def test_targets_that_were_reached_hold() -> None:
    values = targets.measured(targets.ROOT) | targets.called(targets.ROOT)
    unmeasured = {target.name for target in targets.TARGETS} - set(values)
    assert all("JAX" in name for name in unmeasured)  # it may not be installed
    assert targets.missed(values) == []
