"""The Gluon kernels for mma.sync beside the reference, on a GPU of their capabilities or on a newer one with --as.

`python -m pytest --as sm_80 tests/mma/test_device.py`
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mods.diagonals import with_diagonals
from flexattn.kernels_triton.mods.mask_blocks import with_key_lists
from flexattn.kernels_triton.runtime.device import capability_of
from flexattn.ops import spec_to_run
from flexattn.testing import make_call, make_dlse, make_dout, make_inputs, reference_attention
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import BANDS as BANDS_OF_MASKS
from tests.hopper.test_mods import BLOCK_MASKS, FEATURES, blocks_of
from tests.hopper.test_pages import make_arguments
from tests.support.gluon_calls import (
    BANDS,
    EVERYTHING,
    SINKS,
    UNEVEN,
    check_gradients,
    check_results,
    gradient_memory,
    wanted_gradients,
)

DEVICE = "cuda"
HAS_MMA = torch.cuda.is_available() and capability_of(torch.device(DEVICE)) in families.MMA_FORWARD.capabilities
pytestmark = pytest.mark.skipif(not HAS_MMA, reason="no GPU of compute capability 8.0, 8.6, 8.9 or 12.0, and no --as")

REPEATS = 30
DENSE = {"lengths_q": [700] * 2, "lengths_kv": [830] * 2, "num_heads": 4, "num_heads_kv": 2}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MASKS: list[dict[str, Any]] = [
    {"attn_mask_type": "no_mask"},
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "causal_bottom_right"},
    {"window_size": (150, 70)},
]
FORMATS = ("bshd", "sbhd", "bhsd", "thd", "thd_2bshd")
EACH = pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "two kernels"])


def on_device(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def check(call: dict[str, Any], splits: int | None = None, **inputs: Any) -> None:
    """Compares out and lse with the reference, and three runs with each other."""
    given = make_inputs(**{"dtype": torch.bfloat16, "device": DEVICE, **inputs})
    spec, x = make_call(given, **{"return_max_logit": False, **on_device(call)})
    compare(spec, x, splits)


def compare(spec: Any, x: Any, splits: int | None) -> None:
    from flexattn.kernels_triton.mma.forward import mma_forward  # imported here, because it needs compiled Triton

    problem = triton_backend.to_problem(spec, x)
    first = None
    for _ in range(3):
        out, lse, max_logit = empty_outputs(spec, x)
        out.fill_(float("nan"))
        rows = as_bshd(out, spec.q_format)
        assert conditions.forward_unsupported(problem, rows) is None
        mma_forward(problem, rows, lse, max_logit if spec.return_max_logit else None, splits=splits)
        if first is None:
            check_results(spec, x, out, lse, max_logit if spec.return_max_logit else None)
            first = out
        assert torch.equal(first, out)


def check_backward(call: dict[str, Any], deterministic: bool, repeats: int = 2, **inputs: Any) -> None:
    """Compares gradients with the reference; deterministic ones are equal to the bit."""
    from flexattn.kernels_triton.mma.backward import mma_backward
    from flexattn.kernels_triton.mma.backward_dq import mma_two_kernel_backward

    given = make_inputs(**{"dtype": torch.bfloat16, "device": DEVICE, **inputs})
    spec, x = make_call(given, return_max_logit=False, **on_device(call))
    out, lse = reference_attention(spec, x)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    rows, dout_rows = (as_bshd(t, spec.q_format) for t in (out.to(spec.dtype), dout))
    problem = with_diagonals(triton_backend.to_problem(spec, x))
    if deterministic and problem.block_mask is not None:
        problem = with_key_lists(problem)
    wanted = wanted_gradients(spec, x, dout, dlse)
    first = None
    for _ in range(repeats):
        memory = gradient_memory(spec, x)
        own = (rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset)
        backward = Backward(problem, *own, deterministic=deterministic)
        if deterministic:
            assert conditions.two_kernels_unsupported(backward) is None
            mma_two_kernel_backward(backward)
        else:
            assert conditions.backward_unsupported(backward) is None
            mma_backward(backward)
        if first is None:
            check_gradients(memory, wanted)
            first = memory.gradients
        elif deterministic:
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, memory.gradients, strict=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("band", MASKS, ids=str)
def test_dense(band: dict[str, Any], dims: tuple[int, int]) -> None:
    check(band, head_dim_qk=dims[0], head_dim_v=dims[1], **DENSE)


@EACH
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("band", MASKS, ids=str)
def test_dense_backward(band: dict[str, Any], dims: tuple[int, int], deterministic: bool) -> None:
    check_backward(band, deterministic, head_dim_qk=dims[0], head_dim_v=dims[1], **DENSE)


@pytest.mark.parametrize("dims", [(40, 72), (160, 64), (8, 8), (80, 80), (248, 136)], ids=str)
def test_head_dims_and_sinks(dims: tuple[int, int]) -> None:
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dims[0], "head_dim_v": dims[1], **UNEVEN}
    check(EVERYTHING | {"softmax_offset": SINKS}, **inputs)
    for deterministic in (False, True):
        check_backward(EVERYTHING | {"softmax_offset": SINKS}, deterministic, **inputs)


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_and_bands(fmt: str) -> None:
    lengths = {"lengths_q": [70, 0, 300], "lengths_kv": [330, 9, 165], "num_heads": 2, "num_heads_kv": 1}
    dim = (64, 128)[FORMATS.index(fmt) % 2]
    inputs = {
        "qkv_format": fmt,
        "padding": True,
        "gap": 2,
        "dtype": torch.float16,
        "head_dim_qk": dim,
        "head_dim_v": dim,
        **lengths,
    }
    for n, band in enumerate(BANDS):
        check(band, **inputs)
        check_backward(band, n % 2 == 1, **inputs)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_mods_and_biases(name: str, dim: int) -> None:
    call = {"attn_mask_type": "padding_causal", **FEATURES[name](DEVICE)}
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dim, "head_dim_v": dim, **UNEVEN}
    check(call, **inputs)
    for deterministic in (False, True):
        check_backward(call, deterministic, **inputs)


@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks(name: str) -> None:
    heads_kv = 4 if BLOCK_MASKS[name][1] else 2
    inputs = {"lengths_q": [300, 210], "lengths_kv": [330, 100], "num_heads": 4, "num_heads_kv": heads_kv}
    call = {**BANDS_OF_MASKS.get(name, {"attn_mask_type": "padding"}), **blocks_of(name, 300, 330, 2, DEVICE)}
    for deterministic in (False, True):
        check_backward(call, deterministic, qkv_format="bshd", padding=True, head_dim_qk=64, head_dim_v=64, **inputs)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_dropout(dim: int) -> None:
    call = EVERYTHING | dropped(DEVICE) | {"softmax_offset": SINKS}
    inputs = {"qkv_format": "thd", "gap": 3, "head_dim_qk": dim, "head_dim_v": dim, **UNEVEN}
    check(call, **inputs)
    for deterministic in (False, True):
        check_backward(call, deterministic, **inputs)


@pytest.mark.parametrize("splits", [1, 3, BY_LENGTHS])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (6, 128), (2, 128), (4, 96), (8, 256)])
def test_few_queries(heads: int, dim: int, splits: int) -> None:
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one"}
    inputs = {"lengths_q": [9, 0, 1], "lengths_kv": [5000, 70, 1300], "num_heads": heads, "num_heads_kv": 2, "padding": True}
    check(call, splits, head_dim_qk=dim, head_dim_v=dim, **inputs)


@pytest.mark.parametrize("splits", [1, BY_LENGTHS])
@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_pages(page_size: int, splits: int) -> None:
    arguments = make_arguments(page_size, "[pages, size, heads, dim]", 128)
    x, settings = bind_call(**on_device(arguments))
    compare(spec_to_run(x, settings), x, splits)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_two_kernels_repeat_to_the_bit(dims: tuple[int, int]) -> None:
    inputs = {"lengths_q": [2000], "lengths_kv": [2100], "num_heads": 4, "num_heads_kv": 2}
    check_backward({"attn_mask_type": "causal"}, True, REPEATS, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_attention_runs_these_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function, also when a call is replayed."""
    import flexattn

    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    more = {"dropout_p": 0.1} if name == "dropout" else {}
    q, k, v = (torch.randn(2, 600, 4, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    text = flexattn.explain(q, k, v, attn_mask_type="causal", backend="triton", deterministic=True, **more).details
    assert "forward: triton (mma.sync)" in text
    assert "backward: triton (mma.sync two-kernel)" in text
    found = []
    for _ in range(4):
        torch.manual_seed(0)
        out = flexattn.attention(q, k, v, attn_mask_type="causal", backend="triton", deterministic=True, **more)
        found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())))
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
