"""Small tokenizers of the kinds that models come with, written as model folders."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["hello world, this is a text about the cache and the scheduler. " * 4, "naïve café 你好 世界 😀 12345 x"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_byte_level(folder: Path, **config) -> Path:
    """Byte-level BPE as GPT-2, Qwen and Llama 3 have; ids 0 to 3 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(tokenizer, folder, config)


def write_llama_style(folder: Path, **config) -> Path:
    """SentencePiece-style BPE with byte fallback; a template puts <s> in front."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for value in range(256):
        vocab[f"<0x{value:02X}>"] = len(vocab)
    for piece in ["▁", *"abcdehlortuw", "▁a", "▁b", "he", "ll", "llo", "▁he", "▁hello", "▁w", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("h", "e"), ("l", "l"), ("ll", "o"), ("▁", "he"), ("▁he", "llo"), ("▁", "w")]
    merges.append(("▁", "▁"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _write(tokenizer, folder, config)


def write_metaspace(folder: Path, **config) -> Path:
    """Unigram with the Metaspace decoder, as T5 and XLM-R have."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁a", -3.0),
        ("b", -3.0),
        ("▁bc", -3.5),
        ("c", -3.0),
        ("a", -4.0),
        (",", -4.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _write(tokenizer, folder, config)


def _write(tokenizer: Tokenizer, folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"} if tokenizer.token_to_id("<s>") is not None else {}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
