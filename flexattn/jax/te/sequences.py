"""TransformerEngine's SequenceDescriptor, and its conversion to arguments of `flexattn.jax.attention`: lengths, or a mask.

Lengths become cu_seqlens. Segment ids and positions become a mask that reads them, which is exact for any values: in any order,
with gaps, or striped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flexattn.jax.call import cumulative
from flexattn.jax.te.names import AttnMaskType, name_of
from flexattn.validation import describe

Pair = tuple[jax.Array, jax.Array]
Sides: TypeAlias = jax.Array | Pair


def _unset() -> Pair:
    return jnp.zeros(0), jnp.zeros(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class SequenceDescriptor:
    """Positions of sequences in the rows of q, and of k and v. Create one by one of the three `from_` methods.

    It is a pytree of eight arrays. Each attribute is a pair, for the queries and for the keys; if it is unset, arrays of size 0.

    Source: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py
    """

    seqlens: Pair = dataclasses.field(default_factory=_unset)
    seq_offsets: Pair = dataclasses.field(default_factory=_unset)
    segment_ids: Pair = dataclasses.field(default_factory=_unset)
    segment_pos: Pair = dataclasses.field(default_factory=_unset)

    def __post_init__(self) -> None:
        """Takes None for unset, as TransformerEngine's class does."""
        for name in [name for name, pair in vars(self).items() if pair is None]:
            setattr(self, name, _unset())

    @classmethod
    def from_seqlens(cls, seqlens: Sides) -> SequenceDescriptor:
        """Returns a descriptor of one sequence per row, its first tokens.

        Args:
            seqlens: integers [b], or a pair of them, for the queries and for the keys.

        Raises TypeError if an argument is not an array, and ValueError for a tuple of another length.
        """
        return cls(seqlens=_pair("seqlens", seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Sides, seq_offsets: Sides) -> SequenceDescriptor:
        """Returns a descriptor of several sequences per row, for layouts with T in their name.

        Args:
            seqlens: integers [b, n], or a pair of them: lengths of a row's sequences; below 1: no sequence. Sequence i of the
                queries sees sequence i of the keys.
            seq_offsets: integers [b, n] or more columns, or a pair of them: each sequence's start in its row. Columns beyond n, and
                those without a sequence, are not read.

        Raises TypeError if an argument is not an array, and ValueError for a tuple of another length.
        """
        return cls(seqlens=_pair("seqlens", seqlens), seq_offsets=_pair("seq_offsets", seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids: Sides, segment_pos: Sides | None = None) -> SequenceDescriptor:
        """Returns a descriptor by token: its sequence in the row, and its position in the sequence.

        Args:
            segment_ids: integers [b, s], or a pair of them, for the queries and for the keys; 0 is padding.
            segment_pos: integers [b, s] or [s], or a pair of them; required, as in TransformerEngine.

        Raises TypeError if an argument is not an array, and ValueError for a tuple of another length, or without segment_pos.
        """
        if segment_pos is None:
            raise ValueError(
                "segment_pos is None; accepted: integers [b, s], each token's position in its segment, or a pair of them"
            )
        return cls(segment_ids=_pair("segment_ids", segment_ids), segment_pos=_pair("segment_pos", segment_pos))


def _pair(name: str, value: object) -> Pair:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"{name} is a tuple of {len(value)}; accepted: an array, or a pair, for the queries and for the keys")
        return value
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} is {describe(value)}; accepted: an array, or a pair, for the queries and for the keys")
    return value, value


class Rows(NamedTuple):
    """A call's properties that determine its mask: its rows, and TransformerEngine's mask type and window."""

    batch: int
    sizes: tuple[int, int]  # tokens of a row of q, and of k
    is_thd: bool
    kind: AttnMaskType
    window: tuple[int, int]  # -1: open

    @property
    def band(self) -> dict[str, Any]:
        """Mask type and window as arguments of `attention`, without padding, because a mask replaces the lengths."""
        name = name_of(self.kind).removeprefix("padding_").replace("padding", "no_mask")
        return {
            "attn_mask_type": name,
            "window_size": self.window,
            "bottom_right_diagonal": None if self.kind.is_causal() else False,
        }

    @property
    def padded_band(self) -> dict[str, object]:
        """Mask type and window for a call with lengths."""
        return self.band | {"attn_mask_type": name_of(self.kind)}


