"""cuDNN through its Python frontend, as in its samples: one graph for each shape, built before the timed executions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexattn.bench.counts import band_of
from flexattn.bench.implementations import Prepared, Unavailable
from flexattn.bench.inputs import Tensors
from flexattn.bench.shapes import Workload

CUDNN_FRONTEND = "cuDNN frontend"


def prepare_cudnn(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    """Prepares a call on bshd memory. Raises Unavailable if this harness does not build a graph for the workload."""
    if workload.is_ragged or workload.score or workload.hidden_keys or workload.softmax_type != "vanilla":
        raise Unavailable("this harness drives the frontend for dense batches with a band only; flexattn cudnn takes the rest")
    try:
        import cudnn
    except ImportError as e:
        raise Unavailable(f"nvidia-cudnn-frontend is not installed ({e})") from e
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    q, k, v, dout = (t.transpose(1, 2) for t in tensors[:4])  # cuDNN's dims are (b, h, s, d), with any strides
    out = torch.empty_like(tensors.dout).transpose(1, 2)
    stats = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
    forward = _forward_graph(cudnn, handle, workload, (q, k, v), out, stats if direction != "forward" else None)
    if direction == "forward":
        return Prepared(lambda: (forward(), {"out": out.transpose(1, 2)})[1], forward)
    forward()
    gradients = [torch.empty_like(t).transpose(1, 2) for t in tensors[:3]]
    backward = _backward_graph(cudnn, handle, workload, (q, k, v, out, dout, stats), gradients)

    def both() -> None:
        forward()
        backward()

    run = backward if direction == "backward" else both

    def results() -> dict[str, Tensor]:
        run()
        named = {f"d{name}": t.transpose(1, 2) for name, t in zip("qkv", gradients, strict=True)}
        return named if direction == "backward" else {"out": out.transpose(1, 2), **named}

    return Prepared(results, run)


def _graph(cudnn: ModuleType, handle: object, dtype: torch.dtype) -> Any:
    io = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    fp32 = cudnn.data_type.FLOAT
    return cudnn.pygraph(io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)


def _forward_graph(
    cudnn: ModuleType, handle: object, workload: Workload, inputs: tuple[Tensor, ...], out: Tensor, stats: Tensor | None
) -> Any:
    from flexattn.kernels_cudnn.graphs import band_arguments

    graph = _graph(cudnn, handle, out.dtype)
    q, k, v = (graph.tensor_like(t) for t in inputs)
    scale = workload.head_dim_qk**-0.5
    o, s = graph.sdpa(q=q, k=k, v=v, generate_stats=stats is not None, attn_scale=scale, **band_arguments(*band_of(workload)))
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    pack = {q: inputs[0], k: inputs[1], v: inputs[2], o: out}
    if stats is not None:
        s.set_output(True).set_data_type(cudnn.data_type.FLOAT).set_dim(list(stats.shape)).set_stride(list(stats.stride()))
        pack[s] = stats
    return _executable(cudnn, handle, graph, pack)


def _backward_graph(
    cudnn: ModuleType, handle: object, workload: Workload, inputs: tuple[Tensor, ...], gradients: list[Tensor]
) -> Any:
    from flexattn.kernels_cudnn.graphs import band_arguments

    graph = _graph(cudnn, handle, gradients[0].dtype)
    q, k, v, o, dout, stats = symbols = [graph.tensor_like(t) for t in inputs]
    scale = workload.head_dim_qk**-0.5
    outputs = graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=dout, stats=stats, attn_scale=scale, **band_arguments(*band_of(workload)))
    for symbol, t in zip(outputs, gradients, strict=True):
        symbol.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride()))
    return _executable(cudnn, handle, graph, dict(zip([*symbols, *outputs], [*inputs, *gradients], strict=True)))


def _executable(cudnn: ModuleType, handle: object, graph: Any, pack: dict[object, Tensor]) -> Any:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    return lambda: graph.execute(pack, workspace, handle=handle)
