"""Encoder-decoder models with the sizes of released ones and random weights, and prompts of different lengths.

Weights are well conditioned: transformers' own float32 must find the ids of its float64 for a comparison with it to
mean anything, so T5's queries, which nothing scales, stay as small as its initialisation has them.
"""

import copy
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from run_folder import made_once
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, WhisperFeatureExtractor

from spmd_worker.tokenizer.languages import LANGUAGES

RATE: Final = 16_000
NUM_TOKENS: Final = 24
BLOCK_SIZE: Final = 8
PENALTY: Final = 1.5
"""Of repetition, in answers to texts: without it random weights give one token again and again."""
TEXT_LENGTHS: Final = (3, 17, 40, 120, 400, 7, 60, 33)
"""Words of each text."""
AUDIO_LENGTHS_S: Final = (3.0, 11.3, 29.0, 30.0, 0.7, 17.2, 6.1, 22.5)
WHISPER_PROMPT: Final = (50258, 50259, 50359, 50363)
"""Start of a transcript, English, transcribe, no timestamps."""
_END_OF_TEXT: Final = 50257


def _t5(**sizes: Any) -> dict[str, Any]:
    return {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "decoder_start_token_id": 0, **sizes}


def _halves(num_layers: int, num_heads: int, ffn_dim: int) -> dict[str, int]:
    sizes = {"layers": num_layers, "attention_heads": num_heads, "ffn_dim": ffn_dim}
    return {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in sizes.items()}


SHAPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "whisper-tiny": (
        "Whisper",
        {
            "vocab_size": 51865,
            "d_model": 384,
            **_halves(4, 6, 1536),
            "num_mel_bins": 80,
            "decoder_start_token_id": 50258,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _END_OF_TEXT),
            "begin_suppress_tokens": [220, _END_OF_TEXT],
        },
    ),
    "t5-small": ("T5", _t5(d_ff=2048, num_heads=8, num_layers=6)),
    "flan-t5-small": (
        "T5",
        _t5(d_ff=1024, num_heads=6, num_layers=8, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "bart-base": (
        "Bart",
        {"vocab_size": 50265, "d_model": 768, **_halves(6, 12, 3072), "max_position_embeddings": 1024},
    ),
}
"""Class of transformers, and its sizes."""


@dataclass(frozen=True, slots=True)
class FullSize:
    """A model of transformers, its folder, and its inputs."""

    folder: Path
    model: PreTrainedModel
    prompts: list[dict[str, Any]]
    """For `LLM.generate`."""
    inputs: list[Tensor]
    """The same for transformers: ids [1, T] or features [1, mels, frames]."""
    num_blocks_at_start: int
    """Of all inputs together, when each decoder has its prompt."""
    chunk: int
    """Tokens of a step, which cut inputs, and are so many that all rows run at once before the first has ended."""

    @property
    def is_audio(self) -> bool:
        return self.model.config.model_type == "whisper"


@cache
def full_size(name: str) -> FullSize:
    """A model that the processes of a run share."""
    folder = made_once(name, lambda path: _write(path, name))
    model = _class_of(name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if SHAPES[name][0] == "Whisper":
        extractor = WhisperFeatureExtractor()
        sounds = [speech_sound(length_s, seed) for seed, length_s in enumerate(AUDIO_LENGTHS_S)]
        features = [extractor(each, sampling_rate=RATE, return_tensors="pt").input_features for each in sounds]
        prompts = [_heard(each) for each in sounds]
        return FullSize(folder, model, prompts, features, len(sounds) * (-(-1500 // BLOCK_SIZE) + 1), 2000)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = _texts()
    ids = [torch.tensor([tokenizer(each).input_ids]) for each in texts]
    num_blocks = sum(-(-each.shape[1] // BLOCK_SIZE) + 1 for each in ids)
    return FullSize(folder, model, [{"prompt": each} for each in texts], ids, num_blocks, 100)


def full_size_prompts(name: str) -> list[dict[str, Any]]:
    """For `LLM.generate`, in a process that needs no model of transformers."""
    if SHAPES[name][0] == "Whisper":
        return [_heard(speech_sound(length_s, seed)) for seed, length_s in enumerate(AUDIO_LENGTHS_S)]
    return [{"prompt": each} for each in _texts()]


def speech_with_rules(folder: Path) -> Path:
    """The model of whisper-tiny's sizes, with what its release has for timestamps and languages."""
    shutil.copytree(full_size("whisper-tiny").folder, folder)
    languages = [f"<|{code}|>" for code in LANGUAGES][:99]
    special = ["<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    words = {f"w{index}": index for index in range(_END_OF_TEXT)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", special=False) for index in range(1501)])
    assert tokenizer.token_to_id("<|notimestamps|>") == WHISPER_PROMPT[-1]
    assert tokenizer.get_vocab_size() == SHAPES["whisper-tiny"][1]["vocab_size"]
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "generation_config.json"
    settings = {
        "no_timestamps_token_id": WHISPER_PROMPT[-1],
        "max_initial_timestamp_index": 50,
        "is_multilingual": True,
        "lang_to_id": {each: tokenizer.token_to_id(each) for each in languages},
        "task_to_id": {"translate": 50358, "transcribe": 50359},
        "suppress_tokens": [*range(50259, 50364)],
        "prev_sot_token_id": 50361,
    }
    given = json.loads(path.read_text())
    # Or transformers reads what it knows of all models alone.
    given.pop("_from_model_config", None)
    path.write_text(json.dumps({**given, **settings}))
    return folder


@torch.no_grad()
def greedy_ids(shape: FullSize, given: Tensor, num_tokens: int = NUM_TOKENS) -> list[int]:
    """transformers' answer to one input alone, without its prompt."""
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "num_beams": 1}
    if not shape.is_audio:
        return _as_list(shape.model.generate(given, repetition_penalty=PENALTY, **options)[0])[1:]
    start = torch.tensor([WHISPER_PROMPT])
    found = _as_list(shape.model.generate(given, decoder_input_ids=start, **options)[0])
    return found[len(WHISPER_PROMPT) :] if found[: len(WHISPER_PROMPT)] == [*WHISPER_PROMPT] else found


@torch.no_grad()
def are_double_ids(shape: FullSize, answers: list[list[int]]) -> bool:
    """Whether each token is the first choice of the model in float64 after all before it."""
    start = [*WHISPER_PROMPT] if shape.is_audio else [shape.model.config.decoder_start_token_id]
    model = copy.deepcopy(shape.model).double()
    for given, answer in zip(shape.inputs, answers, strict=True):
        inputs = {"input_features": given.double()} if shape.is_audio else {"input_ids": given}
        logits = model(**inputs, decoder_input_ids=torch.tensor([[*start, *answer[:-1]]])).logits[0, len(start) - 1 :]
        if shape.is_audio:
            logits[0, model.generation_config.begin_suppress_tokens] = -torch.inf
        else:
            for position, scores in enumerate(logits):
                seen = torch.tensor([*start, *answer[:position]])
                found = scores[seen]
                scores[seen] = torch.where(found < 0, found * PENALTY, found / PENALTY)
        if logits.argmax(-1).tolist() != answer:
            return False
    return True


def _as_list(ids: Tensor) -> list[int]:
    found: list[int] = ids.tolist()
    return found


def _class_of(name: str) -> Any:
    return getattr(transformers, f"{SHAPES[name][0]}ForConditionalGeneration")


@torch.no_grad()
def _write(folder: Path, name: str) -> None:
    family, sizes = SHAPES[name]
    torch.manual_seed(0)
    model = _class_of(name)(getattr(transformers, f"{family}Config")(**sizes)).eval()
    for key, value in model.named_parameters():
        # Whisper's encoder has a table of sines.
        if "encoder.embed_positions" not in key or family != "Whisper":
            value.copy_(_stirred(key, value, family == "T5"))
    config = model.generation_config
    config.forced_bos_token_id = config.forced_eos_token_id = None
    config.no_repeat_ngram_size = 0
    model.save_pretrained(folder)
    if family == "Whisper":
        WhisperFeatureExtractor().save_pretrained(folder)
    else:
        word_tokenizer(sizes["vocab_size"], family).save_pretrained(folder)


def _stirred(key: str, value: Tensor, is_t5: bool) -> Tensor:
    if value.ndim == 1:
        return value + 0.1 * torch.randn_like(value)
    if value.shape[0] > 20_000:
        return 0.05 * torch.randn_like(value)
    if "relative_attention_bias" in key:
        return torch.randn_like(value)
    # An answer follows what the encoder read, and goes on.
    gain = 3 if any(each in key for each in ("attn.out_proj", "Attention.o.", "embed_positions")) else 1.6
    return (
        gain
        * (0.125 if is_t5 and key.endswith(".q.weight") else 1)
        * value[0].numel() ** -0.5
        * torch.randn_like(value)
    )


def word_tokenizer(vocab_size: int, family: str) -> PreTrainedTokenizerFast:
    """Of the words w0, w1, ..., with the special tokens at the ids of releases."""
    special, written = {"<s>": 0, "<pad>": 1, "</s>": 2}, "<s> $A </s>"
    if family == "T5":
        special, written = {"<pad>": 0, "</s>": 1}, "$A </s>"
    words = {f"w{index}": index for index in range(len(special), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel({**special, **words}, unk_token=f"w{vocab_size - 1}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=written, special_tokens=[*special.items()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def _texts() -> list[str]:
    chance = np.random.default_rng(1)
    return [" ".join([f"w{each}" for each in chance.integers(10, 30_000, length)]) for length in TEXT_LENGTHS]


def speech_sound(length_s: float, seed: int) -> np.ndarray:
    """A tone and noise, float32 at 16 kHz."""
    chance, num_samples = np.random.default_rng(seed), int(length_s * RATE)
    tone = 0.3 * np.sin(np.arange(num_samples) * chance.uniform(0.05, 0.6))
    return (tone + 0.1 * chance.standard_normal(num_samples)).astype(np.float32)


def _heard(samples: np.ndarray) -> dict[str, Any]:
    return {"prompt_token_ids": [*WHISPER_PROMPT], "multi_modal_data": {"audio": (samples, RATE)}}
