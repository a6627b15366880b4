"""The surroundings of a call do not change the kept trace of its mod; threads may trace at once; nothing is left behind."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import linecache
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.fx._symbolic_trace import is_fx_tracing
from torch.utils.checkpoint import checkpoint

from flexattn import attention, call_cache, explain
from flexattn.mods.bands import Masks
from flexattn.mods.joined import join
from flexattn.mods.trace import cache_info, clear_cache, trace_mods
from flexattn.mods.tracer import trace
from tests.conftest import FreshPython

Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    clear_cache()
    join.cache_clear()
    yield
    clear_cache()
    join.cache_clear()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 16, generator=generator).to(DEVICE).requires_grad_() for _ in "qkv")
    return q, k, v


def mods() -> tuple[Mod, Tensor]:
    """A multiplicative score_mod, whose derivative needs a value of the forward, and its captures."""
    slopes = torch.tensor([0.5, 1.5], device=DEVICE, requires_grad=True)
    return lambda s, b, h, i, j: torch.tanh(s) * s * slopes[h], slopes


def results(around: contextlib.AbstractContextManager[Any], backend: str, through: Any = lambda f, *x: f(*x)) -> list[Tensor]:
    (q, k, v), (mod, slopes) = inputs(), mods()
    with around:
        out = through(lambda *x: attention(*x, score_mod=mod, backend=backend), q, k, v)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad, slopes.grad]  # type: ignore[list-item]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-5)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "rounding hooks": lambda: saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()),
    "hooks that give zeros": lambda: saved_tensors_hooks(lambda t: t * 0, lambda t: t),
    "save_on_cpu": save_on_cpu,
    "no hooks": lambda: disable_saved_tensors_hooks("not here"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_cold_trace_keeps_nothing_of_what_is_around_it(name: str, backend: str) -> None:
    (q, k, v), (mod, _) = inputs(), mods()
    with AROUND[name]():
        attention(q, k, v, score_mod=mod, backend=backend)
    later = results(contextlib.nullcontext(), backend)
    clear_cache()
    join.cache_clear()
    call_cache.clear_cache()
    close(later, results(contextlib.nullcontext(), backend))


@pytest.mark.sample
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_cold_mod_in_a_checkpoint(reentrant: bool, backend: str) -> None:
    got = results(contextlib.nullcontext(), backend, functools.partial(checkpoint, use_reentrant=reentrant))
    close(got, results(contextlib.nullcontext(), backend))


def test_explain_of_a_cold_mod_in_a_checkpoint() -> None:
    (q, k, v), (mod, _) = inputs(), mods()

    def run(*x: Tensor) -> Tensor:
        assert explain(*x, score_mod=mod)
        return attention(*x, score_mod=mod)

    checkpoint(run, q, k, v, use_reentrant=False).sum().backward()
    assert q.grad is not None


def test_a_cold_mod_inside_an_operator() -> None:
    """Below autograd no result has a graph; the kept derivative is right all the same."""
    mod, _ = mods()
    with torch._C._AutoDispatchBelowAutograd():
        trace_mods(mod, None, needs_grad=True)
    got = results(contextlib.nullcontext(), "triton")
    clear_cache()
    join.cache_clear()
    call_cache.clear_cache()
    close(got, results(contextlib.nullcontext(), "triton"))


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_a_cold_mod_under_a_transform(transform: Any) -> None:
    want = trace_mods(mods()[0], None, needs_grad=True).program.text
    clear_cache()
    join.cache_clear()
    texts = []

    def function(x: Tensor) -> Tensor:
        texts.append(trace_mods(mods()[0], None, needs_grad=True).program.text)
        return x.sum()

    transform(function)(torch.ones(3))
    assert texts == [want]


def test_the_default_dtype_is_part_of_the_key() -> None:
    """An index times a number has this dtype, in a mod too."""
    mod = lambda s, b, h, i, j: s + i * 0.1  # noqa: E731
    texts = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            texts.append(trace_mods(mod, None).program.text)
        finally:
            torch.set_default_dtype(torch.float32)
    assert texts[0] == texts[2] != texts[1]
    assert cache_info()["traces"] == 2


# Threads.


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Starts work(0), .. work(count - 1) at once; raises their first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(n: int) -> None:
        try:
            barrier.wait()
            work(n)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.slow
def test_threads_that_trace_at_once() -> None:
    q, k, v = (x.detach() for x in inputs())
    slopes = torch.tensor([0.5, 1.5], device=DEVICE)

    def scaled(n: int) -> Mod:
        return lambda s, b, h, i, j: torch.tanh(s) * n + slopes[h] * i

    def masked(n: int) -> Mod:
        return lambda b, h, i, j: (i - j).abs() <= n

    def plain(n: int, with_mask: bool) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        i, j = torch.arange(9, device=DEVICE)[:, None], torch.arange(9, device=DEVICE)
        if not with_mask:
            scores = torch.tanh(scores) * n + slopes[:, None, None] * i
        else:
            scores = scores.masked_fill((i - j).abs() > n, -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    want = [(plain(n, False), plain(n, True)) for n in range(8)]
    shared = scaled(3)
    for _ in range(5):
        clear_cache()
        join.cache_clear()
        call_cache.clear_cache()

        def work(n: int) -> None:
            torch.testing.assert_close(attention(q, k, v, score_mod=scaled(n), backend="eager"), want[n][0])
            torch.testing.assert_close(attention(q, k, v, score_mod=shared, backend="eager"), want[3][0])
            torch.testing.assert_close(attention(q, k, v, mask_mod=masked(n), backend="eager"), want[n][1])

        in_threads(work)
    assert not is_fx_tracing()


@pytest.mark.slow
def test_threads_that_compile_while_others_trace() -> None:
    """torch.fx's tracers set a flag of the process. If it is set, functions made by torch.compile raise."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.ones(3)
    compiled(x)

    def work(n: int) -> None:
        for i in range(4):
            if n % 2:
                trace_mods(lambda s, b, h, q, kv, by=n + 8 * i: s * by, None, needs_grad=True)
            else:
                for _ in range(50):
                    torch.testing.assert_close(compiled(x), x.sin() + 1)

    in_threads(work)


