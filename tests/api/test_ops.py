"""The operators as torch sees them: schemas, fakes, strides, autograd, torch.compile, checkpointing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flexattn
from flexattn import autograd, call_cache, ops
from flexattn.dispatch import eager_backend
from flexattn.dispatch.options import attention_backend
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import Operands
from flexattn.testing import make_inputs

LENGTHS = (5, 0, 3)  # one empty, none a power of two
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def op_arguments(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments that `attention` gives to the operators for a call."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(call_cache, "look_up", lambda *_: (None, None))  # the operators' way
        patch.setattr(autograd, "attention", lambda x, settings, *_: seen.append((*x, *settings)) or (None, None, None))
        flexattn.attention(**call)
    return seen[0]


def permuted(x: Tensor) -> Tensor:
    """The same values with the first two dims the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


EVERYTHING = {
    "window_size": (4, -1),
    "softcap": 5.0,
    "dropout_p": 0.25,
    "softmax_type": "learnable",
    "softmax_offset": torch.tensor([0.5, -1.0, 0.0, 2.0]),
    "return_max_logit": True,
}
CALLS = {
    "bshd": {**make_inputs("bshd", lengths_q=(5, 5), lengths_kv=(7, 7))._asdict(), "attn_mask_type": "causal"},
    "sbhd strided": make_inputs("sbhd", lengths_q=(5, 5), lengths_kv=(7, 7), strided=True)._asdict(),
    "bhsd padding": {**make_inputs("bhsd", lengths_q=LENGTHS, padding=True)._asdict(), "attn_mask_type": "padding_causal"},
    "bshd everything": {
        **make_inputs("bshd", lengths_q=(5, 5), head_dim_v=8)._asdict(),
        **EVERYTHING,
        "bias_type": "post_scale_bias",
        "bias": torch.randn(1, 4, 5, 5).transpose(-1, -2).requires_grad_(),
    },
    "thd everything": {
        **make_inputs("thd", lengths_q=LENGTHS, gap=2, strided=True)._asdict(),
        **EVERYTHING,
        "attn_mask_type": "padding_causal_bottom_right",
        "bias_type": "alibi",
    },
    "thd to bshd": {**make_inputs("thd_2bshd", lengths_q=LENGTHS, lengths_kv=(4, 4, 7))._asdict(), "attn_mask_type": "padding"},
    "half": make_inputs("bshd", lengths_q=(5, 5), dtype=torch.bfloat16)._asdict(),
}


