"""A tiny Whisper with random weights: its tokenizer of bytes, its special tokens, windows of two seconds; and audio."""

import copy
import io
import json
import wave
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LogitsProcessorList, WhisperConfig, WhisperForConditionalGeneration
from transformers.generation import GenerationMixin

WINDOW_S: Final = 2
RATE: Final = 16_000
NUM_BYTES: Final = 256
SPECIAL: Final = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
IDS: Final = {name: NUM_BYTES + index for index, name in enumerate(SPECIAL)}
FIRST_STAMP: Final = NUM_BYTES + len(SPECIAL)
NUM_STAMPS: Final = WINDOW_S * 50 + 1
MAX_LENGTH: Final = 64


ALPHABET: Final = sorted(pre_tokenizers.ByteLevel.alphabet())
_ODD_IDS: Final = [index for index, each in enumerate(ALPHABET) if not (each.isascii() and each.isalpha())]
"""Answers are of letters."""


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, then Whisper's special tokens, then its timestamps, which are not special."""
    tokenizer = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", special=False) for index in range(NUM_STAMPS)])
    start, end = IDS["<|startoftranscript|>"], IDS["<|endoftext|>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>",
        special_tokens=[
            ("<|startoftranscript|>", start),
            ("<|notimestamps|>", IDS["<|notimestamps|>"]),
            ("<|endoftext|>", end),
        ],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@cache
def speech_folder() -> Path:
    """A folder as releases have it. The answers of its model are random, and end."""
    folder = Path(mkdtemp(prefix="speech-"))
    end, start = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=FIRST_STAMP + NUM_STAMPS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=WINDOW_S * 50,
        max_target_positions=MAX_LENGTH,
        num_mel_bins=80,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(4)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.15)
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight *= 6
        model.model.decoder.embed_positions.weight *= 4
        # Without timestamps in its prompt it gives few.
        model.model.decoder.embed_tokens.weight[FIRST_STAMP:] *= 0.5
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=end,
        max_length=MAX_LENGTH,
        suppress_tokens=[*_ODD_IDS, *[each for name, each in IDS.items() if name != "<|endoftext|>"]],
        begin_suppress_tokens=[end],
        no_timestamps_token_id=IDS["<|notimestamps|>"],
        max_initial_timestamp_index=20,
        is_multilingual=True,
        lang_to_id={name: IDS[name] for name in ("<|en|>", "<|de|>", "<|fr|>")},
        task_to_id={"translate": IDS["<|translate|>"], "transcribe": IDS["<|transcribe|>"]},
        prev_sot_token_id=IDS["<|startofprev|>"],
    )
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(feature_settings()))
    return folder


@cache
def speech_reference() -> WhisperForConditionalGeneration:
    """transformers' model of `speech_folder`."""
    return WhisperForConditionalGeneration.from_pretrained(speech_folder()).eval()


def _settings_of(model: WhisperForConditionalGeneration, settings: dict[str, Any]) -> GenerationConfig:
    config = copy.deepcopy(model.generation_config)
    config.return_timestamps = settings.get("timestamps", False)
    # transformers takes no task by default.
    config.language, config.task = settings.get("language"), settings.get("task", "transcribe")
    config.no_speech_threshold = None
    return config


def speech_rules(
    model: WhisperForConditionalGeneration, settings: dict[str, Any], num_prompt: int
) -> LogitsProcessorList:
    """transformers' rules of the answer to a prompt of so many tokens."""
    config = _settings_of(model, settings)
    return LogitsProcessorList(model._retrieve_logit_processors(config, None, num_prompt, 1, "cpu"))


@torch.no_grad()
def their_transcripts(
    model: WhisperForConditionalGeneration, features: torch.Tensor, settings: dict[str, Any], num_tokens: int
) -> list[list[int]]:
    """Prompts and greedy answers, of the first window alone: `generate` computes what follows the last timestamp once
    more. A detected language is of the answer, and of its number of tokens.
    """
    config = _settings_of(model, settings)
    ids = model._retrieve_init_tokens(features, len(features), config, model.config, features.shape[-1], {})
    most = num_tokens - (ids.shape[1] - 1 if "language" not in settings else 0)
    processors, end = speech_rules(model, settings, ids.shape[1]), config.eos_token_id
    encoded = model.model.encoder(features)
    for _ in range(most):
        scores = processors(ids, model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1])
        ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), dim=1)
    rows = ids.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@torch.no_grad()
def their_beams(
    model: WhisperForConditionalGeneration,
    features: torch.Tensor,
    prompt: list[int],
    rules: list[Any],
    width: int,
    num_tokens: int,
) -> tuple[list[list[int]], list[float]]:
    """Beams behind a prompt, with it, none of which ends; and their scores."""
    settings = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num_tokens,
        length_penalty=0.0,
        pad_token_id=IDS["<|endoftext|>"],
        decoder_start_token_id=prompt[0],
        output_scores=True,
        return_dict_in_generate=True,
    )
    given = {"decoder_input_ids": torch.tensor([prompt]), "logits_processor": LogitsProcessorList(rules)}
    # The class's own `generate` is for recordings of any length.
    with patch.object(model, "generation_config", settings):
        made = GenerationMixin.generate(model, features, **given)
    return made.sequences.tolist(), made.sequences_scores.tolist()


def feature_settings() -> dict[str, Any]:
    """Contents of `preprocessor_config.json`."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "chunk_length": WINDOW_S,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": RATE,
        "n_samples": WINDOW_S * RATE,
        "nb_max_frames": WINDOW_S * 100,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
    }


def sound(length_s: float, seed: int = 0) -> np.ndarray:
    """Tones that change, float32 at 16 kHz."""
    chance = np.random.default_rng(seed)
    num_samples = int(length_s * RATE)
    times = np.arange(num_samples) / RATE
    pitches = chance.uniform(100, 2000, int(length_s * 4) + 1)
    waves = np.sin(2 * np.pi * pitches[(times * 4).astype(int)] * times) * (1 + np.sin(times * 7)) / 4
    return waves.astype(np.float32)


def wave_file(samples: np.ndarray) -> bytes:
    """A WAV file of 16 bits."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return stream.getvalue()