@pytest.mark.slow
def test_a_mod_that_asks_for_another_mods_trace() -> None:
    inner = lambda b, h, i, j: i >= j  # noqa: E731

    def outer(b: Any, h: Any, i: Any, j: Any) -> Any:
        trace_mods(None, inner)
        return i >= j

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trace_mods(None, outer, masks=Masks.EXACT).right == 0


# Leaks.


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def closure(tensor: Tensor) -> Mod:
    return lambda s, b, h, i, j: s * tensor[h]


def nested(tensor: Tensor) -> Mod:
    def inner(s: Any, h: Any) -> Any:
        return s * tensor[h]

    return lambda s, b, h, i, j: inner(s, h)


def partial(tensor: Tensor) -> Mod:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s * table[h]

    return functools.partial(mod, table=tensor)


class Owner:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.table[h]


def method(tensor: Tensor) -> Mod:
    return Owner(tensor).mod


def unkeyed(tensor: Tensor) -> Mod:
    tables = collections.deque([tensor])
    return lambda s, b, h, i, j: s * tables[0][h]


@pytest.mark.sample
@pytest.mark.parametrize("make", [closure, nested, partial, method, unkeyed])
@pytest.mark.filterwarnings("ignore:.*is traced again in each call")
def test_a_captured_tensor_dies_with_its_closure(make: Callable[[Tensor], Mod]) -> None:
    q, k, v = (x.detach() for x in inputs())
    with without_collector():
        tensor = torch.ones(2, device=DEVICE)
        alive = weakref.ref(tensor)
        mod = make(tensor)
        for _ in range(3):
            attention(q, k, v, score_mod=mod)
        del tensor, mod
        assert alive() is None, gc.get_referrers(alive())


