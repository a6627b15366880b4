"""mask_mods for few queries, such as a tree of drafts: a forward tests a whole block before each query and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import mods, ops
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.hopper.forward import hopper_forward
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import check_close, make_call, make_inputs, reference_attention
from tests.support.compiled_kernels import compile_sound
from tests.support.trees import tree

LENGTHS_Q, LENGTHS_KV = (5, 3), (150, 97)
SPILLS = 0.03  # share of the loop's instructions, at most: if a block is tested by pairs, a tree is read in 64 bits
# The results of each, and whether intervals can show that a block of it is fully visible, without reading its keys.
MASKS: dict[str, tuple[Any, bool]] = {
    "tree": (lambda device: tree(LENGTHS_Q, LENGTHS_KV, device), True),
    "window": (lambda device: mods.sliding_window(100, 60), True),
    "dilated": (lambda device: mods.dilated_sliding_window(5, 3), True),
    "not": (lambda device: lambda b, h, i, j: ~((j - i > 20) & (j - i < 70)), True),
    "where": (lambda device: lambda b, h, i, j: torch.where(b == 0, j - i, i + 90 - j) >= 60, True),
    "no key": (lambda device: lambda b, h, i, j: j < i - 200, True),
    "by head": (lambda device: lambda b, h, i, j: j * 2 >= 40 * h + i, True),
    "document": (lambda device: mods.document(torch.arange(150, device=device) // 40), False),
    "nothing known": (lambda device: lambda b, h, i, j: (i * j) % 3 == 0, False),
}


def forward_launch(spec: Any, x: Any) -> Launch:
    with recorded_launches() as launches:
        triton_backend.forward(spec, x)
    return next(launch for launch in launches if "_attn_fwd" in launch.kernel.__name__)


@pytest.mark.sample
@pytest.mark.parametrize("name", MASKS)
def test_few_queries(name: str, device: str) -> None:
    mask, is_asked = MASKS[name]
    inputs = make_inputs(
        device=device, lengths_q=list(LENGTHS_Q), lengths_kv=list(LENGTHS_KV), qkv_format="thd", dtype=torch.float16
    )
    spec, x = make_call(inputs, mods=trace_mods(None, mask(device)))
    results = triton_backend.forward(spec, x)
    exact, budget = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    for what, got, wanted, eager in zip(("out", "lse"), results, exact, budget, strict=False):
        check_close(what, got, wanted, eager)
    meta = forward_launch(spec, x).arguments[-1]
    assert meta.GROUP == 1
    assert meta.ASKS_OF_BLOCKS is is_asked


@pytest.mark.parametrize(("name", "is_asked"), [("window", True), ("by head", False)])
def test_heads_that_share_a_tile_have_one_answer(name: str, is_asked: bool, device: str) -> None:
    inputs = make_inputs(device=device, lengths_q=[4] * 2, lengths_kv=[150] * 2, dtype=torch.float16)
    spec, x = make_call(inputs, mods=trace_mods(None, MASKS[name][0](device)), return_max_logit=False)
    out, _, _ = triton_backend.forward(spec, x)
    check_close("out", out, *(reference_attention(spec, x, dtype=dtype)[0] for dtype in (torch.float64, spec.dtype)))
    meta = forward_launch(spec, x).arguments[-1]
    assert meta.GROUP == 2
    assert meta.ASKS_OF_BLOCKS is is_asked


def test_lists_take_its_place(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
    for length, asks, lists in ((40, True, 0), (150, False, mask_blocks.BLOCK)):
        inputs = make_inputs(device=device, lengths_q=[length], lengths_kv=[150], qkv_format="bshd", dtype=torch.float16)
        meta = forward_launch(*make_call(inputs, mods=trace_mods(None, mods.sliding_window(100, 60)))).arguments[-1]
        assert meta.ASKS_OF_BLOCKS is asks
        assert lists == meta.BLOCK_SIZE_Q


def tree_launch(sm: int) -> Launch:
    """The forward's launch for eight queries of a tree over pages, 32 heads over 8."""
    x, settings = bind_call(
        q=torch.zeros(64, 32, 128, dtype=torch.bfloat16),
        k=torch.zeros(8 * 64, 16, 8, 128, dtype=torch.bfloat16),
        v=torch.zeros(8 * 64, 16, 8, 128, dtype=torch.bfloat16),
        qkv_format="thd_2bshd",
        attn_mask_type="padding",
        cu_seqlens_q=torch.arange(0, 72, 8, dtype=torch.int32),
        max_seqlen_q=8,
        seqused_kv=torch.full((8,), 1024, dtype=torch.int32),
        page_table=torch.zeros(8, 64, dtype=torch.int32),
        mask_mod=tree((8,) * 8, (1024,) * 8),
    )
    spec = ops.spec_to_run(x, settings)
    out, lse, _ = empty_outputs(spec, x)
    forward = hopper_forward if sm == 90 else attention_forward
    with pretended_device(sm, 132), recorded_launches() as launches:
        forward(triton_backend.to_problem(spec, x), as_bshd(out, spec.q_format), lse)
    return next(launch for launch in launches if "_attn_fwd" in launch.kernel.__name__)


@pytest.mark.slow
def test_compiled_ahead_of_time() -> None:
    launches = {sm: tree_launch(sm) for sm in (80, 90)}
    assert all(launch.arguments[-1].ASKS_OF_BLOCKS for launch in launches.values())
    for report in compile_sound([request_for(launch, sm) for sm, launch in launches.items()]):
        assert report.loop_spill_share <= SPILLS
        assert not report.warnings
