"""FP8's part of a cached call: quantisation before and after attention, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import fp8, fp8_ops, ops, validation
from flexattn.dispatch import triton_backend
from flexattn.dispatch.select import Backend
from flexattn.dispatch.spec import Flat, Gradients, Operands
from flexattn.fp8_ops import Delayed, Passes, QuantizeConfig

_DESCALES = 3  # descales of q, k and v, before a state's tensors
_COPIES = 2  # q and k in 16 bits
_BACKWARD = ("out", "lse", "max_logit", "q", "k", "v", "descale_q", "descale_k", "descale_v")  # results of a forward before one


class Fp8Steps:
    """Composes the steps of a call in FP8 around `attend`, which runs attention on operands that a backend takes.

    Such a call has tensors behind its operands (`more`): the descale arguments of q, k and v and the buffers of a `DelayedScaling`.
    A backward in FP8 has the descales of q, k and v, q and k in 16 bits, and dout's scale and history. If only keys and values are
    in FP8, as in a cache, there may be none.
    """

    def __init__(
        self, config: QuantizeConfig | None, recipe: fp8.Recipe | None, settings: ops.Settings, device: torch.device
    ) -> None:
        """config: how q, k and v are quantised, or None if they are in FP8."""
        self.config, self.recipe, self.settings, self.device = config, recipe, settings, device
        self.is_delayed = recipe is not None and recipe.scaling == "delayed"
        self.quantizes_out = recipe is not None and recipe.out_dtype in validation.FP8_DTYPES
        self.has_backward = settings.needs_grad and not settings.bf16_backward
        self.num_results = 5 if self.quantizes_out else len(_BACKWARD) if self.has_backward else 3
        runs_kernels = config is not None or self.quantizes_out
        self.can_be_recorded = not (runs_kernels and triton_backend.quantises_unrecorded(device))

    def forward(self, x: Operands, more: Sequence[Tensor | None], attend: Callable[[Operands], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns out, lse, max_logit; then the descale and amax of an out in FP8, or q, k, v and descales for a backward."""
        delayed = Delayed(*more[_DESCALES:]) if self.is_delayed else Delayed()
        if self.config is None:
            x = self._with_descales(x, more)
        else:
            x = fp8_ops.quantize_inputs(x, self.settings.qkv_format, self.config, delayed, fp8_ops.FUNCTIONS)
        out, lse, max_logit = attend(x)
        if self.quantizes_out:
            assert self.recipe is not None
            found = fp8.quantize_out(out, x, self.settings, self.recipe, delayed, fp8_ops.FUNCTIONS)
            return found.data, lse, max_logit, found.descale, found.amax
        if self.has_backward:
            return out, lse, max_logit, x.q, x.k, x.v, *x.descales
        return out, lse, max_logit

    def outputs(self, results: Flat) -> tuple[Any, Tensor, Tensor | None]:
        """Returns out, lse and max_logit from the results of `forward`. If out is in FP8, it is a QuantizedTensor."""
        out, lse, max_logit, *more = results
        if self.quantizes_out:
            assert self.recipe is not None
            descale, amax = more
            out = fp8.QuantizedTensor(out, descale, amax, block_rows=self.recipe.rows)
        return out, lse, max_logit

    def backward(
        self, x: Operands, more: Flat, dout: Tensor, passes: Passes, attend: Callable[[Operands, Tensor], Gradients]
    ) -> Gradients:
        """Returns the gradients of operands that `saved_places` saved."""
        if not self.has_backward or self.config is None:
            return attend(x, dout)
        *_, scale, history = more
        delayed = Delayed(scale_dout=scale, history_dout=history)
        x = x._replace(descales=more[:_DESCALES], copies16=_copies(more))
        return fp8_ops.gradients(x, self.settings.qkv_format, self.config, delayed, dout, passes, attend)

    def saved_places(self, places: Sequence[int | None], first: int) -> list[int | None]:
        """Returns the place of each tensor of a backward in (*results, *inputs of the forward), or None if it is not saved.

        places: of the operands. first: the place of the first tensor in `more`.
        """
        if not self.has_backward or self.config is None:
            return list(places)
        first_input = self.num_results
        copies = [first_input, first_input + 1] if self.config.keeps_16_bit else [None] * _COPIES
        scale = first + _DESCALES + fp8.BUFFERS.index("scale_dout") if self.is_delayed else None
        qkv, descales = range(3, 6), range(6, 6 + _DESCALES)
        return [*qkv, *places[3:], *descales, *copies, scale, None]

    def history_place(self, first: int) -> int | None:
        """Returns the place of dout's history among the forward's inputs. It is not saved, because it changes."""
        if not (self.has_backward and self.is_delayed):
            return None
        return first + _DESCALES + fp8.BUFFERS.index("amax_history_dout")

    def as_run(self, x: Operands, more: Sequence[Tensor | None]) -> Operands:
        """Returns operands like those of the forward's backend. The values of quantised tensors are missing."""
        if self.config is None:
            return self._with_descales(x, more)
        planned = fp8_ops.planned(x, self.settings, self.config)
        return planned._replace(descales=planned.descales[:_DESCALES])

    def backward_as_run(self, x: Operands, more: Flat, dout: Tensor) -> Operands:
        """Returns operands like those of the backward's backend. The value of dout's descale is missing."""
        if not self.has_backward or self.config is None:
            return x
        descales, copies = list(more[:_DESCALES]), _copies(more)
        if self.config.quantises_dout:  # dout's descale has the layout of q's
            descales, copies = [*descales, descales[0]], [dout, *copies]
        return x._replace(descales=descales, copies16=copies)

    def quantizer_beside(self, backend: Backend) -> Backend | None:
        """Returns the backend that quantises beside another one, or None if that is the same or if torch's operators quantise."""
        triton: Any = triton_backend
        return triton if backend is not triton and triton_backend.can_be_recorded() else None

    def _with_descales(self, x: Operands, more: Sequence[Tensor | None]) -> Operands:
        descales = tuple(more[:_DESCALES]) or (None,) * _DESCALES
        if x.q.dtype not in validation.FP8_DTYPES:
            return x._replace(descales=[validation.as_cache_scales(t, x.k) for t in descales[1:]])
        return x._replace(descales=[validation.as_scales(t, self.device) for t in descales])


class BackwardSteps(Fp8Steps):
    """FP8's part of a separate backward. Its q, k and v are in FP8, so nothing is quantised around it.

    The descales of q, k and v follow the operands, then those of dout and dout in 16 bits, which are None if dout is in 16 bits.
    """

    def __init__(self, settings: ops.Settings, device: torch.device) -> None:
        super().__init__(None, None, settings, device)

    def operands(self, x: Operands, more: Flat) -> Operands:
        """Returns operands in the form that a backend takes."""
        *given, descale_dout, dout16 = more
        descales = [validation.as_scales(t, self.device) for t in given]
        if descale_dout is None:
            return x._replace(descales=descales)
        return x._replace(descales=[*descales, descale_dout], copies16=[dout16])

    def backward(
        self,
        x: Operands,
        more: Sequence[Tensor | None],
        dout: Tensor,
        passes: Passes,
        attend: Callable[[Operands, Tensor], Gradients],
    ) -> Gradients:
        """Returns the gradients of operands with their descales."""
        return attend(self.operands(x, more), dout)

    def backward_as_run(self, x: Operands, more: Sequence[Tensor | None], dout: Tensor) -> Operands:
        """Returns the operands, see `operands`."""
        return self.operands(x, more)


def _copies(more: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in more[_DESCALES : _DESCALES + _COPIES] if t is not None]
