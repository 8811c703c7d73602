"""Tiny whole models of every kind that takes images: weights, tokenizer, template, processor; and transformers' ids.

Numbers of pictures are those of `media_models.py`, so that those of a few hundred pixels reach every size rule.
"""

import importlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from content_templates import template_with
from kimi_names import restore_layers
from logit_scales import scale_logits
from media_models import (
    COHERE_SPECIAL,
    EXAONE_SPECIAL,
    GEMMA4_SPECIAL,
    KIMI_SPECIAL,
    LFM2_SPECIAL,
    MINICPM_SPECIAL,
    MODELS,
    PAGE_SPECIAL,
    byte_tokenizer,
    noise,
)
from media_oracle import one_axis_a_call, oracle_inputs, oracle_texts, replaced
from run_folder import made_once
from tokenizers import Tokenizer
from torch import Tensor
from vision_checkpoints import CASES, OF_TOKEN_GRIDS, stir

from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.media.prepared import Pixels

if TYPE_CHECKING:
    # Importing it takes seconds, which ranks that run these files would pay for each.
    from transformers import PreTrainedModel

_MEDIA_KINDS: Final = {
    "qwen3_5": "qwen3_vl",
    "qwen4": "qwen3_vl",
    "idefics3": "smolvlm",
    "gemma4_clipped": "gemma4",
    "llava_next_mistral": "llava_next",
    "glm46v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm4v",
    "mistral_large4": "mistral3",
}
KINDS: Final = (*MODELS, *_MEDIA_KINDS)
NUM_TOKENS: Final = 8
PICTURES: Final = (noise(97, 61, 3), noise(130, 257, 4))
OTHERS: Final = (noise(97, 61, 5), PICTURES[1])
"""Another first picture of the same size."""
_TEXT: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 0.03,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_OF_KIND: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gemma4": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "pad_token_id": 3,
    },
    "gemma4_unified": {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 3},
    "gemma4_clipped": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "pad_token_id": 3,
    },
    "granite_docling": {"num_hidden_layers": 4},
    "aya_vision": {"sliding_window": 24},
    "cohere2_vision": {"sliding_window": 24},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_5": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "qwen4": {"layer_types": ["linear_attention", "full_attention"] * 2, "ple_layer_ids": [3], "eos_token_id": 5},
    "minicpmv4_6": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mistral3": {"sliding_window": None},
    "mistral_large4": {"no_rope_layers": [1, 0, 1, 1], "kv_source_layers": [0, 1, 0, 3], "index_topk": 48},
    "pixtral": {"sliding_window": None},
    "llama4": {"intermediate_size_mlp": 40},
    "llava_next_mistral": {"sliding_window": None},
}
_NAMED_IDS: Final = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
_NAMED_IDS_OF_GEMMA4: Final = {
    "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
}


def media_kind(kind: str) -> str:
    """The row of the table of placeholders and processors."""
    return _MEDIA_KINDS.get(kind, kind)


@cache
def tokenizer_of_images(kind: str) -> Tokenizer:
    if kind.startswith("gemma4"):
        return byte_tokenizer(*GEMMA4_SPECIAL)
    if kind == "kimi_k25":
        return byte_tokenizer(*KIMI_SPECIAL)
    if kind == "exaone4_5":
        return byte_tokenizer(*EXAONE_SPECIAL)
    if kind == "lfm2_vl":
        return byte_tokenizer(*LFM2_SPECIAL)
    if kind == "minicpmv4_6":
        return byte_tokenizer(*MINICPM_SPECIAL)
    if kind in ("aya_vision", "cohere2_vision"):
        return byte_tokenizer(*COHERE_SPECIAL)
    return byte_tokenizer(*(PAGE_SPECIAL if kind in ("paddleocr_vl", "lighton_ocr", "deepseek_vl") else ()))


def image_folder(kind: str) -> Path:
    """The model of a kind, written once a run."""
    return made_once(f"images {kind}", lambda folder: _write(folder, kind))


@cache
def image_reference(kind: str) -> "PreTrainedModel":
    """transformers' model of the folder."""
    model_class = getattr(transformers, f"{CASES[kind][0]}ForConditionalGeneration")
    if kind == "gemma4_unified":
        _correct_masks()
    model = model_class.from_pretrained(image_folder(kind), dtype=torch.float32, attn_implementation="sdpa").eval()
    return scale_logits(model)


