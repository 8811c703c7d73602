"""Tokenizer: text to token ids and back, from the files of a model folder.

Ids equal those of transformers' fast tokenizer for the same folder; transformers itself is imported only to convert the
files of older tokenizers, and nothing in the folder is executed but the chat template, in its sandbox.
"""

import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import tokenizers

from spmd_worker.base import files
from spmd_worker.base.errors import TokenizerError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.tokenizer.bert_normalizer import bert_normalizer, has_bert_normalizer
from spmd_worker.tokenizer.chat_templates import DEFAULT, TOOL_USE, ChatTemplates, named_templates
from spmd_worker.tokenizer.conversion import converted, older_files
from spmd_worker.tokenizer.encoder import Encoder, TextEncoder, library_errors, opened
from spmd_worker.tokenizer.encoder_process import IsolatedEncoder
from spmd_worker.tokenizer.form import WAY_OUT, TokenizerForm, check_token, checked_form
from spmd_worker.tokenizer.token_bound import UNKNOWN, token_bound

logger = logging.getLogger(__name__)

_TOKENIZER_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
_MODEL_FILE: Final = "config.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_OLD_TEMPLATE_FILE: Final = "chat_template.json"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE_SUFFIX: Final = ".jinja"
_FILES: Final = (_TOKENIZER_FILE, _CONFIG_FILE, _SPECIAL_TOKENS_FILE, _TEMPLATE_FILE, _OLD_TEMPLATE_FILE)

