"""The fused backward for sm_90 with persistent programs: the calls that it is chosen for, and its gradients on such a GPU.

`test_emulated.py` and `test_mods.py` run it in the emulator, and `test_attention.py` compiles it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexattn import attention
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.gluon import conditions as gluon_conditions
from flexattn.kernels_triton.gluon.conditions import converts_dq
from flexattn.kernels_triton.hopper import backward_fused, conditions
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import make_call, make_dout, make_inputs
from tests.conftest import FreshPython
from tests.hopper.test_attention import BANDS, CONVERTING, FUSED, UNEVEN, check, choose_persistent, on_hopper, slower
from tests.hopper.test_attention import launches as launches


def test_persistent_programs_are_chosen_by_mask_length_and_groups() -> None:
    lengths = (256, 512, 1024, 2048, 4096, 8192, 16384)
    window = {"window_left": 1023, "window_right": 0}
    for dim, more, chosen in (
        (64, {}, (256, 512, 1024, 2048, 4096)),
        (64, {"window_right": 0}, (256, 512, 1024, 2048, 4096, 8192)),
        (64, window, (2048, 4096, 8192)),
        (128, {}, (256, 512, 1024, 2048, 4096)),
        (128, {"window_right": 0}, (512, 1024, 2048, 4096, 8192)),
        (128, window, (2048, 4096, 8192)),
        (64, {"softcap": 30.0}, ()),
        (128, {"dropout_p": 0.1, "window_right": 0}, ()),
        (128, {"block_mask": object()}, ()),
    ):
        for length in lengths:
            x = torch.empty((16384 // length, length, 2048 // dim, dim), dtype=torch.bfloat16, device="meta")
            tile = conditions.fused_tile(Problem(x, x, x, softmax_scale=0.1, **more))
            assert tile.is_persistent == (length in chosen), (dim, more, length)
            assert tile.dq_stages == 1 or (dim == 64 and not tile.is_persistent)  # otherwise shared memory is too small
            assert tile.converts == (tile.is_persistent and dim == 128 and not more and length > 256)
            grouped = x[:, :, : x.shape[2] // 4]
            is_short = (length, more) in ((256, {"window_right": 0}), (512, {"window_right": 0}), (256, {}))
            is_persistent = is_short if dim == 64 else length in chosen and not more
            assert conditions.fused_tile(Problem(x, grouped, grouped, softmax_scale=0.1, **more)).is_persistent == is_persistent
            lengths_kv = torch.empty(x.shape[0], dtype=torch.int32, device="meta")
            padded = conditions.fused_tile(Problem(x, x, x, softmax_scale=0.1, seqused_kv=lengths_kv, **more))
            narrow = conditions.fused_tile(Problem(x[..., :-8], x, x, softmax_scale=0.1, **more))
            for other in (padded, narrow):  # a kernel of its own converts
                assert not other.converts
                is_measured = other is narrow or length > 256 or bool(more)
                assert other.is_persistent == (length in chosen and is_measured)
    many = torch.empty((8, 4096, 16, 128), dtype=torch.bfloat16, device="meta")
    tile = conditions.fused_tile(Problem(many, many, many, softmax_scale=0.1))
    for keys, converts in ((4096, True), (5000, True), (4095, False), (300, False)):  # with few keys, parts of dq wait
        few = torch.empty((8, keys, 16, 128), dtype=torch.bfloat16, device="meta")
        assert converts_dq(Problem(many, few, few, softmax_scale=0.1), many, tile) == converts
    short = torch.empty((32, 512, 32, 64), dtype=torch.bfloat16, device="meta")
    grouped = short[:, :, :8]
    assert "from 1024 tokens" in str(slower("sm_90 fused", Problem(short, grouped, grouped, softmax_scale=0.1)))


def test_rows_of_dq_as_wide_as_the_tile_are_converted() -> None:
    x = torch.empty((2, 64, 4, 128), dtype=torch.bfloat16, device="meta")
    narrow, lengths = x[..., :-8], torch.empty(2, dtype=torch.int32, device="meta")
    problem = Problem(x, x, x, softmax_scale=0.1)
    tile = replace(conditions.fused_tile(problem), is_persistent=True, converts=True)
    for dq in (x, x.transpose(1, 2), torch.empty_like(x.expand(3, 2, 64, 4, 128))[0]):
        assert gluon_conditions.converts_dq(problem, dq, tile)
    assert not gluon_conditions.converts_dq(problem, x, replace(tile, converts=False))
    assert not gluon_conditions.converts_dq(problem, torch.empty((2, 64, 4, 136), device="meta")[..., :128], tile)
    assert not gluon_conditions.converts_dq(Problem(narrow, narrow, x, softmax_scale=0.1), narrow, tile)
    assert not gluon_conditions.converts_dq(Problem(x, x, x, softmax_scale=0.1, seqused_q=lengths), x, tile)


def test_the_kernel_that_converts_is_the_last() -> None:
    x, lse = torch.zeros(2, 256, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 4, 256)
    problem = Problem(x, x, x, softmax_scale=0.1)
    backward = Backward(problem, x, lse, x, None, *(torch.zeros_like(x) for _ in range(3)))
    for converts, names in ((True, CONVERTING), (False, FUSED)):
        with recorded_launches() as launches:
            tile = replace(conditions.fused_tile(problem), is_persistent=True, converts=converts)
            backward_fused.fused_backward(backward, tile)
        assert [launch.kernel.__name__ for launch in launches] == names


@on_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd", "sbhd_2thd"])
def test_persistent_programs(
    fmt: str, band: dict[str, Any], dims: tuple[int, int], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_persistent(monkeypatch)
    heads = {"num_heads": 6, "num_heads_kv": 6 if "300" in str(band) else 2, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
    check(launches, {"attn_mask_type": "padding", **band}, qkv_format=fmt, padding=True, gap=13, **heads, **UNEVEN)


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_persistent_programs_of_dense_calls(
    sq: int, skv: int, mask: str, converts: bool, dim: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_persistent(monkeypatch, converts=converts)
    heads = {"num_heads": 24, "num_heads_kv": 24, "head_dim_qk": dim, "head_dim_v": dim}
    fused = CONVERTING if converts else FUSED
    forward = "_attn_fwd_few_keys_hopper_kernel" if skv == 1 else "_attn_fwd_hopper_kernel"
    check(launches, {"attn_mask_type": mask}, fused, forward, lengths_q=[sq] * 3, lengths_kv=[skv] * 3, **heads)


ORDER = """
from dataclasses import replace
import torch
from flexattn.kernels_triton.ahead_of_time.compile_report import compiled_from, request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.hopper import backward_fused, conditions
from flexattn.kernels_triton.runtime.launch import recorded_launches