def with_gradients(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy with new leaves in the same layout. Padding is 0, because opcheck treats NaN as different from NaN."""

    def leaf(name: str, t: Any) -> Any:
        if name not in ("q", "k", "v", "bias", "softmax_offset") or t is None:
            return t
        copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach().nan_to_num())
        return copy.requires_grad_()

    return {name: leaf(name, t) for name, t in call.items()}


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "as given") for name in CALLS), ("bshd", "permuted"), ("thd everything", "permuted")]
)
def test_opcheck(monkeypatch, name, layout):
    call = with_gradients(CALLS[name])
    if layout == "permuted":
        call |= {t: permuted(call[t].detach()).requires_grad_() for t in "qkv"}
    # Without gradients, because autograd is outside the operators; their settings still request all of them.
    arguments = tuple(t.detach() if isinstance(t, Tensor) else t for t in op_arguments(monkeypatch, call))
    torch.library.opcheck(ops._forward_op, arguments, test_utils=OPCHECKS)
    out, lse, _ = ops._forward_op(*arguments)
    for dout in (torch.ones(()).to(out).expand_as(out), permuted(torch.randn_like(out))):
        torch.library.opcheck(ops._backward_op, (dout, torch.randn_like(lse), out, lse, *arguments), test_utils=OPCHECKS)


def test_the_operator_asks_for_a_gradient_of_lse(monkeypatch):
    call = with_gradients(CALLS["bshd"]) | {"backend": "eager"}
    arguments = tuple(t.detach() if isinstance(t, Tensor) else t for t in op_arguments(monkeypatch, call))
    out, lse, _ = ops._forward_op(*arguments)
    monkeypatch.setattr(eager_backend, "unsupported", lambda spec, _: "takes no gradient of lse" if spec.needs_lse_grad else None)
    select.cache_clear()
    ops._backward_op(torch.ones_like(out), None, out, lse, *arguments)
    with pytest.raises(flexattn.BackendError, match="takes no gradient of lse"):
        ops._backward_op(torch.ones_like(out), lse, out, lse, *arguments)
    select.cache_clear()


def test_the_schemas_are_the_operands_and_then_the_settings():
    operands = ["memory" if name == "out" else name for name in Operands._fields]  # as a backward has an out of its own
    expected = [*operands, *ops.Settings._fields]
    assert [a.name for a in ops._forward_op._schema.arguments] == expected
    assert [a.name for a in ops._backward_op._schema.arguments] == ["dout", "dlse", "out", "lse", *expected]


def test_outputs_share_no_memory_with_inputs_and_gradients_are_contiguous(monkeypatch):
    arguments = op_arguments(monkeypatch, CALLS["bshd everything"])
    outputs = ops._forward_op(*arguments)
    *gradients, _ = ops._backward_op(torch.randn_like(outputs[0]), None, *outputs[:2], *arguments)
    inputs = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, Tensor)}
    memories = [t.untyped_storage().data_ptr() for t in (*outputs, *gradients)]
    assert len(set(memories)) == len(memories)
    assert not inputs & set(memories)
    assert all(t.is_contiguous() for t in (*outputs, *gradients))


def test_gradients_that_nobody_wants_are_empty(monkeypatch):
    arguments = op_arguments(monkeypatch, CALLS["bshd"])
    out, lse, max_logit = ops._forward_op(*arguments)
    *_, dbias, dsoftmax_offset, dmod_tensors = ops._backward_op(out, None, out, lse, *arguments)
    assert dmod_tensors == []
    assert max_logit.shape == dbias.shape == dsoftmax_offset.shape == (0,)


def results(function: Any, call: dict[str, Any]) -> list[Tensor]:
    """The outputs and every gradient, of a loss that uses out and lse both."""
    leaves = with_gradients(call)
    torch.manual_seed(0)
    outputs = function(**leaves, return_lse=True)
    out, lse = outputs[:2]
    weights = torch.arange(1.0, out.shape[-1] + 1)
    ((out * weights).sum() + lse.where(lse.isfinite(), 0.0).square().sum()).backward()
    return [*outputs, *(t.grad for t in leaves.values() if isinstance(t, Tensor) and t.requires_grad)]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("bshd", "thd everything") else pytest.mark.exhaustive) for n in CALLS]
)
def test_compiled_as_one_graph_gives_the_same(name):
    torch.compiler.reset()
    compiled = torch.compile(flexattn.attention, fullgraph=True, backend="aot_eager")
    eager = {**CALLS[name]}
    if "dropout_p" in eager:  # the two draw from different generators
        eager["rng_state"] = torch.tensor([3, 4])
    for got, expected in zip(results(compiled, eager), results(flexattn.attention, eager), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", ["bshd", "bhsd padding", "thd"])
def test_new_lengths_compile_nothing(name):
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounter()

    def step(call: dict[str, Any], scale: float) -> Tensor:
        return flexattn.attention(**call, softmax_scale=scale)

    compiled = torch.compile(step, fullgraph=True, backend=graphs)

    def run(batch: int, length: int) -> None:
        lengths = [length - i for i in range(batch)] if name != "bshd" else [length] * batch
        kwargs: dict[str, Any] = {"padding": True} if name == "bhsd padding" else {}
        inputs = make_inputs(name.split()[0], lengths_q=lengths, lengths_kv=[n + 2 for n in lengths], **kwargs)
        call = with_gradients({**inputs._asdict(), "attn_mask_type": "causal" if name == "bshd" else "padding_causal"})
        scale = 0.1 * length
        got = compiled(call, scale)
        torch.testing.assert_close(got, step(call, scale), rtol=0, atol=0)

    run(batch=2, length=5)
    run(batch=3, length=9)  # shows torch that batch and lengths change
    compiled_once = graphs.frame_count
    for batch, length in ((4, 11), (5, 6), (2, 130)):
        run(batch, length)
    assert graphs.frame_count == compiled_once <= 2


@pytest.mark.slow
def test_one_tensor_may_come_twice_to_a_compiled_call():
    """The cu_seqlens of self-attention do, and k as v."""
    torch.compiler.reset()
    compiled = torch.compile(flexattn.attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs("thd", lengths_q=LENGTHS, num_heads=2)
    q, kv = inputs.q, inputs.k
    gradients = []
    for attention in (flexattn.attention, compiled):
        leaf = kv.clone().requires_grad_()
        call = inputs._replace(q=q, k=leaf, v=leaf, cu_seqlens_kv=inputs.cu_seqlens_q)._asdict()
        attention(**call, attn_mask_type="padding_causal").square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.slow
def test_a_compiled_call_warns_of_nothing(monkeypatch):
    """A warning would break the graph; pytest is set to make an error of any."""
    torch.compiler.reset()
    monkeypatch.setattr("flexattn.warn._warned", set())
    call = make_inputs("thd", lengths_q=LENGTHS)._asdict() | {
        "attn_mask_type": "padding",
        "max_seqlen_q": None,
        "max_seqlen_kv": None,
    }
    compiled = torch.compile(flexattn.attention, fullgraph=True, backend="aot_eager")
    out = compiled(**call)
    torch.testing.assert_close(out, flexattn.attention(**(call | {"max_seqlen_q": 5, "max_seqlen_kv": 5})), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("spelling", ["argument", "around", "inside"])
def test_the_backend_request_reaches_a_compiled_call(monkeypatch, spelling):
    torch.compiler.reset()
    requests = []
    select = ops.select
    monkeypatch.setattr(
        ops,
        "select",
        lambda spec, direction, request, refused: requests.append(request) or select(spec, direction, request, refused),
    )
    q = torch.randn(1, 3, 2, 8)

    def inside(q: Tensor) -> Tensor:
        if spelling == "argument":
            return flexattn.attention(q, q, q, backend="eager")
        if spelling == "around":
            return flexattn.attention(q, q, q)
        with attention_backend("eager"):
            return flexattn.attention(q, q, q)

    compiled = torch.compile(inside, fullgraph=True, backend="eager")
    compiled(q)
    with attention_backend("eager"):
        compiled(q)
    thread = threading.Thread(target=compiled, args=(q,))  # with its request
    with attention_backend("eager"):
        thread.start()
        thread.join()
    assert requests == (["auto", "eager", "auto"] if spelling == "around" else ["eager"] * 3)


@pytest.mark.slow
def test_alibi_slopes_that_a_trace_made_are_not_kept():
    torch.compiler.reset()
    q = torch.randn(1, 3, 6, 8)  # a number of heads that no other test has
    compiled = torch.compile(lambda q: flexattn.attention(q, q, q, bias_type="alibi"), fullgraph=True, backend="aot_eager")
    expected = compiled(q)
    with torch.inference_mode():
        flexattn.attention(q, q, q, bias_type="alibi")
    leaf = q.clone().requires_grad_()
    out = flexattn.attention(leaf, q, q, bias_type="alibi")
    out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_export_with_a_dynamic_length():
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flexattn.attention(q, k, v, attn_mask_type="causal", backend="eager")

    def qkv(length: int) -> tuple[Tensor, ...]:
        return make_inputs("bshd", lengths_q=[length] * 2)[:3]

    length = torch.export.Dim("length", min=2)
    exported = torch.export.export(Attention(), qkv(5), dynamic_shapes=[{1: length}] * 3)
    for n in (5, 9):
        torch.testing.assert_close(exported.module()(*qkv(n)), Attention()(*qkv(n)), rtol=0, atol=0)


def test_gradients_of_lse_alone_and_of_out_alone_add_up():
    call = with_gradients(CALLS["bshd"])
    out, lse = flexattn.attention(**call, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    leaves = [call["q"], call["k"]]
    both = torch.autograd.grad([out, lse], leaves, [dout, dlse], retain_graph=True)
    out_gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    lse_gradients = torch.autograd.grad(lse, leaves, dlse)
    for total, a, b in zip(both, out_gradients, lse_gradients, strict=True):
        assert b.abs().max() > 0.01
        torch.testing.assert_close(total, a + b)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_backend_that_takes_no_gradient_of_lse_is_not_asked_for_one(is_kept, monkeypatch):
    def unsupported(spec, direction):
        return "takes no gradient of lse" if spec.needs_lse_grad else None

    monkeypatch.setattr(eager_backend, "unsupported", unsupported)
    monkeypatch.setenv("FLEXATTN_CHECK", "0" if is_kept else "1")
    select.cache_clear()
    call = with_gradients(CALLS["bshd"])
    for _ in range(3):
        out, lse = flexattn.attention(**call, return_lse=True, backend="eager")
        out.sum().backward(retain_graph=True)
        with pytest.raises(flexattn.BackendError, match="takes no gradient of lse"):
            lse.sum().backward()
    select.cache_clear()


def test_max_logit_is_not_differentiable():
    call = with_gradients(CALLS["bshd"])
    out, max_logit = flexattn.attention(**call, return_max_logit=True)
    assert out.requires_grad
    assert not max_logit.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_drops_the_same_weights(use_reentrant):
    """dv and dq of a recomputed forward equal the first forward's only if both drew the same dropout."""

    def gradients(run: Any) -> list[Tensor]:
        call = with_gradients(CALLS["bshd"])
        torch.manual_seed(1)
        q, k, v = call["q"], call["k"], call["v"]
        run(lambda q, k, v: flexattn.attention(q, k, v, attn_mask_type="causal", dropout_p=0.5), q, k, v).sum().backward()
        return [q.grad, k.grad, v.grad]

    plain = gradients(lambda function, *qkv: function(*qkv))
    torch.rand(7)  # the generator moves on between forward and recomputation
    saved = gradients(lambda function, *qkv: checkpoint(function, *qkv, use_reentrant=use_reentrant))
    for got, expected in zip(saved, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_generator_decides_dropout_unless_rng_state_does():
    call = CALLS["bshd"] | {"dropout_p": 0.5}

    def draw(seed: int, **rng: Any) -> Tensor:
        torch.manual_seed(seed)
        return flexattn.attention(**call, **rng)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    given = {"rng_state": torch.tensor([5, 6])}
    assert torch.equal(draw(0, **given), draw(1, **given))


def test_no_gradient_no_graph():
    """A call without gradients or under no_grad saves nothing and needs no backward."""
    plain = flexattn.attention(**CALLS["bshd"])
    call = with_gradients(CALLS["bshd"])
    with torch.no_grad():
        quiet = flexattn.attention(**call)
    with torch.inference_mode():
        inference = flexattn.attention(**call)
    for out in (plain, quiet, inference):
        assert out.grad_fn is None
        assert not out.requires_grad
    assert flexattn.attention(**call).grad_fn is not None
    assert flexattn.explain(**CALLS["bshd"]).backward is None


def test_one_input_may_need_no_gradient():
    for name in "qkv":
        call = CALLS["bshd"] | {name: CALLS["bshd"][name].clone().requires_grad_()}
        flexattn.attention(**call).sum().backward()
        assert call[name].grad.shape == call[name].shape


def test_gradients_under_a_dispatch_mode():
    """Flop counters and selective checkpointing are such modes: torch switches autograd off in kernels there."""
    expected = results(flexattn.attention, CALLS["bshd"])
    with FlopCounterMode(display=False):
        got = results(flexattn.attention, CALLS["bshd"])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_meta_tensors_give_shapes():
    inputs = make_inputs("thd", lengths_q=(3, 5), device="meta")
    out, lse = flexattn.attention(**inputs._asdict(), attn_mask_type="padding", return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((8, 4, 16), (4, 8), "meta")
