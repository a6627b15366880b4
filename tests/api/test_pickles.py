"""Objects that are copied or pickled, at any time of their use, work as the original does from then on."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import inspect
import io
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexattn import (
    AuxOutput,
    AuxRequest,
    OutAux,
    OutLse,
    OutLseMaxLogit,
    OutMaxLogit,
    PagedKVCache,
    SelectedKeys,
    Window,
    attention,
    create_block_mask,
    distributed,
    fp8,
    mods,
    nn,
)
from flexattn.block_mask import BLOCK_TENSORS as LISTS
from flexattn.integrations import te

HEADS, HEADS_KV, DIM, TOKENS = 4, 2, 8, 32
PUBLIC = ("flexattn", "flexattn.fp8", "flexattn.mods", "flexattn.nn", "flexattn.distributed", "flexattn.integrations.te")


def through_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle protocol 2": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_file,
}


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class PagedCache(NamedTuple):
    cache: PagedKVCache

    @classmethod
    def make(cls) -> PagedCache:
        cache = PagedKVCache([torch.zeros(2, 12, 4, HEADS_KV, DIM)], max_sequences=5, max_length=16)
        made = cls(cache)
        cache.add()
        made.use(5)
        return made

    def use(self, count: int = 1) -> Tensor:
        """Another sequence joins, so that lengths and tables differ from those of an earlier copy."""
        cache = self.cache
        cache.add()
        new = dict.fromkeys(cache.sequences, count)
        cache.step(new)
        total = sum(new.values())
        cache.append(0, tokens(total, HEADS_KV, DIM, seed=1), tokens(total, HEADS_KV, DIM, seed=2))
        return attention(tokens(total, HEADS, DIM), *cache.pools[0], **cache.arguments(), backend="eager")


class TeCache(NamedTuple):
    cache: te.InferenceParams

    @classmethod
    def make(cls, **pages: Any) -> TeCache:
        made = cls(te.InferenceParams(5, 16, HEADS_KV, DIM, torch.float32, **pages))
        made.use()
        return made

    def use(self) -> Tensor:
        names = [*self.cache.sequences, f"s{len(self.cache.sequences)}"]
        self.cache.pre_step(dict.fromkeys(names, 2))
        k, v = tokens(len(names), 2, HEADS_KV, DIM, seed=1), tokens(len(names), 2, HEADS_KV, DIM, seed=2)
        step = self.cache.step(1, k, v, "bshd")
        more = {"page_table": self.cache.page_table("cpu")} if self.cache.is_paged else {}
        lengths = {"seqused_kv": step.cu_seqlens_kv.diff(), "attn_mask_type": "padding_causal_bottom_right"}
        return attention(tokens(len(names), 2, HEADS, DIM), step.k, step.v, **lengths, **more, backend="eager")


class Scaling(NamedTuple):
    state: fp8.DelayedScaling

    @classmethod
    def make(cls) -> Scaling:
        made = cls(fp8.DelayedScaling(fp8.Recipe(scaling="delayed"), HEADS, HEADS_KV))
        made.use()
        return made

    def use(self) -> Tensor:
        q, k, v = (tokens(1, TOKENS, h, 16, seed=h, dtype=torch.bfloat16) for h in (HEADS, HEADS_KV, HEADS_KV))
        out = attention(q, k, v, fp8_recipe=self.state.recipe, fp8_state=self.state, backend="eager")
        self.state.update()
        return torch.cat((out.flatten().float(), self.state.history("q").flatten(), self.state.scale("k")))


def hides_most(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


class BlockMask(NamedTuple):
    """Returns a block mask whose lists were changed in place after a call had read them."""

    block_mask: Any

    @classmethod
    def make(cls) -> BlockMask:
        made = cls(create_block_mask(hides_most, None, None, TOKENS, TOKENS, "cpu", 16))
        made.attend()
        made.block_mask.kv_num_blocks.zero_()
        return made

    def attend(self) -> Tensor:
        return attention(tokens(1, TOKENS, 1, DIM), *tokens(2, 1, TOKENS, 1, DIM), block_mask=self.block_mask, backend="eager")

    def use(self) -> Tensor:
        out = self.attend()
        self.block_mask.full_kv_num_blocks.zero_()
        return torch.cat((out, self.attend()))


class OfPlan(NamedTuple):
    plan: distributed.Plan

    @classmethod
    def make(cls) -> OfPlan:
        return cls(distributed.plan(2, length=TOKENS, attn_mask_type="causal"))

    def use(self) -> Tensor:
        return torch.tensor([*bytes.fromhex(self.plan.digest), int(self.plan.work("ring").received)])


class Called(NamedTuple):
    """A module, which is called with tensors of these shapes."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def use(self) -> Tensor:
        more = {"need_weights": False} if isinstance(self.function, nn.MultiheadAttention) else {}
        out = self.function(*(tokens(*shape, seed=i) for i, shape in enumerate(self.shapes)), **more)
        return out[0] if isinstance(out, tuple) else out


class Modified(NamedTuple):
    score_mod: Any

    def use(self) -> Tensor:
        return attention(*tokens(3, 1, TOKENS, HEADS, DIM), score_mod=self.score_mod, backend="eager")


class Value(NamedTuple):
    """A value without behaviour of its own."""

    value: Any

    def use(self) -> Tensor:
        found = [t.float().flatten() for t in tensors_in(self.value)]
        return torch.cat([torch.tensor([float(len(repr(type(self.value))))]), *found])


