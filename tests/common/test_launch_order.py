"""Kernels that begin while the one before them runs: their compiled code, and their launches."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from flexattn.kernels_triton.runtime import direct, store

COMPILE = """
import json, sys
import torch
from flexattn.kernels_triton.ahead_of_time.compile_report import compiled_from, request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime import store
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches

q, k = torch.zeros(8, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(8, 4096, 2, 64, dtype=torch.bfloat16)
problem = Problem(q, k, k, softmax_scale=0.1, seqused_kv=torch.zeros(8, dtype=torch.int32))
for sm in (80, 90):
    with pretended_device(sm, 132), recorded_launches() as launches:
        attention_forward(problem, torch.zeros_like(q), torch.zeros(8, 4, 1))
    for launch in launches:
        compiled = compiled_from(request_for(launch, sm))
        ptx = compiled.asm["ptx"]
        touched = any(f"{kind}.global" in ptx.partition("griddepcontrol.wait")[0] for kind in ("ld", "st"))
        lets = "griddepcontrol.launch_dependents" in ptx
        print(json.dumps([sm, launch.kernel.__name__, store.binary_of(compiled).waits, lets, touched]))
"""


def test_what_follows_the_plan_waits_for_it_where_it_can(forked_python: Any) -> None:
    """The plan's kernel waits for nothing, whatever kernel runs before it. The others wait before they touch any memory."""
    done = forked_python("-c", COMPILE)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [80, "_split_plan_kernel", False, False, True],
        [80, "_attn_fwd_kernel", False, False, True],
        [80, "_combine_splits_kernel", False, False, True],
        [90, "_split_plan_kernel", False, True, True],
        [90, "_attn_fwd_kernel", True, True, False],
        [90, "_combine_splits_kernel", True, False, False],
    ]


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_that_waits_is_launched_with_the_attribute(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_load", lambda binary: 1)
    made = direct.Direct(store.Binary("kernel", ["i32"], 4, 0, [], waits, b""), ["n"])
    made._pack(made.buffer, 5, 7, (), (3,), launches=False)
    grid, stream, attributes, count = struct.unpack_from("=I28xQQI", made.buffer.memory, made.buffer.offset)
    assert (grid, stream, count) == (5, 7, int(waits))
    if waits:  # CUlaunchAttribute: the id, 4 bytes of padding, and the value
        found = direct._BeginsEarly.from_address(attributes)
        assert (found.id, found.value) == (6, 1)
    else:
        assert attributes == 0
