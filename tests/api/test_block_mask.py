"""Block masks: made without a dense mask, equal to torch's, and skipped blocks that change nothing, on each backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import flexattn
from flexattn.block_mask import block_lists
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import tiles as configs
from flexattn.kernels_triton.common.problem import Backward, BlockLists
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_inputs
from tests.mods.test_score_mod_triton import HEADS, LOOP_SPILLS, check, lengths, rand
from tests.support.compiled_kernels import compile_sound

SIZE = 64


def documents(device: str, length: int = 2000) -> Any:
    ids = torch.arange(length, device=device) // 75
    return lambda b, h, i, j: ids[i] == ids[j]


def causal(device: str) -> Any:
    return lambda b, h, i, j: i >= j


def by_batch_and_head(device: str) -> Any:
    ends = torch.tensor([70, 1500], device=device)
    return lambda b, h, i, j: ((j < ends[b]) | (h == 1)) & ((i - j).abs() < 90 * (h + 1))


def checkerboard(device: str) -> Any:
    return lambda b, h, i, j: ((i // SIZE + j // SIZE) % 3 == 0) & ((i // SIZE != j // SIZE) | (j % 2 == 0))


def everything(device: str) -> Any:
    return lambda b, h, i, j: i >= 0


def nothing(device: str) -> Any:
    return lambda b, h, i, j: i < 0


MASKS = [documents, causal, by_batch_and_head, checkerboard, everything, nothing]


@pytest.mark.parametrize("make_mask", MASKS[:4])
@pytest.mark.parametrize(("sq", "skv"), [(256, 256), (256, 512)])
def test_equal_to_torch(make_mask: Any, sq: int, skv: int, device: str) -> None:
    mask_mod = make_mask(device)
    ours = flexattn.create_block_mask(mask_mod, 2, HEADS, sq, skv, device, SIZE)
    torchs = torch_create_block_mask(mask_mod, 2, HEADS, sq, skv, device, SIZE)
    assert isinstance(ours, BlockMask)
    assert torch.equal(ours.to_dense(), torchs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(torchs, name)), name
    assert ours.BLOCK_SIZE == torchs.BLOCK_SIZE
    assert ours.seq_lengths == torchs.seq_lengths


def test_memory_is_that_of_the_lists(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(flexattn.block_mask, "MOST_AT_ONCE", 1 << 14)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        small = flexattn.create_block_mask(causal(device), None, None, 1024, 1024, device, SIZE)
    assert largest <= 1 << 14
    whole = torch_create_block_mask(causal(device), None, None, 1024, 1024, device, SIZE)
    assert torch.equal(small.to_dense(), whole.to_dense())


def run(mask: BlockMask, device: str, score_mod: Any = None, call: dict[str, Any] | None = None, **inputs: Any) -> list[Tensor]:
    sizes = [max(inputs[name]) + inputs.get("gap", 0) for name in ("lengths_q", "lengths_kv")]
    blocks = block_lists(mask, len(inputs["lengths_q"]), HEADS, *sizes, torch.device(device if device == "cpu" else "cuda:0"))
    return check((score_mod, mask.mask_mod), device, {**(call or {}), "blocks": blocks}, **inputs)


@pytest.mark.sample
@pytest.mark.parametrize(("make_mask", "maker"), [*((make_mask, "ours") for make_mask in MASKS), (by_batch_and_head, "torch's")])
def test_against_the_reference(make_mask: Any, maker: str, device: str) -> None:
    # partial last blocks, and a mask that is larger than the input
    create = flexattn.create_block_mask if maker == "ours" else torch_create_block_mask
    (sq,), (skv,) = lengths(100), lengths(150)
    mask = create(make_mask(device), 2, HEADS, sq + (0 if maker == "ours" else 100), skv + 70, device, SIZE)
    run(mask, device, lengths_q=[sq, sq], lengths_kv=[skv, skv])


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_lengths_bands_biases_and_a_score_mod(dtype: torch.dtype, device: str) -> None:
    lengths_q, lengths_kv = lengths(130, 0, 40), lengths(97, 30, 140)
    slopes = rand(HEADS, device=device).abs().requires_grad_()
    call = {
        "attn_mask_type": "padding_causal_bottom_right",
        "window_size": (lengths(80)[0], 0),
        "bias_type": "post_scale_bias",
        "bias": rand(1, HEADS, 1, max(lengths_kv), device=device),
        "dropout_p": 0.2,
        "rng_state": torch.tensor((3, 4), device=device),
        "deterministic": True,
    }
    mask = flexattn.create_block_mask(checkerboard(device), 1, 1, max(lengths_q) + 2, max(lengths_kv) + 2, device, (64, 32))
    run(
        mask,
        device,
        lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
        call,
        qkv_format="thd",
        gap=2,
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        dtype=dtype,
    )


@pytest.mark.slow
def test_through_the_public_function(device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(2, 100, n, 16, device=device, generator=generator, requires_grad=True) for n in (HEADS, 2, 2))
    mask_mod = by_batch_and_head(device)
    mask = flexattn.create_block_mask(mask_mod, 2, HEADS, 100, 100, device, 32)
    want = flexattn.attention(q, k, v, mask_mod=mask_mod, backend="eager")
    for backend in ("eager", "triton"):
        for _ in range(2):  # the lists are made once
            out = flexattn.attention(q, k, v, block_mask=mask, backend=backend)
            torch.testing.assert_close(out, want, rtol=1e-3 if device == "cuda" else 1e-5, atol=1e-3 if device == "cuda" else 1e-5)


LISTS = [f"{full}{side}_{kind}" for full in ("", "full_") for side in ("kv", "q") for kind in ("num_blocks", "indices")]


def copied(t: Tensor, new: Tensor) -> Tensor:
    return t.copy_(new)


def replaced(t: Tensor, new: Tensor) -> Tensor:
    return new.clone()


def at_the_same_address(t: Tensor, new: Tensor) -> Tensor:
    """Imitates an allocator that gives a new tensor the memory of the one that it replaces: a version and an address as before."""
    t.data.copy_(new)
    return t.data


@pytest.mark.sample
@pytest.mark.parametrize("change", [copied, replaced, at_the_same_address])
def test_lists_that_are_changed_between_calls(change: Any, device: str) -> None:
    """Derived tensors of a mask's lists are made again, in kept calls too."""
    q, k, v = (torch.randn(1, 64, 1, 16, device=device, requires_grad=True) for _ in "qkv")
    masks = [
        flexattn.create_block_mask(mod, None, None, 64, 64, device, 32) for mod in (everything(device), lambda b, h, i, j: j < 32)
    ]
    for backend in ("eager", "triton"):
        mask, other = (flexattn.create_block_mask(everything(device), None, None, 64, 64, device, 32) for _ in range(2))
        for new in (masks[1], masks[0], masks[1]):
            for name in LISTS:
                setattr(mask, name, change(getattr(mask, name), getattr(new, name)))
                setattr(other, name, getattr(new, name).clone())
            for _ in range(2):
                found, wanted = (flexattn.attention(q, k, v, block_mask=m, backend=backend) for m in (mask, other))
                assert torch.equal(found, wanted)
                grads = (torch.autograd.grad(out.sum(), [q, k, v]) for out in (found, wanted))
                assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
            assert (found - flexattn.attention(q, k, v, backend=backend)).abs().max() < 1e-5 or new is masks[1]
            other = flexattn.create_block_mask(everything(device), None, None, 64, 64, device, 32)


