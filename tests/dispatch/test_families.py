"""The kernel family that runs a call, as measured and as forced: the chosen kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexattn import fp8, ops
from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import dout_like
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands, Window, empty_outputs
from flexattn.functional import bind_call
from tests.api.test_support import ROWS, Row, make_case
from tests.fuzz.calls import Call
from tests.fuzz.config import FEATURES, Where, draw_config

pytest.importorskip("triton", reason="triton is not installed")

from flexattn.kernels_triton.ahead_of_time.compile_report import CompileRequest, request_for
from flexattn.kernels_triton.common.problem import BlockLists, Forward, Problem
from flexattn.kernels_triton.families import BACKWARDS, FORWARDS, SPARSE_BACKWARDS, SPARSE_FORWARDS, Policy, choose
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch
from tests.support.compiled_kernels import compile_sound

MEASURED, FORCED = Policy(), Policy(ignores_measurements=True, takes_what_never_ran=True)
SEEDS = 40
WHERE = Where("triton", "cpu", (torch.bfloat16, torch.float32), (64, 128, 40, 192, 256, 512), (270, 300), 2, frozenset(FEATURES))

# Kernels that only this family launches.
KERNELS = {
    ("forward", "portable"): {"_attn_fwd_kernel"},
    ("forward", "sm_90"): {"_attn_fwd_hopper_kernel"},
    ("forward", "sm_90 few keys"): {"_attn_fwd_few_keys_hopper_kernel"},
    ("forward", "sm_90 wide"): {"_attn_fwd_wide_hopper_kernel"},
    ("forward", "sm_90 FP8 cache"): {"_attn_fwd_fp8_cache_kernel"},
    ("forward", "sm_90 FP8"): {"_attn_fwd_fp8_hopper_kernel"},
    ("forward", "sm_100"): {"_attn_fwd_blackwell_kernel"},
    ("forward", "sparse"): {"_sparse_fwd_kernel"},
    ("forward", "sm_90 sparse latent"): {"_sparse_fwd_wide_hopper_kernel"},
    ("forward", "sparse by block"): {"_sparse_block_fwd_kernel"},
    ("backward", "sparse"): {"_sparse_bwd_dq_kernel"},
    ("backward", "sparse by block"): {"_sparse_block_bwd_kernel"},
    ("backward", "portable"): {"_attn_bwd_dq_kernel", "_attn_bwd_dkdv_kernel"},
    ("backward", "sm_90 fused"): {"_attn_bwd_fused_hopper_kernel"},
    ("backward", "sm_90 fused 192"): {"_attn_bwd_fused_192_hopper_kernel"},
    ("backward", "sm_100 fused"): {"_attn_bwd_blackwell_kernel"},
    ("backward", "sm_90 two-kernel"): {"_attn_bwd_dq_hopper_kernel", "_attn_bwd_dkdv_hopper_kernel"},
    ("backward", "sm_90 wide two-kernel"): {"_attn_bwd_wide_hopper_kernel"},
    ("backward", "sm_90 FP8 fused"): {"_attn_bwd_fused_fp8_hopper_kernel"},
    ("backward", "sm_90 FP8 two-kernel"): {"_attn_bwd_dq_fp8_hopper_kernel", "_attn_bwd_dkdv_fp8_hopper_kernel"},
}
for _name in ("sm_90 fused", "sm_90 fused 192", "sm_90 two-kernel"):
    KERNELS["backward", f"{_name}, dequantized"] = KERNELS["backward", _name]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def on_sm_90(**arguments: Any) -> tuple[AttentionSpec, Operands]:
    x, settings = bind_call(**arguments)
    return ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=(9, 0)), x


def names(spec: AttentionSpec, x: Operands) -> list[str]:
    choices = (triton_backend.choice_of(spec, x, direction) for direction in DIRECTIONS)
    return [choice.family.name for choice in choices if choice is not None]


def launches_of(spec: AttentionSpec, x: Operands, direction: Direction) -> list[Launch]:
    x = triton_backend.on_meta(x)
    with torch.no_grad(), triton_backend.recorded_on(spec) as launches:
        out, lse, _ = empty_outputs(spec, x)
        if direction == "forward":
            triton_backend.forward(spec, x)
        else:
            triton_backend.backward(spec, x, out, lse, dout_like(spec, x, out), None)
    return launches


def launched(spec: AttentionSpec, x: Operands, direction: Direction) -> set[str]:
    return {launch.kernel.__name__ for launch in launches_of(spec, x, direction)}


CAUSAL = {"attn_mask_type": "causal"}
LONG = (2, 4096, 16, 128)
FP8 = {"fp8_recipe": fp8.Recipe()}


# The shape of q, other arguments, and the families as measured and as forced, forward and backward.
@pytest.mark.parametrize(
    ("shape", "more", "measured", "forced"),
    [
        (LONG, {}, ["sm_90", "sm_90 fused"], ["sm_90", "sm_90 fused"]),
        (LONG, {"window_size": Window(1024, -8)}, ["sm_90", "sm_90 fused"], ["sm_90", "sm_90 fused"]),
        (LONG, {"window_size": Window(-8, None)}, ["sm_90", "sm_90 two-kernel"], ["sm_90", "sm_90 fused"]),
        (LONG, {"window_size": Window(1024, -8)} | FP8, ["portable", "portable"], ["portable", "portable"]),
        (LONG, CAUSAL, ["sm_90", "sm_90 fused"], ["sm_90", "sm_90 fused"]),
        (LONG, CAUSAL | {"deterministic": True}, ["sm_90", "sm_90 two-kernel"], ["sm_90", "sm_90 two-kernel"]),
        (LONG, {"softcap": 30.0}, ["sm_90", "sm_90 fused"], ["sm_90", "sm_90 fused"]),
        (LONG, {"dropout_p": 0.1}, ["sm_90", "sm_90 fused"], ["sm_90", "sm_90 fused"]),
        (LONG, {"window_size": (99, 0)}, ["sm_90", "portable"], ["sm_90", "sm_90 fused"]),
        ((2, 4096, 16, 256), CAUSAL, ["sm_90", "sm_90 two-kernel"], ["sm_90", "sm_90 two-kernel"]),
        ((2, 64, 16, 128), {}, ["portable", "portable"], ["sm_90", "sm_90 fused"]),
        ((2, 4096, 16, 512), CAUSAL, ["sm_90 wide", "sm_90 wide two-kernel"], ["sm_90 wide", "sm_90 wide two-kernel"]),
        ((2, 8192, 16, 320), CAUSAL, ["portable", "portable"], ["sm_90 wide", "sm_90 wide two-kernel"]),
        ((2, 64, 16, 256), {}, ["portable", "portable"], ["sm_90", "sm_90 two-kernel"]),
        (LONG, FP8, ["sm_90 FP8", "sm_90 FP8 fused"], ["sm_90 FP8", "sm_90 FP8 fused"]),
        (LONG, FP8 | {"softcap": 30.0}, ["portable", "sm_90 FP8 fused"], ["sm_90 FP8", "sm_90 FP8 fused"]),
        (LONG, FP8 | {"deterministic": True}, ["sm_90 FP8", "sm_90 FP8 two-kernel"], ["sm_90 FP8", "sm_90 FP8 two-kernel"]),
        (LONG, FP8 | {"dropout_p": 0.1}, ["portable", "sm_90 fused, dequantized"], ["portable", "sm_90 fused, dequantized"]),
        (
            (2, 4096, 16, 256),
            FP8 | CAUSAL | {"dropout_p": 0.1},
            ["portable", "sm_90 two-kernel, dequantized"],
            ["portable", "sm_90 two-kernel, dequantized"],
        ),
        ((2, 64, 16, 128), FP8, ["portable", "portable"], ["sm_90 FP8", "sm_90 FP8 fused"]),
    ],
)
def test_families_of_calls(
    shape: tuple[int, ...], more: dict[str, Any], measured: list[str], forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    spec, x = on_sm_90(q=q, k=q, v=q, **more)
    for policy, expected in ((MEASURED, measured), (FORCED, forced), (Policy(portable_only="a test"), ["portable"] * 2)):
        monkeypatch.setattr(triton_backend, "policy_of", lambda spec, policy=policy: policy)
        assert names(spec, x) == expected


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("more", [{}, FP8], ids=["16 bits", "FP8"])
def test_a_family_runs_only_on_its_devices(more: dict[str, Any], capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditions of kernels do not repeat it."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: FORCED)
    q = torch.empty(LONG, dtype=torch.bfloat16, device="meta", requires_grad=True)
    spec, x = on_sm_90(q=q, k=q, v=q, **more)
    spec = spec._replace(capability=divmod(capability, 10))
    for direction, orders in (("forward", FORWARDS), ("backward", BACKWARDS)):
        choice = triton_backend.choice_of(spec, x, direction)
        assert choice is not None
        rejected = dict(choice.rejected)
        for family in orders[bool(more)]:
            if family.capabilities and capability not in family.capabilities:
                assert choice.family is not family
                assert family.name not in rejected or rejected[family.name].endswith(" is needed")


@pytest.mark.parametrize("layout", ["one head", "one batch entry", "rows between others"])
def test_a_deterministic_backward_has_one_family_at_any_strides(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook for saved tensors, such as save_on_cpu, gives the backward contiguous copies."""
    q = torch.empty(LONG, dtype=torch.bfloat16, device="meta")
    strided = {
        "one head": q[:, :, :1].expand(q.shape),
        "one batch entry": q[:1].expand(q.shape),
        "rows between others": q.new_empty(q.numel() + 8).as_strided(q.shape, (q.stride(0) + 8, *q.stride()[1:])),
    }[layout]
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: MEASURED)
    for k in (q, strided):
        spec, x = on_sm_90(q=q.requires_grad_(), k=k, v=k, deterministic=True, **CAUSAL)
        assert names(spec, x)[1] == "sm_90 two-kernel"
        assert launched(spec, x, "backward") >= KERNELS["backward", "sm_90 two-kernel"]


