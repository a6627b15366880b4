"""Pictures of a call's mask: the keys that each query sees, and the scores that the call changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch.spec import AttentionSpec, Operands, batch_size
from flexattn.functional import bind_call
from flexattn.validation import check_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flexattn.dispatch.reference import Sequences

MOST_POINTS = 512  # the most points of a picture's side
MOST_AT_ONCE = 1 << 22  # scores in memory at a time
HIDDEN, SEEN, EDGE = "#e3e7ea", "#3949ab", "#90a4ae"
NEG_INF = float("-inf")


def plot_mask(
    q: Tensor, k: Tensor, v: Tensor, *, batch: int | None = None, head: int = 0, ax: Axes | None = None, **call: object
) -> Axes:
    """Draws the keys that each query of an `attention` call sees: a row for a query, a column for a key. No attention is computed.

    Hidden keys are grey. Visible keys have one colour. If score_mod, a bias or ALiBi changes scores by position, the colour is
    their result for a score of 0; the values in q and k have no effect. The function needs matplotlib:
    `pip install "flexattn[bench]"`. If there are more than 512 queries or keys, it draws every second, third, and so on.

    Args:
        q, k, v: as for `attention`.
        batch: the sequence to draw. None: the first one, or all of them if queries and keys are packed ("thd").
        head: the query head to draw.
        ax: matplotlib's Axes to draw into. None creates a figure.
        call: the other arguments of `attention`.

    Returns:
        The Axes; `ax.figure.savefig("mask.png")` writes the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: errors of `attention`; batch or head is out of range; there is no query or no key to draw.

    Examples:
        >>> import torch
        >>> from flexattn import mods, plot_mask
        >>> q = k = v = torch.zeros(1, 64, 4, 16)
        >>> ax = plot_mask(q, k, v, attn_mask_type="causal", window_size=(16, 0))
        >>> ax = plot_mask(q, k, v, mask_mod=mods.natten_2d(8, 8, 3))
    """
    from flexattn.dispatch.pages import without_pages  # a late import: importing flexattn should not import it

    x, settings = bind_call(q, k, v, **call)
    spec, x = without_pages(ops.spec_to_run(x, settings), x)
    for name, value, count in (("batch", 0 if batch is None else batch, batch_size(spec, x)), ("head", head, spec.num_heads)):
        check_count(name, value, 0, f"an int from 0 to {count - 1}, because the call has {count}", count - 1)
    rows, columns = _tokens(spec, x, batch)
    if not rows or not columns:
        raise ValueError(f"there are {len(rows)} queries and {len(columns)} keys to draw; accepted: at least one of each")
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as e:
            raise ImportError("plot_mask needs matplotlib, which is not installed: pip install 'flexattn[bench]'") from e
        _, ax = pyplot.subplots(figsize=(4.4, 3.8), layout="compressed")
    _draw(ax, scores_of_zero(spec, x, batch, head).cpu(), rows, columns)
    if spec.block_size is not None:
        for tokens, size, line in ((rows, spec.block_size[0], ax.axhline), (columns, spec.block_size[1], ax.axvline)):
            for edge in range(tokens[0] + size, tokens[-1] + 1, size):
                line(edge - 0.5, color=EDGE, linewidth=0.6)
    return ax


@torch.no_grad()
def scores_of_zero(spec: AttentionSpec, x: Operands, batch: int | None, head: int) -> Tensor:
    """Returns the modified scores of a call if all scores are 0: float64 [rows, columns], -inf for hidden keys.

    The arithmetic is the reference's.
    """
    from flexattn.dispatch.reference import Differentiable, masked_logits, slice_block  # a late import, as above

    rows, columns = _tokens(spec, x, batch)
    zeros = [t.new_zeros((), dtype=torch.float64).expand(*t.shape[:-1], 1) for t in (x.q, x.k, x.v)]
    whole = Differentiable.of(x)._replace(q=zeros[0], k=zeros[1], v=zeros[2]).map(lambda t: t.double())
    scores = whole.q.new_full((len(rows), len(columns)), NEG_INF)
    for sequences in _sequences(spec, x, batch):
        queries, start = range(len(sequences.q)), sequences.kv.start
        row_places = [place for place, token in enumerate(rows) if token in sequences.q]
        column_places = [place for place, token in enumerate(columns) if token in sequences.kv]
        wanted = torch.tensor([rows[place] - sequences.q.start for place in row_places], dtype=torch.int64, device=x.q.device)
        step = max(1, MOST_AT_ONCE // max(1, spec.num_heads * len(queries) * columns.step))
        for first in range(0, len(column_places) if row_places else 0, step):
            places = column_places[first : first + step]
            keys = range(columns[places[0]] - start, columns[places[-1]] - start + 1)
            block = slice_block(spec, whole, sequences, queries, keys)
            logits = masked_logits(spec, x, sequences, queries, keys, block)[0, head]
            scores[row_places, places[0] : places[-1] + 1] = logits[wanted, :: columns.step]
    return scores


def _sequences(spec: AttentionSpec, x: Operands, batch: int | None) -> list[Sequences]:
    from flexattn.dispatch.reference import split_sequences

    sequences = split_sequences(spec, x)
    if spec.padding:
        return sequences if _is_whole(spec, batch) else [sequences[batch or 0]]
    one = batch or 0
    return [group._replace(batch=range(one, one + 1)) for group in sequences if one in group.batch]


def _is_whole(spec: AttentionSpec, batch: int | None) -> bool:
    return batch is None and spec.q_format == spec.kv_format == "thd"


def _tokens(spec: AttentionSpec, x: Operands, batch: int | None) -> tuple[range, range]:
    """Returns the queries and the keys to draw, as positions in the token dim."""
    sides = []
    for side, fmt, t in (("q", spec.q_format, x.q), ("kv", spec.kv_format, x.k)):
        if fmt == "thd" and not _is_whole(spec, batch):
            tokens: range = getattr(_sequences(spec, x, batch)[0], side)
        else:
            tokens = range(t.shape[fmt.index("t" if fmt == "thd" else "s")])
        sides.append(tokens[:: max(1, -(-len(tokens) // MOST_POINTS))])
    return sides[0], sides[1]


def _draw(ax: Axes, scores: Tensor, rows: range, columns: range) -> None:
    from matplotlib.colors import ListedColormap

    seen = scores > NEG_INF
    extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    options: dict[str, Any] = {
        "extent": extent,
        "interpolation": "nearest",
        "aspect": "equal" if 1 / 3 < len(rows) / len(columns) < 3 else "auto",
    }
    values = scores[seen]
    if not len(values) or bool((values == values[0]).all()):
        ax.imshow(seen.numpy(), cmap=ListedColormap([HIDDEN, SEEN]), vmin=0, vmax=1, **options)
    else:
        ax.set_facecolor(HIDDEN)
        image = ax.imshow(scores.masked_fill(~seen, float("nan")).numpy(), cmap="viridis", **options)
        ax.figure.colorbar(image, ax=ax, label="a score of 0 becomes")
    ax.set(xlabel="key", ylabel="query")
