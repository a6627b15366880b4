"""Attention of a sequence that lies over the devices of a mesh axis: each device's queries stay, and all keys come to it."""

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
from flexattn.jax.call import meta_tensor
from flexattn.lengths import check_length_tensor
from flexattn.shorthands import bias_type_of

LAYOUTS = ("contiguous", "zigzag")
_MASKS = ("no_mask", "causal", "causal_bottom_right")
_MASKS_OF_LENGTHS = ("padding", "padding_causal", "padding_causal_bottom_right")
_FORMATS = ("bshd", "sbhd", "bhsd", "thd")
_NOT_TAKEN = {
    "block_mask": "mask_mod",
    "causal": "attn_mask_type, which names the diagonal",
    **dict.fromkeys(("cu_seqlens", "max_seqlen"), "cu_seqlens_q and cu_seqlens_kv of the whole"),
    "batch_invariant": "False",
    **dict.fromkeys(("page_table", "seqused_q", "seqused_kv"), "keys that are no cache"),
    **dict.fromkeys(("fp8_recipe", "fp8_state"), "q, k and v in FP8 with their descales, as each device would scale its part"),
}


def sequence_order(length: int, devices: int, layout: str = "zigzag") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the positions of a sequence in the order in which devices hold it: x[:, order] is what a mesh axis then splits.

    "contiguous" leaves them as they are. "zigzag" gives device i the parts i and 2 devices - 1 - i of 2 devices: under a causal
    mask, one that sees few keys and one that sees many, so that all have as much to do. numpy.argsort of it is the way back.
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
    q: jax.Array, k: jax.Array, v: jax.Array, *, axis_name: str, layout: str = "contiguous", **options: Any
) -> Any:
    """Returns attention of this device's queries over the keys of all, as `attention` of the whole sequence has it.

    Called inside `jax.shard_map(..., check_vma=False)` over the axis, whose devices hold equal parts of each sequence, or of the
    tokens of packed documents. It is the strategy "gather" of `flexattn.distributed`: keys and values come by all_gather, once for
    the forward and once more for the backward, which keeps none of them; their gradients are summed in float32 by psum_scatter.
    Numbers are those of one device up to the order of that sum.

    Args:
        q, k, v: this device's tokens, in the order of `sequence_order`: [b, s, h, d] or [t, h, d] as `qkv_format` says, as many
            tokens of each.
        axis_name: the mesh axis that tokens are split over. Heads and batch may be split over others.
        layout: "contiguous" or "zigzag", how the tokens lie on the devices.
        attn_mask_type, window_size: of the whole: "no_mask", "causal" or "causal_bottom_right", which is the same here; with
            cu_seqlens_q "padding", "padding_causal" or "padding_causal_bottom_right".
        cu_seqlens_q, cu_seqlens_q_padded: int32 [sequences + 1], of the whole, the same on each device: the lengths of packed
            documents, or of the sequences of a batch. Keys have the lengths of the queries, so cu_seqlens_kv and
            cu_seqlens_kv_padded are None or those very arrays.
        max_seqlen_q: the longest document of the whole, for thd; that of the keys is the same.
        bias: [b, h, s, skv] with the rows of this device's queries and all keys, in the sequence's order; not for thd.
        bias_type: ALiBi with a causal mask.
        score_mod, mask_mod: as `attention` takes them; they see the document and the positions of the whole.
        softmax_offset: the same on each device; shard_map sums the parts of its gradient where it comes in whole, as P().
        dropout_p, rng_state: one key, the same on each device, drops what one device drops, on any number of them. Where the batch
            or heads are split over other axes, give those keys of their own, as by jax.random.fold_in of jax.lax.axis_index.
        descale_q, descale_k, descale_v: of q, k and v in FP8, which travel as they are; without blocks, the same on each device.
        options: others of `attention`, but for caches, block masks and FP8 recipes.

    Returns:
        out, or with lse of this device's queries, and with max_logit of all, as `attention` does.

    Raises:
        ValueError, TypeError: an argument that has no meaning, or that cannot be split, when the call is traced.
    """
    whole = _Whole.of(q, k, axis_name, layout, options)
    # Named results are kept for the backward and all else is made anew: the keys are fetched again, and attention, whose results
    # these are, is not.
    kept = jax.checkpoint_policies.save_only_these_names("flexattn_out", "flexattn_lse")
    wanted = [name for name in ("return_lse", "return_max_logit") if options.pop(name, False)]
    options["return_max_logit"] = "return_max_logit" in wanted
    out, lse, max_logit = jax.checkpoint(functools.partial(whole.attend, options=options), policy=kept)(q, k, v)
    results = {"return_lse": lse, "return_max_logit": max_logit}
    if "return_max_logit" in wanted:
        results["return_max_logit"] = jax.lax.pmax(jax.lax.stop_gradient(max_logit), axis_name)
    return (out, *(results[name] for name in wanted)) if wanted else out