def test_the_first_trace_of_a_process_keeps_nothing(forked_python: FreshPython) -> None:
    """Modules that torch imports for it keep the frames of their import."""
    source = """
import gc, weakref, torch
from flexattn import attention
def call():
    q, table = torch.ones(1, 5, 2, 16), torch.ones(2)
    attention(q, q, q, score_mod=lambda s, b, h, i, j: s * table[h])
    return weakref.ref(q), weakref.ref(table)
alive = call()
gc.collect()
assert [x() for x in alive] == [None, None]
"""
    result = forked_python("-c", source)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_mod_without_a_key_leaves_nothing_behind(forked_python: FreshPython) -> None:
    """In a process of its own, because pytest keeps all logs."""
    source = """
import collections, gc, linecache, tracemalloc, torch
from flexattn import attention
from flexattn.mods.captures import find_captures
q, tables = torch.ones(1, 5, 2, 16), collections.deque([torch.ones(2)])
mod = lambda s, b, h, i, j: s * tables[0][h]
assert find_captures(mod).key is None
def measure():
    gc.collect()
    fx = torch.fx.graph_module._loader.eval_cache
    return tracemalloc.get_traced_memory()[0], len(linecache.cache), len(fx)
tracemalloc.start()  # before the first calls: what takes the place of something else is no growth
for calls in (50, 100):
    before = measure()
    for _ in range(calls):
        attention(q, q, q, score_mod=mod, backend="eager")
after = measure()
assert after[1:] == before[1:]
assert after[0] - before[0] < 100 * 500, (before, after)  # a graph takes 8 KB
"""
    result = forked_python("-W", "ignore", "-c", source)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_source_of_a_function_goes_with_it() -> None:
    pytest.importorskip("triton")
    from flexattn.kernels_triton.mods.lowering import compile_source

    source = "@triton.jit\ndef of_a_test(x):\n    return x + 1\n"
    function = compile_source("of_a_test", source)
    assert compile_source("of_a_test", source) is function
    assert "".join(linecache.getlines("<flexattn of_a_test>")) == source
    del function
    gc.collect()
    assert "<flexattn of_a_test>" not in linecache.cache


@pytest.mark.filterwarnings("ignore:.*is traced again in each call")
def test_a_mod_without_a_key_is_lowered_once() -> None:
    pytest.importorskip("triton")
    from flexattn.dispatch import triton_backend

    texts = [trace_mods(unkeyed(torch.ones(2)), None) for _ in range(3)]
    assert len({id(traced.program) for traced in texts}) == 1
    sources = {triton_backend.mod_source(traced.program, traced.tensors) for traced in texts}
    assert len(sources) == 1


# Checks of FLEXATTN_CHECK=1.


def test_a_hit_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs())
    mod = lambda s, b, h, i, j: s * 2 + i  # noqa: E731
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    for _ in range(3):
        attention(q, k, v, score_mod=mod)
    monkeypatch.setattr("flexattn.mods.trace.trace", lambda role, mod, found: trace(role, lambda s, b, h, i, j: s * 3 + i, found))
    with pytest.raises(RuntimeError, match=r"score_mod .*<lambda> is another graph now .* not in its key"):
        attention(q, k, v, score_mod=mod)


# Modules and objects as mods.


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor([0.5, 1.5], device=DEVICE))
        self.act = torch.nn.GELU()

    def forward(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.act(s) * self.table[h]


def of_a_list(parameters: Any) -> Mod:
    return lambda s, b, h, i, j: torch.nn.functional.gelu(s) * parameters[0][h]


class Items:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __getitem__(self, at: Any) -> Any:
        return self.table[at]


def of_items(items: Items) -> Mod:
    return lambda s, b, h, i, j: torch.nn.functional.gelu(s) * items[h]


@pytest.mark.parametrize("kind", ["module", "ParameterList", "ParameterDict", "__getitem__"])
@pytest.mark.filterwarnings("ignore:.*is traced again in each call")
def test_objects_with_tensors_as_mods(kind: str) -> None:
    q, k, v = inputs()
    table = torch.nn.Parameter(torch.tensor([0.5, 1.5], device=DEVICE))
    module = Table()
    module.table = table
    parameters = torch.nn.ParameterDict({"t": table})
    made: dict[str, Mod] = {
        "module": module,
        "ParameterList": of_a_list(torch.nn.ParameterList([table])),
        "ParameterDict": lambda s, b, h, i, j: torch.nn.functional.gelu(s) * parameters["t"][h],
        "__getitem__": of_items(Items(table)),
    }
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    weights = (torch.nn.functional.gelu(scores) * table[:, None, None]).softmax(-1)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v, table))
    for _ in range(3):
        out = attention(q, k, v, score_mod=made[kind], backend="eager")
        close([out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))], [want, *wanted])


def test_a_sparse_capture_is_refused_by_name() -> None:
    q, k, v = inputs()
    sparse = torch.eye(9).to_sparse()
    with pytest.raises(ValueError, match=r"score_mod captures sparse, a torch.float32 tensor of layout torch.sparse_coo; accepted"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s + sparse[i, j])
