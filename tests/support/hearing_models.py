"""Small random models of text and audio, with tokenizer, template and processor, and transformers' answers."""

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from content_templates import template_with
from numpy.typing import NDArray
from run_folder import made_once
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    # Importing it takes seconds.
    from transformers import PreTrainedModel

Samples = NDArray[np.float32]
RATE: Final = 16_000
WINDOW_S: Final = 2
"""Seconds of audio that the small models hear at most; Whisper's are 30."""
NUM_MEL_BINS: Final = 16
WRITTEN: Final = {
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
    "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>",
    "audioflamingo3": "<sound>",
}
"""Kind -> what a template writes for a recording."""
KINDS: Final = tuple(WRITTEN)
_SPECIAL: Final = (
    *("<eos>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    *("[BEGIN_AUDIO]", "[AUDIO]", "<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>", "<sound>"),
)
_TOKENS: Final = {
    "qwen2_audio": ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    "qwen3_asr": ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    "voxtral": ("[AUDIO]",),
    "glmasr": ("<|pad|>",),
    "audioflamingo3": ("<sound>",),
}
"""Kind -> its token of audio, and those before and behind it if its processor knows them."""
ONE_BY_ONE: Final = ("qwen3_asr", "glmasr", "audioflamingo3")
"""Kinds whose processors take one recording a text, where the models take several."""
_TEXT: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}
_WHISPER: Final = {
    "num_mel_bins": NUM_MEL_BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}
_IN_WINDOWS: Final = {
    "num_mel_bins": NUM_MEL_BINS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_OF_PICTURES: Final = {"downsample_hidden_size": 16, "n_window_infer": 100, "output_dim": 64}
"""Attention within one chunk: the next has a window of its own."""


def template_of(kind: str) -> str:
    """As Qwen's: it looks for the key of an audio part."""
    return template_with("'audio' in part or 'audio_url' in part", WRITTEN[kind])


def recording(num_samples: int, seed: int = 0) -> Samples:
    """A tone that rises, and noise."""
    time = np.arange(num_samples) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, num_samples)
    return (0.4 * np.sin(2 * np.pi * (200 + 90 * seed + 300 * time) * time) + noise).astype(np.float32)


def hearing_folder(kind: str) -> Path:
    """A folder as the hub has it."""
    return made_once(f"hearing_{kind}", lambda folder: _write(kind, folder))


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _config(kind: str, tokenizer: Tokenizer) -> Any:
    text = {**_TEXT, "vocab_size": tokenizer.get_vocab_size()}
    token_id = tokenizer.token_to_id(_TOKENS[kind][0])
    if kind == "qwen3_asr":
        return transformers.Qwen3ASRConfig(
            text_config={"model_type": "qwen3", "head_dim": 16, **text},
            audio_config={"model_type": "qwen3_asr_encoder", **_WHISPER, **_OF_PICTURES},
            audio_token_id=token_id,
            tie_word_embeddings=False,
            **dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.token_to_id("<eos>")),
        )
    if kind != "qwen2_audio":
        positions = "max_position_embeddings" if kind == "glmasr" else "max_source_positions"
        return getattr(transformers, f"{_CLASSES[kind]}Config")(
            text_config={"model_type": "qwen2" if kind == "audioflamingo3" else "llama", "head_dim": 16, **text},
            audio_config={"model_type": f"{kind}_encoder", **_IN_WINDOWS, positions: 50 * WINDOW_S},
            audio_token_id=token_id,
            tie_word_embeddings=False,
        )
    return transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text},
        audio_config={"model_type": "qwen2_audio_encoder", **_WHISPER, "max_source_positions": 50 * WINDOW_S},
        audio_token_index=token_id,
    )


_CLASSES: Final = {
    "qwen2_audio": "Qwen2Audio",
    "qwen3_asr": "Qwen3ASR",
    "voxtral": "Voxtral",
    "glmasr": "GlmAsr",
    "audioflamingo3": "AudioFlamingo3",
}


def _model_class(kind: str) -> Any:
    return getattr(transformers, f"{_CLASSES[kind]}ForConditionalGeneration")


def _write(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template_of(kind)}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_extractor(kind).to_dict()))
    torch.manual_seed(0)
    model = _model_class(kind)(_config(kind, tokenizer))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = weight.ndim == 1 and "norm" in name and name.endswith("weight")
            spread = 0.1 if weight.ndim == 1 else 2.5 / weight[0].numel() ** 0.5
            spread = 1.0 if "embed_tokens" in name else spread
            weight.copy_(1 + 0.1 * noise if is_norm else noise * spread)
    model.save_pretrained(folder)


def original_folder() -> Path:
    """The model of Qwen3-ASR in files as Qwen's own are."""
    return made_once("hearing_qwen3_asr_original", _write_original)


_OF_THINKER: Final = {
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
    "model.audio_tower.": "thinker.audio_tower.",
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
}
"""Beginnings of names in transformers' form -> those in Qwen's."""


