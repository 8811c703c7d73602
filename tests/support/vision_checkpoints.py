"""Small random checkpoints of models that take images, written by transformers, with images and transformers' rows.

No weight is what a mistake would leave it at, and epsilons are large enough to be seen.
"""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from kimi_names import restore_layers
from run_folder import made_once
from torch import Tensor

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.media.sizes import best_pinpoint
from spmd_worker.model.towers.pixels import patches_of

if TYPE_CHECKING:
    # Importing it takes seconds, which ranks that run these files would pay for each.
    from transformers import PreTrainedModel

IMAGE_TOKEN = 60
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.2, 0.25)
SIDE = 84
"""Pixels of a square of LLaVA, LLaVA-NeXT and LLaVA-OneVision."""
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.03,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
_QWEN = {"depth": 4, "hidden_size": 32, "intermediate_size": 52, "num_heads": 2, "out_hidden_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [4, 2, 2]}
_GLM = {**_QWEN, "intermediate_size": 40, "image_size": 84, "patch_size": 14, "rms_norm_eps": 0.03}
_HALF = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "topk_group": 1, "n_group": 1}
_LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2} | {
    "attention_chunk_size": 64,
    "floor_scale": 16,
    "attn_scale": 0.3,
}
_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {**_EXPERTS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16} | {
    "v_head_dim": 16,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_INDEXED = {key: value for key, value in _LATENT.items() if key != "q_lora_rank"} | {
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 12,
}
_VIT = {**_TOWER, "image_size": SIDE, "patch_size": 14, "layer_norm_eps": 0.03}
_LFM2 = {"model_type": "lfm2", "block_auto_adjust_ff_dim": False, "norm_eps": 0.03}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "patch_size": 14, "hidden_act": "silu"}

