"""Parses rows of audio: bodies of /v1/audio/transcriptions and /v1/audio/translations, and plain rows with `audio`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.frontends.openai.prompt_values import (
    PRIORITY_KEY,
    adapter_name,
    check_keys,
    check_neutral,
    decoder_prompt,
    media_source,
    model_name,
    sampling_from,
)
from spmd_worker.frontends.openai.row import AudioPrompt, Row
from spmd_worker.frontends.openai.transcript import RESPONSE_FORMATS, TIMED_FORMATS, ResponseFormat, Task
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError, optional_flag

TRANSCRIPTIONS_URL: Final = "/v1/audio/transcriptions"
TRANSLATIONS_URL: Final = "/v1/audio/translations"
AUDIO_TASKS: Final[Mapping[str, Task]] = {TRANSCRIPTIONS_URL: "transcribe", TRANSLATIONS_URL: "translate"}

FILE_KEYS: Final = ("file", "file_url")
_SAMPLING_KEYS: Final = (
    *("temperature", "seed", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens"),
)
"""OpenAI's `temperature`, and vLLM's further keys."""
NUMBER_KEYS: Final = (*_SAMPLING_KEYS, "max_completion_tokens", PRIORITY_KEY)
_IGNORED_KEYS: Final = ("model", "user", "metadata", "store", "service_tier", "safety_identifier")
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "include": ([],),
    "chunking_strategy": ("auto",),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
    "to_language": ("en", "english"),
    "stream_include_usage": (False,),
    "stream_continuous_usage_stats": (False,),
    "vllm_xargs": ({},),
}
"""Keys of OpenAI's and of vLLM's that have no effect here, with the values besides null that are neutral."""
BODY_KEYS: Final = (
    *(*FILE_KEYS, "language", "prompt", "response_format", "timestamp_granularities"),
    *(*NUMBER_KEYS, "request_id", *_IGNORED_KEYS, *_UNSUPPORTED),
)

_PROMPT_KEYS: Final = ("decoder_prompt", "language", "task", "timestamps")
PLAIN_KEYS: Final = ("audio", *_PROMPT_KEYS, "custom_id", "adapter", PRIORITY_KEY, *SAMPLING_KEYS)


def audio_row(index: int, custom_id: str | None, url: str, body: Mapping[str, Any], defaults: SamplingParams) -> Row:
    """Row of an OpenAI batch line. Without `temperature` it is greedy. Raises InvalidRequestError."""
    check_keys(body, BODY_KEYS, " in body")
    check_neutral(body, _UNSUPPORTED)
    response_format = _response_format(body)
    prompt = AudioPrompt(
        *_file(body),
        language=_text(body, "language"),
        task=AUDIO_TASKS[url],
        has_timestamps=response_format in TIMED_FORMATS,
        text=_text(body, "prompt"),
    )
    own = replace(defaults, temperature=0.0, n=1, best_of=None, max_tokens=None)
    sampling = sampling_from(own, _sampling_values(body))
    if response_format == "verbose_json":
        sampling = replace(sampling, logprobs=0)
    return Row(index, custom_id, "audio", prompt, sampling, model_name(body), response_format=response_format)


def plain_audio_row(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    """Row of a plain line with `audio`. Raises InvalidRequestError."""
    check_keys(fields, PLAIN_KEYS)
    task = _text(fields, "task") or "transcribe"
    if task not in AUDIO_TASKS.values():
        raise InvalidRequestError(f"task={shown(task)} must be {' or '.join(AUDIO_TASKS.values())}")
    decoder = decoder_prompt("decoder_prompt", fields.get("decoder_prompt"))
    others = [key for key in _PROMPT_KEYS[1:] if fields.get(key) is not None]
    if decoder is not None and others:
        message = f"decoder_prompt has the tokens of {' and '.join(others)}: leave one of them out"
        raise InvalidRequestError(message, "conflicting_keys")
    prompt = AudioPrompt(
        media_source("audio", fields["audio"], "audio/wav"),
        decoder=decoder,
        language=_text(fields, "language"),
        task="translate" if task == "translate" else "transcribe",
        has_timestamps=optional_flag(fields, "timestamps"),
    )
    sampling = sampling_from(defaults, {key: fields[key] for key in SAMPLING_KEYS if key in fields})
    return Row(index, custom_id, "plain", prompt, sampling, adapter=adapter_name(fields))


def _file(body: Mapping[str, Any]) -> tuple[str | bytes, str]:
    """The audio, and the key that has it. Raises InvalidRequestError."""
    given = [key for key in FILE_KEYS if body.get(key) is not None]
    if not given:
        message = "the body has no file: upload it as file, or give a data URL or a path below job.media_root"
        raise InvalidRequestError(message, "missing_prompt")
    if len(given) > 1:
        raise InvalidRequestError("the body has file and file_url: give one of them", "conflicting_prompts")
    value = body[given[0]]
    # A server gets the file itself.
    return value if isinstance(value, bytes) else media_source(given[0], value, "audio/wav"), given[0]


def _response_format(body: Mapping[str, Any]) -> ResponseFormat:
    given = body.get("response_format")
    found = next((each for each in RESPONSE_FORMATS if given in (each, None)), None)
    if found is None:
        raise InvalidRequestError(f"response_format={shown(given)} must be one of {', '.join(RESPONSE_FORMATS)}")
    wanted = body.get("timestamp_granularities")
    if wanted in (None, []):
        return found
    if wanted != ["segment"]:
        message = f"timestamp_granularities={shown(wanted)} must be ['segment']: words have no timestamps here"
        raise InvalidRequestError(message, "unsupported_value")
    if found != "verbose_json":
        message = "timestamp_granularities goes with response_format='verbose_json'"
        raise InvalidRequestError(message, "conflicting_keys")
    return found


def _text(given: Mapping[str, Any], key: str) -> str | None:
    """Text, None for none: forms have empty fields."""
    value = given.get(key)
    if not isinstance(value, str | None):
        raise InvalidRequestError(f"{key}={shown(value)} must be a string")
    return value or None


def _sampling_values(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: body[key] for key in _SAMPLING_KEYS if body.get(key) is not None}
    limit = body.get("max_completion_tokens")
    if limit is not None:
        if given.get("max_tokens", limit) != limit:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ: give one", "conflicting_keys")
        given["max_tokens"] = limit
    return given
