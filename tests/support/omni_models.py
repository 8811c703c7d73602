"""Small random Omni models, of text, images and audio, in files as the hub has them; transformers' rows and answers."""

import importlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from hearing_models import NUM_MEL_BINS, RATE, Samples
from media_models import MODELS
from media_oracle import one_axis_a_call, oracle_inputs
from run_folder import made_once
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from video_oracle import oracle_video

from spmd_worker.media.prepared import Pixels

if TYPE_CHECKING:
    # Importing it takes seconds.
    from transformers import PreTrainedModel

KINDS: Final = ("qwen2_5_omni", "qwen3_omni")
LONGEST_S: Final = 4
"""Seconds of a recording that the file of Qwen2.5-Omni's small model allows."""
IMAGE_KINDS: Final = {"qwen2_5_omni": "qwen2_5_vl", "qwen3_omni": "qwen3_vl"}
"""Kind -> that whose pictures are prepared alike."""
IMAGES: Final = {
    "qwen2_5_omni": ("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    "qwen3_omni": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
}
AUDIO: Final = {
    "qwen2_5_omni": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    "qwen3_omni": ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
}
_VIDEOS: Final = {"qwen2_5_omni": "<|VIDEO|>", "qwen3_omni": "<|video_pad|>"}
_CLASSES: Final = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni": "Qwen3OmniMoe"}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXT: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": _ROPE,
    # The usual 1e-6 is too small for a wrong one to be seen.
    "rms_norm_eps": 0.03,
}
_EXPERTS: Final = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}
_WHISPER: Final = {
    "num_mel_bins": NUM_MEL_BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 32,
}
_VISION: Final = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
_OWN: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "qwen2_5_omni": {
        "text_config": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
        "audio_config": {"n_window": 50},
        "vision_config": {"fullatt_block_indexes": [1, 3]},
    },
    "qwen3_omni": {
        "text_config": {**_EXPERTS, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        "audio_config": {"downsample_hidden_size": 16, "n_window_infer": 100},
        "vision_config": {"deepstack_visual_indexes": [0, 2, 1], "num_position_embeddings": 64},
    },
}
VIDEO_SIZE: Final = {"size": {"shortest_edge": 3136, "longest_edge": 50176}}
VIDEO_FPS: Final = 1.0
_LEFT_OUT: Final = {"qwen2_5_omni": ("talker", "token2wav"), "qwen3_omni": ("talker", "code2wav")}
Given = tuple[str, Any]
"""A medium and a picture or a recording."""


def written(kind: str, medium: str) -> str:
    """What a template writes for an image or a recording."""
    if medium == "video":
        begin, _, end = IMAGES[kind]
        return f"{begin}{_VIDEOS[kind]}{end}"
    return "".join({"image": IMAGES, "audio": AUDIO}[medium][kind])


def template_of(kind: str) -> str:
    return (
        "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
        f"{written(kind, 'image')}{{% elif 'audio' in part or part.type == 'audio' %}}{written(kind, 'audio')}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )


@cache
def omni_tokenizer(kind: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *IMAGES[kind], *AUDIO[kind], _VIDEOS[kind]])
    return tokenizer


def omni_folder(kind: str) -> Path:
    """The complete model, with parts that speak."""
    return made_once(f"omni_{kind}", lambda folder: _write(kind, folder))


def thinker_folder(kind: str) -> Path:
    """The same thinker alone, as transformers saves it."""
    return made_once(f"omni_{kind}_thinker", lambda folder: _write_thinker(kind, folder))


def _ids(kind: str) -> dict[str, int | None]:
    id_of, ending = omni_tokenizer(kind).token_to_id, "id" if kind == "qwen3_omni" else "index"
    names = {"image": IMAGES[kind][1], "audio": AUDIO[kind][1], "video": _VIDEOS[kind]}
    around = {"vision_start_token_id": IMAGES[kind][0], "audio_start_token_id": AUDIO[kind][0]}
    return {
        **{f"{name}_token_{ending}": id_of(token) for name, token in names.items()},
        **{key: id_of(token) for key, token in around.items()},
    }


def _write_thinker(kind: str, folder: Path) -> None:
    own, tokenizer = _OWN[kind], omni_tokenizer(kind)
    config = getattr(transformers, f"{_CLASSES[kind]}ThinkerConfig")(
        text_config={**_TEXT, **own["text_config"], "vocab_size": tokenizer.get_vocab_size()},
        audio_config={**_WHISPER, **own["audio_config"]},
        vision_config={**_VISION, **own["vision_config"]},
        **_ids(kind),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{_CLASSES[kind]}ThinkerForConditionalGeneration")(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and ("norm" in name or "ln_" in name) and name.endswith("weight")
            num_inputs = weight.shape[-1] if "experts" in name else weight[0].numel()
            spread = 0.1 if weight.ndim == 1 else 1.0 if "embed" in name.split(".")[-2] else 2 / num_inputs**0.5
            weight.copy_(1 + 0.1 * noise if is_norm else noise * spread)
    model.save_pretrained(folder)
    _write_beside(kind, folder)


def _write(kind: str, folder: Path) -> None:
    thinker = thinker_folder(kind)
    folder.mkdir(parents=True, exist_ok=True)
    own = json.loads((thinker / "config.json").read_text())
    left_out = {f"{part}_config": {"model_type": f"{kind}_{part}", "hidden_size": "any"} for part in _LEFT_OUT[kind]}
    config = {
        "architectures": [f"{_CLASSES[kind]}ForConditionalGeneration"],
        "model_type": "qwen3_omni_moe" if kind == "qwen3_omni" else kind,
        "torch_dtype": own.pop("dtype"),
        "thinker_config": {**own, "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"]},
        **left_out,
        "enable_audio_output": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(thinker / "model.safetensors").items()}
    tensors |= {f"{part}.model.layers.0.weight": torch.ones(32, 32) for part in _LEFT_OUT[kind]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_beside(kind, folder)


def _write_beside(kind: str, folder: Path) -> None:
    """Tokenizer, template, and the one file of both processors."""
    omni_tokenizer(kind).save(str(folder / "tokenizer.json"))
    settings = {**_extractor(kind).to_dict(), **MODELS[IMAGE_KINDS[kind]].settings}
    settings |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{_CLASSES[kind]}Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template_of(kind)}))