def _correct_masks() -> None:
    """Replace the masks of `forward` of Gemma 4's 12B by those of its class for `generate`, which has them for static
    caches alone. transformers 5.23 lets tokens of an image see each other in full layers too, and beyond windows: what
    was a fault of the other sizes (https://github.com/huggingface/transformers/issues/46711).
    """
    module = importlib.import_module("transformers.models.gemma4_unified.modeling_gemma4_unified")
    of_text = module.create_masks_for_generate

    def masks(*, block_sequence_ids: Tensor | None = None, **of_step: Any) -> Any:
        if block_sequence_ids is None or not (block_sequence_ids >= 0).any():
            return of_text(**of_step)
        return module.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **of_step)

    vars(module)["create_masks_for_generate"] = masks


def image_token_id(kind: str) -> int:
    found = tokenizer_of_images(kind).token_to_id(PLACEHOLDERS[media_kind(kind)].image_token)
    assert found is not None
    return found


def _write(folder: Path, kind: str) -> None:
    family, text, beside = CASES[kind]
    tokenizer, media = tokenizer_of_images(kind), MODELS[media_kind(kind)]
    sizes = {**_TEXT, **text, **_OF_KIND.get(kind, {}), "vocab_size": tokenizer.get_vocab_size()}
    beside = {**beside, **{key: value for key, value in media.config.items() if key != "model_type"}}
    beside["vision_config"] = {**CASES[kind][2]["vision_config"], **media.config["vision_config"]}
    named = _NAMED_IDS_OF_GEMMA4 if kind.startswith("gemma4") else _NAMED_IDS
    names = {key: tokenizer.token_to_id(token) for key, token in named.items()}
    if video_token := PLACEHOLDERS[media_kind(kind)].video_token:
        names["video_token_id"] = tokenizer.token_to_id(video_token)
    if sizes.get("vocab_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]
    values = {"text_config": sizes, "image_token_id": image_token_id(kind), **names, **beside}
    config = getattr(transformers, f"{family}Config")(**values, tie_word_embeddings=False)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    stir(model)
    model.save_pretrained(folder)
    if kind == "kimi_k25":
        restore_layers(folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(media.settings))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template_of(kind)}))


def template_of(kind: str) -> str:
    """A chat template that writes a placeholder for each part of an image or a video."""
    token, written = PLACEHOLDERS[media_kind(kind)].video_token, PLACEHOLDERS[media_kind(kind)].written
    around = ("<|vision_start|>", "<|vision_end|>") if kind.startswith("qwen") else ("", "")
    of_video = "{% elif part.type == 'video' %}" + token.join(around) if token else ""
    return template_with("part.type == 'image'", written + of_video)


def text_of(kind: str, num_images: int) -> str:
    """A prompt with a placeholder for each image."""
    written = [PLACEHOLDERS[media_kind(kind)].written] * num_images
    return "Look:\n" + "\nand\n".join(written) + "\nWhat is it?"


def prompt_of(kind: str, pictures: Sequence[Pixels], text: str | None = None) -> dict[str, Any]:
    """As `LLM.generate` takes it."""
    return {"prompt": text or text_of(kind, len(pictures)), "multi_modal_data": {"image": list(pictures)}}


@torch.no_grad()
def their_vector(kind: str, pictures: Sequence[Pixels], text: str) -> Tensor:
    """transformers' last hidden state of the prompt's last token, of length 1."""
    ids, given = _their_inputs(kind, pictures, text)
    body: Any = image_reference(kind).model
    return torch.nn.functional.normalize(body(torch.tensor([ids]), **given).last_hidden_state[0, -1], dim=0)


def _their_inputs(kind: str, pictures: Sequence[Pixels], text: str) -> tuple[list[int], dict[str, Tensor]]:
    media = media_kind(kind)
    with one_axis_a_call():
        inputs = oracle_inputs(media, list(pictures))
    # 8 x 8 patches a square, of which a token takes 4 x 4.
    own = {"image_seq_len": 4} if kind == "idefics3" else {}
    texts = oracle_texts(media, inputs, len(pictures), **own)
    whole = replaced(text, PLACEHOLDERS[media].marker, texts)
    ids = list(tokenizer_of_images(kind).encode(whole).ids)
    return ids, _tensors(kind, inputs, torch.tensor([ids]))


