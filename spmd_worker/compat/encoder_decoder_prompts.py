"""Encodes the prompts of an encoder-decoder model, in vLLM's forms.

encoder of text    text, ids, {"prompt": text} or {"prompt_token_ids": ids}, or {"encoder_prompt": any of these,
                   "decoder_prompt": text or ids of the answer's beginning}; with "target_language" for a translator,
                   and "source_language" of its text
encoder of audio   {"prompt": decoder's text, "multi_modal_data": {"audio": audio}}, or {"encoder_prompt":
                   {"prompt": "", "multi_modal_data": {"audio": audio}}, "decoder_prompt": decoder's text}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_text, shown
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.encoder_prompts import NO_TRUNCATION, OF_TEXT, EncoderPrompts, audio_of
from spmd_worker.compat.keywords import is_empty
from spmd_worker.compat.prompts import CheckText, Encoded, TextPair
from spmd_worker.replica.sequence.decoder_prompt import DecoderPrompt
from spmd_worker.replica.sequence.request import as_token_ids
from spmd_worker.tokenizer.tokenizer import Tokenizer

_ENCODER: Final = "encoder_prompt"
_DECODER: Final = "decoder_prompt"
_LANGUAGE: Final = "target_language"
_SOURCE: Final = "source_language"
_AUDIO: Final = "multi_modal_data"
_SALT: Final = "cache_salt"
_ONE_KEYS: Final = ("prompt", "prompt_token_ids", _AUDIO)
_UNUSED: Final = "multi_modal_uuids"
"""Names of media, which are not used: audio has the name of its features."""
_EMPTY_KEYS: Final = ("mm_processor_kwargs", "token_type_ids")
"""Keys of vLLM's that are accepted if they are empty."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderReader:
    """Reads prompts of one model. `need_tokenizer` is called for text only, and raises ConfigError. `check_text` is
    called before text is encoded.
    """

    prompts: EncoderPrompts
    need_tokenizer: Callable[[], Tokenizer]
    tokenizer: Tokenizer | None
    check_text: CheckText
    is_truncated: bool = False

    def encode(self, prompt: Any) -> Encoded:
        """The prompt, or the error for which it is not one."""
        encoded = Encoded(())
        try:
            if isinstance(prompt, TextPair):
                raise ValueError("an encoder-decoder model takes no pairs of texts: give one prompt")
            if self.is_truncated:
                raise ValueError(NO_TRUNCATION)
            given = _as_mapping(prompt)
            encoded.cache_salt = given.pop(_SALT, None)
            if self.prompts.audio is None:
                self._of_text(encoded, given)
            else:
                self._of_audio(encoded, given)
        except (ConfigError, TypeError, ValueError) as error:
            encoded.error = str(error)
        return encoded

    def _of_text(self, encoded: Encoded, given: dict[str, Any]) -> None:
        encoder, decoder, language = given, None, given.pop(_LANGUAGE, None)
        source = given.pop(_SOURCE, None)
        if _ENCODER in given:
            _check_keys(given, (_ENCODER, _DECODER))
            encoder, decoder = _as_mapping(given[_ENCODER]), given.get(_DECODER)
        _check_keys(encoder, _ONE_KEYS)
        if encoder.get(_AUDIO) is not None:
            raise ValueError("the model's encoder reads text: leave multi_modal_data out")
        if not isinstance(source, str | None):
            raise ValueError(f"{_SOURCE}={shown(source)} must be text")
        encoded.encoder_text, ids = self._text_or_ids(encoder, is_decoder=False, language=source)
        encoded.encoder = self.prompts.of_ids(ids)
        if language is not None and (decoder is not None or not isinstance(language, str)):
            raise ValueError(f"{_LANGUAGE}={shown(language)} must be text, and goes without {_DECODER}")
        self._set_decoder(encoded, decoder, lambda: self.prompts.text_decoder(self.tokenizer, language))

    def _of_audio(self, encoded: Encoded, given: dict[str, Any]) -> None:
        encoder = given
        decoder: Any = {key: given[key] for key in _ONE_KEYS[:2] if key in given}
        if _ENCODER in given:
            _check_keys(given, (_ENCODER, _DECODER))
            encoder, decoder = _as_mapping(given[_ENCODER]), given.get(_DECODER)
            if encoder.get("prompt") or encoder.get("prompt_token_ids"):
                raise ValueError("the model's encoder reads audio: the prompt of encoder_prompt must be empty")
        _check_keys(encoder, _ONE_KEYS)
        source = audio_of(encoder.get(_AUDIO))
        if source is None:
            raise ValueError('the model\'s encoder reads audio: give "multi_modal_data": {"audio": audio}')
        encoded.encoder, window = self.prompts.one_window(source)
        encoded.media = (window,)
        self._set_decoder(encoded, decoder, lambda: self.prompts.speech_decoder(self.tokenizer))

    def _set_decoder(self, encoded: Encoded, given: Any, own: Callable[[], DecoderPrompt]) -> None:
        """The decoder's prompt, of text, ids or a dict of either; the model's own for none."""
        decoder = {} if given is None else _as_mapping(given)
        _check_keys(decoder, _ONE_KEYS[:2])
        if not any(decoder.values()):
            made = own()
        else:
            encoded.text, ids = self._text_or_ids(decoder, is_decoder=True)
            encoded.is_ids = "prompt_token_ids" in decoder
            made = self.prompts.decoder_of(ids)
        encoded.token_ids, encoded.rules = made.token_ids, made.rules

    def _text_or_ids(
        self, given: Mapping[str, Any], *, is_decoder: bool, language: str | None = None
    ) -> tuple[str | None, tuple[int, ...]]:
        """Text, None for ids, and the ids. A decoder's text gets no special tokens: an end would end its answer."""
        value = given.get("prompt")
        text = plain_text(value)
        if language is not None and (text is None or "prompt_token_ids" in given):
            raise ValueError(OF_TEXT)
        if "prompt_token_ids" in given:
            return text, as_token_ids(given["prompt_token_ids"])
        if text is None and value is None:
            raise ValueError(f"a prompt needs text under prompt, or prompt_token_ids; this one has {[*given]}")
        if text is None:
            return None, as_token_ids(value)
        tokenizer = self.need_tokenizer()
        self.check_text(tokenizer, text)
        if language is not None:
            before, after = tokenizer.around_source(language)
            return text, (*before, *tokenizer.encode(text, add_special_tokens=False), *after)
        return text, tuple(tokenizer.encode(text, add_special_tokens=not is_decoder))


def _as_mapping(prompt: Any) -> dict[str, Any]:
    return _without_empty(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}


def _without_empty(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say something; those of `_EMPTY_KEYS` are kept, as errors, unless they are empty."""
    return {
        key: value
        for key, value in prompt.items()
        if value is not None and key != _UNUSED and (key not in _EMPTY_KEYS or not is_empty(value))
    }


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ValueError(f"the prompt has {', '.join(unknown)}: this model takes only {', '.join(known)} here")
