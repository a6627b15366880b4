"""Integrations read each argument that they take: an unread parameter has a reason here, and no keyword is dropped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = [*sorted((ROOT / "flexattn" / "integrations").rglob("*.py")), ROOT / "flexattn" / "nn.py"]

# Parameters that no integration reads, by name: they change no result.
PLANS_A_LAUNCH = "says how the other library's kernels are launched"
UNREAD_ANYWHERE = {
    "num_splits": PLANS_A_LAUNCH,
    "pack_gqa": PLANS_A_LAUNCH,
    "sm_margin": PLANS_A_LAUNCH,
    "scheduler_metadata": PLANS_A_LAUNCH,
    "disable_scheduler_metadata": PLANS_A_LAUNCH,
    "seqlen_k_per_split": PLANS_A_LAUNCH,
    "min_seqlen_k": PLANS_A_LAUNCH,
    "cuda_graph": "every call can be captured",
    "fast_zero_fill": "padding is 0 in every output",
}
# The same for parameters of one module.
UNREAD = {
    "flash_attn/cute.py": {
        "block_sparse_tensors_bwd": "lists the forward's blocks by keys, and the gradient follows from the forward",
        "cu_seqlens": "flash_attn_combine combines each token, whatever its sequence",
        "seqused": "flash_attn_combine combines tokens behind a sequence too, whose results are undefined in FlashAttention",
        "virtual_batch_idx": PLANS_A_LAUNCH,
        "_": "get_scheduler_metadata has nothing to plan",
        "__": "get_scheduler_metadata has nothing to plan",
    },
    "flash_attn/flash_attn_3.py": {
        "_": "get_scheduler_metadata has nothing to plan",
        "__": "get_scheduler_metadata has nothing to plan",
    },
    "flex.py": {
        "_compile": "no mask of the size of all scores is made, so nothing is worth compiling",
        "dq_kv_order": "orders what compute_dq_write_order makes, and that raises",
    },
    "te/dot_product_attention.py": {"name": "a label of the module"},
    "te/fused_attn.py": {
        "s_quantizer": "kernels round softmax weights with a scale of their own",
        "dp_quantizer": "kernels round the gradient of the scores with a scale of their own",
    },
    "te/inference.py": {"max_ctx_len": "the cache needs no bound on prompts"},
    "te/quantizers.py": {
        "tensor": "a protocol has no body",
        "device": "a tensor is quantised where it is",
    },
    "te/recipe.py": {"_graph": "every call can be captured"},
    "te/score_graph.py": {
        "input": "positions are those of the score",
        "name": "a label of the node",
        "compute_data_type": "positions are integers",
        "scalar_type": "says when a number is known",
    },
    "transformers/masks.py": {
        "allow_torch_fix": "has no effect in transformers either",
    },
    "vllm.py": {
        "fast_build": "a step's metadata takes few kernels",
        "kv_cache_spec": "the page sizes are the same for all caches",
        "dtype": "supports_dtype has the answer",
        "rest": "other methods have the answers",
        "layer": "a latent cache has no scales",
    },
    "xformers.py": {"op": "names one of xformers' kernels"},
    "te/context_parallel.py": {"_saved": "the gradient of an empty result, by which a second derivative finds the guard"},
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Yields the functions of a module and the methods of its classes. Functions inside of them have a mod's signature."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, Function):
                yield inner


def _loaded(function: Function) -> list[str]:
    return [x.id for part in function.body for x in ast.walk(part) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]


def unread_parameters(function: Function) -> set[str]:
    a = function.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None}
    return names - {"self", "cls", "ctx"} - set(_loaded(function))


def drops_keywords(function: Function) -> bool:
    """Returns whether a function only looks for some names among its keywords, so that it ignores any other one."""
    if function.args.kwarg is None or function.args.kwarg.arg not in (names := _loaded(function)):
        return False  # the call is a parameter that nothing reads
    name, picks = function.args.kwarg.arg, 0
    for x in (x for part in function.body for x in ast.walk(part)):
        picked = x.value if isinstance(x, ast.Subscript) else None
        if isinstance(x, ast.Attribute) and x.attr in ("get", "pop"):
            picked = x.value
        elif isinstance(x, ast.Compare) and isinstance(x.ops[0], ast.In | ast.NotIn):
            picked = x.comparators[0]
        picks += isinstance(picked, ast.Name) and picked.id == name
    return names.count(name) == picks


@pytest.mark.parametrize("door", DOORS, ids=lambda path: path.relative_to(ROOT / "flexattn").as_posix())
def test_every_argument_is_read_or_has_a_reason(door: Path) -> None:
    key = door.relative_to(ROOT / "flexattn" / "integrations").as_posix() if "integrations" in door.parts else door.name
    functions = list(_functions(ast.parse(door.read_text("utf-8"))))
    found = set().union(*map(unread_parameters, functions))
    own = UNREAD.get(key, {})
    assert found - UNREAD_ANYWHERE.keys() == own.keys(), "read the parameter, refuse it, or say here why it changes no result"
    assert [f.name for f in functions if drops_keywords(f)] == [], "check the other keywords, or name those that are read"


@pytest.mark.slow
def test_every_reason_is_still_needed() -> None:
    found: set[str] = set()
    for door in DOORS:
        found = found.union(*map(unread_parameters, _functions(ast.parse(door.read_text("utf-8")))))
    assert found >= UNREAD_ANYWHERE.keys()
    assert {(ROOT / "flexattn" / "integrations" / name).is_file() for name in UNREAD} == {True}


@pytest.mark.parametrize(
    ("source", "unread", "drops"),
    [
        ("def f(a, *, b=1, **more): return g(a, **more)", {"b"}, False),
        ("def f(a, *b, **more): return a + more.get('c', 0) + more['d'] if 'e' in more else b", set(), True),
        ("def f(**more):\n  check(more)\n  return more.get('c')", set(), False),
        ("def f(a, **more): return a", {"more"}, False),
    ],
)
def test_the_walk_finds_what_is_ignored(source: str, unread: set[str], drops: bool) -> None:
    (function,) = _functions(ast.parse(source))
    assert unread_parameters(function) == unread
    assert drops_keywords(function) == drops