_MOST_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of tokenizer.json: vocabularies of a million tokens take 64 MiB."""
_MOST_DIGITS: Final = 10
"""Maximum digits of a token id."""

_REPLACEMENT: Final = "\ufffd"
"""Decoded text of an incomplete or invalid UTF-8 sequence."""

_NUM_CONTEXT_TOKENS: Final = 8
"""Tokens decoded before new ones. Six suffice: three bytes to synchronise with UTF-8, three of an open character."""

_MAX_HELD_TOKENS: Final = 16
"""Maximum number of tokens without a complete character: then the bytes are invalid, and the window moves on."""

_MAX_BYTE_RUN: Final = 64
_MAX_RUN_SHOWN: Final = 256
"""Tokens: a run is decoded again for each of its bytes."""


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable character -> the byte it encodes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(value if value in printable else next(others)): value for value in range(256)}


_BYTES: Final = _byte_characters()


class TokenizerFilesError(TokenizerError):
    """The files of a tokenizer cannot be used: every rank reads the same."""

    is_known_to_all = True


class Tokenizer:
    """The tokenizer of one model folder. Use `open` or `open_if_present`.

    tokenizer.json decides which special tokens `encode` adds; `add_bos_token` and `add_eos_token` of
    tokenizer_config.json are then ignored, as transformers 5 ignores them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        encoder: TextEncoder,
        special_tokens: Mapping[str, str],
        chat_templates: ChatTemplates,
        fingerprint: str,
        truncation_side: str = "right",
    ) -> None:
        self._backend = backend
        self._encoder = encoder
        self._special_tokens = dict(special_tokens)
        self.chat_templates = chat_templates
        self._fingerprint = fingerprint
        self._truncation_side = truncation_side
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._has_byte_fallback = b'"ByteFallback"' in decoder
        self._is_byte_level = decoder.startswith(b'{"type":"ByteLevel"')
        self._token_texts: dict[int, str] = {}
        self._found_anchor: tuple[tuple[int, ...], str] | None = None
        self._bound = UNKNOWN if self.is_isolated else token_bound(backend)

    @staticmethod
    def open(model_folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder. Raises TokenizerError naming the file and the fault."""
        try:
            return Tokenizer._open(Path(model_folder))
        except TokenizerError as error:
            raise TokenizerFilesError(str(error)) from None

    @staticmethod
    def _open(folder: Path) -> "Tokenizer":
        contents = {name: _read(folder / name) for name in (*_FILES, *_more_templates(folder))}
        if contents[_TOKENIZER_FILE] is None:
            contents[_TOKENIZER_FILE] = converted(folder)
        tokenizer = contents[_TOKENIZER_FILE]
        if tokenizer is None:
            raise TokenizerError(
                f"{folder} has no {_TOKENIZER_FILE}: text prompts need one (convert other formats with transformers' "
                f"save_pretrained); rows with prompt_token_ids work without"
            )
        special_tokens_map, config = (
            _json_object(folder / name, contents[name]) for name in (_SPECIAL_TOKENS_FILE, _CONFIG_FILE)
        )
        config = special_tokens_map | config
        special_tokens = _named_tokens(config)
        form = checked_form(str(folder / _TOKENIZER_FILE), tokenizer)
        text = tokenizer.decode("utf-8")
        normalizer = _class_normalizer(folder, form, config)
        if normalizer is not None:
            form = replace(form, values={**form.values, "normalizer": normalizer})
            text = json.dumps(form.values)
        added = _added_tokens(form.values, config, special_tokens, folder / _CONFIG_FILE)
        backend, encoder = _open_library(folder / _TOKENIZER_FILE, text, form, added)
        templates = ChatTemplates(_chat_template_sources(folder, contents, config), special_tokens)
        side = config.get("truncation_side", "right")
        if side not in ("left", "right"):
            raise TokenizerError(f"{folder / _CONFIG_FILE}: truncation_side={side!r} must be left or right")
        return Tokenizer(backend, encoder, special_tokens, templates, _fingerprint(contents), side)

    @staticmethod
    def open_if_present(model_folder: Path) -> "Tokenizer | None":
        """The tokenizer, or None for a folder without tokenizer.json; older files are converted, and None with a
        warning if that fails. Raises TokenizerError when tokenizer.json is broken.
        """
        folder = Path(model_folder)
        if (folder / _TOKENIZER_FILE).is_file():
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
        """Whether tokenizer.json has components that no known model has, so that texts are encoded in a process with
        limits.
        """
        return isinstance(self._encoder, IsolatedEncoder)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence; None when the folder names none."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence; None when the folder names none. A model may have more of them."""
        return self._named_id("eos_token")

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by name: `bos_token`, `eos_token`, `pad_token`, ... -> the token."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates.sources)

    @property
    def chat_template_source(self) -> str | None:
        """The template of the model folder; of several, that for conversations with tools, else the default; None
        without either.
        """
        sources = self.chat_templates.sources
        return sources.get(TOOL_USE, sources.get(DEFAULT))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError for text that is not Unicode (a lone surrogate), and its subclass
        TokenizerError where the tokenizer fails on it.

        There is no batch call: the library's own starts a thread per core, which takes the cores from the ranks and
        makes it print a warning after every later fork.
        """
        if not _is_unicode(text):
            raise ValueError("the text holds half of a surrogate pair, which is no character")
        return self._encoder.encode(text, add_special_tokens)

    def min_num_tokens(self, text: str) -> int:
        """Lower bound of `len(encode(text, add_special_tokens=False))`, without encoding and at a thousandth of its
        cost, to reject texts with too many tokens. 0 if no bound is known. Never raises.
        """
        return self._bound.min_num_tokens(text)

    def encode_inside(
        self, first: str, second: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of two that are encoded as a pair, and the number of ids of the first text: those of
        type 0, which are all if the tokenizer does not distinguish types. None where types are not all 0 and then all
        1.

        Beyond `max_tokens` the ends of the texts (their beginnings, with `truncation_side` left) are cut, never special
        tokens: of a pair, until both have one length, or the shorter is complete. Raises ValueError for text that is
        not Unicode, and where special tokens alone are more.
        """
        texts = [first] if second is None else [first, second]
        if not all(map(_is_unicode, texts)):
            raise ValueError("the text holds half of a surrogate pair, which is no character")
        return self._encoder.encode_inside(first, second, max_tokens, self._truncation_side)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token (a model's padding) add no text, invalid UTF-8 becomes U+FFFD. Raises
        TokenizerError where the tokenizer fails on them.
        """
        with library_errors("the ids cannot be decoded"):
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an invalid id."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary writes it; None for an unknown token."""
        return self._backend.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token as it appears inside a text: with its leading space, special tokens by name."""
        text = self._token_texts.get(token_id)
        if text is None:
            anchor, prefix = self._anchor()
            text = self.decode([*anchor, token_id], skip_special_tokens=False)[len(prefix) :]
            self._token_texts[token_id] = text
        return text

    def _anchor(self) -> tuple[tuple[int, ...], str]:
        """The first token that is a letter or word, and its text: after it other tokens have their leading space."""
        if self._found_anchor is None:
            ids = range(self.vocab_size)
            texts = ((i, self.decode([i])) for i in ids)
            found = next(((i, text) for i, text in texts if text.isascii() and text.isalpha()), None)
            self._found_anchor = ((), "") if found is None else ((found[0],), found[1])
        return self._found_anchor

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        content_format: str | None = "auto",
    ) -> str:
        """Prompt text of a conversation; encode it with `add_special_tokens=False`. `chat_template` is the name of one
        of the folder's, or the text of another; by default it is the folder's, the one for tools if `variables` has
        tools. `content_format` as in `ChatTemplate.render`. Raises ChatTemplateError.
        """
        has_tools = variables is not None and variables.get("tools") is not None
        template = self.chat_templates.template(chat_template, has_tools=has_tools)
        return template.render(messages, add_generation_prompt, variables, content_format)

    def to_json(self) -> str:
        """Contents of tokenizer.json, with the tokens that the folder's other files add to its vocabulary."""
        return str(self._backend.to_str())

    def fingerprint(self) -> str:
        """Digest of the files, 32 hexadecimal digits: equal on two ranks exactly when they read the same tokenizer."""
        return self._fingerprint

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding uses a token: it exists, and is not a special token that is skipped."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        return self._backend.id_to_token(token_id) is not None

    def marker_id(self, text: str) -> int | None:
        """Id of an added token, special or not, that is this text; None if there is none."""
        return self._added_ids.get(text)

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, which decoding omits where it skips those -> their ids."""
        return {text: i for text in texts if (i := self._added_ids.get(text)) in self._special_ids and i is not None}

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether a token is one byte (`<0x0A>`), which needs its neighbours to make a character."""
        token = self._backend.id_to_token(token_id) if self._has_byte_fallback else None
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def byte_of(self, token_id: int) -> bytes:
        """The byte of a token for which `is_fallback_byte` holds."""
        return bytes([int(str(self._backend.id_to_token(token_id))[3:5], 16)])

    def level_bytes(self, token_id: int) -> bytes | None:
        """Bytes of a token of a byte-level tokenizer, which need not be complete characters; None for another
        tokenizer's.
        """
        token = self._backend.id_to_token(token_id) if self._is_byte_level else None
        if token is None:
            return None
        found = [_BYTES.get(character) for character in token]
        # As in the library: an added token may have characters that encode no byte.
        return token.encode() if None in found else bytes(each for each in found if each is not None)

    def _named_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        token_id = None if token is None else self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)


class IncrementalDecoder:
    """Decodes one sequence as its tokens appear, and never returns part of a character.

    The results of `append` and `flush`, concatenated, are the text of `decode(context + output)` after that of the
    context, where the context is the end of the prompt. An unfinished character at the end of the prompt belongs to the
    output. With `skip_special_tokens` special tokens leave no trace, as in `decode`, except those of `kept_ids`.

    A window of a few tokens is decoded each time: its beginning gives the context that leading spaces and cleaning-up
    depend on (the idea of text-generation-inference and vLLM). Two kinds of text are held back: a last character that
    is U+FFFD, which more bytes may complete, and an entire run of fallback bytes (SentencePiece), because one invalid
    byte at its end changes how all of it decodes. Work per token is constant over a sequence.
    """

    __slots__ = (
        *("_is_flushed", "_kept_ids", "_num_characters_given", "_num_tokens_read", "_skips_special", "_tokenizer"),
        "_window",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        kept_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special, self._kept_ids = skip_special_tokens, kept_ids
        self._window = _prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
        self._num_tokens_read = len(self._window)
        self._num_characters_given = _prompt_length(tokenizer, self._window)
        self._is_flushed = False

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that the new tokens make certain, often "" and sometimes of earlier tokens."""
        assert not self._is_flushed
        visible = self._visible(token_ids)
        pieces = []
        # Token by token, so that the text does not depend on how tokens are grouped into calls.
        for token_id in visible:
            self._window.append(token_id)
            if not self._tokenizer.is_fallback_byte(token_id):
                pieces.append(self._release())
        return "".join(pieces)

    def held(self) -> str:
        """The held-back text, as it decodes now; "" while that is invalid, and for a run longer than any text that is
        searched for.
        """
        num_held = len(self._window) - self._num_tokens_read
        if not 0 < num_held <= _MAX_RUN_SHOWN:
            return ""
        text = self._decode(self._window)[self._num_characters_given :]
        return "" if _REPLACEMENT in text else text

    def flush(self) -> str:
        """The rest of the text, once, when no more tokens come: held-back tokens as they decode."""
        assert not self._is_flushed
        self._is_flushed = True
        return self._decode(self._window)[self._num_characters_given :]

    def finish(self, token_ids: Iterable[int]) -> str:
        """`append` and `flush` in one, for a complete sequence: decodes once."""
        assert not self._is_flushed
        self._window += self._visible(token_ids)
        return self.flush()

    def _visible(self, token_ids: Iterable[int]) -> list[int]:
        tokenizer, kept = self._tokenizer, self._kept_ids
        return [i for i in token_ids if i in kept or tokenizer.is_visible(i, self._skips_special)]

    def _release(self) -> str:
        text = self._decode(self._window)
        num_certain = len(text) - text.endswith(_REPLACEMENT)
        new_text = text[self._num_characters_given : num_certain]
        self._num_characters_given = max(self._num_characters_given, num_certain)
        num_held = len(text) - num_certain
        if num_held == 0 or len(self._window) - self._num_tokens_read > _MAX_HELD_TOKENS:
            self._move_window(num_held)
        return new_text

    def _move_window(self, num_held: int) -> None:
        self._window = self._window[-_NUM_CONTEXT_TOKENS:]
        self._num_tokens_read = len(self._window)
        self._num_characters_given = len(self._decode(self._window)) - num_held

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Invisible tokens are removed already; the remaining special ones are wanted.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _prompt_context(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The last visible tokens of a prompt, from an index where no run of fallback bytes is cut."""
    context: list[int] = []
    for token_id in reversed(token_ids):
        is_enough = len(context) >= _NUM_CONTEXT_TOKENS
        if is_enough and (len(context) > _MAX_BYTE_RUN or not tokenizer.is_fallback_byte(context[-1])):
            break
        if tokenizer.is_visible(token_id, skip_special_tokens):
            context.append(token_id)
    context.reverse()
    return context


def num_unfinished(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> int:
    """Number of characters at the end of a prompt's text that are of an unfinished one, which belongs to the output."""
    context = _prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
    return len(tokenizer.decode(context, skip_special_tokens=False)) - _prompt_length(tokenizer, context)


def _prompt_length(tokenizer: Tokenizer, context: Sequence[int]) -> int:
    """Number of characters of the context that belong to the prompt: all but an unfinished one at the end."""
    text = tokenizer.decode(context, skip_special_tokens=False)
    if not text.endswith(_REPLACEMENT):
        return len(text)
    num_bytes = 0
    while num_bytes < len(context) and tokenizer.is_fallback_byte(context[-1 - num_bytes]):
        num_bytes += 1
    return len(text) - max(num_bytes, 1)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    """Contents of a file; None if it does not exist."""
    try:
        most = _MOST_BYTES if path.name == _TOKENIZER_FILE else files.CONFIG_BYTES
        return files.read_regular_file(path, most) if path.is_file() else None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _class_normalizer(folder: Path, form: TokenizerForm, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The normalizer with which transformers replaces that of tokenizer.json, if it differs; else None."""
    if not has_bert_normalizer(form.values):
        return None
    model = _json_object(folder / _MODEL_FILE, _read(folder / _MODEL_FILE))
    try:
        normalizer = bert_normalizer(config, model)
    except ValueError as error:
        raise TokenizerError(f"{folder / _CONFIG_FILE}: {error}") from None
    own = form.values["normalizer"]
    changed = [] if normalizer is None else [key for key in normalizer if own.get(key) != normalizer[key]]
    if normalizer is None or not changed:
        return None
    logger.warning(
        "%s: the tokenizer's class and %s make the normalizer's %s, otherwise than the file: as transformers has it",
        folder / _TOKENIZER_FILE,
        _CONFIG_FILE,
        ", ".join(f"{key}={json.dumps(normalizer[key])}" for key in changed),
        extra=SAME_ON_EVERY_RANK,
    )
    return normalizer


def _open_library(
    path: Path, text: str, form: TokenizerForm, added: Sequence[Mapping[str, Any]]
) -> tuple[tokenizers.Tokenizer, TextEncoder]:
    """The vocabulary and decoder, in this process, and the encoder. Raises TokenizerError."""
    try:
        if form.is_known:
            backend = opened(text, added)
            encoder: TextEncoder = Encoder(backend)
        else:
            backend = opened(json.dumps({**form.values, "normalizer": None, "pre_tokenizer": None}), added)
            encoder = IsolatedEncoder(text, added)
            encoder.check()
            words = "%s has a step that may take more than linear time: texts are encoded in a process with limits"
            logger.warning(words, path, extra=SAME_ON_EVERY_RANK)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}: {WAY_OUT}") from None
    if dropout := form.values["model"].get("dropout"):
        words = "%s: model.dropout=%s is for training and is off"
        logger.warning(words, path, dropout, extra=SAME_ON_EVERY_RANK)
    return backend, encoder


def _json_object(path: Path, content: bytes | None) -> dict[str, Any]:
    """The object in a file; {} if it does not exist."""
    if content is None:
        return {}
    try:
        return files.parse_json_object(content, allows_nan=True)
    except files.JsonError as error:
        raise TokenizerError(f"{path} {error}") from None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, `unk_token`, ... -> text. A token is written as its text or as {"content": text}."""
    named = {name: _token_content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: content for name, content in named.items() if content is not None}


def _token_content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _added_tokens(
    values: Mapping[str, Any], config: Mapping[str, Any], named: Mapping[str, str], path: Path
) -> list[dict[str, Any]]:
    """Tokens that the configuration, `path`, names and tokenizer.json does not, which are added as transformers adds
    them: the arguments of `AddedToken`. Raises TokenizerError.
    """
    tokens: dict[str, dict[str, Any]] = {}
    for token in _listed_tokens(config):
        tokens.setdefault(token["content"], token)
    key = "additional_special_tokens" if config.get("additional_special_tokens") else "extra_special_tokens"
    extra = config.get(key) or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(extra, list):
        # A string is a sequence too: each of its letters would be a token.
        raise TokenizerError(f"{path}: {key}={str(extra)[:80]!r} must be a list of tokens, or an object of them")
    for content in (*named.values(), *(_token_content(value) for value in extra)):
        if content is not None:
            tokens.setdefault(content, {"content": content, "special": True, "normalized": False})
    for content in tokens:
        check_token(str(path), "a token", content)
    known = {token["content"] for token in values.get("added_tokens") or []}
    return [token for content, token in tokens.items() if content not in known]


def _listed_tokens(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens of `added_tokens_decoder`, in order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key in sorted(listed, key=lambda key: int(key) if key.isdecimal() and len(key) <= _MOST_DIGITS else 0):
        value = listed[key]
        content = _token_content(value)
        if content is not None and isinstance(value, dict):
            flags = {name: value.get(name, False) is True for name in ("lstrip", "rstrip", "single_word", "special")}
            normalized = value.get("normalized", not flags["special"]) is True
            yield {"content": content, "normalized": normalized, **flags}


def _more_templates(folder: Path) -> list[str]:
    """File names of additional templates."""
    try:
        paths = sorted((folder / _MORE_TEMPLATES).glob(f"*{_TEMPLATE_SUFFIX}"))
    except OSError as error:
        raise TokenizerError(f"{folder / _MORE_TEMPLATES} cannot be read: {error}") from None
    for path in paths:
        if not _is_unicode(path.name):
            raise TokenizerError(f"{str(path)!a}: the name of a template must be UTF-8: rename the file")
    return [f"{_MORE_TEMPLATES}/{path.name}" for path in paths]


def _chat_template_sources(
    folder: Path, contents: Mapping[str, bytes | None], config: Mapping[str, Any]
) -> dict[str, str]:
    """Name -> text. Separate files take precedence over the configuration, as in transformers."""
    sources = {}
    for name, content in contents.items():
        if name.endswith(_TEMPLATE_SUFFIX) and content is not None:
            key = DEFAULT if name == _TEMPLATE_FILE else Path(name).name.removesuffix(_TEMPLATE_SUFFIX)
            try:
                # With the line ends of reading as text.
                sources[key] = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{folder / name} cannot be read: {error}") from None
    if sources:
        return sources
    old = _json_object(folder / _OLD_TEMPLATE_FILE, contents[_OLD_TEMPLATE_FILE])
    return named_templates(folder / _OLD_TEMPLATE_FILE, old.get("chat_template")) or named_templates(
        folder / _CONFIG_FILE, config.get("chat_template")
    )


def _fingerprint(contents: Mapping[str, bytes | None]) -> str:
    digest = blake2b(digest_size=16)
    for name, content in contents.items():
        digest.update(f"{name}:{content is not None}:{len(content or b'')}\n".encode())
        digest.update(content or b"")
    return digest.hexdigest()