def test_a_mask_that_is_made_in_inference_mode(device: str) -> None:
    """Its lists do not tell when they change, so that nothing is kept of them."""
    with torch.inference_mode():
        mask = flexattn.create_block_mask(causal(device), None, None, 64, 64, device, 32)
        q = torch.randn(1, 64, HEADS, 16, device=device)
        for _ in range(3):
            torch.testing.assert_close(
                flexattn.attention(q, q, q, block_mask=mask), flexattn.attention(q, q, q, attn_mask_type="causal")
            )
        mask.full_kv_num_blocks.zero_()
        out = flexattn.attention(q, q, q, block_mask=mask)
    assert (out - flexattn.attention(q, q, q, attn_mask_type="causal")).abs().max() > 0.01


def test_skipped_blocks_are_not_read(device: str) -> None:
    """NaN in keys that no block list names reaches nothing."""
    q, k, v = (torch.randn(1, 128, HEADS, 16, device=device) for _ in "qkv")
    mask = flexattn.create_block_mask(lambda b, h, i, j: j < 64, None, None, 128, 128, device, 32)
    k[:, 64:], v[:, 64:] = float("nan"), float("nan")
    k.requires_grad_()
    out = flexattn.attention(q, k, v, block_mask=mask, backend="triton")
    out.sum().backward()
    assert out.isfinite().all()
    assert k.grad is not None
    assert k.grad.isfinite().all()


def test_errors_name_what_does_not_fit(device: str) -> None:
    q = torch.randn(2, 100, HEADS, 16, device=device)
    mask = flexattn.create_block_mask(causal(device), None, None, 64, 128, device, 32)
    with pytest.raises(ValueError, match=r"block_mask is for batch 1, 1 heads, 64 queries.*at least 100 queries"):
        flexattn.attention(q, q, q, block_mask=mask)
    few_keys = flexattn.create_block_mask(causal(device), None, None, 128, 64, device, 32)
    with pytest.raises(ValueError, match=r"128 queries and 64 keys; .* at least 100 queries and 100 keys"):
        flexattn.attention(q, q, q, block_mask=few_keys)
    with pytest.raises(ValueError, match="one of the two"):
        flexattn.attention(q, q, q, block_mask=mask, mask_mod=causal(device))
    with pytest.raises(TypeError, match="block_mask is a int"):
        flexattn.attention(q, q, q, block_mask=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BLOCK_SIZE is 24"):
        flexattn.create_block_mask(causal(device), None, None, 64, 64, device, 24)


def test_the_default_device_is_one_that_is_there(device: str) -> None:
    mask = flexattn.create_block_mask(causal(device), None, None, 64, 64)
    assert mask.kv_indices.device.type == device


def test_kinds_of_blocks(device: str) -> None:
    mask = flexattn.create_block_mask(causal(device), None, None, 128, 96, device, 32)
    lists = block_lists(mask, 1, 1, 128, 96, mask.kv_indices.device)
    kinds = BlockLists(*lists.tensors, *lists.block_size).kinds()
    assert kinds.tolist() == [[[[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 0]]]]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["forward", pytest.param("backward", marks=pytest.mark.exhaustive)])
