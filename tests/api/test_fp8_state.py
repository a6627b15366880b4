"""The state of delayed scaling: its content after casts and checkpoints, the scale of each tensor, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import fp8
from flexattn.dispatch import triton_backend
from flexattn.fp8 import BUFFERS

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
HEADS, HEADS_KV, LENGTH, D = 4, 2, 20, 16


def tensors(device: str, seed: int = 0, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    heads = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
    return {n: torch.randn(1, LENGTH, h, D, generator=draw).to(device, dtype).requires_grad_() for n, h in heads.items()}


def amax_of(t: Tensor) -> Tensor:
    return t.detach().float().abs().amax((0, 1, 3))


def full_scale(amax: Tensor, dtype: torch.dtype = E4M3, margin: int = 0) -> Tensor:
    return (LARGEST[dtype] * 2.0**-margin / amax.double()).float()


class Layer(torch.nn.Module):
    """A layer of a model, which holds a state as a user's does."""

    def __init__(self, recipe: fp8.Recipe, device: str) -> None:
        super().__init__()
        self.norm = torch.nn.Linear(D, D, device=device)
        self.state = fp8.DelayedScaling(recipe, HEADS, HEADS_KV, device)


RECIPE = fp8.Recipe(scaling="delayed", amax_history_len=3)


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(BF16),
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(torch.empty(0, dtype=torch.float16, device=model.norm.weight.device)),
        lambda model: model.type(BF16),
        lambda model: model.to("meta", BF16).to_empty(device="cpu"),
    ],
    ids=["to", "half", "double", "like", "type", "moved and cast"],
)
def test_casts_leave_the_state_as_it_is(cast: Callable[[Layer], Layer], device: str) -> None:
    model = Layer(RECIPE, device)
    small = torch.rand(HEADS, device=device) * 1e-3  # its scale is infinite in fp16
    model.state.note("q", small.view(1, HEADS, 1))
    model.state.update()
    before = {name: t.clone() for name, t in model.state.named_buffers()}
    model = cast(model)
    assert model.norm.weight.dtype is not torch.float32 or model.norm.weight.is_meta
    for name, t in model.state.named_buffers():
        assert t.dtype is torch.float32
        if "to_empty" not in str(cast.__code__.co_names):
            assert torch.equal(t, before[name])


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_another_dtype_is_converted(assign: bool, device: str) -> None:
    trained, loaded = Layer(RECIPE, device), Layer(RECIPE, device)
    for name in BUFFERS:
        trained.state._buffers[name].uniform_(1, 2)  # type: ignore[union-attr]
    checkpoint = {name: t.to(BF16) for name, t in trained.state_dict().items()}
    loaded.load_state_dict(checkpoint, assign=assign)
    for name, t in loaded.state.named_buffers():
        assert t.dtype is torch.float32
        assert torch.equal(t, checkpoint[f"state.{name}"].float())
    call = tensors(device)
    flexattn.attention(**call, fp8_recipe=RECIPE, fp8_state=loaded.state).sum().backward()
    loaded.state.update()
    assert torch.equal(checkpoint["state.scale_q"], trained.state.scale_q.to(BF16))  # loaded tensors are not shared


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_state_of_inference_mode_is_one_outside_of_it(backend: str, device: str) -> None:
    with torch.inference_mode():
        made = fp8.DelayedScaling(RECIPE, HEADS, HEADS_KV, device)
        moved = fp8.DelayedScaling(RECIPE, HEADS, HEADS_KV, device).to(BF16)
    for state in (made, moved):
        call = tensors(device)
        flexattn.attention(**call, fp8_recipe=RECIPE, fp8_state=state, backend=backend).sum().backward()
        state.update()
        assert torch.equal(state.scale_q, full_scale(amax_of(call["q"])))
        with torch.inference_mode():
            flexattn.attention(**call, fp8_recipe=RECIPE, fp8_state=state, backend=backend)
            state.update()


def test_wrong_buffers_are_named(device: str) -> None:
    def refused(error: str, change: Callable[[fp8.DelayedScaling], None], recipe: fp8.Recipe = RECIPE, calls: int = 0) -> None:
        state = fp8.DelayedScaling(recipe, HEADS, HEADS_KV, device)
        call: dict[str, Any] = {**tensors(device), "fp8_recipe": recipe, "fp8_state": state, "backend": "eager"}
        for _ in range(calls):
            flexattn.attention(**call)
        change(state)
        with pytest.raises(ValueError, match=error):
            flexattn.attention(**call)

    for name in BUFFERS:
        refused(
            rf"fp8_state\.{name} is a torch\.float16 tensor.*accepted: a contiguous torch\.float32 tensor of shape",
            lambda state, name=name: setattr(state, name, getattr(state, name).half()),  # type: ignore[misc]
        )
        refused(
            rf"fp8_state\.{name} is a torch\.float32 tensor of shape .* with strides",
            lambda state, name=name: setattr(state, name, getattr(state, name).repeat_interleave(2, -1)[..., ::2]),  # type: ignore[misc]
        )
    for name in ("q", "k", "v", "dout", "out"):
        refused(
            f"made for 3 heads of {name} ",
            lambda state, name=name: setattr(state, f"scale_{name}", torch.ones(3, device=device)),  # type: ignore[misc]
        )
        refused(
            rf"fp8_state\.amax_history_{name} has shape \(2, . *\); accepted: \(3, ",
            lambda state, name=name: setattr(state, f"amax_history_{name}", state.history(name)[:2].clone()),  # type: ignore[misc]
        )
    refused(
        "scale_k is a torch.float64", lambda state: setattr(state, "scale_k", state.scale_k.double()), calls=3
    )  # and known by then
    by_tensor = fp8.Recipe(scaling="delayed", granularity="tensor")
    refused("made for 4 heads of q", lambda state: setattr(state, "scale_q", torch.ones(HEADS, device=device)), by_tensor)
    state = fp8.DelayedScaling(RECIPE, HEADS, HEADS + 1, device)
    with pytest.raises(ValueError, match="fp8_state was made for 5 heads of k "):
        flexattn.attention(**tensors(device), fp8_recipe=RECIPE, fp8_state=state)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_steps_without_calls_leave_the_scales(algorithm: str, device: str) -> None:
    recipe = fp8.Recipe(scaling="delayed", amax_history_len=2, amax_compute_algo=algorithm)
    state = fp8.DelayedScaling(recipe, HEADS, HEADS_KV, device)
    call = tensors(device)
    flexattn.attention(**call, fp8_recipe=recipe, fp8_state=state).sum().backward()
    for _ in range(4):  # long enough for the history to have forgotten that call
        state.update()
        for name in "qkv":
            assert torch.equal(state.scale(name), full_scale(amax_of(call[name])))
    assert not state.history("q").any()
    assert bool((state.scale("out") == 1).all())  # never made in FP8