class Sequences(NamedTuple):
    """Arguments of `attention` for the sequences of a call; is_packed: whether all rows are packed in thd."""

    arguments: dict[str, object]
    is_packed: bool = False


def sequences_of(descriptor: SequenceDescriptor | object, rows: Rows, has_positions: bool) -> Sequences:
    """Returns the arguments that a descriptor, a mask or None means for a call's rows.

    has_places: whether the call has a bias or a score_mod, which depend on tokens' positions in the rows; offsets then become a
        mask.

    Raises:
        ValueError: if the descriptor does not match the layout, the mask type or the rows' shapes.
    """
    if rows.is_thd and not rows.kind.is_padding():
        raise ValueError(f"attn_mask_type is {rows.kind.name} with a THD layout; accepted: a type with PADDING in its name")
    if descriptor is not None and not isinstance(descriptor, SequenceDescriptor):
        return Sequences(_by_mask(descriptor, rows))
    fields = () if descriptor is None else tuple(name for name in vars(descriptor) if getattr(descriptor, name)[0].size)
    if not rows.kind.is_padding():
        return Sequences(rows.band)
    assert descriptor is None or isinstance(descriptor, SequenceDescriptor)
    if descriptor is not None and "segment_ids" in fields:
        return Sequences(_by_segments(descriptor.segment_ids, descriptor.segment_pos, rows))
    if descriptor is None or ("seq_offsets" in fields) != rows.is_thd or "seqlens" not in fields:
        accepted = "from_seqlens_and_offsets" if rows.is_thd else "from_seqlens"
        description = "None" if descriptor is None else f"a SequenceDescriptor with {', '.join(fields) or 'nothing'}"
        raise ValueError(
            f"sequence_descriptor is {description}, with attn_mask_type {rows.kind.name} and a {'THD' if rows.is_thd else 'BSHD'} "
            f"layout; accepted: SequenceDescriptor.{accepted}(...) or .from_segment_ids_and_pos(...)"
        )
    if rows.is_thd:
        sides = _lengths_and_offsets(descriptor.seqlens, descriptor.seq_offsets, rows)
        if has_positions:
            return Sequences(_by_segments(*_tokens(sides, rows), rows))
        return Sequences(_packed(sides, rows), is_packed=True)
    arguments = rows.padded_band
    for side, lengths in zip(("q", "kv"), descriptor.seqlens, strict=True):
        lengths = _integers("seqlens", lengths, (rows.batch,))
        arguments[f"cu_seqlens_{side}"] = cumulative(jnp.maximum(lengths, 0))
    return Sequences(arguments)