def test_compiled_ahead_of_time(kernels: str) -> None:
    """The kernels take a block mask on sm_90 with its matrix instructions and without spills in the loops."""
    given = make_inputs(lengths_q=[256, 256], head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    mask = flexattn.create_block_mask(documents("cpu"), None, None, 256, 256, "cpu", 128)
    blocks = block_lists(mask, 2, HEADS, 256, 256, torch.device("cpu"))
    spec, x = make_call(given, mods=trace_mods(None, mask.mask_mod), blocks=blocks, return_max_logit=False)
    problem = triton_backend.to_problem(spec, x)
    tiles = [problem.tile(table, 90) for table in (configs.FORWARD, configs.DQ, configs.DKDV)]
    out, lse = torch.zeros_like(x.q), torch.zeros(2, HEADS, 256)
    gradients = (out.clone(), x.k.clone(), x.v.clone())
    with recorded_launches() as launches:
        if kernels == "forward":
            attention_forward(problem, out, lse, tile=tiles[0])
        else:
            attention_backward(Backward(problem, out, lse, out, None, *gradients), *tiles[1:])
    for launch, report in zip(launches, compile_sound([request_for(launch, 90) for launch in launches]), strict=True):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
        assert report.loop_spill_share <= LOOP_SPILLS, launch.kernel
        if "dkdv" not in launch.kernel.__name__:
            assert report.matrix_instructions.keys() == {"HGMMA"}


def table_mask(device: str) -> Any:
    sees = torch.rand(40, 7, generator=torch.Generator().manual_seed(1)).to(device) < 0.7
    return lambda b, h, i, j: sees[i % 40, j % 7]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_in_small_blocks_of_a_mask_that_reads_bytes(dtype: torch.dtype, device: str) -> None:
    """In tiles of 16 by 16; Triton would compile the product with v for weights of four bits (triton-lang/triton#10645)."""
    mask = flexattn.create_block_mask(table_mask(device), None, None, 40, 60, device, 16)
    call = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 3], device=device)}
    run(mask, device, call=call, lengths_q=[40], lengths_kv=[60], dtype=dtype)


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), *(pytest.param(sm, marks=pytest.mark.exhaustive) for sm in (90, 100))]
)
def test_dropout_in_small_blocks_compiled(capability: int) -> None:
    mask = flexattn.create_block_mask(table_mask("cpu"), None, None, 256, 256, "cpu", 16)
    given = make_inputs(lengths_q=[256, 256], head_dim_qk=64, head_dim_v=64, dtype=torch.bfloat16)
    blocks = block_lists(mask, 2, HEADS, 256, 256, torch.device("cpu"))
    drawn = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 3])}
    spec, x = make_call(given, mods=trace_mods(None, mask.mask_mod), blocks=blocks, return_max_logit=False, **drawn)
    problem = triton_backend.to_problem(spec, x)
    out, lse = torch.zeros_like(x.q), torch.zeros(2, HEADS, 256)
    gradients = (out.clone(), x.k.clone(), x.v.clone())
    with pretended_device(capability, 132), recorded_launches() as launches:
        attention_forward(problem, out, lse)
        attention_backward(Backward(problem, out, lse, out, None, *gradients))
    reports = compile_sound([request_for(launch, capability) for launch in launches])
    assert {"HMMA"} in [set(report.matrix_instructions) for report in reports]


def test_a_capture_makes_lists_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a graph's replays write the lists that it creates, and the lists follow changes of the mask's tensors."""
    mask = flexattn.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, 64, 64, "cpu", 16)
    arguments = (mask, 1, 1, 64, 64, torch.device("cpu"))
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        first = block_lists(*arguments)
        assert not hasattr(mask, "_flexattn_lists")
    kept = block_lists(*arguments)
    assert kept is not first
    assert block_lists(*arguments) is kept
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        again = block_lists(*arguments)
        assert all(a is not b for a, b in zip(again.tensors, kept.tensors, strict=True))
    for a, b in zip(again.tensors, kept.tensors, strict=True):
        assert torch.equal(a, b)
