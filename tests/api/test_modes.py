"""If the first use of a call is under one of torch's modes, later calls with gradients return the results without the mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexattn import PagedKVCache, attention, call_cache, create_block_mask, mods, prepare, testing
from flexattn.dispatch import cudnn_mods
from flexattn.integrations import te
from flexattn.integrations.sdpa import scaled_dot_product_attention
from flexattn.integrations.te import fused_attn
from flexattn.integrations.te.recipe import DelayedScaling
from flexattn.mods import trace

HEADS, HEADS_KV, DIM, TOKENS = 4, 2, 16, 32
CPU = torch.device("cpu")


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def qkv() -> list[Tensor]:
    return [tokens(1, TOKENS, h, DIM, seed=i).requires_grad_() for i, h in enumerate((HEADS, HEADS_KV, HEADS_KV))]


def hides_later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def call_with_block_mask() -> Call:
    block_mask = create_block_mask(hides_later, None, None, TOKENS, TOKENS, "cpu", 16)
    return lambda q, k, v: attention(q, k, v, block_mask=block_mask)


def call_with_mod() -> Call:
    table = mods.relative_bias(tokens(32, HEADS, seed=7))
    factor = 0.5

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table(score * factor, b, h, q_idx, kv_idx) + 1.0 / (2.0 + h)

    return lambda q, k, v: attention(q, k, v, score_mod=score_mod)


def call_with_mask() -> Call:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cpu").tril()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)

    return call


def call_with_lengths() -> Call:
    lengths = torch.tensor([0, 9, TOKENS], dtype=torch.int32, device="cpu")
    names = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": TOKENS, "max_seqlen_kv": TOKENS}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[0], k[0], v[0], qkv_format="thd", attn_mask_type="padding_causal", **names)

    return call


def call_with_te() -> Call:
    """The layer makes the state of delayed scaling in its first call."""
    layer = te.DotProductAttention(HEADS, DIM, num_gqa_groups=HEADS_KV, qkv_format="bshd", attn_mask_type="causal")
    layer.eval()  # else its scales are others in each step

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
            return layer(*(x.bfloat16() for x in (q, k, v))).float()

    return call


def call_with_te_function() -> Call:
    kind = te.FusedAttnBackend.F16_arbitrary_seqlen

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = [x.detach().bfloat16() for x in (q, k, v)]
        fixed = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd", "attn_mask_type": "causal"}
        lengths = torch.tensor([0, TOKENS], dtype=torch.int32, device="cpu")
        ends = (TOKENS, TOKENS, lengths, lengths)
        out, saved, *_ = te.fused_attn_fwd(True, *ends, *qkv, torch.bfloat16, kind, **fixed)
        backward_arguments = fixed | {"do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd"}
        dq, *_ = te.fused_attn_bwd(*ends, *qkv, out, out, torch.bfloat16, saved, kind, **backward_arguments)
        return out.float() + dq.float() + 0.0 * (q + k.repeat_interleave(2, 2) + v.repeat_interleave(2, 2))

    return call


def call_with_cache() -> Call:
    """Rows go into memory that the first step allocates, and that later ones write to."""
    cache = te.InferenceParams(2, TOKENS, HEADS_KV, DIM, torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.reset()
        for step in range(2):
            cache.pre_step({"a": 2})
            found = cache.step(1, k[:, 2 * step : 2 * step + 2], v[:, 2 * step : 2 * step + 2], "bshd")
        return q + found.k[:1].repeat_interleave(2, 2) * found.v[:1].repeat_interleave(2, 2) + k.sum() + v.sum()

    return call


def call_with_pages() -> Call:
    cache: list[PagedKVCache] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not cache:
            cache.append(PagedKVCache([torch.zeros(2, 16, 4, HEADS_KV, DIM, device="cpu")], max_sequences=2, max_length=TOKENS))
        sequence = cache[0].add()
        cache[0].step({sequence: TOKENS})
        cache[0].append(0, k[0].detach(), v[0].detach())
        out = attention(q[0].detach(), *cache[0].pools[0], **cache[0].arguments())
        cache[0].free(sequence)
        return out + 0.0 * (q[0] + k.sum() + v.sum())

    return call


def call_with_alibi() -> Call:
    return lambda q, k, v: attention(q, k, v, bias_type="alibi", attn_mask_type="causal")


def call_with_plain() -> Call:
    return lambda q, k, v: attention(q, k, v, attn_mask_type="causal", window_size=(7, 0))


CALLS: dict[str, Callable[[], Call]] = {
    name.removeprefix("call_with_"): make for name, make in list(globals().items()) if name.startswith("call_with_")
}


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Replaces a CUDA graph's capture, which tests/gpu has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def around(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Call], None]:
    def run(call: Call) -> None:
        q, k, v = qkv()
        with context():
            call(q, k, v)

    return run


def fake(call: Call) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    q, k, v = (mode.from_tensor(x) for x in qkv())
    with mode:
        call(q, k, v)


MODES: dict[str, Callable[[Call], None]] = {
    "inference": around(torch.inference_mode),
    "no_grad": around(torch.no_grad),
    "default device": around(default_device),
    "device": around(lambda: torch.device("meta")),
    "autocast": around(lambda: torch.autocast("cpu", torch.bfloat16)),
    "deterministic": around(deterministic),
    "capture": around(capture),
    "fake": fake,
    "vmap": lambda call: torch.func.vmap(call)(*(x.detach().expand(2, *x.shape) for x in qkv())),
    "functionalize": lambda call: torch.func.functionalize(call)(*qkv()),
    "make_fx": lambda call: make_fx(call)(*qkv()),
    "jit": lambda call: torch.jit.trace(call, tuple(x.detach() for x in qkv()), check_trace=False),
}


MAY_REFUSE = {"capture", "fake", "vmap", "functionalize", "make_fx", "jit"}


def forget() -> None:
    """Drops all that is kept in the process."""
    call_cache.clear_cache()
    trace.clear_cache()
    prepare.default_alibi_slopes.cache_clear()  # type: ignore[attr-defined]
    fused_attn._no_dropout_states.clear()


def results(call: Call) -> list[Tensor]:
    q, k, v = qkv()
    out = call(q, k, v)
    return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v))]


_fresh: dict[str, list[Tensor]] = {}


def fresh(name: str) -> list[Tensor]:
    if name not in _fresh:
        forget()
        _fresh[name] = results(CALLS[name]())
    return _fresh[name]


CASES = [(name, mode) for name in CALLS for mode in MODES if not (name == "pages" and mode in ("fake", "functionalize"))]


@pytest.mark.sample("mode")
@pytest.mark.parametrize(("name", "mode"), CASES)  # a cache that is made of a mode's tensors stays of them
@pytest.mark.filterwarnings("ignore")
def test_a_first_call_under_a_mode_leaves_nothing_behind(name: str, mode: str) -> None:
    wanted = fresh(name)
    forget()
    call = CALLS[name]()
    # A refused call must leave no state either.
    with contextlib.suppress(*(RuntimeError, NotImplementedError) if mode in MAY_REFUSE else ()):
        MODES[mode](call)
    for got, want in zip(results(call), wanted, strict=True):
        assert type(got) is Tensor
        assert torch.equal(got, want)


def test_tensors_on_the_host_ignore_the_default_device() -> None:
    scaled = te.TEScoreMod(
        lambda graph, score, tensors: graph.mul(a=score, b=tensors["two"]),
        lambda graph, dscore, tensors: graph.mul(a=dscore, b=tensors["two"]),
        {"two": 2.0},
    )
    cudnn_mods._constant.cache_clear()  # type: ignore[attr-defined]
    with default_device():
        scaled.check_bprop(samples=10)
        inputs = testing.make_inputs("thd", lengths_q=[3, 0, 5], gap=2, outliers=True, device="cpu")
        made = [inputs.q, testing.make_dout(inputs), testing.make_dlse(inputs), cudnn_mods._constant(1.0, torch.float32)]
        pages = te.InferenceParams(2, 8, HEADS_KV, DIM, torch.float32, is_paged=True, total_num_pages=4, page_size=4)
        pages.pre_step({"a": 3})
        made += [pages.get_seqlens_pre_step(), pages.page_table("cpu")]
    assert {t.device.type for t in made} == {"cpu"}
    assert pages.page_table("cpu").tolist() == [[0, 0]]
