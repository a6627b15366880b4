"""flexattn's backends and launchers as implementations: each prepares a workload, or raises Unavailable with the reason."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import flexattn
from flexattn import ops
from flexattn.bench.inputs import Tensors, arguments_of, bias_of, make_tensors, mask_mod_of, score_mod_of
from flexattn.bench.shapes import MODS, Workload
from flexattn.bench.tables import AUTO
from flexattn.dispatch import triton_backend
from flexattn.functional import bind_call

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.problem import Problem
    from flexattn.kernels_triton.runtime.device import Tile
    from flexattn.kernels_triton.runtime.launch import Launch

TRITON, CUDNN, EAGER, SCORE_MOD = "flexattn triton", "flexattn cudnn", "flexattn eager", "flexattn score_mod"
PORTABLE, HOPPER = "flexattn portable", "flexattn sm_90"
"""The triton backend without its kernels for sm_90 or mma.sync, and with the kernels for sm_90 in each call that they support."""
NAMED = (AUTO, HOPPER)
"""Implementations that are measured only if they are named, because they repeat kernels of the others."""
MMA_CAPABILITIES = (80, 86, 89, 120)
KERNELS = {
    "forward": ("forward", "_attn_fwd_kernel"),
    "dq": ("backward", "_attn_bwd_dq_kernel"),
    "dkdv": ("backward", "_attn_bwd_dkdv_kernel"),
}
"""The direction and the name in the source of each kernel that can be measured alone."""


class Unavailable(Exception):
    """Raised if an implementation is missing or does not support a workload; the text is its cell in the table."""


class Prepared(NamedTuple):
    results: Callable[[], Mapping[str, Tensor]]  # "out", "dq", "dk", "dv", "dbias" if the call has them, laid out as `Tensors`
    timed: Callable[[], object]


class Implementation(NamedTuple):
    name: str
    version: str
    prepare: Callable[[Workload, Tensors, str], Prepared]
    compiles: bool = False  # kernels, when first run, into a cache on disk
    serves: Callable[[Workload, str], bool] = lambda workload, direction: True  # whether a cell has a row of it


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Layout = Callable[[Tensor], Tensor]


def differentiable(
    attend: Callable[[Workload, Tensors], Attend], to_layout: Layout = lambda t: t, from_layout: Layout = lambda t: t
) -> Callable[[Workload, Tensors, str], Prepared]:
    """Returns a `prepare` function for a differentiable function of q, k and v in any layout. A dense bias has a gradient too."""

    def prepare(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        q, k, v, dout = (to_layout(t) for t in tensors[:4])
        if direction == "forward":
            call = attend(workload, tensors)
            return Prepared(lambda: {"out": from_layout(call(q, k, v))}, lambda: call(q, k, v))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        wanted = list(leaves)
        if tensors.dense_bias is not None:
            bias = tensors.dense_bias.detach().requires_grad_()
            tensors = tensors._replace(dense_bias=bias)
            wanted.append(bias)
        call = attend(workload, tensors)

        def named(gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
            found = {f"d{name}": from_layout(t) for name, t in zip("qkv", gradients, strict=False)}
            return found | ({"dbias": gradients[3]} if len(gradients) > 3 else {})

        if direction == "backward":
            backward = functools.partial(torch.autograd.grad, call(*leaves), wanted, dout, retain_graph=True)
            return Prepared(lambda: named(backward()), backward)

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = call(*leaves)
            return out, torch.autograd.grad(out, wanted, dout)

        def results() -> dict[str, Tensor]:
            out, gradients = both()
            return {"out": from_layout(out.detach()), **named(gradients)}

        return Prepared(results, both)

    return prepare


def attention_of(backend: str, workload: Workload, tensors: Tensors, **more: object) -> Attend:
    """Returns attention() on a backend with the workload's arguments and `more`."""

    made = arguments_of(workload, tensors) | {"backend": backend, **more}
    if workload.repeats_bias and backend == "cudnn":  # the copies are part of the call, and the sum of their gradients
        return lambda q, k, v: _only(flexattn.attention(q, k, v, **made | {"bias": bias_of(tensors, workload)}))
    return lambda q, k, v: _only(flexattn.attention(q, k, v, **made))


def _attention_with_mods(workload: Workload, tensors: Tensors) -> Attend:
    """Returns attention() with the workload's score and mask as functions. A packed batch is one sequence with a document mask."""
    arguments: dict[str, Any] = {"score_mod": score_mod_of(workload, tensors), "backend": "triton"}
    arguments["mask_mod"] = mask_mod_of(workload, tensors)
    if not workload.is_ragged:
        arguments["qkv_format"] = workload.qkv_format
        return lambda q, k, v: _only(flexattn.attention(q, k, v, **arguments))
    return lambda q, k, v: _only(flexattn.attention(q[None], k[None], v[None], **arguments))[0]


