"""`python -m flexattn demo`: packs uneven documents, attends to them, checks the results, times them, and prices the padding."""

from __future__ import annotations

import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import flexattn
from flexattn.cli import Parser, program
from flexattn.cli.explain import positive
from flexattn.dispatch import options
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.testing import FORWARD_FACTOR, GRADIENT_FACTOR, Inputs, check_close, make_call

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")

VOCABULARY = 4096  # tokens are hashed into this many ids
EMBEDDING = 256  # features of a token, before the projections to q, k and v
BACKWARD_FLOPS = 2.5  # times the forward's: five matrix products for its two


class Settings(NamedTuple):
    tokens: int
    longest: int  # tokens of the longest document; all are shortened in proportion
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: torch.dtype
    repeats: int  # timed runs, of which the fastest counts; 0: no timing


LLAMA_3_8B = Settings(65536, 4096, 32, 8, 128, torch.bfloat16, 10)
# A CPU runs the eager backend, whose times say nothing about the kernels.
SMALL = Settings(6144, 1024, 4, 2, 64, torch.float32, 0)
TINY = Settings(160, 40, 4, 2, 32, torch.float32, 0)  # Triton's interpreter is about a million times slower than a GPU


class Batch(NamedTuple):
    """One packed batch. q, dout: [total, h, d]; k, v: [total, h_kv, d]; documents follow each other without gaps."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: list[int]

    def call(self) -> dict[str, Any]:
        cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.q.device)
        longest = max(self.lengths)
        return {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal",
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_kv": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog=program("demo"),
        description="Packs this library's own documents, attends to them, checks results and gradients against a reference in "
        "float64, and compares the work with that of padded batches. On a GPU it measures times too.",
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="tokens to pack (default: 65536 with a GPU, 6144 without)")
    parser.add_argument("--backend", choices=options.REQUESTS, default="auto", help="default: %(default)s")
    args = parser.parse_args(arguments)
    if find_spec("rich") is None:
        parser.error("the demo needs rich, which is not installed: pip install 'flexattn[demo]'")
    try:
        return run(args.tokens, args.backend)
    except flexattn.BackendError as e:
        parser.exit(1, f"{e}\n")


def run(tokens: int | None, backend: str) -> int:
    """Runs the demo, prints its results, and returns the exit status: 1 if a result is too far from the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpret = device == "cpu" and "triton" not in sys.modules
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    from rich.console import Console  # a late import: --help does not need it

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    device_name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    console.print(f"flexattn {flexattn.__version__} · torch {torch.__version__.partition('+')[0]} · {device_name}\n")

    settings = LLAMA_3_8B if device == "cuda" else TINY if backend == "triton" else SMALL
    batch = make_batch(settings._replace(tokens=tokens or settings.tokens), device)
    describe(console, batch, "the library's own docs and sources")
    passed = run_and_check(console, batch, backend)
    compare_with_padding(console, batch, backend, settings.repeats)

    if interpret and backend == "auto" and find_spec("triton"):
        console.print("\nNo GPU here, so the Triton kernels run in Triton's interpreter, on a batch small enough for it.\n")
        tiny = make_batch(TINY, device)
        describe(console, tiny, "the same")
        passed = run_and_check(console, tiny, "triton") and passed
    console.print("\nPassed: every result is as near to the reference as it must be." if passed else "\nFAILED, see above.")
    return 0 if passed else 1


def documents() -> list[list[int]]:
    """Returns the token ids of each source file of the package, and of each documentation page if the package is a checkout."""
    package = Path(flexattn.__file__).parent
    folders = [package, *sorted(p for p in package.iterdir() if p.is_dir())]
    files = [p for folder in folders for p in sorted(folder.glob("*.py"))]
    if (package.parent / "pyproject.toml").exists():
        files += sorted([*package.parent.glob("*.md"), *package.parent.glob("docs/*.md")])
    words = [re.findall(r"\w+|[^\w\s]", p.read_text(encoding="utf-8")) for p in files]
    return [[zlib.crc32(word.encode()) % VOCABULARY for word in document] for document in words if document]