def _extractor(kind: str) -> Any:
    chunk = {"chunk_length": LONGEST_S} if kind == "qwen2_5_omni" else {}
    return transformers.WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, return_attention_mask=True, **chunk)


@cache
def omni_reference(kind: str) -> "PreTrainedModel":
    """transformers' thinker."""
    model_class = getattr(transformers, f"{_CLASSES[kind]}ThinkerForConditionalGeneration")
    return model_class.from_pretrained(thinker_folder(kind), dtype=torch.float32).eval()


def text_of(kind: str, media: Sequence[Given]) -> str:
    """A prompt with a placeholder for each, in order; those of one medium may touch."""
    return "Look " + " and ".join([written(kind, medium) for medium, _ in media]) + " what?"


def _heard(kind: str, samples: Samples) -> tuple[Tensor, Tensor, int]:
    """Features of a recording alone, which of them count, and its tokens, by the rules of the model's processor."""
    module = "qwen3_omni_moe" if kind == "qwen3_omni" else kind
    processing = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    options: dict[str, Any] = {"padding": True, "truncation": False}
    options = options if kind == "qwen3_omni" else {"padding": "max_length"}
    found = _extractor(kind)(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options)
    features, mask = found["input_features"][0], found["attention_mask"][0].bool()
    return features, mask, int(processing._get_feat_extract_output_lengths(mask.sum()))


def their_inputs(kind: str, media: Sequence[Given], text: str | None = None) -> dict[str, Tensor]:
    """Ids of the expanded text, pixels and features."""
    pictures = [given for medium, given in media if medium == "image"]
    heard = [_heard(kind, given) for medium, given in media if medium == "audio"]
    given: dict[str, Tensor] = {}
    counts: dict[str, list[int]] = {IMAGES[kind][1]: [], AUDIO[kind][1]: [count for _, _, count in heard]}
    videos = [
        oracle_video("qwen2_5_vl", given, {**MODELS[IMAGE_KINDS[kind]].settings, **VIDEO_SIZE})
        for medium, given in media
        if medium == "video"
    ]
    counts[_VIDEOS[kind]] = [int(each["video_grid_thw"].prod()) // 4 for each in videos]
    of_videos = {
        name: torch.cat([each[name] for each in videos]) for name in ("pixel_values_videos", "video_grid_thw") if videos
    }
    if pictures:
        with one_axis_a_call():
            images = oracle_inputs(IMAGE_KINDS[kind], pictures)
        given = {name: torch.as_tensor(images[name]) for name in ("pixel_values", "image_grid_thw")}
        counts[IMAGES[kind][1]] = [int(grid.prod()) // 4 for grid in given["image_grid_thw"]]
    if videos:
        given |= of_videos
        given["video_second_per_grid"] = torch.tensor([2 / VIDEO_FPS] * len(videos))
    if heard:
        longest = max(mask.shape[0] for _, mask, _ in heard)
        padded = [torch.nn.functional.pad(each, (0, longest - each.shape[1])) for each, _, _ in heard]
        masks = [torch.nn.functional.pad(mask, (0, longest - len(mask))) for _, mask, _ in heard]
        given |= {"input_features": torch.stack(padded), "feature_attention_mask": torch.stack(masks).long()}
    left = {token: iter(numbers) for token, numbers in counts.items()}
    markers = "|".join(map(re.escape, counts))
    whole = re.sub(markers, lambda found: found[0] * next(left[found[0]]), text or text_of(kind, media))
    ids = torch.tensor([omni_tokenizer(kind).encode(whole).ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


@torch.no_grad()
def their_answer(
    kind: str, media: Sequence[Given], num_tokens: int, text: str | None = None
) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of the greedy answer."""
    given = their_inputs(kind, media, text)
    found = omni_reference(kind).generate(**given, max_new_tokens=num_tokens, do_sample=False)
    length = given["input_ids"].shape[1]
    return given["input_ids"][0].tolist(), found[0, length:].tolist()


@torch.no_grad()
def their_positions(kind: str, media: Sequence[Given]) -> Tensor:
    """int64 [3, T]."""
    given, model = their_inputs(kind, media), omni_reference(kind).model
    mask = given.get("feature_attention_mask")
    lengths = None if mask is None else mask.sum(1)
    positions, _ = model.get_rope_index(
        given["input_ids"], given.get("image_grid_thw"), None, given["attention_mask"], False, lengths
    )
    return positions[:, 0].long()


@torch.no_grad()
def their_rows(kind: str, medium: str, given: Pixels | Samples) -> list[Tensor]:
    """Rows of a picture or a recording alone, and those for the text's first layers."""
    model, inputs = omni_reference(kind).model, their_inputs(kind, [(medium, given)])
    if medium == "audio":
        return [model.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"]).last_hidden_state]
    found = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return [
        torch.cat([*found.pooler_output]),
        *[torch.cat([*each]) for each in getattr(found, "deepstack_features", ())],
    ]


def their_features(kind: str, samples: Samples) -> Samples:
    """[mel bins, frames] of a recording."""
    features, mask, _ = _heard(kind, samples)
    return np.asarray(features[:, mask])
