"""torch.compile(fullgraph=True) of every kind of call: one graph, results and backend of eager, and few compilations."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexattn
from flexattn import mods, ops
from flexattn.integrations.te import TEScoreMod

HEADS, HEADS_KV, D = 4, 2, 16
# On a GPU tests compile like users; on a CPU without Inductor, which takes seconds for each graph.
BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"
TWENTY = [(2 + i % 5, 6 + 7 * i) for i in range(20)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
WEIGHT = 0.75

Function = Callable[..., Tensor]


class Settings:
    scale = 0.5
    block = 3


SETTINGS = Settings()


def module_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def object_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * SETTINGS.scale + (q_idx // SETTINGS.block) % 2


def with_a_weight(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, weight: float) -> Any:
    return score * weight + 0.01 * kv_idx


def document_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 7 == kv_idx // 7) & (q_idx >= kv_idx)


class Relative(torch.nn.Module):
    """A mod that is a method, over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(HEADS, 40, generator=torch.Generator().manual_seed(1))
        self.table = torch.nn.Parameter(table.to(DEVICE))

    def bias(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.table[h, (q_idx - kv_idx).clamp(0, 39)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexattn.attention(q, k, v, score_mod=self.bias, attn_mask_type="causal")


class Callbacks:
    """A callback in TransformerEngine's form, whose explicit backward uses a result that the forward saved."""

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.tanh = graph.tanh(input=graph.div(a=score, b=tensors["cap"]))
        return graph.mul(a=self.tanh, b=tensors["cap"])

    def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        square = graph.mul(a=self.tanh, b=self.tanh)
        return graph.mul(a=gradient, b=graph.sub(a=tensors["one"], b=square))


def made_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = q.float().mean((0, 1, 3))  # a tensor of the graph, which gets a gradient

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * kv_idx.float()

    return flexattn.attention(q, k, v, score_mod=score_mod)


def length_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[1]
    return flexattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i + j < length, s * 0.5, s), softcap=5.0)


def documents_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flexattn.attention(q, k, v, mask_mod=mods.document(torch.arange(q.shape[1], device=q.device) // 3))


def block_mask_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1]
    return flexattn.attention(
        q, k, v, block_mask=create_block_mask(document_causal, None, None, n, n, str(q.device), BLOCK_SIZE=16)
    )


def library_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask_mod = mods.both(mods.causal(), mods.sliding_window(3, 0))
    return flexattn.attention(q, k, v, score_mod=mods.alibi(SLOPES), mask_mod=mask_mod)


def reads_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flexattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * q[b, i, h, 0])


def call(**arguments: Any) -> Function:
    return lambda q, k, v: flexattn.attention(q, k, v, **arguments)