_GEMMA4_TEXT = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "sliding_window": 24}
_GEMMA4 = {
    **_TOWER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 288,
    "rms_norm_eps": 0.03,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {"vision_config": {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2, 1]}},
    ),
    "qwen3_vl_heads_of_24": (
        "Qwen3VL",
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {"vision_config": {**_QWEN, "hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]}},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
            **_NETS,
        },
        {"vision_config": {**_QWEN, "num_position_embeddings": 64}},
    ),
    "qwen4": (
        "Qwen4Exp",
        {
            "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "ple_embed_dim": 48,
            "heads_per_ngram": 3,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 2,
            "indexer_n_heads": 12,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 24,
            "indexer_compress_ratio": 4,
            "eos_token_id": 2,
        },
        {"vision_config": {**_QWEN, "num_position_embeddings": 64}},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": _ROPE},
        {"vision_config": {"depth": 4, "embed_dim": 48, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 32}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _ROPE},
        {"vision_config": {**_QWEN, "window_size": 112, "fullatt_block_indexes": [1, 3]}},
    ),
    "exaone4_5": (
        "Exaone4_5_",
        {"model_type": "exaone4", "sliding_window": 24},
        {
            "vision_config": {
                **_QWEN,
                "hidden_size": 64,
                "num_heads": 4,
                "num_key_value_heads": 2,
                "window_size": 112,
                "fullatt_block_indexes": [1, 3],
            }
        },
    ),
    "glm4v": ("Glm4v", {"rope_parameters": _HALF}, {"vision_config": {**_GLM, "attention_bias": True}}),
    "glm46v": (
        "Glm46V",
        {"model_type": "glm4v_text", "rope_parameters": _HALF},
        {"vision_config": {**_GLM, "model_type": "glm4v_vision", "hidden_size": 48, "intermediate_size": 64}},
    ),
    "glm4v_moe": ("Glm4vMoe", {**_EXPERTS, "rope_parameters": _HALF}, {"vision_config": _GLM}),
    "glm_ocr": ("GlmOcr", {"rope_parameters": _HALF}, {"vision_config": {**_GLM, "hidden_size": 48}}),
    "paddleocr_vl": (
        "PaddleOCRVL",
        {"rope_parameters": _ROPE, "use_bias": True},
        {"vision_config": {**_VIT, "hidden_size": 48, "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}},
    ),
    "kimi_k25": (
        "Kimi_K25",
        {**_LATENT, "model_type": "deepseek_v3"},
        {"vision_config": {**_TOWER, "pos_emb_height": 6, "pos_emb_width": 6, "rope_parameters": {"rope_theta": 50.0}}}
        | {"projection_hidden_size": 32, "projection_layer_norm_eps": 0.03},
    ),
    "gemma3": (
        "Gemma3",
        {},
        {"vision_config": {**_VIT, "image_size": 112, "vision_use_head": False}, "mm_tokens_per_image": 16},
    ),
    "gemma4": ("Gemma4", _GEMMA4_TEXT, {"vision_config": {**_GEMMA4, "standardize": True}}),
    "gemma4_clipped": (
        "Gemma4",
        {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        {"vision_config": {**_GEMMA4, "head_dim": 24, "use_clipped_linears": True}},
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {"global_head_dim": 32, "sliding_window": 24},
        {
            "vision_config": {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 80, "rms_norm_eps": 0.03}
            | {"patch_size": 4, "pooling_kernel_size": 2}
        },
    ),
    "llava": (
        "Llava",
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "clip_vision_model", "projection_dim": 32}},
    ),
    "llava_of_siglip": (
        "Llava",
        {"model_type": "qwen2"},
        {"vision_config": {**_VIT, "model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"},
    ),
    "deepseek_vl": (
        "DeepseekVL",
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "siglip_vision_model"}},
    ),
    "llava_next": (
        "LlavaNext",
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "clip_vision_model", "projection_dim": 32}}
        | {"image_grid_pinpoints": PINPOINTS},
    ),
    "llava_next_mistral": (
        "LlavaNext",
        {"model_type": "mistral"},
        {"vision_config": {**_VIT, "model_type": "clip_vision_model", "projection_dim": 32}}
        | {"image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1, "multimodal_projector_bias": False},
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2"},
        {"vision_config": {**_VIT, "model_type": "siglip_vision_model"}, "image_grid_pinpoints": PINPOINTS}
        | {"vision_aspect_ratio": "anyres_max_4"},
    ),
    "internvl": (
        "InternVL",
        {"model_type": "qwen2"},
        {"vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}},
    ),
    "internvl_of_6b": (
        "InternVL",
        {"model_type": "qwen2"},
        {
            "vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14], "norm_type": "rms_norm"}
            | {"use_qk_norm": True, "use_mean_pooling": False, "layer_norm_eps": 0.03}
        },
    ),
    "aya_vision": (
        "AyaVision",
        {"model_type": "cohere2", "layer_norm_eps": 0.03},
        {"vision_config": {**_VIT, "image_size": 56, "model_type": "siglip_vision_model"}}
        | {"adapter_layer_norm_eps": 0.05, "alignment_intermediate_size": 40},
    ),
    "aya_vision_inner": (
        "AyaVision",
        {"model_type": "cohere", "layer_norm_eps": 0.03},
        {"vision_config": {**_VIT, "image_size": 84, "model_type": "siglip_vision_model"}}
        | {"vision_feature_layer": -2, "downsample_factor": 3},
    ),
    "cohere2_vision": (
        "Cohere2Vision",
        {"layer_norm_eps": 0.03},
        {"vision_config": {**_VIT, "image_size": 56, "model_type": "siglip_vision_model"}}
        | {"alignment_intermediate_size": 72},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, {"vision_config": _PIXTRAL, "spatial_merge_size": 2}),
    "mistral_large4": ("MistralLarge4", _INDEXED, {"vision_config": _PIXTRAL, "spatial_merge_size": 2}),
    "lighton_ocr": (
        "LightOnOcr",
        {"model_type": "qwen3", "rms_norm_eps": 0.05},
        {"vision_config": {**_PIXTRAL, "image_size": 182}, "spatial_merge_size": 2},
    ),
    "pixtral": (
        "Llava",
        {"model_type": "mistral"},
        {
            "vision_config": {**_PIXTRAL, "hidden_act": "gelu"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, {"vision_config": {**_VIT, "image_size": 56}, "scale_factor": 2}),
    "granite_docling": (
        "GraniteDocling",
        {"num_hidden_layers": 2, "embedding_multiplier": 3.0, "pad_token_id": 0},
        {
            "vision_config": {**_VIT, "image_size": 112, "out_hidden_size": 32, "deepstack_visual_indexes": [2, 0]},
            "density_router_hidden_size": 8,
        },
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        {**_LFM2, "layer_types": ["conv"]},
        {
            "vision_config": {
                **{key: value for key, value in _VIT.items() if key != "image_size"},
                "num_patches": 36,
                "model_type": "siglip2_vision_model",
            },
            "projector_hidden_size": 24,
        },
    ),
    "minicpmv4_6": (
        "MiniCPMV4_6",
        {"model_type": "qwen3_5_text", **_NETS},
        {
            "vision_config": {**_VIT, "num_hidden_layers": 4, "insert_layer_id": 3, "image_size": 112},
            "insert_layer_id": 1,
        },
    ),
    "lfm2_vl_plain": (
        "Lfm2Vl",
        {**_LFM2, "layer_types": ["conv"]},
        {
            "vision_config": {**_TOWER, "num_patches": 36, "model_type": "siglip2_vision_model"}
            | {"patch_size": 14, "vision_use_head": False},
            "projector_hidden_size": 40,
            "projector_use_layernorm": False,
            "projector_bias": False,
        },
    ),
    "llama4": (
        "Llama4",
        _LLAMA4,
        {
            "vision_config": {
                **_TOWER,
                "intermediate_size": 128,
                "image_size": 56,
                "patch_size": 14,
                "vision_output_dim": 24,
                "projector_input_dim": 24,
                "projector_output_dim": 24,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    # Heads of the sizes of real towers.
    "qwen3_vl_heads_of_72": (
        "Qwen3VL",
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {
            "vision_config": {
                **_QWEN,
                "hidden_size": 144,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [1],
            }
        },
    ),
    "gemma3_heads_of_72": (
        "Gemma3",
        {},
        {
            "vision_config": {**_VIT, "hidden_size": 144, "image_size": 112, "vision_use_head": False},
            "mm_tokens_per_image": 16,
        },
    ),
    "qwen2_5_vl_heads_of_80": (
        "Qwen2_5_VL",
        {"rope_parameters": _ROPE},
        {"vision_config": {**_QWEN, "hidden_size": 160, "window_size": 112, "fullatt_block_indexes": [1, 3]}},
    ),
    "llava_heads_of_64": (
        "Llava",
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "hidden_size": 128, "model_type": "clip_vision_model", "projection_dim": 32}},
    ),
    "idefics3": (
        "Idefics3",
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "image_size": 112}, "scale_factor": 4},
    ),
}
PADDED: tuple[str, ...] = ("qwen3_vl_heads_of_72", "gemma3_heads_of_72")
REAL_HEADS: tuple[str, ...] = (*PADDED, "qwen2_5_vl_heads_of_80", "llava_heads_of_64")
OF_TOKEN_GRIDS = ("qwen", "glm", "paddleocr")
"""Beginnings of cases whose tokens have lines and columns, which their positions follow."""
_LIKE_QWEN = (*OF_TOKEN_GRIDS, "exaone")
"""And those whose patches are given as Qwen's."""
_ALWAYS_BESIDE = {"image_token_id": IMAGE_TOKEN, "eos_token_id": 2}


def vision_folder(name: str) -> Path:
    """The checkpoint of a case, written once a run."""
    return made_once(f"vision {name}", lambda folder: _write(folder, name))


@cache
def vision_reference(name: str) -> "PreTrainedModel":
    """transformers' model of the folder."""
    model_class = getattr(transformers, f"{CASES[name][0]}ForConditionalGeneration")
    return model_class.from_pretrained(vision_folder(name), dtype=torch.float32, attn_implementation="sdpa").eval()


def _write(folder: Path, name: str) -> None:
    family, text, beside = CASES[name]
    sizes = {**_TEXT, **text}
    config = getattr(transformers, f"{family}Config")(text_config=sizes, **{**_ALWAYS_BESIDE, **beside})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    stir(model)
    model.save_pretrained(folder)
    if name == "kimi_k25":
        restore_layers(folder / "model.safetensors")
    processor: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
    if name.startswith(_LIKE_QWEN):
        # Qwen's class assumes 14.
        processor["patch_size"] = model.config.vision_config.patch_size
    if name.startswith("gemma4"):
        processor |= {"do_normalize": True, "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@torch.no_grad()
def stir(model: "PreTrainedModel") -> None:
    """Fill the model with numbers."""
    generator = torch.Generator().manual_seed(11)
    for name, value in sorted(model.named_buffers()):
        leaf = name.rpartition(".")[2]
        if leaf in _BOUNDS:
            # Of the numbers that layers have, between a tenth and a third are bounded.
            value.copy_(_BOUNDS[leaf] * (1 + 0.2 * torch.rand((), generator=generator)))
        elif leaf in ("std_bias", "std_scale"):
            value.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator))
    for name, value in sorted(model.named_parameters()):
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith(("position_embedding_table", "embed_vision.pos_embedding")):
            value.copy_(noise)
        elif name.endswith("softmax_scaling.scale"):
            value.copy_(0.1 * noise)
        elif value.ndim < 2:
            value.copy_(1 + 0.3 * noise)
        else:
            value.copy_(noise * (1.4 / value[0].numel() ** 0.5))


def _pixels(generator: np.random.Generator, height: int, width: int) -> Any:
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


_BOUNDS = {"input_min": -1.2, "input_max": 1.4, "output_min": -1.6, "output_max": 1.8}
"""Bounds of Gemma 4's linear layers."""
OF_TILES = ("internvl", "smolvlm", "idefics3", "llama4", "granite", "aya_vision", "cohere2_vision")
"""Beginnings of cases whose images may be several squares."""
OF_PICTURES = ("llava_next", "llava_onevision")
"""Beginnings of cases whose pictures are made of squares."""
GRIDS = ((4, 6), (2, 4), (12, 10))
"""Patches of images of any size."""
ODD_GRIDS = ((5, 6), (2, 5), (13, 11))
"""Of images with patches in no token."""
SIZES = ((100, 140), (84, 50), (500, 490))
"""Images of LLaVA-NeXT and LLaVA-OneVision: padded above and below, at the sides, of more squares than its most."""


def image_of(name: str, number: int) -> ImagePixels:
    """One of three images, of random pixels, as a processor prepares it."""
    generator, config = np.random.default_rng(number), vision_reference(name).config
    patch = config.vision_config.patch_size
    if name.startswith((*_LIKE_QWEN, "kimi", "gemma4", "mistral", "pixtral", "lighton")):
        grid = ODD_GRIDS[number] if name == "lighton_ocr" else GRIDS[number]
        return ImagePixels((_pixels(generator, grid[0] * patch, grid[1] * patch),), grid, (99, 98))
    if name.startswith("minicpm"):
        sizes = ((4, 8),), ((8, 4), (4, 4), (4, 4)), ((12, 8), (8, 12), (8, 12))
        crops = tuple([_pixels(generator, lines * patch, columns * patch) for lines, columns in sizes[number]])
        return ImagePixels(crops, sizes[number][0], (99, 98))
    if name.startswith("lfm2"):
        sizes = ((6, 8),), ((4, 10),), ((6, 6), (6, 6), (12, 4))
        crops = tuple([_pixels(generator, lines * patch, columns * patch) for lines, columns in sizes[number]])
        return ImagePixels(crops, sizes[number][0], (99, 98))
    side = config.vision_config.image_size
    side, patch = (side[0], patch[0]) if isinstance(side, list | tuple) else (side, patch)
    size, count = SIZES[number], (1, 3, 5)[number] if name.startswith(OF_TILES) else 1
    if name.startswith(OF_PICTURES):
        height, width = best_pinpoint(*size, tuple([(each[0], each[1]) for each in PINPOINTS]))
        count = 1 + height * width // SIDE**2
    crops = tuple([_pixels(generator, side, side) for _ in range(count)])
    return ImagePixels(crops, (side // patch, side // patch), size)


def normalised(pixels: Any, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Float32 [3, height, width]."""
    levels = torch.from_numpy((pixels.astype(np.float64) / 255).astype(np.float32)).permute(2, 0, 1)
    return (levels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def in_bfloat16(pixels: Any) -> Tensor:
    """The same as float32, computed in bfloat16."""
    levels = torch.from_numpy(pixels).permute(2, 0, 1).bfloat16() * (1 / 255)
    mean, std = (torch.tensor(each, dtype=torch.bfloat16).view(3, 1, 1) for each in (MEAN, STD))
    return ((levels - mean) / std).float()


def _inputs(name: str, image: ImagePixels, config: Any, *, is_fine: bool) -> dict[str, Tensor]:
    if name.startswith("minicpm"):
        return _packed(image, config.vision_config.patch_size)
    if name.startswith("lfm2"):
        return _padded(image, config.vision_config.patch_size)
    planes = torch.stack([in_bfloat16(each) if name == "llama4" else normalised(each) for each in image.crops])
    if name in ("paddleocr_vl", "kimi_k25"):
        patches = patches_of(planes[0], config.vision_config.patch_size).view(
            -1, 3, *[config.vision_config.patch_size] * 2
        )
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, *image.grid]])}
    if name.startswith(_LIKE_QWEN):
        (rows, columns), size = image.grid, config.vision_config.patch_size
        squares = planes[0].view(3, rows // 2, 2, size, columns // 2, 2, size).permute(1, 4, 2, 5, 0, 3, 6)
        frames = squares.unsqueeze(5).expand(*squares.shape[:5], 2, size, size)
        grid = torch.tensor([[1, rows, columns]])
        return {"pixel_values": frames.reshape(rows * columns, -1), "image_grid_thw": grid}
    if name.startswith("gemma4"):
        (rows, columns), size = image.grid, config.vision_config.patch_size
        if name == "gemma4_unified":
            merge = config.vision_config.pooling_kernel_size
            rows, columns, size = rows // merge, columns // merge, size * merge
        squares = planes[0].view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)
        lines, places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions = torch.stack((places, lines), dim=-1).view(1, -1, 2)
        return {"pixel_values": squares.reshape(1, rows * columns, -1), "image_position_ids": positions}
    sizes = torch.tensor([image.size if name.startswith(OF_PICTURES) else image.crops[0].shape[:2]])
    if name in ("mistral3", "mistral_large4", "pixtral", "lighton_ocr"):
        return {"pixel_values": planes, "image_sizes": sizes}
    if name == "llava_onevision":
        return {"pixel_values": planes[None], "image_sizes": sizes, "batch_num_images": torch.tensor([1])}
    if name.startswith(OF_PICTURES):
        return {"pixel_values": planes[None], "image_sizes": sizes}
    if name == "granite_docling":
        fine = {"tile_fine_mask": torch.ones(1, dtype=torch.bool)} if is_fine else {}
        return {"pixel_values": planes[None], "pixel_attention_mask": torch.ones(1, len(planes)).bool(), **fine}
    return {"pixel_values": planes[None] if name in ("smolvlm", "idefics3") else planes}


def _packed(image: ImagePixels, size: int) -> dict[str, Tensor]:
    """Patches of all pictures one beside the other, and their lines and columns."""
    shapes = [(len(each) // size, each.shape[1] // size) for each in image.crops]
    patches = torch.cat([patches_of(normalised(each), size) for each in image.crops]).view(-1, 3, size, size)
    return {
        "pixel_values": patches.permute(1, 2, 0, 3).reshape(1, 3, size, -1),
        "target_sizes": torch.tensor(shapes, dtype=torch.int32),
    }


def _padded(image: ImagePixels, size: int) -> dict[str, Tensor]:
    """Patches of pictures of several sizes, the channels of a pixel side by side, behind them zeros."""
    shapes = [(len(each) // size, each.shape[1] // size) for each in image.crops]
    most, found = max(lines * columns for lines, columns in shapes), []
    for crop, (lines, columns) in zip(image.crops, shapes, strict=True):
        squares = normalised(crop).view(3, lines, size, columns, size).permute(1, 3, 2, 4, 0)
        patches = squares.reshape(lines * columns, -1)
        found.append(torch.nn.functional.pad(patches, (0, 0, 0, most - len(patches))))
    mask = torch.stack([torch.arange(most) < lines * columns for lines, columns in shapes]).int()
    return {
        "pixel_values": torch.stack(found),
        "spatial_shapes": torch.tensor(shapes),
        "pixel_attention_mask": mask,
    }


@torch.no_grad()
def their_rows(
    name: str, image: ImagePixels, dtype: torch.dtype = torch.float32, *, is_fine: bool = False
) -> tuple[Tensor, ...]:
    """Rows of the image's tokens, then those of each layer that adds some; by the fine route of Granite-Docling, and of
    MiniCPM-V.
    """
    model = vision_reference(name)
    model = model if dtype == torch.float32 else deepcopy(model).to(dtype)
    if name == "llama4":
        # A change of dtype leaves their imaginary part out.
        model.vision_model.rotary_embedding.freqs_ci = vision_reference(name).vision_model.rotary_embedding.freqs_ci
    inputs = _inputs(name, image, model.config, is_fine=is_fine)
    if name.startswith("minicpm") and is_fine:
        inputs["downsample_mode"] = "4x"
    if not name.startswith(_LIKE_QWEN):
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    if name == "llama4":
        return (model.multi_modal_projector(model.get_image_features(**inputs).last_hidden_state.flatten(0, 1)),)
    found = model.model.get_image_features(**inputs)
    rows = torch.cat([each.reshape(-1, each.shape[-1]) for each in found.pooler_output])
    added = getattr(found, "deepstack_features", None) or []
    return rows, *[each[0] if isinstance(each, list | tuple) else each for each in added]
