"""Models of diffusers and torchtitan on flexattn, beside the same models on the package's own attention.

    python -m flexattn.bench.package_models --out package_models.json

The program measures a forward without gradients and a training step, both in bfloat16. Before the timing, results are compared with
the same model in float32; their error may be `WORST` times that of the package's own attention in bfloat16. A model whose package
is missing has a row with the reason. Needs a GPU.

Llama has a sixteenth of its layers and of its vocabulary, so that attention keeps its share of the time. Its results in float32
come from torch's `scaled_dot_product_attention`, which is called for one document after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from flexattn.bench import harness, record
from flexattn.bench.harness import Program, Row

WORST = 2.0
BUDGET_MS = 1000.0  # device time of each call
T = TypeVar("T")
OWN, OURS = "own", "flexattn"
PACKAGES = ("diffusers", "torchtitan")


class Sizes(NamedTuple):
    """Sizes of the models: published ones with fewer layers, or tiny ones."""

    is_tiny: bool
    device: torch.device

    def of(self, published: T, tiny: T) -> T:
        return tiny if self.is_tiny else published


class Subject(NamedTuple):
    """The same model on each attention, a call that returns its results, and a call that returns them in float32."""

    models: dict[str, nn.Module]
    run: Callable[[nn.Module], Tensor]
    exact: Callable[[], Tensor]
    attention: str  # the package's own


def _numbers(sizes: Sizes, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(sizes.device)


def _seeded(sizes: Sizes, make: Callable[[], nn.Module]) -> nn.Module:
    """Returns a model with weights of seed 0, which are drawn on the device: a CPU needs most of a minute for a billion."""
    torch.manual_seed(0)
    with torch.device(sizes.device):
        return make()


def _switched(sizes: Sizes, make: Callable[[], nn.Module], switch: Callable[[nn.Module], object]) -> dict[str, nn.Module]:
    """Returns two models of diffusers with equal weights, of which `switch` moves the second to flexattn."""
    models = {name: _seeded(sizes, make) for name in (OWN, OURS)}
    switch(models[OURS])
    return models


def _in_float32(models: dict[str, nn.Module], run: Callable[[nn.Module], Tensor]) -> Subject:
    """Returns a subject whose exact results are from the package's own attention in float32."""
    return Subject(models, run, lambda: run(models[OWN].float()), "scaled_dot_product_attention")


def prepare_torchtitan() -> None:
    """Makes torchtitan's attention run in one process and, on Hopper, without FlashAttention-3."""
    from torchtitan.models.common import decoder
    from torchtitan.tools import utils

    decoder.create_attention_mask = create_block_mask  # compiled, as torchtitan has it, it takes half a minute
    if importlib.util.find_spec("flash_attn_interface") is None:
        utils.get_cuda_flash_attention_impl = lambda: None  # torch's default is then FlashAttention-2


