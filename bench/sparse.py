"""Attention by lists of keys (kv_indices) in shapes of models: time, TFLOP/s and error of the Triton kernels, beside dense calls.

    python -m flexattn.bench.sparse --out sparse.json [--only PATTERN ...]

Each row is a direction of a cell. The eager backend checks the results of a few queries in fp32. If blocks of queries share a list,
cuDNN's block-sparse attention has rows beside, in a call without a mask. Its gradients are checked in fp32 too, for one head, in
memory that was NaN. Only rows that name their lists include the time to sort them. attention-gym's gather_attn (`pip install
attn_gym`) has rows beside cells with one key head and equal head dims. Its forward unrolls the loop over a list: before
Blackwell, it compiles for a minute with 16 keys, and for hours with 512. So its backward gets this library's results. Needs a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import BackendError, attention
from flexattn.bench import harness
from flexattn.bench.harness import Row, Run, event_times, make_parser, need_gpu, quartiles
from flexattn.key_lists import with_block_mask
from flexattn.shorthands import score_sizes

CALLS = 8
CHECKED = 64  # queries whose results are compared with the eager backend
UNROLLED = 16  # keys of the longest list for which attention-gym's forward is compiled
BLOCK_BACKENDS = {"triton": "", "cudnn": ", cuDNN"}  # backends of cells whose queries share lists, and names in rows


class Cell(NamedTuple):
    """A call of one sequence, whose keys are as many as its queries or more. It is causal if each query has a list."""

    name: str
    queries: int
    keys: int
    heads: tuple[int, int]  # query heads and key heads
    head_dims: tuple[int, int]
    listed: int  # keys of each query; 0: a dense call
    block: int = 1  # keys of an entry
    rows: int = 1  # queries that share a list. Above 1, the call has no mask
    window: int = 0  # DeepSeek-V4: as many recent keys beside the listed ones, which are in a pool of `keys` others, and a sink


CELLS = (
    Cell("FlashMLA prefill 8k", 4096, 8192, (128, 1), (576, 512), 2048),
    Cell("FlashMLA prefill 32k", 4096, 32768, (128, 1), (576, 512), 2048),
    Cell("FlashMLA prefill 8k, dense", 4096, 8192, (128, 1), (576, 512), 0),
    Cell("512 columns 8k", 4096, 8192, (128, 1), (512, 512), 2048),
    Cell("512 columns 32k", 4096, 32768, (128, 1), (512, 512), 2048),
    Cell("512 columns 8k, 16 keys", 4096, 8192, (128, 1), (512, 512), 16),
    Cell("DeepSeek-V4 8k, window and 512 keys", 8192, 2048, (64, 1), (512, 512), 512, window=128),
    Cell("MiniMax-M3 16k, blocks of 128", 16384, 16384, (64, 4), (128, 128), 16, 128),
    Cell("GQA 16k, 1024 keys", 16384, 16384, (32, 4), (128, 128), 1024),
    Cell("GQA 16k, dense", 16384, 16384, (32, 4), (128, 128), 0),
    Cell("decode, 64 queries over 32k", 64, 32768, (128, 1), (576, 512), 2048),
    Cell("decode, 4 queries over 32k", 4, 32768, (128, 1), (576, 512), 2048),
    Cell("decode, 64 queries over 32k, 512 columns", 64, 32768, (128, 1), (512, 512), 2048),
    Cell("blocks of 64, 8k", 8192, 8192, (16, 16), (128, 128), 32, 64, rows=64),
    Cell("blocks of 64, 32k", 32768, 32768, (16, 16), (128, 128), 32, 64, rows=64),
    Cell("blocks of 128, 8k", 8192, 8192, (16, 16), (128, 128), 16, 128, rows=128),
    Cell("blocks of 128, 32k", 32768, 32768, (16, 16), (128, 128), 16, 128, rows=128),
    Cell("blocks, dense, 8k", 8192, 8192, (16, 16), (128, 128), 0, rows=64),
    Cell("blocks, dense, 32k", 32768, 32768, (16, 16), (128, 128), 0, rows=64),
)


def tensors(cell: Cell, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns q, k and v in bf16, and the other arguments. v is the first columns of k if key heads are one."""
    generator = torch.Generator(device).manual_seed(0)
    make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    (heads, heads_kv), (d_qk, d_v) = cell.heads, cell.head_dims
    recent = cell.queries if cell.window else 0  # keys before the pool
    q, k = make(1, cell.queries, heads, d_qk), make(1, recent + cell.keys, heads_kv, d_qk)
    v = k[..., :d_v] if heads_kv == 1 else make(1, cell.keys, heads_kv, d_v)
    options: dict[str, Any] = {"attn_mask_type": "no_mask" if cell.window else "causal_bottom_right", "backend": "triton"}
    if cell.rows > 1:
        options["attn_mask_type"] = "no_mask"
        if cell.listed:
            order = torch.rand(1, heads_kv, cell.queries // cell.rows, cell.keys // cell.block, generator=generator, device=device)
            options |= {"kv_indices": order.argsort(-1)[..., : cell.listed].int(), "kv_block_size": cell.block}
    elif cell.window:
        i = torch.arange(cell.queries, device=device)[:, None]
        windows = i - torch.arange(cell.window, device=device)  # below 0, an entry is empty
        seen = (i + 1) * cell.keys // cell.queries  # keys of the pool that are complete
        listed = recent + (torch.rand(cell.queries, cell.listed, generator=generator, device=device) * seen).int()
        options["kv_indices"] = torch.cat((windows, torch.where(seen > 0, listed, -1)), 1)[None].int()
        options |= {"softmax_type": "learnable", "softmax_offset": make(heads).float()}
    elif cell.listed:
        blocks = -(-cell.keys // cell.block)
        shape = (1, cell.queries, cell.listed) if cell.block == 1 else (1, cell.queries, heads_kv, cell.listed)
        last = torch.arange(cell.queries, device=device) + cell.keys - cell.queries
        last = (last // cell.block + 1).view(1, -1, *(1,) * (len(shape) - 2))
        options["kv_indices"] = (torch.rand(shape, generator=generator, device=device) * last).int().clamp(max=blocks - 1)
        if cell.block > 1:
            options["kv_block_size"] = (1, cell.block)
    return [q, k, v], options


def flops_of(cell: Cell, direction: str) -> float:
    """Returns the floating-point operations of the products, without recomputation of scores. Each entry counts as keys."""
    first = cell.keys - cell.queries
    entries = cell.window + cell.listed
    dense = cell.keys * cell.queries if cell.rows > 1 else sum(range(first + 1, cell.keys + 1))
    seen = entries * cell.block * cell.queries if entries else dense
    return 2.0 * seen * cell.heads[0] * sum(cell.head_dims) * (1.0 if direction.startswith("forward") else 2.5)


def error_of(cell: Cell, qkv: list[Tensor], options: dict[str, Any], out: Tensor) -> float:
    """Returns the relative error of the last queries."""
    q, k, v = (t.float() for t in (qkv[0][:, -CHECKED:], *qkv[1:]))
    own = {name: t[:, -CHECKED:] if name == "kv_indices" else t for name, t in options.items()}
    if "kv_block_size" in options and isinstance(options["kv_block_size"], int):  # they share the last list
        own |= {"kv_indices": options["kv_indices"][:, :, -1:], "kv_block_size": (CHECKED, options["kv_block_size"])}
    return harness.distance(out[:, -CHECKED:], attention(q, k, v, **(own | {"backend": "eager"})))


def calls_of(qkv: list[Tensor], options: dict[str, Any]) -> dict[str, Callable[[], object]]:
    calls = harness.forward_and_backward(functools.partial(attention, **options), qkv)
    if "kv_indices" in options:
        repeatable = harness.forward_and_backward(functools.partial(attention, deterministic=True, **options), qkv)
        calls["backward, deterministic"] = repeatable["backward"]
    return calls


def peer_unsupported(cell: Cell) -> str | None:
    """Returns the reason if attention-gym cannot run the cell; None: it can."""
    if cell.heads[1] != 1 or cell.head_dims[0] != cell.head_dims[1] or cell.block != 1 or not cell.listed:
        return "gather_attn takes lists of keys, one key head, and values that are the keys"
    try:
        import attn_gym.sparse.gather_attn  # noqa: F401
    except ImportError as error:
        return f"attention-gym is not here ({error}); pip install attn_gym"
    return None


class PeerCall(NamedTuple):
    """The arguments of gather_attn, in its layout: values are its keys."""

    query: Tensor  # [b, h, sq, d]
    local_kv: Tensor  # [b, 1, sq, d]
    sparse_kv: Tensor  # [b, 1, keys, d]
    kv_indices: Tensor
    attention_sink: Tensor | None


def peer_call(cell: Cell, qkv: list[Tensor], options: dict[str, Any]) -> PeerCall:
    q, k = (t.transpose(1, 2) for t in qkv[:2])
    indices, recent = options["kv_indices"][..., cell.window :], cell.queries if cell.window else 0
    return PeerCall(
        query=q.contiguous(),
        local_kv=k[:, :, : cell.queries],
        sparse_kv=k[:, :, recent:],
        kv_indices=torch.where(indices < 0, -1, indices - recent),
        attention_sink=options.get("softmax_offset"),
    )


def peer_forward(cell: Cell, call: PeerCall, **more: Any) -> Tensor:
    """Returns out [b, sq, h, d] of gather_attn."""
    from attn_gym.sparse.gather_attn import gather_attn

    out: Tensor = gather_attn(*call, sliding_window_size=cell.window, **more)
    return out.transpose(1, 2)


def peer_backward(cell: Cell, call: PeerCall, out: Tensor, lse: Tensor, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns the call of gather_attn's backward, which returns the gradients of the call's query, sparse_kv and local_kv first.

    It takes the inverted lists that gather_attn's forward makes.
    """
    from attn_gym.sparse.gather_attn.impl.triton.backward import _build_index_query_map

    inverted = _build_index_query_map(call.kv_indices, call.sparse_kv.shape[2], None, None)
    sink = torch.full_like(lse[0, :, 0], float("-inf")) if call.attention_sink is None else call.attention_sink
    scale = call.query.shape[-1] ** -0.5
    given = (call.query, call.sparse_kv, call.local_kv, call.kv_indices, *inverted, sink, None, None)
    results = (out.transpose(1, 2).contiguous(), lse, dout.transpose(1, 2).contiguous())
    return lambda: torch.ops.attn_gym._gather_attn_bwd(*given, *results, cell.window, True, scale)


def peer_gradients(cell: Cell, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Returns dq and the gradient of the keys, which are values too, in this library's layout."""
    dq, dsparse, dlocal, _ = call()
    dkv = torch.cat((dlocal, dsparse), 2) if cell.window else dsparse
    return dq.transpose(1, 2), dkv.transpose(1, 2)


def measure_peer(cell: Cell, run: Run, qkv: list[Tensor], options: dict[str, Any]) -> None:
    call = peer_call(cell, qkv, options)
    if cell.listed <= UNROLLED:
        error = error_of(cell, qkv, options, peer_forward(cell, call))
        add_times(cell, run, {"forward, attention-gym": lambda: peer_forward(cell, call)}, error)
    leaves = [t.detach().requires_grad_() for t in qkv[:2]]
    out, lse = attention(leaves[0], leaves[1], leaves[1], return_lse=True, **options)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, dout)
    backward = peer_backward(cell, call, out.detach(), lse.detach(), dout)
    error = max(map(harness.distance, peer_gradients(cell, backward), wanted))
    add_times(cell, run, {"backward, attention-gym": backward}, error)


def add_times(cell: Cell, run: Run, calls: dict[str, Callable[[], object]], error: float) -> None:
    for direction, call in calls.items():
        for _ in range(3):
            call()
        times = quartiles(event_times(call, CALLS, lambda: None))
        rate = flops_of(cell, direction) / times["us"] / 1e6
        row: Row = {"cell": cell.name, "direction": direction, "error": error, "tflops": rate, **times}
        row["status"] = "measured" if error < harness.WORST else "wrong"
        run.add(row, f"{cell.name:32} {direction:24} {times['us']:10.0f} us {rate:7.1f} TFLOP/s  error {error:.1e}")


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with NaN inside the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def exact_gradients(cell: Cell, qkv: list[Tensor], options: dict[str, Any], dout: Tensor) -> list[Tensor]:
    """Returns dq, dk and dv [s, d] of the first head in fp32, by a dense mask."""
    q, k, v = (t[0, :, 0].float().requires_grad_() for t in qkv)
    scores = q @ k.T * cell.head_dims[0] ** -0.5
    if cell.listed:
        chosen = torch.zeros(cell.queries // cell.rows, cell.keys // cell.block, dtype=torch.bool, device=q.device)
        chosen.scatter_(-1, options["kv_indices"][0, 0].long(), True)
        mask = chosen.repeat_interleave(cell.rows, 0).repeat_interleave(cell.block, 1)
        scores = scores.masked_fill(~mask, float("-inf"))
    return list(torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), dout[0, :, 0].float()))


def measure_blocks(cell: Cell, run: Run, device: str) -> None:
    qkv, options = tensors(cell, device)
    options["deterministic"] = False
    ready = options
    if cell.listed:
        listed = {name: options[name] for name in ("kv_indices", "kv_block_size")}
        ready = {name: value for name, value in options.items() if name not in listed}
        ready |= with_block_mask(qkv[0], qkv[1], listed, functools.partial(score_sizes, argument="kv_block_size"))
    leaves = [t.detach().requires_grad_() for t in qkv]
    dout = torch.randn_like(qkv[0])
    exact = exact_gradients(cell, qkv, options, dout)
    for backend, name in BLOCK_BACKENDS.items():
        with poisoned_memory():
            try:
                out = attention(*leaves, **ready | {"backend": backend})
            except BackendError as error:
                print(f"{cell.name:32} no rows{name}: {str(error).splitlines()[1].strip()}")
                continue
            gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        errors = {"forward": error_of(cell, qkv, options, out.detach())}
        errors["backward"] = max(harness.distance(t[0, :, 0], e) for t, e in zip(gradients, exact, strict=True))
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda backend=backend: attention(*qkv, **ready | {"backend": backend}),  # type: ignore[misc]
            "backward": lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True),  # type: ignore[misc]
        }
        if cell.listed:
            calls["forward with its lists"] = lambda backend=backend: attention(*qkv, **options | {"backend": backend})  # type: ignore[misc]
        for direction, call in calls.items():
            add_times(cell, run, {direction + name: call}, errors[direction.split()[0]])
        del out, gradients


def measure(cell: Cell, run: Run, device: str = "cuda") -> None:
    if cell.rows > 1:
        measure_blocks(cell, run, device)
        return
    qkv, options = tensors(cell, device)
    error = error_of(cell, qkv, options, attention(*qkv, **options))
    add_times(cell, run, calls_of(qkv, options), error)
    if reason := peer_unsupported(cell):
        if cell.listed:
            print(f"{cell.name:32} no rows of attention-gym: {reason}")
        return
    measure_peer(cell, run, qkv, options)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, only="patterns of cells, such as 'FlashMLA*'")
    arguments = parser.parse_args(argv)
    need_gpu(parser)
    run = Run("flexattn.bench.sparse", __doc__, arguments.out)
    for cell in harness.chosen({cell.name: cell for cell in CELLS}, arguments.only).values():
        measure(cell, run)
        torch.cuda.empty_cache()
    run.write()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