@torch.no_grad()
def their_answer(kind: str, pictures: Sequence[Pixels]) -> tuple[list[int], list[int], list[float]]:
    """transformers' ids of the prompt, greedy ids after it, and their log-probabilities."""
    ids, given = _their_inputs(kind, pictures, text_of(kind, len(pictures)))
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made: Any = image_reference(kind).generate(torch.tensor([ids]), **given, **options)
    chosen = made.sequences[0, len(ids) :].tolist()
    logprobs = [logits[0].log_softmax(0)[token].item() for logits, token in zip(made.logits, chosen, strict=True)]
    return ids, chosen, logprobs


@torch.no_grad()
def their_stream(kind: str, pictures: Sequence[Pixels], ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' inputs of the text model and its last hidden states, [T, hidden], and int64 [3, T] positions of
    time, line and column, of a row of ids whose prompt has the pictures.
    """
    model: Any = image_reference(kind).model
    with one_axis_a_call():
        inputs = oracle_inputs(media_kind(kind), list(pictures))
    row, given = torch.tensor([list(ids)]), dict[str, Tensor]()
    hook = model.language_model.register_forward_pre_hook(
        lambda module, arguments, options: given.update(options), with_kwargs=True
    )
    try:
        hidden = model(row, **_tensors(kind, inputs, row), use_cache=False).last_hidden_state[0]
    finally:
        hook.remove()
    return given["inputs_embeds"][0], hidden, given["position_ids"][-3:, 0]


@torch.no_grad()
def their_logprobs(
    model: "PreTrainedModel", kind: str, pictures: Sequence[Pixels], prompt: Sequence[int], chosen: Sequence[int]
) -> Tensor:
    """Log-probabilities of the ids behind a prompt of ids, by a model of transformers."""
    with one_axis_a_call():
        inputs = oracle_inputs(media_kind(kind), list(pictures))
    ids = torch.tensor([[*prompt, *chosen]])
    given = _tensors(kind, inputs, ids)
    given["pixel_values"] = given["pixel_values"].to(model.dtype)
    logits = model(ids, **given).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)


def _merged(given: dict[str, Tensor], vision: Any) -> dict[str, Tensor]:
    """Patches of Gemma 4's processor, line by line, as squares of its 12B, and their places."""
    side, size, found = vision.pooling_kernel_size, vision.patch_size, []
    for patches, places in zip(given["pixel_values"], given["image_position_ids"], strict=True):
        columns, lines = (places.max(0).values + 1).tolist()
        squares = patches[: lines * columns].view(lines // side, side, columns // side, side, size, size, 3)
        rows = squares.permute(0, 2, 1, 4, 3, 5, 6).reshape(lines * columns // side**2, -1)
        corners = places[: lines * columns].view(lines, columns, 2)[::side, ::side].reshape(-1, 2) // side
        padding = (0, 0, 0, len(patches) // side**2 - len(rows))
        padded = [torch.nn.functional.pad(each, padding, value=value) for each, value in ((rows, 0), (corners, -1))]
        found.append(padded)
    pixels, positions = (torch.stack(each) for each in zip(*found, strict=True))
    return {"pixel_values": pixels, "image_position_ids": positions}


def _tensors(kind: str, inputs: dict[str, Any], ids: Tensor) -> dict[str, Tensor]:
    """What a processor of transformers gives beside the ids."""
    names = (
        "pixel_values",
        "image_grid_thw",
        "image_position_ids",
        "image_sizes",
        "batch_num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "target_sizes",
    )
    given = {name: torch.as_tensor(inputs[name]) for name in names if name in inputs}
    if kind == "lfm2_vl":
        # Its processor counts tokens by them.
        del given["image_sizes"]
    if kind == "gemma4_unified":
        given |= _merged(given, image_reference(kind).config.vision_config)
    types = (ids == image_token_id(kind)).long()
    if kind.startswith((*OF_TOKEN_GRIDS, "gemma4")):
        given["mm_token_type_ids"] = types
    if kind == "gemma3":
        given["token_type_ids"] = types
    return {**given, "attention_mask": torch.ones_like(ids)}