def closure() -> Function:
    table = torch.randn(HEADS, 9, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    cap = 5.0

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        capped = cap * torch.tanh(score / cap) + table[h, (q_idx - kv_idx).clamp(-4, 4) + 4]
        return torch.where(q_idx >= kv_idx, capped, -float("inf"))

    return call(score_mod=score_mod)


def te(with_backward: bool) -> Function:
    callbacks = Callbacks()
    tensors = {"cap": torch.tensor(3.0), "one": torch.tensor(1.0)}
    return call(score_mod=TEScoreMod(callbacks.forward, callbacks.backward if with_backward else None, tensors))


KINDS: dict[str, Callable[[], Function]] = {
    "module function": lambda: call(score_mod=module_mod),
    "lambda over globals": lambda: call(score_mod=lambda s, b, h, i, j: s * WEIGHT + SLOPES[h]),
    "closure from outside": closure,
    "closure from inside": lambda: made_inside,
    "partial": lambda: call(score_mod=functools.partial(with_a_weight, weight=0.5)),
    "object's attributes": lambda: call(score_mod=object_mod),
    "method of a module": Relative,
    "library's, from inside": lambda: library_inside,
    "T5": lambda: call(score_mod=mods.relative_bias(torch.ones(32, HEADS, device=DEVICE).cumsum(0).requires_grad_())),
    "explicit tensors": lambda: call(score_mod=lambda s, b, h, i, j, t: s * t[h], score_mod_tensors=[SLOPES]),
    "named tensors": lambda: call(score_mod=lambda s, b, h, i, j, t: s * t[h], score_mod_tensors={"t": SLOPES}),
    "reads q": lambda: reads_q,
    "length": lambda: length_inside,
    "documents": lambda: documents_inside,
    "block mask": lambda: call(block_mask=create_block_mask(document_causal, None, None, 160, 160, DEVICE, BLOCK_SIZE=16)),
    "block mask from inside": lambda: block_mask_inside,
    "dropout": lambda: call(
        score_mod=module_mod, dropout_p=0.25, rng_state=torch.tensor([1, 2], device=DEVICE), softmax_type="off-by-one"
    ),
    "TransformerEngine's": lambda: te(True),
    "TransformerEngine's, derived": lambda: te(False),
}


def tensors(batch: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(batch, length, h, D, generator=generator).to(DEVICE).requires_grad_() for h in (HEADS, HEADS_KV, HEADS_KV)]


def results(function: Function, batch: int, length: int) -> list[Tensor]:
    """out, and the gradients of q, k, v and of the function's parameters."""
    leaves = tensors(batch, length)
    leaves += list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    out = function(*leaves[:3])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records the backend and the direction of each call."""
    ran: list[tuple[str, str]] = []
    select = ops.select

    def noted(spec: Any, direction: Any, *rest: Any) -> Any:
        decision = select(spec, direction, *rest)
        ran.append((direction, decision.backend))
        return decision

    monkeypatch.setattr(ops, "select", noted)
    return ran


def check(kind: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """The number of compilations so far after each length, once every result is eager's."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    function = KINDS[kind]()
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    if isinstance(function, torch.nn.Module):
        compiled.parameters = function.parameters
    ran = backends(monkeypatch)
    counts = []
    for batch, length in lengths:
        ran.clear()
        expected = results(function, batch, length)
        eager = list(ran)
        ran.clear()
        for got, want in zip(results(compiled, batch, length), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        assert ran == eager
        counts.append(counter.frame_count)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "TransformerEngine's" else pytest.mark.exhaustive) for k in KINDS]
)
def test_a_mod_of_any_kind_is_one_graph(kind, monkeypatch):
    assert check(kind, [(2, 5), (3, 9), (2, 12)], monkeypatch)[-1] <= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_static_and_dynamic(kind, dynamic, monkeypatch):
    """All sizes and numbers of heads differ, because torch would guard that equal ones stay equal."""
    lengths = [(5, 7), (3, 9)]
    first, second = check(kind, lengths, monkeypatch, dynamic=dynamic)
    assert second == (first if dynamic else 2 * first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["closure from inside", "block mask"])
def test_twenty_lengths_and_batches_compile_twice_at_most(kind, monkeypatch):
    """A batch of 1 is not among them: torch compiles a dim of 1 for itself."""
    assert check(kind, TWENTY, monkeypatch)[-1] <= 2


@pytest.mark.slow
def test_a_backend_by_name_runs_in_a_compiled_call(monkeypatch):
    """The call runs in Triton's interpreter if there is no GPU, with a captured tensor that gets a gradient."""
    torch.compiler.reset()
    table = torch.randn(HEADS, 9, device=DEVICE).requires_grad_()
    function = call(
        score_mod=lambda s, b, h, i, j: torch.where(i >= j, s + table[h, (i - j).clamp(0, 8)], -float("inf")), backend="triton"
    )
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    ran = backends(monkeypatch)
    leaves = [*tensors(1, 9), table]
    results = []
    for run in (function, compiled):
        out = run(*leaves[:3])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert {backend for _, backend in ran} == {"triton"}


@pytest.mark.slow
def test_a_new_float_of_a_mod_compiles_once_more_at_most():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)

    def step(q: Tensor, k: Tensor, v: Tensor, weight: float) -> Tensor:
        return flexattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * weight - 0.5 * j)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for weight in (0.1, 0.3, 0.5):
        leaves = tensors(2, 5)
        torch.testing.assert_close(compiled(*leaves, weight), step(*leaves, weight), rtol=2e-5, atol=2e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_a_captured_tensor_is_an_input_and_not_a_constant():
    torch.compiler.reset()
    scale = torch.ones((), device=DEVICE)
    function = call(score_mod=lambda s, b, h, i, j: s * scale)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    leaves = tensors(2, 5)
    before = compiled(*leaves).detach()
    scale.fill_(3.0)
    after = compiled(*leaves)
    torch.testing.assert_close(after, function(*leaves), rtol=2e-5, atol=2e-5)
    assert not torch.allclose(after, before)


def test_a_learned_number_under_a_mask():
    torch.compiler.reset()
    scale = torch.tensor(0.5, device=DEVICE, requires_grad=True)
    function = call(score_mod=lambda s, b, h, i, j: s * scale, mask_mod=lambda b, h, i, j: i >= j)
    leaves = tensors(2, 5)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    got, want = (torch.autograd.grad(run(*leaves).sum(), scale)[0] for run in (compiled, function))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_slice_of_a_tensor_as_long_as_another():
    torch.compiler.reset()
    first, second = torch.randn(HEADS, 50, device=DEVICE), torch.randn(2, HEADS, 50, device=DEVICE)

    def function(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return flexattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + first[h][2:40][j] - second[b][h][i])

    leaves = tensors(2, 5)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND, dynamic=True)
    torch.testing.assert_close(compiled(*leaves, first, second), function(*leaves, first, second), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_what_the_closure_held_when_compiled_is_no_longer_used_once_it_is_another():
    torch.compiler.reset()
    window = 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() <= window

    function = call(mask_mod=mask_mod)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    q, k, v = (t.detach() for t in tensors(2, 9))
    for window in (2, 5):  # noqa: B007
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=2e-5, atol=2e-5)


