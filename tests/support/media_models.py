"""Tiny model folders of every kind that takes images: settings alone, without weights, and a tokenizer of bytes.

Numbers are such that pictures of a few hundred pixels reach every branch of the size rules.
"""

import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmd_worker.media.image_processor import ImageProcessor, read_image_processor
from spmd_worker.media.prepared import Pixels
from spmd_worker.model_config.vision_config import VisionConfig

SPECIAL: Final = (
    *("<eos>", "<bos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>"),
    *("<end_of_image>", "<image_soft_token>", "<image>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>"),
    *("</img>", "<IMG_CONTEXT>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)),
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
GEMMA4_SPECIAL: Final = ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>")
PAGE_SPECIAL: Final = (
    *("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|vision_pad|>", "<image_placeholder>"),
)
"""Of PaddleOCR-VL, LightOnOCR and DeepSeek-VL."""
GRANITE_SPECIAL: Final = tuple(
    f"<row_{row + 1}_col_{column + 1}>" for row in range(16) for column in range(16) if max(row, column) >= 6
)
"""Places of tiles that Idefics3 has not."""
LFM2_SPECIAL: Final = (
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(5) for column in range(5)),
)
EXAONE_SPECIAL: Final = ("<vision>", "</vision>")
MINICPM_SPECIAL: Final = ("</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
COHERE_SPECIAL: Final = tuple(f"<|{each}|>" for each in ("START_OF_IMG", "IMG_PATCH", "IMG_LINE_BREAK", "END_OF_IMG"))
KIMI_SPECIAL: Final = (
    *(f"<|media_{part}|>" for part in ("begin", "content", "pad", "end")),
    "<|kimi_k25_video_placeholder|>",
)
PINPOINTS: Final = [[84 * lines, 84 * columns] for lines in (1, 2, 3) for columns in (1, 2, 3)]


@dataclass(frozen=True, slots=True)
class MediaModel:
    """Contents of the two files, and the module and class of transformers that prepares images."""

    config: dict[str, Any]
    settings: dict[str, Any]
    oracle: tuple[str, str]


_CLIP: Final = {"model_type": "clip_vision_model", "image_size": 84, "patch_size": 14}
_SIGLIP: Final = {"model_type": "siglip_vision_model", "image_size": 84, "patch_size": 14}
MODELS: Final = {
    "qwen3_vl": MediaModel(
        {"vision_config": {"patch_size": 16}},
        {
            "patch_size": 16,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        },
        ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    ),
    "qwen2_vl": MediaModel(
        {"vision_config": {}}, {"min_pixels": 784, "max_pixels": 50176}, ("qwen2_vl", "Qwen2VLImageProcessorPil")
    ),
    "qwen2_5_vl": MediaModel(
        {"vision_config": {}}, {"min_pixels": 3136, "max_pixels": 100352}, ("qwen2_vl", "Qwen2VLImageProcessorPil")
    ),
    "exaone4_5": MediaModel(
        {"vision_config": {}}, {"min_pixels": 3136, "max_pixels": 50176}, ("qwen2_vl", "Qwen2VLImageProcessorPil")
    ),
    "glm4v": MediaModel(
        {"vision_config": {}},
        {"size": {"shortest_edge": 6272, "longest_edge": 100352}},
        ("glm4v", "Glm4vImageProcessorPil"),
    ),
    "paddleocr_vl": MediaModel(
        {"vision_config": {}},
        {"size": {"shortest_edge": 3136, "longest_edge": 100352}},
        ("paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
    ),
    "kimi_k25": MediaModel(
        {"vision_config": {}},
        {"size": {"max_height": 12, "max_width": 12}, "max_patches": 64},
        # It has no processor for Pillow: see media_oracle.py.
        ("kimi_k25", "Kimi_K25ImageProcessor"),
    ),
    "gemma3": MediaModel(
        {"vision_config": {**_SIGLIP, "image_size": 112}, "mm_tokens_per_image": 16},
        {"size": {"height": 112, "width": 112}},
        ("gemma3", "Gemma3ImageProcessorPil"),
    ),
    "gemma4": MediaModel(
        {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 288}},
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ("gemma4", "Gemma4ImageProcessorPil"),
    ),
    # Its own processor needs torchvision, and gives the same pixels but for the filter's last levels.
    "gemma4_unified": MediaModel(
        {
            "vision_config": {"model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2}
            | {"mm_posemb_size": 80}
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ("gemma4", "Gemma4ImageProcessorPil"),
    ),
    "llava": MediaModel(
        {"vision_config": _CLIP},
        {"size": {"shortest_edge": 84}, "crop_size": {"height": 84, "width": 84}},
        ("clip", "CLIPImageProcessorPil"),
    ),
    "deepseek_vl": MediaModel(
        {"vision_config": _SIGLIP},
        {"size": {"height": 84, "width": 84}, "min_size": 20},
        ("deepseek_vl", "DeepseekVLImageProcessorPil"),
    ),
    "llava_next": MediaModel(
        {"vision_config": _CLIP, "image_grid_pinpoints": PINPOINTS},
        {
            "size": {"shortest_edge": 84},
            "crop_size": {"height": 84, "width": 84},
            "image_grid_pinpoints": PINPOINTS,
        },
        ("llava_next", "LlavaNextImageProcessorPil"),
    ),
    "llava_onevision": MediaModel(
        {"vision_config": _SIGLIP, "vision_aspect_ratio": "anyres_max_4", "image_grid_pinpoints": PINPOINTS},
        {"size": {"height": 84, "width": 84}, "image_grid_pinpoints": PINPOINTS},
        ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    ),
    "internvl": MediaModel(
        {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}},
        {"size": {"height": 56, "width": 56}, "max_patches": 6, "crop_to_patches": False},
        ("got_ocr2", "GotOcr2ImageProcessorPil"),
    ),
    "aya_vision": MediaModel(
        {"vision_config": {**_SIGLIP, "image_size": 56}},
        {"size": {"height": 56, "width": 56}, "max_patches": 6},
        ("got_ocr2", "GotOcr2ImageProcessorPil"),
    ),
    "cohere2_vision": MediaModel(
        {"vision_config": {**_SIGLIP, "image_size": 56}},
        {"size": {"height": 56, "width": 56}, "max_patches": 6, "patch_size": 2},
        # It has no processor for Pillow: see media_oracle.py.
        ("cohere2_vision", "Cohere2VisionImageProcessor"),
    ),
    "llama4": MediaModel(
        {"vision_config": {"image_size": 56, "patch_size": 14}},
        {"size": {"height": 56, "width": 56}, "max_patches": 6},
        # It has no processor for Pillow: see media_oracle.py.
        ("llama4", "Llama4ImageProcessor"),
    ),
    "mistral3": MediaModel(
        {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "image_size": 140, "patch_size": 14}},
        {"size": {"longest_edge": 140}, "patch_size": {"height": 14, "width": 14}},
        ("pixtral", "PixtralImageProcessorPil"),
    ),
    "pixtral": MediaModel(
        {"model_type": "llava", "vision_config": {"model_type": "pixtral", "image_size": 128, "patch_size": 16}},
        {"size": {"longest_edge": 128}, "patch_size": {"height": 16, "width": 16}},
        ("pixtral", "PixtralImageProcessorPil"),
    ),
    "lighton_ocr": MediaModel(
        {"vision_config": {"model_type": "pixtral", "image_size": 140, "patch_size": 14}},
        {"size": {"longest_edge": 140}, "patch_size": 14},
        ("pixtral", "PixtralImageProcessorPil"),
    ),
    "granite_docling": MediaModel(
        {"vision_config": {"image_size": 56, "patch_size": 14}},
        {"size": {"height": 56, "width": 56}, "max_patches": 4},
        ("granite_docling", "GraniteDoclingImageProcessorPil"),
    ),
    "minicpmv4_6": MediaModel(
        {"vision_config": {"patch_size": 14}},
        {"patch_size": 14, "scale_resolution": 168, "max_slice_nums": 5},
        ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
    ),
    "lfm2_vl": MediaModel(
        {"vision_config": {"patch_size": 14}, "downsample_factor": 2},
        {
            "encoder_patch_size": 14,
            "downsample_factor": 2,
            "tile_size": 56,
            "min_image_tokens": 4,
            "max_image_tokens": 12,
            "max_tiles": 5,
        },
        # It has no processor for Pillow: see media_oracle.py.
        ("lfm2_vl", "Lfm2VlImageProcessor"),
    ),
    "smolvlm": MediaModel(
        {"vision_config": {"image_size": 64, "patch_size": 8}},
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        ("idefics3", "Idefics3ImageProcessorPil"),
    ),
}


def media_folder(folder: Path, kind: str, settings: dict[str, Any] | None = None, **config: Any) -> Path:
    """A model folder of `kind`; `settings` and `config` change its two files, a value of None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[kind]
    files = {"config.json": (model.config, config), "preprocessor_config.json": (model.settings, settings or {})}
    for name, (values, changes) in files.items():
        kept = {key: value for key, value in {**values, **changes}.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))
    return folder


def media_processor(folder: Path, kind: str, settings: dict[str, Any] | None = None, **config: Any) -> ImageProcessor:
    """The image processor of `media_folder`."""
    return read_image_processor(media_folder(folder / kind, kind, settings, **config), VisionConfig(kind, 1), None)


def byte_tokenizer(*more: str) -> Tokenizer:
    """Bytes, runs of two to four line ends as tokens of their own, as Gemma's has, and all media tokens, behind them
    `more` of some kinds.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    line_end = "Ċ"
    vocabulary = {
        letter: index for index, letter in enumerate([*letters, *(line_end * number for number in (2, 3, 4))])
    }
    merges = [(line_end, line_end), (line_end * 2, line_end), (line_end * 2, line_end * 2)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *more])
    return tokenizer


@cache
def tokenizer_of_all_media() -> Tokenizer:
    """`byte_tokenizer` with the tokens of every kind."""
    return byte_tokenizer(
        *(*GEMMA4_SPECIAL, *PAGE_SPECIAL, *KIMI_SPECIAL, *GRANITE_SPECIAL, *LFM2_SPECIAL, *EXAONE_SPECIAL),
        *(*COHERE_SPECIAL, *MINICPM_SPECIAL),
    )


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(image: Image.Image | Pixels, kind: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
