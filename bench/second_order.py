"""Tangents and double backwards: time beside forward, backward, the math backend and jvp-flash-attention; times of tiles.

    python -m flexattn.bench.second_order --out second_order.json [--only PATTERN ...]
    python -m flexattn.bench.second_order --tiles --out second_order_tiles.json [--only PATTERN ...]

Each row is a direction of a cell: the device time of one call in microseconds (`measure.time_on_device`), as median and quartiles.
A jvp includes its forward, and a double backward is the call that differentiates gradients alone. Before the timing, the results of
another implementation are compared with flexattn's. With --tiles each row is a kernel with a tile, whose results are compared with
the first tile's. Needs a GPU; `pip install --no-deps jvp_flash_attention` brings that peer, which has no double backward.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexattn import attention
from flexattn.bench import harness
from flexattn.bench.harness import Row, Run, make_parser, need_gpu, quartiles
from flexattn.bench.measure import peak_bytes, time_on_device

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.launch import Launch

CELLS = {
    "DiT-XL/2": (256, 256, 16, 72),
    "8 x 2048": (8, 2048, 16, 128),
    "8 x 2048, 64": (8, 2048, 16, 64),
    "8 x 2048, 96": (8, 2048, 16, 96),
    "1 x 16384": (1, 16384, 16, 128),
}
BUDGET_MS = 300.0  # device time of each call
MOST_SCORES = 2**30  # for the math backend, whose matrices of more scores do not fit
JVP_FLASH_DIMS = (16, 32, 64, 128, 256)

TILES: dict[str, Sequence[tuple[int, int, int, int]]] = {  # queries and keys of a block, warps, stages
    "tangent": ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1), (128, 64, 8, 2)),
    "queries": ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 1), (128, 32, 8, 2)),
    "keys": ((32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 2), (64, 128, 8, 1)),
}

# Changes of the committed tile of the forward with a tangent, by its head dim
JOINT_TILES: dict[int, Sequence[dict[str, Any]]] = {
    64: (
        {},
        {"pingpong": True},
        {"out_parts": 1},
        {"out_parts": 1, "pingpong": True},
        {"is_lazy": False},
        {"block_n": 64, "num_stages": 3, "q_stages": 2, "out_parts": 1},
        {"block_m": 192, "block_n": 64, "num_stages": 3, "registers": 160},
    ),
    80: (
        {},
        {"is_lazy": True},
        {"pingpong": True},
        {"num_stages": 2, "out_parts": 1},
        {"num_stages": 2, "out_parts": 1, "pingpong": True},
        {"q_stages": 1, "out_parts": 1},
        {"block_n": 128, "num_stages": 2, "q_stages": 1, "pingpong": True},
    ),
    96: (
        {},
        {"pingpong": True},
        {"is_lazy": False},
        {"num_stages": 2, "q_stages": 2},
        {"num_stages": 2, "q_stages": 2, "pingpong": True},
        {"num_stages": 2, "out_parts": 1},
    ),
    128: ({}, {"pingpong": True}, {"is_lazy": False}, {"is_lazy": False, "pingpong": True}),
}


def qkv_of(shape: tuple[int, ...], device: str = "cuda") -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def math_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def jvp_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found, unused-ignore]

    out: Tensor = JVPAttn.fwd_dual(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return out


def calls_of(attend: Callable[..., Tensor], shape: tuple[int, ...], device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """Returns the calls of each direction."""
    *qkv, dout = qkv_of(shape, device)
    if attend is jvp_flash_attention:  # its layout is bhsd: it copies tensors of another one
        qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
        return {"forward": lambda: attend(*qkv), "jvp": lambda: torch.func.jvp(attend, tuple(qkv), tuple(reversed(qkv)))}
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = attend(*leaves)
    gradients = torch.autograd.grad(attend(*leaves), leaves, dout, create_graph=True)
    return {
        "forward": lambda: attend(*qkv),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "jvp": lambda: torch.func.jvp(attend, tuple(qkv), tuple(reversed(qkv))),
        "double backward": lambda: torch.autograd.grad(gradients, leaves, tuple(reversed(qkv)), retain_graph=True),
    }


def measure(name: str, shape: tuple[int, ...], run: Run) -> None:
    batch, length, heads, _ = shape
    implementations: dict[str, Callable[..., Tensor]] = {"flexattn": ours}
    if batch * heads * length**2 <= MOST_SCORES:
        implementations["math"] = math_backend
    if importlib.util.find_spec("jvp_flash_attention") and shape[-1] in JVP_FLASH_DIMS:
        implementations["jvp-flash-attention"] = jvp_flash_attention
    for implementation, attend in implementations.items():
        calls = calls_of(attend, shape)
        if attend is not ours and (error := wrong(calls, shape)):
            run.add({"cell": name, "implementation": implementation, "status": "wrong", "error": error}, f"{name:14} {error}")
            continue
        for direction, samples in time_on_device(calls, BUDGET_MS).items():
            times = quartiles([1e3 * ms for ms in samples.ms])
            row: Row = {"cell": name, "shape": shape, "implementation": implementation, "direction": direction, **times}
            row["peak_mib"] = peak_bytes(calls[direction]) / 2**20
            line = f"{name:14} {implementation:20} {direction:16} {times['us']:10.0f} us {row['peak_mib']:9.0f} MiB"
            run.add({**row, "status": "measured"}, line)
        del calls
        torch.cuda.empty_cache()


class Candidate(NamedTuple):
    """The launch of a kernel with a tile, and the results that it writes."""

    launch: Launch
    results: tuple[Tensor, ...]

    def run(self) -> None:
        from flexattn.kernels_triton.runtime.launch import make

        make(self.launch, self.results[0].device)


Tiles = Mapping[str, Sequence[tuple[int, int, int, int]]]


def candidates(kernel: str, shape: tuple[int, ...], device: str = "cuda", tiles: Tiles = TILES) -> list[Candidate]:
    """Returns a kernel of a double backward with each tile, on the same tensors. The tangent kernel has run for the others."""
    from flexattn.kernels_triton.common.problem import Along, Problem
    from flexattn.kernels_triton.portable.forward import attention_forward
    from flexattn.kernels_triton.runtime.device import Tile
    from flexattn.kernels_triton.runtime.launch import make, recorded_launches
    from flexattn.kernels_triton.second_order import launch
    from flexattn.kernels_triton.second_order import tiles as second

    q, k, v, dout = qkv_of(shape, device)
    call, along = launch.Modified(Problem(q, k, v, softmax_scale=shape[-1] ** -0.5)), Along(k, v, q)
    lse = q.new_empty((shape[0], shape[2], shape[1]), dtype=torch.float32)
    attention_forward(call.problem, torch.empty_like(q), lse)
    found = []
    for tile in tiles[kernel]:
        used = second.Tiles(*(Tile(*(tile if name == kernel else tiles[name][0])) for name in (*TILES, "tangent")))
        incoming, tout = launch.Incoming(lse, dout), torch.empty_like(q)
        with recorded_launches() as launches:
            _, gradients = launch.attention_double_backward(call, along, incoming, tout, launch.Wanted(), used)
        tangent, by_queries, by_keys = launches
        if kernel != "tangent":
            make(tangent, q.device)
        written = {"tangent": (tout,), "keys": (gradients.k, gradients.v), "queries": (gradients.q,)}
        found.append(Candidate({"tangent": tangent, "keys": by_keys, "queries": by_queries}[kernel], written[kernel]))
    return found


class Joint(NamedTuple):
    """The forward with a tangent with a tile, and the results that it writes."""

    run: Callable[[], Tensor]
    results: tuple[Tensor, ...]


def joint_candidates(shape: tuple[int, ...], device: str = "cuda") -> dict[str, Joint]:
    """Returns the forward with a tangent, with each tile, by the tile."""
    from flexattn.kernels_triton.common.problem import Along, Problem
    from flexattn.kernels_triton.hopper.conditions import tangent_tile
    from flexattn.kernels_triton.hopper.tangent import TangentResults, forward_with_tangent

    q, k, v, _ = qkv_of(shape, device)
    problem, along = Problem(q, k, v, softmax_scale=shape[-1] ** -0.5), Along(k, v, q)
    lse_shape = (shape[0], shape[2], shape[1])
    committed = tangent_tile(problem)
    found = {}
    for changes in JOINT_TILES[committed.head_dim_v]:
        results = TangentResults(torch.empty_like(q), torch.empty_like(q), lse=q.new_empty(lse_shape, dtype=torch.float32))
        name = ", ".join(f"{name} {value}" for name, value in changes.items()) or "committed"
        tile = dataclasses.replace(committed, **changes)
        found[name] = Joint(functools.partial(forward_with_tangent, problem, along, results, tile), results)
    return found


def error_of(got: Sequence[Tensor], first: Sequence[Tensor]) -> float:
    return max(map(harness.distance, got, first))


def wrong(calls: Mapping[str, Callable[[], Any]], shape: tuple[int, ...], device: str = "cuda") -> str:
    """Returns the first direction whose results differ from flexattn's, with the error; "": all agree."""
    expected = calls_of(ours, shape, device)
    for direction, call in calls.items():
        got, first = (x if isinstance(x, tuple) else (x,) for x in (call(), expected[direction]()))
        error = error_of(got, first)
        if not error < harness.WORST:
            return f"{direction}: error {error:.1e}"
    return ""


