"""`python -m flexattn explain`: a call described by its shapes on the command line, and which backend would run it."""

from __future__ import annotations

import argparse
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import ops
from flexattn.build_ahead import explain_built
from flexattn.call_options import DEFAULTS
from flexattn.cli import Parser, program
from flexattn.dispatch import explain as explanations
from flexattn.dispatch import options
from flexattn.dispatch.quantization import GRANULARITIES
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import BIAS_TYPES, MASK_TYPES, SOFTMAX_TYPES, AttentionSpec, Operands, parse_format
from flexattn.fp8 import FORMATS, Recipe
from flexattn.functional import bind_call
from flexattn.mods.trace import mod_source
from flexattn.plot import plot_mask

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DRAWN = ("q", "k", "v", "qkv_format", "attn_mask_type", "window_size", "score_mod", "mask_mod", "cu_seqlens_q", "cu_seqlens_kv")
"""Arguments of `attention` that a picture shows, beside the longest lengths and ALiBi."""

EXAMPLES = """examples:
  %(prog)s --q 2,4096,32,128 --kv-heads 8 --mask causal --capability 9.0
  %(prog)s --q 16384,32,128 --format thd --mask padding_causal --batch 8 --verbose
  %(prog)s --q 1,64,4,64 --mask causal --window 16,0 --picture mask.png
"""


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("explain", EXAMPLES)
    add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="print the reason against each other backend and kernel too")
    parser.add_argument("--source", action="store_true", help="also print the Triton functions that the mods are lowered to")
    parser.add_argument("--build", action="store_true", help="build the kernels or plans first: the answer is then final")
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the keys that each query sees, as PNG, SVG or PDF; sequences of thd are of equal lengths, a bias is left out",
    )
    args = parser.parse_args(arguments)
    try:
        found = answer(args)
        print(found.details if args.verbose else found)  # noqa: T201
        if args.source:
            print(source(args))  # noqa: T201
        if args.picture is not None:
            draw(args)
    except BrokenPipeError:
        raise
    except (ImportError, OSError, TypeError, ValueError) as e:
        parser.error(str(e))
    except BackendError as e:
        parser.exit(1, f"{e}\n")
    return 0