# Each takes a score, the indices, a tensor [h, s], and the length, which is symbolic.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "compare with a length": lambda s, b, h, i, j, t, n: torch.where((i == n - 2) | (n > j + 3) | (j >= n - 1), s, -s),
    "differ from a length": lambda s, b, h, i, j, t, n: torch.where((i != n - 2) & (n - 3 != j), s, -s),
    "divide by a length": lambda s, b, h, i, j, t, n: s + (i * 2 // n) + (j % n) / n - (n - i) * (n // 2),
    "unary": lambda s, b, h, i, j, t, n: torch.where(~(i > j), -s, torch.abs(s)) + (+s).neg(),
    "power": lambda s, b, h, i, j, t, n: s**2 + 2.0 ** (-(i % 3)) + torch.pow(s, 3),
    "methods": lambda s, b, h, i, j, t, n: s.clamp(min=-1.0).exp().mul(0.5) + i.float().sqrt() + (j > 2).to(torch.float32),
    "functions": lambda s, b, h, i, j, t, n: torch.nn.functional.gelu(s) + torch.maximum(s, t[h, i]) + torch.sin(i * 0.1),
    "index by index": lambda s, b, h, i, j, t, n: s + t[h][i] + t[h, :][j] + t[..., i][h],
    "views": lambda s, b, h, i, j, t, n: s + t.T[i, h] + t[1:].T[j, h % 3] + t[h, 1:][i % (n - 1)],
    "in place": lambda s, b, h, i, j, t, n: operator.iadd(s * 1.0, t[h, j]),
    "a number": lambda s, b, h, i, j, t, n: 1.5,
    "ignores the score": lambda s, b, h, i, j, t, n: t[h, j] * 1,
    "infinite": lambda s, b, h, i, j, t, n: torch.where(i >= j, s, float("-inf")),
    "keywords": lambda s, b, h, i, j, t, n: torch.add(s, t[h, i], alpha=2) + torch.clamp(input=s, max=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "divide by a length" else pytest.mark.exhaustive) for n in OPERATIONS],
)
def test_what_mods_do_is_written_down_as_it_is(name):
    torch.compiler.reset()
    operation = OPERATIONS[name]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, n = q[0, :, :, 0].T.contiguous().detach(), q.shape[1]
        return flexattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: operation(s, b, h, i, j, t, n))

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for length in (6, 9):
        leaves = [t.detach() for t in tensors(2, length)]
        torch.testing.assert_close(compiled(*leaves), function(*leaves), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score_mod", "text"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, "Data-dependent branching"),
        (lambda s, b, h, i, j: s * i.item(), "item"),
        (lambda s, b, h, i, j: s.T, "does not show|creates a tensor|no kernel can run"),
        (lambda s, b, h, i, j: [s], "returned"),
    ],
)
def test_what_a_mod_cannot_do_is_an_error_and_no_wrong_result(score_mod, text):
    torch.compiler.reset()
    compiled = torch.compile(call(score_mod=score_mod), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=text):
        compiled(*(t.detach() for t in tensors(2, 5)))


TABLE = torch.tensor([0.5, 0.25, 2.0, 1.5], device=DEVICE)


def by_dtype(s, b, h, i, j):
    return s * TABLE[h] if (s * 2).dtype == torch.float32 and (i + j).dtype == torch.int64 else -s


def by_dtype_of_an_entry(s, b, h, i, j):
    row = TABLE[:, None][h]
    return s + row[0] if (row.dtype, row.ndim, row.shape[0]) == (torch.float32, 1, 1) else -s


HALVES, DOUBLES, BYTES = TABLE.half(), TABLE.double(), TABLE.to(torch.uint8)


