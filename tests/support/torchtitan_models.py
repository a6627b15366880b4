"""Small models of torchtitan with random weights, and their losses while they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ranks
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.models.common import attention as titan
from torchtitan.models.common import decoder
from torchtitan.models.llama3 import model_registry

VOCABULARY = 2048
OWN: dict[str, Any] = {"varlen": titan.VarlenAttention, "flex": titan.FlexAttention, "sdpa": titan.ScaledDotProductAttention}


def create_masks_without_compiling() -> None:
    """Makes torchtitan and torch's context parallelism call `create_block_mask` itself, because to compile it takes a minute."""
    torch_ranks._compiled_create_block_mask = create_block_mask  # type: ignore[assignment]
    decoder.create_attention_mask = create_block_mask


def config_of(inner: Any, layers: int = 2) -> Any:
    """Returns the configuration of torchtitan's debug model with fewer layers, whose attention has the configuration inner."""
    config = model_registry("debugmodel", attn_backend="flex").model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = inner
    return config


def build(config: Any) -> nn.Module:
    """Returns the model with weights of seed 0."""
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_states(buffer_device=torch.device("cpu"))  # type: ignore[operator]
    return model


def batch_of(lengths: Sequence[int], batch: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, labels and positions, [batch, tokens], of packed documents; their lengths are the same in each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, batch, sum(lengths)), generator=generator)
    return tokens, labels, torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1).contiguous()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], masks: Any) -> Tensor:
    """Returns the sum over the tokens of the cross entropy."""
    tokens, labels, positions = batch
    logits = model(tokens, positions, masks)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def losses(model: nn.Module, lengths: Sequence[int], steps: int = 3, is_split: bool = False) -> list[float]:
    """Returns the loss of each training step on one batch.

    is_split: whether each document is a call of its own, for attention that knows no documents.
    """
    batch, found = batch_of(lengths), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        if is_split:
            parts = zip(*(x.split(list(lengths), 1) for x in batch), strict=True)
            loss = torch.stack([loss_of(model, part, None) for part in parts]).sum()
        else:
            loss = loss_of(model, batch, model.get_attention_masks(batch[2]))  # type: ignore[operator]
        optimizer.zero_grad()
        (loss / batch[0].numel()).backward()
        optimizer.step()
        found.append(float(loss.detach()) / batch[0].numel())
    return found