@pytest.mark.sample("fp8_format", "out_dtype", "quantises")
@pytest.mark.parametrize("quantises", ["torch", "triton"])
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
def test_each_tensors_scale_is_of_its_dtype_and_margin(
    out_dtype: torch.dtype, fp8_format: str, quantises: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantises == "torch":
        monkeypatch.setattr(triton_backend, "_can_quantize", lambda device: False)
    own = {"amax_compute_algo": "most_recent", "margin": 2, "out_dtype": out_dtype, "fp8_format": fp8_format}
    recipe = fp8.Recipe(scaling="delayed", **own)
    state = fp8.DelayedScaling(recipe, HEADS, HEADS_KV, device)
    plain = fp8.DelayedScaling(recipe, HEADS, HEADS_KV, device)
    call = tensors(device) | {"fp8_recipe": recipe, "backend": "eager"}
    for _ in range(2):
        out = flexattn.attention(**call, fp8_state=state)
        dout = torch.linspace(-3, 5, out.source.numel(), device=device).view(out.source.shape)
        fp8.dequantize(out, recipe).backward(dout.to(BF16))
        amax = {name: amax_of(call[name]) for name in "qkv"} | {"dout": amax_of(dout.to(BF16)), "out": amax_of(out.source)}
        for name, largest in amax.items():
            assert torch.equal(state.history(name)[0], largest), name
        state.update()
    dtypes = dict.fromkeys("qkv", E4M3) | {"dout": E5M2 if fp8_format == "HYBRID" else E4M3, "out": out_dtype}
    for name, dtype in dtypes.items():
        assert torch.equal(state.scale(name), full_scale(amax[name], dtype, 2)), name
    assert not plain.amax_history_q.any()
    again = flexattn.attention(**call, fp8_state=state)
    wanted = out.source.float().abs().max() / LARGEST[out_dtype] * 4
    assert float(again.descale.max()) == pytest.approx(float(wanted.detach()), rel=0.1)


def test_copies_are_independent(device: str) -> None:
    state = fp8.DelayedScaling(RECIPE, HEADS, HEADS_KV, device)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        flexattn.attention(**tensors(device), fp8_recipe=RECIPE, fp8_state=other)
        assert other.amax_history_q.any()
        assert not state.amax_history_q.any()


@pytest.mark.parametrize("is_known", [False, True])
def test_an_update_between_forward_and_backward_is_refused(is_known: bool, device: str) -> None:
    """dout's scale is the one that the call began with, or nobody's: autograd sees that it changed."""
    state = fp8.DelayedScaling(RECIPE, HEADS, HEADS_KV, device)
    call = tensors(device) | {"fp8_recipe": RECIPE, "fp8_state": state, "backend": "eager"}
    for _ in range(3 * is_known):
        flexattn.attention(**call).sum().backward()
    out = flexattn.attention(**call)
    state.note("dout", torch.ones(1, HEADS, 1, device=device))
    state.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_steps_in_a_cuda_graph() -> None:
    """The graph has forward, backward and update: each replay is the next step, like without a graph."""
    recipe = fp8.Recipe(scaling="delayed", amax_history_len=3, fp8_format="HYBRID")
    states = [fp8.DelayedScaling(recipe, HEADS, HEADS_KV, "cuda") for _ in range(3)]
    given = tensors("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step(state: fp8.DelayedScaling) -> Tensor:
        out: Tensor = flexattn.attention(**call, fp8_recipe=recipe, fp8_state=state)
        torch.autograd.grad(out, list(call.values()), dout)
        state.update()
        return out.detach()

    with torch.cuda.stream(stream):  # whose gradient nodes are then of no stream that must not be waited for
        call = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
        dout = torch.ones(1, LENGTH, HEADS, D, dtype=BF16, device="cuda")
        for _ in range(3):  # compiled, and known
            step(states[2])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(states[0])
    for n in range(4):
        factor = 1.0 + n
        with torch.no_grad():
            call["q"].copy_(given["q"] * factor)
        dout.fill_(factor)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step(states[1])), n
        for a, b in zip(states[0].buffers(), states[1].buffers(), strict=True):
            assert torch.equal(a, b), n