# Kernels that no GPU has run need a request by name, whatever else a policy allows.
@pytest.mark.parametrize(
    ("shape", "more", "forced"),
    [
        (LONG, {}, ["sm_100", "sm_100 fused"]),
        (LONG, {"window_size": Window(1024, -8)}, ["sm_100", "sm_100 fused"]),
        (LONG, CAUSAL | {"softcap": 30.0}, ["sm_100", "sm_100 fused"]),
        (LONG, CAUSAL | {"softcap": 30.0, "deterministic": True}, ["sm_100", "portable"]),
        (LONG, {"dropout_p": 0.1}, ["sm_100", "portable"]),
        (LONG, FP8, ["portable", "portable"]),
        ((2, 4096, 16, 256), CAUSAL, ["portable", "portable"]),
        ((2, 4096, 16, 192), CAUSAL, ["portable", "portable"]),
        ((2, 1, 16, 64), {}, ["sm_100", "sm_100 fused"]),
    ],
    ids=str,
)
def test_families_on_sm_100(
    shape: tuple[int, ...], more: dict[str, Any], forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    spec, x = on_sm_90(q=q, k=q, v=q, **more)
    spec = spec._replace(capability=(10, 0))
    portable = ["portable", "portable"]
    for policy, expected in ((MEASURED, portable), (Policy(ignores_measurements=True), portable), (FORCED, forced)):
        monkeypatch.setattr(triton_backend, "policy_of", lambda spec, policy=policy: policy)
        assert names(spec, x) == expected
        for direction, name in zip(DIRECTIONS, expected, strict=True):
            assert launched(spec, x, direction) & set.union(*KERNELS.values()) == KERNELS[direction, name]


@pytest.mark.parametrize(
    ("queries", "dim", "more", "measured", "forced"),
    [
        (1, 128, {}, "sm_90 FP8 cache", "sm_90 FP8 cache"),
        (8, 64, {"softcap": 30.0}, "sm_90 FP8 cache", "sm_90 FP8 cache"),
        (9, 128, {}, "portable", "sm_90 FP8 cache"),
        (1, 256, {}, "sm_90 FP8 cache", "sm_90 FP8 cache"),
        (1, 192, {}, "portable", "portable"),
        (1, 128, {"batch_invariant": True}, "portable", "portable"),
    ],
)
def test_families_of_fp8_caches(
    queries: int, dim: int, more: dict[str, Any], measured: str, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(2, queries, 8, dim, dtype=torch.bfloat16, device="meta")
    k, table = (
        torch.empty(512, 16, 2, dim, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(2, 256, dtype=torch.int32, device="meta"),
    )
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    spec, x = on_sm_90(q=q, k=k, v=k, page_table=table, seqused_kv=lengths, attn_mask_type="padding_causal_bottom_right", **more)
    for policy, expected in ((MEASURED, measured), (FORCED, forced), (Policy(portable_only="a test"), "portable")):
        monkeypatch.setattr(triton_backend, "policy_of", lambda spec, policy=policy: policy)
        choice = triton_backend.choice_of(spec, x, "forward")
        assert choice is not None
        assert choice.family.name == expected
        assert launched(spec, x, "forward") & set.union(*KERNELS.values()) == KERNELS["forward", expected]


def fp8_cache_call() -> tuple[AttentionSpec, Operands]:
    q = torch.empty(2, 1, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 512, 2, 64, dtype=torch.float8_e4m3fn, device="meta")
    return on_sm_90(q=q, k=k, v=k)


def latent_call(dims: tuple[int, int] = (320, 256), *, has_copy: bool = False) -> tuple[AttentionSpec, Operands]:
    q, k = (torch.zeros(1, n, heads, dims[0], dtype=torch.bfloat16) for n, heads in ((2, 4), (64, 1)))
    v = k[..., : dims[1]]
    return on_sm_90(q=q, k=k, v=v.clone() if has_copy else v, kv_indices=torch.zeros(1, 2, 16, dtype=torch.int32))


@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (512, 448)], ids=str)
def test_latent_heads_have_a_family_if_v_is_no_copy(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())
    assert names(*latent_call(dims)) == ["sm_90 sparse latent", "sparse"]
    assert names(*latent_call(dims, has_copy=True)) == ["sparse", "sparse"]


@pytest.mark.slow
def test_a_kernel_of_each_family_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any supported Triton, at the head dims that compile fastest."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: policy)
    requests: dict[tuple[str, str], CompileRequest] = {}

    def add(spec: AttentionSpec, x: Operands, capability: int, directions: tuple[Direction, ...] = DIRECTIONS) -> None:
        spec = spec._replace(capability=divmod(capability, 10))
        for direction in directions:
            choice = triton_backend.choice_of(spec, x, direction)
            assert choice is not None
            family_kernels = KERNELS[direction, choice.family.name]
            launch = next(launch for launch in launches_of(spec, x, direction) if launch.kernel.__name__ in family_kernels)
            requests.setdefault((direction, choice.family.name), request_for(launch, capability))

    def call(dims: tuple[int, int] = (64, 64), **more: Any) -> tuple[AttentionSpec, Operands]:
        q, v = (torch.empty(2, 4096, 16, dim, dtype=torch.bfloat16, device="meta", requires_grad=True) for dim in dims)
        return on_sm_90(q=q, k=q, v=v, **more)

    policy = FORCED
    for given in (call(), call((192, 128)), call(deterministic=True), call(**FP8), call(deterministic=True, **FP8)):
        add(*given, 90)
    few = torch.empty(2, 77, 16, 64, dtype=torch.bfloat16, device="meta")
    add(*on_sm_90(q=torch.empty(2, 4096, 16, 64, dtype=torch.bfloat16, device="meta"), k=few, v=few), 90, ("forward",))
    add(*call((512, 512)), 90)
    add(*fp8_cache_call(), 90, ("forward",))
    lists = torch.empty(2, 4096, 64, dtype=torch.int32, device="meta")
    add(*call(kv_indices=lists), 90)
    add(*call(kv_indices=lists[:, :, None].expand(-1, -1, 16, -1), kv_block_size=(1, 64)), 90)
    add(*latent_call(), 90, ("forward",))
    add(*call(), 100)
    policy = Policy(portable_only="a test")
    add(*call(), 80)
    add(*call(kv_indices=lists), 80, ("forward",))
    assert requests.keys() == {key for key in KERNELS if "dequantized" not in key[1]}
    compile_sound(list(requests.values()))


def calls_of(row: Row) -> Iterator[tuple[AttentionSpec, Operands]]:
    for dtype in (torch.bfloat16, None):  # as it is, and if its dtype is fp32, also in a half type
        arguments = make_case(row if dtype is None else row._replace(inputs={**row.inputs, "dtype": dtype}), "cpu").arguments
        has_gradients = not (row.pages or row.fp8)
        for name in ("q", "k", "v", "bias"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].detach().requires_grad_(has_gradients)
        yield on_sm_90(**arguments)


def check(spec: AttentionSpec, x: Operands) -> None:
    for direction in DIRECTIONS:
        if triton_backend.unsupported(spec, direction) is not None:
            continue
        choice = triton_backend.choice_of(spec, x, direction)
        assert choice is not None
        name = choice.family.name
        if x.kv_indices is not None:
            families = SPARSE_FORWARDS if direction == "forward" else SPARSE_BACKWARDS
        else:
            families = (FORWARDS if direction == "forward" else BACKWARDS)[spec.fp8 is not None]
        order = [family.name for family in families]
        assert [rejected for rejected, reason in choice.rejected if reason] == order[: order.index(name)]
        assert "keys" in choice.blocks
        ran = launched(spec, x, direction) & set.union(*KERNELS.values())
        assert ran == KERNELS[direction, name] if x.q.numel() else ran <= KERNELS[direction, name]


@pytest.mark.sample("policy")
@pytest.mark.parametrize("policy", [FORCED, MEASURED], ids=["forced", "measured"])
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for rows in ROWS.values() for name, row in rows.items()])
def test_what_is_chosen_is_launched(row: Row, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: policy)
    for spec, x in calls_of(row):
        check(spec, x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a call without max_seqlen, a mod that is traced again
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_chosen_for_a_drawn_call_is_launched(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: FORCED)
    check(*on_sm_90(**Call(draw_config(seed, WHERE), seed).arguments()))


def _invariant_call(dims: tuple[int, int], queries: int, keys: int, form: str, **more: Any) -> Forward:
    """A forward in 16 bits of three sequences, dense, packed or over pages of 16."""
    d_qk, d_v = dims
    shapes = ((queries, 8, d_qk), (keys, 2, d_qk), (keys, 2, d_v))
    q, k, v = (torch.empty(3, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    if form == "packed":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        more |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": queries, "max_seqlen_kv": keys}
    if form == "pages":
        k, v = (torch.empty(1024, 16, 2, d, dtype=torch.bfloat16, device="meta") for d in (d_qk, d_v))
        more |= {"page_table": lengths.new_empty(3, 600), "seqused_kv": lengths[1:], "max_seqlen_kv": keys}
    lse = torch.empty((8, 3 * queries) if form == "packed" else (3, 8, queries), device="meta")
    problem = Problem(q, k, v, softmax_scale=0.1, bottom_right=True, is_batch_invariant=True, **more)
    return Forward(problem, q.new_empty(*q.shape[:-1], d_v), lse)


@pytest.mark.parametrize("capability", [80, 90])
def test_a_batch_invariant_call_with_a_block_mask_runs_portable_kernels(capability: int) -> None:
    call = _invariant_call((128, 128), 300, 300, "dense")
    lists = [torch.empty(1, 1, 3, *columns, dtype=torch.int32, device="meta") for _ in range(4) for columns in ((), (3,))]
    masked = call._replace(problem=replace(call.problem, block_mask=BlockLists(*lists, 128, 128)))
    with pretended_device(capability, 132):
        assert choose(masked, Policy(ignores_measurements=True)).family.name == "portable"
        assert choose(call, Policy(ignores_measurements=True)).family.name != "portable"


@pytest.mark.parametrize(
    ("capability", "never_ran"), [(80, False), (86, False), (90, False), (90, True), (100, False), (100, True), (120, False)]
)
def test_no_length_and_no_form_chooses_the_key_blocks_of_a_batch_invariant_call(capability: int, never_ran: bool) -> None:
    policy = Policy(ignores_measurements=True, takes_what_never_ran=never_ran)
    scores: tuple[dict[str, Any], ...] = ({}, {"window_right": 0}, {"window_left": 99, "window_right": 0}, {"softcap": 5.0})
    for dims in ((64, 64), (80, 80), (128, 128), (192, 128), (512, 512)):
        for more in scores:
            found: dict[tuple[str, int], list[Any]] = {}
            for form in ("dense", "packed", "pages"):
                for queries, keys in ((1, 9000), (20, 300), (300, 300), (5000, 5000)):
                    with pretended_device(capability, 132):
                        choice = choose(_invariant_call(dims, queries, keys, form, **more), policy)
                    found.setdefault((choice.family.name, choice.tile.block_n), []).append((form, queries, keys))
            assert len(found) == 1, (dims, more, found)
