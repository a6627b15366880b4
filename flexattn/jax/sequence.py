"""Attention of a sequence that is split over the devices of a mesh axis: queries stay on their device, and keys are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from flexattn import validation
from flexattn.dispatch.spec import Window, as_index, make_band
from flexattn.jax import front
from flexattn.jax.call import cumulative, meta_tensor
from flexattn.lengths import check_length_tensor
from flexattn.shorthands import bias_type_of

LAYOUTS = ("contiguous", "zigzag")
_MASKS = ("no_mask", "causal", "causal_bottom_right")
_PADDING_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
_FORMATS = ("bshd", "sbhd", "bhsd", "thd")
_UNSUPPORTED = {
    "block_mask": "mask_mod",
    "causal": "attn_mask_type, which names the diagonal",
    **dict.fromkeys(("cu_seqlens", "max_seqlen"), "cu_seqlens_q and cu_seqlens_kv of the whole"),
    "batch_invariant": "False",
    **dict.fromkeys(("page_table", "seqused_q", "seqused_kv"), "keys without a cache"),
    **dict.fromkeys(("kv_indices", "kv_index_counts", "kv_block_size"), "a mask_mod, because lists name keys of the whole"),
    **dict.fromkeys(("fp8_recipe", "fp8_state"), "q, k and v in FP8 with their descales, because each device would scale its part"),
}


def sequence_order(length: int, devices: int, layout: str = "zigzag") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a sequence's positions in the devices' order: x[:, order] is the array to split over a mesh axis.

    "contiguous" keeps the order. "zigzag" assigns parts i and 2 devices - 1 - i of 2 devices to device i. This balances the
    load of a causal mask: one part sees few keys and the other many. numpy.argsort of the result restores the order.
    """
    validation.check_name("layout", layout, LAYOUTS)
    if length % (2 * devices if layout == "zigzag" else devices):
        parts = f"{2 * devices}, two parts for each device" if layout == "zigzag" else f"{devices}, the devices"
        raise ValueError(f"length is {length} with layout {layout!r}; accepted: a multiple of {parts}")
    if layout == "contiguous":
        return np.arange(length)
    halves = np.arange(length).reshape(2 * devices, -1)
    return np.stack([halves[:devices], halves[: devices - 1 : -1]], 1).reshape(-1)


def attention_over_axis(
    q: jax.Array, k: jax.Array, v: jax.Array, *, axis_name: str, layout: str = "contiguous", **options: object
) -> object:
    """Returns attention of this device's queries over the keys of all devices, like `attention` of the whole sequence.

    Call it inside `jax.shard_map(..., check_vma=False)` over the axis. Its devices hold equal parts of each sequence, or of the
    tokens of packed documents. This is the strategy "gather" of `flexattn.distributed`: all_gather collects keys and values, once
    for the forward and again for the backward, and none are stored in between. psum_scatter sums their gradients in float32.
    Results are those of one device, up to the order of that sum.

    Args:
        q, k, v: this device's tokens, in the order of `sequence_order`: [b, s, h, d] or [t, h, d], according to `qkv_format`, with
            equally many tokens.
        axis_name: the mesh axis that splits the tokens. Heads and batch may be split over other axes.
        layout: "contiguous" or "zigzag", the order of tokens on the devices.
        attn_mask_type, window_size: mask of the whole sequence: "no_mask", "causal" or "causal_bottom_right", which are equivalent
            here. With cu_seqlens_q: "padding", "padding_causal" or "padding_causal_bottom_right".
        cu_seqlens_q, cu_seqlens_q_padded: int32 [sequences + 1], of the whole, the same on each device: the lengths of packed
            documents, or of the sequences of a batch. Keys have the queries' lengths, so cu_seqlens_kv and cu_seqlens_kv_padded
            must be None or the same arrays.
        max_seqlen_q: the longest document of the whole, for thd; max_seqlen_kv must be equal or None.
        bias: [b, h, s, skv] with the rows of this device's queries and all keys, in the sequence's order; not for thd.
        bias_type: ALiBi needs a causal mask.
        score_mod, mask_mod: as in `attention`; their arguments are the document and the positions in the whole sequence.
        softmax_offset: the same on each device. If it is replicated, as P(), shard_map sums the parts of its gradient.
        dropout_p, rng_state: one key, the same on each device. The same weights are dropped as on one device. If the batch or heads
            are split over other axes, pass a different key on each, for example jax.random.fold_in of jax.lax.axis_index.
        descale_q, descale_k, descale_v: for q, k and v in FP8, which are sent unchanged; without blocks, the same on each device.
        options: other arguments of `attention`, except for caches, block masks and FP8 recipes.

    Returns:
        out, or a tuple with lse of this device's queries, or with max_logit of all, as in `attention`.

    Raises:
        ValueError, TypeError: if an argument is invalid, or cannot be split, when the call is traced.
    """
    call = _AxisCall.of(q, k, axis_name, layout, options)
    # The backward keeps the named results, and recomputes everything else: it gathers the keys again, but does not repeat
    # attention, because its results are named.
    policy = jax.checkpoint_policies.save_only_these_names("flexattn_out", "flexattn_lse")
    requested = [name for name in ("return_lse", "return_max_logit") if options.pop(name, False)]
    options["return_max_logit"] = "return_max_logit" in requested
    out, lse, max_logit = jax.checkpoint(functools.partial(call.attend, options=options), policy=policy)(q, k, v)
    results = {"return_lse": lse, "return_max_logit": max_logit}
    if "return_max_logit" in requested:
        results["return_max_logit"] = jax.lax.pmax(jax.lax.stop_gradient(max_logit), axis_name)
    return (out, *(results[name] for name in requested)) if requested else out