def _write_original(folder: Path) -> None:
    converted = hearing_folder("qwen3_asr")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(converted / name, folder / name)
    config = json.loads((converted / "config.json").read_text())
    text, audio = config.pop("text_config"), config.pop("audio_config")
    rope = text.pop("rope_parameters")
    text |= {"model_type": "qwen3_asr_text", "rope_theta": rope["rope_theta"]}
    text["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    audio |= {"model_type": "qwen3_asr_audio_encoder", "max_source_positions": 1500, "conv_chunksize": 500}
    del audio["max_position_embeddings"]
    thinker = {"audio_config": audio, "text_config": text, "audio_token_id": config.pop("audio_token_id")}
    config |= {"thinker_config": {**thinker, "user_token_id": 872}, "support_languages": ["English"]}
    (folder / "config.json").write_text(json.dumps(config))
    extractor = transformers.WhisperFeatureExtractor(feature_size=NUM_MEL_BINS).to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    named = {}
    for name, tensor in load_file(converted / "model.safetensors").items():
        ((old, new),) = [each for each in _OF_THINKER.items() if name.startswith(each[0])]
        named[new + name.removeprefix(old)] = tensor
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def _extractor(kind: str) -> Any:
    if kind == "qwen3_asr":
        return transformers.Qwen3ASRFeatureExtractor(feature_size=NUM_MEL_BINS)
    return transformers.WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=WINDOW_S)


@cache
def hearing_reference(kind: str) -> "PreTrainedModel":
    """transformers' model of the folder."""
    return _model_class(kind).from_pretrained(hearing_folder(kind), dtype=torch.float32).eval()


@cache
def _processor(kind: str) -> Any:
    file = str(hearing_folder(kind) / "tokenizer.json")
    tokens = dict(zip(("audio_token", "audio_bos_token", "audio_eos_token"), _TOKENS[kind], strict=False))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, pad_token="<eos>", extra_special_tokens=tokens
    )
    processor_class = getattr(transformers, f"{_CLASSES[kind]}Processor")
    given = {"audio_token": tokens["audio_token"]} if len(tokens) == 1 else {}
    return processor_class(_extractor(kind), tokenizer, chat_template=template_of(kind), **given)


def their_inputs(kind: str, text: str, recordings: list[Samples]) -> dict[str, Any]:
    """Ids of the expanded text, features, and which of them are not padding."""
    if kind == "voxtral":
        return _of_voxtral(text, recordings)
    if kind in ONE_BY_ONE and len(recordings) > 1:
        return _one_by_one(kind, text, recordings)
    found = _processor(kind)(text=text, audio=recordings, sampling_rate=RATE, return_tensors="pt")
    return {name: each for name, each in found.items() if name != "token_type_ids"}


def _of_voxtral(text: str, recordings: list[Samples]) -> dict[str, Any]:
    """Features by its processor, whose ids come from another library: 12.5 tokens a second of complete windows."""
    window, pieces = RATE * WINDOW_S, text.split("[AUDIO]")
    counts = [-(-len(each) // window) * 25 for each in recordings]
    joined = "".join([first + "[AUDIO]" * count for first, count in zip(pieces, counts, strict=False)]) + pieces[-1]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(hearing_folder("voxtral") / "tokenizer.json"))
    ids = tokenizer(joined, return_tensors="pt")
    holder = SimpleNamespace(feature_extractor=_extractor("voxtral"))
    options = {**transformers.VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": window}
    features = transformers.VoxtralProcessor._retrieve_input_features(
        holder, recordings, **{**options, "max_source_positions": 100 * WINDOW_S}
    )
    return {**{name: ids[name] for name in ("input_ids", "attention_mask")}, "input_features": features}


def _one_by_one(kind: str, text: str, recordings: list[Samples]) -> dict[str, Any]:
    """Of a processor that takes one recording a text, where the model takes several."""
    found = [their_inputs(kind, WRITTEN[kind], [each]) for each in recordings]
    token, first, *rest = _TOKENS[kind][0], *text.split(_TOKENS[kind][0])
    token_id = hearing_reference(kind).config.audio_token_id
    pieces = [token * int((each["input_ids"] == token_id).sum()) + after for each, after in zip(found, rest)]
    ids = _processor(kind).tokenizer(first + "".join(pieces), return_tensors="pt")
    longest = max(each["input_features"].shape[2] for each in found)

    def joined(name: str) -> torch.Tensor:
        parts = [each[name] for each in found]
        return torch.cat([torch.nn.functional.pad(each, (0, longest - each.shape[-1])) for each in parts])

    masks = {name: ids[name] for name in ("input_ids", "attention_mask")}
    return {**masks, **{name: joined(name) for name in ("input_features", "input_features_mask")}}


def their_answer(kind: str, text: str, recordings: list[Samples], num_tokens: int) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of the greedy answer."""
    given = their_inputs(kind, text, recordings)
    with torch.no_grad():
        found = hearing_reference(kind).generate(**given, max_new_tokens=num_tokens, do_sample=False)
    length = given["input_ids"].shape[1]
    return given["input_ids"][0].tolist(), found[0, length:].tolist()


@torch.inference_mode()
def their_rows(kind: str, samples: Samples) -> torch.Tensor:
    """Rows of a recording alone."""
    given = their_inputs(kind, WRITTEN[kind], [samples])
    model, ids = hearing_reference(kind).model, given["input_ids"]
    taken = []
    hook = model.language_model.register_forward_pre_hook(
        lambda module, args, options: taken.append(options["inputs_embeds"]), with_kwargs=True
    )
    model(**given)
    hook.remove()
    token_id = hearing_reference(kind).config.audio_token_id
    rows: torch.Tensor = taken[0][ids == token_id]
    return rows


def their_features(kind: str, samples: Samples) -> Samples:
    """[mel bins, frames]."""
    windows = their_inputs(kind, WRITTEN[kind], [samples])["input_features"].numpy()
    return np.concatenate([*windows], axis=1)