def flux(sizes: Sizes) -> Subject:
    """FLUX.1 with 2 of 19 double and 4 of 38 single blocks: 1,024 x 1,024 pixels and 512 tokens of text."""
    import diffusers

    from flexattn.integrations.diffusers import register

    register()
    image, text, width = sizes.of((4096, 512, 4096), (16, 8, 32))
    heads, dim, axes = sizes.of((24, 128, (16, 56, 56)), (2, 16, (4, 4, 8)))

    def make() -> nn.Module:
        model: nn.Module = diffusers.FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=4,
            num_attention_heads=heads,
            attention_head_dim=dim,
            joint_attention_dim=width,
            axes_dims_rope=axes,
        )
        return model

    inputs = {"hidden_states": _numbers(sizes, 1, image, 64), "encoder_hidden_states": _numbers(sizes, 1, text, width, seed=1)}
    inputs |= {"pooled_projections": _numbers(sizes, 1, 768), "timestep": torch.ones(1, device=sizes.device)}
    positions = {name: torch.zeros(n, 3, device=sizes.device) for name, n in (("img_ids", image), ("txt_ids", text))}

    def run(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        own = {name: x.to(dtype) for name, x in inputs.items()}
        out: Tensor = model(**own, **positions, return_dict=False)[0]
        return out

    return _in_float32(_switched(sizes, make, lambda model: model.set_attention_backend("flexattn")), run)  # type: ignore[operator]


def unet(sizes: Sizes) -> Subject:
    """Stable Diffusion 1.5's UNet: four images of 512 x 512 pixels, and 77 tokens of text."""
    import diffusers

    from flexattn.integrations.diffusers import AttnProcessor

    side, channels, width = sizes.of((64, (320, 640, 1280, 1280), 768), (16, (32, 32, 32, 32), 32))

    def make() -> nn.Module:
        model: nn.Module = diffusers.UNet2DConditionModel(block_out_channels=channels, cross_attention_dim=width)
        return model

    sample, text = _numbers(sizes, 4, 4, side, side), _numbers(sizes, 4, 77, width, seed=1)

    def run(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        out: Tensor = model(sample.to(dtype), 10, text.to(dtype), return_dict=False)[0]
        return out

    return _in_float32(_switched(sizes, make, lambda model: model.set_attn_processor(AttnProcessor())), run)  # type: ignore[operator]


def llama(sizes: Sizes, form: str, published: tuple[int, ...], tiny: tuple[int, ...]) -> Subject:
    """torchtitan's Llama 3 8B with 2 of 32 layers and 8,016 of 128,256 words: documents of these lengths in a row."""
    prepare_torchtitan()
    from torch.nn.attention import current_flash_attention_impl
    from torchtitan.models.common import attention as titan
    from torchtitan.models.llama3 import model_registry

    from flexattn.integrations.torchtitan import convert

    lengths, words = sizes.of(published, tiny), sizes.of(8016, 64)
    tokens = torch.randint(0, words, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(sizes.device)
    positions = torch.cat([torch.arange(n, device=sizes.device) for n in lengths])
    forms = {"varlen": titan.VarlenAttention, "flex": titan.FlexAttention, "sdpa": titan.ScaledDotProductAttention}

    def build(form: str, is_ours: bool = False) -> nn.Module:
        config = model_registry(sizes.of("8B", "debugmodel")).model
        config.layers = config.layers[:2]
        config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = words
        for layer in config.layers:
            layer.attention.inner_attention = forms[form].Config()
        model: nn.Module = (convert(config) if is_ours else config).build()
        model.init_states(buffer_device=sizes.device)  # type: ignore[operator]
        return model

    def run(model: nn.Module) -> Tensor:
        out: Tensor = model(tokens[None], positions[None], masks)
        return out

    def exact() -> Tensor:
        model = _seeded(sizes, lambda: build("sdpa"))
        ends = zip(itertools.accumulate(lengths), lengths, strict=True)
        return torch.cat([model(tokens[None, end - n : end], positions[None, end - n : end]) for end, n in ends], 1)

    models = {OWN: _seeded(sizes, lambda: build(form)), OURS: _seeded(sizes, lambda: build(form, is_ours=True))}
    masks = None if form == "sdpa" else models[OWN].get_attention_masks(positions[None])  # type: ignore[operator]
    varlen = f"varlen_attn, {current_flash_attention_impl() or 'FA2'}"
    own = {"sdpa": "scaled_dot_product_attention", "flex": "flex_attention, max_autotune", "varlen": varlen}
    return Subject(models, run, exact, own[form])


DOCUMENTS = (3072, 256, 1536, 512, 1920, 896), (24, 2, 6)
SUBJECTS: dict[str, Callable[[Sizes], Subject]] = {
    "FLUX.1": flux,
    "Stable Diffusion 1.5": unet,
    "Llama 3 8B": lambda sizes: llama(sizes, "sdpa", (8192,), (32,)),
    "Llama 3 8B, packed": lambda sizes: llama(sizes, "varlen", *DOCUMENTS),
    "Llama 3 8B, packed, flex": lambda sizes: llama(sizes, "flex", *DOCUMENTS),
}


def error_of(subject: Subject) -> float:
    """Returns the largest error of flexattn's results in bfloat16 over that of the package's own, against float32."""
    with torch.no_grad():
        exact = subject.exact()
        off = {name: (subject.run(model.bfloat16()).float() - exact).abs().max().item() for name, model in subject.models.items()}
    return off[OURS] / off[OWN]


def step(subject: Subject, model: nn.Module) -> None:
    """Runs a forward and a backward, and drops the gradients."""
    torch.autograd.backward(subject.run(model).float().square().mean())
    model.zero_grad(set_to_none=True)


def forward(subject: Subject, model: nn.Module) -> None:
    with torch.no_grad():
        subject.run(model)


def timed(subject: Subject) -> Iterator[Row]:
    """Yields the times of each direction and implementation, and their speed beside the package's own attention."""
    for direction, call in (("forward", forward), ("step", step)):
        calls = {name: functools.partial(call, subject, model) for name, model in subject.models.items()}
        times = harness.times(calls, BUDGET_MS, "ms")
        for name, taken in times.items():
            yield {"direction": direction, "implementation": name, "speed": times[OWN]["ms"] / taken["ms"]} | taken


def measure(make: Callable[[Sizes], Subject], sizes: Sizes) -> Iterator[Row]:
    """Yields a row for each direction and implementation of a model, with the status measured, wrong or refused."""
    try:
        subject = make(sizes)
        error = error_of(subject)
        if not error <= WORST:
            yield {"status": "wrong", "implementation": OURS, "error": error}
            return
        for times in timed(subject):
            yield {"status": "measured", "own": subject.attention, "error": error} | times
    except Exception as e:  # the packages raise errors of any kind if versions differ
        yield {"status": "refused", "reason": f"{type(e).__name__}: {e}"[:200]}


def line(row: Row) -> str:
    times = f"{row['ms']:8.2f} ms {row['speed']:5.2f}" if row["status"] == "measured" else row["status"]
    return f"{times:18} {row['model']:26} {row.get('direction', ''):8} {row.get('implementation', row.get('reason', ''))}"


PROGRAM = Program(
    "flexattn.bench.package_models",
    __doc__,
    "model",
    SUBJECTS,
    lambda make, options: measure(make, Sizes(is_tiny=False, device=torch.device("cuda"))),
    line,
    facts=lambda: {name: record.installed(name) for name in PACKAGES},
)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
