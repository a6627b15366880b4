"""Keywords of transformers' models: flexattn's functions know each, and raise if one would change a result."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed, whose keywords these tests read")

from transformers.utils.generic import TransformersKwargs  # noqa: E402

from flexattn.integrations.transformers import attention_forward, attention_mask, paged_attention_forward  # noqa: E402
from flexattn.integrations.transformers.keywords import HARMLESS, REFUSED, check_keywords  # noqa: E402

POSITIONAL = {"module", "query", "key", "value", "attention_mask"}


def _named(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def _calls(source: str, function: str) -> list[ast.Call]:
    """Returns the calls of a function in a module's source, without parsing all of it."""
    calls = []
    for found in re.finditer(rf"\b{function}\(", source):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        call = ast.parse(source[found.start() : end], mode="eval").body
        assert isinstance(call, ast.Call)
        calls.append(call)
    return calls


def keywords_of_models(root: Path, function: str, pattern: str = "models/*/modeling_*.py") -> dict[str, str]:
    """Returns the keywords that modules under `root` pass to `function`, each with a file that does."""
    found: dict[str, str] = {}
    for file in sorted(root.glob(pattern)):
        for call in _calls(re.sub(r"#.*", "", file.read_text("utf-8")), function):
            found |= {keyword.arg: file.name for keyword in call.keywords if keyword.arg is not None}
    return found


def test_every_keyword_of_the_installed_models_is_known() -> None:
    found = keywords_of_models(Path(transformers.__file__).parent, "attention_interface")
    assert {"scaling", "dropout", "sliding_window", "s_aux", "indices"} <= found.keys(), "the walk no longer finds the calls"
    known = _named(attention_forward) | HARMLESS | REFUSED.keys()
    assert {name: file for name, file in found.items() if name not in known} == {}


def test_every_keyword_that_all_models_take_is_known() -> None:
    names = set(TransformersKwargs.__annotations__)
    assert "num_items_in_batch" in names
    assert names <= _named(attention_forward) | HARMLESS


def test_every_keyword_of_a_mask_is_known() -> None:
    found = keywords_of_models(Path(transformers.__file__).parent, "mask_interface", "masking_utils.py")
    assert "local_size" in found
    assert found.keys() <= _named(attention_mask)


def test_no_keyword_is_both_harmless_and_something_else() -> None:
    assert not HARMLESS & (REFUSED.keys() | _named(attention_forward))


@pytest.mark.parametrize("function", [attention_forward, paged_attention_forward])
@pytest.mark.parametrize("name", [*REFUSED, "kernel_options", "cache_seqlens"])
def test_a_keyword_that_may_change_the_result_raises_by_name(function: Callable[..., Any], name: str) -> None:
    if name in _named(function):
        pytest.skip("it has a parameter")
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        TypeError, match=rf'^{name} is passed by Identity \(int\): .*accepted: None\. .*attn_implementation="eager"'
    ):
        function(torch.nn.Identity(), q, q, q, None, **{name: 3})


def test_harmless_keywords_and_those_without_a_value_pass() -> None:
    check_keywords(torch.nn.Identity(), dict.fromkeys(HARMLESS, 1) | dict.fromkeys([*REFUSED, "new"]))


def test_an_unknown_keyword_of_a_mask_raises_by_name() -> None:
    attention_mask(1, 4, 4, dtype=torch.float32, config=None, new=None)
    with pytest.raises(TypeError, match=r"attention_mask\(\) has no argument new, which may change the mask"):
        attention_mask(1, 4, 4, new=3)
    with pytest.raises(TypeError, match=r"attention_mask\.to"):
        attention_mask(1, 4, 4).to("cpu", dtype=torch.float32)


@pytest.mark.parametrize(("given", "text"), [({"dropout": 0.1}, "dropout 0.1"), ({"is_causal": False}, "is_causal False")])
def test_paged_attention_refuses_what_it_does_not_do(given: dict[str, Any], text: str) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=text):
        paged_attention_forward(torch.nn.Identity(), q, q, q, None, **given)
