"""Statistics that `attention(..., return_aux=AuxRequest(...))` returns beside out: the request, the result, and their pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat, ops
from flexattn.call_options import Arguments
from flexattn.dispatch.spec import Operands
from flexattn.dispatch.statistics import Statistics, Wanted, empty_statistics, statistics, triton_unsupported
from flexattn.first_order import guarded
from flexattn.validation import FP8_DTYPES, check_flag, describe


class AuxRequest(NamedTuple):
    """The statistics that `attention` returns with return_aux. lse and max_scores are also in torch's AuxRequest for FlexAttention.

    The weights are those before dropout, with the share of a sink taken off. lse and max_logit come from the forward itself. Each
    other field needs a second pass over the scores, in memory that grows linearly with the tokens.

    Args:
        lse (bool): whether to return lse.
        max_logit (bool): whether to return the largest score of each head.
        max_scores (bool): whether to return the largest score of each query.
        entropy (bool): whether to return the entropy of each query's weights.
        column_sums (bool): whether to return the weight of each key, summed over the queries.
        rows (Tensor, optional): int32 or int64 [n] or [b, n] on q's device: queries whose weights to return, counted within their
            sequence. An index outside of a sequence gives zeros.

    max_scores and entropy cost one product q k^T, and column_sums one more. For float32 and for scores with a bias, ALiBi or a
    score_mod, column_sums and rows need the first product too. Triton kernels or torch operations compute them, whatever backend
    runs the forward; `explain(..., return_aux=...).details` says which. Pages are copied in order first.

    A backward through any field of the result but lse raises RuntimeError. Under torch.compile these fields require no gradient.
    FP8 and kv_indices allow lse and max_logit only. DTensors, `flexattn.distributed` and `flexattn.jax` do not take return_aux.

    Examples:
        H2O keeps the keys with the largest column sums in a cache. SnapKV sums over the last queries in a
        call of their own:

        >>> import torch
        >>> from flexattn import AuxRequest, attention
        >>> q, k, v = torch.randn(3, 2, 64, 8, 16)
        >>> request = AuxRequest(entropy=True, column_sums=True, rows=torch.tensor([62, 63]))
        >>> out, aux = attention(q, k, v, causal=True, return_aux=request)
        >>> aux.entropy.shape, aux.column_sums.shape, aux.row_weights.shape
        (torch.Size([2, 8, 64]), torch.Size([2, 8, 64]), torch.Size([2, 8, 2, 64]))
        >>> request = AuxRequest(column_sums=True)
        >>> recent = attention(q[:, -16:], k, v, attn_mask_type="causal_bottom_right", return_aux=request).aux
        >>> kept = recent.column_sums.topk(32).indices
    """

    lse: bool = False
    max_logit: bool = False
    max_scores: bool = False
    entropy: bool = False
    column_sums: bool = False
    rows: Tensor | None = None


class AuxOutput(NamedTuple):
    """The statistics of a call; None if `AuxRequest` does not ask for one. All are float32, or float64 for float64.

    Args:
        lse (Tensor): as `attention` returns it with return_lse. Differentiable.
        max_logit (Tensor): as `attention` returns it with return_max_logit.
        max_scores (Tensor): lse's shape: the largest visible score of each query, -inf if none is visible.
        entropy (Tensor): lse's shape: -sum_j p_j log(p_j), in nats, of the weights p_j of the keys. A sink is no term of the sum.
        column_sums (Tensor): [b, h, skv], or [h, t_kv] for keys in "thd": sum_i p_ij for each key j.
        row_weights (Tensor): [b, h, n, skv]: the weights of the queries in `rows`. For "thd" and pages skv is
            max_seqlen_kv, for "thd" at most the next power of two of all tokens.
    """

    lse: Tensor | None = None
    max_logit: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None
    column_sums: Tensor | None = None
    row_weights: Tensor | None = None


class OutAux(NamedTuple):
    """Result of `attention` with return_aux."""

    out: Tensor
    aux: AuxOutput


for _kind in (AuxOutput, OutAux):
    compat.register_namedtuple(_kind, f"flexattn.{_kind.__name__}")

_FLAGS = AuxRequest._fields[:-1]
_operator = torch.ops.flexattn.attention_statistics.default


def check_request(request: AuxRequest, q: Tensor, k: Tensor, batch: int, arguments: Arguments) -> None:
    """Raises ValueError or TypeError for a request that has no meaning, or that the other arguments do not combine with."""
    if not isinstance(request, AuxRequest):
        raise TypeError(f"return_aux is {describe(request)}; accepted: a flexattn.AuxRequest, or None")
    for name in _FLAGS:
        check_flag(f"return_aux.{name}", getattr(request, name))
    for name in ("return_lse", "return_max_logit"):
        if arguments[name]:  # type: ignore[literal-required]
            field = name.removeprefix("return_")
            raise ValueError(f"{name} is True and return_aux is given; accepted: one of them, such as AuxRequest({field}=True)")
    rows = request.rows
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"return_aux.rows is {describe(rows)}; accepted: an int32 or int64 tensor, or None")
        if rows.device != q.device:
            raise ValueError(f"return_aux.rows is on {rows.device} and q is on {q.device}; accepted: the same device")
        if rows.dim() not in (1, 2) or (rows.dim() == 2 and rows.shape[0] not in (1, batch)):
            raise ValueError(f"return_aux.rows has shape {tuple(rows.shape)}; accepted: [n] or [b, n] with b = {batch}")
    asked = ", ".join(_of_second_pass(request))
    if not asked:
        return
    if arguments["fp8_recipe"] is not None or q.dtype in FP8_DTYPES or k.dtype in FP8_DTYPES:
        raise ValueError(f"return_aux asks for {asked} and the call is in FP8; accepted there: lse and max_logit")
    if arguments["kv_indices"] is not None:
        raise ValueError(
            f"return_aux asks for {asked} and kv_indices is given; accepted there: lse and max_logit; flexattn.key_weights returns "
            "the weights of listed keys"
        )


def _of_second_pass(request: AuxRequest) -> list[str]:
    """Returns the fields that the forward does not make."""
    asked = [name for name in _FLAGS[2:] if getattr(request, name)]
    return asked if request.rows is None else [*asked, "rows"]


def runs_on(x: Operands, settings: ops.Settings, request: AuxRequest) -> str | None:
    """Returns "triton", "torch operations" with the reason, or None if the forward makes all statistics."""
    if not _of_second_pass(request):
        return None
    reason = triton_unsupported(ops.spec_to_run(x, settings), settings.backend)
    return "triton" if reason is None else f"torch operations, because {reason}"


def out_and_aux(
    request: AuxRequest, x: Operands, settings: ops.Settings, results: tuple[Any, Tensor | None, Tensor | None]
) -> OutAux:
    """Returns the result of a call with return_aux. results: its out, lse and max_logit."""
    out, lse, max_logit = results
    aux = AuxOutput(lse=lse if request.lse else None, max_logit=max_logit if request.max_logit else None)
    if not _of_second_pass(request):
        return OutAux(out, aux)
    assert lse is not None
    tensors = ops.tensors_of(x)
    if ops.is_differentiated((*tensors, request.rows)):
        raise RuntimeError(
            "return_aux under a transform of torch.func or forward-mode AD has lse and max_logit alone; call attention() for the "
            "other statistics outside of the transform"
        )
    with torch.no_grad():
        plain = x._replace(out=None, dropout_p=0.0, rng_state=None)
        fixed = settings._replace(needs_grad=False, needs_bias_grad=False, return_max_logit=False, batch_invariant=False)
        found = Statistics(*_operator(lse.detach(), request.rows, *request[2:-1], *plain, *fixed))
    wanted = {
        "max_scores": found.max_scores if request.max_scores else None,
        "entropy": found.entropy if request.entropy else None,
        "column_sums": found.column_sums if request.column_sums else None,
        "row_weights": None if request.rows is None else found.row_weights,
    }
    if settings.needs_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # torch.compile would differentiate all results, so there they have no gradient
        sources = [t for t in tensors if t is not None and t.requires_grad]
        wanted = {name: _without_gradient(name, t, sources) for name, t in wanted.items()}
    return OutAux(out, aux._replace(**wanted))


def _without_gradient(name: str, statistic: Tensor | None, sources: Sequence[Tensor]) -> Tensor | None:
    """Returns a statistic whose gradient raises, because a gradient that is silently missing is a wrong one."""
    message = (
        f"aux.{name} of attention() has no gradient, and one is asked for; accepted: aux.{name}.detach() in a loss; aux.lse is "
        "differentiable"
    )
    return guarded((statistic,), *sources, message=message)[0]


def attention_statistics_implementation(
    lse: Tensor, rows: Tensor | None, max_scores: bool, entropy: bool, column_sums: bool, *call: object
) -> tuple[Tensor, ...]:
    x, settings = ops.call_of(call)
    wanted = Wanted(rows, max_scores, entropy, column_sums)
    return statistics(ops.spec_to_run(x, settings), settings.backend, x, lse, wanted)


def attention_statistics_fake(
    lse: Tensor, rows: Tensor | None, max_scores: bool, entropy: bool, column_sums: bool, *call: object
) -> tuple[Tensor, ...]:
    x, settings = ops.call_of(call)
    return empty_statistics(ops.make_spec(x, settings, None), x, lse, Wanted(rows, max_scores, entropy, column_sums))
