"""Small random models of text and audio, with tokenizer, template and processor, and transformers' answers."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from run_folder import made_once
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    # Importing it takes seconds.
    from transformers import PreTrainedModel

Samples = NDArray[np.float32]
RATE: Final = 16_000
WINDOW_S: Final = 2
"""Seconds of audio that the small models hear at most; Whisper's are 30."""
NUM_MEL_BINS: Final = 16
WRITTEN: Final = {"qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
"""Kind -> what a template writes for a recording."""
KINDS: Final = tuple(WRITTEN)
_SPECIAL: Final = ("<eos>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
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
    "max_source_positions": 50 * WINDOW_S,
}


def template_of(kind: str) -> str:
    """As Qwen's: it looks for the key of an audio part."""
    return (
        "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if 'audio' in part or 'audio_url' in part %}"
        + WRITTEN[kind]
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )


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
    assert kind == "qwen2_audio", kind
    return transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text},
        audio_config={"model_type": "qwen2_audio_encoder", **_WHISPER},
        audio_token_index=tokenizer.token_to_id("<|AUDIO|>"),
    )


def _model_class(kind: str) -> Any:
    return {"qwen2_audio": transformers.Qwen2AudioForConditionalGeneration}[kind]


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


def _extractor(kind: str) -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=WINDOW_S)


@cache
def hearing_reference(kind: str) -> "PreTrainedModel":
    """transformers' model of the folder."""
    return _model_class(kind).from_pretrained(hearing_folder(kind), dtype=torch.float32).eval()


@cache
def _processor(kind: str) -> Any:
    file = str(hearing_folder(kind) / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<eos>")
    return transformers.Qwen2AudioProcessor(_extractor(kind), tokenizer, chat_template=template_of(kind))


def their_inputs(kind: str, text: str, recordings: list[Samples]) -> dict[str, Any]:
    """Ids of the expanded text, features, and which of them are not padding."""
    found = _processor(kind)(text=text, audio=recordings, sampling_rate=RATE, return_tensors="pt")
    return {name: each for name, each in found.items() if name != "token_type_ids"}


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
    found: Samples = their_inputs(kind, WRITTEN[kind], [samples])["input_features"][0].numpy()
    return found
