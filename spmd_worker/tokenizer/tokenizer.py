"""Tokenizer: text to token ids and back, from the files of a model folder.

Ids equal those of transformers' fast tokenizer for the same folder; transformers itself is imported only to convert the
files of older tokenizers, and nothing in the folder is executed but the chat template, in its sandbox.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import TokenizerError
from spmd_worker.model_config.byte_level_bpe import BYTES
from spmd_worker.tokenizer.chat_templates import DEFAULT, TOOL_USE, ChatTemplates, load_template
from spmd_worker.tokenizer.continued_message import before_mark, with_mark
from spmd_worker.tokenizer.conversion import older_files
from spmd_worker.tokenizer.encoder import library_errors
from spmd_worker.tokenizer.encoder_process import IsolatedEncoder
from spmd_worker.tokenizer.tokenizer_files import TOKENIZER_FILE, TokenizerFiles, read_tokenizer_files

logger = logging.getLogger(__name__)


class TokenizerFilesError(TokenizerError):
    """The files of a tokenizer cannot be used: every rank reads the same."""

    is_known_to_all = True


class Tokenizer:
    """The tokenizer of one model folder. Use `open` or `open_if_present`.

    tokenizer.json decides which special tokens `encode` adds; `add_bos_token` and `add_eos_token` of
    tokenizer_config.json are then ignored, as transformers 5 ignores them.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        backend = files.backend
        self._files, self._backend, self._encoder = files, backend, files.encoder
        self.special_tokens: Mapping[str, str] = files.special_tokens
        """`bos_token`, `eos_token`, `pad_token`, ... -> the token."""
        self.chat_templates, self._fingerprint = files.chat_templates, files.fingerprint
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._has_byte_fallback = b'"ByteFallback"' in decoder
        self._is_byte_level = decoder.startswith(b'{"type":"ByteLevel"')
        self._token_texts: dict[int, str] = {}

    @staticmethod
    def open(model_folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder. Raises TokenizerError naming the file and the fault."""
        try:
            return Tokenizer(read_tokenizer_files(Path(model_folder)))
        except TokenizerError as error:
            raise TokenizerFilesError(str(error)) from None

    @staticmethod
    def open_if_present(model_folder: Path) -> "Tokenizer | None":
        """`open`; None for a folder without a tokenizer, or, with a warning, if its older files cannot be converted."""
        folder = Path(model_folder)
        if (folder / TOKENIZER_FILE).is_file():
            return Tokenizer.open(folder)
        try:
            return Tokenizer.open(folder) if older_files(folder) else None
        except TokenizerError as error:
            logger.warning("%s", error)
            return None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def is_isolated(self) -> bool:
        """Whether texts are encoded in a process with limits: tokenizer.json has components that no known model has."""
        return isinstance(self._encoder, IsolatedEncoder)

    @property
    def is_of_ranks(self) -> bool:
        """Whether the folder has a file of ranks and no tokenizer.json: transformers may open it with other ids."""
        return self._files.is_of_ranks

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates.sources)

    @property
    def chat_template_source(self) -> str | None:
        """The folder's template, that for tools if there are several; None without any."""
        sources = self.chat_templates.sources
        return sources.get(TOOL_USE, sources.get(DEFAULT))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError for text that is not Unicode (a lone surrogate), and its subclass
        TokenizerError where the tokenizer fails on it.

        There is no batch call: the library's own starts a thread per core, which takes the cores from the ranks and
        makes it print a warning after every later fork.
        """
        _check_unicode(text)
        return self._encoder.encode(text, add_special_tokens)

    def around_source(self, language: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and after a text in this language, without other special tokens, for the encoder of a translator.
        Raises ValueError for an unknown language, and for a tokenizer without source languages.
        """
        if self._files.source is None:
            raise ValueError(
                f"source_language={shown(language)}: this model's tokenizer is of no class that marks the source "
                f"language: leave it out, or set tokenizer_class in tokenizer_config.json"
            )
        return self._files.source.around(language, self.marker_id)

    def min_num_tokens(self, text: str) -> int:
        """Lower bound of `len(encode(text, add_special_tokens=False))`, fast; 0 if unknown. Never raises."""
        return self._files.bound.min_num_tokens(text)

    def encode_inside(
        self, first: str, second: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text or of a pair, and the number of ids of the first text: those of type 0, None where types
        are not all 0 and then all 1.

        Beyond `max_tokens` the ends of the texts (their beginnings, with `truncation_side` left) are truncated, of a
        pair the longer one first, and never special tokens. Raises ValueError as `encode`, and if these alone are more.
        """
        _check_unicode(first + (second or ""))
        return self._encoder.encode_inside(first, second, max_tokens, self._files.truncation_side)

    def encode_with_offsets(self, text: str, max_tokens: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text as `encode_inside` gives them, and (start, end) of each in characters of the text, (0, 0)
        of special tokens. Raises as `encode_inside`.
        """
        _check_unicode(text)
        return self._encoder.encode_with_offsets(text, max_tokens, self._files.truncation_side)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token add none, invalid UTF-8 becomes U+FFFD. Raises TokenizerError."""
        with library_errors("the ids cannot be decoded"):
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary writes it; None for an unknown token."""
        return self._backend.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text: with its leading space, special tokens by name."""
        text = self._token_texts.get(token_id)
        if text is None:
            anchor, prefix = self._anchor
            text = self.decode([*anchor, token_id], skip_special_tokens=False)[len(prefix) :]
            self._token_texts[token_id] = text
        return text

    @cached_property
    def _anchor(self) -> tuple[tuple[int, ...], str]:
        """The first token that is a letter or word, and its text: after it other tokens have their leading space."""
        texts = (((i,), self.decode([i])) for i in range(self.vocab_size))
        return next((found for found in texts if found[1].isascii() and found[1].isalpha()), ((), ""))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        content_format: str | None = "auto",
        continue_final_message: bool = False,
    ) -> str:
        """Prompt text of a conversation; encode it with `add_special_tokens=False`. `chat_template` is the name of one
        of the folder's, or the text of another; by default it is the folder's, the one for tools if `variables` has
        tools. `content_format` as in `ChatTemplate.render`. `continue_final_message` ends the prompt with the last
        message's text. Raises ChatTemplateError.
        """
        has_tools = variables is not None and variables.get("tools") is not None
        template = self.chat_templates.template(chat_template, has_tools=has_tools)
        if not continue_final_message:
            return template.render(messages, add_generation_prompt, variables, content_format)
        return before_mark(template.render(with_mark(messages), add_generation_prompt, variables, content_format))

    def to_json(self) -> str:
        """Contents of tokenizer.json, with the tokens that the folder's other files add to its vocabulary."""
        return str(self._backend.to_str())

    def fingerprint(self) -> str:
        """Digest of the files and of a chat template that was given, 32 hexadecimal digits: equal on two ranks exactly
        when they read the same.
        """
        return self._fingerprint

    def files_fingerprint(self) -> str:
        """`fingerprint` without a chat template that was given."""
        return self._files.fingerprint

    def with_chat_template(self, key: str, given: str) -> "Tokenizer":
        """The same tokenizer with one chat template, that of the setting `key`: see `load_template`. Raises ConfigError
        for a missing file.
        """
        text = load_template(key, given, self.chat_templates.sources)
        tokenizer = Tokenizer(self._files)
        tokenizer.chat_templates = ChatTemplates({DEFAULT: text}, self.special_tokens)
        content = f"{self.files_fingerprint()}:{text}".encode("utf-8", "surrogatepass")
        tokenizer._fingerprint = blake2b(content, digest_size=16).hexdigest()
        return tokenizer

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding uses a token: it exists, and is not a special token that is skipped."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        return self._backend.id_to_token(token_id) is not None

    def marker_id(self, text: str) -> int | None:
        """Id of an added token, special or not, that is this text; None if there is none."""
        return self._added_ids.get(text)

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of the texts that are special tokens -> their ids."""
        return {text: i for text in texts if (i := self._added_ids.get(text)) in self._special_ids and i is not None}

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token (`<0x0A>`), which needs its neighbours to make a character; else None."""
        token = self._backend.id_to_token(token_id) if self._has_byte_fallback else None
        if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:  # ordinary text, such as <0xyz>
            return None

    def level_bytes(self, token_id: int) -> bytes | None:
        """Bytes of a byte-level tokenizer's token, which may be part of a character; None for other tokenizers."""
        token = self._backend.id_to_token(token_id) if self._is_byte_level else None
        if token is None:
            return None
        found = [BYTES.get(character) for character in token]
        # As in the library: an added token may have characters that encode no byte.
        return token.encode() if None in found else bytes(each for each in found if each is not None)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text contains a lone surrogate, which UTF-8 cannot encode") from None
