"""Delayed scaling of one attention layer: its state, its steps, and its bytes in a checkpoint."""

from __future__ import annotations

import contextlib
import io
import pickle

import torch
from torch import Tensor

from flexattn import compat, fp8
from flexattn.dispatch.neutral import making_state
from flexattn.integrations.te.recipe import current_step
from flexattn.warn import warn_once


def is_recomputed() -> bool:
    """Returns whether a backward runs in this thread, so that a forward is a checkpoint's recomputation."""
    return not torch.compiler.is_compiling() and compat.backward_id() != -1


class LayerScaling:
    """Owner of a layer's `flexattn.fp8.DelayedScaling`, which is created at the first call in FP8.

    It is not a submodule, because TransformerEngine's checkpoints lack the keys that its buffers would add to the state_dict.
    """

    def __init__(self, num_heads: int, num_heads_kv: int) -> None:
        self.heads = (num_heads, num_heads_kv)
        self.state: fp8.DelayedScaling | None = None
        self.loaded: dict[str, Tensor] | None = None  # tensors of a checkpoint, until a state exists
        self.step = 0  # step of the scales

    def state_for(self, recipe: fp8.Recipe, device: torch.device, is_training: bool) -> fp8.DelayedScaling:
        """Returns the state for a call. In training, each new outermost autocast advances it by a step."""
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
        """Returns scales and amax histories as bytes, uint8; empty if there is no state."""
        content = self.loaded if self.state is None else self.state.state_dict()
        if content is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        buffer = io.BytesIO()
        torch.save({name: t.cpu() for name, t in content.items()}, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def from_bytes(self, state: object) -> None:
        """Loads `to_bytes`'s result; any other state, such as TransformerEngine's own, resets the scales."""
        self.state, self.loaded = None, None
        if isinstance(state, io.BytesIO):
            content = state.getvalue()
        else:
            content = state.cpu().numpy().tobytes() if isinstance(state, Tensor) else b""
        if not content:
            return
        tensors = None
        if content.startswith(b"PK"):  # written by torch.save; other bytes are another library's
            with contextlib.suppress(pickle.UnpicklingError, RuntimeError):  # objects other than tensors, or truncated bytes
                tensors = torch.load(io.BytesIO(content), weights_only=True)
        if isinstance(tensors, dict) and set(tensors) == set(fp8.BUFFERS):
            self.loaded = tensors
        else:
            warn_once("extra state", "a checkpoint's FP8 state is not flexattn's; its attention scales start at 1")
