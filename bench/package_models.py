"""Models of diffusers and torchtitan on flexattn, beside the same models on the package's own attention.

    python -m flexattn.bench.package_models --out package_models.json

The program measures a forward without gradients and a training step, both in bfloat16. Before the timing, results are compared with
the package's own attention in float32; their error may be `WORST` times that of its own attention in bfloat16. Needs a GPU. A model
whose package is missing has a row with the reason.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flexattn.bench import record
from flexattn.bench.harness import Row, Run, event_times, in_turns, make_parser, need_gpu, quartiles

WORST = 2.0
ROUNDS = 8
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
    """The same model on each attention, and a call that returns its results."""

    models: dict[str, nn.Module]
    run: Callable[[nn.Module], Tensor]


def _numbers(sizes: Sizes, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(sizes.device)


def _twice(make: Callable[[], nn.Module], switch: Callable[[nn.Module], object]) -> dict[str, nn.Module]:
    """Returns two models with equal weights, of which `switch` moves the second to flexattn."""
    models = {}
    for name in (OWN, OURS):
        torch.manual_seed(0)
        models[name] = make()
    switch(models[OURS])
    return models


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

    return Subject(_twice(make, lambda model: model.set_attention_backend("flexattn")), run)  # type: ignore[operator]


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

    return Subject(_twice(make, lambda model: model.set_attn_processor(AttnProcessor())), run)  # type: ignore[operator]


def llama(sizes: Sizes, attention: str) -> Subject:
    """torchtitan's Llama 3 8B with 2 of 32 layers: 8,192 tokens of six packed documents."""
    from torchtitan.models.llama3 import model_registry

    from flexattn.integrations.torchtitan import convert

    lengths = sizes.of((3072, 256, 1536, 512, 1920, 896), (24, 2, 6))
    tokens = torch.randint(0, 2048, (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to(sizes.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(sizes.device)
    names = iter((OWN, OURS))

    def make() -> nn.Module:
        config = model_registry(sizes.of("8B", "debugmodel"), attn_backend=attention).model
        config.layers = config.layers[:2]
        model: nn.Module = (convert(config) if next(names) == OURS else config).build()
        model.init_states(buffer_device=torch.device("cpu"))  # type: ignore[operator]
        return model

    models = _twice(make, lambda model: None)
    masks = models[OWN].get_attention_masks(positions)  # type: ignore[operator]

    def run(model: nn.Module) -> Tensor:
        out: Tensor = model(tokens, positions, masks)
        return out

    return Subject(models, run)


SUBJECTS: dict[str, Callable[[Sizes], Subject]] = {
    "FLUX.1": flux,
    "Stable Diffusion 1.5": unet,
    "Llama 3 8B, packed": lambda sizes: llama(sizes, "varlen"),
    "Llama 3 8B, packed, flex": lambda sizes: llama(sizes, "flex"),
}


def error_of(subject: Subject) -> float:
    """Returns the largest error of flexattn's results in bfloat16 over that of the package's own, against its own in float32."""
    with torch.no_grad():
        exact = subject.run(subject.models[OWN].float()).float()
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

        def turn(name: str, call: Callable[[Subject, nn.Module], None] = call) -> list[float]:
            return event_times(lambda: call(subject, subject.models[name]), 1, int)

        in_turns(subject.models, 2, turn)  # compiles
        samples = in_turns(subject.models, ROUNDS, turn)
        times = {name: quartiles([us * 1e-3 for us in taken], "ms") for name, taken in samples.items()}
        for name, taken in times.items():
            yield {"direction": direction, "implementation": name, "speed": times[OWN]["ms"] / taken["ms"]} | taken


def measure(sizes: Sizes) -> Iterator[Row]:
    """Yields a row for each model, direction and implementation, with the status measured, wrong or refused."""
    for name, make in SUBJECTS.items():
        row: Row = {"model": name}
        try:
            subject = make(sizes)
            for model in subject.models.values():
                model.to(sizes.device)
            error = error_of(subject)
        except Exception as e:  # the packages raise errors of any kind if versions differ
            yield row | {"status": "refused", "reason": f"{type(e).__name__}: {e}"[:200]}
            continue
        if not error <= WORST:
            yield row | {"status": "wrong", "implementation": OURS, "error": error}
            continue
        for times in timed(subject):
            yield row | {"status": "measured", "error": error} | times
        del subject
        gc.collect()
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    options = parser.parse_args(argv)
    need_gpu(parser)
    facts = {name: record.installed(name) for name in PACKAGES}
    run = Run("flexattn.bench.package_models", __doc__, options.out, argv, **facts)
    for row in measure(Sizes(is_tiny=False, device=torch.device("cuda"))):
        times = f"{row['ms']:8.2f} ms {row['speed']:5.2f}" if row["status"] == "measured" else row["status"]
        run.add(
            row, f"{times:18} {row['model']:26} {row.get('direction', ''):8} {row.get('implementation', row.get('reason', ''))}"
        )
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
