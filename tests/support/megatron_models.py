"""Small models of Megatron-Core with random weights on a CPU, and their losses while they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

VOCABULARY, LONGEST = 96, 64


def run_on_a_cpu(patch: Any) -> None:
    """Makes Megatron's buffers, indices and trackers of random numbers take the CPU, where it expects a current GPU."""
    make = torch.tensor
    patch.setattr(torch, "tensor", lambda *args, pin_memory=False, **options: make(*args, **options))
    patch.setattr(Tensor, "cuda", lambda self, *_, **__: self)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
    patch.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    patch.setattr(megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))


def start(ranks: int = 1, cp: int = 1, **groups: Any) -> None:
    """Makes Megatron's process groups, and its tracker of random numbers."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp, **groups)
    tracker = megatron_random.get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", 1)
    assert torch.distributed.get_world_size() == ranks


def config_of(is_mla: bool = False, **options: Any) -> Any:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    settings: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False} | options
    if is_mla:
        mla = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
        return MLATransformerConfig(**sizes, **settings, **mla, rope_type="rope")
    return TransformerConfig(**sizes, num_query_groups=2, **settings)


def build(config: Any, spec: Any = None) -> nn.Module:
    """Returns a GPT with weights of seed 0."""
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec() if spec is None else spec
    model: nn.Module = GPTModel(config, spec, VOCABULARY, LONGEST, position_embedding_type="rope", parallel_output=False)
    return model


def batch_of(tokens: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Returns tokens and labels, [batch, tokens]."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randint(0, VOCABULARY, (2, batch, tokens), generator=generator)
    return inputs, labels


def packed_of(lengths: Sequence[int]) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Returns the sum over the tokens of the cross entropy."""
    positions = options.pop("positions", torch.arange(tokens.shape[1]).expand_as(tokens))
    logits = model(tokens, positions, mask, **options)  # [b, s, vocabulary]; Megatron's own loss changes them in place
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def causal_mask(tokens: int) -> Tensor:
    """Returns the mask that Megatron's data loaders make; its own attention would make one on a GPU."""
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def losses(model: nn.Module, lengths: Sequence[int], steps: int = 3, is_packed: bool = False, batch: int = 1) -> list[float]:
    """Returns the loss of each training step on one batch of documents: packed, or each a call of its own."""
    tokens, labels = batch_of(sum(lengths), batch)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        if is_packed:
            loss = loss_of(model, tokens, labels, positions=positions_of(lengths), packed_seq_params=packed_of(lengths))
        else:
            parts = zip(tokens.split(list(lengths), 1), labels.split(list(lengths), 1), strict=True)
            loss = torch.stack([loss_of(model, *part, causal_mask(part[0].shape[1])) for part in parts]).sum()
        optimizer.zero_grad()
        (loss / tokens.numel()).backward()
        optimizer.step()
        found.append(float(loss.detach()) / tokens.numel())
    return found
