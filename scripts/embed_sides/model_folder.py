"""A sentence-transformers folder in the shape of all-MiniLM-L6-v2 with random weights, and short texts for it.

Both are drawn from a seed. The tokenizer is WordPiece with words that are made here, so that a word of a text is one
token or two, as in a language that the tokenizer was made for. Knows nothing of the runtimes that are compared.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
CONTINUES: Final = "##"
_MAX_TOKENS: Final = 256
_MOST_WORDS: Final = 64
_SHARE_OF_TWO_PIECES: Final = 0.15


@dataclass(frozen=True)
class Shape:
    """Of the encoder; the defaults are all-MiniLM-L6-v2's."""

    num_layers: int = 6
    hidden_size: int = 384
    num_heads: int = 12
    intermediate_size: int = 1536
    vocab_size: int = 30522


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Whole words and second pieces, as many as fill a vocabulary of this size beside special tokens and letters."""
    chance = random.Random(0)
    num_left = size - len(SPECIAL) - 2 * len(LETTERS)
    found: dict[str, None] = {}
    while len(found) < num_left:
        syllables = [chance.choice(LETTERS) + chance.choice("aeiou") for _ in range(chance.randint(1, 5))]
        found["".join(syllables) + chance.choice(LETTERS)] = None
    words = list(found)
    num_pieces = num_left // 4
    return words[num_pieces:], [CONTINUES + word for word in words[:num_pieces]]


def draw_texts(count: int, vocab_size: int, seed: int = 1) -> list[str]:
    """Short texts: a median of 13 words, 64 at most."""
    words, pieces = vocabulary(vocab_size)
    chance = random.Random(seed)

    def word() -> str:
        ending = chance.choice(pieces).removeprefix(CONTINUES) if chance.random() < _SHARE_OF_TWO_PIECES else ""
        return chance.choice(words) + ending

    lengths = [min(_MOST_WORDS, max(3, round(chance.lognormvariate(2.6, 0.5)))) for _ in range(count)]
    return [" ".join([word() for _ in range(length)]) for length in lengths]


def write_folder(folder: Path, shape: Shape) -> None:
    """What `SentenceTransformer.save` writes: weights, tokenizer, mean pooling, normalisation."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape.vocab_size)
    _write_weights(folder, shape)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(zip(paths, kinds))
    ]
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    _write_json(folder / "modules.json", modules)
    pooling = {"word_embedding_dimension": shape.hidden_size, "pooling_mode_mean_tokens": True}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": _MAX_TOKENS, "do_lower_case": False})
    # Last: a folder that has it is complete.
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    _write_json(folder / "config.json", config)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """BERT's: lower case, words split at spaces and punctuation, the longest piece first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words, pieces = vocabulary(vocab_size)
    letters = [*LETTERS, *(CONTINUES + letter for letter in LETTERS)]
    ids = {token: number for number, token in enumerate([*SPECIAL, *letters, *words, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    around = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **names,
        "mask_token": "[MASK]",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(folder: Path, shape: Shape) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, Any] = {}

    def linear(name: str, num_outputs: int, num_inputs: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
        tensors[f"{name}.bias"] = 0.05 * torch.randn(num_outputs, generator=generator)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.1 * torch.randn(hidden, generator=generator)
        tensors[f"{name}.bias"] = 0.1 * torch.randn(hidden, generator=generator)

    for kind, rows in (("word", shape.vocab_size), ("position", 512), ("token_type", 2)):
        tensors[f"embeddings.{kind}_embeddings.weight"] = torch.randn(rows, hidden, generator=generator)
    norm("embeddings.LayerNorm")
    for number in range(shape.num_layers):
        layer = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", hidden, hidden)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, hidden)
        linear(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm")
    linear("pooler.dense", hidden, hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(f"{json.dumps(value, indent=1)}\n", encoding="utf-8")