def measure_tiles(name: str, shape: tuple[int, ...], run: Run) -> None:
    for kernel in (*TILES, "joint"):
        found: Mapping[str, Candidate | Joint] = joint_candidates(shape)
        if kernel in TILES:
            found = {" ".join(map(str, tile)): c for tile, c in zip(TILES[kernel], candidates(kernel, shape), strict=True)}
        samples = time_on_device({tile: candidate.run for tile, candidate in found.items()}, BUDGET_MS)
        first = next(iter(found.values())).results
        for tile, candidate in found.items():
            times, error = quartiles([1e3 * ms for ms in samples[tile].ms]), error_of(candidate.results, first)
            row: Row = {"cell": name, "shape": shape, "kernel": kernel, "tile": tile, "error": error, **times}
            row["status"] = "measured" if error < harness.WORST else "wrong"
            run.add(row, f"{name:14} {kernel:8} {tile:28} {times['us']:10.0f} us  error {error:.1e}")


def compile_tiles(shapes: Sequence[tuple[int, ...]]) -> None:
    """Compiles the kernels of all tiles, several at a time."""
    from flexattn.kernels_triton.ahead_of_time.build import build, missing
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    major, minor = torch.cuda.get_device_capability()
    launches = [candidate.launch for shape in shapes for kernel in TILES for candidate in candidates(kernel, shape)]
    with recorded_launches() as joint:
        for shape in shapes:
            for candidate in joint_candidates(shape).values():
                candidate.run()
    launches += joint
    build(missing(launches, 10 * major + minor), 10 * major + minor)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, only="patterns of cells, such as '8 x*'")
    parser.add_argument("--tiles", action="store_true", help="time tiles of each kernel")
    arguments = parser.parse_args(argv)
    need_gpu(parser)
    run = Run("flexattn.bench.second_order", __doc__, arguments.out)
    cells = harness.chosen(CELLS, arguments.only)
    if arguments.tiles:
        compile_tiles([(2, 2 * min(length, 1024), 2, dim) for _, length, _, dim in cells.values()])
    for name, shape in cells.items():
        (measure_tiles if arguments.tiles else measure)(name, shape, run)
        torch.cuda.empty_cache()
    run.write()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