class _Sequences(NamedTuple):
    """Sequences of the whole, with lengths known at run time: packed documents, or the sequences of a batch."""

    starts: jax.Array  # int32 [b]: the first token of each document; 0 for sequences of a batch
    lengths: jax.Array  # int32 [b]
    longest: int | None = None  # most tokens of a packed document, if specified
    is_padded: bool = False  # whether there is padding between documents

    @classmethod
    def of(cls, fmt: str, options: dict[str, object]) -> _Sequences | None:
        """Removes the length arguments from the options, and returns their sequences; None if there are none."""
        names = ("cu_seqlens_q", "cu_seqlens_q_padded")
        cu, padded = (options.pop(name, None) for name in names)
        for name, array_q in zip(names, (cu, padded), strict=True):
            other = name.replace("_q", "_kv")
            if (array_kv := options.pop(other, None)) is not None and array_kv is not array_q:
                raise ValueError(
                    f"{other} is not the array {name}; accepted over an axis: None or that array, because keys have the queries' "
                    "lengths"
                )
        maxima = [x for x in (options.pop(f"max_seqlen_{side}", None) for side in ("q", "kv")) if x is not None]
        longest = [as_index(x) for x in maxima]
        if None in longest or len({*longest}) > 1:
            raise ValueError(f"max_seqlen_q and max_seqlen_kv are {maxima}; accepted over an axis: one int for both, or None")
        if cu is None:
            if padded is not None or maxima:
                raise ValueError("cu_seqlens_q is None but cu_seqlens_q_padded or max_seqlen_q is set; accepted: int32 [b + 1]")
            return None
        if padded is not None and fmt != "thd":
            raise ValueError(f"cu_seqlens_q_padded is set with format {fmt}; accepted: None, because only thd has gaps")
        cu, starts = jnp.asarray(cu), jnp.asarray(cu if padded is None else padded)
        for name, x in zip(names, (cu, starts), strict=True):
            check_length_tensor(name, meta_tensor(name, x), 1, torch.device("meta"))
        if fmt != "thd":
            return cls(jnp.zeros_like(cu[1:]), jnp.diff(cu))
        return cls(starts[:-1], jnp.diff(cu), longest[0] if longest else None, padded is not None)


