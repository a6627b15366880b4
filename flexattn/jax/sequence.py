"""Attention of a sequence that lies over the devices of a mesh axis: each device's queries stay, and all keys come to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flexattn import validation
from flexattn.dispatch.spec import Window, make_band
from flexattn.jax import front

LAYOUTS = ("contiguous", "zigzag")
_MASKS = ("no_mask", "causal", "causal_bottom_right")
_FORMATS = ("bshd", "sbhd", "bhsd")
_NOT_TAKEN = {
    "block_mask": "mask_mod",
    "batch_invariant": "False",
    **dict.fromkeys(("dropout_p", "rng_state"), "no dropout, as each device would drop by its own positions"),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv"),
        "sequences that are all as long as the whole",
    ),
    **dict.fromkeys(("page_table", "seqused_q", "seqused_kv"), "keys that are no cache"),
    **dict.fromkeys(
        ("fp8_recipe", "fp8_state", "descale_q", "descale_k", "descale_v"), "16 bits or more, as each device would scale its part"
    ),
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

    Called inside `jax.shard_map(..., check_vma=False)` over the axis, whose devices hold equal parts of each sequence. It is the
    strategy "gather" of `flexattn.distributed`: keys and values come by all_gather, once for the forward and once more for the
    backward, which keeps none of them; their gradients are summed in float32 by psum_scatter. Numbers are those of one device up to
    the order of that sum.

    Args:
        q, k, v: this device's tokens, in the order of `sequence_order`: [b, s, h, d] as `qkv_format` says, each with s tokens.
        axis_name: the mesh axis that sequences are split over. Heads and batch may be split over others.
        layout: "contiguous" or "zigzag", how the tokens lie on the devices.
        attn_mask_type, window_size: of the whole: "no_mask", "causal" or "causal_bottom_right", which is the same here.
        bias: [b, h, s, skv] with the rows of this device's queries and all keys, in the sequence's order.
        bias_type: ALiBi with a causal mask.
        score_mod, mask_mod: as `attention` takes them; they see the positions of the whole.
        softmax_offset: the same on each device; shard_map sums the parts of its gradient where it comes in whole, as P().
        options: others of `attention`, but for lengths, caches, dropout, block masks and FP8.

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


class _Whole(NamedTuple):
    """A call whose sequence lies over an axis."""

    axis_name: str
    devices: int
    layout: str
    dim: int  # the tokens' in q, k and v
    fmt: str
    is_causal: bool
    window: Window  # with a causal mask its right side ends at the diagonal, or before

    @classmethod
    def of(cls, q: Any, k: Any, axis_name: str, layout: str, options: dict[str, Any]) -> _Whole:
        """Returns the call, checked, and takes the arguments that it stands for out of the options."""
        for name, value in options.items():
            if name in _NOT_TAKEN and value is not None and not (name == "dropout_p" and value == 0.0) and value is not False:
                raise ValueError(f"{name} is given to attention_over_axis; accepted: {_NOT_TAKEN[name]}")
        validation.check_name("layout", layout, LAYOUTS)
        fmt = options.pop("qkv_format", "bshd")
        validation.check_name("qkv_format", fmt, _FORMATS)
        mask = options.pop("attn_mask_type", "no_mask")
        validation.check_name("attn_mask_type", mask, _MASKS)
        is_causal, dim = mask != "no_mask", fmt.index("s")
        band = make_band(mask, options.pop("window_size", (-1, -1)), options.pop("bottom_right_diagonal", None))
        if options.get("bias_type") == "alibi" and not is_causal:
            raise ValueError("bias_type is 'alibi' with 'no_mask'; accepted over an axis: a causal mask, or a score_mod")
        if len(q.shape) != 4 or len(k.shape) != 4 or q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q has shape {tuple(q.shape)} and k {tuple(k.shape)} in {fmt}; accepted over an axis: as many tokens of both on "
                "each device"
            )
        if layout == "zigzag" and q.shape[dim] % 2:
            raise ValueError(f"q has {q.shape[dim]} tokens on each device with layout 'zigzag'; accepted: an even number")
        return cls(axis_name, jax.lax.psum(1, axis_name), layout, dim, fmt, is_causal, Window(band.left, band.right))

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
        return jnp.concatenate([out, out_2], self.dim), jnp.concatenate([lse, lse_2], 2), jnp.maximum(largest, largest_2)

    def _in_order(self, x: Any) -> Any:
        """Returns gathered tokens in the sequence's order."""
        if self.layout == "contiguous":
            return x
        parts = jnp.split(x, 2 * self.devices, self.dim)  # 0, 2n - 1, 1, 2n - 2, and so on
        return jnp.concatenate([*parts[::2], *parts[1::2][::-1]], self.dim)

    def _part(self, q: Any, keys: list[Any], start: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Returns the results of queries that begin at `start`, which is known when the program runs."""
        given = {"qkv_format": self.fmt, **options}
        k, v = keys
        count, total = q.shape[self.dim], k.shape[self.dim]
        begin = jnp.zeros((), jnp.int32)
        if self.is_causal:
            # Keys end with the last query's, so the bottom-right diagonal is the whole's.
            row = jnp.arange(q.shape[self.fmt.index("b")] + 1, dtype=jnp.int32)
            given |= {"attn_mask_type": "padding_causal_bottom_right", "window_size": self.window}
            given |= {"cu_seqlens_q": row * count, "cu_seqlens_kv": row * (start + count)}
        elif options.get("bias") is None and None not in self.window:
            left, right = (max(0, side or 0) for side in self.window)
            if count + left + right < total:
                begin = jnp.clip(start - left, 0, total - (count + left + right))
                k, v = (jax.lax.dynamic_slice_in_dim(x, begin, count + left + right, self.dim) for x in keys)
        mods = _Shifted(start, begin, None if self.is_causal else self.window)
        given |= mods.of(options)
        return front.attend({"q": q, "k": k, "v": v} | given)


class _Shifted(NamedTuple):
    """Mods that see the positions of the whole, of queries and keys that begin where the program says."""

    start: Any  # position of the first query
    begin: Any  # position of the first key
    window: Window | None  # that mask_mod has to be, as the diagonal depends on the device

    def of(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns score_mod and mask_mod in the place of those in the options."""
        found: dict[str, Any] = {}
        score_mod, mask_mod, start, begin = options.get("score_mod"), options.get("mask_mod"), self.start, self.begin
        if score_mod is not None:
            found["score_mod"] = lambda s, b, h, i, j, *more, **named: score_mod(s, b, h, i + start, j + begin, *more, **named)
        left, right = self.window or (None, None)
        masks: list[Callable[..., Any]] = [] if mask_mod is None else [mask_mod]
        masks += [lambda b, h, i, j: i - j <= left] if left is not None else []
        masks += [lambda b, h, i, j: j - i <= right] if right is not None else []
        if masks:
            found["mask_mod"] = lambda b, h, i, j: functools.reduce(
                jnp.logical_and, [mask(b, h, i + start, j + begin) for mask in masks]
            )
        return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: Any, axis_name: str, dim: int) -> Any:
    """Returns the tokens of all devices, one device's after another's; gradients are summed in float32."""
    return jax.lax.all_gather(x, axis_name, axis=dim, tiled=True)


def _scattered(axis_name: str, dim: int, _: None, gradient: Any) -> tuple[Any]:
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return (jax.lax.psum_scatter(wide, axis_name, scatter_dimension=dim, tiled=True).astype(gradient.dtype),)


_gathered.defvjp(lambda x, axis_name, dim: (_gathered(x, axis_name, dim), None), _scattered)