x, lse = torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 256)
problem = Problem(x, x, x, softmax_scale=0.1)
backward = Backward(problem, x, lse, x, None, *(torch.zeros_like(x) for _ in range(3)))
with recorded_launches() as launches:
    tile = replace(conditions.fused_tile(problem), is_persistent=True, converts=True)
    backward_fused.fused_backward(backward, tile)
print(compiled_from(request_for(launches[1], 90)).asm["ptx"])
"""
STEPS = re.compile(
    r"cp\.reduce\.async\.bulk|cp\.async\.bulk\.wait_group(?:\.read)?|bar\.warp\.sync"
    r"|(?:ld|atom|red)\.global\.gpu\.(?:release|acquire)|mbarrier\.(?:arrive|try_wait)[\w.]*\.shared"
)


def test_what_is_counted_has_been_added_and_what_is_converted_was_counted(forked_python: FreshPython) -> None:
    """The PTX has the chain of `dq_parts`. The emulator sees no step of it, because its programs run one after the other."""
    steps = STEPS.findall(forked_python("-c", ORDER).stdout)
    (count,) = (n for n, step in enumerate(steps) if "release" in step)
    before = [step for step in steps[:count] if step != "bar.warp.sync"]
    assert (before[-1], steps[count - 1]) == ("cp.async.bulk.wait_group", "bar.warp.sync")
    waits = [n for n, step in enumerate(steps) if "acquire" in step]
    assert len(waits) == 2  # the first, and the loop's
    after = [step for step in steps[waits[-1] :] if "mbarrier" in step]
    assert after[:2] == ["mbarrier.try_wait.parity.shared", "mbarrier.arrive.shared"]  # `broadcast_tile`


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_programs_that_convert_dq(fmt: str, dim: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in any order of dimensions, heads that share keys, several sections. Other head dims have one more kernel."""
    choose_persistent(monkeypatch, converts=True)
    shape = {"qkv_format": fmt, "lengths_q": [600] * 8, "lengths_kv": [700] * 8, "num_heads": 24, "num_heads_kv": 12}
    check(launches, {"window_size": (500, 0)}, CONVERTING, head_dim_qk=dim, head_dim_v=dim, **shape)
    launches.clear()
    check(launches, {}, FUSED, head_dim_qk=dim - 8, head_dim_v=dim, **shape)


@on_hopper
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_sum_is_converted_before_it_is_whole(dim: int, mask: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a part is missing, the error is as large as dq itself."""
    given = make_inputs(lengths_q=[512] * 16, num_heads=16, head_dim_qk=dim, head_dim_v=dim, dtype=torch.bfloat16, device="cuda")
    spec, x = make_call(given, attn_mask_type=mask, return_max_logit=False)
    dout = make_dout(given)
    out, lse, _ = triton_backend.forward(spec, x)
    choose_persistent(monkeypatch)
    first = triton_backend.backward(spec, x, out, lse, dout, None)
    largest = float(first.dq.float().abs().amax())
    choose_persistent(monkeypatch, converts=True)
    launches.clear()
    for _ in range(300):
        again = triton_backend.backward(spec, x, out, lse, dout, None)
        assert torch.equal(again.dk, first.dk)
        assert torch.equal(again.dv, first.dv)
        assert float((again.dq.float() - first.dq.float()).abs().amax()) <= largest * 2.0**-7
    assert launches == 300 * CONVERTING


@on_hopper
def test_each_backward_counts_from_zero(launches: list[str]) -> None:
    """In a second backward, and in the replays of a graph, whose launches reuse the memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # so that no gradient node is on a stream that the graph must not wait for
        q, k, v = (torch.randn(4, 640, 40, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = attention(q, k, v, backend="triton")
        douts = [torch.randn_like(out) for _ in range(3)]
        first = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in douts]
        again = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in douts]
    torch.cuda.current_stream().wait_stream(stream)
    assert set(launches) == {"_attn_fwd_hopper_kernel", *CONVERTING}
    graph, dout = torch.cuda.CUDAGraph(), torch.empty_like(douts[0])
    del out  # and its gradient nodes: the capture makes its own
    with torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(attention(q, k, v, backend="triton"), (q, k, v), dout)
    for n in (0, 1, 2, 0):
        dout.copy_(douts[n])
        for gradient in found:
            gradient.fill_(float("nan"))
        graph.replay()
        for gradients in (found, again[n]):
            for name, got, want in zip("qkv", gradients, first[n], strict=True):
                apart = float((got.float() - want.float()).abs().amax())
                assert apart <= (float(want.float().abs().amax()) * 2.0**-7 if name == "q" else 0.0), f"d{name} of dout {n}"
