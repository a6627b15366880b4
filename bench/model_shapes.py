"""Shapes of attention in published models, as data: the preset `models`.

Heads and head dims are those of the source. Lengths follow from its image, patch or context sizes, batches are chosen here.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCES = {
    "transformers": "https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/models/{0}/configuration_{0}.py",
    "diffusers": "https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/{0}.py",
    "github": "https://github.com/{0}",
}
GEMMA2 = "github google/gemma_pytorch/blob/main/gemma/config.py"
GEMMA4 = "github google-deepmind/gemma/blob/main/gemma/gm/nn/gemma4/_gemma4.py"
LLAMA32 = "github pytorch/torchtune/blob/main/torchtune/models/llama3_2/_model_builders.py"
QWEN25 = "github pytorch/torchtune/blob/main/torchtune/models/qwen2_5/_model_builders.py"
ALPHAFOLD3 = "github google-deepmind/alphafold3/blob/main/src/alphafold3/model/network/modules.py"
ALPHAFOLD3_SINGLE = "github google-deepmind/alphafold3/blob/main/src/alphafold3/model/network/diffusion_transformer.py"
OPEN_CLIP = "github mlfoundations/open_clip/blob/main/src/open_clip/model_configs/"
T5 = "github google-research/t5x/blob/main/t5x/examples/t5/t5_1_1/"
WHISPER = "github k2-fsa/sherpa-onnx/blob/master/scripts/whisper/model-info.md"
SAM = "github facebookresearch/segment-anything/blob/main/segment_anything/build_sam.py"
UNET = "diffusers unets/unet_2d_condition"


class Shape(NamedTuple):
    """One attention call of a model.

    source: a key of SOURCES and its place there. seqlen_kv, heads_kv, head_dim_v: 0 if they are equal to those of the queries.
    packed: tokens, median and longest length of sequences that lie one after another, in place of batch and seqlen_q.
    biases: matrices [heads, seqlen_q, seqlen_kv] that are added to scores and have gradients. Each is for batch / biases entries.
    hidden_keys: the share of keys that a mask hides, at random places.
    """

    name: str
    source: str
    batch: int
    seqlen_q: int
    heads: int
    head_dim: int
    seqlen_kv: int = 0
    heads_kv: int = 0
    head_dim_v: int = 0
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    has_sink: bool = False
    has_softcap: bool = False
    biases: int = 0
    hidden_keys: float = 0.0
    packed: tuple[int, int, int] | None = None

    @property
    def url(self) -> str:
        place, _, rest = self.source.partition(" ")
        return SOURCES[place].format(rest)


SHAPES = (
    # Language models
    Shape("gpt-oss-window", "transformers gpt_oss", 2, 8192, 64, 64, heads_kv=8, is_causal=True, window=(127, 0), has_sink=True),
    Shape(
        "gpt-oss-window-128k", "transformers gpt_oss", 1, 131072, 64, 64, heads_kv=8, is_causal=True, window=(127, 0), has_sink=True
    ),
    Shape(
        "deepseek-v4-window",
        "transformers deepseek_v4",
        1,
        8192,
        64,
        512,
        heads_kv=1,
        is_causal=True,
        window=(127, 0),
        has_sink=True,
    ),
    Shape("deepseek-v3", "transformers deepseek_v3", 2, 4096, 128, 192, head_dim_v=128, is_causal=True),
    Shape("glm-5", "transformers glm_moe_dsa", 1, 8192, 64, 256, is_causal=True),
    Shape("qwen3.5", "transformers qwen3_5", 1, 16384, 16, 256, heads_kv=4, is_causal=True),
    Shape("gemma4-e2b-global", GEMMA4, 1, 8192, 8, 512, heads_kv=1, is_causal=True),
    Shape("gemma4-e2b-window", GEMMA4, 2, 8192, 8, 256, heads_kv=1, is_causal=True, window=(511, 0)),
    Shape("gemma4-26b-window", GEMMA4, 2, 8192, 16, 256, heads_kv=8, is_causal=True, window=(1023, 0)),
    Shape("gemma2-9b", GEMMA2, 1, 8192, 16, 256, heads_kv=8, is_causal=True, has_softcap=True),
    Shape(
        "mimo-v2-flash-window",
        "transformers mimo_v2_flash",
        1,
        16384,
        64,
        192,
        heads_kv=4,
        head_dim_v=128,
        is_causal=True,
        window=(127, 0),
        has_sink=True,
    ),
    Shape("falcon-7b", "transformers falcon", 8, 2048, 71, 64, heads_kv=1, is_causal=True),
    Shape("starcoder2-3b", "transformers starcoder2", 1, 16384, 24, 128, heads_kv=2, is_causal=True, window=(4095, 0)),
    Shape("qwen2.5-7b", QWEN25, 4, 4096, 28, 128, heads_kv=4, is_causal=True),
    Shape("qwen2.5-0.5b", QWEN25, 8, 2048, 14, 64, heads_kv=2, is_causal=True),
    Shape("llama3.2-3b-packed", LLAMA32, 0, 0, 24, 128, heads_kv=8, is_causal=True, packed=(32768, 1024, 8192)),
    Shape("phi3-mini", "transformers phi3", 4, 4096, 32, 96, is_causal=True),
    Shape("gpt-neox-20b", "transformers gpt_neox", 4, 2048, 64, 96, is_causal=True),
    Shape("stablelm-3b", "transformers stablelm", 4, 4096, 32, 80, is_causal=True),
    Shape("gpt2-xl", "github karpathy/nanoGPT/blob/master/model.py", 16, 1024, 25, 64, is_causal=True),
    Shape("bert-base-packed", "transformers bert", 0, 0, 12, 64, packed=(16384, 128, 512)),
    Shape("modernbert-window", "transformers modernbert", 0, 0, 12, 64, window=(64, 64), packed=(65536, 1024, 8192)),
    Shape("modernbert-global", "transformers modernbert", 0, 0, 12, 64, packed=(65536, 1024, 8192)),
    Shape("t5-base", T5 + "base.gin", 32, 512, 12, 64, biases=1),
    Shape("t5-base-decoder", T5 + "base.gin", 64, 128, 12, 64, is_causal=True, biases=1),
    Shape("t5-xxl", T5 + "xxl.gin", 4, 512, 64, 64, biases=1),
    Shape("timesfm-2.5", "transformers timesfm2_5", 64, 512, 16, 80, is_causal=True),
    # Speech
    Shape("whisper-large-encoder", WHISPER, 16, 1500, 20, 64),
    Shape("whisper-large-cross", WHISPER, 16, 448, 20, 64, seqlen_kv=1500),
    Shape("whisper-large-decoder", WHISPER, 16, 448, 20, 64, is_causal=True),
    Shape("parakeet", "transformers parakeet", 16, 375, 8, 128, biases=16),
    # Images and videos, encoded
    Shape("vit-base", "transformers vit", 128, 197, 12, 64),
    Shape("clip-l-vision", OPEN_CLIP + "ViT-L-14.json", 64, 257, 16, 64),
    Shape("clip-l-336-vision", OPEN_CLIP + "ViT-L-14-336-quickgelu.json", 32, 577, 16, 64),
    Shape("clip-l-text", OPEN_CLIP + "ViT-L-14.json", 256, 77, 12, 64, is_causal=True),
    Shape("clip-bigg-vision", OPEN_CLIP + "ViT-bigG-14.json", 32, 257, 16, 104),
    Shape("blip2-vision", "transformers blip_2", 32, 257, 16, 88),
    Shape("siglip-so400m", "github google-research/big_vision/blob/main/big_vision/models/vit.py", 32, 729, 16, 72),
    Shape("dinov2-giant", "github facebookresearch/dinov2/blob/main/dinov2/models/vision_transformer.py", 16, 1370, 24, 64),
    Shape("dinov3-7b", "github facebookresearch/dinov3/blob/main/dinov3/models/vision_transformer.py", 32, 201, 32, 128),
    Shape("beit-base", "transformers beit", 64, 197, 12, 64, biases=1),
    Shape("swin-t-stage1", "transformers swin", 4096, 49, 3, 32, biases=1),
    Shape("swin-t-stage3", "transformers swin", 512, 49, 12, 32, biases=1),
    Shape("sam-h-window", SAM, 100, 196, 16, 80, biases=100),
    Shape("sam3-window", "transformers sam3", 36, 576, 16, 64),
    Shape("sam3-global", "transformers sam3", 4, 5184, 16, 64),
    Shape("videomae-base", "transformers videomae", 8, 1568, 12, 64),
    Shape("mllama-vision", "transformers mllama", 2, 4100, 16, 80),
    Shape("qwen2-vl-vision", "transformers qwen2_vl", 0, 0, 16, 80, packed=(16384, 1500, 4096)),
    Shape("segformer-b0-stage1", "transformers segformer", 8, 16384, 1, 32, seqlen_kv=256),
    Shape("idefics2-perceiver", "transformers idefics2", 8, 64, 16, 96, seqlen_kv=4964, heads_kv=4),
    # Images and videos, generated
    Shape("sd-unet-64", UNET, 8, 4096, 8, 40),
    Shape("sd-unet-64-cross", UNET, 16, 4096, 8, 40, seqlen_kv=77),
    Shape("sd-unet-32", UNET, 16, 1024, 8, 80),
    Shape("sd-unet-16", UNET, 16, 256, 8, 160),
    Shape("dit-xl", "github facebookresearch/DiT/blob/main/models.py", 64, 256, 16, 72),
    Shape("pixart-cross", "diffusers transformers/pixart_transformer_2d", 4, 4096, 16, 72, seqlen_kv=300),
    Shape("sana-cross", "diffusers transformers/sana_transformer", 8, 1024, 20, 112, seqlen_kv=300),
    Shape("flux", "diffusers transformers/transformer_flux", 2, 4608, 24, 128),
    Shape("qwen-image", "diffusers transformers/transformer_qwenimage", 2, 4608, 24, 128, hidden_keys=0.05),
    Shape("auraflow", "diffusers transformers/auraflow_transformer_2d", 2, 4352, 12, 256),
    Shape("lumina2", "diffusers transformers/transformer_lumina2", 2, 4352, 24, 96, heads_kv=8),
    Shape("cogview4", "diffusers transformers/transformer_cogview4", 1, 4320, 64, 40),
    Shape("cogvideox-5b", "github huggingface/diffusers/blob/main/scripts/convert_cogvideox_to_diffusers.py", 1, 17776, 48, 64),
    Shape("wan-14b", "diffusers transformers/transformer_wan", 1, 75600, 5, 128),  # its heads over eight GPUs
    Shape("wan-14b-cross", "diffusers transformers/transformer_wan", 1, 75600, 40, 128, seqlen_kv=512),
    # Molecules
    Shape("alphafold3-triangle-384", ALPHAFOLD3, 384, 384, 4, 32, biases=1),
    Shape("alphafold3-triangle-384-masked", ALPHAFOLD3, 384, 384, 4, 32, biases=1, hidden_keys=0.1),
    Shape("alphafold3-triangle-768", ALPHAFOLD3, 768, 768, 4, 32, biases=1),
    Shape("alphafold3-triangle-5120", ALPHAFOLD3, 32, 5120, 4, 32, biases=1),
    Shape("alphafold3-triangle-two", ALPHAFOLD3, 512, 256, 4, 32, biases=2),
    Shape("alphafold3-template", ALPHAFOLD3, 384, 384, 4, 16, biases=1),
    Shape("alphafold3-single", ALPHAFOLD3_SINGLE, 1, 768, 16, 24, biases=1),
    Shape("alphafold3-diffusion", ALPHAFOLD3_SINGLE, 48, 384, 16, 48, biases=1),
    Shape("openfold-msa-row", "github aqlaboratory/openfold/blob/main/openfold/config.py", 128, 256, 8, 32, biases=1),
    Shape("esmc-6b-packed", "transformers esmc", 0, 0, 40, 64, packed=(16384, 350, 2048)),
)