def make_batch(settings: Settings, device: str) -> Batch:
    """Packs documents in a fixed random order, skips each that does not fit, and projects them randomly to q, k and v."""
    generator = torch.Generator().manual_seed(0)
    sources = documents()
    # All documents are cut in the same proportion, so that they stay uneven; at least four fit.
    longest = min(settings.longest, max(1, settings.tokens // 4))
    share = min(1.0, longest / max(len(document) for document in sources))
    packed: list[list[int]] = []
    room = settings.tokens
    for i in torch.randperm(len(sources), generator=generator, device="cpu").tolist():
        document = sources[i][: max(1, int(share * len(sources[i])))]
        if len(document) <= room:
            packed.append(document)
            room -= len(document)

    table = torch.randn(VOCABULARY, EMBEDDING, generator=generator, device="cpu").to(device)
    x = table[torch.tensor(list(chain(*packed)), device=device)]

    def project(num_heads: int) -> Tensor:
        weight = torch.randn(EMBEDDING, num_heads * settings.head_dim, generator=generator, device="cpu").to(device)
        projected: Tensor = x @ weight / EMBEDDING**0.5
        return projected.view(len(x), num_heads, settings.head_dim).to(settings.dtype)

    q, k, v = (project(h).requires_grad_() for h in (settings.num_heads, settings.num_heads_kv, settings.num_heads_kv))
    return Batch(q, k, v, project(settings.num_heads), [len(document) for document in packed])


def describe(console: Console, batch: Batch, source: str) -> None:
    q, k, lengths = batch.q, batch.k, batch.lengths
    console.print(f"{len(lengths)} documents ({source}), {min(lengths)} to {max(lengths)} tokens each, packed: {len(q)} tokens")
    console.print(f"q {list(q.shape)}, k and v {list(k.shape)}, {str(q.dtype).removeprefix('torch.')}, thd, padding_causal\n")


def forward_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **call: Any) -> Results:
    out = flexattn.attention(q, k, v, **call)
    assert isinstance(out, Tensor)
    return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def run_and_check(console: Console, batch: Batch, backend: str) -> bool:
    """Prints the backend of the batch and the reason, runs the batch, and compares the results with the reference."""
    call = batch.call() | {"backend": backend}
    console.print(f"{flexattn.explain(batch.q, batch.k, batch.v, **call)}\n", soft_wrap=True)
    with console.status("forward and backward"):
        results = forward_backward(batch.q, batch.k, batch.v, batch.dout, **call)

    # Documents are independent, so a few are enough. Heads are too: one group at a time bounds the reference's quadratic memory.
    by_length = sorted(range(len(batch.lengths)), key=batch.lengths.__getitem__)
    checked = sorted({by_length[0], by_length[len(by_length) // 2], by_length[-1]})
    num_heads_kv = batch.k.shape[1]
    group = batch.q.shape[1] // num_heads_kv
    steps = [(i, head_kv) for i in checked for head_kv in range(num_heads_kv)]
    pieces = []
    for i, head_kv in with_bar(steps, "against the reference", console):
        start = sum(batch.lengths[:i])
        rows = slice(start, start + batch.lengths[i])
        q_part = rows, slice(head_kv * group, (head_kv + 1) * group)
        kv_part = rows, slice(head_kv, head_kv + 1)
        document = batch.q[q_part].detach(), batch.k[kv_part].detach(), batch.v[kv_part].detach(), batch.dout[q_part]
        ours = Results(results.out[q_part], results.dq[q_part], results.dk[kv_part], results.dv[kv_part])
        pieces.append((ours, reference(*document, torch.float64), reference(*document, batch.q.dtype)))

    lengths = ", ".join(str(batch.lengths[i]) for i in checked)
    console.print(f"Against the reference in fp64, all heads of the documents of {lengths} tokens:")
    table = right_aligned("error", "max", "RMS", "of plain torch: max", "RMS", "")
    failures = []
    for n, name in enumerate(Results._fields):
        # Concatenates the pieces' three kinds of results, each into one vector.
        got, ref, eager = (torch.cat([results[n].flatten() for results in kind]) for kind in zip(*pieces, strict=True))
        errors = (got - ref).abs(), (eager - ref).abs()
        numbers = (norm.item() for e in errors for norm in (e.amax(), e.square().mean().sqrt()))
        try:
            check_close(name, got, ref, eager, factor=FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR)
            verdict = "ok"
        except AssertionError as e:
            verdict = "FAILED"
            failures.append(str(e))
        table.add_row(name, *(f"{x:.1e}" for x in numbers), verdict)
    console.print(table)
    for failure in failures:
        console.print(failure)
    return not failures


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dtype: torch.dtype) -> Results:
    """Runs the reference on one document ([s, h, d] each), computing in `dtype`."""
    inputs = Inputs(q[None], k[None], v[None], "bshd", *(None,) * 6)
    spec, x = make_call(inputs, attn_mask_type="causal")
    out, _, _ = reference_attention(spec, x, dtype)
    gradients = reference_gradients(spec, x, dout[None], dtype=dtype)
    return Results(out[0], gradients.dq[0], gradients.dk[0], gradients.dv[0])


def compare_with_padding(console: Console, batch: Batch, backend: str, repeats: int) -> None:
    """Shows the work of forward and backward for the packed batch and for the same documents padded, and times them on a GPU."""
    call = batch.call() | {"backend": backend}
    rows, longest = len(batch.lengths), max(batch.lengths)
    lengths = torch.tensor(batch.lengths, device=batch.q.device)
    is_real = torch.arange(longest, device=lengths.device) < lengths[:, None]

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(rows, longest, *x.shape[1:])
        padded[is_real] = x.detach()
        return padded.requires_grad_(x.requires_grad)

    packed = [batch.q, batch.k, batch.v, batch.dout]
    padded = [pad(x) for x in packed]
    unaware = {"qkv_format": "bshd", "attn_mask_type": "causal", "backend": backend}
    real_flops, padded_flops = flops(batch, batch.lengths), flops(batch, [longest] * rows)
    cases = (
        ("packed, thd", packed, call, real_flops),
        ("padded, bshd, with cu_seqlens", padded, call | {"qkv_format": "bshd"}, real_flops),
        ("padded, bshd, plain causal", padded, unaware, padded_flops),
    )
    table = right_aligned("forward and backward", "tokens", "MiB", "GFLOP", *(["ms"] if repeats else []))
    runs = [lambda t=tensors, a=arguments: forward_backward(*t, **a) for _, tensors, arguments, _ in cases]
    seconds = least_times(runs, with_bar(range(repeats), "timing", console))
    for (name, tensors, _, work), taken in zip(cases, seconds, strict=True):
        q, k, v, _ = tensors
        tokens = q.numel() // q.shape[-1] // q.shape[-2]
        mebibytes = 2 * (2 * q.nbytes + k.nbytes + v.nbytes) / 2**20  # q, out, k, v, and the gradient of each
        times = [f"{1e3 * taken:.1f}"] if repeats else []
        table.add_row(name, f"{tokens}", f"{mebibytes:.1f}", f"{work / 1e9:.1f}", *times)
    console.print("\nThe same batch, packed and padded:")
    console.print(table)


def flops(batch: Batch, lengths: list[int]) -> float:
    """Returns the floating-point operations of forward and backward. As in FlashAttention, a causal mask halves the square."""
    _, num_heads, head_dim = batch.q.shape
    return sum(4 * num_heads * head_dim * n * n / 2 for n in lengths) * (1 + BACKWARD_FLOPS)


def least_times(functions: Sequence[Callable[[], object]], rounds: Iterable[int]) -> list[float]:
    """Returns the least time of each function in seconds. The functions alternate, so that a busy machine slows all of them."""
    least = [float("inf")] * len(functions)
    for n in rounds:
        for i, function in enumerate(functions):
            if n == 0:
                function()  # which may compile kernels
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def with_bar(steps: Sequence[T], title: str, console: Console) -> Iterable[T]:
    from rich.progress import track

    return track(steps, title, console=console, transient=True, disable=not console.is_terminal)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def right_aligned(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