class _Sequences(NamedTuple):
    """Sequences of the whole, whose lengths are known when the program runs: packed documents, or those of a batch."""

    starts: Any  # int32 [b]: the first token of each document; 0 for those of a batch
    lengths: Any  # int32 [b]
    longest: int | None = None  # most tokens of a packed document, where the call says so
    is_padded: bool = False  # whether there are tokens between documents

    @classmethod
    def of_batch(cls, batch: int, length: int) -> _Sequences:
        """Returns sequences that are all as long as the whole."""
        return cls(jnp.zeros(batch, jnp.int32), jnp.full(batch, length, jnp.int32))

    @classmethod
    def of(cls, fmt: str, options: dict[str, Any]) -> _Sequences | None:
        """Returns the sequences that the options have the lengths of, and takes those out; None where there are none."""
        names = ("cu_seqlens_q", "cu_seqlens_q_padded")
        cu, padded = (options.pop(name, None) for name in names)
        for name, of_q in zip(names, (cu, padded), strict=True):
            other = name.replace("_q", "_kv")
            if (of_kv := options.pop(other, None)) is not None and of_kv is not of_q:
                raise ValueError(
                    f"{other} is given, and is not the array {name}; accepted over an axis: None or that array, as keys have the "
                    "lengths of the queries"
                )
        given = [x for x in (options.pop(f"max_seqlen_{side}", None) for side in ("q", "kv")) if x is not None]
        longest = [as_index(x) for x in given]
        if None in longest or len({*longest}) > 1:
            raise ValueError(f"max_seqlen_q and max_seqlen_kv are {given}; accepted over an axis: one int for both, or None")
        if cu is None:
            if padded is not None or given:
                raise ValueError("cu_seqlens_q is None beside cu_seqlens_q_padded or max_seqlen_q; accepted: int32 [sequences + 1]")
            return None
        if padded is not None and fmt != "thd":
            raise ValueError(f"cu_seqlens_q_padded is given with format {fmt}; accepted: None, as only thd has gaps")
        cu, starts = jnp.asarray(cu), jnp.asarray(cu if padded is None else padded)
        for name, x in zip(names, (cu, starts), strict=True):
            check_length_tensor(name, meta_tensor(name, x), 1, torch.device("meta"))
        if fmt != "thd":
            return cls(jnp.zeros_like(cu[1:]), jnp.diff(cu))
        return cls(starts[:-1], jnp.diff(cu), longest[0] if longest else None, padded is not None)