def by_dtype_of_a_read(s, b, h, i, j):
    dtypes = (HALVES[h] * 2).dtype, (DOUBLES[h] + s).dtype, BYTES[h].dtype, (BYTES[h] > 1).dtype
    return s * HALVES[h] if dtypes == (torch.float32, torch.float32, torch.int64, torch.bool) else -s


def by_kind(s, b, h, i, j):
    return s * 2 if torch.is_floating_point(s * 2) and (i * 2).dim() == 0 and not (i < j).is_floating_point() else -s


def by_dtype_in_place(s, b, h, i, j):
    x = s * 1
    x += TABLE[h]
    return x if x.dtype == torch.float32 else -s


def by_dtype_of_a_product(s, b, h, i, j):
    return s + (i * 2).to((s * 2).dtype)


@pytest.mark.parametrize(
    "score_mod",
    [
        by_dtype,
        *(pytest.param(mod, marks=pytest.mark.slow) for mod in (by_dtype_of_an_entry, by_dtype_of_a_read)),
        *(pytest.param(mod, marks=pytest.mark.exhaustive) for mod in (by_kind, by_dtype_in_place, by_dtype_of_a_product)),
    ],
)
def test_a_mod_takes_the_branch_of_its_results_dtype_and_shape(score_mod):
    torch.compiler.reset()
    leaves = [t.detach() for t in tensors(2, 5)]
    compiled = torch.compile(call(score_mod=score_mod), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*leaves), call(score_mod=score_mod)(*leaves))


@pytest.mark.slow
def test_a_builtin_of_a_tensor_is_computed_or_refused():
    """Dynamo of torch 2.11 takes abs(x) for torch.abs(x); that of 2.13 does not."""
    torch.compiler.reset()
    leaves = [t.detach() for t in tensors(2, 5)]
    compiled = torch.compile(call(score_mod=lambda s, b, h, i, j: s - abs(i - j)), fullgraph=True, backend="eager")
    if not torch.__version__.startswith("2.11"):
        with pytest.raises(Exception, match=r"use the function of torch, such as torch.abs\(x\) for abs\(x\)"):
            compiled(*leaves)
        return
    torch.testing.assert_close(compiled(*leaves), call(score_mod=lambda s, b, h, i, j: s - torch.abs(i - j))(*leaves))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["default", "max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["closure from outside", "block mask", "dropout"])
def test_inductor(kind, mode):
    """A training step's worth around the call, for Inductor to have something to fuse with."""
    torch.compiler.reset()
    function = KINDS[kind]()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(function(q * 1.5, k.tanh(), v + 1.0)).flatten(2)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for batch, length in ((2, 33), (3, 70)):
        expected = results(step, batch, length)
        for got, want in zip(results(compiled, batch, length), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def writes_to_itself(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    writes_to_itself.calls = 1  # type: ignore[attr-defined]
    return score * SLOPES[h]


def sleeps(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    time.sleep(0)
    return score * SLOPES[h]


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("mod", [writes_to_itself, sleeps])
@pytest.mark.filterwarnings("ignore:.*is traced again in each call")
@pytest.mark.filterwarnings("error:.*lru_cache")  # Dynamo warns if it traces the functions that find a mod's captures
def test_a_mod_that_dynamo_cannot_trace_breaks_the_graph(mod: Any) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(2, 9)
    function = torch.compile(lambda *x: flexattn.attention(*x, score_mod=mod) + 1, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(function(q, k, v), flexattn.attention(q, k, v, score_mod=mod) + 1)


@pytest.mark.slow
def test_mods_read_differences_of_dynamic_sizes() -> None:
    """Where sizes are equal, their difference is a symbol with a fixed value."""
    torch.compiler.reset()

    def call(q: Tensor, k: Tensor) -> Tensor:
        shift = k.shape[1] - q.shape[1]
        return flexattn.attention(q, k, k, mask_mod=lambda b, h, i, j: j <= i + shift)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for lengths in ((8, 8), (5, 9)):
        q, k = (torch.randn(1, length, 2, 16) for length in lengths)
        torch.testing.assert_close(compiled(q, k), call(q, k))


def test_compiled_autograd_traces_the_backward_as_one_graph() -> None:
    q, k, v = tensors(2, 9)
    want = torch.autograd.grad(sum_of_both(q, k, v), (q, k, v))
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        sum_of_both(q, k, v).backward()
    torch.testing.assert_close([t.grad for t in (q, k, v)], [*want])


def sum_of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = flexattn.attention(q, k, v, return_lse=True)
    return out.square().sum() + lse.square().sum()
