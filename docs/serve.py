"""Serves a small decoder: continuous batching over pages of keys, each token checked against eager attention over dense keys.

python docs/serve.py [--requests 12] [--cascade] [--device cpu]

Weights are random. Requests share a system prompt, whose pages they fork. They join when there is room, their prompts are read in
chunks beside the tokens that others decode, in one packed call; they leave when they are done, and wait again where pages run out.
On a GPU steps that decode alone are one CUDA graph, captured once.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexattn import PagedKVCache, attention, attention_with_prefix
from flexattn.kv_cache import OutOfPagesError

VOCABULARY, DIM, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 256, 64, 4, 2, 16, 2
PAGE_SIZE, PAGES, SEQUENCES, LONGEST = 8, 16, 6, 128
BUDGET = 24  # tokens of a step: one for each sequence that decodes, and chunks of prompts
SYSTEM = 16  # tokens of the system prompt: whole pages, as a cascade needs them

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # a layer's attention: its number, q, k and v, [tokens, heads, head_dim]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv = nn.Linear(DIM, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        for layer in self.layers:
            nn.init.normal_(layer.qkv.weight, std=0.3)  # weights at which keys matter
            nn.init.normal_(layer.out.weight, std=0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the token that follows each of `tokens`, [tokens], as far as the sequence is known."""
        frequencies = 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=tokens.device)
        angles = positions[:, None, None] * frequencies
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            q, k, v = layer.qkv(layer.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), 1)
            x = x + layer.out(attend(number, rotated(q, angles), rotated(k, angles), v).flatten(1))
            x = x + layer.down(functional.gelu(layer.up(layer.norms[1](x))))
        return self.head(self.norm(x)).argmax(-1)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: x [tokens, heads, head_dim], angles [tokens, 1, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Request:
    """A prompt, the tokens that were made so far, and how many of both are in the cache."""

    def __init__(self, prompt: list[int], wanted: int) -> None:
        self.prompt, self.wanted = prompt, wanted
        self.made: list[int] = []
        self.cached = 0

    @property
    def pending(self) -> list[int]:
        return (self.prompt + self.made)[self.cached :]


class Server:
    def __init__(self, decoder: Decoder, system: list[int], device: str, cascade: bool) -> None:
        self.decoder, self.system, self.device, self.cascade = decoder, system, device, cascade
        pools = [torch.zeros(2, PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM, device=device) for _ in range(LAYERS)]
        self.cache = PagedKVCache(pools, max_sequences=1 + SEQUENCES, max_length=LONGEST)
        self.running: dict[int, Request] = {}  # by the numbers of their sequences
        self.waiting: list[Request] = []
        self.counts = {"steps": 0, "decoding alone": 0, "evictions": 0}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.slots = [torch.zeros(SEQUENCES, dtype=torch.long, device=device) for _ in range(2)]  # tokens, positions
        self.prefix = self.cache.add()
        self.cache.step({self.prefix: len(system)})
        self.follow(*(torch.tensor(x, device=device) for x in (system, list(range(len(system))))))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, longest: int | None) -> Tensor:
        self.cache.append(layer, k, v)
        call, pools = self.cache.arguments(longest=longest), self.cache.pools[layer]
        if self.cascade and self.running:
            return attention_with_prefix(q, *pools, prefix_length=len(self.system), prefix_row=self.prefix, **call)
        return attention(q, *pools, **call)

    def follow(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        return self.decoder(tokens, positions, functools.partial(self.attend, longest=longest))

    def step(self) -> list[Request]:
        """Makes a step, and returns the requests that are done."""
        self.admit()
        new = self.begin()
        numbers = sorted(new)
        tokens = [token for n in numbers for token in self.running[n].pending[: new[n]]]
        positions = [len(self.system) + self.running[n].cached + i for n in numbers for i in range(new[n])]
        self.counts["steps"] += 1
        followers = self.decode(tokens, positions) if max(new.values()) == 1 else self.prefill(tokens, positions)
        done, at = [], 0
        for n in numbers:
            request, at = self.running[n], at + new[n]
            request.cached += new[n]
            if not request.pending:
                request.made.append(followers[at - 1])
            if len(request.made) == request.wanted:
                done.append(self.running.pop(n))
                self.cache.free(n)
        return done

    def admit(self) -> None:
        """Lets requests join while there are a row and pages for the prompt; what they make may still run out of pages."""
        while self.waiting and len(self.running) < SEQUENCES:
            if self.cache.free_pages * PAGE_SIZE < len(self.waiting[0].pending):
                return
            self.running[self.cache.fork(self.prefix)] = self.waiting.pop(0)

    def begin(self) -> dict[int, int]:
        """Returns how many tokens of each sequence this step takes, the shortest first; puts the last request back for pages."""
        while True:
            new, room = {}, BUDGET
            for n, request in sorted(self.running.items(), key=lambda item: len(item[1].pending)):
                new[n] = min(len(request.pending), room)
                room -= new[n]
            try:
                self.cache.step(new)
                return {n: count for n, count in new.items() if count}
            except OutOfPagesError:
                n, request = self.running.popitem()
                self.cache.free(n)
                request.cached = 0
                self.waiting.insert(0, request)
                self.counts["evictions"] += 1

    def prefill(self, tokens: list[int], positions: list[int]) -> list[int]:
        return self.follow(*(torch.tensor(x, device=self.device) for x in (tokens, positions))).tolist()

    def decode(self, tokens: list[int], positions: list[int]) -> list[int]:
        """Follows one token of each sequence; always as many rows, of which those behind the last token mean nothing."""
        self.counts["decoding alone"] += 1
        for slots, numbers in zip(self.slots, (tokens, positions), strict=True):
            slots.copy_(torch.tensor(numbers + [0] * (SEQUENCES - len(numbers))))
        if self.device == "cpu":
            return self.follow(*self.slots, longest=1).tolist()
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.follow(*self.slots, longest=1)  # compiles what it needs; the same rows are appended again
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.followers = self.follow(*self.slots, longest=1)
        self.graph.replay()
        return self.followers.tolist()


def is_right(decoder: Decoder, system: list[int], request: Request, device: str) -> bool:
    """Returns whether each token follows from those before it by eager attention over all of them."""
    text = torch.tensor(system + request.prompt + request.made, device=device)
    hidden = torch.ones(len(text), len(text), dtype=torch.bool, device=device).triu(1)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_DIM**-0.5
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    followers = decoder(text, torch.arange(len(text), device=device), attend).tolist()
    return followers[-len(request.made) - 1 : -1] == request.made


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--cascade", action="store_true", help="read the system prompt's keys once for all sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # tensors are too small to be shared out
    torch.manual_seed(0)
    generator = random.Random(0)

    def text(length: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(length)]

    decoder, system = Decoder().to(arguments.device), text(SYSTEM)
    server = Server(decoder, system, arguments.device, arguments.cascade)
    requests = [Request(text(generator.randint(1, 40)), generator.randint(4, 24)) for _ in range(arguments.requests)]
    server.waiting = requests.copy()
    start = time.perf_counter()
    while server.waiting or server.running:
        for request in server.step():
            print(f"{len(request.prompt):3} tokens of prompt, {len(request.made):3} made: {request.made[:6]} ...")  # noqa: T201
    seconds = time.perf_counter() - start
    print(f"{', '.join(f'{name}: {count}' for name, count in server.counts.items())}; {seconds:.1f} s")  # noqa: T201
    wrong = sum(not is_right(decoder, system, request, arguments.device) for request in requests)
    print(f"{wrong} of {len(requests)} differ from eager attention" if wrong else "all tokens are those of eager attention")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
