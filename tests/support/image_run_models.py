"""Small random models that take images, with tokenizer, template and image processor, and transformers' answers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from image_doors import TEMPLATE
from media_models import byte_tokenizer
from run_folder import made_once
from transformers import PreTrainedModel

from spmd_worker.media.patches import normalise, qwen_patches
from spmd_worker.media.prepared import PreparedImage

HALVES = (0.5, 0.5, 0.5)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}
_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_heads": 3,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}
_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def image_model_folder() -> Path:
    """Of Qwen3-VL."""
    return made_once("image_model_qwen3_vl", _write)


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    size = {"shortest_edge": 4096, "longest_edge": 65536}
    processor = {"patch_size": 16, "image_mean": HALVES, "image_std": HALVES, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    ids = {f"{kind}_token_id": tokenizer.token_to_id(name) for kind, name in names.items()}
    text = {**_TEXT, "vocab_size": tokenizer.get_vocab_size(), "rope_scaling": _ROPE}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=_VISION, **ids)
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and "norm" in name and name.endswith("weight")
            spread = 0.5 if weight.ndim == 1 else 1.5 / weight[0].numel() ** 0.5
            weight.copy_(1 + 0.1 * noise if is_norm else noise * spread)
    model.save_pretrained(folder)


@cache
def reference() -> PreTrainedModel:
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        image_model_folder(), dtype=torch.float32
    ).eval()


def their_ids(token_ids: list[int], images: tuple[PreparedImage, ...], num_tokens: int) -> list[int]:
    """transformers' greedy answer."""
    model = reference()
    crops = [each.pixels.crops[0] for each in images]
    pixels = [qwen_patches(normalise(each, HALVES, HALVES), 16, 2) for each in crops]
    ids = torch.tensor([token_ids])
    given: dict[str, Any] = {
        "pixel_values": torch.from_numpy(np.concatenate(pixels)),
        "image_grid_thw": torch.tensor([[1, *each.pixels.grid] for each in images]),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }
    with torch.no_grad():
        found = model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False, **given)
    return list(found[0, len(token_ids) :].tolist())
