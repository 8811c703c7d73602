"""The demo model's tokenizer: all 256 bytes, one token for each word that every prompt repeats, and a ChatML template.

Any UTF-8 text encodes and decodes to itself.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
RESERVED_TOKENS = tuple(f"<|reserved_{number}|>" for number in range(4))
SPECIAL_TOKENS = (END_OF_TEXT, CHAT_START, CHAT_END, *RESERVED_TOKENS)
MERGED_WORDS = ("user", "assistant", "add", "sort", "reverse", "copy")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_prompt(user_message: str) -> str:
    """What the chat template makes of one user message and the request for an answer."""
    return f"{CHAT_START}user\n{user_message}{CHAT_END}\n{CHAT_START}assistant\n"


def byte_alphabet() -> list[str]:
    """The printable stand-ins of the 256 bytes, in an order that is the same everywhere."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def word_merges(word: str) -> list[tuple[str, str]]:
    """The merges that build `word` from its left end, one letter at a time."""
    return [(word[:length], word[length]) for length in range(1, len(word))]


def build_tokenizer() -> Tokenizer:
    merges = [merge for word in MERGED_WORDS for merge in word_merges(word)]
    tokens = [*byte_alphabet(), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config(max_model_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_length,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(folder: Path, max_model_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template in the second."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_model_length), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
