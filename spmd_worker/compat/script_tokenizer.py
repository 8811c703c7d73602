"""The tokenizer of `LLM.get_tokenizer()`: transformers' own if it can be imported, else ours under transformers' names.

The engine itself encodes and decodes with `tokenizer/`, with the same ids.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_worker.base.config.extras import package_fault
from spmd_worker.compat.chat import ChatOptions, render
from spmd_worker.tokenizer.chat_templates import DEFAULT
from spmd_worker.tokenizer.encoder import switch_off_sampling
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def script_tokenizer(own: Tokenizer, model_folder: Path) -> Any:
    """The tokenizer for scripts. Nothing is downloaded, no code of the folder is executed, and nothing is random."""
    if own.is_of_ranks:
        logger.info("the tokenizer of %s is made from a file of ranks, so ours is used", model_folder)
        return PlainTokenizer(own)
    if own.is_isolated:
        logger.info("the format of the tokenizer of %s is unknown, so ours, with limits, is used", model_folder)
        return PlainTokenizer(own)
    try:
        from transformers import AutoTokenizer

        found: Any = AutoTokenizer.from_pretrained(str(model_folder), local_files_only=True, trust_remote_code=False)
        if not (getattr(found, "sp_model_kwargs", None) or {}).get("enable_sampling"):
            if (backend := getattr(found, "backend_tokenizer", None)) is not None:
                switch_off_sampling(backend)
            return found
        logger.info("sp_model_kwargs.enable_sampling of %s is for training, so our tokenizer is used", model_folder)
    except ImportError as error:
        logger.info("transformers %s, so our tokenizer is used", package_fault("transformers", None, error).reason)
    except (OSError, ValueError, KeyError) as error:  # a tokenizer that needs code, or missing files
        logger.info("transformers cannot open the tokenizer of %s, so ours is used: %s", model_folder, error)
    return PlainTokenizer(own)


class PlainTokenizer:
    """Our tokenizer under transformers' names, for scripts that encode, decode and render prompts.

    `bos_token`, `eos_token`, `pad_token`, `unk_token` and their ids are None if the folder does not define them.
    """

    is_fast = True

    def __init__(self, own: Tokenizer) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        kind = name.removesuffix("_id")
        if kind in ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"):
            token = self._own.special_tokens.get(kind)
            return token if name == kind or token is None else self._own.token_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: install transformers for its tokenizer")

    def __len__(self) -> int:
        return self._own.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of one text, or lists of them."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        found = [self(each, add_special_tokens) for each in text]
        return {name: [each[name] for each in found] for name in ("input_ids", "attention_mask")}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._own.vocab_size

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The template's source, a dict of several by name, or None."""
        sources = self._own.chat_templates.sources
        return sources.get(DEFAULT) if sources.keys() <= {DEFAULT} else dict(sources)

    @property
    def all_special_tokens(self) -> list[str]:
        """The folder's special tokens, without duplicates."""
        return list(dict.fromkeys(self._own.special_tokens.values()))

    @property
    def all_special_ids(self) -> list[int]:
        ids = [self._own.token_id(token) for token in self.all_special_tokens]
        return [each for each in ids if each is not None]

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._own.vocabulary()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._own.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of one id or of several; as in transformers, special tokens are kept by default."""
        return self._own.decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """One id or a list; None for an unknown token."""
        return self._own.token_id(tokens) if isinstance(tokens, str) else [self._own.token_id(each) for each in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """One token, as in the vocabulary, or a list; None for an unknown id."""
        return self._own.token(ids) if isinstance(ids, int) else [self._own.token(each) for each in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Prompt of one conversation, as ids unless `tokenize` is False. Raises ChatTemplateError and ValueError."""
        if documents is not None:
            variables["documents"] = documents
        options = ChatOptions(
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
            # As in transformers.
            keeps_contents=True,
        )
        text = render(conversation, options, self._own)
        return self._own.encode(text, add_special_tokens=False) if tokenize else text
