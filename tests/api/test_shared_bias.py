"""A bias whose first dim divides the batch: groups of consecutive batch entries share an entry of it, without copies."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import flexattn
from flexattn import ops, plot, sharded
from flexattn.call_options import DEFAULTS
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.canary import _lengths
from flexattn.dispatch.sample import sample_operands
from flexattn.dispatch.spec import AttentionSpec
from flexattn.functional import bind_call
from flexattn.kernels_triton.portable import shared_bias_gradient
from flexattn.testing import check_close, make_call, make_dout, make_inputs, reference_attention, reference_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENTRIES, GROUP, HEADS = 2, 3, 2
LENGTHS_Q, LENGTHS_KV = (37, 20, 1, 64, 0, 33), (45, 64, 30, 7, 12, 0)


def call_of(qkv_format: str, bias_type: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    """Returns the arguments of a call, with a bias of `shape`, whose dims are 1 or cover the longest sequence, and dout."""
    packed = qkv_format == "thd"
    lengths = {"lengths_q": LENGTHS_Q, "lengths_kv": LENGTHS_KV} if packed else {"lengths_q": (18,) * 6, "lengths_kv": (25,) * 6}
    given = make_inputs(qkv_format=qkv_format, num_heads=HEADS, num_heads_kv=1, dtype=dtype, device=DEVICE, **lengths)
    longest = (max(LENGTHS_Q), max(LENGTHS_KV)) if packed else (18, 25)
    sizes = (ENTRIES, HEADS, *longest)
    bias = torch.randn([size if n else 1 for n, size in zip(shape, sizes, strict=True)], generator=torch.Generator().manual_seed(3))
    return {**given._asdict(), "bias": bias.to(DEVICE, dtype), "bias_type": bias_type}, make_dout(given)


def results(call: dict[str, Any], dout: Tensor, backend: str) -> list[Tensor]:
    """Returns out, lse, and the gradients of q, k, v and the bias."""
    leaves = {name: call[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")}
    mask = "padding" if call["qkv_format"] == "thd" else "no_mask"
    out, lse = flexattn.attention(**call | leaves, attn_mask_type=mask, return_lse=True, backend=backend)
    return [out, lse, *torch.autograd.grad(out, list(leaves.values()), dout)]


@pytest.mark.sample("fmt", "bias_type", "shape", "dtype", "backend", values=False)
@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("bias_type", ["post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)], ids=["ghss", "g1ss", "gh1s", "ghs1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_equals_a_repeated_bias(fmt: str, bias_type: str, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    """The same bits in out, lse and the gradients of q, k and v. The gradient of the bias is the sum over each group."""
    call, dout = call_of(fmt, bias_type, shape, dtype)
    *shared, dbias = results(call, dout, backend)
    *repeated, _ = results(call | {"bias": call["bias"].repeat_interleave(GROUP, 0)}, dout, backend)
    for got, want in zip(shared, repeated, strict=True):
        if backend == "triton":
            assert torch.equal(got, want)
        else:  # products of another batch may be summed in another order
            torch.testing.assert_close(got, want)
    spec, x = make_call(make_inputs(**_inputs(fmt, dtype)), bias=call["bias"], bias_type=bias_type)
    exact, rounded = (reference_gradients(spec, x, dout, dtype=to).dbias for to in (torch.float64, dtype))
    assert dbias.shape == call["bias"].shape
    check_close("dbias", dbias, exact, rounded, factor=3.0)


def _inputs(fmt: str, dtype: torch.dtype) -> dict[str, Any]:
    lengths = (LENGTHS_Q, LENGTHS_KV) if fmt == "thd" else ((18,) * 6, (25,) * 6)
    names = {"lengths_q": lengths[0], "lengths_kv": lengths[1]}
    return {"qkv_format": fmt, "num_heads": HEADS, "num_heads_kv": 1, "dtype": dtype, "device": DEVICE, **names}


def test_eager_calls_without_a_gradient() -> None:
    """These run torch's own operator, which has no such broadcast."""
    q = torch.randn(6, 8, HEADS, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(2, HEADS, 8, 8, generator=torch.Generator().manual_seed(1))
    out, repeated = (flexattn.attention(q, q, q, bias=t, backend="eager") for t in (bias, bias.repeat_interleave(GROUP, 0)))
    torch.testing.assert_close(out, repeated)


@pytest.mark.parametrize(("entries", "kind"), [(1, "batch"), (2, "all"), (3, "batch"), (6, "batch")])
def test_a_mesh_splits_whole_groups(monkeypatch: pytest.MonkeyPatch, entries: int, kind: str) -> None:
    """Three ranks cannot divide two entries of a bias, so q is gathered."""
    monkeypatch.setattr(sharded, "DTensor", SimpleNamespace)
    q, mesh = SimpleNamespace(placements=(Shard(0),)), SimpleNamespace(size=lambda dim: 3)
    arguments = DEFAULTS | {"bias": torch.zeros(entries, 1, 1, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sharded._kinds(q, "bshd", "bshd", mesh, arguments, (4, 4), 6) == [kind]


def test_the_reference_equals_a_formula() -> None:
    """Each batch entry b adds bias[b // GROUP]: consecutive entries share."""
    spec, x = make_call(
        make_inputs(**_inputs("bshd", torch.float64)),
        bias=torch.randn(ENTRIES, HEADS, 18, 25, dtype=torch.float64, device=DEVICE),
        bias_type="post_scale_bias",
    )
    out, _, _ = reference_attention(spec, x)
    k, v = (t.expand(-1, -1, HEADS, -1) for t in (x.k, x.v))
    for b in range(ENTRIES * GROUP):
        scores = torch.einsum("ihd,jhd->hij", x.q[b], k[b]) * x.softmax_scale + x.bias[b // GROUP]
        torch.testing.assert_close(out[b], torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[b]))


@pytest.mark.slow
def test_the_gradient_is_written_once_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program owns a tile of the gradient and adds all entries of the group to it. Without splits there is one sum."""
    launches: list[tuple[int, int]] = []
    launch = shared_bias_gradient.launch

    def watched(kernel: Any, programs: int, *rest: Any) -> None:
        launches.append((programs, rest[2][0].num_splits))
        launch(kernel, programs, *rest)

    monkeypatch.setattr(shared_bias_gradient, "launch", watched)
    monkeypatch.setattr(shared_bias_gradient, "num_processors", lambda device: 1)
    call, dout = call_of("bshd", "post_scale_bias", (1, 1, 1, 1), torch.float32)
    first, second = (results(call, dout, "triton")[-1] for _ in range(2))
    assert torch.equal(first, second)
    assert launches[0][1] == 1
    assert launches[0][0] % (ENTRIES * HEADS) == 0


@pytest.mark.parametrize("entries", [0, 4, 5, 12])
def test_other_first_dims_are_refused(entries: int) -> None:
    q = torch.zeros(6, 8, HEADS, 16)
    with pytest.raises(ValueError, match=r"The first may also be n, if n divides b: batch entry i then adds"):
        flexattn.attention(q, q, q, bias=torch.zeros(entries, HEADS, 8, 8))


def test_an_empty_batch_takes_no_groups() -> None:
    q = torch.zeros(0, 8, HEADS, 16)
    assert flexattn.attention(q, q, q, bias=torch.zeros(0, HEADS, 8, 8)).shape == q.shape
    with pytest.raises(ValueError, match="bias has shape"):
        flexattn.attention(q, q, q, bias=torch.zeros(2, HEADS, 8, 8))


@pytest.mark.parametrize(("len_q", "len_kv"), [(8, 0), (0, 8)])
def test_no_queries_or_no_keys(len_q: int, len_kv: int) -> None:
    """An empty bias has no tiles."""
    q, k = (torch.zeros(6, length, HEADS, 16, device=DEVICE, requires_grad=True) for length in (len_q, len_kv))
    bias = torch.zeros(1, HEADS, len_q, len_kv, device=DEVICE, requires_grad=True)
    found = torch.autograd.grad(flexattn.attention(q, k, k, bias=bias, backend="triton").sum(), (q, k, bias))
    assert not any(t.any() for t in found)


def spec_of(batch: int, entries: int) -> AttentionSpec:
    q = torch.zeros(batch, 8, HEADS, 16)
    x, settings = bind_call(q, q, q, bias=torch.zeros(entries, HEADS, 8, 8))
    return ops.spec_to_run(x, settings)


def test_explain_and_cudnn() -> None:
    q = torch.zeros(6, 8, HEADS, 16)
    assert "post_scale_bias shared by batch entries" in str(flexattn.explain(q, q, q, bias=torch.zeros(2, HEADS, 8, 8)))
    assert [spec_of(6, n).bias_is_shared for n in (1, 2, 3, 6)] == [False, True, True, False]
    assert "bias.repeat_interleave" in str(cudnn_backend._bias_error(spec_of(6, 2), False))
    assert cudnn_backend._bias_error(spec_of(6, 6), False) is None


@pytest.mark.parametrize("padding", [False, True])
def test_samples_share_too(padding: bool) -> None:
    """The canary and warm-up compile the kernels of the call."""
    spec = spec_of(6, 2)._replace(padding=padding)
    x = sample_operands(spec, "cpu", *_lengths(spec))
    assert (x.q.shape[0], x.bias.shape[0]) == (4, 2)
    assert reference_attention(spec, x)[0].isfinite().all()


def test_plots_draw_the_entry_of_the_group() -> None:
    q = torch.zeros(6, 8, HEADS, 16)
    bias = torch.arange(2.0)[:, None, None, None].expand(2, HEADS, 8, 8).contiguous()
    x, settings = bind_call(q, q, q, bias=bias)
    drawn = [plot.scores_of_zero(ops.spec_to_run(x, settings), x, batch, 0) for batch in range(6)]
    assert [t.unique().tolist() for t in drawn] == [[0.0]] * 3 + [[1.0]] * 3


@pytest.mark.slow
def test_compiled_calls() -> None:
    """One graph, for other numbers of groups too, and the results of eager mode."""

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flexattn.attention(q, k, v, bias=bias)

    for batch, entries in ((6, 2), (8, 4)):
        q, k, v = (torch.randn(batch, 18, HEADS, 16, device=DEVICE, requires_grad=True) for _ in range(3))
        bias = torch.randn(entries, HEADS, 18, 18, device=DEVICE, requires_grad=True)
        found = []
        for call in (attend, lambda q, k, v, bias: flexattn.attention(q, k, v, bias=bias)):
            out = call(q, k, v, bias)
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))])
        torch.testing.assert_close(*found)


def test_second_derivatives() -> None:
    """These come from the reference's formulas, whose blocks have one entry of the bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 5, HEADS, 8), (6, 7, HEADS, 8), (6, 7, HEADS, 8), (2, HEADS, 5, 7)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    found = []
    for repeats in (1, GROUP):
        bias = leaves[3].repeat_interleave(repeats, 0)
        out = flexattn.attention(*leaves[:3], bias=bias, backend="eager")
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    torch.testing.assert_close(*found)
