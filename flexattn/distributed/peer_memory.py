"""Exchanges through symmetric memory of one host: each rank writes rows there, and a kernel reads them from all ranks.

Compared with messages, this saves two copies and most of a collective's latency. Every rank of a group maps torch's symmetric
memory (https://docs.pytorch.org/docs/stable/symmetric_memory.html) once. An exchange is

    exchange = peer_memory.begin(group, device, size)  # waits until no rank reads the previous data
    exchange.room(0, shape, dtype).copy_(rows)
    exchange.open()  # waits until every rank has written
    exchange.pull(peer_memory.Pull(out, 0, moves, sides, width))
    exchange.close()

All of it runs on the current stream. GPUs wait for each other, not hosts.
"""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn import compat
from flexattn.dispatch import options
from flexattn.dispatch.neutral import is_capturing
from flexattn.distributed.capture import Group, is_over_nccl, tables

MOST_RANKS = 8  # GPUs of one host
MOST_BYTES = 1 << 30  # Largest symmetric memory of a rank. Larger exchanges use messages.
_LEAST_BYTES = 32 << 20


class RowLayout(NamedTuple):
    """Layout of rows: row r begins at element `r * stride + column`, plus `n * step` for rows of source n."""

    stride: int
    column: int = 0
    step: int = 0


OWN = -1  # the source of a move from a tensor of this rank outside of symmetric memory: `own` of a pull


class RemoteRows(NamedTuple):
    """Rows of one source, a rank or `OWN`, and the first row of their destination."""

    source: int
    first: int
    to: int
    rows: int


class Pull(NamedTuple):
    """A read into a contiguous tensor `out`, of rows that ranks have from byte `first` on.

    sides: layouts in out (column 0) and in each rank's memory (step 0), in elements. width: elements of a row. own: a contiguous
    tensor of this rank, with the layout of a rank's memory.
    """

    out: Tensor
    first: int
    moves: tuple[RemoteRows, ...]
    sides: tuple[RowLayout, RowLayout]
    width: int
    own: Tensor | None = None


class Memory(Protocol):
    """Symmetric memory: bytes of each rank of a group, which all ranks can read."""

    own: Tensor  # uint8, this rank's
    addresses: Tensor  # int64 [ranks], addresses of each rank's bytes on this rank

    def barrier(self) -> None:
        """Makes the current stream wait until every rank's stream has reached its barrier."""


class _SymmetricMemory:
    def __init__(self, group: Group, device: torch.device, size: int) -> None:
        assert group is not None
        try:
            self.own: Tensor = compat.allocate_symmetric((size,), (1,), torch.uint8, device)
            self._handle = compat.symmetric_memory().rendezvous(self.own, group)
        except RuntimeError as e:
            raise RuntimeError(
                f"rank {group.rank()} of {group.size()} could not allocate {size >> 20} MiB of symmetric memory on {device}: {e}. "
                "Set FLEXATTN_PEER_MEMORY=never on all ranks to exchange messages instead"
            ) from e
        places = [self._handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(group.size())]
        self.addresses = torch.tensor(places, device="cpu").to(device)
        self._milliseconds = int(compat.timeout_of(group, device).total_seconds() * 1e3)

    def barrier(self) -> None:
        self._handle.barrier(0, self._milliseconds)


class PeerMemory:
    """Symmetric memory of a group, which grows. All ranks must ask for the same sizes in the same order.

    make: a collective function that allocates memory of a size in bytes.
    """

    def __init__(self, rank: int, device: torch.device, make: Callable[[int], Memory]) -> None:
        self.rank, self.device, self._make = rank, device, make
        self.memory: Memory | None = None
        self._captured: list[Memory] = []  # graphs contain their addresses
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = (
            None  # the stream of the last exchange, and an event at its end
        )

    def grow(self, size: int) -> None:
        """Allocates at least `size` bytes, if there are fewer. All ranks of the group must call it."""
        if self.memory is not None and self.memory.own.numel() >= size:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # after all ranks have come here, none reads the old memory
        self.memory = self._make(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))

    def begin(self) -> Memory:
        """Makes the current stream wait for the last exchange of every rank."""
        memory = self.memory
        assert memory is not None
        if self.device.type == "cuda":
            if is_capturing(self.device):
                if memory not in self._captured:
                    self._captured.append(memory)
            elif self._last is not None and self._last[0] != torch.cuda.current_stream(self.device):
                torch.cuda.current_stream(self.device).wait_event(self._last[1])
        memory.barrier()
        return memory

    def end(self) -> None:
        if self.device.type == "cuda" and not is_capturing(self.device):
            stream = torch.cuda.current_stream(self.device)
            self._last = stream, stream.record_event()


