"""FP8 in local calls: inputs are FP8, with descales of the full sequence. Gradients are computed in FP8 and summed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn import backward, fp8
from flexattn.backward import Given, GivenInFp8, Gradients
from flexattn.dispatch.quantization import num_blocks
from flexattn.dispatch.spec import Fp32Gradients, Results
from flexattn.fp8_ops import QuantizeConfig


class Fp8Call(NamedTuple):
    """FP8 settings of a call over ranks."""

    recipe: fp8.Recipe
    config: QuantizeConfig | None  # None: q, k and v are FP8 already
    state: fp8.DelayedScaling | None
    out_dtype: torch.dtype  # dtype of the outputs of local calls
    local_rows: int  # Rows that share a scale in a local call. 0 if scales are not by blocks.

    @property
    def part_recipe(self) -> fp8.Recipe:
        """The recipe of a local call, whose tensors are FP8 already."""
        if self.local_rows:
            return fp8.Recipe(granularity="block", block_rows=self.local_rows, out_dtype=self.out_dtype)
        return fp8.Recipe(out_dtype=self.out_dtype)


class Span(NamedTuple):
    """Sequences of a call on one side: documents (None if dense), first positions, and the length of the longest."""

    document: Tensor | None
    start: Tensor
    longest: int


def local_descale(descale: Tensor, span: Span, heads: Tensor | None, rows: tuple[int, int]) -> Tensor:
    """Returns the part of a descale that a call needs. heads: of the call; None: all. rows: per scale, globally and locally."""
    if span.document is not None and descale.shape[0] > 1:
        descale = descale.index_select(0, span.document)
    if heads is not None and descale.shape[1] > 1:
        descale = descale.index_select(1, heads)
    global_rows, local = rows
    if not local:
        return descale.contiguous()
    first = torch.arange(num_blocks(span.longest, local), device=descale.device) * local
    block = ((span.start.view(-1, 1) + first) // global_rows).clamp(max=descale.shape[2] - 1).long()  # [sequences | 1, blocks]
    batch = max(descale.shape[0], block.shape[0])
    block = block[:, None].expand(batch, descale.shape[1], -1)
    return descale.expand(batch, -1, -1).gather(2, block)


def differentiate(
    operands: Given,
    fp8_call: Fp8Call,
    descales: Sequence[Tensor],
    dout8: Tensor | None,
    arguments: dict[str, object],
    fp32: Fp32Gradients,
) -> Gradients:
    """Returns the gradients of a local call in FP8. descales: for q, k and v, and for dout8 if there is one.

    fp32: gradients in float32, one of `FP32_GRADIENTS`.
    """
    grad_dtype = str(fp8_call.recipe.grad_dtype).removeprefix("torch.")
    descale_dout, dout16 = None, None
    if dout8 is not None:
        descale_dout, dout16, operands = descales[3], operands.dout, operands._replace(dout=dout8)
    in_fp8 = GivenInFp8(fp8_call.part_recipe, grad_dtype, descales[:3], descale_dout, dout16, is_part=True)
    return backward.differentiate(Results(fp32=fp32), operands, arguments, in_fp8)
