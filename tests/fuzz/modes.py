"""Modes that a call of attention() is made in: torch's contexts around a call, and CUDA graphs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.calls import Call
from tests.fuzz.statistics import request

WITHOUT_GRADIENTS = ("no_grad", "inference")


def attend(call: Call, mode: str = "") -> dict[str, Tensor]:
    """Returns the results of one call, and the gradients by "d" and a name if its mode computes them."""
    if mode == "thread":
        return _in_thread(lambda: _attend(call))
    if mode == "stream":
        return _on_stream(lambda: _attend(call))
    if mode == "graph":
        return _captured(call)
    around: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast(call.config.where.device, dtype=call.config.dtype),
        "default device": lambda: torch.device("meta"),
        "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.device, t.cpu()), lambda kept: kept[1].to(kept[0])
        ),
    }
    return _attend(call, mode, around.get(mode, contextlib.nullcontext))


def _attend(
    call: Call, mode: str = "", around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
) -> dict[str, Tensor]:
    arguments = call.arguments()
    with around():
        if mode == "checkpoint" and call.wanted:
            results = checkpoint(_results, call, arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            results = _results(call, arguments)
    if call.wanted and mode not in WITHOUT_GRADIENTS:
        results |= _gradients(call, results)
    return {name: t.detach() for name, t in results.items()}


def _results(call: Call, arguments: dict[str, Any]) -> dict[str, Tensor]:
    from flexattn import attention
    from flexattn.dispatch.spec import Results
    from flexattn.in_layout import attend as attend_in_layout

    config = call.config
    names = ["out", *(["lse"] if config.return_lse else []), *(["max_logit"] if config.return_max_logit else [])]
    if config.aux:
        out, aux = attention(**arguments | {"return_lse": False, "return_max_logit": False, "return_aux": request(call)})
        return {"out": out} | {name: t for name, t in aux._asdict().items() if t is not None}
    if call.results == Results():
        if config.gives_out and not call.wanted:
            arguments = arguments | {"out": _memory(arguments)}
        found = attention(**arguments)
        return dict(zip(names, found if len(names) > 1 else (found,), strict=True))
    out, lse, max_logit = attend_in_layout(call.results, **arguments)
    every = {"out": out, "lse": lse, "max_logit": max_logit}
    return {name: every[name] for name in names}


def _memory(arguments: dict[str, Any]) -> Tensor:
    """Returns memory for out, with NaN in it."""
    q, v = arguments["q"], arguments["v"]
    dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
    return torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=dtype, device=q.device)


def _with_gradients(call: Call, arguments: dict[str, Any]) -> dict[str, Tensor]:
    results = _results(call, arguments)
    if call.wanted:
        results |= _gradients(call, results)
    return {name: t.detach() for name, t in results.items()}


def _gradients(call: Call, results: dict[str, Tensor]) -> dict[str, Tensor]:
    seeds = {"out": call.dout, "lse": call.dlse}
    outputs = [name for name in ("out", "lse") if seeds[name] is not None]
    leaves = [call.tensors[name] for name in call.wanted]
    found = torch.autograd.grad([results[name] for name in outputs], leaves, [seeds[name] for name in outputs], allow_unused=True)
    return {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for name, leaf, gradient in zip(call.wanted, leaves, found, strict=True)
    }


def _in_thread(make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(make())
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _on_stream(make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = make()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return found


def _captured(call: Call) -> dict[str, Tensor]:
    """The results of a graph that is captured with the call's lengths and values, and replayed with others in the same memory.

    The call runs on the capture's stream before. Kernels are compiled and loaded then, and autograd has that stream for the leaves,
    which are new: a leaf that a graph on another stream still has would make that stream wait inside of the capture.
    """
    call.renew_leaves()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    arguments = call.arguments()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        _with_gradients(call, arguments)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")  # torch.cuda.graph would collect garbage first, which takes longer
        try:
            results = _with_gradients(call, arguments)
        finally:
            graph.capture_end()  # an error of it has the error inside of the capture as its context
    torch.cuda.synchronize()
    call.refill(is_captured=True)
    graph.replay()
    torch.cuda.synchronize()
    return {name: t.clone() for name, t in results.items()}