class Exchange(NamedTuple):
    """One exchange: memory that this rank may write, and the memory of the others."""

    owner: PeerMemory
    memory: Memory

    def room(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns this rank's memory from a byte on, which is a multiple of `UNIT`, as a tensor."""
        size = dtype.itemsize * math.prod(shape)
        return self.memory.own[first : first + size].view(dtype).view(*shape)

    def open(self) -> None:
        """Waits until all ranks have written, so that their data can be read."""
        self.memory.barrier()

    def pull(self, *pulls: Pull) -> None:
        """Writes rows of disjoint tensors from all ranks' memory. One launch writes up to four tensors."""
        from flexattn.kernels_triton.portable.pull_rows import MOST_OUTS, pull_rows  # imported here, because it imports Triton

        for i in range(0, len(pulls), MOST_OUTS):
            part = pulls[i : i + MOST_OUTS]
            shapes = tuple((first, moves, sides, width, out.element_size()) for out, first, moves, sides, width, _ in part)
            table = _table(shapes, self.owner.rank, part[0].out.device)
            if table.blocks.numel():
                owns = [pull.out if pull.own is None else pull.own for pull in part]
                pull_rows([pull.out for pull in part], owns, self.memory.addresses, table)

    def close(self) -> None:
        """Ends the exchange. Later work on this stream can use the pulled rows."""
        self.owner.end()


UNIT = 128  # alignment of tensors in an exchange, in bytes
_WORDS = 16  # alignment of tensors that are read in the widest words, in bytes


def can_read(x: Tensor) -> bool:
    """Returns whether a tensor can be `own` of a pull."""
    return x.is_contiguous() and x.data_ptr() % _WORDS == 0


def aligned(size: int) -> int:
    """Returns the bytes of an exchange that a tensor with `size` bytes takes."""
    return -(-size // UNIT) * UNIT


@tables(512)
def _table(shapes: tuple[Any, ...], rank: int, device: torch.device) -> Any:
    """Returns the kernel's table for some pulls, on a device. Each rank starts with the next rank's memory."""
    from flexattn.kernels_triton.portable.pull_rows import Block, make_table

    blocks = []
    for number, (at, moves, (written, read), width, size) in enumerate(shapes):
        for source, first, to, rows in moves:
            begin = 0 if source == OWN else at
            places = begin + (first * read.stride + read.column) * size, (to * written.stride + source * written.step) * size
            row_sizes = width * size, read.stride * size, written.stride * size
            blocks.append(Block(number, source, *places, rows if width else 0, *row_sizes))
    table = make_table(blocks, rank + 1)
    return table._replace(blocks=table.blocks.to(device))


_MEMORIES: dict[tuple[Group, torch.device], PeerMemory | None] = {}


def are_near(group: Group, device: torch.device) -> bool:
    """Returns whether a group's ranks use symmetric memory, equal on all ranks. The first call is a collective."""
    return _group_memory(group, device) is not None


def shared_bytes(group: Group, device: torch.device) -> int:
    """Returns the bytes of symmetric memory that each rank of a group has now. torch's allocator does not count them."""
    peer = _MEMORIES.get((group, device))
    return 0 if peer is None or peer.memory is None else peer.memory.own.numel()


def begin(group: Group, device: torch.device, size: int) -> Exchange | None:
    """Returns an exchange with `size` bytes of memory, or None if messages must be used. size: equal on all ranks."""
    peer = _group_memory(group, device)
    if peer is None or size > MOST_BYTES:
        return None
    if is_capturing(device) and (peer.memory is None or peer.memory.own.numel() < size):
        return None
    peer.grow(size)
    return Exchange(peer, peer.begin())


def _group_memory(group: Group, device: torch.device) -> PeerMemory | None:
    assert group is not None
    if options.peer_memory() == "never" or not 2 <= group.size() <= MOST_RANKS:
        return None
    key = (group, device)
    if key not in _MEMORIES:
        if device.type != "cuda" or is_capturing(device):
            return None
        _MEMORIES[key] = _make_group_memory(group, device)
    return _MEMORIES[key]


def _make_group_memory(group: Group, device: torch.device) -> PeerMemory | None:
    """Returns a group's memory, or None if ranks are on several hosts or a GPU cannot read another's memory."""
    if group is None or not is_over_nccl(group):
        return None
    ranks: list[object] = [None] * group.size()
    dist.all_gather_object(ranks, _host_and_gpus(device), group=group)
    hosts, gpus, unread = zip(*ranks, strict=True)
    is_near = len(set(hosts)) == 1 and not any(names & set(gpus) for names in unread)
    return PeerMemory(group.rank(), device, functools.partial(_SymmetricMemory, group, device)) if is_near else None


def _host_and_gpus(device: torch.device) -> tuple[tuple[str, str], str, set[str]]:
    """Returns names of the machine and of the GPU, and the names of visible GPUs whose memory it cannot read."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    unread = {_name(i) for i in others if not torch.cuda.can_device_access_peer(device, i)}
    return (socket.gethostname(), boot.read_text("utf-8") if boot.exists() else ""), _name(device), unread


def _name(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
