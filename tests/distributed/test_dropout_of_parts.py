"""Dropout of a part of a call: each backend drops the same weights as in the full call."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention_backward
from flexattn.dispatch import canary, cudnn_backend
from flexattn.dispatch.philox import dropout_keep
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.hopper.conditions import forward_unsupported
from flexattn.kernels_triton.portable.backward import attention_backward as portable_backward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs
from tests.support.compiled_kernels import compile_sound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # Triton runs in its interpreter on a CPU.
STATE = torch.tensor([2**40 + 17, 2**33 + 5], device=DEVICE)
P = 0.3
BATCH, LENGTH, HEADS, DIM = 2, 40, 4, 16


def state_of(first_query: int, first_key: int, first_head: int = 0) -> Tensor:
    """Returns the rng_state of a part of BATCH sequences. The part begins at these positions in each of them."""
    beyond = [first_key % 8] if first_key % 8 else []
    rows = [[first_query, first_key // 8 * 8, b * HEADS + first_head, *beyond] for b in range(BATCH)]
    return torch.cat((STATE.expand(BATCH, 2), torch.tensor(rows, device=DEVICE)), 1)


@pytest.mark.parametrize("first_key", [0, 3, 7, 8, 21])
def test_what_is_kept_of_a_part_is_the_wholes(first_key: int) -> None:
    heads, rows_of_batch = torch.arange(HEADS, device=DEVICE), torch.arange(BATCH, device=DEVICE)
    whole = dropout_keep(STATE, P, rows_of_batch[:, None] * HEADS + heads, range(30), range(40))
    for first, rows, cols in itertools.product((0, 5), (range(6), range(2, 11)), (range(1), range(8), range(3, 17))):
        part = dropout_keep(state_of(first, first_key, 1), P, heads[:-1].expand(BATCH, -1), rows, cols)
        whole_rows, whole_cols = (slice(t.start + start, t.stop + start) for t, start in ((rows, first), (cols, first_key)))
        assert torch.equal(part, whole[:, 1:, whole_rows, whole_cols])
    assert whole.float().mean().item() == pytest.approx(1 - P, abs=0.02)


def by_table(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    return score * table[h]


SAME: dict[str, Any] = {"dropout_p": P, "score_mod": by_table, "bias_type": "post_scale_bias"}


def tensors_of(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q": (BATCH, LENGTH, HEADS, DIM),
        "k": (BATCH, LENGTH, 2, DIM),
        "v": (BATCH, LENGTH, 2, DIM),
        "dout": (BATCH, LENGTH, HEADS, DIM),
        "bias": (1, HEADS, LENGTH, LENGTH),
        "table": (HEADS,),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for name, shape in shapes.items()}


def whole_of(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    tensors = tensors_of(dtype)
    leaves = {name: t.requires_grad_() for name, t in tensors.items() if name != "dout"}
    out, lse = flexattn.attention(
        *(leaves[name] for name in "qkv"),
        **SAME,
        bias=leaves["bias"],
        score_mod_tensors=[leaves["table"]],
        rng_state=STATE,
        return_lse=True,
        backend=backend,
    )
    out.backward(tensors["dout"])
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def in_parts(dtype: torch.dtype, backend: str, cut: int) -> dict[str, Tensor]:
    """Returns the results of the same call in two parts of the keys, split at `cut`. The backwards get the full out and lse."""
    q, k, v, dout, bias, table = tensors_of(dtype).values()
    leaves = {"bias": bias.requires_grad_(), "table": table.requires_grad_()}
    calls = []
    for keys in (slice(0, cut), slice(cut, LENGTH)):
        call: dict[str, Any] = {"bias": leaves["bias"][..., keys], "score_mod_tensors": [leaves["table"]]}
        calls.append((keys, SAME | call | {"rng_state": state_of(0, keys.start), "backend": backend}))
    with torch.no_grad():
        forwards = [flexattn.attention(q, k[:, keys], v[:, keys], **call, return_lse=True) for keys, call in calls]
        out, lse = flexattn.merge_attention(*forwards[0], *forwards[1])
    backwards = [attention_backward(dout, q, k[:, keys], v[:, keys], out, lse, **call) for keys, call in calls]
    return {
        "out": out,
        "lse": lse,
        "dq": backwards[0].dq + backwards[1].dq,
        **{f"d{name}": torch.cat([getattr(part, f"d{name}") for part in backwards], 1) for name in "kv"},
        "dbias": torch.cat([part.dbias for part in backwards if part.dbias is not None], -1),
        "dtable": sum((part.dcaptures[0][1] for part in backwards), torch.zeros(HEADS, dtype=dtype, device=DEVICE)),
    }


@pytest.mark.sample
@pytest.mark.parametrize(("backend", "dtype"), [("eager", torch.float64), ("triton", torch.float32), ("triton", torch.bfloat16)])
@pytest.mark.parametrize("cut", [16, 13])
def test_parts_drop_what_the_whole_drops(backend: str, dtype: torch.dtype, cut: int) -> None:
    expected, same = whole_of(torch.float64, "eager"), whole_of(dtype, "eager")
    for name, t in in_parts(dtype, backend, cut).items():
        if dtype is torch.float64:
            torch.testing.assert_close(t, expected[name], rtol=0.0, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
        else:
            check_close(name, t, expected[name], same[name], factor=GRADIENT_FACTOR)


def far(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j < 7) | (j > i + 9)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("first_key", [16, 21])
def test_a_part_under_a_block_mask(first_key: int) -> None:
    """Other features change scores too. These blocks need tiles of 16 by 16."""
    blocks = flexattn.create_block_mask(far, None, None, LENGTH, LENGTH, DEVICE, BLOCK_SIZE=16)
    call: dict[str, Any] = {"dropout_p": P, "rng_state": state_of(5, first_key, 1), "block_mask": blocks, "bias_type": "alibi"}
    found = []
    for backend, dtype in (("eager", torch.float64), ("eager", torch.bfloat16), ("triton", torch.bfloat16)):
        *leaves, dout = (t.to(dtype).requires_grad_() for t in list(tensors_of(torch.bfloat16).values())[:4])
        out, lse = flexattn.attention(
            *leaves, **call, attn_mask_type="causal", window_size=(33, -1), return_lse=True, backend=backend
        )
        out.backward(dout.detach())
        found.append([out.detach(), lse.detach(), *(t.grad for t in leaves)])
    for name, exact, same, got in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        check_close(name, got, exact, same, factor=GRADIENT_FACTOR)


def test_heads_of_the_whole() -> None:
    q, k, v, *_ = (t.float() for t in tensors_of(torch.float64).values())
    call: dict[str, Any] = {"dropout_p": P, "attn_mask_type": "causal"}
    whole = flexattn.attention(q, k, v, rng_state=STATE, backend="eager", **call)
    for backend in ("eager", "triton"):
        out = flexattn.attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], rng_state=state_of(0, 0, 2), backend=backend, **call)
        torch.testing.assert_close(out, whole[:, :, 2:])


@pytest.mark.slow
def test_packed_sequences_each_have_their_own_place() -> None:
    """The parts are the last queries of the second document, and the last keys of the first one."""
    q, k, v = (t.float() for t in list(tensors_of(torch.float64).values())[:3])
    for backend in ("eager", "triton"):
        call: dict[str, Any] = {"dropout_p": P, "return_lse": True, "backend": backend}
        whole = [
            flexattn.attention(q, k[:, keys], v[:, keys], **call, rng_state=state_of(0, keys.start))
            for keys in (slice(9, None), slice(0, None))
        ]
        state = torch.stack((state_of(0, 9)[0], torch.nn.functional.pad(state_of(33, 0)[1], (0, 1))))
        ends = {"cu_seqlens_q": torch.tensor([0, 40, 47]), "cu_seqlens_kv": torch.tensor([0, 31, 71])}
        packed = (torch.cat((q[0], q[1, 33:])), *(torch.cat((t[0, 9:], t[1])) for t in (k, v)))
        lengths = {name: t.to(DEVICE, torch.int32) for name, t in ends.items()} | {"max_seqlen_q": 40, "max_seqlen_kv": 40}
        out, _ = flexattn.attention(*packed, qkv_format="thd", attn_mask_type="padding", **lengths, **call, rng_state=state)
        torch.testing.assert_close(out, torch.cat((whole[0][0][0], whole[1][0][1, 33:])))


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("columns", [6, 5])
@pytest.mark.parametrize("capability", [90, 80, 89, 100])
def test_compiled(capability: int, columns: int) -> None:
    q, lse = torch.zeros(1, 512, 4, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 512)
    with pretended_device(capability, 132), recorded_launches() as launches:
        state = torch.zeros(1, columns, dtype=torch.int64)
        problem = Problem(q, q, q, softmax_scale=0.1, dropout_p=P, rng_state=state)
        attention_forward(problem, torch.zeros_like(q), lse)
        portable_backward(Backward(problem, q, lse, q, None, *torch.zeros(3, *q.shape, dtype=q.dtype)))
    requests = [request_for(launch, capability) for launch in launches]
    assert len(requests) >= 3
    assert not any(report.warnings for report in compile_sound(requests))


def test_kernels_that_draw_at_positions_of_their_own_refuse() -> None:
    q = torch.zeros(BATCH, 512, HEADS, 64, dtype=torch.bfloat16, device=DEVICE)
    problem = Problem(q, q, q, softmax_scale=0.1, dropout_p=P, rng_state=state_of(0, 0))
    with pretended_device(90, 132):
        assert "it draws dropout at the call's own positions" in str(forward_unsupported(problem, q))
        assert forward_unsupported(dataclasses.replace(problem, rng_state=STATE), q) is None
    spec, x = make_call(
        make_inputs("bshd", lengths_q=[64, 64], dtype=torch.bfloat16, device=DEVICE), dropout_p=P, rng_state=state_of(0, 0)
    )
    assert "does not support an rng_state of two dims" in str(cudnn_backend._dropout_error(spec))
    assert x.rng_state is not None
    assert canary.mismatch("eager", spec, "forward", x.q.device) is None


@pytest.mark.parametrize("state", [torch.zeros(BATCH + 1, 5), torch.zeros(BATCH, 7), torch.zeros(5, BATCH).t(), torch.zeros(3)])
def test_states_of_another_shape_are_refused(state: Tensor) -> None:
    q, k, v, *_ = tensors_of(torch.float32).values()
    with pytest.raises(
        ValueError, match=r"rng_state is .*; accepted: .* \[2\], the Philox .*, or \[b, 5 or 6\] with b = 2: seed, offset, first q"
    ):
        flexattn.attention(q, k, v, dropout_p=P, rng_state=state.to(DEVICE, torch.int64))


@pytest.mark.parametrize("row", [(1, 2, 0, 9, 0), (1, 2, 0, 8, 0, 8), (1, 2, -1, 8, 0)])
def test_places_that_no_draw_begins_at_are_refused(row: tuple[int, ...]) -> None:
    q, k, v, *_ = (t.cpu() for t in tensors_of(torch.float32).values())
    with pytest.raises(ValueError, match="accepted: positions of 0 or more, multiples of 8 in this column, with the remainder"):
        flexattn.attention(q, k, v, dropout_p=P, rng_state=torch.tensor([row] * BATCH))