def make_parser(command: str, examples: str, needed: str = "--q SHAPE") -> Parser:
    usage = f"%(prog)s {needed} [OPTION ...]"
    return Parser(prog=program(command), usage=usage, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Names and defaults are those of flexattn.attention(). Nothing is allocated or run."
    parser.add_argument("--q", type=_shape, required=True, metavar="2,4096,32,128", help="shape of q, in --format")
    parser.add_argument("--kv", type=_shape, metavar="SHAPE", help="shape of k (default: q's, with --kv-heads)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="heads of k and v (default: q's)")
    parser.add_argument("--head-dim-v", type=positive, metavar="N", help="head dim of v (default: q's)")
    parser.add_argument("--format", dest="qkv_format", metavar="FORMAT", default="bshd", help="qkv_format (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences, for thd (default: %(default)s)")
    parser.add_argument("--max-seqlen", type=positive, metavar="N", help="the longest sequence, for thd (default: all tokens)")
    parser.add_argument(
        "--mask", dest="attn_mask_type", default="no_mask", choices=MASK_TYPES, help="attn_mask_type (default: %(default)s)"
    )
    parser.add_argument(
        "--window", dest="window_size", type=_window, default=(-1, -1), metavar="L,R", help="window_size, or N (default: -1,-1)"
    )
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="dtype of q, k and v (default: %(default)s)")
    parser.add_argument("--bias", dest="bias_type", default="no_bias", choices=BIAS_TYPES, help="bias_type (default: %(default)s)")
    parser.add_argument("--bias-shape", type=_shape, metavar="B,H,SQ,SKV", help="shape of bias (default: 1,h,sq,skv)")
    parser.add_argument(
        "--softmax", dest="softmax_type", default="vanilla", choices=SOFTMAX_TYPES, help="softmax_type (default: %(default)s)"
    )
    parser.add_argument("--softcap", type=float, default=0.0, metavar="C", help="softcap (default: none)")
    parser.add_argument("--dropout", dest="dropout_p", type=float, default=0.0, metavar="P", help="dropout_p (default: none)")
    parser.add_argument("--fp8", choices=GRANULARITIES, help="granularity of fp8_recipe (default: no recipe)")
    parser.add_argument("--fp8-format", choices=FORMATS, help="fp8_format of fp8_recipe (default: E4M3)")
    parser.add_argument("--deterministic", action="store_true", help="deterministic")
    parser.add_argument("--max-logit", dest="return_max_logit", action="store_true", help="return_max_logit")
    parser.add_argument("--no-grad", action="store_true", help="no input requires a gradient")
    parser.add_argument("--lse-grad", action="store_true", help="lse is returned, and has a gradient too")
    parser.add_argument("--backend", choices=options.REQUESTS, help="backend (default: FLEXATTN_BACKEND, else auto)")
    parser.add_argument("--score-mod", type=_function, metavar="MODULE:FUNCTION", help="score_mod")
    parser.add_argument("--mask-mod", type=_function, metavar="MODULE:FUNCTION", help="mask_mod")
    parser.add_argument(
        "--capability",
        type=_capability,
        metavar="9.0",
        help="compute capability of a GPU that need not be here (default: this machine's GPU, else its CPU)",
    )


def answer(args: argparse.Namespace) -> explanations.Explanation:
    """Returns `flexattn.explain` of the call; raises its ValueError, TypeError and BackendError."""
    x, settings, spec = parse(args)
    return (explain_built if args.build else explanations.explain)(spec, settings.backend, x)


def parse(args: argparse.Namespace) -> tuple[Operands, ops.Settings, AttentionSpec]:
    """Returns the call, on the meta device, and its spec on the given GPU; raises the errors of `attention`."""
    x, settings = bind_call(**_call(args))
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    capability = args.capability or here
    spec = ops.spec_to_run(x, settings)._replace(
        device_type="cpu" if capability is None else "cuda", capability=capability, needs_lse_grad=args.lse_grad
    )
    return x, settings, spec


def draw(args: argparse.Namespace) -> None:
    """Draws the mask and the bias; raises ImportError without matplotlib, and ValueError if the kind of file is unknown."""
    call = {name: value for name, value in _call(args).items() if name in DRAWN or name.startswith("max_seqlen")}
    tensors = {name: torch.zeros(*call[name].shape[:-1], 8, device="cpu") for name in "qkv"}  # a mask knows no head dim
    if "cu_seqlens_q" in call:
        batch = call["cu_seqlens_q"].shape[0] - 1
        for side, fmt, t in zip(("q", "kv"), parse_format(args.qkv_format), (tensors["q"], tensors["k"]), strict=True):
            tokens = t.shape[0] // batch if fmt == "thd" else t.shape[fmt.index("s")]
            tensors[f"cu_seqlens_{side}"] = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * tokens
    alibi = args.bias_type if args.bias_type == "alibi" else "no_bias"
    ax: Any = plot_mask(**call | tensors, bias_type=alibi)
    ax.figure.savefig(args.picture)


_OTHERS = {"max_seqlen", "out"}  # names of options that are no arguments of the call


def _call(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `attention`, with tensors on the meta device."""
    q_format, kv_format = parse_format(args.qkv_format)
    dtype, training = DTYPES[args.dtype], not args.no_grad
    heads = args.q[q_format.index("h")] if len(args.q) == len(q_format) else 1
    kv = args.kv or tuple(args.kv_heads or n if q_format[i : i + 1] == "h" else n for i, n in enumerate(args.q))
    v = (*kv[:-1], args.head_dim_v or kv[-1])
    call: dict[str, Any] = {
        "q": _tensor(args.q, dtype, training),
        "k": _tensor(kv, dtype, training),
        "v": _tensor(v, dtype, training),
        **{name: value for name, value in vars(args).items() if name in DEFAULTS.keys() - _OTHERS},
    }
    if args.fp8 is not None:
        call["fp8_recipe"] = Recipe(granularity=args.fp8, fp8_format=args.fp8_format or "E4M3")
    elif args.fp8_format is not None:
        raise ValueError("--fp8-format is given without --fp8; accepted: both")
    batch = args.batch if q_format == "thd" else args.q[q_format.index("b")] if len(args.q) == len(q_format) else 1
    if "padding" in args.attn_mask_type:
        call["cu_seqlens_q"] = call["cu_seqlens_kv"] = _tensor((batch + 1,), torch.int32, False)
    for side, fmt, shape in (("q", q_format, args.q), ("kv", kv_format, kv)):
        if fmt == "thd":
            call[f"max_seqlen_{side}"] = args.max_seqlen or shape[0]
    if args.bias_type.endswith("scale_bias"):
        lengths = [
            call.get(f"max_seqlen_{s}") or shape[f.index("s")] for s, f, shape in (("q", q_format, args.q), ("kv", kv_format, kv))
        ]
        call["bias"] = _tensor(args.bias_shape or (1, heads, *lengths), dtype, training)
    if args.softmax_type == "learnable":
        call["softmax_offset"] = _tensor((heads,), torch.float32, training)
    return call


def source(args: argparse.Namespace) -> str:
    """Returns the text of --source; raises ValueError if no mod is given."""
    if args.score_mod is None and args.mask_mod is None:
        raise ValueError("--source is for mods: give --score-mod or --mask-mod, as package.module:function")
    return mod_source(args.score_mod, args.mask_mod)


def _function(name: str) -> Callable[..., Tensor]:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{name!r} is not to be had ({e}); accepted: package.module:function") from e
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{name!r} is a {type(found).__name__}; accepted: package.module:function")
    return found  # type: ignore[no-any-return]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def positive(text: str) -> int:
    """Parses a size on the command line: 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; accepted: an integer of 1 or more")
    return number


def _shape(text: str) -> tuple[int, ...]:
    sizes = _numbers(text)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}, with a size of {min(sizes)}; accepted: sizes of 1 or more")
    return sizes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; accepted: integers with commas between them") from None


def _window(text: str) -> int | tuple[int, ...]:
    sides = _numbers(text)
    return sides if len(sides) > 1 else sides[0]


_CAPABILITY = re.compile(r"(?:sm_?)?(\d{1,2}?)(?:\.?(\d))?[af]?")


def _capability(text: str) -> tuple[int, int]:
    """Parses "9.0", "90", "sm_90", "sm90" and "sm_9.0" as (9, 0), "103" as (10, 3): without a point the last digit is the minor."""
    found = _CAPABILITY.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"it is {text!r}; accepted: a compute capability, as 9.0, 90, sm_90 or sm_103")
    return int(found[1]), int(found[2] or 0)
