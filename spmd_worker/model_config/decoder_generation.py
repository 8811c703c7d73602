"""DecoderGeneration: how answers of an encoder-decoder model begin and end, and which tokens may come, from
generation_config.json; from config.json, where older releases have these keys, if there is no such file.

Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer

TASKS: Final = ("transcribe", "translate")
"""Tasks of a speech model: text in the language of the audio, or in English."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "sequence_bias": (),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
}
"""Keys that change answers of transformers and nothing here -> values by which they change none."""
_OF_BEAMS: Final = ("num_beams", "num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty")


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Special tokens of Whisper. `languages` and `tasks` are pairs of a name, such as "en" or "transcribe", and an id;
    both are empty in models of English alone. `previous` begins the text before, None if the model has no such token.
    Timestamps follow `no_timestamps`, 20 ms each. `language`, a code or a name, is that of audio for which none is
    given; None: it is detected.
    """

    no_timestamps: int
    languages: tuple[tuple[str, int], ...] = ()
    tasks: tuple[tuple[str, int], ...] = ()
    previous: int | None = None
    max_initial_index: int | None = None
    language: str | None = None

    @property
    def first_timestamp(self) -> int:
        """Id of `<|0.00|>`."""
        return self.no_timestamps + 1


@dataclass(frozen=True, slots=True)
class DecoderGeneration:
    """`start_token_id` begins the decoder's prompt, and `forced_bos_token_id`, if there is one, follows it.

    Lengths count the decoder's prompt too, as in transformers; 0 or None for no bound. `end_token_id` is the first that
    ends an answer, `max_positions` the most tokens of prompt and answer, 0 for no bound. `without_effect` are keys of
    `file` that change nothing here.
    """

    start_token_id: int
    end_token_id: int
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    max_length: int | None = None
    max_positions: int = 0
    speech: SpeechTokens | None = None
    without_effect: tuple[str, ...] = ()
    file: str = "generation_config.json"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the shortest prompt of a decoder of text."""
        return 1 + (self.forced_bos_token_id is not None)

    @property
    def max_tokens(self) -> int | None:
        """Default of `max_tokens`, if the file has one."""
        return None if self.max_length is None else max(self.max_length - self.num_prompt_tokens, 1)

    @property
    def warning(self) -> str:
        """A sentence about keys without effect, "" if there are none."""
        if not self.without_effect:
            return ""
        beams = [key for key in self.without_effect if key.split("=")[0] in _OF_BEAMS]
        way_out = ": call LLM.beam_search for beams" if beams else ""
        return f"{self.file}: {', '.join(self.without_effect)} are without effect here{way_out}"


def read_decoder_generation(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    *,
    start_token_id: int,
    is_speech: bool,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    max_positions: int,
) -> DecoderGeneration:
    """`generation` is {} without generation_config.json. Raises ModelConfigError naming file, key, value and rule."""
    name = "generation_config.json" if generation else "config.json"
    ids = _Ids(ConfigReader(generation or config, folder / name), vocab_size)
    speech = _speech_tokens(ids) if is_speech else None
    bad_ids, bad_words = ids.bad_words(eos_token_ids)
    return DecoderGeneration(
        start_token_id=start_token_id,
        end_token_id=eos_token_ids[0] if eos_token_ids else 0,
        forced_bos_token_id=ids.optional("forced_bos_token_id"),
        forced_eos_token_id=ids.optional("forced_eos_token_id"),
        suppress_tokens=tuple(sorted({*ids.listed("suppress_tokens"), *bad_ids})),
        begin_suppress_tokens=ids.listed("begin_suppress_tokens"),
        no_repeat_ngram_size=ids.number("no_repeat_ngram_size") or 0,
        # A speech model's length is that of its table of positions.
        min_length=0 if is_speech else ids.number("min_length") or 0,
        min_new_tokens=ids.number("min_new_tokens") or 0,
        max_length=None if is_speech else ids.number("max_length", least=1),
        max_positions=max_positions,
        speech=speech,
        without_effect=(*_without_effect(generation or config), *_bad_words(bad_words)),
        file=name,
    )


@dataclass(frozen=True, slots=True)
class _Ids:
    """Reads token ids of a vocabulary, and numbers."""

    reader: ConfigReader
    vocab_size: int

    def optional(self, key: str) -> int | None:
        """A token id, or None; a list of one is the id."""
        value = self.reader.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        return None if value is None else checked_integer(value, self.reader.where(key), 0, self.vocab_size - 1)

    def listed(self, key: str) -> tuple[int, ...]:
        """Token ids; those outside the vocabulary, which cannot be sampled, are left out."""
        values = self.reader.get(key, [])
        if not isinstance(values, list):
            raise self.reader.error(key, "must be a list of token ids")
        ids = [checked_integer(each, self.reader.where(key), 0, MAX_INT) for each in values]
        return tuple(sorted(dict.fromkeys([each for each in ids if each < self.vocab_size])))

    def bad_words(self, eos_token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], list[Any]]:
        """Tokens that `bad_words_ids` lists alone, but for those that end an answer, and its longer words."""
        key = "bad_words_ids"
        words = self.reader.get(key, [])
        if not isinstance(words, list) or not all(isinstance(each, list) and each for each in words):
            raise self.reader.error(key, "must be a list of lists of token ids")
        alone = [checked_integer(each[0], self.reader.where(key), 0, MAX_INT) for each in words if len(each) == 1]
        found = [each for each in alone if each < self.vocab_size and each not in eos_token_ids]
        return tuple(found), [each for each in words if len(each) > 1]

    def number(self, key: str, least: int = 0) -> int | None:
        value = self.reader.get(key)
        return None if value is None else checked_integer(value, self.reader.where(key), least, MAX_INT)

    def named(self, key: str) -> tuple[tuple[str, int], ...]:
        """Pairs of a name and a token id, by ascending id; names without `<|` and `|>`."""
        values = self.reader.get(key, {})
        if not isinstance(values, Mapping):
            raise self.reader.error(key, "must map names to token ids")
        found = [
            (str(name).removeprefix("<|").removesuffix("|>"), checked_integer(each, where, 0, self.vocab_size - 1))
            for name, each in values.items()
            for where in (f"{self.reader.where(key)}[{name!r}]",)
        ]
        return tuple(sorted(found, key=lambda pair: pair[1]))


def _speech_tokens(ids: _Ids) -> SpeechTokens | None:
    """None if the file names no token for answers without timestamps: no prompt can be made for it."""
    no_timestamps = ids.optional("no_timestamps_token_id")
    if no_timestamps is None:
        return None
    is_multilingual = ids.reader.flag("is_multilingual", True)
    return SpeechTokens(
        no_timestamps=no_timestamps,
        languages=ids.named("lang_to_id") if is_multilingual else (),
        tasks=ids.named("task_to_id") if is_multilingual else (),
        previous=ids.optional("prev_sot_token_id"),
        max_initial_index=ids.number("max_initial_timestamp_index"),
        language=_language(ids.reader) if is_multilingual else None,
    )


def _language(reader: ConfigReader) -> str | None:
    language = reader.get("language")
    if not isinstance(language, str | None):
        raise reader.error("language", "must be the code or the name of a language")
    return language


def _bad_words(words: list[Any]) -> tuple[str, ...]:
    return (f"bad_words_ids={words}",) if words else ()


def _without_effect(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys as `key=value`."""
    found = [(key, generation.get(key)) for key in _NEUTRAL]
    return tuple(f"{key}={value}" for key, value in found if value not in (None, [], {}) and value not in _NEUTRAL[key])
