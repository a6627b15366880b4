"""Delayed scaling of one attention layer: its state, how it goes from step to step, and as bytes in a checkpoint."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from flexattn import fp8
from flexattn.dispatch.neutral import making_state
from flexattn.integrations.te.recipe import current_step
from flexattn.warn import warn_once


def is_recomputed() -> bool:
    """Returns whether a backward runs in this thread: what a checkpoint computes again is to be as it was in the forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class LayerScaling:
    """Keeper of a layer's `flexattn.fp8.DelayedScaling`, which is made at the first call in FP8.

    It is no submodule, as its buffers would be keys of the layer's state_dict that TransformerEngine's checkpoints do not have.
    """

    def __init__(self, num_heads: int, num_heads_kv: int) -> None:
        self.heads = (num_heads, num_heads_kv)
        self.state: fp8.DelayedScaling | None = None
        self.loaded: dict[str, Tensor] | None = None  # tensors of a checkpoint, until there is a state
        self.step = 0  # to which the scales belong

    def state_for(self, recipe: fp8.Recipe, device: torch.device, is_training: bool) -> fp8.DelayedScaling:
        """Returns the state for a call; in training it goes to the next step in each new outermost autocast."""
        state, step = self.state, current_step()
        if state is None or state.recipe != recipe or state.scale("q").device != device:
            before = self.loaded if state is None else state.state_dict()
            with making_state("the first call of a layer with delayed scaling"):
                state = fp8.DelayedScaling(recipe, *self.heads, device=device)
            if before is not None and all(t.shape == before[name].shape for name, t in state.state_dict().items()):
                state.load_state_dict(before)
            self.state, self.loaded = state, None
        if step != self.step and is_training and not is_recomputed():
            state.update()
            self.step = step
        return state

    def to_bytes(self) -> Tensor:
        """Returns scales and amax histories as bytes, uint8; none where there is no state."""
        content = self.loaded if self.state is None else self.state.state_dict()
        if content is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        buffer = io.BytesIO()
        torch.save({name: t.cpu() for name, t in content.items()}, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def from_bytes(self, state: Any) -> None:
        """Takes what `to_bytes` gave; with anything else, as TransformerEngine's own, the scales begin anew."""
        self.state, self.loaded = None, None
        if isinstance(state, io.BytesIO):
            content = state.getvalue()
        else:
            content = state.cpu().numpy().tobytes() if isinstance(state, Tensor) else b""
        if not content:
            return
        found = None
        if content.startswith(b"PK"):  # written by torch.save; other bytes are another library's
            with contextlib.suppress(pickle.UnpicklingError, RuntimeError):  # objects that are no tensors, or cut off
                found = torch.load(io.BytesIO(content), weights_only=True)
        if isinstance(found, dict) and set(found) == set(fp8.BUFFERS):
            self.loaded = found
        else:
            warn_once("extra state", "the FP8 state of a checkpoint is not flexattn's; its scales of attention begin at 1")