def soft(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.mul(a=score, b=tensors["factor"])


def quantized() -> fp8.QuantizedTensor:
    return fp8.quantize(tokens(1, TOKENS, HEADS, 16))


MAKERS: dict[str, Callable[[], Any]] = {
    "PagedKVCache": PagedCache.make,
    "InferenceParams": TeCache.make,
    "InferenceParams in pages": lambda: TeCache.make(is_paged=True, total_num_pages=12, page_size=4),
    "DelayedScaling": Scaling.make,
    "BlockMask": BlockMask.make,
    "Plan": OfPlan.make,
    "Attention": lambda: Called(nn.Attention(32, 4), ((1, 5, 32),)),
    "MultiheadAttention": lambda: Called(nn.MultiheadAttention(32, 4, batch_first=True).eval(), ((1, 5, 32),) * 3),
    "DotProductAttention": lambda: Called(te.DotProductAttention(HEADS, DIM, qkv_format="bshd"), ((1, 5, HEADS, DIM),) * 3),
    "TEScoreMod": lambda: Modified(te.TEScoreMod(soft, score_mod_tensors={"factor": torch.tensor(0.5)})),
    "mods": lambda: Modified(mods.relative_bias(tokens(32, HEADS))),
    "Recipe": lambda: Value(fp8.Recipe()),
    "QuantizedTensor": lambda: Value(quantized()),
    "Float8Tensor": lambda: Value(te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(tokens(1, 5, HEADS, 16))),
    "Float8Quantizer": lambda: Value(te.Float8Quantizer(torch.ones(1), torch.zeros(1), torch.float8_e4m3fn)),
    "Float8CurrentScalingQuantizer": lambda: Value(te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)),
    "Rates": lambda: Value(distributed.Rates()),
    "AttentionParams": lambda: Value(te.AttentionParams()),
    "Window": lambda: Value(Window(3, 0)),
    "SelectedKeys": lambda: Value(SelectedKeys(torch.zeros(2, 3, dtype=torch.int32), tokens(2, 3))),
    "OutLse": lambda: Value(OutLse(tokens(3), tokens(2))),
    "OutAux": lambda: Value(OutAux(tokens(3), AuxOutput(lse=tokens(2)))),
    "AuxOutput": lambda: Value(AuxOutput(entropy=tokens(2))),
    "AuxRequest": lambda: Value(AuxRequest(entropy=True, rows=torch.tensor([1, 2]))),
    "OutMaxLogit": lambda: Value(OutMaxLogit(tokens(3), tokens(2))),
    "OutLseMaxLogit": lambda: Value(OutLseMaxLogit(tokens(3), tokens(2), tokens(2))),
}
# Classes of a call's arguments and results, without tensors that share memory.
PLAIN = {"AttentionSpec", "BackendError", "Gradients"}


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yields the tensors of an object and of all that its attributes lead to, in a fixed order."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from tensors_in(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(x) or (hasattr(x, "__dict__") and not isinstance(x, type) and not callable(x)):
        for value in vars(x).values():
            yield from tensors_in(value)


def shared(x: Any) -> list[int]:
    """Returns for each tensor the first one that lies in the same memory."""
    storages = [t.untyped_storage().data_ptr() for t in tensors_in(x)]
    return [storages.index(at) for at in storages]


@pytest.mark.sample("name", "how", values=False)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_works_as_the_original_does(name: str, how: str) -> None:
    if name == "QuantizedTensor" and how.startswith("pickle"):
        return  # torch pickles no float8 tensor but by torch.save
    original = MAKERS[name]()
    made = type(original)(COPIES[how](original[0]), *original[1:])
    for _ in range(2):
        got, wanted = made.use(), original.use()
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("how", COPIES)
def test_attributes_that_share_memory_share_it_in_a_copy(how: str) -> None:
    original = PagedCache.make().cache
    own = [original._on_device, *(getattr(original, name) for name in ("page_table", "seqused_before", "cu_seqlens_q"))]
    assert shared(own) == [0, 0, 0, 0]
    made = COPIES[how](original)
    own = [made._on_device, *(getattr(made, name) for name in ("page_table", "seqused_before", "cu_seqlens_q"))]
    assert shared(own) == [0, 0, 0, 0]
    assert made._on_device.untyped_storage().data_ptr() != original._on_device.untyped_storage().data_ptr()


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_block_mask_has_lists_of_its_own(how: str) -> None:
    """The original's lists belong to an old version of its tensors, and a copy's tensors begin with that version."""
    original = BlockMask(create_block_mask(hides_most, None, None, TOKENS, TOKENS, "cpu", 16))
    for name in LISTS:
        t = getattr(original.block_mask, name)
        while t._version < COPIES[how](t)._version:
            t.add_(0)
    original.attend()
    original.block_mask.kv_num_blocks.zero_()
    made = BlockMask(COPIES[how](original.block_mask))
    assert torch.equal(made.attend(), original.attend())


def test_every_public_class_is_here() -> None:
    found = set()
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and not issubclass(value, (enum.Enum, Exception)):
                found.add(name)
    assert found - PLAIN - {"QKVFormat", "QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType"} <= MAKERS.keys()


def _use_in_child(cache: PagedKVCache, results: Any) -> None:
    results.put(PagedCache(cache).use().tolist())


@pytest.mark.slow
def test_a_spawned_process_uses_a_cache() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    original = PagedCache.make()
    process = context.Process(target=_use_in_child, args=(original.cache, results))
    process.start()
    got = torch.tensor(results.get(timeout=120))
    process.join()
    torch.testing.assert_close(got, original.use())
