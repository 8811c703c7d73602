"""Decoder's prompts of encoder-decoder models, with the rules of the answers that follow, and segments of a transcript.

An answer of speech, with timestamps and without a known language:

    prompt   <|startofprev|> text before <|startoftranscript|>
    answer   <|en|> <|transcribe|> <|0.00|> Hello. <|1.20|> <|1.20|> Goodbye. <|3.00|> <|endoftext|>
             `first_tokens`, `forced_tokens`, then the answer proper
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from spmd_worker.base.config.plain_values import shown
from spmd_worker.model_config.decoder_generation import TASKS, DecoderGeneration, SpeechTokens
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.token_rules import NO_RULES, TimestampRules, TokenRules
from spmd_worker.tokenizer.languages import LANGUAGES, language_code
from spmd_worker.tokenizer.source_language import language_id, unknown_language
from spmd_worker.tokenizer.tokenizer import Tokenizer

TIMESTAMP_S: Final = 0.02
"""Seconds between a timestamp and the next."""


@dataclass(frozen=True, slots=True)
class DecoderPrompt:
    """Ids that the decoder computes before the answer, and `SamplingParams.token_rules` of it, if there are any."""

    token_ids: tuple[int, ...]
    rules: TokenRules | None = None


class RuledParams:
    """Sampling parameters with rules. Rows that share frozen parameters and rules get one record, which is then checked
    and encoded once.
    """

    def __init__(self) -> None:
        self._last: tuple[SamplingParams, TokenRules | None, SamplingParams] | None = None

    def of(self, sampling: SamplingParams, rules: TokenRules | None) -> SamplingParams:
        """`sampling` with these rules, unless it has its own, which may be none at all. Raises ValueError if both say
        how the answer begins.
        """
        own = sampling.token_rules
        rules = rules if own is None else own
        rules = None if rules == NO_RULES else rules
        if rules is own:
            return sampling
        if rules is not None and rules.first_tokens and sampling.structured_outputs is not None:
            raise ValueError(
                "structured_outputs begins with the answer's first token, which is the language that the model "
                "detects: give language, or a decoder's prompt that ends with language and task"
            )
        # Read and set once each: a server has several threads.
        frozen, last = sampling.frozen(), self._last
        if last is None or last[0] is not frozen or last[1] != rules:
            last = self._last = (frozen, rules, replace(frozen, token_rules=rules).frozen())
        return last[2]


class Segment(NamedTuple):
    """A part of a transcript: its times in seconds, and the ids of its text, without timestamps."""

    start_s: float
    end_s: float
    token_ids: tuple[int, ...]


def text_prompt(
    generation: DecoderGeneration, tokenizer: Tokenizer | None = None, target_language: str | None = None
) -> DecoderPrompt:
    """The prompt of a decoder of text: its start token, and the token that every answer begins with, if there is one.
    `target_language` names another one, as the tokenizer writes it: "fra_Latn", "fr_XX", or "fr" for `__fr__`.

    Raises ValueError for an unknown language.
    """
    first = generation.forced_bos_token_id
    if target_language is not None:
        first = _target_id(tokenizer, target_language)
    token_ids = (generation.start_token_id, *(() if first is None else (first,)))
    return DecoderPrompt(token_ids, rules_after(generation, token_ids))


def decoder_prompt(
    generation: DecoderGeneration,
    tokenizer: Tokenizer | None = None,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    prompt_text: str = "",
) -> DecoderPrompt:
    """The prompt of a speech model. `language` is a code or a name; None: that of the model's files, or else the model
    detects it, and the answer begins with its token. `task` is one of `TASKS`. `prompt_text` is what was said before,
    cut to its last tokens, half of the model's positions.

    Raises ValueError naming the argument and the rule.
    """
    speech = _speech(generation)
    if task not in TASKS:
        raise ValueError(f"task={shown(task)} must be {' or '.join(TASKS)}")
    token_ids = [*_previous_ids(generation, tokenizer, prompt_text), generation.start_token_id]
    last = () if timestamps else (speech.no_timestamps,)
    if not speech.languages:
        _check_english(language, task)
        token_ids += last
        return DecoderPrompt(tuple(token_ids), _rules(generation, timestamps, len(token_ids)))
    task_ids = tuple(token_id for name, token_id in speech.tasks if name == task)
    if not task_ids:
        raise ValueError(f"task={task!r} has no token in task_to_id of this model's generation_config.json")
    language = speech.language if language is None else language
    if language is None:
        languages = tuple(token_id for _, token_id in speech.languages)
        rules = _rules(generation, timestamps, len(token_ids), languages, (*task_ids, *last))
        return DecoderPrompt(tuple(token_ids), rules)
    token_ids += [_language_id(speech, language), *task_ids, *last]
    return DecoderPrompt(tuple(token_ids), _rules(generation, timestamps, len(token_ids)))


def rules_after(generation: DecoderGeneration, token_ids: Sequence[int]) -> TokenRules | None:
    """Rules of the answer to a prompt that the caller gives. A speech model gives timestamps unless the prompt ends
    with `<|notimestamps|>`.
    """
    speech = generation.speech
    timestamps = speech is not None and (not token_ids or token_ids[-1] != speech.no_timestamps)
    return _rules(generation, timestamps, len(token_ids))


def segments(generation: DecoderGeneration, token_ids: Sequence[int], start_s: float, end_s: float) -> list[Segment]:
    """Segments of the answer to a window of audio, which lasts from `start_s` to `end_s`: those that transformers makes
    of it, and the text after the last pair of timestamps, which transformers computes again from there.
    """
    speech = _speech(generation)
    first = speech.first_timestamp
    answer = _answer_proper(generation, token_ids)
    cuts = [index + 1 for index in range(len(answer) - 1) if answer[index] >= first and answer[index + 1] >= first]
    bounds = [0, *cuts, len(answer)]
    return [found for begin, end in pairwise(bounds) for found in _segment(answer[begin:end], first, start_s, end_s)]


def detected_language(generation: DecoderGeneration, token_ids: Sequence[int]) -> str | None:
    """The code of the language whose token is the first of them: of an answer, or of a prompt after its start token."""
    codes = {token_id: code for code, token_id in _speech(generation).languages}
    return next((codes[each] for each in token_ids if each in codes), None)


def _segment(token_ids: Sequence[int], first: int, start_s: float, end_s: float) -> list[Segment]:
    """The segment of ids between two cuts; none if it has no text."""
    stamps = [each - first for each in token_ids if each >= first]
    text = tuple(each for each in token_ids if each < first)
    if not text:
        return []
    has_start, has_end = token_ids[0] >= first, token_ids[-1] >= first
    begin = start_s + stamps[0] * TIMESTAMP_S if has_start else start_s
    end = start_s + stamps[-1] * TIMESTAMP_S if has_end else end_s
    # A timestamp may lie behind the audio's end.
    begin, end = min(begin, end_s), min(end, end_s)
    return [Segment(round(begin, 3), round(max(begin, end), 3), text)]


def _answer_proper(generation: DecoderGeneration, token_ids: Sequence[int]) -> list[int]:
    """Ids of text and timestamps: without special tokens of languages, tasks and the end."""
    speech = _speech(generation)
    return [each for each in token_ids if each < generation.end_token_id or each >= speech.first_timestamp]


def _rules(
    generation: DecoderGeneration,
    timestamps: bool,
    num_prompt_tokens: int,
    first_tokens: tuple[int, ...] = (),
    forced_tokens: tuple[int, ...] = (),
) -> TokenRules | None:
    speech = generation.speech
    stamps = None
    if timestamps and speech is not None:
        stamps = TimestampRules(speech.first_timestamp, generation.end_token_id, speech.max_initial_index)
    rules = TokenRules(
        first_tokens=first_tokens,
        forced_tokens=forced_tokens,
        suppress_tokens=generation.suppress_tokens,
        begin_suppress_tokens=generation.begin_suppress_tokens,
        forced_eos_token_id=generation.forced_eos_token_id,
        min_new_tokens=max(generation.min_new_tokens, generation.min_length - num_prompt_tokens, 0),
        no_repeat_ngram_size=generation.no_repeat_ngram_size,
        timestamps=stamps,
    )
    return None if rules == NO_RULES else rules


def _speech(generation: DecoderGeneration) -> SpeechTokens:
    if generation.speech is None:
        raise ValueError(
            "this model's generation_config.json has no no_timestamps_token_id, which a prompt of speech is made with: "
            "take the file of the release, or give decoder_prompt as token ids"
        )
    return generation.speech


def _check_english(language: str | None, task: str) -> None:
    if language is not None and language_code(language) != "en":
        raise ValueError(f"language={shown(language)}: this model knows English alone: leave language out")
    if task != "transcribe":
        raise ValueError(f"task={task!r}: this model knows English alone and does not translate: leave task out")


def _language_id(speech: SpeechTokens, language: str) -> int:
    ids = dict(speech.languages)
    code = language_code(language)
    if code in ids:
        return ids[code]
    if code in LANGUAGES:
        raise ValueError(f"language={shown(language)} is not a language of this model: {', '.join(ids)}")
    raise ValueError(f"language={shown(language)} must be a code or an English name: {', '.join(ids)}")


def _previous_ids(generation: DecoderGeneration, tokenizer: Tokenizer | None, prompt_text: str) -> tuple[int, ...]:
    """`<|startofprev|>` and the last tokens of the text."""
    if not prompt_text.strip():
        return ()
    if tokenizer is None:
        raise ValueError("prompt needs a tokenizer.json in the model folder: leave it out")
    previous = _speech(generation).previous
    previous = tokenizer.marker_id("<|startofprev|>") if previous is None else previous
    if previous is None:
        raise ValueError("prompt: this model has no token <|startofprev|>, which text before begins with: leave it out")
    token_ids = tokenizer.encode(f" {prompt_text.strip()}", add_special_tokens=False)
    special = next((each for each in token_ids if each >= generation.end_token_id), None)
    if special is not None:
        raise ValueError(f"prompt: {tokenizer.token(special)!r} is a special token: leave it out")
    most = max(generation.max_positions // 2 - 1, 0)
    return (previous, *token_ids[len(token_ids) - min(most, len(token_ids)) :])


def _target_id(tokenizer: Tokenizer | None, language: str) -> int:
    if tokenizer is None:
        raise ValueError("target_language needs a tokenizer.json in the model folder: give decoder_prompt as token ids")
    found = language_id(language, tokenizer.marker_id)
    if found is None:
        raise unknown_language("target_language", language)
    return found
