"""Numbers that vary between calls: what is noted of them, and that launches have them as they came and nothing made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import dout_like
from flexattn.dispatch.spec import AttentionSpec, Operands, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.runtime import direct, interpreter, launch
from flexattn.kernels_triton.runtime.store import Binary
from flexattn.kernels_triton.runtime.varying import Notes, Varying, plain


def test_comparisons_are_noted_with_their_outcome() -> None:
    notes = Notes()
    x = Varying(0.5, 0, notes)
    assert x > 0
    assert x != 0
    assert x < 1
    assert max(x, 0.25) is x
    assert not notes.is_used
    assert notes.hold(0.75)
    assert not notes.hold(0.0)
    assert not notes.hold(2.0)
    assert not notes.hold(0.1)


USES = (float, round, bool, hash, str, int, lambda x: -x, lambda x: x * 2, lambda x: 2 / x, lambda x: f"{x:.2f}")


@pytest.mark.parametrize("use", USES)
def test_another_use_is_noted(use: Any) -> None:
    notes = Notes()
    assert use(Varying(0.5, 0, notes)) == use(0.5)
    assert not notes.hold(0.5)


def test_a_plain_copy_has_ordinary_floats() -> None:
    notes = Notes()
    found = plain((1, Varying(0.5, 0, notes), ("a", Varying(2.0, 1, notes)), None))
    assert found == (1, 0.5, ("a", 2.0), None)
    assert [type(found[1]), type(found[2][1])] == [float, float]
    assert not notes.is_used


def test_a_varying_number_is_compiled_for_as_any_float() -> None:
    x = Varying(0.5, 0, Notes())
    for compared in ((False, False), (False, True)):
        assert launch._compiled_for(x, compared) is launch._compiled_for(0.5, compared) is float


def test_a_launch_with_other_numbers_has_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_load", lambda binary: 16)
    monkeypatch.setattr(direct, "_library", lambda: type("Library", (), {"cuLaunchKernelEx": None}))
    signature = ["*fp32", "fp32", "i32", ["fp32", "i64"]]
    binary = Binary(name="k", signature=signature, num_warps=4, shared=0, maps=[], waits=False, code=b"")
    kernel, memory, notes = direct.Direct(binary), torch.zeros(4), Notes()

    def bytes_of(prepared: direct.Prepared) -> bytes:
        start = prepared.buffer.offset
        return bytes(prepared.buffer.memory[start : start + kernel.size])

    first = kernel.prepare(2, (memory, Varying(0.5, 0, notes), 7, (Varying(2.0, 1, notes), 9)))
    before = bytes_of(first)
    assert before == bytes_of(kernel.prepare(2, (memory, 0.5, 7, (2.0, 9))))
    other = first.with_numbers((0.25, 1e300))  # past the largest of float32
    assert bytes_of(other) == bytes_of(kernel.prepare(2, (memory, 0.25, 7, (float("inf"), 9))))
    assert bytes_of(first) == before
    assert other.buffer.lock is not first.buffer.lock


SLOPE = 0.75


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPE * (i - j)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


CU = torch.empty(3, dtype=torch.int32, device="meta")
CALLS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {  # lengths, arguments
    "causal": ((512, 512), {"attn_mask_type": "causal"}),
    "long": ((4096, 4096), {"attn_mask_type": "causal", "deterministic": True}),
    "few queries": ((1, 8192), {}),
    "window": ((2048, 2048), {"attn_mask_type": "causal", "window_size": (255, 0), "dropout_p": 0.1}),
    "score_mod": ((512, 512), {"score_mod": relative}),
    "bias": ((256, 256), {"bias_type": "post_scale_bias", "bias": meta(1, 8, 256, 256)}),
    "padding": ((512, 512), {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "return_max_logit": True}),
}


def launches(spec: AttentionSpec, x: Operands, has_backward: bool) -> list[launch.Launch]:
    with torch.no_grad(), triton_backend.recorded_on(spec) as found:
        triton_backend.forward(spec, x)
        if has_backward:
            out, lse, _ = empty_outputs(spec, x)
            triton_backend.backward(spec.for_backward(), x, out, lse, dout_like(spec, x, out), None)
    return found


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_launches_of_two_values_differ_in_them_alone(
    name: str, head_dim: int, capability: tuple[int, int], softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # so that kernels for sm_90 are asked
    (sq, skv), more = CALLS[name]
    q, k, v = meta(2, sq, 8, head_dim), meta(2, skv, 4, head_dim), meta(2, skv, 4, head_dim)
    x, settings = bind_call(q, k, v, softmax_scale=0.5, softcap=softcap, **more)
    if x.dropout_p > 0:
        x = x._replace(rng_state=torch.empty(2, dtype=torch.int64, device="meta"))
    spec = ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=capability)
    assert x.mod_numbers == ((SLOPE,) if name == "score_mod" else ())
    (scale, cap, *of_mods), notes = triton_backend.varying((0.5, softcap, *x.mod_numbers))
    others = (0.125, 7.0 if softcap else 0.0, -3.0)[: 2 + len(of_mods)]
    has_backward = sq > 1
    marked = launches(spec, x._replace(softmax_scale=scale, softcap=cap, mod_numbers=of_mods), has_backward)
    again = launches(spec, x._replace(softmax_scale=others[0], softcap=others[1], mod_numbers=others[2:]), has_backward)
    assert all(note.hold(value) for note, value in zip(notes, others, strict=True))
    assert len(marked) == len(again) > 0
    seen = set()
    for a, b in zip(marked, again, strict=True):
        assert (a.kernel, a.tile, a.programs) == (b.kernel, b.tile, b.programs)
        for left, right in zip(flat(a.arguments), flat(b.arguments), strict=True):
            if type(left) is Varying:
                seen.add(left.place)
                assert right == others[left.place]
            elif isinstance(left, Tensor):
                assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
            elif hasattr(left, "block_shape"):
                assert (left.shape, left.strides, left.block_shape) == (right.shape, right.strides, right.block_shape)
            else:
                assert left == right
    assert seen == set(range(len(others)))


def flat(arguments: tuple[Any, ...]) -> list[Any]:
    return [leaf for x in arguments for leaf in (flat(x) if type(x) is tuple else (x,))]
