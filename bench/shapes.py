"""The workloads, by name: commonly measured shapes, as data. `PRESETS` has the selections of `bench --preset`."""

from __future__ import annotations

import fnmatch
import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexattn.bench.model_shapes import SHAPES, Shape

DIRECTIONS = ("forward", "backward", "both")
SCORES = ("", "softcap", "alibi", "relative_bias")


class Workload(NamedTuple):
    """One attention call, without its tensors.

    lengths_q, lengths_kv: tokens of each sequence; thd packs them, bshd needs them equal.
    score: modification of each scaled score: "softcap" (50 * tanh(s / 50), Gemma 2's), "alibi", "relative_bias" (a table's entry
        for each head and distance), "dense_bias", or "".
    biases: matrices [heads, seqlen_q, seqlen_kv] of a dense bias, which have gradients. Each is added to batch / biases sequences.
    hidden_keys: share of the keys of each sequence that a mask hides, at random places.
    """

    name: str
    group: str
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    num_heads: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] = (-1, -1)
    softmax_type: str = "vanilla"
    score: str = ""
    qkv_format: str = "bshd"
    dtype: str = "bfloat16"
    biases: int = 1
    hidden_keys: float = 0.0

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def directions(self) -> tuple[str, ...]:
        """Directions of the workload. A decoding step has no backward."""
        return DIRECTIONS if self.seqlen_q > 1 else DIRECTIONS[:1]

    @property
    def is_ragged(self) -> bool:
        return self.qkv_format == "thd"

    @property
    def seqlen_q(self) -> int:
        """Tokens of the longest sequence of queries."""
        return max(self.lengths_q)

    @property
    def seqlen_kv(self) -> int:
        return max(self.lengths_kv)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_heads_kv

    @property
    def repeats_bias(self) -> bool:
        """Returns whether more than one sequence, but not all, share a matrix of the dense bias."""
        return self.biases not in (1, self.batch)

    @property
    def is_causal(self) -> bool:
        return "causal" in self.attn_mask_type

    def __str__(self) -> str:
        """Returns the shape in one line, in terms of `attention`'s arguments."""
        heads = f"h{self.num_heads}" + (f"/{self.num_heads_kv}" if self.group_size > 1 else "")
        dims = f"d{self.head_dim_qk}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim_qk else "")
        if self.is_ragged:
            tokens = f"{self.batch} sequences of {min(self.lengths_q)} to {self.seqlen_q}, {sum(self.lengths_q)} tokens"
        elif self.seqlen_q == self.seqlen_kv:
            tokens = f"b{self.batch} s{self.seqlen_q}"
        else:
            tokens = f"b{self.batch} s{self.seqlen_q}/{self.seqlen_kv}"
        parts = [tokens, heads, dims, self.attn_mask_type]
        parts += [f"window {self.window_size}"] if self.window_size != (-1, -1) else []
        parts += [f"{self.softmax_type} sink"] if self.softmax_type != "vanilla" else []
        parts += [self.score] if self.score else []
        parts += [f"of {self.biases} matrices"] if self.biases > 1 else []
        parts += [f"{self.hidden_keys:.0%} of keys hidden"] if self.hidden_keys else []
        return " ".join(parts)

    def shortened(self, longest: int, most_sequences: int = 2, most_heads: int = 2) -> Workload:
        """Returns a call of the same kind, small enough for Triton's interpreter: fewer and shorter sequences, fewer heads."""
        group = min(self.group_size, most_heads)

        def cut(lengths: tuple[int, ...]) -> tuple[int, ...]:
            chosen = sorted(lengths)[-1:] + sorted(lengths)[: most_sequences - 1] if self.is_ragged else lengths[:most_sequences]
            return tuple(max(1, min(longest, n * longest // max(lengths))) for n in chosen)

        left, right = self.window_size
        return self._replace(
            name=f"{self.name} shortened",
            biases=min(self.biases, most_sequences),
            lengths_q=cut(self.lengths_q) if self.seqlen_q > 1 else self.lengths_q[:most_sequences],
            lengths_kv=cut(self.lengths_kv),
            num_heads=group,
            num_heads_kv=1,
            window_size=(min(left, longest // 3), min(right, longest // 3)),
        )


def dense(
    name: str, group: str, batch: int, seqlen: int, heads: tuple[int, int], dims: tuple[int, int], **more: object
) -> Workload:
    """Returns a workload of `batch` sequences of `seqlen` tokens. heads: (query, key) heads. dims: (d_qk, d_v)."""
    lengths = (seqlen,) * batch
    return Workload(name, group, lengths, lengths, *heads, *dims, **more)  # type: ignore[arg-type]


def ragged(name: str, lengths: Sequence[int], heads: tuple[int, int], dims: tuple[int, int], group: str = "ragged") -> Workload:
    """Returns a workload of packed sequences, causal within each."""
    lengths = tuple(lengths)
    return Workload(name, group, lengths, lengths, *heads, *dims, attn_mask_type="padding_causal", qkv_format="thd")


def evened(ragged: Workload) -> Workload:
    """Returns a dense batch to compare with a packed one: about the same tokens and scores, in sequences of one length.

    This length is sum(n**2) / sum(n), the mean over tokens of their sequence's length, rounded to a multiple of 128.
    """
    tokens = sum(ragged.lengths_q)
    seqlen = 128 * round(sum(n * n for n in ragged.lengths_q) / tokens / 128)
    heads, dims = (ragged.num_heads, ragged.num_heads_kv), (ragged.head_dim_qk, ragged.head_dim_v)
    return dense(f"{ragged.name}-evened", ragged.group, round(tokens / seqlen), seqlen, heads, dims, attn_mask_type="causal")


SWEEP_TOKENS, SWEEP_WIDTH = 16384, 2048
SWEEP_HEAD_DIMS = (128, 64, 256)
SWEEP_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = {"causal": "causal", "full": "no_mask"}


def sweep(head_dim: int, mask: str, seqlen: int, group: str = "sweep") -> Workload:
    """Returns a cell of FlashAttention's benchmark: 16384 tokens, heads * head dim = 2048 (its README, "Performance")."""
    name = f"{group}-d{head_dim}-{mask}-s{seqlen}"
    heads = SWEEP_WIDTH // head_dim
    return dense(name, group, SWEEP_TOKENS // seqlen, seqlen, (heads, heads), (head_dim, head_dim), attn_mask_type=MASKS[mask])


ODD_SEQLENS = (641, 777, 897, 1500, 3001, 6000, 12289)
"""Lengths that are no multiple of a block and lie between lengths that decide the choice of kernels."""


# Token counts of this library's own sources and pages as `python -m flexattn demo` packed them once; fixed, so that runs compare.
DOCUMENTS = (
    *(604, 1494, 24, 1822, 577, 21, 119, 380, 567, 1418, 1285, 2728, 3226, 24, 871),
    *(4096, 278, 2744, 80, 946, 2439, 822, 2644, 2325, 503, 256, 180, 75, 22),
)


def log_normal_lengths(tokens: int = 32768, median: float = 512.0, sigma: float = 1.2, longest: int = 8192) -> tuple[int, ...]:
    """Returns lengths from a log-normal distribution that fill `tokens`, the same on every machine."""
    generator = random.Random(0)
    lengths: list[int] = []
    while room := tokens - sum(lengths):
        drawn = int(median * 2.718281828459045 ** (sigma * generator.gauss(0.0, 1.0)))
        lengths.append(min(max(1, drawn), longest, room))
    return tuple(lengths)


PUBLISHED = "published"
"""The group of shapes of published models, in `model_shapes`. A third of them is unseen."""


def published(shape: Shape) -> Workload:
    """Returns the workload of a published model's shape."""
    lengths = (shape.seqlen_q,) * shape.batch
    mask = "causal" if shape.is_causal else "no_mask"
    if shape.packed is not None:
        tokens, median, longest = shape.packed
        lengths = log_normal_lengths(tokens, median, longest=longest)
        mask = "padding_causal" if shape.is_causal else "padding"
    return Workload(
        f"models-{shape.name}",
        PUBLISHED,
        lengths,
        (shape.seqlen_kv,) * shape.batch if shape.seqlen_kv else lengths,
        shape.heads,
        shape.heads_kv or shape.heads,
        shape.head_dim,
        shape.head_dim_v or shape.head_dim,
        attn_mask_type=mask,
        window_size=shape.window,
        softmax_type="learnable" if shape.has_sink else "vanilla",
        score="dense_bias" if shape.biases else "softcap" if shape.has_softcap else "",
        qkv_format="bshd" if shape.packed is None else "thd",
        biases=shape.biases or 1,
        hidden_keys=shape.hidden_keys,
    )


def is_unseen(workload: Workload) -> bool:
    """Returns whether a published shape is one that no tile and no rule is chosen by. A hash of the name decides."""
    return workload.group == PUBLISHED and hashlib.sha256(workload.name.encode()).digest()[0] < 256 // 3


def scores_of(workload: Workload) -> int:
    """Returns the scores of all heads times the head dims, the masked ones included: an order of the time that a shape takes."""
    pairs = sum(q * kv for q, kv in zip(workload.lengths_q, workload.lengths_kv, strict=True))
    return pairs * workload.num_heads * (workload.head_dim_qk + workload.head_dim_v)


RAGGED = tuple(
    ragged(f"ragged-{name}", lengths, (32, 8), (128, 128))
    for name, lengths in (("documents", DOCUMENTS), ("log-normal", log_normal_lengths()))
)
CAUSAL = {"attn_mask_type": "causal"}
MODS = "score_mods"
"""The group of scores and masks that FlexAttention is made for. flexattn also runs them written as functions."""
OLDER = "older"
"""Shapes beside the sweep's for GPUs with mma.sync: head dim 96, short sequences and windows."""


def latent(mask: str, seqlen: int) -> Workload:
    """Returns a cell with the head dims of DeepSeek's attention without a cache, 192 and 128."""
    name = f"older-d192-128-{mask}-s{seqlen}"
    return dense(name, OLDER, SWEEP_TOKENS // seqlen, seqlen, (16, 16), (192, 128), attn_mask_type=MASKS[mask])


def windowed(head_dim: int) -> Workload:
    """Returns 4,096 tokens whose queries see 1,024 keys each."""
    return sweep(head_dim, "causal", 4096, OLDER)._replace(name=f"older-d{head_dim}-window-s4096", window_size=(1023, 0))


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        # Models, by their published configurations.
        *(dense(f"llama3-8b-s{s}", "models", 16384 // s, s, (32, 8), (128, 128), **CAUSAL) for s in (2048, 8192)),
        dense("llama3-70b-s8192", "models", 1, 8192, (64, 8), (128, 128), **CAUSAL),
        dense(
            "gpt-oss-window-s8192", "models", 2, 8192, (64, 8), (64, 64), **CAUSAL, window_size=(1023, 0), softmax_type="learnable"
        ),  # 128 key positions in the released model; 1024 in cuDNN's benchmark of it
        dense("gpt-oss-full-s8192", "models", 2, 8192, (64, 8), (64, 64), **CAUSAL, softmax_type="learnable"),
        dense("deepseek-v3-s4096", "models", 1, 4096, (128, 128), (192, 128), **CAUSAL),
        # A quarter of Llama-3-8B's heads: the share of a GPU under tensor parallelism over four.
        dense("long-128k", "long", 1, 131072, (8, 2), (128, 128), **CAUSAL),
        *RAGGED,
        *map(evened, RAGGED),
        # One query for each of 64 sequences against a cache. It sees all keys, so no mask is needed.
        *(Workload(f"decode-kv{n}", "decode", (1,) * 64, (n,) * 64, 32, 8, 128, 128) for n in (2048, 8192)),
        *(dense(f"small-s{s}", "small", 1, s, (16, 16), (64, 64), **CAUSAL) for s in (128, 256, 512)),
        # Scores and masks that FlexAttention is made for, with Llama-3-8B's dims.
        *(
            dense(f"score-{score.replace('_', '-')}", MODS, 4, 4096, (16, 16), (128, 128), **CAUSAL, score=score)
            for score in SCORES[1:]
        ),
        dense("score-causal", MODS, 4, 4096, (16, 16), (128, 128), **CAUSAL),
        dense("score-sliding-window", MODS, 2, 8192, (16, 16), (128, 128), **CAUSAL, window_size=(1023, 0)),
        ragged("score-document-mask", DOCUMENTS, (16, 16), (128, 128), MODS),
        *(sweep(d, mask, s) for d in SWEEP_HEAD_DIMS for mask in MASKS for s in SWEEP_SEQLENS),
        *(sweep(d, mask, s, "odd") for d in SWEEP_HEAD_DIMS for mask in MASKS for s in ODD_SEQLENS),
        *(sweep(96, mask, s, OLDER) for mask in MASKS for s in (1024, 4096)),
        *(latent(mask, s) for mask in MASKS for s in (1024, 4096)),
        *(sweep(d, mask, 256, OLDER) for d in (64, 128) for mask in MASKS),
        *map(windowed, SWEEP_HEAD_DIMS),
        # The slowest last, so that a run whose time is spent has all others.
        *sorted(map(published, SHAPES), key=scores_of),
    )
}

TITLES = {
    "llama3-8b-s2048": "Llama 3 8B, 2,048 tokens",
    "llama3-8b-s8192": "Llama 3 8B, 8,192 tokens",
    "llama3-70b-s8192": "Llama 3 70B, 8,192 tokens",
    "gpt-oss-window-s8192": "gpt-oss, window, 8,192 tokens",
    "gpt-oss-full-s8192": "gpt-oss, causal, 8,192 tokens",
    "deepseek-v3-s4096": "DeepSeek-V3, 4,096 tokens",
    "long-128k": "One sequence of 128k tokens",
    "ragged-documents": "Packed documents",
    "ragged-log-normal": "Packed, log-normal lengths",
    "ragged-documents-evened": "Dense batch like documents",
    "ragged-log-normal-evened": "Dense batch like log-normal",
    "decode-kv2048": "Decode, 64 x 2,048 keys",
    "decode-kv8192": "Decode, 64 x 8,192 keys",
    "small-s128": "One sequence of 128 tokens",
    "small-s256": "One sequence of 256 tokens",
    "small-s512": "One sequence of 512 tokens",
    "score-softcap": "Softcap",
    "score-alibi": "ALiBi",
    "score-relative-bias": "Relative bias",
    "score-causal": "Causal mask",
    "score-sliding-window": "Sliding window",
    "score-document-mask": "Document mask",
}


def title_of(workload: Workload) -> str:
    """Returns a workload's name in words."""
    if workload.group not in ("sweep", OLDER):
        return TITLES.get(workload.name, workload.name)
    mask = "window" if workload.window_size != (-1, -1) else "causal" if workload.is_causal else "no mask"
    return f"Head dim {workload.head_dim_qk}, {mask}, {workload.seqlen_q:,} tokens"


PRESETS: dict[str, tuple[str, ...]] = {
    "tiny": ("small-s256", "small-s512"),
    "quick": ("sweep-*-s4096",),
    "standard": (
        "llama3-*",
        "gpt-oss-*",
        "deepseek-*",
        "ragged-*",
        "score-*",
        "decode-*",
        "small-*",
        *(f"sweep-d{d}-*" for d in SWEEP_HEAD_DIMS),
        "long-*",
    ),
    "sweep": ("sweep-*",),
    "models": ("models-*",),
    "small": ("small-*", "decode-*"),
    MODS: ("score-*",),
    "odd": ("odd-*",),
    # The first ones are enough for a table; a run that ends early has them.
    OLDER: (
        *(f"sweep-d{d}-*-s{s}" for s in (4096, 1024) for d in SWEEP_HEAD_DIMS),
        "older-d96-*",
        *("llama3-8b-*", "ragged-documents", "ragged-log-normal", "score-*"),
        *("sweep-*-s16384", "sweep-*-s512", "older-*", "decode-*"),
    ),
    "all": ("*",),
}


def select(patterns: Iterable[str]) -> list[Workload]:
    """Returns the workloads of names, patterns ("sweep-d64-*") or presets, each once, in the order of the arguments.

    Raises ValueError if a pattern matches none.
    """
    chosen: dict[str, Workload] = {}
    for pattern in (p for name in patterns for p in PRESETS.get(name, (name,))):
        found = fnmatch.filter(WORKLOADS, pattern)
        if not found:
            raise ValueError(
                f"no workload is called {pattern!r}; accepted: names and patterns of `bench --list`, as 'llama3-8b-s8192' or "
                f"'sweep-d64-*', and the presets {', '.join(PRESETS)}"
            )
        chosen |= {name: WORKLOADS[name] for name in found}
    return list(chosen.values())