class _AxisCall(NamedTuple):
    """A call whose sequence is split over an axis."""

    axis_name: str
    devices: int
    layout: str
    dim: int  # the tokens' dim in q, k and v
    fmt: str
    is_causal: bool
    window: Window  # with a causal mask, its right side is at most the diagonal
    sequences: _Sequences | None  # None: all have the full length

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, axis_name: str, layout: str, options: dict[str, Any]) -> _AxisCall:
        """Returns the checked call, and removes its arguments from the options."""
        for name, value in options.items():
            if name in _UNSUPPORTED and value is not None and value is not False:
                raise ValueError(f"{name} is not supported by attention_over_axis; accepted: {_UNSUPPORTED[name]}")
        validation.check_name("layout", layout, LAYOUTS)
        fmt = options.pop("qkv_format", "bshd")
        validation.check_name("qkv_format", fmt, _FORMATS)
        sequences = _Sequences.of(fmt, options)
        if fmt == "thd" and sequences is None:
            raise ValueError(
                "cu_seqlens_q is None with thd; accepted: int32 [documents + 1], cumulative lengths of the whole's documents"
            )
        mask = options.pop("attn_mask_type", "no_mask")
        if sequences is None and mask in _PADDING_MASKS:
            raise ValueError(f"cu_seqlens_q is None with attn_mask_type {mask!r}; accepted: int32 [sequences + 1], of the whole")
        validation.check_name("attn_mask_type", mask, _MASKS if sequences is None else _PADDING_MASKS)
        implied = bias_type_of(options.get("bias_type"), options.get("bias"), options.get("alibi_slopes"))
        is_causal, dim = "causal" in mask, fmt.index("t" if fmt == "thd" else "s")
        band = make_band(mask, options.pop("window_size", (-1, -1)), options.pop("bottom_right_diagonal", None))
        if implied == "alibi" and not is_causal:
            raise ValueError(f"bias_type is 'alibi' with {mask!r}; accepted over an axis: a causal mask, or a score_mod")
        if options.get("bias") is not None and fmt == "thd":
            raise ValueError("bias is set with thd; accepted over an axis: a score_mod that reads an array")
        if len(q.shape) != len(fmt) or len(k.shape) != len(fmt) or q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q has shape {tuple(q.shape)} and k {tuple(k.shape)} in {fmt}; accepted over an axis: equally many tokens of both "
                "on each device"
            )
        if layout == "zigzag" and q.shape[dim] % 2:
            raise ValueError(f"q has {q.shape[dim]} tokens on each device with layout 'zigzag'; accepted: an even number")
        window = Window(band.left, band.right)
        return cls(axis_name, jax.lax.psum(1, axis_name), layout, dim, fmt, is_causal, window, sequences)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, options: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns out, lse and max_logit of this device's queries."""
        keys = [self._in_order(_gather(x, self.axis_name, self.dim)) for x in (k, v)]
        device, length = jax.lax.axis_index(self.axis_name), q.shape[self.dim]
        if self.layout == "contiguous":
            return self._part(q, keys, device * length, options)
        starts = (device * (length // 2), (2 * self.devices - 1 - device) * (length // 2))
        results = []
        for i, (half, start) in enumerate(zip(jnp.split(q, 2, self.dim), starts, strict=True)):
            part_options = dict(options)
            if options.get("bias") is not None and options["bias"].shape[2] > 1:
                part_options["bias"] = jnp.split(options["bias"], 2, 2)[i]
            results.append(self._part(half, keys, start, part_options))
        (out, lse, largest), (out_2, lse_2, largest_2) = results
        return jnp.concatenate([out, out_2], self.dim), jnp.concatenate([lse, lse_2], -1), jnp.maximum(largest, largest_2)

    def _in_order(self, x: jax.Array) -> jax.Array:
        """Returns gathered tokens in the sequence's order."""
        if self.layout == "contiguous":
            return x
        parts = jnp.split(x, 2 * self.devices, self.dim)  # 0, 2n - 1, 1, 2n - 2, and so on
        return jnp.concatenate([*parts[::2], *parts[1::2][::-1]], self.dim)

    def _part(
        self, q: jax.Array, keys: list[jax.Array], start: jax.Array, options: dict[str, object]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the results of queries that begin at `start`, a value known at run time."""
        (k, v), count, total = keys, q.shape[self.dim], keys[0].shape[self.dim]
        arguments = {"qkv_format": self.fmt, **options}
        origin = _Origin(start, jnp.zeros((), jnp.int32))
        if self.is_causal or self.sequences is not None:
            lengths_origin, length_arguments = self._lengths(q, start, total)
            origin, arguments = lengths_origin if self.fmt == "thd" else origin, arguments | length_arguments
        elif options.get("bias") is None and None not in self.window:
            left, right = (max(0, side or 0) for side in self.window)
            if count + left + right < total:  # begin is arbitrary, so dropout is drawn for each key
                begin = jnp.clip(start - left, 0, total - (count + left + right))
                k, v = (jax.lax.dynamic_slice_in_dim(x, begin, count + left + right, self.dim) for x in keys)
                origin = _Origin(start, begin, by_eights=False)
        arguments |= origin.mods(options, None if self.is_causal else self.window)
        if arguments.get("dropout_p") and arguments.get("rng_state") is not None:  # without one, `attention` raises
            rows = q.shape[self.fmt.index("b")] if self.fmt != "thd" else len(origin.query)
            arguments["rng_state"] = origin.words(front.words_of(arguments["rng_state"]), rows, q.shape[self.fmt.index("h")])
        return front.attend({"q": q, "k": k, "v": v} | arguments)

    def _lengths(self, q: jax.Array, start: jax.Array, total: int) -> tuple[_Origin, dict[str, object]]:
        """Returns the origin of the queries from `start` on in their sequences, and the arguments for the sequences' lengths."""
        count = q.shape[self.dim]
        sequences = self.sequences
        if sequences is None:  # all have the full length
            batch = q.shape[self.fmt.index("b")]
            sequences = _Sequences(jnp.zeros(batch, jnp.int32), jnp.full(batch, total, jnp.int32))
        starts, full_lengths, longest, is_padded = sequences
        first, stop = (jnp.clip(token - starts, 0, full_lengths) for token in (start, start + count))
        begin, end = jnp.zeros_like(full_lengths), full_lengths
        most = total if longest is None else min(longest, total)
        if self.is_causal:
            end = stop  # keys end with the last query's key, so the bottom-right diagonal is the whole's
        elif self.fmt == "thd":
            left, right = (None if side is None else max(0, side) for side in self.window)
            if left is not None:
                begin = jnp.maximum(0, first - left) // 8 * 8  # dropout is drawn for groups of eight keys
            if right is not None:
                end = jnp.minimum(full_lengths, stop + right)
            if left is not None and right is not None:
                most = min(most, left + count + right + 7)
        end = jnp.where(stop > first, end, begin)
        arguments = {"cu_seqlens_q": cumulative(stop - first), "cu_seqlens_kv": cumulative(end - begin)}
        arguments["attn_mask_type"] = "padding_causal_bottom_right" if self.is_causal else "padding"
        if self.is_causal:
            arguments["window_size"] = self.window
        if self.fmt == "thd":
            arguments |= {"max_seqlen_q": count if longest is None else min(longest, count), "max_seqlen_kv": most}
            arguments["cu_seqlens_kv_padded"] = jnp.append(starts + begin, total).astype(jnp.int32)
            if is_padded:
                arguments["cu_seqlens_q_padded"] = jnp.append(jnp.clip(starts - start, 0, count), count).astype(jnp.int32)
        return _Origin(first, begin), arguments


class _Origin(NamedTuple):
    """Positions of a call's first query and first key in their sequence: 0-d if all have the same, else [documents]."""

    query: jax.Array
    key: jax.Array
    by_eights: bool = True  # whether key is a multiple of 8

    def mods(self, options: dict[str, Any], window: Window | None) -> dict[str, object]:
        """Returns score_mod and mask_mod with positions of the whole sequence as arguments.

        window: a window that mask_mod must apply too, because its diagonal depends on the device.
        """
        mods: dict[str, object] = {}
        score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")

        def shift(b: object, q_idx: jax.Array, kv_idx: jax.Array) -> tuple[object, object]:
            query, key = (origin[b] if origin.ndim else origin for origin in (self.query, self.key))
            return q_idx + query, kv_idx + key

        if score_mod is not None:
            mods["score_mod"] = lambda s, b, h, q_idx, kv_idx, *extra, **named: score_mod(
                s, b, h, *shift(b, q_idx, kv_idx), *extra, **named
            )
        left, right = window or (None, None)
        masks: list[Callable[..., object]] = [] if mask_mod is None else [mask_mod]
        masks += [lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= left] if left is not None else []
        masks += [lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= right] if right is not None else []
        if masks:
            mods["mask_mod"] = lambda b, h, q_idx, kv_idx: functools.reduce(
                jnp.logical_and, [mask(b, h, *shift(b, q_idx, kv_idx)) for mask in masks]
            )
        return mods

    def words(self, words: jax.Array, rows: int, heads: int) -> jax.Array:
        """Returns the rng_state, as words, of a call that drops the same weights as the whole; words: the whole's, uint32 [4]."""
        columns = [self.query, self.key // 8 * 8, jnp.arange(rows) * heads, *([] if self.by_eights else [self.key % 8])]
        both = [x for column in columns for x in (column, jnp.zeros((), jnp.int32))]  # the upper word is 0
        broadcast = [jnp.broadcast_to(x.astype(jnp.uint32), (rows,)) for x in (*words, *both)]
        return jnp.stack(broadcast, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis_name: str, dim: int) -> jax.Array:
    """Returns the tokens of all devices, in device order; gradients are summed in float32."""
    return jax.lax.all_gather(x, axis_name, axis=dim, tiled=True)


def _scatter(axis_name: str, dim: int, _: None, gradient: jax.Array) -> tuple[object]:
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return (jax.lax.psum_scatter(wide, axis_name, scatter_dimension=dim, tiled=True).astype(gradient.dtype),)


_gather.defvjp(lambda x, axis_name, dim: (_gather(x, axis_name, dim), None), _scatter)