class _Whole(NamedTuple):
    """A call whose sequence lies over an axis."""

    axis_name: str
    devices: int
    layout: str
    dim: int  # the tokens' in q, k and v
    fmt: str
    is_causal: bool
    window: Window  # with a causal mask its right side ends at the diagonal, or before
    sequences: _Sequences | None  # None: all as long as the whole

    @classmethod
    def of(cls, q: Any, k: Any, axis_name: str, layout: str, options: dict[str, Any]) -> _Whole:
        """Returns the call, checked, and takes the arguments that it stands for out of the options."""
        for name, value in options.items():
            if name in _NOT_TAKEN and value is not None and value is not False:
                raise ValueError(f"{name} is given to attention_over_axis; accepted: {_NOT_TAKEN[name]}")
        validation.check_name("layout", layout, LAYOUTS)
        fmt = options.pop("qkv_format", "bshd")
        validation.check_name("qkv_format", fmt, _FORMATS)
        sequences = _Sequences.of(fmt, options)
        if fmt == "thd" and sequences is None:
            raise ValueError(
                "cu_seqlens_q is None with thd; accepted: int32 [documents + 1], the cumulative lengths of the whole's"
            )
        mask = options.pop("attn_mask_type", "no_mask")
        if sequences is None and mask in _MASKS_OF_LENGTHS:
            raise ValueError(f"cu_seqlens_q is None with attn_mask_type {mask!r}; accepted: int32 [sequences + 1], of the whole")
        validation.check_name("attn_mask_type", mask, _MASKS if sequences is None else _MASKS_OF_LENGTHS)
        implied = bias_type_of(options.get("bias_type"), options.get("bias"), options.get("alibi_slopes"))
        is_causal, dim = "causal" in mask, fmt.index("t" if fmt == "thd" else "s")
        band = make_band(mask, options.pop("window_size", (-1, -1)), options.pop("bottom_right_diagonal", None))
        if implied == "alibi" and not is_causal:
            raise ValueError(f"bias_type is 'alibi' with {mask!r}; accepted over an axis: a causal mask, or a score_mod")
        if options.get("bias") is not None and fmt == "thd":
            raise ValueError("bias is given with thd; accepted over an axis: a score_mod that reads an array")
        if len(q.shape) != len(fmt) or len(k.shape) != len(fmt) or q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q has shape {tuple(q.shape)} and k {tuple(k.shape)} in {fmt}; accepted over an axis: as many tokens of both on "
                "each device"
            )
        if layout == "zigzag" and q.shape[dim] % 2:
            raise ValueError(f"q has {q.shape[dim]} tokens on each device with layout 'zigzag'; accepted: an even number")
        window = Window(band.left, band.right)
        return cls(axis_name, jax.lax.psum(1, axis_name), layout, dim, fmt, is_causal, window, sequences)

    def attend(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Returns out, lse and max_logit of this device's queries."""
        keys = [self._in_order(_gathered(x, self.axis_name, self.dim)) for x in (k, v)]
        device, length = jax.lax.axis_index(self.axis_name), q.shape[self.dim]
        if self.layout == "contiguous":
            return self._part(q, keys, device * length, options)
        starts = (device * (length // 2), (2 * self.devices - 1 - device) * (length // 2))
        found = []
        for i, (half, start) in enumerate(zip(jnp.split(q, 2, self.dim), starts, strict=True)):
            more = dict(options)
            if options.get("bias") is not None and options["bias"].shape[2] > 1:
                more["bias"] = jnp.split(options["bias"], 2, 2)[i]
            found.append(self._part(half, keys, start, more))
        (out, lse, largest), (out_2, lse_2, largest_2) = found
        return jnp.concatenate([out, out_2], self.dim), jnp.concatenate([lse, lse_2], -1), jnp.maximum(largest, largest_2)

    def _in_order(self, x: Any) -> Any:
        """Returns gathered tokens in the sequence's order."""
        if self.layout == "contiguous":
            return x
        parts = jnp.split(x, 2 * self.devices, self.dim)  # 0, 2n - 1, 1, 2n - 2, and so on
        return jnp.concatenate([*parts[::2], *parts[1::2][::-1]], self.dim)

    def _part(self, q: Any, keys: list[Any], start: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Returns the results of queries that begin at `start`, which is known when the program runs."""
        (k, v), count, total = keys, q.shape[self.dim], keys[0].shape[self.dim]
        given = {"qkv_format": self.fmt, **options}
        origin = _Origin(start, jnp.zeros((), jnp.int32))
        if self.is_causal or self.sequences is not None:
            found, more = self._lengths(q, start, total)
            origin, given = found if self.fmt == "thd" else origin, given | more
        elif options.get("bias") is None and None not in self.window:
            left, right = (max(0, side or 0) for side in self.window)
            if count + left + right < total:  # at any place, so dropout is drawn for each key
                begin = jnp.clip(start - left, 0, total - (count + left + right))
                k, v = (jax.lax.dynamic_slice_in_dim(x, begin, count + left + right, self.dim) for x in keys)
                origin = _Origin(start, begin, by_eights=False)
        given |= origin.mods(options, None if self.is_causal else self.window)
        if given.get("dropout_p") and given.get("rng_state") is not None:  # `attention` says where there is none
            rows = q.shape[self.fmt.index("b")] if self.fmt != "thd" else len(origin.query)
            given["rng_state"] = origin.words(front.words_of(given["rng_state"]), rows, q.shape[self.fmt.index("h")])
        return front.attend({"q": q, "k": k, "v": v} | given)

    def _lengths(self, q: Any, start: Any, total: int) -> tuple[_Origin, dict[str, Any]]:
        """Returns where the sequences of queries from `start` on begin, and the arguments that say which tokens they have."""
        count = q.shape[self.dim]
        sequences = self.sequences or _Sequences.of_batch(q.shape[self.fmt.index("b")], total)
        starts, whole, longest, is_padded = sequences
        first, stop = (jnp.clip(at - starts, 0, whole) for at in (start, start + count))
        begin, end = jnp.zeros_like(whole), whole
        most = total if longest is None else min(longest, total)
        if self.is_causal:
            end = stop  # keys end with the last query's, so the bottom-right diagonal is the whole's
        elif self.fmt == "thd":
            left, right = (None if side is None else max(0, side) for side in self.window)
            if left is not None:
                begin = jnp.maximum(0, first - left) // 8 * 8  # dropout is drawn for eight keys
            if right is not None:
                end = jnp.minimum(whole, stop + right)
            if left is not None and right is not None:
                most = min(most, left + count + right + 7)
        end = jnp.where(stop > first, end, begin)
        found = {"cu_seqlens_q": _cumulative(stop - first), "cu_seqlens_kv": _cumulative(end - begin)}
        found["attn_mask_type"] = "padding_causal_bottom_right" if self.is_causal else "padding"
        if self.is_causal:
            found["window_size"] = self.window
        if self.fmt == "thd":
            found |= {"max_seqlen_q": count if longest is None else min(longest, count), "max_seqlen_kv": most}
            found["cu_seqlens_kv_padded"] = jnp.append(starts + begin, total).astype(jnp.int32)
            if is_padded:
                found["cu_seqlens_q_padded"] = jnp.append(jnp.clip(starts - start, 0, count), count).astype(jnp.int32)
        return _Origin(first, begin), found


def _cumulative(lengths: Any) -> Any:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


class _Origin(NamedTuple):
    """Positions of a call's first query and first key in their sequence: 0-d where all have the same, else [documents]."""

    query: Any
    key: Any
    by_eights: bool = True  # whether the key's is a multiple of 8

    def mods(self, options: dict[str, Any], window: Window | None) -> dict[str, Any]:
        """Returns score_mod and mask_mod that see the positions of the whole.

        window: that mask_mod has to be as well, as the diagonal depends on the device.
        """
        found: dict[str, Any] = {}
        score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")

        def moved(b: Any, i: Any, j: Any) -> tuple[Any, Any]:
            query, key = (at[b] if at.ndim else at for at in (self.query, self.key))
            return i + query, j + key

        if score_mod is not None:
            found["score_mod"] = lambda s, b, h, i, j, *more, **named: score_mod(s, b, h, *moved(b, i, j), *more, **named)
        left, right = window or (None, None)
        masks: list[Callable[..., Any]] = [] if mask_mod is None else [mask_mod]
        masks += [lambda b, h, i, j: i - j <= left] if left is not None else []
        masks += [lambda b, h, i, j: j - i <= right] if right is not None else []
        if masks:
            found["mask_mod"] = lambda b, h, i, j: functools.reduce(
                jnp.logical_and, [mask(b, h, *moved(b, i, j)) for mask in masks]
            )
        return found

    def words(self, words: Any, rows: int, heads: int) -> Any:
        """Returns the rng_state of a call that drops what the whole does, as words; words: the whole's, uint32 [4]."""
        columns = [self.query, self.key // 8 * 8, jnp.arange(rows) * heads, *([] if self.by_eights else [self.key % 8])]
        both = [x for column in columns for x in (column, jnp.zeros((), jnp.int32))]  # the upper word is 0
        of_rows = [jnp.broadcast_to(x.astype(jnp.uint32), (rows,)) for x in (*words, *both)]
        return jnp.stack(of_rows, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: Any, axis_name: str, dim: int) -> Any:
    """Returns the tokens of all devices, one device's after another's; gradients are summed in float32."""
    return jax.lax.all_gather(x, axis_name, axis=dim, tiled=True)


def _scattered(axis_name: str, dim: int, _: None, gradient: Any) -> tuple[Any]:
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return (jax.lax.psum_scatter(wide, axis_name, scatter_dimension=dim, tiled=True).astype(gradient.dtype),)


_gathered.defvjp(lambda x, axis_name, dim: (_gathered(x, axis_name, dim), None), _scattered)
