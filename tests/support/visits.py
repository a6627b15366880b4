"""Functions of a checkout that a call visits, as JSON: `python visits.py CASE [RANK PORT]`, with the checkout first on the path.

The script uses the public functions alone, so that it measures older checkouts too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

WARM = 4  # the call that is measured, if it is not the first


def visited(run: Callable[[], Any], root: Path) -> list[tuple[str, str]]:
    """Returns the functions of a checkout that are called, each as its file and its name, as often as they are called."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{root}{os.sep}")
        if event == "call" and path != code.co_filename and not path.startswith(("tests", ".")):  # ".": .venv, in the checkout
            found.append((path.removeprefix("flexattn/") if (root / path).resolve() != root / path else path, code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def _torch_call() -> Callable[[], Any]:
    import torch

    from flexattn import attention

    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    return lambda: attention(q, k, v, backend="eager")


def first() -> Callable[[], Any]:
    return _torch_call()


def warm() -> Callable[[], Any]:
    call = _torch_call()
    for _ in range(WARM - 1):
        call()
    return call


def two_ranks(rank: int, port: int) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    from flexattn import distributed

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    plan = distributed.plan(dist.group.WORLD, length=64, attn_mask_type="causal")
    q, k, v = distributed.shard(plan, *(torch.randn(1, 64, 2, 16) for _ in range(3)))

    def call() -> Any:
        return distributed.attention(q, k, v, plan=plan)

    for _ in range(WARM - 1):
        call()
    return call


def jax() -> Callable[[], Any]:
    import jax.numpy as jnp

    from flexattn.jax import attention

    q = jnp.ones((1, 5, 2, 16))

    def call() -> Any:
        return attention(q, q, q)

    for _ in range(WARM - 1):
        call()
    return call


CASES: dict[str, Callable[..., Callable[[], Any]]] = {"first": first, "warm": warm, "two_ranks": two_ranks, "jax": jax}


def main(case: str, *numbers: str) -> None:
    call = CASES[case](*map(int, numbers))
    import flexattn

    json.dump(visited(call, Path(flexattn.__file__).resolve().parents[1]), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