def _integers(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != shape:
        raise ValueError(f"{name} of the sequence_descriptor has dtype {x.dtype} and shape {x.shape}; accepted: integers {shape}")
    return jnp.asarray(x, jnp.int32)


def _lengths_and_offsets(seqlens: Pair, seq_offsets: Pair, rows: Rows) -> list[Pair]:
    """Returns lengths and offsets, [b, n] each, for the queries and for the keys."""
    count = seqlens[0].shape[-1] if seqlens[0].ndim else 0
    sides = []
    for lengths, offsets in zip(seqlens, seq_offsets, strict=True):
        lengths = _integers("seqlens", lengths, (rows.batch, count))
        columns = max(count, offsets.shape[-1] if offsets.ndim else 0)
        sides.append((lengths, _integers("seq_offsets", offsets, (rows.batch, columns))[:, :count]))
    return sides


def _tokens(sides: Sequence[Pair], rows: Rows) -> tuple[Pair, Pair]:
    """Returns segment ids and positions from sequences' offsets."""
    ids, positions = [], []
    for (lengths, offsets), size in zip(sides, rows.sizes, strict=True):
        position = jnp.arange(size, dtype=jnp.int32) - offsets[..., None]  # [b, n, s]: tokens since each sequence's start
        is_inside = (position >= 0) & (position < lengths[..., None])
        which = jnp.argmax(is_inside, 1)[:, None]
        ids.append(jnp.where(is_inside.any(1), which[:, 0] + 1, 0).astype(jnp.int32))
        positions.append(jnp.take_along_axis(position, which, 1)[:, 0])
    return (ids[0], ids[1]), (positions[0], positions[1])


def _packed(sides: Sequence[Pair], rows: Rows) -> dict[str, object]:
    """Returns arguments for all rows' sequences, packed one after another."""
    arguments = rows.padded_band | {"max_seqlen_q": rows.sizes[0], "max_seqlen_kv": rows.sizes[1]}
    for side, (lengths, offsets), size in zip(("q", "kv"), sides, rows.sizes, strict=True):
        starts = jnp.where(lengths > 0, offsets + size * jnp.arange(rows.batch, dtype=jnp.int32)[:, None], 0)
        arguments[f"cu_seqlens_{side}"] = cumulative(jnp.maximum(lengths, 0).reshape(-1))
        arguments[f"cu_seqlens_{side}_padded"] = jnp.append(starts.reshape(-1), jnp.int32(rows.batch * size))
    return arguments


def _by_segments(segment_ids: Pair, segment_pos: Pair, rows: Rows) -> dict[str, object]:
    """Returns arguments with a mask of ids and positions: a query sees keys of its own id that are within the band."""
    ids, positions = [], []
    for row_ids, pos, size in zip(segment_ids, segment_pos, rows.sizes, strict=True):
        shape = (rows.batch, size)
        ids.append(_integers("segment_ids", row_ids, shape))
        position = jnp.broadcast_to(_integers("segment_pos", pos, shape if pos.ndim == 2 else (size,)), shape)
        positions.append(position - _run_lengths(ids[-1]) if rows.kind.is_bottom_right() else position)
    (ids_q, ids_kv), (position_q, position_kv) = ids, positions
    (left, right), is_causal = rows.window, rows.kind.is_causal()

    def mask_mod(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        distance = position_q[b, q_idx] - position_kv[b, kv_idx]  # distance of the key before the diagonal
        is_visible = (ids_q[b, q_idx] == ids_kv[b, kv_idx]) & (ids_q[b, q_idx] != 0)
        is_visible = is_visible & (distance >= 0) if is_causal else is_visible
        is_visible = is_visible & (distance <= left) if left >= 0 else is_visible
        return is_visible & (distance >= -right) if right >= 0 and not is_causal else is_visible

    return {"attn_mask_type": "no_mask", "mask_mod": mask_mod}


def _run_lengths(ids: jax.Array) -> jax.Array:
    """Returns for each token of [b, s] the length of its run of equal ids."""
    begins = jnp.concatenate([jnp.zeros((ids.shape[0], 1), bool), ids[:, 1:] != ids[:, :-1]], 1)
    run = jnp.cumsum(begins, 1)
    counts = jax.vmap(lambda row: jnp.bincount(row, length=ids.shape[1]))(run)
    return jnp.take_along_axis(counts, run, 1).astype(jnp.int32)


def _by_mask(mask: object, rows: Rows) -> dict[str, object]:
    """Returns arguments for a mask, True for a hidden pair, as in TransformerEngine before it had descriptors."""
    shape = (rows.batch, 1, *rows.sizes)
    if not isinstance(mask, (jax.Array, np.ndarray)):
        raise TypeError(f"sequence_descriptor is {describe(mask)}; accepted: a SequenceDescriptor, a mask {shape}, or None")
    if rows.is_thd:
        raise ValueError("sequence_descriptor is a mask with a THD layout; accepted: a SequenceDescriptor")
    if not rows.kind.is_padding():
        return rows.band
    if mask.shape != shape:
        raise ValueError(f"sequence_descriptor is a mask of shape {mask.shape}; accepted: {shape}, True or 1 for a hidden pair")
    if rows.kind.is_bottom_right():
        raise ValueError(
            f"sequence_descriptor is a mask with attn_mask_type {rows.kind.name}, whose diagonal depends on lengths; accepted: "
            "SequenceDescriptor.from_seqlens(...)"
        )
    hidden = jnp.asarray(mask) != 0
    return rows.band | {"mask_mod": lambda b, h, q_idx, kv_idx: ~hidden[b, 0, q_idx, kv_idx]}