def _only(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    assert isinstance(out, Tensor)
    return out


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for as long as the block lasts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def with_wish(wish: str, prepare: Callable[[Workload, Tensors, str], Prepared]) -> Callable[[Workload, Tensors, str], Prepared]:
    """Returns `prepare` with FLEXATTN_HOPPER=`wish`, which each call reads."""

    def wished(call: Callable[[], object]) -> Callable[[], Any]:
        def run() -> Any:
            with environment({"FLEXATTN_HOPPER": wish}):
                return call()

        return run

    def prepare_with(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        prepared = wished(lambda: prepare(workload, tensors, direction))()
        return Prepared(*map(wished, prepared))

    return prepare_with


def capability_of(device: str) -> int:
    """Returns the compute capability of the GPU, for example 90 for 9.0; 0 without a GPU."""
    major, minor = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


def ours(device: str) -> list[Implementation]:
    """Returns each backend by name, without fallbacks: if it cannot run, its reason is the cell. AUTO selects one of them.

    `mma.implementations` has the kernels for mma.sync.
    """
    version = flexattn.__version__
    backends = {TRITON: "triton", CUDNN: "cudnn"} if device == "cuda" else {EAGER: "eager"}
    found = [
        Implementation(name, version, differentiable(functools.partial(attention_of, backend)), compiles=backend == "triton")
        for name, backend in backends.items()
    ]
    capability, triton = capability_of(device), differentiable(functools.partial(attention_of, "triton"))
    if capability == 90 or capability in MMA_CAPABILITIES:
        found.insert(1, Implementation(PORTABLE, version, with_wish("never", triton), compiles=True))
    if capability == 90:
        found.append(Implementation(HOPPER, version, with_wish("always", triton), compiles=True))
    if device == "cuda":
        prepare = differentiable(_attention_with_mods)
        has_mods = lambda workload, direction: workload.group == MODS  # noqa: E731
        found.append(Implementation(SCORE_MOD, version, prepare, compiles=True, serves=has_mods))
    found.append(Implementation(AUTO, version, differentiable(functools.partial(attention_of, "auto")), compiles=device == "cuda"))
    return found


class Launchers(NamedTuple):
    """The library's or a developer's launchers, and the tiles that replace the committed ones, by KERNELS' names."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    tiles: Mapping[str, Tile]


def committed_launchers(tiles: Mapping[str, Tile]) -> Launchers:
    from flexattn.kernels_triton.portable.backward import attention_backward
    from flexattn.kernels_triton.portable.forward import attention_forward

    return Launchers(attention_forward, attention_backward, tiles)


def problem_of(workload: Workload, tensors: Tensors) -> Problem:
    """Returns the problem that the launchers get from `attention`."""
    x, settings = bind_call(*tensors[:3], **arguments_of(workload, tensors))
    return triton_backend.to_problem(ops.spec_to_run(x, settings), x)


def with_launchers(launchers: Launchers, workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    """Prepares a whole forward or backward by these launchers, which allocate their outputs in each call, like attention()."""
    from flexattn.kernels_triton.common.problem import Backward

    q, k, v, dout = tensors[:4]
    problem = problem_of(workload, tensors)

    def forward() -> tuple[Tensor, Tensor]:
        lse_shape = (workload.num_heads, q.shape[0]) if workload.is_ragged else (q.shape[0], workload.num_heads, q.shape[1])
        out, lse = _unwritten(dout), _unwritten(dout.new_empty(lse_shape, dtype=torch.float32))
        launchers.forward(problem, out, lse, tile=launchers.tiles.get("forward"))
        return out, lse

    if direction == "forward":
        return Prepared(lambda: {"out": forward()[0]}, forward)
    out, lse = forward()

    def backward() -> dict[str, Tensor]:
        dq, dk, dv = map(_unwritten, (q, k, v))
        doffset = None if tensors.softmax_offset is None else torch.empty_like(tensors.softmax_offset)
        tiles = {f"tile_{kernel}": launchers.tiles.get(kernel) for kernel in ("dq", "dkdv")}
        launchers.backward(Backward(problem, out, lse, dout, None, dq, dk, dv, doffset), **tiles)
        return {"dq": dq, "dk": dk, "dv": dv}

    return Prepared(backward, backward)


def _unwritten(like: Tensor) -> Tensor:
    """Returns memory for a result. On a CPU, where nothing is timed, it is NaN, so that an element that is not written is found."""
    return torch.empty_like(like) if like.is_cuda else torch.full_like(like, float("nan"))


def recorded(prepared: Callable[[], Prepared], kernel: str | None = None) -> list[Launch]:
    """Returns the launches of `kernel` (None: of all kernels) without running any."""
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    with recorded_launches() as launches:
        prepared().timed()
    return [x for x in launches if kernel is None or x.kernel.__name__ == KERNELS[kernel][1]]


def one_kernel(kernel: str, launchers: Launchers, workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    """Prepares one kernel: the results are the whole call's; only its launches are timed, on the other kernels' results."""
    from flexattn.kernels_triton.runtime.launch import make

    whole = with_launchers(launchers, workload, tensors, direction)
    every = recorded(lambda: whole)
    own = [x for x in every if x.kernel.__name__ == KERNELS[kernel][1]]

    def run(launches: list[Launch]) -> None:
        for x in launches:
            make(x, tensors.q.device)

    @functools.cache
    def fill() -> None:  # the statistics that one kernel writes for the next, in the buffers of the recorded launches
        run(every)

    def timed() -> None:
        fill()
        run(own)

    return Prepared(whole.results, timed)


def committed_tile(kernel: str, workload: Workload, capability: int) -> Tile:
    """Returns the tables' tile for a kernel and capability, on any device."""
    from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD

    table = {"forward": FORWARD, "dq": DQ, "dkdv": DKDV}[kernel]
    return problem_of(workload, make_tensors(workload, "meta")).tile(table, capability)
